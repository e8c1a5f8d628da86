"""The shared library: compiled once per machine, kept in a folder, loaded and registered."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import jaxlib

from jaxdraft.native import OFF, VARIABLE, choice

_SOURCES = Path(__file__).parent

_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-ffp-contract=fast", "-fno-math-errno", "-w")

_WIDE = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")

_SETS = {
    "avx512": ("-DLANES=16", "-mavx2", "-mfma", *_WIDE),
    "avx2": ("-DLANES=8", "-mavx2", "-mfma"),
    "plain": ("-DLANES=4",),
}

_SECONDS = 300
"""Time after which a compiler is given up."""


@dataclasses.dataclass(frozen=True)
class Library:
    """The functions, or the reason why there are none.

    Attributes:
      handle: the loaded library; None: there is none.
      key: end of the names that the functions have in XLA, new for every change of the source.
      name: instruction set in use.
      reason: reason why there is no library.
    """

    handle: ctypes.CDLL | None
    key: str = ""
    name: str = ""
    reason: str = ""


class _Unavailable(Exception):
    """There is no library; the message is the reason."""


@functools.cache
def library() -> Library:
    """Return the library, compiled if need be; the same for the whole process.

    Raises:
      ValueError: the environment names an instruction set that the processor does not have.
    """
    wanted = choice()
    try:
        compiler = _compiler()
        key = _key(compiler)
        path = _folder() / f"{key}.so"
        if not path.exists():
            _compile(compiler, path)
        handle = ctypes.CDLL(str(path))
    except (_Unavailable, OSError) as error:
        return Library(None, reason=str(error))
    handle.jaxdraft_chosen.restype = ctypes.c_char_p
    handle.jaxdraft_choose.argtypes = [ctypes.c_char_p]
    handle.jaxdraft_choose.restype = ctypes.c_bool
    if wanted in _SETS and not handle.jaxdraft_choose(wanted.encode()):
        raise ValueError(f"the native products are to use {wanted}; this processor has no {wanted}")
    for kind in ("dense", "packed"):
        function = jax.ffi.pycapsule(getattr(handle, f"jaxdraft_{kind}"))
        jax.ffi.register_ffi_target(f"jaxdraft_{kind}_{key}", function, platform="cpu")
    return Library(handle, key, handle.jaxdraft_chosen().decode())


def description() -> str:
    """Return which products of few rows serve on CPUs, and why."""
    if choice() == OFF:
        return f"XLA ({VARIABLE}=on would use native ones)"
    found = library()
    return f"XLA ({found.reason})" if found.handle is None else f"native, {found.name}"


def _compiler() -> list[str]:
    """Return the command of the C++ compiler: that of ``CXX``, or the first one found."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name):
            return [name]
    raise _Unavailable("no C++ compiler was found")


def _folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "jaxdraft" / "native"


def _on_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


def _key(compiler: list[str]) -> str:
    """Return a name for the result of compiling: a hash of everything that determines it."""
    version = _run([*compiler, "--version"])
    parts = [version, *compiler, jaxlib.__version__, platform.machine(), repr((_FLAGS, _SETS))]
    parts += [(_SOURCES / name).read_text() for name in ("kernels.h", "kernels.cc", "handlers.cc")]
    extra = os.environ.get("JAXDRAFT_NATIVE_FLAGS", "")  # sanitizers, in a test
    return hashlib.sha256("\0".join([*parts, extra]).encode()).hexdigest()[:16]


def _compile(compiler: list[str], path: Path) -> None:
    """Compile the library for all instruction sets, in a folder of its own, then move it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.with_suffix(".lock")):
        if path.exists():  # another process was faster
            return
        with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
            folder = Path(temporary)
            command = [
                *compiler,
                *_FLAGS,
                *shlex.split(os.environ.get("JAXDRAFT_NATIVE_FLAGS", "")),
            ]
            objects = []
            for name in _SETS if _on_x86() else ("plain",):
                objects.append(str(folder / f"{name}.o"))
                source = ["-c", str(_SOURCES / "kernels.cc"), "-o", objects[-1]]
                _run([*command, f"-DNAME={name}", *_SETS[name], *source])
            made = folder / "made.so"
            include = [f"-I{jax.ffi.include_dir()}", *(["-DJAXDRAFT_X86"] if _on_x86() else [])]
            source = ["-shared", str(_SOURCES / "handlers.cc"), *objects, "-o", str(made)]
            _run([*command, *include, *source])
            os.replace(made, path)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _Unavailable(f"the compiler did not run: {error}") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        first = next((line for line in lines if "error" in line), lines[0] if lines else "")
        raise _Unavailable(f"{command[0]} failed: {first}")
    return done.stdout


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock between processes, where there are such locks."""
    try:
        import fcntl
    except ImportError:  # Windows: two processes may both compile, and the move stays atomic
        yield
        return
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
