"""MODEL of a command line: hub names from the local cache. test_model_directory.py is about paths."""
from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import OfflineModeIsEnabled

from tinygrad_nv.cli.model_path import find_model
from tinygrad_nv.errors import ModelError


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"): monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home" / "hub"


def download(hub: Path, files: tuple[str, ...] = ("config.json",), ref: str = "main",
             commit: str = "a1b2") -> Path:
    """What `hf download org/model` leaves."""
    folder = hub / "models--org--model"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / ref).write_text(commit)
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for name in files: (snapshot / name).write_text("{}")
    return snapshot


def refused(name: str, *words: str) -> None:
    with pytest.raises(ModelError) as caught: find_model(name)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


def test_a_hub_name_is_found_in_the_cache(hub: Path, monkeypatch: pytest.MonkeyPatch):
    main, other = download(hub), download(hub, ref="v2", commit="c3d4")
    assert find_model("org/model") == main
    assert find_model("org/model@v2") == find_model("org/model@c3d4") == other
    monkeypatch.setenv("HF_HUB_CACHE", str(hub.parent / "elsewhere"))
    refused("org/model", str(hub.parent / "elsewhere"))
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    assert find_model("org/model") == main


def test_a_directory_comes_before_the_cache(hub: Path):
    download(hub)
    here = hub.parents[1] / "org" / "model"
    here.mkdir(parents=True)
    (here / "config.json").write_text("{}")
    assert find_model("org/model") == Path("org/model")


def test_what_to_download_is_said(hub: Path):
    refused("org/model", f"neither a directory here nor a model in the Hugging Face cache, {hub}",
            "hf download org/model")
    refused("org/model@v3", "hf download org/model --revision v3")
    download(hub)
    refused("org/model@v3", "without revision v3", "one of main")


def test_a_download_that_is_not_complete(hub: Path):
    download(hub, ("README.md",))
    refused("org/model", "without its config.json", "hf download org/model")


def test_a_path_is_left_as_it_is(tmp_path: Path):
    for name in (tmp_path, tmp_path / "no" / "such", "./no/such", "nowhere", "x" * 300):
        assert find_model(str(name)) == Path(name)


# **** --download ****

def test_a_hub_name_is_downloaded_where_that_is_asked_for(hub: Path, monkeypatch: pytest.MonkeyPatch):
    """By huggingface_hub's own code, which gets what a model is of: no second copy of the weights."""
    asked: list[Any] = []

    def snapshot(repo: str, **more: Any) -> None:
        asked.append((repo, more["revision"], more["cache_dir"], more["allow_patterns"]))
        download(hub)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda *_, **__: [
        "config.json", "model.safetensors", "pytorch_model.bin", "x-Q4_K.gguf"])
    refused("org/model", "add --download, or run: hf download org/model")
    made = find_model("org/model", download=True)
    assert made.name == "a1b2"
    (repo, revision, cache, patterns), = asked
    assert (repo, revision, cache) == ("org/model", "main", hub)
    assert "*.safetensors" in patterns
    assert not any(fnmatch(name, each) for each in patterns for name in ("pytorch_model.bin", "x-Q4_K.gguf"))
    assert find_model("org/model", download=True) == made
    assert len(asked) == 1, "what is here is not asked for again"


def test_a_download_that_fails_says_why(hub: Path, monkeypatch: pytest.MonkeyPatch):
    def failed(*words: str) -> None:
        with pytest.raises(ModelError) as caught: find_model("org/model", download=True)
        assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)

    def offline(*_: Any, **__: Any) -> None: raise OfflineModeIsEnabled("offline")
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", offline)
    failed("HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE")

    def gone(*_: Any, **__: Any) -> None: raise ConnectionError("no route to host\nmore")
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", gone)
    failed("org/model at main could not be downloaded: no route to host\n", "a connection")
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda *_, **__: ["a.gguf", "b.gguf"])
    failed("it has 2 GGUF files, such as a.gguf", "hf download")
