"""A step of one size, collected and compiled: everything about its graph but the addresses.

Protocol. `collect(step, …)` runs the step as TinyJit does, with tinygrad putting schedules aside instead of
executing them; `Collected.recipe()` plans its memory. What the step makes is then of three kinds: outputs,
which get places in the outputs' region; intermediates, which the memory planner lays out in an arena; and
everything that was there before (weights, caches), which stays where it is and may be written in place.
Outputs and arena are stand-ins in the compiled schedule until `Recipe.placed` puts real memory there.

A Tensor that the step makes and leaves behind, other than by returning it, belongs to none of them. If it
depends on neither inputs nor anything the step writes (a table kept for later), it is computed at once and
is state from then on. Otherwise, or if the step writes to it again (a counter made when it is first needed),
the step cannot be a graph, since a replay would not rebind it, and what was collected is run as it stands:
that is what the step asked for. The next time such a counter is there already.

What a step assigns without realizing it is realized with its results.
"""
from __future__ import annotations

import contextlib
import functools
import gc
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, call, is_
from typing import Any

from tinygrad import Device, Tensor, UOp, dtypes
from tinygrad import tensor as tensors
from tinygrad.device import Buffer
from tinygrad.engine import realize
from tinygrad.engine.jit import GraphRunner, graph_class
from tinygrad.helpers import BEAM, JIT, GlobalCounters, getenv
from tinygrad.schedule.memory import memory_plan_rewrite
from tinygrad.uop.ops import Ops, buffers

from tinygrad_nv.errors import GraphError
from tinygrad_nv.graphs.inputs import ALIGN

_uop = attrgetter("uop")
Returned = Any  # a Tensor, or a tuple, list or dict of them


@dataclass(frozen=True)
class Output:
    """A result: its name in messages, its storage in the schedule, the shape of a row, and its place in the
    outputs' region."""
    name: str
    storage: UOp
    row: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int: return self.storage.max_numel() * self.storage.dtype.itemsize

    def tensor(self, memory: Buffer, rows: int) -> UOp:
        """Its first rows, in the outputs' region."""
        view = memory.view(rows * math.prod(self.row), self.storage.dtype, self.offset)
        return UOp.from_buffer(view).reshape((rows, *self.row))


@dataclass(frozen=True)
class Recipe:
    """A compiled step. `lanes` are the stand-ins for the arena with their places in it; `state` the Tensors
    whose memory the graph uses, and what they were; `obstacle` why it is not one graph, "" when it is."""
    linear: UOp
    lanes: tuple[tuple[UOp, int], ...]
    arena_bytes: int
    outputs: tuple[Output, ...]
    output_bytes: int
    variables: tuple[str, ...]
    state: tuple[tuple[weakref.ref[Tensor], UOp], ...]
    obstacle: str

    def unchanged(self) -> bool:
        """Whether every Tensor of the state is there and is what it was. 300 of them take about 13 µs."""
        refs, uops = self._refs, self._uops
        try: return all(map(is_, map(_uop, map(call, refs)), uops))
        except AttributeError: return False  # one is gone

    @functools.cached_property
    def _refs(self) -> list[weakref.ref[Tensor]]: return [ref for ref, _ in self.state]

    @functools.cached_property
    def _uops(self) -> list[UOp]: return [uop for _, uop in self.state]

    def placed(self, arena: Buffer | None, outputs: Buffer | None) -> UOp:
        """The schedule with memory in the place of the stand-ins."""
        memory: dict[UOp, UOp] = {}
        for lane, offset in self.lanes:
            assert arena is not None
            memory[lane] = UOp.from_buffer(arena.view(lane.max_numel(), dtypes.int8, offset))
        for each in self.outputs:
            assert outputs is not None
            view = outputs.view(each.storage.max_numel(), each.storage.dtype, each.offset)
            memory[each.storage] = UOp.from_buffer(view)
        return self.linear.substitute(memory, walk=True)


class _Schedules:
    """What tinygrad gives to while it captures."""

    def __init__(self) -> None:
        self.linears: list[UOp] = []
        self.values: dict[str, int] = {}

    def add_linear(self, linear: UOp, var_vals: dict[str, int]) -> None:
        self.linears.append(linear)
        self.values |= var_vals

    def joined(self) -> UOp:
        """One schedule."""
        return UOp(Ops.LINEAR, src=tuple(call for linear in self.linears for call in linear.src))


@dataclass
class Collected:
    """A step as it was recorded: its compiled schedule, its results, what there was before."""
    linear: UOp
    values: dict[str, int]
    results: list[tuple[str, Tensor]]
    known: set[UOp]
    inputs: set[UOp]
    device: str
    kept: set[UOp] | None = None

    def run(self) -> None:
        """Executes the step as it was recorded, kernel by kernel."""
        realize.run_linear(self.linear, self.values, jit=True)

    def left_behind(self) -> bool:
        """Computes what the step keeps and did not need its inputs for; whether it keeps anything else. After
        an exception what it keeps is not there yet: it must be called again."""
        if self.kept is None:
            results = [tensor for _, tensor in self.results]
            if kept := _kept(self.linear, self.known, results):
                gc.collect()  # what is only in cycles is not kept
                kept &= _kept(self.linear, self.known, results)
            self.kept = kept
        self.linear, left = _computed(self.linear, self.kept, self.known, self.inputs)
        return bool(left)

    def recipe(self) -> Recipe:
        """Lays out its memory. Call after `left_behind` has said no."""
        outputs, offset = [], 0
        for name, tensor in self.results:
            made = Output(name, tensor.uop.base, tuple(tensor.shape[1:]), offset)
            outputs.append(made)
            offset += -(-made.nbytes // ALIGN) * ALIGN
        held = set(buffers) | self.known | {made.storage for made in outputs}
        before = _storage(self.linear)
        planned = memory_plan_rewrite(self.linear, held)
        lanes, arena = [], 0
        for lane in sorted(_storage(planned) - before, key=lambda u: u.arg.slot):
            if lane.device != self.device: continue
            lanes.append((lane, arena))
            arena += -(-lane.max_numel() // ALIGN) * ALIGN
        used = _storage(planned) - self.inputs - {made.storage for made in outputs}
        return Recipe(planned, tuple(lanes), arena, tuple(outputs), offset, tuple(sorted(self.values)),
                      _watched(used), obstacle(planned, self.device))


def collect(step: Callable[..., Returned], size: int, inputs: Mapping[str, Tensor],
            variables: Mapping[str, UOp], device: str) -> tuple[Collected, Returned]:
    """Records one run of the step on `size` rows. Returns it with what the step returned."""
    realize_assigned(tensor for _, tensor in _live())  # or every replay would assign that again
    given = {tensor.uop.base for tensor in inputs.values()}
    schedules, ran = _Schedules(), GlobalCounters.kernel_count
    known = set(buffers) | _storage_of(tensor.uop for _, tensor in _live())
    try:
        with restoring():
            with _capturing(schedules):
                try: returned, results = run(step, size, inputs, variables, device, known)
                except RuntimeError as error:
                    if "TinyJit inside another TinyJit" in str(error): raise _jitted("captures") from error
                    raise
            if GlobalCounters.kernel_count != ran: raise _jitted("replays")
            bound = {variable.unbind()[0].expr for variable in variables.values()}
            if own := sorted(schedules.values.keys() - bound):
                raise GraphError(f"the step binds Variable {own[0]} itself",
                                 "Variables that are given in every call: a replay may need another value",
                                 f"pool(…, {own[0]}=Variable(…).bind(…)), and an argument of the step")
            linear = _compiled(schedules.joined())
            if not linear.src: raise GraphError("a step that computes nothing", "at least one kernel")
    except BaseException:
        # what the step kept, as far as that can be had; the reason is on its way
        with contextlib.suppress(Exception):
            if kept := _kept(schedules.joined(), known):
                _computed(_compiled(schedules.joined()), kept, known, given)
        raise
    return Collected(linear, schedules.values, results, known, given, device), returned


def _jitted(does: str) -> GraphError:
    return GraphError(f"a step {does} a TinyJit while it is captured", "a step of plain tinygrad",
                      "take the TinyJit off: the pool captures the whole step")


def _compiled(linear: UOp) -> UOp: return realize.compile_linear(linear, beam=getenv("JITBEAM", BEAM.value))


def named(returned: Returned) -> list[tuple[str, Tensor]]:
    """The Tensors of what a step returned, with names for messages."""
    if isinstance(returned, dict): items = [(repr(key), value) for key, value in returned.items()]
    elif isinstance(returned, (tuple, list)): items = [(str(k), value) for k, value in enumerate(returned)]
    else: items = [("", returned)]
    for name, value in items:
        if not isinstance(value, Tensor):
            raise GraphError(f"the step returns {_output(name)} of type {type(value).__name__}",
                             "a Tensor, or a tuple, list or dict of Tensors")
    if not items: raise GraphError("the step returns nothing", "at least one Tensor")
    return items


def rebuilt(returned: Returned, outputs: Sequence[Tensor | None]) -> Returned:
    """`outputs` in the shape of what the step returned."""
    if isinstance(returned, dict): return dict(zip(returned, outputs, strict=True))
    if hasattr(returned, "_make"): return returned._make(outputs)  # a namedtuple
    if isinstance(returned, (tuple, list)): return type(returned)(outputs)
    return outputs[0]


def run(step: Callable[..., Returned], size: int, inputs: Mapping[str, Tensor], variables: Mapping[str, UOp],
        device: str, known: set[UOp]) -> tuple[Returned, list[tuple[str, Tensor]]]:
    """Calls the step and realizes what it returns and what it assigned. Returns the containers, with None in
    the place of Tensors, and the results. Each has storage of its own: not of `known`, which was there
    before, nor of another result; and is a Tensor that the step does not have."""
    before = [ref for ref, _ in _live()]
    returned = step(**{name: Tensor(tensor.uop) for name, tensor in inputs.items()}, **variables)
    items = [(name, _result(tensor, device)) for name, tensor in named(returned)]
    returned = rebuilt(returned, [None] * len(items))
    for name, tensor in items: _check(name, tensor, size, device)
    Tensor.realize(*(tensor for _, tensor in items))
    realize_assigned(tensor for ref in before if (tensor := ref()) is not None)
    _detach(inputs.values(), [tensor for _, tensor in items])
    return returned, list(_owned(items, known))


@contextlib.contextmanager
def restoring() -> Iterator[None]:
    """After an exception inside, Tensors that were there before are what they were: an assignment that was
    written down but not run would get into whatever is realized next."""
    before = {ref: tensor.uop for ref, tensor in _live()}
    try: yield
    except BaseException:
        for ref, uop in before.items():
            if (old := ref()) is not None and old.uop is not uop: old.uop = uop
        raise


def realize_assigned(candidates: Iterable[Tensor]) -> None:
    """Realizes assignments that are written down and not done."""
    pending = [tensor for tensor in candidates if not tensor.uop.has_buffer_identity()
               and tensor.uop.has_buffer_identity(after_ok=True)]
    if pending: Tensor.realize(*pending)


def _detach(inputs: Iterable[Tensor], results: Iterable[Tensor]) -> None:
    """What a step leaves behind over its inputs, or not computed of them yet, gets memory of its own: other
    rows are there in the next call."""
    own = {id(tensor) for tensor in (*inputs, *results)}
    storage = {tensor.uop.base for tensor in inputs}
    def leaning() -> list[Tensor]:
        others = [tensor for _, tensor in _live() if id(tensor) not in own]
        over: set[UOp] = set()  # in one walk over all graphs, which thousands of Tensors may share
        for u in UOp.sink(*(tensor.uop for tensor in others)).toposort():
            if u in storage or not over.isdisjoint(u.src): over.add(u)
        return [tensor for tensor in others if tensor.uop in over]
    if not leaning(): return
    gc.collect()  # what is only in cycles is not kept
    for tensor in leaning(): tensor.replace(tensor.clone().realize())


def _owned(items: Sequence[tuple[str, Tensor]], known: set[UOp]) -> Iterator[tuple[str, Tensor]]:
    seen = set(known)
    for name, tensor in items:
        if not tensor.uop.has_buffer_identity() or tensor.uop.base in seen: tensor = tensor.clone().realize()
        seen.add(tensor.uop.base)
        yield name, tensor


def _result(tensor: Tensor, device: str) -> Tensor:
    """Another Tensor of the same values. What is computed is contiguous, or tinygrad may leave a Tensor with
    a Variable in it as it is; what is of no device, as `Tensor.arange`, is placed on this one."""
    if tensor.uop.has_buffer_identity(after_ok=True): return Tensor(tensor.uop)
    if tensor.device is None and all(isinstance(extent, int) for extent in tensor.shape):
        return Tensor.empty(*tensor.shape, dtype=tensor.dtype, device=device).assign(tensor)
    return tensor.contiguous()


def _check(name: str, tensor: Tensor, size: int, device: str) -> None:
    shape = tuple(tensor.shape)
    if not shape or shape[0] != size or not all(isinstance(extent, int) and extent for extent in shape):
        told = ", ".join(str(extent) if isinstance(extent, int) else extent.unbind_all()[0].render()
                         for extent in shape)
        raise GraphError(f"the step returns {_output(name)} of shape ({told}) for a batch of {size}",
                         f"a row for each of the batch: ({size}, …), extents known and not 0",
                         "reduce over rows outside the step: padding would be in the sum")
    if tensor.device != device:
        raise GraphError(f"the step returns {_output(name)} on {tensor.device}", f"a Tensor on {device}")


def _output(name: str) -> str: return f"output {name}" if name else "something"


def obstacle(linear: UOp, device: str) -> str:
    """Why a schedule cannot be one graph of the device; "" when it can."""
    opened = Device[device]
    if JIT != 1: return f"JIT={JIT.value} turns graphs off"
    if opened.graph is None: return f"{device} has no graphs"
    runner: type[GraphRunner] = graph_class(opened)
    wrong = [call for call in linear.src if not runner.supports_uop([opened], call)]
    if not wrong: return ""
    body = wrong[0].src[0]
    where = sorted({d for a in realize.get_call_arg_uops(wrong[0]) for d in _devices(a)})
    if body.op is Ops.COPY: what = f"a copy between {' and '.join(where)}"
    elif body.op is Ops.CUSTOM_FUNCTION: what = f"the custom function {body.arg}"
    elif where != [device]: what = f"a kernel on {', '.join(where)}"
    else: what = f"kernel {realize.get_call_name(wrong[0], ())}"
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return f"a graph cannot hold {what}{more} of {len(linear.src)} launches"


def _devices(u: UOp) -> tuple[str, ...]: return (u.device,) if isinstance(u.device, str) else u.device


# **** what a step makes and keeps ****

@contextlib.contextmanager
def _capturing(schedules: _Schedules) -> Iterator[None]:
    realize.capturing.append(schedules)
    try: yield
    finally: realize.capturing.clear()


def _live() -> Iterator[tuple[weakref.ref[Tensor], Tensor]]:
    for ref in list(tensors.all_tensors):
        if (tensor := ref()) is not None: yield ref, tensor


def _storage_of(uops: Any) -> set[UOp]:
    """All buffers that these graphs reach."""
    sink = UOp.sink(*uops)
    return {u for u in sink.toposort() if u.op is Ops.BUFFER}


def _storage(linear: UOp) -> set[UOp]:
    """All buffers among the arguments of a schedule."""
    arguments = {a for call in linear.src for a in realize.get_call_arg_uops(call)}
    return {u for a in arguments for u in a.toposort() if u.op is Ops.BUFFER}


def _kept(linear: UOp, known: set[UOp], results: Iterable[Tensor] = ()) -> set[UOp]:
    """New storage of a schedule that Tensors refer to, other than the results."""
    fresh, own = _storage(linear) - known - set(buffers), {id(tensor) for tensor in results}
    return fresh & _storage_of(tensor.uop for _, tensor in _live() if id(tensor) not in own)


def _computed(linear: UOp, kept: set[UOp], known: set[UOp], inputs: set[UOp]) -> tuple[UOp, set[UOp]]:
    """Runs what the kept buffers come from, for those that depend neither on inputs nor on what the schedule
    writes, and are written once; returns the rest of the schedule, and the kept buffers that are not so."""
    if not kept: return linear, kept
    calls = [(call, *_accesses(call)) for call in linear.src]
    moving = inputs | {b for _, writes, _ in calls for b in writes if b in known}
    once: set[int] = set()
    left = set()
    for buffer in kept:
        needed, mine = {buffer}, set()
        for k in reversed(range(len(calls))):
            call, writes, reads = calls[k]
            if needed.isdisjoint(writes): continue
            mine.add(k)
            needed |= writes | reads
            if call.src[0].op is Ops.PROGRAM and call.src[0].arg.vars: needed |= inputs
        changed = sum(buffer in writes for _, writes, _ in calls) > 1
        if not mine or changed or needed & moving: left.add(buffer)
        else: once |= mine
    chosen = tuple(call for k, (call, _, _) in enumerate(calls) if k in once)
    realize.run_linear(linear.replace(src=chosen), jit=True, update_stats=False)
    rest = tuple(call for k, (call, _, _) in enumerate(calls) if k not in once)
    return linear.replace(src=rest), left


def _accesses(call: UOp) -> tuple[set[UOp], set[UOp]]:
    """Buffers that a launch writes and reads."""
    outs, ins = realize.get_call_outs_ins(call)
    arguments = realize.get_call_arg_uops(call)
    def storage(positions: tuple[int, ...]) -> set[UOp]:
        return {u for k in positions for u in arguments[k].toposort() if u.op is Ops.BUFFER}
    return storage(outs), storage(ins)


def _watched(used: set[UOp]) -> tuple[tuple[weakref.ref[Tensor], UOp], ...]:
    """Tensors that are the storage a schedule uses, as they are now."""
    return tuple((ref, tensor.uop) for ref, tensor in _live()
                 if tensor.uop.has_buffer_identity() and tensor.uop.base in used)
