"""Block drafters and their target in float64 numpy, written from the formulas of their papers.

It reads a folder's files on its own and shares no code with the package. Everything is computed
anew in every round: no cache, one row of the batch.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import safe_open

Array = np.ndarray
Weights = dict[str, Array]


def read_weights(folder: Path) -> Weights:
    """Return the tensors of a folder: floats widened to float64, others as they are."""
    found: Weights = {}
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        for name in file.keys():  # noqa: SIM118 - it is not a mapping
            value = file.get_tensor(name)
            floats = value.dtype == ml_dtypes.bfloat16 or value.dtype.kind == "f"
            found[name] = value.astype(np.float64) if floats else value
    return found


def read_json(folder: Path) -> dict[str, Any]:
    """Return the content of ``config.json``."""
    return json.loads((folder / "config.json").read_text())


def norm(x: Array, weight: Array, eps: float) -> Array:
    """RMSNorm over the last axis."""
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def sigmoid(x: Array) -> Array:
    """The logistic function."""
    return 1 / (1 + np.exp(-x))


def silu(x: Array) -> Array:
    """``x * sigmoid(x)``."""
    return x * sigmoid(x)


def turn(x: Array, positions: Array, theta: float) -> Array:
    """Rotate heads [T, N, H] in halves."""
    half = x.shape[-1] // 2
    angles = positions[:, None] / theta ** (np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attention(q: Array, k: Array, v: Array, seen: Array) -> Array:
    """Attend: [T, N, H], [S, G, H], [S, G, H], [T, S] -> [T, N * H]."""
    share = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, share, axis=1), np.repeat(v, share, axis=1)
    scores = np.einsum("tnh,snh->nts", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(seen[None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("nts,snh->tnh", weights, v).reshape(q.shape[0], -1)


@dataclasses.dataclass
class Layers:
    """Settings and tensors of Qwen3 layers, of a target or a drafter."""

    weights: Weights
    config: dict[str, Any]
    prefix: str

    def __getitem__(self, name: str) -> Array:
        return self.weights[f"{self.prefix}{name}.weight"]

    def norm(self, x: Array, name: str) -> Array:
        """Norm the rows of ``x``."""
        return norm(x, self[name], self.config["rms_norm_eps"])

    @property
    def theta(self) -> float:
        """Base of the rotary frequencies."""
        inner = self.config.get("rope_parameters") or {}
        return float(inner.get("rope_theta", self.config.get("rope_theta")))

    def heads(self, x: Array, layer: str, name: str, positions: Array | None) -> Array:
        """Project rows to heads [T, N, H]; normed and rotated, unless they are values."""
        projected = x @ self[f"{layer}.self_attn.{name}_proj"].T
        heads = projected.reshape(len(x), -1, self.config["head_dim"])
        if positions is None:
            return heads
        return turn(self.norm(heads, f"{layer}.self_attn.{name}_norm"), positions, self.theta)

    def mlp(self, x: Array, layer: str) -> Array:
        """The gated MLP."""
        gate, up = (x @ self[f"{layer}.mlp.{name}_proj"].T for name in ("gate", "up"))
        return (silu(gate) * up) @ self[f"{layer}.mlp.down_proj"].T


class Target(Layers):
    """A Qwen3 target."""

    def __init__(self, folder: Path):
        super().__init__(read_weights(folder), read_json(folder), "model.")

    @property
    def head(self) -> Array:
        """The head [V, D]."""
        return self.weights["lm_head.weight"]

    def run(self, tokens: list[int]) -> tuple[Array, list[Array]]:
        """Return logits [T, V], and the rows that enter each layer and leave the last."""
        x, entering = self["embed_tokens"][tokens], []
        positions = np.arange(len(tokens))
        seen = positions[None] <= positions[:, None]
        for i in range(self.config["num_hidden_layers"]):
            entering.append(x)
            y, layer = self.norm(x, f"layers.{i}.input_layernorm"), f"layers.{i}"
            q, k = (self.heads(y, layer, name, positions) for name in "qk")
            mixed = attention(q, k, self.heads(y, layer, "v", None), seen)
            x = x + mixed @ self[f"{layer}.self_attn.o_proj"].T
            x = x + self.mlp(self.norm(x, f"{layer}.post_attention_layernorm"), layer)
        entering.append(x)
        return self.norm(x, "norm") @ self.head.T, entering

    def greedy(self, tokens: list[int], count: int) -> list[int]:
        """Return the ``count`` best tokens after a text."""
        text = list(tokens)
        for _ in range(count):
            text.append(int(self.run(text)[0][-1].argmax()))
        return text[len(tokens) :]


class Drafter(Layers):
    """A block drafter of any layout, beside its target."""

    def __init__(self, folder: Path, target: Target):
        body, self.target = read_json(folder), target
        inner = body.get("dflash_config") or {}
        layers = body.get("transformer_layer_config") or body
        super().__init__(read_weights(folder), layers, "")
        self.settings = {**body, **inner}
        self.size = self.settings["block_size"]
        entering = "speculators_model_type" in body
        taps = self.settings["aux_hidden_state_layer_ids" if entering else "target_layer_ids"]
        self.taps = [tap if entering else tap + 1 for tap in taps]
        self.pairs = next((n for n in ("markov_head", "candidate_selector") if self.has(n)), None)
        self.first = 0 if self.pairs == "markov_head" else 1
        if entering:
            self.first = 0 if body["sample_from_anchor"] else 1

    def has(self, name: str) -> bool:
        """Whether some tensor's name begins so."""
        return any(each.startswith(name) for each in self.weights)

    @property
    def ids(self) -> Array:
        """Target ids of the draft ids."""
        if "d2t" not in self.weights:
            return np.arange(self.target.config["vocab_size"])
        return np.arange(len(self.weights["d2t"])) + self.weights["d2t"]

    def seen(self, layer: int, start: int) -> Array:
        """What each row of a block sees of the context and of the block: [Q, start + Q]."""
        config = self.config
        query = start + np.arange(self.size)[:, None]
        key = np.arange(start + self.size)[None]
        types = config.get("layer_types")
        sliding = types is not None and types[layer] == "sliding_attention"
        causal = config.get("is_causal", sliding)
        seen = np.broadcast_to(key >= 0, (self.size, start + self.size))
        if sliding:
            seen = seen & (query - key < config["sliding_window"])
            seen = seen & (key - query < config["sliding_window"])
        return seen & (key <= query) if causal else seen

    def rows(self, entering: list[Array], anchor: int) -> Array:
        """Return the block's rows after the final norm [Q, D]."""
        aux = np.concatenate([entering[tap] for tap in self.taps], axis=-1)
        context = self.norm(aux @ self["fc"].T, "hidden_norm")
        start = len(context)
        block = [anchor] + [self.settings["mask_token_id"]] * (self.size - 1)
        x = self.target["embed_tokens"][block] * self.settings.get("input_embedding_scale", 1.0)
        positions = np.arange(start + self.size)
        for i in range(self.config["num_hidden_layers"]):
            layer, seen = f"layers.{i}", self.seen(i, start)

            def attend(y: Array, layer: str = layer, seen: Array = seen) -> Array:
                both = np.concatenate([context, y])
                q = self.heads(y, layer, "q", positions[start:])
                k = self.heads(both, layer, "k", positions)
                mixed = attention(q, k, self.heads(both, layer, "v", None), seen)
                return mixed @ self[f"{layer}.self_attn.o_proj"].T

            y = self.norm(x, f"{layer}.input_layernorm")
            x = x + self.around(y, f"{layer}.attention_conv", attend)
            y = self.norm(x, f"{layer}.post_attention_layernorm")
            x = x + self.around(y, f"{layer}.mlp_conv", lambda y, layer=layer: self.mlp(y, layer))
        return self.norm(x, "norm")

    def around(self, y: Array, name: str, sublayer: Any) -> Array:
        """Run a sublayer between the two sides of its convolution, if it has one."""
        if not self.has(name):
            return sublayer(y)
        base = self.weights[f"{name}.base_kernel"]  # [side, tap, D]
        taps, group = base.shape[1], self.settings["conv_group_size"]
        delta = (y @ self[f"{name}.kernel_projection"].T).reshape(len(y), 2, taps, -1)

        def convolve(x: Array, side: int) -> Array:
            out = np.zeros_like(x)
            for tap in range(taps):
                shifted = np.concatenate([np.zeros((tap, x.shape[1])), x[: len(x) - tap]])
                out += shifted * (base[side, tap] + np.repeat(delta[:, side, tap], group, axis=-1))
            return out

        return convolve(sublayer(convolve(y, 0)), 1)

    def logits(self, rows: Array) -> Array:
        """Return logits over draft ids [K, V']."""
        own = "d2t" in self.weights
        z = rows @ (self.weights["lm_head.weight"] if own else self.target.head).T
        z = z * self.settings.get("output_multiplier", 1.0)
        cap = self.settings.get("final_logit_softcapping")
        return cap * np.tanh(z / cap) if cap else z

    def after(self, row: Array, previous: int, memory: Array) -> tuple[Array, Array]:
        """Return the bias [V'] of a row's logits after a token, and the memory of the path."""
        head = "markov_head."
        e = self.weights[f"{head}markov_w1.weight"][previous]
        if self.has(f"{head}gate_proj"):
            gate = self.weights[f"{head}gate_proj.weight"] @ np.concatenate([row, e])
            e = sigmoid(gate + self.weights[f"{head}gate_proj.bias"]) * e
        elif self.has(f"{head}joint_proj"):
            joint = self.weights[f"{head}joint_proj.weight"] @ np.concatenate([memory, e, row])
            g, c, o = np.split(joint + self.weights[f"{head}joint_proj.bias"], 3)
            memory = sigmoid(g) * memory + (1 - sigmoid(g)) * np.tanh(c)
            e = np.tanh(o)
        return self.weights[f"{head}markov_w2.weight"] @ e, memory

    def scores(
        self, entering: list[Array], text: list[int]
    ) -> tuple[list[int], Array, Array | None]:
        """Return the drafts, the scores of all target ids [K, V], and the confidence's logits.

        Args:
          entering: rows that enter each layer of the target, of all tokens but the last.
          text: all tokens; the last is the anchor.
        """
        anchor = text[-1]
        rows = self.rows(entering, anchor)[self.first :]
        z, ids = self.logits(rows), self.ids
        scores = np.full((len(rows), self.target.config["vocab_size"]), -np.inf)
        drafts: list[int] = []
        memory = np.zeros(self.settings.get("markov_rank") or 0)
        trust = [] if self.has("confidence_head") else None
        for k, row in enumerate(rows):
            previous = drafts[-1] if drafts else anchor
            if self.pairs == "candidate_selector":
                best = np.argsort(-z[k], kind="stable")[: self.settings["selector_top_k"]]
                before, after = (
                    self.weights[f"{self.pairs}.{name}_codebook"]
                    for name in ("predecessor", "successor")
                )
                weight = self[f"{self.pairs}.hidden_projection"] @ row
                scores[k, best] = z[k, best] + after[best] @ (before[previous] * weight)
            elif self.pairs == "markov_head":
                bias, memory = self.after(row, previous, memory)
                scores[k, ids] = z[k] + bias
            else:
                scores[k, ids] = z[k]
            if trust is not None:
                e = self["markov_head.markov_w1"][previous]
                read = (
                    np.concatenate([row, e])
                    if self.settings["confidence_head_with_markov"]
                    else row
                )
                bias = self.weights["confidence_head.proj.bias"]
                trust.append(float((self["confidence_head.proj"] @ read + bias)[0]))
            drafts.append(int(scores[k].argmax()))
        return drafts, scores, None if trust is None else np.asarray(trust)


@dataclasses.dataclass
class Round:
    """One round, as the golden arrays have it."""

    drafts: list[int]
    accepted: int
    candidates: Array  # [K, n]
    scores: Array  # [K, n]
    trust: Array | None
    margin: float  # least difference between a best score and the next, of drafter and target


def rounds(
    drafter: Any, ids: list[int], count: int, best: int = 8
) -> tuple[list[int], list[Round]]:
    """Return the prompt with all that is emitted, and the rounds."""
    target, found = drafter.target, []
    text = [*ids, int(target.run(ids)[0][-1].argmax())]
    for _ in range(count):
        _, entering = target.run(text[:-1])
        drafts, scores, trust = drafter.scores(entering, text)
        order = np.argsort(-scores, axis=-1, kind="stable")[:, :best]
        top = np.take_along_axis(scores, order, axis=-1)
        logits = target.run(text + drafts)[0][len(text) - 1 :]
        right = logits.argmax(axis=-1)
        accepted = next((k for k, d in enumerate(drafts) if d != right[k]), len(drafts))
        judged = np.sort(logits[: accepted + 1], axis=-1)
        margin = min((top[:, 0] - top[:, 1]).min(), (judged[:, -1] - judged[:, -2]).min())
        found.append(Round(drafts, accepted, order, top, trust, float(margin)))
        text += [*drafts[:accepted], int(right[accepted])]
    return text, found
