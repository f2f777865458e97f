"""Architectures of llama.cpp: the record of one, the metadata of a file of it, and its rope scaling."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tinygrad_nv.errors import ModelError, brief
from tinygrad_nv.quant.gguf import blocks
from tinygrad_nv.quant.gguf.file import GGUFFile

from ..families.family import FULL, SLIDING
from ..layer_config import LLAMA_NAMES, Names

USE = "use a model of a supported family"
PATTERN = "attention.sliding_window_pattern"


@dataclass(frozen=True)
class Metadata:
    """Metadata of a `file` that are its architecture's, `own`, by what follows the architecture's name,
    `kind`.
    """
    file: GGUFFile
    kind: str
    own: Mapping[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        """A value, one for all layers. Raises `ModelError` where layers differ."""
        value = self.own.get(key, default)
        if not isinstance(value, list) or not value: return value
        if any(each != value[0] for each in value):
            raise ModelError(f"{self.file.path}: {key} is {str(value)[:60]}", "the same for all layers", USE)
        return value[0]

    def positive(self, key: str) -> int:
        """An integer above 0. Raises `ModelError`."""
        value = self.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{self.file.path}: {key} is {brief(value)}", "a positive integer", AGAIN)
        return value

    @property
    def head_dim(self) -> Any:
        """Elements of a head, where the file does not say it hidden ones by heads."""
        hidden, heads = self.get("embedding_length"), self.get("attention.head_count")
        whole = isinstance(hidden, int) and isinstance(heads, int) and heads > 0 and hidden % heads == 0
        usual = self.get("rope.dimension_count") or (hidden // heads if whole else None)
        return self.get("attention.key_length", usual)

    def refusal(self, key: str, expected: str) -> ModelError:
        """Returns the error of a value that is not implemented."""
        return ModelError(f"{self.file.path}: {self.kind}.{key} is {brief(self.own[key])}, which is not "
                          "implemented", expected, USE)

    def layer_types(self, period: int) -> list[str]:
        """layer_types of config.json: as the file says, else all but each `period`th layer slide. Raises
        `ModelError`."""
        layers, given = self.positive("block_count"), self.own.get(PATTERN, period)
        if isinstance(given, int) and not isinstance(given, bool):
            given = [not given or i % given < given - 1 for i in range(layers)]
        if not isinstance(given, list) or len(given) != layers:
            raise ModelError(f"{self.file.path}: {PATTERN} is {str(given)[:60]}",
                             f"a number of layers, or a list of {layers}", AGAIN)
        return [SLIDING if each else FULL for each in given]


AGAIN = "convert the model again with llama.cpp"


@dataclass(frozen=True)
class Architecture:
    """An architecture as llama.cpp writes it, and what it knows of it without metadata.

    `family` is what architectures of config.json say, `names` are those of its tensors; `renamed` are parts
    of llama.cpp's names that mean others here. `keys` are metadata as config.json calls them, beside the
    common ones; `reads` those that `settings(metadata)` makes fields of config.json of; `fixed` are fields
    that no metadata say. Of `permuted` ones the converter has ordered rows of queries and keys so that rope
    rotates neighbours. `norm_offset` is what it added to norms. `whole_heads`: values are as long as keys,
    all of which are rotated.
    """
    family: str
    names: Names = LLAMA_NAMES
    keys: Mapping[str, str] = field(default_factory=dict)
    reads: frozenset[str] = frozenset()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    settings: Callable[[Metadata], dict[str, Any]] = lambda metadata: {}
    renamed: Mapping[str, str] = field(default_factory=dict)
    permuted: bool = False
    norm_offset: float = 0.0
    whole_heads: bool = True


# tensors: what frequencies are divided by, of Llama 3's kind of rope and of LongRoPE
FACTORS, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
SCALING = {"factor": "factor", "original_context_length": "original_max_position_embeddings",
           "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow",
           # the whole factor, as converters write it
           "attn_factor": "attention_factor", "yarn_attn_factor": "attention_factor"}


def rope_scaling(m: Metadata, more: Mapping[str, str] | None = None) -> dict[str, Any] | None:
    """Returns rope_scaling of config.json, with `more` keys of an architecture. The factors of Llama 3 are a
    kind of rope of their own. Raises `ModelError`."""
    given = {key.removeprefix("rope.scaling."): value for key, value in m.own.items()
             if key.startswith("rope.scaling.") and not key.endswith(".finetuned")}
    kind = given.pop("type", "linear")
    if "rope.scale_linear" in m.own: given.setdefault("factor", m.own["rope.scale_linear"])   # of older files
    if LONG in m.file.tensors and kind in ("linear", "none"): kind = "longrope"     # older files say none
    scaled = kind != "none" and (kind != "linear" or given.get("factor", 1.0) not in (0.0, 1.0))
    if FACTORS in m.file.tensors:
        if scaled:
            raise ModelError(f"{m.file.path} has {FACTORS} and rope scaling of type {brief(kind)}",
                             "one of them", AGAIN)
        return {"rope_type": "factors", "factors": _factors(m, FACTORS)}
    if not scaled: return None
    known = SCALING | dict(more or {})
    if unknown := [key for key in given if key not in known]:
        raise ModelError(f"{m.file.path}: rope.scaling.{unknown[0]} is {brief(given[unknown[0]])}",
                         f"a rope scaling of {', '.join(known)}", USE)
    if kind != "longrope" and given.get("attn_factor") == 1.0: del given["attn_factor"]     # says nothing
    made = {"rope_type": kind, **{known[key]: value for key, value in given.items()}}
    if kind == "longrope":
        made |= {key: _factors(m, name) for key, name in (("long_factor", LONG), ("short_factor", SHORT))
                 if name in m.file.tensors}
    return made


def _factors(m: Metadata, name: str) -> list[float]:
    found: list[float] = blocks.values(m.file.tensors[name].format, m.file.raw(name)).reshape(-1).tolist()
    return found
