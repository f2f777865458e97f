"""Rows of data sets, batches and the loader; packed rows give transformers' losses of the documents alone."""
from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tinygrad_nv.errors import DataError
from tinygrad_nv.train.data import (
    IGNORE,
    Batch,
    DataOptions,
    Loader,
    LoaderOptions,
    Row,
    SamplerState,
    Summary,
    load,
)

STORY = "Once upon a time there was a little fox. "
TEXTS = [{"text": STORY * count} for count in (1, 5, 2, 3, 1, 4)]
PAIRS = [{"prompt": "a fox", "completion": f" ran {'far ' * number}"} for number in range(7)]
PREFERENCES = [{"prompt": f"fox {number}", "chosen": " good" * (number + 1), "rejected": " bad"}
               for number in range(5)]
MODES = {"rows": {}, "bfd": {"packing": True},
         "bfd_split": {"packing": True, "packing_strategy": "bfd_split"},
         "wrapped": {"packing": True, "packing_strategy": "wrapped"}}


def loaded(path: Any, tokenizer: Any, length: int = 64, **options: Any) -> Any:
    return load([path], tokenizer, 320, DataOptions(max_length=length, **options))


def batches(data: Any, **options: Any) -> list[Batch]:
    with Loader(data, LoaderOptions(**{"rows": 2, "epochs": 1, "shuffle": False, **options})) as loader:
        return [batch for step in loader for batch in step.batches]


def segments(batch: Batch) -> list[np.ndarray]:
    return [batch.ids[row][batch.segments[row] == number] for row in range(len(batch.ids))
            for number in range(1, batch.segments[row].max() + 1)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [TEXTS, PAIRS])
def test_a_batch(write, tokenizer, rows: list[Any], mode: str):
    """Shapes, positions, segments, labels and targets, from their definitions."""
    data = loaded(write("a.jsonl", rows), tokenizer, **MODES[mode])
    for batch in batches(data):
        for each in (batch.ids, batch.labels, batch.positions, batch.segments, batch.targets):
            assert (each.shape, each.dtype) == ((2, data.width), np.int32)
        for row in range(2):
            ids, labels, positions, numbers = (
                each[row] for each in (batch.ids, batch.labels, batch.positions, batch.segments))
            padding = numbers == 0
            assert (np.diff(padding.astype(int)) >= 0).all()    # at the end
            assert (labels[padding] == IGNORE).all()
            starts = np.flatnonzero(np.diff(numbers, prepend=0) * (numbers > 0))
            assert (positions[starts] == 0).all()
            assert (labels[starts] == IGNORE).all()
            inside = (numbers[1:] == numbers[:-1]) & (numbers[1:] > 0)
            assert (np.diff(positions)[inside] == 1).all()
            assert ((labels == ids) | (labels == IGNORE)).all()
            targets = batch.targets[row]
            has = np.flatnonzero(targets != IGNORE)
            assert (targets[has] == ids[has + 1]).all()
            assert (numbers[has] == numbers[has + 1]).all()     # none of another document
            assert has.tolist() == (np.flatnonzero(labels != IGNORE) - 1).tolist()
    assert sum(batch.loss_tokens for batch in batches(data)) == data.summary.loss_tokens
    assert sum(batch.tokens for batch in batches(data)) == data.summary.row_tokens


@pytest.mark.parametrize("mode", MODES)
def test_lengths_of_segments_in_a_batch(write, tokenizer, mode: str):
    data = loaded(write("a.jsonl", TEXTS), tokenizer, **MODES[mode])
    for batch in batches(data, rows=3):
        ends = batch.cu_seqlens()
        assert (ends[0], ends[-1], ends.dtype) == (0, batch.ids.size, np.int32)
        flat = [batch.ids.ravel()[begin:end].tolist() for begin, end in itertools.pairwise(ends)
                if batch.segments.ravel()[begin]]
        assert flat == [segment.tolist() for segment in segments(batch)]
        longer = batch.cu_seqlens(20)
        assert longer.tolist() == [*ends.tolist(), *[batch.ids.size] * (20 - len(ends))]


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                      vocab_size=320, num_attention_heads=4, num_key_value_heads=2,
                                      initializer_range=0.2)
    config._attn_implementation = "sdpa"      # takes a mask of booleans as it is
    return transformers.LlamaForCausalLM(config).double().eval()


@pytest.mark.parametrize("mode", MODES)
def test_packed_rows_have_the_losses_of_documents_alone(write, tokenizer, mode: str):
    """Attention within `segments`, `positions` for the rotation: transformers' Llama gives each document's
    tokens the losses that it gives them without neighbours. In float64 the order of sums changes less than
    1e-12."""
    data, model, packed, alone = loaded(write("a.jsonl", TEXTS), tokenizer, **MODES[mode]), llama(), [], []
    for batch in batches(data):
        numbers = torch.tensor(batch.segments)
        causal = torch.ones(data.width, data.width, dtype=torch.bool).tril()
        mask = (numbers[:, None, :, None] == numbers[:, None, None, :]) & causal
        with torch.no_grad():
            logits = model(torch.tensor(batch.ids), attention_mask=mask,
                           position_ids=torch.tensor(batch.positions)).logits
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), torch.tensor(batch.targets).long().flatten(), reduction="none")
        packed += loss[loss != 0].tolist()
        for ids in (torch.tensor(each)[None].long() for each in segments(batch)):
            with torch.no_grad(): logits = model(ids).logits
            alone += torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none").tolist()
    assert len(packed) == len(alone) == data.summary.loss_tokens
    assert np.abs(np.array(packed) - np.array(alone)).max() < 1e-12


def test_a_batch_that_is_not_packed_has_the_loss_of_transformers(write, tokenizer):
    """Labels are what transformers' models take."""
    data, model = loaded(write("a.jsonl", PAIRS), tokenizer), llama()
    for batch in batches(data):
        with torch.no_grad():
            out = model(torch.tensor(batch.ids), labels=torch.tensor(batch.labels).long())
            ours = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1).float(),
                                                     torch.tensor(batch.targets).long().flatten())
        assert abs(out.loss - ours) < 1e-6 * out.loss


def test_documents_that_are_truncated_split_or_left_out(write, tokenizer):
    path, size = write("a.jsonl", TEXTS), len(tokenizer.encode(STORY)) - 1
    whole = [tokenizer.encode(each["text"] + "<|eos|>") for each in TEXTS]
    cut = loaded(path, tokenizer, 2 * size)
    assert [cut.rows(index)[0].ids.tolist() for index in range(6)] == [ids[:2 * size] for ids in whole]
    assert cut.summary.dropped_tokens == sum(max(0, len(ids) - 2 * size) for ids in whole) > 0
    split = loaded(path, tokenizer, 2 * size, overflow="split")
    assert [token for index in range(len(split)) for token in split.rows(index)[0].ids.tolist()] == [
        token for ids in whole for token in ids]
    assert split.summary.dropped_tokens == 0
    long = write("b.jsonl", [{"prompt": STORY * 9, "completion": "x"}, *PAIRS])
    kept = loaded(long, tokenizer)
    assert (len(kept), kept.summary.dropped_documents) == (7, 1)
    assert "1 documents without loss dropped" in str(kept.summary)


def test_a_text_file_is_split_and_a_record_truncated(write, tokenizer, tmp_path):
    write("x.jsonl", [])
    (tmp_path / "a.txt").write_text(STORY * 10)
    ids = tokenizer.encode(STORY * 10 + "<|eos|>")
    data = loaded(tmp_path / "a.txt", tokenizer)
    assert [token for index in range(len(data)) for token in data.rows(index)[0].ids.tolist()] == ids
    assert len(data) == -(-len(ids) // 64) > 1
    cut = loaded(tmp_path / "a.txt", tokenizer, overflow="truncate")
    assert (len(cut), cut.summary.dropped_tokens) == (1, len(ids) - 64)
    assert len(loaded(write("a.jsonl", [{"text": STORY * 10}]), tokenizer)) == 1


def test_preferences_are_two_halves_of_a_batch(write, tokenizer):
    data = loaded(write("a.jsonl", PREFERENCES), tokenizer)
    assert (len(data), data.rows_per_index) == (5, 2)
    made = batches(data, rows=2)
    assert [batch.ids.shape for batch in made] == [(4, data.width)] * 3
    for number, batch in enumerate(made):
        for which in range(2):
            if (index := 2 * number + which) == 5: continue     # padding, in both halves
            for half, name in enumerate(("chosen", "rejected")):
                row, each = 2 * half + which, PREFERENCES[index]
                expected = tokenizer.encode(each["prompt"] + each[name] + "<|eos|>")
                assert batch.ids[row][batch.segments[row] > 0].tolist() == expected
                before = len(tokenizer.encode(each["prompt"]))
                assert batch.labels[row][batch.labels[row] != IGNORE].tolist() == expected[before:]
    assert [int(row.max()) for row in made[2].segments] == [1, 0, 1, 0]


def test_a_pair_whose_prompt_leaves_no_room_is_left_out(write, tokenizer):
    long = {"prompt": STORY * 9, "chosen": " a", "rejected": " b"}
    data = loaded(write("a.jsonl", [PREFERENCES[0], long, PREFERENCES[1]]), tokenizer)
    assert (len(data), data.summary.dropped_documents) == (2, 2)


def test_all_batches_of_a_data_set_have_one_shape(write, tokenizer):
    data = loaded(write("a.jsonl", TEXTS), tokenizer, 4096)
    longest = len(tokenizer.encode(TEXTS[1]["text"])) + 1
    assert data.width == -(-longest // 64) * 64 < 4096
    assert {batch.ids.shape for batch in batches(data, rows=4, pad=2)} == {(4, data.width)}
    last = batches(data, rows=4, pad=2)[-1]
    assert [int(row.max()) for row in last.segments] == [1, 1, 0, 0]
    assert (last.ids[2:] == 2).all()
    assert (last.labels[2:] == IGNORE).all()


# **** the loader ****

class Numbers:
    """Row i is the ids i, i; `fail` raises, and `seen` has what was asked for, in order."""
    width, rows_per_index = 2, 1
    summary = Summary(0, 0, 0, 0, 0, 0, 0)

    def __init__(self, count: int, fail: int = -1) -> None:
        self.count, self.fail, self.seen = count, fail, list[int]()

    def __len__(self) -> int: return self.count

    def rows(self, index: int) -> tuple[Row, ...]:
        self.seen.append(index)
        if index == self.fail: raise DataError("row 5 is damaged")
        ids = np.array([index, index], np.int32)
        return (Row(ids, ids, (2,)),)


def numbers(loader: Loader, count: int) -> list[list[list[int]]]:
    return [[batch.ids[batch.segments[:, 0] > 0, 0].tolist() for batch in next(loader).batches]
            for _ in range(count)]


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_resumed_after_any_step(prefetch: int):
    options = LoaderOptions(rows=2, accumulation=2, seed=3, prefetch=prefetch)
    with Loader(Numbers(11), options) as loader:
        whole, states = [], [loader.state]
        for _ in range(9):
            whole += numbers(loader, 1)
            states.append(loader.state)
    for at, state in enumerate(states[:-1]):
        with Loader(Numbers(11), options, SamplerState.from_json(state.to_json())) as resumed:
            assert numbers(resumed, 9 - at) == whole[at:]


@pytest.mark.parametrize(("world", "accumulation"), [(1, 6), (2, 3), (3, 2), (6, 1)])
def test_ranks_have_one_order_between_them(world: int, accumulation: int):
    """Of a step the micro-batches of all ranks are, dealt out in turn, those of one rank."""
    with Loader(Numbers(50), LoaderOptions(rows=2, accumulation=6)) as loader: expected = numbers(loader, 6)
    loaders = [Loader(Numbers(50), LoaderOptions(rows=2, accumulation=accumulation, rank=rank, world=world))
               for rank in range(world)]
    found = [numbers(each, 6) for each in loaders]
    for each in loaders: each.close()
    for step in range(6):
        dealt = [found[rank][step][micro] for micro in range(accumulation) for rank in range(world)]
        assert dealt == expected[step]


def test_an_epoch_has_every_row_once():
    with Loader(Numbers(11), LoaderOptions(rows=2, accumulation=2, epochs=2)) as loader:
        assert loader.steps_per_epoch == 3
        steps = list(loader)
    assert [round(step.epoch, 3) for step in steps] == [0.364, 0.727, 1, 1.364, 1.727, 2]
    for epoch in range(2):
        found = [step.batches for step in steps[3 * epoch:3 * epoch + 3]]
        ids = [batch.ids[batch.segments[:, 0] > 0, 0].tolist() for step in found for batch in step]
        assert sorted(index for each in ids for index in each) == list(range(11))
    assert all(batch.ids.shape == (2, 2) for step in steps for batch in step.batches)


def test_read_ahead_no_further_than_asked():
    data = Numbers(100)
    with Loader(data, LoaderOptions(rows=1, prefetch=2, shuffle=False)) as loader:
        next(loader)
        most = 1 + 2 + 1    # given out, ready, and the one that waits for room
        for _ in range(50):
            threading.Event().wait(0.002)
            assert len(data.seen) <= most
        assert data.seen[:3] == [0, 1, 2]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_is_raised_at_its_step(prefetch: int):
    with Loader(Numbers(9, fail=5), LoaderOptions(rows=1, shuffle=False, prefetch=prefetch)) as loader:
        assert numbers(loader, 5) == [[[number]] for number in range(5)]
        with pytest.raises(DataError, match="row 5 is damaged"): next(loader)
        assert list(loader) == []
        assert loader.state.offset == 5


def test_a_closed_loader_has_no_thread():
    before = threading.active_count()
    loader = Loader(Numbers(9), LoaderOptions(rows=1))
    next(loader)
    assert threading.active_count() == before + 1
    loader.close()
    assert threading.active_count() == before
    assert list(loader) == []
    loader.close()
