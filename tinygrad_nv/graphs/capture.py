"""A step of one batch size, recorded and compiled: its graph except for the addresses.

Protocol. `record(step, …)` runs the step as TinyJit does, with tinygrad collecting schedules instead of
executing them; `RecordedStep.finalize()` plans its memory. Buffers that the step creates or uses are of three
kinds: outputs, which get offsets in the outputs' region; intermediates, which the memory planner places in an
arena; and everything that existed before (weights, caches), which stays in place and may be written. The
compiled schedule has placeholders for outputs and arena; `CompiledStep.bind_memory` substitutes real memory.

A Tensor that the step creates and keeps, other than by returning it, is none of these. If it depends neither
on inputs nor on anything the step writes (a lookup table), it is computed at once and is state from then on.
Otherwise, or if the step writes to it again (a counter created on first use), the step cannot be a graph,
since a replay would not rebind it. Then the recorded schedule is executed eagerly. The next time, such a
counter exists already.

Pending assignments of a step are realized with its results.
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
from typing import Any, Self

from tinygrad import Device, Tensor, UOp, dtypes
from tinygrad.device import Buffer
from tinygrad.engine import realize
from tinygrad.engine.jit import GraphRunner, graph_class
from tinygrad.helpers import BEAM, JIT, GlobalCounters, getenv
from tinygrad.schedule.memory import memory_plan_rewrite
from tinygrad.uop.ops import Ops, buffers

from tinygrad_nv.errors import GraphError
from tinygrad_nv.graphs.inputs import ALIGN
from tinygrad_nv.graphs.kept_buffers import (
    buffers_in,
    buffers_of,
    find_kept,
    live_tensors,
    run_kept,
    state_tensors,
)

_uop = attrgetter("uop")
Returned = Any  # a Tensor, or a tuple, list or dict of them


@dataclass(frozen=True)
class CapturedOutput:
    """A result: its name in messages, its storage in the schedule, the shape of a row, and its byte offset in
    the outputs' region."""
    name: str
    storage: UOp
    row: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int: return self.storage.max_numel() * self.storage.dtype.itemsize

    def tensor(self, memory: Buffer, rows: int) -> UOp:
        """Its first rows in the outputs' region."""
        view = memory.view(rows * math.prod(self.row), self.storage.dtype, self.offset)
        return UOp.from_buffer(view).reshape((rows, *self.row))


@dataclass(frozen=True)
class CompiledStep:
    """A compiled step. `arena_placeholders`: buffers in the arena with their offsets. `state`: Tensors whose
    memory the graph uses, with their UOps. `graph_obstacle`: why it is not one graph, "" if it is."""
    linear: UOp
    arena_placeholders: tuple[tuple[UOp, int], ...]
    arena_bytes: int
    outputs: tuple[CapturedOutput, ...]
    output_bytes: int
    variables: tuple[str, ...]
    state: tuple[tuple[weakref.ref[Tensor], UOp], ...]
    graph_obstacle: str

    def is_unchanged(self) -> bool:
        """Whether every Tensor of the state exists and was not replaced. Takes about 13 µs for 300 Tensors.
        """
        refs, uops = self._refs, self._uops
        try: return all(map(is_, map(_uop, map(call, refs)), uops))
        except AttributeError: return False  # one is gone

    @functools.cached_property
    def _refs(self) -> list[weakref.ref[Tensor]]: return [ref for ref, _ in self.state]

    @functools.cached_property
    def _uops(self) -> list[UOp]: return [uop for _, uop in self.state]

    def bind_memory(self, arena: Buffer | None, outputs: Buffer | None) -> UOp:
        """Returns the schedule with real memory in place of the placeholders."""
        memory: dict[UOp, UOp] = {}
        for placeholder, offset in self.arena_placeholders:
            assert arena is not None
            memory[placeholder] = UOp.from_buffer(arena.view(placeholder.max_numel(), dtypes.int8, offset))
        for each in self.outputs:
            assert outputs is not None
            view = outputs.view(each.storage.max_numel(), each.storage.dtype, each.offset)
            memory[each.storage] = UOp.from_buffer(view)
        return self.linear.substitute(memory, walk=True)


class ScheduleRecorder:
    """Collects, inside `with`, what tinygrad would run, and the values of its variables."""

    def __init__(self) -> None:
        self.calls: list[UOp] = []
        self.values: dict[str, int] = {}

    def add_linear(self, linear: UOp, var_vals: dict[str, int]) -> None:
        """Takes a schedule that tinygrad would run."""
        self.calls += linear.src
        self.values |= var_vals

    def __enter__(self) -> Self:
        realize.capturing.append(self)
        return self

    def __exit__(self, *_: object) -> None: realize.capturing.clear()

    @property
    def linear(self) -> UOp:
        """All of them as one schedule."""
        return UOp(Ops.LINEAR, src=tuple(self.calls))


@dataclass
class RecordedStep:
    """A recorded step: its compiled schedule, its results, and the buffers that existed before."""
    linear: UOp
    values: dict[str, int]
    results: list[tuple[str, Tensor]]
    existing: set[UOp]
    inputs: set[UOp]
    device: str
    kept_buffers: set[UOp] | None = None

    def execute(self) -> None:
        """Executes the recorded step, kernel by kernel."""
        realize.run_linear(self.linear, self.values, jit=True)

    def keeps_tensors(self) -> bool:
        """Computes kept Tensors that do not depend on inputs. Returns whether the step keeps any other. After
        an exception it must be called again."""
        if self.kept_buffers is None:
            results = [tensor for _, tensor in self.results]
            if kept_buffers := find_kept(self.linear, self.existing, results):
                gc.collect()  # objects only in reference cycles are not kept
                kept_buffers &= find_kept(self.linear, self.existing, results)
            self.kept_buffers = kept_buffers
        self.linear, left = run_kept(self.linear, self.kept_buffers, self.existing, self.inputs)
        return bool(left)

    def finalize(self) -> CompiledStep:
        """Plans its memory. Requires that `keeps_tensors` returned False."""
        outputs, offset = [], 0
        for name, tensor in self.results:
            made = CapturedOutput(name, tensor.uop.base, tuple(tensor.shape[1:]), offset)
            outputs.append(made)
            offset += -(-made.nbytes // ALIGN) * ALIGN
        held = set(buffers) | self.existing | {made.storage for made in outputs}
        before = buffers_in(self.linear)
        planned = memory_plan_rewrite(self.linear, held)
        arena_placeholders, arena = [], 0
        for placeholder in sorted(buffers_in(planned) - before, key=lambda u: u.arg.slot):
            if placeholder.device != self.device: continue
            arena_placeholders.append((placeholder, arena))
            arena += -(-placeholder.max_numel() // ALIGN) * ALIGN
        used = buffers_in(planned) - self.inputs - {made.storage for made in outputs}
        return CompiledStep(planned, tuple(arena_placeholders), arena, tuple(outputs), offset,
                            tuple(sorted(self.values)), state_tensors(used),
                            graph_obstacle(planned, self.device))


def record(step: Callable[..., Returned], size: int, inputs: Mapping[str, Tensor],
           variables: Mapping[str, UOp], device: str) -> tuple[RecordedStep, Returned]:
    """Records one run of the step on `size` rows. Returns it, and the step's return value."""
    # or every replay would repeat pending assignments
    realize_assigned(tensor for _, tensor in live_tensors())
    given = {tensor.uop.base for tensor in inputs.values()}
    schedules, ran = ScheduleRecorder(), GlobalCounters.kernel_count
    existing = set(buffers) | buffers_of(tensor.uop for _, tensor in live_tensors())
    try:
        with restore_on_error():
            with schedules:
                try: returned, results = call_step(step, size, inputs, variables, device, existing)
                except RuntimeError as error:
                    if "TinyJit inside another TinyJit" in str(error):
                        raise _jit_within_jit("captures") from error
                    raise
            if GlobalCounters.kernel_count != ran: raise _jit_within_jit("replays")
            bound = {variable.unbind()[0].expr for variable in variables.values()}
            if own := sorted(schedules.values.keys() - bound):
                raise GraphError(f"the step binds Variable {own[0]} itself",
                                 "Variables that are given in every call: a replay may need another value",
                                 f"pool(…, {own[0]}=Variable(…).bind(…)), and an argument of the step")
            linear = _compile_linear(schedules.linear)
            if not linear.src: raise GraphError("a step that computes nothing", "at least one kernel")
    except BaseException:
        # compute what the step kept, as far as possible, and re-raise
        with contextlib.suppress(Exception):
            if kept_buffers := find_kept(schedules.linear, existing):
                run_kept(_compile_linear(schedules.linear), kept_buffers, existing, given)
        raise
    return RecordedStep(linear, schedules.values, results, existing, given, device), returned


def _jit_within_jit(does: str) -> GraphError:
    return GraphError(f"a step {does} a TinyJit while it is captured", "a step of plain tinygrad",
                      "remove the TinyJit: the pool captures the whole step")


def _compile_linear(linear: UOp) -> UOp: return realize.compile_linear(linear,
                                                                       beam=getenv("JITBEAM", BEAM.value))


def name_results(returned: Returned) -> list[tuple[str, Tensor]]:
    """Lists the Tensors that a step returned, with names for messages."""
    if isinstance(returned, dict): items = [(repr(key), value) for key, value in returned.items()]
    elif isinstance(returned, (tuple, list)): items = [(str(k), value) for k, value in enumerate(returned)]
    else: items = [("", returned)]
    for name, value in items:
        if not isinstance(value, Tensor):
            raise GraphError(f"the step returns {_output(name)} of type {type(value).__name__}",
                             "a Tensor, or a tuple, list or dict of Tensors")
    if not items: raise GraphError("the step returns nothing", "at least one Tensor")
    return items


def rebuild(returned: Returned, outputs: Sequence[Tensor | None]) -> Returned:
    """`outputs` in the containers that the step returned."""
    if isinstance(returned, dict): return dict(zip(returned, outputs, strict=True))
    if hasattr(returned, "_make"): return returned._make(outputs)  # a namedtuple
    if isinstance(returned, (tuple, list)): return type(returned)(outputs)
    return outputs[0]


def call_step(step: Callable[..., Returned], size: int, inputs: Mapping[str, Tensor],
              variables: Mapping[str, UOp], device: str,
              existing: set[UOp]) -> tuple[Returned, list[tuple[str, Tensor]]]:
    """Calls the step, and realizes what it returns and assigns. Returns the containers, with None in place of
    Tensors, and the results. Each result has its own storage, not in `existing` and not of another result,
    and is a Tensor that the step has no reference to."""
    before = [ref for ref, _ in live_tensors()]
    returned = step(**{name: Tensor(tensor.uop) for name, tensor in inputs.items()}, **variables)
    items = [(name, _result(tensor, device)) for name, tensor in name_results(returned)]
    returned = rebuild(returned, [None] * len(items))
    for name, tensor in items: _check_result(name, tensor, size, device)
    Tensor.realize(*(tensor for _, tensor in items))
    realize_assigned(tensor for ref in before if (tensor := ref()) is not None)
    _detach(inputs.values(), [tensor for _, tensor in items])
    return returned, list(_with_own_storage(items, existing))


@contextlib.contextmanager
def restore_on_error() -> Iterator[None]:
    """After an exception inside, restores the Tensors that existed before: a pending assignment that did not
    run would otherwise become part of the next realize."""
    before = {ref: tensor.uop for ref, tensor in live_tensors()}
    try: yield
    except BaseException:
        for ref, uop in before.items():
            if (old := ref()) is not None and old.uop is not uop: old.uop = uop
        raise


def realize_assigned(candidates: Iterable[Tensor]) -> None:
    """Realizes pending assignments."""
    pending = [tensor for tensor in candidates if not tensor.uop.has_buffer_identity()
               and tensor.uop.has_buffer_identity(after_ok=True)]
    if pending: Tensor.realize(*pending)


def _detach(inputs: Iterable[Tensor], results: Iterable[Tensor]) -> None:
    """Gives Tensors that the step keeps, and that are views of its inputs or lazily depend on them, their own
    memory: the next call overwrites the inputs."""
    own = {id(tensor) for tensor in (*inputs, *results)}
    storage = {tensor.uop.base for tensor in inputs}
    def leaning() -> list[Tensor]:
        others = [tensor for _, tensor in live_tensors() if id(tensor) not in own]
        over: set[UOp] = set()  # in one traversal, since thousands of Tensors may share graphs
        for u in UOp.sink(*(tensor.uop for tensor in others)).toposort():
            if u in storage or not over.isdisjoint(u.src): over.add(u)
        return [tensor for tensor in others if tensor.uop in over]
    if not leaning(): return
    gc.collect()  # objects only in reference cycles are not kept
    for tensor in leaning(): tensor.replace(tensor.clone().realize())


def _with_own_storage(items: Sequence[tuple[str, Tensor]],
                      existing: set[UOp]) -> Iterator[tuple[str, Tensor]]:
    seen = set(existing)
    for name, tensor in items:
        if not tensor.uop.has_buffer_identity() or tensor.uop.base in seen: tensor = tensor.clone().realize()
        seen.add(tensor.uop.base)
        yield name, tensor


def _result(tensor: Tensor, device: str) -> Tensor:
    """A Tensor with the same values. Computed results are made contiguous, or tinygrad may leave a Tensor
    with a Variable unrealized; a result without a device (`Tensor.arange`) is placed on this one."""
    if tensor.uop.has_buffer_identity(after_ok=True): return Tensor(tensor.uop)
    if tensor.device is None and all(isinstance(extent, int) for extent in tensor.shape):
        return Tensor.empty(*tensor.shape, dtype=tensor.dtype, device=device).assign(tensor)
    return tensor.contiguous()


def _check_result(name: str, tensor: Tensor, size: int, device: str) -> None:
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


def graph_obstacle(linear: UOp, device: str) -> str:
    """Why a schedule cannot be one device graph; "" if it can."""
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
