"""Native products against float64, and their place among JAX's transformations."""

from __future__ import annotations

import dataclasses
import math
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import export

from jaxdraft import native
from jaxdraft.kernels.form import Form
from jaxdraft.native import build
from jaxdraft.native.product import serves, without
from jaxdraft.nn.packed import PackedMatrix
from jaxdraft.nn.product import multiply_dense
from tests.examples import LONG, first

FORMS: dict[str, dict[str, Any]] = {
    "blocks of 32": dict(bits=4, block=32, inputs=96),
    "zero points": dict(bits=4, block=32, inputs=90, zeros=np.uint8, scales=np.float32),
    "blocks of 16": dict(bits=4, block=16, inputs=1_100),
    "bytes": dict(bits=8, block=128, inputs=300, scales=np.float32),
    "two bits": dict(bits=2, block=64, inputs=200, zeros=np.uint8),
    "two levels": dict(bits=4, block=32, inputs=700, fine=8, minima=np.uint8, scales=np.uint8),
    "bytes, two levels": dict(bits=8, block=16, inputs=130, fine=4, scales=np.int8),
    "two bits, blocks of 16": dict(bits=2, block=16, inputs=100, zeros=np.int8),
    "a scale per row": dict(bits=4, block=2_502, inputs=2_501, scales=np.float32),
    "long blocks": dict(bits=4, block=6_144, inputs=6_100, scales=np.float32, minima=np.float16),
    "float minimum": dict(bits=4, block=32, inputs=64, minima=np.float16),
    "fp8 in squares": dict(bits=8, block=32, inputs=70, values="e4m3", rows=4),
    "mxfp4": dict(bits=4, block=32, inputs=96, values="e2m1", scales=ml_dtypes.float8_e8m0fnu),
    "order": dict(bits=4, block=32, inputs=64, zeros=np.uint8, order=True),
    "bfloat16": dict(bits=4, block=32, inputs=96, dtype="bfloat16"),
    "bfloat16, short blocks": dict(bits=8, block=8, inputs=90, dtype="bfloat16"),
}

OUT = 11


def packed(
    bits: int,
    block: int,
    inputs: int,
    *,
    scales: Any = np.float16,
    zeros: Any = None,
    minima: Any = None,
    fine: int = 0,
    rows: int = 1,
    order: bool = False,
    values: str = "integer",
    dtype: str = "float32",
) -> PackedMatrix:
    rng = np.random.default_rng(bits * block + inputs)
    blocks = math.ceil(inputs / block)
    shape = (math.ceil(OUT / rows), blocks)
    raw = rng.integers(0, 256, (OUT, blocks, block * bits // 8), dtype=np.uint8)
    if values == "e4m3":
        raw[raw & 0x7F == 0x7F] = 0x7E  # a value that is no number
    coarse = (shape[0], math.ceil(blocks / fine)) if fine else shape
    small = lambda kind, shape: (  # noqa: E731
        rng.integers(1, 4, shape).astype(kind)
        if np.dtype(kind).kind in "iu"
        else rng.uniform(0.5, 2, shape).astype(kind)
    )
    arrays = {"weight_q": raw, "scales": small(scales, shape)}
    if zeros:
        arrays["zeros"] = small(zeros, shape)
    if minima:
        arrays["minima"] = small(minima, shape)
    if fine:
        arrays["coarse"] = small(np.float16, coarse)
        if minima:
            arrays["coarse_minima"] = -small(np.float16, coarse)
    if order:
        arrays["order"] = rng.permutation(inputs).astype(np.int32)
    form = Form(
        inputs,
        OUT,
        jnp.dtype(dtype),
        bits,
        block,
        values=values,
        rows=rows,
        fine=fine,
        parts=tuple(arrays),
    )
    return PackedMatrix({name: jnp.asarray(array) for name, array in arrays.items()}, form)


@pytest.fixture(scope="module")
def handle() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(native.VARIABLE, raising=False)
        found = build.library()
    if found.handle is None:
        pytest.skip(found.reason)
    return found.handle


@pytest.fixture(params=native.SETS)
def instructions(
    request: pytest.FixtureRequest, handle: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    monkeypatch.setenv(native.VARIABLE, native.ON)
    before = handle.jaxdraft_chosen()
    if not handle.jaxdraft_choose(request.param.encode()):
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    handle.jaxdraft_choose(before)


@pytest.fixture
def on(handle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.VARIABLE, native.ON)


def native_calls(run: Any, *args: Any) -> int:
    return jax.jit(run).lower(*args).as_text().count("stablehlo.custom_call @jaxdraft_")


def check(found: Any, x: np.ndarray, weight: np.ndarray) -> None:
    """Compare with float64; sums of n products err by less than their sizes times 2**-20."""
    x, weight = x.astype(np.float64), weight.astype(np.float64)
    bound = np.abs(x) @ np.abs(weight).T * 2.0**-20
    error = np.abs(np.asarray(found, np.float64) - x @ weight.T)
    assert (error <= bound).all(), (error / bound).max()


def compare(run: Any, x: jax.Array, weight: np.ndarray, few: int = 1) -> None:
    """Compare windows of several rows with float64, and fewer rows with the window."""
    assert native_calls(run, x) == 1
    window = jax.jit(run)(x)
    check(window, np.asarray(x), weight)
    for rows in (few, 5):
        np.testing.assert_array_equal(jax.jit(run)(x[:rows]), window[:rows])


@pytest.mark.parametrize("name", first(6, FORMS))
def test_a_packed_product_is_that_of_the_decoded_matrix(instructions: str, name: str) -> None:
    matrix = packed(**FORMS[name])
    x = jax.random.normal(jax.random.key(0), (16, matrix.form.inputs)).astype(matrix.dtype)
    run = lambda x: matrix.matmul(x, out_dtype=jnp.float32)  # noqa: E731
    compare(run, x, np.asarray(matrix.dequantized()))


@pytest.mark.parametrize(
    ("outputs", "inputs", "dtype"),
    first(2, [(11, 70, "float32"), (9, 33, "bfloat16"), (4, 9_000, "float32"), (1, 1, "bfloat16")]),
)
def test_a_dense_product(instructions: str, outputs: int, inputs: int, dtype: str) -> None:
    weight = jax.random.normal(jax.random.key(1), (outputs, inputs)).astype(dtype)
    x = jax.random.normal(jax.random.key(2), (32, inputs)).astype(dtype)
    run = lambda x: multiply_dense(x, weight, out_dtype=jnp.float32)  # noqa: E731
    compare(run, x, np.asarray(weight), few=2 if dtype == "float32" else 1)


def test_threads_share_the_outputs(on: None) -> None:
    weight = jax.random.normal(jax.random.key(1), (4_099, 257))
    x = jax.random.normal(jax.random.key(2), (3, 257))
    check(jax.jit(multiply_dense)(x, weight), np.asarray(x), np.asarray(weight))


def test_derivatives_batches_and_exports(on: None) -> None:
    matrix = packed(**FORMS["zero points"])
    dense = matrix.dequantized()
    x = jax.random.normal(jax.random.key(0), (3, 4, matrix.form.inputs))
    want = np.asarray(jnp.einsum("abi,oi->abo", x, dense))
    for product in (matrix.matmul, lambda x: multiply_dense(x, dense)):
        each = jax.vmap(product)
        assert native_calls(each, x) == 1
        np.testing.assert_allclose(jax.jit(each)(x), want, rtol=1e-4, atol=1e-4)
        slope = jax.grad(lambda x: jnp.sum(product(x)))(x)  # noqa: B023
        plain = np.broadcast_to(np.asarray(dense).sum(0), x.shape)
        np.testing.assert_allclose(slope, plain, rtol=1e-4, atol=1e-4)
        assert "@jaxdraft_" not in export.export(jax.jit(product))(x[0]).mlir_module()
    weights = jnp.stack([dense, 2 * dense, 3 * dense])
    apart = jax.vmap(multiply_dense)
    assert native_calls(apart, x, weights) == 0
    factors = np.arange(1, 4).reshape(3, 1, 1)
    np.testing.assert_allclose(apart(x, weights), want * factors, rtol=1e-4, atol=1e-4)


def test_the_xla_path_serves_what_is_not_native(on: None, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = jnp.ones((8, 16)), jnp.ones((33, 16))
    assert native_calls(multiply_dense, x, weight) == 0
    assert native_calls(multiply_dense, x[:1], weight) == 0
    assert native_calls(multiply_dense, x[:2], weight) == 1
    assert native_calls(multiply_dense, x[:2], weight.astype(jnp.float16)) == 0
    with without():
        assert native_calls(multiply_dense, x[:2], weight) == 0
    matrix = packed(**{**FORMS["zero points"], "zeros": np.int16})
    assert not serves(matrix.form, 1, jnp.float32, matrix.weights)
    wide = dataclasses.replace(packed(**FORMS["zero points"]).form, gated=True)
    assert not serves(wide, 1, jnp.float32, matrix.weights)
    monkeypatch.setenv(native.VARIABLE, "off")
    assert native_calls(lambda x: multiply_dense(x, weight), x[:2]) == 0


def test_without_a_compiler_there_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(native.VARIABLE, "on")
    monkeypatch.setenv("CXX", str(tmp_path / "nothing"))
    found = build.library.__wrapped__()
    assert found.handle is None and "did not run" in found.reason
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\n[ $1 = --version ] && exit 0\necho error: no >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    found = build.library.__wrapped__()
    assert found.handle is None and found.reason.endswith("error: no")
    monkeypatch.setattr(build, "library", lambda: found)
    assert build.description() == f"XLA ({found.reason})"


def test_unknown_choices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.VARIABLE, "fast")
    with pytest.raises(ValueError, match="JAXDRAFT_NATIVE is 'fast'; expected one of off, on"):
        native.choice()


@pytest.mark.skipif(not LONG, reason="takes a minute; ./run test --long")
def test_no_product_reads_past_a_buffer(tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    here, there = Path(__file__).parent, Path(build.__file__).parent
    checked = ["-O1", "-g", "-std=c++17", "-ffp-contract=fast", "-w"]
    checked += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    for name, flags in build._SETS.items():
        if name != "plain" and not build._on_x86():
            continue
        program = tmp_path / name
        command = [compiler, *checked, *flags, f"-DNAME={name}", f"-DKERNELS=kernels_{name}"]
        sources = [str(there / "kernels.cc"), str(here / "sanitize.cc")]
        subprocess.run([*command, f"-I{there}", *sources, "-o", str(program)], check=True)
        done = subprocess.run([program], capture_output=True, text=True)
        if done.returncode == 4:  # the processor lacks the instructions
            continue
        assert done.returncode == 0, done.stdout + done.stderr[-3000:]
