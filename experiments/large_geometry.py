"""How much memory does loading take at the width of a 27B model?

    python experiments/large_geometry.py

Writes an artifact of one delta-net and one attention layer at full width, with embedding and head,
as a graph over a sparse data file (all numbers are zero and take no disk), and loads it in a fresh
process. Then inspects all 64 layers, which reads no weights. The graph repeats the layers of a
golden artifact with other sizes. Geometry: that of Qwen3.5-27B as far as known, bfloat16.
"""

from __future__ import annotations

import argparse
import json
import re
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import onnx
from common import table, write_result
from loading import LOAD
from onnx import TensorProto, helper

from convert import inspect_artifact

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden" / "qwen35_paged_fp16_mtp"
WIDTH, MLP, VOCABULARY, CONTEXT = 5120, 17408, 248320, 262144
HEADS, KV_HEADS, HEAD, ROTARY = 24, 4, 256, 64
KEY_HEADS, VALUE_HEADS, LANE = 16, 48, 128
KEYS, VALUES = KEY_HEADS * LANE, VALUE_HEADS * LANE
CHANNELS, CAPACITY = 2 * KEYS + VALUES, 8
DELTA, ATTENTION = 1, 3  # layers of the golden graph, one of each kind

SHAPES = {  # ends of initializers' names
    "embed_tokens.weight": [VOCABULARY, WIDTH],
    "lm_head.MatMul.weight": [WIDTH, VOCABULARY],
    "cos_cache": [CONTEXT, ROTARY // 2],
    "sin_cache": [CONTEXT, ROTARY // 2],
    "linear_attn.qkv_proj.MatMul.weight": [WIDTH, CHANNELS],
    "linear_attn.z_proj.MatMul.weight": [WIDTH, VALUES],
    "linear_attn.b_proj.MatMul.weight": [WIDTH, VALUE_HEADS],
    "linear_attn.a_proj.MatMul.weight": [WIDTH, VALUE_HEADS],
    "conv1d.weight": [CHANNELS, 1, 4],
    "conv1d.bias": [CHANNELS],
    "A_log": [VALUE_HEADS],
    "dt_bias": [VALUE_HEADS],
    "linear_attn.norm.weight": [LANE],
    "out_proj.MatMul.weight": [VALUES, WIDTH],
    "attn.qkv_proj.MatMul.weight": [WIDTH, 2 * (HEADS + KV_HEADS) * HEAD],
    "q_norm.layernorm.weight": [HEAD],
    "k_norm.layernorm.weight": [HEAD],
    "o_proj.MatMul.weight": [HEADS * HEAD, WIDTH],
    "gate_proj.MatMul.weight": [WIDTH, MLP],
    "up_proj.MatMul.weight": [WIDTH, MLP],
    "down_proj.MatMul.weight": [MLP, WIDTH],
    "norm.weight": [WIDTH],
    "layernorm.weight": [WIDTH],
}
CONSTANTS = {  # ends of the names of nodes whose second input is a list of sizes
    "split_qkv/Split": [KEYS, KEYS, VALUES],
    "q_heads/Reshape": [0, KEY_HEADS, LANE],
    "k_heads/Reshape": [0, KEY_HEADS, LANE],
    "v_heads/Reshape": [0, VALUE_HEADS, LANE],
    "gdn_out/Reshape": [0, VALUES],
    "qkv_proj/Split": [2 * HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD],
    "q_gate/Reshape": [0, HEADS, 2 * HEAD],
    "q_gate/Split": [HEAD, HEAD],
    "q_proj/Reshape": [0, HEADS * HEAD],
    "gate/Reshape": [0, HEADS * HEAD],
    "Reshape_1": [0, -1, HEAD],
    "q_norm/Reshape_2": [-1, HEADS * HEAD],
    "k_norm/Reshape_2": [-1, KV_HEADS * HEAD],
}
VALUES_OF = {  # parts of the names of graph inputs and outputs: their last dimensions
    "hidden_states": [WIDTH],
    "logits": [VOCABULARY],
    ".key": [KV_HEADS, HEAD],
    ".value": [KV_HEADS, HEAD],
    ".conv": [CHANNELS, 3],
    ".recurrent": [VALUE_HEADS, LANE, LANE],
    ".conv_value": [CHANNELS],
    ".recurrent_capsule": [CAPACITY * (VALUE_HEADS + KEYS + VALUES)],
}
LAYER = re.compile(r"(layers|past|present|past_key_values|state_update)\.(\d+)")


def longest(table_: dict[str, Any], name: str) -> Any:
    """Return the entry with the longest key that ``name`` ends with."""
    keys = [key for key in table_ if name.endswith(key)]
    return table_[max(keys, key=len)] if keys else None


def kinds(layers: int) -> list[int]:
    """Return the golden layer to copy for each; every fourth attends, or the second of two."""
    return [ATTENTION if i % 4 == 3 or layers == 2 == i + 1 else DELTA for i in range(layers)]


def write_artifact(folder: Path, layers: int) -> None:
    """Write an artifact of ``layers`` layers with a sparse data file."""
    goldens = GOLDEN.parent
    runpy.run_path(str(goldens / "twins.py"))["restore"](goldens)  # the graph is kept as a recipe
    golden = onnx.load(str(GOLDEN / "model.onnx"), load_external_data=False)
    graph = golden.graph
    plan = kinds(layers)

    def expand(items: Any, rename: Any) -> list[Any]:
        """Return items outside the layers once, and those of a layer once for each copy."""
        plain = [x for x in items if not LAYER.search(x.name)]
        out = []
        for i, kind in enumerate(plan):
            source = 0 if i == 0 else kind
            out += [rename(x, source, i) for x in items if owner(x.name) == source]
        first = [x for x in plain if "lm_head" not in x.name]
        last = [x for x in items if owner(x.name) == 4]
        tail = [x for x in plain if "lm_head" in x.name]
        return [*first, *out, *[rename(x, 4, layers) for x in last], *tail]

    def owner(name: str) -> int | None:
        found = LAYER.search(name)
        return int(found[2]) if found else None

    def renamed(text: str, source: int, i: int) -> str:
        return LAYER.sub(lambda m: f"{m[1]}.{int(m[2]) - source + i}", text)

    def node(old: onnx.NodeProto, source: int, i: int) -> onnx.NodeProto:
        new = onnx.NodeProto()
        new.CopyFrom(old)
        new.name = renamed(old.name, source, i)
        for field in ("input", "output"):
            names = [renamed(n, source, i) for n in getattr(old, field)]
            del getattr(new, field)[:]
            getattr(new, field).extend(names)
        sizes = longest(CONSTANTS, new.name)
        if sizes is not None and new.op_type in ("Reshape", "Split"):
            new.input[1] = constant(sizes)
        changes: dict[str, Any] = {}
        if new.op_type == "PagedAttention":
            changes = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, "scale": HEAD**-0.5}
        elif new.op_type == "MRotaryEmbedding":
            heads = HEADS if "q_rotary" in new.name else KV_HEADS
            changes = {"num_heads": heads, "rotary_embedding_dim": ROTARY}
            changes["mrope_section"] = [11, 11, 10]
        kept = [a for a in new.attribute if a.name not in changes]
        del new.attribute[:]
        new.attribute.extend(kept + [helper.make_attribute(k, v) for k, v in changes.items()])
        return new

    constants: dict[tuple[int, ...], onnx.NodeProto] = {}

    def constant(sizes: list[int]) -> str:
        name = f"/sizes/{sizes}"
        tensor = helper.make_tensor(name, TensorProto.INT64, [len(sizes)], sizes)
        made = helper.make_node("Constant", [], [name], name=name, value=tensor)
        constants.setdefault(tuple(sizes), made)
        return name

    def value(old: onnx.ValueInfoProto, source: int, i: int) -> onnx.ValueInfoProto:
        new = onnx.ValueInfoProto()
        new.CopyFrom(old)
        new.name = renamed(old.name, source, i)
        last = longest(VALUES_OF, new.name)
        dims = new.type.tensor_type.shape.dim
        for dim, size in zip(dims[len(dims) - len(last or []) :], last or [], strict=True):
            dim.dim_value = size
        return new

    offset = 0

    def tensor(old: onnx.TensorProto, source: int, i: int) -> onnx.TensorProto:
        nonlocal offset
        shape = longest(SHAPES, old.name)
        size: dict[int, int] = {
            TensorProto.FLOAT: 4,
            TensorProto.FLOAT16: 2,
            TensorProto.BFLOAT16: 2,
        }
        length = size[old.data_type]
        for n in shape:
            length *= n
        new = onnx.TensorProto(
            name=renamed(old.name, source, i),
            data_type=old.data_type,
            dims=shape,
            data_location=TensorProto.EXTERNAL,
        )
        entries = {"location": "model.onnx.data", "offset": offset, "length": length}
        for key, entry in entries.items():
            new.external_data.add(key=key, value=str(entry))
        offset += -(-length // 4096) * 4096
        return new

    def expanded(items: Any, rename: Any) -> list[Any]:
        # Names outside the layers get their new sizes too.
        return [rename(x, 0, 0) if not LAYER.search(x.name) else x for x in expand(items, rename)]

    initializers = expanded(graph.initializer, tensor)
    nodes = expanded(graph.node, node)
    read = {name for n in nodes for name in n.input}
    nodes = [n for n in nodes if n.op_type != "Constant" or n.output[0] in read]
    made = helper.make_graph(
        [*constants.values(), *nodes],
        graph.name,
        expanded(graph.input, value),
        expanded(graph.output, value),
        initializers,
    )
    model = helper.make_model(made, opset_imports=golden.opset_import, ir_version=golden.ir_version)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    with (folder / "model.onnx.data").open("wb") as file:
        file.truncate(offset)

    config = json.loads((GOLDEN / "genai_config.json").read_text())
    section = config["model"]
    section.pop("mtp", None)
    section |= {"vocab_size": VOCABULARY, "context_length": CONTEXT}
    decoder = section["decoder"]
    decoder.pop("shared_initializers", None)
    decoder |= {
        "hidden_size": WIDTH,
        "head_size": HEAD,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": layers,
    }
    for group in decoder["state_groups"]:
        kind = ATTENTION if group["kind"] == "paged_kv" else DELTA
        group["layer_ids"] = [i for i, k in enumerate(plan) if k == kind]
        if "key_head_count" in group.get("state_update", {}):
            group["state_update"]["key_head_count"] = KEY_HEADS
    (folder / "genai_config.json").write_text(json.dumps(config))


def main() -> None:
    """Load two layers, inspect 64."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_artifact(folder, 2)
        command = [sys.executable, "-c", LOAD, name]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        seconds, weights, peak = json.loads(done.stdout.strip().splitlines()[-1])
        rows.append(
            ["load, 2 layers", f"{weights / 1e9:.2f}", f"{seconds:.1f}", f"{peak / weights:.2f}"]
        )
        write_artifact(folder, 64)
        start = time.perf_counter()
        report = inspect_artifact(folder)
        seconds = time.perf_counter() - start
        if not report.loads or report.target is None:
            raise SystemExit("\n".join(map(str, report.problems)))
        weights = report.target.weight_bytes
        rows.append(["inspect, 64 layers", f"{weights / 1e9:.2f}", f"{seconds:.1f}", "none read"])
    body = table(["what", "weights, GB", "seconds", "peak / weights"], rows) + (
        "\n\nbfloat16. Peak: growth of the resident set over a process that has imported "
        "everything; it counts the pages of the mapped file too."
    )
    write_result(__file__, "Memory at the width of a 27B model", body)


if __name__ == "__main__":
    main()
