"""Conversion of arguments of all accepted forms to arrays, and checks on the host.

An argument that is *traced* (by ``jit``, ``vmap``, ``grad`` and the like) has no values yet: only
its shape and its type are checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdraft.base import NO_TOKEN
from jaxdraft.meshes import whole_array
from jaxdraft.model import Model
from jaxdraft.sizes import power_of_two

Prompts = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]] | np.ndarray | jax.Array

_MIN_BUCKET = 16
_INT32_MAX = 2**31 - 1


def traced(*values: Any) -> bool:
    """Return whether anything in these pytrees is traced."""
    kinds = set(map(type, jax.tree.leaves(values)))  # a prompt may be thousands of integers
    return any(issubclass(kind, jax.core.Tracer) for kind in kinds)


def check_static(**arguments: Any) -> None:
    """Refuse traced arguments that determine shapes.

    Raises:
      ValueError: an argument is traced.
    """
    for name, value in arguments.items():
        if traced(value):
            raise ValueError(
                f"{name} is traced; expected a Python number: it decides about the program and its "
                "buffers"
            )


def check_concrete(*values: Any) -> None:
    """Refuse traced values where rounds run from Python.

    Raises:
      ValueError: a value is traced.
    """
    if traced(*values):
        raise ValueError(
            "an argument is traced; stream runs round by round from Python: under jit, call "
            "jaxdraft.generate"
        )


def check_varying(*values: Any) -> None:
    """Refuse arrays whose types record mesh axes over which they vary.

    Raises:
      ValueError: an array has such a type: a state begins as constants, which vary over no axis,
        and a loop must not change the type of what it carries.
    """
    if not traced(*values):
        return
    for leaf in jax.tree.leaves(values):
        axes = _axes(jax.typeof(leaf)) if isinstance(leaf, jax.core.Tracer) else ()
        if axes:
            raise ValueError(
                f"an argument varies over the mesh axes {sorted(axes)}; expected a shard_map "
                "without that check: jax.shard_map(..., check_vma=False)"
            )


def _axes(kind: Any) -> Any:
    """Return the axes of a mesh over which a type varies; later versions of JAX rename them."""
    return getattr(kind, "vma", ()) or getattr(getattr(kind, "mat", None), "varying", ())


def host(value: Any) -> Any:
    """Return an untraced value as a NumPy array, with an explicit transfer from its device."""
    if isinstance(value, jax.Array):
        return whole_array(value)
    listed = value[:1] if isinstance(value, list | tuple) else [value]
    fetched = any(isinstance(one, jax.Array) for one in listed)
    return np.asarray(jax.device_get(value) if fetched else value)


def arrays(model: Model, prompts: Prompts, lengths: Any) -> tuple[Any, Any]:
    """Return prompts as ids [B, P] and lengths [B], int32; checked and in NumPy unless traced.

    Args:
      model: the model.
      prompts: as in :func:`jaxdraft.generate`.
      lengths: [B], only for an array [B, P].

    Raises:
      ValueError: as :func:`check_ids`, or shapes that do not fit each other.
    """
    if isinstance(prompts, np.ndarray | jax.Array) and prompts.ndim == 2:
        return _padded(model, prompts, lengths)
    if lengths is not None:
        raise ValueError(
            "lengths belong to a [B, P] array of ids; these prompts have their own lengths"
        )
    rows = _rows(model, prompts)
    if not traced(rows):
        return check_ids(model, [host(row) for row in rows])
    rows = [jnp.stack(row) if isinstance(row, list | tuple) else jnp.asarray(row) for row in rows]
    for number, row in enumerate(rows):
        _check_row(number, row)
    longest = max(row.size for row in rows)
    ids = [jnp.pad(row.astype(jnp.int32), (0, longest - row.size)) for row in rows]
    return jnp.stack(ids), np.asarray([row.size for row in rows], np.int32)


def _padded(model: Model, prompts: np.ndarray | jax.Array, lengths: Any) -> tuple[Any, Any]:
    if not np.issubdtype(prompts.dtype, np.integer):
        raise ValueError(f"prompts are {prompts.dtype}; token ids are integers")
    batch, size = prompts.shape
    if lengths is None:
        count = np.full((batch,), size, np.int32)
    else:
        count = jnp.asarray(lengths) if traced(lengths) else host(lengths)
    if count.shape != (batch,):
        raise ValueError(f"lengths have shape {count.shape}; expected ({batch},)")
    if not np.issubdtype(count.dtype, np.integer):
        raise ValueError(f"lengths are {count.dtype}; expected integers")
    if traced(prompts, count):
        return jnp.asarray(prompts, jnp.int32), jnp.asarray(count, jnp.int32)
    ids = host(prompts)
    if count.size and not (0 <= count.min() and count.max() <= size):
        raise ValueError(f"lengths {count.tolist()} are not in 0..{size}, the array's width")
    return check_ids(model, [row[:n] for row, n in zip(ids, count, strict=True)])


def _rows(model: Model, prompts: Prompts) -> list[Any]:
    if isinstance(prompts, str):
        return [encode(model, prompts)]
    if isinstance(prompts, np.ndarray | jax.Array) and prompts.ndim == 1:
        if prompts.dtype.kind not in "OUS":  # those are prompts one by one
            return [prompts]
    if isinstance(prompts, np.ndarray | jax.Array) and prompts.ndim == 0:
        raise ValueError(f"prompts are {prompts!r}; expected a string, ids, or a list of those")
    listed = list(prompts)  # type: ignore[arg-type]
    if not listed:
        raise ValueError("no prompts: expected at least one")
    if all(isinstance(p, str) for p in listed):
        return [encode(model, str(p)) for p in listed]
    return [listed] if all(map(_is_id, listed)) else listed


def _is_id(value: Any) -> bool:
    number = isinstance(value, int | np.integer)
    return number or (isinstance(value, jax.Array | np.ndarray) and value.ndim == 0)


def encode(model: Model, prompt: str) -> list[int]:
    """Return the ids of a prompt.

    Raises:
      ValueError: the model has no tokenizer.
    """
    if model.text is None:
        raise ValueError("the model has no tokenizer: prompts must be token ids")
    return model.text.encode(prompt)


def _check_row(number: int, row: Any) -> None:
    if row.ndim != 1:
        raise ValueError(f"prompt {number} has shape {row.shape}; expected a list of ids")
    if row.size == 0:
        raise ValueError(f"prompt {number} is empty; a model needs at least one token")
    if not np.issubdtype(row.dtype, np.integer):
        raise ValueError(f"prompt {number} holds {row.dtype}; token ids are integers")


def check_ids(model: Model, rows: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return prompts as one array [B, P] int32, padded with zeros, and lengths [B] int32.

    Raises:
      ValueError: a prompt that is empty or no sequence of integers, or an id outside the
        vocabulary.
    """
    vocab = model.target.vocab_size
    for number, row in enumerate(rows):
        _check_row(number, row)
        bad = row[(row < 0) | (row >= vocab)]
        if bad.size:
            raise ValueError(
                f"prompt {number} holds id {int(bad[0])}; the vocabulary has ids 0..{vocab - 1}"
            )
    count = np.asarray([row.size for row in rows], np.int32)
    ids = np.zeros((len(rows), int(count.max())), np.int32)
    for number, row in enumerate(rows):
        ids[number, : row.size] = row
    return ids, count


def one_prompt(model: Model, prompt: str | Sequence[int] | np.ndarray | jax.Array) -> list[int]:
    """Return the ids of one prompt, a string or ids.

    Raises:
      ValueError: as for :func:`check_ids`, or the prompt is traced.
    """
    if isinstance(prompt, str):
        return encode(model, prompt)
    if traced(prompt):
        raise ValueError(
            "the prompt is traced; an engine runs on the host: under jit, call jaxdraft.generate"
        )
    return check_ids(model, [host(prompt)])[0][0].tolist()


def per_row(name: str, value: Any, batch: int, *, low: int) -> Any:
    """Return one integer, or one per row, as [B] int32; in NumPy and checked, unless traced.

    Raises:
      ValueError: another type or shape, or a number below ``low``.
    """
    given = jnp.asarray(value) if traced(value) else host(value)
    if not np.issubdtype(given.dtype, np.integer) or given.shape not in ((), (batch,)):
        raise ValueError(f"{name} is {value!r}; expected an integer, or {batch} of them")
    if traced(given):
        return jnp.broadcast_to(given.astype(jnp.int32), (batch,))
    if given.min(initial=low) < low:
        raise ValueError(f"{name} is {value!r}; expected at least {low}")
    return np.broadcast_to(np.minimum(given, _INT32_MAX), (batch,)).astype(np.int32)


def positive_per_row(name: str, value: Any, batch: int) -> Any:
    """Return one number above zero, or one per row, as [B] float32; checked unless traced.

    Raises:
      ValueError: another type or shape, or a number that is not above zero.
    """
    given = jnp.asarray(value) if traced(value) else host(value)
    if not np.issubdtype(given.dtype, np.number) or given.shape not in ((), (batch,)):
        raise ValueError(f"{name} is {value!r}; expected a number, or {batch} of them")
    if traced(given):
        return jnp.broadcast_to(given.astype(jnp.float32), (batch,))
    if not (np.isfinite(given).all() and (given > 0).all()):
        raise ValueError(f"{name} is {value!r}; expected finite numbers above 0")
    return np.broadcast_to(given, (batch,)).astype(np.float32)


def stop_rows(stops: Any, vocab_size: int, batch: int) -> Any:
    """Return stop ids for every row, [B, S] int32; in NumPy and checked, unless traced.

    S is a power of two, at least 4, so that a few more or fewer stops compile nothing.

    Raises:
      ValueError: a stop id outside the vocabulary, or not a sequence of integers.
    """
    if traced(stops):
        given = jnp.asarray(stops)
        if given.ndim != 1 or not np.issubdtype(given.dtype, np.integer):
            raise ValueError(f"stop_ids are {given.dtype}{given.shape}; expected a row of integers")
        row = jnp.pad(
            given.astype(jnp.int32),
            (0, power_of_two(given.size, least=4)),
            constant_values=NO_TOKEN,
        )
        return jnp.tile(row[: power_of_two(given.size, least=4)], (batch, 1))
    listed = tuple(int(i) for i in (host(stops) if isinstance(stops, jax.Array) else stops))
    for i in listed:
        if not 0 <= i < vocab_size:
            raise ValueError(f"stop id {i} is not in the vocabulary of {vocab_size}")
    padded = [*listed, *[NO_TOKEN] * (power_of_two(len(listed), least=4) - len(listed))]
    return np.tile(np.asarray(padded, np.int32), (batch, 1))


def bucket_of(size: int) -> int:
    """Return the next power of two, at least 16: few buffer sizes mean few programs."""
    return power_of_two(size, least=_MIN_BUCKET)


def pad(ids: Any, size: int) -> Any:
    """Pad rows [B, P] with zeros to ``size`` columns."""
    width = ((0, 0), (0, size - ids.shape[1]))
    return np.pad(ids, width) if isinstance(ids, np.ndarray) else jnp.pad(ids, width)
