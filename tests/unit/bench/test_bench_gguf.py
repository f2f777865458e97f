"""bench/cpu/gguf_decode.py and what makes its files, without llama.cpp."""
from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from bench.cpu import gguf_decode as cpu_gguf
from bench.cpu.decode import BOX
from bench.cpu.gguf_writer import write
from tinygrad_nv.models.gguf import elements, list_tensors
from tinygrad_nv.quant.gguf.file import open_file


def test_a_written_file_has_the_model(tmp_path: Path):
    """Rows of q and k are in Hugging Face's order again when they are read."""
    path = tmp_path / "box-f16.gguf"
    write(BOX, path, "float16")
    assert cpu_gguf.types_of(path) == {"F16": 29}
    weights, file = load_file(BOX / "model.safetensors"), open_file(path)
    found = {each.name: elements(file, each, 0, weights[each.name].size) for each in list_tensors(file)}
    assert found.keys() == weights.keys() - {"lm_head.weight"}
    for name, values in found.items():
        wanted = weights[name].astype(np.float32 if weights[name].ndim == 1 else np.float16)
        assert np.array_equal(values.reshape(wanted.shape), wanted), name


def test_rates():
    prompt = cpu_gguf.prompt_of("pp", 512)
    assert len(prompt) == 512
    assert cpu_gguf.rate("pp", prompt, 1, 0.5, 0.5) == 1024
    assert cpu_gguf.rate("tg", cpu_gguf.prompt_of("tg", 512), 129, 0.5, 1.5) == 128


class FakeWorker:
    """A worker whose repetitions have these rates, in turn."""
    rates: dict[str, Iterator[float]]
    asked: list[tuple[str, str]]

    def __init__(self, engine: str, path: Path, arguments: Namespace) -> None: self.engine = engine

    def once(self, mode: str) -> float:
        self.asked.append((self.engine, mode))
        return next(self.rates[self.engine])

    def ticks(self) -> int: return 0

    def end(self) -> None: self.asked.append((self.engine, "end"))


def test_pairs_in_turn_of_which_the_quiet_ones_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    path = tmp_path / "some.gguf"
    write(BOX, path, "float16")
    monkeypatch.setattr(cpu_gguf, "Worker", FakeWorker)
    monkeypatch.setattr(cpu_gguf, "MODES", ("tg",))
    FakeWorker.asked = []
    FakeWorker.rates = {"tinygrad_nv": iter([1.0, 30.0, 50.0]), "llama.cpp": iter([9.0, 10.0, 10.0])}
    # ticks before and after each repetition: others take all of the first pair, and nothing later
    busy = iter([0, 10, 10, 20, *[20] * 8])
    whole = iter(range(0, 1000, 10))
    monkeypatch.setattr(cpu_gguf, "machine_ticks", lambda: (next(whole), next(busy)))
    found = cpu_gguf.compare(path, Namespace(repeat=2, cpu_time=False))
    assert found["runs"]["tg"] == {"tinygrad_nv": [30.0, 50.0], "llama.cpp": [10.0, 10.0]}
    assert found["ratio"] == {"tg": {"llama.cpp": 4.0}}
    assert (found["others"], found["types"]) == ({"tg": 0.0}, {"F16": 29})
    assert FakeWorker.asked == [("tinygrad_nv", "tg"), ("llama.cpp", "tg")] * 3 + [("tinygrad_nv", "end"),
                                                                               ("llama.cpp", "end")]


def test_an_answer_of_one_token_is_no_rate():
    """A model that stops early, as trained ones do, was a division by zero."""
    with pytest.raises(ValueError, match="an answer of 1 tokens, expected at least 2"):
        cpu_gguf.rate("tg", [0], 1, 0.5, 0.5)
    assert cpu_gguf.rate("pp", [0, 1], 1, 0.5, 0.5) == 4


@pytest.mark.parametrize(("script", "words"), [
    ("import sys; sys.stderr.write('no such type\\n'); sys.exit(3)", "code 3, and wrote:\n  no such type"),
    ("import os; os.kill(os.getpid(), 11)", "by SIGSEGV, and wrote nothing")])
def test_a_process_that_ends_early_is_named(script: str, words: str, tmp_path: Path,
                                            monkeypatch: pytest.MonkeyPatch):
    """Which one, how it ended, and what it wrote last."""
    monkeypatch.setattr(cpu_gguf, "__file__", str(program := tmp_path / "program.py"))
    program.write_text(script)
    arguments = Namespace(peer=sys.executable, dtype="auto", tokens=2, prompt=2, cpu_time=False)
    with pytest.raises(SystemExit) as ended: cpu_gguf.Worker("llama.cpp", Path("x.gguf"), arguments)
    assert str(ended.value).startswith("x.gguf: the process of llama.cpp ended ")
    assert words in str(ended.value)
