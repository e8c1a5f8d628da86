"""What a bare ``import jaxdraft`` gives, each case in a fresh interpreter."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

import jaxdraft

SUBMODULES = sorted(
    m.name for m in pkgutil.iter_modules(jaxdraft.__path__) if m.name not in jaxdraft.__all__
)


def printed(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_submodule_is_reached() -> None:
    """Also those that are not imported at once, in any order."""
    code = (
        f"import jaxdraft\nfor name in {SUBMODULES[::-1]}: print(getattr(jaxdraft, name).__name__)"
    )
    assert printed(code).split() == [f"jaxdraft.{name}" for name in SUBMODULES[::-1]]


def test_submodules_that_users_call() -> None:
    code = """
import jaxdraft, pathlib, tempfile
folder = pathlib.Path(tempfile.mkdtemp()) / "out"
jaxdraft.checkpoint.save(jaxdraft.testing.tiny_model(None), folder)
print(callable(jaxdraft.train.fit), callable(jaxdraft.lattice.walk), (folder / "target").is_dir())
"""
    assert printed(code).split() == ["True"] * 3


def test_submodules_are_imported_when_they_are_used() -> None:
    """And listed before."""
    code = "import jaxdraft, sys\n"
    code += "print([n for n in ('checkpoint', 'cli', 'testing', 'train')"
    code += " if f'jaxdraft.{n}' in sys.modules or n not in dir(jaxdraft)])"
    assert printed(code).strip() == "[]"


def test_names_that_do_not_exist() -> None:
    with pytest.raises(AttributeError, match="module 'jaxdraft' has no attribute 'checkpoints'"):
        _ = jaxdraft.checkpoints  # type: ignore[attr-defined]
    assert not hasattr(jaxdraft, "__wrapped__")


def test_a_checkpoint_is_read_without_onnx() -> None:
    """The other wing, which reads graphs, is not imported either."""
    code = """
import sys, jaxdraft
model = jaxdraft.load(jaxdraft.EMBEDDED)
assert jaxdraft.inspect(jaxdraft.EMBEDDED).loads
print([name for name in sys.modules if name == "onnx" or name.startswith("convert.artifact")])
"""
    assert printed(code).strip() == "[]"


def test_kernels_are_imported_when_they_are_chosen() -> None:
    """Pallas with Triton takes a third of a second of every other import."""
    code = "import sys, jaxdraft\n"
    code += "print([name for name in sys.modules if name.startswith('jax.experimental.pallas')])"
    assert printed(code).strip() == "[]"
