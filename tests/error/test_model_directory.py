"""MODEL of a command line is no directory of a model, nor a hub name of the cache; and command lines that
are none."""
from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import OfflineModeIsEnabled

from tinygrad_nv import cli
from tinygrad_nv.cli import console
from tinygrad_nv.cli.model_path import find_model, list_names
from tinygrad_nv.errors import ModelError


@pytest.mark.parametrize("name", ["nowhere", "no/where", "x" * 5000, "a\0b"], ids=["a", "b", "long", "nul"])
@pytest.mark.parametrize("subcommand", ["generate", "chat", "explain"])
def test_no_such_directory(command, tmp_path: Path, subcommand: str, name: str):
    directory = f"{tmp_path}/{name}"
    command(subcommand, directory, *["hello"] * (subcommand == "generate")).refused(
        f"tinygrad-nv: no such directory: {directory[:300]}",
        "expected: a Hugging Face model directory (config.json, weights)",
        "to fix:   check the path; models are not downloaded")


def test_config_json_is_missing(command, copy: Path):
    (copy / "config.json").unlink()
    command("generate", copy, "hello").refused(
        f"tinygrad-nv: {copy} has no config.json", "expected: a Hugging Face model directory",
        "to fix:   point MODEL at the folder that holds config.json")


def test_a_file_is_not_a_directory(command, tiny: Path):
    command("generate", tiny / "config.json", "hello").refused(
        "config.json has no config.json", "expected: a Hugging Face model directory")


@pytest.mark.parametrize("subcommand", ["generate", "chat", "explain"])
@pytest.mark.parametrize(("name", "found"), [("tiny.gguf", "starts with b''"),
                                             ("ggml-model", "is damaged: ")])
def test_a_gguf_file(command, tmp_path: Path, subcommand: str, name: str, found: str):
    """By its name, or by its first bytes."""
    path = tmp_path / name
    path.write_bytes(b"" if "." in name else b"GGUF\3\0\0\0")
    command(subcommand, path, *["hello"] * (subcommand == "generate")).refused(
        f"{path} {found}", "GGUF file", "to fix:   download the file again")


def test_a_directory_of_gguf_files(command, tmp_path: Path, copy: Path):
    for at in (2, 1): (tmp_path / f"tiny-Q{at}_0.GGUF").write_bytes(b"GGUF")
    command("generate", tmp_path, "hello").refused(
        f"{tmp_path} holds 2 GGUF files (tiny-Q1_0.GGUF, tiny-Q2_0.GGUF, …)",
        "expected: one, or the name of one", f"to fix:   name the file: {tmp_path}/tiny-Q1_0.GGUF")
    (copy / "also.gguf").write_bytes(b"GGUF")
    command("generate", copy, "hello", "--max-tokens", 1).succeeded()


@pytest.mark.parametrize(("adapter", "kind"), [({"peft_type": "LORA"}, "LoRA"), ({"peft_type": "IA3"}, "IA3"),
                                               ({}, "LoRA")])
@pytest.mark.parametrize("alone", [True, False])
def test_an_adapter(command, tmp_path: Path, copy: Path, adapter: dict[str, str], kind: str, alone: bool):
    """Beside a model's own weights, too: transformers would apply it."""
    directory = tmp_path if alone else copy
    config = {**adapter, "base_model_name_or_path": "org/base"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    command("generate", directory, "hello").refused(
        f"{directory} is an adapter ({kind}) of the model org/base, and no model",
        "expected: a Hugging Face model directory, without adapter_config.json",
        "merge it into its model with PEFT's merge_and_unload",
        *[f"to fix:   serve its model with --lora-modules NAME={directory}; or"] * (kind == "LoRA"))


def test_an_adapter_that_is_no_json(command, copy: Path):
    (copy / "adapter_config.json").write_text("{")
    command("generate", copy, "hello").refused("adapter_config.json is not JSON", "expected: a JSON object")


def test_config_json_is_a_directory(command, copy: Path):
    (copy / "config.json").unlink()
    (copy / "config.json").mkdir()
    command("generate", copy, "hello").refused(f"{copy} has no config.json")


@pytest.mark.parametrize(("content", "found"), [
    (b"{", "is not JSON: Expecting property name enclosed in double quotes: line 1 column 2"),
    (b"", "is not JSON: Expecting value: line 1 column 1"),
    (b"[]", "holds a list"),
    (b"[" * 200_000, "is not JSON: maximum recursion depth exceeded"),
    (b'{"vocab_size": ' + b"9" * 5000 + b"}", "is not JSON: Exceeds the limit"),
], ids=["cut", "empty", "list", "deep", "huge-number"])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_json_that_is_none(command, copy: Path, file: str, content: bytes, found: str):
    (copy / file).write_bytes(content)
    command("generate", copy, "hello").refused(f"{copy / file} {found}", "expected: a JSON object",
                                               "to fix:   download the file again")


def test_config_json_is_not_text(command, copy: Path):
    (copy / "config.json").write_bytes(b"\xff\xfe{}")
    command("generate", copy, "hello").refused(
        f"{copy / 'config.json'} cannot be read: 'utf-8' codec can't decode byte 0xff",
        "expected: a readable UTF-8 text file", "to fix:   check its permissions, or download the file again")


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_file_without_permission(command, tiny: Path, file: str, monkeypatch: pytest.MonkeyPatch):
    opened = Path.open
    def refuse(path: Path, *arguments, **options):
        if path.name == file: raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *arguments, **options)
    monkeypatch.setattr(Path, "open", refuse)
    command("generate", tiny, "hello").refused(
        f"{tiny / file} cannot be read", "Permission denied", "expected: a readable", "check its permissions")


def test_the_model_in_the_box_is_not_there(command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cli, "DEFAULT_MODEL", tmp_path / "tales")
    command("generate", "hello").refused(
        f"the bundled model is not at {tmp_path / 'tales'}", "expected: an installation with its model",
        "to fix:   reinstall tinygrad-nv, or name a model directory")


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


def test_a_server_has_the_names_by_which_it_was_started(hub: Path):
    """Not that of a snapshot's directory, which is a commit's number."""
    snapshot = download(hub)
    for given in ("org/model", "org/model@main"): assert list_names(None, given, snapshot) == ["org/model"]
    assert list_names(["a", "b"], "org/model", snapshot) == ["a", "b"]
    assert list_names(None, None, snapshot) == ["a1b2"]
    assert list_names(None, str(snapshot), snapshot) == ["a1b2", str(snapshot)]


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


@pytest.mark.parametrize(("arguments", "found"), [
    ([], "the following arguments are required: COMMAND"),
    (["serve-coffee"], "argument COMMAND: invalid choice: 'serve-coffee' (choose from"),
    (["generate", "--no-such-option", "hello"], "unrecognized arguments: --no-such-option"),
    (["generate", "model", "--json", "hello", "--nosuch"], "unrecognized arguments: hello --nosuch"),
    (["generate", "hello", "--seed"], "argument --seed: expected one argument"),
    (["chat", "model", "surplus"], "unrecognized arguments: surplus"),
    (["doctor", "surplus"], "unrecognized arguments: surplus"),
])
def test_usage_errors_exit_with_2(command, arguments: list[str], found: str):
    command(*arguments).refused("usage: tinygrad-nv", found)


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["chat", "-h"], ["explain", "-h"]])
def test_help_is_no_error(command, arguments: list[str]):
    outcome = command(*arguments).succeeded()
    assert outcome.err == ""
    assert outcome.out.startswith("usage: tinygrad-nv")


def test_an_error_of_the_system_is_told_in_its_words(command, tiny: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_): raise OSError(28, "No space left on device")
    monkeypatch.setattr(console, "load", fail)
    command("generate", tiny, "hello").refused(
        "the system refused: [Errno 28] No space left on device", "expected: files that can be read",
        "to fix:   check permissions and free space")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", [["-m", "tinygrad_nv"], [str(Path(sys.executable).parent / "tinygrad-nv")]],
                         ids=["module", "script"])
def test_a_setting_that_is_none(how: list[str]):
    """Read when the package is imported, before there is a command line to catch anything."""
    command, settings = [sys.executable, *how, "doctor"], {**os.environ, "NV": "yes"}
    done = subprocess.run(command, capture_output=True, text=True, env=settings, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tinygrad-nv: NV=yes\n  expected: one of 0, 1")
