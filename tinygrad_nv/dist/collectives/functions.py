"""Collectives of Tensors over a group of ranks, with gradients.

Protocol. Every rank of the group calls the same function with tensors of one shape and dtype, and gets its
result. The calls are lazy, as all of tinygrad: they run when a result is realized, in an order that is the
same on all ranks if these build the same graphs.

Gradients are those of the sum of all ranks' losses, as torch.distributed.nn.functional has them: that of
`all_reduce` is an `all_reduce`. Where all ranks compute one loss that is counted once, as tensor parallel
layers do (Megatron-LM, arXiv 1909.08053, section 3), `all_reduce(x, replicated=True)` passes the gradient on
as it is, and `copy_to_ranks` is the identity with an `all_reduce` in its gradient.

`wire` is the dtype in which bytes are sent: x is cast to it before, and the result back after.

In the graph of a CPU a collective is a kernel of one part, that calls the group's transport (csrc/group.h).
Its descriptor has all that the C function has to know, so one kernel is compiled for all collectives.
tinygrad runs it after the kernels that write its input and before those that read its result: eager, in a
TinyJit's graph and in captured steps. tinygrad's order depends on the graph alone, so ranks with the same
graph run the same collectives in the same order.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from tinygrad import Device, Tensor, dtypes
from tinygrad.dtype import DType
from tinygrad.uop.ops import UOp

from tinygrad_nv.dist.collectives.device import anchor, on_device, serves
from tinygrad_nv.dist.group import Group
from tinygrad_nv.dist.transports.nccl import CollectiveCall
from tinygrad_nv.errors import DistError
from tinygrad_nv.patterns.named import call
from tinygrad_nv.patterns.program import Output, program
from tinygrad_nv.runtime.note import Note

_TYPES = "typedef unsigned char u8; typedef unsigned long long u;\n"
_CALL = "  ((int (*)(u, const u *, void *, const void *))words[0])(words[1], words + 2, {}, {});\n"
# a SEND reads `in`, a RECV writes `out`
SHIFT = """typedef unsigned char u8; typedef unsigned long long u;
typedef int (*function)(u, const u *, void *, const void *);
void collective_shift(u8 *out, const u8 *in, const u *first, const u *second, const u8 *after) {
  ((function)first[0])(first[1], first + 2, out, in);
  ((function)second[0])(second[1], second + 2, out, in);
}
"""


@dataclass(frozen=True)
class Copied:
    """The identity over a group, by name."""
    group: str
    name: str


BUCKET_BYTES = 25 << 20     # as torch's DistributedDataParallel has it


def all_reduce(x: Tensor, group: Group, op: str = "sum", *, wire: DType | None = None,
               replicated: bool = False, name: str = "") -> Tensor:
    """The sum (or "max", "min") over all ranks, of x's shape. 16-bit floats are added in float32, in the
    order of ranks, and rounded once. Only the sum has a gradient. Raises `DistError`."""
    if group.size == 1: return x
    if wire is not None and wire != x.dtype:
        return all_reduce(x.cast(wire), group, op, replicated=replicated, name=name).cast(x.dtype)

    def back(grad: UOp, _: UOp) -> tuple[UOp | None, ...]:
        if op != "sum": return None, None
        return (grad if replicated else all_reduce(Tensor(grad), group, name=f"gradient of {name}").uop), None
    return _call("all_reduce", x, group, x.shape, prod(extents(x)), op=op, name=name, back=back)


def copy_to_ranks(x: Tensor, group: Group, name: str = "") -> Tensor:
    """x, whose gradient is the sum of those of all ranks: what tensor parallel layers begin with."""
    if group.size == 1: return x

    def back(grad: UOp, _: UOp) -> tuple[UOp | None, ...]:
        return all_reduce(Tensor(grad), group, name=f"gradient of {name}").uop,
    return call(Copied(group.name, name), _same, x, grad=back)[0]


def reduce_scatter(x: Tensor, group: Group, axis: int = 0, op: str = "sum", *, wire: DType | None = None,
                   name: str = "") -> Tensor:
    """Returns this rank's part of the sum over all ranks: rank r has the r-th of equal parts along `axis`."""
    if group.size == 1: return x
    if wire is not None and wire != x.dtype:
        return reduce_scatter(x.cast(wire), group, axis, op, name=name).cast(x.dtype)
    first, shape = _to_front(x, axis, "reduce_scatter", group)

    def back(grad: UOp, _: UOp) -> tuple[UOp | None, ...]:
        if op != "sum": return None, None
        return all_gather(Tensor(grad), group, name=f"gradient of {name}").uop, None
    own = (shape[0] // group.size, *shape[1:])
    made = _call("reduce_scatter", first, group, own, prod(own), op=op, name=name, back=back)
    return _from_front(made, x, axis)


def all_gather(x: Tensor, group: Group, axis: int = 0, name: str = "", after: Tensor | None = None) -> Tensor:
    """Returns the parts of all ranks, one after the other along `axis`. It runs after `after` is computed."""
    if group.size == 1: return x
    first, shape = _to_front(x, axis, "all_gather", None)
    more = (None,) if after is None else (None, None)

    def back(grad: UOp, _: UOp) -> tuple[UOp | None, ...]:
        return reduce_scatter(Tensor(grad), group, name=f"gradient of {name}").uop, *more
    whole = (shape[0] * group.size, *shape[1:])
    return _from_front(_call("all_gather", first, group, whole, prod(shape), name=name, back=back,
                                 after=after), x, axis)


def all_to_all(x: Tensor, group: Group, split: int = 0, concat: int = 0, name: str = "") -> Tensor:
    """Part r of x along `split` goes to rank r; what comes from all ranks stands along `concat`."""
    if group.size == 1: return x
    first, shape = _to_front(x, split, "all_to_all", group)

    def back(grad: UOp, _: UOp) -> tuple[UOp | None, ...]:
        return all_to_all(Tensor(grad), group, name=f"gradient of {name}").uop, None
    made = _call("all_to_all", first, group, shape, prod(shape) // group.size, name=name, back=back)
    # (ranks, part of split, rest) with the split axis back in its place, then ranks before `concat`
    made = _from_front_of(made.reshape(group.size, shape[0] // group.size, *shape[1:]), x, split)
    at = concat % x.ndim
    order = [*range(1, at + 1), 0, *range(at + 1, made.ndim)]
    moved = made.permute(order)
    return moved.reshape(*moved.shape[:at], moved.shape[at] * moved.shape[at + 1], *moved.shape[at + 2:])


def broadcast(x: Tensor, group: Group, root: int = 0, name: str = "") -> Tensor:
    """Returns the tensor of rank `root` of the group. Its gradient is the sum of all ranks', at the root."""
    if group.size == 1: return x

    def back(grad: UOp, _: UOp) -> tuple[UOp | None, ...]:
        summed = all_reduce(Tensor(grad), group, name=f"gradient of {name}")
        # in memory, or a rank that has 0 of it would not come to the sum
        return (summed * group.is_rank(root).to(summed.device).cast(summed.dtype)).uop, None
    return _call("broadcast", x, group, x.shape, prod(extents(x)), peer=root, name=name, back=back)


def send(x: Tensor, group: Group, to: int, name: str = "") -> Tensor:
    """Sends x to rank `to` of the group, which has to `recv` it. Returns a byte to realize: x is sent when
    that is computed."""
    return _call("send", x, group, (1,), prod(extents(x)), peer=to, name=name, dtype=dtypes.uint8)


def recv(shape: Sequence[int], dtype: DType, group: Group, source: int, name: str = "",
         device: str | None = None) -> Tensor:
    """Receives what rank `source` of the group sends, of this shape and dtype, on a device (default:
    tinygrad's). Calls that one graph shall have several of need different names."""
    count, device = prod(shape), Device.canonicalize(device)
    if serves(device):
        order, told = CollectiveCall("recv", count, dtype, peer=source, name=name), title("recv", group, name)
        return on_device(group, order, tuple(shape), dtype, anchor(group, device), told, None)
    words = group.descriptor("recv", count, dtype, peer=source, name=name)
    what = Collective("recv", tuple(shape), dtype, count * dtype.itemsize, title("recv", group, name),
                      group.name)
    return call(what, call_kernel, words)[0]


def all_reduce_many(tensors: Sequence[Tensor], group: Group, *, bucket_bytes: int = BUCKET_BYTES,
                    wire: DType | None = None, name: str = "") -> list[Tensor]:
    """`all_reduce` of each, those of one dtype together in buckets of at most so many bytes, in their order:
    a call for each bucket, not for each tensor."""
    made: list[Tensor] = list(tensors)
    for number, bucket in enumerate(buckets(tensors, bucket_bytes)):
        flat = Tensor.cat(*(tensors[i].reshape(-1) for i in bucket)) if len(bucket) > 1 else \
            tensors[bucket[0]].reshape(-1)
        summed, at = all_reduce(flat, group, wire=wire, name=f"{name} bucket {number}".strip()), 0
        for i in bucket:
            count = prod(extents(tensors[i]))
            made[i] = summed[at:at + count].reshape(tensors[i].shape)
            at += count
    return made


def buckets(tensors: Sequence[Tensor], most: int) -> list[list[int]]:
    """Numbers of tensors that are carried together: neighbours among those of a dtype, up to so many
    bytes."""
    made, open_ = list[list[int]](), dict[DType, tuple[list[int], int]]()
    for i, each in enumerate(tensors):
        size = prod(extents(each)) * each.dtype.itemsize
        found, used = open_.get(each.dtype, ([], 0))
        if not found or used + size > most:
            made.append(found := [])
            used = 0
        found.append(i)
        open_[each.dtype] = found, used + size
    return made


def part(x: Tensor, axis: int, index: int, count: int) -> Tensor:
    """Part `index` of `count` equal ones along an axis."""
    each = int(x.shape[axis]) // count
    return x.shrink(tuple((index * each, (index + 1) * each) if i == axis % x.ndim else None
                          for i in range(x.ndim)))


def require_cpu(kind: str, x: Tensor, expected: str) -> None:
    """Raises `DistError` for a tensor that is not on a CPU."""
    if str(x.device).partition(":")[0] == "CPU": return
    raise DistError(f"{kind} of a tensor on {x.device}", expected, "move it: .to(\"CPU\")")


# **** calls ****

Back = Callable[..., tuple[UOp | None, ...]]


def _call(kind: str, x: Tensor, group: Group, shape: Sequence[int], count: int, op: str = "sum",
            peer: int = 0, name: str = "", back: Back | None = None, dtype: DType | None = None,
            after: Tensor | None = None) -> Tensor:
    told, made = title(kind, group, name), dtype or x.dtype
    more = [] if after is None else [after.contiguous()]
    if serves(x.device):
        order = CollectiveCall(kind, count, x.dtype, op, peer, name)
        return on_device(group, order, tuple(shape), made, x.contiguous(), told, back, *more)
    require_cpu(kind, x, "a tensor on a GPU or the CPU")
    words = group.descriptor(kind, count, x.dtype, op, peer, name)
    what = Collective(kind, tuple(shape), made, 2 * count * x.dtype.itemsize, told, group.name)
    return call(what, call_kernel, x.contiguous(), words.to(x.device), *more, grad=back)[0]


def title(kind: str, group: Group, name: str) -> str:
    """A collective as people read it."""
    return f"{kind} over ranks {group.name}" + (f" of {name}" if name else "")


def _same(what: object, x: Tensor) -> tuple[Tensor, ...]: return (x,)


def extents(x: Tensor) -> tuple[int, ...]:
    """The shape of a tensor that a collective takes. Raises `DistError` for one that is not known."""
    if not all(isinstance(extent, int) for extent in x.shape):
        raise DistError(f"a collective of a tensor of shape {x.shape}", "known extents",
                        "pad it to its largest extent")
    return tuple(int(extent) for extent in x.shape)


def _to_front(x: Tensor, axis: int, kind: str, divides: Group | None) -> tuple[Tensor, tuple[int, ...]]:
    """x with the axis first, and its shape then."""
    shape = extents(x)
    if not -len(shape) <= axis < len(shape):
        raise DistError(f"{kind} along axis {axis} of shape {shape}", f"an axis of {len(shape)}")
    if divides is not None and shape[axis] % divides.size:
        raise DistError(f"{kind} along axis {axis} of shape {shape} over {divides.size} ranks",
                        f"an extent that {divides.size} divides", "pad it")
    order = _front(axis % len(shape), len(shape))
    made = x.permute(order) if order[0] else x
    return made, tuple(shape[i] for i in order)


def _from_front(made: Tensor, x: Tensor, axis: int) -> Tensor:
    """The first axis back in its place."""
    order = _front(axis % x.ndim, x.ndim)
    return made.permute([order.index(i) for i in range(x.ndim)]) if order[0] else made


def _from_front_of(made: Tensor, x: Tensor, axis: int) -> Tensor:
    """The same behind an axis of ranks."""
    order = _front(axis % x.ndim, x.ndim)
    return made.permute([0, *(1 + order.index(i) for i in range(x.ndim))]) if order[0] else made


def _front(axis: int, ndim: int) -> list[int]: return [axis, *(i for i in range(ndim) if i != axis)]


# **** kernels of CPUs ****

@dataclass(frozen=True)
class Collective:
    """A collective that makes a result of this shape and dtype; `name` is for people, `ranks` is the group's.
    A SEND makes a byte."""
    kind: str
    shape: tuple[int, ...]
    dtype: DType
    nbytes: int
    name: str
    ranks: str = ""


# what only sends has a byte as its result, by which its kernel is found in the graph
TEXTS = {name: f"{_TYPES}void {name}({arguments}) {{\n{_CALL.format(*used)}}}\n"
         for name, arguments, used in (
    ("collective", "u8 *out, const u8 *in, const u *words", ("out", "in")),
    ("collective_after", "u8 *out, const u8 *in, const u *words, const u8 *after", ("out", "in")),
    ("collective_send", "u8 *done, const u8 *in, const u *words", ("(void *)0", "in")),
    ("collective_recv", "u8 *out, const u *words", ("out", "(void *)0")))}


def call_kernel(what: Collective, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The kernel of a collective: `tensors` are its input, if it has one, the descriptor, and what has to be
    computed before, if anything."""
    other = "collective" if len(tensors) < 3 else "collective_after"
    entry = {"send": "collective_send", "recv": "collective_recv"}.get(what.kind, other)
    made = program(entry, TEXTS[entry], str(tensors[-1].device), [Output(what.shape, what.dtype)],
                   [each.uop for each in tensors], nbytes=what.nbytes, note=Note(what.kind, what.name))
    return (Tensor(made[0]),)


# **** shift ****

def shift(x: Tensor, group: Group, by: int = 1, name: str = "", after: Tensor | None = None) -> Tensor:
    """Returns what rank `r - by` of the group has, on each rank r, in a circle. Its gradient is shifted back.
    It runs after `after` is computed. On GPUs a send and a receive of NCCL are one group, on CPUs one kernel
    sends and receives. A send may end only when it is received, so ranks that send upwards send first and the
    others receive first: of any circle of ranks some are of each kind."""
    if group.size == 1 or by % group.size == 0: return x
    shape, told = extents(x), title(f"shift by {by}", group, name)

    def back(grad: UOp, _: UOp) -> tuple[UOp | None, ...]:
        return shift(Tensor(grad), group, -by, name=f"gradient of {name}").uop, None, None, None
    if serves(x.device):
        calls = CollectiveCall("shift", prod(shape), x.dtype, peer=by % group.size, name=name)
        behind = [] if after is None else [after.contiguous()]
        return on_device(group, calls, shape, x.dtype, x.contiguous(), told, back, *behind)
    require_cpu("shift", x, "a tensor on a GPU or the CPU")
    to, source = (group.rank + by) % group.size, (group.rank - by) % group.size
    sends, receives = (group.descriptor(kind, prod(shape), x.dtype, peer=peer, name=name)
                       for kind, peer in (("send", to), ("recv", source)))
    order = (sends, receives) if to > group.rank else (receives, sends)
    what = Collective("shift", shape, x.dtype, 2 * prod(shape) * x.dtype.itemsize, told, group.name)
    first = order[0] if after is None else after.contiguous()
    return call(what, _call_shift, x.contiguous(), *order, first, grad=back)[0]


def _call_shift(what: Collective, x: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
    made = program("collective_shift", SHIFT, str(x.device), [Output(what.shape, what.dtype)],
                   [x.uop, *(each.uop for each in more)], nbytes=what.nbytes, note=Note(what.kind, what.name))
    return (Tensor(made[0]),)
