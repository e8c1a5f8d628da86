"""The target's graph -> :class:`jaxdraft.nn.decoder.Decoder`.

The graph is read from the logits back to the embedding; layers are numbered from the front once the
embedding has been reached. Every parameter of the module is named once, in the recipes collected
on the way.

Accepted, from the ids down to the logits:

    input_ids -> Gather = x

    x --> norm --> attention, delta net --> Add --> norm --> feed-forward --> Add      per layer
      |                                      |  |                              |
       --------------------------------------    ------------------------------
                     |
                     --> Concat = aux_hidden_states (x as it enters some layers)

    x --> norm --> [Gather logits_indices; or the last row] --> MatMul head --> [Cast] = logits
                |
                --> hidden_states

A sum and the norm after it are one SkipSimplifiedLayerNormalization.
"""

from __future__ import annotations

import dataclasses

from convert.artifact.attention import Mixer, attention, count_layers
from convert.artifact.delta_net import delta_net
from convert.artifact.feed_forward import FeedForward, feed_forward
from convert.artifact.genai_config import CONFIG, ArtifactConfig, Names
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
from convert.artifact.walk import Walk, axis_of
from convert.errors import ArtifactError, Problems
from convert.recipes import Matrix, Recipe, Recipes
from convert.tensors import FLOAT, FLOATS, INT64
from jaxdraft.config import (
    FULL_ATTENTION,
    AttentionConfig,
    DeltaNetConfig,
    LayerKind,
    TargetConfig,
)


@dataclasses.dataclass(frozen=True)
class TargetPlan:
    """The description of a target's graph.

    Attributes:
      config: the description of the module.
      recipes: module path -> recipe of the parameter.
      dtype: ONNX type of the body's weights.
      embedding, head: the two tensors a drafter shares.
      logits_dtype: ONNX type of the logits output.
      layout: dense or paged.
    """

    config: TargetConfig
    recipes: Recipes
    dtype: int
    embedding: Matrix
    head: Matrix
    layout: str


@dataclasses.dataclass(frozen=True)
class _Layer:
    mixer: Mixer
    feed: FeedForward
    input_norm: Norm
    post_norm: Norm
    kind: LayerKind


def plan_target(graph: Graph, config: ArtifactConfig, problems: Problems) -> TargetPlan:
    """Read the graph of ``model.decoder``.

    Args:
      graph: the graph.
      config: the artifact's configuration; disagreements are reported.
      problems: destination of problems that do not prevent further reading.

    Raises:
      ArtifactError: the graph is not of the form that is implemented.
    """
    return _TargetReader(graph, config, problems).read()


class _TargetReader:
    def __init__(self, graph: Graph, config: ArtifactConfig, problems: Problems):
        self.walk = Walk(graph, problems)
        self.config = config
        self.decoder = config.decoder
        self.problems = problems
        layout = "paged" if "block_table" in self.decoder.inputs else "dense"
        outputs = dict(self.decoder.outputs.by_role)
        for role in ("aux_hidden_states", "hidden_states"):
            # Without a drafter the builder exports these outputs and does not list them.
            if role in graph.outputs and role not in outputs.values():
                outputs.setdefault(role, role)
        self.io = Io(self.decoder.inputs, Names(outputs), layout)
        self.width = self.decoder.hidden_size

    def read(self) -> TargetPlan:
        walk, names = self.walk, self.io.outputs
        logits = names["logits"]
        if logits not in walk.graph.producers:
            raise ArtifactError(walk.file, f"output {logits!r}", "nothing", "the logits")
        value = logits
        if walk.op(value) == "Cast":
            value = cast(walk, value, FLOAT)
        head_input, head = linear(walk, value, self.width, self.config.vocab_size)
        hidden = self._unpruned(head_input)
        self._body_type(hidden)
        logits_type = FLOAT if value != logits else walk.dtype
        self._logits_output(logits, logits_type, head_input != hidden)
        final = rms_norm(walk, hidden, self.width)
        self._hidden_output(hidden)
        layers, embedded = self._layers(final)
        ids = io_input(walk, self.io, "input_ids", INT64, self.io.rows)
        table = embedding(walk, embedded, ids, self.config.vocab_size, self.width)
        taps = self._taps(layers)
        walk.finish()
        return self._plan(layers, final, table, head, taps)

    def _body_type(self, hidden: str) -> None:
        """Check that the type of the final norm's weight is that of the body, quantized or not."""
        call = self.walk.expect_op(
            hidden, "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"
        )
        name = call.inputs.get("gamma") or call.inputs.get("scale") or ""
        tensor = self.walk.graph.initializers.get(name)
        if tensor is None or tensor.data_type not in FLOATS:
            raise ArtifactError(
                self.walk.file, call.node.label, f"scale {name!r}", "a float tensor"
            )
        self.walk.dtype = tensor.data_type

    def _unpruned(self, value: str) -> str:
        """Return the final norm's rows, of which the head may read a selection."""
        walk = self.walk
        if walk.op(value) == "Unsqueeze":  # the last row of a dense graph
            call = walk.expect_op(value, "Unsqueeze")
            walk.expect(call, "axes", [1])
            last = walk.expect_op(call["data"], "Gather")
            walk.expect(last, "indices", -1)
            if axis_of(last, 3) != 1:
                raise ArtifactError(
                    walk.file, f"{last.node.label}, axis", last.attributes["axis"], 1
                )
            return last["data"]
        return self._selected(value)

    def _selected(self, value: str) -> str:
        """Match ``value = rows[logits_indices]``: the rows, or ``value`` if nothing is selected."""
        walk = self.walk
        if walk.op(value) != "Gather" or "logits_indices" not in self.io.inputs:
            return value
        call = walk.expect_op(value, "Gather")
        indices = io_input(walk, self.io, "logits_indices", 6, ("rows",))
        walk.expect_same(f"{call.node.label}, indices", call["indices"], indices)
        if axis_of(call, 2) != 0:
            raise ArtifactError(walk.file, f"{call.node.label}, axis", call.attributes["axis"], 0)
        return call["data"]

    def _logits_output(self, name: str, data_type: int | None, pruned: bool) -> None:
        rows: tuple[int | str, ...] = self.io.rows
        if pruned and self.io.layout == "dense":
            rows = ("batch", 1)
        self.walk.output(name, "the logits", data_type, (*rows, self.config.vocab_size))

    def _hidden_output(self, hidden: str) -> None:
        if "hidden_states" not in self.io.outputs:
            return
        name = self.io.outputs["hidden_states"]
        self.walk.output(name, "the hidden rows", self.walk.dtype, (*self.io.rows, self.width))
        self.walk.expect_same("output hidden_states", hidden, name)

    def _layers(self, final: Norm) -> tuple[list[_Layer], str]:
        """Return all layers, and the value that enters the first."""
        count = self.decoder.layers
        count_layers(self.walk, count, "model.decoder")
        layers: list[_Layer] = []
        norm = final
        for layer in reversed(range(count)):
            layers.append(self._layer(layer, norm, last=layer == count - 1))
            norm = layers[-1].input_norm
        return layers[::-1], unskipped(self.walk, norm)

    def _layer(self, layer: int, after: Norm, *, last: bool) -> _Layer:
        walk = self.walk
        feed = feed_forward(walk, after.skip, self.io, self.width)
        post = rms_norm(walk, feed.source, self.width)
        self._residual(after.source, post)
        residual, delta = post.source, post.skip
        if last and walk.op(residual) == "Gather" and "logits_indices" in self.io.inputs:
            selected = self._selected(residual)
            if selected != residual:
                residual, delta = selected, self._selected(delta)
        read = delta_net if self._is_delta_net(delta) else attention
        mixer = read(walk, delta, self.io, layer, self.width)
        kind: LayerKind = "delta_net"
        if isinstance(mixer.config, AttentionConfig):
            kind = "attention" if mixer.config.window == FULL_ATTENTION else "sliding"
        before = rms_norm(walk, mixer.source, self.width)
        self._residual(residual, before)
        return _Layer(mixer, feed, before, post, kind)

    def _residual(self, value: str, norm: Norm) -> None:
        """Check that the residual stream goes on from the sum that ``norm`` normalised."""
        self.walk.expect_same("the residual stream", value, norm.sum)

    def _is_delta_net(self, delta: str) -> bool:
        produced = self.walk.graph.producers.get(delta)
        return bool(produced) and self.walk.op(produced[0].inputs[0]) == "GatedRMSNorm"

    def _taps(self, layers: list[_Layer]) -> tuple[int, ...]:
        """Return the layers whose input residuals form the auxiliary output, in its order."""
        if "aux_hidden_states" not in self.io.outputs:
            return ()
        walk, name = self.walk, self.io.outputs["aux_hidden_states"]
        walk.output(name, "the auxiliary states", None)
        call = walk.expect_op(name, "Concat")
        if axis_of(call, len(self.io.rows) + 1) != len(self.io.rows):
            raise ArtifactError(walk.file, f"{call.node.label}, axis", call.attributes["axis"], -1)
        entering = {layer.input_norm.sum: i for i, layer in enumerate(layers) if i > 0}
        taps = []
        for value in call.inputs.values():
            if value not in entering:
                raise ArtifactError(
                    walk.file, call.node.label, f"{value!r}", "residuals entering layers 1 and up"
                )
            taps.append(entering[value])
        shape = (*self.io.rows, len(taps) * self.width)
        walk.output(name, "the auxiliary states", walk.dtype, shape)
        return tuple(taps)

    def _plan(
        self,
        layers: list[_Layer],
        final: Norm,
        table: Matrix,
        head: Matrix,
        taps: tuple[int, ...],
    ) -> TargetPlan:
        walk = self.walk
        tied = self._tied(table, head)
        used = [layer.mixer.tables for layer in layers if layer.mixer.tables]
        tables = all_equal(walk, "rotary tables", used) if used else None
        shapes = {
            kind: all_equal(walk, f"shapes of {kind} layers", [x.mixer.config for x in found])
            for kind in dict.fromkeys(layer.kind for layer in layers)
            if (found := [layer for layer in layers if layer.kind == kind])
        }
        full, sliding, delta = (shapes.get(kind) for kind in ("attention", "sliding", "delta_net"))
        assert full is None or isinstance(full, AttentionConfig)
        assert sliding is None or isinstance(sliding, AttentionConfig)
        assert delta is None or isinstance(delta, DeltaNetConfig)
        eps = [n.eps for x in layers for n in (x.input_norm, x.post_norm)] + [final.eps]
        target = TargetConfig(
            vocab_size=self.config.vocab_size,
            width=self.width,
            layers=tuple(layer.kind for layer in layers),
            attention=full,
            sliding=sliding,
            delta_net=delta,
            mlp=all_equal(walk, "feed-forward shapes", [layer.feed.config for layer in layers]),
            norm_eps=all_equal(walk, "norm epsilons", eps),
            tied=tied,
            context_length=tables.positions if tables else self.config.context_length,
            taps=taps,
            hidden_states="hidden_states" in self.io.outputs,
        )
        self._compare(target)
        self._compare_windows(target, [i for i, layer in enumerate(layers) if layer.mixer.bounded])
        recipes: Recipes = {
            ("embed", "weight"): Recipe.rows([table]),
            ("norm", "weight"): final.recipe,
            **(tables.recipes if tables else {}),
        }
        if not tied:
            recipes["head", "weight"] = Recipe.rows([head])
        for i, layer in enumerate(layers):
            recipes["layers", i, "input_norm", "weight"] = layer.input_norm.recipe
            recipes["layers", i, "post_norm", "weight"] = layer.post_norm.recipe
            for part, found in (("mixer", layer.mixer.recipes), ("mlp", layer.feed.recipes)):
                for path, recipe in found.items():
                    recipes["layers", i, part, *path] = recipe
        assert walk.dtype is not None
        return TargetPlan(target, recipes, walk.dtype, table, head, self.io.layout)

    def _tied(self, table: Matrix, head: Matrix) -> bool:
        """Return whether embedding and head are the same stored tensors, read the same way."""
        if table.tensors[0] is not head.tensors[0]:
            return False
        same = [t.name for t in table.tensors] == [t.name for t in head.tensors]
        if isinstance(table, Quantized) and isinstance(head, Quantized):
            same = same and table.blocks == head.blocks
        if not same:
            raise ArtifactError(
                self.walk.file,
                f"initializer {table.tensors[0].name}",
                "an embedding and a head that dequantize it differently",
                "one way to dequantize it",
            )
        return True

    def _compare(self, target: TargetConfig) -> None:
        """Check that the configuration agrees with the graph."""
        decoder = self.decoder

        def equal(key: str, configured: object, graph: object) -> None:
            if configured != graph:
                self.problems.report(
                    CONFIG, f"model.decoder.{key}", configured, f"{graph}, of {self.walk.file}"
                )

        for shape in target.softmax:
            equal("num_attention_heads", decoder.heads, shape.heads)
            equal("num_key_value_heads", decoder.kv_heads, shape.kv_heads)
            equal("head_size", decoder.head_size, shape.head_dim)
        groups = {
            "paged_kv": ("attention", "sliding"),
            "fixed_conv": ("delta_net",),
            "fixed_recurrent": ("delta_net",),
        }
        for kind, ids in decoder.state_groups.items():
            layers = tuple(i for i, k in enumerate(target.layers) if k in groups[kind])
            equal(f"state_groups {kind}.layer_ids", ids, layers)

    def _compare_windows(self, target: TargetConfig, bounded: list[int]) -> None:
        """Check that the configuration and the graph bound the caches of the same layers."""
        section, where = self.decoder.sliding, "model.decoder.sliding_window"
        listed = list(section.layers) if section else []
        if listed != bounded:
            found = f"layers {listed}" if section else "nothing"
            self.problems.report(CONFIG, where, found, f"layers {bounded}, of {self.walk.file}")
        window = target.sliding.window if target.sliding else None
        if section and bounded and section.window != window:
            wanted = f"{window}, of {self.walk.file}"
            self.problems.report(CONFIG, f"{where}.window_size", section.window, wanted)
