"""Names of the hub: what they mean, which files are taken, and the cache of ``huggingface_hub``.

There is no hub here. A server on this machine answers as it does, in the few requests that a
download needs; the cache is laid out as the package lays it out.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import jaxdraft
from convert import ArtifactError, hub
from convert.hub import HubError, HubName
from jaxdraft.kinds import folders
from tests.paths import FIRST_FAMILY

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TARGET = jaxdraft.EMBEDDED / "target"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of an empty cache; the network may not be used."""
    for name in ("HF_HOME", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_OFFLINE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def put(cache: Path, repo: str, files: dict[str, Path], *, ref: str | None = "main") -> Path:
    """Lay out a snapshot as ``huggingface_hub`` does: links to blobs, and a commit by its name."""
    home = cache / f"models--{repo.replace('/', '--')}"
    for name, source in files.items():
        blob = home / "blobs" / hashlib.sha256(name.encode()).hexdigest()
        blob.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, blob)
        link = home / "snapshots" / COMMIT / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    if ref is not None:
        (home / "refs").mkdir(exist_ok=True)
        (home / "refs" / ref).write_text(COMMIT)
    return home / "snapshots" / COMMIT


def family(prefix: str = "") -> dict[str, Path]:
    """Return the files of the embedded target, by their names in a repository."""
    return {prefix + path.name: path for path in TARGET.iterdir()}


# --------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("Qwen/Qwen3-4B", HubName("Qwen/Qwen3-4B")),
        ("z-lab/Qwen3-4B-DFlash-b16@refs/pr/1", HubName("z-lab/Qwen3-4B-DFlash-b16", "refs/pr/1")),
        ("a/b-GGUF/x/b.Q4_0.gguf@v1", HubName("a/b-GGUF", "v1", "x/b.Q4_0.gguf")),
        *((text, None) for text in ("gpt2", "./a/b", "/a/b", "a/b/", "a/b/c", "../a", "a--b/c")),
        *((text, None) for text in ("a/b..c", "a\\b", "", "a/.b", "-a/b", "a/b.gguf/c", "a b/c")),
    ],
)
def test_what_a_name_means(text: str, meaning: HubName | None) -> None:
    assert hub.parse(text) == meaning


def test_revisions_are_checked() -> None:
    assert hub.parse("a/b", "v1") == HubName("a/b", "v1")
    for text, revision in [("a/b@main", "v1"), ("a/b", "../x"), ("a/b", ""), ("a/b@/x", None)]:
        with pytest.raises(ValueError, match="revision is"):
            hub.parse(text, revision)
    for name in (str(TARGET), "no-such-folder"):
        with pytest.raises(ValueError, match="revision is 'main'; .*only repositories"):
            jaxdraft.load(name, revision="main")


@pytest.mark.parametrize(
    ("given", "folder"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HUGGINGFACE_HUB_CACHE": "/c", "HF_HOME": "/b"}, "/c"),
        ({"HF_HOME": "/b", "XDG_CACHE_HOME": "/d"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/d"}, "/d/huggingface/hub"),
        ({"HOME": "/e"}, "/e/.cache/huggingface/hub"),
    ],
)
def test_where_the_cache_is(
    given: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_CACHE")
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert hub.cache_folder() == Path(folder)


# --------------------------------------------------------------------------- which files


def test_only_what_loading_reads_is_taken() -> None:
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    wanted = {"config.json", "generation_config.json", "model.safetensors.index.json", *shards}
    wanted |= {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    wanted |= {"additional_chat_templates/tools.jinja", "dflash2/config.json"}
    wanted |= {"dflash2/model.safetensors"}
    others = {"README.md", "pytorch_model.bin", "consolidated.safetensors", "onnx/model.onnx"}
    others |= {"params.json", "original/consolidated.00.pth", "model.gguf", "vocab.json"}
    others |= {"model.fp16.safetensors", "other/config.json", "other/model.safetensors"}
    assert set(hub.needed(wanted | others, lambda index: shards)) == wanted
    few = hub.needed(wanted | others, lambda index: shards, weights=False)
    assert set(few) == {name for name in wanted if not name.endswith(".safetensors")}
    apart = {"target/config.json", "target/model.safetensors", "dspark/config.json"}
    apart |= {"dspark/model.safetensors", "prompts.json"}
    apart |= {f"{kind}/config.json" for kind in (*folders(), "draft_model")}
    apart |= {f"{kind}/model.safetensors" for kind in (*folders(), "draft_model")}
    assert set(hub.needed(apart, lambda index: ())) == apart - {"prompts.json"}
    artifact = {"genai_config.json", "model.onnx", "model.onnx.data", "tokenizer.json"}
    assert set(hub.needed(artifact | others, lambda index: ())) == artifact | {
        "params.json",
        "vocab.json",
    }


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"config.json", "pytorch_model.bin"}, "pytorch_model.bin, a pickle.*safetensors"),
        ({"README.md", "b.Q4_0.gguf"}, "owner/name/b.Q4_0.gguf"),
        ({"cpu/genai_config.json", "cpu/model.onnx"}, "ONNX artifacts in cpu"),
        ({"README.md"}, "it holds README.md"),
        (set(), "it holds nothing"),
        ({"genai_config.json"}, "no graph"),
    ],
)
def test_other_formats_are_named(names: set[str], words: str) -> None:
    with pytest.raises(HubError, match=words):
        hub.needed(names, lambda index: ())


# --------------------------------------------------------------------------- the cache


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_a_snapshot_in_the_cache_loads(cache: Path, revision: str | None) -> None:
    folder = put(cache, "me/tiny", family())
    assert jaxdraft.load("me/tiny", revision=revision, drafter="none").info.name == "me/tiny"
    report = jaxdraft.inspect("me/tiny", revision=revision)
    assert report.folder == folder and not report.problems
    fits = jaxdraft.plan("me/tiny", revision=revision, pages=4, drafter="none")
    assert fits.costs == jaxdraft.plan(TARGET, pages=4, drafter="none").costs


def test_it_does_so_without_the_package(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(cache, "me/tiny", family())
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert jaxdraft.load("me/tiny", drafter="none").info.name == "me/tiny"
    with pytest.raises(HubError, match=r'no snapshot.*pip install "jaxdraft\[hub\]"'):
        jaxdraft.load("me/other")


def test_a_drafter_and_folders_in_a_repository(cache: Path) -> None:
    """As :func:`jaxdraft.checkpoint.save` lays them out."""
    put(cache, "me/tiny", family("target/"))
    drafter = jaxdraft.EMBEDDED / "dflash2"
    put(cache, "me/drafter", {path.name: path for path in drafter.iterdir()}, ref="v2")
    model = jaxdraft.load("me/tiny", drafter="me/drafter@v2")
    assert model.info.drafter == "dflash2" and model.text is not None


def test_a_draft_model_and_an_adapter_are_repositories(cache: Path) -> None:
    put(cache, "me/tiny", family())
    model = jaxdraft.load("me/tiny", drafter="me/tiny@main")
    assert model.info.drafter == "draft_model"
    put(cache, "me/lora", {"adapter_config.json": TARGET / "config.json"})
    with pytest.raises(HubError, match="no adapter_model.safetensors"):
        jaxdraft.load("me/tiny", adapter="me/lora")


def test_something_local_of_that_name_comes_first(cache: Path, tmp_path: Path) -> None:
    put(cache, "me/tiny", family())
    shutil.copytree(FIRST_FAMILY, tmp_path / "me" / "tiny")
    assert jaxdraft.inspect("me/tiny").folder == Path("me/tiny")
    with pytest.raises(FileNotFoundError):  # a path is never a repository
        jaxdraft.load(Path("me/other"))


def test_a_gguf_file_of_a_repository(cache: Path) -> None:
    folder = put(cache, "me/tiny-GGUF", {"q/tiny.Q4_0.gguf": TARGET / "config.json"})
    assert hub.locate("me/tiny-GGUF/q/tiny.Q4_0.gguf") == folder / "q/tiny.Q4_0.gguf"
    with pytest.raises(ArtifactError, match="GGUF"):  # the file is another one
        jaxdraft.load("me/tiny-GGUF/q/tiny.Q4_0.gguf@main")
    with pytest.raises(HubError, match="other.gguf is missing"):
        hub.locate("me/tiny-GGUF/other.gguf")
    with pytest.raises(HubError, match="name one of them, as in 'owner/name/q/tiny.Q4_0.gguf'"):
        hub.locate("me/tiny-GGUF")


def test_an_incomplete_snapshot_is_refused_by_the_name_of_the_file(cache: Path) -> None:
    files = family()
    folder = put(cache, "me/tiny", files)
    os.remove(os.path.realpath(folder / "model.safetensors"))
    with pytest.raises(HubError, match="no model.safetensors.*HF_HUB_OFFLINE"):
        jaxdraft.load("me/tiny")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model-1.safetensors").write_bytes(b"")
    with pytest.raises(HubError, match="model-2.safetensors is missing"):
        jaxdraft.load("me/tiny")
    with pytest.raises(HubError, match="no snapshot"):
        jaxdraft.load("me/tiny", revision="other")


# --------------------------------------------------------------------------- downloads


class Hub(BaseHTTPRequestHandler):
    """The hub's answers to the requests of a download."""

    files: dict[str, bytes] = {}
    asked: list[str] = []

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        self.asked.append(f"{self.command} {path}")
        code = {"missing": "RepoNotFound", "gated": "GatedRepo"}.get(path.split("/")[-3], "")
        known = "/revision/" not in path or path.endswith(("/main", COMMIT))
        if code or not known:
            self.send(404 if code != "GatedRepo" else 403, b"", code or "RevisionNotFound")
        elif "/tree/" in path:
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                for name, data in self.files.items()
            ]
            self.send(200, json.dumps(tree).encode())
        elif path.startswith("/api/"):
            siblings = [{"rfilename": name} for name in self.files]
            info = {"id": "me/tiny", "sha": COMMIT, "siblings": siblings}
            self.send(200, json.dumps(info).encode())
        else:
            data = self.files[path.partition(f"/resolve/{COMMIT}/")[2]]
            self.send(200, data, etag=hashlib.sha256(data).hexdigest(), body=body)

    def send(
        self, status: int, data: bytes, code: str = "", *, etag: str = "", body: bool = True
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Repo-Commit", COMMIT)
        if code:
            self.send_header("X-Error-Code", code)
        if etag:
            self.send_header("ETag", f'"{etag}"')
        self.end_headers()
        if body:
            self.wfile.write(data)


@pytest.fixture
def server() -> Iterator[str]:
    """Yield the address of a hub with the files of the embedded target and some others."""
    pytest.importorskip("huggingface_hub")
    Hub.files = {name: path.read_bytes() for name, path in family().items()}
    Hub.files |= {"README.md": b"x", "pytorch_model.bin": b"x", "onnx/model.onnx": b"x"}
    Hub.asked = []
    served = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=served.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{served.server_port}"
    served.shutdown()
    thread.join()
    served.server_close()


SCRIPT = """
import json, sys
from convert.hub import locate
for name in sys.argv[1:]:
    try:
        folder = locate(name.lstrip("?"), weights=name[0] != "?")
        print(json.dumps([str(folder), sorted(path.name for path in folder.iterdir())]))
    except ValueError as error:
        print(json.dumps([type(error).__name__, str(error)]))
"""


def locate(address: str, *names: str) -> list[list]:
    """Return what a fresh process finds for each name; "?" wants no weights.

    ``huggingface_hub`` reads the address of the hub when it is imported.
    """
    given = {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *names],
        env={**os.environ, **given, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_downloads(server: str, cache: Path) -> None:
    """The needed files alone, each once; and every refusal in words."""
    folder = str(cache / "models--me--tiny" / "snapshots" / COMMIT)
    names = ["?me/tiny", "me/tiny", "me/tiny", f"me/tiny@{COMMIT}"]
    few, all_, *again, revision, missing, gated = locate(
        server, *names, "me/tiny@v9", "me/missing", "me/gated"
    )
    assert few == [folder, sorted(set(family()) - {"model.safetensors"})]
    assert all_ == [folder, sorted(family())] and again == [all_, all_]
    read = [path for path in Hub.asked if path.startswith("GET /me/tiny/resolve/")]
    assert sorted(read) == sorted(f"GET /me/tiny/resolve/{COMMIT}/{name}" for name in family())
    assert {kind for kind, _ in (revision, missing, gated)} == {"HubError"}
    assert "revision is 'v9'" in revision[1] and "no such branch, tag or commit" in revision[1]
    assert "no repository" in missing[1] and "me/missing" in missing[1] and "HF_TOKEN" in missing[1]
    assert "access to it is granted at" in gated[1] and "HF_TOKEN" in gated[1]
    assert jaxdraft.load("me/tiny", drafter="none").info.name == "me/tiny"


def test_without_a_network_the_cache_serves_with_a_warning(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    folder = put(cache, "me/tiny", family())
    with pytest.raises(HubError, match="http://127.0.0.1:9/me/other cannot be downloaded: "):
        hub.locate("me/other")
    with pytest.warns(UserWarning, match="cannot be downloaded.*the cached commit 0123.* is used"):
        assert hub.locate("me/tiny") == folder
