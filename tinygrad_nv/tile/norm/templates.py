"""The template of rows on a GPU: norms, softmax, argmax."""
from __future__ import annotations

from math import prod

from tinygrad_nv.tile.epilogue import problems as refused
from tinygrad_nv.tile.limits import MOST_GRID
from tinygrad_nv.tile.norm.schedules import Norm, every
from tinygrad_nv.tile.norm.spec import NormSpec
from tinygrad_nv.tile.order import BY_ROW
from tinygrad_nv.tile.template import GPU, Family, Template, lazy_build

MOST_ELEMENTS = 1 << 17  # of a row with statistics, which one CTA or cluster goes through


def problems(spec: NormSpec, schedule: Norm, gpu: GPU) -> list[str]:
    """Why the template does not take rows, or has another schedule for them; empty when it can. A row has one
    order of its sums, whatever it is beside: one schedule."""
    out = list(dict.fromkeys(words for root in spec.expressions for words in refused(root, gpu.arch)))
    if any(each.result.n not in (0, 1) for each in spec.results if not each.group):
        out.append("elements of a result lie apart")
    apart = sorted({load.parameter for load in every(spec) if load.n not in (0, 1)})
    if apart: out.append(f"elements of x{apart[0]} lie apart")
    if spec.statistics and spec.n > MOST_ELEMENTS:
        out.append(f"a row of {spec.n} elements, at most {MOST_ELEMENTS}: several CTAs are faster")
    if prod(spec.batch) > MOST_GRID: out.append(f"a batch of {prod(spec.batch)}, at most {MOST_GRID}")
    own = Norm.of(spec, gpu.arch)
    out += _groups(spec, own)
    return out if out or schedule == own else [f"{schedule} is not {own}"]


def _groups(spec: NormSpec, schedule: Norm) -> list[str]:
    """A group is that of some lanes of a warp, once in each chunk."""
    if not (found := spec.groups): return []
    if len(found) > 1: return [f"groups of {' and '.join(map(str, sorted(found)))}"]
    lanes, rest = divmod(group := found.pop(), schedule.vector)
    if rest or lanes > 32 or lanes & (lanes - 1) or schedule.team % lanes:
        return [f"groups of {group} by threads of {schedule.vector}: {lanes} lanes of {schedule.team}"]
    return [] if schedule.held else ["groups of a row that is read again"]


NORM = Template("norm", NormSpec, Norm, problems, lambda spec, gpu: (Norm.of(spec, gpu.arch),),
                lazy_build("tinygrad_nv.tile.norm.kernel", "norm"))
FAMILY = Family("norm", (NORM,), determinism_class=BY_ROW)
