"""Automata over tokens: which token may follow, and where the text is complete.

A round runs them on the device. The state of a row is one number. The tokens of a vocabulary fall
into few *classes*: two tokens of a class lead from every state to the same state. So an automaton
is a small table over states and classes, and the class of every token, instead of a mask of V
tokens for each state. Example, ``ab*`` over the tokens 0 = ``a``, 1 = ``b``, 2 = ``bb``, 3 = ``c``:

  classes = [3, 2, 2, 0]
  table   = [[-1, -1, -1,  1],   state 0: ``a`` alone
             [-1,  1,  1, -1]]   state 1: ``b`` or ``bb``, or the end

Class 0 has the tokens that no state allows. Class 1 has the stop ids of the row, which the table
allows where the text is complete. -1 means that a token is not allowed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jaxdraft.base import MASKED
from jaxdraft.meshes import set_in_rows
from jaxdraft.sizes import power_of_two

NO_STRUCTURE = -1
"""Index for a row whose text is free."""

REFUSED = -1
"""State after a token that is not allowed. It never leads elsewhere."""

NEVER, END = 0, 1
"""The classes of tokens that no state allows, and of stop ids."""

MAX_STATES = 2**14
"""Maximum number of states of an automaton; they are stored in 16 bits."""

_MERGING = 2**18
"""Maximum number of states, times steps in which they are told apart, before they are merged."""

_COLUMNS = 2**22
"""Entries of the table over states and tokens that are computed at once."""


@dataclasses.dataclass(frozen=True, eq=False)
class TokenAutomaton:
    """An automaton over the tokens of one vocabulary, on the host. State 0 is the start.

    Attributes:
      table: [S, C] int16, state after a token of each class; REFUSED if it is not allowed.
      classes: [V] int16, class of each token.
    """

    table: np.ndarray
    classes: np.ndarray

    @classmethod
    def of(
        cls,
        transitions: Mapping[int, Mapping[int, int]],
        *,
        start: int,
        complete: Sequence[int],
        vocab_size: int,
    ) -> TokenAutomaton:
        """Return the automaton with given transitions.

        Args:
          transitions: ``{state: {token: state}}``; other tokens are not allowed.
          start: the first state.
          complete: states in which the text may end.
          vocab_size: V.

        Raises:
          ValueError: a token outside of the vocabulary, or no text leads from the start to its end.
        """
        names = dict.fromkeys([start, *complete])
        for state, after in transitions.items():
            names.update(dict.fromkeys([state, *after.values()]))
        numbers = {name: place for place, name in enumerate(names)}
        _check_states(len(numbers))
        table = np.full((len(numbers), vocab_size), REFUSED, np.int16)
        for state, after in transitions.items():
            for token, name in after.items():
                if not 0 <= token < vocab_size:
                    raise ValueError(
                        f"state {state} has token {token}; expected 0..{vocab_size - 1}"
                    )
                table[numbers[state], token] = numbers[name]
        ends = np.isin(np.arange(len(numbers)), [numbers[name] for name in complete])
        return _reduced([table], ends, vocab_size)

    @classmethod
    def over_bytes(
        cls, steps: np.ndarray, ends: np.ndarray, tokens: Sequence[bytes], vocab_size: int
    ) -> TokenAutomaton:
        """Return the automaton over tokens of an automaton over bytes.

        Args:
          steps: [S, 256] int32, state after each byte; REFUSED if it is not allowed.
          ends: [S] bool, states in which the text may end.
          tokens: the bytes of each token; those without bytes are never allowed.
          vocab_size: V. Tokens past it are left out, and ids past the tokens are never allowed.

        Raises:
          ValueError: too many states, or the tokens spell no text that the automaton accepts.
        """
        _check_states(len(steps))
        steps, ends = _merged(steps, ends)  # first, since there may be many tokens
        return _reduced(_columns(steps, tokens, vocab_size), ends, vocab_size)

    @property
    def shape(self) -> tuple[int, int]:
        """S and C."""
        return self.table.shape[0], self.table.shape[1]

    def allowed(self, state: int, stop_ids: Sequence[int] = ()) -> np.ndarray:
        """Return the tokens that may follow in ``state``, [V] bool."""
        if state == REFUSED:
            return np.zeros(self.classes.shape, bool)
        classes = self.classes.copy()
        classes[list(stop_ids)] = END
        return self.table[state, classes] != REFUSED

    def run(self, tokens: Sequence[int], stop_ids: Sequence[int] = ()) -> int:
        """Return the state after tokens from the start; REFUSED if one of them is not allowed."""
        return self.run_from(0, tokens, stop_ids)

    def run_from(self, state: int, tokens: Sequence[int], stop_ids: Sequence[int] = ()) -> int:
        """Return the state after more tokens; REFUSED if one of them is not allowed."""
        for token in tokens:
            if state == REFUSED or token < 0:
                return REFUSED
            kind = END if token in stop_ids else self.classes[token]
            state = int(self.table[state, kind])
        return state

    def complete(self, state: int) -> bool:
        """Return whether the text may end in ``state``."""
        return state != REFUSED and self.table[state, END] != REFUSED


def _check_states(count: int) -> None:
    if count > MAX_STATES:
        raise ValueError(
            f"the structure has {count} states; expected at most {MAX_STATES}: use smaller counts "
            "of repetitions, or less depth"
        )


def _columns(steps: np.ndarray, tokens: Sequence[bytes], vocab: int) -> Iterator[np.ndarray]:
    """Yield the states after each token, [S, some of V] int16, in the order of the tokens."""
    states = len(steps)
    dead = states  # one more state, so that no byte needs a condition
    table = np.vstack([np.where(steps == REFUSED, dead, steps), np.full((1, 256), dead)])
    table = table.astype(np.int16)
    width = max(1, _COLUMNS // (states + 1))
    for start in range(0, vocab, width):
        ids = range(start, min(start + width, vocab))
        part = [tokens[i] if i < len(tokens) else b"" for i in ids]
        lengths = np.asarray([len(token) for token in part])
        text = np.zeros((len(part), max(1, int(lengths.max(initial=0)))), np.uint8)
        for number, token in enumerate(part):
            text[number, : len(token)] = np.frombuffer(token, np.uint8)
        reached = np.repeat(np.arange(states, dtype=np.int16)[:, None], len(part), axis=1)
        reached[:, lengths == 0] = dead
        for place in range(text.shape[1]):
            longer = np.flatnonzero(lengths > place)
            reached[:, longer] = table[reached[:, longer], text[longer, place][None]]
        yield np.where(reached == dead, np.int16(REFUSED), reached)


def _reduced(
    columns: Iterator[np.ndarray] | Sequence[np.ndarray], ends: np.ndarray, vocab: int
) -> TokenAutomaton:
    """Return the automaton of the columns of all tokens, without states that lead to no end."""
    known: dict[bytes, int] = {}
    kinds: list[np.ndarray] = []
    first = np.empty(vocab, np.int64)
    token = 0
    for part in columns:
        for column in np.ascontiguousarray(part.T):
            number = known.setdefault(column.tobytes(), len(known))
            if number == len(kinds):
                kinds.append(column.copy())
            first[token] = number
            token += 1
    found = _useful(np.stack(kinds, axis=1), ends)
    if found is None:
        raise ValueError(
            "no text that the structure allows can be written with the tokens of this vocabulary"
        )
    table, ends = _useful(*_merged(*found)) or found
    # Columns that differed in useless states alone are equal now; the empty one becomes class 0.
    kept, again = np.unique(table, axis=1, return_inverse=True)
    again = np.asarray(again).reshape(-1)
    empty = (kept == REFUSED).all(axis=0)
    place = np.where(empty, NEVER, np.cumsum(~empty) + END)
    end = np.where(ends, np.arange(len(ends)), REFUSED)[:, None]
    never = np.full((len(ends), 1), REFUSED)
    whole = np.concatenate([never, end, kept[:, ~empty]], axis=1).astype(np.int16)
    if whole.shape[1] > 2**15:
        raise ValueError(f"the structure has {whole.shape[1]} classes of tokens; expected 2**15")
    return TokenAutomaton(whole, place[again][first].astype(np.int16))


def _useful(table: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the table of the states that some text passes from the start to an end.

    They are numbered anew, the start first. None if there is no such text.
    """
    useful = ends.copy()
    while True:
        more = useful | np.any((table != REFUSED) & useful[table], axis=1)
        if (more == useful).all():
            break
        useful = more
    if not useful[0]:
        return None
    table = np.where((table != REFUSED) & useful[table], table, REFUSED)
    order, seen = [0], {0}
    for state in order:  # grows while it is read
        for after in np.unique(table[state]).tolist():
            if after != REFUSED and after not in seen:
                seen.add(after)
                order.append(after)
    numbers = np.full(len(table) + 1, REFUSED, np.int64)  # the last entry is that of REFUSED
    numbers[order] = np.arange(len(order))
    return numbers[table[order]], ends[order]


def _merged(table: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the table with states merged that the same texts follow (Moore, 1956).

    States are told apart by what follows within more and more tokens. If that does not come to an
    end soon, as with very long chains of states, the table is returned as it was.
    """
    labels = ends.astype(np.int64)
    for _ in range(_MERGING // len(ends)):
        after = np.append(labels, REFUSED)[table]
        keys = np.concatenate([labels[:, None], after], axis=1)
        _, first, found = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        found = np.asarray(found).reshape(-1)
        if found.max() == labels.max():
            order = np.append(first[found[0]], np.delete(first, found[0]))  # the start first
            numbers = np.empty(len(order) + 1, np.int64)
            numbers[found[order]], numbers[-1] = np.arange(len(order)), REFUSED
            return numbers[np.append(found, -1)[table]][order], ends[order]
        labels = found
    return table, ends


# --------------------------------------------------------------------------- on the device


@struct.dataclass
class Structures:
    """Automata over tokens, with the index of each row's automaton."""

    table: jax.Array  # [U, S, C] int16
    classes: jax.Array  # [U, V] int16
    which: jax.Array  # [B] int32, below U; NO_STRUCTURE: none


def sizes(automata: Sequence[TokenAutomaton]) -> tuple[int, int, int]:
    """Return U, S and C for automata of these sizes, rounded up so that there are few programs."""
    states = max(automaton.shape[0] for automaton in automata)
    classes = max(automaton.shape[1] for automaton in automata)
    return power_of_two(len(automata)), _power_of_four(states), _power_of_four(classes)


def _power_of_four(size: int) -> int:
    """Return 256, 1024, 4096, ...: few sizes, so that other structures rarely need new programs."""
    return 4 ** max(4, -(-(size - 1).bit_length() // 2))


def stack(
    automata: Sequence[TokenAutomaton], shape: tuple[int, int, int], vocab: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tables [U, S, C] and the classes [U, V] of automata, for a round.

    Args:
      automata: at most U, each with at most S states and C classes.
      shape: U, S and C.
      vocab: V.
    """
    table = np.full(shape, REFUSED, np.int16)
    classes = np.full((shape[0], vocab), NEVER, np.int16)
    for number, automaton in enumerate(automata):
        s, c = automaton.shape
        table[number, :s, :c] = automaton.table
        classes[number] = automaton.classes
    return table, classes


def window(
    structures: Structures | None, stop_ids: jax.Array, state: jax.Array, tokens: jax.Array
) -> jax.Array:
    """Run each row's automaton over its next tokens.

    Args:
      structures: the automata, if there are any.
      stop_ids: [B, N] int32, NO_TOKEN where there is none.
      state: [B] int32.
      tokens: [B, T] int32; entries that are no token lead to REFUSED.

    Returns:
      [B, 1 + T] int32: the states before the first token and after each.
    """
    if structures is None:
        return jnp.zeros((tokens.shape[0], 1 + tokens.shape[1]), jnp.int32)
    which, free = jnp.maximum(structures.which, 0), structures.which == NO_STRUCTURE

    def read(state: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
        after = _after(structures.table[which, jnp.maximum(state, 0)], state)  # [B, C]
        kind = structures.classes[which, jnp.maximum(token, 0)].astype(jnp.int32)
        kind = jnp.where(jnp.any(stop_ids == token[:, None], axis=1), END, kind)
        kind = jnp.where(token < 0, NEVER, kind)
        state = jnp.take_along_axis(after, kind[:, None], axis=1)[:, 0].astype(jnp.int32)
        state = jnp.where(free, 0, state)
        return state, state

    _, states = lax.scan(read, state, jnp.swapaxes(tokens, 0, 1), unroll=True)
    return jnp.concatenate([state[:, None], jnp.swapaxes(states, 0, 1)], axis=1)


def masked(
    structures: Structures, stop_ids: jax.Array, states: jax.Array, logits: jax.Array
) -> jax.Array:
    """Return the logits with MASKED for tokens that may not follow.

    Args:
      structures: the automata.
      stop_ids: [B, N] int32: they may follow where the text is complete, and nowhere else.
      states: [B, T] int32; REFUSED allows nothing.
      logits: [B, T, V] float32.
    """
    vocab = structures.classes.shape[1]
    which = jnp.maximum(structures.which, 0)
    after = _after(structures.table[which[:, None], jnp.maximum(states, 0)], states)  # [B, T, C]
    classes = jnp.take(structures.classes, which, axis=0)
    classes = set_in_rows(classes, jnp.where(stop_ids >= 0, stop_ids, vocab), END)
    classes = jnp.broadcast_to(classes[:, None], logits.shape).astype(jnp.int32)
    allowed = jnp.take_along_axis(after, classes, axis=2) != REFUSED
    free = (structures.which == NO_STRUCTURE)[:, None, None]
    return jnp.where(allowed | free, logits, MASKED)


@struct.dataclass
class StructureGuide:
    """A :class:`jaxdraft.base.Guide` of rows with automata."""

    structures: Structures
    stop_ids: jax.Array  # [B, N] int32
    state: jax.Array  # [B] int32

    @property
    def free(self) -> jax.Array:
        """Rows without a structure, [B] bool."""
        return self.structures.which == NO_STRUCTURE

    def scores(self, scores: jax.Array, tokens: jax.Array | None = None) -> jax.Array:
        """See :meth:`jaxdraft.base.Guide.scores`."""
        which, vocab = jnp.maximum(self.structures.which, 0), self.structures.classes.shape[1]
        if tokens is None:
            tokens = jnp.arange(scores.shape[1], dtype=jnp.int32)
        tokens = jnp.clip(jnp.broadcast_to(tokens, scores.shape), 0, vocab - 1)
        kinds = self.structures.classes[which[:, None], tokens].astype(jnp.int32)
        stops = jnp.any(tokens[:, :, None] == self.stop_ids[:, None], axis=-1)
        after = _after(self.structures.table[which, jnp.maximum(self.state, 0)], self.state)
        allowed = jnp.take_along_axis(after, jnp.where(stops, END, kinds), axis=1) != REFUSED
        allowed = allowed | self.free[:, None] | ~jnp.any(allowed, axis=1, keepdims=True)
        return jnp.where(allowed, scores, MASKED)

    def after(self, token: jax.Array) -> StructureGuide:
        """Return the guide after the draft ``token`` [B]."""
        states = window(self.structures, self.stop_ids, self.state, token[:, None])
        return self.at(states[:, 1])

    def at(self, state: jax.Array) -> StructureGuide:
        """Return the guide at another place [B]."""
        return replace(self, state=state)


def guide(
    structures: Structures | None, stop_ids: jax.Array, state: jax.Array
) -> StructureGuide | None:
    """Return the guide of rows in these states; None without structures."""
    return None if structures is None else StructureGuide(structures, stop_ids, state)


def complete(structures: Structures, states: jax.Array) -> jax.Array:
    """Return whether a structure is complete in each state, [B, T] bool; free texts never are."""
    which = structures.which[:, None]
    ends = structures.table[jnp.maximum(which, 0), jnp.maximum(states, 0), END] != REFUSED
    return ends & (states >= 0) & (which != NO_STRUCTURE)


def _after(rows: jax.Array, states: jax.Array) -> jax.Array:
    """Return rows of a table [..., C], without any token where the state [...] is REFUSED."""
    return jnp.where((states < 0)[..., None], jnp.asarray(REFUSED, rows.dtype), rows)
