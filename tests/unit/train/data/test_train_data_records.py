"""Records of files: kinds, texts, prompts that pairs share, files of paths. Token shards: windows in file
order, dtypes of .bin, segments at EOS, nothing read before its turn. The order of rows: a permutation,
uniform, resumable at any batch, the same for any number of ranks."""
from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinygrad_nv.train.data import IGNORE, DataOptions, Loader, LoaderOptions, load
from tinygrad_nv.train.data.files import find
from tinygrad_nv.train.data.records import record, records
from tinygrad_nv.train.data.sampler import Sampler, SamplerState, permute, share
from tinygrad_nv.train.data.shards import HEADER

USER, ONE, TWO = ({"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "a"),
                                                                      ("assistant", "b")))


@pytest.mark.parametrize(("row", "kind", "chat"), [
    ({"text": "a", "more": 1}, "text", False), ({"messages": [USER, ONE]}, "messages", True),
    ({"prompt": "a", "completion": "b"}, "prompt-completion", False),
    ({"prompt": [USER], "completion": [ONE]}, "prompt-completion", True),
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preference", False),
    ({"prompt": [USER], "chosen": [ONE], "rejected": [TWO]}, "preference", True),
    ({"messages": [USER], "prompt": "a", "completion": "b", "text": "c"}, "prompt-completion", False)])
def test_what_a_record_is(row: dict[str, Any], kind: str, chat: bool):
    made = record(row, "here")
    assert (made.kind, made.is_chat) == (kind, chat)


@pytest.mark.parametrize(("chosen", "rejected", "prompt"), [
    ("The sky is blue.", "The sky is green.", "The sky is"), ("ab", "ac", "a"), ("x", "y", ""),
    ("The sky", "The sky is", "The sky"), ([USER, ONE], [USER, TWO], [USER])])
def test_the_prompt_that_a_pair_shares(chosen: Any, rejected: Any, prompt: Any):
    fields = record({"chosen": chosen, "rejected": rejected}, "here").fields
    assert fields["prompt"] == prompt
    assert (prompt + fields["chosen"], prompt + fields["rejected"]) == (chosen, rejected)


@pytest.mark.parametrize(("sample_by", "texts"), [
    ("document", ["one\ntwo\n\nthree\n"]), ("paragraph", ["one\ntwo", "three"]),
    ("line", ["one", "two", "three"])])
def test_documents_of_a_text_file(tmp_path: Path, sample_by: Any, texts: list[str]):
    (tmp_path / "a.txt").write_text("one\ntwo\n\nthree\n")
    found = list(records([tmp_path / "a.txt"], sample_by))
    assert [each.fields["text"] for each in found] == texts
    lines = {"document": [""], "paragraph": [", line 1", ", line 4"],
             "line": [", line 1", ", line 2", ", line 4"]}
    assert [each.place.removeprefix(str(tmp_path / "a.txt")) for each in found] == lines[sample_by]


def test_empty_lines_and_a_byte_order_mark_are_no_records(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\n\n  \r\n{"text": "b"}')
    found, read = list(records([tmp_path / "a.jsonl"])), []
    assert [(each.fields["text"], each.place[-6:]) for each in found] == [("a", "line 1"), ("b", "line 4")]
    list(records([tmp_path / "a.jsonl"], read=read.append))
    assert sum(read) == (tmp_path / "a.jsonl").stat().st_size


@pytest.mark.parametrize("rows", [
    [{"text": "a"}, {"text": "é😀"}], [{"messages": [USER, ONE], "tools": [{"type": "function"}]},
                                       {"messages": [{**USER, "name": "x"}, TWO]}]])
def test_parquet_has_the_records_of_json_lines(tmp_path: Path, rows: list[dict[str, Any]]):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = rows * 1500
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    read: list[int] = []
    assert [each.fields for each in records([tmp_path / "a.parquet"], read=read.append)] == rows
    size = (tmp_path / "a.parquet").stat().st_size
    assert size - 3 <= sum(read) <= size


def test_files_of_paths(tmp_path: Path):
    for name in ("b.txt", "a.jsonl", "in/c.txt", "in/d.md", ".hidden/e.txt", "in/.f.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    def names(*paths: str) -> list[str]:
        return [str(file.relative_to(tmp_path)) for file in find([tmp_path / path for path in paths])]
    assert names(".") == ["a.jsonl", "b.txt", "in/c.txt"]
    assert names("*.txt", ".") == ["b.txt", "a.jsonl", "in/c.txt"]
    assert names("**/*.txt") == ["b.txt", "in/c.txt"]
    assert names("in/c.txt", "a.jsonl") == ["in/c.txt", "a.jsonl"]
    (tmp_path / "odd[1].txt").write_text("a")
    assert names("odd[1].txt") == ["odd[1].txt"]


def test_a_long_file_is_read_line_by_line(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": str(number)}) + "\n" for number in range(9)) + "not JSON\n")
    found = records([path])
    assert [next(found).fields["text"] for _ in range(9)] == list("012345678")


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


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 16, 17, 255, 1000, 4096, 4097])
def test_every_index_once(count: int):
    orders = [permute(np.arange(count), count, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    for order in orders: assert sorted(order.tolist()) == list(range(count))
    if count > 200:
        for one, other in itertools.combinations(orders, 2): assert (one == other).mean() < 0.1


def test_an_index_of_a_large_permutation_is_found_at_once():
    some = np.array([0, 1, 10**12 - 1])
    found = permute(some, 10**12, 7, 3)
    assert len(set(found.tolist())) == 3
    assert ((found >= 0) & (found < 10**12)).all()
    assert [permute(each[None], 10**12, 7, 3)[0] for each in some] == found.tolist()


def mixed(value: int) -> int:
    """SplitMix64's finalizer, of one of Python's integers."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % 2**64
    return value ^ (value >> 31)


def place(position: int, count: int, seed: int, epoch: int) -> int:
    """The permutation as its docstring says, in Python's integers: what checkpoints of any version and system
    go on with."""
    golden = 0x9E3779B97F4A7C15
    half = max(2, ((count - 1).bit_length() + 1) // 2)
    begin = mixed((mixed(seed % 2**64) + epoch * golden) % 2**64)
    keys = [mixed((begin + number * golden) % 2**64) for number in range(1, 17)]
    while True:
        left, right = position >> half, position % 2**half
        for key in keys: left, right = right, left ^ mixed((right + key) % 2**64) % 2**half
        position = (left << half) + right
        if position < count: return position


@pytest.mark.parametrize(("count", "seed", "epoch"), [
    (10, 42, 0), (10**9, 42, 5), (2**40 + 1, 2**64 - 1, 2**33)])
def test_the_bits_are_those_of_integers(count: int, seed: int, epoch: int):
    positions = [0, 1, 2, 7, count - 1]
    assert permute(np.array(positions), count, seed, epoch).tolist() == [
        place(position, count, seed, epoch) for position in positions]


def test_permutations_of_four_are_about_equally_frequent():
    """Chi-square of 24 permutations over 1200 epochs: 23 degrees of freedom, 99.99 % below 56."""
    seen = Counter(tuple(permute(np.arange(4), 4, 5, epoch).tolist()) for epoch in range(1200))
    assert len(seen) == 24
    assert sum((count - 50) ** 2 / 50 for count in seen.values()) < 56


def test_places_are_about_equally_frequent():
    """Of 12 indices at 12 places over 600 epochs: 121 degrees of freedom, 99.99 % below 187."""
    table = np.zeros((12, 12))
    for epoch in range(600): table[np.arange(12), permute(np.arange(12), 12, 1, epoch)] += 1
    assert ((table - 50) ** 2 / 50).sum() < 187


def batches(sampler: Sampler, count: int, state: SamplerState | None = None
            ) -> list[tuple[list[int], SamplerState]]:
    state, out = state or sampler.start, []
    for _ in range(count):
        indices, state = sampler.next(state)
        out.append((indices.tolist(), state))
    return out


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_epochs(shuffle: bool, drop_last: bool):
    sampler = Sampler(10, 4, 3, shuffle, drop_last)
    count = sampler.batches
    assert count == (2 if drop_last else 3)
    found = batches(sampler, 3 * count)
    for epoch in range(3):
        rows = [index for indices, _ in found[epoch * count:(epoch + 1) * count] for index in indices]
        assert len(rows) == len(set(rows)) == (8 if drop_last else 10)
        assert found[epoch * count + count - 1][1] == SamplerState(epoch + 1, 0, 3, 10)
        if not shuffle: assert rows == list(range(len(rows)))
    assert (found[0][0] == found[count][0]) is not shuffle


@pytest.mark.parametrize("drop_last", [False, True])
def test_resumed_at_any_batch(drop_last: bool):
    sampler = Sampler(23, 4, 9, drop_last=drop_last)
    whole = batches(sampler, 15)
    for at, (_, state) in enumerate(whole):
        resumed = SamplerState.from_json(json.loads(json.dumps(state.to_json())))
        sampler.require(resumed)
        assert batches(sampler, 15 - at - 1, resumed) == whole[at + 1:]


def test_a_global_batch_is_the_same_for_any_number_of_ranks():
    """24 indices: as 1 rank × 6 micro-batches × 4, 2 × 3 × 4, 6 × 1 × 4, … the same, in the same order of
    micro-batches."""
    indices = np.random.default_rng(0).permutation(24)
    for world, accumulation in ((1, 6), (2, 3), (3, 2), (6, 1)):
        shares = [share(indices, rank, world, accumulation, 4) for rank in range(world)]
        dealt = [shares[rank][micro].tolist() for micro in range(accumulation) for rank in range(world)]
        assert [index for each in dealt for index in each] == indices.tolist()


def test_the_last_batch_of_an_epoch_is_dealt_as_far_as_it_goes():
    shares = [share(np.arange(9), rank, 2, 2, 4) for rank in range(2)]
    assert [[each.tolist() for each in one] for one in shares] == [[[0, 1, 2, 3], [8]], [[4, 5, 6, 7], []]]
