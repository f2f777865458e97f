"""FlashAttention to a kernel of ours, which writes l too.

Protocol. `forward` is what named.py asks for. The body of the function, over its arguments as the graph has
them, is an attention like any other: patterns/attention.py finds its spec (scale, soft-cap, masks that are
bands, strides of q, k and v, copies). Where it finds none, it has said why.

What an argument is computed from is of no interest here and may be the whole network: `Cut` puts a parameter
in the place of what lies under q's, k's and v's movement.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

from tinygrad import dtypes
from tinygrad.uop.ops import GroupOp, Ops, UOp

from tinygrad_nv import config, hooks
from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns import attention, named, program
from tinygrad_nv.patterns.attention import Match
from tinygrad_nv.patterns.attention_named import FlashAttention
from tinygrad_nv.patterns.attention_spec import nbytes
from tinygrad_nv.patterns.contraction import NotOurs
from tinygrad_nv.patterns.index import Space
from tinygrad_nv.runtime.launch_text import source
from tinygrad_nv.tile.attention import AttentionSpec
from tinygrad_nv.tile.schedule import Schedule

TEMPLATE = "flash attention"
LOG_SUM = 1  # of FlashAttention's results
_CUT_SLOT = 1 << 20  # parameters of a graph have slots from 0
Shape = tuple[int, ...]


def register() -> None:
    """Lets FlashAttention become kernels. Without l it is left to attention.py, which sees what follows."""
    named.lower(FlashAttention, TEMPLATE, forward, only_for=LOG_SUM)


# **** what arguments are ****

class Cut:
    """Arguments without what they are computed from. `of` is what stands behind each parameter."""

    def __init__(self) -> None: self.of: dict[UOp, UOp] = {}

    def __call__(self, x: UOp) -> UOp:
        moved = []
        while x.op in GroupOp.Movement:
            moved.append(x)
            x = x.src[0]
        if x.device is not None and x.op not in (Ops.PARAM, Ops.BUFFER):
            known = next((param for param, node in self.of.items() if node is x), None)
            if known is None: self.of[known := x.param_like(_CUT_SLOT + len(self.of))] = x
            x = known
        for node in reversed(moved): x = node.replace(src=(x, *node.src[1:]))
        return x

    def undone(self, nodes: tuple[UOp, ...], end: UOp, made: Callable[[Callable[[UOp], UOp]], UOp]) -> UOp:
        """What `nodes`, a sink the last, were of, with `made` in the place of `end`."""
        def change(node: UOp, new: Callable[[UOp], UOp]) -> UOp | None:
            if node in self.of: return self.of[node]
            return made(new) if node is end else None
        return program.rebuilt(nodes, change).src[0]


def shape_of(x: UOp) -> Shape: return tuple(int(extent) for extent in x.shape)


# **** forward ****

def forward(what: FlashAttention, function: UOp, *arguments: UOp) -> tuple[UOp, ...] | None:
    """out and l by a kernel of ours; None where attention.py has said why there is none."""
    if not config.get("NV_ATTENTION"): return None
    cut = Cut()
    shown = (*map(cut, arguments[:3]), *arguments[3:])
    body = hooks.inlined(function.replace(src=(function.src[0], *shown)))
    assert body is not None
    nodes, match = attention.found_at(root := body.src[0])
    if match is None: return None
    try: spec = replace(match.found.spec, log_sum=True)
    except SpecError as error: raise NotOurs(f"{error.found}, not {error.expected}") from error
    _check_order(spec, match, root)
    schedule = attention.schedule_of(spec, match.machine)
    logs: list[UOp] = []

    def called(new: Callable[[UOp], UOp]) -> UOp:
        out, log = _attention(match, spec, schedule, [new(x) for x in match.found.inputs])
        logs.append(log.reshape(shape_of(root)[:-1]))
        return out
    return cut.undone(nodes, match.attempt.end, called), logs[0]


def _check_order(spec: AttentionSpec, match: Match, root: UOp) -> None:
    """l, dense [*batch, s_q], must be in the order of the result's rows."""
    space, node, end = Space(), root, match.attempt.end
    at = ranges = space.ranges(root.shape)
    while node is not end:
        if node.op in GroupOp.Movement: at = space.through(node, at)
        node = node.src[0]
    lies = space.lies(end.shape, at)
    dense = space.lies(root.shape, ranges)
    widths = (*spec.batch, spec.s_q)
    strides = (*spec.out.batch, spec.out.row)
    moved = any(extent > 1 and stride != prod(widths[i + 1:]) * spec.d_v
                for i, (extent, stride) in enumerate(zip(widths, strides, strict=True)))
    if match.attempt.last >= 0 or lies.key() != dense.key() or moved:
        raise NotOurs("a result whose rows lie in another order than its heads")


def _attention(match: Match, spec: AttentionSpec, schedule: Schedule, inputs: list[UOp]) -> tuple[UOp, UOp]:
    end = match.attempt.end
    kernel = attention.kernel(spec, schedule, match.machine)
    outputs = [program.Output(shape_of(end), end.dtype),
               program.Output((*spec.batch, spec.s_q), dtypes.float32)]
    assert end.device is not None
    out, log = program.program(kernel.name, source(kernel), end.device, outputs, inputs, grid=kernel.grid,
                               block=(kernel.threads, 1, 1), flops=spec.flops, nbytes=nbytes(spec),
                               note=program.Note(schedule.template, f"{spec}: {schedule}", spec, schedule))
    return out, log
