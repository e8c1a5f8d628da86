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

from tests.gpu.programs import CAPACITY, LAYERS, LENGTHS, all_layers, built, case, count, program

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def _compiler() -> None:
    if why := gpu_compile.unavailable():
        pytest.fail(why)


ROUNDS = ["step", "verify", "round:mtp", "round:dflash2", "round:dspark", "sampled:dflash2"]


@pytest.mark.parametrize("name", [*ROUNDS, "verify@moe", "verify@mxfp4"])
def test_no_weight_and_no_cache_is_copied(name: str) -> None:
    counts = count(name, 8192)
    assert counts.joined == 0
    assert counts.rewritten == 0
    assert counts.copied == 0


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", ["step", "verify", "round:dspark", "round:mtp"])
def test_hardly_more_is_moved_than_must_be(name: str, length: int) -> None:
    assert count(name, length).moved <= 1.05 * case(name).least(length)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", [*ROUNDS, "verify@moe", "verify@mxfp4"])
def test_a_program_is_one_graph_and_waits_for_nothing(name: str, length: int) -> None:
    counts = count(name, length)
    assert (counts.graphs, counts.waits) == (1, 0)


@pytest.mark.parametrize("name", ["prefill:dflash2", "generate:dflash2", "generate:mtp"])
def test_a_pass_of_a_loop_waits_for_the_host_once(name: str) -> None:
    """Chunks of a prompt, and rounds: the host waits for the loop's condition and nothing else."""
    counts = count(name, 8192)
    assert (counts.graphs, counts.waits) == (1, 1)
    assert counts.joined == counts.rewritten == 0


@pytest.mark.parametrize("name", ["engine-round", "engine-chunk", "engine-admit"])
def test_programs_of_an_engine_are_one_graph(name: str) -> None:
    counts = count(f"{name}:dflash2", 2048)
    assert (counts.graphs, counts.waits) == (1, 0)
    assert counts.joined == counts.rewritten == 0


@pytest.mark.parametrize("name", ["round:dflash2", "sampled:dflash2"])
def test_a_round_of_64_layers_has_two_thousand_launches(name: str) -> None:
    # A sampled round may search the vocabulary twice, for top-k and top-p: 0.2 GB, counted here.
    within = 1.055 if name.startswith("sampled") else 1.05
    for length in LENGTHS:
        counts, least = all_layers(name, length)
        assert counts.launches <= 2000
        assert counts.moved <= within * least


def test_a_chunk_of_a_prompt_has_few_launches_per_layer() -> None:
    """512 rows: 30 per layer and 128 rows would be 120."""
    few, more = (count("prefill:dflash2", 8192, layers) for layers in (4, 8))
    assert more.launches - few.launches <= 4 * 70


@pytest.mark.parametrize("length", [512, 32_768])
@pytest.mark.parametrize("name", ["step", "verify"])
def test_a_long_text_is_read_once(name: str, length: int) -> None:
    """In a state with room for 34,000 positions. Keys and values of a long text are not copied."""
    counts = count(name, length, capacity=34_000)
    assert (counts.graphs, counts.waits) == (1, 0)
    assert counts.copied == 0 or length == 512
    assert counts.moved <= 1.05 * built(name, capacity=34_000)[0].least(length)


@pytest.mark.parametrize("name", ["step@int4", "verify@int4", "verify@int8", "verify@fp8"])
def test_packed_matrices_are_read_packed(name: str) -> None:
    """A window of eight rows too, with kernels and without: no float matrix is in memory."""
    for kernels, within in (("xla", 1.08), ("pallas", 1.05)):
        counts = count(name, 8192, kernels=kernels)
        assert counts.rewritten == counts.joined == 0
        assert counts.moved <= within * built(name, kernels=kernels)[0].least(8192)


def test_a_delta_net_layer_solves_a_window_in_few_launches() -> None:
    """Twelve launches for convolution and recurrence, and no product of small blocks."""
    lines = program("verify").lines(functools.partial(case("verify").trips, 512))
    launches = sum(part.launches for line, part in lines if line.startswith("nn/delta_net.py"))
    assert launches <= 12 * case("verify").arguments[0].config.count("delta_net")


@pytest.mark.parametrize("length", LENGTHS)
def test_a_round_with_kernels_has_a_thousand_launches(length: int) -> None:
    """All of them are in one CUDA graph, and the keys in use are read and no others."""
    counts, least = all_layers("round:dflash2", length, "pallas")
    assert counts.launches <= 1000
    assert (counts.graphs, counts.waits) == (1, 0)
    assert counts.joined == counts.rewritten == counts.copied == 0
    assert counts.moved <= 1.05 * least


def test_chunks_of_a_prompt_read_no_head_and_copy_no_weight() -> None:
    name = "prefill:dflash2"
    counts = count(name, 512)
    head = case(name).arguments[1].head
    assert counts.joined == counts.rewritten == 0
    found, compiled = built(name)
    trips = functools.partial(found.trips, 512)
    products = [
        part.moved
        for line, part in compiled.lines(trips, found.part)
        if line.endswith(" multiply_dense")
    ]
    assert products
    assert sum(products) < found.least(512) + head.size * head.dtype.itemsize


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
