"""Checkpoints and models that cannot be written or resumed from: what was found, and what to do. What was
there before is as it was."""
from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinygrad import Tensor, dtypes

from tinygrad_nv.errors import CheckpointError, ModelError, NVError, WeightError
from tinygrad_nv.models import weights
from tinygrad_nv.models.config import read_config
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.runtime.memory import read_part, write
from tinygrad_nv.train.checkpoints import CheckpointWriter, load, load_latest, save
from tinygrad_nv.train.export import load_adapter, save_adapter, save_pretrained


def empty(*shape: int, dtype: Any = dtypes.float32) -> Tensor:
    return Tensor.empty(*shape, dtype=dtype, device="CPU")


def tensors(fill: float = 1.0) -> dict[str, Tensor]:
    """Made without a kernel, which is a file, too."""
    made = {"weight": empty(3, 2), "bias": empty(4)}
    for each in made.values(): write(each, 0, np.full(each.numel(), fill, np.float32).data.cast("B"))
    return made


def words(kind: type[NVError], call: Callable[[], object], *expected: str) -> None:
    """Asserts an error with these words, and what to do."""
    with pytest.raises(kind) as raised: call()
    text = str(raised.value)
    assert [word for word in expected if word not in text] == [], text
    assert raised.value.fix


def failing(monkeypatch: pytest.MonkeyPatch, name: str, number: int, nth: int) -> list[int]:
    """The n-th call of an operation fails, and those after it; of `open`, calls that create a file. Returns
    how many there were."""
    real, calls = getattr(os, name), list[int]()
    def call(*args: Any, **more: Any) -> Any:
        if name == "open" and not args[1] & os.O_CREAT: return real(*args, **more)
        calls.append(1)
        named = () if name in ("write", "fsync") else (str(args[0]),)
        if len(calls) >= nth: raise OSError(number, os.strerror(number), *named)
        return real(*args, **more)
    monkeypatch.setattr(os, name, call)
    return calls


@pytest.mark.parametrize(("name", "number", "nth", "said"), [
    ("write", errno.ENOSPC, 1, "No space left on device; 40 bytes are to be written"),
    ("write", errno.ENOSPC, 3, "keep fewer"), ("write", errno.EDQUOT, 2, "are free"),
    ("write", errno.EIO, 2, "check the disk"), ("fsync", errno.EIO, 1, "check the disk"),
    ("open", errno.EACCES, 1, "change its permissions"), ("mkdir", errno.EROFS, 1, "not read-only"),
    ("rename", errno.EPERM, 1, "change its permissions")])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_disk_that_does_not_take_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int,
                                      nth: int, said: str, asynchronous: bool):
    """The error is raised by the call itself, or by the next; the space is given back, and the writer goes on
    when there is room."""
    writer = CheckpointWriter(tmp_path, keep=1, asynchronous=asynchronous)
    writer.save(1, tensors(), {})
    writer.wait()
    given = tensors(2)
    with monkeypatch.context() as patch:
        calls = failing(patch, name, number, nth)
        def again() -> None:
            for step in (2, 3): writer.save(step, given, {})
        words(CheckpointError, again, "cannot be written", said)
        assert calls
    found = load_latest(tmp_path)
    assert found is not None
    assert (found.step, found.skipped) == (1, ())
    assert sorted(each.name for each in tmp_path.iterdir()) == [".checkpoints.lock", "checkpoint-1"]
    writer.save(4, tensors(4), {})
    assert writer.wait() == (tmp_path / "checkpoint-4" if asynchronous else None)
    writer.close()
    made = tensors(0)
    load(tmp_path / "checkpoint-4").restore(made)
    assert made["weight"].tolist() == [[4, 4]] * 3


def test_the_end_of_a_run_waits_and_says_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def run() -> None:
        with CheckpointWriter(tmp_path) as writer:
            failing(monkeypatch, "write", errno.ENOSPC, 1)
            writer.save(2, tensors(), {})
    words(CheckpointError, run, "No space left")
    monkeypatch.undo()
    with pytest.raises(KeyError) as raised, CheckpointWriter(tmp_path) as writer:     # noqa: PT012
        failing(monkeypatch, "write", errno.ENOSPC, 1)
        writer.save(2, tensors(), {})
        raise KeyError("its own")
    assert "No space left" in raised.value.__notes__[0]


def test_a_file_where_the_directory_is_to_be(tmp_path: Path):
    (tmp_path / "a").write_text("")
    words(CheckpointError, lambda: CheckpointWriter(tmp_path / "a"), "a cannot be written")
    words(CheckpointError, lambda: CheckpointWriter(tmp_path / "a" / "b"), "cannot be written")


def test_a_directory_of_another_run(tmp_path: Path):
    """Nothing is written to it, and nothing is read."""
    save(tmp_path, 1, tensors(), {}, run={"model": {"layers": 2}, "seed": 0})
    for run, said in (({"model": {"layers": 3}, "seed": 0}, "model.layers is 2 there, and 3 here"),
                      ({"model": {"layers": 2}}, "seed is 0 there, and not set here"),
                      ({"model": {"layers": 2}, "seed": 0, "x": 1}, "x is 1 here, and not set there")):
        words(CheckpointError, lambda run=run: CheckpointWriter(tmp_path, run=run), "another training", said)
        words(CheckpointError, lambda run=run: load_latest(tmp_path, run=run), "another training", said)
    assert load_latest(tmp_path, run={"seed": 0, "model": {"layers": 2}}) is not None


def test_a_directory_that_another_process_writes_to(tmp_path: Path):
    """As long as that lives."""
    program = ("import sys; from pathlib import Path; from tinygrad_nv.train.checkpoints.folder import Lock; "
               "lock = Lock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()")
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        words(CheckpointError, lambda: CheckpointWriter(tmp_path), f"process {other.pid} writes checkpoints")
        other.kill()
    CheckpointWriter(tmp_path).close()


def test_no_checkpoint_is_whole(tmp_path: Path):
    """A run does not begin anew by mistake."""
    assert load_latest(tmp_path / "nothing") is None
    assert load_latest(tmp_path) is None
    for step in (1, 2): save(tmp_path, step, tensors(), {})
    (tmp_path / "checkpoint-1" / "manifest.json").unlink()
    next((tmp_path / "checkpoint-2").glob("*.safetensors")).write_bytes(b"")
    words(CheckpointError, lambda: load_latest(tmp_path), "none is whole",
          "checkpoint-1 is no whole checkpoint", "has no manifest.json",
          "rank-00000-00001-of-00001.safetensors has 0 bytes, and had")
    words(CheckpointError, lambda: load(tmp_path / "checkpoint-3"), "no such checkpoint")


@pytest.mark.parametrize(("wanted", "said"), [
    ({"weight": empty(3, 2), "scale": empty(4)}, "has no tensor scale"),
    ({"weight": empty(2, 3), "bias": empty(1)}, "weight is F32 [3, 2]\n  expected: F32 [2, 3]"),
    ({"weight": empty(3, 2), "bias": empty(4, dtype=dtypes.bfloat16)},
     "bias is F32 [4]\n  expected: BF16 [4]"),
    ({"weight": empty(3, 2)}, "has a tensor bias, and the run has none"),
    ({"weight": empty(3, 2), "bias": empty(8)[2:6]}, "bias has no memory of its own")])
def test_tensors_that_differ(tmp_path: Path, wanted: dict[str, Tensor], said: str):
    """The first is named, before anything is written."""
    save(tmp_path, 1, tensors(), {})
    write(wanted["weight"], 0, memoryview(bytes(range(24))))
    words(CheckpointError, lambda: load(tmp_path / "checkpoint-1").restore(wanted), said)
    assert read_part(wanted["weight"], 0, 24) == bytes(range(24))


@pytest.mark.parametrize(("state", "said"), [
    ({"sampler": {"shape": (1, 2)}}, "state.sampler.shape is a tuple"),
    ({"a": {1: 2}}, "state.a has the key 1"), ({"seeds": [np.int64(3)]}, "state.seeds[0] is a int64"),
    ({"x": {"y": np.zeros(2)}}, "state.x.y is a ndarray")])
def test_a_state_that_is_not_json(tmp_path: Path, state: Any, said: str):
    words(CheckpointError, lambda: save(tmp_path, 1, tensors(), state), said)


def test_arguments(tmp_path: Path):
    for more in ({"keep": 0}, {"shard_bytes": 0}, {"rank": 1}, {"rank": 1, "ranks": 2}):
        words(CheckpointError, lambda more=more: CheckpointWriter(tmp_path, **more), "keep is", "barrier")
    for step in (-1, 1.0, True):
        words(CheckpointError, lambda step=step: save(tmp_path, step, {}, {}), "step is")
    words(CheckpointError, lambda: save(tmp_path, 1, {"a": Tensor(3.0, device="CPU")}, {}), "a has dtype")


def loaded(directory: Path) -> Llama:
    model = Llama(read_config(directory), dtypes.float32, "CPU")
    weights.load(model, directory)
    return model


def test_models_that_cannot_be_saved(copy: Path, tmp_path: Path):
    model, out = loaded(copy), tmp_path / "out"
    words(ModelError, lambda: save_pretrained(model, out, tmp_path), "has no config.json")
    words(ModelError, lambda: save_pretrained(model, out, copy, dtypes.int8), "dtype is", "float32, float16")
    data = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(data | {"intermediate_size": 96}))
    words(ModelError, lambda: save_pretrained(model, out, copy), "its intermediate_size is 96", "128")
    (copy / "config.json").write_text(json.dumps(data))
    object.__setattr__(model.config, "quantization", {"quant_method": "awq"})
    words(ModelError, lambda: save_pretrained(model, out, copy), "are quantised", "save_adapter")
    assert not out.exists()


def test_a_full_disk_leaves_the_model_that_was_there(copy: Path, monkeypatch: pytest.MonkeyPatch):
    model = loaded(copy)
    with monkeypatch.context() as patch:
        failing(patch, "write", errno.ENOSPC, 3)
        words(CheckpointError, lambda: save_pretrained(model, copy, copy), "No space left",
              "KB are to be written")
    assert read_config(copy) == model.config
    assert not list(copy.glob(".*"))
    loaded(copy)


def test_adapters_that_cannot_be_saved_or_loaded(tmp_path: Path):
    name, a, b = "model.layers.0.self_attn.q_proj", empty(2, 6), empty(8, 2)
    words(ModelError, lambda: save_adapter(tmp_path, {}, 2, 4), "no matrices")
    words(ModelError, lambda: save_adapter(tmp_path, {name: (a, a)}, 2, 4), f"{name}: A is [2, 6], B [2, 6]")
    words(ModelError, lambda: save_adapter(tmp_path, {name: (a, b)}, 0, 4), "rank is 0")
    words(ModelError, lambda: save_adapter(tmp_path, {name: (a, b.cast(dtypes.int32))}, 2, 4), "dtypes.int")
    words(ModelError, lambda: save_adapter(tmp_path, {name: (a, b)}, 2, 4, target_modules=["k_proj"]),
          f"without {name}")
    words(ModelError, lambda: load_adapter(tmp_path, {name: (8, 6)}), "has no adapter_config.json")
    save_adapter(tmp_path, {name: (a.zeros_like().contiguous(), b.zeros_like().contiguous())}, 2, 4)
    words(WeightError, lambda: load_adapter(tmp_path, {name: (8, 7)}), "is [2, 6]", "[2, 7]")
    words(ModelError, lambda: load_adapter(tmp_path, {"model.layers.0.mlp.down_proj": (8, 6)}),
          f"changes {name}")
