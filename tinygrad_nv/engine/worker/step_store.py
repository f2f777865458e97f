"""Captured steps kept from one process to the next: kernels as binaries, and the memory that each uses.

Protocol: `StepStore.open(…)` finds the file of a configuration, by a key over all that steps depend on:
sources of the package, model and weights' places, settings, processor, compiler. `get(name)` is the schedule
of a step over this process's memory, or None; `put(name, linear, existing)` keeps one, and `save` writes all
that were put. A step that uses memory which has no name is not kept, and is captured in each process.

In the file an argument is a mark: the name of a tensor and the place in it, or the number of an intermediate,
which gets memory of its own. A program has its binary and what launches it; its graph and its text are left
out, so explain() names its kernel but shows no source.
"""
from __future__ import annotations

import contextlib
import hashlib
import platform
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from tinygrad import Tensor, dtypes
from tinygrad.codegen import to_program_context
from tinygrad.device import Buffer
from tinygrad.dtype import AddrSpace
from tinygrad.engine import realize
from tinygrad.helpers import BEAM, CCACHE, JIT, VIZ
from tinygrad.nn.state import get_state_dict
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv import cache, config, hooks, private
from tinygrad_nv.bundle.plan import Place, is_graph, launches
from tinygrad_nv.cpu.isa import flags
from tinygrad_nv.engine.worker import prebuilt_steps
from tinygrad_nv.engine.worker.step_file import FASTEST, NEUTRAL, dumps, loads, sources
from tinygrad_nv.runtime.renderers import renderer_of


class StepStore:
    """The steps of one configuration. `tensors()` are those that outlive steps, by name."""

    def __init__(self, path: Path, device: str, tensors: Callable[[], Mapping[str, Buffer]],
                 prebuilt: Callable[[], dict[str, UOp]] = dict) -> None:
        self.path, self.device, self.tensors = path, device, tensors
        found = private.read_sealed(path)
        self.steps = {} if found is None else loads(found, renderer_of(device).target)
        if not self.steps: self.steps = prebuilt()
        self.changed = False
        self.note = ""      # why steps that came with the model were not used

    @staticmethod
    def open(facts: Iterable[object], device: str, tensors: Callable[[], Mapping[str, Buffer]],
             model: Path | None = None) -> StepStore | None:
        """The store of steps that depend on `facts`, at first with those that come with `model`; None where
        nothing is kept, or settings ask to see how programs are made."""
        if not config.get("NV_PROGRAM_CACHE") or not CCACHE or VIZ or BEAM or JIT != 1 or not hooks.enabled():
            return None
        facts, places = list(facts), places_of(tensors())
        words = [*map(repr, facts), repr(places), sources(), *map(repr, _settings(device))]
        key = hashlib.sha256("\0".join(words).encode()).hexdigest()[:32]
        def prebuilt() -> dict[str, UOp]:
            return {} if model is None else prebuilt_steps.read(model, device, facts, places)
        made = StepStore(cache.readable() / "steps" / f"{key}.xz", device, tensors, prebuilt)
        if not made.steps and model is not None:
            made.note = prebuilt_steps.why_unused(model, device, facts, places)
        return made

    def get(self, name: str) -> UOp | None:
        """The schedule of a step over the memory of this process; None if it is not kept."""
        if (kept := self.steps.get(name)) is None: return None
        named, own = self.tensors(), dict[int, Buffer]()

        def memory(u: UOp) -> UOp:
            at: Place = u.tag
            if isinstance(at.owner, str): owner = named[at.owner]
            elif at.owner in own: owner = own[at.owner]
            else: owner = own[at.owner] = Buffer(self.device, at.whole, dtypes.uint8)
            return UOp.from_buffer(owner.base.view(at.size, at.dtype, owner.offset + at.offset))
        marks = dict.fromkeys(u for call in launches(kept) for u in call.src[1:] if isinstance(u.tag, Place))
        if any(isinstance(u.tag.owner, str) and not _has_room(named.get(u.tag.owner), u.tag) for u in marks):
            return None
        return _over(kept, {u: memory(u) for u in marks}, {})

    def put(self, name: str, linear: UOp, existing: frozenset[UOp]) -> None:
        """Keeps a schedule that was captured when the buffers `existing` were there, if it can be."""
        places = _places(linear, existing, self.device, self.tensors())
        if places is None: return
        programs = {call.src[0]: _slim(call.src[0]) for call in launches(linear)}
        if any(made is None for made in programs.values()): return
        marks = {u: UOp(Ops.NOOP, u.dtype, tag=at) for u, at in places.items()}
        self.add(name, _over(linear, marks, programs))

    def add(self, name: str, step: UOp) -> None:
        """Keeps a step that `put` has made, here or in another process."""
        self.steps[name] = step
        self.changed = True

    def loading(self, name: str) -> AbstractContextManager[None]:
        """Around the loading of a step's kernels."""
        return contextlib.nullcontext()

    def save(self) -> None:
        """Writes the file, if a step was put since it was read."""
        if not self.changed: return
        self.changed = False
        with contextlib.suppress(OSError):
            # a copy: another thread may put a step
            private.write_sealed(self.path, dumps(dict(self.steps), FASTEST))


# **** what is in the key ****

def _settings(device: str) -> list[object]:
    """Settings, processor and compiler, as far as kernels depend on them."""
    settings = [config.get(each.name) for each in config.SETTINGS if each.name not in NEUTRAL]
    renderer = renderer_of(device)
    return [settings, hooks.configuration(), [each.value for each in to_program_context], platform.machine(),
            sorted(flags()), renderer.target, renderer.compiler.cachekey]


def places_of(tensors: Mapping[str, Buffer]) -> list[tuple[str, int, str, int]]:
    """Lists where tensors are, as far as steps depend on it."""
    return [(name, at.nbytes, at.dtype.name, at.offset) for name, at in tensors.items()]


def name_buffers(**owners: object) -> dict[str, Buffer]:
    """Returns the realized tensors and buffers that objects have, by name."""
    found: dict[str, Buffer] = {}
    for name, owner in owners.items():
        if isinstance(owner, Buffer): found[name] = owner
        elif isinstance(owner, Tensor): found |= _buffer_by_name(name, owner)
        else:
            for inner, tensor in get_state_dict(owner, f"{name}.").items():
                found |= _buffer_by_name(inner, tensor)
    return found


def _buffer_by_name(name: str, tensor: Tensor) -> dict[str, Buffer]:
    if not tensor.uop.has_buffer_identity() or not isinstance(at := tensor.uop.buffer, Buffer): return {}
    return {name: at}


# **** memory ****

def _places(linear: UOp, existing: frozenset[UOp], device: str,
            named: Mapping[str, Buffer]) -> dict[UOp, Place] | None:
    """The memory of every argument of a schedule; None where one is neither named nor in an intermediate,
    which is written before it is read."""
    owners: dict[int, list[tuple[str, Buffer]]] = {}
    for name, at in named.items(): owners.setdefault(id(at.base), []).append((name, at))
    found: dict[UOp, Place] = {}
    numbers: dict[UOp, int] = {}
    written = set[UOp]()
    for call in launches(linear):
        arguments = realize.get_call_arg_uops(call)
        outs, ins = realize.get_call_outs_ins(call)
        for number, argument in enumerate(arguments):
            [u] = leaves if len(leaves := _leaves(argument)) == 1 else [argument]
            if u.op is not Ops.BUFFER or u.device != device: return None
            if argument not in found:
                at = _place(argument, u, owners, numbers)
                if at is None or (isinstance(at.owner, int) and u in existing): return None
                found[argument] = at
            if isinstance(found[argument].owner, int) and number in ins and u not in written: return None
        for number in outs: written.update(_leaves(arguments[number]))
    return found


def _has_room(owner: Buffer | None, at: Place) -> bool:
    return owner is not None and at.offset + at.size * at.dtype.itemsize <= owner.nbytes


def _leaves(argument: UOp) -> list[UOp]: return [u for u in argument.toposort() if u.op is Ops.BUFFER]


def _over(linear: UOp, memory: Mapping[UOp, UOp], programs: Mapping[UOp, UOp]) -> UOp:
    """A schedule with other memory and programs. (`UOp.substitute` leaves graphs as they are.)"""
    def call(one: UOp) -> UOp:
        if not is_graph(one):
            arguments = [memory.get(u, u) for u in one.src[1:]]
            return one.replace(src=(programs.get(one.src[0], one.src[0]), *arguments))
        graph, inner = one.src[0], one.src[0].src[0]
        return one.replace(src=(graph.replace(src=(inner.replace(src=tuple(map(call, inner.src))),)),
                                *one.src[1:]))
    return linear.replace(src=tuple(map(call, linear.src)))


def _place(argument: UOp, u: UOp, owners: Mapping[int, list[tuple[str, Buffer]]],
           numbers: dict[UOp, int]) -> Place | None:
    """Finds where an argument is in the buffer `u`, whose memory is of one of `owners` or an intermediate."""
    at = argument.buffer
    if not isinstance(at, Buffer): return None
    for name, owner in owners.get(id(at.base), ()):
        offset = at.offset - owner.offset
        if offset >= 0 and offset + at.nbytes <= owner.nbytes: return Place(name, at.size, at.dtype, offset)
    number = numbers.setdefault(u, len(numbers))
    return Place(number, at.size, at.dtype, at.offset, at.base.nbytes)


def _slim(program: UOp) -> UOp | None:
    """A program without its graph and text; None of one that is not compiled."""
    if program.op is not Ops.PROGRAM or [u.op for u in program.src[3:]] != [Ops.BINARY]: return None
    sink, linear, source, binary = program.src[:4]
    parameters = tuple(u for u in linear.src if u.op is Ops.PARAM and u.addrspace != AddrSpace.ALU)
    return program.replace(src=(UOp.sink(arg=sink.arg), linear.replace(src=parameters),
                                source.replace(arg=""), binary))
