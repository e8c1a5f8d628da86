"""A DFlash2 graph -> :class:`jaxdraft.nn.dflash2.DFlash2`."""

from __future__ import annotations

import dataclasses

from convert.artifact.block import BlockReader, DrafterPlan
from convert.artifact.genai_config import ArtifactConfig, DrafterSection
from convert.artifact.graph import Graph
from convert.artifact.products import cast, linear, rms_norm
from convert.artifact.walk import Call, axis_of
from convert.errors import ArtifactError, Problems
from convert.recipes import Plain, Recipe, Recipes
from convert.tensors import FLOAT, Tensor
from jaxdraft.config import ConvConfig

TAPS = 2
"""The only number of convolution taps that the exporter masks correctly; see ``_refuse_taps``."""


def plan_dflash2(
    graph: Graph,
    config: ArtifactConfig,
    section: DrafterSection,
    target_dtype: int | None,
    problems: Problems,
) -> DrafterPlan:
    """Read the graph of ``model.dflash2``; see :class:`convert.artifact.block.DrafterPlan`.

    Its pair scores, of the rows h that the head reads:

        previous -> Gather predecessor -----------------------> Mul --> MatMul -> [Cast] = pairs
        h -> MatMul hidden_projection -> Reshape [steps, 1, R] -->        |
        candidates -> Gather successor -> Transpose ---------------------->
    """
    reader = _DFlash2Reader(graph, config, section, target_dtype, problems)
    walk = reader.walk
    reader.body_type()
    scores = reader.scores()
    candidates, logits = reader.unary(scores["b"])
    rows, head = reader.head(logits)
    pair = walk.expect_op(cast(walk, scores["a"], FLOAT), "MatMul")
    turned = reader.last_two_swapped(pair["b"])
    weighted = walk.expect_op(pair["a"], "Mul")
    previous = reader.gather_indices(weighted["a"])
    reader.previous(previous, candidates)
    predecessor = reader.codebook(weighted["a"], previous)
    successor = reader.codebook(turned, candidates)
    rank = predecessor.shape[1]
    reader.same_rank(successor, rank)
    shaped = walk.expect_op(weighted["b"], "Reshape")
    walk.expect(shaped, "shape", [-1, reader.drafts, 1, rank])
    features, projection = linear(walk, shaped["data"], reader.width, rank, quantized=False)
    walk.expect_same("the rows that are projected", features, rows)
    final = rms_norm(walk, reader.mask_rows(rows), reader.width)
    extra: Recipes = {
        ("hidden_projection", "weight"): Recipe.rows([projection]),
        ("predecessor",): Recipe.of(predecessor),
        ("successor",): Recipe.of(successor),
    }
    return reader.plan(final, head, rank, extra)


@dataclasses.dataclass(frozen=True)
class _Side:
    """One side of a convolution: its rows, its base kernels, and the source of its deltas."""

    source: str
    bases: tuple[Tensor, ...]
    deltas: tuple[str, ...]
    call: Call  # the outermost sum


class _DFlash2Reader(BlockReader):
    _mask: str | None = None

    def mask_rows(self, value: str) -> str:
        """Match ``value`` as all rows of every block but the first; return all rows."""
        walk = self.walk
        flat = walk.expect_op(value, "Reshape")
        walk.expect(flat, "shape", [-1, self.width])
        blocks = walk.expect_op(self.slice(flat["data"], 1, self.block, 1), "Reshape")
        walk.expect(blocks, "shape", [-1, self.block, self.width])
        return blocks["data"]

    def convolved(self, value: str) -> tuple[str, object]:
        """Match ``value = sum_tap (base + delta) * x[t - tap]``, a mask on every tap but the first.

        x -----------------------------------------> Mul ------------> Add = value
        base 0, delta 0 -> Add -> Reshape ---------->                   |
        x -> Slice -> Concat (moved by one row) ---> Mul -> Mul mask -->
        base 1, delta 1 -> Add -> Reshape ---------->
        """
        walk = self.walk
        outer = walk.expect_op(value, "Add")
        terms: list[str] = []
        chain = outer
        while True:
            terms.append(chain["b"])
            if walk.op(chain["a"]) != "Add":
                break
            chain = walk.expect_op(chain["a"], "Add")
        terms.append(chain["a"])
        terms.reverse()  # tap 0 first
        if len(terms) != TAPS:
            _refuse_taps(walk.file, outer, len(terms))
        bases, deltas, source = [], [], ""
        for tap, value_of in enumerate(terms):
            rows, base, delta = self._term(value_of, tap)
            source = source or rows
            walk.expect_same(f"{outer.node.label}, tap {tap}", rows, source)
            bases.append(base)
            deltas.append(delta)
        return source, _Side(source, tuple(bases), tuple(deltas), outer)

    def _term(self, value: str, tap: int) -> tuple[str, Tensor, str]:
        """Match one tap: (rows, base kernel, the value of its delta)."""
        walk = self.walk
        if tap:
            masked = walk.expect_op(value, "Mul")
            self._mask = self._mask or masked["b"]
            walk.expect_same(f"{masked.node.label}, mask", masked["b"], self._mask)
            value = masked["a"]
        product = walk.expect_op(value, "Mul")
        coefficient = walk.expect_op(product["b"], "Reshape")
        walk.expect(coefficient, "shape", [-1, self.width])
        added = walk.expect_op(coefficient["data"], "Add")
        where = f"{added.node.label}, base kernel"
        base = walk.weight(added["a"], where, (1, None, None))
        if base.shape[1] * base.shape[2] != self.width:
            raise ArtifactError(
                walk.file,
                f"initializer {base.name}",
                f"shape {list(base.shape)}",
                f"[1, groups, channels], {self.width} in all",
            )
        rows = product["a"]
        if tap:
            joined = walk.expect_op(rows, "Concat")
            if axis_of(joined, 2) != 0 or len(joined.inputs) != 2:
                raise ArtifactError(walk.file, joined.node.label, "another axis", "two, on axis 0")
            rows = self.slice(joined["1"], 0, -tap, 0)
            front = self.slice(joined["0"], 0, tap, 0)
            walk.expect_same(f"{joined.node.label}, front", front, rows)
        return rows, base, added["b"]

    def convolution(
        self, name: str, prepare: object, finish: object
    ) -> tuple[ConvConfig | None, Recipes]:
        """Match both sides, whose deltas are parts of one projection of the normed rows.

        rows -> MatMul -> Reshape [cuts, groups] -> Split --> Reshape = delta 0 before
                                                          --> Reshape = delta 1 before
                                                          --> Reshape = delta 0 after
                                                          --> Reshape = delta 1 after
        """
        assert isinstance(prepare, _Side) and isinstance(finish, _Side)
        walk = self.walk
        bases = (*prepare.bases, *finish.bases)
        groups, group = bases[0].shape[1:]
        for base in bases:
            walk.weight(base.name, name, (1, groups, group))
        cuts = len(bases)
        shaped = ""
        for i, delta in enumerate((*prepare.deltas, *finish.deltas)):
            single = walk.expect_op(delta, "Reshape")
            walk.expect(single, "shape", [-1, groups, 1])
            split = walk.expect_op(single["data"], "Split", output=i)
            if (
                split["split"]
                or axis_of(split, 3) != 1
                or split.attributes["num_outputs"] != cuts
                or len(split.node.outputs) != cuts
            ):
                raise ArtifactError(
                    walk.file, split.node.label, "another cut", f"{cuts} equal parts of axis 1"
                )
            shaped = shaped or split["data"]
            walk.expect_same(f"{split.node.label}, data", split["data"], shaped)
        whole = walk.expect_op(shaped, "Reshape")
        walk.expect(whole, "shape", [-1, cuts, groups])
        source, projection = linear(walk, whole["data"], self.width, cuts * groups, quantized=False)
        walk.expect_same(f"{whole.node.label}, the projected rows", source, prepare.source)
        recipes: Recipes = {
            (name, "projection", "weight"): Recipe.rows([projection]),
            (name, "base"): Recipe.stack(
                (2, TAPS, self.width), [Plain(base, (self.width,)) for base in bases]
            ),
        }
        return ConvConfig(taps=TAPS, group=group), recipes

    def at_entry(self, embedded: str) -> None:
        """Match the mask: 0 on the first row of every block of the rows that enter, else 1.

        rows -> Shape -> Gather 0 -> Range -> Mod block -> Greater 0 -> Cast -> Reshape = mask
        """
        walk = self.walk
        if self._mask is None:
            return
        column = walk.expect_op(self._mask, "Reshape")
        walk.expect(column, "shape", [-1, 1])
        greater = walk.expect_op(cast(walk, column["data"], walk.dtype), "Greater")
        walk.expect(greater, "b", 0)
        within = walk.expect_op(greater["a"], "Mod")
        walk.expect(within, "b", self.block)
        count = walk.expect_op(within["a"], "Range")
        walk.expect(count, "start", 0)
        walk.expect(count, "delta", 1)
        rows = walk.expect_op(count["limit"], "Gather")
        walk.expect(rows, "indices", 0)
        shape = walk.expect_op(rows["data"], "Shape")
        walk.expect_same(f"{shape.node.label}, data", shape["data"], embedded)


def _refuse_taps(file: str, call: Call, taps: int) -> None:
    raise ArtifactError(
        file,
        call.node.label,
        f"a convolution of {taps} taps",
        f"{TAPS}: the exporter masks every tap with 'not the first row of a block' only, so with "
        "more taps a row reads rows of another block and the drafts depend on the batch",
    )
