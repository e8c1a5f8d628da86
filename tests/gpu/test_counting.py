"""How programs are counted: on texts that are short enough to count by hand."""

from __future__ import annotations

import gpu_count
import gpu_hlo
import pytest
from gpu_compile import Compiled

HLO = """HloModule test

FileNames
1 "/somewhere/jaxdraft/nn/attention.py"

FunctionNames
1 "attend.<locals>.absorb"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%joining (a: f32[1000,500], b: f32[1000,500]) -> f32[2000,500] {
  %a = f32[1000,500]{1,0} parameter(0)
  %b = f32[1000,500]{1,0} parameter(1)
  ROOT %both = f32[2000,500]{1,0} concatenate(%a, %b), dimensions={0}
}

%part (p: f32[1000,500], at: s32[]) -> f32[1,500] {
  %p = f32[1000,500]{1,0} parameter(0)
  %at = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %row = f32[1,500]{1,0} dynamic-slice(%p, %at, %zero), dynamic_slice_sizes={1,500}
}

%body (t: (s32[], f32[1000,500])) -> (s32[], f32[1000,500]) {
  %t = (s32[], f32[1000,500]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %w = f32[1000,500]{1,0} get-tuple-element(%t), index=1
  %taken = f32[1,500]{1,0} fusion(%w, %i), kind=kLoop, calls=%part
  %turned = f32[1000,500]{0,1} copy(%w)
  ROOT %out = (s32[], f32[1000,500]{1,0}) tuple(%i, %w)
}

%goes (u: (s32[], f32[1000,500])) -> pred[] {
  %u = (s32[], f32[1000,500]{1,0}) parameter(0)
  %j = s32[] get-tuple-element(%u), index=0
  ROOT %less = pred[] compare(%j, %j), direction=LT
}

ENTRY %main (w0: f32[1000,500], w1: f32[1000,500]) -> f32[2000,500] {
  %w0 = f32[1000,500]{1,0} parameter(0)
  %w1 = f32[1000,500]{1,0} parameter(1)
  %n = s32[] constant(3)
  %start = (s32[], f32[1000,500]{1,0}) tuple(%n, %w0)
  %loop = (s32[], f32[1000,500]) while(%start), condition=%goes, body=%body, DETAILS
  ROOT %joined = f32[2000,500]{1,0} fusion(%w0, %w1), kind=kLoop, calls=%joining
}
""".replace("DETAILS", "metadata={stack_frame_id=1}")

THUNKS = """000: kWhile [source | sink]
condition:
    001: kCustomKernel [source | sink] less grid: [1, 1, 1]
  body:
    000: kCommandBuffer [source | sink]
        002: kCustomKernel [source | sink] part grid: [1, 1, 1]
        003: kCopy [source | sink] kCopy
004: kCustomKernel [source | sink] joining grid: [1, 1, 1]
"""

NAMES = {0: "loop", 1: "less", 2: "taken", 3: "turned", 4: "joined"}
MATRIX = 4 * 1000 * 500


def program(weights: range, hlo: str = HLO) -> gpu_count.Program:
    return gpu_count.Program(Compiled(hlo, THUNKS, NAMES, 0, 0.0), weights)


def test_a_loop_outside_of_a_graph_waits_for_the_host_before_every_pass() -> None:
    asked = []

    def trips(source: str) -> int:
        asked.append(source)
        return 5

    counts = program(range(2)).count(trips)
    assert asked == ["nn/attention.py:7 absorb"]
    assert counts.waits == 5 + 1
    assert counts.graphs == 5
    assert counts.launches == (5 + 1) + 5 * 2 + 1


def test_passes_that_the_compiler_knows_wait_for_nobody() -> None:
    known = 'backend_config={"known_trip_count":{"n":"3"}}, metadata={stack_frame_id=1}'
    counts = program(range(2), HLO.replace("metadata={stack_frame_id=1}", known)).count(
        lambda source: pytest.fail("asked for passes that are known")
    )
    assert counts.waits == 0
    assert counts.launches == 3 * 2 + 1


def test_a_pass_of_a_loop_has_its_condition() -> None:
    counts = program(range(2)).count(
        lambda source: pytest.fail("a pass is one"), "nn/attention.py absorb"
    )
    assert (counts.graphs, counts.waits, counts.launches) == (1, 1, 2 + 1)
    known = 'backend_config={"known_trip_count":{"n":"3"}}, metadata={stack_frame_id=1}'
    one = program(range(2), HLO.replace("metadata={stack_frame_id=1}", known))
    counts = one.count(lambda source: 0, "nn/attention.py absorb")
    assert (counts.graphs, counts.waits, counts.launches) == (1, 0, 2)


def test_bytes_of_slices_are_those_that_are_touched() -> None:
    module = gpu_hlo.Module(HLO)
    assert module.moved(module["taken"]) == (4 * 500 + 4, 4 * 500)
    assert module.moved(module["joined"]) == (2 * MATRIX, 2 * MATRIX)


def test_weights_are_told_from_other_arrays_inside_loops_too() -> None:
    counts = program(range(2)).count(lambda source: 5)
    assert counts.joined == 4 * MATRIX
    assert counts.rewritten == 5 * 2 * MATRIX
    assert counts.copied == 0
    counts = program(range(0)).count(lambda source: 5)
    assert counts.joined == counts.rewritten == 0
    assert counts.copied == 4 * MATRIX + 5 * 2 * MATRIX


@pytest.mark.parametrize(
    ("shape", "expected"),
    [("f32[]", 4), ("bf16[2,3]{1,0:T(8,128)}", 12), ("(s4[3], pred[5])", 2 + 5), ("u8[0]", 0)],
)
def test_bytes_of_shapes(shape: str, expected: int) -> None:
    assert gpu_hlo.shape_bytes(shape) == expected


def test_conditionals_and_loops_nest() -> None:
    tree = gpu_count.parse_thunks("""000: kCommandBuffer [source]
    001: kConditional [source]
      false_branch:
        002: kCopy [source]
      true_branch:
        003: kWhile [source]
condition:
            004: kCopy [source]
          body:
            005: kCopy [source]
            006: kCopy [source]
        007: kCopy [source]
008: kCopy [source]
""")
    assert [thunk.number for thunk in tree] == [0, 8]
    conditional = tree[0].parts[""][0]
    no, yes = conditional.parts["false_branch"], conditional.parts["true_branch"]
    assert [thunk.number for thunk in no] == [2]
    assert [thunk.number for thunk in yes] == [3, 7]
    assert [thunk.number for thunk in yes[0].parts["body"]] == [5, 6]
