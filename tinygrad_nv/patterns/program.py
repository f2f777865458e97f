"""A kernel of ours in tinygrad's graph: source text in, the UOps of its outputs out.

Protocol. `program` builds CALL(PROGRAM, outputs..., inputs..., bound variables...) and returns one UOp for
each output, that storage AFTER the call. The entry point takes one pointer for each output, then for each
input, then one int for each variable, in these orders. It works in two places:

* at tensor level (`Tensor(program(...)[0])`, also inside @function), where fresh outputs are `invalids`;
* in a rewrite of hooks/, where they are BUFFERs of the schedule. Slots from 1 << 20 keep clear of those
  that tinygrad counts from 0 for copies, which would otherwise be the same UOp.

How the kernel is launched, and what explain() tells of it, is part of the body, in its KernelInfo
(runtime/note.py): the schedule keeps nothing else of a call. The compiler gets the text alone, so that
launches of one text are compiled once. The PROGRAM has no ProgramInfo, so tinygrad derives one after it has
put the caller's variables in place of the body's, and it has no BINARY unless one is given, so that tinygrad
compiles it like any kernel: in parallel, once, cached. `finalize` does what that leaves undone.

The stores and loads in the body's sink are never run. They say which arguments are written and read.

`finalize` is a compile hook, for the variables of kernels of ours before a schedule is compiled. In a
schedule made from a rewrite the variables of a kernel's body have become the user's own, whose type is
usually weak; tinygrad lowers that in the kernels it generates, and encodes arguments by it in the others.
Estimates, upper bounds until then, become those of the variables. What other processes have compiled is taken
from their cache (runtime/programs.py).
"""
from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from tinygrad.dtype import AddrSpace, DType, dtypes
from tinygrad.helpers import all_int, prod, to_tuple
from tinygrad.renderer import Estimates
from tinygrad.uop.ops import (
    Ops,
    ParamArg,
    UOp,
    resolve,
    shape_to_shape_arg,
    sint,
)

from tinygrad_nv import hooks
from tinygrad_nv.cpu.kernel import CPUKernel
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.errors import SpecError
from tinygrad_nv.runtime import programs
from tinygrad_nv.runtime.note import Note, ProgramKernel
from tinygrad_nv.tile.kernel import Chain, ProgramsInTurn, Scratch, TileKernel
from tinygrad_nv.tile.launch import PLAIN, LaunchConfig
from tinygrad_nv.tile.template import GPU

FIRST_SLOT = 1 << 20
_slots = itertools.count(FIRST_SLOT)


@dataclass(frozen=True)
class Output:
    """A fresh output. A symbolic shape gets storage for its largest extent."""
    shape: tuple[sint, ...]
    dtype: DType


def program(entry: str, text: str, device: str | tuple[str, ...], outputs: Sequence[Output | UOp],
            inputs: Sequence[UOp], *, grid: tuple[sint, ...] = (), block: tuple[int, ...] = (),
            variables: Sequence[UOp] = (), flops: sint = 0, nbytes: sint | None = None,
            note: Note | None = None, binary: bytes | None = None, parts: int = 1,
            launch: LaunchConfig = PLAIN) -> tuple[UOp, ...]:
    """Calls `entry` of `text` and returns its outputs, each a UOp of the shape that was asked for.

    An output given as a UOp is storage to write into, which the kernel may also read. `grid` and `block` are
    x, y, z. `variables` are bound variables at tensor level and ALU PARAMs in a rewrite; what `grid`, `flops`
    and `nbytes` depend on must be among them. `nbytes` is by default the size of all arguments. `binary` is
    the compiled source, if the device's compiler is not to make it. On the CPU a kernel of `parts` is called
    so many times, its last integer counting them. On a GPU `launch` is what it needs besides grid and block.
    """
    tensor_level = not hooks.rewriting()
    _check_arguments(device, len(outputs) + len(inputs), len(variables) + (parts > 1), len(launch.maps))
    stores = [storage(out, device, tensor_level) for out in outputs]
    arguments = [*stores, *(_contiguous(x if tensor_level else _in_memory(x)) for x in inputs)]
    params = [UOp.placeholder((x.max_numel(),), x.dtype, slot) for slot, x in enumerate(arguments)]
    if nbytes is None: nbytes = sum(x.max_numel() * x.dtype.itemsize for x in arguments)
    renamed = {_name(v): in_body(v) for v in variables}
    ops, mem, *sizes = (_with_variables(x, renamed) for x in (flops, nbytes, *grid))
    read = [not isinstance(out, Output) for out in outputs] + [True] * len(inputs)
    if not tensor_level: _check(KernelSource(to_tuple(device)[0], entry, text), device, inputs)
    core = [UOp.variable("core_id", 0, parts - 1, dtypes.int32, param=True)] if parts > 1 else []
    sink = UOp.sink(*renamed.values(), *core, *_dimensions("gidx", sizes), *_dimensions("lidx", block),
                    *(p.index(0).store(UOp.const(0, p.dtype)) for p in params[:len(stores)]),
                    *(p.index(0).load() for p, is_read in zip(params, read, strict=True) if is_read),
                    ops, mem, arg=ProgramKernel(name=entry, estimates=_largest_estimates(ops, mem), note=note,
                                                aux=launch))
    body = [sink, UOp(Ops.LINEAR, src=(*params, sink)), UOp(Ops.SOURCE, arg=text)]
    if binary is not None: body.append(UOp(Ops.BINARY, arg=binary))
    bound = [v for v in variables if v.is_bound_var]
    call = UOp(Ops.PROGRAM, src=tuple(body)).call(*arguments, *bound)
    return tuple(_shape_like(store.after(call), out) for store, out in zip(stores, outputs, strict=True))


@dataclass(frozen=True)
class KernelSource:
    """A kernel's text and entry, and the device that compiles it."""
    device: str
    entry: str
    text: str


refused: dict[KernelSource, str] = {}  # why they do not build: building.py


class Refused(Exception):
    """A rewrite asks for a kernel that is known not to build, or that cannot read its operands."""


def _check(kernel: KernelSource, device: str | tuple[str, ...], inputs: Sequence[UOp]) -> None:
    if kernel in refused: raise Refused(refused[kernel])
    if elsewhere := [x.device for x in inputs if x.device not in (None, device)]:
        raise Refused(f"operands on {device} and on {elsewhere[0]}")


def _check_arguments(device: str | tuple[str, ...], pointers: int, integers: int, maps: int) -> None:
    """Raises `Refused` in a rewrite, and `SpecError` at tensor level, for more than a launch can have."""
    kind: type[CPU | GPU] = CPU if to_tuple(device)[0].split(":")[0] == "CPU" else GPU
    if not (words := kind.overfull(pointers, integers, maps)): return
    if hooks.rewriting(): raise Refused(words)
    raise SpecError(words, fix="give it fewer tensors, or one that has several side by side")


class Built(Protocol):
    """Kernels that a template makes, called one after the other with the same arguments, and the memory that
    they need besides."""

    @property
    def kernels(self) -> Sequence[TileKernel | CPUKernel]: ...

    @property
    def scratch(self) -> tuple[Scratch, ...]: ...


COMBINE = Note("combine", "adds up the splits of the kernel before")
PIECES = Note("pieces", "the best, or the sums, of what the kernel before has found")
IN_TURN = Note("in_turn", "goes on with what the kernels before have left")


def call(made: Built | Chain, device: str | tuple[str, ...], outputs: Sequence[Output | UOp],
         inputs: Sequence[UOp], *, rows: sint = 0, variables: Sequence[UOp] = (), flops: sint = 0,
         nbytes: sint | None = None, note: Note | None = None) -> tuple[UOp, ...]:
    """Calls what a template has made and returns its outputs, in the order of its kernel's parameters and
    without its scratch. `rows` is the extent that the grid follows, where that is a variable. `variables` are
    those that the kernel's integers are computed from, or are, in their order. A kernel after the first goes
    on with what that has left in outputs and scratch; operations are counted with the first."""
    if isinstance(made, Chain):
        between = Output((made.between.count,), made.between.dtype)
        found = call(made.first, device, [between], inputs, flops=flops, note=note)
        return call(made.second, device, outputs, found, note=PIECES)
    given: list[tuple[Output | UOp, bool]] = [(out, True) for out in outputs]
    for one in made.scratch:
        given.insert(len(given) if one.at is None else one.at, (Output((one.count,), one.dtype), False))
    done: tuple[UOp, ...] = ()
    for kernel in made.kernels:
        if done:
            flops, nbytes = 0, sum(each.nbytes for each in made.scratch)
            note = IN_TURN if isinstance(made, ProgramsInTurn) else COMBINE
        done = program(kernel.name, kernel.text, device, done or [out for out, _ in given], inputs,
                       grid=_grid(kernel, rows), block=kernel.block, variables=variables, flops=flops,
                       nbytes=nbytes, note=note, parts=kernel.parts, launch=kernel.launch)
    return tuple(out for out, (_, asked) in zip(done, given, strict=True) if asked)


def _grid(kernel: TileKernel | CPUKernel, rows: sint) -> tuple[sint, ...]:
    """A kernel's grid for a variable number of rows; that of the most where there is none."""
    if not isinstance(rows, UOp) or not kernel.rows_of_cta: return kernel.grid
    extent = rows.unbind_all()[0]
    ctas = (extent + (kernel.rows_of_cta - 1)) // kernel.rows_of_cta * kernel.ctas_of_rows
    return ctas.maximum(1), *kernel.grid[1:]  # a graph is built before its variables have values


def storage(out: Output | UOp, device: str | tuple[str, ...], tensor_level: bool = False) -> UOp:
    """Returns where an output goes: fresh storage, or what was given."""
    if isinstance(out, UOp): return out
    shape = tuple(s.vmax if isinstance(s, UOp) else s for s in out.shape)
    if tensor_level: return UOp.invalids(*shape, dtype=out.dtype, device=device)
    arg = ParamArg(next(_slots), out.dtype, device=device, addrspace=AddrSpace.GLOBAL)
    return UOp(Ops.BUFFER, src=(shape_to_shape_arg((prod(shape),)),), arg=arg).reshape(shape)


def is_whole(x: UOp) -> bool:
    """Whether this is storage of a Tensor, before or after other writes: a kernel may write it in place."""
    while x.op is Ops.RESHAPE: x = x.src[0]
    return x.op in (Ops.PARAM, Ops.BUFFER, Ops.AFTER) and x.has_buffer_identity(after_ok=True)


def _contiguous(x: UOp) -> UOp:
    # tinygrad realizes what a call takes. CONTIGUOUS saves that for a view, and doubles it if symbolic.
    return x if x.has_buffer_identity(after_ok=True) or not all_int(x.shape) else x.contiguous()


def _in_memory(x: UOp) -> UOp:
    """The storage that starts with `x`, where there is one: the first rows of a buffer need no copy.

    Not at tensor level, where @function must find the very UOp that it was given.
    """
    lies = x
    while lies.op is Ops.RESHAPE or (lies.op is Ops.SHRINK and _is_prefix(lies)): lies = lies.src[0]
    return lies if lies.has_buffer_identity(after_ok=True) else x


def _is_prefix(x: UOp) -> bool:
    offsets, sizes = zip(*x.marg, strict=True)
    return all(resolve(o == 0) for o in offsets) and sizes[1:] == x.src[0].shape[1:]


def _shape_like(done: UOp, out: Output | UOp) -> UOp: return done.shrink_to(out.shape)


# **** variables ****

def _name(variable: UOp) -> str: return (variable.src[0] if variable.is_bound_var else variable).expr


def in_body(variable: UOp) -> UOp:
    """A variable as the body sees it: int32, as the kernel takes it. Only `p{slot}` is replaced later."""
    v = variable.src[0] if variable.is_bound_var else variable
    dtype = dtypes.int32 if v.dtype in dtypes.weaks else v.dtype
    return UOp(Ops.PARAM, src=v.src, arg=replace(v.arg, slot=-1, dtype=dtype))


def _with_variables(x: sint, renamed: dict[str, UOp]) -> UOp:
    if not isinstance(x, UOp): return UOp.const(x, dtypes.weakint)
    x = x.unbind_all()[0]
    return x.substitute({v: renamed[v.expr].cast(v.dtype) for v in x.variables()})


def _dimensions(name: str, sizes: Sequence[UOp | int]) -> list[UOp]:
    return [UOp.special(size, f"{name}{axis}") for axis, size in enumerate(sizes)]


def _largest_estimates(ops: UOp, mem: UOp) -> Estimates:
    return Estimates(ops=int(ops.vmax), lds=int(mem.vmax), mem=int(mem.vmax))


@dataclass(frozen=True)
class Miss:
    """A near miss: what nearly matched, why it did not, and what its kernel can be recognised by: operation,
    elements, and how many values a REDUCE makes each of (1 for other operations)."""
    template: str
    reason: str
    op: Ops
    numel: int
    reduced: int = 1


_own = threading.local()  # explain() hears what its own thread schedules


def miss(template: str, value: UOp, reason: str) -> None:
    """For rewrites: why `value` is left to tinygrad. explain() shows it with the value's kernel."""
    if (heard := getattr(_own, "heard", None)) is None: return
    numel = value.max_numel() if value._shape is not None else 0
    reduced = value.src[0].max_numel() // max(numel, 1) if value.op is Ops.REDUCE else 1
    heard.append(Miss(template, reason, value.op, numel, reduced))


@contextlib.contextmanager
def collect_misses() -> Iterator[list[Miss]]:
    """Collects what rewrites report with `miss` inside the block."""
    before = getattr(_own, "heard", None)
    heard: list[Miss] = []
    _own.heard = heard
    try: yield heard
    finally: _own.heard = before


def is_collecting() -> bool:
    """Whether misses are collected: a schedule is made to be shown, and nothing runs."""
    return getattr(_own, "heard", None) is not None


# **** what a body says ****

def estimates_of(body: UOp) -> Estimates:
    """Operations and bytes of a kernel of ours in the variables its body has now."""
    ops, mem = (x.ssimplify() for x in body.src[0].src[-2:])
    return Estimates(ops=ops, lds=mem, mem=mem)


def finalize(linear: UOp, inner: hooks.Compile) -> UOp:
    """A compile hook: the caller's variables into Estimates, and typed int32, as kernels take them."""
    if not any(call.src[0].op is Ops.PROGRAM for call in linear.src): return inner(linear)
    calls = (call.replace(src=(_finalize(call.src[0]), *call.src[1:])) if _is_ours(call.src[0]) else call
             for call in linear.src)
    finalized = linear.replace(src=tuple(calls))
    programs.finish(finalized)
    return inner(finalized)


def _is_ours(body: UOp) -> bool: return body.op is Ops.PROGRAM and isinstance(body.src[0].arg, ProgramKernel)


def _finalize(body: UOp) -> UOp:
    weak = [v for v in body.variables() if v.dtype in dtypes.weaks]
    body = body.substitute({v: in_body(v).cast(v.dtype) for v in weak})
    sink = body.src[0]
    final = sink.replace(arg=replace(sink.arg, estimates=estimates_of(body)))
    return body.substitute({sink: final})
