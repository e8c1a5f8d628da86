"""What needs eight devices; ``tests/sharding/test_mesh.py`` runs its sections in processes.

Every section compares a model on a mesh with the same model on one device. Greedy tokens are
compared exactly: their margins are far above the differences of sums in another order.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxdraft
from jaxdraft import Sampling, ShardingError, generate
from jaxdraft.config import AttentionConfig, DeltaNetConfig
from jaxdraft.generate import _prepare, _round_program, _start_program
from jaxdraft.plan import PAGE_SIZE
from jaxdraft.requests import Options
from jaxdraft.testing import assert_lossless, tiny_model
from jaxdraft.train import (
    Continuations,
    DraftLoss,
    labels,
    language_loss,
    make_step,
    optimizer,
    start,
    trained,
)
from tests.examples import LONG, first
from tests.paths import TESTS

IDS = np.arange(1, 33, dtype=np.int32).reshape(8, 4) % 30
WARM = Sampling(temperature=0.8, top_k=12, top_p=0.9, min_p=0.02, repetition_penalty=1.1)
SHAPES = [(2, 4), (8, 1), (4, 2), (1, 8)]
MIXED = dict(
    vocab_size=1024,
    layers=("delta_net", "attention", "delta_net", "attention"),
    attention=AttentionConfig(
        heads=8, kv_heads=4, head_dim=8, rotary_dim=8, gated=True, qk_norm=True, scale=0.25
    ),
    delta_net=DeltaNetConfig(key_heads=4, value_heads=8, key_dim=8, value_dim=4, conv_width=4),
)
"""Changes of a tiny target: everything divides over four devices."""


def mesh_of(rows: int, parts: int) -> Mesh:
    return jax.make_mesh((rows, parts), ("data", "model"), devices=jax.devices()[: rows * parts])


def assert_close(found: Any, expected: Any, tolerance: float = 1e-4) -> None:
    np.testing.assert_allclose(
        np.asarray(found), np.asarray(expected), rtol=tolerance, atol=tolerance
    )


def results(model: Any, *, every: bool) -> list[Any]:
    """Return tokens by every way there is, or greedy ones alone."""
    greedy = generate(model, IDS, max_new_tokens=8, logprobs=2)
    found: list[Any] = [greedy.ids()]
    if every:
        warm = generate(model, IDS[:4], n=2, max_new_tokens=8, sampling=WARM, key=3)
        events = jaxdraft.stream(model, IDS[:3], max_new_tokens=4, logprobs=1)
        stops = sorted({row[2] for row in greedy.ids()})[:3]
        stopped = generate(model, IDS, max_new_tokens=8, stop_ids=stops)
        found += [warm.ids(), [event.tokens for event in events], stopped.ids()]
    return found


def decode() -> None:
    """Compare tokens, scores and log-probabilities on several meshes."""
    model = tiny_model("dflash2", **MIXED)
    expected = results(model, every=True)
    logits = jaxdraft.score(model, IDS).logits
    chances = generate(model, IDS, max_new_tokens=8, logprobs=2).logprobs
    for shape in first(1, SHAPES):
        there = jaxdraft.shard(model, mesh_of(*shape))
        assert results(there, every=True) == expected, shape
        assert_close(jaxdraft.score(there, IDS).logits, logits)
        found = generate(there, IDS, max_new_tokens=8, logprobs=2).logprobs
        assert found is not None and chances is not None
        assert_close(found.top, chances.top)
        back = jaxdraft.unshard(there)
        assert jax.tree.structure(back) == jax.tree.structure(model)
        jax.tree.map(np.testing.assert_array_equal, back, model)


def drafters() -> None:
    """Compare the tokens of every kind of drafter, with key/value heads that must be copied."""
    for kind in first(1, ("dspark", "mtp", "draft_model", "eagle3", "dflash")):
        model = tiny_model(kind)
        expected = results(model, every=LONG)
        for shape in first(1, SHAPES):
            there = jaxdraft.shard(model, mesh_of(*shape))
            assert results(there, every=LONG) == expected, (kind, shape)
        jax.clear_caches()  # a process can hold a limited number of programs
    if LONG:
        ragged = [[1, 2, 3, 1, 2], [4, 5]]
        lookup = jaxdraft.HistoryDrafter.of([[1, 2, 3, 4, 5, 6], *results(there, every=False)[0]])
        both = jaxdraft.FallbackDrafter(lookup, jaxdraft.NgramDrafter())
        assert_lossless(there, both, ragged, max_new_tokens=8)


def placed() -> None:
    """Run inside the caller's own ``jit`` and ``shard_map``."""
    model = tiny_model("dflash2", **MIXED)
    expected = generate(model, IDS, max_new_tokens=4).ids()
    there = jaxdraft.shard(model, mesh_of(2, 4))
    mesh = there.target.placement.mesh

    def run(m: Any, ids: jax.Array) -> jax.Array:
        return generate(m, ids, max_new_tokens=4).tokens

    rows = jax.device_put(jnp.asarray(IDS), NamedSharding(mesh, PartitionSpec("data")))
    assert jax.jit(run)(there, rows).tolist() == expected
    assert generate(there, rows, max_new_tokens=4).ids() == expected
    mapped = jax.shard_map(
        run, mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec("data")),
        out_specs=PartitionSpec("data"), axis_names={"data"}, check_vma=False,
    )  # fmt: skip
    assert jax.jit(mapped)(there, rows).tolist() == expected


def loading() -> None:
    """Load onto a mesh what :func:`jaxdraft.shard` makes, of several formats."""
    data = TESTS / "hub" / "data"
    formats = [
        ("gpt_oss_mxfp4", None),  # packed experts, sinks, windows
        ("qwen3_fp8_ragged", True),  # scales of several rows
        ("qwen25_gptq_act_order", True),
        ("olmo2", None),  # norms over all heads
        ("qwen3_moe_mixed", None),
        ("gemma3_multimodal", None),
        ("llama_w4a16_asym", True),
        ("phi4_mini", None),
    ]
    cases = [(data / name, packed) for name, packed in first(1, formats)]
    for folder, packed in [(jaxdraft.EMBEDDED, None), *cases]:
        how: dict[str, Any] = dict(packed=packed, dtype=jnp.float32)
        model = jaxdraft.load(folder, **how)
        expected = generate(model, IDS, max_new_tokens=6).ids()
        for shape in first(1, [(2, 4), (1, 8), (2, 2)]):
            mesh = mesh_of(*shape)
            found, moved = jaxdraft.load(folder, mesh=mesh, **how), jaxdraft.shard(model, mesh)
            for part in ("target", "drafter"):
                one, two = getattr(found, part), getattr(moved, part)
                assert jax.tree.structure(one) == jax.tree.structure(two), folder
                for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
                    if isinstance(a, jax.Array):
                        assert a.sharding == b.sharding, folder
                        np.testing.assert_array_equal(a, b)
            assert generate(found, IDS, max_new_tokens=6).ids() == expected, folder
        jax.clear_caches()


def bytes_on(device: Any, tree: Any) -> int:
    """Return the bytes of the arrays of a pytree on a device; shared arrays count once."""
    found = {
        id(x): sum(part.data.nbytes for part in x.addressable_shards if part.device == device)
        for x in jax.tree.leaves(tree)
        if isinstance(x, jax.Array)
    }
    return sum(found.values())


def engine() -> None:
    """Compare an engine's tokens, and its bytes on a device with the plan."""
    model = tiny_model("dflash2", **MIXED)
    prompts = IDS.tolist()

    def tokens(model: Any) -> list[Any]:
        with jaxdraft.Engine(model, max_batch=4, page_size=16, context=64) as engine:
            greedy = [r.tokens for r in engine.map(prompts, max_new_tokens=8)]
            warm = []
            if LONG:
                warm = engine.map(prompts[:4], max_new_tokens=6, sampling=WARM, key=5)
            asked = [engine.submit(ids, max_new_tokens=4) for ids in prompts]
            events: dict[int, list[int]] = collections.defaultdict(list)
            for event in engine.run():
                events[event.request.number] += event.tokens
            assert [events[r.number] for r in asked] == [r.tokens for r in asked]
            engine.check()
            found = engine.summary()
            return [greedy, [r.tokens for r in warm], found.emitted, found.prompts]

    def answers(model: Any) -> str:
        with tempfile.TemporaryDirectory() as folder:
            asked, out = Path(folder, "prompts.jsonl"), Path(folder, "answers.jsonl")
            asked.write_text("".join(json.dumps({"prompt": ids}) + "\n" for ids in prompts))
            with jaxdraft.Engine(model, max_batch=4, page_size=16, context=64) as engine:
                jaxdraft.map_file(engine, asked, out, max_new_tokens=8)
            return out.read_text()

    assert answers(jaxdraft.shard(model, mesh_of(2, 2))) == answers(model)
    expected = tokens(model)
    for shape in first(1, [(2, 2), (1, 4), (4, 1)]):
        assert tokens(jaxdraft.shard(model, mesh_of(*shape))) == expected, shape
    sizes: dict[str, Any] = dict(max_batch=4, pages=8, page_size=PAGE_SIZE, context=256)
    there = jaxdraft.shard(model, mesh_of(2, 4))
    plans = [
        jaxdraft.plan(there, **sizes),
        jaxdraft.plan(model, mesh={"data": 2, "model": 4}, **sizes),
    ]
    assert plans[0] == plans[1]
    terms = {term.name: term.bytes for term in plans[0].terms}
    with jaxdraft.Engine(there, **sizes) as running:
        runner = running._engines[0].runner  # type: ignore[attr-defined]
        device = runner.target.placement.mesh.devices.flat[0]
        assert bytes_on(device, (runner.target, runner.drafter)) == terms["weights"]
        caches = [*runner.state.target.pool.keys, *runner.state.target.pool.values]
        assert bytes_on(device, caches) == terms["target pages"]
        assert bytes_on(device, runner.state.target.recurrent) == terms["recurrent state"]
        ring = runner.state.drafter.ring
        assert bytes_on(device, (ring.keys, ring.values)) == terms["drafter rings"]


def draft_loss(model: Any) -> DraftLoss:
    drafter = model.drafter
    return DraftLoss(embedding=drafter.embedding, head=drafter.head)


def random_continuations(model: Any) -> Continuations:
    """Return eight random sequences with random hidden states."""
    rng = np.random.default_rng(1)
    config = model.drafter.config

    def normal(width: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=(8, 17, width)), jnp.float32)

    return Continuations(
        tokens=jnp.asarray(rng.integers(0, config.vocab_size, (8, 17)), jnp.int32),
        aux=normal(config.aux_width),
        hidden=normal(config.width),
        anchors=jnp.asarray(rng.integers(4, 10, (8, 2)), jnp.int32),
        greedy=jnp.asarray([True] * 4 + [False] * 4),
    )


def training() -> None:
    """Compare trained parameters, of a target and of a drafter."""
    model = tiny_model("dflash2", **MIXED)
    text = jnp.asarray(np.random.default_rng(0).integers(0, 1024, (8, 17)), jnp.int32)

    def train(frozen: Any, loss: Any, batch: Any, placement: Any) -> Any:
        transform = optimizer(labels(frozen))
        step = make_step(frozen, loss, transform, placement=placement)
        state = start(frozen, transform, placement=placement)
        size = sum(x.nbytes for x in jax.tree.leaves(state))
        each = bytes_on(jax.devices()[0], state) / size
        for _ in range(2):
            state, metrics = step(state, batch, jnp.float32(1.0))
        return trained(state.params, frozen), metrics["loss"], each

    alone, loss, _ = train(model.target.decoder, language_loss, text, None)
    batch = random_continuations(model)
    if LONG:
        drafter, drafted, _ = train(model.drafter.backbone, draft_loss(model), batch, None)
    for shape, most in first(1, [((2, 2), 0.3), ((4, 1), 0.3)]):
        there = jaxdraft.shard(model, mesh_of(*shape))
        found, value, share = train(
            there.target.decoder, language_loss, text, there.target.placement
        )
        assert share < most, share
        assert_close(value, loss)
        target = dataclasses.replace(there.target, decoder=found)
        there = dataclasses.replace(there, target=target)
        if LONG:
            loss_there, backbone = draft_loss(there), there.drafter.backbone
            own, value, _ = train(backbone, loss_there, batch, there.target.placement)
            assert_close(value, drafted)
            placed = dataclasses.replace(there.drafter, backbone=own)
            back = jaxdraft.unshard(dataclasses.replace(there, drafter=placed))
            jax.tree.map(assert_close, back.drafter.backbone.params, drafter.params)
        back = jaxdraft.unshard(there)
        jax.tree.map(assert_close, back.target.decoder.params, alone.params)
    try:
        start(jaxdraft.shard(tiny_model(), mesh_of(1, 4)).target.decoder, optax.sgd(0.1),
              placement=there.target.placement)  # fmt: skip
        raise AssertionError("copied heads are trained")
    except ShardingError as error:
        assert "copies of every key/value head" in str(error)


def saving() -> None:
    """Save a model of a mesh as the one of one device, byte for byte."""
    model = tiny_model("dspark")
    files = []
    with tempfile.TemporaryDirectory() as folder:
        for name, one in [("one", model), ("mesh", jaxdraft.shard(model, mesh_of(2, 4)))]:
            jaxdraft.checkpoint.save(one, f"{folder}/{name}")
            root = Path(folder, name)
            files.append({p.relative_to(root): p.read_bytes() for p in root.rglob("*.*")})
    assert files[0] == files[1] and len(files[0]) >= 4, files[0].keys()


Key = tuple[str, int, str]


def collectives(text: str) -> dict[Key, int]:
    """Count the collectives of a program by kind, number of elements and operation of JAX."""
    found: dict[Key, int] = collections.Counter()
    for line in text.splitlines():
        match = re.search(
            r"= (\S+) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)"
            r"(?:-start)?\(",
            line,
        )
        if match:
            shape = re.search(r"\[([\d,]*)\]", match[1])
            assert shape is not None
            size = int(np.prod([int(n) for n in shape[1].split(",") if n] or [1]))
            name = re.search(r'op_name="[^"]*?([^/"]*/?[^/"]*)"', line)
            found[match[2], size, name[1] if name else ""] += 1
    return found


def counts() -> None:
    """Count the collectives of a round of four layers, and of two of the drafter."""
    model = tiny_model("dflash2", **MIXED)
    for shape, sampled in first(2, [((1, 4), False), ((2, 4), True), ((1, 2), True)]):
        there = jaxdraft.shard(model, mesh_of(*shape))
        rules = Options(
            max_new_tokens=8, stop_ids=None, draft_limit=None, max_length=None, stop=(),
            sampling=WARM if sampled else None, key=1, logprobs=None,
        )  # fmt: skip
        ready = _prepare(there, IDS, None, rules, "auto", None, None)
        given = (there.target, ready.drafter, ready.tokens, ready.lengths, ready.rules)
        state, _ = _start_program(
            *given, new_tokens=ready.new_tokens, chunk=ready.chunk, logprobs=None
        )
        compiled = _round_program.lower(there.target, ready.drafter, state, ready.rules).compile()
        found = collectives(compiled.as_text())
        rows = len(IDS) // shape[0]
        steps, width = 1 + ready.drafter.draft_tokens, model.target.config.width
        wide = {
            key: n for key, n in found.items() if key[:2] == ("all-reduce", rows * steps * width)
        }
        # Two a layer, the embeddings of the window and of the block, and the taps' projection.
        assert sum(wide.values()) == 2 * (4 + 2) + 2 + 1, (shape, wide)
        # What is left is the vocabulary's: the best tokens of each part, sums and maxima of rows.
        # No weight, no cache and no state of a layer is moved.
        left = {key: n for key, n in found.items() if key not in wide}
        best = 256 if sampled else ready.drafter.config.candidates
        assert all(size <= rows * steps * best * shape[1] for _, size, _ in left), left
        assert {kind for kind, _, _ in left} <= {"all-reduce", "all-gather"}, left
        gathered = {name for kind, _, name in left if kind == "all-gather"}
        assert gathered <= {"shard_map/all_gather"}, gathered
        assert sum(left.values()) <= (22 if sampled else 6), left


def errors() -> None:
    """Refuse meshes and models in words."""
    model = tiny_model()

    def refused(words: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except ShardingError as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"not refused: {words}")

    other = jax.make_mesh((2, 4), ("rows", "heads"))
    refused("the mesh has no axis 'data'", lambda: jaxdraft.shard(model, other))
    refused(
        "nothing would be divided over 'rows'",
        lambda: jaxdraft.shard(model, other, data=None, model_axis="heads"),
    )
    refused(
        "expected two axes", lambda: jaxdraft.shard(model, other, data="rows", model_axis="rows")
    )
    refused("16 devices; found 8 cpu devices", lambda: jaxdraft.shard(model, {"data": 16}))
    refused("expected 'data' and 'model'", lambda: jaxdraft.shard(model, {"heads": 2}))
    refused("mesh axis 'data' is 0", lambda: jaxdraft.plan(model, pages=4, mesh={"data": 0}))
    there = jaxdraft.shard(model, other, data="rows", model_axis="heads")
    assert (
        generate(there, IDS, max_new_tokens=4).ids() == generate(model, IDS, max_new_tokens=4).ids()
    )
    refused("already; expected a model on one device", lambda: jaxdraft.shard(there, {"data": 2}))
    refused("max_batch is 3; expected a multiple of 2", lambda: jaxdraft.Engine(there, max_batch=3))
    refused("max_batch is 5", lambda: jaxdraft.plan(there, pages=4, max_batch=5))
    refused(
        "the model is on a mesh of 2 x 4", lambda: jaxdraft.plan(there, pages=4, mesh={"model": 2})
    )
    refused(
        "kernels cannot be divided",
        lambda: jaxdraft.load(jaxdraft.EMBEDDED, mesh=other, kernels="pallas"),
    )
    refused(
        "blocks are for one CPU", lambda: jaxdraft.load(jaxdraft.EMBEDDED, mesh=other, blocked=True)
    )
    refused("a single device", lambda: jaxdraft.with_kernels(there, "pallas"))


SECTIONS = (decode, drafters, placed, loading, engine, training, saving, counts, errors)


def main() -> None:
    """Run the sections that are named, or all."""
    assert len(jax.devices()) == 8, jax.devices()
    for section in SECTIONS:
        if not sys.argv[1:] or section.__name__ in sys.argv[1:]:
            section()
            print(section.__name__, "equal", flush=True)
            jax.clear_caches()


if __name__ == "__main__":
    main()
