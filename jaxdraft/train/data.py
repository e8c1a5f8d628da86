"""Data whose n-th batch depends on n alone, so a run that stopped goes on as if it had not."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdraft.nn.decoder import Decoder
from jaxdraft.nn.linear import Frozen
from jaxdraft.target import DecoderTarget
from jaxdraft.train.losses import Continuations
from jaxdraft.train.sequence import decoder_rows


@dataclasses.dataclass(frozen=True)
class TokenWindows:
    """Windows of one long row of tokens, each epoch in a new order and from a new offset.

    Attributes:
      tokens: [N] integers.
      length: tokens of a window.
      batch: windows of a batch.
      seed: of the order.
    """

    tokens: np.ndarray
    length: int
    batch: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batches_per_epoch < 1:
            raise ValueError(
                f"{self.tokens.size} tokens are too few for a batch of {self.batch} "
                f"windows of {self.length}"
            )

    @property
    def batches_per_epoch(self) -> int:
        """Whole batches of one pass; the last incomplete one is left out."""
        return (self.tokens.size // self.length - 1) // self.batch

    def __call__(self, step: int) -> np.ndarray:
        """Batch ``step``: [batch, length] int32."""
        epoch, place = divmod(step, self.batches_per_epoch)
        rng = np.random.default_rng([self.seed, epoch])
        offset = int(rng.integers(self.length))
        order = rng.permutation(self.tokens.size // self.length - 1)
        chosen = order[place * self.batch : (place + 1) * self.batch]
        index = offset + chosen[:, None] * self.length + np.arange(self.length)[None]
        return self.tokens[index].astype(np.int32)


def continue_prompts(
    target: DecoderTarget,
    prompts: jax.Array,
    temperature: jax.Array,
    key: jax.Array,
    *,
    new_tokens: int,
) -> jax.Array:
    """Return the target's own continuations: the text that drafters will be used on.

    Args:
      target: any target.
      prompts: [B, P] int32, every row full.
      temperature: [B] float32; zero is greedy.
      key: consumed.
      new_tokens: N, number of new tokens. No stop ends a row.

    Returns:
      [B, P + N] int32, the prompts included.
    """
    return _continue(target, prompts, temperature, key, new_tokens=new_tokens)


@jax.jit(static_argnames="new_tokens")
def _continue(
    target: DecoderTarget,
    prompts: jax.Array,
    temperature: jax.Array,
    key: jax.Array,
    *,
    new_tokens: int,
) -> jax.Array:
    batch, size = prompts.shape
    one = jnp.ones((batch,), jnp.int32)
    prompts = prompts.astype(jnp.int32)
    temperature = jnp.asarray(temperature, jnp.float32)
    drawn, heat = temperature > 0, jnp.where(temperature > 0, temperature, 1.0)[:, None]

    def choose(logits: jax.Array, key: jax.Array) -> jax.Array:
        sampled = jax.random.categorical(key, logits / heat)
        return jnp.where(drawn, sampled, jnp.argmax(logits, axis=-1)).astype(jnp.int32)

    out = target.forward(prompts, size * one, target.init(batch, size + new_tokens), row=size - one)
    first, rest = jax.random.split(key)
    token = choose(out.logits[:, 0], first)
    state = target.commit(out.state, size * one)

    def step(carry, key):  # noqa: ANN001, ANN202
        state, token = carry
        out = target.forward(token[:, None], one, state)
        return (target.commit(out.state, one), choose(out.logits[:, 0], key)), token

    keys = jax.random.split(rest, new_tokens)
    _, tokens = lax.scan(step, (state, token), keys)
    return jnp.concatenate([prompts, tokens.T], axis=1)


@dataclasses.dataclass(frozen=True)
class FeatureCache:
    """States of a frozen target for some sequences, on disk, read through memory maps.

    Attributes:
      tokens: [S, T] int32.
      greedy: [S] bool, as in :class:`Continuations`.
      prompt: [S] int32, number of tokens that the target did not choose.
      aux: [S, T, A].
      hidden: [S, T, D].
    """

    tokens: np.ndarray
    greedy: np.ndarray
    prompt: np.ndarray
    aux: np.ndarray
    hidden: np.ndarray

    @classmethod
    def write(
        cls,
        folder: str | Path,
        decoder: Frozen[Decoder],
        tokens: np.ndarray,
        greedy: np.ndarray,
        prompt: np.ndarray,
        *,
        batch: int = 16,
        dtype: np.typing.DTypeLike = np.float16,
        progress: bool = True,
    ) -> FeatureCache:
        """Score ``tokens`` [S, T] and keep the features; :meth:`open` reads them again.

        Raises:
          ValueError: the decoder has no taps, or a feature does not fit ``dtype``.
        """
        from tqdm import tqdm

        config = decoder().config
        if not config.taps:
            raise ValueError("the target has no taps: there are no auxiliary states to keep")
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        sequences, steps = tokens.shape
        np.save(folder / "tokens.npy", tokens.astype(np.int32))
        np.save(folder / "greedy.npy", greedy.astype(bool))
        np.save(folder / "prompt.npy", prompt.astype(np.int32))
        aux, hidden = (
            np.lib.format.open_memmap(
                folder / f"{name}.npy", mode="w+", dtype=dtype, shape=(sequences, steps, width)
            )
            for name, width in (("aux", config.aux_width), ("hidden", config.width))
        )
        for first in tqdm(range(0, sequences, batch), desc="features", disable=not progress):
            part = tokens[first : first + batch].astype(np.int32)
            full = np.pad(part, ((0, batch - len(part)), (0, 0)))
            rows = _features(decoder, jnp.asarray(full))
            for kept, found in ((aux, rows.aux), (hidden, rows.hidden)):
                values = np.asarray(found)[: len(part)]
                largest = float(np.abs(values).max())
                if not largest <= float(jnp.finfo(dtype).max):
                    raise ValueError(
                        f"a feature of {largest} does not fit {np.dtype(dtype).name}, whose "
                        f"largest number is {float(jnp.finfo(dtype).max)}"
                    )
                kept[first : first + len(part)] = values
        aux.flush()
        hidden.flush()
        return cls.open(folder)

    @classmethod
    def open(cls, folder: str | Path) -> FeatureCache:
        """Open the features that :meth:`write` wrote."""
        names = ("tokens", "greedy", "prompt", "aux", "hidden")
        return cls(*(np.load(Path(folder) / f"{name}.npy", mmap_mode="r") for name in names))


@jax.jit
def _features(decoder: Frozen[Decoder], tokens: jax.Array):  # noqa: ANN202
    return decoder_rows(decoder(), tokens)


@dataclasses.dataclass(frozen=True)
class DraftBatches:
    """Sequences of a cache with anchors inside them, the same mixture in every batch.

    Attributes:
      cache: the features.
      batch: B, sequences per batch.
      greedy: number of greedy continuations among them.
      anchors: n, blocks per sequence.
      drafts: K; an anchor leaves room for K tokens after it. No anchor precedes the last token of
        its sequence's prompt, so all labels are the target's own.
      seed: seed for the choice of sequences and anchors.
      aux: whether batches carry the auxiliary states.
    """

    cache: FeatureCache
    batch: int
    greedy: int
    anchors: int
    drafts: int
    seed: int = 0
    aux: bool = True

    def __post_init__(self) -> None:
        steps, prompt = self.cache.tokens.shape[1], int(self.cache.prompt.max())
        if not 1 <= self.anchors <= steps - self.drafts - prompt + 1:
            raise ValueError(
                f"{self.anchors} anchors, each with {self.drafts} tokens after it, do not fit a "
                f"sequence of {steps} tokens after a prompt of {prompt}"
            )
        have = int(self.cache.greedy.sum()), int((~self.cache.greedy).sum())
        if self.greedy > have[0] or self.batch - self.greedy > have[1]:
            raise ValueError(
                f"a batch has {self.greedy} greedy sequences and {self.batch - self.greedy} "
                f"others; the cache has {have[0]} and {have[1]}"
            )

    def __call__(self, step: int) -> Continuations:
        """Return batch ``step``."""
        cache = self.cache
        rng = np.random.default_rng([self.seed, step])
        kinds = np.flatnonzero(cache.greedy), np.flatnonzero(~cache.greedy)
        counts = self.greedy, self.batch - self.greedy
        chosen = np.concatenate(
            [rng.choice(kind, n, replace=False) for kind, n in zip(kinds, counts, strict=True)]
        )
        end = cache.tokens.shape[1] - self.drafts
        anchors = np.stack(
            [
                rng.choice(np.arange(first - 1, end), self.anchors, replace=False)
                for first in cache.prompt[chosen]
            ]
        )
        width = slice(None) if self.aux else slice(0, 0)
        return Continuations(
            tokens=jnp.asarray(cache.tokens[chosen]),
            aux=jnp.asarray(cache.aux[chosen, :, width].astype(np.float32)),
            hidden=jnp.asarray(cache.hidden[chosen].astype(np.float32)),
            anchors=jnp.asarray(anchors.astype(np.int32)),
            greedy=jnp.asarray(cache.greedy[chosen]),
        )
