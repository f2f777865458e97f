"""Records of families of models: one for each architecture of config.json."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..fields import Fields


@dataclass(frozen=True)
class Family:
    """`defaults` are what transformers' own config class fills in where config.json leaves a key out;
    `honours` the fields that change what is computed, and that this family computes (`config.REFUSED` has
    all); `settings(f)` what of `ModelConfig` differs from LLaMA's. It raises `ModelError`. `head_dim` is the
    key of the elements of a head that rope may rotate."""
    architecture: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    honours: frozenset[str] = frozenset()
    settings: Callable[[Fields], dict[str, Any]] = lambda f: {}
    head_dim: str = "head_dim"
