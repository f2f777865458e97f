"""Heads of sequence classification: cross-encoders, rerankers, classifiers and reward models.

Protocol: `read_classifier(directory, data, names, prefixes, hidden)` reads a head's layers, which families
name (`HeadNames`). A `Classifier` is applied on the host, to pooled hidden states: `logits`, and `scores`,
which are probabilities unless config.json says otherwise.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tinygrad_nv.errors import ModelError, brief
from tinygrad_nv.quant.floats import widen_bfloat16

from .checkpoint import SAFETENSORS_DTYPES, TensorEntry, open_checkpoint, read_array
from .families.encoder import HeadNames
from .fields import CORRECT, Fields


def softmax(x: np.ndarray) -> np.ndarray:
    """Returns the softmax over the last axis."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + e^−x), without overflow."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, e) / (1 + e)


def gelu(x: np.ndarray) -> np.ndarray:
    """With erf."""
    return np.asarray(0.5 * x * (1 + np.vectorize(math.erf, otypes=[float])(x * 0.5 ** 0.5)))


HIDDEN: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "tanh": np.tanh, "relu": lambda x: np.maximum(x, 0), "gelu": gelu, "silu": lambda x: x * sigmoid(x)}
SCORES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "softmax": softmax, "sigmoid": sigmoid, "identity": lambda x: x}
FLOATS = frozenset(SAFETENSORS_DTYPES.values())
# the classes of torch.nn that sentence-transformers' cross-encoders name
NAMED = {"Identity": "identity", "Sigmoid": "sigmoid", "Softmax": "softmax"}


@dataclass(frozen=True)
class HiddenLayer:
    """norm(act(W x + b)), float32; without a norm where `norm` is None."""
    weight: np.ndarray
    bias: np.ndarray | None
    activation: str
    norm: np.ndarray | None = None
    norm_bias: np.ndarray | None = None
    norm_eps: float = 0.0

    def __call__(self, x: np.ndarray) -> np.ndarray:
        x = HIDDEN[self.activation](affine(x, self.weight, self.bias))
        if self.norm is None: return x
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + self.norm_eps) * self.norm
        return x if self.norm_bias is None else x + self.norm_bias


@dataclass(frozen=True)
class Classifier:
    """A hidden layer, if there is one, then W x + b. `activation` of `SCORES` makes scores of logits."""
    weight: np.ndarray
    bias: np.ndarray | None
    hidden: HiddenLayer | None
    activation: str
    labels: int
    names: tuple[str, ...] = ()

    def label(self, at: int) -> str:
        """The name of a label; transformers' for one that config.json does not name."""
        return self.names[at] if at < len(self.names) else f"LABEL_{at}"

    def logits(self, pooled: np.ndarray) -> np.ndarray:
        """float64 (n, labels) of pooled hidden states (n, hidden)."""
        x = pooled.astype(np.float64)
        return affine(x if self.hidden is None else self.hidden(x), self.weight, self.bias)

    def scores(self, pooled: np.ndarray, activate: bool = True) -> np.ndarray:
        """`logits` after the activation, unless `activate` is False."""
        made = self.logits(pooled)
        return SCORES[self.activation](made) if activate else made


def affine(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """W x + b."""
    made = x @ weight.T
    return np.asarray(made if bias is None else made + bias)


def read_classifier(directory: Path, data: Mapping[str, Any], names: HeadNames, prefixes: tuple[str, ...],
                    hidden: int) -> Classifier:
    """The head in `directory`, whose config.json is `data`. Raises `ModelError`."""
    found: dict[str, TensorEntry] = {}
    for name, entry in open_checkpoint(directory).entries.items():
        for prefix in prefixes: name = name.removeprefix(prefix)
        found[name] = entry

    def read(name: str, shape: tuple[int, ...]) -> np.ndarray:
        entry = found.get(name)
        if entry is None or tuple(entry.shape) != shape or entry.dtype not in FLOATS:
            what = "missing" if entry is None else f"{list(entry.shape)} of {entry.dtype}"
            raise ModelError(f"{directory}: {name} is {what}", f"{list(shape)} of floats", CORRECT)
        array = read_array(entry)
        return (widen_bfloat16(array) if array.dtype == np.uint16 else array).astype(np.float32)

    def optional(name: str, size: int) -> np.ndarray | None:
        return read(name, (size,)) if name in found else None

    labels = number_of_labels(data, f"{directory / 'config.json'}")
    dense = None
    if names.dense:
        activation = str(data.get(names.activation_field) or names.activation).lower()
        if activation not in HIDDEN:
            raise ModelError(f"{directory}: {names.activation_field} {brief(activation)} is not "
                             f"implemented", f"one of: {', '.join(HIDDEN)}")
        norm = read(f"{names.norm}.weight", (hidden,)) if names.norm else None
        eps = Fields({"norm_eps": 1e-5, **data}, str(directory / "config.json")).number("norm_eps")
        dense = HiddenLayer(read(f"{names.dense}.weight", (hidden, hidden)),
                            optional(f"{names.dense}.bias", hidden), activation, norm,
                            optional(f"{names.norm}.bias", hidden) if names.norm else None,
                            eps)
    return Classifier(read(f"{names.out}.weight", (labels, hidden)), optional(f"{names.out}.bias", labels),
                      dense, score_activation(data, labels), labels, label_names(data, labels))


def number_of_labels(data: Mapping[str, Any], name: str) -> int:
    """Labels: as many as are named, 2 where config.json says nothing, as in transformers."""
    named = data.get("id2label")
    made = len(named) if isinstance(named, dict) and named else data.get("num_labels", 2)
    return Fields({"num_labels": made}, name).positive("num_labels")


def label_names(data: Mapping[str, Any], labels: int) -> tuple[str, ...]:
    """Returns the names that id2label gives the labels."""
    named = data.get("id2label")
    if not isinstance(named, Mapping): return ()
    return tuple(str(named.get(str(at), f"LABEL_{at}")) for at in range(labels))


def score_activation(data: Mapping[str, Any], labels: int) -> str:
    """Returns the activation of scores, as vLLM chooses it: what problem_type says, else what a cross-encoder
    names, else softmax, or sigmoid of a single label."""
    default = "sigmoid" if labels == 1 else "softmax"
    kinds = {"regression": "identity", "multi_label_classification": "sigmoid",
             "single_label_classification": default}
    if isinstance(kind := data.get("problem_type"), str) and kind in kinds: return kinds[kind]
    own = data.get("sentence_transformers")
    named = own.get("activation_fn") if isinstance(own, Mapping) else None
    named = named or data.get("sbert_ce_default_activation_function")
    if named is None: return default
    name = str(named).rsplit(".", 1)[-1]
    if name not in NAMED:
        raise ModelError(f"the activation of scores is {brief(named)}, which is not implemented",
                         f"one of: {', '.join(NAMED)}")
    return NAMED[name]
