"""Steps and programs of a bundle: which kernels are launched on which memory, and their machine code.

Protocol: a step is the schedule that a StepStore keeps (engine/worker/step_store.py): calls of programs whose
arguments are `Place`s. `ProgramTable.add(program)` numbers programs, each once, and `encoded()` gives JSON
and code; `programs(…)` reads them back. `encoded_step(linear, table)` is the JSON of a step, and
`decoded_step(…)` the schedule again. What is read is checked as it is made, and raises `BundleError`: a
program that names no code, a place outside of its memory. What the code does with its arguments is beyond any
check: a step's digest, of its programs and their code too, holds both together. `launch` is what a launch
needs besides (tile/launch.py); a kernel that calls a library or runs on several devices together is no part
of a bundle.

JSON of a step:     {"places": [[owner, elements, dtype, offset, bytes of an intermediate], …],
                     "batches": [{"graph": 1, "launches": [[program, place, …], …]}, …]}
JSON of a program:  name, code [offset, bytes], of PTX cubin [offset, bytes],
                    parameters [[slot, dtype, elements], …], grid, block, variables, globals, outs, ins,
                    work [operations, bytes of loads, bytes of memory], note, launch
"""
from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from tinygrad import dtypes
from tinygrad.dtype import AddrSpace, DType
from tinygrad.helpers import Target
from tinygrad.renderer import Estimates
from tinygrad.uop.ops import KernelInfo, Ops, ParamArg, ProgramInfo, UOp

from tinygrad_nv.bundle.manifest import FIX, Type, canonical, fields, shorten
from tinygrad_nv.bundle.objects import require_object
from tinygrad_nv.errors import BundleError, NVError
from tinygrad_nv.runtime.note import KeptNote, Note, ProgramKernel
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.launch import Integer, LaunchConfig, MapArgument, Zeroed
from tinygrad_nv.tile.schedule import Schedule

DTYPES = {short(each): each for each in (
    dtypes.bool, dtypes.int8, dtypes.uint8, dtypes.int16, dtypes.uint16, dtypes.int32, dtypes.uint32,
    dtypes.int64, dtypes.uint64, dtypes.float16, dtypes.bfloat16, dtypes.float32, dtypes.float64,
    dtypes.fp8e4m3, dtypes.fp8e5m2)}
MOST_BYTES = 1 << 48        # of an address
MOST_PARTS = 1 << 16        # limit: parts of a kernel of a bundle for a CPU, as many as it may have threads
MOST_GRID, MOST_BLOCK = ((1 << 31) - 1, 65535, 65535), 1024     # of a GPU: CTAs, threads of one
GRAPH, ELF = "graph", b"\x7fELF"
ROW: dict[str, Type] = {
    "name": str, "code": list, "cubin": list, "parameters": list, "grid": list, "block": (list, type(None)),
    "variables": list, "globals": list, "outs": list, "ins": list, "work": list, "launch": dict, "note": list}


# what JSON of another shape raises while it is read
FAULTS = (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError, AssertionError)


@dataclass(frozen=True)
class Place:
    """Memory of a step: a part of a tensor by name, or of an intermediate of `whole` bytes by number. `size`
    is in elements, `offset` in bytes."""
    owner: str | int
    size: int
    dtype: DType
    offset: int = 0
    whole: int = 0


def is_graph(call: UOp) -> bool:
    """Whether a call of a schedule is a graph of launches."""
    return call.src[0].op is Ops.CUSTOM_FUNCTION and call.src[0].arg == GRAPH


def launches(linear: UOp) -> list[UOp]:
    """The launches of a schedule, those of its graphs among them."""
    return [call for each in linear.src for call in (each.src[0].src[0].src if is_graph(each) else (each,))]


# **** programs ****

class ProgramTable:
    """Programs of a set of steps, numbered as they come; code that several have is kept once. `assemble`
    makes a cubin of PTX, which is kept beside it. `several`: kernels may run on several devices, or call a
    library."""

    def __init__(self, assemble: Callable[[str], bytes] | None = None, several: bool = False) -> None:
        self.several = several
        self.numbers: dict[UOp, int] = {}
        self.rows: list[dict[str, Any]] = []
        self.code, self.assemble = bytearray(), assemble
        self._at: dict[bytes, int] = {}
        self._cubins: dict[bytes, bytes] = {}

    def add(self, program: UOp) -> int:
        """The number of a program."""
        if program not in self.numbers:
            self.numbers[program] = len(self.rows)
            self.rows.append(self._row(program))
        return self.numbers[program]

    def _row(self, program: UOp) -> dict[str, Any]:
        sink, linear, _, binary = program.src
        info, kernel, code = program.arg, sink.arg, bytes(binary.arg)
        row = {"name": info.name, "code": self._place_code(code),
               "parameters": [[u.arg.slot, short(u.dtype), u.max_numel()] for u in linear.src],
               "grid": list(info.global_size), "block": None if info.local_size is None else
               list(info.local_size), "variables": [_variable(u) for u in info.vars],
               "globals": list(info.globals), "outs": list(info.outs), "ins": list(info.ins),
               "work": _work(kernel.estimates)}
        if self.assemble is not None and code[:4] != ELF:
            if code not in self._cubins: self._cubins[code] = self.assemble(code.rstrip(b"\0").decode())
            row["cubin"] = self._place_code(self._cubins[code])
        if isinstance(kernel, ProgramKernel):
            row["launch"] = _launch(kernel.aux, info.name, self.several)
            if (note := kernel.note) is not None:
                schedule = "" if note.schedule is None else str(note.schedule)
                row["note"] = [note.template, note.reason, schedule]
                if self.several: row["note"] += _forecast(note)
        return row

    def _place_code(self, code: bytes) -> list[int]:
        """Returns where code is, from now on at the latest."""
        if code not in self._at:
            self._at[code] = len(self.code)
            self.code += code + bytes(-len(code) % 16)
        return [self._at[code], len(code)]

    def digest(self, number: int) -> str:
        """A hash of a program: what is launched, and the code that a compiler made of it; of a GPU the PTX,
        whatever ptxas makes of that."""
        return program_digest(self.rows[number], self.code)


def program_digest(row: Mapping[str, Any], code: bytes | bytearray) -> str:
    """The hash of a program, from its JSON and the code of all."""
    start, size = row["code"]
    what = {key: value for key, value in row.items() if key != "cubin"}
    what["code"] = hashlib.sha256(code[start:start + size]).hexdigest()
    return hashlib.sha256(canonical(what)).hexdigest()


def _variable(u: UOp) -> list[Any]:
    arg = u.arg
    return [arg.slot, short(arg.dtype), *map(int, arg.vmin_vmax), arg.multiple_of or 1, arg.name]


def _work(estimates: Estimates | None) -> list[int]:
    if estimates is None: return [0, 0, 0]
    numbers = (estimates.ops, estimates.lds, estimates.mem)
    return [each if isinstance(each, int) else 0 for each in numbers]


def _launch(launch: LaunchConfig, name: str, several: bool) -> dict[str, Any]:
    partners = {key: value for key in ("call", "peers") if (value := getattr(launch, key)) is not None}
    if several and partners:
        from tinygrad_nv.tile.spec_json import to_plain
        partners = {key: [type(each).__name__, to_plain(each)] for key, each in partners.items()}
    elif partners:
        raise BundleError(f"kernel {name} runs on several devices", "kernels of one device",
                          "compile a model of one rank")
    plain = asdict(replace(launch, call=None, peers=None))
    return {key: value for key, value in plain.items() if key not in ("call", "peers")} | partners


def _partner(kind: str, found: Any) -> Any:
    """Returns what a launch's `call` or `peers` is, of its name and its fields."""
    from tinygrad_nv.dist.collectives.device import DeviceCall
    from tinygrad_nv.dist.collectives.peer_ranks import RankPeers
    from tinygrad_nv.runtime.together import Peers
    from tinygrad_nv.tile.spec_json import from_plain
    kinds = {each.__name__: each for each in (DeviceCall, RankPeers, Peers)}
    return from_plain(kinds[kind], found)


def programs(rows: Any, code: bytes, target: Target, file: str, cubins: bool = False,
             several: bool = False) -> list[UOp]:
    """The programs of a bundle for a device of this target, which takes `cubins` or not; of `several`
    devices, too, or of one alone. Raises `BundleError`."""
    if not isinstance(rows, list): raise BundleError(f"{file}: no list of programs", "a list", FIX)
    made = []
    for number, row in enumerate(rows):
        try:
            fields(row, ROW, "it", ("cubin", "launch", "note"))
            made.append(_program(row, code, target, "cubin" if cubins and "cubin" in row else "code",
                                 several))
        except (NVError, *FAULTS) as error:
            why = error.found if isinstance(error, NVError) else error
            raise BundleError(f"{file}: program {number} is none: {shorten(why)}",
                              "the fields of docs/bundles.md", FIX) from error
    return made


def _program(row: dict[str, Any], code: bytes, target: Target, which: str, several: bool) -> UOp:
    start, size = _integers(row[which], 2)
    if not size or start + size > len(code): raise BundleError("its code ends behind the part", "code inside")
    parameters = tuple(_parameter(_whole(slot), DTYPES[dtype], _whole(numel))
                       for slot, dtype, numel in row["parameters"])
    variables = tuple(_read_variable(*each) for each in row["variables"])
    block = None if row["block"] is None else _integers(row["block"], 3)
    name, grid = row["name"], _integers(row["grid"], 3)
    info = ProgramInfo(name, grid, block, variables,
                       *(_integers(row[each]) for each in ("globals", "outs", "ins")), target)
    if sorted(info.globals) != [*range(len(parameters))] or not {*info.outs, *info.ins} <= {*info.globals}:
        raise BundleError("it names an argument that it lacks, or lacks one", "each argument once, from 0")
    if target.device == "CPU":
        require_object(code[start:start + size])
        _require_parts(grid, block, variables)
    elif not all(0 < n <= most for n, most in zip(grid, MOST_GRID, strict=True)) \
            or not 0 < math.prod(block or (1,)) <= MOST_BLOCK:
        raise BundleError(f"its grid is {grid}, its block {block}", f"{MOST_GRID} and {MOST_BLOCK} at most")
    work = Estimates(*_integers(row["work"], 3))
    kernel = KernelInfo(name=name, estimates=work)
    if "launch" in row:
        note = row.get("note")
        launch = _read_launch(row["launch"], len(parameters), several)
        kernel = ProgramKernel(name=name, estimates=work, aux=launch,
                               note=None if note is None else _note(*note[:5 if several else 3]))
    return UOp(Ops.PROGRAM, src=(UOp.sink(arg=kernel), UOp(Ops.LINEAR, src=parameters),
                                 UOp(Ops.SOURCE, arg=""), UOp(Ops.BINARY, arg=code[start:start + size])),
               arg=info)


def _require_parts(grid: tuple[int, ...], block: tuple[int, ...] | None, variables: tuple[UOp, ...]) -> None:
    """Raises unless a kernel of a CPU is called once for each value of its core_id."""
    cores = [each.arg.vmin_vmax for each in variables if each.arg.name == "core_id"]
    parts = grid[0]
    if grid[1:] == (1, 1) and {*(block or (1,))} == {1} and 0 < parts <= MOST_PARTS \
            and cores == [(0, parts - 1)] * (parts > 1): return
    raise BundleError(f"its grid is {grid}, its block {block}, its core_id {cores}",
                      f"1 to {MOST_PARTS} parts, with a core_id from 0 where there are several")


@functools.lru_cache(1 << 12)
def _parameter(slot: int, dtype: DType, numel: int) -> UOp: return UOp.placeholder((numel,), dtype, slot)


@functools.lru_cache(1 << 12)
def _parameter_bytes(parameter: UOp) -> int: return int(parameter.max_numel()) * parameter.dtype.itemsize


def _note(template: str, reason: str, _: str, *tuned: Any) -> Note | KeptNote:
    if len(tuned) != 2: return Note(_text(template), _text(reason))
    return KeptNote(_text(template), _text(reason), functools.partial(_read_schedule, *tuned))


def _forecast(note: Note | KeptNote) -> list[Any]:
    """Returns what runtime/observe/forecast.py predicts a time of: a spec and a schedule, of a kernel that
    has both. (A bundle's start loads none of these modules.)"""
    if getattr(note.schedule, "kind", "") != "gpu": return []
    from tinygrad_nv.tile.spec_json import is_tuned, spec_to_json
    if not is_tuned(note.spec): return []
    return [spec_to_json(note.spec), cast(Schedule, note.schedule).to_json()]


def _read_schedule(spec: Any, schedule: Any) -> tuple[Any, Any]:
    from tinygrad_nv.tile.spec_json import spec_from_json
    from tinygrad_nv.tile.templates import TABLE
    return spec_from_json(spec), TABLE.read("gpu", schedule)


def _read_variable(slot: int, dtype: str, low: int, high: int, multiple: int, name: str) -> UOp:
    slot, low, high, multiple = map(_check_int, (slot, low, high, multiple))
    if low > high or multiple < 1: raise ValueError(f"{name} is {low} to {high}, a multiple of {multiple}")
    arg = ParamArg(slot, DTYPES[dtype], (low, high), multiple, _text(name), addrspace=AddrSpace.ALU)
    return UOp(Ops.PARAM, src=(UOp(Ops.STACK),), arg=arg)


def _read_launch(found: Mapping[str, Any], pointers: int, several: bool) -> LaunchConfig:
    cluster = _integers(found["cluster"], 3)
    maps = tuple(_read_map(each) for each in found["maps"])
    zeroed = tuple(Zeroed(_whole(each["pointer"]), _whole(each["nbytes"])) for each in found["zeroed"])
    if max((*(each.pointer for each in maps), *(each.pointer for each in zeroed)), default=-1) >= pointers:
        raise BundleError("its launch names an argument that it lacks", "arguments from 0")
    integers = tuple(Integer(_check_int(each["offset"]), tuple(map(_check_int, each["factors"])))
                     for each in found["integers"])
    return LaunchConfig(_whole(found["dynamic_smem"]), (cluster[0], cluster[1], cluster[2]),
                        found["pdl"] is True, zeroed, maps, integers,
                        *(_partner(*found[each]) if several and each in found else None
                          for each in ("call", "peers")))


def _read_map(found: Mapping[str, Any]) -> MapArgument:
    dims, strides, box = (_integers(found[each]) for each in ("dims", "strides", "box"))
    return MapArgument(_whole(found["pointer"]), _text(found["dtype"]), dims, strides, box,
                       _text(found["swizzle"]), _whole(found["offset_bytes"]), _check_int(found["dynamic"]),
                       _check_int(found["integer"]),
                       *(tuple(map(_check_int, found.get(each, ()))) for each in ("lower", "upper", "steps")))


# **** steps ****

def encode_step(linear: UOp, table: ProgramTable) -> dict[str, Any]:
    """Returns a step as JSON; its programs are added to the table."""
    numbers: dict[Place, int] = {}

    def launch(call: UOp) -> list[int]:
        return [table.add(call.src[0]), *(numbers.setdefault(u.tag, len(numbers)) for u in call.src[1:])]
    batches = [{"graph": int(is_graph(each)), "launches": [launch(call) for call in launches(
        linear.replace(src=(each,)))]} for each in linear.src]
    places = [[at.owner, at.size, short(at.dtype), at.offset, at.whole] for at in numbers]
    return {"places": places, "batches": batches}


def plan_parts(steps: Iterable[Mapping[str, Any]], table: ProgramTable) -> dict[str, bytes]:
    """Parts of a set by name: programs, their code, and steps in order."""
    made = {f"steps/{number}.json": canonical(step) for number, step in enumerate(steps)}
    return {"programs.json": canonical(table.rows), "code": bytes(table.code), **made}


def step_digest(step: Mapping[str, Any], program: Callable[[int], str]) -> str:
    """A hash of a step: its launches in order, each with the hash of its program, by number, and its
    memory."""
    made = hashlib.sha256(canonical(step["places"]))
    for batch in step["batches"]:
        for number, *arguments in batch["launches"]:
            made.update(program(number).encode() + canonical(arguments))
    return made.hexdigest()


def decode_step(found: Any, table: Sequence[UOp], owners: Callable[[str], int | None], file: str) -> UOp:
    """Returns the schedule of a step over `Place`s. `owners(name)` is the size of named memory, None where
    there is none. Raises `BundleError`."""
    try:
        fields(found, {"places": list, "batches": list}, file)
        places = [_place(each, owners) for each in found["places"]]
        marks = [UOp(Ops.NOOP, at.dtype, tag=at) for at in places]
        calls = []
        for batch in found["batches"]:
            fields(batch, {"graph": int, "launches": list}, file)
            made = tuple(_decode_launch(each, table, marks) for each in batch["launches"])
            if batch["graph"]:
                body = UOp(Ops.CUSTOM_FUNCTION, src=(UOp(Ops.LINEAR, src=made),), arg=GRAPH)
                calls.append(body.call())
            else: calls += made
        return UOp(Ops.LINEAR, src=tuple(calls))
    except FAULTS as error:
        raise BundleError(f"{file} is no step: {shorten(repr(error))}", "the fields of docs/bundles.md",
                          FIX) from error


def _decode_launch(found: list[int], table: Sequence[UOp], marks: Sequence[UOp]) -> UOp:
    number, *arguments = _integers(found)
    program = table[number]
    pointers = len(program.src[1].src)
    if len(arguments) != pointers: raise ValueError(f"{len(arguments)} arguments of {pointers}")
    for at, parameter in zip(arguments, program.src[1].src, strict=True):
        place: Place = marks[at].tag
        if place.size * place.dtype.itemsize < _parameter_bytes(parameter):
            raise ValueError(f"{place.size} elements where {program.arg.name} has {parameter.max_numel()}")
    return program.call(*(marks[at] for at in arguments))


def _place(found: list[Any], owners: Callable[[str], int | None]) -> Place:
    owner, size, dtype, offset, whole = found
    made = Place(owner if isinstance(owner, str) else _whole(owner), _whole(size), DTYPES[dtype],
                 _whole(offset), _whole(whole))
    room = owners(owner) if isinstance(owner, str) else whole
    if room is None: raise ValueError(f"no memory has the name {owner!r}")
    if made.offset + made.size * made.dtype.itemsize > room:
        raise ValueError(f"{made} ends behind its memory of {room} bytes")
    return made


def _text(value: Any) -> str:
    if type(value) is not str: raise TypeError(f"no text: {shorten(value)}")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < MOST_BYTES: raise ValueError(f"no size: {shorten(value)}")
    return value


def _check_int(value: Any) -> int:
    if type(value) is not int or not -MOST_BYTES < value < MOST_BYTES:
        raise ValueError(f"no number of {MOST_BYTES} at most: {shorten(value)}")
    return value


def _integers(values: Iterable[Any], count: int | None = None) -> tuple[int, ...]:
    made = tuple(map(_whole, values))
    if count is not None and len(made) != count: raise ValueError(f"{len(made)} numbers where {count} are")
    return made
