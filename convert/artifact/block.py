"""The common parts of DFlash2 and DSpark graphs: context path, attention, lattice.

Rows of a call are one stream per request, [context rows, block rows]. The graph computes queries
for block rows only and gathers them into the stream; keys and values of the context come straight
from ``hidden_norm(fc(aux))``.
"""

from __future__ import annotations

import dataclasses

from convert.artifact.attention import (
    Tables,
    attention_core,
    check_tables,
    count_layers,
    paged_lengths,
    rotary_tables,
)
from convert.artifact.feed_forward import mlp
from convert.artifact.genai_config import CONFIG, ArtifactConfig, DrafterSection
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
from convert.artifact.quantized import Quantized
from convert.artifact.walk import Call, Walk, axis_of
from convert.errors import ArtifactError, Problems
from convert.recipes import Dense, Matrix, Piece, Recipe, Recipes, shortest
from convert.tensors import BFLOAT16, FLOAT, FLOAT16, INT32, INT64
from jaxdraft.config import AttentionConfig, BlockDrafterConfig, ConvConfig, MlpConfig, MtpConfig


@dataclasses.dataclass(frozen=True)
class DrafterPlan:
    """The description of a drafter's graph.

    Attributes:
      config: the description of the module.
      recipes: module path -> recipe of the parameter, without embedding and head, which are the
        target's.
      dtype: ONNX type of the body's weights.
      aux_dtype: ONNX type of the auxiliary (MTP: hidden) input.
      embedding, head: the tensors that must be the target's.
    """

    config: BlockDrafterConfig | MtpConfig
    recipes: Recipes
    dtype: int
    aux_dtype: int
    embedding: Matrix
    head: Matrix


@dataclasses.dataclass(frozen=True)
class Attended:
    """One layer's attention, followed back to the block rows and the context rows."""

    block: str  # rows that queries come from
    context: str  # rows of the context
    config: AttentionConfig
    recipes: Recipes
    tables: Tables
    page_size: int


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """One layer of a block drafter."""

    input_norm: Norm
    eps: tuple[float, float]
    attended: Attended
    hidden: int
    convs: tuple[ConvConfig | None, ConvConfig | None]  # around attention, around the MLP
    recipes: Recipes


class BlockReader:
    """Reads a block drafter's graph from its scores to its inputs.

    Accepted, from the inputs down to the scores:

        aux_hidden_states -> Cast -> MatMul fc -> norm = context, which every layer reads
        input_ids -> Gather embedding -> [Mul scale] -> layer -> ... -> layer -> norm = rows
        rows -> [DFlash2: all but the first of a block] -> MatMul head -> TopK = candidate_ids

        the candidates' own logits --------------> Add = scores
        pair scores (see dflash2.py, dspark.py) -->
    """

    def __init__(
        self,
        graph: Graph,
        config: ArtifactConfig,
        section: DrafterSection,
        target_dtype: int | None,
        problems: Problems,
    ):
        self.walk = Walk(graph, problems)
        self.config = config
        self.section = section
        self.problems = problems
        self.external = target_dtype
        self.io = Io(section.inputs, section.outputs, "paged")
        self.width = config.decoder.hidden_size
        self.block = section.block_size
        self.drafts = section.draft_tokens
        self.candidates = section.candidates

    # The lattice.

    def body_type(self) -> None:
        """Set the body's type to that of its caches; the target's head and table may differ."""
        name = self.io.inputs.layer("past_key_names", 0)
        value = self.walk.graph.inputs.get(name)
        if value is None:
            raise ArtifactError(self.walk.file, f"input {name!r}", "none of that name", "a cache")
        if value.data_type not in (FLOAT, FLOAT16, BFLOAT16):
            raise ArtifactError(
                self.walk.file, f"input {name!r}", f"type {value.data_type}", "a float type"
            )
        self.walk.dtype = value.data_type

    def scores(self) -> Call:
        """Match the sum that is the scores' output: (pair scores, candidates' own logits)."""
        walk, name = self.walk, self.io.outputs["scores"]
        shape = ("batch", self.drafts, self.candidates, self.candidates)
        walk.output(name, "the scores", FLOAT, shape)
        return walk.expect_op(name, "Add")

    def unary(self, value: str) -> tuple[str, str]:
        """Match the candidates' own logits: (the candidates' value, the rows that the head reads).

        logits -> [Cast] -> TopK --> Reshape -> Reshape [steps, 1, C] = value
                                 --> Reshape -> Cast = candidate_ids
        """
        walk, n, c = self.walk, self.drafts, self.candidates
        outer = walk.expect_op(value, "Reshape")
        walk.expect(outer, "shape", [-1, n, 1, c])
        inner = walk.expect_op(outer["data"], "Reshape")
        walk.expect(inner, "shape", [-1, n, c])
        best = walk.expect_op(inner["data"], "TopK", output=0)
        walk.expect(best, "k", [c])
        logits = cast(walk, best["x"], FLOAT)

        name = self.io.outputs["candidate_ids"]
        walk.output(name, "the candidates", INT32, ("batch", n, c))
        chosen = cast(walk, name, INT32)
        shaped = walk.expect_op(chosen, "Reshape")
        walk.expect(shaped, "shape", [-1, n, c])
        walk.expect_same("the candidates", shaped["data"], best.output(1))
        walk.expect_op(shaped["data"], "TopK", output=1)
        return chosen, logits

    def head(self, logits: str) -> tuple[str, Matrix]:
        """Match the target's head over rows cast to the target's type: (rows, head)."""
        walk = self.walk
        body, walk.dtype = walk.dtype, self.external
        rows, head = linear(walk, logits, self.width, self.config.vocab_size)
        walk.dtype = body
        if self.external != body:
            rows = cast(walk, rows, self.external)
        return rows, head

    def previous(self, value: str, candidates: str) -> None:
        """Match ``value`` as the anchor C times, then the candidates of all steps but the last.

        ids -> Reshape [block] -> Slice 0:1 -> Reshape -> Tile C --> Concat = value
        candidates -> Slice 0:steps-1 -----------------------------
        """
        walk, c = self.walk, self.candidates
        joined = walk.expect_op(value, "Concat")
        if axis_of(joined, 3) != 1 or len(joined.inputs) != 2:
            raise ArtifactError(
                walk.file, joined.node.label, "another axis or more parts", "axis 1"
            )
        tiled = walk.expect_op(joined["0"], "Tile")
        walk.expect(tiled, "repeats", [1, 1, c])
        lone = walk.expect_op(tiled["data"], "Reshape")
        walk.expect(lone, "shape", [-1, 1, 1])
        ids = self.slice(lone["data"], 0, 1, 1)
        blocks = walk.expect_op(ids, "Reshape")
        walk.expect(blocks, "shape", [-1, self.block])
        walk.expect_same(f"{blocks.node.label}, data", blocks["data"], self.ids())
        tail = self.slice(joined["1"], 0, self.drafts - 1, 1)
        walk.expect_same(f"{joined.node.label}, the earlier candidates", tail, candidates)

    def codebook(self, value: str, indices: str) -> Piece:
        """Match ``value = book[indices]``: the book [V, R]."""
        walk = self.walk
        call = walk.expect_op(value, "Gather")
        walk.expect_same(f"{call.node.label}, indices", call["indices"], indices)
        if axis_of(call, 2) != 0:
            raise ArtifactError(walk.file, f"{call.node.label}, axis", call.attributes["axis"], 0)
        where = f"{call.node.label}, table"
        table = walk.weight(call["data"], where, (self.config.vocab_size, None))
        return Dense.of(table, transposed=False)

    def gather_indices(self, value: str) -> str:
        """Return the indices of the Gather that computes ``value``."""
        return self.walk.expect_op(value, "Gather")["indices"]

    def slice(self, value: str, start: int, end: int, axis: int) -> str:
        """Match ``value = x[start:end]`` along ``axis``: x."""
        call = self.walk.expect_op(value, "Slice")
        self.walk.expect(call, "starts", [start])
        self.walk.expect(call, "ends", [end])
        self.walk.expect(call, "axes", [axis])
        return call["data"]

    def last_two_swapped(self, value: str) -> str:
        """Match ``value = swapaxes(x, -1, -2)`` of rank 4: x."""
        call = self.walk.expect_op(value, "Transpose")
        if call.attributes["perm"] != (0, 1, 3, 2):
            raise ArtifactError(
                self.walk.file, f"{call.node.label}, perm", call.attributes["perm"], (0, 1, 3, 2)
            )
        return call["data"]

    def same_rank(self, book: Piece, rank: int) -> None:
        """Check that a second codebook has the same rank."""
        if book.shape[1] != rank:
            raise ArtifactError(
                self.walk.file,
                f"initializer {book.tensors[0].name}",
                f"rank {book.shape[1]}",
                f"rank {rank}",
            )

    # Context path and block rows.

    def ids(self) -> str:
        """Return the block's token ids, with all requests in one row."""
        return io_input(self.walk, self.io, "input_ids", INT64, ("block rows",))

    def context(self, value: str) -> tuple[Recipes, int, int]:
        """Match ``value = hidden_norm(fc(aux))``: (parameters, A, type of aux).

        aux_hidden_states -> Cast -> MatMul fc -> SimplifiedLayerNormalization = value
        """
        walk = self.walk
        norm = rms_norm(walk, value, self.width)
        rows, fc = linear(walk, unskipped(walk, norm), None, self.width)
        aux = cast(walk, rows, walk.dtype)
        name = self.io.inputs["aux_hidden_states"]
        walk.expect_same("the rows of fc", aux, name)
        value_type = walk.graph.inputs[name].data_type if name in walk.graph.inputs else FLOAT
        walk.input(name, "the auxiliary states", None, ("rows", fc.shape[1]))
        recipes: Recipes = {
            ("fc", "weight"): Recipe.rows([fc]),
            ("hidden_norm", "weight"): norm.recipe,
        }
        return recipes, fc.shape[1], value_type

    def embedded(self, value: str) -> tuple[Matrix, float]:
        """Match the rows that enter the first layer: (the target's table, their scale)."""
        walk, scale = self.walk, 1.0
        if walk.op(value) == "Mul":
            call = walk.expect_op(value, "Mul")
            factor = walk.constant(cast(walk, call["b"], walk.dtype))
            if factor.size != 1 or factor.dtype.kind != "f":
                raise ArtifactError(walk.file, call.node.label, factor.tolist(), "one number")
            scale, value = shortest(float(factor.reshape(()))), call["a"]
        rows = cast(walk, value, walk.dtype)
        body, walk.dtype = walk.dtype, self.external
        table = embedding(walk, rows, self.ids(), self.config.vocab_size, self.width)
        walk.dtype = body
        return table, scale

    def attention(self, value: str, layer: int) -> Attended:
        """Match ``value = o(attention)`` over the stream, taken at the block's rows.

        The stream is [context rows, block rows] of every request.

            block rows -> MatMul q -> Gather q_row_map ----------------->
            block rows, context -> MatMul k -> Concat -> Gather qkv_row_map -->  PagedAttention
            block rows, context -> MatMul v -> Concat -> Gather qkv_row_map -->       |
                                                                           Gather block_row_index
                or one product:                                                       |
            block rows, context -> Concat -> MatMul qkv -> Gather qkv_row_map     MatMul o = value
        """
        walk = self.walk
        picked, out = linear(walk, value, None, self.width)
        gather = walk.expect_op(picked, "Gather")
        self._rows_by(gather, "block_row_index", ("block rows",))
        core = attention_core(walk, gather["data"])
        call, label = core.call, core.call.node.label
        if call.node.op != "PagedAttention" or call.attributes["is_causal"]:
            raise ArtifactError(walk.file, label, "causal attention", "PagedAttention, is_causal 0")
        if not core.rotary or out.shape[1] % core.heads:
            raise ArtifactError(walk.file, label, "no rotation or ragged heads", "do_rotary 1")
        head_dim = out.shape[1] // core.heads
        rows = (core.heads * head_dim, core.kv_heads * head_dim)
        page = self._caches(call, layer, core.kv_heads, head_dim)
        paged_lengths(walk, call, self.io)
        tables = rotary_tables(walk, call["cos_cache"], call["sin_cache"], label)
        check_tables(walk, tables, head_dim)
        packed = not call["key"]
        block, context, recipes = (self._packed if packed else self._separate)(call, rows)
        for name, role in (("q_norm", "q_norm_weight"), ("k_norm", "k_norm_weight")):
            weight = walk.weight(call[role], f"{label}, {role}", (head_dim,))
            recipes[name, "weight"] = Norm("", "", "", weight, 0.0).recipe
        recipes["o", "weight"] = Recipe.rows([out])
        config = AttentionConfig(
            heads=core.heads,
            kv_heads=core.kv_heads,
            head_dim=head_dim,
            rotary_dim=tables.rotary_dim,
            qk_norm=True,
            norm_eps=shortest(call.attributes["qk_norm_epsilon"]),
            window=core.window,
            scale=core.scale(head_dim),
            softcap=core.softcap,
        )
        return Attended(block, context, config, recipes, tables, page)

    def _caches(self, call: Call, layer: int, kv_heads: int, head_dim: int) -> int:
        """Check the caches in and out, of one shape, and return their page size."""
        walk, label = self.walk, call.node.label
        names = [call.node.outputs[0]]
        page = 0
        for role, kind in (("key_cache", "key"), ("value_cache", "value")):
            past = self.io.inputs.layer(f"past_{kind}_names", layer)
            present = self.io.outputs.layer(f"present_{kind}_names", layer)
            walk.expect_same(f"{label}, {role}", call[role], past)
            shape = ("pages", None, kv_heads, head_dim)
            walk.input(past, f"the cache of layer {layer}", walk.dtype, shape)
            declared = walk.graph.inputs[past].shape
            if len(declared) == 4 and isinstance(declared[1], int):
                page = declared[1]
            names.append(
                walk.output(
                    present,
                    f"the cache of layer {layer}",
                    walk.dtype,
                    ("pages", page or None, kv_heads, head_dim),
                )
            )
        walk.outputs(call, names)
        return page

    def _rows_by(self, gather: Call, role: str, shape: tuple[str, ...]) -> None:
        walk = self.walk
        indices = io_input(walk, self.io, role, INT32, shape)
        walk.expect_same(f"{gather.node.label}, indices", gather["indices"], indices)
        if axis_of(gather, 2) != 0:
            raise ArtifactError(
                walk.file, f"{gather.node.label}, axis", gather.attributes["axis"], 0
            )

    def _joined(self, value: str) -> tuple[str, str]:
        """Match ``value`` as block rows, then context rows; return both."""
        call = self.walk.expect_op(value, "Concat")
        if axis_of(call, 2) != 0 or len(call.inputs) != 2:
            raise ArtifactError(
                self.walk.file, call.node.label, "another axis or more parts", "two, on axis 0"
            )
        return call["0"], call["1"]

    def _separate(self, call: Call, rows: tuple[int, int]) -> tuple[str, str, Recipes]:
        walk, label = self.walk, call.node.label
        query = walk.expect_op(call["query"], "Gather")
        self._rows_by(query, "q_row_map", ("stream rows",))
        block, q = linear(walk, query["data"], self.width, rows[0])
        sources, matrices = [], []
        for role in ("key", "value"):
            gather = walk.expect_op(call[role], "Gather")
            self._rows_by(gather, "qkv_row_map", ("stream rows",))
            own, other = self._joined(gather["data"])
            block_rows, matrix = linear(walk, own, self.width, rows[1])
            context_rows, again = linear(walk, other, self.width, rows[1])
            if [t.name for t in matrix.tensors] != [t.name for t in again.tensors]:
                raise ArtifactError(
                    walk.file,
                    f"{label}, {role}",
                    f"{again.tensors[0].name} for context rows",
                    f"{matrix.tensors[0].name}, as for block rows",
                )
            walk.expect_same(f"{label}, {role} of block rows", block_rows, block)
            sources.append(context_rows)
            matrices.append(matrix)
        walk.expect_same(f"{label}, context rows", sources[1], sources[0])
        recipes: Recipes = {
            ("q", "weight"): Recipe.rows([q]),
            ("kv", "weight"): Recipe.rows(matrices),
        }
        return block, sources[0], recipes

    def _packed(self, call: Call, rows: tuple[int, int]) -> tuple[str, str, Recipes]:
        walk = self.walk
        gather = walk.expect_op(call["query"], "Gather")
        self._rows_by(gather, "qkv_row_map", ("stream rows",))
        total = rows[0] + 2 * rows[1]
        both, qkv = linear(walk, gather["data"], self.width, total)
        block, context = self._joined(both)
        assert isinstance(qkv, Dense | Quantized)
        recipes: Recipes = {
            ("q", "weight"): Recipe.rows([qkv.rows(0, rows[0])]),
            ("kv", "weight"): Recipe.rows([qkv.rows(rows[0], total)]),
        }
        return block, context, recipes

    # All layers.

    def layers(self, final: Norm) -> tuple[list[LayerPlan], str]:
        """Return every layer, and the value that enters the first."""
        count_layers(self.walk, self.section.layers, self.section.where)
        found: list[LayerPlan] = []
        norm = final
        for layer in reversed(range(self.section.layers)):
            found.append(self.layer(layer, norm))
            norm = found[-1].input_norm
        return found[::-1], unskipped(self.walk, norm)

    def layer(self, layer: int, after: Norm) -> LayerPlan:
        """Match one layer; ``after`` is the norm that follows it.

        x --> norm --> [conv] --> attention --> [conv] --> Add
          |                                                 |
           -------------------------------------------------
                                                            y
        y --> norm --> [conv] --> mlp --> [conv] --> Add
          |                                           |
           -------------------------------------------
        """
        walk = self.walk
        value, mlp_finish = self.convolved(after.skip)
        feed = mlp(walk, value, self.width)
        normed, mlp_prepare = self.convolved(feed.source)
        post = rms_norm(walk, normed, self.width)
        walk.expect_same("the residual stream", after.source, post.sum)
        value, attention_finish = self.convolved(post.skip)
        attended = self.attention(value, layer)
        normed, attention_prepare = self.convolved(attended.block)
        before = rms_norm(walk, normed, self.width)
        walk.expect_same("the residual stream", post.source, before.sum)
        recipes: Recipes = {
            ("input_norm", "weight"): before.recipe,
            ("post_norm", "weight"): post.recipe,
            **attended.recipes,
            **{("mlp", *path): recipe for path, recipe in feed.recipes.items()},
        }
        around_attention, part = self.convolution(
            "attention_conv", attention_prepare, attention_finish
        )
        recipes.update(part)
        around_mlp, part = self.convolution("mlp_conv", mlp_prepare, mlp_finish)
        recipes.update(part)
        assert isinstance(feed.config, MlpConfig)
        return LayerPlan(
            input_norm=before,
            eps=(before.eps, post.eps),
            attended=attended,
            hidden=feed.config.hidden,
            convs=(around_attention, around_mlp),
            recipes=recipes,
        )

    def convolved(self, value: str) -> tuple[str, object]:
        """Match one side of a block convolution: (rows before it, its parts)."""
        return value, None

    def convolution(
        self, name: str, prepare: object, finish: object
    ) -> tuple[ConvConfig | None, Recipes]:
        """Return both sides of a convolution as one module."""
        return None, {}

    # The plan.

    def plan(self, final: Norm, head: Matrix, rank: int, extra: Recipes) -> DrafterPlan:
        """Match the layers and return the plan of the whole graph."""
        walk, section = self.walk, self.section
        layers, embedded = self.layers(final)
        table, scale = self.embedded(embedded)
        self.at_entry(embedded)
        attended = [layer.attended for layer in layers]
        context = all_equal(walk, "context rows", [a.context for a in attended])
        recipes, aux_width, aux_type = self.context(context)
        walk.finish()

        tables = all_equal(walk, "rotary tables", [a.tables for a in attended])
        eps = [final.eps, *(e for layer in layers for e in layer.eps)]
        assert section.kind != "mtp"
        config = BlockDrafterConfig(
            kind=section.kind,
            vocab_size=self.config.vocab_size,
            width=self.width,
            aux_width=aux_width,
            layers=len(layers),
            attention=all_equal(walk, "attention shapes", [a.config for a in attended]),
            mlp_hidden=all_equal(walk, "feed-forward shapes", [layer.hidden for layer in layers]),
            norm_eps=all_equal(walk, "norm epsilons", eps),
            block_size=self.block,
            draft_tokens=self.drafts,
            candidates=self.candidates,
            rank=rank,
            mask_token=section.mask_token,
            context_length=tables.positions,
            embedding_scale=scale,
            conv=all_equal(walk, "convolutions", [c for layer in layers for c in layer.convs]),
        )
        self._compare(config, attended[0].page_size)
        recipes |= {("norm", "weight"): final.recipe, **tables.recipes, **extra}
        for i, layer in enumerate(layers):
            recipes |= {("layers", i, *path): r for path, r in layer.recipes.items()}
        assert walk.dtype is not None
        return DrafterPlan(config, recipes, walk.dtype, aux_type, table, head)

    def at_entry(self, embedded: str) -> None:
        """Check the value that enters the first layer; kinds with a mask override this."""

    def _compare(self, config: BlockDrafterConfig, page_size: int) -> None:
        """Check that the section agrees with the graph."""
        section, attention = self.section, config.attention
        for key, configured, found in (
            ("num_key_value_heads", section.kv_heads, attention.kv_heads),
            ("head_size", section.head_size, attention.head_dim),
            ("sliding_window", section.window, attention.window),
        ):
            if configured != found:
                self.problems.report(
                    CONFIG, f"{section.where}.{key}", configured, f"{found}, of {self.walk.file}"
                )
        engine = self.config.page_size
        if page_size and engine and page_size != engine:
            self.problems.report(
                CONFIG,
                "engine.dynamic_batching.block_size",
                engine,
                f"{page_size}, the pages of {self.walk.file}",
            )
