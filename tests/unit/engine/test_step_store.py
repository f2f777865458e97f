"""Captured steps on disk: a second runner traces none and answers the same; what has changed is captured."""
from __future__ import annotations

import json
import lzma
import pickle
import shutil
from pathlib import Path

import pytest
from tinygrad import helpers
from tinygrad.engine.realize import compile_linear, run_linear
from tinygrad.uop.ops import Ops, UOp, buffers

from tests.support.engine.runner_case import LENGTH, PAGES, SIZE, Driver, network
from tinygrad_nv import Tensor, private
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.worker import step_file
from tinygrad_nv.engine.worker.model_runner import ModelRunner
from tinygrad_nv.engine.worker.step_store import StepStore
from tinygrad_nv.private import KEY, write_sealed
from tinygrad_nv.runtime.note import note_of
from tinygrad_nv.runtime.programs import Compilations
from tinygrad_nv.runtime.renderers import renderer_of
from tinygrad_nv.tile.gemm.spec import GemmSpec

SIZE_OF_JSON = step_file.LENGTH
# a prompt in a chunk, a decode, and a sampler with every filter
DRAWN = SamplingParams(temperature=1.0, top_k=9, top_p=0.9, min_p=0.01, repetition_penalty=1.2,
                       logit_bias={3: 1.0})


@pytest.fixture(scope="module")
def model():
    return network()


def answers(model, identity: str = "weights", max_seqs: int = 2) -> tuple[list[list[int]], int]:
    """Tokens of two sequences, one of them with every filter, and how many steps were traced for them."""
    counted = Compilations()
    runner = ModelRunner(model, pages=PAGES, page_size=SIZE, max_seqs=max_seqs, max_len=LENGTH,
                         identity=identity)
    try:
        driver = Driver(runner)
        for prompt in (9, 3): driver.add(prompt)
        runner.start_slot(1, DRAWN, 5, driver.sequences[1].tokens)
        driver.drive(3)
        return [each.tokens for each in driver.sequences], Compilations().steps - counted.steps
    finally: runner.close()


@pytest.fixture(scope="module")
def kept(model, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[int]], int, Path]:
    """The answers of a first runner, how many steps it traced, and its file."""
    place = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NV_CACHE_DIR", str(place))
        expected, traced = answers(model)
    [file] = (place / "steps").iterdir()
    return expected, traced, file


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, kept, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory with that file, and the key that its seal is made with."""
    monkeypatch.setenv("NV_CACHE_DIR", str(tmp_path))
    shutil.copytree(kept[2].parent.parent, tmp_path, dirs_exist_ok=True)
    return tmp_path / "steps"


def test_a_second_runner_traces_nothing_and_answers_the_same(model, kept):
    assert kept[1] > 2
    assert answers(model) == (kept[0], 0)


def test_steps_of_other_weights_are_traced(model, kept, directory: Path):
    assert answers(model, "others")[1] == kept[1]
    assert len(list(directory.iterdir())) == 2


@pytest.mark.parametrize(("name", "value"), [("NV_NORM", "0"), ("NUM_CPU_THREADS", "3")])
def test_another_setting_is_another_file(kept, monkeypatch: pytest.MonkeyPatch, name: str, value: str):
    before = StepStore.open((), "CPU", dict)
    monkeypatch.setenv(name, value)
    if name == "NUM_CPU_THREADS": monkeypatch.setattr(helpers.NUM_CPU_THREADS, "value", int(value))
    after = StepStore.open((), "CPU", dict)
    assert before is not None
    assert after is not None
    assert before.path != after.path


def test_a_damaged_file_is_none(kept, directory: Path):
    file, whole = directory / kept[2].name, kept[2].read_bytes()
    assert len(StepStore(file, "CPU", dict).steps) == kept[1]
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for damage in (b"", whole[:-40], b"other bytes" * 9, bytes(flipped)):
        file.write_bytes(damage)
        assert StepStore(file, "CPU", dict).steps == {}


def test_a_file_of_another_cache_is_none(kept, directory: Path):
    """Its seal is of another key."""
    (directory.parent / KEY).unlink()
    assert StepStore(directory / kept[2].name, "CPU", dict).steps == {}


class Hostile:
    """What a pickle would run."""
    def __init__(self, marker: Path) -> None: self.marker = marker
    def __reduce__(self): return Path.touch, (self.marker,)


def test_nothing_of_a_file_is_run_and_what_is_none_is_absent(kept, directory: Path, tmp_path: Path):
    """With a seal that fits, as if this user had made them."""
    file, target = directory / kept[2].name, renderer_of("CPU").target
    good = lzma.decompress(private.read_sealed(file) or b"")
    length, = SIZE_OF_JSON.unpack_from(good)
    text, code = json.loads(good[8:8 + length]), good[8 + length:]
    assert len(step_file.loads(packed(text, code), target)) == kept[1]
    row, name = text["programs"][0], next(iter(text["steps"]))
    step, deep = text["steps"][name], "[" * 100_000
    hostile = [pickle.dumps({"a": Hostile(tmp_path / "ran")}), SIZE_OF_JSON.pack(1 << 60) + b"{}",
               SIZE_OF_JSON.pack(2), SIZE_OF_JSON.pack(len(deep)) + deep.encode(),
               SIZE_OF_JSON.pack(2) + b"[]", b""]
    changed: list[dict[str, object]] = [
        {"programs": [{**row, "code": [0, 1 << 40]}]}, {"programs": [{**row, "code": ["0", 1]}]},
        {"programs": [{**row, "parameters": [[0, "os.system", 1]]}]}, {"programs": 5}, {"steps": {name: 5}},
        {"steps": {name: {**step, "batches": [{"graph": 0, "launches": [[10**9, 0]]}]}}},
        {"steps": {name: {**step, "places": [["a", 1, "f32", -5, 0]]}}},
        {"programs": [{**row, "launch": {**row["launch"], "call": ["Popen", {"args": "ls"}]}}]}]
    for data in (*map(lzma.compress, hostile), *(packed({**text, **each}, code) for each in changed)):
        write_sealed(file, data)
        assert StepStore(file, "CPU", dict).steps == {}
    assert not (tmp_path / "ran").exists()


def packed(text: dict[str, object], code: bytes) -> bytes:
    """A file's content."""
    data = json.dumps(text).encode()
    return lzma.compress(SIZE_OF_JSON.pack(len(data)) + data + code)


def test_without_an_identity_nothing_is_kept(model, kept, directory: Path):
    before = kept[2].stat().st_mtime_ns
    assert answers(model, "")[1] == kept[1]
    assert [file.name for file in directory.iterdir()] == [kept[2].name]
    assert kept[2].stat().st_mtime_ns == before


def test_a_kernel_of_a_gpu_has_its_spec_and_schedule(directory: Path):
    """Timelines predict times of them."""
    memory = {name: Tensor.empty(64, 64, dtype="half", device="EMU").contiguous().realize() for name in "abc"}
    linear = compile_linear(memory["c"].assign(memory["a"] @ memory["b"]).linear_with_vars()[0])
    buffers_of = {name: each.uop.buffer for name, each in memory.items()}
    store = StepStore(directory / "a", "EMU", lambda: buffers_of)   # type: ignore[arg-type, return-value]
    store.put("matmul", linear, frozenset(buffers))
    store.save()
    steps = StepStore(directory / "a", "EMU", dict).steps
    [call] = steps["matmul"].src
    [before], after = linear.src, note_of(call.src[0])
    assert (made := note_of(before.src[0])) is not None
    assert after is not None
    assert type(made.spec) is GemmSpec
    assert (after.template, after.spec, after.schedule) == (made.template, made.spec, made.schedule)
    assert step_file.loads(step_file.dumps(steps, 0), renderer_of("EMU").target).keys() == {"matmul"}, "again"


# **** which steps are kept ****

def compiled(tensor: Tensor) -> UOp:
    """The schedule of a pending assignment."""
    linear = compile_linear(tensor.linear_with_vars()[0])
    assert all(call.src[0].op is Ops.PROGRAM for call in linear.src)
    return linear


def test_a_step_over_memory_without_a_name_is_not_kept(directory: Path):
    named, other = (Tensor([1.0, 2.0]).contiguous().realize() for _ in range(2))
    into = Tensor.empty(2).contiguous().realize()
    memory = {"in": named.uop.buffer, "out": into.uop.buffer}
    store = StepStore(directory / "a", "CPU", lambda: memory)  # type: ignore[arg-type, return-value]
    for number, (source, kept) in enumerate(((named, True), (other, False))):
        existing = frozenset(buffers)
        store.put(str(number), compiled(into.assign(source + 1)), existing)
        assert (store.get(str(number)) is not None) == kept


def test_a_step_is_over_the_memory_that_has_its_name_now(directory: Path):
    memory = {}
    store = StepStore(directory / "a", "CPU", lambda: memory)
    first, second = ([Tensor([float(i), 2.0]).contiguous().realize() for i in range(base, base + 2)]
                     for base in (0, 5))
    memory |= {name: tensor.uop.buffer for name, tensor in zip(("in", "out"), first, strict=True)}
    store.put("add", compiled(first[1].assign(first[0] + 1)), frozenset(buffers))
    store.save()
    memory |= {name: tensor.uop.buffer for name, tensor in zip(("in", "out"), second, strict=True)}
    read = StepStore(directory / "a", "CPU", lambda: memory).get("add")
    assert read is not None
    run_linear(read, jit=True)
    assert second[1].tolist() == [6.0, 3.0]
    del memory["in"]
    assert StepStore(directory / "a", "CPU", lambda: memory).get("add") is None
