"""EAGLE-3 heads, language models and Llama targets in float64 numpy, from their papers' formulas.

It reads a folder's files on its own and shares no code with the package. Everything is computed
anew in every round: no cache, one row of the batch.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.hub.reference_blocks import Array, Layers, Target, attention, read_json, read_weights


def frequencies(config: dict, dim: int) -> Array:
    """Return radians per position [dim / 2]; "llama3" divides slow channels by a factor."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = config.get("rope_theta") or scaling.get("rope_theta") or 10000.0
    plain = float(theta) ** (-np.arange(0, dim, 2) / dim)
    if scaling.get("rope_type", "default") == "default":
        return plain
    assert scaling["rope_type"] == "llama3"
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * plain / (2 * np.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return plain * (kept + (1 - kept) / scaling["factor"])


class Rotated(Layers):
    """Layers with any rotary scheme, with norms of queries and keys or without."""

    def heads(self, x: Array, layer: str, name: str, positions: Array | None) -> Array:
        """Project rows to heads [T, N, H]; normed if there is a norm, and rotated unless values."""
        projected = x @ self[f"{layer}.self_attn.{name}_proj"].T
        config = self.config
        dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        heads = projected.reshape(len(x), -1, dim)
        if positions is None:
            return heads
        norm = f"{layer}.self_attn.{name}_norm"
        if f"{self.prefix}{norm}.weight" in self.weights:
            heads = self.norm(heads, norm)
        angles = positions[:, None] * frequencies(config, dim)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        a, b = np.split(heads, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class LanguageModel(Rotated, Target):
    """A Qwen3 or Llama model."""

    @property
    def head(self) -> Array:
        """The head [V, D], which may be the embedding."""
        tied = self.config["tie_word_embeddings"]
        return self["embed_tokens"] if tied else self.weights["lm_head.weight"]


class Eagle3(Rotated):
    """An EAGLE-3 head of any layout, beside its target."""

    def __init__(self, folder: Path, target: LanguageModel, drafts: int):
        self.body, self.target, self.drafts = read_json(folder), target, drafts
        config = self.body.get("transformer_layer_config") or self.body
        super().__init__(read_weights(folder), config, "")
        self.layer = "layers.0" if "transformer_layer_config" in self.body else "midlayer"
        key, layers = "eagle_aux_hidden_state_layer_ids", target.config["num_hidden_layers"]
        named = (self.body.get("eagle_config") or {}).get(key)  # layers that the rows leave
        entered = self.body.get(key) or [2, layers // 2, layers - 3]
        self.taps = entered if named is None else [tap + 1 for tap in named]

    def embedding(self, token: int) -> Array:
        """Return a token's vector, of its own table or the target's."""
        own = self.weights.get("embed_tokens.weight")
        return (self.target["embed_tokens"] if own is None else own)[token]

    def scores(self, entering: list[Array], text: list[int]) -> tuple[list[int], Array, None]:
        """Return the drafts, and the scores of all target ids [K, V]."""
        taps = [entering[tap] for tap in self.taps]
        if self.body.get("fc_norm"):
            taps = [self.norm(tap, f"fc_norm.{i}") for i, tap in enumerate(taps)]
        rows = list(np.concatenate(taps, axis=-1) @ self["fc"].T)
        tokens, drafts = text[1:], []
        found = np.full((self.drafts, self.target.config["vocab_size"]), -np.inf)
        ids = np.arange(len(self.weights["d2t"])) + self.weights["d2t"]
        for k in range(self.drafts):
            out = self.run(np.stack(rows), [*tokens, *drafts])[-1]
            z = (out if self.body.get("norm_output") else self.norm(out, "norm")) @ self.weights[
                "lm_head.weight"
            ].T
            found[k, ids] = z
            drafts.append(int(ids[z.argmax()]))
            rows.append(out)
        return drafts, found, None

    def run(self, rows: Array, tokens: list[int]) -> Array:
        """Return the layer's rows, from those of pairs of a row and the token after it."""
        layer = self.layer
        h = self.norm(rows, f"{layer}.hidden_norm")
        embedded = np.stack([self.embedding(token) for token in tokens])
        y = np.concatenate([self.norm(embedded, f"{layer}.input_layernorm"), h], axis=-1)
        positions = np.arange(len(rows))
        q, k = (self.heads(y, layer, name, positions) for name in "qk")
        seen = positions[None] <= positions[:, None]
        mixed = attention(q, k, self.heads(y, layer, "v", None), seen)
        x = h if self.body.get("norm_before_residual") else rows
        x = x + mixed @ self[f"{layer}.self_attn.o_proj"].T
        x = x + self.mlp(self.norm(x, f"{layer}.post_attention_layernorm"), layer)
        return self.norm(x, "norm") if self.body.get("norm_output") else x


class DraftModel:
    """A language model that drafts for a target with the same tokens."""

    def __init__(self, folder: Path, target: LanguageModel, drafts: int):
        self.model, self.target, self.drafts = language_model(folder), target, drafts

    def scores(self, entering: list[Array], text: list[int]) -> tuple[list[int], Array, None]:
        """Return the drafts, and the scores of all ids [K, V]; the target's rows are not read."""
        del entering
        drafts, found = [], []
        for _ in range(self.drafts):
            found.append(self.model.run([*text, *drafts])[0][-1])
            drafts.append(int(found[-1].argmax()))
        return drafts, np.stack(found), None


def language_model(folder: Path) -> LanguageModel:
    """Return the model of a folder."""
    return LanguageModel(folder)
