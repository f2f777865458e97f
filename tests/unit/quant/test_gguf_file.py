"""Headers of GGUF files: metadata and tensors as gguf's writer put them there."""
from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from tinygrad_nv.quant.gguf import blocks
from tinygrad_nv.quant.gguf.file import open_gguf

VALUES = {"general.name": "ä name", "a.u8": 255, "a.i8": -1, "a.u16": 65535, "a.i16": -2, "a.u32": 1 << 31,
          "a.i32": -3, "a.u64": 1 << 63, "a.i64": -4, "a.f32": 0.5, "a.f64": 0.1, "a.bool": True,
          "a.strings": ["", "▁the", "日本"], "a.integers": [1, -2, 3], "a.floats": [0.5, -1.5],
          "a.flags": [True, False]}


def write(path: Path, tensors: dict[str, tuple[np.ndarray, Kind]], alignment: int | None = None) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    for key in VALUES:
        kind, value = key[2:], VALUES[key]
        if isinstance(value, list): writer.add_array(key, value)
        else:
            names = {"u": "uint", "i": "int", "f": "float"}
            name = names[kind[0]] + kind[1:] if kind[0] in names and kind[1:].isdigit() else kind
            getattr(writer, f"add_{name}" if key.startswith("a.") else "add_string")(key, value)
    if alignment is not None: writer.add_custom_alignment(alignment)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=None if data.dtype != np.uint8 else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("alignment", [None, 8, 256])
def test_metadata_and_tensors(tmp_path: Path, alignment: int | None):
    rng, path = np.random.default_rng(0), tmp_path / "x.gguf"
    given = {"norm": (rng.standard_normal(7).astype(np.float32), Kind.F32),
             "half": (rng.standard_normal((3, 5)).astype(np.float16), Kind.F16),
             "quarter": (rng.integers(0, 256, (3, 2 * 18), dtype=np.uint8), Kind.Q4_0),
             "experts": (rng.integers(0, 256, (2, 3, 144), dtype=np.uint8), Kind.Q4_K)}
    write(path, given, alignment)
    file = open_gguf(path)
    assert {key: file.metadata[key] for key in VALUES} == VALUES
    assert file.metadata["general.architecture"] == "llama"
    shapes = {"norm": (7,), "half": (3, 5), "quarter": (3, 64), "experts": (2, 3, 256)}
    for name, (data, kind) in given.items():
        tensor, raw = file.tensors[name], file.raw(name)
        assert (tensor.format.name, tensor.shape) == (kind.name, shapes[name])
        assert tensor.offset % (alignment or 32) == 0
        assert raw.tobytes() == data.tobytes()
    assert np.array_equal(blocks.floats(file.tensors["half"].format, file.raw("half")), given["half"][0])
    assert file.raw("experts").shape == (6, 144)


def test_version_2_and_arrays_of_arrays(tmp_path: Path):
    def string(text: str) -> bytes: return struct.pack("<Q", len(text)) + text.encode()
    integers, strings = struct.pack("<IQBB", 0, 2, 1, 2), struct.pack("<IQ", 8, 1) + string("x")
    array = struct.pack("<IIQ", 9, 9, 2) + integers + strings
    data = b"GGUF" + struct.pack("<IQQ", 2, 0, 1) + string("nested") + array
    (tmp_path / "x.gguf").write_bytes(data)
    file = open_gguf(tmp_path / "x.gguf")
    assert file.metadata == {"nested": [[1, 2], ["x"]]}
    assert not file.tensors
