"""A whole model directory, quantised shard by shard.

Protocol: `quantize(source, scheme, out)` rounds the matrices of all linear layers, tensor by tensor, and
writes them and all else to a folder beside `out`, which gets that name at the end: what is interrupted leaves
no directory that loads. Called again with the same settings it goes on after the last whole shard. The result
depends on the weights and the settings alone.

A linear layer's matrix is a tensor of floats with two dimensions, named …weight, that is no embedding. Layers
of `ignored` stay as they are: names, or regular expressions after `re:`.
"""
from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from tinygrad_nv.errors import ModelError, RequestError
from tinygrad_nv.models.checkpoint import (
    TensorEntry,
    open_checkpoint,
    read_array,
    safetensors_dtype,
    widen_bfloat16,
)
from tinygrad_nv.models.config import read_json
from tinygrad_nv.quantize.compress import Stored, compressed, keeping
from tinygrad_nv.quantize.files import unwritable, write
from tinygrad_nv.quantize.rounding import Rounded, rounded
from tinygrad_nv.quantize.schemes import BLOCK, Scheme, config

FLOATS = ("float32", "float16", "bfloat16")
IGNORED = ("lm_head", "re:.*embed.*", "re:.*mlp.gate$", "re:.*router.*")
CHUNK = 1 << 24             # elements that are rounded at a time
MOST_TENSORS = 4            # of one quantised matrix
SETTINGS = "quantize.json"  # of a folder that is not finished
INDEX = "model.safetensors.index.json"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class LayerError:
    """A layer and the root mean square of what rounding changed, relative to its matrix's."""
    layer: str
    error: float


@dataclass(frozen=True)
class Result:
    """What was made: bytes of the weights before and after, and errors of layers, the worst first."""
    out: Path
    before: int
    after: int
    layers: tuple[LayerError, ...]


def quantize(source: Path, scheme: Scheme, out: Path, ignored: Sequence[str] = IGNORED,
             progress: Progress | None = None) -> Result:
    """Quantises a directory. `progress(done, total)` counts bytes that are read. Raises `ModelError` for a
    model that is quantised already, `RequestError` for an `out` that exists, `WeightError` for a disk that is
    full."""
    data = read_json(source / "config.json")
    if data.get("quantization_config"):
        raise ModelError(f"{source} is quantised already", "a model of float32, float16 or bfloat16 weights",
                         "quantise the model that it was made from")
    if out.exists(): raise RequestError(f"{out} exists", "a new directory", "choose another --out")
    entries = open_checkpoint(source).entries
    names = [name for name, entry in entries.items() if _linear(entry) and not _matches(name, ignored)]
    if not names: raise ModelError(f"{source} has no linear layer to quantise", "matrices", "ignore fewer")
    partial = out.with_name(out.name + ".partial")
    try:
        found = _Progress(progress or (lambda done, total: None), _nbytes(entries))
        sizes, errors = _shards(partial, scheme, ignored, entries, set(names), found)
        kept = sorted({name.removesuffix(".weight") for name, each in entries.items()
                       if _linear(each) and name not in names and not _embedding(name)})
        _finish(source, partial, data | {"quantization_config": config(scheme, kept)}, sizes)
        partial.rename(out)
    except OSError as error: raise unwritable(out, error) from error
    worst = sorted((LayerError(name, error) for name, error in errors.items()), key=lambda one: -one.error)
    return Result(out, _nbytes(entries), sum(size for each in sizes.values() for size in each.values()),
                  tuple(worst))


def _nbytes(entries: Mapping[str, TensorEntry]) -> int: return sum(each.nbytes for each in entries.values())


@dataclass
class _Progress:
    """Counts bytes."""
    shown: Progress
    total: int
    done: int = 0

    def add(self, nbytes: int) -> None:
        self.done += nbytes
        self.shown(self.done, self.total)


def _embedding(name: str) -> bool: return "embed" in name


def _linear(entry: TensorEntry) -> bool:
    return len(entry.shape) == 2 and entry.dtype in FLOATS and entry.name.endswith(".weight")


def _matches(name: str, patterns: Iterable[str]) -> bool:
    layer = name.removesuffix(".weight")
    return any(re.match(each[3:], layer) if each.startswith("re:") else
               layer == each or layer.endswith("." + each) for each in patterns)


def _shards(folder: Path, scheme: Scheme, ignored: Sequence[str], entries: dict[str, TensorEntry],
            names: set[str], progress: _Progress) -> tuple[dict[str, dict[str, int]], dict[str, float]]:
    """Bytes of each tensor, by file, and errors of layers."""
    settings: dict[str, Any] = {"scheme": asdict(scheme), "ignored": list(ignored), "files": {}, "errors": {}}
    file = folder / SETTINGS
    if file.exists() and (old := read_json(file)) | {"files": {}, "errors": {}} == settings: settings = old
    elif folder.exists(): shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    ordered = sorted(entries.values(), key=lambda each: each.file_offset)
    shards = [list(found) for _, found in groupby(ordered, key=lambda each: each.file_offset[0])]
    for number, shard in enumerate(shards):
        name = "model.safetensors" if len(shards) == 1 else \
            f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        if name in settings["files"]:
            progress.add(sum(each.nbytes for each in shard))
            continue
        made = _tensors(scheme, shard, names, settings["errors"], progress)
        settings["files"][name] = write(folder / name, made, MOST_TENSORS * len(shard))
        file.write_text(json.dumps(settings))
    return settings["files"], settings["errors"]


def _tensors(scheme: Scheme, shard: Sequence[TensorEntry], names: set[str], errors: dict[str, float],
             progress: _Progress) -> Iterator[tuple[str, str, np.ndarray]]:
    """What a shard becomes."""
    for entry in shard:
        array, layer = read_array(entry), entry.name.removesuffix(".weight")
        if entry.name not in names: yield entry.name, safetensors_dtype(entry), array
        else:
            made, errors[layer] = _matrix(scheme, entry, array)
            for name, (dtype, values) in made.items(): yield f"{layer}.{name}", dtype, values
        progress.add(entry.nbytes)


def _matrix(scheme: Scheme, entry: TensorEntry, array: np.ndarray) -> tuple[Stored, float]:
    """A matrix's tensors, and its error. Some rows at a time are rounded: blocks have at most `BLOCK`."""
    (n, k), keep, parts, changed, whole = entry.shape, keeping(scheme, entry.dtype), list[Rounded](), 0., 0.
    step = max(BLOCK, CHUNK // k // BLOCK * BLOCK)
    for begin in range(0, n, step):
        rows = array[begin:begin + step]
        values = widen_bfloat16(rows) if entry.dtype == "bfloat16" else rows.astype(np.float32)
        made = rounded(scheme, values, keep)
        whole += float(np.square(values, dtype=np.float64).sum())
        changed += float(np.square(values - made.matrix, dtype=np.float64).sum())
        parts.append(Rounded(made.codes, made.scales, made.zeros, values[:0]))
    codes, scales = (np.concatenate([getattr(each, name) for each in parts]) for name in ("codes", "scales"))
    zeros = None if scheme.symmetric else np.concatenate([each.zeros for each in parts
                                                          if each.zeros is not None])
    stored = compressed(scheme, Rounded(codes, scales, zeros, parts[0].matrix), entry.dtype)
    return stored, (changed / whole) ** 0.5 if whole else 0.0


def _finish(source: Path, folder: Path, data: dict[str, Any], sizes: dict[str, dict[str, int]]) -> None:
    """All else: the index, tokenizer and the like, and at last config.json."""
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.endswith(WEIGHTS) and path.name != "config.json":
            shutil.copyfile(path, folder / path.name)
    if len(sizes) > 1:
        places = {name: file for file, found in sizes.items() for name in found}
        total = sum(size for found in sizes.values() for size in found.values())
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places},
                                               indent=2))
    (folder / SETTINGS).unlink()
    (folder / "config.json").write_text(json.dumps(data, indent=2) + "\n")
