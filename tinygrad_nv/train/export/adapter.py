"""Low-rank adapters (LoRA, arXiv 2106.09685) as PEFT saves them.

Protocol: `save_adapter(directory, matrices, rank, alpha)` writes adapter_config.json and
adapter_model.safetensors, which PEFT, vLLM and this package's engine load; `load_adapter(directory, shapes)`
reads such a directory, to train on. Matrices are by the names of the base's modules, without ".weight": A
(r, in) and B (out, r); a layer adds s · B A x to W x, with s = alpha / r, or alpha / √r with `rslora`
(arXiv 2312.03732). In the file they are not scaled.

Files of a directory change together (train/files.py): adapter_config.json is what makes it an adapter.
"""
from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tinygrad import Tensor
from tinygrad.dtype import DType

from tinygrad_nv.errors import ModelError
from tinygrad_nv.models.peft import (
    CONFIG,
    PREFIX,
    floats,
    list_tensors,
    pair_matrices,
    pattern_of,
    rank_of,
    read_config,
    require_shapes,
    require_targets,
    scale_of,
    targets_of,
)
from tinygrad_nv.train.export.checkpoint_tensors import CONFIG_NAMES, FLOATS, elements
from tinygrad_nv.train.files import Source, replace_folder, write_file, write_tensors

WEIGHTS = "adapter_model.safetensors"
STALE = ("adapter_model.bin",)
Matrices = Mapping[str, tuple[Tensor, Tensor]]
ALL_LINEAR = "all-linear"
LARGEST_RANK = 1 << 20
# what else PEFT writes
FIXED = {"use_dora": False, "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True,
         "modules_to_save": None, "layers_to_transform": None, "layers_pattern": None}


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter as it is trained: of each module A (r, in) and B (out, r), float32, not scaled. `scales` are
    the factors of B A by module; `alphas` those of modules that have another than `alpha`. `target_modules`
    is what the configuration says, `dropout` lora_dropout."""
    matrices: Mapping[str, tuple[np.ndarray, np.ndarray]]
    scales: Mapping[str, float]
    rank: int
    alpha: float
    alphas: Mapping[str, float]
    rslora: bool
    target_modules: str | tuple[str, ...] | None
    dropout: float
    base_model: str


def save_adapter(directory: str | Path, matrices: Matrices, rank: int, alpha: float, *, rslora: bool = False,
                 alphas: Mapping[str, float] | None = None, target_modules: str | Sequence[str] | None = None,
                 dropout: float = 0.0, base_model: str = "", dtype: DType | None = None) -> Path:
    """Writes an adapter: its directory.

    A module whose A has another number of rows than `rank` gets its own in rank_pattern, and the scale that
    follows from it; `alphas` are of modules that have another than `alpha`. `target_modules` is what the
    adapter was made for, in PEFT's terms; left out, it is the modules' whole names. `dropout` is what it was
    trained with, `base_model` the directory or the name of its base. Stored as `dtype`, or as each tensor is.
    Raises `ModelError` for matrices that fit no adapter, `CheckpointError` for a directory that cannot be
    written."""
    _require(matrices, rank, alpha, dtype)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base_model or None,
              "r": rank, "lora_alpha": alpha, "lora_dropout": dropout, "use_rslora": rslora, "bias": "none",
              "target_modules": _targets(target_modules, matrices),
              "rank_pattern": {name: int(a.shape[0]) for name, (a, _) in sorted(matrices.items())
                               if a.shape[0] != rank},
              "alpha_pattern": dict(sorted((alphas or {}).items())), **FIXED}
    Tensor.realize(*(each for pair in matrices.values() for each in pair))
    sources = dict(_sources(matrices, dtype))
    def write(folder: Path) -> None:
        write_tensors(folder / WEIGHTS, sources)
        write_file(folder / CONFIG, ((json.dumps(config, indent=2) + "\n").encode(),))
    return replace_folder(Path(directory), CONFIG, STALE, write,
                          sum(each.nbytes for each in sources.values()))


def _require(matrices: Matrices, rank: int, alpha: float, dtype: DType | None) -> None:
    """Raises `ModelError` for what is no adapter."""
    if not matrices:
        raise ModelError("the adapter has no matrices", "A and B of a module at least", "adapt one")
    if not 1 <= rank < LARGEST_RANK or not 0 <= alpha < LARGEST_RANK:
        raise ModelError(f"rank is {rank}, alpha {alpha}", "rank ≥ 1 and alpha ≥ 0, less than a million",
                         "correct them")
    for name, (a, b) in matrices.items():
        if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
            raise ModelError(f"{name}: A is {list(a.shape)}, B {list(b.shape)}", "A (r, in) and B (out, r)",
                             "pass them as PEFT has them")
        for each in (a, b):
            if (dtype or each.dtype) not in FLOATS or each.dtype not in FLOATS:
                raise ModelError(f"{name}: a matrix of {each.dtype} is to be stored as {dtype or each.dtype}",
                                 f"one of: {', '.join(CONFIG_NAMES.values())}", "cast it")


def _targets(given: str | Sequence[str] | None, matrices: Mapping[str, Any]) -> str | list[str]:
    """target_modules of the configuration. Raises `ModelError` for a module that is not among them."""
    if given is None: return sorted(matrices)
    if given == ALL_LINEAR: return sorted({name.rpartition(".")[2] for name in matrices})
    known = set(targets_of(given, matrices))
    if (other := next((name for name in matrices if name not in known), None)) is not None:
        raise ModelError(f"target_modules is {given!r}, without {other}", "all modules that have matrices",
                         "leave target_modules out, or add it")
    return given if isinstance(given, str) else sorted(given)


def _sources(matrices: Matrices, dtype: DType | None) -> Iterator[tuple[str, Source]]:
    for name, pair in sorted(matrices.items()):
        for half, tensor in zip("AB", pair, strict=True):
            yield f"{PREFIX}{name}.lora_{half}.weight", elements(tensor, dtype or tensor.dtype)


def load_adapter(directory: str | Path, shapes: Mapping[str, tuple[int, int]]) -> LoadedAdapter:
    """An adapter of PEFT's; `shapes` are (out, in) of the base's modules that can have one, by name
    (models.lora.adapted). Raises `ModelError` for one that is not LoRA alone, `WeightError` for matrices that
    do not fit the base."""
    path = Path(directory)
    config, entries = read_config(path), list_tensors(path)
    pairs = pair_matrices(entries, path, shapes)
    require_targets(config, pairs, shapes, path)
    for module, (a, b) in pairs.items():
        require_shapes(module, a, b, shapes[module], config, LARGEST_RANK, path)
    targets = config.get("target_modules")
    scales = {module: scale_of(config, module, rank_of(config, module)) for module in sorted(pairs)}
    patterns = config.get("alpha_pattern") or {}
    alphas = {module: float(patterns[key]) for module in sorted(pairs)
              if (key := pattern_of(patterns, module)) is not None}
    return LoadedAdapter({module: (floats(a), floats(b)) for module, (a, b) in sorted(pairs.items())}, scales,
                         int(config.get("r", 8)), float(config.get("lora_alpha", 8)), alphas,
                         bool(config.get("use_rslora")),
                         tuple(targets) if isinstance(targets, list) else targets,
                         float(config.get("lora_dropout") or 0.0),
                         str(config.get("base_model_name_or_path") or ""))
