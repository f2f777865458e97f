"""A bundle of a model: steps captured for each set of kernels, weights, and the model's small files.

Protocol: `compile_model(model, output, …)` starts a process for each set (capture.py), with empty caches of
its own, so that equal input makes equal bytes whatever was compiled before; then it writes one file
(bundle/container.py). Tuned schedules are those of the user's database (NV_SCHEDULES). `refer` keeps weights
that lie in the checkpoint's files as they lie in memory out of the bundle, by reference.
"""
from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinygrad_nv import errors, hooks
from tinygrad_nv.bundle import signing
from tinygrad_nv.bundle.container import Source, write_bundle
from tinygrad_nv.bundle.manifest import FileRange, Manifest, canonical
from tinygrad_nv.engine.bundled.sets import environment
from tinygrad_nv.engine.worker.step_file import sources
from tinygrad_nv.errors import BundleError, ModelError
from tinygrad_nv.tile import database
from tinygrad_nv.version import __version__

# of a model directory: what readers of models read besides weights
SMALL_FILES = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*\.(json|jinja|txt|model)")
WEIGHT_INDEX = re.compile(r".*\.index\.json")
OPTIONS = {"dtype": "auto", "max_num_seqs": 64, "max_num_batched_tokens": 512, "kv_cache_dtype": "auto",
           "page_size": 16, "speculative": None, "quantization": None}
Progress = Callable[[str, int, int], None]      # a set, steps done, steps in all


@dataclass(frozen=True)
class CompileOptions:
    """Options of a compilation: `sets` (sets.py), arguments of `LLM` by name, threads of a CPU's kernels
    (None: as many as there are), whether weights are referred to, and the key that signs."""
    sets: Sequence[str]
    options: dict[str, Any]
    threads: int | None = None
    refer: bool = False
    sign_key: Path | None = None


def compile_model(model: Path, output: Path, how: CompileOptions,
                  progress: Progress = lambda name, done, total: None) -> Manifest:
    """Writes the bundle of a model to `output`. Raises what loading the model raises, and `BundleError`."""
    if not model.is_dir():
        raise ModelError(f"{model} is no directory", "a model directory with config.json and safetensors",
                         "of a GGUF file no bundle is made: serve it as it is")
    if how.sign_key is not None: signing.sign(b"", how.sign_key)    # an error now, not after minutes
    output.parent.mkdir(parents=True, exist_ok=True)
    # weights wait beside the bundle, where there is room for them
    with tempfile.TemporaryDirectory(prefix="tinygrad-nv-", dir=output.parent) as place:
        folders = [_run_capture(model, Path(place) / str(i), name, how, progress)
                   for i, name in enumerate(how.sets)]
        found = [json.loads((folder / "set.json").read_bytes()) for folder in folders]
        parts = list(_sources(Path(place), folders, found, model))
        about = {"options": OPTIONS | how.options, "sets": [each["name"] for each in found],
                 "made_by": {"tinygrad_nv": __version__, "tinygrad": hooks.TINYGRAD_VERSION,
                             "sources": sources()}}
        if how.refer: about["weights"] = str(model.resolve())
        return write_bundle(output, "model", about, parts, how.sign_key)


def _run_capture(model: Path, folder: Path, name: str, how: CompileOptions, progress: Progress) -> Path:
    """Runs the process that captures a set."""
    folder.mkdir()
    order = {"model": str(model.resolve()), "refer": how.refer,
             "options": {name: value for name, value in how.options.items() if value is not None}}
    (folder / "order.json").write_text(json.dumps(order))
    (folder / "cache").mkdir()
    # as the user's database, so that schedules that come with the package are known, too
    if (tuned := database.path()).is_file(): shutil.copy(tuned, folder / "cache" / "schedules.json")
    own = {**os.environ, **environment(name), "NV_CACHE_DIR": str(folder / "cache"),
           "CACHEDB": str(folder / "cache.db")}
    if how.threads is not None: own["NUM_CPU_THREADS"] = str(how.threads)
    with subprocess.Popen([sys.executable, "-m", "tinygrad_nv.engine.bundled.capture", str(folder)], env=own,
                          stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if len(words := line.split()) == 2 and all(each.isdigit() for each in words):
                progress(name, *map(int, words))
    if process.returncode: raise _failure(folder, name, process.returncode)
    return folder


def _failure(folder: Path, name: str, status: int) -> errors.NVError:
    """The error of a process."""
    try: told = json.loads((folder / "error.json").read_text())
    except OSError:
        return BundleError(f"the process that captures {name} ended with status {status}",
                           "a process that ends well", "its words are above")
    kind = getattr(errors, told["type"], BundleError)
    made: errors.NVError = kind(*told["words"])
    return made


def _sources(place: Path, folders: Sequence[Path], found: Sequence[dict[str, Any]],
             model: Path) -> Iterable[Source]:
    """The parts of the bundle, in order."""
    for path in sorted(model.iterdir()):
        if path.is_file() and SMALL_FILES.fullmatch(path.name) and not WEIGHT_INDEX.fullmatch(path.name):
            yield Source(f"model/{path.name}", path)
    names: dict[str, str] = {}      # of a part of weights by its hash
    weights: list[Source] = []
    for folder, each in zip(folders, found, strict=True):
        own, parts = each["name"], dict[str, str]()
        for name, what in each.pop("weights").items():
            if (digest := what["sha256"]) not in names:
                names[digest] = f"weights/{name}" if folder is folders[0] else f"weights/{own}/{name}"
                ranges = tuple(FileRange(*one) for one in what.get("ranges", ()))
                data: bytes | Path = place / "weights" / digest
                if ranges: data = b""
                weights.append(Source(names[digest], data, ranges, what["bytes"], digest))
            parts[name] = names[digest]
        yield Source(f"{own}/set.json", canonical({**each, "parts": parts}))
        for name in ("programs.json", "code", *(["pool"] if each["pool"] else []),
                     *(part for part, _ in each["steps"].values())):
            yield Source(f"{own}/{name}", folder / name)
    if (tuned := database.path()).is_file(): yield Source("schedules.json", tuned)
    yield from weights
