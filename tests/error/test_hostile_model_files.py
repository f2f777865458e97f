"""Files of models that are made to exhaust time or memory are refused in words, before anything of the size
that they claim is made. Every test runs with 2 GiB of address space above what the process has."""
from __future__ import annotations

import json
import os
import pickle
import resource
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch

from tests.support.error.limited_case import limit_process
from tinygrad_nv.cli.onnx import _load_array as onnx_array
from tinygrad_nv.engine.text.tokenizer import Tokenizer
from tinygrad_nv.errors import (
    DataError,
    ModelError,
    NVError,
    PTXError,
    RequestError,
    TokenizerError,
    WeightError,
)
from tinygrad_nv.files import MAX_JSON_BYTES, read_bytes
from tinygrad_nv.models.checkpoint import open_checkpoint
from tinygrad_nv.models.config import read_config, read_json
from tinygrad_nv.models.peft import read_config as read_adapter
from tinygrad_nv.models.pickle_reader import load
from tinygrad_nv.ptx.command import _array as ptx_array
from tinygrad_nv.quant.gguf.file import open_file
from tinygrad_nv.train.data import records as training
from tinygrad_nv.train.data.shards import Shards

SECONDS, BYTES = 5.0, 2 << 30
DIGITS = "9" * 3000


@pytest.fixture(autouse=True)
def limited() -> Iterator[None]:
    with limit_process(BYTES, SECONDS): yield


def refused(error: type[NVError], *words: str) -> Any: return pytest.raises(error, match=".*".join(words))


# **** safetensors ****

def safetensors(folder: Path, header: object, data: bytes = bytes(16)) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return folder


def layout(shape: str = "[1]", offsets: str = "[0,4]", dtype: str = "F32") -> bytes:
    return f'{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}'.encode()


@pytest.mark.parametrize(("header", "words"), [
    (b'{"a":' + layout(f"[{DIGITS},{DIGITS}]") + b"}", "more than a file has"),
    (b'{"a":' + layout(f"[0,{DIGITS}]", "[0,0]") + b"}", "more than a file has"),
    (b'{"a":' + layout(f"[{DIGITS * 2}]") + b"}", "is not JSON"),
    (b'{"a":' + layout(offsets=f"[0,{DIGITS}]") + b"}", "more than a file has"),
    (b'{"a":' + layout(str([2] * 100_000)) + b"}", "has 100000 dimensions"),
    (b'{"a":' + layout("[1.0]") + b"}", r"shape \[1.0\]"), (b'{"a":' + layout("[NaN]") + b"}", r"\[nan\]"),
    (b'{"a":' + layout("[-1]") + b"}", r"shape \[-1\]"), (b'{"a":' + layout('"12"') + b"}", "shape 12"),
    (b'{"a":' + layout("[2]", "[0,8]") + b',"b":' + layout("[2]", "[4,12]") + b"}", "a and b share bytes"),
    (b'{"a":' + layout() + b',"a":' + layout() + b"}", "'a' is there twice"),
    (b'{"a":' + layout("[1099511627776]", "[0,4398046511104]") + b"}", r"\(truncated\?\)"),
    (b'{"a":' + layout(dtype="Q" * 100_000) + b"}", "dtype Q{60}\n"),
    (b'{"__metadata__":[' + b"{}," * 4_000_000 + b"1]}", "8000002 values, and at most 4000000"),
    (b'{"' + b"a" * 1_000_000 + b'":{}}', "tensor a{200} has no layout"), (b"[" * 100_000, "is not JSON"),
    (b'{"m.experts.w_blocks":' + layout("[1000000000,0,16]", "[0,0]", "U8") + b"}", "1000000000 experts")])
def test_headers(tmp_path: Path, header: bytes, words: str) -> None:
    with refused(WeightError, words): open_checkpoint(safetensors(tmp_path, header))


def test_sizes_of_headers(tmp_path: Path) -> None:
    folder = safetensors(tmp_path, b"{}" + b" " * (32 << 20))
    with refused(WeightError, "a header of 33554434 bytes\n", "at most 33554432"): open_checkpoint(folder)
    # a shape that is a tensor of 4 GiB, in a sparse file
    size = 4 << 30
    parts = {"m.compressed": ("F32", [2, 1], 0, 8), "m.bitmask": ("U8", [2, 1], 8, 10),
             "m.shape": ("I64", [size // 8], 10, 10 + size)}
    safetensors(tmp_path, {name: {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
                           for name, (dtype, shape, begin, end) in parts.items()})
    os.truncate(tmp_path / "model.safetensors", size + 4096)
    with refused(WeightError, "m.weight is of shape"): open_checkpoint(tmp_path)


def test_indices(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {str(i): f"{i}.safetensors" for i in range(20_000)}}))
    with refused(WeightError, "names 20000 files\n", "at most 10000"): open_checkpoint(tmp_path)
    safetensors(tmp_path, b'{"a":' + layout() + b"}").joinpath("model.safetensors").rename(tmp_path / "x")
    for name in ("y", "z"): (tmp_path / name).symlink_to("x")
    index.write_text(json.dumps({"weight_map": {"a": "y", "b": "z"}}))
    with refused(WeightError, "names a file twice, by links"): open_checkpoint(tmp_path)
    os.truncate(index, 1 << 40)
    with refused(ModelError, "1099511627776 bytes, and at most 33554432"): open_checkpoint(tmp_path)


# **** pytorch_model.bin ****

def text(value: str) -> bytes: return b"X" + struct.pack("<I", len(value)) + value.encode()


def number(value: int) -> bytes: return b"J" + struct.pack("<i", value)


def tensor(shape: bytes, strides: bytes = b"K\1\x85", offset: int = 0) -> bytes:
    storage = b"(%sctorch\nFloatStorage\n%s%sJ\x10\0\0\0tQ" % (text("storage"), text("0"), text("cpu"))
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + number(offset) + shape + strides + b"\x89}tR"


def state(value: bytes, key: bytes = text("a")) -> bytes: return b"\x80\2}(" + key + value + b"u."


def archive(folder: Path, data: bytes, compression: int = zipfile.ZIP_STORED, **more: bytes) -> Path:
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as made:
        made.writestr("m/data.pkl", data, compression)
        made.writestr("m/data/0", bytes(64), compression if more.pop("all", None) else zipfile.ZIP_STORED)
        for name, content in more.items(): made.writestr(f"m/data/{name}", content)
    return folder


DOUBLED = b"K\1K\2\x86" + b"2\x86" * 60     # a tuple of itself twice over: 2⁶⁰ numbers


@pytest.mark.parametrize(("data", "words"), [
    (state(b"N", DOUBLED), "a key of type tuple"), (state(tensor(DOUBLED)), "a tensor has no shape"),
    (state(b"(" + DOUBLED + b"22tQ"), "a storage has no key"), (state(DOUBLED), "a is not a float32"),
    (b"\x80\5\x96" + struct.pack("<Q", 1 << 40) + b".", "instruction 0x96"),
    (b"\x80\2\x8b" + struct.pack("<I", 1 << 20) + bytes(1 << 20) + b".", "instruction 0x8b"),
    (b"\x80\5\x8d" + struct.pack("<Q", 1 << 62), "ends early"),
    (b"\x80\2]r\xff\xff\xff\xff.", "holds a list"),
    (b"\x80\2ccollections\nOrderedDict\n}\x85R.", "it calls collections.OrderedDict"),
    (state(tensor(b"K\4\x85") + b"}" + text("offset") + number(-9) + b"sb"), "it sets attributes"),
    (state(tensor(number(10 ** 9) + b"\x85", b"K\0\x85")), "no tensor larger than its storage"),
    (state(tensor(b"K\4\x85", number(10 ** 9) + b"\x85")), "which has 64"),
    (state(tensor(b"K\4\x85", number(-1) + b"\x85")), "negative strides"),
    (state(tensor(b"K\4\x85", offset=16)), "which has 64"), (b"\x80\2" + b"]" * 2_000_001, "2000000 instr"),
    (b"\x80\2" + b"c" + b"a" * 1000 + b"\nb\n.", "what has no name")])
def test_pickles(tmp_path: Path, data: bytes, words: str) -> None:
    with refused(WeightError, words): open_checkpoint(archive(tmp_path, data))


def test_archives(tmp_path: Path) -> None:
    good = state(tensor(b"K\4\x85"))
    assert [*open_checkpoint(archive(tmp_path, good)).entries] == ["a"]
    deflated = zipfile.ZIP_DEFLATED
    assert [*open_checkpoint(archive(tmp_path, good, deflated)).entries] == ["a"]
    with refused(WeightError, "m/data/0 is compressed"):
        open_checkpoint(archive(tmp_path, good, deflated, all=b"1"))
    bomb = b"\x80\2" + b"N0" * (17 << 20) + b"}."
    with refused(WeightError, "data.pkl has more than"): open_checkpoint(archive(tmp_path, bomb, deflated))
    with pytest.warns(UserWarning, match="Duplicate"): archive(tmp_path, good, **{"0": bytes(64)})
    with refused(WeightError, "is there twice"): open_checkpoint(tmp_path)
    # two entries with the bytes of one
    both = state(tensor(b"K\4\x85") + text("b") + tensor(b"K\4\x85").replace(text("0"), text("1")))
    raw = bytearray((archive(tmp_path, both, **{"1": bytes(64)}) / "pytorch_model.bin").read_bytes())
    first, second = raw.rindex(b"m/data/0") - 4, raw.rindex(b"m/data/1") - 4
    raw[second:second + 4] = raw[first:first + 4]
    (tmp_path / "pytorch_model.bin").write_bytes(raw)
    with refused(WeightError, "m/data/0 and m/data/1 share bytes"): open_checkpoint(tmp_path)


def test_a_state_dict_is_read_as_torch_reads_it() -> None:
    """What a state dict may hold beside tensors, in all protocols that torch writes."""
    plain = {"a": [1, -1, 300, 70_000, 2 ** 40, 1.5, None, True, (), ("x", 1), ("x", 1, 2), ("y",)],
             "b": {3: "é"}}
    for protocol in range(2, 6):
        assert load(pickle.dumps(plain, protocol), lambda name, args: None, lambda pid: None) == plain
    named = torch.nn.Linear(2, 3).state_dict()      # an OrderedDict, whose _metadata is set
    for name in named: named[name] = 0
    assert load(pickle.dumps(named, 2), lambda name, args: None, lambda pid: None) == named


# **** GGUF ****

def gguf(folder: Path, tensors: int, entries: int, *data: bytes) -> Path:
    path = folder / "a.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, tensors, entries) + b"".join(data))
    os.truncate(path, 3 << 29)      # a sparse file
    return path


KEY = struct.pack("<Q", 1) + b"a"


@pytest.mark.parametrize(("arguments", "words"), [
    ((1 << 63, 0), "9223372036854775808 tensors"), ((0, (1 << 63) - 1), "9223372036854775807 entries"),
    ((0, 1, struct.pack("<Q", 1 << 60), bytes(9)), "bytes of a string"),
    ((0, 1, KEY, struct.pack("<IIQ", 9, 0, 1 << 30)), "1073741824 values of arrays"),
    ((0, 1, KEY, struct.pack("<IIQ", 9, 8, 100_000_000)), "100000000 values of arrays"),
    ((0, 1, KEY, struct.pack("<IIQ", 9, 9, 1_000_000)), "1000000 arrays in arrays"),
    ((0, 1, KEY, struct.pack("<IQ", 8, 1 << 30)), "1073741869 bytes of metadata"),
    ((200_000, 0), "200000 tensors"), ((0, 20_000), "20000 entries"),
    ((1, 0, struct.pack("<Q", 2000), b"a" * 2000), "name has 2000 characters"),
    ((1, 0, KEY, struct.pack("<IQQQQIQ", 4, *[1 << 62] * 4, 0, 0)), "ends at byte")])
def test_gguf(tmp_path: Path, arguments: tuple[Any, ...], words: str) -> None:
    with refused(WeightError, words): open_file(gguf(tmp_path, *arguments))


# **** JSON, tokenizers, and what is no file ****

@pytest.mark.parametrize(("name", "read", "error"), [
    ("config.json", read_config, ModelError), ("adapter_config.json", read_adapter, ModelError),
    ("tokenizer.json", Tokenizer.load, TokenizerError), ("tokenizer.model", Tokenizer.load, TokenizerError),
    ("vocab.txt", Tokenizer.load, TokenizerError)])
def test_sizes_and_kinds(tmp_path: Path, name: str, read: Callable[[Path], Any],
                         error: type[NVError]) -> None:
    path = tmp_path / name
    os.mkfifo(path)
    with refused(error, "has no"): read(tmp_path)
    path.unlink()
    path.write_bytes(b"")
    os.truncate(path, 1 << 40)
    with refused(error, "1099511627776 bytes, and at most"): read(tmp_path)


def test_values_and_depth(tmp_path: Path) -> None:
    many = b"[" + b"{}," * 4_000_000 + b"1]"
    (tmp_path / "config.json").write_bytes(b'{"a":' + many + b"}")
    with refused(ModelError, "8000002 values, and at most 4000000"): read_config(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(many)
    with refused(TokenizerError, "8000001 values"): Tokenizer.load(tmp_path)
    (tmp_path / "config.json").write_bytes(b'{"a":' * 100_000)
    with refused(ModelError, "is not JSON"): read_config(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.txt").write_bytes(b"\n" * 3_000_000)
    with refused(TokenizerError, "lines\n", "at most 2000000"): Tokenizer.load(tmp_path)


def npy(shape: str, descr: str = "<f4", data: bytes = b"") -> bytes:
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header + data


@pytest.mark.parametrize("data", [
    npy("(1000000000000,)"), npy("(-5,)"), npy(f"({DIGITS},)"), npy(f"(0, {DIGITS})"), npy("(" * 5000),
    npy("(9**9**9,)"), npy("(2,)", "|O"), npy("(2,)", "|S1000000000"), npy("(3,)", data=bytes(11)), b"PK\3\4",
    b"\x93NUMPY\2\0\xff\xff\xff\x7f", npy("(True,)", data=bytes(9))[:20]])
def test_arrays(tmp_path: Path, data: bytes) -> None:
    """Headers of .npy files that say more than there is."""
    path = tmp_path / "a.npy"
    path.write_bytes(data)
    with refused(PTXError, "a.npy"): ptx_array(str(path))
    with refused(RequestError, "a.npy"): onnx_array("x", path)
    with refused(DataError, "a.npy"): Shards.open([path], 4, 100)
    path.write_bytes(npy("(3,)", data=bytes(12)))
    assert onnx_array("x", path).tolist() == [0, 0, 0]
    path.unlink()
    os.mkfifo(path)
    with refused(RequestError, "it is a FIFO"): onnx_array("x", path)
    with refused(PTXError, "it is a FIFO"): ptx_array(str(path))


def test_training_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line or a text of terabytes, a line of many values, and rows that share one long text."""
    for name, words in (("a.jsonl", "line 1 has more than 1000000 bytes"), ("a.txt", "1099511627776 bytes")):
        monkeypatch.setattr(training, "MAX_DOCUMENT_BYTES", 1_000_000)
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, 1 << 40)
        with refused(DataError, words): [*training.records([tmp_path / name])]
    monkeypatch.undo()
    (tmp_path / "a.jsonl").write_bytes(b'{"text":[' + b"{}," * 4_000_000 + b"1]}")
    with refused(DataError, "line 1 is not JSON: it has 8000002 values"):
        [*training.records([tmp_path / "a.jsonl"])]
    table = pyarrow.table({"text": ["x" * (1 << 20)] * 200})    # 1 MB on the disk
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", compression="zstd")
    del table
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert sum(len(each.fields["text"]) for each in training.records([tmp_path / "a.parquet"])) == 200 << 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 120 << 10


def test_files_that_are_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path, words in (("/dev/zero", "a device"), (tmp_path, "a directory"), (tmp_path / "fifo", "a FIFO")):
        with refused(ModelError, "cannot be read", words): read_json(Path(path))
    (tmp_path / "a").write_bytes(b"abc")
    with pytest.raises(OSError, match="it has 3 bytes, and at most 2 are read"): read_bytes(tmp_path / "a", 2)
    assert read_bytes("/proc/self/status", MAX_JSON_BYTES).startswith(b"Name")    # says a size of 0
    assert np.frombuffer(read_bytes(tmp_path / "a", 3), "u1").tolist() == [97, 98, 99]
