"""The template of decode attention on a CPU."""
from __future__ import annotations

from tinygrad_nv.cpu.decode import kernel
from tinygrad_nv.cpu.decode.split import CPUDecode
from tinygrad_nv.cpu.template import template
from tinygrad_nv.tile.decode.spec import DecodeSpec
from tinygrad_nv.tile.template import Family

DECODE = template(DecodeSpec, CPUDecode, kernel.default, kernel.problems, kernel.__name__)
FAMILY = Family("decode", (DECODE,),
                determinism_class=f"splits of {kernel.SPLIT_KEYS} keys of the request's own")
