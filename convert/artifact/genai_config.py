"""``genai_config.json``: what an artifact says about itself, read strictly.

Every key this package acts on is checked for type and range, and reported by its full path. Inside
a drafter's section an unknown key is an error too: a setting that is silently ignored costs
acceptance and nobody notices. What the sections mean is in onnxruntime-genai's model builder.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from convert.errors import ArtifactError, Problems
from convert.json_reader import read_json
from convert.paths import GENAI_CONFIG, contained
from convert.unused import (
    TOKENIZER_CONFIG,
    TOKENIZER_FILES,
    Remarks,
    is_integer,
    report_files,
    report_generation,
    report_tokenizer,
    shown,
    stop_ids,
)
from jaxdraft.config import FULL_ATTENTION, DrafterKind

CONFIG = GENAI_CONFIG
_MAX_CONFIG_BYTES = 1 << 24
_INT32 = 2**31 - 1

Json = Mapping[str, Any]

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
_MTP_INPUTS = {
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
_MTP_OUTPUTS = {"logits", "hidden_states", "present_key_names", "present_value_names"}

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
_MTP_KEYS = _COMMON_KEYS | {"enabled", "main_hidden_states"}
_MISPLACED = (_BLOCK_KEYS | _MTP_KEYS) - _COMMON_KEYS - {"block_size", "sliding_window"}
"""Keys that mean something in a drafter's section only; ``block_size`` is also a page size and
``sliding_window`` also a decoder's."""

_MODEL_KEYS = {
    "bos_token_id",
    "context_length",
    "decoder",
    "eos_token_id",
    "pad_token_id",
    "type",
    "vocab_size",
    "dflash2",
    "dspark",
    "mtp",
}
_MODEL_UNUSED = {
    **dict.fromkeys(
        "bot_token_id eot_token_id bor_token_id eor_token_id sep_token_id decoder_start_token_id"
        " image_token_id video_token_id vision_start_token_id boi_token_id eoi_token_id".split(),
        "text is encoded by tokenizer.json and the chat template, which hold these tokens",
    ),
}
"""Keys of ``model`` that nothing here acts on, and why that changes nothing."""
_BATCHING_KEYS = {
    "block_size",
    "max_batch_size",
    # The runtime's memory and cache: jaxdraft.Engine has arguments of its own for them.
    "num_blocks",
    "prefix_caching",
    "gpu_utilization_factor",
}
_DECODER_KEYS = {
    "session_options",  # onnxruntime's
    "filename",
    "head_size",
    "hidden_size",
    "inputs",
    "outputs",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "sliding_window",
    "state_groups",
    "state_update_capacity",
    "shared_initializers",
}
_SLIDING_KEYS = {
    "window_size",
    "pad_value",
    "alignment",
    "slide_key_value_cache",
    "slide_inputs",
    "layers",
    "cache_slack",
}
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
    """Names of a graph's inputs or outputs by role. ``%d`` in a name stands for a layer."""

    by_role: Mapping[str, str]

    def __contains__(self, role: str) -> bool:
        return role in self.by_role

    def __getitem__(self, role: str) -> str:
        return self.by_role[role]

    def layer(self, role: str, layer: int) -> str:
        """The name of a per-layer tensor."""
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
    """``model.dflash2``, ``model.dspark`` or ``model.mtp``. Block fields are zero for MTP."""

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
      problems: collects everything wrong that does not make the rest unreadable.
      alone: read the target alone, and nothing of a drafter.

    Raises:
      ArtifactError: the file is missing or no JSON object, or a key without which nothing can be
        read is missing or has the wrong type.
      FileNotFoundError: no such folder.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"no artifact folder {folder}")
    return _Reader(folder, problems).config(_load(folder), alone)


def _load(folder: Path) -> Json:
    path = contained(folder, CONFIG, str(folder), "configuration")
    if path.stat().st_size > _MAX_CONFIG_BYTES:
        raise ArtifactError(CONFIG, "size", f"{path.stat().st_size} bytes", "a configuration")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise ArtifactError(CONFIG, f"key {key!r}", "two in one object", "one")
            result[key] = value
        return result

    def refuse(constant: str) -> float:
        raise ArtifactError(CONFIG, "contents", constant, "finite numbers")

    try:
        text = path.read_bytes().decode("utf-8")
        value = json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except ArtifactError:
        raise
    except OSError as error:
        raise ArtifactError(CONFIG, "file", error.strerror or error, "a readable file") from error
    except (ValueError, RecursionError) as error:
        raise ArtifactError(CONFIG, "contents", f"no JSON ({error})", "a JSON object") from error
    if not isinstance(value, dict):
        raise ArtifactError(CONFIG, "contents", _kind(value), "a JSON object")
    return value


def _kind(value: Any) -> str:
    """A value as messages show it: short, and with its JSON type."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if value is None:
        return "null"
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


class _Reader:
    """Typed access to the configuration, by path."""

    def __init__(self, folder: Path, problems: Problems):
        self.folder = folder
        self.problems = problems
        self.remarks = Remarks()

    # Typed values. Each raises: without them nothing that follows can be read.

    def object(self, parent: Json, key: str, where: str) -> Json:
        value = parent.get(key)
        if not isinstance(value, dict):
            found = _kind(value) if key in parent else "nothing"
            raise ArtifactError(CONFIG, _join(where, key), found, "an object")
        return value

    def string(self, parent: Json, key: str, where: str) -> str:
        value = parent.get(key)
        if not isinstance(value, str) or not value:
            found = _kind(value) if key in parent else "nothing"
            raise ArtifactError(CONFIG, _join(where, key), found, "a name")
        return value

    def integer(
        self, parent: Json, key: str, where: str, low: int, high: int, meaning: str = ""
    ) -> int:
        value = parent.get(key)
        # bool is a subclass of int; 7.0 and "7" are not integers in JSON's spelling of one.
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            found = _kind(value) if key in parent else "nothing"
            wanted = f"an integer in {low}..{high}" + (f" ({meaning})" if meaning else "")
            raise ArtifactError(CONFIG, _join(where, key), found, wanted)
        return value

    def boolean(self, parent: Json, key: str, where: str) -> bool:
        value = parent.get(key)
        if not isinstance(value, bool):
            found = _kind(value) if key in parent else "nothing"
            raise ArtifactError(CONFIG, _join(where, key), found, "true or false")
        return value

    def attempt(self, read: Callable[[], Any], default: Any) -> Any:
        """``read()``; a failure is reported and ``default`` stands in, so that more is found."""
        try:
            return read()
        except ArtifactError as error:
            self.problems.append(error)
            return default

    # Sections.

    def config(self, root: Json, alone: bool) -> ArtifactConfig:
        model = self.object(root, "model", "")
        for name in _OTHER_MODELS:
            if name in model:
                self.problems.report(
                    CONFIG, f"model.{name}", "a further model", "a decoder, alone or with a drafter"
                )
        vocab = self.integer(model, "vocab_size", "model", 1, _INT32)
        context = self.integer(model, "context_length", "model", 1, _INT32)
        decoder = self.decoder(self.object(model, "decoder", "model"))
        drafter = None if alone else self.drafter(model, vocab, decoder)
        if not alone:
            self.misplaced(root, model)
        page_size, max_batch = self.engine(root)
        self.unknown(root, "", {"model", "search", "engine"})
        self.unknown(model, "model", _MODEL_KEYS | _MODEL_UNUSED.keys())
        self.search(root, context)
        self.files(decoder, drafter)
        return ArtifactConfig(
            folder=self.folder,
            model_type=self.string(model, "type", "model"),
            vocab_size=vocab,
            context_length=context,
            bos_token_id=self.token(model, "bos_token_id", vocab),
            eos_token_ids=self.eos(model, vocab),
            pad_token_id=self.token(model, "pad_token_id", vocab),
            decoder=decoder,
            drafter=drafter,
            page_size=page_size,
            max_batch=max_batch,
            remarks=self.remarks,
        )

    def token(self, model: Json, key: str, vocab: int) -> int | None:
        """A token that nothing here acts on: what is no token is noted."""
        value = model.get(key)
        if value is None or (is_integer(value) and 0 <= value < vocab):
            return value
        self.remarks.note(
            CONFIG, f"model.{key} is {shown(value)}, not a token in 0..{vocab - 1}: it is not used"
        )
        return None

    def eos(self, model: Json, vocab: int) -> tuple[int, ...]:
        value, where = model.get("eos_token_id"), "model.eos_token_id"
        return self.attempt(lambda: stop_ids(value, where, CONFIG, vocab, self.remarks), ())

    def decoder(self, section: Json) -> DecoderSection:
        where = "model.decoder"
        filename = self.string(section, "filename", where)
        inputs = self.names(section, "inputs", where, _DECODER_INPUTS)
        outputs = self.names(section, "outputs", where, _DECODER_OUTPUTS)
        self.required(inputs, f"{where}.inputs", ("input_ids",))
        self.required(outputs, f"{where}.outputs", ("logits",))
        self.distinct(where, inputs, outputs)
        self.unknown(section, where, _DECODER_KEYS)
        capacity = None
        if "state_update_capacity" in section:
            capacity = self.attempt(
                lambda: self.integer(section, "state_update_capacity", where, 1, _INT32), None
            )

        def size(key: str) -> int:
            return self.integer(section, key, where, 1, _INT32)

        return DecoderSection(
            path=contained(self.folder, filename, CONFIG, f"{where}.filename"),
            filename=filename,
            head_size=size("head_size"),
            hidden_size=size("hidden_size"),
            heads=size("num_attention_heads"),
            layers=size("num_hidden_layers"),
            kv_heads=size("num_key_value_heads"),
            inputs=inputs,
            outputs=outputs,
            state_update_capacity=capacity,
            state_groups=self.attempt(lambda: self.state_groups(section), {}),
            sliding=self.attempt(lambda: self.sliding(section), None),
            shared=self.attempt(lambda: self.shared(section, where), {}),
        )

    def sliding(self, decoder: Json) -> SlidingSection | None:
        if decoder.get("sliding_window") is None:
            return None
        section = self.object(decoder, "sliding_window", "model.decoder")
        where = "model.decoder.sliding_window"
        self.known_keys(section, where, _SLIDING_KEYS)
        for key in ("slide_key_value_cache", "slide_inputs"):
            # The runtime's default is true: it would feed prompts window by window, and the keys of
            # one window would be all that its rows see. That is another model.
            if self.boolean(section, key, where):
                raise ArtifactError(CONFIG, _join(where, key), "true", "false: not implemented")
        return SlidingSection(
            window=self.integer(section, "window_size", where, 1, _INT32),
            layers=self.integers(section, "layers", where, 0, _INT32),
        )

    def state_groups(self, section: Json) -> dict[str, tuple[int, ...]]:
        groups = section.get("state_groups", [])
        where = "model.decoder.state_groups"
        if not isinstance(groups, list) or not all(isinstance(g, dict) for g in groups):
            raise ArtifactError(CONFIG, where, _kind(groups), "a list of objects")
        result: dict[str, tuple[int, ...]] = {}
        for i, group in enumerate(groups):
            kind = self.string(group, "kind", f"{where}[{i}]")
            if kind not in ("paged_kv", "fixed_conv", "fixed_recurrent") or kind in result:
                raise ArtifactError(
                    CONFIG,
                    f"{where}[{i}].kind",
                    json.dumps(kind),
                    "one each of paged_kv, fixed_conv, fixed_recurrent",
                )
            result[kind] = self.integers(group, "layer_ids", f"{where}[{i}]", 0, _INT32)
            self.unknown(group, f"{where}[{i}]", {"kind", "layer_ids", "state_update"})
            if "state_update" in group:  # how the runtime rolls back
                update = self.object(group, "state_update", f"{where}[{i}]")
                self.unknown(update, f"{where}[{i}].state_update", {"capacity", "key_head_count"})
        return result

    def drafter(self, model: Json, vocab: int, decoder: DecoderSection) -> DrafterSection | None:
        kinds: tuple[DrafterKind, ...] = ("dflash2", "dspark", "mtp")
        sections: dict[DrafterKind, Json] = {
            kind: self.object(model, kind, "model") for kind in kinds if kind in model
        }
        mtp = sections.get("mtp")
        if mtp is not None and not self.boolean(mtp, "enabled", "model.mtp"):
            # Switched off, it is not read; but a setting nobody would notice is still named.
            self.known_keys(mtp, "model.mtp", _MTP_KEYS)
            del sections["mtp"]
        if len(sections) > 1:
            raise ArtifactError(
                CONFIG,
                "model",
                " and ".join(f"{kind} section" for kind in sections),
                "one drafter",
            )
        for kind, section in sections.items():
            if kind == "mtp":
                return self.mtp(section, decoder)
            return self.block(kind, section, vocab, decoder)
        return None

    def block(
        self, kind: DrafterKind, section: Json, vocab: int, decoder: DecoderSection
    ) -> DrafterSection:
        where = f"model.{kind}"
        self.known_keys(section, where, _BLOCK_KEYS)
        inputs = self.names(section, "inputs", where, _BLOCK_INPUTS)
        outputs = self.names(section, "outputs", where, _BLOCK_OUTPUTS)
        self.required(inputs, f"{where}.inputs", sorted(_BLOCK_INPUTS - {"q_row_map"}))
        self.required(outputs, f"{where}.outputs", sorted(_BLOCK_OUTPUTS))
        self.distinct(where, inputs, outputs)
        smallest = 2 if kind == "dflash2" else 1
        block = self.integer(section, "block_size", where, smallest, 4096, "query rows of a block")
        drafts = block - 1 if kind == "dflash2" else block
        rule = (
            f"block_size - 1 = {drafts}: the anchor's row predicts nothing"
            if kind == "dflash2"
            else f"block_size = {drafts}: every row predicts"
        )
        self.attempt(
            lambda: self.integer(section, "num_draft_tokens", where, drafts, drafts, rule), None
        )
        window = self.integer(section, "sliding_window", where, FULL_ATTENTION, _INT32)
        if window == 0:
            raise ArtifactError(
                CONFIG, f"{where}.sliding_window", 0, "-1 for full attention, or a positive width"
            )
        main = self.string(section, "main_aux_hidden_states", where)
        self.main_output(where, "main_aux_hidden_states", main, decoder, "aux_hidden_states")
        taps = self.integers(
            section, "aux_hidden_state_layers", where, 1, max(decoder.layers - 1, 1)
        )
        if not taps or len(set(taps)) != len(taps):
            self.problems.report(
                CONFIG,
                f"{where}.aux_hidden_state_layers",
                list(taps),
                "one or more layers, each once",
            )
        return DrafterSection(
            kind=kind,
            **self.common(section, where),
            inputs=inputs,
            outputs=outputs,
            main_output=main,
            block_size=block,
            draft_tokens=drafts,
            candidates=self.integer(section, "selector_top_k", where, 1, vocab),
            mask_token=self.integer(
                section, "mask_token_id", where, 0, vocab - 1, "a token of the vocabulary"
            ),
            window=window,
            taps=taps,
        )

    def mtp(self, section: Json, decoder: DecoderSection) -> DrafterSection:
        where = "model.mtp"
        self.known_keys(section, where, _MTP_KEYS)
        inputs = self.names(section, "inputs", where, _MTP_INPUTS)
        outputs = self.names(section, "outputs", where, _MTP_OUTPUTS)
        self.required(
            inputs,
            f"{where}.inputs",
            ("input_ids", "hidden_states", "past_key_names", "past_value_names"),
        )
        self.required(outputs, f"{where}.outputs", sorted(_MTP_OUTPUTS))
        self.distinct(where, inputs, outputs)
        main = self.string(section, "main_hidden_states", where)
        self.main_output(where, "main_hidden_states", main, decoder, "hidden_states")
        return DrafterSection(
            kind="mtp",
            **self.common(section, where),
            inputs=inputs,
            outputs=outputs,
            main_output=main,
        )

    def common(self, section: Json, where: str) -> dict[str, Any]:
        filename = self.string(section, "filename", where)
        return {
            "path": contained(self.folder, filename, CONFIG, f"{where}.filename"),
            "filename": filename,
            "layers": self.integer(section, "num_hidden_layers", where, 1, _INT32),
            "kv_heads": self.integer(section, "num_key_value_heads", where, 1, _INT32),
            "head_size": self.integer(section, "head_size", where, 1, _INT32),
            "shared": self.shared(section, where),
        }

    def main_output(
        self, where: str, key: str, name: str, decoder: DecoderSection, role: str
    ) -> None:
        if role not in decoder.outputs:
            self.problems.report(
                CONFIG, f"model.decoder.outputs.{role}", "nothing", f"{name!r}, of {where}.{key}"
            )
        elif decoder.outputs[role] != name:
            self.problems.report(
                CONFIG,
                f"{where}.{key}",
                json.dumps(name),
                f"{decoder.outputs[role]!r}, of model.decoder.outputs.{role}",
            )

    def shared(self, section: Json, where: str) -> dict[str, SharedTensor]:
        entries = section.get("shared_initializers", [])
        where = _join(where, "shared_initializers")
        if not isinstance(entries, list):
            raise ArtifactError(CONFIG, where, _kind(entries), "a list")
        result: dict[str, SharedTensor] = {}
        for i, entry in enumerate(entries):
            at = f"{where}[{i}]"
            if not isinstance(entry, dict):
                raise ArtifactError(CONFIG, at, _kind(entry), "an object")
            self.known_keys(
                entry, at, {"name", "data_file", "offset", "length", "data_type", "shape"}
            )
            name = self.string(entry, "name", at)
            if name in result:
                raise ArtifactError(CONFIG, f"{at}.name", f"a second {name!r}", "each name once")
            result[name] = SharedTensor(
                name=name,
                data_file=self.string(entry, "data_file", at),
                offset=self.decimal(entry, "offset", at),
                length=self.decimal(entry, "length", at),
                data_type=self.integer(entry, "data_type", at, 1, 64),
                shape=self.integers(entry, "shape", at, 0, 2**62),
            )
        return result

    def decimal(self, parent: Json, key: str, where: str) -> int:
        text = self.string(parent, key, where)
        if not text.isascii() or not text.isdigit() or len(text) > 19:
            raise ArtifactError(CONFIG, _join(where, key), json.dumps(text), "a string of digits")
        return int(text)

    def integers(self, parent: Json, key: str, where: str, low: int, high: int) -> tuple[int, ...]:
        values = parent.get(key)
        if not isinstance(values, list) or not all(
            isinstance(v, int) and not isinstance(v, bool) and low <= v <= high for v in values
        ):
            found = json.dumps(values)[:80] if key in parent else "nothing"
            raise ArtifactError(
                CONFIG, _join(where, key), found, f"a list of integers in {low}..{high}"
            )
        return tuple(values)

    def names(self, section: Json, key: str, where: str, known: set[str]) -> Names:
        names = self.object(section, key, where)
        where = _join(where, key)
        self.known_keys(names, where, known)
        for role in names:
            name = self.string(names, role, where)
            per_layer = role.endswith("_names")
            if name.count("%") != per_layer or name.count("%d") != per_layer:
                wanted = "one %d, the layer" if per_layer else "a plain name"
                self.problems.report(CONFIG, _join(where, role), json.dumps(name), wanted)
        return Names({role: name for role, name in names.items() if role in known})

    def required(self, names: Names, where: str, roles: Sequence[str]) -> None:
        for role in roles:
            if role not in names:
                raise ArtifactError(CONFIG, _join(where, role), "nothing", "a name")

    def distinct(self, where: str, inputs: Names, outputs: Names) -> None:
        owner: dict[str, str] = {}
        for part, names in (("inputs", inputs), ("outputs", outputs)):
            for role, name in names.by_role.items():
                if name in owner:
                    self.problems.report(
                        CONFIG,
                        f"{where}.{part}.{role}",
                        f"{name!r}, as {owner[name]}",
                        "a name of its own",
                    )
                owner[name] = f"{where}.{part}.{role}"

    def known_keys(self, section: Json, where: str, known: set[str]) -> None:
        for key in section:
            if key not in known:
                self.problems.report(
                    CONFIG,
                    _join(where, key),
                    "an unknown key",
                    "one of " + ", ".join(sorted(known)),
                )

    def unknown(self, section: Json, where: str, known: set[str]) -> None:
        """Remark on keys that nothing here acts on."""
        for key in section:
            if key not in known:
                text = f"{_join(where, key)} is {shown(section[key])}: not a setting that is known "
                text += "here, so it has no effect"
                (self.remarks.note if section[key] is None else self.remarks.warn)(CONFIG, text)

    def search(self, root: Json, context: int) -> None:
        """Remark on recommended settings of decoding."""
        search = root.get("search")
        if search is None:
            return
        if not isinstance(search, dict):
            raise ArtifactError(CONFIG, "search", _kind(search), "an object")
        report_generation(search, CONFIG, self.remarks, where="search", known=())
        length = search.get("max_length")
        if is_integer(length) and length < context:
            self.remarks.note(
                CONFIG, f"search.max_length is {length}: each call says how many tokens it wants"
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

    def misplaced(self, root: Json, model: Json) -> None:
        """Settings of a drafter that stand outside its section, where nothing reads them."""
        places = {"": root, "model": model}
        for where, key in (("model", "decoder"), ("", "engine"), ("", "search")):
            inner = (model if where else root).get(key)
            if isinstance(inner, dict):
                places[_join(where, key)] = inner
        for where, section in places.items():
            for key in sorted(_MISPLACED & set(section)):
                self.problems.report(
                    CONFIG, _join(where, key), _kind(section[key]), "it in a drafter's section"
                )

    def engine(self, root: Json) -> tuple[int | None, int | None]:
        if "engine" not in root:
            return None, None
        section = self.object(root, "engine", "")
        self.unknown(section, "engine", {"dynamic_batching", "static_batching"})
        batching, where = section.get("dynamic_batching"), "engine.dynamic_batching"
        if batching is None:
            return None, None
        if not isinstance(batching, dict):
            raise ArtifactError(CONFIG, where, _kind(batching), "an object")
        self.unknown(batching, where, _BATCHING_KEYS)
        values: list[int | None] = []
        for key in ("block_size", "max_batch_size", "num_blocks"):
            value = None
            if key in batching:
                read = lambda k=key: self.integer(batching, k, where, 1, _INT32)  # noqa: E731
                value = self.attempt(read, None)
            values.append(value)
        if "prefix_caching" in batching:
            self.attempt(lambda: self.boolean(batching, "prefix_caching", where), None)
        return values[0], values[1]


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key
