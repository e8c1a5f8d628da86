"""Conversations and templates that transformers and jaxdraft render; see ``regenerate.py``."""

from __future__ import annotations

import json
from typing import Any

HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": "f", "description": "<é> & 'x'", "parameters": {"type": "object"}},
    }
]
ANSWER: list[dict[str, Any]] = [*HI, {"role": "assistant", "content": "The answer is"}]
TRAILING: list[dict[str, Any]] = [*HI, {"role": "assistant", "content": "The answer is "}]
BLOCKS: list[dict[str, Any]] = [
    *HI,
    {"role": "assistant", "content": [{"type": "image"}, {"type": "text", "text": "It shows"}]},
]
THINKING: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "thinking": "hm", "content": "yes"},
]

PLAIN = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TRIMMED = PLAIN.replace("m.content", "m.content | trim")
BLOCKWISE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for b in m.content %}{% if b.type == 'text' %}{{ b.text }}{% else %}[{{ b.type }}]"
    "{% endif %}{% endfor %}{% endif %}</s>{% endfor %}"
)
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' and message.content is string %}
        {%- set ns.last = messages | length - 1 - loop.index0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' %}
        {%- set thought = message.reasoning_content %}
        {%- set thought = thought if thought is string else '' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if thought and loop.index0 > ns.last %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content.lstrip('\\n') }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' }}{{- call.function | tojson }}{{- '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
CALLS: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "add",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}],
    },
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "4"},
]
NAMED = [
    {"name": "default", "template": "plain {{ messages[0].content }}"},
    {"name": "tool_use", "template": "with {{ tools | tojson }}"},
    {"name": "rag", "template": "{% for d in documents %}{{ d.title }}: {{ d.text }};{% endfor %}"},
]
DOCUMENTS = [{"title": "A", "text": "one"}, {"title": "B", "text": "two"}]
BOS: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
SHOW = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ image_token }}|{{ tail }}"


def case(
    config: dict[str, Any] | None, messages: Any = HI, /, *, files: Any = (), **options: Any
) -> dict[str, Any]:
    written = {name: c if isinstance(c, str) else json.dumps(c) for name, c in dict(files).items()}
    if config is not None:
        written["tokenizer_config.json"] = json.dumps(config)
    options.setdefault("add_generation_prompt", False)
    return {"files": written, "messages": messages, "options": options}


def one(template: str, messages: Any = HI, /, **options: Any) -> dict[str, Any]:
    return case({**BOS, "chat_template": template}, messages, **options)


GO: dict[str, Any] = {"continue_final_message": True}
JINJA, MORE = "chat_template.jinja", "additional_chat_templates/"

CASES: dict[str, dict[str, Any]] = {
    # which template
    "named, default": case({"chat_template": NAMED}),
    "named, with tools": case({"chat_template": NAMED}, tools=TOOLS),
    "named, with no tools": case({"chat_template": NAMED}, tools=[]),
    "named, by name": case({"chat_template": NAMED}, chat_template="rag", documents=DOCUMENTS),
    "named, a template": case({"chat_template": NAMED}, chat_template="{{ messages | length }}"),
    "named, by a name before tools": case(
        {"chat_template": NAMED}, chat_template="default", tools=TOOLS
    ),
    "named, no default": case({"chat_template": NAMED[1:]}),
    "named, no default, with tools": case({"chat_template": NAMED[1:]}, tools=TOOLS),
    "one, called tool_use": case({"chat_template": NAMED[:1]}, tools=TOOLS),
    "one, a template given": one(PLAIN, chat_template="{{ messages[0].role }}"),
    "no template": case(BOS),
    "no template, one given": case(BOS, chat_template=PLAIN),
    "file before configuration": case({**BOS, "chat_template": "no"}, files={JINJA: PLAIN}),
    "file beside named ones": case(
        {"chat_template": "no"}, tools=TOOLS,
        files={JINJA: PLAIN, MORE + "tool_use.jinja": "file {{ tools | length }}"},
    ),
    "file by name": case(
        BOS, chat_template="x.y", files={JINJA: PLAIN, MORE + "x.y.jinja": "dotted"}
    ),
    "only named files": case({"chat_template": "no"}, files={MORE + "a.jinja": "a"}),
    "only named files, by name": case({}, chat_template="a", files={MORE + "a.jinja": "a"}),
    "no configuration": case(None, files={JINJA: "{{ messages[0].content }}"}),
    # continuing the last message
    "continue": one(PLAIN, ANSWER, **GO),
    "continue, blank kept": one(PLAIN, TRAILING, **GO),
    "continue, blank trimmed": one(TRIMMED, TRAILING, **GO),
    "continue, trimmed": one(TRIMMED, ANSWER, **GO),
    "continue, blocks": one(BLOCKWISE, BLOCKS, **GO),
    "continue, no text block": one(
        BLOCKWISE, [*HI, {"role": "assistant", "content": [{"type": "image"}]}], **GO
    ),
    "continue, thinking": one(QWEN, THINKING, continue_final_message="thinking"),
    "continue, no such field": one(PLAIN, THINKING, continue_final_message="reasoning_content"),
    "continue, field not in template": one(PLAIN, THINKING, continue_final_message="thinking"),
    "continue, message dropped": one("{{ messages[0].content }}", ANSWER, **GO),
    "continue, message changed": one("{{ messages[1].content | upper }} content", ANSWER, **GO),
    "continue and prompt": one(PLAIN, ANSWER, **GO | {"add_generation_prompt": True}),
    "continue, nothing": one(PLAIN, [], **GO),
    "continue, none": one(PLAIN, [*HI, {"role": "assistant", "content": None}], **GO),
    "continue, text occurs before": one(
        PLAIN, [{"role": "user", "content": "yes"}, {"role": "assistant", "content": "yes"}], **GO
    ),
    # messages
    "empty": one(PLAIN, []),
    "none is missing": one("{{ 'x' in messages[0] }}", [{"role": "user", "x": None}]),
    "reasoning": one("{{ messages[1].thinking }}{{ messages[1].reasoning_content }}", THINKING),
    "reasoning, other name": one(
        "{{ messages[0].reasoning_content }}{{ messages[0].thinking }}",
        [{"role": "assistant", "content": "", "reasoning": "r"}],
    ),
    "calls": one(QWEN, CALLS),
    "calls with tools": one(QWEN, CALLS, tools=TOOLS, add_generation_prompt=True),
    "no thinking": one(QWEN, HI, enable_thinking=False, add_generation_prompt=True),
    "a tool that is none": one(PLAIN, HI, tools=["f"]),
    "a document that is none": one(PLAIN, HI, documents=["f"]),
    # special tokens
    "objects": case({
        "bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False, "rstrip": False,
                      "single_word": False, "normalized": False},
        "eos_token": {"content": "</s>", "__type": "AddedToken"},
        "image_token": "<image>", "extra_special_tokens": {"tail": "<tail>"},
        "chat_template": SHOW,
    }),
    "tokens of a map": case(
        {"bos_token": "<pad>", "chat_template": SHOW},
        files={"special_tokens_map.json": {"bos_token": {"content": "<s>"}, "pad_token": "<pad>"}},
    ),
    "tokens of a map beside a decoder": case(
        {"bos_token": "<s>", "chat_template": SHOW, "added_tokens_decoder": {}},
        files={"special_tokens_map.json": {"bos_token": "</s>", "pad_token": "<pad>"}},
    ),
    "a map alone": case(
        None, files={"special_tokens_map.json": {"bos_token": "<s>"}, JINJA: SHOW}
    ),
    "a token is a variable": case({**BOS, "chat_template": SHOW}, bos_token="mine"),
    "null": case({"bos_token": None, "chat_template": SHOW}),
    # what templates call
    "json": one("{{ {'b': '<é>', 'a': [1.5, none, true]} | tojson }}"),
    "json, sorted": one("{{ {'b': 1, 'a': {'c': 2}} | tojson(indent=2, sort_keys=true) }}"),
    "json, ascii": one("{{ 'é' | tojson(ensure_ascii=true) }}"),
    "json, separators": one("{{ [1, {'a': 2}] | tojson(separators=(',', ':')) }}"),
    "generation": one(
        "{% for m in messages %}{% generation %}{% set x = m.content %}{{ x }}{% endgeneration %}"
        "{{ x }}!{% endfor %}"
    ),
    "raise": one("{{ raise_exception('roles must alternate') }}"),
    "time": one("{{ strftime_now('%Y') | length }}"),
    "loops": one("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}"
                 "{% if i > 2 %}{% break %}{% endif %}{% endfor %}"),
    "blocks trimmed": one("a\n  {% if true %}\n  b\n  {% endif %}\nc\n"),
    "namespace": one("{% set n = namespace(i=1) %}{% set n.i = n.i + 1 %}{{ n.i }}"),
    "namespace, private": one("{% set n = namespace(_i=1) %}{{ n._i }}"),
    "dictionary": one("{{ dict(a=1) }}{{ dict.fromkeys(['x'], 1) }}"),
    "dictionary, unsafe": one("{{ dict.__class__ }}"),
    "items": one("{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}"),
    "escapes": one("{{ '<&>' }}{{ messages[0].content }}", [{"role": "user", "content": "<b>&"}]),
    "undefined": one("{{ nothing }}|{{ nothing is defined }}"),
    "undefined attribute": one("{{ nothing.at_all }}"),
    "no attribute": one("{{ messages[0].nothing }}|"),
    "wrong type": one("{{ messages[0].content + 1 }}"),
    "changes its messages": one("{{ messages.append(1) }}"),
    "variables": one("{{ mood }} {{ deep.a[0] }}", mood="glad", deep={"a": [3]}),
    "tools are none": one("{{ tools is none }} {{ documents is none }}"),
}  # fmt: skip
