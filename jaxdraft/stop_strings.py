"""Stop strings as arrays: a string is found token by token, inside the round.

A string may end in the middle of an accepted block, in the middle of a token, or be spread over
several tokens. So the strings become an automaton over bytes (Aho and Corasick, 1975), and the
automaton a table over tokens: ``table[state, token]`` is the state after all bytes of the token.
An entry ``-1 - state`` leads to the same state as ``state`` and marks a token that completes a
string. The round emits and commits nothing after such a token, unless
``min_new_tokens`` is not reached yet. In that case row and automaton continue, so later
occurrences are found.

Example: stop string ``ab``, tokens 0 = ``a``, 1 = ``b``, 2 = ``aba``. States: 0 nothing, 1 after
``a``, 2 after ``ab``:

  table = [[1,  0, -2],
           [1, -3, -2],
           [1,  0, -2]]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jaxdraft.sizes import power_of_two


@struct.dataclass
class StopText:
    """Automata over tokens, with the index of each row's automaton. State 0 is the start."""

    table: jax.Array  # [U, states, V] int16
    which: jax.Array  # [B] int32, below U; NO_AUTOMATON: none


NO_AUTOMATON = -1
"""Index for a row without stop strings."""


def run(stop: StopText, state: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Run each row's automaton over its next tokens.

    Args:
      stop: the automata.
      state: [B] int32.
      tokens: [B, T] int32.

    Returns:
      The states after each token, [B, T] int32, and whether the token completes a string, [B, T]
      bool.
    """
    has = stop.which != NO_AUTOMATON
    which = jnp.maximum(stop.which, 0)

    def read(state: jax.Array, token: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        entry = stop.table[which, state, jnp.maximum(token, 0)].astype(jnp.int32)
        after = jnp.where(has, jnp.where(entry < 0, -1 - entry, entry), 0)
        return after, (after, has & (entry < 0))

    _, (states, found) = lax.scan(read, state, jnp.swapaxes(tokens, 0, 1))
    return jnp.swapaxes(states, 0, 1), jnp.swapaxes(found, 0, 1)


def byte_automaton(strings: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the automaton over bytes.

    Returns:
      Transitions [states, 256] int32, and whether a string ends in each state, [states] bool.

    Raises:
      ValueError: there is no string, or an empty one.
    """
    patterns = [s.encode("utf-8") for s in strings]
    if not patterns or not all(patterns):
        raise ValueError(f"stop strings are {list(strings)!r}; expected strings that are not empty")
    children: list[dict[int, int]] = [{}]  # a trie
    complete: set[int] = set()
    for pattern in patterns:
        state = 0
        for byte in pattern:
            if byte not in children[state]:
                children[state][byte] = len(children)
                children.append({})
            state = children[state][byte]
        complete.add(state)
    table = np.zeros((len(children), 256), np.int32)
    ends = np.isin(np.arange(len(children)), list(complete))
    # Breadth first: where a byte leads nowhere, go on as after the longest proper suffix.
    failure = [0] * len(children)
    queue = deque([0])
    while queue:
        state = queue.popleft()
        table[state] = table[failure[state]]
        ends[state] |= ends[failure[state]]
        for byte, child in children[state].items():
            failure[child] = int(table[failure[state], byte]) if state else 0
            table[state, byte] = child
            queue.append(child)
    return table, ends


def token_automaton(strings: Sequence[str], tokens: Sequence[bytes], vocab: int) -> np.ndarray:
    """Return the table over tokens, [states, V] int16; states are rounded up to a power of two.

    The padding avoids new programs: other strings of similar length have a table of the same shape.

    Args:
      strings: the stop strings.
      tokens: the bytes of each token; ids past its end have no bytes.
      vocab: V.

    Raises:
      ValueError: as for :func:`byte_automaton`, or strings of more than 2**14 bytes together.
    """
    over_bytes, ends = byte_automaton(strings)
    states = over_bytes.shape[0]
    if states > 2**14:
        raise ValueError(
            f"stop strings have {states - 1} bytes together; expected fewer than {2**14}"
        )
    size = power_of_two(states, least=16)
    lengths = np.zeros(vocab, np.int64)
    known = min(vocab, len(tokens))
    lengths[:known] = [len(t) for t in tokens[:known]]
    text = np.zeros((vocab, max(1, int(lengths.max(initial=0)))), np.uint8)
    for number, token in enumerate(tokens[:known]):
        text[number, : len(token)] = np.frombuffer(token, np.uint8)
    # All states of all tokens at once, byte by byte; few tokens are long.
    table = np.zeros((size, vocab), np.int16)
    reached = table[:states]
    reached[:] = np.arange(states)[:, None]
    found = np.zeros(reached.shape, bool)
    for place in range(text.shape[1]):
        longer = np.flatnonzero(lengths > place)
        reached[:, longer] = over_bytes[reached[:, longer], text[longer, place][None]]
        found[:, longer] |= ends[reached[:, longer]]
    reached[found] = -1 - reached[found]
    return table


def match(text: bytes, start: int, strings: Sequence[bytes]) -> tuple[int, int] | None:
    """Return the place of the first string to be complete, among those that end past ``start``.

    Among strings with the same end it is the longest. Example: in ``abab`` with ``start`` 2, ``ab``
    and ``bab`` both end at 4, and the place of ``bab`` is ``(1, 4)``.

    Args:
      text: bytes of the output.
      start: bytes before the token that completed a string.
      strings: the stop strings.
    """
    places = ((text.find(s, max(0, start - len(s) + 1)), len(s)) for s in strings)
    found = [(at + size, at) for at, size in places if at >= 0]
    if not found:
        return None
    end, at = min(found)
    return at, end


def overlap(text: bytes, strings: Sequence[bytes]) -> int:
    """Return the length of the longest end of ``text`` that is a proper beginning of a string."""
    longest = max((len(s) for s in strings), default=1) - 1
    ends = range(min(len(text), longest), 0, -1)
    return next((n for n in ends if any(s[:n] == text[-n:] for s in strings if n < len(s))), 0)
