"""The steps of a bundle, read as they are needed.

Protocol: a `StepStore` (worker/step_store.py) whose steps come from a bundle: `get(name)` is a step over the
memory of this process, and raises `BundleError` for one that the bundle lacks, or whose memory has another
size here, or that has another digest than its set says. Programs are made once for all steps. Nothing is
kept on disk.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tinygrad import Device
from tinygrad.device import Buffer
from tinygrad.uop.ops import UOp

from tinygrad_nv.bundle.container import Bundle
from tinygrad_nv.bundle.manifest import FIX, shorten
from tinygrad_nv.bundle.objects import require_object
from tinygrad_nv.bundle.plan import decode_step, program_digest, programs, step_digest
from tinygrad_nv.engine.bundled.sets import runs_cubins
from tinygrad_nv.engine.worker.step_store import StepStore
from tinygrad_nv.errors import BundleError, NVError

AGAIN = "compile the model with this version of tinygrad_nv"


@dataclass(frozen=True)
class SetParts:
    """A set of a bundle: its JSON, and the names of its parts."""
    bundle: Bundle
    name: str
    about: Mapping[str, Any]

    def part(self, name: str) -> str:
        """The name of a part of this set."""
        return f"{self.name}/{name}"


class KeptSteps(StepStore):
    """The steps of a set of a bundle, for a device. `tensors()` are those that outlive steps, by name."""

    def __init__(self, parts: SetParts, device: str, tensors: Callable[[], Mapping[str, Buffer]]) -> None:
        self.parts, self.device, self.tensors = parts, device, tensors
        self.steps = _Steps(self)  # type: ignore[assignment]
        self.note, self.changed = "", False

    def get(self, name: str) -> UOp:
        """The schedule of a step over the memory of this process."""
        made = super().get(name)
        if made is None:
            raise BundleError(f"{self.parts.bundle.path} has no {shorten(name)}",
                              "what a server's warm-up captures, with the limits it was compiled for",
                              "compile it with these limits")
        return made

    @contextlib.contextmanager
    def loading(self, name: str) -> Iterator[None]:
        """Around the loading of a step's kernels: code that no compiler made raises all kinds of errors."""
        try: yield
        except NVError: raise
        except MemoryError as error: raise no_memory(self.parts.bundle, f"intermediates of {name}") from error
        except Exception as error:
            raise BundleError(f"{self.parts.bundle.path}: kernels of {shorten(name)} cannot be loaded: "
                              f"{shorten(repr(error))}", "code of a compiler, for this machine",
                              FIX) from error

    def put(self, name: str, linear: UOp, existing: frozenset[UOp]) -> None:
        """Nothing: a bundle has all of its steps."""

    def save(self) -> None:
        """Nothing."""


class _Steps(Mapping[str, UOp]):
    """Steps by name."""

    def __init__(self, store: KeptSteps) -> None:
        self.store, self.made = store, dict[str, UOp]()
        self.names = {name: _part_of(name, found, store.parts)
                      for name, found in store.parts.about["steps"].items()}
        self.programs: list[UOp] | None = None
        self.digests: list[str] = []

    def __getitem__(self, name: str) -> UOp:
        if name not in self.made: self.made[name] = self._read(name)
        return self.made[name]

    def __iter__(self) -> Iterator[str]: return iter(self.names)
    def __len__(self) -> int: return len(self.names)
    def __contains__(self, name: object) -> bool: return name in self.names

    def _read(self, name: str) -> UOp:
        parts, store = self.store.parts, self.store
        bundle, (part, digest) = parts.bundle, self.names[name]
        if self.programs is None:
            target = Device[store.device].renderer.target
            rows, code = bundle.json(parts.part("programs.json")), bundle.read(parts.part("code"))
            self.programs = programs(rows, code, target, f"{bundle.path}: {parts.name}",
                                     runs_cubins(store.device, parts.name))
            self.digests = [program_digest(row, code) for row in rows]
        named, wanted = store.tensors(), parts.about["memory"]

        def room(owner: str) -> int | None:
            if owner not in named: return None
            if (found := named[owner].nbytes) != wanted.get(owner):
                raise BundleError(f"{bundle.path} was compiled for {shorten(wanted.get(owner))} bytes of "
                                  f"{shorten(owner)}, which has {found} here",
                                  "equal memory of host and kernels", AGAIN)
            return found
        step, what = bundle.json(part), f"{bundle.path}: {shorten(part)}"
        made = decode_step(step, self.programs, room, what)
        if step_digest(step, self.digests.__getitem__) == digest: return made
        raise BundleError(f"{what} has another hash than its set says", f"{shorten(digest)}", FIX)


def give_pool(bundle: Bundle, own: str) -> None:
    """Has threads of a CPU made of a set's code of them."""
    from tinygrad_nv.runtime.cpu import pool
    code = bundle.read(name := f"{own}/pool")
    try: require_object(code)
    except BundleError as error:
        raise BundleError(f"{bundle.path}: {name}: {error.found}", error.expected, FIX) from error
    pool.give(code)


def no_memory(bundle: Bundle, what: str) -> BundleError:
    """The error of memory that a bundle asks for, and this machine has not."""
    return BundleError(f"{bundle.path}: there is no memory for {shorten(what)}",
                       "a bundle whose sizes are those of a model",
                       "use a machine with more memory, or build it again")


def _part_of(name: str, found: object, parts: SetParts) -> tuple[str, str]:
    """The part that has a step, and its digest."""
    if isinstance(found, list) and [type(each) for each in found] == [str, str]:
        return parts.part(found[0]), found[1]
    raise BundleError(f"{parts.bundle.path}: {parts.name} has {shorten(found)} for {shorten(name)}",
                      "the name of a part, and a hash", FIX)
