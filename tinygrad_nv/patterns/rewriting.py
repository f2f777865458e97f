"""Kernels of ours in a graph that is rewritten.

Protocol. `rebuilt` makes a graph again, with nodes in the places of others. `write_through` ends a rewrite:
it lets kernels write where their results would be copied to. A result of ours is the BUFFER of a slot from
`FIRST_SLOT` on (program.py) AFTER its CALL.

`rewrite_allreduces` is for reductions over the devices of one process, of which tinygrad makes ALLREDUCEs.
What does them is far above and is loaded with the first: registration.py says where it is.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass

from tinygrad.helpers import all_int
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv.patterns.program import FIRST_SLOT
from tinygrad_nv.runtime.observe import ranges

Rewrite = Callable[[UOp], UOp]
_load: list[Callable[[], Rewrite]] = []


def write_through(sink: UOp) -> UOp:
    """Lets kernels of ours write straight into the storage their result would be copied to, where safe, and
    read results of others of ours where they are; storage that a kernel has written in place is not stored.

    A rewrite ends with this. Who reads the old contents runs first, as tinygrad orders writes after reads;
    only a kernel that reads the storage itself has to keep its own.
    """
    nodes = sink.toposort(enter_calls=False)
    found = [copy for copy in map(_find_copy, nodes) if copy is not None]
    uses = _uses(nodes, {copy.target for copy in found}) if found else {}
    moved: dict[UOp, UOp] = {}
    for copy in found:
        if copy.target not in uses[copy.call]:
            moved.setdefault(copy.buffer, copy.target.reshape(copy.buffer.shape))
    def changes(node: UOp) -> bool:
        if node.op is Ops.CALL: return bool(_read(node))
        return _is_store(node) and _value_in_place(*node.src[1].src) is not None

    if not moved and not any(map(changes, nodes)): return sink
    return rebuilt(nodes, lambda node, new: _move(node, new, moved))


def rebuilt(nodes: Iterable[UOp], change: Callable[[UOp, Callable[[UOp], UOp]], UOp | None]) -> UOp:
    """The graph of `nodes`, which are in topological order with its sink last, in one pass: `change(node,
    new)` gives what takes a node's place, None to keep it over its new sources; `new` gives those, and does
    the same for nodes beside the graph that are made of it."""
    made: dict[UOp, UOp] = {}

    def new(node: UOp) -> UOp:
        if (known := made.get(node)) is None: known = made[node] = _over(node, tuple(map(new, node.src)))
        return known

    for node in nodes:
        if (changed := change(node, new)) is None:
            # the body of a call is no part of the graph
            changed = _over(node, tuple(made.get(s, s) for s in node.src))
        made[node] = changed
    ranges.carry(made)
    return changed


_SHAPE: str = vars(UOp)["_shape"].nm  # where a node keeps its shape once it is known


def _over(node: UOp, src: tuple[UOp, ...]) -> UOp:
    if src == node.src: return node
    made = node.replace(src=src)
    # the sources have kept their shapes: finding this one's again would be a third of a rewrite's time
    if _SHAPE in node.__dict__: made.__dict__.setdefault(_SHAPE, node.__dict__[_SHAPE])
    return made


def _move(node: UOp, new: Callable[[UOp], UOp], moved: dict[UOp, UOp]) -> UOp | None:
    if node.op is Ops.BUFFER: return moved.get(node)
    if node.op is Ops.CALL and (read := _read(node)):
        return node.replace(src=(node.src[0], *(new(read.get(s, s)) for s in node.src[1:])))
    if not _is_store(node): return None
    return _value_in_place(*map(new, node.src[1].src))


def _read(call: UOp) -> dict[UOp, UOp]:
    """Returns the results that arguments of a call are copies of, where the results are ours. What was a
    value when the call was made may be a kernel's result now."""
    found = ((s, _dense(s.src[0])) for s in call.src[1:] if s.op is Ops.CONTIGUOUS)
    return {copy: done for copy, done in found if done.op is Ops.AFTER and done.src[1].op is Ops.CALL
            and (buffer := _output_storage(done)).op is Ops.BUFFER and buffer.arg.slot >= FIRST_SLOT}


@dataclass(frozen=True)
class _Copy:
    """Call that writes, and the storage that its result is copied to."""
    buffer: UOp
    call: UOp
    target: UOp


def _uses(nodes: Iterable[UOp], targets: Set[UOp]) -> dict[UOp, Set[UOp]]:
    """Returns which of some nodes each node is made of. Most have the set of one of their sources."""
    made: dict[UOp, Set[UOp]] = {}
    none: Set[UOp] = frozenset()
    for node in nodes:
        own = frozenset((node,)) if node in targets else none
        for s in node.src:
            if (others := made.get(s, none)) is not own and not others <= own:
                own = others if own <= others else own | others
        made[node] = own
    return made


def _find_copy(after: UOp) -> _Copy | None:
    """Returns the BUFFER, the call, and target's storage of AFTER(target, STORE(target, BUFFER after a
    call))."""
    if not _is_store(after): return None
    target, value = after.src[1].src
    while target.op is value.op is Ops.SHRINK and target.src[1:] == value.src[1:]:
        target, value = target.src[0], value.src[0]
    target, value = _dense(target), _dense(value)
    if value.op is not Ops.AFTER or value.src[1].op is not Ops.CALL: return None
    buffer, call = _output_storage(value), value.src[1]
    if buffer.op is not Ops.BUFFER or buffer.arg.slot < FIRST_SLOT: return None
    if target.op not in (Ops.PARAM, Ops.BUFFER): return None
    # a function's result of symbolic shape is storage of that shape: a call writes the largest
    if not all_int(target.shape) or target.max_numel() != buffer.max_numel(): return None
    if (target.dtype, target.device) != (buffer.dtype, buffer.device): return None
    return _Copy(buffer, call, target)


def _is_store(after: UOp) -> bool:
    return after.op is Ops.AFTER and len(after.src) == 2 and after.src[1].op is Ops.STORE


def value_in_storage(node: UOp) -> UOp:
    """Returns the value that storage has been given as a whole; of others, the node."""
    if not _is_store(node) or node.src[1].src[0] is not node.src[0]: return node
    return node.src[1].src[1]


def _dense(x: UOp) -> UOp:
    """Returns the source of a reshape, a shrink that cuts nothing, or a permutation there and back: the same
    elements in the same order."""
    while True:
        if x.op is Ops.RESHAPE or (x.op is Ops.SHRINK and x.shape == x.src[0].shape): x = x.src[0]
        elif x.op is Ops.PERMUTE and x.src[0].op is Ops.PERMUTE and _undone(x): x = x.src[0].src[0]
        else: return x


def _undone(x: UOp) -> bool:
    """Whether a permutation undoes that of its source."""
    return [x.src[0].marg[axis] for axis in x.marg] == list(range(len(x.marg)))


def _value_in_place(target: UOp, value: UOp) -> UOp | None:
    """The value, if a kernel has written it where it would be stored: another part of the same storage is
    not there."""
    where, done = target, value
    while where.op is done.op is Ops.SHRINK and where.src[1:] == done.src[1:]:
        where, done = where.src[0], done.src[0]
    where, done = _dense(where), _dense(done)
    written = done.op is Ops.AFTER and done.src[1].op is Ops.CALL
    return value if written and _output_storage(done) is _output_storage(where) else None


def _output_storage(after: UOp) -> UOp:
    """The storage that the calls of AFTERs write, one after another."""
    while after.op is Ops.AFTER: after = after.src[0].base
    return after


def set_allreduce_lowering(load: Callable[[], Rewrite]) -> None:
    """Makes what `load` gives do them."""
    _load[:] = [load]


def rewrite_allreduces(sink: UOp) -> UOp:
    """The graph after that, where there is an ALLREDUCE in it."""
    found = any(node.op is Ops.ALLREDUCE for node in sink.toposort(enter_calls=False))
    return _load[0]()(sink) if _load and found else sink
