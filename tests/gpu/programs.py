"""Programs at the geometry of 27B, compiled for an H200 once per test process, and their counts."""

from __future__ import annotations

import functools

import gpu_compile
import gpu_count
import gpu_models

LAYERS, CAPACITY = 4, 9216
LENGTHS = (512, 2048, 8192)
H200 = gpu_compile.CARDS["h200"]


@functools.cache
def built(
    name: str, layers: int = LAYERS, kernels: str = "xla", capacity: int = CAPACITY
) -> tuple[gpu_models.Case, gpu_count.Program]:
    found = gpu_models.case(
        name, layers=layers, dtype=H200.dtype, capacity=capacity, kernels=kernels
    )
    compiled = gpu_compile.compile_for(H200, found.function, found.arguments)
    return found, gpu_count.Program(compiled, found.weights)


def case(name: str) -> gpu_models.Case:
    return built(name)[0]


def program(name: str) -> gpu_count.Program:
    return built(name)[1]


def count(
    name: str,
    length: int,
    layers: int = LAYERS,
    kernels: str = "xla",
    capacity: int = CAPACITY,
) -> gpu_count.Counts:
    found, compiled = built(name, layers, kernels, capacity)
    trips = functools.partial(found.trips, length)
    return compiled.count(trips, found.part, functools.partial(found.branches, length))


def all_layers(name: str, length: int, kernels: str = "xla") -> tuple[gpu_count.Counts, int]:
    """Counts and least bytes of 64 layers.

    They are four, and fifteen times what comes from four to eight: layers of the same kinds.
    """
    few, more = (count(name, length, layers, kernels) for layers in (4, 8))
    least, most = (built(name, layers, kernels)[0].least(length) for layers in (4, 8))
    total = gpu_count.Counts()
    total.add(more, 15)
    total.add(few, -14)
    return total, 15 * most - 14 * least
