"""The graph of a multi-token-prediction head -> :class:`jaxdraft.nn.mtp.Mtp`."""

from __future__ import annotations

import dataclasses

from convert.artifact.attention import Mixer, attention
from convert.artifact.block import DrafterPlan
from convert.artifact.feed_forward import FeedForward, feed_forward
from convert.artifact.genai_config import CONFIG, ArtifactConfig, DrafterSection, Names
from convert.artifact.graph import Graph
from convert.artifact.products import (
    Io,
    Norm,
    all_equal,
    cast,
    embedding,
    io_input,
    linear,
    rms_norm,
    unskipped,
)
from convert.artifact.walk import Walk, axis_of
from convert.errors import ArtifactError, Problems
from convert.recipes import Matrix, Recipe, Recipes
from convert.tensors import FLOAT, INT64
from jaxdraft.config import AttentionConfig, MtpConfig


def plan_mtp(
    graph: Graph,
    config: ArtifactConfig,
    section: DrafterSection,
    target_dtype: int | None,
    problems: Problems,
) -> DrafterPlan:
    """Read the graph of ``model.mtp``; see :class:`convert.artifact.block.DrafterPlan`.

    ids -> Gather embedding -> norm --> Concat -> MatMul fc = x
    hidden_states -----------> norm -->

    x --> norm --> attention --> Add --> norm --> feed-forward --> Add --> norm = hidden_states
      |                           |  |                              |                |
       ---------------------------    ------------------------------     MatMul head -> logits
    """
    walk = Walk(graph, problems)
    walk.dtype = target_dtype
    io = _io(graph, config, section)
    if section.layers != 1:
        problems.report(CONFIG, f"{section.where}.num_hidden_layers", section.layers, 1)
    return _plan(_walk(walk, io, config), walk, config, section, problems)


@dataclasses.dataclass(frozen=True)
class _Head:
    """The parts found by the walk, from the inputs down to the logits."""

    table: Matrix
    embedding_norm: Norm
    hidden_norm: Norm
    fc: Matrix
    before: Norm
    mixer: Mixer
    post: Norm
    feed: FeedForward
    final: Norm
    head: Matrix

    @property
    def norms(self) -> tuple[Norm, ...]:
        """All norms, which share one epsilon."""
        return (self.embedding_norm, self.hidden_norm, self.before, self.post, self.final)


def _walk(walk: Walk, io: Io, config: ArtifactConfig) -> _Head:
    """Read the graph from its logits to its inputs."""
    width, vocab, external = config.decoder.hidden_size, config.vocab_size, walk.dtype
    value = io.outputs["logits"]
    walk.output(value, "the logits", None, (*io.rows, vocab))
    if walk.op(value) == "Cast":
        value = cast(walk, value, FLOAT)
    rows, head = linear(walk, value, width, vocab)
    final = rms_norm(walk, rows, width)
    out = io.outputs["hidden_states"]
    walk.output(out, "the hidden rows", walk.dtype, (*io.rows, width))
    if out != rows:
        walk.expect_same("output hidden_states", walk.expect_op(out, "Identity")["x"], rows)

    feed = feed_forward(walk, final.skip, io, width)
    post = rms_norm(walk, feed.source, width)
    walk.expect_same("the residual stream", final.source, post.sum)
    mixer = attention(walk, post.skip, io, 0, width)
    before = rms_norm(walk, mixer.source, width)
    walk.expect_same("the residual stream", post.source, before.sum)
    pair, fc = linear(walk, unskipped(walk, before), 2 * width, width)
    joined = walk.expect_op(pair, "Concat")
    if axis_of(joined, len(io.rows) + 1) != len(io.rows) or len(joined.inputs) != 2:
        raise ArtifactError(walk.file, joined.node.label, "another axis", "two, on the last axis")
    embedding_norm = rms_norm(walk, joined["0"], width)
    hidden_norm = rms_norm(walk, joined["1"], width)
    hidden = io_input(walk, io, "hidden_states", external or FLOAT, (*io.rows, width))
    walk.expect_same("the rows of hidden_norm", unskipped(walk, hidden_norm), hidden)
    ids = io_input(walk, io, "input_ids", INT64, io.rows)
    table = embedding(walk, unskipped(walk, embedding_norm), ids, vocab, width)
    walk.finish()
    return _Head(table, embedding_norm, hidden_norm, fc, before, mixer, post, feed, final, head)


def _plan(
    found: _Head,
    walk: Walk,
    config: ArtifactConfig,
    section: DrafterSection,
    problems: Problems,
) -> DrafterPlan:
    """Return the module's description and recipes, checked against the section."""
    mixer, tables = found.mixer, found.mixer.tables
    eps = all_equal(walk, "norm epsilons", [norm.eps for norm in found.norms])
    if tables is None:
        raise ArtifactError(walk.file, "layer 0", "no rotation", "rotary tables")
    assert isinstance(mixer.config, AttentionConfig) and walk.dtype is not None
    for key, configured, graph in (
        ("num_key_value_heads", section.kv_heads, mixer.config.kv_heads),
        ("head_size", section.head_size, mixer.config.head_dim),
    ):
        if configured != graph:
            problems.report(
                CONFIG, f"{section.where}.{key}", configured, f"{graph}, of {walk.file}"
            )
    description = MtpConfig(
        vocab_size=config.vocab_size,
        width=config.decoder.hidden_size,
        attention=mixer.config,
        mlp=found.feed.config,
        norm_eps=eps,
        context_length=tables.positions,
    )
    recipes: Recipes = {
        ("embedding_norm", "weight"): found.embedding_norm.recipe,
        ("hidden_norm", "weight"): found.hidden_norm.recipe,
        ("fc", "weight"): Recipe.rows([found.fc]),
        ("input_norm", "weight"): found.before.recipe,
        ("post_norm", "weight"): found.post.recipe,
        ("norm", "weight"): found.final.recipe,
        **tables.recipes,
        **{("mixer", *path): recipe for path, recipe in mixer.recipes.items()},
        **{("mlp", *path): recipe for path, recipe in found.feed.recipes.items()},
    }
    return DrafterPlan(description, recipes, walk.dtype, walk.dtype, found.table, found.head)


def _io(graph: Graph, config: ArtifactConfig, section: DrafterSection) -> Io:
    """Return the names of the head's inputs.

    A paged head is fed like the paged target, whose section names the lengths and the page table;
    its own section still lists the attention mask of the dense form, which the graph lacks.
    """
    names = dict(section.inputs.by_role)
    paged = "block_table" in config.decoder.inputs
    if paged:
        if names.get("attention_mask") not in graph.inputs:
            names.pop("attention_mask", None)
        for role in (
            "block_table",
            "cumulative_sequence_lengths",
            "past_sequence_lengths",
            "attention_metadata",
        ):
            if role in config.decoder.inputs:
                names.setdefault(role, config.decoder.inputs[role])
    return Io(Names(names), section.outputs, "paged" if paged else "dense")
