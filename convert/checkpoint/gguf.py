"""A GGUF file as a target: its settings and its tensors under the names of a checkpoint."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from convert.checkpoint.config import TargetFacts, read_target
from convert.checkpoint.tensors import HEAD, check_tensors
from convert.errors import ArtifactError, Problems
from convert.gguf.file import GgufFile, read_gguf
from convert.gguf.formats import GgufTensor
from convert.recipes import shortest
from convert.tensors import Array, DataFiles, Tensor
from convert.unused import Remarks
from jaxdraft.checkpoint.layout import Entry, target_layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """Differences of an architecture's files from the checkpoints that they were made from.

    Attributes:
      model_type: ``model_type`` of the checkpoint.
      interleaved: whether the rows of queries and keys were permuted, so that the two channels
        that turn together are neighbours.
    """

    model_type: str
    interleaved: bool = False


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(model_type="llama", interleaved=True),
    "qwen2": Architecture(model_type="qwen2"),
    "qwen3": Architecture(model_type="qwen3"),
}
"""Architectures that are read, as ``general.architecture`` names them."""

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Names of modules in GGUF files, and in checkpoints."""

FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies, which Llama 3.1 and later have."""

_STOPS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Tokens that end a sequence or a turn, in ``tokenizer.ggml``."""


@dataclasses.dataclass(frozen=True)
class GgufTarget:
    """A target, read and checked.

    Attributes:
      file: the file.
      facts: its settings.
      layout: its parameters.
      tensors: its tensors, by the names of checkpoints.
      stop_ids: tokens that end a sequence.
    """

    file: GgufFile
    facts: TargetFacts
    layout: list[Entry]
    tensors: Mapping[str, Tensor]
    stop_ids: tuple[int, ...]


def open_gguf(
    path: Path,
    files: DataFiles,
    problems: Problems,
    remarks: Remarks,
    context: int | None = None,
) -> GgufTarget:
    """Read a target from a GGUF file.

    Args:
      path: the file.
      files: owner of the maps.
      problems: destination of problems that do not prevent further reading.
      remarks: destination of remarks, which do not prevent loading.
      context: maximum length of a sequence. Default: as in the file.

    Raises:
      ArtifactError: the target is not implemented.
    """
    file = read_gguf(path, files)
    name = file.architecture
    if name not in ARCHITECTURES:
        expected = " or ".join(ARCHITECTURES) + "; others need their names and settings in a table"
        raise ArtifactError(path.name, "general.architecture", repr(name), expected)
    settings = _Settings(file, problems)
    body = settings.body()
    facts = _facts(path, body, HEAD in settings.names, problems, context)
    settings.report(remarks)
    layout = target_layout(facts.config, facts.family)
    tensors = settings.tensors(facts)
    check_tensors(layout, tensors, path.name, (), problems, None, remarks)
    return GgufTarget(file, facts, layout, tensors, facts.stop_ids)


def _facts(
    path: Path, body: Mapping[str, Any], head: bool, problems: Problems, context: int | None
) -> TargetFacts:
    """Read settings as those of a checkpoint; report problems with the name of the file."""
    own = Problems()
    try:
        return read_target(body, head_stored=head, problems=own, remarks=Remarks(), context=context)
    except ArtifactError as error:
        own.extend(error.problems)
        raise
    finally:
        for each in own:
            problems.report(path.name, f"{each.where}, in a checkpoint", each.found, each.expected)
        problems.raise_any()


class _Settings:
    """The settings of a file, and which of them have been read."""

    def __init__(self, file: GgufFile, problems: Problems):
        self.file, self.problems = file, problems
        self.architecture = ARCHITECTURES[file.architecture]
        self.read = {"general.architecture", "general.alignment"}
        self.names = {_translated(name): name for name in file.tensors}

    def value(self, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Return a setting of the architecture; one without a default is required."""
        key = f"{self.file.architecture}.{name}"
        self.read.add(key)
        found = self.file.metadata.get(key, default)
        wrong = not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool)
        if found is not default and wrong or found is None and default is None:
            shown = "nothing" if found is None else repr(found)[:80]
            kinds = kind if isinstance(kind, tuple) else (kind,)
            expected = " or ".join(each.__name__ for each in kinds)
            raise ArtifactError(self.file.path.name, key, shown, expected)
        return found

    def only(self, name: str, *allowed: Any) -> None:
        """Report a setting of the architecture that is present with another value."""
        key = f"{self.file.architecture}.{name}"
        self.read.add(key)
        found = self.file.metadata.get(key)
        if found is not None and found not in allowed:
            expected = " or ".join(map(str, allowed)) or "no such setting"
            self.problems.report(self.file.path.name, key, repr(found)[:80], expected)

    def token(self, name: str) -> int | None:
        """Return a token of the tokenizer's settings, if it is named."""
        found = self.file.metadata.get(f"tokenizer.ggml.{name}")
        return found if isinstance(found, int) and not isinstance(found, bool) else None

    def body(self) -> dict[str, Any]:
        """Return the settings as ``config.json`` of the architecture spells them."""
        embedding = self.file.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise ArtifactError(
                self.file.path.name, "tensor token_embd.weight", "nothing", "a matrix"
            )
        width = self.value("embedding_length", int)
        heads = self.value("attention.head_count", int)
        if heads < 1:
            where = f"{self.file.architecture}.attention.head_count"
            raise ArtifactError(self.file.path.name, where, f"{heads}", "1 or more")
        head_dim = self.value("attention.key_length", int, width // heads)
        self.only("attention.value_length", head_dim)
        self.only("rope.dimension_count", head_dim)
        self.only("vocab_size", embedding.shape[0])
        for name in ("expert_count", "attention.sliding_window", "attention.scale", "logit_scale"):
            self.only(name, 0)
        stops = [token for name in _STOPS if (token := self.token(name)) is not None]
        body: dict[str, Any] = {
            "model_type": self.architecture.model_type,
            "vocab_size": embedding.shape[0],
            "hidden_size": width,
            "intermediate_size": self.value("feed_forward_length", int),
            "num_hidden_layers": self.value("block_count", int),
            "num_attention_heads": heads,
            "num_key_value_heads": self.value("attention.head_count_kv", int, heads),
            "head_dim": head_dim,
            "max_position_embeddings": self.value("context_length", int),
            "rms_norm_eps": shortest(self.value("attention.layer_norm_rms_epsilon", float)),
            "tie_word_embeddings": HEAD not in self.names,
            "bos_token_id": self.token("bos_token_id"),
            "pad_token_id": self.token("padding_token_id"),
            "eos_token_id": list(dict.fromkeys(stops)) or None,
            "use_sliding_window": False,
            **self.rope(head_dim),
        }
        biased = "model.layers.0.self_attn.q_proj.bias" in self.names
        if biased and self.architecture.model_type != "qwen2":
            body["attention_bias"] = True
        return body

    def rope(self, head_dim: int) -> dict[str, Any]:
        """Return the rotary embedding's settings."""
        theta = shortest(self.value("rope.freq_base", float, 10000.0))
        context = self.value("context_length", int)
        kind = self.value("rope.scaling.type", str, "none")
        factor = self.value("rope.scaling.factor", float, 0.0) or self.value(
            "rope.scale_linear", float, 0.0
        )
        original = self.value("rope.scaling.original_context_length", int, 0)
        self.only("rope.scaling.finetuned", True, False)
        scaling: dict[str, Any] = {}
        if kind not in ("none", "linear", "yarn"):
            self.only("rope.scaling.type", "none", "linear", "yarn")
        elif factor not in (0.0, 1.0) and kind != "none":
            scaling = {"rope_type": kind, "factor": shortest(factor)}
            if kind == "yarn":
                scaling["original_max_position_embeddings"] = original or context
                attention = self.value("rope.scaling.attn_factor", float, 0.0)
                if attention:
                    scaling["attention_factor"] = shortest(attention)
        factors = self.file.tensors.get(FACTORS)
        if factors is not None:
            if scaling:
                shown = f"beside rope.scaling.type {kind}"
                raise ArtifactError(self.file.path.name, f"tensor {FACTORS}", shown, "one of them")
            scaling = _llama3(factors, theta, head_dim, original)
        return {"rope_theta": theta, "rope_scaling": scaling or None}

    def report(self, remarks: Remarks) -> None:
        """Remark on settings that were not read. Those of text are read with the tokenizer."""
        for key in self.file.metadata.keys() - self.read:
            if key.startswith(("general.", "tokenizer.", "quantize.", "split.")):
                continue
            value = repr(self.file.metadata[key])[:80]
            text = f"{key} is {value}: an unknown setting, which has no effect"
            remarks.warn(self.file.path.name, text)

    def tensors(self, facts: TargetFacts) -> dict[str, Tensor]:
        """Return the tensors by the names of checkpoints, their rows in the order of those."""
        shape = facts.config.softmax[0]
        heads = {"q_proj": shape.heads, "k_proj": shape.kv_heads}
        found: dict[str, Tensor] = {}
        for name, stored in self.names.items():
            tensor = self.file.tensors[stored]
            if stored == FACTORS:
                continue
            part = name.split(".")[-2] if name.count(".") > 1 else ""
            count = heads.get(part, 0) * shape.head_dim
            if self.architecture.interleaved and count and tensor.shape[:1] == (count,):
                tensor = _with_rows(tensor, halves(heads[part], shape.head_dim))
            found[name] = dataclasses.replace(tensor, name=name)
        return found


def _translated(name: str) -> str:
    """Return the name of a tensor in a checkpoint; one that is not known is left as it is.

    Example: ``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``.
    """
    module, _, kind = name.rpartition(".")
    if module in _TOP:
        return f"{_TOP[module]}.{kind}"
    parts = module.split(".", 2)
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _LAYER:
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.{kind}"
    return name


def halves(heads: int, head_dim: int) -> Array:
    """Return the row of an interleaved matrix for each row of one in halves.

    Channel j turns with channel j + head_dim / 2 in checkpoints, and with its neighbour in files of
    ``llama``. Example, one head of width 4: rows 0 2 1 3.
    """
    rows = np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2)
    return rows.transpose(0, 2, 1).reshape(-1)


@dataclasses.dataclass(frozen=True, eq=False)
class _Permuted(Tensor):
    """A tensor of floats with its rows in another order."""

    rows: Any = None

    def read(self) -> Array:
        """Return a copy in the new order."""
        return super().read()[self.rows]


def _with_rows(tensor: Tensor, rows: Array) -> Tensor:
    """Return the same tensor with its rows in another order."""
    if isinstance(tensor, GgufTensor):
        return dataclasses.replace(tensor, rows=rows)
    facts = {field.name: getattr(tensor, field.name) for field in dataclasses.fields(Tensor)}
    return _Permuted(**facts, rows=rows)


_LLAMA3 = ((8.0, 8192), (32.0, 8192), (16.0, 8192), (4.0, 8192), (2.0, 8192))
"""Factors and old contexts of published models; low and high frequency factors are 1 and 4."""


@functools.cache
def _frequencies(theta: float, width: int) -> Array:
    return theta ** (-np.arange(0, width, 2, dtype=np.float64) / width)


def _llama3(tensor: Tensor, theta: float, width: int, original: int) -> dict[str, Any]:
    """Return the settings of rope ``llama3`` that give the stored divisors.

    The file holds only the divisors, so the published settings are tried.

    Raises:
      ArtifactError: none of them fits.
    """
    stored = tensor.read().astype(np.float64)
    inverse = _frequencies(theta, width)
    factor = float(stored.max(initial=1.0))
    tried = [(factor, original)] if original else []
    for scale, context in (*tried, *_LLAMA3):
        turns = context * inverse / (2 * np.pi)
        kept = np.clip((turns - 1.0) / 3.0, 0, 1)
        expected = 1 / (kept + (1 - kept) / scale)
        if stored.shape == expected.shape and np.allclose(stored, expected, rtol=1e-3):
            return {
                "rope_type": "llama3",
                "factor": scale,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": context,
            }
    raise ArtifactError(
        tensor.file,
        f"tensor {tensor.name}",
        f"{len(stored)} divisors up to {factor:g}",
        "those of rope llama3 as published; others need settings that the file does not hold",
    )
