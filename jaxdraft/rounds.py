"""Prefill and one speculative round: the composition of target, verification and drafter.

All functions here map arrays to arrays, without the host and without synchronisation. They work
with any target and any drafter.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxdraft import guard, sampling, stop_strings, verify
from jaxdraft.base import (
    NO_TOKEN,
    Drafter,
    DraftInfo,
    Feed,
    NoDraft,
    Proposal,
    Status,
    Target,
    TargetOutput,
    full_drafter,
    full_target,
)
from jaxdraft.meshes import set_in_rows
from jaxdraft.ranking import largest_first
from jaxdraft.round_state import RoundState, Rules
from jaxdraft.sampling import History
from jaxdraft.sharding.states import divide_state
from jaxdraft.state import rows
from jaxdraft.structure import automaton
from jaxdraft.telemetry import Stats
from jaxdraft.verify import Verdict

MAX_FAILURES = 3
"""Number of consecutive failing rounds after which drafting is switched off for a row."""


@struct.dataclass
class Logprobs:
    """Log-probabilities of the emitted tokens, and of alternatives.

    Those of the model are under its own logits, before penalties, bans, temperature and truncation;
    those in ``sampled`` are after all of these.
    """

    token: jax.Array  # [B, T] float32, of the emitted tokens; 0 where there is none
    top_tokens: jax.Array  # [B, T, n] int32, the best n, best first; NO_TOKEN where there is none
    top: jax.Array  # [B, T, n] float32
    sampled: jax.Array
    """[B, T] float32, of the emitted tokens in the distribution that they were drawn from. 0 in
    greedy rows, whose tokens are certain."""


@struct.dataclass
class RoundInfo:
    """Report of a round. Nothing depends on it."""

    accepted: jax.Array  # [B] int32 drafts that were accepted and emitted; -1: the row did not run
    emitted: jax.Array  # [B] int32 tokens the round added to each row
    draft: DraftInfo
    logprobs: Logprobs | None = None  # T = 1 + K, of the added tokens; None unless requested


def prefill(
    target: Target,
    drafter: Drafter,
    tokens: jax.Array,
    lengths: jax.Array,
    rules: Rules,
    *,
    capacity: int,
    chunk: int,
    samples: int = 1,
    logprobs: int | None = None,
) -> tuple[RoundState, RoundInfo]:
    """Run the prompts, emit the token that follows each, and propose for the first round.

    Args:
      target: the target.
      drafter: the drafter.
      tokens: [B, S] int32: the prompts, with room for the output. Rows past their length may hold
        anything; they become zeros.
      lengths: [B] int32; a row of length zero never runs.
      rules: see :class:`Rules`; those of ``B * samples`` rows.
      capacity: positions to make room for.
      chunk: prompt rows run at once.
      samples: n, rows that continue each prompt, side by side. Prompts are read once if the states
        of target and drafter can be repeated (:func:`jaxdraft.state.rows.repeat`).
      logprobs: give log-probabilities, and so many alternatives.
    """
    batch, size = tokens.shape

    def make(batch: int) -> RoundState:
        caches = target.init(batch, capacity), drafter.init(batch, capacity)
        return empty(*caches, batch=batch, size=size, draft_tokens=drafter.draft_tokens)

    rules = _divided(target, rules, batch * samples)
    if samples > 1 and not rows.repeatable(make, batch, samples):
        tokens, lengths = jnp.repeat(tokens, samples, axis=0), jnp.repeat(lengths, samples)
        batch, samples = batch * samples, 1
    state, tokens, lengths = _divided(target, (make(batch), tokens, lengths), batch)
    state = replace(
        state, status=jnp.where(lengths > 0, Status.RUNNING, Status.EMPTY).astype(jnp.int32)
    )
    padded = jnp.pad(tokens, ((0, 0), (0, -size % chunk)))

    def run(carry: tuple[jax.Array, jax.Array, RoundState]) -> tuple[Any, ...]:
        offset, last, state = carry
        part = lax.dynamic_slice_in_dim(padded, offset, chunk, axis=1)
        count = jnp.clip(lengths - offset, 0, chunk)
        state, row = read(target, drafter, state, part, count)
        return offset + chunk, jnp.where((count > 0)[:, None, None], row, last), state

    head = full_target(target).head
    width, dtype = (target.vocab_size, jnp.float32) if head is None else head[:2]
    start = (jnp.asarray(0, jnp.int32), jnp.zeros((batch, 1, width), dtype), state)
    longest = jnp.max(lengths, initial=0)
    if size <= chunk:
        _, last, state = run(start)
    else:
        _, last, state = lax.while_loop(lambda c: c[0] < longest, run, start)
    logits = logits_after(target, last)
    if samples > 1:
        logits = jnp.repeat(logits, samples, axis=0)
        state = rows.repeat(make, state, batch, samples)
        state = _divided(target, state, batch * samples)
    return begin(drafter, state, logits, rules, logprobs=logprobs)


def _divided(target: Target, tree: Any, batch: int) -> Any:
    """Divide arrays of ``batch`` rows over the target's mesh, if it is on one."""
    placement = full_target(target).placement
    return tree if placement is None else divide_state(placement, tree, batch)


def empty(target: Any, drafter: Any, *, batch: int, size: int, draft_tokens: int) -> RoundState:
    """Return a state of empty rows, with status ``EMPTY``.

    Args:
      target: an empty state of the target.
      drafter: an empty state of the drafter.
      batch: B.
      size: S, tokens of the longest row.
      draft_tokens: K.
    """
    zeros = jnp.zeros((batch,), jnp.int32)
    return RoundState(
        target=target,
        drafter=drafter,
        proposal=_no_proposal(batch, draft_tokens),
        anchor=zeros,
        tokens=jnp.zeros((batch, size), jnp.int32),
        length=zeros,
        emitted=zeros,
        status=jnp.full((batch,), int(Status.EMPTY), jnp.int32),
        failures=zeros,
        stop_state=zeros,
        structure_state=zeros,
        stats=Stats.zeros(batch, draft_tokens),
    )


def read(
    target: Target, drafter: Drafter, state: RoundState, tokens: jax.Array, count: jax.Array
) -> tuple[RoundState, jax.Array]:
    """Run the next tokens of the prompts. All of them are committed, none is emitted.

    Args:
      target: the target.
      drafter: the drafter.
      state: rows that have read ``length`` tokens of their prompts.
      tokens: [B, T] int32. Entries at or past ``count`` are ignored, whatever they hold.
      count: [B] int32, 0..T.

    Returns:
      The state, and the argument for :func:`logits_after`: the hidden row of each row's last token
      [B, 1, D], or, without a head, the logits after it [B, 1, V]. It is valid only in rows with
      ``count > 0``.
    """
    batch, size = state.tokens.shape
    step = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    place = jnp.where(step < count[:, None], state.length[:, None] + step, size)
    text = set_in_rows(state.tokens, place, tokens)
    last = jnp.maximum(count - 1, 0)
    out = guard.forward(target, tokens, count, state.target, last)
    zeros = jnp.zeros((batch,), jnp.int32)
    feed = _feed(out, tokens, count, state.length, zeros, zeros)
    stats = replace(state.stats, target_forwards=state.stats.target_forwards + 1)
    state = replace(
        state,
        target=guard.commit(target, out.state, count, state.target),
        drafter=guard.ingest(drafter, state.drafter, feed),
        tokens=text,
        length=state.length + count,
        stats=stats,
    )
    if full_target(target).head is None:
        return state, out.logits
    assert out.hidden is not None, "a target with a head gives its hidden rows"
    # The logits are not used, and so are not computed.
    return state, jnp.take_along_axis(out.hidden, last[:, None, None], axis=1, mode="clip")


def logits_after(target: Target, last: jax.Array, needed: jax.Array | None = None) -> jax.Array:
    """Return the logits [B, 1, V] float32 after the tokens read so far.

    Args:
      target: the target.
      last: see :func:`read`.
      needed: [] bool: whether they are needed; otherwise they are zeros. Default: they are.
    """
    head = full_target(target).head
    if head is None:
        return last
    shape = (last.shape[0], 1, target.vocab_size)
    if needed is None:
        return guard.check_logits(target, head.logits(last), shape)
    return lax.cond(
        needed,
        lambda: guard.check_logits(target, head.logits(last), shape),
        lambda: jnp.zeros(shape, jnp.float32),
    )


def begin(
    drafter: Drafter,
    state: RoundState,
    logits: jax.Array,
    rules: Rules,
    *,
    logprobs: int | None = None,
) -> tuple[RoundState, RoundInfo]:
    """Emit the token that follows the prompt, and propose for the first round.

    Args:
      drafter: the drafter.
      state: rows that have read their prompts; those that run begin.
      logits: [B, 1, V] float32, after each row's last token.
      rules: see :class:`Rules`.
      logprobs: give log-probabilities, and so many alternatives.
    """
    state, first = emit_first_token(state, logits, rules, logprobs=logprobs)
    state, info = propose(drafter, state, rules, vocab_size=logits.shape[-1])
    return state, replace(first, draft=info)


def emit_first_token(
    state: RoundState, logits: jax.Array, rules: Rules, *, logprobs: int | None = None
) -> tuple[RoundState, RoundInfo]:
    """Emit the token that follows the prompt, in running rows. Args: see :func:`begin`."""
    none = _no_proposal(logits.shape[0], 0)
    verdict = _judge(logits, state, none, rules)
    state, window_tokens, count, accepted = _emit(state, verdict, none, rules)
    no_drafts = DraftInfo(jnp.zeros_like(count), jnp.zeros((), jnp.int32))
    return state, RoundInfo(
        accepted, count, no_drafts, _logprobs(logits, verdict, window_tokens, count, logprobs)
    )


def propose(
    drafter: Drafter, state: RoundState, rules: Rules, *, vocab_size: int
) -> tuple[RoundState, DraftInfo]:
    """Propose for the next round, in rows whose committed tokens the drafter has ingested."""
    zeros = jnp.zeros_like(state.length)
    feed = _feed(None, None, zeros, state.length - 1, *_ask(state, drafter, rules), state.anchor)
    feed = replace(feed, draw=sampling.drafting(rules.sampling, state.length))
    return _propose(drafter, state, feed, vocab_size, rules)


def round(
    target: Target,
    drafter: Drafter,
    state: RoundState,
    rules: Rules,
    *,
    logprobs: int | None = None,
    drafted: bool = False,
) -> tuple[RoundState, RoundInfo]:
    """Verify the proposal, commit the accepted rows, feed the drafter, propose again.

    A drafter with ``declines`` often proposes nothing. With it, rounds without any drafts run the
    target over one token per row, at the cost of a plain step.

    Args:
      target: the target.
      drafter: the drafter.
      state: state from :func:`prefill` or an earlier round.
      rules: see :class:`Rules`.
      logprobs: give log-probabilities, and so many alternatives.
      drafted: whether some row is known to have drafts.
    """
    proposal = state.proposal

    def with_drafts() -> _Verified:
        return _verify(target, drafter, state, proposal, rules, logprobs)

    def without() -> _Verified:
        nothing = jax.tree.map(lambda x: x[:, :0], (proposal.tokens, proposal.support))
        none = replace(proposal, tokens=nothing[0], support=nothing[1])
        verified = _verify(target, drafter, state, none, rules, logprobs)
        return _widen(verified, proposal.tokens.shape[1])

    declines = full_drafter(drafter).declines and proposal.tokens.shape[1] > 0
    if declines and not drafted:
        verified = lax.cond(jnp.any(proposal.length > 0), with_drafts, without)
    else:
        verified = with_drafts()
    state, info = _propose(drafter, verified.state, verified.feed, target.vocab_size, rules)
    return state, RoundInfo(verified.accepted, verified.feed.count, info, verified.logprobs)


@struct.dataclass
class _Verified:
    """Result of a round before the drafter proposes."""

    state: RoundState  # committed, and ingested by the drafter
    feed: Feed  # feed of the drafter, count rows of 1 + K
    accepted: jax.Array  # [B] int32; -1: did not run
    logprobs: Logprobs | None


def _verify(
    target: Target,
    drafter: Drafter,
    state: RoundState,
    proposal: Proposal,
    rules: Rules,
    logprobs: int | None,
) -> _Verified:
    """Run the target over anchor and drafts, emit and commit the accepted, feed the drafter."""
    running = state.status == Status.RUNNING
    first = state.length - 1
    count = jnp.where(running, 1 + proposal.length, 0)
    window = jnp.concatenate([state.anchor[:, None], proposal.tokens], axis=1)  # [B, 1 + K]
    out = guard.forward(target, window, count, state.target)
    verdict = _judge(out.logits, state, proposal, rules)
    state, window_tokens, rows, accepted = _emit(state, verdict, proposal, rules)
    # A round that emits m tokens commits m rows: the old anchor and all but the last of them.
    committed = guard.commit(target, out.state, rows, state.target)
    stats = replace(
        state.stats,
        target_forwards=state.stats.target_forwards + 1,
        rounds=state.stats.rounds + running.astype(jnp.int32),
    )
    state = replace(state, target=committed, stats=stats)
    feed = _feed(out, window, rows, first, *_ask(state, drafter, rules), state.anchor)
    feed = replace(feed, draw=sampling.drafting(rules.sampling, state.length))
    state = replace(state, drafter=guard.ingest(drafter, state.drafter, feed))
    chances = _logprobs(out.logits, verdict, window_tokens, rows, logprobs)
    return _Verified(state, feed, accepted, chances)


def _widen(verified: _Verified, drafts: int) -> _Verified:
    """Return the same result, padded by ``drafts`` unused token rows."""

    def wide(x: jax.Array, fill: int = 0) -> jax.Array:
        beside = ((0, 0), (0, drafts), *[(0, 0)] * (x.ndim - 2))
        return jnp.pad(x, beside, constant_values=fill)

    feed, logprobs = verified.feed, verified.logprobs
    aux, hidden, tokens = jax.tree.map(wide, (feed.aux, feed.hidden, feed.tokens))
    if logprobs is not None:
        tops = wide(logprobs.top_tokens, NO_TOKEN)
        logprobs = replace(jax.tree.map(wide, logprobs), top_tokens=tops)
    feed = replace(feed, aux=aux, hidden=hidden, tokens=tokens)
    return replace(verified, feed=feed, logprobs=logprobs)


def _judge(logits: jax.Array, state: RoundState, proposal: Proposal, rules: Rules) -> Verdict:
    """Verify a proposal under the rules of each row."""
    how, raw, complete = rules.sampling, logits, None
    if how is not None:
        history = History(state.tokens, state.length, state.emitted, proposal.tokens)
        logits = sampling.adjust(logits, how, history, rules.stop_ids)
    if rules.structures is not None:
        states = _structure_states(state, proposal.tokens, rules)
        logits = automaton.masked(rules.structures, rules.stop_ids, states, logits)
        complete = automaton.complete(rules.structures, states)
    if how is None or how.streams is None:
        verdict = verify.greedy(logits, proposal)
    else:
        verdict = verify.sampled(logits, proposal, how.target, how.streams, state.length)
    if complete is None and (how is None or (not how.masks and how.allowed is None)):
        return verdict
    return replace(verdict, failure=verify.failure(raw, verdict.accepted, complete))


def _emit(
    state: RoundState, verdict: Verdict, proposal: Proposal, rules: Rules
) -> tuple[RoundState, jax.Array, jax.Array, jax.Array]:
    """Append the accepted drafts and the next token, up to the first stop.

    Returns:
      The state, the candidate tokens [B, 1 + K], the number of emitted ones [B], and the number of
      drafts among those [B] (-1: the row did not run).
    """
    running = state.status == Status.RUNNING
    batch, drafts = proposal.tokens.shape
    place = jnp.arange(drafts + 1, dtype=jnp.int32)[None]
    # Example: drafts [4 7 9], accepted 2, next 8: window_tokens = [4 7 8 .], three tokens.
    padded = jnp.pad(proposal.tokens, ((0, 0), (0, 1)))
    window_tokens = jnp.where(
        place < verdict.accepted[:, None], padded, verdict.next_token[:, None]
    )
    available = verdict.accepted + verdict.finite.astype(jnp.int32)
    by_id = jnp.any(window_tokens[:, :, None] == rules.stop_ids[:, None], axis=-1)
    by_text, stop_state = _match_stops(state, window_tokens, rules)
    structure_states = _structure_states(state, window_tokens, rules)
    stops = (by_id | by_text) & (place < available[:, None])
    stopped = jnp.any(stops, axis=1)
    where = jnp.argmax(stops, axis=1).astype(jnp.int32)
    count = jnp.where(running, jnp.where(stopped, where + 1, available), 0)

    def at(x: jax.Array, index: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, index[:, None], axis=1)[:, 0]

    position = jnp.where(
        place < count[:, None], state.length[:, None] + place, state.tokens.shape[1]
    )
    tokens = set_in_rows(state.tokens, position, window_tokens)
    length, emitted = state.length + count, state.emitted + count
    stop = jnp.where(at(by_id, where), Status.STOP, Status.STOP_STRING)
    status = jnp.where(stopped, stop, _limits(verdict, length, emitted, rules))
    status = jnp.where(running, status, state.status).astype(jnp.int32)
    last = jnp.maximum(count - 1, 0)
    anchor = jnp.where(count > 0, at(window_tokens, last), state.anchor)
    stop_state = jnp.where(count > 0, at(stop_state, last), state.stop_state)

    accepted = jnp.minimum(verdict.accepted, count)
    # The draft after the accepted prefix was evaluated too, unless a stop came first.
    judged = jnp.where(accepted == verdict.accepted, accepted + 1, accepted)
    evaluated = jnp.where(running, jnp.minimum(judged, proposal.length), 0)
    accepted = jnp.where(running, accepted, 0)
    stats = state.stats
    if drafts:
        stats = replace(
            stats,
            proposed=stats.proposed + jnp.where(running, proposal.length, 0),
            evaluated_at=_tally(stats.evaluated_at, evaluated),
            accepted_at=_tally(stats.accepted_at, accepted),
        )
    stats = replace(stats, emitted=stats.emitted + count)
    state = replace(
        state,
        tokens=tokens,
        length=length,
        emitted=emitted,
        status=status,
        anchor=anchor,
        stop_state=stop_state,
        structure_state=at(structure_states, count),
        stats=stats,
    )
    return state, window_tokens, count, jnp.where(running, accepted, -1)


def _structure_states(state: RoundState, tokens: jax.Array, rules: Rules) -> jax.Array:
    """Return the states of the structures' automata before and after tokens, [B, 1 + T]."""
    return automaton.window(rules.structures, rules.stop_ids, state.structure_state, tokens)


def _limits(verdict: Verdict, length: jax.Array, emitted: jax.Array, rules: Rules) -> jax.Array:
    """Return the status of each row that emitted no stop, [B]."""
    failure = Status.NONFINITE if verdict.failure is None else verdict.failure
    status = jnp.where(verdict.finite, Status.RUNNING, failure)
    status = jnp.where(length >= rules.max_length, Status.CONTEXT, status)
    return jnp.where(emitted >= rules.max_new_tokens, Status.LENGTH, status)


def _match_stops(
    state: RoundState, window_tokens: jax.Array, rules: Rules
) -> tuple[jax.Array, jax.Array]:
    """Return whether each token completes a stop string, and the automata's states, [B, 1 + K]."""
    stop = rules.stop_text
    if stop is None:
        return jnp.zeros(window_tokens.shape, bool), jnp.zeros(window_tokens.shape, jnp.int32)
    stop_state, found = stop_strings.run(stop, state.stop_state, window_tokens)
    if rules.sampling is not None:
        out = state.emitted[:, None] + 1 + jnp.arange(window_tokens.shape[1], dtype=jnp.int32)[None]
        found = found & (out > rules.sampling.min_new_tokens[:, None])
    return found, stop_state


def _logprobs(
    logits: jax.Array,
    verdict: Verdict,
    window_tokens: jax.Array,
    count: jax.Array,
    alternatives: int | None,
) -> Logprobs | None:
    """Return log-probabilities of the first ``count`` [B] of ``window_tokens`` [B, T]."""
    if alternatives is None:
        return None
    there = jnp.arange(window_tokens.shape[1], dtype=jnp.int32)[None] < count[:, None]
    mass = jax.nn.logsumexp(logits, axis=-1)
    token = (
        jnp.take_along_axis(logits, jnp.maximum(window_tokens, 0)[..., None], axis=-1)[..., 0]
        - mass
    )
    if alternatives == 0:
        top = jnp.zeros((*window_tokens.shape, 0), jnp.float32)
        ids = jnp.zeros((*window_tokens.shape, 0), jnp.int32)
    else:
        top, ids = largest_first(logits, alternatives)
        top = top - mass[..., None]
    return Logprobs(
        jnp.where(there, token, 0.0),
        jnp.where(there[..., None], ids, NO_TOKEN),
        jnp.where(there[..., None], top, 0.0),
        jnp.where(there, verdict.log_prob, 0.0),
    )


def _ask(state: RoundState, drafter: Drafter, rules: Rules) -> tuple[jax.Array, jax.Array]:
    """Return whether each row needs drafts, and how many it can use.

    A draft must leave room for the token that follows it, in the sequence and among the tokens
    still to emit. Example: with two tokens left to emit, one draft and its bonus.
    """
    room = rules.max_length - state.length - 1
    wanted = rules.max_new_tokens - state.emitted - 1
    limit = jnp.minimum(jnp.minimum(room, wanted), rules.draft_limit)
    limit = jnp.clip(limit, 0, drafter.draft_tokens)
    on = state.failures < MAX_FAILURES
    return (state.status == Status.RUNNING) & (limit > 0) & on, limit


def _feed(
    out: TargetOutput | None,
    tokens: jax.Array | None,
    count: jax.Array,
    first: jax.Array,
    wants: jax.Array,
    limit: jax.Array,
    anchor: jax.Array | None = None,
) -> Feed:
    return Feed(
        aux=None if out is None else out.aux,
        hidden=None if out is None else out.hidden,
        tokens=tokens,
        count=count,
        first_position=first,
        anchor=jnp.zeros_like(count) if anchor is None else anchor,
        wants_draft=wants.astype(bool),
        limit=limit,
    )


def _propose(
    drafter: Drafter, state: RoundState, feed: Feed, vocab_size: int, rules: Rules
) -> tuple[RoundState, DraftInfo]:
    """Propose drafts and update the counters: drafts reset a row's failures.

    A row without drafts for a harmless reason keeps its count of failures. A proposal that was cut
    because it is invalid is counted, too, with or without drafts left.
    """
    guide = automaton.guide(rules.structures, rules.stop_ids, state.structure_state)
    feed = replace(feed, guide=guide)
    drafts, proposal, info = guard.propose(drafter, state.drafter, feed)
    proposal, info = guard.sanitize(proposal, info, feed, vocab_size)
    drafted = proposal.length > 0
    running = state.status == Status.RUNNING
    off = running & (feed.limit > 0) & (state.failures >= MAX_FAILURES)
    info = replace(info, reason=jnp.where(off, NoDraft.OFF, info.reason).astype(jnp.int32))
    invalid = info.reason == NoDraft.INVALID
    failed = (info.reason == NoDraft.HOLE) | (info.reason == NoDraft.NONFINITE) | invalid
    failures = jnp.where(drafted, 0, state.failures + failed.astype(jnp.int32))
    reasons = jax.nn.one_hot(info.reason, len(NoDraft), dtype=jnp.int32)
    missed = jnp.where((running & (~drafted | invalid))[:, None], reasons, 0)
    stats = replace(
        state.stats,
        drafter_forwards=state.stats.drafter_forwards + info.forwards,
        undrafted=state.stats.undrafted + missed,
    )
    # The lattice is for the caller of a drafter; carrying it through the loop would cost a copy.
    state = replace(state, drafter=drafts, proposal=proposal, failures=failures, stats=stats)
    return state, info


def _tally(counts: jax.Array, reached: jax.Array) -> jax.Array:
    """Count every position below ``reached`` [B]: counts is [B, K]."""
    place = jnp.arange(counts.shape[1], dtype=jnp.int32)[None]
    return counts + (place < reached[:, None]).astype(jnp.int32)


def _no_proposal(batch: int, width: int) -> Proposal:
    return Proposal(jnp.zeros((batch, width), jnp.int32), jnp.zeros((batch,), jnp.int32))
