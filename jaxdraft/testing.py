"""Small models and checks for the tests of this package and for your own.

:func:`assert_lossless` checks your own drafter. :class:`TableTarget` makes the check cheap, and
:class:`ScriptedDrafter` proposes any mixture of right and wrong drafts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct

from jaxdraft.base import (
    Drafter,
    DrafterDefaults,
    DraftInfo,
    Feed,
    Lattice,
    NoDraft,
    Proposal,
    TargetDefaults,
    TargetOutput,
)
from jaxdraft.config import (
    DRAFT_MODEL,
    AttentionConfig,
    BlockDrafterConfig,
    ConvConfig,
    DeltaNetConfig,
    Eagle3Config,
    MlpConfig,
    MoeConfig,
    MtpConfig,
    TargetConfig,
)
from jaxdraft.draft.block import BlockDrafter
from jaxdraft.draft.draft_model import DraftModel
from jaxdraft.draft.eagle3 import Eagle3Drafter
from jaxdraft.draft.lattice import greedy, path_tokens, walk
from jaxdraft.draft.mtp import MtpDrafter
from jaxdraft.draft.sampled import sampled_walk
from jaxdraft.generate import generate
from jaxdraft.kinds import block_of
from jaxdraft.model import Model
from jaxdraft.nn.decoder import Decoder
from jaxdraft.nn.eagle3 import Eagle3
from jaxdraft.nn.linear import Frozen
from jaxdraft.nn.mtp import Mtp
from jaxdraft.rope import Rope
from jaxdraft.state.paged import PagedPool
from jaxdraft.target import DecoderTarget


@struct.dataclass
class TableState:
    """State of a :class:`TableTarget`."""

    length: jax.Array  # [B] int32
    last: jax.Array  # [B] int32, the last committed token
    window: jax.Array  # [B, T] int32, the rows of the last forward pass


@struct.dataclass
class TableTarget(TargetDefaults):
    """Logits from a table: row ``(31 * previous + token) % S`` of ``table`` [S, V].

    An order-2 Markov chain, so a wrongly committed row changes the following logits. It is small
    enough to enumerate, and ties or NaNs can be planted in the table.
    """

    table: jax.Array  # [S, V] float32
    context: int = struct.field(pytree_node=False, default=1024)

    @classmethod
    def random(cls, key: jax.Array, vocab_size: int = 16, *, rows: int = 97) -> TableTarget:
        """Return a table of independent normal logits."""
        return cls(jax.random.normal(key, (rows, vocab_size), jnp.float32))

    @classmethod
    def counting(cls, vocab_size: int = 16) -> TableTarget:
        """Return a target whose best next token is always ``(token + 1) % V``."""
        following = (np.arange(31 * vocab_size) + 1) % vocab_size
        table = np.zeros((31 * vocab_size, vocab_size), np.float32)
        # Rows are (31 * previous + token) mod 31 V; with previous dropped that is token mod 31.
        assert vocab_size <= 31, "counting needs a vocabulary of at most 31"
        for row in range(table.shape[0]):
            table[row, following[row % 31] if row % 31 < vocab_size else 0] = 1.0
        return cls(jnp.asarray(table))

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.table.shape[1]

    @property
    def context_length(self) -> int:
        """Maximum length of a sequence; arbitrary, so that the limit can be tested."""
        return self.context

    def init(self, batch: int, capacity: int) -> TableState:
        """See :meth:`jaxdraft.base.Target.init`."""
        del capacity
        zeros = jnp.zeros((batch,), jnp.int32)
        return TableState(zeros, zeros, jnp.zeros((batch, 0), jnp.int32))

    def forward(
        self,
        tokens: jax.Array,
        count: jax.Array,
        state: TableState,
        *,
        row: jax.Array | None = None,
    ) -> TargetOutput:
        """See :meth:`jaxdraft.base.Target.forward`."""
        del count
        previous = jnp.concatenate([state.last[:, None], tokens[:, :-1]], axis=1)
        logits = self.table[(31 * previous + tokens) % self.table.shape[0]]
        if row is not None:
            logits = jnp.take_along_axis(logits, row[:, None, None], axis=1)
        return TargetOutput(logits, None, None, replace(state, window=tokens))

    def commit(self, state: TableState, count: jax.Array) -> TableState:
        """See :meth:`jaxdraft.base.Target.commit`."""
        index = jnp.maximum(count - 1, 0)[:, None]
        last = jnp.take_along_axis(state.window, index, axis=1)[:, 0]
        return TableState(
            length=state.length + count,
            last=jnp.where(count > 0, last, state.last),
            window=state.window[:, :0],
        )


class Stateless(DrafterDefaults):
    """Base class of drafters without a state.

    A subclass adds ``draft_tokens`` and ``propose``, and is a :class:`jaxdraft.base.Drafter`: its
    only input is the feed.
    """

    def init(self, batch: int, capacity: int) -> Any:
        """Return an empty state."""
        del batch, capacity
        return ()

    def ingest(self, state: Any, feed: Feed) -> Any:
        """Ignore committed rows."""
        del feed
        return state

    def propose(self, state: Any, feed: Feed) -> tuple[Any, Proposal, DraftInfo]:
        """See :meth:`jaxdraft.base.Drafter.propose`."""
        raise NotImplementedError


@struct.dataclass
class TableDrafter(Stateless):
    """Drafts from a table ``[V, K]``, indexed by the anchor alone: right only by chance."""

    table: jax.Array  # [V, K] int32

    @classmethod
    def random(cls, key: jax.Array, vocab_size: int, draft_tokens: int = 4) -> TableDrafter:
        """Return a table of independent uniform drafts."""
        shape = (vocab_size, draft_tokens)
        return cls(jax.random.randint(key, shape, 0, vocab_size, jnp.int32))

    @property
    def draft_tokens(self) -> int:
        """K."""
        return self.table.shape[1]

    def propose(self, state: Any, feed: Feed) -> tuple[Any, Proposal, DraftInfo]:
        """Propose the row of the anchor."""
        return state, *propose_tokens(self.table[feed.anchor], feed)


@struct.dataclass
class LatticeDrafter(Stateless):
    """A lattice from a table, indexed by the anchor alone, for tests of walks and draws.

    ``candidates`` [V, K, C] and ``scores`` [V, K, C, C]; the first row of ``scores[v, 0]`` is
    used for all of them.
    """

    candidates: jax.Array
    scores: jax.Array

    @classmethod
    def random(
        cls, key: jax.Array, vocab_size: int, draft_tokens: int = 3, candidates: int = 3
    ) -> LatticeDrafter:
        """Return distinct random candidates with independent normal scores."""
        first, second = jax.random.split(key)
        shape = (vocab_size, draft_tokens, candidates)
        order = jax.random.uniform(first, (*shape[:2], vocab_size), jnp.float32)
        ids = jnp.argsort(order, axis=-1)[..., :candidates].astype(jnp.int32)
        return cls(ids, jax.random.normal(second, (*shape, candidates), jnp.float32))

    @property
    def draft_tokens(self) -> int:
        """K."""
        return self.candidates.shape[1]

    def lattice(self, anchor: jax.Array) -> Lattice:
        """Return the candidates and scores after ``anchor`` [B]."""
        scores = self.scores[anchor]
        return Lattice(self.candidates[anchor], scores.at[:, 0].set(scores[:, 0, :1]))

    def propose(self, state: Any, feed: Feed) -> tuple[Any, Proposal, DraftInfo]:
        """Walk the lattice, or draw from it."""
        lattice = self.lattice(feed.anchor)
        if feed.draw is None:
            proposal, info = propose_tokens(path_tokens(lattice, walk(lattice, greedy)), feed)
            return state, replace(proposal, lattice=lattice), info
        tokens, support = sampled_walk(lattice, feed.draw, feed.guide)
        proposal, info = propose_tokens(tokens, feed)
        return state, replace(proposal, lattice=lattice, support=support), info


@struct.dataclass
class ScriptedDrafter(Stateless):
    """Drafts that are right or wrong at chosen positions.

    ``truth[b, p]`` is the token at position p of row b's sequence; the draft for that position is
    that token if ``right[b, p]``, and another token otherwise.
    """

    truth: jax.Array  # [B, S] int32
    right: jax.Array  # [B, S] bool
    vocab_size: int = struct.field(pytree_node=False)
    width: int = struct.field(pytree_node=False, default=4)

    @property
    def draft_tokens(self) -> int:
        """K."""
        return self.width

    def propose(self, state: Any, feed: Feed) -> tuple[Any, Proposal, DraftInfo]:
        """Propose the script from the position after the anchor on."""
        anchor = feed.first_position + feed.count
        index = anchor[:, None] + 1 + jnp.arange(self.width, dtype=jnp.int32)[None]
        token = jnp.take_along_axis(self.truth, index, axis=1, mode="clip")
        right = jnp.take_along_axis(self.right, index, axis=1, mode="clip")
        return state, *propose_tokens(jnp.where(right, token, (token + 1) % self.vocab_size), feed)


def propose_tokens(tokens: jax.Array, feed: Feed) -> tuple[Proposal, DraftInfo]:
    """Return a proposal of ``tokens`` [B, K], cut to the limit of every row."""
    limit = jnp.minimum(feed.limit, tokens.shape[1])
    wants = feed.wants_draft & (limit > 0)
    length = jnp.where(wants, limit, 0).astype(jnp.int32)
    kept = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] < length[:, None]
    reason = jnp.where(wants, NoDraft.DRAFTED, NoDraft.UNWANTED).astype(jnp.int32)
    proposal = Proposal(jnp.where(kept, tokens, -1).astype(jnp.int32), length)
    return proposal, DraftInfo(reason, jnp.any(wants).astype(jnp.int32))


def tiny_target_config(**changes: Any) -> TargetConfig:
    """Return full attention between two delta nets, width 32, vocabulary 48, taps 1 and 2."""
    fields: dict[str, Any] = dict(
        vocab_size=48,
        width=32,
        layers=("delta_net", "attention", "delta_net"),
        attention=AttentionConfig(
            heads=4, kv_heads=2, head_dim=16, rotary_dim=8, gated=True, qk_norm=True, scale=0.25
        ),
        delta_net=DeltaNetConfig(key_heads=2, value_heads=4, key_dim=8, value_dim=8, conv_width=4),
        mlp=MlpConfig(hidden=48),
        norm_eps=1e-6,
        tied=False,
        context_length=256,
        taps=(1, 2),
    )
    return TargetConfig(**{**fields, **changes})


def windowed_target_config(**changes: Any) -> TargetConfig:
    """Return attention alone, with Gemma's properties and layers with a window of six keys.

    Norms on both sides, rotary tables for each kind of layer, soft-caps, an embedding that is
    scaled and the head, too, and GELU.
    """
    attention = AttentionConfig(
        heads=4, kv_heads=2, head_dim=16, rotary_dim=16, qk_norm=True, scale=0.2, softcap=5.0
    )
    fields: dict[str, Any] = dict(
        layers=("sliding", "attention", "sliding"),
        attention=attention,
        sliding=replace(attention, window=6),
        delta_net=None,
        mlp=MlpConfig(hidden=48, activation="gelu_tanh"),
        tied=True,
        norms="both",
        embedding_scale=32**0.5,
        softcap=4.0,
        own_tables=True,
        rope=Rope(theta=1e6, kind="linear", factor=4.0),
        sliding_rope=Rope(theta=1e4),
    )
    return tiny_target_config(**{**fields, **changes})


def biased_target_config(**changes: Any) -> TargetConfig:
    """Return attention alone, with biases everywhere and norms after each part of a layer.

    Queries and keys are normed over all heads, as in OLMo 2. Half of each head is rotated, in
    neighbouring pairs, as in GLM-4, with the frequencies of Llama 3.
    """
    fields: dict[str, Any] = dict(
        layers=("attention",) * 3,
        attention=AttentionConfig(
            heads=4,
            kv_heads=2,
            head_dim=16,
            rotary_dim=8,
            interleaved=True,
            qk_norm=True,
            norm_whole=True,
            bias=True,
            out_bias=True,
            scale=0.25,
        ),
        delta_net=None,
        mlp=MlpConfig(hidden=48, bias=True),
        norms="post",
        rope=Rope(theta=1e4, kind="llama3", factor=8.0, original_length=16),
    )
    return tiny_target_config(**{**fields, **changes})


def experts_target_config(**changes: Any) -> TargetConfig:
    """Return attention alone, with gpt-oss's properties: sinks, biases, clamped experts.

    Layers with a window of six keys are first and last. The middle layer is dense.
    """
    attention = AttentionConfig(
        heads=4,
        kv_heads=2,
        head_dim=16,
        rotary_dim=16,
        bias=True,
        out_bias=True,
        scale=0.25,
        sinks=True,
    )
    fields: dict[str, Any] = dict(
        layers=("sliding", "attention", "sliding"),
        attention=attention,
        sliding=replace(attention, window=6),
        delta_net=None,
        mlp=MoeConfig(
            experts=6,
            active=2,
            hidden=24,
            shared_hidden=0,
            renormalized=False,
            router_bias=True,
            bias=True,
            limit=1.0,
        ),
        dense=MlpConfig(hidden=48),
        dense_layers=(1,),
        rope=Rope(theta=1e4, kind="yarn", factor=4.0, original_length=64, truncate=False),
    )
    return tiny_target_config(**{**fields, **changes})


def random_target(config: TargetConfig, seed: int = 0, dtype: Any = jnp.float32) -> DecoderTarget:
    """Return a random decoder whose vectors are random, too: norms about 1, biases and sinks.

    Args:
      config: description of a target without delta-net layers.
      seed: seed of the numbers.
      dtype: type of the weights and activations.
    """
    decoder = Decoder(config, dtype=dtype, rngs=nnx.Rngs(seed))
    key = jax.random.key(seed)
    for i, (path, value) in enumerate(nnx.to_flat_state(nnx.state(decoder, nnx.Param))):
        if value.ndim == 1 or str(path[-1]).endswith("_bias"):
            noise = jax.random.normal(jax.random.fold_in(key, i), value.shape, jnp.float32)
            value.set_value(value[...] + (0.3 * noise).astype(value.dtype))
    return DecoderTarget.of(decoder)


def tiny_target(seed: int = 0, dtype: Any = jnp.float32, **changes: Any) -> DecoderTarget:
    """Return a random decoder of :func:`tiny_target_config`."""
    config = tiny_target_config(**changes)
    return DecoderTarget.of(Decoder(config, dtype=dtype, rngs=nnx.Rngs(seed)))


def tiny_drafter(
    target: DecoderTarget,
    kind: str = "dflash2",
    seed: int = 1,
    dtype: Any = jnp.float32,
    **changes: Any,
) -> BlockDrafter:
    """Return a random two-layer block drafter: block 4, three candidates, window 12."""
    t = target.config
    own = block_of(kind)
    fields: dict[str, Any] = dict(
        kind=kind,
        vocab_size=t.vocab_size,
        width=t.width,
        aux_width=t.aux_width,
        layers=2,
        attention=AttentionConfig(
            heads=4,
            kv_heads=2,
            head_dim=16,
            rotary_dim=16,
            qk_norm=True,
            scale=0.25,
            window=12 if kind == "dflash2" else -1,
        ),
        mlp_hidden=48,
        norm_eps=1e-6,
        block_size=4,
        draft_tokens=own.draft_tokens(4),
        candidates=3,
        rank=8,
        mask_token=5,
        context_length=t.context_length,
        conv=ConvConfig(taps=2, group=8) if own.convolves else None,
    )
    config = BlockDrafterConfig(**{**fields, **changes})
    module = own.module(config, dtype=dtype, rngs=nnx.Rngs(seed))
    _spread(module, config)
    embedding, head = _shared(target)
    return BlockDrafter.of(Frozen.of(module), embedding, head, config, jnp.dtype(dtype))


def tiny_mtp(
    target: DecoderTarget,
    seed: int = 1,
    dtype: Any = jnp.float32,
    draft_tokens: int = 3,
    **changes: Any,
) -> MtpDrafter:
    """Return a random multi-token-prediction head for ``target``."""
    t = target.config
    fields: dict[str, Any] = dict(
        vocab_size=t.vocab_size,
        width=t.width,
        attention=AttentionConfig(
            heads=4, kv_heads=2, head_dim=16, rotary_dim=8, gated=True, qk_norm=True, scale=0.25
        ),
        mlp=MlpConfig(hidden=48),
        norm_eps=1e-6,
        context_length=t.context_length,
    )
    config = MtpConfig(**{**fields, **changes})
    head = Mtp(config, dtype=dtype, rngs=nnx.Rngs(seed))
    embedding, matrix = _shared(target)
    return MtpDrafter(Frozen.of(head), embedding, matrix, config, jnp.dtype(dtype), draft_tokens)


def tiny_eagle3(
    target: DecoderTarget,
    seed: int = 1,
    dtype: Any = jnp.float32,
    draft_tokens: int = 3,
    **changes: Any,
) -> Eagle3Drafter:
    """Return a random EAGLE-3 head for ``target``: three of four tokens can be drafts."""
    t = target.config
    fields: dict[str, Any] = dict(
        vocab_size=t.vocab_size,
        width=t.width,
        tap_width=t.width,
        taps=len(t.taps),
        attention=AttentionConfig(heads=4, kv_heads=2, head_dim=12, rotary_dim=12, scale=0.3),
        mlp=MlpConfig(hidden=48),
        norm_eps=1e-6,
        context_length=t.context_length,
        draft_tokens=draft_tokens,
        draft_vocab_size=t.vocab_size * 3 // 4,
    )
    config = Eagle3Config(**{**fields, **changes})
    module = Eagle3(config, dtype=dtype, rngs=nnx.Rngs(seed))
    _spread(module, config)
    embedding, head = _shared(target)
    return Eagle3Drafter.of(Frozen.of(module), embedding, head, config, jnp.dtype(dtype))


def tiny_model(kind: str | None = "dflash2", seed: int = 0, **changes: Any) -> Model:
    """Return :func:`tiny_target` with a random drafter of the given kind."""
    target = tiny_target(seed, **changes)
    if kind is None:
        return Model.of(target)
    if kind == DRAFT_MODEL:
        return Model.of(target, DraftModel(tiny_target(seed + 1, taps=()), target.vocab_size))
    chains: dict[str, Any] = {"mtp": tiny_mtp, "eagle3": tiny_eagle3}
    if kind in chains:
        return Model.of(target, chains[kind](target, seed + 1))
    return Model.of(target, tiny_drafter(target, kind, seed + 1))


def _spread(module: Any, config: BlockDrafterConfig | Eagle3Config) -> None:
    """Spread the draft vocabulary, if there is one, over the whole vocabulary."""
    size = config.draft_vocab_size
    if size is not None:
        spread = np.arange(size) * config.vocab_size // size
        module.vocabulary.set_value(jnp.asarray(spread, jnp.int32))


def _shared(target: DecoderTarget) -> tuple[jax.Array, jax.Array]:
    """Return embedding and head, [V, D] each, that a drafter shares with its target."""
    params = target.decoder.params
    embedding = params["embed"]["weight"]
    return embedding, embedding if target.config.tied else params["head"]["weight"]


def assert_lossless(model: Model, drafter: Drafter, prompts: Any, **options: Any) -> None:
    """Check that greedy tokens are the same without ``drafter`` and that the counters add up.

    Args:
      model: a model.
      drafter: any :class:`jaxdraft.base.Drafter`.
      prompts: as in :func:`jaxdraft.generate`.
      **options: as in :func:`jaxdraft.generate`.

    Raises:
      AssertionError: with the first difference.
    """
    plain = generate(model, prompts, drafter="none", **options)
    drafted = generate(model, prompts, drafter=drafter, **options)
    for row, (expected, found) in enumerate(zip(plain.ids(), drafted.ids(), strict=True)):
        if expected != found:
            pairs = zip(expected, found, strict=False)
            same = next(
                (i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(found))
            )
            raise AssertionError(
                f"row {row} differs from plain decoding at token {same}: "
                f"plain {expected[same : same + 8]}, with drafts {found[same : same + 8]}"
            )
    np.testing.assert_array_equal(plain.lengths, drafted.lengths)
    np.testing.assert_array_equal(plain.status, drafted.status)
    check_stats(drafted.stats)


def check_stats(stats: Any) -> None:
    """Check ``0 <= accepted <= evaluated <= proposed``, and that no count rises with position."""
    accepted, evaluated = np.asarray(stats.accepted), np.asarray(stats.evaluated)
    proposed = np.asarray(stats.proposed)
    assert (accepted >= 0).all() and (accepted <= evaluated).all(), (accepted, evaluated)
    assert (evaluated <= proposed).all(), (evaluated, proposed)
    for counts in (np.asarray(stats.accepted_at), np.asarray(stats.evaluated_at)):
        assert (np.diff(counts, axis=1) <= 0).all(), counts


def check_pool(pool: PagedPool) -> None:
    """Check a pool: free + owned = all pages, and no page has two owners."""
    free = np.asarray(pool.free)[: int(pool.free_count)].tolist()
    owned = np.asarray(pool.table)
    owned = owned[owned < pool.pages].tolist()
    assert sorted(free + owned) == list(range(pool.pages)), (free, owned)


def run_rows_one_by_one(target: DecoderTarget, tokens: jax.Array, state: Any) -> tuple[Any, Any]:
    """Run every row alone, the reference for "verify T and commit n"; return logits and state."""
    logits = []
    one = jnp.ones((tokens.shape[0],), jnp.int32)
    for t in range(tokens.shape[1]):
        out = target.forward(tokens[:, t : t + 1], one, state)
        state = target.commit(out.state, one)
        logits.append(out.logits)
    return jnp.concatenate(logits, axis=1), state


__all__ = [
    "LatticeDrafter",
    "ScriptedDrafter",
    "Stateless",
    "TableDrafter",
    "TableState",
    "TableTarget",
    "assert_lossless",
    "biased_target_config",
    "check_pool",
    "check_stats",
    "experts_target_config",
    "propose_tokens",
    "random_target",
    "run_rows_one_by_one",
    "tiny_drafter",
    "tiny_model",
    "tiny_mtp",
    "tiny_target",
    "tiny_target_config",
    "windowed_target_config",
]
