"""Generation: one XLA program for a whole batch, and a streaming driver over the same round.

The host prepares arrays and reads results. Nothing is transferred to it between the first and the
last token. With arrays in, :func:`generate` traces under the caller's own ``jit``.
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jaxdraft import guard, rounds
from jaxdraft import prompts as given
from jaxdraft.base import NO_TOKEN, Drafter, Status, Target, full_target, mesh_of
from jaxdraft.checks import check_int
from jaxdraft.devices import prompt_chunk
from jaxdraft.meshes import set_in_rows, traced_for
from jaxdraft.model import Model
from jaxdraft.plan import check_batch
from jaxdraft.prompts import Prompts, host, traced
from jaxdraft.requests import Options, check
from jaxdraft.rounds import Logprobs, RoundInfo, RoundState, Rules
from jaxdraft.sampling import Sampling
from jaxdraft.stop_strings import StopText
from jaxdraft.structure import Structured
from jaxdraft.structure.automaton import Structures, sizes, stack
from jaxdraft.telemetry import Stats
from jaxdraft.text import OutputText, Text


@struct.dataclass
class Trace:
    """Record of every round."""

    accepted: jax.Array  # [B, rounds] int32 accepted drafts; -1 after the row has ended


@struct.dataclass
class Output:
    """Result of a generation."""

    tokens: jax.Array  # [B, N] int32 without the prompt; NO_TOKEN past ``lengths``
    lengths: jax.Array  # [B] int32
    status: jax.Array  # [B] int32, a Status
    stats: Stats
    trace: Trace | None = None
    logprobs: Logprobs | None = None  # T = N; None unless requested
    prompts: jax.Array | None = None  # [B, P] int32, padded
    prompt_lengths: jax.Array | None = None  # [B] int32
    text: Text | None = struct.field(pytree_node=False, default=None)
    stop: tuple[str, ...] = struct.field(pytree_node=False, default=())

    @property
    def finish_reasons(self) -> list[str]:
        """Reason each row ended: "stop", "stop_string", "length", "context", "complete" (of a
        structure), "dead_end" (structure, masks and bans allow no token) or "nonfinite"."""
        return [Status(int(code)).reason for code in np.asarray(self.status)]

    def ids(self) -> list[list[int]]:
        """Return the tokens of each row as a list."""
        tokens, lengths = np.asarray(self.tokens), np.asarray(self.lengths)
        return [row[:n].tolist() for row, n in zip(tokens, lengths, strict=True)]

    def texts(self) -> list[str]:
        """Return the text of each row, without the prompt and the stop string that ended it.

        Raises:
          ValueError: the model has no tokenizer.
        """
        if self.text is None:
            raise ValueError("the model has no tokenizer: read out.tokens and out.lengths instead")
        rows, stopped = self.ids(), np.asarray(self.status) == Status.STOP_STRING
        prompts: list[Any] = [()] * len(rows)
        if self.prompts is not None and self.prompt_lengths is not None:
            lengths = np.asarray(self.prompt_lengths)
            prompts = [p[:n] for p, n in zip(np.asarray(self.prompts), lengths, strict=True)]
        return [
            OutputText(self.text, prompt=prompt, stop=self.stop if ended else ()).push(
                ids, done=True, stopped=bool(ended)
            )
            for ids, prompt, ended in zip(rows, prompts, stopped, strict=True)
        ]


@struct.dataclass
class Event:
    """Tokens that one row received in one round of :func:`stream`."""

    row: int
    tokens: list[int]
    text: str | None  # None without a tokenizer; may lag behind the tokens by a partial character
    accepted: int  # accepted drafts among the tokens; -1 for the token after the prompt
    finish_reason: str | None  # set on the row's last event
    logprobs: Logprobs | None = None  # of these tokens, numpy arrays [T], [T, n], [T, n]


def generate(
    model: Model,
    prompts: Prompts,
    *,
    lengths: Any = None,
    max_new_tokens: int | Sequence[int] = 128,
    drafter: str | Drafter = "auto",
    sampling: Sampling | None = None,
    key: jax.Array | int | None = None,
    stop_ids: Sequence[int] | None = None,
    stop: str | Sequence[str] = (),
    structure: Structured | Sequence[Structured | None] | None = None,
    draft_limit: int | Sequence[int] | jax.Array | None = None,
    max_length: int | None = None,
    draft_tokens: int | None = None,
    logprobs: int | None = None,
    memory: int | str | None = None,
    trace: bool = False,
    throw: bool = True,
    n: int = 1,
) -> Output:
    """Continue every prompt losslessly: drafting never changes what the target would produce.

    Any argument may be traced by a JAX transformation, except those that determine shapes:
    ``max_new_tokens``, ``max_length``, ``draft_tokens``, ``logprobs``, ``memory`` and the strings.
    Inside ``shard_map``, pass ``check_vma=False`` to it.

    Greedy decoding gives the tokens of the target alone. Sampling gives tokens with the same
    distribution as the target alone. The whole generation is one compiled program. Prompts and
    outputs share buffers whose sizes are powers of two, so other prompts, limits and stop ids of
    the same bucket compile nothing.

    Args:
      model: model from :func:`jaxdraft.load` or ``Model.of``.
      prompts: a string; several strings; ids, [P]; several sequences of ids; or a padded [B, P]
        integer array with ``lengths``.
      lengths: [B], number of ids in each row's prompt, for an array. Default: all.
      max_new_tokens: tokens to emit, one number or one per row. Under ``jit``: one Python number.
      drafter: "auto" (the model's own, if it has one), its kind ("mtp", "dflash2", "dspark"),
        "ngram" or "none", which always work; two joined by a plus, "ngram+auto", to use the second
        where the first proposes nothing; or your own drafter.
      sampling: rules for choosing tokens; see :class:`jaxdraft.Sampling`. Default: greedy.
      key: a PRNG key of any kind, or a seed for one; needed above temperature zero. Row i draws
        from ``fold_in(key, i)`` only, independently of the other rows.
      stop_ids: tokens that end a row; they are emitted. Default: the model's; ``()``: none.
      stop: strings that end a row. The token that completes one is the row's last. Texts end
        before the string.
      structure: texts that the outputs must be, such as
        ``Structure.json_schema(schema)``: one for all rows, or one per row (None: any text). Stop
        ids are banned until the text is complete, and emitted when nothing else may follow. Without
        a stop id that row ends as "complete".
      draft_limit: maximum number of drafts per round, one number or one per row. Default: K.
      max_length: the longest sequence, prompt included. Default: the model's context.
      draft_tokens: K of the drafter: any number for "mtp" and "ngram", at most the number of its
        block for a block drafter. Static: another K compiles another program, unlike another
        ``draft_limit``. Default: the drafter's own K.
      logprobs: number of alternatives in ``out.logprobs``, which also has the log-probability of
        every token. Default: no ``out.logprobs``.
      memory: limit in bytes, or a string like "12GiB". A batch whose weights and state need more
        is refused before anything is allocated. :func:`jaxdraft.plan` computes what fits.
      trace: whether to return ``out.trace``.
      throw: whether to raise when a row's logits are not finite, or when no token may follow.
        Otherwise only ``status`` reports it.
      n: samples per prompt. Each prompt is read once and continued by n rows side by side: with P
        prompts, ``B = P * n``, and row i continues prompt ``i // n``. Lists of settings, one per
        row, have B entries; ``lengths`` has P. Tokens are those of n copies of each prompt.

    Returns:
      Tokens [B, N], their number [B], and counters.

    Raises:
      ValueError: an empty prompt, ids outside the vocabulary, a prompt that leaves no room, or
        arguments of the wrong form: nothing was allocated or run. With ``throw``, a row that no
        token may follow.
      FloatingPointError: with ``throw``, non-finite logits.
    """
    options = Options(
        max_new_tokens=max_new_tokens, stop_ids=stop_ids, draft_limit=draft_limit,
        max_length=max_length, sampling=sampling, key=key, stop=stop, logprobs=logprobs,
        structure=structure,
    )  # fmt: skip
    ready = _prepare(model, prompts, lengths, options, drafter, draft_tokens, memory, n)
    given.check_varying(model, ready.drafter, ready.tokens, ready.lengths, ready.rules)
    out = _generate(
        model.target,
        ready.drafter,
        ready.tokens,
        ready.lengths,
        ready.rules,
        new_tokens=ready.new_tokens,
        chunk=ready.chunk,
        samples=n,
        trace=trace,
        logprobs=logprobs,
    )
    out = _described(out, model, ready)
    if traced(out):  # through any argument: the output has no concrete values yet
        cropped = jax.tree.map(lambda x: x[:, : ready.wanted], out.logprobs)
        return replace(out, tokens=out.tokens[:, : ready.wanted], logprobs=cropped)
    return _finish(out, ready.wanted, throw)


def stream(
    model: Model,
    prompts: Prompts,
    *,
    lengths: Any = None,
    max_new_tokens: int | Sequence[int] = 128,
    drafter: str | Drafter = "auto",
    sampling: Sampling | None = None,
    key: jax.Array | int | None = None,
    stop_ids: Sequence[int] | None = None,
    stop: str | Sequence[str] = (),
    structure: Structured | Sequence[Structured | None] | None = None,
    draft_limit: int | Sequence[int] | None = None,
    max_length: int | None = None,
    draft_tokens: int | None = None,
    logprobs: int | None = None,
    memory: int | str | None = None,
    throw: bool = True,
    n: int = 1,
) -> Iterator[Event]:
    """Generate round by round, with one event per row that received tokens.

    Python calls the same prefill and the same round as :func:`generate`, with the same tokens as
    the result. The generator returns the final :class:`Output` (the ``value`` of its
    ``StopIteration``).

    Args, Raises: see :func:`generate`. Arguments are checked before this returns.
    """
    options = Options(
        max_new_tokens=max_new_tokens, stop_ids=stop_ids, draft_limit=draft_limit,
        max_length=max_length, sampling=sampling, key=key, stop=stop, logprobs=logprobs,
        structure=structure,
    )  # fmt: skip
    ready = _prepare(model, prompts, lengths, options, drafter, draft_tokens, memory, n)
    given.check_concrete(model, ready.drafter, ready.tokens, ready.lengths, ready.rules)
    return _stream(model, ready, throw, logprobs)


# --------------------------------------------------------------------------- programs


@functools.partial(jax.jit, static_argnames=("new_tokens", "chunk", "samples", "trace", "logprobs"))
def _generate(
    target: Target,
    drafter: Drafter,
    tokens: jax.Array,
    lengths: jax.Array,
    rules: Rules,
    *,
    new_tokens: int,
    chunk: int,
    samples: int = 1,
    trace: bool,
    logprobs: int | None,
) -> Output:
    """Run the prefill, then rounds until every row is done."""
    placement = full_target(target).placement
    with traced_for(mesh_of(target)):
        sizes = dict(new_tokens=new_tokens, chunk=chunk, samples=samples)
        out = _whole(target, drafter, tokens, lengths, rules, sizes, trace, logprobs)
    return out if placement is None else placement.everywhere(out)


def _whole(
    target: Target,
    drafter: Drafter,
    tokens: jax.Array,
    lengths: jax.Array,
    rules: Rules,
    sizes: dict[str, int],
    trace: bool,
    logprobs: int | None,
) -> Output:
    Carry = tuple[RoundState, jax.Array, Trace | None, Logprobs | None]
    state, info = _start(target, drafter, tokens, lengths, rules, **sizes, logprobs=logprobs)
    batch, new_tokens = tokens.shape[0] * sizes["samples"], sizes["new_tokens"]
    # A round emits at least one token of every running row.
    seen = Trace(jnp.full((batch, new_tokens), -1, jnp.int32)) if trace else None
    collected = _no_logprobs(batch, new_tokens, logprobs)
    collected = _append(collected, info, jnp.zeros((batch,), jnp.int32))

    def running(carry: Carry) -> jax.Array:
        return jnp.any(carry[0].status == Status.RUNNING)

    def body(carry: Carry) -> Carry:
        state, number, seen, collected = carry
        start = state.emitted
        state, info = rounds.round(target, drafter, state, rules, logprobs=logprobs)
        if seen is not None:
            place = (jnp.zeros_like(number), number)
            seen = Trace(lax.dynamic_update_slice(seen.accepted, info.accepted[:, None], place))
        return state, number + 1, seen, _append(collected, info, start)

    carry = (state, jnp.asarray(0, jnp.int32), seen, collected)
    state, _, seen, collected = lax.while_loop(running, body, carry)
    lengths = _each(lengths, sizes["samples"])
    return replace(_output(state, lengths, new_tokens), trace=seen, logprobs=collected)


def _start(
    target: Target,
    drafter: Drafter,
    tokens: jax.Array,
    lengths: jax.Array,
    rules: Rules,
    new_tokens: int,
    chunk: int,
    samples: int = 1,
    logprobs: int | None = None,
) -> tuple[RoundState, RoundInfo]:
    """Prefill into buffers with room for the output."""
    size = tokens.shape[1]
    room = jnp.pad(tokens, ((0, 0), (0, new_tokens)))
    with traced_for(mesh_of(target)):
        return rounds.prefill(
            target,
            drafter,
            room,
            lengths,
            rules,
            capacity=size + new_tokens,
            chunk=chunk,
            samples=samples,
            logprobs=logprobs,
        )


_start_program = functools.partial(
    jax.jit, static_argnames=("new_tokens", "chunk", "samples", "logprobs")
)(_start)


def _each(x: Any, samples: int) -> Any:
    """Repeat the rows of an array of prompts for their samples."""
    if samples == 1:
        return x
    if traced(x):
        return jnp.repeat(x, samples, axis=0)
    repeated = np.repeat(host(x), samples, axis=0)  # on the host: one program less
    return jax.device_put(repeated) if isinstance(x, jax.Array) else repeated


@functools.partial(jax.jit, donate_argnames=("state",), static_argnames=("logprobs",))
def _round_program(
    target: Target,
    drafter: Drafter,
    state: RoundState,
    rules: Rules,
    logprobs: int | None = None,
) -> tuple[RoundState, RoundInfo]:
    with traced_for(mesh_of(target)):
        return rounds.round(target, drafter, state, rules, logprobs=logprobs)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _no_logprobs(batch: int, size: int, alternatives: int | None) -> Logprobs | None:
    if alternatives is None:
        return None
    return Logprobs(
        jnp.zeros((batch, size), jnp.float32),
        jnp.full((batch, size, alternatives), NO_TOKEN, jnp.int32),
        jnp.zeros((batch, size, alternatives), jnp.float32),
        jnp.zeros((batch, size), jnp.float32),
    )


def _append(collected: Logprobs | None, info: RoundInfo, start: jax.Array) -> Logprobs | None:
    """Append a round's log-probabilities to the ``start`` [B] existing ones."""
    if collected is None or info.logprobs is None:
        return collected
    step = jnp.arange(info.logprobs.token.shape[1], dtype=jnp.int32)[None]
    size = collected.token.shape[1]
    place = jnp.where(step < info.emitted[:, None], start[:, None] + step, size)
    return jax.tree.map(lambda x, new: set_in_rows(x, place, new), collected, info.logprobs)


_append_program = jax.jit(_append)


def _output(state: RoundState, lengths: jax.Array, new_tokens: int) -> Output:
    place = jnp.arange(new_tokens, dtype=jnp.int32)[None]
    index = lengths[:, None] + place
    tokens = jnp.take_along_axis(state.tokens, index, axis=1, mode="clip")
    tokens = jnp.where(place < state.emitted[:, None], tokens, NO_TOKEN)
    return Output(tokens, state.emitted, state.status, state.stats)


_output_program = functools.partial(jax.jit, static_argnames=("new_tokens",))(_output)


# --------------------------------------------------------------------------- host


@struct.dataclass
class _Prepared:
    """Arguments of a generation, checked and on the device."""

    drafter: Drafter
    tokens: jax.Array  # [B, P], padded to a bucket
    lengths: jax.Array  # [B]
    rules: Rules
    new_tokens: int  # N, rounded up
    wanted: int  # the caller's N
    chunk: int  # rows of a prompt that run at once
    samples: int  # n
    stop: tuple[str, ...]


def _prepare(
    model: Model,
    prompts: Prompts,
    lengths: Any,
    options: Options,
    drafter: str | Drafter,
    draft_tokens: int | None,
    memory: int | str | None,
    samples: int = 1,
) -> _Prepared:
    """Check all arguments, then transfer them to the device."""
    guard.check_target(model.target)
    given.check_static(
        max_new_tokens=options.max_new_tokens, max_length=options.max_length,
        draft_tokens=draft_tokens, logprobs=options.logprobs, memory=memory,
    )  # fmt: skip
    chosen = model.choose(drafter, draft_tokens)
    ids, count = given.arrays(model, prompts, lengths)
    batch, unknown = ids.shape[0] * check_int("n", samples), traced(ids, count)
    each = _each(count, samples)
    found = check(model, options, each, draft_tokens=chosen.draft_tokens)
    wanted = most = int(found.max_new_tokens.max())
    if not unknown:  # no row can emit more than the context leaves
        most = min(most, found.max_length - int(count.min()))
        ids = given.pad(ids, given.bucket_of(ids.shape[1]))
    new_tokens = given.bucket_of(most)
    if memory is not None:
        capacity = ids.shape[1] + new_tokens  # as in `_start`
        check_batch(model.target, chosen, batch=batch, capacity=capacity, memory=memory)
    fields = dict(
        stop_ids=found.stop_ids,
        max_new_tokens=found.max_new_tokens,
        max_length=np.full((batch,), found.max_length, np.int32),
        draft_limit=found.draft_limit,
        sampling=found.sampling,
    )
    automaton = None
    if found.automaton is not None:
        automaton = (found.automaton[None], np.zeros((batch,), np.int32))
    structures = None
    if found.structures is not None:
        automata, which = found.structures
        vocab = model.target.vocab_size
        structures = Structures(*stack(automata, sizes(automata), vocab), which)  # type: ignore[bad-argument-type]
    # One transfer for everything.
    ids, count, fields, automaton, structures = jax.device_put(
        (ids, count, fields, automaton, structures)
    )
    stop_text = None if automaton is None else StopText(*automaton)
    rules = Rules(**fields, stop_text=stop_text, structures=structures)
    chunk = prompt_chunk(model.target, batch=ids.shape[0], size=ids.shape[1], room=new_tokens)
    return _Prepared(chosen, ids, count, rules, new_tokens, wanted, chunk, samples, found.stop)


def _described(out: Output, model: Model, ready: _Prepared) -> Output:
    """Add the fields that ``Output.texts`` needs."""
    tokens, lengths = (_each(x, ready.samples) for x in (ready.tokens, ready.lengths))
    return replace(out, prompts=tokens, prompt_lengths=lengths, text=model.text, stop=ready.stop)


def _finish(out: Output, wanted: int, throw: bool) -> Output:
    """Cut the buffers to what was asked for. On the host: a slice would be one more program."""
    status = host(out.status)
    if throw and (status == Status.NONFINITE).any():
        rows = np.flatnonzero(status == Status.NONFINITE).tolist()
        raise FloatingPointError(
            f"the target's logits are not finite in rows {rows}; throw=False returns what was "
            "emitted before"
        )
    if throw and (status == Status.DEAD_END).any():
        rows = np.flatnonzero(status == Status.DEAD_END).tolist()
        raise ValueError(
            f"no token may follow in rows {rows}: masks, bans and structures allow none together; "
            "throw=False returns what was emitted before"
        )
    if out.tokens.shape[1] > wanted:
        cut_off = jax.tree.map(lambda x: host(x)[:, :wanted], (out.tokens, out.logprobs))
        tokens, logprobs = jax.device_put(cut_off)
        out = replace(out, tokens=tokens, logprobs=logprobs)
    if out.trace is not None:
        ran = max(1, int(host(out.stats.rounds).max(initial=0)))
        accepted = host(out.trace.accepted)[:, :ran]
        out = replace(out, trace=Trace(jax.device_put(accepted)))
    return out


def _stream(
    model: Model, ready: _Prepared, throw: bool, logprobs: int | None
) -> Generator[Event, None, Output]:
    target, drafter = model.target, ready.drafter
    state, info = _start_program(
        target,
        drafter,
        ready.tokens,
        ready.lengths,
        ready.rules,
        new_tokens=ready.new_tokens,
        chunk=ready.chunk,
        samples=ready.samples,
        logprobs=logprobs,
    )
    tokens, lengths = (_each(x, ready.samples) for x in (ready.tokens, ready.lengths))
    batch = tokens.shape[0]
    seen, accepted = np.zeros(batch, np.int64), np.full(batch, -1)
    prompt, ids = host(lengths), host(tokens)
    texts = None
    if model.text is not None:
        parts = (row[:n] for row, n in zip(ids, prompt, strict=True))
        texts = [OutputText(model.text, prompt=part, stop=ready.stop) for part in parts]
    done = np.zeros(batch, bool)
    collected = _no_logprobs(batch, ready.new_tokens, logprobs)
    while True:
        status, emitted = host(state.status), host(state.emitted)
        tokens, chances = host(state.tokens), jax.tree.map(host, info.logprobs)
        collected = _append_program(collected, info, jax.device_put(seen.astype(np.int32)))
        for row in range(batch):
            if done[row]:
                continue
            done[row] = status[row] != Status.RUNNING
            new = tokens[row, prompt[row] + seen[row] : prompt[row] + emitted[row]].tolist()
            stopped = status[row] == Status.STOP_STRING
            text = None
            if texts is not None:
                text = texts[row].push(new, done=bool(done[row]), stopped=bool(stopped))
            reason = Status(int(status[row])).reason if done[row] else None
            count = len(new)
            chance = jax.tree.map(lambda x, row=row, count=count: x[row, :count], chances)
            yield Event(row, new, text, int(accepted[row]), reason, chance)
        seen = emitted.astype(np.int64)
        if done.all():
            break
        state, info = _round_program(target, drafter, state, ready.rules, logprobs=logprobs)
        accepted = host(info.accepted)
    out = replace(_output_program(state, lengths, ready.new_tokens), logprobs=collected)
    return _finish(_described(out, model, ready), ready.wanted, throw)
