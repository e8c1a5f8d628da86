"""Code shared by drafters that wrap drafters, and the rule for how many drafts to verify."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxdraft.base import Drafter, DrafterDefaults, full_drafter
from jaxdraft.budget import DrafterCost


class Wrapper(DrafterDefaults):
    """A drafter that wraps the drafter ``inner``. It often proposes nothing.

    The methods here take the inner drafter's own state.
    """

    inner: Drafter

    @property
    def declines(self) -> bool:
        """True, because rounds without drafts are common; they run a plain step."""
        return True

    @property
    def draft_tokens(self) -> int:
        """K of the drafter inside."""
        return self.inner.draft_tokens

    @property
    def overlap(self) -> int:
        """Number of tokens after a page that its content depends on, in the drafter inside."""
        return full_drafter(self.inner).overlap

    def skip(self, state: Any, tokens: jax.Array, length: jax.Array) -> Any:
        """Start after the first ``length`` [B] positions if the inner drafter can; else None."""
        return full_drafter(self.inner).skip(state, tokens, length)

    def row_statistics(self, state: Any) -> Any:
        """Return the statistics of the inner drafter."""
        return full_drafter(self.inner).row_statistics(state)

    def with_row_statistics(self, state: Any, statistics: Any) -> Any:
        """Return the state with the result of :meth:`row_statistics` restored."""
        return full_drafter(self.inner).with_row_statistics(state, statistics)

    def misses(self, state: Any) -> jax.Array | int:
        """Count how often the drafter inside found no room."""
        return full_drafter(self.inner).misses(state)

    def cost(self) -> DrafterCost | None:
        """Return the memory cost of the drafter inside."""
        return full_drafter(self.inner).cost()


def pool_of(inner: Drafter, batch: int, sizes: dict[str, int]) -> Any:
    """Return the pooled state of ``inner``, or a full state per row if it has no pool.

    Args:
      inner: any drafter.
      batch: B.
      sizes: arguments of its ``init_pool``. Pages become a ring per row where the drafter has
        a window.
    """
    whole = full_drafter(inner)
    if "pages" in sizes and whole.windowed:
        sizes = dict(rings=batch, page_size=sizes["page_size"])
    return whole.init_pool(batch, **sizes)


def check_numbers(rule: Any, bounds: dict[str, tuple[float, float | None]]) -> None:
    """Check that the numbers of a rule lie within (least, largest); None means no largest.

    Raises:
      ValueError: a number is out of bounds. Arrays, as inside ``jit``, are not checked.
    """
    for name, (low, high) in bounds.items():
        value = getattr(rule, name)
        if isinstance(value, int | float) and not low <= value <= (high or float("inf")):
            expected = f"at least {low}" if high is None else f"in {low}..{high}"
            raise ValueError(f"{name} is {value}; expected {expected}")


def best_width(
    accept_prob: jax.Array,
    round_cost: float | jax.Array,
    draft_cost: float | jax.Array,
    limit: jax.Array | None = None,
) -> jax.Array:
    """Return the number of drafts with the most tokens per cost, [B] int32 in 0..K.

    Ties go to the fewest drafts.

    n drafts yield an expected ``1 + s_1 + s_1 s_2 + ... + s_1 ... s_n`` tokens for ``1 + round_cost
    + n draft_cost`` plain steps of the target; no drafts yield 1 for 1. Leviathan et al.,
    arXiv:2211.17192, section 3.3, with a chance for every draft.

    Args:
      accept_prob: s, [B, K] float32, the probability that each draft is accepted if those before
        it are.
      round_cost, draft_cost: costs per round and per draft, in plain steps.
      limit: [B] int32, the most drafts per row. Default: K.
    """
    drafts = jnp.arange(accept_prob.shape[1] + 1, dtype=jnp.float32)
    tokens = 1.0 + jnp.cumsum(jnp.cumprod(accept_prob, axis=1), axis=1)
    tokens = jnp.pad(tokens, ((0, 0), (1, 0)), constant_values=1.0)  # [B, 1 + K]
    # Python's numbers are float64 arguments under `jax_enable_x64`.
    once, each = (jnp.asarray(x, jnp.float32) for x in (round_cost, draft_cost))
    cost = 1.0 + jnp.where(drafts > 0, once, 0.0) + drafts * each
    worth = tokens / cost[None]
    if limit is not None:
        worth = jnp.where(drafts[None] <= limit[:, None].astype(jnp.float32), worth, 0.0)
    return jnp.argmax(worth, axis=1).astype(jnp.int32)
