"""The wheel has everything that the package needs, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("jaxdraft", "convert")
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def sources() -> set[str]:
    """Return the files of the packages, relative to the repository."""
    files = {path for package in PACKAGES for path in (ROOT / package).rglob("*")}
    return {
        path.relative_to(ROOT).as_posix()
        for path in files
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_settings_name_every_file_of_the_packages() -> None:
    """Modules lie in folders with an ``__init__.py``, and every other file fits a pattern"""
    assert SETTINGS["packages"]["find"]["include"] == [f"{name}*" for name in PACKAGES]
    patterns = SETTINGS["package-data"]
    for name in sources():
        path = Path(name)
        if path.suffix == ".py":
            assert (ROOT / path.parent / "__init__.py").is_file(), name
            continue
        inside = path.relative_to(path.parts[0])
        fitting = patterns.get(path.parts[0], [])
        assert any(ROOT / path in (ROOT / path.parts[0]).glob(p) for p in fitting), inside


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources: a build leaves files beside them."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "source"
    copy.mkdir()
    for name in PACKAGES:
        hidden = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, copy / name, ignore=hidden)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder)]
    subprocess.run([*command, str(copy)], check=True)
    (made,) = folder.glob("*.whl")
    return made


@pytest.mark.full
def test_the_wheel_has_the_files_of_the_packages_and_is_small(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == sources()
    assert wheel.stat().st_size < 15_000_000


@pytest.mark.full
def test_the_wheel_runs_without_the_repository(wheel: Path, tmp_path: Path) -> None:
    """Installed beside nothing of ours, called from another folder"""
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site)]
    subprocess.run([*pip, str(wheel)], check=True)
    code = "import jaxdraft; from jaxdraft.cli import app; print(jaxdraft.__file__); app()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, "demo", "--family", "-n", "16", "--repeats", "1"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith(str(site))
    assert done.stdout.count("equal to plain decoding") == 6
