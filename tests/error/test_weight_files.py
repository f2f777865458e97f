"""Weight files that are missing, cut short, malformed, or of another model."""
from __future__ import annotations

import json
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from tinygrad_nv.models import weights
from tinygrad_nv.models.tied import has_own_head

AGAIN = "to fix:   download the file again"
NORM = "model.norm.weight"


def file_of(directory: Path) -> Path:
    return directory / "model.safetensors"


def header_bytes(path: Path) -> int:
    return int.from_bytes(path.read_bytes()[:8], "little")


def write_header(path: Path, header: object, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def edit(path: Path, changes: dict[str, np.ndarray | None]) -> None:
    """Replaces tensors of a safetensors file; None drops one."""
    tensors = {**load_file(path), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def save_pickle(directory: Path, state: object) -> Path:
    file_of(directory).unlink()
    torch.save(state, directory / "pytorch_model.bin")
    return directory / "pytorch_model.bin"


def shard(directory: Path, weight_map: object) -> Path:
    """Two shards with the tensors of the single file, and an index."""
    tensors = load_file(file_of(directory))
    file_of(directory).unlink()
    for i in range(2):
        part = {name: tensors[name] for name in sorted(tensors)[i::2]}
        save_file(part, directory / f"shard-{i}.safetensors")
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map} if weight_map is not None else {}))
    return index


def test_no_weights_at_all(command, copy: Path):
    file_of(copy).unlink()
    command("generate", copy, "hello").refused(
        f"{copy} holds no weights",
        "expected: model.safetensors, or model.safetensors.index.json with its shards, or pytorch_model.bin",
        "to fix:   download the weight files into the directory")


# **** one safetensors file ****

@pytest.mark.parametrize("cut", ["empty", "in the length", "after the length", "inside the header",
                                 "after the header", "inside the data", "one byte short"])
def test_a_truncated_file(command, copy: Path, cut: str):
    path, header = file_of(copy), header_bytes(file_of(copy))
    whole = path.read_bytes()
    end = {"empty": 0, "in the length": 7, "after the length": 8, "inside the header": 8 + header // 2,
           "after the header": 8 + header, "inside the data": len(whole) // 2,
           "one byte short": len(whole) - 1}[cut]
    found = {"empty": "0 bytes long", "in the length": "7 bytes long",
             "after the length": f"its header of {header} bytes does not fit in 8 bytes",
             "inside the header": f"its header of {header} bytes does not fit in {end} bytes"}
    path.write_bytes(whole[:end])
    command("generate", copy, "hello").refused(
        f"{path} is damaged: ", found.get(cut, f", the file at {end} (truncated?)"),
        "expected: a complete safetensors file", AGAIN)


@pytest.mark.parametrize("length", [2 ** 64 - 1, 2 ** 40, 10 ** 6])
def test_a_header_length_beyond_the_file(command, copy: Path, length: int):
    path = file_of(copy)
    size = len(whole := path.read_bytes())
    path.write_bytes(struct.pack("<Q", length) + whole[8:])
    command("generate", copy, "hello").refused(
        f"{path} is damaged: its header of {length} bytes does not fit in {size} bytes", AGAIN)


@pytest.mark.parametrize(("header", "found"), [
    (b"\xffx", "its header is not JSON ('utf-8' codec can't decode"),
    (b'{"a":', "its header is not JSON (Expecting"),
    (b"", "its header is not JSON"), (b"[]", "its header is not an object"),
    (b"[" * 100_000, "its header is not JSON (maximum recursion"),
    ({"a": None}, "tensor a has no layout"),
    ({"a": {"dtype": "F32", "shape": [1]}}, "tensor a has no layout"),
], ids=["bytes", "cut", "nothing", "list", "deep", "null", "no-offsets"])
def test_a_header_that_is_none(command, copy: Path, header, found: str):
    write_header(file_of(copy), header, bytes(16))
    command("generate", copy, "hello").refused(f"{file_of(copy)} is damaged: {found}", AGAIN)


@pytest.mark.parametrize(("dtype", "shape", "offsets"), [
    ("F32", [1], [-64, -60]), ("F32", [-1, -1], [0, 4]), ("F32", ["x"], [0, 4]), ("F32", [1.0], [0, 4]),
    ("F32", [True], [0, 4]), ("F32", [1], [None, None]), ("F32", [1], ["0", "4"]), (["F32"], [1], [0, 4]),
])
def test_a_layout_of_the_wrong_types(command, copy: Path, dtype, shape, offsets):
    write_header(file_of(copy), {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}, bytes(16))
    command("generate", copy, "hello").refused(
        f"{file_of(copy)} is damaged: tensor a has dtype {dtype!r}, shape {shape} and offsets {offsets}",
        AGAIN)


def test_offsets_that_do_not_hold_the_shape(command, copy: Path):
    write_header(file_of(copy), {"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 12]}}, bytes(16))
    command("generate", copy, "hello").refused("is damaged: tensor a has 12 bytes, needs 16", AGAIN)


@pytest.mark.parametrize("dtype", [np.int64, np.float64, np.int8])
def test_a_dtype_that_is_not_supported(command, copy: Path, dtype):
    edit(file_of(copy), {NORM: np.ones(64, dtype)})
    name = {np.int64: "I64", np.float64: "F64", np.int8: "I8"}[dtype]
    command("generate", copy, "hello").refused(
        f"tensor {NORM} has dtype {name}", "expected: one of F32, F16, BF16", "to fix:   convert the weights")


# **** tensors of another model ****

def test_a_wrong_shape_is_named_with_both_shapes(command, copy: Path):
    edit(file_of(copy), {NORM: np.ones(65, np.float32)})
    command("generate", copy, "hello").refused(
        f"the weights in {copy} do not fit the model of its config.json",
        f"wrong shape: {NORM}: [65], expected [64], as hidden_size is 64",
        "to fix:   use the config.json that belongs to these weights")


def test_missing_and_unexpected_tensors_are_named(command, copy: Path):
    up = "model.layers.1.mlp.up_proj.weight"
    edit(file_of(copy), {NORM: None, up: None, "model.extra": np.ones(1, np.float32)})
    command("generate", copy, "hello").refused(
        f"missing (2): {NORM}, {up}\n", "unexpected (1): model.extra\n",
        "expected: every tensor of the architecture, once, in the shape config.json implies")


def test_layers_are_missing(command, spoil):
    command("generate", spoil(num_hidden_layers=4), "hello").refused(
        "num_hidden_layers is 4, and the tensors model.layers.… are those of 2")


def test_many_missing_tensors_are_counted(command, copy: Path):
    layers = [name for name in load_file(file_of(copy))
              if ".layers." in name and "input_layernorm" not in name]
    edit(file_of(copy), dict.fromkeys(layers))
    command("generate", copy, "hello").refused(f"missing ({len(layers)}): model.layers.0.", ", and 8 more")


def test_the_head_of_an_untied_model_is_missing(command, copy: Path):
    edit(file_of(copy), {"lm_head.weight": None})
    command("generate", copy, "hello").refused("missing (1): lm_head.weight")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["safetensors", "pickle"])
def test_a_tied_model_with_a_head_of_its_own(command, spoil, kind: str):
    """The stored head is used then, as transformers 5 does. One that is the embedding again is no other."""
    directory = spoil(tie_word_embeddings=True)
    path = file_of(directory)
    own = load_file(path)[weights.HEAD]
    edit(path, {weights.HEAD: load_file(path)[weights.EMBEDDING]})
    assert not has_own_head(directory)
    ask = ("generate", directory, "hello", "--max-tokens", 8, "--temperature", 0)
    tied = command(*ask).succeeded().out
    edit(path, {weights.HEAD: own})
    if kind == "pickle":
        save_pickle(directory, {name: torch.from_numpy(each) for name, each in load_file(path).items()})
    assert has_own_head(directory)
    made = command(*ask).succeeded().out
    spoil(tie_word_embeddings=False)
    assert made == command(*ask).succeeded().out != tied


@pytest.mark.parametrize(("size", "words"), [
    (2 ** 26, "model.embed_tokens.weight: [300, 64], expected [67108864, 64]"),
    (10 ** 12, "vocab_size is 1000000000000")])
def test_a_size_no_machine_holds_is_refused_before_memory_is_asked_for(command, spoil, size: int, words: str):
    command("generate", spoil(vocab_size=size), "hello").refused(words)


def test_a_file_that_shrinks_while_it_is_read(command, copy: Path, monkeypatch: pytest.MonkeyPatch):
    allocate = weights.allocate_arena
    def shrink(tensors):
        with file_of(copy).open("r+b") as file: file.truncate(file.seek(0, 2) - 10)
        allocate(tensors)
    monkeypatch.setattr(weights, "allocate_arena", shrink)
    command("generate", copy, "hello").refused(
        f"{file_of(copy)} ended 10 bytes early", "expected: the file its header describes", AGAIN)


@pytest.mark.parametrize("sampling", [["--temperature", 0], ["--temperature", 1]])
def test_weights_that_are_not_numbers(command, copy: Path, sampling):
    edit(file_of(copy), {NORM: np.full(64, np.nan, np.float32)})
    command("generate", copy, "--prompt-ids", "5", "--json", *sampling).refused(
        "the model computed NaN, so there is no likeliest token", "expected: weights that are finite",
        "to fix:   try --dtype bfloat16 or float32", "download them again")


# **** shards ****

def test_a_missing_shard(command, copy: Path):
    shard(copy, {NORM: "shard-0.safetensors", "a": "shard-7.safetensors", "b": "shard-8.safetensors"})
    command("generate", copy, "hello").refused(
        f"{copy} lacks 2 of 3 shards: shard-7.safetensors, shard-8.safetensors",
        "expected: every file the index names", "to fix:   download the missing shards")


def test_an_index_that_promises_tensors_a_shard_lacks(command, copy: Path):
    shard(copy, {"model.ghost": "shard-0.safetensors", "lm_head.weight": "shard-0.safetensors"})
    command("generate", copy, "hello").refused(
        f"{copy / 'shard-0.safetensors'} lacks tensors that its index lists: model.ghost",
        "expected: the shards the index was written with", "to fix:   download the directory again")


@pytest.mark.parametrize("weight_map", [None, {}, [], "x"])
def test_an_index_without_a_map(command, copy: Path, weight_map):
    index = shard(copy, weight_map)
    command("generate", copy, "hello").refused(
        f"{index} has no weight_map", "expected: an object that maps tensor names to files", AGAIN)


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", ".", "", None, 3])
def test_an_index_that_points_out_of_its_directory(command, copy: Path, name):
    index = shard(copy, {NORM: name})
    command("generate", copy, "hello").refused(
        f"{index}: {NORM} is in {name!r}", "expected: the name of a file beside the index", AGAIN)


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b"])
def test_a_shard_name_no_system_allows(command, copy: Path, name: str):
    shard(copy, {NORM: name})
    command("generate", copy, "hello").refused(f"{copy} lacks 1 of 1 shards: {name[:200]}")


# **** pytorch_model.bin ****

def test_a_pickle_may_not_call_functions(command, copy: Path, tmp_path: Path):
    """numpy.testing.runstring is exec in disguise, and numpy is what unpicklers of weights like to allow."""
    class Hostile:
        def __reduce__(self):
            from numpy.testing._private.utils import runstring
            return runstring, (f"open({str(tmp_path / 'owned')!r}, 'w')", {})
    path = save_pickle(copy, {})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", pickle.dumps({"a": Hostile()}))
    command("generate", copy, "hello").refused(
        f"{path} cannot be unpickled: ", "it calls numpy.testing._private.utils.runstring",
        "expected: a state dict written by torch.save since torch 1.6",
        f"{AGAIN}, or convert it to safetensors")
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("cut", [0, 100, -1, -1000])
def test_a_truncated_pickle(command, copy: Path, cut: int):
    path = save_pickle(copy, {"a": torch.ones(300)})
    path.write_bytes(path.read_bytes()[:cut])
    command("generate", copy, "hello").refused(f"{path} cannot be unpickled: ", "not a zip file", AGAIN)


def test_a_pickle_without_the_bytes_of_a_tensor(command, copy: Path):
    path = save_pickle(copy, {"a": torch.ones(300)})
    with zipfile.ZipFile(path) as archive: state = archive.read(archive.namelist()[0])
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", state)
        archive.writestr("x/data/0", bytes(40))
    command("generate", copy, "hello").refused(
        f"{path} is damaged: a needs 1200 bytes at 0 of x/data/0, which has 40",
        "expected: a complete state dict", AGAIN)


@pytest.mark.parametrize(("state", "found", "expected"), [
    ([1, 2], "holds a list", "a state dict, tensors by name"),
    ({"epoch": 3}, "epoch is not a float32, float16 or bfloat16 tensor", "a state dict of such tensors"),
    ({"model": {"a": torch.ones(1)}}, "model is not a float32, float16 or bfloat16 tensor", "a state dict"),
    ({"a": torch.ones(2, dtype=torch.int64)}, "a is not a float32, float16 or bfloat16", "a state dict"),
], ids=["list", "number", "nested", "integers"])
def test_a_pickle_of_something_else(command, copy: Path, state, found: str, expected: str):
    path = save_pickle(copy, state)
    command("generate", copy, "hello").refused(
        str(path), found, f"expected: {expected}", "to fix:   convert it to safetensors")
