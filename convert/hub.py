"""Repositories of the Hugging Face hub: a name -> a folder with the files that loading needs.

``owner/name`` is a repository, ``owner/name@revision`` a branch, tag or commit of it, and
``owner/name/file.gguf`` one file of it. Something local of the same spelling comes first.

The cache is that of ``huggingface_hub``, in its layout, and the same environment variables set
its place (``HF_HUB_CACHE``, ``HF_HOME``) and whether the network may be used
(``HF_HUB_OFFLINE``):

    models--owner--name/refs/main              the commit of a branch or a tag
    models--owner--name/snapshots/COMMIT/...   links to the files of that commit

A snapshot that holds all needed files is read without the package ``huggingface_hub``, which
is an extra (``jaxdraft[hub]``) and is imported for a download only.
"""

from __future__ import annotations

import dataclasses
import glob
import importlib
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from convert.json_reader import read_json
from convert.paths import CONFIG, GENAI_CONFIG
from convert.unused import TOKENIZER_FILES
from jaxdraft.checkpoint.files import INDEX, SINGLE
from jaxdraft.checkpoint.layout import TARGET
from jaxdraft.config import DRAFT_MODEL
from jaxdraft.kinds import folders
from jaxdraft.templates import FILES as TEMPLATE_FILES
from jaxdraft.templates import FOLDER as TEMPLATE_FOLDER

_PART = r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9_])?"
_NAME = re.compile(
    rf"(?P<repo>{_PART}/{_PART})(?P<file>(?:/{_PART})*/{_PART}\.gguf)?(?:@(?P<revision>[\w./-]+))?",
    re.ASCII,
)
_COMMIT = re.compile(r"[0-9a-f]{40}")

_SMALL = (CONFIG, "generation_config.json", "quantize_config.json", "adapter_config.json")
"""Files with the settings of a model."""

_BESIDE = (*TOKENIZER_FILES, *TEMPLATE_FILES)
"""Files that text needs."""

_ADAPTER = "adapter_model.safetensors"

Names = Collection[str]

ReadIndex = Callable[[str], Iterable[str]]
"""Function from the name of an index to the names of its shards."""


class HubError(ValueError):
    """A repository of the hub does not exist, may not be read, or cannot be reached."""


@dataclasses.dataclass(frozen=True)
class HubName:
    """A repository, or a file of it.

    Attributes:
      repo: ``owner/name``.
      revision: a branch, a tag or a commit.
      file: a GGUF file in it; None: a checkpoint or an artifact.
    """

    repo: str
    revision: str = "main"
    file: str | None = None

    def __str__(self) -> str:
        return f"revision {self.revision!r} of {self.repo!r}"


def parse(name: str, revision: str | None = None) -> HubName | None:
    """Return the repository that a name can mean, or None if it does not have that form.

    Example: ``"Qwen/Qwen3-4B@main"``. Absolute paths, ``./x``, ``x`` and ``x/y/z`` do not
    have it.

    Args:
      name: any string.
      revision: a revision, unless the name has one.

    Raises:
      ValueError: two revisions, or one that cannot be a branch, a tag or a commit.
    """
    found = _NAME.fullmatch(name)
    if found is None or "--" in found["repo"] or ".." in found["repo"]:
        return None
    if revision is not None and found["revision"] is not None:
        raise ValueError(f"revision is {revision!r}; the name {name!r} has one, too")
    chosen = revision if revision is not None else found["revision"]
    chosen = "main" if chosen is None else chosen
    if not re.fullmatch(r"[\w./-]+", chosen) or ".." in chosen or chosen.startswith(("/", "-")):
        raise ValueError(f"revision is {chosen!r}; expected a branch, a tag or a commit")
    file = found["file"]
    return HubName(found["repo"], chosen, None if file is None else file.lstrip("/"))


def locate(name: str | Path, revision: str | None = None, *, weights: bool = True) -> Path:
    """Return the local folder, or the GGUF file, that a name means. Download it if necessary.

    Args:
      name: anything local, or the name of a repository.
      revision: a branch, a tag or a commit of the repository. Default: as in the name, else
        ``main``.
      weights: whether the weights are needed; without, a few small files are enough.

    Returns:
      A path. It may not exist if the name cannot be one of a repository.

    Raises:
      HubError: the repository is not in the cache and cannot be downloaded, or has no files that
        this package reads.
      ValueError: a revision of something local.
    """
    path = Path(name)
    wanted = None if isinstance(name, Path) or path.exists() else parse(name, revision)
    if wanted is not None:
        return _snapshot(wanted, weights)
    if revision is not None:
        kind = "local" if path.exists() else "no name of a repository"
        raise ValueError(
            f"revision is {revision!r}; {str(name)!r} is {kind}, and only repositories of the hub "
            "have revisions"
        )
    return path


def cache_folder() -> Path:
    """Return the folder in which snapshots lie, as ``huggingface_hub`` computes it."""
    given = os.environ.get
    home = given("XDG_CACHE_HOME") or "~/.cache"
    home = given("HF_HOME") or os.path.join(home, "huggingface")
    folder = given("HF_HUB_CACHE") or given("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expandvars(os.path.expanduser(folder)))


# --------------------------------------------------------------------------- which files


def needed(names: Names, read_index: ReadIndex, *, weights: bool = True) -> list[str]:
    """Choose the files of a repository that loading reads.

    Of a checkpoint: settings, the tokenizer, and safetensors. Weights of other formats that lie
    beside them (``pytorch_model.bin``, ``consolidated.*``, folders of ONNX graphs) are left out.

    Args:
      names: all files, with ``/``.
      read_index: reads the index of shards.
      weights: whether to choose weights, too. Graphs of an artifact are always chosen.

    Returns:
      The chosen names, in order.

    Raises:
      HubError: no files can be loaded; the message names the formats found.
    """
    homes = ["", f"{TARGET}/", *(f"{kind}/" for kind in (*folders(), DRAFT_MODEL))]
    homes = [home for home in homes if f"{home}{CONFIG}" in names]
    adapter = "adapter_config.json" in names
    if GENAI_CONFIG in names:
        kinds = (".json", ".jinja", ".onnx", ".onnx.data", ".onnx_data")
        found = sorted(name for name in names if "/" not in name and name.endswith(kinds))
        if not any(name.endswith(".onnx") for name in found):
            raise HubError(f"there is {GENAI_CONFIG}, but no graph beside it: {_formats(names)}")
        return found
    if not homes and not adapter:
        raise HubError(f"there is no {CONFIG}: {_formats(names)}")
    chosen: set[str] = set()
    for home in homes or [""]:
        inside = {name[len(home) :] for name in names if name.startswith(home)}
        own = {name for name in (*_SMALL, *_BESIDE, INDEX) if name in inside}
        own |= {n for n in inside if n.startswith(f"{TEMPLATE_FOLDER}/") and n.endswith(".jinja")}
        if weights:
            own |= _weights(home, inside, read_index)
        chosen |= {home + name for name in own}
    return sorted(chosen)


def _weights(home: str, inside: Names, read_index: ReadIndex) -> set[str]:
    """Choose the weights of one folder: of an index, or the single file."""
    if INDEX in inside:
        return set(read_index(home + INDEX))
    for single in (SINGLE, _ADAPTER):
        if single in inside:
            return {single}
    wanted = f"{home}{SINGLE} and no {home}{INDEX}" if CONFIG in inside else _ADAPTER
    raise HubError(f"there is no {wanted}: {_formats(inside)}")


def _formats(names: Names) -> str:
    """Describe the weights of a repository, and those that would be needed."""
    ggufs = sorted(name for name in names if name.endswith(".gguf"))
    if ggufs:
        return f"it holds GGUF files; name one of them, as in 'owner/name/{ggufs[0]}'"
    folders = sorted({name.rpartition("/")[0] for name in names if name.endswith(GENAI_CONFIG)})
    if folders:
        return (
            f"it holds ONNX artifacts in {', '.join(folders)}; download one of these folders and "
            "load it from there"
        )
    pickles = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth")))
    if pickles:
        return (
            f"it holds {pickles[0]}, a pickle, which can run any code; convert it to safetensors, "
            "or use a revision that has them"
        )
    return f"it holds {', '.join(sorted(names)[:5]) or 'nothing'}"


def _shards(folder: Path, index: str) -> set[str]:
    """Return the names of the shards that an index lists, relative to it."""
    path = folder / index
    body = read_json(path.parent, path.name).get("weight_map")
    found = set(body.values()) if isinstance(body, dict) else set()
    if not found or not all(isinstance(name, str) for name in found):
        raise HubError(f"{index} lists no files: weight_map is {str(body)[:80]}")
    return found


# --------------------------------------------------------------------------- the cache


def _repository(name: HubName) -> Path:
    return cache_folder() / f"models--{name.repo.replace('/', '--')}"


def _cached(name: HubName) -> Path | None:
    """Return the snapshot of a revision in the cache; it may lack files."""
    home = _repository(name)
    commit = name.revision
    ref = home / "refs" / name.revision
    if ref.is_file():
        commit = ref.read_text(encoding="utf-8").strip()
    folder = home / "snapshots" / commit
    return folder if _COMMIT.fullmatch(commit) and folder.is_dir() else None


def _lacking(name: HubName, folder: Path | None, weights: bool) -> str | None:
    """Return why a snapshot in the cache is not enough; None: it is."""
    if folder is None:
        return "no snapshot"
    if name.file is not None:
        return None if (folder / name.file).is_file() else f"{name.file} is missing"
    names = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    try:
        chosen = needed(names, lambda index: _shards(folder, index), weights=weights)
    except ValueError as error:
        return str(error)
    missing = sorted(set(chosen) - names)
    return f"{missing[0]} is missing" if missing else None


def _snapshot(name: HubName, weights: bool) -> Path:
    cached = _cached(name)
    lacking = _lacking(name, cached, weights)
    where = "" if name.file is None else name.file
    if lacking is None and cached is not None:
        if _COMMIT.fullmatch(name.revision) or _offline():
            return cached / where
    try:
        return _download(name, weights) / where
    except _Unreachable as error:
        if lacking is None and cached is not None:
            if error.surprising:
                warnings.warn(f"{error}; the cached commit {cached.name} is used", stacklevel=4)
            return cached / where
        raise HubError(
            f"there is no local {name.repo!r}; {name} is not in the cache {cache_folder()} "
            f"({lacking}); {error}"
        ) from error.__cause__


def _offline() -> bool:
    given = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return given.upper() in ("1", "ON", "YES", "TRUE")


# --------------------------------------------------------------------------- downloads


class _Unreachable(Exception):
    """The hub cannot provide the files; the cache may hold them.

    Attributes:
      surprising: whether the user is warned even if the cache is used.
    """

    def __init__(self, words: str, *, surprising: bool = True):
        super().__init__(words)
        self.surprising = surprising


def _download(name: HubName, weights: bool) -> Path:
    """Download the needed files of a repository, with the progress bars of ``huggingface_hub``."""
    if _offline():
        raise _Unreachable("HF_HUB_OFFLINE is set, so nothing is downloaded", surprising=False)
    try:
        hub: Any = importlib.import_module("huggingface_hub")
        constants: Any = importlib.import_module("huggingface_hub.constants")
        errors: Any = importlib.import_module("huggingface_hub.errors")
    except ImportError as error:
        words = 'downloading needs huggingface_hub: pip install "jaxdraft[hub]"'
        raise _Unreachable(words, surprising=False) from error
    page = f"{constants.ENDPOINT}/{name.repo}"
    token = "`hf auth login`, or HF_TOKEN"
    try:
        return _fetch(hub, name, weights)
    except errors.GatedRepoError as error:
        words = f"access to it is granted at {page}, to the account of a token ({token})"
        raise _Unreachable(words) from error
    except errors.RepositoryNotFoundError as error:
        words = (
            f"there is no repository {page}, or it is private: check the spelling; a private one "
            f"needs a token ({token})"
        )
        raise _Unreachable(words) from error
    except errors.RevisionNotFoundError as error:
        raise HubError(
            f"revision is {name.revision!r}; {page} has no such branch, tag or commit"
        ) from error
    # Errors of any HTTP client derive from one of these.
    except (OSError, *errors.HfHubHTTPError.__bases__) as error:
        first = str(error).strip().partition("\n")[0] or "no further words"
        words = f"{page} cannot be downloaded: {type(error).__name__}: {first}"
        raise _Unreachable(words) from error


def _fetch(hub: Any, name: HubName, weights: bool) -> Path:
    options: dict[str, Any] = dict(cache_dir=str(cache_folder()), library_name="jaxdraft")
    info = hub.HfApi(library_name="jaxdraft").model_info(name.repo, revision=name.revision)
    names = {each.rfilename for each in info.siblings or ()}

    def read_index(index: str) -> set[str]:
        path = hub.hf_hub_download(name.repo, index, revision=info.sha, **options)
        return _shards(Path(path).parent, Path(path).name)

    if name.file is None:
        try:
            chosen = needed(names, read_index, weights=weights)
        except HubError as error:
            raise HubError(f"{name}: {error}") from None
    elif name.file in names:
        chosen = [name.file]
    else:
        others = ", ".join(sorted(n for n in names if n.endswith(".gguf"))) or "none"
        raise HubError(f"{name} has no file {name.file!r}; its GGUF files are {others}")
    patterns = [glob.escape(each) for each in chosen]
    folder = Path(
        hub.snapshot_download(name.repo, revision=name.revision, allow_patterns=patterns, **options)
    )
    missing = [each for each in chosen if not (folder / each).is_file()]
    if missing:
        raise HubError(f"{name} was downloaded without {missing[0]}, which an index lists")
    return folder
