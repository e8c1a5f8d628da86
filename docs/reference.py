"""Build the API reference from the docstrings, with pdoc.

    python docs/reference.py OUT

The pages cover every module of ``jaxdraft`` and ``convert``. A warning of pdoc ends the build: it
means a module that cannot be imported, or an annotation that names nothing.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import typing
import warnings
from pathlib import Path

import pdoc
from pdoc.extract import walk_specs

import convert
import jaxdraft


def specifications() -> list[str]:
    """Return module names that together make pdoc visit every module once.

    pdoc visits the submodules of a package itself, unless the package has an ``__all__``.
    """
    names: list[str] = []
    visited: set[str] = set()
    for package in (jaxdraft, convert):
        inner = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        for name in [package.__name__, *(module.name for module in inner)]:
            if name not in visited:
                names.append(name)
                visited |= set(walk_specs([name]))
    return names


def name_types(module: str) -> None:
    """Replace the annotations of a module's named tuples, which are strings, by the types.

    The constructor of a named tuple does not know the module whose names they use.
    """
    for value in vars(importlib.import_module(module)).values():
        if isinstance(value, type) and issubclass(value, tuple) and value.__module__ == module:
            constructor: typing.Any = value.__new__
            constructor.__annotations__ = typing.get_type_hints(value)


def resolve_names(module: str) -> None:
    """Import the public names that a module imports when they are first used."""
    found = importlib.import_module(module)
    for name in getattr(found, "__all__", ()):
        setattr(found, name, getattr(found, name))


def main() -> None:
    """Write the pages and print how many there are."""
    (out,) = map(Path, sys.argv[1:])
    warnings.filterwarnings("error", module="pdoc")
    pdoc.render.configure(docformat="google", show_source=False)
    names = specifications()
    for module in walk_specs(names):
        resolve_names(module)
        name_types(module)
    pdoc.pdoc(*names, output_directory=out)
    print(out / "index.html")


if __name__ == "__main__":
    main()
