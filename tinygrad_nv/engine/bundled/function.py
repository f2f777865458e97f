"""A function of Tensors as a bundle.

Protocol: `compile(fn, *examples)` runs `fn` once on the examples, so that what it creates on first use is
there, then captures it for arguments of these shapes and dtypes on this device. A `CompiledFunction` is
called with Tensors or arrays like the examples, and returns Tensors of its own, in the structure that `fn`
returned; it schedules nothing. `save(path)` writes a bundle, with the Tensors that the function closes over
as they are then, and `load(path)` reads it on a device of the same kind, without a compiler. What a function
writes besides its results, such as the counter of Tensor.rand, begins anew with each load.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tinygrad import Device, Tensor, UOp
from tinygrad.device import Buffer
from tinygrad.dtype import DType
from tinygrad.engine import realize
from tinygrad.uop.ops import Ops

from tinygrad_nv import hooks
from tinygrad_nv.bundle import manifest
from tinygrad_nv.bundle.container import Bundle, Source, open_bundle, write_bundle
from tinygrad_nv.bundle.manifest import Manifest, canonical
from tinygrad_nv.bundle.plan import (
    DTYPES,
    MOST_BYTES,
    ProgramTable,
    encode_step,
    launches,
    plan_parts,
    step_digest,
)
from tinygrad_nv.engine.bundled.kept_steps import KeptSteps, SetParts, give_pool, no_memory
from tinygrad_nv.engine.bundled.sets import bytes_of, choose_set, host_threads, name_of, native, require
from tinygrad_nv.engine.worker.captured_step import CapturedStep
from tinygrad_nv.engine.worker.step_store import StepStore
from tinygrad_nv.errors import BundleError
from tinygrad_nv.runtime.memory import allocate, host_bytes, write
from tinygrad_nv.tile.expression import short

CALL = "call"       # the name of a function's step
MOST_DIMENSIONS = 64
SET: dict[str, manifest.Type] = {
    "name": str, "steps": dict, "memory": dict, "pool": bool, "native": list, "threads": int, "parts": dict,
    "inputs": list, "outputs": list, "tree": (int, dict)}


@dataclass(frozen=True)
class Shaped:
    """Shape and dtype of an argument or a result."""
    shape: tuple[int, ...]
    dtype: DType

    def __str__(self) -> str: return f"{short(self.dtype)}{list(self.shape)}"

    def to_json(self) -> list[Any]:
        """Returns shape and dtype as JSON."""
        return [list(self.shape), short(self.dtype)]

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def empty(self, device: str) -> Tensor:
        """Memory for one."""
        made = Tensor.empty(*self.shape, dtype=self.dtype, device=device)
        allocate(made)
        return made


class _Store(StepStore):
    """Keeps the step of a function; memory that was there before and has no name is a constant."""

    def __init__(self, device: str, named: dict[str, Buffer]) -> None:
        self.device, self.named, self.steps, self.changed, self.note = device, named, {}, False, ""

    def tensors(self) -> Mapping[str, Buffer]: return self.named

    def put(self, name: str, linear: UOp, existing: frozenset[UOp]) -> None:
        known = {id(each.base) for each in self.named.values()}
        for call in launches(linear):
            for argument in realize.get_call_arg_uops(call):
                for u in (each for each in argument.toposort() if each.op is Ops.BUFFER and each in existing):
                    if not isinstance(at := u.buffer, Buffer) or id(at.base) in known: continue
                    known.add(id(at.base))
                    self.named[f"constant.{len(self.named)}"] = at.base
        super().put(name, linear, existing)


@dataclass
class CompiledFunction:
    """A captured function. `inputs` and `outputs` are its memory, `tree` the structure of what it returns,
    with numbers of outputs in the place of Tensors."""
    device: str
    inputs: list[Tensor]
    outputs: list[Tensor]
    tree: Any
    step: CapturedStep
    named: dict[str, Buffer] = field(repr=False)
    kept: UOp | None = field(default=None, repr=False)

    def __call__(self, *arguments: Tensor | np.ndarray) -> Any:
        """Runs the function. Raises `BundleError` for arguments unlike the examples."""
        if len(arguments) != len(self.inputs):
            raise BundleError(f"{len(arguments)} arguments", f"{len(self.inputs)}, as the function has")
        for number, (given, place) in enumerate(zip(arguments, self.inputs, strict=True)):
            self._put(number, given, place)
        self.step()
        made = [self._copy(each) for each in self.outputs]
        return _rebuilt(self.tree, made)

    def _put(self, number: int, given: Tensor | np.ndarray, place: Tensor) -> None:
        wanted = shape_of(place)
        if isinstance(given, np.ndarray):
            if given.shape != wanted.shape or given.dtype.itemsize != wanted.dtype.itemsize \
                    or short_of(given.dtype) != short(wanted.dtype):
                raise _unlike(number, f"an array {given.dtype}{list(given.shape)}", wanted)
            return write(place, 0, np.ascontiguousarray(given).reshape(-1).view(np.uint8).data)
        if not isinstance(given, Tensor) or shape_of(given) != wanted or given.device != self.device:
            what = f"{shape_of(given)} on {given.device}" if isinstance(given, Tensor) else repr(given)[:60]
            raise _unlike(number, what, wanted, self.device)
        if not given.uop.has_buffer_identity() or not given.uop.is_realized:
            given = given.contiguous().realize()
        source = given.uop.buffer
        assert isinstance(source, Buffer)
        allocate(place).copy_from(source.ensure_allocated())

    def _copy(self, output: Tensor) -> Tensor:
        made = Buffer(self.device, output.uop.buffer.size, output.dtype).allocate()
        made.copy_from(allocate(output))
        return Tensor(UOp.from_buffer(made).reshape(output.shape))

    def save(self, path: str | Path, sign_key: Path | None = None) -> Manifest:
        """Writes a bundle. Raises `BundleError` for a function that was loaded from one."""
        if self.kept is None:
            raise BundleError("save() of a function that was loaded", "one that was compiled here",
                              "copy its bundle")
        table, own = ProgramTable(), name_of(self.device)
        step = encode_step(self.kept, table)
        weights = {name: at for name, at in self.named.items() if name.startswith("constant.")}
        on_cpu = self.device == "CPU"
        about = {"name": own, "steps": {CALL: ["steps/0.json", step_digest(step, table.digest)]},
                 "memory": {name: at.nbytes for name, at in self.named.items()}, "pool": on_cpu,
                 "native": native(self.device), "threads": host_threads(self.device),
                 "parts": {name: f"weights/{name}" for name in weights},
                 "inputs": [shape_of(each).to_json() for each in self.inputs],
                 "outputs": [shape_of(each).to_json() for each in self.outputs], "tree": self.tree}
        parts = plan_parts([step], table)
        if on_cpu:
            from tinygrad_nv.runtime.cpu.pool import machine_code
            parts["pool"] = machine_code()
        sources = [Source(f"{own}/set.json", canonical(about)),
                   *(Source(f"{own}/{name}", data) for name, data in parts.items()),
                   *(Source(f"weights/{name}", bytes(bytes_of(at))) for name, at in weights.items())]
        made_by = {"tinygrad": hooks.TINYGRAD_VERSION}
        return write_bundle(Path(path), "function", {"sets": [own], "made_by": made_by}, sources, sign_key)


def compile(fn: Callable[..., Any], *examples: Tensor) -> CompiledFunction:
    """Captures a function of Tensors for arguments like the examples, all on one device; it returns a Tensor,
    or a tuple, a list or a dict of results. Raises `BundleError` for others."""
    if not examples or not all(isinstance(each, Tensor) for each in examples):
        raise BundleError(f"examples {[type(each).__name__ for each in examples]}", "Tensors, at least one",
                          "close over other values")
    device = str(examples[0].device)
    if elsewhere := [each.device for each in examples if each.device != device]:
        raise BundleError(f"examples on {device} and on {elsewhere[0]}", "one device", f".to({device!r})")
    Tensor.realize(*_flatten(fn(*examples))[0])     # what it creates on first use is there from now on
    inputs = [shape_of(each).empty(device) for each in examples]
    named = {f"input.{i}": allocate(each) for i, each in enumerate(inputs)}
    outputs: list[Tensor] = []
    tree: Any = None

    def run() -> None:
        nonlocal tree
        made, tree = _flatten(fn(*inputs))
        outputs[:] = [shape_of(each).empty(device) for each in made]
        named.update((f"output.{i}", allocate(each)) for i, each in enumerate(outputs))
        Tensor.realize(*(place.assign(each) for place, each in zip(outputs, made, strict=True)))
    store = _Store(device, named)
    step = CapturedStep(run, list, device, store, CALL)
    step.prepare()
    if (kept := store.steps.get(CALL)) is None:
        raise BundleError("the function uses memory of another device, or keeps some between calls",
                          "Tensors of one device, created before or in each call")
    return CompiledFunction(device, inputs, outputs, tree, step, named, kept)


def load(path: str | Path, device: str | None = None, required_key: Path | None = None) -> CompiledFunction:
    """A function from a bundle that `save` wrote, on a device its kernels were made for. Raises
    `BundleError`."""
    file, name = Path(path), Device.canonicalize(device)
    bundle = open_bundle(file, required_key)
    if bundle.manifest.kind != "function":
        raise BundleError(f"{file} is the bundle of a {bundle.manifest.kind}", "one of a function",
                          "load a model with tinygrad_nv.LLM")
    there = manifest.field(bundle.manifest.about, "sets", list, str(file))
    own = choose_set(name, there, str(file))
    what = f"{file}: {own}/set.json"
    about = _check_set(bundle, own, what)
    require(about["native"], str(file))
    shapes = {key: [_read_shaped(each, what) for each in about[key]] for key in ("inputs", "outputs")}
    _require_sizes(bundle, about["memory"], shapes, about["parts"], what)
    tree = _check_tree(about["tree"], len(shapes["outputs"]), what)
    if about["pool"]: give_pool(bundle, own)
    try: return _load_set(SetParts(bundle, own, about), name, shapes, tree)
    except MemoryError as error: raise no_memory(bundle, "arguments and results") from error


def _check_set(bundle: Bundle, own: str, what: str) -> dict[str, Any]:
    """Returns the JSON of a function's set, whose fields have their types."""
    about = manifest.fields(bundle.json(f"{own}/set.json"), SET, what)
    manifest.entries(about, "memory", int, what)
    manifest.entries(about, "parts", str, what)
    if about["name"] != own or not all(type(each) is str for each in about["native"]):
        raise BundleError(f"{what} is of {manifest.shorten(about['name'])}, with instructions "
                          f"{manifest.shorten(about['native'])}", f"{own}, and names", manifest.FIX)
    if len({*about["parts"].values()}) < len(about["parts"]):
        raise BundleError(f"{what} names a part twice", "a part for each constant", manifest.FIX)
    return about


def _require_sizes(bundle: Bundle, memory: Mapping[str, int], shapes: Mapping[str, Sequence[Shaped]],
                   parts: Mapping[str, str], what: str) -> None:
    """Raises unless all memory has the size that it needs: before any is taken."""
    needed = {f"{key[:-1]}.{i}": each.nbytes for key, some in shapes.items() for i, each in enumerate(some)}
    needed |= {name: bundle.part(part).nbytes for name, part in parts.items()}
    for name in dict.fromkeys([*needed, *memory]):
        if (found := memory.get(name)) == (right := needed.get(name)) and found: continue
        raise BundleError(f"{what} has {manifest.shorten(found)} bytes of {manifest.shorten(name)}",
                          f"{manifest.shorten(right)}, as its shape or its part has, and more than none",
                          manifest.FIX)


def _load_set(parts: SetParts, device: str, shapes: Mapping[str, Sequence[Shaped]],
            tree: Any) -> CompiledFunction:
    """Loads the function of a set that is checked."""
    inputs, outputs = ([each.empty(device) for each in shapes[key]] for key in ("inputs", "outputs"))
    named = {f"{kind}.{i}": allocate(each) for kind, tensors in (("input", inputs), ("output", outputs))
             for i, each in enumerate(tensors)}
    for each, part in parts.about["parts"].items(): named[each] = _upload(parts.bundle.read(part), device)
    store = KeptSteps(parts, device, lambda: named)
    step = CapturedStep(lambda: None, list, device, store, CALL)
    step.prepare()
    return CompiledFunction(device, inputs, outputs, tree, step, named)


def _upload(data: bytes, device: str) -> Buffer:
    tensor = Tensor.empty(len(data), dtype=DTYPES["u8"], device=device)
    buffer = allocate(tensor)
    if (view := host_bytes(tensor)) is not None: view[:] = data
    else: write(tensor, 0, memoryview(data))
    return buffer


def shape_of(tensor: Tensor) -> Shaped:
    """Returns shape and dtype of a Tensor. Raises `BundleError` for a symbolic shape, or one without
    elements."""
    if not all(isinstance(each, int) and each for each in tensor.shape):
        raise BundleError(f"a Tensor of shape {tensor.shape}", "integers from 1 on",
                          "give it a shape of integers, with elements")
    return Shaped(tuple(int(each) for each in tensor.shape), tensor.dtype)


def short_of(dtype: np.dtype) -> str:
    """The name of NumPy's dtype as `short` has it."""
    if dtype == np.bool_: return "bool"
    return {"f": "f", "i": "s", "u": "u"}.get(dtype.kind, "?") + str(8 * dtype.itemsize)


def _unlike(number: int, found: str, wanted: Shaped, device: str = "") -> BundleError:
    return BundleError(f"argument {number} is {found}", f"{wanted}{f' on {device}' if device else ''}",
                       "compile the function for such arguments, or convert them")


def _read_shaped(found: Any, what: str) -> Shaped:
    try:
        shape, dtype = found
        made = Shaped(tuple(shape), DTYPES[dtype])
        if len(shape) > MOST_DIMENSIONS or any(type(each) is not int or each < 1 for each in shape) \
                or made.nbytes >= MOST_BYTES: raise ValueError(shape)
        return made
    except (TypeError, ValueError, KeyError) as error:
        raise BundleError(f"{what} has an argument {manifest.shorten(found)}",
                          f"a shape of 0 to {MOST_DIMENSIONS} numbers from 1 on, and a dtype, of less than "
                          f"{MOST_BYTES} bytes", manifest.FIX) from error


# **** structures ****

def _flatten(made: Any) -> tuple[list[Tensor], Any]:
    """Returns the Tensors of a function's result, and its structure with their numbers in their places."""
    found: list[Tensor] = []

    def visit(each: Any) -> Any:
        if isinstance(each, Tensor):
            found.append(each)
            return len(found) - 1
        if isinstance(each, dict) and all(isinstance(key, str) for key in each):
            return {"dict": [[key, visit(value)] for key, value in each.items()]}
        if type(each) in (tuple, list): return {type(each).__name__: [visit(value) for value in each]}
        raise BundleError(f"the function returns a {type(each).__name__}",
                          "a Tensor, or a tuple, a list or a dict (by text) of results",
                          "return one of these")
    tree = visit(made)
    if not found: raise BundleError("the function returns no Tensor", "one at least")
    return found, tree


def _rebuilt(tree: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(tree, int): return tensors[tree]
    (kind, inner), = tree.items()
    if kind == "dict": return {key: _rebuilt(value, tensors) for key, value in inner}
    made: Iterable[Any] = (_rebuilt(each, tensors) for each in inner)
    return tuple(made) if kind == "tuple" else list(made)


def _check_tree(tree: Any, count: int, what: str) -> Any:
    """Returns a structure of a file, which names outputs that are there."""
    def visit(each: Any) -> None:
        if type(each) is int and 0 <= each < count: return
        (kind, inner), = each.items()
        for one in {"dict": inner, "tuple": inner, "list": inner}[kind]:
            if kind != "dict": visit(one)
            else:
                name, value = one
                if type(name) is not str: raise TypeError(name)
                visit(value)
    try:
        visit(tree)
        return tree
    except (TypeError, ValueError, AttributeError, KeyError, RecursionError) as error:
        raise BundleError(f"{what} has a structure {manifest.shorten(tree)}",
                          "numbers of results, in tuple, list, dict", manifest.FIX) from error
