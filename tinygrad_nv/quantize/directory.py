"""A whole model directory, quantised shard by shard.

Protocol: `quantize(source, scheme, out)` rounds the matrices of all linear layers, tensor by tensor, and
writes them and all else to a folder beside `out`, which gets that name at the end: what is interrupted leaves
no directory that loads. Called again with the same settings it goes on after the last whole shard. Methods
that look at inputs make the layers of the network first (calibrate.py), and others, as a head that is not
ignored, are rounded. The result depends on the weights, the settings and the calibration text alone.

A linear layer's matrix is a tensor of floats with two dimensions, named …weight, that is no embedding. Layers
of `ignored` stay as they are: names, or regular expressions after `re:`.
"""
from __future__ import annotations

import hashlib
import json
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
)
from tinygrad_nv.models.config import read_json
from tinygrad_nv.quant.floats import as_float32
from tinygrad_nv.quantize.calibrate import Job, calibrate, list_replacements
from tinygrad_nv.quantize.compress import MOST_TENSORS, Stored, compress, keeping
from tinygrad_nv.quantize.files import unwritable, write
from tinygrad_nv.quantize.network import Source
from tinygrad_nv.quantize.rounding import Rounded, round_matrix
from tinygrad_nv.quantize.schemes import BLOCK, Scheme, config
from tinygrad_nv.quantize.text import Sequences
from tinygrad_nv.regexes import compile_pattern

FLOATS = ("float32", "float16", "bfloat16")
IGNORED = ("lm_head", "re:.*embed.*", "re:.*mlp.gate$", "re:.*moe.gate$", "re:.*router.*")
CHUNK = 1 << 24             # elements that are rounded at a time
SETTINGS = "quantize.json"  # of a folder that is not finished
LAYERS = "layers"           # of calibrated layers in it
INDEX = "model.safetensors.index.json"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class LayerError:
    """A layer and the root mean square of what rounding changed, relative to its matrix's; of its outputs on
    the calibration text where there is one."""
    layer: str
    error: float


@dataclass(frozen=True)
class Result:
    """Result of a quantisation: bytes of the weights before and after, and errors of layers, the worst
    first."""
    out: Path
    before: int
    after: int
    layers: tuple[LayerError, ...]


def quantize(source: Path, scheme: Scheme, out: Path, ignored: Sequence[str] = IGNORED,
             progress: Progress | None = None, text: Sequences | None = None,
             note: Callable[[str], None] = lambda line: None) -> Result:
    """Quantises a directory. `text` is what a calibrated scheme needs. `progress(done, total)` counts bytes
    that are read, `note` is called with a line about each calibrated layer. Raises `ModelError` for a model
    that is quantised already, `RequestError` for an `out` that exists, `WeightError` for a disk that is
    full."""
    data = require_plain(source, out)
    entries = open_checkpoint(source).entries
    names = [name for name, entry in entries.items()
             if _linear(entry) and not _embedding(name) and not _matches(name, ignored)]
    if not names: raise ModelError(f"{source} has no linear layer to quantise", "matrices", "ignore fewer")
    partial = out.with_name(out.name + ".partial")
    found = _Progress(progress or (lambda done, total: None), _nbytes(entries) * (1 + scheme.is_calibrated))
    try:
        settings = _settings(partial, scheme, ignored, text)
        if scheme.is_calibrated:
            assert text is not None, "a calibrated scheme has one"
            layers = frozenset(name.removesuffix(".weight") for name in names)
            job = Job(Source(source, max(text.lengths)), scheme, layers, text, found.add, note)
            settings["errors"] |= calibrate(job, partial / LAYERS)
            found.add(_nbytes(entries) - found.done)
        _shards(partial, scheme, settings, entries, set(names), found)
        kept = sorted({name.removesuffix(".weight") for name, each in entries.items()
                       if _linear(each) and not _embedding(name) and name not in names}
                      # readers have a head where it is the embedding, too
                      | ({"lm_head"} - {name.removesuffix(".weight") for name in names}))
        _finish(source, partial, data | {"quantization_config": config(scheme, kept)}, settings["files"])
        partial.rename(out)
    except OSError as error: raise unwritable(out, error) from error
    worst = sorted((LayerError(name, error) for name, error in settings["errors"].items()),
                   key=lambda one: -one.error)
    after = sum(size for each in settings["files"].values() for size in each.values())
    return Result(out, _nbytes(entries), after, tuple(worst))


def require_plain(source: Path, out: Path) -> dict[str, Any]:
    """Returns config.json. Raises `ModelError` for a model that is quantised already, `RequestError` for an
    `out` that exists."""
    if source.suffix == ".gguf" or (source.is_dir() and not (source / "config.json").exists()
                                    and any(source.glob("*.gguf"))):
        raise ModelError(f"{source} is a GGUF file, and quantize reads model directories",
                         "a directory with config.json and weights of float32, float16 or bfloat16",
                         "quantise the model that the file was made from, or run the file as it is: its own "
                         "types are read")
    data = read_json(source / "config.json")
    if data.get("quantization_config"):
        raise ModelError(f"{source} is quantised already", "a model of float32, float16 or bfloat16 weights",
                         "quantise the model that it was made from")
    if out.exists(): raise RequestError(f"{out} exists", "a new directory", "choose another --out")
    return data


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
    return any(compile_pattern(each[3:], "ignored layers").match(layer) if each.startswith("re:") else
               layer == each or layer.endswith("." + each) for each in patterns)


def _settings(folder: Path, scheme: Scheme, ignored: Sequence[str], text: Sequences | None) -> dict[str, Any]:
    """Returns the settings of a folder to go on with, or of a new one: bytes of each tensor, by file, and
    errors of layers."""
    ids = None if text is None else hashlib.sha256(text.ids.tobytes() + bytes(str(text.lengths), "ascii"))
    made: dict[str, Any] = {"scheme": asdict(scheme), "ignored": list(ignored),
                            "text": ids and ids.hexdigest(), "files": {}, "errors": {}}
    file = folder / SETTINGS
    if file.exists() and (old := read_json(file)) | {"files": {}, "errors": {}} == made: return old
    if folder.exists(): shutil.rmtree(folder)
    folder.mkdir(parents=True)
    file.write_text(json.dumps(made))
    return made


def _shards(folder: Path, scheme: Scheme, settings: dict[str, Any], entries: dict[str, TensorEntry],
            names: set[str], progress: _Progress) -> None:
    """Writes the files that the settings do not have."""
    calibrated = list_replacements(folder / LAYERS)
    ordered = sorted(entries.values(), key=lambda each: each.file_offset)
    shards = [list(found) for _, found in groupby(ordered, key=lambda each: each.file_offset[0])]
    for number, shard in enumerate(shards):
        name = "model.safetensors" if len(shards) == 1 else \
            f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        if name in settings["files"]:
            progress.add(sum(each.nbytes for each in shard))
            continue
        tensors = _tensors(scheme, shard, names, calibrated, settings["errors"], progress)
        settings["files"][name] = write(folder / name, tensors, MOST_TENSORS * len(shard))
        (folder / SETTINGS).write_text(json.dumps(settings))


def _tensors(scheme: Scheme, shard: Sequence[TensorEntry], names: set[str],
             calibrated: Mapping[str, Sequence[TensorEntry]], errors: dict[str, float],
             progress: _Progress) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yields the tensors that a shard becomes."""
    for entry in shard:
        layer = entry.name.removesuffix(".weight")
        if entry.name in calibrated:
            for each in calibrated[entry.name]: yield each.name, safetensors_dtype(each), read_array(each)
        elif entry.name not in names: yield entry.name, safetensors_dtype(entry), read_array(entry)
        else:
            found, errors[layer] = _matrix(scheme, entry, read_array(entry))
            for name, (dtype, values) in found.items(): yield f"{layer}.{name}", dtype, values
        progress.add(entry.nbytes)


def _matrix(scheme: Scheme, entry: TensorEntry, array: np.ndarray) -> tuple[Stored, float]:
    """A matrix's tensors, and its error. Some rows at a time are rounded: blocks have at most `BLOCK`."""
    (n, k), keep, parts, changed, whole = entry.shape, keeping(scheme, entry.dtype), list[Rounded](), 0., 0.
    step = max(BLOCK, CHUNK // k // BLOCK * BLOCK)
    for begin in range(0, n, step):
        rows = array[begin:begin + step]
        values = as_float32(rows)
        found = round_matrix(scheme, values, keep)
        whole += float(np.square(values, dtype=np.float64).sum())
        changed += float(np.square(values - found.matrix, dtype=np.float64).sum())
        parts.append(Rounded(found.codes, found.scales, found.zeros, values[:0]))
    codes, scales = (np.concatenate([getattr(each, name) for each in parts]) for name in ("codes", "scales"))
    zeros = None if scheme.symmetric else np.concatenate([each.zeros for each in parts
                                                          if each.zeros is not None])
    stored = compress(scheme, Rounded(codes, scales, zeros, parts[0].matrix), entry.dtype)
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
    if (folder / LAYERS).exists(): shutil.rmtree(folder / LAYERS)
    (folder / "config.json").write_text(json.dumps(data, indent=2) + "\n")
