"""How fast is DFlash2 compared with MTP? The reference's published table, on models made here.

    python experiments/speed_table.py [FOLDER...]            # the embedded family, or others
    python experiments/speed_table.py --geometry 27b         # a GPU: random weights, see below
    python experiments/speed_table.py --geometry tiny --dry  # the same, in a minute on a CPU

Three prompt lengths, seven drafts per round, one request at a time, greedily, with every drafter of
the folders, all in turn in one process. Tokens and counters of every run must be the same, and the
tokens those of plain decoding. The published table has 512, 2,048 and 8,192 prompt tokens; a model
with too short a context gets 128, 384 and 768.

Whole calls of ``generate`` are timed, and the same calls stopped at their first token by its id,
which is the same program; the difference is decoding alone.

With ``--geometry`` there is no trained model. Target and drafters have random weights and do all of
their work, but the tokens are scripted: the target emits a script, and drafts follow the script at
the rates of ``--acceptance``. The times are therefore those of a model of this size with drafters
of this acceptance, and give no other information.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import math
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from common import HERE, drafters_of, interleave, ratios, table, write_result
from flax import nnx, struct

import jaxdraft
from jaxdraft import Drafter, DraftInfo, Feed, Model, Output, Proposal, Summary, Target
from jaxdraft.base import NO_TOKEN, TargetOutput
from jaxdraft.config import (
    FULL_ATTENTION,
    AttentionConfig,
    BlockDrafterConfig,
    ConvConfig,
    DeltaNetConfig,
    MlpConfig,
    MtpConfig,
    TargetConfig,
)
from jaxdraft.draft.block import BlockDrafter
from jaxdraft.draft.mtp import MtpDrafter
from jaxdraft.nn.decoder import Decoder
from jaxdraft.nn.dflash2 import DFlash2
from jaxdraft.nn.dspark import DSpark
from jaxdraft.nn.linear import Frozen
from jaxdraft.nn.mtp import Mtp
from jaxdraft.target import DecoderTarget
from jaxdraft.testing import tiny_drafter, tiny_mtp, tiny_target

PUBLISHED = {512: (139.92, 166.40), 2048: (138.59, 155.92), 8192: (111.26, 129.43)}
"""Tokens per second with MTP and with DFlash2, by prompt length: onnxruntime-genai, a 27B hybrid on
one H200, K = 7, 1,024 new tokens."""

SHORT, SHORT_TOKENS = (128, 384, 768), 192
"""Prompt lengths and new tokens where the published ones do not fit."""

TOKENS = 1024
DRAFTS = 7
KINDS = ("mtp", "dflash2", "dspark")

ACCEPTANCE = {"mtp": 0.656, "dflash2": 0.748}
"""Probability that a draft is accepted, given that all before it were, the same at every position:
2.81 and 3.58 tokens per round at K = 7, as measured for Qwen3.8-27B in bfloat16, over eleven kinds
of prompts at temperature 1 (ggml-org/llama.cpp, pull request 27342)."""


# --------------------------------------------------------------------------- replay


@struct.dataclass
class ScriptedTarget:
    """A target that does all of its work, and then emits the tokens of a script."""

    inner: Target
    script: jax.Array  # [S] int32: the token of every position, in all rows

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.inner.vocab_size

    @property
    def context_length(self) -> int:
        """Context length of the target inside."""
        return self.inner.context_length

    def init(self, batch: int, capacity: int) -> Any:
        """See :meth:`jaxdraft.base.Target.init`; the state's ``length`` is [B]."""
        return self.inner.init(batch, capacity)

    def forward(
        self, tokens: jax.Array, count: jax.Array, state: Any, *, row: jax.Array | None = None
    ) -> TargetOutput:
        """See :meth:`jaxdraft.base.Target.forward`: real logits, but the script's token is best."""
        out = self.inner.forward(tokens, count, state, row=row)
        batch, rows, _ = out.logits.shape
        at = jnp.arange(rows, dtype=jnp.int32)[None] if row is None else row[:, None]
        token = jnp.take(self.script, state.length[:, None] + at + 1, mode="clip")  # [B, T]
        place = jnp.arange(batch)[:, None], jnp.arange(rows)[None], token
        return replace(out, logits=out.logits.at[place].set(1e30))

    def commit(self, state: Any, count: jax.Array) -> Any:
        """See :meth:`jaxdraft.base.Target.commit`."""
        return self.inner.commit(state, count)


@struct.dataclass
class ReplayState:
    """State of a :class:`ReplayDrafter`."""

    inner: Any
    rounds: jax.Array  # [B] uint32, proposals made


@struct.dataclass
class ReplayDrafter:
    """A drafter that does all of its work, and proposes right drafts at given rates.

    In proposal n, the first ``sum(survival > u_n)`` drafts are the script's and the others are not.
    ``u_n`` is the fractional part of ``n`` golden ratios, which fills 0..1 evenly: after n rounds
    every rate is met to a few 1/n, where random draws would miss it by 1/sqrt(n).
    """

    inner: Drafter
    script: jax.Array  # [S] int32, as the target's
    survival: jax.Array  # [K] float32: share of rounds that accept draft k and all before it
    vocab_size: int = struct.field(pytree_node=False)

    @classmethod
    def of(
        cls, inner: Drafter, script: jax.Array, rates: Sequence[float], vocab_size: int
    ) -> ReplayDrafter:
        """Wrap a drafter.

        Args:
          inner: drafter of any kind.
          script: tokens [S] int32.
          rates: probability that draft k is accepted, given that all before it were; K or one.
          vocab_size: V.

        Raises:
          ValueError: the number of rates is neither K nor one, or a rate is outside 0..1.
        """
        drafts = inner.draft_tokens
        each = list(rates) * drafts if len(rates) == 1 else list(rates)
        if len(each) != drafts:
            raise ValueError(f"{len(each)} acceptance rates; expected 1 or {drafts}")
        if bad := [r for r in each if not 0 <= r <= 1]:
            raise ValueError(f"an acceptance rate is {bad[0]}; expected 0..1")
        return cls(inner, script, jnp.cumprod(jnp.asarray(each, jnp.float32)), vocab_size)

    @property
    def draft_tokens(self) -> int:
        """K of the drafter inside."""
        return self.inner.draft_tokens

    def init(self, batch: int, capacity: int) -> ReplayState:
        """See :meth:`jaxdraft.base.Drafter.init`."""
        return ReplayState(self.inner.init(batch, capacity), jnp.zeros((batch,), jnp.uint32))

    def ingest(self, state: ReplayState, feed: Feed) -> ReplayState:
        """See :meth:`jaxdraft.base.Drafter.ingest`."""
        return replace(state, inner=self.inner.ingest(state.inner, feed))

    def propose(self, state: ReplayState, feed: Feed) -> tuple[ReplayState, Proposal, DraftInfo]:
        """See :meth:`jaxdraft.base.Drafter.propose`."""
        inner, proposal, info = self.inner.propose(state.inner, feed)
        # Golden ratios as integers: 2**32 / 1.618..., which wraps around as a fraction does.
        turn = state.rounds * jnp.uint32(2654435769) + jnp.uint32(2**31)
        u = (turn >> 8).astype(jnp.float32) / 2**24  # [B]
        right = jnp.sum(self.survival[None] > u[:, None], axis=1, dtype=jnp.int32)
        step = jnp.arange(self.draft_tokens, dtype=jnp.int32)[None]
        place = (feed.first_position + feed.count + 1)[:, None] + step
        token = jnp.take(self.script, place, mode="clip")
        token = jnp.where(step < right[:, None], token, (token + 1) % self.vocab_size)
        # Its own drafts decide whether there is one, so that none of its work can be left out.
        token = jnp.where(proposal.tokens >= 0, token, NO_TOKEN)
        drafted = (proposal.length > 0).astype(jnp.uint32)
        state = ReplayState(inner, state.rounds + drafted)
        return state, replace(proposal, tokens=token, support=None), info

    def step(self, state: ReplayState, feed: Feed) -> tuple[ReplayState, Proposal, DraftInfo]:
        """Run ``ingest``, then ``propose``."""
        return self.propose(self.ingest(state, feed), feed)


# --------------------------------------------------------------------------- geometries


def target_27b() -> TargetConfig:
    """Return the sizes of Qwen3.5-27B as far as known: those of ``large_geometry.py``."""
    import large_geometry as sizes  # needs onnx

    return TargetConfig(
        vocab_size=sizes.VOCABULARY,
        width=sizes.WIDTH,
        layers=tuple(
            "attention" if kind == sizes.ATTENTION else "delta_net" for kind in sizes.kinds(64)
        ),
        attention=AttentionConfig(
            heads=sizes.HEADS,
            kv_heads=sizes.KV_HEADS,
            head_dim=sizes.HEAD,
            rotary_dim=sizes.ROTARY,
            gated=True,
            qk_norm=True,
            scale=sizes.HEAD**-0.5,
        ),
        delta_net=DeltaNetConfig(
            key_heads=sizes.KEY_HEADS,
            value_heads=sizes.VALUE_HEADS,
            key_dim=sizes.LANE,
            value_dim=sizes.LANE,
            conv_width=4,
        ),
        mlp=MlpConfig(hidden=sizes.MLP),
        norm_eps=1e-6,
        tied=False,
        context_length=16384,
        taps=(2, 17, 32, 47, 62),
    )


def block_27b(target: TargetConfig, kind: Literal["dflash2", "dspark"]) -> BlockDrafterConfig:
    """Return the configuration of a block drafter at the width of 27B.

    Block, candidates, rank and convolution are those of the published DFlash2 of this size; layers,
    heads, window and taps those of others of its kind. DSpark: without convolution and window.
    """
    dflash2 = kind == "dflash2"
    assert isinstance(target.mlp, MlpConfig)
    return BlockDrafterConfig(
        kind=kind,
        vocab_size=target.vocab_size,
        width=target.width,
        aux_width=target.aux_width,
        layers=5,
        attention=AttentionConfig(
            heads=32,
            kv_heads=8,
            head_dim=128,
            rotary_dim=128,
            qk_norm=True,
            scale=128**-0.5,
            window=2048 if dflash2 else FULL_ATTENTION,
        ),
        mlp_hidden=target.mlp.hidden,
        norm_eps=target.norm_eps,
        block_size=DRAFTS + 1 if dflash2 else DRAFTS,
        draft_tokens=DRAFTS,
        candidates=16,
        rank=256,
        mask_token=target.vocab_size - 1,
        context_length=target.context_length,
        conv=ConvConfig(taps=2, group=16) if dflash2 else None,
    )


def drafter_27b(target: DecoderTarget, kind: str) -> Drafter:
    """Return a random drafter that shares embedding and head with its target."""
    params, dtype = target.decoder.params, target.dtype
    shared = params["embed"]["weight"], params["head"]["weight"]
    rngs = nnx.Rngs(1)
    if kind == "mtp":
        mtp = MtpConfig.of(target.config)
        return MtpDrafter(Frozen.of(Mtp(mtp, dtype=dtype, rngs=rngs)), *shared, mtp, dtype, DRAFTS)
    block = block_27b(target.config, "dflash2" if kind == "dflash2" else "dspark")
    module = DFlash2 if kind == "dflash2" else DSpark
    return BlockDrafter(Frozen.of(module(block, dtype=dtype, rngs=rngs)), *shared, block, dtype)


def tiny(target: DecoderTarget, kind: str) -> Drafter:
    """Return the same with two small layers."""
    if kind == "mtp":
        return tiny_mtp(target, draft_tokens=DRAFTS)
    block = DRAFTS + (kind == "dflash2")
    return tiny_drafter(target, kind, block_size=block, draft_tokens=DRAFTS)


def geometry(name: str, rates: dict[str, list[float]]) -> tuple[dict[str, Variant], np.ndarray]:
    """Return variants over a script, plain decoding first, and the script [S] int32.

    Args:
      name: "27b" or "tiny".
      rates: acceptance rates by kind of drafter; see :meth:`ReplayDrafter.of`.

    Raises:
      ValueError: rates are given for an unknown kind, or :meth:`ReplayDrafter.of` refuses them.
    """
    if unknown := set(rates) - set(KINDS):
        raise ValueError(f"acceptance of {', '.join(sorted(unknown))}; expected {', '.join(KINDS)}")
    if name == "27b":
        module = Decoder(target_27b(), dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        target, make = DecoderTarget.of(module), drafter_27b
    else:
        target, make = tiny_target(context_length=1024), tiny
    vocab, size = target.vocab_size, target.context_length
    written = np.random.default_rng(0).integers(0, vocab, size).astype(np.int32)
    script = jnp.asarray(written)
    model = Model.of(ScriptedTarget(target, script))
    found = {"none": Variant(model, "none")}
    for kind, each in rates.items():
        replay = ReplayDrafter.of(make(target, kind), script, each, vocab)
        found[kind] = Variant(model, replay)
    return found, written


def parse_rates(entries: Sequence[str]) -> dict[str, list[float]]:
    """Parse ``["mtp=0.7", "dflash2=0.8,0.7"]`` into rates by kind.

    Raises:
      ValueError: an entry has another form.
    """
    found = {}
    for entry in entries:
        kind, equals, numbers = entry.partition("=")
        try:
            found[kind] = [float(number) for number in numbers.split(",")]
        except ValueError:
            equals = ""
        if not equals:
            raise ValueError(f"acceptance is {entry!r}; expected KIND=RATE or KIND=RATE,RATE,...")
    return found


# --------------------------------------------------------------------------- measuring


class Variant:
    """A drafter, its target, and the outcomes of its runs."""

    def __init__(self, model: Model, drafter: str | Drafter, draft_tokens: int | None = None):
        self.model, self.drafter = model, model.choose(drafter, draft_tokens)
        self.outputs: list[Output] = []
        self.outcomes: list[tuple[str, Summary]] = []

    def whole(self, prompts: list[list[int]], tokens: int) -> None:
        """Generate, and record a hash of the tokens and the counters."""
        self.outputs = [self._call(prompt, tokens, ()) for prompt in prompts]
        digest = hashlib.sha256(repr([out.ids() for out in self.outputs]).encode())
        summary = jaxdraft.summarize([out.stats for out in self.outputs])
        self.outcomes.append((digest.hexdigest()[:12], summary))

    def first(self, prompts: list[list[int]], tokens: int) -> None:
        """Generate up to the first token, which the call before has shown."""
        for prompt, out in zip(prompts, self.outputs, strict=True):
            ended = self._call(prompt, tokens, (out.ids()[0][0],))
            assert ended.ids()[0] == out.ids()[0][:1]

    def _call(self, prompt: list[int], tokens: int, stop_ids: tuple[int, ...]) -> Output:
        return jaxdraft.generate(
            self.model, [prompt], max_new_tokens=tokens, stop_ids=stop_ids, drafter=self.drafter
        )


@dataclass(frozen=True)
class Fact:
    """The measurements of a drafter, for prompts of one length."""

    digest: str
    summary: Summary
    tokens: int  # emitted in a run, the first of each prompt included
    prompts: int
    whole: list[float]  # seconds of every run
    decoding: list[float]  # the same without the calls that end at the first token

    @property
    def speed(self) -> float:
        """Tokens per second of whole calls."""
        return self.tokens / statistics.median(self.whole)

    @property
    def decoding_speed(self) -> float:
        """Tokens per second after the first."""
        return (self.tokens - self.prompts) / statistics.median(self.decoding)


def measure(
    found: dict[str, Variant], prompts: list[list[int]], args: argparse.Namespace
) -> dict[str, Fact]:
    """Run every variant over prompts of one length, in turn.

    Raises:
      AssertionError: the runs of a drafter differ, or a drafter changed the tokens.
    """
    calls: dict[str, Callable[[], None]] = {}
    for name, variant in found.items():
        variant.outcomes = []
        calls[name] = functools.partial(variant.whole, prompts, args.tokens)
        calls[f"{name} first"] = functools.partial(variant.first, prompts, args.tokens)
    seconds = interleave(calls, repeats=args.runs, warmups=args.warmups)
    facts = {}
    for name, variant in found.items():
        assert len(set(map(repr, variant.outcomes))) == 1, (
            f"{name}: runs differ: {variant.outcomes}"
        )
        digest, summary = variant.outcomes[0]
        whole, first = seconds[name], seconds[f"{name} first"]
        decoding = [w - f for w, f in zip(whole, first, strict=True)]
        tokens = sum(len(out.ids()[0]) for out in variant.outputs)
        facts[name] = Fact(digest, summary, tokens, len(prompts), whole, decoding)
    digests = {fact.digest for fact in facts.values()}
    assert len(digests) == 1, "a drafter changed the tokens"
    return facts


def family(folders: list[Path], drafts: int) -> dict[str, Variant]:
    """Load every drafter of the folders, plain decoding first."""
    found: dict[str, Variant] = {}
    for folder in folders:
        for kind, (model, drafter) in drafters_of(folder, drafts, "float32").items():
            found.setdefault("none", Variant(model, "none"))
            if kind != "ngram":
                found[kind] = Variant(model, drafter)
    return found


# --------------------------------------------------------------------------- reporting


def spread(above: Sequence[float], below: Sequence[float]) -> str:
    """Format the median, least and largest ratio, pair by pair."""
    low, middle, high = ratios(above, below)
    return f"{middle:.2f} ({low:.2f}..{high:.2f})"


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean of positive numbers."""
    return math.exp(statistics.fmean(map(math.log, values)))


def published(lengths: Sequence[int]) -> dict[int, tuple[int, float, float]]:
    """Return the published length, MTP and DFlash2 to print beside each of the given lengths.

    Equal lengths are paired; three lengths that all differ are paired in their order.
    """
    rows = [(length, *pair) for length, pair in PUBLISHED.items()]
    if not set(lengths) & set(PUBLISHED) and len(lengths) == len(rows):
        return dict(zip(lengths, rows, strict=True))
    return {row[0]: row for row in rows if row[0] in lengths}


def report(results: dict[int, dict[str, Fact]], found: dict[str, Variant]) -> str:
    """Return the tables in Markdown."""
    rows = []
    for length, facts in results.items():
        plain = facts["none"]
        for name, fact in facts.items():
            rows.append(
                [
                    length,
                    name,
                    found[name].drafter.draft_tokens,
                    f"{fact.summary.tokens_per_round or 0:.2f}",
                    f"{fact.speed:.2f}",
                    f"{fact.decoding_speed:.2f}",
                    spread(plain.whole, fact.whole),
                    spread(plain.decoding, fact.decoding),
                    fact.digest,
                ]
            )
    head = ["prompt", "drafter", "K", "tokens per round", "tokens/s", "tokens/s, decoding"]
    head += ["speed-up", "speed-up, decoding", "tokens' hash"]
    parts = [table(head, rows)]
    if all({"mtp", "dflash2"} <= set(facts) for facts in results.values()):
        parts += ["DFlash2 against MTP, with the published table:", against(results)]
    return "\n\n".join(parts)


def against(results: dict[int, dict[str, Fact]]) -> str:
    """Return DFlash2 / MTP by prompt length and in geometric mean, measured and published."""
    theirs = published(list(results))
    rows, whole, decoding = [], [], []
    for length, facts in results.items():
        mtp, dflash2 = facts["mtp"], facts["dflash2"]
        whole.append(ratios(mtp.whole, dflash2.whole)[1])
        decoding.append(ratios(mtp.decoding, dflash2.decoding)[1])
        row = [length, f"{mtp.speed:.2f}", f"{dflash2.speed:.2f}"]
        row += [spread(mtp.whole, dflash2.whole), spread(mtp.decoding, dflash2.decoding)]
        if length in theirs:
            at, slow, fast = theirs[length]
            row += [f"{at:,}", f"{slow:.2f}", f"{fast:.2f}", f"{fast / slow:.2f}"]
        rows.append([*row, *[""] * (9 - len(row))])
    ours = [f"**{geometric_mean(w):.2f}**" if min(w) > 0 else "-" for w in (whole, decoding)]
    known = [fast / slow for _, slow, fast in theirs.values()]
    mean = f"**{geometric_mean(known):.2f}**" if known else ""
    rows.append(["geometric mean", "", "", *ours, "", "", "", mean])
    head = ["prompt", "MTP, tokens/s", "DFlash2, tokens/s", "DFlash2 / MTP", "decoding alone"]
    head += ["published: prompt", "MTP", "DFlash2", "DFlash2 / MTP"]
    return table(head, rows)


def closing(args: argparse.Namespace, rates: dict[str, list[float]], load: float) -> str:
    """Return a description of the measurement, and of what was not run."""
    lines = [
        f"Greedy, one request at a time, {args.tokens} new tokens; medians of {args.runs} runs "
        f"after {args.warmups}, ratios pair by pair (least..largest). Tokens are the same with "
        "every drafter and in every run. Decoding alone: without a call that ends at the first "
        "token. Published: onnxruntime-genai, a 27B hybrid on one H200, K = 7, 1,024 new tokens. "
        f"Load of the machine before the first run: {load:.1f}."
    ]
    if args.geometry:
        given = "; ".join(f"{k} {', '.join(map(str, r))}" for k, r in rates.items())
        lines.append(
            f"**Random weights at the geometry `{args.geometry}`, acceptance replayed** (the "
            "probability that a draft is accepted, given that all before it were: "
            f"{given}). The tokens are scripted, so acceptance is an input and not a result."
        )
    elif (HERE / "speed_table_27b.md").exists():
        lines.append("The published geometry with replayed acceptance: `speed_table_27b.md`.")
    else:
        lines.append(
            "Not run: the published geometry (`--geometry 27b` writes `speed_table_27b.md` and "
            "needs a GPU with some 70 GB). Ratios of a model this small do not predict it."
        )
    return "\n\n".join(lines)


def main() -> None:
    """Measure, check, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folders", nargs="*", type=Path, help="a checkpoint, or exports")
    parser.add_argument("--geometry", choices=("27b", "tiny"), help="random weights instead")
    parser.add_argument(
        "--acceptance",
        nargs="+",
        metavar="KIND=RATES",
        help="rates to replay with --geometry: one, or one per position",
    )
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument(
        "--prompts", type=int, default=4, help="number of held-out files; unused with --geometry"
    )
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--warmups", type=int, default=2)
    parser.add_argument("--dry", action="store_true", help="print, write nothing")
    args = parser.parse_args()
    rates = (
        parse_rates(args.acceptance) if args.acceptance else {k: [r] for k, r in ACCEPTANCE.items()}
    )
    if args.geometry:
        found, script = geometry(args.geometry, rates)
    else:
        found, script = family(args.folders or [jaxdraft.EMBEDDED], DRAFTS), None
    model = found["none"].model
    context = model.info.context_length
    fits = max(PUBLISHED) + TOKENS <= context
    args.tokens = args.tokens or (TOKENS if fits else SHORT_TOKENS)
    args.lengths = args.lengths or (list(PUBLISHED) if fits else list(SHORT))
    if (whole := max(args.lengths) + args.tokens) > context:
        raise ValueError(f"prompt and output have {whole} tokens; the context has {context}")
    if script is not None:
        texts = [script.tolist()]
    else:
        from acceptance import held_out  # as in `family`

        texts = list(held_out(model, max(args.lengths)).values())[: args.prompts]
    load = os.getloadavg()[0]
    results = {}
    for length in args.lengths:
        prompts = [text[:length] for text in texts]
        results[length] = measure(found, prompts, args)
        speeds = ", ".join(f"{name} {f.speed:.2f}" for name, f in results[length].items())
        print(f"{length} prompt tokens, tokens/s: {speeds}", flush=True)
    body = f"{report(results, found)}\n\n{closing(args, rates, load)}"
    if args.dry:
        print(body)
        return
    name = f"speed_table_{args.geometry}" if args.geometry else None
    write_result(__file__, "DFlash2 compared with MTP", body, name)


if __name__ == "__main__":
    main()
