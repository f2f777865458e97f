"""`record(path, fn, *args)` runs a function and writes what ran; `replay(path)` runs it again and compares.

    from tinygrad_nv.numerics.replay import record, replay
    record("step.log", train.step, x, y, lr=0.1)        # a function that a module or a file defines
    print(replay("step.log"))                           # repeated bit for bit, or at which kernel it parts

Protocol: the log names the function by module or file, keeps Tensors whole in a safetensors file beside and
other arguments as JSON, and sets the generators of Python, NumPy and tinygrad to `seed` before the call, both
times. A function may be a TinyJit. Its result is what must be equal at the end: Tensors, or what JSON can
say, also in lists, tuples and dictionaries. `recording` is for what is named otherwise, as a command line.

`replay` runs with the settings of this process; those that differ from the recorded ones are told beside
versions where it parts.
"""
from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import platform
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from tinygrad import Device, Tensor, dtypes
from tinygrad.nn.state import safe_load, safe_save

from tinygrad_nv import config
from tinygrad_nv.cpu import isa
from tinygrad_nv.errors import NVError, ReplayError
from tinygrad_nv.files import read_bytes
from tinygrad_nv.numerics.replay.compare import Report, compare
from tinygrad_nv.numerics.replay.log import Header, KernelRun, Log, Writer, digest, read
from tinygrad_nv.numerics.replay.recorder import Take, record_kernels
from tinygrad_nv.tile import database

MOST_BYTES = 1 << 30        # of Tensors that are kept
# no part of what is computed, or secret
UNTOLD = {"NV_CACHE_DIR", "NV_API_KEY", "NV_DIST_TOKEN", "NV_DIST_TIMEOUT", "NV_SCHEDULES", "NV_NVTX",
          "NV_REPACK_CACHE", "NV_PROGRAM_CACHE", "NV_SPEC", "NV_STRICT", "EMU_STEP_LIMIT"}


@dataclass
class Recording:
    """A run that is going on: `take` writes a kernel, `result` is set to the hash of what comes of it."""
    take: Take
    result: str = ""


@contextlib.contextmanager
def recording(path: str | Path, what: Mapping[str, Any], seed: int = 0, inputs: str = "",
              inputs_hash: str = "") -> Iterator[Recording]:
    """A log whose run is `what`; kernels are those of `record_kernels(take)` inside. Raises `ReplayError`."""
    writer = Writer(Path(path), Header(what, seed, versions(), settings(), inputs, inputs_hash))
    made = Recording(writer.add)
    try:
        yield made
        writer.end(made.result)
    finally: writer.close()


def record(path: str | Path, fn: Callable[..., Any], *args: Any, seed: int = 0, **constants: Any) -> Any:
    """The result of fn(*args, **constants), whose kernels are written to a log. Raises `ReplayError` for a
    function that cannot be found again, and for arguments that are neither Tensors nor JSON."""
    where = Path(path)
    tensors = {str(i): each for i, each in enumerate(args) if isinstance(each, Tensor)}
    what = {"function": _name_of(fn), "constants": _plain("a keyword argument", constants),
            "arguments": [None if str(i) in tensors else _plain(f"argument {i + 1}", each)
                          for i, each in enumerate(args)],
            "devices": {name: str(each.device) for name, each in tensors.items()}}
    kept, inputs = where.with_name(where.name + ".safetensors"), ""
    if tensors:
        if (nbytes := sum(each.nbytes() for each in tensors.values())) > MOST_BYTES:
            raise ReplayError(f"arguments of {nbytes} bytes", f"at most {MOST_BYTES}, which are kept whole",
                              "have the function load what is large: it is hashed where it is read")
        inputs = _save_arguments(kept, tensors)
    with recording(where, what, seed, kept.name if tensors else "", inputs) as run:
        given = _arguments(what, tensors)
        with record_kernels(run.take): result = _call(fn, given, constants, seed)
        run.result = _digest_of(result)
    return result


def replay(path: str | Path, fn: Callable[..., Any] | None = None,
           commands: Callable[[dict[str, Any], Take], str] | None = None) -> Report:
    """Runs what a log names again, and compares. `fn` stands in for the function. `commands` runs what is
    none, tells of each kernel, and gives the hash of the result. Raises `ReplayError`."""
    log = read(Path(path))
    what, runs = log.header.what, list[KernelRun]()
    if "command" in what:
        if not isinstance(what["command"], list):
            raise ReplayError(f"{path} has command = {what['command']!r:.200}", "a list of words",
                              "record it again")
        if commands is None:
            raise ReplayError(f"{path} is of a command line: {' '.join(map(str, what['command']))}",
                              "the log of a function", f"tinygrad-nv replay {path}")
        result = commands(dict(what), runs.append)
    else:
        found = fn or _find(Path(path), what)
        given, constants = _arguments(what, _inputs(Path(path), log)), what.get("constants", {})
        with record_kernels(runs.append): made = _call(found, given, constants, log.header.seed)
        result = _digest_of(made)
    return compare(log, runs, result, {**versions(), **settings()})


# **** what runs depend on ****

def versions() -> dict[str, str]:
    """Versions of the packages that make kernels."""
    made = {name: importlib.metadata.version(name) for name in ("tinygrad_nv", "tinygrad")}
    compilers = {"C compiler": "cpu", "ptxas": "gpu"}
    for name, kind in compilers.items():
        with contextlib.suppress(NVError): made[name] = database.toolchain(kind)
    return {**made, "processor": f"{platform.machine()} {isa.detect()}"}


def settings() -> dict[str, str]:
    """Settings that kernels depend on, where they are not the defaults."""
    every = {each.name: (config.get(each.name), each.default) for each in config.SETTINGS
             if each.name not in UNTOLD}
    return {"device": Device.DEFAULT, **{name: str(now) for name, (now, default) in every.items()
                                         if now != default}}


# **** functions ****

def _name_of(fn: Callable[..., Any]) -> str:
    """Returns where a function is found again: its module, or the file of a script, and its name."""
    own = inner(fn)
    module, name = getattr(own, "__module__", ""), getattr(own, "__qualname__", "")
    loaded = sys.modules.get(module)
    if loaded is None or not name or "<" in name or _look_up(loaded, name) is None:
        raise ReplayError(f"{name or fn!r} cannot be found again by its name",
                          "a function that a module or a script defines", "move it out of what encloses it")
    file = getattr(loaded, "__file__", None)
    return f"{Path(file).resolve()}:{name}" if module == "__main__" and file else f"{module}:{name}"


def inner(fn: Callable[..., Any]) -> Any:
    """The function that a TinyJit or a decorator encloses."""
    while (next_ := getattr(fn, "fxn", None) or getattr(fn, "__wrapped__", None)) is not None: fn = next_
    return fn


def _look_up(module: Any, name: str) -> Any:
    return functools.reduce(lambda at, part: getattr(at, part, None), name.split("."), module)


def _find(log: Path, what: Mapping[str, Any]) -> Callable[..., Any]:
    """The function of a log."""
    place, _, name = str(what.get("function", "")).rpartition(":")
    try: module = _of_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:
        raise ReplayError(f"{log} is of {name} in {place}, which cannot be imported: {error}",
                          "a module or a file that Python imports",
                          "set PYTHONPATH, or call replay(path, fn)") from error
    if callable(fn := _look_up(module, name)): return cast(Callable[..., Any], fn)
    raise ReplayError(f"{log} is of {name} in {place}, which has none", "the function's name",
                      "call replay(path, fn)")


def _of_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"{path.stem}_of_replay", path)
    if spec is None or spec.loader is None: raise FileNotFoundError(str(path))
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    try: spec.loader.exec_module(module)
    finally: sys.path.pop(0)
    return module


def _call(fn: Callable[..., Any], args: list[Any], constants: Mapping[str, Any], seed: int) -> Any:
    """The result, realized; all generators begin at the seed."""
    random.seed(seed)
    np.random.seed(seed)
    Tensor.manual_seed(seed)
    result = fn(*args, **constants)
    if tensors := _tensors(result): Tensor.realize(*tensors)
    return result


# **** arguments and results ****

def _plain(name: str, value: Any) -> Any:
    try: return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise ReplayError(f"{name} is {value!r}", "Tensors, and what JSON can say: numbers, texts, lists",
                          "have the function make it") from error


def _save_arguments(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """The hash of the file of arguments, written as they are now."""
    held = {name: each.to("CPU").contiguous().realize() for name, each in tensors.items()}
    safe_save(held, str(path))
    return digest(path.read_bytes())


def _inputs(path: Path, log: Log) -> dict[str, Tensor]:
    """Tensors of a log."""
    if not log.header.inputs: return {}
    file = path.with_name(Path(log.header.inputs).name)
    try: content = read_bytes(file, 2 * MOST_BYTES)
    except (OSError, ValueError) as error:
        why = "is not there" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        raise ReplayError(f"{str(file)[:400]} {why}",
                          f"the arguments of {path}, which record wrote beside it",
                          "move both files together") from error
    if digest(content) != log.header.inputs_hash:
        raise ReplayError(f"{file} is not what was recorded", f"the arguments of {path}", "record it again")
    return safe_load(str(file))


def _arguments(what: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[Any]:
    """All arguments, each Tensor on its device."""
    def of(i: int, plain: Any) -> Any:
        if (tensor := tensors.get(str(i))) is None: return plain
        return tensor.to(what["devices"][str(i)]).contiguous().realize()
    return [of(i, plain) for i, plain in enumerate(what.get("arguments", []))]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor): return [value]
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [tensor for each in inner for tensor in _tensors(each)]


def _digest_of(result: Any) -> str:
    """Returns the digest of all bytes of a result, and of what is no Tensor."""
    tensors = _tensors(result)
    bytes_of = [each.to("CPU").flatten().bitcast(dtypes.uint8).numpy().tobytes() for each in tensors]
    rest = "" if tensors else repr(result)
    return digest(b"".join(bytes_of) + rest.encode())
