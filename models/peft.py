"""A PEFT directory: adapter_config.json and adapter_model.safetensors (or adapter_model.bin), checked.

Protocol: `read_adapter(directory, shapes, rank, dtype)` returns the matrices of each projection, or raises:
`ModelError` for a directory that is no adapter, or one that changes what adapters cannot change here;
`WeightError` for tensors that are missing, unexpected, or of another shape than the base model has.
`shapes` are (out, in) of the base's projections by their Hugging Face names.

Of a module named m: r = rank_pattern, else r; alpha = alpha_pattern, else lora_alpha; the scale is alpha / r,
with use_rslora alpha / √r. Keys of patterns match as PEFT has it: the last parts of a name, or a regular
expression of them. The scale is multiplied into B in float32, and rounded once.
"""
from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tinygrad.dtype import DType

from tinygrad_nv.errors import ModelError, WeightError, brief
from tinygrad_nv.quant.floats import as_float32
from tinygrad_nv.regexes import Pattern, compile_pattern, require_few

from .checkpoint import (
    FLOAT_BYTES,
    PyTorchFiles,
    Safetensors,
    TensorEntry,
    convert,
    dtype_error,
    in_index_order,
    read_array,
)
from .config import read_json
from .lora import BITS, AdapterMatrices
from .multimodal import language_entries

CONFIG, FILES = "adapter_config.json", (("adapter_model.safetensors", Safetensors),
                                        ("adapter_model.bin", PyTorchFiles))
PREFIX = "base_model.model."
MAX_SCALE = 1 << 20     # limit: ranks and alphas of an adapter_config.json
MERGE = "merge the adapter into the weights (PEFT's merge_and_unload)"
NAMED = re.compile(r"(.+)(\.lora_[AB])\.([^.]+)(\.weight)")
EXPERTS = re.compile(r"\.(experts|block_sparse_moe|router)(\.|$)|\.mlp\.gate$")
# what adapters of other kinds change; a value that is none of these is refused
OFF: tuple[Any, ...] = (None, False, [], {}, "")
REFUSED = {"use_dora": "DoRA normalises whole weights",
           "use_qalora": "QALoRA pools inputs by groups",
           "use_bdlora": "block-diagonal adapters have other matrices",
           "lora_bias": "biases of adapters are not added",
           "modules_to_save": "modules that were trained whole are not exchanged",
           "trainable_token_indices": "embeddings are the base model's",
           "target_parameters": "parameters of experts are the base model's",
           "layer_replication": "layers are the base model's",
           "alora_invocation_tokens": "adapters change all tokens of a request",
           "arrow_config": "adapters are not routed by token", "kasa_config": "it has other matrices",
           "monteclora_config": "it has other matrices"}
# ways to begin an adapter in which PEFT changes the base model, as often as it loads the adapter
OF_OTHER_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class Adapter:
    """The matrices of an adapter, by projection; `digest` is a hash of all that they are made of."""
    name: str
    matrices: Mapping[str, AdapterMatrices]
    digest: bytes

    @property
    def rank(self) -> int:
        """The largest."""
        return max(len(each.a) for each in self.matrices.values())

    @property
    def nbytes(self) -> int:
        """In host memory."""
        return sum(each.a.nbytes + each.b.nbytes for each in self.matrices.values())


def read_adapter(name: str, directory: Path, shapes: Mapping[str, tuple[int, int]], rank: int,
                 dtype: DType) -> Adapter:
    """The adapter in a directory, for slots of `rank` and `dtype`. Raises `ModelError`."""
    config = read_config(directory)
    entries = list_tensors(directory)
    pairs = pair_matrices(entries, directory, shapes)
    require_targets(config, pairs, shapes, directory)
    digest, matrices = hashlib.blake2b(str(dtype).encode(), digest_size=16), dict[str, AdapterMatrices]()
    for module in sorted(pairs):
        a, b = pairs[module]
        require_shapes(module, a, b, shapes[module], config, rank, directory)
        scale, (first, second) = scale_of(config, module, a.shape[0]), (floats(one) for one in (a, b))
        scaled = second if scale == 1 else second * np.float32(scale)
        made = AdapterMatrices(_bits(first, dtype), _bits(np.ascontiguousarray(scaled.T), dtype))
        for each in (module.encode(), repr(made.a.shape).encode(), made.a.data.cast("B"),
                     made.b.data.cast("B")): digest.update(each)
        matrices[module] = made
    return Adapter(name, matrices, digest.digest())


def floats(entry: TensorEntry) -> np.ndarray:
    """A tensor in float32."""
    if entry.strides is None: return as_float32(read_array(entry))
    raw = read_array(TensorEntry(entry.name, entry.dtype, (int(np.prod(entry.shape)),), entry.file_offset))
    data = in_index_order(raw.data.cast("B"), entry)
    return np.frombuffer(convert(data, entry.dtype, _FLOAT32), np.float32).reshape(entry.shape)


def _bits(values: np.ndarray, dtype: DType) -> np.ndarray:
    """float32 in a dtype."""
    data = convert(np.ascontiguousarray(values, np.float32).reshape(-1).data.cast("B"), "float32", dtype)
    return np.frombuffer(data, BITS[dtype]).reshape(values.shape)


_FLOAT32 = next(each for each in BITS if each.itemsize == 4)


# **** adapter_config.json ****

def read_config(directory: Path) -> Mapping[str, Any]:
    """The configuration. Raises `ModelError` where there is none, or one that is not served."""
    path = directory / CONFIG
    if not path.is_file(): raise not_an_adapter(directory)
    config: Mapping[str, Any] = read_json(path)
    if config.get("peft_type") != "LORA":
        raise ModelError(f"{path}: peft_type is {brief(config.get('peft_type'))}", "LORA",
                         f"use a LoRA adapter, or {MERGE}")
    for key, why in REFUSED.items():
        if not any(type(config.get(key)) is type(off) and config.get(key) == off for off in OFF):
            raise ModelError(f"{path}: {key} is {brief(config[key])}, and {why}", f"{key} left out",
                             f"{MERGE}, or train one without")
    if config.get("bias", "none") != "none":
        raise ModelError(f"{path}: bias is {brief(config['bias'])}, and biases are the base model's", "none",
                         f"{MERGE}, or train one with bias='none'")
    begun = config.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(OF_OTHER_BASES):
        raise ModelError(f"{path}: init_lora_weights is {brief(begun)}, and PEFT takes such an adapter's "
                         "first values off the base model's weights", "an adapter to the model as it is",
                         "save it with path_initial_model_for_weight_conversion (PEFT)")
    for key, least in (("r", 1), ("lora_alpha", 0)):
        value = config.get(key, 8)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < MAX_SCALE:
            raise ModelError(f"{path}: {key} is {brief(value)}", f"a number ≥ {least}, below {MAX_SCALE:,}",
                             "correct the file")
    for key in ("rank_pattern", "alpha_pattern"):
        _require_pattern(path, key, config.get(key) or {})
    targets = config.get("target_modules")
    if not isinstance(targets, str | None) and not (
            isinstance(targets, list) and all(isinstance(each, str) for each in targets)):
        raise ModelError(f"{path}: target_modules is {brief(targets)}",
                         "a regular expression, or a list of names of modules", "correct the file")
    return config


def _require_pattern(path: Path, key: str, given: Any) -> None:
    def fits(name: Any, value: Any) -> bool:
        if not isinstance(name, str): return False
        pattern_for(name, f"{path}: {key}")
        return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < MAX_SCALE
    if isinstance(given, dict): require_few(len(given), f"{path}: {key}")
    if not isinstance(given, dict) or not all(fits(*each) for each in given.items()):
        raise ModelError(f"{path}: {key} is {brief(given)}", "an object of numbers by names of modules",
                         "correct the file")


def not_an_adapter(directory: Path) -> ModelError:
    """Returns the error of a path that has no adapter_config.json."""
    expected = f"a directory with {CONFIG} and adapter_model.safetensors, as PEFT saves them"
    if not directory.exists(): what = "does not exist"
    elif directory.is_file(): what = "is a file"
    elif (directory / "config.json").is_file(): what = "is a model, not an adapter: it has a config.json"
    else: what = f"has no {CONFIG}"
    fix = "pass its directory" if directory.is_file() and (directory.parent / CONFIG).is_file() else \
        "serve it as the model" if (directory / "config.json").is_file() else "check the path of the adapter"
    return ModelError(f"{directory} {what}", expected, fix)


def base_of(directory: Path) -> str | None:
    """The base model that an adapter's configuration names; None of a directory that is no adapter."""
    if not (directory / CONFIG).is_file(): return None
    return str(read_json(directory / CONFIG).get("base_model_name_or_path") or "unknown")


def pattern_of(patterns: Mapping[str, Any], module: str) -> str | None:
    """The first key that matches a module."""
    return next((key for key in patterns if pattern_for(key, f"{CONFIG}: patterns").match(module)), None)


def pattern_for(key: str, where: str) -> Pattern:
    """The regular expression of a module's last parts. Raises `ModelError`."""
    compile_pattern(key, where)     # so that an error names the key alone
    return compile_pattern(rf"(.*\.)?({key})$", where)


def rank_of(config: Mapping[str, Any], module: str) -> int:
    """Returns the rank that the configuration gives a module."""
    patterns = config.get("rank_pattern") or {}
    key = pattern_of(patterns, module)
    return int(config.get("r", 8) if key is None else patterns[key])


def scale_of(config: Mapping[str, Any], module: str, rank: int) -> float:
    """By which B A is multiplied."""
    patterns = config.get("alpha_pattern") or {}
    key = pattern_of(patterns, module)
    alpha = float(config.get("lora_alpha", 8) if key is None else patterns[key])
    return alpha / rank ** 0.5 if config.get("use_rslora") else alpha / rank


# **** tensors ****

def list_tensors(directory: Path) -> dict[str, TensorEntry]:
    """Tensors of the adapter's file, without PEFT's prefix. Raises `WeightError`."""
    for name, kind in FILES:
        if not (directory / name).is_file(): continue
        checkpoint = kind()
        checkpoint.add(directory / name)
        found = _without_names({key.removeprefix(PREFIX): entry for key, entry in checkpoint.entries.items()},
                               directory)
        made = language_entries(found)
        return found if len(made) != len(found) else made
    raise WeightError(f"{directory} has {CONFIG}, and no weights", " or ".join(name for name, _ in FILES),
                      "download the adapter again")


def _without_names(entries: Mapping[str, TensorEntry], directory: Path) -> dict[str, TensorEntry]:
    """Entries without the adapter's name, which a state_dict of PEFT's model has: lora_A.default.weight.
    Raises `WeightError` for several adapters in one file."""
    found = {key: NAMED.fullmatch(key) for key in entries}
    names = {match[3] for match in found.values() if match}
    if len(names) > 1:
        raise WeightError(f"{directory} has the adapters {', '.join(sorted(names))} in one file",
                          "one adapter", "save one with PEFT's save_pretrained(selected_adapters=[…])")
    return {match[1] + match[2] + match[4] if (match := found[key]) else key: entry
            for key, entry in entries.items()}


def pair_matrices(entries: Mapping[str, TensorEntry], directory: Path,
                  shapes: Mapping[str, tuple[int, int]]) -> dict[str, tuple[TensorEntry, TensorEntry]]:
    """A and B of each module. Raises `WeightError`."""
    halves: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in entries.items():
        found = re.fullmatch(r"(.+)\.lora_([AB])\.weight", name)
        if found is None: raise _refusal(name, directory)
        if entry.dtype not in FLOAT_BYTES: raise dtype_error(entry.file_offset[0], name, entry.dtype)
        if found[1] not in shapes: raise _not_adapted(found[1], directory, shapes)
        halves.setdefault(found[1], {})[found[2]] = entry
    lacking = [f"{module}.lora_{each}.weight" for module, half in halves.items() for each in "AB"
               if each not in half]
    if lacking or not halves:
        raise WeightError(f"{directory} lacks {', '.join(lacking[:4]) or 'all tensors'}",
                          "lora_A and lora_B of each module", "download the adapter again")
    return {module: (half["A"], half["B"]) for module, half in halves.items()}


def _refusal(name: str, directory: Path) -> ModelError:
    why = "embeddings are the base model's" if "lora_embedding" in name else \
        "DoRA normalises whole weights" if "magnitude_vector" in name else \
        "biases are the base model's" if name.endswith(".bias") else \
        "modules that were trained whole are not exchanged"
    return ModelError(f"{directory} has {name}, and {why}",
                      "lora_A.weight and lora_B.weight of linear layers", MERGE)


def _not_adapted(module: str, directory: Path, shapes: Mapping[str, tuple[int, int]]) -> ModelError:
    if EXPERTS.search(module):
        found = f"{module}, and experts and routers are the base model's"
        expected = "attention and dense layers"
    elif module.endswith(("lm_head", "embed_tokens")):
        found, expected = f"{module}, and head and embedding are the base model's", "layers"
    else:
        found = f"{module}, which the base model has not, or takes no adapter for"
        expected = ", ".join(_endings(shapes)) + " of its layers"
    return ModelError(f"{directory} changes {found}", expected, f"use an adapter of this base, or {MERGE}")


def _endings(shapes: Mapping[str, tuple[int, int]]) -> list[str]:
    return list(dict.fromkeys(name.rpartition(".")[2] for name in shapes))


def require_shapes(module: str, a: TensorEntry, b: TensorEntry, base: tuple[int, int],
                   config: Mapping[str, Any], most: int, directory: Path) -> None:
    """Raises `WeightError` for matrices that do not fit each other, the base or the configuration."""
    out, inputs = base
    rank = rank_of(config, module)
    for entry, shape in ((a, (rank, inputs)), (b, (out, rank))):
        if entry.shape != shape:
            raise WeightError(f"{directory}: {entry.name} is {list(entry.shape)}", f"{list(shape)}: rank "
                              f"{rank} by its configuration, of a layer {out} x {inputs}",
                              "use an adapter of this base model")
    if rank > most:
        raise ModelError(f"{directory}: {module} has rank {rank}", f"at most {most}: max_lora_rank",
                         "raise --max-lora-rank")


def require_targets(config: Mapping[str, Any], found: Mapping[str, Any],
                    shapes: Mapping[str, tuple[int, int]], directory: Path) -> None:
    """Raises `WeightError` where the configuration lists modules that the file has no matrices of."""
    targets = config.get("target_modules")
    some = any(config.get(key) is not None for key in ("layers_to_transform", "exclude_modules"))
    if some or not targets: return
    lacking = [module for module in targets_of(targets, shapes) if module not in found]
    if lacking:
        raise WeightError(f"{directory} lacks matrices of {', '.join(lacking[:4])}"
                          + (f", and {len(lacking) - 4} more" if len(lacking) > 4 else ""),
                          "those of all target_modules", "download the adapter again")


def targets_of(targets: str | Sequence[str], modules: Mapping[str, Any]) -> Iterator[str]:
    """The modules that target_modules lists, as PEFT matches them. Raises `ModelError`."""
    if isinstance(targets, str):
        pattern = None if targets == "all-linear" else compile_pattern(targets, f"{CONFIG}: target_modules")
        yield from (module for module in modules if pattern is None or pattern.fullmatch(module))
        return
    ends = frozenset(targets)
    for module in modules:      # each name, and what follows one of its dots
        parts = module.split(".")
        if any(".".join(parts[at:]) in ends for at in range(len(parts))): yield module
