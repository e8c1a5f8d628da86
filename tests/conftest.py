"""Settings of all tests: strict numerics, equal examples in every run, compiled programs kept.

``./run test --long`` draws other examples in every run, and more of them.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

# Most of the time goes into compiling programs that run for a millisecond; nothing here is timed.
# `./run test --full` sets XLA_FLAGS, and so compiles as users do.
FLAGS = ["--xla_backend_optimization_level=0"]
if version("jax").startswith("0.10."):  # XLA ends a process that names a flag it does not know
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("XLA_FLAGS", " ".join(FLAGS))

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

from tests.examples import LONG, examples  # noqa: E402
from tests.paths import restore_files  # noqa: E402

# A shape or a type that does not fit is an error, not a guess, and no key is used twice.
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_debug_key_reuse", True)

hypothesis.settings.register_profile(
    "jaxdraft",
    derandomize=not LONG,
    deadline=None,  # the first example of a shape compiles
    max_examples=examples(20),
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("jaxdraft")


def pytest_configure(config: pytest.Config) -> None:
    # Compiling takes most of the time. The programs stay in pytest's cache, which `--cache-clear`
    # empties, unless the environment names another place.
    cached = config.pluginmanager.hasplugin("cacheprovider")
    if cached and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        assert config.cache is not None
        jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir("xla")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


@pytest.fixture(autouse=True, scope="session")
def _golden_files() -> None:
    """Put back the golden files that the repository keeps as recipes."""
    restore_files()


@pytest.fixture(autouse=True, scope="module")
def _forget_programs() -> Iterator[None]:
    """Drop compiled programs before they are too many.

    Each takes a dozen memory maps, and Linux allows a process 65,530: past them it is killed.
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 15_000:
        jax.clear_caches()
        gc.collect()
