"""Losses for training, and metrics that predict how many drafts will be accepted."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxdraft.base import MASKED
from jaxdraft.nn.block_drafter import BlockBackbone
from jaxdraft.nn.decoder import Decoder
from jaxdraft.nn.eagle3 import Eagle3
from jaxdraft.nn.linear import soft_cap
from jaxdraft.nn.mtp import Mtp
from jaxdraft.nn.packed import PackedMatrix
from jaxdraft.train.blocks import block_features, following
from jaxdraft.train.optimize import Metrics
from jaxdraft.train.sequence import chain_rows, decoder_rows, head_logits


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return ``-log softmax(logits)[label]``: [..., V], [...] -> [...] float32."""
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


def soft_cross_entropy(logits: jax.Array, probs: jax.Array) -> jax.Array:
    """Return ``-sum probs * log softmax(logits)``: [..., V], [..., V] -> [...] float32."""
    return -jnp.sum(probs * jax.nn.log_softmax(logits, axis=-1), axis=-1)


def binary_cross_entropy(logits: jax.Array, probs: jax.Array) -> jax.Array:
    """Return ``-p log sigmoid(logit) - (1 - p) log sigmoid(-logit)``, p held fixed: [...] float32.

    Example: logit 0 and any p give log 2.
    """
    return jax.nn.softplus(logits) - lax.stop_gradient(probs) * logits


def _in_32_bits(x: jax.Array) -> jax.Array:
    """Return wide numbers, which arrays have by default under ``jax_enable_x64``, in 32 bits."""
    narrow = {"int64": jnp.int32, "float64": jnp.float32}.get(str(x.dtype))
    return x if narrow is None else x.astype(narrow)


def language_loss(decoder: Decoder, tokens: jax.Array) -> tuple[jax.Array, Metrics]:
    """Return mean nats per token of sequences [B, 1 + T] int32, and metrics."""
    rows = decoder_rows(decoder, tokens[:, :-1])
    logits = decoder.logits(rows.hidden)
    nats = jnp.mean(cross_entropy(logits, tokens[:, 1:]))
    best = jnp.argmax(lax.stop_gradient(logits), axis=-1).astype(tokens.dtype)
    right = best == tokens[:, 1:]
    return nats, {"nats": nats, "right": jnp.mean(right.astype(jnp.float32))}


@struct.dataclass
class Continuations:
    """Sequences with the target's hidden states, and the positions where drafts start."""

    tokens: jax.Array  # [B, T] int32
    aux: jax.Array  # [B, T, A], the target's auxiliary states; MTP heads do not read them
    hidden: jax.Array  # [B, T, D], after the target's final norm
    anchors: jax.Array  # [B, n] int32 positions; every token they lead to lies in the sequence
    greedy: jax.Array  # [B] bool: continued greedily; else drawn at the loss's temperature


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftLoss:
    """Loss of a drafter: ``loss(module, batch) -> (loss, metrics)``.

    Draft k has weight ``exp(-k / decay)``. Its terms are

    * the cross entropy of the head's logits, which decide a block drafter's candidates;
    * the cross entropy of the lattice's scores after the true predecessor: among the C candidates
      (DFlash2's selector; a label that is missing takes the last one's place) or over the whole
      vocabulary (DSpark's Markov head). DFlash has none, and an MTP head has none, since its input
      is the predecessor;
    * the total variation between the drafts' distribution and the target's at ``temperature``:
      the probability of rejection in sampled verification. Only for sampled sequences.

    A confidence head learns the probability that a draft is accepted after its true predecessors.
    This term is the mean over all drafts, with the same weights.

    A drafter with a draft vocabulary learns from labels in it; the others have weight zero, and the
    target's probabilities are those among its tokens.

    A sequence's own tokens are the labels. Where they are one draw from a known distribution, the
    share ``soft`` of both cross entropies is taken against the target's probabilities themselves.

    Attributes:
      embedding: [V, D], the target's embedding.
      head: [V, D], the target's head.
      softcap: ``softcap`` of the target's description, for its probabilities.
      decay: number of drafts over which the weight falls by a factor of e.
      head_weight: weight of the first term.
      pair_weight: weight of the second term.
      variation_weight: weight of the third term.
      trust_weight: weight of the confidence head's term.
      temperature: temperature of the sampled sequences.
      soft: share of the target's probabilities in both cross entropies, see above.
      links: number of drafts of a chain (MTP, EAGLE-3); a block drafter has its own number.
    """

    embedding: jax.Array | PackedMatrix
    head: jax.Array | PackedMatrix
    softcap: float = 0.0
    decay: float = 4.0
    head_weight: float = 1.0
    pair_weight: float = 1.0
    variation_weight: float = 0.0
    trust_weight: float = 1.0
    temperature: float = 1.0
    soft: float = 0.0
    links: int = 3

    def __call__(
        self, module: BlockBackbone | Mtp | Eagle3, batch: Continuations
    ) -> tuple[jax.Array, Metrics]:
        """Return the loss [] and metrics, see :func:`acceptance`."""
        batch = jax.tree.map(_in_32_bits, batch)
        if isinstance(module, BlockBackbone):
            return self.block(module, batch)
        return self.chain(module, batch)

    def block(self, backbone: BlockBackbone, batch: Continuations) -> tuple[jax.Array, Metrics]:
        """Return the loss and metrics of a block drafter."""
        config = backbone.config
        drafts = config.draft_tokens
        features = block_features(
            backbone, self.embedding, batch.aux, batch.tokens, batch.anchors
        )  # [B, n, K, D]
        head = self.head
        if config.draft_vocab_size is not None:
            head = _rows(head, backbone.vocabulary[...])
        logits = backbone.logits(features, head)
        labels = backbone.draft_ids(following(batch.tokens, batch.anchors, drafts, offset=1))
        before = following(batch.tokens, batch.anchors, drafts, offset=0)
        before = backbone.predecessors(before)
        bias = backbone.pair_bias(features, before)
        known = labels < config.draftable
        labels = jnp.where(known, labels, 0)
        teacher = self._teacher(following(batch.hidden, batch.anchors, drafts, offset=0), head)
        nats = self._mixed(logits, labels, teacher, batch.greedy)

        whole = logits if bias is None else logits + bias
        # A chain's drafts are the best after the path, a lattice's candidates the best before it.
        ranked = whole if config.chained else logits
        _, best = lax.top_k(lax.stop_gradient(ranked), config.candidates)
        candidates = jnp.concatenate([best, labels[..., None]], axis=-1)  # [B, n, K, C + 1]
        pairs = self._pairs(backbone, features, before, candidates, bias)
        scores = jnp.take_along_axis(logits, candidates, axis=-1) + pairs
        if bias is not None:
            selected = self._mixed(whole, labels, teacher, batch.greedy)
        else:
            selected = self._selected(scores, candidates, teacher, batch.greedy)
        drafted = scores[..., : config.candidates]
        overlap = self._overlap(drafted, jnp.take_along_axis(teacher, best, axis=-1), teacher)
        total = self.head_weight * nats
        if config.rank:
            total = total + self.pair_weight * selected
        total = total + self.variation_weight * self._sampled(batch, 1.0 - overlap)
        found = jnp.any(best == labels[..., None], axis=-1) & known
        right = found & (jnp.take_along_axis(best, _best(drafted), axis=-1)[..., 0] == labels)
        metrics = {
            "nats": self._weighted(nats, known),
            "pair_nats": self._weighted(selected, known),
            "recall": jnp.mean(found.astype(jnp.float32), axis=(0, 1)),
            **acceptance(batch.greedy, right, overlap),
        }
        loss = self._weighted(total, known)
        if config.confidence is not None:
            chance = jnp.where(batch.greedy[:, None, None], right.astype(jnp.float32), overlap)
            trust = backbone.trust(features, before)
            metrics["trust_nats"] = self._weighted(binary_cross_entropy(trust, chance))
            loss = loss + self.trust_weight * metrics["trust_nats"]
        return loss, metrics

    @staticmethod
    def _pairs(
        backbone: BlockBackbone,
        features: jax.Array,
        before: jax.Array,
        candidates: jax.Array,
        bias: jax.Array | None,
    ) -> jax.Array:
        """Return the scores of candidates after the true predecessor, [B, n, K, C + 1]."""
        if bias is not None:
            return jnp.take_along_axis(bias, candidates, axis=-1)
        shape = (-1, features.shape[2])
        return backbone.pair_scores(
            features.reshape(*shape, features.shape[-1]),
            before.reshape(*shape, 1),
            candidates.reshape(*shape, candidates.shape[-1]),
        ).reshape(candidates.shape)

    def _selected(
        self, scores: jax.Array, candidates: jax.Array, teacher: jax.Array, greedy: jax.Array
    ) -> jax.Array:
        """Return the cross entropy among the candidates, of which the last is the label."""
        width = candidates.shape[-1] - 1
        hit = candidates[..., :-1] == candidates[..., -1:]
        found = jnp.any(hit, axis=-1)
        # One entry too many: the label's own, or the last candidate that it replaces.
        place = jnp.arange(width + 1, dtype=jnp.int32).reshape(1, 1, 1, -1)
        spare = jnp.where(found, width, width - 1)[..., None]
        kept = place != spare
        index = jnp.where(found, jnp.argmax(hit, axis=-1).astype(jnp.int32), width)
        return self._mixed(
            jnp.where(kept, scores, MASKED),
            index,
            jnp.where(kept, jnp.take_along_axis(teacher, candidates, axis=-1), MASKED),
            greedy,
        )

    def chain(self, layer: Mtp | Eagle3, batch: Continuations) -> tuple[jax.Array, Metrics]:
        """Return loss and metrics of a chain; link 0 at ``anchor - 1`` is the first draft."""
        embedding, head, start = self.embedding, self.head, batch.hidden
        if isinstance(layer, Eagle3):
            start = layer.fuse(batch.aux)
            embedding = layer.embed.table if layer.config.own_embedding else embedding
        rows = chain_rows(layer, embedding, start, batch.tokens, self.links)
        rows = jnp.stack(rows, axis=2)  # [B, T, K, D]
        features = jnp.take_along_axis(rows, (batch.anchors - 1)[..., None, None], axis=1)
        labels, known = following(batch.tokens, batch.anchors, self.links, offset=1), None
        logits = None
        if isinstance(layer, Eagle3):
            features = layer.features(features)
            if layer.config.own_head:
                logits = layer.head(features, out_dtype=jnp.float32)
            if layer.config.draft_vocab_size is not None:
                head = _rows(head, layer.vocabulary[...])
                labels = layer.draft_ids(labels)
                known = labels < layer.config.draftable
                labels = jnp.where(known, labels, 0)
        logits = head_logits(features, head) if logits is None else logits
        hidden = following(batch.hidden, batch.anchors, self.links, offset=0)
        teacher = self._teacher(hidden, head)
        nats = self._mixed(logits, labels, teacher, batch.greedy)
        full = teacher if known is None else self._teacher(hidden, self.head)
        overlap = self._overlap(logits, teacher, full)
        total = self.head_weight * nats
        total = total + self.variation_weight * self._sampled(batch, 1.0 - overlap)
        right = _best(logits)[..., 0].astype(jnp.int32) == labels
        return self._weighted(total, known), {
            "nats": self._weighted(nats, known),
            **acceptance(batch.greedy, right if known is None else right & known, overlap),
        }

    def _teacher(self, hidden: jax.Array, head: jax.Array | PackedMatrix) -> jax.Array:
        """Return the target's logits [B, n, K, V]."""
        return soft_cap(lax.stop_gradient(head_logits(hidden, head)), self.softcap)

    def _mixed(
        self, logits: jax.Array, labels: jax.Array, teacher: jax.Array, greedy: jax.Array
    ) -> jax.Array:
        """Return cross entropy [B, n, K], mixed from labels and the target's probabilities."""
        hard = cross_entropy(logits, labels)
        if not self.soft:
            return hard
        soft = soft_cross_entropy(logits, jax.nn.softmax(teacher, axis=-1))
        share = jnp.where(greedy, 0.0, self.soft)[:, None, None]
        return (1.0 - share) * hard + share * soft

    def _overlap(self, scores: jax.Array, teacher: jax.Array, full: jax.Array) -> jax.Array:
        """Return ``sum min(p, q)``, the probability that a sampled draft is accepted.

        Args:
          scores: [B, n, K, C], scores of the drafts that can be drawn.
          teacher: [B, n, K, C], the target's logits of the same tokens.
          full: [B, n, K, V], the target's logits of all tokens.
        """
        mass = jax.nn.logsumexp(full / self.temperature, axis=-1, keepdims=True)
        p = jnp.exp(teacher / self.temperature - mass)
        q = jax.nn.softmax(scores / self.temperature, axis=-1)
        return jnp.sum(jnp.minimum(p, q), axis=-1)

    @staticmethod
    def _sampled(batch: Continuations, values: jax.Array) -> jax.Array:
        """Return the values, set to zero on greedy sequences."""
        return jnp.where(batch.greedy[:, None, None], 0.0, values)

    def _weighted(self, values: jax.Array, known: jax.Array | None = None) -> jax.Array:
        """Return the mean of [B, n, K], weighted over drafts; zero where not ``known``."""
        weight = jnp.exp(-jnp.arange(values.shape[-1], dtype=jnp.float32) / self.decay)
        if known is not None:
            values = jnp.where(known, values, 0.0)
        return jnp.sum(jnp.mean(values, axis=(0, 1)) * weight) / jnp.sum(weight)


def acceptance(greedy: jax.Array, right: jax.Array, overlap: jax.Array) -> Metrics:
    """Return acceptance metrics of a training batch.

    Each draft is evaluated after its true predecessors, like a draft that a round reaches.
    ``survival`` [K] is the share of blocks whose drafts 0..k are all accepted. The ratio of its
    neighbours is the conditional acceptance by position. ``tokens``, its sum plus one, is the
    number of tokens that a round emits from an anchor anywhere in the sequences.

    Args:
      greedy: [B] bool, True for sequences continued greedily.
      right: [B, n, K] bool, True if the draft is the label; used on greedy sequences.
      overlap: [B, n, K], probability that a sampled draft is accepted; used on the others.

    Returns:
      ``greedy_survival`` and ``sampled_survival`` [K], ``greedy_tokens`` and ``sampled_tokens`` [];
      NaN where a batch has no such sequence.
    """
    metrics = {}
    kinds = {
        "greedy": (greedy, right.astype(jnp.float32)),
        "sampled": (~greedy, overlap.astype(jnp.float32)),
    }
    for name, (of, accept_prob) in kinds.items():
        reached = jnp.cumprod(lax.stop_gradient(accept_prob), axis=-1)
        number = jnp.sum(of.astype(jnp.float32)) * reached.shape[1]
        survival = jnp.sum(jnp.where(of[:, None, None], reached, 0.0), axis=(0, 1)) / number
        metrics[f"{name}_survival"] = survival
        metrics[f"{name}_tokens"] = 1.0 + jnp.sum(survival)
    return metrics


def _rows(head: jax.Array | PackedMatrix, ids: jax.Array) -> jax.Array | PackedMatrix:
    """Return the rows of a head that score the tokens ``ids``."""
    return head.select(ids) if isinstance(head, PackedMatrix) else jnp.take(head, ids, axis=0)


def _best(scores: jax.Array) -> jax.Array:
    """Return the index [..., 1] of the best score; the lowest index wins ties."""
    return jnp.argmax(scores, axis=-1, keepdims=True)
