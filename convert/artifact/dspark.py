"""A DSpark graph -> :class:`jaxdraft.nn.dspark.DSpark`."""

from __future__ import annotations

from convert.artifact.block import BlockReader, DrafterPlan
from convert.artifact.genai_config import ArtifactConfig, DrafterSection
from convert.artifact.graph import Graph
from convert.artifact.products import cast, rms_norm
from convert.errors import Problems
from convert.recipes import Recipe, Recipes
from convert.tensors import FLOAT


def plan_dspark(
    graph: Graph,
    config: ArtifactConfig,
    section: DrafterSection,
    target_dtype: int | None,
    problems: Problems,
) -> DrafterPlan:
    """Read the graph of ``model.dspark``; see :class:`convert.artifact.block.DrafterPlan`.

    The pattern of its pair scores:

        previous -> Gather markov_w1 -> Cast ----------------> MatMul = pairs
        candidates -> Gather markov_w2 -> Cast -> Transpose -->
    """
    reader = BlockReader(graph, config, section, target_dtype, problems)
    walk = reader.walk
    reader.body_type()
    scores = reader.scores()
    candidates, logits = reader.unary(scores["b"])
    rows, head = reader.head(logits)
    pair = walk.expect_op(scores["a"], "MatMul")
    before = cast(walk, pair["a"], FLOAT)
    after = cast(walk, reader.last_two_swapped(pair["b"]), FLOAT)
    previous = reader.gather_indices(before)
    reader.previous(previous, candidates)
    w1 = reader.codebook(before, previous)
    w2 = reader.codebook(after, candidates)
    rank = w1.shape[1]
    reader.same_rank(w2, rank)
    final = rms_norm(walk, rows, reader.width)
    extra: Recipes = {("markov_w1",): Recipe.of(w1), ("markov_w2",): Recipe.of(w2)}
    return reader.plan(final, head, rank, extra)
