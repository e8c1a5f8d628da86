"""What each device of a mesh holds of models of 27B and 70B, and what a round sends between them.

Computed, not measured: nothing is allocated. Bytes that are held come from :func:`jaxdraft.plan`'s
arithmetic. What is sent is read from the compiled round of a few layers at full width, for CPU
devices: XLA divides a program before it looks at the kind of device. All layers of a kind send the
same, so the rest is added. Writes ``mesh.md``; run it alone, it forces eight devices.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
)

import collections
import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
from common import table, write_result
from gpu_models import config_27b, greedy_rules, model_27b
from speed_table import target_27b

import jaxdraft
from jaxdraft import rounds
from jaxdraft.base import mesh_of
from jaxdraft.config import AttentionConfig, TargetConfig
from jaxdraft.meshes import traced_for
from jaxdraft.model import Model
from jaxdraft.sharding.placement import Placement

BANDWIDTH = 450e9
"""Bytes per second that a device sends to the others: NVLink of an H200, one direction."""

MEMORY = 4.8e12 * 0.85
"""Bytes per second that a device reads: an H200's, and the share that a copy reaches."""

POSITIONS = 8192

DTYPE = jnp.bfloat16


def config_70b(layers: int, context: int) -> TargetConfig:
    """Return the sizes of Llama 3 70B; drafts need taps, which it has at five layers."""
    taps = tuple(sorted({layer * layers // 80 for layer in (2, 20, 39, 58, 77)}))
    return dataclasses.replace(
        target_27b(),
        vocab_size=128256,
        width=8192,
        layers=("attention",) * layers,
        attention=AttentionConfig(
            heads=64, kv_heads=8, head_dim=128, rotary_dim=128, scale=128**-0.5
        ),
        delta_net=None,
        mlp=dataclasses.replace(target_27b().mlp, hidden=28672),
        taps=taps,
        context_length=context,
    )


MODELS = {"27B, hybrid": (config_27b, 64, 4), "70B, dense": (config_70b, 80, 5)}
"""Configuration by layers and context, layers, and layers of the smallest program."""


def shapes(config: TargetConfig) -> Model:
    """Return shapes of a target and a DFlash2 drafter."""
    target, drafter = model_27b(config, "dflash2", DTYPE)
    return Model.of(target, drafter)


def sent(model: Model, placement: Placement) -> tuple[int, int, float]:
    """Return the all-reduces, the other collectives, and the bytes that a device sends per round.

    In a ring, an all-reduce of S bytes over n devices sends 2 (n - 1) / n * S from each of them,
    and an all-gather of S bytes (n - 1) / n * S.
    """
    rules = greedy_rules()

    def start(target: Any, drafter: Any, rules: Any) -> Any:
        tokens = jnp.zeros((1, 16), jnp.int32)
        with traced_for(mesh_of(target)):
            return rounds.prefill(
                target, drafter, tokens, jnp.full((1,), 16, jnp.int32), rules,
                capacity=POSITIONS, chunk=16,
            )[0]  # fmt: skip

    first = jax.jit(start).lower(model.target, model.drafter, rules).compile()
    state = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        jax.eval_shape(start, model.target, model.drafter, rules),
        first.output_shardings,
    )

    def run(target: Any, drafter: Any, state: Any, rules: Any) -> Any:
        with traced_for(mesh_of(target)):
            return rounds.round(target, drafter, state, rules, drafted=True)

    compiled = jax.jit(run).lower(model.target, model.drafter, state, rules).compile()
    reduces = others = 0
    total = 0.0
    n = placement.parts
    for kind, size in collectives(compiled.as_text() or ""):
        share = (n - 1) / n * size
        if kind == "all-reduce":
            reduces, total = reduces + 1, total + 2 * share
        else:
            others, total = others + 1, total + share
    return reduces, others, total


SIZES = {"pred": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4}


def collectives(text: str) -> list[tuple[str, int]]:
    """Return the collectives of a program, and the bytes of their results."""
    found = []
    for line in text.splitlines():
        match = re.search(
            r"= (.+?) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)"
            r"(?:-start)?\(",
            line,
        )
        if match:
            size = 0
            for kind, dims in re.findall(r"(\w+)\[([\d,]*)\]", match[1]):
                numbers = [int(n) for n in dims.split(",") if n]
                size += SIZES[kind] * functools.reduce(lambda a, b: a * b, numbers, 1)
            found.append((match[2], size))
    return found


def held(config: TargetConfig, placement: dict[str, int]) -> dict[str, int]:
    """Return the bytes of weights and of one text of ``POSITIONS`` on each device."""
    found = jaxdraft.plan(
        shapes(config), pages=POSITIONS // 256, max_batch=1, context=POSITIONS, mesh=placement
    )
    terms: dict[str, int] = collections.Counter()
    for term in found.terms:
        terms["weights" if term.name == "weights" else "caches"] += term.bytes
    return dict(terms)


def rows() -> list[list[object]]:
    """Return the rows of the table."""
    lines: list[list[object]] = []
    for name, (make, layers, few) in MODELS.items():
        for parts in (1, 2, 4, 8):
            mine = held(make(layers, 16384), {"model": parts})
            each = [f"{mine[key] / 1e9:.2f}" for key in ("weights", "caches")]
            read = (mine["weights"] + mine["caches"]) / MEMORY * 1e3
            if parts == 1:
                lines.append([name, 1, *each, 0, 0, 0, f"{read:.1f}", f"{read:.1f}"])
                continue
            placement = Placement.like({"model": parts})
            small, twice = (
                sent(jaxdraft.shard(shapes(make(n, 1024)), placement), placement)
                for n in (few, 2 * few)
            )
            more = layers // few - 1  # further groups of layers, each sending the same
            pairs = zip(small, twice, strict=True)
            reduces, others, total = (a + more * (b - a) for a, b in pairs)
            send = total / BANDWIDTH * 1e3
            moved = [f"{reduces} + {others}", f"{total / 1e6:.2f}", f"{send:.3f}"]
            lines.append([name, parts, *each, *moved, f"{read:.1f}", f"{read + send:.1f}"])
            print(*lines[-1], flush=True)
            jax.clear_caches()
    return lines


HEAD = (
    "model", "devices", "GB of weights", "GB of caches", "all-reduces + others",
    "MB sent by each", "ms to send", "ms to read", "ms",
)  # fmt: skip

INTRODUCTION = """\
Nothing here was measured. Held bytes are those of `jaxdraft.plan`, with one text of 8,192
positions. Sent bytes are read from the compiled DFlash2 round (one row, K = 7, bfloat16). All
devices lie along the axis "model".

Milliseconds per round: sent bytes at 450 GB/s, held bytes at 0.85 of 4.8 TB/s, and their sum.
Collectives also wait for each other, some microseconds each, which is not in the table. A round
does not read all that is held: of the embedding, one row per token.

"""


def main() -> None:
    """Write the table."""
    title = "Models on a mesh: what devices hold and send (computed)"
    write_result("mesh.py", title, INTRODUCTION + table(HEAD, rows()))


if __name__ == "__main__":
    main()
