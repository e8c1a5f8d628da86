"""Drives exported graphs one call at a time: targets, MTP heads and block drafters.

Nothing here is clever: caches are fed back as the graph returns them, a paged cache uses a
shuffled page table so that page order cannot matter by accident, and a state is never changed in
place, so going back to an earlier position is keeping the earlier state. Layers with a bounded
cache keep their whole history in a dense graph, where the mask alone must hide it, and have the
ring of the reference runtime in a paged one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.oracle.graph import Graph, Shape
from tests.oracle.ops import Array

Outputs = dict[str, Array]

ROW_OUTPUTS = ("logits", "aux_hidden_states", "hidden_states", "hidden_states_out")
METADATA = "attention_metadata"


def read_config(folder: Path | str) -> dict[str, Any]:
    """Returns the parsed genai_config.json of an export."""
    return json.loads((Path(folder) / "genai_config.json").read_text())


def resolve(shape: Shape, sizes: dict[str, int]) -> tuple[int, ...]:
    """Returns `shape` with named dimensions replaced by their sizes."""
    return tuple(d if isinstance(d, int) else sizes[d] for d in shape)


def as_past(name: str) -> str:
    """The input that takes up an output. Example: present.3.key -> past_key_values.3.key."""
    is_cache = name.endswith((".key", ".value"))
    return ("past_key_values." if is_cache else "past.") + name.removeprefix("present.")


def present_as_past(results: Outputs) -> Outputs:
    """Returns the state outputs of a run under the names of the next run's inputs."""
    return {as_past(k): v for k, v in results.items() if k.startswith("present.")}


@dataclass(frozen=True)
class State:
    """One request between two steps.

    Attributes:
        position: how many tokens are in the state.
        tensors: cache and recurrent inputs of the next step by name.
    """

    position: int
    tensors: Outputs


class Session:
    """A causal graph with caches, dense or paged, run for a single request."""

    def __init__(self, folder: Path | str, file: str) -> None:
        self.config = read_config(folder)
        self.graph = Graph(Path(folder) / file)
        self.paged = "block_table" in self.graph.inputs
        decoder = self.config["model"]["decoder"]
        self.sizes = {
            "batch_size": 1,
            "past_sequence_length": 0,
            "past_sliding_length": 0,
            "kv_cache_dim": decoder["head_size"],
        }
        if self.paged:
            page = self.config["engine"]["dynamic_batching"]["block_size"]
            pages = max(8, -(-self.config["model"]["context_length"] // page) + 1)
            self.sizes |= {"num_blocks": pages, "block_size": page}
            self.table = np.random.default_rng(5).permutation(pages).astype(np.int32)[None]
        self.chunk = self.config.get("search", {}).get("chunk_size", 0)
        self.windowed = "block_table_windowed" in self.graph.inputs
        if self.windowed:
            # The smallest ring that holds a chunk and the keys that its first row sees, and the
            # table of the true positions, which names its pages over and over.
            window = decoder["sliding_window"]["window_size"]
            ring = -(-(self.chunk + window - 1) // self.sizes["block_size"])
            self.sizes["num_blocks_windowed"] = ring
            self.ring = np.arange(self.table.shape[1], dtype=np.int32)[None, ::-1] % ring

    def start(self) -> State:
        """Returns the state before the first token: empty or zero tensors."""
        names = [n for n in self.graph.inputs if n.startswith(("past.", "past_key_values."))]
        return State(
            0,
            {n: np.zeros(resolve(self.graph.inputs[n], self.sizes), np.float32) for n in names},
        )

    def run(
        self, state: State, ids: Sequence[int], capture: int, extra: Outputs
    ) -> tuple[Outputs, State]:
        """Runs `ids` after `state`; see `Target.step`. `extra` holds further inputs [n, ...]."""
        count = len(ids)
        if (
            self.windowed and count > self.chunk
        ):  # more rows would overwrite what the first one sees
            first, middle = self.run(state, ids[: self.chunk], capture, extra)
            rest, end = self.run(middle, ids[self.chunk :], capture, extra)
            return {k: np.concatenate([first[k], rest[k]]) for k in rest}, end
        rows = {"input_ids": np.asarray(ids, np.int64), **extra}
        feeds = dict(state.tensors)
        if self.paged:
            feeds |= rows | self._paged_inputs(state.position, count, capture)
        else:
            feeds |= {k: v[None] for k, v in rows.items()}
            feeds["attention_mask"] = np.ones((1, state.position + count), np.int64)
        feeds["position_ids"] = self._positions(state.position, count)
        # One superset of inputs serves all variants; each graph takes those it declares.
        results = self.graph.run({k: v for k, v in feeds.items() if k in self.graph.inputs})
        outputs = {k: v if self.paged else v[0] for k, v in results.items() if k in ROW_OUTPUTS}
        outputs |= {k: v[0] for k, v in results.items() if k.startswith("state_update.")}
        return outputs, State(state.position + count, present_as_past(results))

    def _positions(self, position: int, count: int) -> Array:
        """position_ids of `count` tokens, [3, n] packed or [3, 1, n]: text is equal in all 3."""
        line = np.arange(position, position + count, dtype=np.int64)
        return np.broadcast_to(line, (3, count) if self.paged else (3, 1, count))

    def _paged_inputs(self, position: int, count: int, capture: int) -> Outputs:
        """The int32 bookkeeping inputs of a packed batch of one request."""
        values = {
            "cumulative_sequence_lengths": [0, count],
            "past_sequence_lengths": [position],
            METADATA: [count, position + count, 1],
            "logits_indices": range(count),
            "state_update_capture_count": [capture],
            "state_update_active": [capture > 0],
        }
        inputs = {k: np.array(v, np.int32) for k, v in values.items()}
        inputs |= {"block_table": self.table}
        return inputs | ({"block_table_windowed": self.ring} if self.windowed else {})


class Target(Session):
    """The model whose text counts."""

    def __init__(self, folder: Path | str, file: str = "model.onnx") -> None:
        super().__init__(folder, file)
        names = [n.split(".") for n in self.graph.inputs if n.endswith(".recurrent")]
        self.linear_layers = sorted(int(part[1]) for part in names)
        self.captures = "state_update_capture_count" in self.graph.inputs

    def step(self, state: State, ids: Sequence[int], capture: int = 0) -> tuple[Outputs, State]:
        """Runs n tokens.

        Args:
            state: what `start` or an earlier step returned; it stays valid.
            ids: [n] token ids.
            capture: how many rows of the delta nets to record; 0 turns the recording off.

        Returns:
            Rows by output name, without a batch axis: logits [n, V] and, where the graph has
            them, aux_hidden_states [n, A], hidden_states [n, D], state_update.*; the next state.
        """
        return self.run(state, ids, capture, {})

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """Returns `count` greedy tokens after the prompt; stop tokens are ignored."""
        outputs, state = self.step(self.start(), prompt)
        tokens = [int(outputs["logits"][-1].argmax())]
        while len(tokens) < count:
            outputs, state = self.step(state, tokens[-1:])
            tokens.append(int(outputs["logits"][-1].argmax()))
        return tokens

    def recurrent(self, state: State) -> Array:
        """[L, Hv, Dk, Dv] delta-net states; paged graphs store the last two axes swapped."""
        stacked = np.stack([state.tensors[f"past.{i}.recurrent"][0] for i in self.linear_layers])
        return stacked.swapaxes(-1, -2) if self.paged else stacked

    def convolution(self, state: State) -> Array:
        """[L, C, W - 1] convolution states."""
        return np.stack([state.tensors[f"past.{i}.conv"][0] for i in self.linear_layers])

    def capsules(self, outputs: Outputs) -> Capsule:
        """The recorded rows of all linear layers, with a leading layer axis."""
        state_shape = resolve(
            self.graph.inputs[f"past.{self.linear_layers[0]}.recurrent"], self.sizes
        )
        heads, value_size, key_size = state_shape[1:]  # paged order, and only paged graphs capture
        parts = [
            split_capsule(
                outputs[f"state_update.{i}.recurrent_capsule"],
                outputs[f"state_update.{i}.conv_value"],
                heads=heads,
                key_size=key_size,
                value_size=value_size,
            )
            for i in self.linear_layers
        ]
        return Capsule(
            decay=np.stack([p.decay for p in parts]),
            key=np.stack([p.key for p in parts]),
            delta=np.stack([p.delta for p in parts]),
            conv_value=np.stack([p.conv_value for p in parts]),
        )


@dataclass(frozen=True)
class Capsule:
    """What a linear layer needs to be moved forward by some rows without running it again.

    S_t = decay_t * S_(t-1) + key_t (outer) delta_t; rows after the captured ones are zero.

    Attributes:
        decay: [N, Hv].
        key: [N, Hk, Dk].
        delta: [N, Hv, Dv].
        conv_value: [N, C], rows before the convolution.
    """

    decay: Array
    key: Array
    delta: Array
    conv_value: Array


def split_capsule(
    flat: Array, conv_value: Array, *, heads: int, key_size: int, value_size: int
) -> Capsule:
    """Splits one layer's [N*(Hv + Hk*Dk + Hv*Dv)] capsule into its planes; N from conv_value."""
    capacity = conv_value.shape[0]
    per_row = flat.shape[0] // capacity
    key_heads = (per_row - heads - heads * value_size) // key_size
    first, second = capacity * heads, capacity * (heads + key_heads * key_size)
    return Capsule(
        decay=flat[:first].reshape(capacity, heads),
        key=flat[first:second].reshape(capacity, key_heads, key_size),
        delta=flat[second:].reshape(capacity, heads, value_size),
        conv_value=conv_value,
    )


class MtpHead(Session):
    """A multi-token prediction head: one attention layer over (next token, hidden row) pairs."""

    def __init__(self, folder: Path | str, file: str = "mtp.onnx") -> None:
        super().__init__(folder, file)

    def step(self, state: State, ids: Sequence[int], hidden: Array) -> tuple[Outputs, State]:
        """Runs n pairs.

        Args:
            state: what `start` or an earlier step returned.
            ids: [n] the tokens that follow each hidden row.
            hidden: [n, D] rows of the target's hidden_states, or hidden_states_out of a link.

        Returns:
            logits [n, V] and hidden_states_out [n, D]; the next state.
        """
        return self.run(state, ids, 0, {"hidden_states": np.asarray(hidden, np.float32)})

    def forget(self, state: State, position: int) -> State:
        """Returns the state cut back to its first `position` pairs.

        Rows of a paged cache stay where they are: later writes replace them, and nothing at or
        after the position is read before that.
        """
        if self.paged:
            return State(position, state.tensors)
        return State(position, {k: v[:, :, :position] for k, v in state.tensors.items()})


class Drafter:
    """A DFlash2 or DSpark block drafter over paged caches, for a fixed number of requests.

    Unlike a `Session` it advances in place: a call commits its context rows.
    """

    def __init__(self, folder: Path | str, kind: str, requests: int = 1) -> None:
        section = read_config(folder)["model"][kind]
        self.graph = Graph(Path(folder) / section["filename"])
        self.requests = requests
        self.block: int = section["block_size"]
        self.drafts: int = section["num_draft_tokens"]
        self.mask_token: int = section["mask_token_id"]
        self.positions = np.zeros(requests, np.int64)
        caches = {k: v for k, v in self.graph.inputs.items() if k.startswith("past_key_values.")}
        page = int(next(iter(caches.values()))[1])
        pages = max(2, -(-640 // page))
        shuffled = np.random.default_rng(6).permutation(requests * pages).astype(np.int32)
        self.table = shuffled.reshape(requests, pages)
        sizes = {"num_blocks": requests * pages}
        self.caches = {k: np.zeros(resolve(v, sizes), np.float32) for k, v in caches.items()}

    def call(self, rows: Sequence[Array], anchors: Sequence[int]) -> tuple[Array, Array]:
        """Commits context rows and proposes a block after them.

        Args:
            rows: for each request [n, A] new aux rows, n may be 0.
            anchors: [B] the last token of each request, which stands at the block's first row.

        Returns:
            candidate ids int32 [B, drafts, k] and scores [B, drafts, k, k].
        """
        counts = np.array([len(r) for r in rows])
        ids = np.full((self.requests, self.block), self.mask_token, np.int64)
        ids[:, 0] = anchors
        longest = (int(counts.max()), int((self.positions + counts).max()))
        feeds = {
            "aux_hidden_states": np.concatenate(rows).astype(np.float32),
            "input_ids": ids.reshape(-1),
            "past_sequence_lengths": self.positions.astype(np.int32),
            "block_table": self.table,
            METADATA: np.array([longest[0] + self.block, longest[1] + self.block, 1], np.int32),
            **stream_maps(counts, self.block),
            **self.caches,
        }
        results = self.graph.run({k: v for k, v in feeds.items() if k in self.graph.inputs})
        self.caches = present_as_past(results)
        self.positions = self.positions + counts
        return results["draft_candidate_ids"].astype(np.int32), results["draft_scores"]


def stream_maps(counts: Array, block: int) -> Outputs:
    """Index inputs of a drafter call.

    The stream of a request is its context rows, then its block rows. The graph computes rows in
    the order all blocks, then all contexts, and the maps bring them into stream order.

    Example, counts [1, 2] and a block of 2 (c context row, b block row):
        computed order               b0 b0 b1 b1 c0 c1 c1
        qkv_row_map                  4 0 1 | 5 6 2 3
        q_row_map                    0 0 1 | 0 0 2 3   context rows have no query: any row does
        block_row_index              1 2 | 5 6
        cumulative_sequence_lengths  0 3 7
    """
    requests = len(counts)
    qkv, q, block_rows, cumulative = [], [], [], [0]
    context = requests * block
    for b, count in enumerate(counts.tolist()):
        own = list(range(b * block, (b + 1) * block))
        qkv += [*range(context, context + count), *own]
        q += [0] * count + own
        block_rows += range(cumulative[-1] + count, cumulative[-1] + count + block)
        cumulative.append(cumulative[-1] + count + block)
        context += count
    maps = {
        "qkv_row_map": qkv,
        "q_row_map": q,
        "block_row_index": block_rows,
        "cumulative_sequence_lengths": cumulative,
    }
    return {k: np.array(v, np.int32) for k, v in maps.items()}


def greedy_walk(candidates: Array, scores: Array) -> list[int]:
    """Follows the best candidate of each step, ties to the lowest index.

    Args:
        candidates: [drafts, k] token ids of one request.
        scores: [drafts, k, k], by candidate of the step before and own candidate; step 0 uses
            row 0, as all its rows stand for the anchor.

    Returns:
        [drafts] token ids.
    """
    previous, tokens = 0, []
    for ids, table in zip(candidates, scores, strict=True):
        previous = int(table[previous].argmax())
        tokens.append(int(ids[previous]))
    return tokens
