"""``genai_config.json``, the configuration of an artifact, read strictly.

Every key this package acts on is checked for type and range, and reported by its full path. Inside
a drafter's section an unknown key is an error too, because a setting ignored in silence lowers
acceptance unnoticed. onnxruntime-genai's model builder defines the meaning of the sections.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from convert.errors import ArtifactError, Problems
from convert.json_reader import INT32, Section, read_json
from convert.paths import GENAI_CONFIG, contained
from convert.unused import (
    TOKENIZER_CONFIG,
    TOKENIZER_FILES,
    Remarks,
    is_integer,
    report_files,
    report_generation,
    report_tokenizer,
)
from jaxdraft.config import FULL_ATTENTION, DrafterKind
from jaxdraft.kinds import KINDS, block_of, inside

CONFIG = GENAI_CONFIG

_DECODER_INPUTS = {
    "input_ids",
    "attention_mask",
    "position_ids",
    "past_key_names",
    "past_value_names",
    "past_conv_names",
    "past_recurrent_names",
    "past_key_scale_names",
    "past_value_scale_names",
    "block_table",
    "block_table_windowed",
    "cumulative_sequence_lengths",
    "past_sequence_lengths",
    "attention_metadata",
    "logits_indices",
    "state_update_capture_count",
    "state_update_active",
}
_DECODER_OUTPUTS = {
    "logits",
    "present_key_names",
    "present_value_names",
    "present_conv_names",
    "present_recurrent_names",
    "present_key_scale_names",
    "present_value_scale_names",
    "state_update_conv_value_names",
    "state_update_recurrent_capsule_names",
    "aux_hidden_states",
    "hidden_states",
}
_BLOCK_INPUTS = {
    "aux_hidden_states",
    "input_ids",
    "q_row_map",
    "qkv_row_map",
    "block_row_index",
    "cumulative_sequence_lengths",
    "past_sequence_lengths",
    "block_table",
    "attention_metadata",
    "past_key_names",
    "past_value_names",
}
_BLOCK_OUTPUTS = {"candidate_ids", "scores", "present_key_names", "present_value_names"}
_HEAD_INPUTS = {
    "input_ids",
    "hidden_states",
    "attention_mask",
    "position_ids",
    "past_key_names",
    "past_value_names",
    "block_table",
    "cumulative_sequence_lengths",
    "past_sequence_lengths",
    "attention_metadata",
}
_HEAD_OUTPUTS = {"logits", "hidden_states", "present_key_names", "present_value_names"}

_COMMON_KEYS = {
    "filename",
    "session_options",
    "num_hidden_layers",
    "num_key_value_heads",
    "head_size",
    "inputs",
    "outputs",
    "shared_initializers",
}
_BLOCK_KEYS = _COMMON_KEYS | {
    "block_size",
    "num_draft_tokens",
    "selector_top_k",
    "mask_token_id",
    "sliding_window",
    "main_aux_hidden_states",
    "aux_hidden_state_layers",
}
_HEAD_KEYS = _COMMON_KEYS | {"enabled", "main_hidden_states"}
_MISPLACED = (_BLOCK_KEYS | _HEAD_KEYS) - _COMMON_KEYS - {"block_size", "sliding_window"}
"""Keys with a meaning in a drafter's section only; ``block_size`` is also a page size and
``sliding_window`` also a decoder's."""

MODEL_KEYS = dict.fromkeys(
    "bot_token_id eot_token_id bor_token_id eor_token_id sep_token_id decoder_start_token_id"
    " image_token_id video_token_id vision_start_token_id boi_token_id eoi_token_id".split(),
    "text is encoded by tokenizer.json and the chat template, which hold these tokens",
)
"""Keys of ``model`` without effect here, each with the reason."""

DECODER_KEYS = {"session_options": "how onnxruntime runs a graph"}
"""Keys of ``model.decoder``, likewise."""

GROUP_KEYS = {"state_update": "how the runtime rolls states back"}
"""Keys of its ``state_groups``, likewise."""

BATCHING_KEYS = dict.fromkeys(
    ("num_blocks", "prefix_caching", "gpu_utilization_factor"),
    "memory and cache of the runtime; jaxdraft.Engine has arguments of its own",
)
"""Keys of ``engine.dynamic_batching``, likewise."""

_SLIDING_KEYS = {
    "window_size",
    "pad_value",
    "alignment",
    "slide_key_value_cache",
    "slide_inputs",
    "layers",
    "cache_slack",
}
_KINDS: tuple[DrafterKind, ...] = tuple(name for name, kind in KINDS.items() if kind.graph)
"""Kinds of drafters that an artifact may have."""
_OTHER_MODELS = ("encoder", "vision", "speech", "embedding", "encoder_decoder_init")


@dataclasses.dataclass(frozen=True)
class SharedTensor:
    """A tensor that two graphs read from one file, as the configuration lists it."""

    name: str
    data_file: str
    offset: int
    length: int
    data_type: int
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Names:
    """Names of a graph's inputs or outputs by role. ``%d`` in a name is the number of a layer."""

    by_role: Mapping[str, str]

    def __contains__(self, role: str) -> bool:
        return role in self.by_role

    def __getitem__(self, role: str) -> str:
        return self.by_role[role]

    def layer(self, role: str, layer: int) -> str:
        """Return the name of a per-layer tensor."""
        return self.by_role[role].replace("%d", str(layer))


@dataclasses.dataclass(frozen=True)
class SlidingSection:
    """``model.decoder.sliding_window``: layers whose cache the runtime bounds, and their window."""

    window: int
    layers: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderSection:
    """``model.decoder``."""

    path: Path
    filename: str
    head_size: int
    hidden_size: int
    heads: int
    layers: int
    kv_heads: int
    inputs: Names
    outputs: Names
    state_update_capacity: int | None
    state_groups: Mapping[str, tuple[int, ...]]
    sliding: SlidingSection | None
    shared: Mapping[str, SharedTensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterSection:
    """The drafter's section, named by its kind. Block fields are zero for MTP."""

    kind: DrafterKind
    path: Path
    filename: str
    layers: int
    kv_heads: int
    head_size: int
    inputs: Names
    outputs: Names
    shared: Mapping[str, SharedTensor]
    main_output: str
    block_size: int = 0
    draft_tokens: int = 0
    candidates: int = 0
    mask_token: int = 0
    window: int = FULL_ATTENTION
    taps: tuple[int, ...] = ()

    @property
    def where(self) -> str:
        """Path of the section."""
        return f"model.{self.kind}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArtifactConfig:
    """The configuration of one artifact."""

    folder: Path
    model_type: str
    vocab_size: int
    context_length: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    decoder: DecoderSection
    drafter: DrafterSection | None
    page_size: int | None
    max_batch: int | None
    remarks: Remarks


def read_config(folder: Path, problems: Problems, *, alone: bool = False) -> ArtifactConfig:
    """Read and check ``genai_config.json``.

    Args:
      folder: the artifact's folder.
      problems: destination of problems that do not prevent further reading.
      alone: whether to read the target alone, without a drafter.

    Raises:
      ArtifactError: the file is missing or is not a JSON object, or a key that further reading
        depends on is missing or has the wrong type.
      FileNotFoundError: no such folder.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"no artifact folder {folder}")
    body = read_json(folder, CONFIG, finite=True)
    root = Section(body, CONFIG, "", problems, Remarks())
    return _Reader(folder, root).read(alone)


class _Reader:
    """Reads the sections of the file, in their order."""

    def __init__(self, folder: Path, root: Section):
        self.folder, self.root = folder, root
        self.problems, self.remarks = root.problems, root.remarks

    def read(self, alone: bool) -> ArtifactConfig:
        root = self.root
        model = root.section("model")
        for name in _OTHER_MODELS:
            if name in model:
                model.report(name, "a decoder, alone or with a drafter", "a further model")
        vocab, context = model.integer("vocab_size"), model.integer("context_length")
        decoder = self.decoder(model.section("decoder"))
        drafter = None if alone else self.drafter(model, vocab, decoder)
        if alone:
            model.inert(*_KINDS)
        else:
            self.misplaced(model)
        page_size, max_batch = self.engine()
        config = ArtifactConfig(
            folder=self.folder,
            model_type=model.string("type"),
            vocab_size=vocab,
            context_length=context,
            bos_token_id=model.token("bos_token_id", vocab),
            eos_token_ids=model.attempt(lambda: model.stop_ids(vocab), ()),
            pad_token_id=model.token("pad_token_id", vocab),
            decoder=decoder,
            drafter=drafter,
            page_size=page_size,
            max_batch=max_batch,
            remarks=self.remarks,
        )
        model.report_unread(MODEL_KEYS)
        self.search(context)
        root.report_unread()
        self.files(decoder, drafter)
        return config

    def decoder(self, section: Section) -> DecoderSection:
        filename = section.string("filename")
        inputs = _names(section, "inputs", _DECODER_INPUTS)
        outputs = _names(section, "outputs", _DECODER_OUTPUTS)
        _require(section, "inputs", inputs, ("input_ids",))
        _require(section, "outputs", outputs, ("logits",))
        _distinct(section, inputs, outputs)
        capacity = None
        if "state_update_capacity" in section:
            capacity = section.attempt(lambda: section.integer("state_update_capacity"), None)
        found = DecoderSection(
            path=contained(self.folder, filename, CONFIG, section.at("filename")),
            filename=filename,
            head_size=section.integer("head_size"),
            hidden_size=section.integer("hidden_size"),
            heads=section.integer("num_attention_heads"),
            layers=section.integer("num_hidden_layers"),
            kv_heads=section.integer("num_key_value_heads"),
            inputs=inputs,
            outputs=outputs,
            state_update_capacity=capacity,
            state_groups=section.attempt(lambda: _state_groups(section), {}),
            sliding=section.attempt(lambda: _sliding(section), None),
            shared=section.attempt(lambda: _shared(section), {}),
        )
        section.report_unread(DECODER_KEYS)
        return found

    def drafter(self, model: Section, vocab: int, decoder: DecoderSection) -> DrafterSection | None:
        sections = {kind: model.section(kind) for kind in _KINDS if kind in model}
        for kind in inside():
            if kind in sections and not sections[kind].boolean("enabled"):
                # A head that is switched off is not read, but its unknown keys are reported.
                sections.pop(kind).known(_HEAD_KEYS)
        if len(sections) > 1:
            found = " and ".join(f"{kind} section" for kind in sections)
            raise ArtifactError(CONFIG, "model", found, "one drafter")
        for kind, section in sections.items():
            if kind in inside():
                return self.head(kind, section, decoder)
            return self.block(kind, section, vocab, decoder)
        return None

    def block(
        self, kind: DrafterKind, section: Section, vocab: int, decoder: DecoderSection
    ) -> DrafterSection:
        section.known(_BLOCK_KEYS)
        inputs = _names(section, "inputs", _BLOCK_INPUTS)
        outputs = _names(section, "outputs", _BLOCK_OUTPUTS)
        _require(section, "inputs", inputs, sorted(_BLOCK_INPUTS - {"q_row_map"}))
        _require(section, "outputs", outputs, sorted(_BLOCK_OUTPUTS))
        _distinct(section, inputs, outputs)
        block, drafts = self.drafts(kind, section)
        window = section.integer("sliding_window", FULL_ATTENTION)
        if window == 0:
            raise section.fail("sliding_window", "-1 for full attention, or a positive width")
        main = section.string("main_aux_hidden_states")
        self.main_output(section, "main_aux_hidden_states", main, decoder, "aux_hidden_states")
        taps = section.integers("aux_hidden_state_layers", 1, max(decoder.layers - 1, 1))
        if not taps or len(set(taps)) != len(taps):
            section.report("aux_hidden_state_layers", "one or more layers, each once")
        return DrafterSection(
            kind=kind,
            **self.common(section),
            inputs=inputs,
            outputs=outputs,
            main_output=main,
            block_size=block,
            draft_tokens=drafts,
            candidates=section.integer("selector_top_k", 1, vocab),
            mask_token=section.integer(
                "mask_token_id", 0, vocab - 1, meaning="a token of the vocabulary"
            ),
            window=window,
            taps=taps,
        )

    def drafts(self, kind: DrafterKind, section: Section) -> tuple[int, int]:
        """Return the number of rows of a block, and of those that predict."""
        own = block_of(kind)
        skipped = own.first_row
        block = section.integer("block_size", 1 + skipped, 4096, meaning="query rows of a block")
        drafts = own.draft_tokens(block)
        rule = f"block_size = {drafts}: every row predicts"
        if skipped:
            rule = f"block_size - {skipped} = {drafts}: the anchor's row predicts nothing"
        section.attempt(
            lambda: section.integer("num_draft_tokens", drafts, drafts, meaning=rule), None
        )
        return block, drafts

    def head(self, kind: DrafterKind, section: Section, decoder: DecoderSection) -> DrafterSection:
        section.known(_HEAD_KEYS)
        inputs = _names(section, "inputs", _HEAD_INPUTS)
        outputs = _names(section, "outputs", _HEAD_OUTPUTS)
        needed = ("input_ids", "hidden_states", "past_key_names", "past_value_names")
        _require(section, "inputs", inputs, needed)
        _require(section, "outputs", outputs, sorted(_HEAD_OUTPUTS))
        _distinct(section, inputs, outputs)
        main = section.string("main_hidden_states")
        self.main_output(section, "main_hidden_states", main, decoder, "hidden_states")
        return DrafterSection(
            kind=kind,
            **self.common(section),
            inputs=inputs,
            outputs=outputs,
            main_output=main,
        )

    def common(self, section: Section) -> dict[str, Any]:
        filename = section.string("filename")
        return {
            "path": contained(self.folder, filename, CONFIG, section.at("filename")),
            "filename": filename,
            "layers": section.integer("num_hidden_layers"),
            "kv_heads": section.integer("num_key_value_heads"),
            "head_size": section.integer("head_size"),
            "shared": _shared(section),
        }

    def main_output(
        self, section: Section, key: str, name: str, decoder: DecoderSection, role: str
    ) -> None:
        path = f"model.decoder.outputs.{role}"
        if role not in decoder.outputs:
            self.problems.report(CONFIG, path, "nothing", f"{name!r}, of {section.at(key)}")
        elif decoder.outputs[role] != name:
            section.report(key, f"{decoder.outputs[role]!r}, of {path}")

    def misplaced(self, model: Section) -> None:
        """Report settings of a drafter outside its section, where nothing reads them."""
        places = [self.root, model]
        for parent, key in ((model, "decoder"), (self.root, "engine"), (self.root, "search")):
            inner = parent.body.get(key)
            if isinstance(inner, dict):
                places.append(parent.inner(inner, parent.at(key)))
        for place in places:
            for key in sorted(_MISPLACED & set(place.body)):
                place.report(key, "this key inside a drafter's section")

    def engine(self) -> tuple[int | None, int | None]:
        """Return the page size and rows of the engine's section."""
        if "engine" not in self.root:
            return None, None
        engine = self.root.section("engine")
        engine.inert("static_batching")
        if engine.body.get("dynamic_batching") is None:
            engine.report_unread()
            return None, None
        batching = engine.section("dynamic_batching")
        values: list[int | None] = []
        for key in ("block_size", "max_batch_size", "num_blocks"):
            value = None
            if key in batching:
                read = lambda k=key: batching.integer(k)  # noqa: E731
                value = batching.attempt(read, None)
            values.append(value)
        if "prefix_caching" in batching:
            batching.attempt(lambda: batching.boolean("prefix_caching"), False)
        batching.report_unread(BATCHING_KEYS)
        engine.report_unread()
        return values[0], values[1]

    def search(self, context: int) -> None:
        """Remark on recommended settings of decoding."""
        if self.root.body.get("search") is None:
            return
        search = self.root.section("search")
        report_generation(search.body, CONFIG, self.remarks, where="search", known=())
        length = search.body.get("max_length")
        if is_integer(length) and length < context:
            self.remarks.note(
                CONFIG, f"search.max_length is {length}: each call sets its own limit"
            )

    def files(self, decoder: DecoderSection, drafter: DrafterSection | None) -> None:
        """Remark on files of the folder that are not read."""
        used = {CONFIG, decoder.filename, f"{decoder.filename}.data", *TOKENIZER_FILES}
        if drafter is not None:
            used |= {drafter.filename, f"{drafter.filename}.data"}
        for shared in (decoder.shared, drafter.shared if drafter is not None else {}):
            used |= {tensor.data_file for tensor in shared.values()}
        names = [path.name for path in self.folder.iterdir()]
        report_files(names, used, self.folder.name, self.remarks)
        if (self.folder / TOKENIZER_CONFIG).is_file():
            body = read_json(self.folder, TOKENIZER_CONFIG)
            report_tokenizer(body, TOKENIZER_CONFIG, self.remarks)


def _sliding(decoder: Section) -> SlidingSection | None:
    if decoder.body.get("sliding_window") is None:
        return None
    section = decoder.section("sliding_window")
    section.known(_SLIDING_KEYS)
    for key in ("slide_key_value_cache", "slide_inputs"):
        # The runtime's default is true: it would feed prompts window by window, and the keys of
        # one window would be visible to its rows, which makes another model.
        if section.boolean(key):
            raise section.fail(key, "false: not implemented")
    return SlidingSection(
        window=section.integer("window_size"),
        layers=section.integers("layers", 0, INT32),
    )


def _state_groups(decoder: Section) -> dict[str, tuple[int, ...]]:
    result: dict[str, tuple[int, ...]] = {}
    for group in decoder.sections("state_groups"):
        kind = group.string("kind")
        if kind not in ("paged_kv", "fixed_conv", "fixed_recurrent") or kind in result:
            raise group.fail("kind", "one each of paged_kv, fixed_conv, fixed_recurrent")
        result[kind] = group.integers("layer_ids", 0, INT32)
        if "state_update" in group:
            group.section("state_update").report_unread(("capacity", "key_head_count"))
        group.report_unread(GROUP_KEYS)
    return result


def _shared(section: Section) -> dict[str, SharedTensor]:
    result: dict[str, SharedTensor] = {}
    for entry in section.sections("shared_initializers"):
        entry.known({"name", "data_file", "offset", "length", "data_type", "shape"})
        name = entry.string("name")
        if name in result:
            raise entry.fail("name", "each name once", f"a second {name!r}")
        result[name] = SharedTensor(
            name=name,
            data_file=entry.string("data_file"),
            offset=_decimal(entry, "offset"),
            length=_decimal(entry, "length"),
            data_type=entry.integer("data_type", 1, 64),
            shape=entry.integers("shape", 0, 2**62),
        )
    return result


def _decimal(section: Section, key: str) -> int:
    text = section.string(key)
    if not text.isascii() or not text.isdigit() or len(text) > 19:
        raise section.fail(key, "a string of digits")
    return int(text)


def _names(section: Section, key: str, known: set[str]) -> Names:
    names = section.section(key)
    names.known(known)
    for role in names.body:
        name = names.string(role)
        per_layer = role.endswith("_names")
        if name.count("%") != per_layer or name.count("%d") != per_layer:
            names.report(role, "one %d, the layer" if per_layer else "a plain name")
    return Names({role: name for role, name in names.body.items() if role in known})


def _require(section: Section, key: str, names: Names, roles: Sequence[str]) -> None:
    for role in roles:
        if role not in names:
            raise ArtifactError(CONFIG, f"{section.at(key)}.{role}", "nothing", "a name")


def _distinct(section: Section, inputs: Names, outputs: Names) -> None:
    owner: dict[str, str] = {}
    for part, names in (("inputs", inputs), ("outputs", outputs)):
        for role, name in names.by_role.items():
            path = f"{section.at(part)}.{role}"
            if name in owner:
                found = f"{name!r}, as {owner[name]}"
                section.problems.report(CONFIG, path, found, "a unique name")
            owner[name] = path
