"""The templates of attention on a CPU: flash.py, and backward/ for its gradient."""
from __future__ import annotations

from tinygrad_nv.cpu.attention import flash
from tinygrad_nv.cpu.attention.backward import kernel as backward
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.cpu.template import template
from tinygrad_nv.tile.attention.backward_spec import BackwardSpec
from tinygrad_nv.tile.attention.spec import AttentionSpec
from tinygrad_nv.tile.template import Family

FLASH = template(AttentionSpec, flash.CPUFlash, flash.default, flash.problems, flash.__name__)
BACKWARD = template(BackwardSpec, backward.CPUFlashBackward, backward.default, backward.problems,
                    backward.__name__)


def _why_not(spec: AttentionSpec | BackwardSpec, target: CPU) -> str:
    if isinstance(spec, BackwardSpec): return ""
    return f"flash: {', '.join(FLASH.problems(spec, flash.default(spec, target), target))}"


FAMILY = Family("attention", (FLASH, BACKWARD), refusal=_why_not,
                determinism_class=f"keys in blocks of {flash.BLOCK_N} from the first")
