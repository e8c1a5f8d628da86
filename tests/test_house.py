"""Rules that the whole repository keeps: sizes, imports, links, references in docstrings."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("jaxdraft", "convert")
LONGEST_FILE = 600  # lines
LONGEST_BODY = 60  # lines of a function, its docstring not counted


def sources(*folders: str) -> list[Path]:
    """Return the Python files under the given folders of the repository."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    """Return the dotted name of a module, given its file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def tracked() -> list[Path]:
    """Return the files that the repository holds, or every file if git does not know the folder."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this folder is not a git repository")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


# --------------------------------------------------------------------------- sizes


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every function of a module with its qualified name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{node.name}", node
        named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        yield from functions(node, f"{prefix}{node.name}." if named else prefix)


def body_lines(function: Any) -> int:
    """Return the number of lines of a function's body, without its docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def test_body_lines_leave_out_the_signature_and_the_docstring() -> None:
    (function,) = ast.parse(
        'def f(\n    a,\n):\n    """One.\n\n    Two."""\n    b = a\n    return b'
    ).body
    assert body_lines(function) == 2
    (function,) = ast.parse("def f(a):\n    return [\n        a\n    ]").body
    assert body_lines(function) == 3


def test_no_file_is_long() -> None:
    lines = {p: len(p.read_text().splitlines()) for p in sources(*PACKAGES, "experiments", "docs")}
    long = {p.relative_to(ROOT).as_posix() for p, count in lines.items() if count > LONGEST_FILE}
    assert not long


def test_no_function_is_long() -> None:
    long = {
        f"{name_of(path)}.{name}"
        for path in sources(*PACKAGES)
        for name, function in functions(ast.parse(path.read_text()))
        if body_lines(function) > LONGEST_BODY
    }
    assert not long


# --------------------------------------------------------------------------- imports


def imported(path: Path, modules: set[str]) -> set[str]:
    """Return the modules of the repository that a module imports anywhere, functions included."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            # `from package import module` needs the module, every other form the package itself.
            found |= inner & modules or {node.module}
    return found & modules


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Return the strongly connected components of two or more nodes (Tarjan, 1972)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = set[frozenset[str]]()

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for other in graph[node]:
            if other not in order:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], order[other])
        if low[node] == order[node]:
            at = stack.index(node)
            if len(stack) - at > 1:
                found.add(frozenset(stack[at:]))
            del stack[at:]

    for node in graph:
        if node not in order:
            visit(node)
    return found


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"a", "e"}}
    assert circles(graph) == {frozenset("bc")}


def module_graph() -> dict[str, set[str]]:
    """Return, for every module of the packages, the modules it imports."""
    files = {name_of(path): path for path in sources(*PACKAGES)}
    # The front doors name what is below them; imports of a package as a whole end there.
    return {
        name: imported(path, set(files)) - {name} - set(PACKAGES) for name, path in files.items()
    }


def test_no_module_imports_itself_by_a_detour() -> None:
    assert not circles(module_graph())


def test_the_engine_does_not_import_generate() -> None:
    """Both take their options from ``requests`` and their prompts from ``prompts``."""
    graph = module_graph()
    inside = [name for name in graph if name.startswith("jaxdraft.engine")]
    assert inside and not any("jaxdraft.generate" in graph[name] for name in inside)


def folder_of(name: str) -> str:
    """Return the package that a module lies in, itself if the module is a package."""
    path = ROOT / name.replace(".", "/")
    return name if path.is_dir() else name.rpartition(".")[0]


def test_no_package_below_jaxdraft_imports_itself_by_a_detour() -> None:
    graph: dict[str, set[str]] = {}
    for name, others in module_graph().items():
        graph.setdefault(folder_of(name), set()).update(map(folder_of, others))
    # Files directly in jaxdraft/ are modules of several floors, not a package of one.
    below = {name: others - set(PACKAGES) for name, others in graph.items()}
    found = circles({k: v - {k} for k, v in below.items() if k not in PACKAGES})
    assert not found


# --------------------------------------------------------------------------- docstrings


def docstrings(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yield the qualified name, the enclosing class and the text of every docstring of a module."""

    def walk(tree: ast.AST, prefix: str, owner: str) -> Iterator[tuple[str, str, str]]:
        for node in ast.iter_child_nodes(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inside = f"{prefix}.{node.name}".strip(".")
                around = inside if isinstance(node, ast.ClassDef) else owner
                yield inside, around, ast.get_docstring(node) or ""
                yield from walk(node, inside, around)

    tree = ast.parse(path.read_text())
    yield "", "", ast.get_docstring(tree) or ""
    yield from walk(tree, "", "")


def resolve(target: str, module: str, owner: str) -> bool:
    """Tell whether a reference names something, read inside a module and perhaps a class."""
    target = target.removeprefix("~")
    for start in (f"{module}.{owner}".strip("."), module, ""):
        parts = f"{start}.{target}".strip(".").split(".")
        for split in range(len(parts), 0, -1):
            try:
                value: Any = importlib.import_module(".".join(parts[:split]))
            except ImportError:
                continue
            for part in parts[split:]:
                fields = getattr(value, "__annotations__", {})
                value = getattr(value, part, fields.get(part))
            if value is not None:
                return True
            break
    return False


ROLE = re.compile(r":(?:py:)?(?:func|class|meth|mod|attr|data|exc|obj):`([^`]+)`")


def test_references_are_resolved() -> None:
    assert resolve("Feed", "jaxdraft.base", "") and resolve("jaxdraft.base.Feed.count", "json", "")
    assert resolve("submit", "jaxdraft.engine.engine", "Engine")
    assert not resolve("Food", "jaxdraft.base", "") and not resolve("jaxdraft.food", "json", "")


@pytest.mark.parametrize("package", PACKAGES)
def test_references_in_docstrings_lead_somewhere(package: str) -> None:
    lost = [
        f"{name_of(path)}.{name}: {target}"
        for path in sources(package)
        for name, owner, text in docstrings(path)
        for target in ROLE.findall(text)
        if not resolve(target, name_of(path), owner)
    ]
    assert lost == []


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_are_markdown(package: str) -> None:
    """Markup that the API reference would print as it stands: literal blocks, tables, directives"""
    strange = re.compile(r"::$|^\s*=+  =+|^\.\. \w+::", re.MULTILINE)
    found = [
        f"{name_of(path)}.{name}"
        for path in sources(package)
        for name, _, text in docstrings(path)
        if strange.search(text)
    ]
    assert found == []


# --------------------------------------------------------------------------- documents

DOCUMENTS = [
    path
    for pattern in ("*.md", "experiments/*.md", "jaxdraft/data/*/*.md", "tests/*/*.md")
    for path in sorted(ROOT.glob(pattern))
]


def anchors(path: Path) -> set[str]:
    """Return the fragments that GitHub makes of a document's headings."""
    heads = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("https://", "http://", "mailto:")):
            continue
        target, _, fragment = link.partition("#")
        file = path.parent / target if target else path
        assert file.exists(), f"{link}: no such file"
        assert not fragment or fragment in anchors(file), f"{link}: no such heading"


def test_no_tracked_file_names_what_lies_outside() -> None:
    """Paths of one machine, or folders beside the repository, mean nothing to a reader"""
    outside = re.compile(rb"\.\./sha" rb"red|(?<![\w./])/(?:home|root|work|Users)/\w")
    named = [
        path.relative_to(ROOT).as_posix()
        for path in tracked()
        if path.suffix in (".py", ".md", ".toml", ".ipynb", ".json", ".cff", "")
        and outside.search(path.read_bytes())
    ]
    assert named == []


def test_every_experiment_is_in_the_index() -> None:
    folder = ROOT / "experiments"
    index = (folder / "README.md").read_text(encoding="utf-8")
    files = {p.name for p in folder.iterdir() if p.suffix in (".py", ".md", ".png", ".json")}
    linked = set(re.findall(r"\]\(([\w.]+)\)", index))
    assert files - {"README.md"} == linked


def test_the_run_script_has_the_commands_that_its_help_and_ci_name() -> None:
    text = (ROOT / "run").read_text()
    usage = text[text.index("<<'EOF'") : text.index("\nEOF")]
    named = set(re.findall(r"^  (\w+) ", usage, re.MULTILINE))
    named |= set(re.findall(r"^\./run (\w+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE))
    cases = text[text.index("\ncase $command in") :]
    handled = re.findall(r"^  ([\w| -]+)\)", cases, re.MULTILINE)
    assert named == {name for names in handled for name in names.split(" | ")} - {"-h", "--help"}
    assert subprocess.run(["bash", "-n", ROOT / "run"]).returncode == 0


def test_the_version_is_the_same_everywhere() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\n## {version}\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
