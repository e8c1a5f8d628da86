"""The programs that are compiled for GPUs, at full width, and the least bytes they can move.

Weights are shapes alone, so a target of 27B parameters takes no memory. Fewer layers than the real
number keep the order of their kinds and every width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import gpu_engine
import jax
import jax.numpy as jnp
from flax import nnx
from gpu_count import KEYS, SMALLEST
from jax.typing import DTypeLike
from speed_table import DRAFTS, drafter_27b, target_27b

from jaxdraft import Drafter, rounds
from jaxdraft.base import Truncation
from jaxdraft.config import LayerKind, MoeConfig, TargetConfig
from jaxdraft.draft.block import BlockDrafter
from jaxdraft.draft.mtp import MtpDrafter
from jaxdraft.draft.none import NoDrafter
from jaxdraft.generate import _generate
from jaxdraft.kernels import XLA
from jaxdraft.kernels.linear import Form
from jaxdraft.nn import choice
from jaxdraft.nn.attention import reaches
from jaxdraft.nn.decoder import Decoder
from jaxdraft.nn.experts import PackedExperts
from jaxdraft.nn.linear import Linear
from jaxdraft.nn.packed import PackedLinear
from jaxdraft.rounds import Rules
from jaxdraft.sampling import SamplingRules
from jaxdraft.sizes import GPU_CHUNK, PREFILL_CHUNK
from jaxdraft.state import paged
from jaxdraft.target import DecoderTarget

STOPS = 4
"""Stop ids of a row."""

PREFILL_LOOP = "rounds.py prefill"
"""Source of the loop over the chunks of a prompt."""

ROUND_LOOP = "generate.py _generate"
"""Source of the loop over the rounds of a generation."""

_LOOKED_UP = ("embed", "rotary", "predecessor", "successor")
"""Parts of the names of tables of which a program reads single rows."""


@dataclass(frozen=True)
class Case:
    """One program and its arguments, shapes alone."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    weights: range  # numbers of the arguments that are weights, as XLA counts them
    least: Callable[[int], int]  # length of the text -> bytes that the program cannot do without
    trips: Callable[[int, str], int]  # length, source line of a loop -> its passes
    branches: Callable[[int, str, int], int | None]  # length, source, number -> the one taken
    part: str | None = None  # the loop of which one pass is counted; None: the whole program


def _dense(config: TargetConfig) -> TargetConfig:
    kinds: tuple[LayerKind, ...] = ("attention",) * len(config.layers)
    return replace(config, layers=kinds, delta_net=None)


def _sliding(config: TargetConfig) -> TargetConfig:
    """Three of four layers have a window of 1,024."""
    assert config.attention is not None
    kinds: tuple[LayerKind, ...] = tuple(
        "sliding" if i % 4 < 3 else "attention" for i in range(len(config.layers))
    )
    window = replace(config.attention, window=1024)
    return replace(config, layers=kinds, delta_net=None, sliding=window)


def _moe(config: TargetConfig) -> TargetConfig:
    return replace(config, mlp=MoeConfig(experts=256, active=8, hidden=512, shared_hidden=512))


def _experts(config: TargetConfig) -> TargetConfig:
    """Experts, biases, sinks and windows in turn, as in gpt-oss."""
    assert config.attention is not None
    full = replace(config.attention, gated=False, bias=True, out_bias=True, sinks=True)
    kinds: tuple[LayerKind, ...] = tuple(
        "attention" if i % 2 else "sliding" for i in range(len(config.layers))
    )
    mlp = MoeConfig(
        experts=128,
        active=4,
        hidden=2880,
        shared_hidden=0,
        router_bias=True,
        bias=True,
        limit=7.0,
    )
    return replace(
        config,
        layers=kinds,
        delta_net=None,
        attention=full,
        sliding=replace(full, window=128),
        mlp=mlp,
    )


MODELS: dict[str, Callable[[TargetConfig], TargetConfig]] = {
    "hybrid": lambda config: config,
    "dense": _dense,
    "sliding": _sliding,
    "moe": _moe,
    "experts": _experts,
    "mxfp4": _experts,
}
"""Targets of the width of 27B: the hybrid itself, and others made of it."""


def config_27b(layers: int, context: int) -> TargetConfig:
    """Return the 27B hybrid with some of its layers and ``context`` rotary positions."""
    whole = replace(target_27b(), context_length=context)
    if layers == len(whole.layers):
        return whole
    kinds = whole.layers[:layers]
    taps = tuple(range(min(len(whole.taps), layers)))
    taps += (layers - 1,) * (len(whole.taps) - len(taps))
    return replace(whole, layers=kinds, taps=tuple(sorted(set(taps))))


def model_27b(
    config: TargetConfig, drafter: str, dtype: DTypeLike, packed: str | None = None
) -> tuple[DecoderTarget, Drafter]:
    """Return shapes of a target and its drafter; "none" is one that proposes nothing.

    Args:
      config: the target.
      drafter: kind of the drafter.
      dtype: type of weights, keys and values.
      packed: a name in ``PACKED``, or None.
    """

    def make() -> tuple[DecoderTarget, Drafter]:
        decoder = Decoder(config, dtype=dtype, rngs=nnx.Rngs(0))
        if packed is not None:
            PACKED[packed](decoder, dtype)
        target = DecoderTarget.of(decoder)
        return target, NoDrafter() if drafter == "none" else drafter_27b(target, drafter)

    return jax.eval_shape(make)


def _pack_experts(decoder: Decoder, dtype: DTypeLike) -> None:
    """Put experts in MXFP4 in place of dense ones."""
    for layer in decoder.layers:
        for name in ("gate_up", "down"):
            count, outputs, inputs = getattr(layer.mlp, name).shape
            form = Form(inputs, outputs, jnp.dtype(dtype), 4, 32, values="e2m1")
            shape = (count, outputs, inputs // 32)
            arrays = {
                "weight_q": jnp.zeros((*shape, 16), jnp.uint8),
                "scales": jnp.ones(shape, jnp.float8_e8m0fnu),
            }
            setattr(layer.mlp, name, PackedExperts(arrays, form))


def _pack(form: Mapping[str, Any], decoder: Decoder, dtype: DTypeLike) -> None:
    """Put packed matrices of zeros in place of the dense ones of all layers."""
    for _, part in list(nnx.iter_modules(decoder.layers)):
        for name, linear in list(vars(part).items()):
            if type(linear) is Linear:
                outputs, inputs = linear.weight[...].shape
                blocks, groups = -(-inputs // form["block"]), -(-outputs // form.get("rows", 1))
                size = form["block"] * form["bits"] // 8
                values = jnp.zeros((outputs, blocks, size), jnp.uint8)
                scales = jnp.zeros((groups, blocks), jnp.float16)
                packed = PackedLinear(values, scales, inputs=inputs, dtype=dtype, **form)
                setattr(part, name, packed)


PACKED: dict[str, Callable[[Decoder, DTypeLike], None]] = {
    "int4": functools.partial(_pack, dict(bits=4, block=64)),
    "int8": functools.partial(_pack, dict(bits=8, block=64)),
    "fp8": functools.partial(_pack, dict(bits=8, block=128, rows=128, values="e4m3")),
    "mxfp4": _pack_experts,
}
"""Forms in which a target's matrices or experts may be packed; head and embedding never are."""


def window(target: DecoderTarget, rows: int, capacity: int) -> Case:
    """Run a plain step (one row) or a verify window: logits, the best tokens, and a commit."""
    state = jax.eval_shape(lambda: target.init(1, capacity))

    def run(
        target: DecoderTarget, tokens: jax.Array, count: jax.Array, kept: jax.Array, state: Any
    ):
        out = target.forward(tokens, count, state)
        best = jnp.argmax(out.logits, axis=-1).astype(jnp.int32)
        return best, target.commit(out.state, kept)

    arguments = (target, _integers(1, rows), _integers(1), _integers(1), state)
    return Case(
        jax.jit(run, donate_argnums=4),
        arguments,
        _weights(target),
        functools.partial(_least, target, None, rows),
        functools.partial(_trips, rows, 0),
        functools.partial(_branch, rows, capacity, _window(target)),
    )


def decoding_round(target: DecoderTarget, drafter: Drafter, capacity: int, rules: Rules) -> Case:
    """Run one round, as :func:`jaxdraft.stream` does."""

    start = functools.partial(rounds.prefill, capacity=capacity, chunk=16)
    state, _ = jax.eval_shape(start, target, drafter, _integers(1, 16), _integers(1), rules)
    state = replace(state, tokens=_integers(1, capacity))

    def run(target: DecoderTarget, drafter: Drafter, state: rounds.RoundState, rules: Rules):
        return rounds.round(target, drafter, state, rules)

    rows = 1 + drafter.draft_tokens
    return Case(
        jax.jit(run, donate_argnums=2),
        (target, drafter, state, rules),
        _weights(target, drafter),
        functools.partial(_least, target, drafter, rows),
        functools.partial(_trips, rows, drafter.draft_tokens),
        functools.partial(_branch, rows, capacity, _window(target)),
    )


def prefill(target: DecoderTarget, drafter: Drafter, capacity: int, rules: Rules) -> Case:
    """Run a prompt of ``capacity`` tokens; :data:`PREFILL_LOOP` is the loop over its chunks."""
    chunk = min(target.prompt_rows, GPU_CHUNK)
    start = functools.partial(rounds.prefill, capacity=capacity, chunk=chunk)
    return Case(
        jax.jit(start),
        (target, drafter, _integers(1, capacity), _integers(1), rules),
        _weights(target, drafter),
        functools.partial(_least_prefill, target, drafter, chunk),
        functools.partial(_trips, chunk, drafter.draft_tokens),
        functools.partial(_branch, chunk, capacity, _window(target)),
        part=PREFILL_LOOP,
    )


def generation(target: DecoderTarget, drafter: Drafter, capacity: int, rules: Rules) -> Case:
    """Run all of :func:`jaxdraft.generate`; :data:`ROUND_LOOP` is the loop over its rounds.

    ``capacity`` is the room of the prompt and of a quarter as many new tokens.
    """
    new, rows = capacity // 5, 1 + drafter.draft_tokens

    def run(*arguments: Any) -> Any:
        static = dict(new_tokens=new, chunk=GPU_CHUNK, trace=False, logprobs=None)
        return _generate(*arguments, **static)

    return Case(
        jax.jit(run),
        (target, drafter, _integers(1, capacity - new), _integers(1), rules),
        _weights(target, drafter),
        functools.partial(_least, target, drafter, rows),
        functools.partial(_trips, rows, drafter.draft_tokens),
        functools.partial(_branch, rows, capacity, _window(target)),
        part=ROUND_LOOP,
    )


def engine(name: str, target: DecoderTarget, drafter: Drafter, capacity: int) -> Case:
    """Run one of :func:`gpu_engine.programs_of`, for eight greedy requests of equal lengths."""
    requests = gpu_engine.ROWS
    found = gpu_engine.programs_of(target, drafter, capacity, greedy_rules(requests))
    function, arguments = found[name]
    rows = PREFILL_CHUNK if name == "chunk" else 1 + drafter.draft_tokens
    least = functools.partial(_least, target, drafter, rows, requests=requests)
    if name == "admit":  # the states of one request, cleared

        def least(length: int) -> int:
            del length
            return 2 * _size(jax.eval_shape(lambda: target.init_recurrent(1)))

    return Case(
        jax.jit(function, donate_argnums=2),
        arguments,
        _weights(target, drafter) if name != "admit" else range(0),  # which reads none
        least,
        functools.partial(_trips, rows, drafter.draft_tokens),
        functools.partial(_branch, rows, capacity, _window(target)),
    )


def greedy_rules(batch: int = 1) -> Rules:
    """Return the rules of greedy rows."""
    number = jnp.zeros((batch,), jnp.int32)
    return jax.eval_shape(
        lambda: Rules(jnp.zeros((batch, STOPS), jnp.int32), number, number, number)
    )


def sampled_rules() -> Rules:
    """Return the rules of one row that is sampled, with top-k, top-p and min-p."""

    def make() -> SamplingRules:
        one = jnp.ones((1,), jnp.float32)
        kept = Truncation(one, jnp.ones((1,), jnp.int32), one, one)
        return SamplingRules(kept, kept, jax.random.key(0)[None], jnp.zeros((1,), jnp.int32))

    return replace(greedy_rules(), sampling=jax.eval_shape(make))


PROGRAMS = (
    "step",
    "verify",
    "round:mtp",
    "round:dflash2",
    "round:dspark",
    "sampled:mtp",
    "sampled:dflash2",
    "prefill:dflash2",
    "generate:dflash2",
    "generate:mtp",
    "engine-round:dflash2",
    "engine-chunk:dflash2",
    "engine-admit:dflash2",
    "step@dense",
    "verify@dense",
    "verify@sliding",
    "step@moe",
    "verify@moe",
    "step@experts",
    "step@mxfp4",
    "verify@mxfp4",
    "step@int4",
    "verify@int4",
    "verify@int8",
    "verify@fp8",
)
"""Names for :func:`case`: what runs, with which drafter, in which of ``MODELS`` or ``PACKED``."""


def case(name: str, *, layers: int, dtype: DTypeLike, capacity: int, kernels: str = XLA) -> Case:
    """Return the program of a name, at the geometry of 27B with ``layers`` layers.

    Args:
      name: one of ``PROGRAMS``.
      layers: of the target; a drafter has all of its own.
      dtype: of weights, keys and values.
      capacity: positions that the state has room for.
      kernels: "xla", or "pallas" for GPU kernels where there are some.

    Raises:
      ValueError: no such program.
    """
    if name not in PROGRAMS:
        raise ValueError(f"program is {name!r}; expected one of {', '.join(PROGRAMS)}")
    name, _, model = name.partition("@")
    what, _, drafter = name.partition(":")
    config = config_27b(layers, context=max(16384, capacity))
    config = MODELS.get(model or "hybrid", MODELS["hybrid"])(config)
    both = model_27b(config, drafter or "none", dtype, model if model in PACKED else None)
    target, drafts = choice.apply(both, kernels)
    if what in ("round", "sampled"):
        rules = greedy_rules() if what == "round" else sampled_rules()
        return decoding_round(target, drafts, capacity, rules)
    if what == "prefill":
        return prefill(target, drafts, capacity, greedy_rules())
    if what == "generate":
        return generation(target, drafts, capacity, greedy_rules())
    if what.startswith("engine-"):
        return engine(what.removeprefix("engine-"), target, drafts, capacity)
    return window(target, 1 if what == "step" else 1 + DRAFTS, capacity)


def _window(target: DecoderTarget) -> int | None:
    return target.config.sliding.window if target.config.sliding else None


def _integers(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _weights(*trees: Any) -> range:
    return range(len(jax.tree.leaves(trees)))


def _trips(rows: int, drafts: int, length: int, source: str) -> int:
    """Return the passes of a loop that depend on the length of the text or on the proposal."""
    if source == KEYS:
        return length + rows
    if source.startswith("nn/attention.py"):
        return -(-(length + rows) // paged.CHUNK)
    if source.startswith("draft/mtp.py"):
        return drafts
    raise ValueError(f"nothing is known about the passes of the loop in {source!r}")


def _branch(
    rows: int, capacity: int, window: int | None, length: int, source: str, number: int
) -> int | None:
    """The branch of attention that reads what is in use, and does not have to do it again.

    A target's layers with a window read from the page of the oldest visible key on.
    """
    if source.endswith(" _everything"):
        return SMALLEST
    if not source.endswith(" _at_once"):
        return None
    first = 0
    lengths = reaches(paged.room(capacity, PREFILL_CHUNK) // paged.CHUNK, whole=True)
    if len(lengths) != number and window is None:  # the pages of a pool
        lengths = reaches(-(-capacity // paged.CHUNK), whole=False)
    elif len(lengths) != number and window is not None:
        lengths = reaches(-(-(window + PREFILL_CHUNK) // paged.CHUNK) + 1, whole=False)
        first = max(length - window + 1, 0) // paged.CHUNK * paged.CHUNK
    if len(lengths) != number:
        raise ValueError(f"{source} has {number} branches; expected {len(lengths)}, for {lengths}")
    used = -(-(length + rows - first) // paged.CHUNK)
    return sum(used > reach for reach in lengths[:-1])


def _least(
    target: DecoderTarget, drafter: Drafter | None, rows: int, length: int, requests: int = 1
) -> int:
    """Return the bytes of weights, keys and values once, and of recurrent states twice.

    An MTP head runs once per draft and reads the target's head every time.
    """
    config = target.config
    states = jax.eval_shape(lambda: target.init_recurrent(requests))
    total = _size(target.decoder) + 2 * _size(states)
    if isinstance(config.mlp, MoeConfig):
        unused = max(0, config.mlp.experts - requests * rows * config.mlp.active)
        matrices = [
            _size([layer["mlp"][name] for name in ("gate_up", "down")])
            for layer in target.decoder.params["layers"].values()
        ]
        total -= sum(matrices) * unused // config.mlp.experts
    if (shape := config.sliding) is not None:
        seen = min(length, shape.window)
        total += config.count("sliding") * _cached(shape, target.dtype, requests * seen)
    if (shape := config.attention) is not None:
        total += config.count("attention") * _cached(shape, target.dtype, requests * length)
    if isinstance(drafter, MtpDrafter):
        total += drafter.draft_tokens * (
            _size(drafter.mtp)
            + _size(drafter.head)
            + _cached(drafter.config.attention, drafter.dtype, requests * length)
        )
    if isinstance(drafter, BlockDrafter):
        shape = drafter.config.attention
        seen = min(length, shape.window) if drafter.config.windowed else length
        total += _size(drafter.backbone) + _size(drafter.head)
        total += drafter.config.layers * _cached(shape, drafter.dtype, requests * seen)
    return total


def _least_prefill(target: DecoderTarget, drafter: Drafter, chunk: int, length: int) -> int:
    """Return :func:`_least` for a chunk of a prompt, which runs no head and no block.

    Of a block drafter it reads only weights that make keys and values of the target's rows.
    """
    total = _least(target, None, chunk, length) - _size(target.decoder.params["head"])
    if isinstance(drafter, BlockDrafter):
        params = drafter.backbone.params
        total += _size(params["fc"])
        total += sum(_size(layer["kv"]) for layer in params["layers"].values())
    return total


def _cached(shape: Any, dtype: DTypeLike, length: int) -> int:
    """Return the bytes of the keys and values of one layer."""
    return 2 * shape.kv_heads * shape.head_dim * length * jnp.dtype(dtype).itemsize


def _size(tree: Any) -> int:
    """Return the bytes of the arrays that a program reads in full."""
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    return sum(
        x.size * x.dtype.itemsize
        for path, x in found
        if not any(name in jax.tree_util.keystr(path) for name in _LOOKED_UP)
    )
