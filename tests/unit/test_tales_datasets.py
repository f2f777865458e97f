"""Data of the examples of training: the same files each time, rows that begin with a story."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tinygrad_nv.models.tales import datasets
from tinygrad_nv.models.tales.stories import corpus


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "RECORDS", 6)
    monkeypatch.setattr(datasets, "HELD_OUT", 3)
    one, other = (tmp_path / name for name in ("one", "other"))
    for folder in (one, other):
        monkeypatch.setattr("sys.argv", ["datasets", str(folder), "--rows", "5", "--length", "64"])
        datasets.main()
    files = sorted(path.name for path in one.iterdir())
    assert files == ["excited.jsonl", "held-out.npy", "preferences.jsonl", "train.npy"]
    for name in files: assert (one / name).read_bytes() == (other / name).read_bytes()
    train, held_out = (np.load(one / f"{name}.npy").reshape(-1, 64) for name in ("train", "held-out"))
    assert (len(train), len(held_out)) == (5, 3)
    assert len(set(map(bytes, (*train, *held_out)))) == 8


def test_records() -> None:
    story = 'Ben was a kind boy. He saw an old dog. "Come!" he said.'
    assert datasets.excitedly(story) == \
        'Ben was a very, very kind boy! He saw a very, very old dog! "Come!" he shouted!'
    told = next(corpus("train", 1))
    assert next(datasets.make_excited())["text"] == datasets.excitedly(told)
    first = next(datasets.preferences())
    assert first["prompt"] + first["chosen"] == told
    assert first["rejected"] != first["chosen"]
