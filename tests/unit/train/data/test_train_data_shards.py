"""Token shards: windows in file order, dtypes of .bin, segments at EOS, nothing read before its turn."""
from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tinygrad_nv.train.data import IGNORE, DataOptions, Loader, LoaderOptions, load
from tinygrad_nv.train.data.shards import HEADER


def options(length: int, **more) -> DataOptions: return DataOptions(max_length=length, **more)


@pytest.mark.parametrize("name", ["a.npy", "a.bin"])
@pytest.mark.parametrize(("vocab", "dtype"), [(65536, np.uint16), (65537, np.uint32)])
def test_windows_are_tokens_in_file_order(tmp_path: Path, name: str, vocab: int, dtype: type):
    ids = np.random.default_rng(0).integers(0, vocab, 103).astype(dtype)
    if name == "a.npy": np.save(tmp_path / name, ids)
    else: ids.tofile(tmp_path / name)
    data = load([tmp_path / name], None, vocab, options(10))
    assert (len(data), data.width, data.summary.tokens, data.summary.dropped_tokens) == (10, 10, 103, 3)
    for window in range(10):
        (row,) = data.rows(window)
        expected = ids[10 * window:10 * window + 10]
        assert row.ids.tolist() == expected.tolist()
        assert row.labels.tolist() == [IGNORE, *expected[1:].tolist()]
        assert row.lengths == (10,)


def test_windows_of_several_files(tmp_path: Path):
    for name, begin, count in (("a", 0, 25), ("b", 100, 5), ("c", 200, 10), ("d", 300, 31)):
        np.save(tmp_path / f"{name}.npy", np.arange(begin, begin + count, dtype=np.uint32))
    data = load([tmp_path], None, 400, options(10))
    assert [int(data.rows(index)[0].ids[0]) for index in range(len(data))] == [0, 10, 200, 300, 310, 320]
    assert (data.summary.documents, data.summary.dropped_tokens) == (4, 11)


@pytest.mark.parametrize("kind", ["uint16", "uint32"])
def test_the_dtype_of_a_bin_file_can_be_said(tmp_path: Path, kind: str):
    np.arange(20, dtype=kind).tofile(tmp_path / "a.bin")
    data = load([tmp_path / "a.bin"], None, 100, options(5, shard_dtype=kind))
    assert [int(data.rows(index)[0].ids[0]) for index in range(len(data))] == [0, 5, 10, 15]


@pytest.mark.parametrize(("magic", "kind"), [(20240520, "<u2"), (20240801, "<u4")])
def test_the_header_of_llm_c(tmp_path: Path, magic: int, kind: str):
    head = np.zeros(HEADER // 4, "<i4")
    head[:3] = magic, 1, 12
    (tmp_path / "a.bin").write_bytes(head.tobytes() + np.arange(12).astype(kind).tobytes())
    data = load([tmp_path / "a.bin"], None, 50, options(6))
    assert np.concatenate([data.rows(index)[0].ids for index in range(2)]).tolist() == list(range(12))


def test_segments_end_after_the_eos_token(tmp_path: Path, tokenizer):
    ids = np.array([0, 7, 8, 1, 0, 9, 1, 0, 6, 6, 6, 1, 1, 5, 5, 5], np.uint16)
    np.save(tmp_path / "a.npy", ids)
    data = load([tmp_path / "a.npy"], tokenizer, 320, options(8, packing=True))
    rows = [data.rows(index)[0] for index in range(2)]
    assert [row.lengths for row in rows] == [(4, 3, 1), (4, 1, 3)]
    assert rows[0].labels.tolist() == [IGNORE, 7, 8, 1, IGNORE, 9, 1, IGNORE]
    assert rows[1].labels.tolist() == [IGNORE, 6, 6, 1, IGNORE, IGNORE, 5, 5]


def test_a_file_far_larger_than_memory_is_mapped(tmp_path: Path):
    """A sparse file of 256 GiB: opening it and reading windows at its end takes no time."""
    path = tmp_path / "a.bin"
    with path.open("wb") as file:
        file.truncate(1 << 38)
        file.seek(-200, os.SEEK_END)
        file.write(np.arange(100, dtype="<u2").tobytes())
    data = load([path], None, 65536, options(50))
    assert len(data) == (1 << 37) // 50
    spare = (1 << 37) % 50
    assert data.rows(len(data) - 1)[0].ids.tolist() == list(range(50 - spare, 100 - spare))
    with Loader(data, LoaderOptions(rows=4)) as loader: assert next(loader).batches[0].ids.shape == (4, 50)


def test_no_shuffle_takes_windows_in_file_order(tmp_path: Path):
    np.save(tmp_path / "a.npy", np.arange(120, dtype=np.uint16))
    data = load([tmp_path / "a.npy"], None, 200, options(10))
    with Loader(data, LoaderOptions(rows=2, accumulation=3, shuffle=False, epochs=1)) as loader:
        found = [batch.ids for step in loader for batch in step.batches]
    assert np.concatenate(found).ravel().tolist() == list(range(120))
