"""Repacked weights on disk: a second load has the same bits, and nothing stale or damaged is ever loaded."""
from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tests.models.test_quantised import KINDS, LINEARS
from tests.support.quant.gguf_case import tokenizer_metadata, write_model
from tinygrad_nv import cache
from tinygrad_nv.engine.text.tokenizer import Tokenizer
from tinygrad_nv.models import weights
from tinygrad_nv.models.config import read_config
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.quantised import repack_file, repack_folder
from tinygrad_nv.models.quantised.layers import Part, matrices, projections
from tinygrad_nv.models.quantised.repack_file import bytes_of, tensors_of
from tinygrad_nv.quant import sparse
from tinygrad_nv.quant.activations import QWeight, SparseWeight
from tinygrad_nv.quant.readers.reader import Activations
from tinygrad_nv.quant.sparse import SparseTensor
from tinygrad_nv.quant.tensor import QTensor, in_memory
from tinygrad_nv.quant.types import (
    E4M3,
    INT8,
    MXFP4,
    NF4,
    NVFP4,
    Q4_K,
    Q6_K,
    UINT3,
    UINT4,
    QType,
    Scale,
    buffers,
)
from tinygrad_nv.runtime.memory import read, write

DENSE = "model.layers.0.self_attn.k_proj"      # between quantised ones, and a layer's only one
CODES = "model.layers.0.mlp.down_proj 0 codes"
Bits = dict[str, tuple[str, bytes]]


@pytest.fixture
def directory(hf_model: Callable[[str], Path], tmp_path: Path) -> Path:
    """A model in GPTQ, but for two projections."""
    quantise, config = KINDS["gptq"]
    source, made = hf_model("llama"), tmp_path / "model"
    made.mkdir()
    stored = load_file(source / "model.safetensors")
    for name in [name for name in stored if name.split(".")[-2] in LINEARS]:
        layer = name.removesuffix(".weight")
        if layer not in (DENSE, "model.layers.1.mlp.down_proj"):
            stored |= quantise(layer, stored.pop(name).float())[0]
    save_file({name: each.contiguous() for name, each in stored.items()}, made / "model.safetensors",
              metadata={"format": "pt"})
    data = json.loads((source / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(data | {"quantization_config": config}))
    return made


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that holds all that is kept; not there yet."""
    monkeypatch.setattr(repack_folder, "root", lambda: tmp_path / "repacked")
    monkeypatch.setenv("NV_REPACK_CACHE", "1")
    return tmp_path / "repacked"


@pytest.fixture
def repacked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The layers that are repacked from now on."""
    seen, fill = list[object](), weights.fill
    monkeypatch.setattr(weights, "fill", lambda model, layer, found: (seen.append(layer),
                                                                      fill(model, layer, found))[1])
    return seen


def loaded(directory: Path, int8: bool = False) -> Bits:
    """Every part of every layer: what it is, and the bits of its buffers."""
    model, seen = Llama(read_config(directory), dtypes.float32, "CPU"), list[tuple[int, int]]()
    model.int8_inputs = int8
    total = weights.load(model, directory, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (total, total)
    made: Bits = {}
    for each in (each for i in range(len(model.blocks)) for each in projections(model, i)):
        for number, part in enumerate(each.linear.parts):
            if isinstance(part, Tensor): made[f"{each.name} {number}"] = "dense", bits(part)
            else:
                what = repr((part.matrix.type, part.matrix.shape, replace(part, matrix=None)))
                made |= {f"{each.name} {number} {name}": (what, bits(one))
                         for name, one in tensors_of(part).items()}
    return made


def bits(tensor: Tensor) -> bytes: return read(tensor, np.uint8).tobytes()


def test_a_second_load_has_the_same_bits(directory: Path, root: Path, repacked: list[object],
                                         capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Also by another path to the same files."""
    first = loaded(directory)
    assert len(repacked) == 7
    assert "layout='tiles'" in first[CODES][0]
    assert first[f"{DENSE} 1"][0] == "dense"
    folder, = root.iterdir()
    assert sorted(path.name for path in folder.iterdir()) == [f"{i:04}.layer" for i in range(7)]
    monkeypatch.chdir(directory.parent)
    assert loaded(Path(directory.name)) == first
    assert len(repacked) == 7
    assert capsys.readouterr().err == ""


def test_weights_that_change_in_place_are_repacked(directory: Path, root: Path, repacked: list[object]):
    """The same size and, as a copy may keep it, the same time; what was kept of them is removed."""
    before, file = loaded(directory), directory / "model.safetensors"
    stat, (old,) = file.stat(), root.iterdir()
    data = bytearray(file.read_bytes())
    begin = data.index(np.ascontiguousarray(load_file(file)["model.layers.0.mlp.down_proj.qweight"].numpy()))
    data[begin] ^= 1
    with file.open("r+b") as opened: opened.write(data)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    after = loaded(directory)
    assert len(repacked) == 14
    assert [name for name in before if after[name] != before[name]] == [CODES]
    new, = root.iterdir()
    assert new.name != old.name
    assert new.name.split("-")[0] == old.name.split("-")[0]


def test_a_layer_of_another_setting_is_another_file(directory: Path, root: Path,
                                                    monkeypatch: pytest.MonkeyPatch, repacked: list[object]):
    loaded(directory)
    loaded(directory, int8=True)
    monkeypatch.setenv("NV_CPU", "0")
    assert "layout='rows'" in loaded(directory)[CODES][0]
    assert len(repacked) == 21
    assert len(list(root.iterdir())) == 3


def cut(data: bytearray) -> None: del data[-100:]
def shortened(data: bytearray) -> None: del data[:64]
def emptied(data: bytearray) -> None: data.clear()
def flipped(data: bytearray) -> None: data[1000] ^= 16
def described_otherwise(data: bytearray) -> None: data[-30] ^= 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("damage", [cut, shortened, emptied, flipped, described_otherwise])
def test_a_damaged_file_is_repacked(damage: Callable[[bytearray], None], directory: Path, root: Path,
                                    repacked: list[object], capsys: pytest.CaptureFixture[str]):
    first = loaded(directory)
    folder, = root.iterdir()
    file = folder / "0002.layer"
    whole = file.read_bytes()
    damage(data := bytearray(whole))
    file.write_bytes(data)
    repacked.clear()
    assert loaded(directory) == first
    assert len(repacked) == 1
    line, = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tinygrad-nv: {file} is damaged (")
    assert line.endswith("its layer is repacked")
    assert file.read_bytes() == whole


def test_a_full_disk_ends_no_load(directory: Path, root: Path, monkeypatch: pytest.MonkeyPatch,
                                  capsys: pytest.CaptureFixture[str], repacked: list[object]):
    """The third file finds no space: two are kept, and nothing of the third."""
    rename, count = os.replace, iter(range(100))
    def full(source: str, target: Path) -> None:
        if next(count) >= 2: raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rename(source, target)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        first = loaded(directory)
    folder, = root.iterdir()
    assert capsys.readouterr().err == \
        f"tinygrad-nv: repacked weights are not kept in {root}: No space left on device\n"
    assert sorted(path.name for path in folder.iterdir()) == ["0000.layer", "0001.layer"]
    repacked.clear()
    assert loaded(directory) == first
    assert len(repacked) == 5


def test_an_interrupt_leaves_whole_files(directory: Path, root: Path, monkeypatch: pytest.MonkeyPatch):
    first, fill, count = loaded(directory, int8=True), weights.fill, iter(range(100))
    def interrupted(*arguments: object) -> object:
        if next(count) == 3: raise KeyboardInterrupt
        return fill(*arguments)
    with monkeypatch.context() as patch:
        patch.setattr(weights, "fill", interrupted)
        with pytest.raises(KeyboardInterrupt): loaded(directory)
    assert {path.suffix for path in root.rglob("*") if path.is_file()} == {".layer"}
    assert {name: one for name, (_, one) in loaded(directory).items()} == \
        {name: one for name, (_, one) in first.items()}


def test_weights_that_change_while_they_are_read_are_not_kept(
        directory: Path, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    fill = weights.fill
    def touched(*arguments: object) -> object:
        os.utime(directory / "model.safetensors")
        return fill(*arguments)
    monkeypatch.setattr(weights, "fill", touched)
    loaded(directory)
    assert not [path for path in root.rglob("*") if path.is_file()]
    assert "files of the checkpoint changed while they were read" in capsys.readouterr().err


@pytest.mark.sampled(1)
@pytest.mark.parametrize("why", ["switched off", "temporary"])
def test_nothing_is_kept(why: str, directory: Path, root: Path, monkeypatch: pytest.MonkeyPatch,
                         repacked: list[object], capsys: pytest.CaptureFixture[str]):
    if why == "temporary": monkeypatch.setattr(cache, "is_temporary", lambda place: True)
    else: monkeypatch.setenv("NV_REPACK_CACHE", "0")
    assert loaded(directory) == loaded(directory)
    assert len(repacked) == 14
    assert not root.exists()
    assert capsys.readouterr().err == ""


def test_a_gguf_file_that_is_tied(make_model: Callable[..., Path], tmp_path: Path, root: Path,
                                  repacked: list[object]):
    """Its embedding is its head, and its inputs may be int8."""
    source = make_model(hidden_size=256, intermediate_size=256, head_dim=64, tie_word_embeddings=True)
    write_model(file := tmp_path / "model.gguf", source, Kind.Q8_0,
                tokenizer_metadata(Tokenizer.load(source).backend, "gpt-2"))
    made = []
    for _ in range(2):
        made.append(model := Llama(read_config(file), dtypes.float16, "CPU"))
        weights.load(model, file)
        head = model.quantised_head
        assert head is not None
        assert head.int8
        assert model.quantised_embedding is head.matrix
        assert matrices(model)[-1][0] is head.matrix
    assert len(repacked) == 9
    first, second = ([(str(one.type), {name: bits(each) for name, each in one.buffers.items()})
                      for one, _ in matrices(model)] for model in made)
    assert first == second


def described_buffers(part: Part) -> list[tuple[str, DType, tuple[int, ...], bytes]]:
    return [(name, one.dtype, one.shape, bytes(bytes_of(one))) for name, one in tensors_of(part).items()]


TYPES = (MXFP4, NVFP4, Q4_K, Q6_K, INT8 @ Scale(1, 0), E4M3 @ Scale(128, 128), NF4 @ Scale(1, 64),
         QType(UINT4, Scale(1, 64, dtypes.bfloat16), zeros=True, permuted=True, layout="tiles"),
         QType(UINT3, Scale(1, 64, dtypes.float16), shift=4, layout="fragments"))


@pytest.mark.parametrize("device", ["CPU", "EMU"])
def test_every_type_in_a_file(device: str, tmp_path: Path):
    """In memory that the host can address, and not; more bytes than a chunk; a dense part between."""
    random, dense = np.random.default_rng(0), Tensor.empty(3, device=device)

    def filled(shape: tuple[int, ...], dtype: DType) -> Tensor:
        made = Tensor.empty(*shape, dtype=in_memory(dtype), device=device)
        write(made, 0, memoryview(random.bytes(int(made.nbytes()))))
        return made
    parts: list[Part] = [QWeight(QTensor(type, (128, 256), {
        name: filled(*one) for name, one in buffers(type, 128, 256).items()})) for type in TYPES]
    parts.append(QWeight(QTensor(INT8 @ Scale(0, 0), (1030, 1024), {
        "codes": filled((1030, 1024), dtypes.int8), "scales": filled((1, 1), dtypes.float32)}),
        Activations("int8", Scale(1, 0), static=True), 0.1, int8=True, codes=True))
    parts += [dense, *(SparseWeight(SparseTensor(dtype, (32, 128), *(
        filled(*one) for one in sparse.buffers(dtype, 32, 128).values()), scales), how, scale)
        for dtype, scales, how, scale in ((dtypes.bfloat16, None, None, None),
                                          (dtypes.fp8e4m3, filled((32, 1), dtypes.float32),
                                           Activations("e4m3", Scale(1, 0)), 2.0)))]
    with open(tmp_path / "file", "wb", buffering=0) as file:
        repack_file.write(file, "key", parts, [
            {name: bytes_of(each) for name, each in tensors_of(part).items()} for part in parts])
    described, size = repack_file.describe(tmp_path / "file", "key")
    found = [repack_file.empty(each, [dense], device) for each in described]
    tensors = [each for part in found for each in tensors_of(part).values()]
    assert size == sum(int(each.nbytes()) for each in tensors)
    sums = [total for each in described for total in each.get("sums", {}).values()]
    repack_file.read(tmp_path / "file", tensors, sums)
    for made, part in zip(found, parts, strict=True):
        if part is dense: assert made is dense
        else: assert replace(made, matrix=0) == replace(part, matrix=0)
        assert described_buffers(made) == described_buffers(part)
        if isinstance(made, QWeight): assert made.matrix.type == part.matrix.type
    with pytest.raises(ValueError, match="it is of other weights"):
        repack_file.describe(tmp_path / "file", "another")


# **** room ****

def folder(root: Path, name: str, size: int = 0, used: int = 0, layers: tuple[int, ...] = (100,)
           ) -> repack_folder.Folder:
    """A folder with a file of so many bytes, if any, that was used at a time."""
    if size:
        (root / name).mkdir(parents=True)
        (root / name / "0000.layer").write_bytes(bytes(size))
        os.utime(root / name, (used, used))
    return repack_folder.Folder(root / name, "", (), layers)


def left(root: Path) -> list[str]: return sorted(path.name for path in root.iterdir() if any(path.iterdir()))


def test_models_that_were_used_longest_ago_make_room(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(repack_folder, "GB", 1000)
    for name, used in (("b-1", 2), ("a-1", 3), ("c-1", 1), ("d-1", 4)): folder(root, name, 240, used)
    folder(root, "a-1").touch()
    assert folder(root, "e-1", layers=(20, 20, 90)).make_room([0, 1]) == ""
    assert left(root) == ["a-1", "b-1", "c-1", "d-1"]
    assert folder(root, "e-1", layers=(200, 90)).make_room([0, 1]) == ""
    assert left(root) == ["a-1", "d-1"]
    assert folder(root, "d-2", layers=(10,)).make_room([0]) == "", "d-1 is of the files before they changed"
    assert left(root) == ["a-1"]


def test_a_model_that_is_too_large_removes_none(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(repack_folder, "GB", 1000)
    folder(root, "a-1", 500)
    why = folder(root, "b-1", layers=(900, 200)).make_room([0, 1])
    assert why == "1.1 GB are more than NV_REPACK_CACHE, 1"
    assert left(root) == ["a-1"]


@pytest.mark.parametrize(("free", "why", "there"), [
    (200, "", ["a-1", "b-1"]), (199, "", ["b-1"]), (40, "", ["b-1"]), (39, "", []),
    (8, "half", ["a-1", "b-1"])])
def test_half_of_what_is_free_stays_free(free: int, why: str, there: list[str], root: Path,
                                         monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(repack_folder, "GB", 1000)
    monkeypatch.setattr(repack_folder.shutil, "disk_usage",
                        lambda path: repack_folder.shutil._ntuple_diskusage(10**4, 10**4 - free, free))
    folder(root, "a-1", 160, 1)
    folder(root, "b-1", 31, 2)
    said = folder(root, "c-1").make_room([0])
    assert (bool(said), why in said) == (bool(why), True)
    assert left(root) == there


def test_files_of_a_process_that_ended_are_removed(root: Path):
    folder(root, "a-1", 10)
    for name, age in (("old.part", 7200), ("new.part", 60)):
        (root / "a-1" / name).touch()
        os.utime(root / "a-1" / name, (then := (root / "a-1").stat().st_ctime - age, then))
    assert folder(root, "a-1").make_room([0]) == ""
    assert sorted(path.name for path in (root / "a-1").iterdir()) == ["0000.layer", "new.part"]
