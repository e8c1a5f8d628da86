"""What the programs do on a GPU: counts of compiled programs, at full width with four layers.

Nothing here runs on a GPU, and nothing is timed. ``./run test --gpu`` installs the compiler and
runs these tests; ``experiments/gpu_program.py`` prints the same counts as a table.
"""

from __future__ import annotations

import functools

import gpu_compile
import gpu_count
import gpu_models
import pytest

pytestmark = pytest.mark.gpu

LAYERS, CAPACITY = 4, 9216
H200 = gpu_compile.CARDS["h200"]


@pytest.fixture(scope="module", autouse=True)
def _compiler() -> None:
    if why := gpu_compile.unavailable():
        pytest.fail(why)


@functools.cache
def built(name: str, layers: int, kernels: str) -> tuple[gpu_models.Case, gpu_count.Program]:
    found = gpu_models.case(
        name, layers=layers, dtype=H200.dtype, capacity=CAPACITY, kernels=kernels
    )
    compiled = gpu_compile.compile_for(H200, found.function, found.arguments)
    return found, gpu_count.Program(compiled, found.weights)


def case(name: str) -> gpu_models.Case:
    return built(name, LAYERS, "xla")[0]


def program(name: str) -> gpu_count.Program:
    return built(name, LAYERS, "xla")[1]


def count(name: str, length: int, layers: int = LAYERS, kernels: str = "xla") -> gpu_count.Counts:
    found, compiled = built(name, layers, kernels)
    trips = functools.partial(found.trips, length)
    return compiled.count(trips, found.part, functools.partial(found.branches, length))


ROUNDS = ["step", "verify", "round:mtp", "round:dflash2", "round:dspark", "sampled:dflash2"]


@pytest.mark.parametrize("name", [*ROUNDS, "verify@moe", "verify@mxfp4"])
def test_no_weight_and_no_cache_is_copied(name: str) -> None:
    counts = count(name, 8192)
    assert counts.joined == 0
    assert counts.rewritten == 0
    assert counts.copied == 0


LENGTHS = (512, 2048, 8192)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", ["step", "verify", "round:dspark", "round:mtp"])
def test_hardly_more_is_moved_than_must_be(name: str, length: int) -> None:
    assert count(name, length).moved <= 1.05 * case(name).least(length)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", [*ROUNDS, "verify@moe", "verify@mxfp4", "prefill:dflash2"])
def test_a_program_is_one_graph_and_waits_for_nothing(name: str, length: int) -> None:
    counts = count(name, length)
    assert (counts.graphs, counts.waits) == (1, 0)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_round_of_64_layers_has_two_thousand_launches(length: int) -> None:
    assert count("round:dflash2", length, 64).launches <= 2000


@pytest.mark.parametrize("name", ["step", "verify"])
def test_a_long_text_is_read_once(name: str) -> None:
    """32,768 positions of a state with room for more: keys and values are not copied."""
    found = gpu_models.case(name, layers=LAYERS, dtype=H200.dtype, capacity=34_000)
    compiled = gpu_compile.compile_for(H200, found.function, found.arguments)
    counts = gpu_count.Program(compiled, found.weights).count(
        functools.partial(found.trips, 32_768),
        branches=functools.partial(found.branches, 32_768),
    )
    assert (counts.graphs, counts.waits, counts.copied) == (1, 0, 0)
    assert counts.moved <= 1.05 * found.least(32_768)


def test_a_delta_net_layer_solves_a_window_in_few_launches() -> None:
    """Twelve launches for convolution and recurrence, and no product of small blocks."""
    lines = program("verify").lines(functools.partial(case("verify").trips, 512))
    launches = sum(part.launches for line, part in lines if line.startswith("nn/delta_net.py"))
    assert launches <= 12 * case("verify").arguments[0].config.count("delta_net")


@pytest.mark.parametrize("length", [512, 8192])
def test_a_round_with_kernels_has_a_thousand_launches(length: int) -> None:
    """64 layers are four, and fifteen times the four between four and eight: of the same kinds.

    All of them are in one CUDA graph, without a wait for the host, at every length.
    """
    few, more = (count("round:dflash2", length, layers, "pallas") for layers in (4, 8))
    assert few.launches + 15 * (more.launches - few.launches) <= 1000
    for counts in (few, more):
        assert (counts.graphs, counts.waits) == (1, 0)
        assert counts.joined == counts.rewritten == counts.copied == 0


@pytest.mark.parametrize("length", [512, 2048, 8192])
def test_a_round_with_kernels_reads_the_keys_in_use(length: int) -> None:
    """Of every four more layers, hardly more bytes are moved than there must be."""
    few, more = (count("round:dflash2", length, layers, "pallas").moved for layers in (4, 8))
    least, most = (built("round:dflash2", n, "pallas")[0].least(length) for n in (4, 8))
    assert more - few <= 1.05 * (most - least)


def test_chunks_of_a_prompt_read_no_head_and_copy_no_weight() -> None:
    name = "prefill:dflash2"
    counts = count(name, 512)
    head = case(name).arguments[1].head
    assert counts.joined == counts.rewritten == 0
    assert counts.moved < case(name).least(512) + head.size * head.dtype.itemsize


@pytest.mark.parametrize("name", ["verify@moe", "step@experts", "step@mxfp4", "verify@mxfp4"])
def test_experts_that_no_row_chose_are_not_read(name: str) -> None:
    """Nor are the floats of packed experts ever in memory."""
    assert count(name, 512).moved <= 1.05 * case(name).least(512)


def test_the_thresholds_of_a_sampled_round_sort_no_vocabulary() -> None:
    """At most 8,192 scores of each of eight rows, where the vocabulary has 248,320."""
    sorts = [op for op in program("sampled:dflash2").module.instructions() if op.opcode == "sort"]
    assert sorts
    assert max(op.bytes for op in sorts) <= 8 * 8192 * 12  # a key, a place, and XLA's own number


@pytest.mark.parametrize("name", ["step", "verify"])
def test_a_card_without_bfloat16_makes_no_float32_of_its_weights(name: str) -> None:
    t4 = gpu_compile.CARDS["t4"]
    found = gpu_models.case(name, layers=LAYERS, dtype=t4.dtype, capacity=CAPACITY)
    compiled = gpu_compile.compile_for(t4, found.function, found.arguments)
    counts = gpu_count.Program(compiled, found.weights).count(
        functools.partial(found.trips, 512), branches=functools.partial(found.branches, 512)
    )
    assert (counts.graphs, counts.waits, counts.joined, counts.rewritten) == (1, 0, 0, 0)
    assert counts.moved <= 1.05 * found.least(512)
