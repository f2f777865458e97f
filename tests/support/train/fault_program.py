"""A toy training run that is killed, again and again.

    fault_program.py KILLS SEED EVERY

SIGKILL from outside, at so many random moments, with and without a thread; then at each EVERY-th operation on
files. Every run is a fork of this process, which has imported everything. It prints JSON objects: bits of a
run that was never stopped and of the one that was killed, and for each kill the step that was reached, the
step of the last save that was begun, and the step that it resumes from.
"""
from __future__ import annotations

import hashlib
import json
import mmap
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tinygrad import Tensor, dtypes

from tinygrad_nv.runtime.memory import host_bytes
from tinygrad_nv.train.checkpoints import CheckpointWriter, load, load_latest

INTERVAL, STEPS, RUN = 4, 120, {"width": 48}
REACHED, BEGUN, SAVING = 0, 1, 2        # places of `shared`
shared = np.frombuffer(mmap.mmap(-1, 4096), np.int64)     # with forks, too


class Toy:
    """Weights, a momentum, and a generator of random numbers: what a step makes depends on all before."""

    def __init__(self) -> None:
        self.tensors = {"weight": Tensor.empty(48, 48, dtype=dtypes.float32, device="CPU"),
                        "momentum": Tensor.empty(48, 48, dtype=dtypes.float32, device="CPU"),
                        "count": Tensor.empty(1, dtype=dtypes.int64, device="CPU")}
        def view(name: str, kind: str) -> np.ndarray:
            memory = host_bytes(self.tensors[name])
            assert memory is not None
            return np.frombuffer(memory, kind)
        self.weight, self.momentum = (view(name, "f4").reshape(48, 48) for name in ("weight", "momentum"))
        self.count, self.random = view("count", "i8"), np.random.default_rng(0)
        self.weight[:], self.momentum[:], self.count[:] = np.eye(48), 0, 0

    def step(self) -> None:
        self.momentum *= np.float32(0.9)
        self.momentum += self.random.normal(size=(48, 48)).astype(np.float32) * np.tanh(self.weight.T)
        self.weight += np.float32(0.1) * self.momentum
        self.count += 1

    @property
    def digest(self) -> str:
        every = (self.weight, self.momentum, self.count)
        return hashlib.sha256(b"".join(each.tobytes() for each in every)).hexdigest()


class Told(CheckpointWriter):
    """Says while it writes."""

    def _write(self, job: Any) -> Path:
        shared[SAVING] = 1
        try: return super()._write(job)
        finally: shared[SAVING] = 0


def train(directory: Path, steps: int, asynchronous: bool, keep: int = 2) -> str:
    """Goes on to `steps`, from where it was killed. The digest then."""
    toy, start = Toy(), 0
    found = load_latest(directory, run=RUN)
    if found is not None:
        found.restore(toy.tensors)
        toy.random.bit_generator.state = found.state["random"]
        start = found.state["step"]
        assert start == found.step == toy.count[0], "what was loaded is of one step"
    with Told(directory, run=RUN, keep=keep, asynchronous=asynchronous, shard_bytes=10_000) as writer:
        for step in range(start + 1, steps + 1):
            toy.step()
            shared[REACHED] = step
            if step % INTERVAL == 0:
                writer.wait()
                shared[BEGUN] = step
                writer.save(step, toy.tensors, {"step": step, "random": toy.random.bit_generator.state})
    return toy.digest


def forked(run: Callable[[], None]) -> int:
    """The process of a fork that runs this."""
    if child := os.fork(): return child
    try: run()
    except BaseException as error:
        print(repr(error), file=sys.stderr)
        os._exit(1)
    os._exit(0)


def resumed(directory: Path) -> int:
    """The step of the newest checkpoint. All that have a name are whole, also those that are not needed."""
    for path in directory.glob("checkpoint-*"): load(path)
    found = load_latest(directory, run=RUN)
    return 0 if found is None else found.step


def moments(kills: int, seed: int, asynchronous: bool) -> dict[str, Any]:
    whole, broken = (Path(tempfile.mkdtemp()) for _ in range(2))
    begin = time.perf_counter()
    wanted = train(whole, STEPS, asynchronous)
    each, chance, seen = (time.perf_counter() - begin) / STEPS, random.Random(seed), []
    for _ in range(kills):
        first = resumed(broken)
        shared[:3] = first, first, 0
        child = forked(lambda: void(train(broken, 100 * STEPS, asynchronous)))
        time.sleep(0.02 + chance.uniform(0, 4 * INTERVAL * each))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "it was killed, and did not end by itself"
        reached, begun, saving = (int(each) for each in shared[:3])
        seen.append({"reached": reached, "begun": begun, "saving": saving, "resumed": resumed(broken)})
    end = -(-max(STEPS, seen[-1]["reached"]) // INTERVAL) * INTERVAL
    made = train(broken, end, asynchronous)
    if end != STEPS:
        shutil.rmtree(whole)
        whole.mkdir()
        wanted = train(whole, end, asynchronous)
    for path in (whole, broken): shutil.rmtree(path)
    return {"wanted": wanted, "made": made, "interval": INTERVAL, "kills": seen}


def void(value: object) -> None: del value


def dying(number: int) -> None:
    """The operation of this number on files kills the process; a write in its middle."""
    count = 0
    def deadly(name: str) -> None:
        real = getattr(os, name)
        def call(*args: Any, **more: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                if name == "write": real(args[0], args[1][:len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **more)
        setattr(os, name, call)
    for name in ("write", "fsync", "rename", "mkdir", "unlink", "rmdir"): deadly(name)


def operations(every: int) -> dict[str, Any]:
    """Two saves, of which the second removes the first; and a step that is saved again."""
    base, seen, number = Path(tempfile.mkdtemp()), [], 1 - every
    train(base, 2 * INTERVAL, False, keep=1)
    while True:
        number += every
        broken = Path(tempfile.mkdtemp())
        shutil.copytree(base, broken, dirs_exist_ok=True)
        shared[:3] = 0
        def run(number: int = number, broken: Path = broken) -> None:
            dying(number)
            train(broken, 3 * INTERVAL, False, keep=1)
            found, toy = load_latest(broken), Toy()
            assert found is not None
            found.restore(toy.tensors)
            with Told(broken, run=RUN, keep=1, asynchronous=False) as writer:
                writer.save(3 * INTERVAL, toy.tensors, found.state)
        _, status = os.waitpid(forked(run), 0)
        ended = os.WIFEXITED(status)
        assert not ended or os.WEXITSTATUS(status) == 0, "a run that no operation killed is right"
        seen.append({"reached": int(shared[REACHED]), "resumed": resumed(broken)})
        made = train(broken, 5 * INTERVAL, False, keep=1)
        left = sorted(each.name for each in broken.iterdir())
        seen[-1] |= {"made": made, "left": left}
        shutil.rmtree(broken)
        if ended: break
    wanted = train(base, 5 * INTERVAL, False, keep=1)
    shutil.rmtree(base)
    return {"wanted": wanted, "interval": INTERVAL, "kills": seen}


if __name__ == "__main__":
    warnings.simplefilter("error")      # nothing that is named checkpoint-N is ever broken
    kills, seed, every = map(int, sys.argv[1:])
    print(json.dumps({"SYNC": moments(kills, seed, False), "ASYNC": moments(kills, seed, True),
                      "operations": operations(every)}))
