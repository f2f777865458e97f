"""Quantisation that looks at layers' inputs: GPTQ, AWQ, SmoothQuant, static scales.

Protocol: `calibrate(job, folder)` runs the model over a text, layer by layer: what goes into each linear
layer is summed up, the layer is quantised, and its quantised output is the next one's input. It writes a
file of tensors for each layer to `folder`; `list_replacements(folder)` lists them by the tensor of the
checkpoint that they stand for. In memory are one layer's weights, and the layer's input for all of the text,
which is also on disk: an interrupted run goes on after the last whole layer. The same text, model and machine
give the same bytes.
"""
from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tinygrad_nv.models.checkpoint import TensorEntry, read_header
from tinygrad_nv.models.config import read_json
from tinygrad_nv.quant.activations import E4M3_MAX
from tinygrad_nv.quant.readers.reader import Activations
from tinygrad_nv.quant.types import Scale
from tinygrad_nv.quantize.compress import FLOATS, MOST_TENSORS, compress, keeping, rounding_to, store_as
from tinygrad_nv.quantize.files import Tensors, write
from tinygrad_nv.quantize.gptq import gptq
from tinygrad_nv.quantize.network import (
    DOWN,
    GATE,
    UP,
    Block,
    K,
    Linear,
    O,
    Q,
    Source,
    V,
    advance,
    batches,
)
from tinygrad_nv.quantize.rounding import Keep, Rounded, require_whole_groups, round_matrix
from tinygrad_nv.quantize.schemes import Scheme
from tinygrad_nv.quantize.smoothing import Inputs, scale_block
from tinygrad_nv.quantize.text import Sequences

SAMPLE = 2048       # tokens whose inputs are kept
TOGETHER = ((Q, K, V), (O,), (GATE, UP), (DOWN,))   # layers with the same inputs
STATE = "calibration.json"


@dataclass(frozen=True)
class Job:
    """A calibration: `layers` are the names of those to quantise. `done` is called with the bytes of each
    layer that is finished, `note` with a line about it."""
    source: Source
    scheme: Scheme
    layers: frozenset[str]
    text: Sequences
    done: Callable[[int], None]
    note: Callable[[str], None]


def calibrate(job: Job, folder: Path) -> dict[str, float]:
    """Quantises all layers: the relative errors of their outputs. Raises `WeightError` for groups that do not
    divide a matrix, and for a disk that is full."""
    for name in sorted(job.layers):
        require_whole_groups(job.scheme, job.source.entries[f"{name}.weight"].shape[1])
    folder.mkdir(exist_ok=True)
    state: dict[str, Any] = {"errors": {}, "layers": 0}
    if (folder / STATE).exists(): state = read_json(folder / STATE)
    errors, first = state["errors"], state["layers"]
    x = np.load(_inputs(folder, first)) if first else job.source.embed(job.text.ids)
    for index in range(count := job.source.config.num_layers):
        names = [name for name in job.source.entries if name.startswith(f"model.layers.{index}.")]
        if index >= first:
            begun = time.perf_counter()
            block, tensors, found = _layer(job, index, x)
            write(_file(folder, index), tensors, MOST_TENSORS * len(names))
            errors |= found
            advance(block, x, job.text.lengths)
            _save(folder, index + 1, x, errors)
            worst = max(found.items(), key=lambda one: one[1], default=("nothing to quantise", 0.0))
            job.note(f"layer {index + 1} of {count}: {time.perf_counter() - begun:.1f} s, largest error "
                     f"{worst[1]:.2%} ({worst[0]})")
        job.done(sum(job.source.entries[name].nbytes for name in names))
    _inputs(folder, count).unlink(missing_ok=True)
    return errors


def list_replacements(folder: Path) -> dict[str, list[TensorEntry]]:
    """Tensors that were made, by the name of the checkpoint's tensor that they replace."""
    found: dict[str, list[TensorEntry]] = {}
    for path in sorted(folder.glob("layer-*.safetensors")):
        for entry in read_header(path):
            layer, _, last = entry.name.rpartition(".")
            plain = last == "bias" or layer.endswith("norm")
            found.setdefault(entry.name if plain else f"{layer}.weight", []).append(entry)
    return found


def _file(folder: Path, index: int) -> Path: return folder / f"layer-{index:05}.safetensors"


def _inputs(folder: Path, index: int) -> Path: return folder / f"inputs-{index:05}.npy"


def _save(folder: Path, layers: int, x: np.ndarray, errors: Mapping[str, float]) -> None:
    """Saves that so many layers are finished: the next one's input first, then the file that names it."""
    np.save(_inputs(folder, layers), x)
    partial = folder / f"{STATE}.partial"
    partial.write_text(json.dumps({"errors": errors, "layers": layers}))
    partial.replace(folder / STATE)
    _inputs(folder, layers - 1).unlink(missing_ok=True)


# **** one layer ****

@dataclass
class _Seen:
    """Sums up what goes into linear layers, by the first name of those with the same inputs."""
    hessians: bool
    step: int                       # of tokens that are kept
    tokens: int = 0

    def __post_init__(self) -> None:
        self.sums, self.largest = dict[str, np.ndarray](), dict[str, np.ndarray]()
        self.samples, self.gram = dict[str, list[np.ndarray]](), dict[str, np.ndarray]()

    def __call__(self, name: str, x: np.ndarray) -> None:
        if name not in (Q, O, GATE, DOWN): return
        size = np.abs(x)
        self.sums[name] = self.sums.get(name, 0) + size.sum(0, dtype=np.float64)
        self.largest[name] = np.maximum(self.largest.get(name, 0), size.max(0))
        self.samples.setdefault(name, []).append(x[-self.tokens % self.step::self.step].copy())
        if self.hessians: self.gram[name] = self.gram.get(name, 0) + (x.T @ x).astype(np.float64)

    def inputs(self, name: str) -> Inputs:
        """Returns the inputs of a layer."""
        return Inputs((self.sums[name] / self.tokens).astype(np.float32), self.largest[name],
                      np.concatenate(self.samples[name]))


def _layer(job: Job, index: int, x: np.ndarray) -> tuple[Block, Tensors, dict[str, float]]:
    """The quantised layer, what is written of it, errors."""
    block, layer, scheme = job.source.block(index), f"model.layers.{index}", job.scheme
    seen = _Seen(scheme.method == "gptq", -(-len(x) // SAMPLE))
    for rows, some in batches(job.text.lengths):
        block(x[rows], some, seen)
        seen.tokens += rows.stop - rows.start
    inputs = {name: each for names in TOGETHER for each in [seen.inputs(names[0])] for name in names}
    chosen = [name for names in TOGETHER for name in names if f"{layer}.{name}" in job.layers]
    names = job.source.config.names.norms[0], Q
    norms, weights = (job.source.entries[f"{layer}.{name}.weight"].dtype for name in names)
    scales: Mapping[str, np.ndarray] = {}
    changed = block
    if scheme.method in ("awq", "smoothquant"):
        result = scale_block(scheme, block, inputs, chosen, rounding_to(norms))
        changed, scales = result.block, result.scales
        inputs = {name: _divide(each, scales.get(name)) for name, each in inputs.items()}
    keep = keeping(scheme, weights)
    found = dict(_matrices(scheme, changed, chosen, inputs, seen, keep))
    linears, errors = dict(changed.linears), dict[str, float]()
    for name, each in found.items():
        scale = _input_scale(scheme, inputs[name], keep)
        errors[f"{layer}.{name}"] = _error(changed.linears[name].weight, each.matrix, inputs[name].sample)
        linears[name] = replace(linears[name], weight=each.matrix, activations=_activations(scheme),
                                input_scale=scale)
    changes = _find_changes(job, layer, block, changed, found, linears)
    return replace(changed, linears=linears), changes, errors


def _divide(inputs: Inputs, s: np.ndarray | None) -> Inputs:
    return inputs if s is None else Inputs(inputs.mean / s, inputs.largest / s, inputs.sample / s)


def _matrices(scheme: Scheme, block: Block, chosen: Sequence[str], inputs: Mapping[str, Inputs], seen: _Seen,
              keep: Keep) -> Iterator[tuple[str, Rounded]]:
    """The layer's matrices, quantised."""
    for names in TOGETHER:
        here = [name for name in names if name in chosen]
        if scheme.method == "gptq" and here:
            weights = [block.linears[name].weight for name in here]
            whole, first = gptq(scheme, np.concatenate(weights), seen.gram[names[0]], keep), 0
            for name, w in zip(here, weights, strict=True):
                yield name, _rows(whole, first, first + len(w))
                first += len(w)
        else:
            for name in here:
                yield name, _round_clipped(scheme, name, block.linears[name].weight, inputs[name], keep)


def _rows(made: Rounded, begin: int, end: int) -> Rounded:
    return Rounded(made.codes[begin:end], made.scales[begin:end], None if made.zeros is None else
                   made.zeros[begin:end], made.matrix[begin:end], made.groups)


def _round_clipped(scheme: Scheme, name: str, w: np.ndarray, inputs: Inputs, keep: Keep) -> Rounded:
    """To the nearest; of AWQ with the ranges of groups that change a layer's outputs least. Queries and keys
    keep theirs, as their outputs are multiplied with each other."""
    if scheme.method != "awq" or scheme.observer != "mse": return round_matrix(scheme, w, keep)
    if name in (Q, K): return round_matrix(replace(scheme, observer="minmax"), w, keep)
    x = np.ascontiguousarray(inputs.sample.reshape(len(inputs.sample), -1, scheme.group).transpose(1, 0, 2))
    return round_matrix(scheme, w, keep, x.transpose(0, 2, 1) @ x)


def _error(w: np.ndarray, made: np.ndarray, x: np.ndarray) -> float:
    """Root mean square of what changed in the outputs, relative to them."""
    whole, changed = (float(np.square(x @ each.T).sum(dtype=np.float64)) for each in (w, made - w))
    return (changed / whole) ** 0.5 if whole else 0.0


def _activations(scheme: Scheme) -> Activations | None:
    if not scheme.activations: return None
    element, static = "e4m3" if scheme.type == "float" else "int8", scheme.activations == "tensor"
    return Activations(element, Scale(int(not static), 0), static)


def _input_scale(scheme: Scheme, inputs: Inputs, keep: Keep) -> float | None:
    if scheme.activations != "tensor": return None
    most = np.float32(E4M3_MAX if scheme.type == "float" else 127.5)
    return float(keep(np.maximum(inputs.largest.max(keepdims=True) / most, np.float32(1e-12)))[0])


def _find_changes(job: Job, layer: str, before: Block, after: Block, found: Mapping[str, Rounded],
                  linears: Mapping[str, Linear]) -> Tensors:
    """The tensors of a layer that are not those of the checkpoint."""
    entries = job.source.entries
    for name in before.norms:
        if after.norms[name] is not before.norms[name]:
            kind = FLOATS[entries[f"{layer}.{name}.weight"].dtype]
            yield f"{layer}.{name}.weight", *store_as(kind, after.norms[name])
    for name, each in found.items():
        entry, bias = entries[f"{layer}.{name}.weight"], linears[name].bias
        for key, tensor in compress(job.scheme, each, entry.dtype).items():
            yield f"{layer}.{name}.{key}", *tensor
        scale = linears[name].input_scale
        if scale is not None:
            yield f"{layer}.{name}.input_scale", *store_as(FLOATS[entry.dtype], np.array([scale], np.float32))
        if bias is not None and bias is not before.linears[name].bias:
            yield f"{layer}.{name}.bias", *store_as(FLOATS[entries[f"{layer}.{name}.bias"].dtype], bias)
