"""Calls to targets and drafters, with checks of their results.

A mistake in a drafter may cost acceptance or raise; it may not change the output. Mistakes visible
when a program is traced (members, shapes, types) raise ``ValueError`` then. Mistakes visible only
when the program runs are handled by :func:`sanitize`, in one place for ``generate``, ``stream`` and
the engine.

Reasons that the output stays the same as without drafts:

* *Greedy.* A draft is accepted only if it equals the target's best token, whatever was proposed.
* *Sampled, without a support.* A draft counts as proposed with probability one. Given any draft x,
  accepting it with p(x) and otherwise drawing from p without x emits exactly p, so the
  origin of x does not matter, nor does a choice to use it that depends on x itself.
* *Sampled, with a support.* Acceptance by min(1, p(x) / q(x)) is right if x was drawn from q. So a
  step is used only if its q is a distribution over the vocabulary and gives x a positive
  probability. Otherwise the proposal ends before the step, whose token is then drawn from p itself.
  The steps before it are verified as usual.

The cut is at the step, never at the whole row. Example: the second draft is broken whenever the
first is token 0. If the whole row were left without drafts in that case, a first draft 0 would
never be accepted, and 0 would be emitted too rarely.

One mistake cannot be recognised in one proposal: a valid support that drafts were not drawn from,
or a length that depends on the tokens drawn. A drafter without exact distributions for its drafts
must leave ``support`` out.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdraft.base import (
    NO_TOKEN,
    Drafter,
    DraftInfo,
    Feed,
    NoDraft,
    Proposal,
    Support,
    Target,
    TargetOutput,
)

TOLERANCE = 1e-4
"""Tolerance for the sum of a support's probabilities: only float32 rounding."""

_TARGET = ("vocab_size", "context_length", "init", "forward", "commit")
_DRAFTER = ("draft_tokens", "init", "ingest", "propose", "step")


# --------------------------------------------------------------------------- members


def check_target(target: Any) -> Target:
    """Check that ``target`` has the members of a :class:`jaxdraft.base.Target`.

    Raises:
      ValueError: a member is missing, or a size is not a positive integer.
    """
    _check_members("target", target, _TARGET, "jaxdraft.base.Target")
    for name in ("vocab_size", "context_length"):
        _check_size(f"target.{name}", getattr(target, name), 1)
    return target


def check_drafter(drafter: Any) -> Drafter:
    """Check that ``drafter`` has the members of a :class:`jaxdraft.base.Drafter`.

    Raises:
      ValueError: a member is missing, or ``draft_tokens`` is not a number of tokens.
    """
    _check_members("drafter", drafter, _DRAFTER, "jaxdraft.base.Drafter")
    _check_size("drafter.draft_tokens", drafter.draft_tokens, 0)
    return drafter


def _check_members(what: str, value: Any, names: tuple[str, ...], contract: str) -> None:
    missing = [name for name in names if not hasattr(value, name)]
    if missing:
        raise ValueError(
            f"{what} is {value!r}, without {', '.join(missing)}; expected a {contract}"
        )


def _check_size(what: str, value: Any, low: int) -> None:
    try:
        size = operator.index(value)
    except TypeError:
        size = low - 1
    if size < low or isinstance(value, bool):
        raise ValueError(f"{what} is {value!r}; expected an integer of at least {low}")


def check_form(what: str, old: Any, new: Any) -> None:
    """Check that a target or a drafter can take the place of another in compiled programs.

    Raises:
      ValueError: their settings differ, or an array's shape or type.
    """
    (olds, form), (news, found) = (jax.tree.flatten(part) for part in (old, new))
    if form != found:
        raise ValueError(
            f"the {what} is {_kind(new)} of another form; expected the settings of the engine's "
            f"{_kind(old)}"
        )
    paths = jax.tree_util.tree_leaves_with_path(new)
    for (path, _), a, b in zip(paths, olds, news, strict=True):
        one, other = (jax.typeof(x) if hasattr(x, "dtype") else type(x) for x in (a, b))
        if one != other:
            raise ValueError(f"{what}{jax.tree_util.keystr(path)} is {other}; expected {one}")


def _kind(part: Any) -> str:
    return f"a {type(part).__name__}"


# --------------------------------------------------------------------------- targets


def forward(
    target: Target, tokens: jax.Array, count: jax.Array, state: Any, row: jax.Array | None = None
) -> TargetOutput:
    """Call :meth:`jaxdraft.base.Target.forward` and check the form of its result.

    Args:
      target: the target.
      tokens: [B, T] int32.
      count: [B] int32.
      state: state of the target.
      row: [B] int32: the only row of which logits are needed.

    Raises:
      ValueError: the logits are not [B, T, V] float32 ([B, 1, V] with ``row``), or auxiliary or
        hidden states are not a floating-point array [B, T, ...].
    """
    if row is None:
        out = target.forward(tokens, count, state)
    else:
        out = target.forward(tokens, count, state, row=row)
    where = f"{type(target).__name__}.forward"
    if not isinstance(out, TargetOutput):
        raise ValueError(f"{where} returned {_form(out)}; expected a TargetOutput")
    batch, rows = tokens.shape
    shape = (batch, rows if row is None else 1, target.vocab_size)
    _check(where, "logits", out.logits, shape, jnp.float32)
    for name in ("aux", "hidden"):
        value = getattr(out, name)
        if value is not None:
            _check(where, name, value, (batch, rows, None), jnp.floating)
    return out


def check_logits(target: Target, logits: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Check the form of the logits from a target's head and return them.

    Args:
      target: the target.
      logits: result of the head.
      shape: required shape.

    Raises:
      ValueError: the logits are not a float32 array of this shape.
    """
    _check(f"{type(target).__name__}.head", "logits", logits, shape, jnp.float32)
    return logits


def commit(target: Target, tentative: Any, count: jax.Array, state: Any) -> Any:
    """Call :meth:`jaxdraft.base.Target.commit`; its result has the form of ``state``.

    Args:
      target: the target.
      tentative: the state of a ``TargetOutput``.
      count: [B] int32, rows to commit.
      state: the state before ``forward``.

    Raises:
      ValueError: the form changed, so that the next round could not use the state.
    """
    return _same_form(f"{type(target).__name__}.commit", state, target.commit(tentative, count))


# --------------------------------------------------------------------------- drafters


def ingest(drafter: Drafter, state: Any, feed: Feed) -> Any:
    """Call :meth:`jaxdraft.base.Drafter.ingest`; its result has the form of ``state``.

    Raises:
      ValueError: the form changed, so that the next round could not use the state.
    """
    return _same_form(f"{type(drafter).__name__}.ingest", state, drafter.ingest(state, feed))


def propose(drafter: Drafter, state: Any, feed: Feed) -> tuple[Any, Proposal, DraftInfo]:
    """Call :meth:`jaxdraft.base.Drafter.propose` and check the form of what it returns.

    Raises:
      ValueError: a missing member, a shape that does not go with B and K, or a type of number that
        cannot hold what it should; or the form of the state changed.
    """
    where = f"{type(drafter).__name__}.propose"
    returned = drafter.propose(state, feed)
    if not isinstance(returned, tuple) or len(returned) != 3:
        raise ValueError(f"{where} returned {_form(returned)}; expected state, proposal and info")
    after, proposal, info = returned
    if not isinstance(proposal, Proposal) or not isinstance(info, DraftInfo):
        raise ValueError(
            f"{where} returned {_form(proposal)} and {_form(info)} after its state; expected a "
            "Proposal and a DraftInfo"
        )
    batch, drafts = feed.anchor.shape[0], drafter.draft_tokens
    _check(where, "proposal.tokens", proposal.tokens, (batch, drafts), jnp.integer)
    _check(where, "proposal.length", proposal.length, (batch,), jnp.integer)
    _check(where, "info.reason", info.reason, (batch,), jnp.integer)
    _check(where, "info.forwards", info.forwards, (), jnp.integer)
    if (support := proposal.support) is not None:
        if not isinstance(support, Support):
            raise ValueError(f"{where}: support is {_form(support)}; expected a Support")
        name = "proposal.support"
        _check(where, f"{name}.tokens", support.tokens, (batch, drafts, None), jnp.integer)
        shape = tuple(support.tokens.shape)
        _check(where, f"{name}.probs", support.probs, shape, jnp.float32)
    return _same_form(where, state, after), proposal, info


def sanitize(
    proposal: Proposal, info: DraftInfo, feed: Feed, vocab_size: int
) -> tuple[Proposal, DraftInfo]:
    """End every row's proposal before the first draft that must not be verified.

    A row gets at most ``feed.limit`` drafts, and none if it requests none. Also, a draft is
    broken if it is not a token, or if drafts are drawn and its support is not a distribution over
    tokens that gives it a positive probability; so is a length that is not in 0..K. Rows with a
    broken draft or length get the reason ``NoDraft.INVALID``. The module docstring explains why
    this keeps the distribution.

    Example, V = 9, limit 3: tokens ``4 -1 7`` and length 3 become ``4 . .``, length 1.

    Args:
      proposal: from :func:`propose`.
      info: from :func:`propose`.
      feed: feed of that call.
      vocab_size: V.

    Returns:
      The proposal in int32 and without its lattice, with a support only if drafts are drawn; and
      the info.
    """
    drafts = proposal.tokens.shape[1]
    wants = feed.wants_draft & (feed.limit > 0)
    claimed = _wide(proposal.length)
    broken = (claimed < 0) | (claimed > drafts)
    asked = jnp.minimum(
        jnp.clip(claimed, 0, drafts).astype(jnp.int32), jnp.where(wants, feed.limit, 0)
    )
    support = None if feed.draw is None else proposal.support
    tokens, sound = _as_tokens(proposal.tokens, vocab_size)
    if support is not None:
        among, inside = _as_tokens(support.tokens, vocab_size)
        support = Support(among, support.probs)
        sound = sound & _drawn(tokens, support, inside)
    place = jnp.arange(drafts, dtype=jnp.int32)[None]
    first = jnp.min(jnp.where(sound, drafts, place), axis=1, initial=drafts)  # that is broken
    length = jnp.minimum(asked, first).astype(jnp.int32)
    broken = wants & (broken | (length < asked))
    known = (info.reason >= 0) & (info.reason < len(NoDraft))
    reason = jnp.where(broken | ~known, NoDraft.INVALID, info.reason.astype(jnp.int32))
    tokens = jnp.where(place < length[:, None], tokens, NO_TOKEN)
    info = replace(info, reason=reason.astype(jnp.int32), forwards=info.forwards.astype(jnp.int32))
    return Proposal(tokens, length, support=support), info


def _drawn(tokens: jax.Array, support: Support, inside: jax.Array) -> jax.Array:
    """Return whether each step's support is a distribution that its draft can come from, [B, K].

    Entries of probability zero may hold any token.
    """
    probs = support.probs
    positive = probs > 0  # false for NaN
    valid = jnp.all((probs == 0) | (positive & inside), axis=-1)
    whole = jnp.abs(jnp.sum(probs, axis=-1) - 1.0) <= TOLERANCE
    return valid & whole & jnp.any(positive & (support.tokens == tokens[..., None]), axis=-1)


def _as_tokens(values: jax.Array, vocab_size: int) -> tuple[jax.Array, jax.Array]:
    """Return integers as int32, with NO_TOKEN for non-tokens, and whether each is a token."""
    values = _wide(values)
    inside = (values >= 0) & (values < vocab_size)
    return jnp.where(inside, values, NO_TOKEN).astype(jnp.int32), inside


def _wide(values: jax.Array) -> jax.Array:
    """Return integers in a type that can be compared with K and V."""
    return values.astype(jnp.int32) if values.dtype.itemsize < 4 else values


def needed(drafter: Any, name: str, value: jax.Array | None, width: int | None) -> jax.Array:
    """Return a member of a feed for a drafter that needs it.

    Args:
      drafter: the drafter.
      name: "aux", "hidden" or "tokens", as in :class:`jaxdraft.base.Feed`.
      value: that member.
      width: size of its last axis. None: it is [B, T].

    Raises:
      ValueError: the target does not provide the member, or with another width.
    """
    reader = type(drafter).__name__
    if value is None:
        raise ValueError(f"{reader} reads Feed.{name}, but the target's forward returned none")
    if width is not None and value.shape[-1] != width:
        raise ValueError(
            f"{reader} reads Feed.{name} of width {width}; the target's has width {value.shape[-1]}"
        )
    return value


# --------------------------------------------------------------------------- forms


def _check(where: str, name: str, value: Any, shape: tuple[int | None, ...], dtype: Any) -> None:
    """Check that ``value`` is an array of this shape (None: any size) and kind of number."""
    found = np.shape(value) if hasattr(value, "dtype") else None
    fits = found is not None and len(found) == len(shape)
    fits = fits and all(a is None or a == b for a, b in zip(shape, found or (), strict=True))
    if fits and jnp.issubdtype(value.dtype, dtype):
        return
    kinds = {jnp.integer: "integers", jnp.floating: "floats", jnp.float32: "float32"}
    sizes = ", ".join("*" if size is None else str(size) for size in shape)
    raise ValueError(
        f"{where} returned {name} of {_form(value)}; expected {kinds[dtype]} [{sizes}]"
    )


def _form(value: Any) -> str:
    """Return the type and shape of a value as text."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype} [{', '.join(map(str, value.shape))}]"
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, tuple) else "")


def _same_form(where: str, before: Any, after: Any) -> Any:
    """Return ``after`` if its leaves have the shapes and types of those of ``before``."""
    old, new = (jax.tree.flatten_with_path(x) for x in (before, after))
    if old[1] != new[1]:
        raise ValueError(f"{where} returned a state of structure {new[1]}; expected {old[1]}")
    for (path, x), (_, y) in zip(old[0], new[0], strict=True):
        x, y = jax.typeof(x), jax.typeof(y)
        if x.shape != y.shape or x.dtype != y.dtype:
            raise ValueError(
                f"{where} returned state{jax.tree_util.keystr(path)} of {_form(y)}; expected "
                f"{_form(x)}, as it was"
            )
    return after
