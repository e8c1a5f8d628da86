"""Windows in every form the builder can write them, against the interpreter of the same graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest

import jaxdraft
from jaxdraft.config import TargetConfig
from jaxdraft.target import DecoderTarget
from tests.convert.helpers import Config, copied, edit_config, edit_graph, set_attribute
from tests.oracle import Target

DENSE, PAGED = "sliding_qwen3_fp32_cpu", "sliding_qwen3_paged_fp16"
LENGTH, ROWS = 90, 6

forward = jax.jit(lambda target, *args: target.forward(*args))
commit = jax.jit(lambda target, *args: target.commit(*args))


def attentions(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    return [n for n in graph.node if n.op_type in ("GroupQueryAttention", "PagedAttention")]


def uniform(tmp_path: Path) -> Path:
    """All layers have the window, in bounded buffers."""

    def change(graph: onnx.GraphProto) -> None:
        set_attribute(attentions(graph)[1], "local_window_size", 12)
        set_attribute(attentions(graph)[1], "sliding_window_cache", 1)

    def describe(config: Config) -> None:
        config["model"]["decoder"]["sliding_window"]["layers"] = [0, 1, 2]

    return edit_config(edit_graph(copied(DENSE, tmp_path), change), describe)


def paged_uniform(tmp_path: Path) -> Path:
    """All layers have the window: a paged export has no ring then, and says nothing of windows."""

    def change(graph: onnx.GraphProto) -> None:
        for node in attentions(graph):
            set_attribute(node, "local_window_size", 12)
            node.input[7] = "block_table"
        kept = [value for value in graph.input if value.name != "block_table_windowed"]
        del graph.input[:]
        graph.input.extend(kept)

    def describe(config: Config) -> None:
        decoder = config["model"]["decoder"]
        del decoder["sliding_window"], decoder["inputs"]["block_table_windowed"]

    folder = edit_config(edit_graph(copied(PAGED, tmp_path), change), describe)
    return edit_graph(folder, lambda graph: rename(graph, "num_blocks_windowed", "num_blocks"))


def rename(graph: onnx.GraphProto, name: str, new: str) -> None:
    """Dimensions called ``name`` become ``new``."""
    for value in (*graph.input, *graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == name:
                dim.dim_param = new


def without_rotation(tmp_path: Path) -> Path:
    """The layers with a window do not rotate, the other one does."""

    def change(graph: onnx.GraphProto) -> None:
        for node in (attentions(graph)[0], attentions(graph)[2]):
            set_attribute(node, "do_rotary", 0)
            node.input[7] = node.input[8] = ""

    return edit_graph(copied(DENSE, tmp_path), change)


def unbounded(tmp_path: Path) -> Path:
    """Buffers of full length, and the window in the mask alone."""

    def change(graph: onnx.GraphProto) -> None:
        for node in attentions(graph):
            set_attribute(node, "sliding_window_cache", 0)

    def describe(config: Config) -> None:
        del config["model"]["decoder"]["sliding_window"]

    return edit_config(edit_graph(copied(DENSE, tmp_path), change), describe)


def rotations(config: TargetConfig) -> tuple[int, ...]:
    return tuple(shape.rotary_dim for shape in config.softmax)


@pytest.mark.parametrize(
    ("make", "layers", "rotated"),
    [
        (uniform, "sss", (16,)),
        (paged_uniform, "sss", (16,)),
        (without_rotation, "sas", (16, 0)),
        (unbounded, "sas", (16, 16)),
    ],
)
def test_windows_in_every_form(
    tmp_path: Path, make: Callable[[Path], Path], layers: str, rotated: tuple[int, ...]
) -> None:
    """Ninety tokens, six at a time over rings of 24 slots: logits as in one pass of the graph."""
    folder = make(tmp_path)
    tokens = np.random.default_rng(0).integers(0, 64, LENGTH)
    oracle = Target(folder)
    expected = oracle.step(oracle.start(), tokens.tolist())[0]["logits"]
    target = jaxdraft.load(folder, dtype="float32").target
    assert isinstance(target, DecoderTarget)
    assert "".join(kind[0] for kind in target.config.layers) == layers
    assert rotations(target.config) == rotated
    state = target.init_pool(1, pages=24, page_size=4, columns=24, rows=ROWS)
    assert state.sliding is not None and state.sliding.slots == 24
    state, granted = target.grow(state, jnp.asarray([96], jnp.int32))
    assert granted.all()
    count = jnp.asarray([ROWS], jnp.int32)
    found = []
    for start in range(0, LENGTH, ROWS):
        out = forward(target, jnp.asarray(tokens[None, start : start + ROWS]), count, state)
        state = commit(target, out.state, count)
        found.append(np.asarray(out.logits[0]))
    np.testing.assert_allclose(np.concatenate(found), expected, atol=2e-4, rtol=0)
