"""Ragged attention to a kernel of ours: from a named function's arguments to an attention of a ragged batch.

Protocol: `lowered` is what patterns/named.py asks for. Where q, k and v lie is read off their indices
(patterns/strides.py), so that heads of a projection need no copy; what no template can read where it lies is
copied. What no template does is a near miss, and the body runs.
"""
from __future__ import annotations

from tinygrad.uop.ops import UOp

from tinygrad_nv import config
from tinygrad_nv.cpu.schedule import CPUSchedule
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns import program
from tinygrad_nv.patterns.attention.match import call, schedule_of
from tinygrad_nv.patterns.attention.varlen_reference import VarlenAttention
from tinygrad_nv.patterns.contraction import NotOurs
from tinygrad_nv.patterns.strides import Laid, copied, laid
from tinygrad_nv.patterns.target import Target, target_of
from tinygrad_nv.tile.attention.schedules import FlashMma
from tinygrad_nv.tile.attention.spec import AttentionSpec, Rows
from tinygrad_nv.tile.expression import Expression, Sum, short, tanh
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.templates import TABLE

TEMPLATE = "attention"
SMALL = FlashMma().block(16, 32).warps(1)  # whose problems are told
LEAST_BYTES = 16  # of which rows begin at multiples, or they are copied: what every template reads


def lowered(what: VarlenAttention, function: UOp, *arguments: UOp) -> tuple[UOp, ...] | None:
    """The result of a ragged attention by a kernel of ours. Raises `NotOurs` where there is none."""
    machine = target_of(function.device)
    if machine is None or not config.get("NV_ATTENTION"): return None
    try: return _called(what, arguments, machine),
    except SpecError as error: raise NotOurs(f"{error.found}, not {error.expected}") from error


def _called(what: VarlenAttention, arguments: tuple[UOp, ...], machine: Target) -> UOp:
    q, k, v, *ends = arguments
    read = [_read(x) for x in (q, k, v)]
    shape = tuple(map(int, (*q.shape[:2], v.shape[2])))
    keys, sequences = (int(k.shape[0]), int(k.shape[1])), int(ends[0].shape[0]) - 1
    spec = _spec(what, read, shape, keys, int(q.shape[2]), sequences)
    schedule = _schedule(spec, machine)
    share = spec.flops * shape[0] // (spec.batch[0] * spec.s_q)  # of as many rows as there are
    inputs = [*(each.storage for each in read), *ends]
    return call(spec, schedule, machine, [program.Output(shape, q.dtype)], inputs, spec.s_q,
                flops=min(spec.flops, share))[0]


def _spec(what: VarlenAttention, read: list[Laid], shape: tuple[int, ...], keys: tuple[int, int], d: int,
          sequences: int) -> AttentionSpec:
    """The spec of operands: `shape` is the result's, `keys` are keys and key heads."""
    (rows, heads, d_v), group = shape, shape[1] // keys[1]
    q, k, v = read
    queries = Rows(q.dtype, q.strides[0], (0, group * q.strides[1], q.strides[1]), q.offset)
    shared, values = (Rows(x.dtype, x.strides[0], (0, x.strides[1], 0), x.offset) for x in (k, v))
    return AttentionSpec(what.most_q, what.most_k, d, d_v, queries, shared, values,
                         Rows(q.dtype, heads * d_v, (0, group * d_v, d_v)), (sequences, keys[1], group),
                         _score(what), what.band, total=(rows, keys[0]))


def _schedule(spec: AttentionSpec, machine: Target) -> Schedule | CPUSchedule:
    """How the kernel is made. Raises `NotOurs` with what is in the way."""
    if isinstance(machine, CPU): return schedule_of(spec, machine)
    if (found := TABLE.choose(spec, machine)) is not None: return found
    words = "; ".join(TABLE.problems(spec, SMALL, machine)) or f"d {spec.d} needs more shared memory"
    raise NotOurs(f"no kernel for {short(spec.q.dtype)} on {machine.arch}: {words}")


def _score(what: VarlenAttention) -> Expression:
    scaled = Sum() * what.scale
    return scaled if what.softcap is None else tanh(scaled * (1 / what.softcap)) * what.softcap


def _read(x: UOp) -> Laid:
    """An operand where it lies, or copied where its rows could not be read there."""
    found = laid(x)
    row, head, d = found.strides
    lies = Rows(found.dtype, row, (0, head, 0), found.offset)
    return found if d == 1 and lies.aligned_bytes >= LEAST_BYTES else copied(x)
