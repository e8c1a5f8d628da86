"""Logits -> distributions -> tokens.

These steps apply to a row of logits, in this order:

1. repetition penalty r, for tokens of prompt and output: positive logits are divided by r, others
   multiplied (Keskar et al., arXiv:1909.05858, section 4.1);
2. presence and frequency penalties, for tokens of the output: ``presence`` once, ``frequency`` for
   every time the token was emitted;
3. logit bias;
4. bans: tokens that a mask does not allow, and stop ids while fewer than ``min_new_tokens`` tokens
   are emitted;
5. temperature; at 0 the best token has probability one, ties go to the lowest id, and steps 6 to 8
   have no effect;
6. top-k: the k largest logits; this and the next two steps apply to the tokens left by all earlier
   steps;
7. top-p: the smallest set of most probable tokens whose mass reaches p (Holtzman et al.,
   arXiv:1904.09751);
8. min-p: tokens at least p times as probable as the most probable (Nguyen et al.,
   arXiv:2407.01082).

Tokens of equal probability are kept or removed together: each of the last three is a threshold.

In a verify window, the history of row i includes the drafts before it, as in plain decoding.
Random draws depend only on a row's own key and the position of the draw. So a state holds no keys,
and the draws of a row do not depend on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jaxdraft.base import MASKED, Draw, Truncation
from jaxdraft.keys import draw_keys
from jaxdraft.meshes import divided_vocabulary, set_in_rows
from jaxdraft.ranking import best_token, largest_first

Proposals = Literal["lattice", "greedy_path", "independent", "none"]

PROPOSALS: tuple[Proposals, ...] = ("lattice", "greedy_path", "independent", "none")
"""Ways to propose drafts for a sampled row; see :class:`Sampling`."""


class _Numbers(NamedTuple):
    temperature: float
    top_k: int
    top_p: float
    min_p: float


INDEPENDENT = _Numbers(temperature=0.1, top_k=0, top_p=0.95, min_p=0.3)
"""Rules by which ``independent`` draws drafts, regardless of the target's rules."""

_SORTED = 256
"""Number of largest logits to search before searching the whole vocabulary."""

Mask = Callable[[jax.Array, jax.Array], jax.Array]
"""(tokens [S] int32, length [] int32) -> tokens that may follow, [V] bool."""

_Number = float | Sequence[float] | np.ndarray | jax.Array


@struct.dataclass(kw_only=True)
class Sampling:
    """Rules for choosing tokens. The module docstring gives their order.

    Every number may be one for all rows, or one per row. All of them are dynamic: changing them
    compiles nothing. Only the presence of penalties, a bias or a mask is part of the program.

    Attributes:
      temperature: 0 is greedy.
      top_k: 0 is off.
      top_p: 1 is off.
      min_p: 0 is off.
      repetition_penalty: 1 is off.
      presence_penalty: in logits; 0 is off.
      frequency_penalty: in logits; 0 is off.
      min_new_tokens: stop ids are banned, and stop strings ignored, until so many tokens are
        emitted.
      logit_bias: ``{token: bias}`` or an array [V] or [B, V], added to the logits.
      allowed: bool, [V] or [B, V]: tokens that may be chosen.
      mask: for research: a traceable function of one row's history, ``mask(tokens [S] int32, length
        [] int32) -> bool [V]``, the tokens that may follow ``tokens[:length]``. Compared by
        identity: another function compiles another program. In an engine, each function runs for
        all rows of a step, and S is the engine's context.
      proposals: way to propose drafts for a sampled row. It does not change the distribution of
        the output, only the number of accepted drafts.

        * ``lattice``: each draft is drawn from the scores that its predecessor gives its
          candidates, tempered and truncated like the target's logits;
        * ``greedy_path``: the best candidate at each step, as in greedy decoding;
        * ``independent``: drawn as by ``lattice``, with separate rules: temperature 0.1, top-p
          0.95, min-p 0.3;
        * ``none``: sampled rows get no drafts.
    """

    temperature: _Number = 1.0
    top_k: _Number = 0
    top_p: _Number = 1.0
    min_p: _Number = 0.0
    repetition_penalty: _Number = 1.0
    presence_penalty: _Number = 0.0
    frequency_penalty: _Number = 0.0
    min_new_tokens: _Number = 0
    logit_bias: Mapping[int, float] | np.ndarray | jax.Array | None = None
    allowed: np.ndarray | jax.Array | None = None
    mask: Mask | None = struct.field(pytree_node=False, default=None)
    proposals: Proposals = struct.field(pytree_node=False, default="lattice")

    @property
    def random(self) -> bool:
        """Whether a key is needed. False only if the temperature is known to be zero."""
        if _traced(self.temperature):
            return True
        return bool(np.any(np.asarray(jax.device_get(self.temperature)) > 0))

    def resolve(self, batch: int, vocab_size: int, streams: jax.Array | None) -> SamplingRules:
        """Check all values and convert them to arrays of ``batch`` rows.

        Args:
          batch: B.
          vocab_size: V.
          streams: one key per row, [B]; None if no row is random.

        Raises:
          ValueError: a value outside its range, a token outside the vocabulary, a mask that allows
            nothing, or an array of another shape.
        """
        if self.proposals not in PROPOSALS:
            known = ", ".join(PROPOSALS)
            raise ValueError(f"proposals is {self.proposals!r}; expected one of {known}")

        def number(name: str, low: float, high: float, integer: bool = False) -> Any:
            return _per_row(name, getattr(self, name), batch, low, high, integer)

        inf = float("inf")
        target = Truncation(
            temperature=number("temperature", 0.0, inf),
            top_k=number("top_k", 0, 2**31 - 1, integer=True),
            top_p=number("top_p", 0.0, 1.0),
            min_p=number("min_p", 0.0, 1.0),
        )
        if not isinstance(target.top_p, jax.core.Tracer) and np.any(target.top_p <= 0):
            raise ValueError(f"top_p is {self.top_p!r}; expected more than 0, at most 1")
        penalties = Penalties(
            repetition=number("repetition_penalty", 1e-6, inf),
            presence=number("presence_penalty", -inf, inf),
            frequency=number("frequency_penalty", -inf, inf),
        )
        neutral = (1.0, 0.0, 0.0)
        values = (penalties.repetition, penalties.presence, penalties.frequency)
        off = all(
            not isinstance(value, jax.core.Tracer) and bool(np.all(value == none))
            for value, none in zip(values, neutral, strict=True)
        )
        return SamplingRules(
            target=target,
            drafts=self._drafts(target),
            streams=streams,
            min_new_tokens=number("min_new_tokens", 0, 2**31 - 1, integer=True),
            penalties=None if off else penalties,
            bias=_bias(self.logit_bias, batch, vocab_size),
            allowed=_allowed(self.allowed, batch, vocab_size),
            masks=() if self.mask is None else (self.mask,),
        )

    def _drafts(self, target: Truncation) -> Truncation:
        """Return the rules for drawing drafts; greedy rows draft greedily."""
        if self.proposals == "greedy_path":
            return replace(target, temperature=target.temperature * np.float32(0))
        if self.proposals == "independent":
            own = INDEPENDENT
            return Truncation(
                temperature=(target.temperature > 0) * np.float32(own.temperature),
                top_k=target.top_k * np.int32(0) + np.int32(own.top_k),
                top_p=target.top_p * np.float32(0) + np.float32(own.top_p),
                min_p=target.min_p * np.float32(0) + np.float32(own.min_p),
            )
        return target

    def limit(self, draft_limit: Any, rules: SamplingRules) -> Any:
        """Return ``draft_limit`` [B], zero for the sampled rows of ``proposals="none"``."""
        if self.proposals != "none":
            return draft_limit
        sampled = rules.target.temperature > 0
        known = isinstance(sampled, np.ndarray) and isinstance(draft_limit, np.ndarray)
        return (np if known else jnp).where(sampled, 0, draft_limit)


@struct.dataclass
class Penalties:
    """Penalties for tokens that occurred before."""

    repetition: jax.Array  # [B] float32
    presence: jax.Array  # [B] float32
    frequency: jax.Array  # [B] float32


@struct.dataclass
class SamplingRules:
    """:class:`Sampling` in the form for a round: one value per row."""

    target: Truncation
    drafts: Truncation
    streams: jax.Array | None  # [B] keys; None: no row is random
    min_new_tokens: jax.Array  # [B] int32
    penalties: Penalties | None = None
    bias: jax.Array | None = None  # [1 or B, V] float32
    allowed: jax.Array | None = None  # [1 or B, V] bool
    masks: tuple[Mask, ...] = struct.field(pytree_node=False, default=())
    which_mask: jax.Array | None = None
    """[B] int32, the index of each row's mask; -1: none. Default: the first, of all rows."""


@struct.dataclass
class History:
    """Tokens before and in a window of verify rows."""

    tokens: jax.Array  # [B, S] int32: prompt and output
    length: jax.Array  # [B] int32, tokens before the window's first prediction
    emitted: jax.Array  # [B] int32, output tokens among them
    drafts: jax.Array  # [B, K] int32; row i of the window follows the first i drafts


def drafting(rules: SamplingRules | None, position: jax.Array) -> Draw | None:
    """Return rules and keys for drawing the drafts that follow ``position`` [B]."""
    if rules is None or rules.streams is None:
        return None
    return Draw(rules.drafts, draw_keys(rules.streams, position, 2))


def adjust(
    logits: jax.Array, rules: SamplingRules, history: History, stop_ids: jax.Array
) -> jax.Array:
    """Apply steps 1 to 4: penalties, bias and bans.

    Args:
      logits: [B, T, V] float32, T = 1 + K: row i follows the first i drafts.
      rules: see :class:`SamplingRules`.
      history: see :class:`History`.
      stop_ids: [B, S] int32, NO_TOKEN where there is none.

    Returns:
      [B, T, V] float32; banned tokens have MASKED.
    """
    batch, rows, vocab = logits.shape
    step = jnp.arange(rows, dtype=jnp.int32)[None]
    if rules.penalties is not None:
        logits = _penalize(logits, rules.penalties, history)
    if rules.bias is not None:
        logits = logits + rules.bias[:, None]
    if rules.allowed is not None:
        logits = jnp.where(rules.allowed[:, None], logits, MASKED)
    for number, mask in enumerate(rules.masks):
        allowed = _masks(mask, history, rows)
        if rules.which_mask is not None:
            allowed = allowed | (rules.which_mask != number)[:, None, None]
        logits = jnp.where(allowed, logits, MASKED)
    early = history.emitted[:, None] + step < rules.min_new_tokens[:, None]  # [B, T]
    index = jnp.where(early[:, :, None] & (stop_ids >= 0)[:, None], stop_ids[:, None], vocab)
    flat = logits.reshape(batch * rows, vocab)  # a row of a batch for every step
    return set_in_rows(flat, index.reshape(batch * rows, -1), MASKED).reshape(logits.shape)


def _penalize(logits: jax.Array, penalties: Penalties, history: History) -> jax.Array:
    batch, rows, vocab = logits.shape
    place = jnp.arange(history.tokens.shape[1], dtype=jnp.int32)[None]
    start = (history.length - history.emitted)[:, None]
    none = jnp.zeros((batch, vocab), jnp.int32)
    prompt = set_in_rows(none, jnp.where(place < start, history.tokens, vocab), 1, add=True)
    output = (place >= start) & (place < history.length[:, None])
    output = set_in_rows(none, jnp.where(output, history.tokens, vocab), 1, add=True)
    # The history of row i also has drafts 0..i-1. Example: drafts [7 7] add zero, one and two 7s
    # to rows 0 to 2.
    counts = jnp.broadcast_to(output[:, None], (batch, rows, vocab))
    i = jnp.arange(rows, dtype=jnp.int32)[:, None]
    j = jnp.arange(history.drafts.shape[1], dtype=jnp.int32)[None]
    before = (j < i)[None] & (history.drafts >= 0)[:, None]  # [B, T, K]
    index = jnp.where(before, history.drafts[:, None], vocab)
    flat = counts.reshape(batch * rows, vocab)
    counts = set_in_rows(flat, index.reshape(batch * rows, -1), 1, add=True).reshape(counts.shape)

    def row(x: jax.Array) -> jax.Array:
        return x[:, None, None]

    seen = (counts > 0) | (prompt > 0)[:, None]
    r = row(penalties.repetition)
    logits = jnp.where(seen, jnp.where(logits > 0, logits / r, logits * r), logits)
    once = (counts > 0).astype(jnp.float32)
    often = counts.astype(jnp.float32)
    return logits - row(penalties.presence) * once - row(penalties.frequency) * often


def _masks(mask: Mask, history: History, rows: int) -> jax.Array:
    """Return the tokens that the callback allows after every row's history, [B, T, V]."""
    width = history.drafts.shape[1]

    def one(tokens: jax.Array, length: jax.Array, drafts: jax.Array) -> jax.Array:
        room = jnp.pad(tokens, (0, width))  # drafts may extend past the buffer
        text = lax.dynamic_update_slice(room, drafts, (length,))
        return jax.vmap(lambda i: mask(text, length + i))(jnp.arange(rows, dtype=jnp.int32))

    return jax.vmap(one)(history.tokens, history.length, jnp.maximum(history.drafts, 0))


@struct.dataclass
class Distribution:
    """Result of steps 5 to 8 for rows of logits, without a dense array of probabilities."""

    logits: jax.Array  # [..., V] float32: tempered, the largest is 0
    cutoff: jax.Array  # [...] float32: tokens below it have probability zero
    log_mass: jax.Array  # [...] float32: logsumexp of the rest

    def log_prob(self, tokens: jax.Array) -> jax.Array:
        """Return the log-probability of one token per row, [...]; MASKED for probability zero."""
        logit = jnp.take_along_axis(self.logits, tokens[..., None], axis=-1)[..., 0]
        return jnp.where(logit >= self.cutoff, logit - self.log_mass, MASKED)

    def probs(self) -> jax.Array:
        """Return dense probabilities, [..., V]."""
        kept = self.logits >= self.cutoff[..., None]
        return jnp.where(kept, jnp.exp(self.logits - self.log_mass[..., None]), 0.0)

    def rows(self, index: jax.Array) -> Distribution:
        """Return row ``index`` [B] of the [B, T] rows."""
        at = index[:, None]
        return Distribution(
            jnp.take_along_axis(self.logits, at[..., None], axis=1)[:, 0],
            jnp.take_along_axis(self.cutoff, at, axis=1)[:, 0],
            jnp.take_along_axis(self.log_mass, at, axis=1)[:, 0],
        )


def distribution(logits: jax.Array, truncation: Truncation) -> Distribution:
    """Apply temperature, top-k, top-p and min-p.

    Rows with temperature zero are treated as temperature one: the caller must take the ``argmax``
    for them.

    Args:
      logits: [B, ..., V] float32.
      truncation: [B].
    """
    shape = (logits.shape[0],) + (1,) * (logits.ndim - 2)
    t = jax.tree.map(lambda x: jnp.broadcast_to(x.reshape(shape), logits.shape[:-1]), truncation)
    heat = jnp.where(t.temperature > 0, t.temperature, 1.0)[..., None]
    # Dividing the difference: the largest is 0 at any temperature, and nothing overflows upwards.
    tempered = (logits - jnp.max(logits, axis=-1, keepdims=True)) / heat
    if logits.shape[-1] >= _SORTED:  # not the scores of a few candidates
        tempered = divided_vocabulary(tempered)
    cutoff = jnp.maximum(_cutoff(tempered, t), jnp.where(t.min_p > 0, jnp.log(t.min_p), MASKED))
    weights = jnp.where(tempered >= cutoff[..., None], jnp.exp(tempered), 0.0)
    return Distribution(tempered, cutoff, jnp.log(jnp.sum(weights, axis=-1)))


def probabilities(scores: jax.Array, truncation: Truncation) -> jax.Array:
    """Return dense probabilities [B, ..., C] of a few scores; one-hot at temperature zero."""
    shape = (scores.shape[0],) + (1,) * (scores.ndim - 1)
    best = jax.nn.one_hot(jnp.argmax(scores, axis=-1), scores.shape[-1], dtype=jnp.float32)
    warm = truncation.temperature.reshape(shape) > 0
    return jnp.where(warm, distribution(scores, truncation).probs(), best)


def draw(probs: jax.Array, keys: jax.Array) -> jax.Array:
    """Draw one index per row, [B] int32, with probabilities proportional to ``probs`` [B, X].

    The index is the argmax of log p + Gumbel noise.
    """
    return best_token(perturb(probs, gumbel(keys, probs.shape[1])))


def perturb(probs: jax.Array, noise: jax.Array) -> jax.Array:
    """Return ``log(probs) + noise``, about MASKED where the probability is zero."""
    return jnp.where(probs > 0, jnp.log(jnp.where(probs > 0, probs, 1.0)), MASKED) + noise


def gumbel(keys: jax.Array, size: int) -> jax.Array:
    """Return Gumbel noise of each key: [...] keys -> [..., size] float32."""
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (size,), jnp.float32))(keys.reshape(-1))
    return noise.reshape(*keys.shape, size)


def _cutoff(tempered: jax.Array, t: Truncation) -> jax.Array:
    """Return the joint threshold of top-k and top-p, [...]: tokens below it are removed.

    The few largest logits nearly always settle both. The whole vocabulary is searched only if some
    row is not settled. Each row takes its own result, so other rows do not affect it.
    """
    vocab = tempered.shape[-1]
    few = min(_SORTED, vocab)
    top_k = jnp.where(t.top_k > 0, jnp.minimum(t.top_k, vocab), vocab)
    cuts_p = t.top_p < 1.0
    active = jnp.any((top_k < vocab) | cuts_p)

    def none() -> jax.Array:
        return jnp.full(top_k.shape, MASKED, jnp.float32)

    def search() -> jax.Array:
        largest, _ = largest_first(tempered, few)
        kth = jnp.take_along_axis(largest, jnp.minimum(top_k, few)[..., None] - 1, axis=-1)[..., 0]
        kth = jnp.where(top_k < vocab, kth, MASKED)
        settled = (top_k <= few) | (top_k == vocab)
        if few < vocab:
            kth = lax.cond(
                jnp.all(settled),
                lambda: kth,
                lambda: jnp.where(settled, kth, _kth(tempered, top_k)),
            )
        weights = jnp.where(tempered >= kth[..., None], jnp.exp(tempered), 0.0)
        need = t.top_p * jnp.sum(weights, axis=-1)
        # Example: weights [.5 .3 .2], p = 0.7: cumulated [.5 .8 1], the second reaches it.
        cumulated = jnp.cumsum(jnp.where(largest >= kth[..., None], jnp.exp(largest), 0.0), axis=-1)
        reached = cumulated >= need[..., None]
        index = jnp.where(jnp.any(reached, axis=-1), jnp.argmax(reached, axis=-1), few - 1)
        nucleus = jnp.take_along_axis(largest, index[..., None], axis=-1)[..., 0]
        settled = jnp.any(reached, axis=-1) | ~cuts_p
        if few < vocab:
            nucleus = lax.cond(
                jnp.all(settled),
                lambda: nucleus,
                lambda: jnp.where(settled, nucleus, _nucleus(tempered, weights, need)),
            )
        return jnp.maximum(kth, jnp.where(cuts_p, nucleus, MASKED))

    return lax.cond(active, search, none)


def _kth(logits: jax.Array, k: jax.Array) -> jax.Array:
    """Return the k-th largest of [..., V], by bisection of the bits, without a sort."""
    return _threshold(logits, jnp.ones_like(logits), k.astype(jnp.float32))


def _nucleus(logits: jax.Array, weights: jax.Array, need: jax.Array) -> jax.Array:
    """Return the largest threshold whose tokens weigh at least ``need``."""
    return _threshold(logits, weights, need)


def _threshold(logits: jax.Array, weights: jax.Array, need: jax.Array) -> jax.Array:
    """Return the largest t, [...], where the weights of ``logits >= t`` sum to ``need`` or more.

    Floats are ordered like their bits once negative ones are flipped, so t is found bit by bit.
    Weights of one count exactly up to 2**24.
    """
    bits = lax.bitcast_convert_type(logits + 0.0, jnp.uint32)  # + 0.0: one zero
    ordered = jnp.where(bits & _HIGH, ~bits, bits | _HIGH)
    found = lax.platform_dependent(ordered, weights, need, cpu=_by_bits, default=_by_digits)
    return lax.bitcast_convert_type(jnp.where(found & _HIGH, found ^ _HIGH, ~found), jnp.float32)


_HIGH = np.uint32(0x80000000)


def _by_bits(ordered: jax.Array, weights: jax.Array, need: jax.Array) -> jax.Array:
    """Find the threshold in uint32, bit by bit."""

    def bit(number: jax.Array, low: jax.Array) -> jax.Array:
        trial = low | (_HIGH >> number.astype(jnp.uint32))
        mass = jnp.sum(jnp.where(ordered >= trial[..., None], weights, 0.0), axis=-1)
        return jnp.where(mass >= need, trial, low)

    return lax.fori_loop(0, 32, bit, jnp.zeros(need.shape, jnp.uint32))


def _by_digits(ordered: jax.Array, weights: jax.Array, need: jax.Array) -> jax.Array:
    """Find the threshold in uint32, four bits per pass over the weights.

    For GPUs: a loop would end a CUDA graph, and this takes 8 launches where bits take 32.
    """
    low = jnp.zeros(need.shape, jnp.uint32)
    for shift in range(28, -4, -4):
        trials = [low + jnp.uint32(digit << shift) for digit in range(1, 16)]
        kept = tuple(jnp.where(ordered >= trial[..., None], weights, 0.0) for trial in trials)
        masses = lax.reduce(kept, (jnp.float32(0),) * len(kept), _add, (ordered.ndim - 1,))
        for trial, mass in zip(trials, masses, strict=True):
            low = jnp.where(mass >= need, trial, low)
    return low


def _add(one: tuple[jax.Array, ...], other: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(a + b for a, b in zip(one, other, strict=True))


# --------------------------------------------------------------------------- host


def _per_row(name: str, value: Any, batch: int, low: float, high: float, integer: bool) -> Any:
    dtype = np.int32 if integer else np.float32
    known = not _traced(value)
    given = np.asarray(jax.device_get(value)) if known else jnp.asarray(value)
    kind = np.integer if integer else np.number
    if not np.issubdtype(given.dtype, kind) or given.shape not in ((), (batch,)):
        expected = "an integer" if integer else "a number"
        raise ValueError(f"{name} is {value!r}; expected {expected}, or {batch} of them")
    if not known:
        return jnp.broadcast_to(given.astype(dtype), (batch,))
    if not np.all((given >= low) & (given <= high)) or not np.all(np.isfinite(given)):
        raise ValueError(f"{name} is {value!r}; expected {_range(low, high)}")
    return np.broadcast_to(given, (batch,)).astype(dtype)


def _range(low: float, high: float) -> str:
    if np.isinf(low):
        return "a finite number"
    return f"at least {low:g}" if np.isinf(high) or high > 2**30 else f"{low:g} to {high:g}"


def _bias(value: Any, batch: int, vocab: int) -> Any:
    if value is None:
        return None
    if isinstance(value, Mapping):
        for token in value:
            if not 0 <= int(token) < vocab:
                raise ValueError(
                    f"logit_bias names token {token}; the vocabulary has ids 0..{vocab - 1}"
                )
        tokens, amounts = [int(token) for token in value], list(value.values())
        if _traced(amounts):
            amounts = jnp.stack([jnp.asarray(amount, jnp.float32) for amount in amounts])
            value = jnp.zeros((vocab,), jnp.float32).at[jnp.asarray(tokens)].set(amounts)
        else:
            bias = np.zeros((vocab,), np.float32)
            bias[tokens] = jax.device_get(amounts)
            value = bias
    value = _rows("logit_bias", value, batch, vocab)
    if _traced(value):
        return jnp.maximum(value.astype(jnp.float32), MASKED)
    if np.isnan(value).any() or np.isposinf(value).any():
        raise ValueError("logit_bias holds NaN or +inf; expected numbers below +inf")
    return np.maximum(value, MASKED).astype(np.float32)  # -inf bans


def _allowed(value: Any, batch: int, vocab: int) -> Any:
    if value is None:
        return None
    value = _rows("allowed", value, batch, vocab)
    if value.dtype != bool:
        raise ValueError(f"allowed is {value.dtype}; expected booleans")
    if not _traced(value) and not value.any(axis=-1).all():
        rows = np.flatnonzero(~value.any(axis=-1)).tolist()
        raise ValueError(f"allowed leaves no token in rows {rows}")
    return value


def _rows(name: str, value: Any, batch: int, vocab: int) -> Any:
    """Reshape [V] or [B, V] to [1 or B, V]."""
    if np.shape(value) not in ((vocab,), (batch, vocab)):
        expected = f"({vocab},) or ({batch}, {vocab})"
        raise ValueError(f"{name} has shape {np.shape(value)}; expected {expected}")
    value = jnp.asarray(value) if _traced(value) else np.asarray(jax.device_get(value))
    return value.reshape(-1, vocab)


def _traced(value: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value))


__all__ = [
    "INDEPENDENT",
    "PROPOSALS",
    "Distribution",
    "History",
    "Penalties",
    "Sampling",
    "SamplingRules",
    "adjust",
    "distribution",
    "draw",
    "drafting",
    "gumbel",
    "perturb",
    "probabilities",
]
