"""Stop strings as arrays: a string is found token by token, inside the round.

A string may end in the middle of an accepted block, in the middle of a token, or be spread over
several tokens. So the strings become an automaton over bytes (Aho and Corasick, 1975), and the
automaton a table over tokens: state ``table[state, token]`` is where reading all bytes of the token
leads. What comes after the token that completes a string is then never emitted nor committed.

Example: stop string ``ab``, tokens 0 = ``a``, 1 = ``b``, 2 = ``xab``. States: 0 nothing, 1 ``a``
was read, 2 found::

  table = [[1, 0, 2],
           [1, 2, 2],
           [2, 2, 2]]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax


@struct.dataclass
class StopText:
    """Automata over tokens, and which one each row runs.

    The last state of every automaton means *found*; nothing leads out of it. State 0 is the start.
    """

    table: jax.Array  # [U, states, V] int16
    which: jax.Array  # [B] int32, below U; NO_AUTOMATON: none

    @property
    def found(self) -> int:
        """The state that means a string is complete."""
        return self.table.shape[1] - 1


NO_AUTOMATON = -1
"""A row without stop strings."""


def run(stop: StopText, state: jax.Array, tokens: jax.Array) -> jax.Array:
    """Where each row stands after each of its next tokens.

    A row that goes on although a string was complete begins anew after it.

    Args:
      stop: the automata.
      state: [B] int32.
      tokens: [B, T] int32.

    Returns:
      States [B, T] int32.
    """
    has = stop.which != NO_AUTOMATON
    which = jnp.maximum(stop.which, 0)

    def read(state: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
        state = jnp.where(state == stop.found, 0, state)
        after = stop.table[which, state, jnp.maximum(token, 0)].astype(jnp.int32)
        after = jnp.where(has, after, 0)
        return after, after

    _, states = lax.scan(read, state, jnp.swapaxes(tokens, 0, 1))
    return jnp.swapaxes(states, 0, 1)


def byte_automaton(strings: Sequence[str]) -> np.ndarray:
    """Transitions [states, 256] over bytes; the last state is *found* and stays.

    Raises:
      ValueError: there is no string, or an empty one.
    """
    patterns = [s.encode("utf-8") for s in strings]
    if not patterns or not all(patterns):
        raise ValueError(f"stop strings are {list(strings)!r}; expected strings that are not empty")
    # A trie in which a complete string is the one common state; what follows it is never read.
    children: list[dict[int, int]] = [{}]
    final = -1
    for pattern in patterns:
        state = 0
        for number, byte in enumerate(pattern):
            if number == len(pattern) - 1:
                children[state][byte] = final
            elif children[state].get(byte, final) == final:
                if byte in children[state]:
                    break  # a shorter string is a prefix of this one: it is found first
                children.append({})
                children[state][byte] = len(children) - 1
                state = len(children) - 1
            else:
                state = children[state][byte]
    found = len(children)
    table = np.zeros((found + 1, 256), np.int32)
    table[found] = found
    # Breadth first: where a byte leads nowhere, go on as after the longest proper suffix.
    failure = [0] * found
    queue: deque[int] = deque()
    for byte, child in children[0].items():
        table[0, byte] = found if child == final else child
        if child != final:
            queue.append(child)
    while queue:
        state = queue.popleft()
        table[state] = table[failure[state]]
        for byte, child in children[state].items():
            if child == final:
                table[state, byte] = found
                continue
            failure[child] = int(table[failure[state], byte])
            if failure[child] == found:  # a shorter string ends inside this one
                table[state, byte] = found
                continue
            table[state, byte] = child
            queue.append(child)
    return table


def token_automaton(strings: Sequence[str], tokens: Sequence[bytes], vocab: int) -> np.ndarray:
    """Transitions [states, V] over tokens, int16; states are rounded up to a power of two.

    The padding keeps programs: other strings of like length have a table of the same shape.

    Args:
      strings: the stop strings.
      tokens: the bytes of each token; ids past its end read as nothing.
      vocab: V.

    Raises:
      ValueError: as :func:`byte_automaton`, or strings of more than 2**14 bytes together.
    """
    over_bytes = byte_automaton(strings)
    states = over_bytes.shape[0]
    if states > 2**14:
        raise ValueError(f"stop strings have {states} bytes together; expected at most {2**14}")
    size = max(16, 1 << (states - 1).bit_length())
    lengths = np.zeros(vocab, np.int64)
    known = min(vocab, len(tokens))
    lengths[:known] = [len(t) for t in tokens[:known]]
    text = np.zeros((vocab, max(1, int(lengths.max(initial=0)))), np.uint8)
    for number, token in enumerate(tokens[:known]):
        text[number, : len(token)] = np.frombuffer(token, np.uint8)
    # All states of all tokens at once, byte by byte; few tokens are long.
    reached = np.broadcast_to(np.arange(states)[:, None], (states, vocab)).astype(np.int16)
    for place in range(text.shape[1]):
        longer = np.flatnonzero(lengths > place)
        reached[:, longer] = over_bytes[reached[:, longer], text[longer, place][None]]
    table = np.full((size, vocab), size - 1, np.int16)
    table[:states] = np.where(reached == states - 1, size - 1, reached)
    return table


def cut(text: str, strings: Sequence[str]) -> str:
    """``text`` before the stop string that is complete first; all of it when there is none.

    Of strings that end at the same place the longest is cut off.
    """
    found = [(text.find(s) + len(s), -len(s)) for s in strings if s in text]
    if not found:
        return text
    end, length = min(found)
    return text[: end + length]


class Holder:
    """Streams text without ever showing part of a stop string.

    Text that could be the beginning of a stop string waits until what follows it is known.
    """

    def __init__(self, strings: Sequence[str]):
        self._strings = tuple(strings)
        self._held = ""
        self._done = False

    def push(self, text: str) -> str:
        """Takes the next text and returns what may be shown."""
        if self._done:
            return ""
        text = self._held + text
        before = cut(text, self._strings)
        if len(before) < len(text):
            self._held, self._done = "", True
            return before
        keep = max((_overlap(text, s) for s in self._strings), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Returns the text held back: no stop string came of it."""
        text, self._held = self._held, ""
        return "" if self._done else text


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of ``text`` that begins ``string``."""
    longest = min(len(text), len(string) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(string[:n])), 0)
