"""Poolings of a text's hidden states by embedding models: the files of sentence-transformers.

Protocol: `read_pooling(directory)` reads modules.json and the folders that it names (Pooling, Dense,
Normalize) as one frozen `Pooling`, None where there is no modules.json. `default_pooling(decoder)` is
vLLM's: the last token of a decoder, the first (CLS) of an encoder, normalised. `pool` runs on the device,
`Pooling.finish` makes vectors of its result on the host.
"""
from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tinygrad import Tensor, dtypes

from tinygrad_nv import functional as F
from tinygrad_nv.errors import ModelError, brief, shorten
from tinygrad_nv.quant.floats import as_float32

from .checkpoint import FLOAT_BYTES, open_checkpoint, read_array
from .config import read_json, read_json_value
from .fields import CORRECT, Fields
from .paged import PackedBatch

KINDS = ("cls", "mean", "last")
# by names of 1_Pooling/config.json: an older flag each, or since version 5 a name in pooling_mode
FLAGS = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean",
         "pooling_mode_lasttoken": "last", "pooling_mode_max_tokens": "max",
         "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
         "pooling_mode_weightedmean_tokens": "weightedmean"}
NAMES = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {"Identity": lambda x: x, "Tanh": np.tanh}
MAX_MODULES = 32        # limit: modules of a modules.json; published ones have up to 4
ADD = "use a model with one of these, or add it (see CONTRIBUTING.md)"


@dataclass(frozen=True)
class Dense:
    """act(W x + b) of a pooled vector, float32."""
    weight: np.ndarray
    bias: np.ndarray | None
    activation: str

    def __call__(self, x: np.ndarray) -> np.ndarray:
        made = x @ self.weight.T if self.bias is None else x @ self.weight.T + self.bias
        return np.asarray(ACTIVATIONS[self.activation](made), np.float32)


@dataclass(frozen=True)
class Pooling:
    """`kind` of `KINDS`; then the dense layers, and normalisation to length 1. A text has at most
    `max_tokens`; `lowercase`: texts are written in small letters first."""
    kind: str
    normalize: bool = True
    dense: tuple[Dense, ...] = field(default=(), compare=False)
    max_tokens: int | None = None
    lowercase: bool = False

    def finish(self, x: np.ndarray, normalize: bool | None = None,
               dimensions: int | None = None) -> np.ndarray:
        """Vectors of pooled hidden states, float32 [n, hidden]: the first `dimensions` elements, which are
        normalised again."""
        for each in self.dense: x = each(x)
        x = x[:, :dimensions]
        if not (self.normalize if normalize is None else normalize): return x
        return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)

    def require_fitting(self, hidden: int, name: str) -> None:
        """Raises `ModelError` for dense layers that do not take what they are given."""
        for each in self.dense:
            if each.weight.shape[1] != hidden:
                raise ModelError(f"{name}: a Dense module has in_features {each.weight.shape[1]}",
                                 f"{hidden}, as many as what is before it gives", CORRECT)
            hidden = each.weight.shape[0]

    def width(self, hidden: int) -> int:
        """Elements of a vector."""
        return self.dense[-1].weight.shape[0] if self.dense else hidden


def default_pooling(decoder: bool, causal: bool = False) -> Pooling:
    """Returns the pooling of a model without modules.json: of decoders that attend in both directions the
    mean."""
    return Pooling("cls" if not decoder else "last" if causal else "mean")


def pool(kind: str, hidden: Tensor, batch: PackedBatch) -> Tensor:
    """float32 (sequences, hidden) of the hidden states (T, hidden) of a batch: those of a sequence's first or
    last token, or their mean. Sequences without tokens give anything."""
    starts, ends = batch.starts[:-1], batch.starts[1:]
    if kind != "mean":
        rows = starts if kind == "cls" else (ends - 1).maximum(0)
        return F.embedding(hidden, rows.minimum(hidden.shape[0] - 1).contiguous()).float()
    places = Tensor.arange(hidden.shape[0], dtype=dtypes.int32).reshape(1, -1)
    inside = ((places >= starts.reshape(-1, 1)) & (places < ends.reshape(-1, 1))).float().contiguous()
    sums = inside @ hidden.float().contiguous()
    return sums / (ends - starts).maximum(1).float().reshape(-1, 1)


def read_pooling(directory: Path) -> Pooling | None:
    """Reads modules.json, None where there is none. Raises `ModelError` for a module that is not
    implemented."""
    path = directory / "modules.json"
    if not os.path.isfile(path): return None
    kind, dense, normalize = "", list[Dense](), False
    for at, (module, folder) in enumerate(_modules(path)):
        if module == "Transformer" and at == 0: continue
        elif module == "Pooling" and not kind: kind = _kind(folder / "config.json")
        elif module == "Dense" and kind and not normalize: dense.append(_dense(folder))
        elif module == "Normalize" and kind: normalize = True
        else:
            raise ModelError(f"{path}: module {at} is {shorten(module)}, which is not implemented there",
                             "Transformer, Pooling, any number of Dense, Normalize, in this order", ADD)
    if not kind: raise ModelError(f"{path} has no Pooling", "Transformer, then Pooling", CORRECT)
    own = directory / "sentence_bert_config.json"
    fields = Fields(read_json(own) if own.is_file() else {}, str(own))
    most = None if fields.get("max_seq_length") is None else fields.positive("max_seq_length")
    return Pooling(kind, normalize, tuple(dense), most, fields.flag("do_lower_case"))


def _modules(path: Path) -> list[tuple[str, Path]]:
    """Class and folder of each module."""
    listed, found = read_json_value(path), []
    if not isinstance(listed, list) or len(listed) > MAX_MODULES:
        raise ModelError(f"{path} is {brief(listed)}", f"a list of at most {MAX_MODULES} modules", CORRECT)
    for each in listed:
        kind, folder = (each.get("type"), each.get("path")) if isinstance(each, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(folder, str) or Path(folder).name != folder:
            raise ModelError(f"{path} has {brief(each)}", "objects with a type, and the path of a folder",
                             CORRECT)
        found.append((kind.rsplit(".", 1)[-1], path.parent / folder))
    return found


def _kind(path: Path) -> str:
    data = read_json(path)
    if (named := data.get("pooling_mode")) is not None:
        kinds = [NAMES.get(named, named)] if isinstance(named, str) else [str(named)]
    else: kinds = [kind for flag, kind in FLAGS.items() if data.get(flag)]
    if len(kinds) != 1 or kinds[0] not in KINDS:
        raise ModelError(f"{path}: the pooling is {shorten(' and '.join(kinds)) or 'none'}, which is not "
                         "implemented",
                         f"one of: {', '.join(KINDS)}", ADD)
    if data.get("include_prompt") is False:
        raise ModelError(f"{path}: include_prompt is false, which is not implemented", "true", ADD)
    return kinds[0]


def _dense(folder: Path) -> Dense:
    path = folder / "config.json"
    f = Fields(read_json(path), str(path))
    activation = str(f.get("activation_function")).rsplit(".", 1)[-1]
    if activation not in ACTIVATIONS:
        raise ModelError(f"{path}: activation_function {brief(activation)} is not implemented",
                         f"one of: {', '.join(ACTIVATIONS)}", ADD)
    entries = open_checkpoint(folder).entries
    shape, wanted = (f.positive("out_features"), f.positive("in_features")), ["linear.weight"]
    if f.get("bias", True): wanted.append("linear.bias")
    for name in wanted:
        expected = list(shape[:1] if name == "linear.bias" else shape)
        if name not in entries or list(entries[name].shape) != expected \
                or entries[name].dtype not in FLOAT_BYTES:
            found = f"{list(entries[name].shape)} of {entries[name].dtype}" if name in entries else "missing"
            raise ModelError(f"{folder}: {name} is {found}", f"{expected} of {', '.join(FLOAT_BYTES)}",
                             CORRECT)
    arrays = [as_float32(read_array(entries[name])) for name in wanted]
    return Dense(arrays[0], arrays[1] if len(arrays) > 1 else None, activation)
