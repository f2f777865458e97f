"""Checkpoints: bits of every dtype, copies that later steps do not change, files, ranks, what is kept.
SIGKILL at any moment of training and saving: what is resumed is whole, recent, and ends in equal bits."""
from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tinygrad import Tensor, TinyJit, dtypes

from tests.support import SUPPORT
from tinygrad_nv.errors import CheckpointError
from tinygrad_nv.runtime.memory import read_part, write
from tinygrad_nv.train.checkpoints import CheckpointWriter, load, load_latest, save
from tinygrad_nv.train.checkpoints.reader import CheckpointWarning
from tinygrad_nv.train.files import DTYPES


def filled(seed: int, dtype: Any = dtypes.float32, *shape: int) -> Tensor:
    """A tensor of random bits."""
    made = Tensor.empty(*(shape or (5, 3)), dtype=dtype, device="CPU")
    bits = np.random.default_rng(seed).integers(0, 256, int(made.nbytes()), np.uint8)
    write(made, 0, bits.data)
    return made


def bits(tensor: Tensor) -> bytes: return bytes(read_part(tensor, 0, int(tensor.nbytes())))


def empty_like(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: Tensor.empty(*each.shape, dtype=each.dtype, device="CPU") for name, each in tensors.items()}


def steps(directory: Path) -> list[str]: return sorted(each.name for each in directory.glob("*"))


def restored(directory: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found, made = load_latest(directory), empty_like(tensors)
    assert found is not None
    found.restore(made)
    return made


def test_bits_of_every_dtype_come_back(tmp_path: Path):
    """Also NaNs with a payload, of random bits; no elements, one, and what is computed only now."""
    tensors = {str(dtype): filled(i, dtype) for i, dtype in enumerate(DTYPES)}
    tensors |= {"none": Tensor.empty(0, 4, device="CPU"), "one": filled(50, dtypes.bfloat16, 1)}
    expected = {name: bits(each) for name, each in tensors.items() if name != "none"}
    state = {"step": 3, "seeds": [2 ** 80, -1], "rate": 0.1 + 0.2, "none": None, "on": True, "ü": {"a": []}}
    assert save(tmp_path, 3, tensors, state) == tmp_path / "checkpoint-3"
    made = restored(tmp_path, tensors)
    assert {name: bits(each) for name, each in made.items() if name != "none"} == expected
    assert load(tmp_path / "checkpoint-3").state == state
    lazy = {"view": Tensor(np.arange(12, dtype=np.int32).reshape(3, 4), device="CPU").realize()[1:],
            "sum": Tensor.ones(3, device="CPU") + 1, "constant": Tensor.full((2,), 7, device="CPU")}
    save(tmp_path, 4, lazy, {})
    assert [each.tolist() for each in restored(tmp_path, lazy).values()] == [
        [[4, 5, 6, 7], [8, 9, 10, 11]], [2, 2, 2], [7, 7]]


def test_a_captured_step_goes_on_with_what_was_loaded(tmp_path: Path):
    weight = Tensor.zeros(3, device="CPU").contiguous().realize()
    @TinyJit
    def step() -> Tensor: return weight.assign(weight + 1).realize()
    for _ in range(4): step()
    save(tmp_path, 4, {"weight": weight}, {})
    for _ in range(3): step()
    assert weight.tolist() == [7] * 3
    load(tmp_path / "checkpoint-4").restore({"weight": weight})
    step()
    assert weight.tolist() == [5] * 3


def test_steps_after_a_save_do_not_change_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The thread writes nothing until the tensors have changed."""
    changed, real = threading.Event(), os.write
    def late(*args: Any) -> int:
        if threading.current_thread() is not threading.main_thread(): assert changed.wait(10)
        return real(*args)
    with CheckpointWriter(tmp_path, keep=5) as writer:
        tensors = {"a": filled(1), "b": filled(2)}
        expected = {name: bits(each) for name, each in tensors.items()}
        state = {"list": [1]}
        monkeypatch.setattr(os, "write", late)
        writer.save(1, tensors, state)
        state["list"].append(2)
        for each in tensors.values(): write(each, 0, memoryview(bytes(60)))
        assert steps(tmp_path) == [".checkpoint-1.partial", ".checkpoints.lock"] or not changed.is_set()
        changed.set()
        assert writer.wait() == tmp_path / "checkpoint-1"
        writer.save(2, tensors, state)      # in the same memory
    for number, wanted in ((1, expected), (2, dict.fromkeys("ab", bytes(60)))):
        found, made = load(tmp_path / f"checkpoint-{number}"), empty_like(tensors)
        found.restore(made)
        assert {name: bits(each) for name, each in made.items()} == wanted
        assert found.state == {"list": [1, 2][:number]}


def test_files_are_safetensors_of_a_limited_size(tmp_path: Path):
    tensors = {f"t{i}": filled(i, dtypes.bfloat16 if i % 2 else dtypes.float32, 10) for i in range(6)}
    tensors["large"] = filled(9, dtypes.float32, 100)
    with CheckpointWriter(tmp_path, shard_bytes=100) as writer: writer.save(1, tensors, {})
    files = sorted((tmp_path / "checkpoint-1").glob("*.safetensors"))
    found = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            names = list(opened.keys())
            own = {name: opened.get_tensor(name) for name in names}
        size = sum(each.nbytes for each in own.values())
        assert size <= 100 or names == ["large"]
        found |= {name: each.view(-1).numpy().tobytes() if each.dtype.itemsize == 4 else
                  each.view(dtype=torch.int16).numpy().tobytes() for name, each in own.items()}
    assert len(files) == 3
    assert found == {name: bits(each) for name, each in tensors.items()}
    manifest = json.loads((tmp_path / "checkpoint-1" / "manifest.json").read_text())["content"]["parts"][0]
    for file in files:
        assert manifest["files"][file.name]["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()


def test_everything_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A machine may lose power between any two operations: each file, then the manifest, then the folder are
    synced before the rename, and the folder above after it."""
    seen, names = list[str](), dict[int, str]()
    def watched(name: str, note: Callable[..., str]) -> None:
        real = getattr(os, name)
        def call(*args: Any, **more: Any) -> Any:
            made = real(*args, **more)
            if name == "open": names[made] = Path(args[0]).name
            seen.append(note(*args))
            return made
        monkeypatch.setattr(os, name, call)
    with CheckpointWriter(tmp_path, shard_bytes=60) as writer:
        watched("open", lambda path, *_: f"open {Path(path).name}")
        watched("fsync", lambda file: f"sync {names[file]}")
        watched("rename", lambda a, b, **_: f"rename {Path(a).name} {Path(b).name}")
        writer.save(1, {"a": filled(1), "b": filled(2)}, {})
    kept = [each for each in seen if not each.startswith("open")]
    assert kept == ["sync rank-00000-00001-of-00002.safetensors",
                    "sync rank-00000-00002-of-00002.safetensors",
                    "sync rank-00000.json", "sync manifest.json", "sync .checkpoint-1.partial",
                    "rename .checkpoint-1.partial checkpoint-1", f"sync {tmp_path.name}"]


def test_the_newest_are_kept(tmp_path: Path):
    """Damaged ones do not count, and push none out; a step that is saved again replaces the one before."""
    with CheckpointWriter(tmp_path, keep=2) as writer:
        for step in (5, 10, 15): writer.save(step, {"a": filled(step)}, {})
        writer.wait()
        assert steps(tmp_path) == [".checkpoints.lock", "checkpoint-10", "checkpoint-15"]
        (tmp_path / "checkpoint-15" / "manifest.json").unlink()
        writer.save(20, {"a": filled(20)}, {})
        writer.wait()
        assert steps(tmp_path) == [".checkpoints.lock", "checkpoint-10", "checkpoint-15", "checkpoint-20"]
        writer.save(20, {"a": filled(21)}, {})
        writer.save(12, {"a": filled(12)}, {})
    assert steps(tmp_path) == [".checkpoints.lock", "checkpoint-12", "checkpoint-15", "checkpoint-20"]
    assert bits(restored(tmp_path, {"a": filled(0)})["a"]) == bits(filled(21))


def damage(path: Path, how: str) -> None:
    file = next(path.glob("*.safetensors"))
    if how == "flipped bit":
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    elif how == "truncated": os.truncate(file, file.stat().st_size - 1)
    elif how == "no shard": file.unlink()
    elif how == "no manifest": (path / "manifest.json").unlink()
    else:
        text = (path / "manifest.json").read_text()
        (path / "manifest.json").write_text(text.replace('"step": 2', '"step": 9') if how == "edited"
                                            else text[:len(text) // 2])


@pytest.mark.parametrize("how", ["flipped bit", "truncated", "no shard", "no manifest", "edited", "half"])
def test_a_checkpoint_that_is_not_whole_is_named_and_skipped(tmp_path: Path, how: str):
    for step in (1, 2): save(tmp_path, step, {"a": filled(step)}, {"step": step})
    damage(tmp_path / "checkpoint-2", how)
    words = r"checkpoint-2 is no whole checkpoint.*resuming from checkpoint-1"
    with pytest.warns(CheckpointWarning, match=words):
        found = load_latest(tmp_path)
    assert found is not None
    assert (found.step, found.state) == (1, {"step": 1})
    assert ["checkpoint-2" in str(each) for each in found.skipped] == [True]
    with pytest.raises(CheckpointError, match="checkpoint-2 is no whole checkpoint"):
        load(tmp_path / "checkpoint-2")


def test_a_manifest_that_names_what_is_elsewhere_or_absurd_is_refused(tmp_path: Path):
    """The author of a manifest can hash it, too."""
    path = save(tmp_path, 1, {"a": filled(1)}, {"step": 1})
    file, whole = path / "manifest.json", json.loads((path / "manifest.json").read_text())["content"]
    name = next(each.name for each in path.glob("*.safetensors"))
    (tmp_path / "outside").write_bytes((path / name).read_bytes())
    os.symlink("/dev/zero", path / "endless")
    os.mkfifo(path / "waits")
    def changed(change: Callable[[Any, Any], Any]) -> str:
        content = json.loads(json.dumps(whole))
        change(content, content["parts"][0])
        text = json.dumps(content)
        file.write_text(json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "content": content}))
        with pytest.raises(CheckpointError, match="checkpoint-1 is no whole checkpoint") as caught:
            load(path)
        return str(caught.value)
    def file_named(other: str) -> Callable[[Any, Any], Any]:
        record = whole["parts"][0]["files"][name] if "outside" in other else {"nbytes": 0, "sha256": ""}
        return lambda _, part: part["files"].update({other: record})
    for other in ("../outside", str(tmp_path / "outside"), "", "..", "a\0b"):
        assert repr(other)[:20] in changed(file_named(other)), other
    assert "a device" in changed(file_named("endless"))
    assert "a FIFO" in changed(file_named("waits"))
    for wrong in ({"offset": -1}, {"offset": 1 << 40}, {"shape": [1 << 62]}, {"shape": [-5, -3]},
                  {"shape": 3}, {"shape": [1e308]}, {"shape": [1] * 1000}, {"file": "../outside"},
                  {"dtype": "F3"}, {"dtype": []}):
        changed(lambda _, part, wrong=wrong: part["tensors"]["a"].update(wrong))
    for step in (1e308, -1, "x", None, [], 1 << 200, True):
        changed(lambda content, _, step=step: content.update(step=step))
    for parts in ([], {}, [[]], None, whole["parts"] * 2):
        changed(lambda content, _, parts=parts: content.update(parts=parts))
    changed(lambda _, part: part.update(rank=1))
    deep: Any = []
    for _ in range(500): deep = [deep]
    for each in ("files", "tensors"): changed(lambda _, part, each=each: part.update({each: deep}))
    file.write_text('{"sha256": "", "content": ' + "[" * 900 + "]" * 900 + "}")
    with pytest.raises(CheckpointError, match=r"manifest\.json"): load(path)


def ranks(directory: Path, tensors: list[dict[str, Tensor]], broken: int | None = None) -> list[Any]:
    """A save by threads that stand for ranks: what each came to."""
    count, made = len(tensors), list[Any]([None] * len(tensors))
    barrier = threading.Barrier(count)
    def rank(number: int) -> None:
        try:
            with CheckpointWriter(directory, rank=number, ranks=count, barrier=lambda: void(barrier.wait(20)),
                                  shard_bytes=100) as writer:
                if number == broken: writer._write_part = refuse    # type: ignore[method-assign]
                writer.save(1, tensors[number], {"rank": number})
        except CheckpointError as error: made[number] = error
    def refuse(job: Any) -> None: raise OSError(28, "No space left on device", str(directory / "x"))
    threads = [threading.Thread(target=rank, args=(i,)) for i in range(count)]
    for each in threads: each.start()
    for each in threads: each.join(30)
    return made


def void(value: object) -> None: del value


def test_ranks_write_parts_of_one_checkpoint(tmp_path: Path):
    """Each has its own under one name; what rank 0 alone has is for all."""
    given = [{"own": filled(i), f"only{i}": filled(10 + i)} | ({"shared": filled(20)} if i == 0 else {})
             for i in range(3)]
    assert ranks(tmp_path, given) == [None] * 3
    assert len(list((tmp_path / "checkpoint-1").glob("rank-*"))) == 7
    for i in range(3):
        found = load_latest(tmp_path, rank=i, ranks=3)
        assert found is not None
        made = empty_like(given[i] | {"shared": filled(0)})
        found.restore(made)
        assert found.state == {"rank": i}
        assert {name: bits(each) for name, each in made.items()} == {
            name: bits(each) for name, each in (given[i] | {"shared": given[0]["shared"]}).items()}


@pytest.mark.parametrize(("ranks_then", "ranks_now"), [(3, 2), (2, 3), (1, 4), (4, 1), (2, 2)])
def test_parts_of_vectors_are_cut_anew(tmp_path: Path, ranks_then: int, ranks_now: int):
    """Of 10 elements, in equal parts with elements of nothing behind them; these stay as they are."""
    def parts(count: int) -> list[np.ndarray]:
        each = -(-10 // count) + 1
        return np.pad(np.arange(10, dtype=np.int32), (0, each * count - 10), constant_values=99) \
            .reshape(count, each).copy().tolist()
    given = [{"cut": Tensor(each, dtype=dtypes.int32, device="CPU").realize()}
             for each in parts(ranks_then)]
    given[0]["all"] = filled(1)
    if ranks_then == 1: save(tmp_path, 1, given[0], {})
    else: assert ranks(tmp_path, given) == [None] * ranks_then
    for i, expected in enumerate(parts(ranks_now)):
        behind = Tensor.full((len(expected),), 99, dtype=dtypes.int32, device="CPU").contiguous().realize()
        own = {"cut": behind, "all": filled(2)}
        found = load_latest(tmp_path, rank=i, ranks=ranks_now)
        assert found is not None
        found.restore(own, {"cut": 10})
        assert own["cut"].tolist() == expected
        assert bits(own["all"]) == bits(filled(1))


def test_another_number_of_ranks_resumes_with_names_of_one_rank_alone(tmp_path: Path):
    given = [{f"layer{i}": filled(i)} for i in range(2)]
    assert ranks(tmp_path / "a", given) == [None] * 2
    found, made = load(tmp_path / "a" / "checkpoint-1"), empty_like(given[0] | given[1])
    found.restore(made)
    assert {name: bits(each) for name, each in made.items()} == {
        f"layer{i}": bits(filled(i)) for i in range(2)}
    assert ranks(tmp_path / "b", [{"own": filled(i)} for i in range(2)]) == [None] * 2
    with pytest.raises(CheckpointError, match="own is not in equal parts of 15 F32 together, one of each"):
        load_latest(tmp_path / "b").restore({"own": Tensor.empty(15, device="CPU")}, {"own": 15})
    with pytest.raises(CheckpointError, match="2 ranks have a own of their own"):
        load(tmp_path / "b" / "checkpoint-1").restore({"own": filled(0)})


@pytest.mark.parametrize("broken", [0, 1])
def test_a_rank_that_cannot_write_leaves_no_rank_waiting(tmp_path: Path, broken: int):
    made = ranks(tmp_path, [{"a": filled(i)} for i in range(2)], broken)
    assert ["No space left" in str(each) for each in made] == [i == broken for i in range(2)]
    assert all(isinstance(each, CheckpointError) for each in made)
    assert "rank 1 wrote no part" in str(made[0]) or "rank 0 did not finish" in str(made[1])
    assert steps(tmp_path) == [".checkpoints.lock"]


def test_a_folder_that_was_removed_is_made_again(tmp_path: Path):
    with CheckpointWriter(tmp_path / "a" / "b") as writer:
        shutil.rmtree(tmp_path / "a")
        writer.save(1, {"a": filled(1)}, {})
    assert load_latest(tmp_path / "a" / "b") is not None


PROGRAM = SUPPORT / "train" / "fault_program.py"


@pytest.fixture(scope="module", params=[(5, 5), pytest.param((20, 1), marks=pytest.mark.slow)],
                ids=["5 kills", "20 kills"])
def told(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the program says: of so many kills, and of each n-th operation."""
    kills, every = request.param
    made = subprocess.run([sys.executable, str(PROGRAM), str(kills), "7", str(every)], capture_output=True,
                          text=True, timeout=300, check=False)
    assert made.returncode == 0, made.stderr
    assert made.stderr == ""
    found: dict[str, Any] = json.loads(made.stdout)
    assert len(found["SYNC"]["kills"]) == len(found["ASYNC"]["kills"]) == kills
    assert len(found["operations"]["kills"]) > 30 // every
    return found


@pytest.mark.parametrize("how", ["SYNC", "ASYNC"])
def test_a_killed_run_ends_in_the_bits_of_one_that_was_never_stopped(told: dict[str, Any], how: str):
    """Resumed from no earlier than an interval before the last save that was begun; without a thread, than an
    interval before the last step."""
    found = told[how]
    assert found["made"] == found["wanted"]
    for kill in found["kills"]:
        assert kill["resumed"] >= kill["begun"] - found["interval"], kill
        if how == "SYNC": assert kill["resumed"] >= kill["reached"] - found["interval"], kill
    both = told["SYNC"]["kills"] + told["ASYNC"]["kills"]   # on a busy machine few of one reach a save
    assert any(kill["saving"] for kill in both), "some were killed while they saved"
    assert any(kill["resumed"] for kill in both), "some resumed"


def test_no_operation_on_files_is_one_that_must_not_be_the_last(told: dict[str, Any]):
    """Writes, syncs, renames and removals of saving, rotating and replacing kill the process. Nothing of it
    is left after the next run."""
    found = told["operations"]
    for kill in found["kills"]:
        assert kill["made"] == found["wanted"]
        assert kill["resumed"] >= kill["reached"] - found["interval"], kill
        assert kill["left"] == [".checkpoints.lock", "checkpoint-20"]
