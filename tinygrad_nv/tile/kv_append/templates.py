"""The template of new keys and values on a GPU."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tinygrad_nv.tile.kv_append.spec import AppendSpec, problems
from tinygrad_nv.tile.order import BY_ELEMENT
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import Family, make_template


@dataclass(frozen=True)
class Append(Schedule):
    """Nothing to choose."""
    template: ClassVar[str] = "kv_append"


KV_APPEND = make_template(AppendSpec, Append, problems, "tinygrad_nv.tile.kv_append.kernel", "kv_append")
FAMILY = Family("kv_append", (KV_APPEND,), determinism_class=BY_ELEMENT)
