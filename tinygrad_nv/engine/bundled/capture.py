"""`python -m tinygrad_nv.engine.bundled.capture FOLDER`: one set of a bundle, made in a process of its own.

Protocol: FOLDER/order.json says what is to be made: arguments of `LLM`, whether weights that lie in the
checkpoint's files are to be referred to. The process has the variables of the set (sets.py), and captures
every job of a server's warm-up without running it. It leaves, for compile.py to put together:

  set.json       name, threads, steps by job, memory and weights by name, layouts of inputs, limits
  programs.json, code, steps/N.json (bundle/plan.py), pool (the threads of a CPU)
  ../weights/    bytes of tensors, each in a file named by its hash: sets share them

Weights may lie in the checkpoint's files as they lie in memory. `find_ranges(model, directory)` gives for
memory (base, offset, bytes) what the checkpoint has of it, where the dtype is the same and all of it is
there: q|k|v is three ranges. `confirm(…)` compares bytes, so that what a loader has changed is never referred
to.
"""
from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tinygrad.device import Buffer

from tinygrad_nv import config
from tinygrad_nv.bundle.container import digest
from tinygrad_nv.bundle.manifest import canonical
from tinygrad_nv.bundle.plan import ProgramTable, encode_step, plan_parts, step_digest
from tinygrad_nv.engine.bundled.sets import assembler, bytes_of, host_threads, layout_of, name_of
from tinygrad_nv.engine.llm import LLM
from tinygrad_nv.engine.worker.input_buffer import BatchShape
from tinygrad_nv.engine.worker.kv_cache_scales import cache_scales
from tinygrad_nv.engine.worker.model_runner import ModelRunner
from tinygrad_nv.engine.worker.step_file import NEUTRAL
from tinygrad_nv.engine.worker.step_store import StepStore
from tinygrad_nv.errors import BundleError, NVError
from tinygrad_nv.models import weights
from tinygrad_nv.models.checkpoint import FLOAT_BYTES, open_checkpoint
from tinygrad_nv.models.multimodal import language_entries
from tinygrad_nv.models.quantised.layers import sparse_savings
from tinygrad_nv.tile.decode.spec import BYTES

if TYPE_CHECKING:
    from tinygrad_nv.models.llama import Llama

WEIGHTS = ("model.", "rope")    # names of memory whose content a bundle has
CHUNK = 64 << 20
Ranges = list[tuple[str, int, int]]     # a file, an offset and bytes


def main() -> int:
    """The command."""
    folder = Path(sys.argv[1])
    order = json.loads((folder / "order.json").read_text())
    try: made = _capture_set(folder, order)
    except NVError as error:
        (folder / "error.json").write_text(json.dumps(
            {"type": type(error).__name__, "words": [error.found, error.expected, error.fix]}))
        return error.exit_code
    (folder / "set.json").write_bytes(canonical(made))
    return 0


def _capture_set(folder: Path, order: dict[str, Any]) -> dict[str, Any]:
    def print_progress(done: int, total: int) -> None: print(f"{done} {total}", flush=True)
    with LLM(order["model"], **order["options"]) as llm:
        if llm.embedder is not None:
            raise BundleError(f"{order['model']} makes embeddings", "a model that generates",
                              "serve the model from its directory")
        runner = llm.runner
        if runner.images is not None:
            raise BundleError(f"{order['model']} reads images",
                              "a model of texts: a bundle has no vision tower",
                              "serve the model from its directory")
        store = runner.step_store = StepStore(folder / "none", runner.device, runner._buffers)
        # of one rank there are no gathers
        jobs = [job for each in runner.jobs for job in each if isinstance(job, BatchShape | tuple)]
        print_progress(0, len(jobs))
        for number, job in enumerate(jobs):
            runner.run_now(lambda job=job: runner.capture(job))  # type: ignore[misc]
            print_progress(number + 1, len(jobs))
        names = [runner.job_name(job) for job in jobs]
        if missing := [name for name in names if name not in store.steps]:
            raise BundleError(f"{missing[0]} uses memory that outlives steps without a name",
                              "steps whose memory is that of the model, its cache, inputs and outputs",
                              "serve the model from its directory")
        table = ProgramTable(assembler(name_of(runner.device)))
        steps = {name: encode_step(store.steps[name], table) for name in names}
        (folder / "steps").mkdir()
        for name, data in plan_parts(steps.values(), table).items(): (folder / name).write_bytes(data)
        layouts = {runner.job_name(job): layout_of(runner.layout(job)) for job in jobs
                   if isinstance(job, BatchShape)}
        buffers = runner._buffers()
        return {"name": name_of(runner.device), "device": runner.device.partition(":")[0],
                "threads": host_threads(runner.device), "layouts": layouts,
                "steps": {name: [f"steps/{i}.json", step_digest(steps[name], table.digest)]
                          for i, name in enumerate(names)},
                "memory": {name: at.nbytes for name, at in buffers.items()},
                "weights": _weights(folder, llm, buffers, order["refer"]),
                "weight_bytes": llm._weight_bytes, "sparse_bytes": sparse_savings(llm.model),
                "cache_scales": _scales(runner), "pages": runner.capacity, "length": llm.length,
                "pool": _pool(folder, runner.device), "settings": _settings()}


def _weights(folder: Path, llm: LLM, buffers: dict[str, Buffer], refer: bool) -> dict[str, dict[str, Any]]:
    """Memory with content: its hash, and where it lies in the checkpoint's files, if it does."""
    place, made = folder.parent / "weights", dict[str, dict[str, Any]]()
    seen: dict[tuple[int, int, int], str] = {}
    place.mkdir(exist_ok=True)
    found = find_ranges(llm.model, llm.directory) if refer else {}
    for name, at in buffers.items():
        if not name.startswith(WEIGHTS): continue
        key = id(at.base), at.offset, at.nbytes
        if key in seen:     # an embedding that is the head, too
            made[name] = made[seen[key]]
            continue
        seen[key] = name
        content = bytes_of(at)
        made[name] = {"sha256": digest(content).hex(), "bytes": at.nbytes}
        if ranges := confirm(found.get(key), llm.directory, content):
            made[name]["ranges"] = ranges
        elif not (file := place / made[name]["sha256"]).exists(): file.write_bytes(content)
    return made


def _scales(runner: ModelRunner) -> list[list[list[float]]]:
    """Scales of 8-bit keys and values by layer: of keys, of values, by head."""
    if runner.kv_dtype not in BYTES: return []
    found = cache_scales(runner.model, runner.kv_dtype, runner.device, runner.page_size)
    return [[np.ravel(each).astype(float).tolist() for each in layer] for layer in found]


def _pool(folder: Path, device: str) -> bool:
    """Writes the code of a CPU's threads."""
    if device != "CPU": return False
    from tinygrad_nv.runtime.cpu.pool import machine_code
    (folder / "pool").write_bytes(machine_code())
    return True


def _settings() -> dict[str, int | str]:
    """Settings that are not at their defaults and change kernels."""
    return {each.name: value for each in config.SETTINGS
            if each.name not in NEUTRAL and (value := config.get(each.name)) != each.default}


def find_ranges(model: Llama, directory: Path) -> dict[tuple[int, int, int], Ranges]:
    """Finds where memory of the model lies in the files of `directory`."""
    if not directory.is_dir(): return {}
    entries = language_entries(open_checkpoint(directory).entries, model.config.names.spell)
    parts = defaultdict[tuple[int, int, int], list[tuple[int, str, int, int]]](list)
    for name, slot in weights.slots(model).items():
        at = slot.tensor.uop.buffer
        if not isinstance(at, Buffer) or (entry := entries.get(name)) is None: continue
        if entry.dtype not in FLOAT_BYTES or FLOAT_BYTES[entry.dtype] != slot.tensor.dtype.itemsize: continue
        file, offset = entry.file_offset
        parts[id(at.base), at.offset, at.nbytes].append((slot.offset, Path(file).name, offset, entry.nbytes))
    return {key: [each[1:] for each in sorted(found)] for key, found in parts.items()
            if sum(each[3] for each in found) == key[2]}


def confirm(found: Ranges | None, directory: Path, content: memoryview) -> list[Sequence[Any]]:
    """Returns the ranges if their bytes are the content; none otherwise."""
    at = 0
    for name, offset, nbytes in found or ():
        if not _same(directory / name, offset, content[at:at + nbytes]): return []
        at += nbytes
    return list(found or ())


def _same(path: Path, offset: int, content: memoryview) -> bool:
    file = os.open(path, os.O_RDONLY)
    try: return all(os.pread(file, CHUNK, offset + at)[:len(content) - at] == content[at:at + CHUNK]
                    for at in range(0, len(content), CHUNK))
    finally: os.close(file)


if __name__ == "__main__": sys.exit(main())
