"""The templates of attention and of its gradient, those that are liked best first."""
from __future__ import annotations

from tinygrad_nv.tile.attention import backward_defaults, defaults
from tinygrad_nv.tile.attention.backward_mma import legality as backward_mma_legality
from tinygrad_nv.tile.attention.backward_spec import BackwardSpec
from tinygrad_nv.tile.attention.backward_wgmma import legality as backward_wgmma_legality
from tinygrad_nv.tile.attention.fma import legality as fma_legality
from tinygrad_nv.tile.attention.mma import legality as mma_legality
from tinygrad_nv.tile.attention.ordered import choose_ordered
from tinygrad_nv.tile.attention.schedules import BackwardMma, BackwardWgmma, FlashFma, FlashMma, FlashWgmma
from tinygrad_nv.tile.attention.spec import AttentionSpec
from tinygrad_nv.tile.attention.wgmma import legality as wgmma_legality
from tinygrad_nv.tile.attention.why_not import why_not
from tinygrad_nv.tile.choose import choose
from tinygrad_nv.tile.order import Ordered
from tinygrad_nv.tile.template import GPU, Family, Template, lazy_build, legality

FOLDER = "tinygrad_nv.tile.attention"


def _choose_ordered(spec: AttentionSpec | BackwardSpec, gpu: GPU) -> Ordered | None:
    return choose_ordered(FAMILY.templates, spec, gpu)


FAMILY = Family("attention", (
    Template("flash_fma", AttentionSpec, FlashFma, legality(fma_legality.problems), defaults.fma,
             lazy_build(f"{FOLDER}.fma.kernel", "flash_fma")),
    Template("flash_wgmma", AttentionSpec, FlashWgmma, legality(wgmma_legality.problems), defaults.wgmma,
             lazy_build(f"{FOLDER}.wgmma.kernel", "flash_wgmma")),
    Template("flash_mma", AttentionSpec, FlashMma, legality(mma_legality.problems), defaults.mma,
             lazy_build(f"{FOLDER}.mma.kernel", "flash_mma")),
    Template("flash_backward_wgmma", BackwardSpec, BackwardWgmma, legality(backward_wgmma_legality.problems),
             backward_defaults.wgmma, lazy_build(f"{FOLDER}.backward_wgmma.kernel", "flash_backward_wgmma")),
    Template("flash_backward_mma", BackwardSpec, BackwardMma, legality(backward_mma_legality.problems),
             backward_defaults.mma, lazy_build(f"{FOLDER}.backward_mma.kernel", "flash_backward_mma"))),
    choice=choose, refusal=why_not, determinism_class=_choose_ordered)
