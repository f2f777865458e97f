"""The template of new keys and values on a CPU."""
from __future__ import annotations

from tinygrad_nv.cpu.kv_append import kernel
from tinygrad_nv.cpu.template import template
from tinygrad_nv.tile.kv_append.spec import AppendSpec
from tinygrad_nv.tile.order import BY_ELEMENT
from tinygrad_nv.tile.template import Family

KV_APPEND = template(AppendSpec, kernel.CPUAppend, kernel.default, None, kernel.__name__)
FAMILY = Family("kv_append", (KV_APPEND,), determinism_class=BY_ELEMENT)
