"""What drafters that hold drafters share, and the rule by which drafts are worth verifying."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxdraft.base import Drafter, DrafterDefaults, full_drafter
from jaxdraft.state.budget import DrafterCost


class Around(DrafterDefaults):
    """A drafter with a drafter ``inner``. It is often silent, and otherwise like the one inside.

    The methods here are for a state that is the inner drafter's own.
    """

    inner: Drafter

    @property
    def declines(self) -> bool:
        """True: draft-free rounds are common, so they get a plain step."""
        return True

    @property
    def draft_tokens(self) -> int:
        """K of the drafter inside."""
        return self.inner.draft_tokens

    @property
    def overlap(self) -> int:
        """Tokens after a page that its content depends on, of the drafter inside."""
        return full_drafter(self.inner).overlap

    def skip(self, state: Any, tokens: jax.Array, length: jax.Array) -> Any:
        """Start behind the first ``length`` [B] positions, if the drafter inside can; else None."""
        return full_drafter(self.inner).skip(state, tokens, length)

    def learned(self, state: Any) -> Any:
        """Return what the drafter inside learned."""
        return full_drafter(self.inner).learned(state)

    def with_learned(self, state: Any, learned: Any) -> Any:
        """Return the state with what :meth:`learned` gave."""
        return full_drafter(self.inner).with_learned(state, learned)

    def misses(self, state: Any) -> jax.Array | int:
        """Count how often the drafter inside found no room."""
        return full_drafter(self.inner).misses(state)

    def cost(self) -> DrafterCost | None:
        """Tell what the drafter inside costs."""
        return full_drafter(self.inner).cost()


def pool_of(inner: Drafter, batch: int, sizes: dict[str, int]) -> Any:
    """Return the pooled state of ``inner``; one without a pool has its whole state in every row.

    Args:
      inner: any drafter.
      batch: B.
      sizes: of its ``init_pool``. Pages become a ring per row where the drafter has a window.
    """
    whole = full_drafter(inner)
    if "pages" in sizes and whole.windowed:
        sizes = dict(rings=batch, page_size=sizes["page_size"])
    return whole.init_pool(batch, **sizes)


def check_numbers(rule: Any, bounds: dict[str, tuple[float, float | None]]) -> None:
    """Numbers of a rule lie in their bounds, least and largest; None: there is no largest.

    Raises:
      ValueError: one does not. Inside ``jit`` it may be an array, which is not judged.
    """
    for name, (low, high) in bounds.items():
        value = getattr(rule, name)
        if isinstance(value, int | float) and not low <= value <= (high or float("inf")):
            expected = f"at least {low}" if high is None else f"in {low}..{high}"
            raise ValueError(f"{name} is {value}; expected {expected}")


def best_width(
    stands: jax.Array,
    round_cost: float | jax.Array,
    draft_cost: float | jax.Array,
    limit: jax.Array | None = None,
) -> jax.Array:
    """Drafts that promise the most tokens for their cost, [B] int32 in 0..K; ties: the fewest.

    n drafts promise ``1 + s_1 + s_1 s_2 + ... + s_1 ... s_n`` tokens for ``1 + round_cost + n
    draft_cost`` plain steps of the target, none promise 1 for 1. Leviathan et al.,
    arXiv:2211.17192, section 3.3, with a chance for every draft.

    Args:
      stands: s, [B, K] float32: the chance of each draft when those before it stand.
      round_cost, draft_cost: in plain steps.
      limit: [B] int32, the most a row can use. Default: K.
    """
    drafts = jnp.arange(stands.shape[1] + 1, dtype=jnp.float32)
    tokens = 1.0 + jnp.cumsum(jnp.cumprod(stands, axis=1), axis=1)
    tokens = jnp.pad(tokens, ((0, 0), (1, 0)), constant_values=1.0)  # [B, 1 + K]
    # Python's numbers are float64 arguments under `jax_enable_x64`.
    once, each = (jnp.asarray(x, jnp.float32) for x in (round_cost, draft_cost))
    cost = 1.0 + jnp.where(drafts > 0, once, 0.0) + drafts * each
    worth = tokens / cost[None]
    if limit is not None:
        worth = jnp.where(drafts[None] <= limit[:, None].astype(jnp.float32), worth, 0.0)
    return jnp.argmax(worth, axis=1).astype(jnp.int32)
