"""FlashAttentionBackward to a kernel of ours.

Protocol. `backward` is what patterns/named.py asks for. The forward's body is built again over the same
arguments, and the spec that match.py finds for it is the backward's `forward`: its scores, masks and strides.
The gradient of the result is read where it lies, or copied. dq is summed in float32, on GPUs in memory that
is zero before the launch, and cast by a kernel of tinygrad's; dk and dv lie as k and v do (`lies_by_rows`).
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from math import prod

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType
from tinygrad.uop.ops import UOp

from tinygrad_nv import config, hooks
from tinygrad_nv.cpu.kernel import CPUKernel
from tinygrad_nv.cpu.schedule import CPUSchedule
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns import named, program
from tinygrad_nv.patterns.attention import match as attention
from tinygrad_nv.patterns.attention import named as attention_named
from tinygrad_nv.patterns.attention.lower import Cut, Shape, dropped, lies_by_rows, shape_of, turned
from tinygrad_nv.patterns.attention.named import FlashAttentionBackward
from tinygrad_nv.patterns.attention.spec import widths
from tinygrad_nv.patterns.contraction import NotOurs
from tinygrad_nv.patterns.strides import Laid, copied, laid
from tinygrad_nv.patterns.target import cpu_kernel, target_of
from tinygrad_nv.runtime.note import Note
from tinygrad_nv.tile.attention.backward_spec import BackwardSpec, dtype_problems
from tinygrad_nv.tile.attention.spec import EVERY, AttentionSpec, Rows
from tinygrad_nv.tile.expression import Apply, Expression, Load, Position, short, walk
from tinygrad_nv.tile.kernel import BackwardKernel
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

TEMPLATE = "flash attention backward"


def register() -> None:
    """Lets FlashAttentionBackward become kernels."""
    named.lower(FlashAttentionBackward, TEMPLATE, backward)


def backward(what: FlashAttentionBackward, function: UOp, q: UOp, k: UOp, v: UOp,
             *rest: UOp) -> tuple[UOp, ...] | None:
    """dq, dk and dv by a kernel of ours; None where match.py has said why there is none."""
    *mask, log, delta, grad = rest
    seed = [mask.pop()] if what.forward.kept < EVERY else []
    machine = target_of(q.device)
    if machine is None or not config.get("NV_ATTENTION"): return None
    if (found := _forward(what, (q, k, v), tuple(mask))) is None: return None
    b, heads, rows, _ = shape_of(q)
    kv, by_rows = shape_of(k)[1], (lies_by_rows(k), lies_by_rows(v))
    # the query heads of a key head are rows, where each has one
    group, rows = (heads // kv, rows) if found[0].s_q == rows else (1, heads // kv * rows)
    forward = divided(found[0], (b, kv, group))
    if forward.s_q != rows: raise NotOurs(f"{forward.s_q} rows, not {rows}")
    grad = grad.reshape(b, kv, group, rows, shape_of(v)[-1])
    spec, schedule, read = _chosen(forward, grad, by_rows, machine)
    dq, dk, dv = _called(spec, schedule, machine, [*found[1][:3], read, log, delta, *seed, *found[1][3:]])
    dq = dq.reshape(shape_of(q)).cast(q.dtype)
    return dq, _filled(dk, shape_of(k), by_rows[0]), _filled(dv, shape_of(v), by_rows[1])


def _forward(what: FlashAttentionBackward, operands: tuple[UOp, ...],
             mask: tuple[UOp, ...]) -> tuple[AttentionSpec, list[UOp]] | None:
    """The spec of the forward pass, and its kernel's inputs."""
    cut = Cut()
    arguments = (Tensor(x) for x in (*map(cut, operands), *mask))
    root = hooks.flattened(attention_named.forward(replace(what.forward, kept=EVERY), *arguments)[0].uop)
    nodes, match = attention.found_at(root)
    if match is None: return None
    inputs: list[UOp] = []

    def given(new: Callable[[UOp], UOp]) -> UOp:
        inputs.extend(map(new, match.found.inputs))
        return match.attempt.end
    cut.undone(nodes, match.attempt.end, given)
    return dropped(replace(match.found.spec, log_sum=True), what.forward, operands), inputs


# **** specs ****

def divided(spec: AttentionSpec, batch: Shape) -> AttentionSpec:
    """A spec with this batch, where it has batch and key heads as one dimension."""
    if spec.batch == batch: return spec
    b, heads, group = batch
    if spec.batch != (1, b * heads, group):
        raise NotOurs(f"heads that lie as {'x'.join(map(str, spec.batch))}, not {'x'.join(map(str, batch))}")
    if any(isinstance(node, Position) and node.axis == 1 for node in walk(spec.score)):
        raise NotOurs("scores by the number of a head in the whole batch")

    def over(strides: tuple[int, ...]) -> tuple[int, int, int]:
        return strides[1] * heads, strides[1], strides[2]

    def score(node: Expression) -> Expression:
        if isinstance(node, Load) and node.batch: return replace(node, batch=over(node.batch))
        return replace(node, args=tuple(map(score, node.args))) if isinstance(node, Apply) else node
    q, k, v, out = (replace(rows, batch=over(rows.batch)) for rows in (spec.q, spec.k, spec.v, spec.out))
    return replace(spec, batch=(b, heads, group), q=q, k=k, v=v, out=out, score=score(spec.score))


def _chosen(forward: AttentionSpec, grad: UOp, by_rows: tuple[bool, bool],
            machine: GPU | CPU) -> tuple[BackwardSpec, Schedule | CPUSchedule, UOp]:
    """The spec of a backward pass, its schedule, and the gradient's storage: where it lies if that can be."""
    reason, ordered = "", bool(config.get("NV_DETERMINISTIC"))
    for read in (laid(grad), copied(grad)):
        if read.strides[-1] != 1: continue
        try: spec = BackwardSpec(forward, _rows(read, forward), *_results(forward, by_rows), ordered)
        except SpecError as error: raise NotOurs(f"{error.found}, not {error.expected}") from error
        if (schedule := _schedule(spec, machine)) is not None: return spec, schedule, read.storage
        reason = _reason(spec, machine)
    raise NotOurs(reason)


def _schedule(spec: BackwardSpec, machine: GPU | CPU) -> Schedule | None:
    return TABLE.choose(spec, machine)


def _reason(spec: BackwardSpec, machine: GPU | CPU) -> str:
    """Why there is no schedule."""
    if isinstance(machine, CPU): return TABLE.why_not(spec, machine)
    if words := dtype_problems(spec): return "; ".join(words)
    return f"no template for the gradient of {short(spec.forward.q.dtype)} attention of " \
           f"{widths(spec.forward)} on {machine.arch}"


def _rows(read: Laid, forward: AttentionSpec) -> Rows:
    *batch, row, _ = read.strides
    # the stride of a single row is free: that of dense rows
    if forward.s_q == 1: row = -(-forward.d_v // 8) * 8
    return Rows(read.dtype, row, (batch[0], batch[1], batch[2]), read.offset)


def _results(forward: AttentionSpec, by_rows: tuple[bool, bool]) -> tuple[Rows, Rows]:
    """dk and dv."""
    heads = forward.batch[1]

    def dense(dtype: DType, d: int, turned: bool) -> Rows:
        whole, matrix = heads * forward.s_kv * d, forward.s_kv * d
        return Rows(dtype, heads * d, (whole, d, 0)) if turned else Rows(dtype, d, (whole, matrix, 0))
    return dense(forward.k.dtype, forward.d, by_rows[0]), dense(forward.v.dtype, forward.d_v, by_rows[1])


def _filled(made: UOp, shape: Shape, by_rows: bool) -> UOp:
    """The gradient of all keys or values, of those that any row may see."""
    b, heads, rows, d = shape
    found = shape_of(made)[-1] // (b * heads * d)
    made = turned(made.reshape(b, found, heads, d)) if by_rows else made.reshape(b, heads, found, d)
    return made.pad(((0, 0), (0, 0), (0, rows - found), (0, 0))) if found < rows else made


# **** calls ****

@functools.lru_cache(1024)
def kernel(spec: BackwardSpec, schedule: Schedule, machine: GPU) -> BackwardKernel:
    """The kernel of a backward pass."""
    made: BackwardKernel = TABLE.build(spec, schedule, machine)
    return made


def _called(spec: BackwardSpec, schedule: Schedule, machine: GPU | CPU,
            inputs: list[UOp]) -> tuple[UOp, ...]:
    """dq in float32, dk and dv."""
    one, device = spec.forward, inputs[0].device
    assert device is not None
    dq = program.Output((*one.batch, one.s_q, one.d), dtypes.float32)
    results = [program.Output((prod(one.batch[:2]) * one.s_kv * d,), rows.dtype)
               for rows, d in ((spec.dk, one.d), (spec.dv, one.d_v))]
    note = Note(schedule.template, f"{spec}: {schedule}", spec, schedule)
    made: BackwardKernel | CPUKernel
    if isinstance(machine, CPU): made = cpu_kernel(spec, schedule, machine)
    else:
        assert isinstance(machine, GPU)
        made = kernel(spec, schedule, machine)
    return program.called(made, device, [dq, *results], inputs, flops=spec.flops, note=note)
