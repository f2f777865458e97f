"""A model's launches for inputs of one kind: shapes, types, and the values that decide what runs.

Protocol. `capture(lower, kinds, known)` builds the graph of a call over placeholders and compiles its
kernels; `known` are inputs whose values are part of the capture. A value that is needed while the graph is
built (a condition, a number of iterations, an extent) and that depends on a placeholder raises `ValueNeeded`
with the inputs that it depends on. A call reads inputs where they lie, writes results into new memory, which
no later call overwrites, and is one call into C. On another device than the CPU a TinyJit replays the
launches (transforms/jit.py).
"""
from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from tinygrad import Tensor
from tinygrad.device import Buffer, Device
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv.dlpack import from_dlpack
from tinygrad_nv.graphs.capture import ScheduleRecorder
from tinygrad_nv.graphs.kept_buffers import all_buffers, buffers_in, buffers_of, live_tensors, run_kept
from tinygrad_nv.graphs.launches import Launches, compile_launches
from tinygrad_nv.onnx.elements import PLAIN, Value, from_numpy
from tinygrad_nv.onnx.gradients import Call, register
from tinygrad_nv.onnx.replayed import Kind, Replayed, address_of, allocate_aligned
from tinygrad_nv.transforms.jit import jit

_lock = threading.RLock()   # one capture at a time: each replaces Tensor.realize meanwhile
Lower = Callable[[Mapping[str, Value]], Mapping[str, Value]]


class ValueNeeded(Exception):
    """The graph depends on the values of these inputs."""

    def __init__(self, names: Sequence[str]) -> None: self.names = tuple(names)


class NotCaptured(Exception):
    """A call returns what is no Tensor: a sequence, strings."""


def capture(lower: Lower, kinds: Mapping[str, Kind],
            known: Mapping[str, Value]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """The launches of a call, as a function of inputs. Raises `ValueNeeded` and `NotCaptured`."""
    with _lock: return (Captured if Device.DEFAULT == "CPU" else _Jitted)(lower, kinds, known)


@contextmanager
def _forbid_values(places: Mapping[UOp, str]) -> Iterator[None]:
    """Raises `ValueNeeded` where a Tensor that depends on a placeholder is computed."""
    theirs = Tensor.realize

    def realize(self: Tensor, *others: Tensor, **options: Any) -> Tensor:
        needed = buffers_of(each.uop for each in (self, *others)) & places.keys()
        if needed: raise ValueNeeded(sorted(places[each] for each in needed))
        return theirs(self, *others, **options)
    Tensor.realize = realize
    try: yield
    finally: Tensor.realize = theirs


def _trace(lower: Lower, kinds: Mapping[str, Kind], known: Mapping[str, Value]
            ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Placeholders, and the results of a call that is not computed."""
    given = {name: _placeholder(kind) for name, kind in kinds.items()}
    with _forbid_values({each.uop.base: name for name, each in given.items()}):
        made = {name: from_numpy(each) if isinstance(each, np.ndarray) else each
                for name, each in lower({**given, **known}).items()}
    tensors = {name: each for name, each in made.items() if isinstance(each, Tensor)}
    if len(tensors) < len(made): raise NotCaptured
    return given, tensors


def _placeholder(kind: Kind) -> Tensor:
    """A Tensor of storage without values."""
    storage = Buffer(Device.DEFAULT, kind.size, PLAIN[kind.element])
    return Tensor(UOp.from_buffer(storage).reshape(kind.shape))


def _elsewhere(kind: Kind) -> UOp:
    """A buffer whose memory is not tinygrad's, to be placed at other addresses."""
    made: UOp = from_dlpack(allocate_aligned(kind)[0].reshape(-1), copy=False).uop.base
    return made


class Captured:
    """The launches on the CPU."""

    def __init__(self, lower: Lower, kinds: Mapping[str, Kind], known: Mapping[str, Value]) -> None:
        self.lazy = functools.cache(lambda: _trace(lower, kinds, known)[1])
        self.lower: Lower = lambda given: lower({**given, **known})
        self.kinds, self.lock = list(kinds.items()), threading.Lock()
        given, made = _trace(lower, kinds, known)
        self.names = tuple(made)
        self.constants = {name: each for name, each in made.items()
                          if each.uop.is_virtual or not each.numel()}
        pending = {name: each.contiguous() for name, each in made.items() if name not in self.constants}
        _upload(pending.values())
        existing = {each.uop.base for each in given.values()} | all_buffers() | buffers_of(
            each.uop for _, each in live_tensors())
        linear = compile_launches(_record(pending, existing))
        # what depends on constants alone is computed now
        fresh = buffers_in(linear) - existing - {each.uop.base for each in pending.values()}
        linear, _ = run_kept(linear, fresh, existing, {each.uop.base for each in given.values()})
        self.results = [(name, Kind.of(each)) for name, each in pending.items()]
        recorded = [each.uop.base for each in (*given.values(), *pending.values())]
        placed = (*kinds.values(), *(kind for _, kind in self.results))
        self.launches = Launches(linear, recorded, tuple(map(_elsewhere, placed)))

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The results for inputs of the captured kind."""
        read = [address_of(inputs[name], kind) for name, kind in self.kinds]    # keeps copies
        fresh = [allocate_aligned(kind) for _, kind in self.results]
        with self.lock:
            for place, (address, _) in enumerate(read):
                if address != self.launches.addresses[place]: self.launches.bind(place, address)
            for place, (_, address) in enumerate(fresh, len(read)): self.launches.bind(place, address)
            self.launches.run()
        call = Call.of(self.lower, inputs, [name for name, _ in self.kinds])
        made = {name: Replayed.over(array, kind, self, name, call)
                for (name, kind), (array, _) in zip(self.results, fresh, strict=True)}
        if not self.constants: return made
        return {name: made[name] if name in made else self.constants[name] for name in self.names}


def _upload(pending: Iterable[Tensor]) -> None:
    """Copies constants of the host to the device, once: a launch would do so in every call."""
    copies = [Tensor(u) for u in UOp.sink(*(each.uop for each in pending)).toposort()
              if u.op is Ops.COPY and u.src[0].base.op is Ops.BUFFER]
    if copies: Tensor.realize(*copies)


def _record(pending: dict[str, Tensor], existing: set[UOp]) -> UOp:
    """Returns the schedule that tinygrad would run. Each result gets storage that is not in `existing`, nor
    another's."""
    existing = set(existing)
    with ScheduleRecorder() as schedules:
        if pending: Tensor.realize(*pending.values())
        for name, each in pending.items():
            if not each.uop.has_buffer_identity() or each.uop.base in existing:
                pending[name] = each.clone().realize()
            existing.add(pending[name].uop.base)
    return schedules.linear


class _Jitted:
    """The launches on another device. The first call's results are lazy, so that explain() shows them."""

    def __init__(self, lower: Lower, kinds: Mapping[str, Kind], known: Mapping[str, Value]) -> None:
        self.names = tuple(kinds)
        self.steps: Iterator[Callable[..., dict[str, Any]]]
        _trace(lower, kinds, known)    # raises what cannot be captured

        def step(*given: Tensor) -> dict[str, Tensor]:
            made = self.lower(dict(zip(self.names, given, strict=True)))
            return {name: _tensor(each) for name, each in made.items()}
        self.lower: Lower = lambda given: lower({**given, **known})
        self.steps = itertools.chain([step], itertools.repeat(jit(step)))

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        given = (_tensor(inputs[name]) for name in self.names)
        # what realizes an input shall not cut off what it is computed of
        made = next(self.steps)(*(x if x.uop.is_realized else x.contiguous() for x in given))
        if (call := Call.of(self.lower, inputs, self.names)) is not None:
            for name, each in made.items():
                if each.uop.base.op is Ops.BUFFER: register(each.uop.base, call, name)
        return made


def _tensor(x: Any) -> Tensor:
    """An input or a result on the device."""
    made = x if isinstance(x, Tensor) else from_numpy(np.asarray(x), folds=False)
    assert isinstance(made, Tensor)
    return made
