"""Rope scaling of a GGUF file, as rope_scaling of config.json."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinygrad_nv.errors import ModelError, brief
from tinygrad_nv.quant.gguf import blocks

from .architecture import AGAIN, USE, Metadata

# tensors: what frequencies are divided by, of Llama 3's kind of rope and of LongRoPE
FACTORS, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
SCALING = {"factor": "factor", "original_context_length": "original_max_position_embeddings",
           "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow",
           # the whole factor, as converters write it
           "attn_factor": "attention_factor", "yarn_attn_factor": "attention_factor"}


def rope_scaling(m: Metadata, more: Mapping[str, str] | None = None) -> dict[str, Any] | None:
    """With `more` keys of an architecture. The factors of Llama 3 are a kind of rope of their own. Raises
    `ModelError`."""
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
