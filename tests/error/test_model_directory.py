"""MODEL is not a directory with a model in it."""
from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from tinygrad_nv import cli


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
