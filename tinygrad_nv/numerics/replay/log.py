"""The file of a recorded run: JSON lines, the first says what ran, then one for each kernel, the last that it
ended.

    {"format": "tinygrad_nv run", "version": 1, "what": {…}, "seed": 0, "versions": {…}, "settings": {…}, …}
    {"thread": "MainThread", "kernel": "gemm_1x40x1500", "device": "CPU", "text": "9f…", "layer": "",
     "why": "…", "variables": {}, "in": ["a1…"], "out": ["03…"]}
    {"end": 12, "result": "5c…"}

Protocol: hashes are BLAKE2b of 8 bytes, in hexadecimal digits, of a kernel's text and of all bytes of a
buffer. `what` is a function with its arguments, or a command line. Tensors that a function was given lie
whole in a safetensors file beside (`inputs`, with the file's own hash). There is no pickle. A reader refuses
files of other kinds, of later versions, and files that end early, by `ReplayError`.
"""
from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tinygrad_nv.errors import ReplayError
from tinygrad_nv.files import parse_json, read_text

FORMAT, VERSION = "tinygrad_nv run", 1
DIGITS = 16
MOST_BYTES = 256 << 20      # limit: bytes of the log of a recorded run; of a kernel it has some 400


@dataclass(frozen=True)
class KernelRun:
    """One kernel that ran: `text` is the hash of its source, `read` and `written` those of its operands and
    results, `why` what explain() says of it."""
    thread: str
    kernel: str
    device: str
    text: str
    layer: str = ""
    why: str = ""
    variables: Mapping[str, int] = field(default_factory=dict)
    read: tuple[str, ...] = ()
    written: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns the run as a line of the file has it."""
        made = asdict(self)
        made["in"], made["out"] = list(made.pop("read")), list(made.pop("written"))
        return made

    def __str__(self) -> str:
        return f"{self.kernel} on {self.device}" + (f", layer {self.layer}" if self.layer else "")


@dataclass(frozen=True)
class Header:
    """The start of a log: what ran, as {"function": "module:name" or "file.py:name", "arguments": […],
    "constants": {…}}, or {"command": [words]}; the seed of all generators; versions and settings that kernels
    depend on."""
    what: Mapping[str, Any]
    seed: int
    versions: Mapping[str, str]
    settings: Mapping[str, str]
    inputs: str = ""                # the file of tensors, beside this one
    inputs_hash: str = ""


@dataclass(frozen=True)
class Log:
    """A run that ended. `result` is the hash of what came of it."""
    header: Header
    kernels: tuple[KernelRun, ...]
    result: str


def digest(data: bytes | memoryview) -> str:
    """The hash of bytes."""
    return hashlib.blake2b(data, digest_size=DIGITS // 2).hexdigest()


class Writer:
    """Writes a file line by line, so that a run which fails leaves what there was."""

    def __init__(self, path: Path, header: Header) -> None:
        self.count = 0
        try: self.file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise ReplayError(f"{path}: {error.strerror}", "a file that can be written") from error
        self._line({"format": FORMAT, "version": VERSION, **asdict(header)})

    def add(self, run: KernelRun) -> None:
        """A kernel has run."""
        self.count += 1
        self._line(run.to_json())

    def end(self, result: str) -> None:
        """The run has ended."""
        self._line({"end": self.count, "result": result})

    def close(self) -> None: self.file.close()

    def _line(self, data: Mapping[str, Any]) -> None:
        self.file.write(json.dumps(data, ensure_ascii=False) + "\n")


# **** reading ****

def read(path: Path) -> Log:
    """A run. Raises `ReplayError` for what is none."""
    try: lines = read_text(path, MOST_BYTES).splitlines()
    except OSError as error:
        raise ReplayError(f"{path}: {error.strerror}", "the log of a recorded run",
                          "record one: tinygrad-nv generate --record LOG") from error
    except UnicodeDecodeError as error: raise _foreign(path) from error
    header = _header(path, lines[0] if lines else "")
    parsed = [_parse(path, number, line) for number, line in enumerate(lines[1:], 2)]
    end = parsed[-1] if parsed else {}
    if "end" not in end:
        raise ReplayError(f"{path} ends after {len(parsed)} kernels, and the run did not",
                          "the log of a run that ended", "record it again")
    if end["end"] != len(parsed) - 1:
        raise ReplayError(f"{path} has {len(parsed) - 1} kernels and says {end['end']!r:.40}", "a whole log",
                          "record it again")
    return Log(header, tuple(_run(path, number, each) for number, each in enumerate(parsed[:-1], 2)),
               str(end.get("result", "")))


def _foreign(path: Path) -> ReplayError:
    return ReplayError(f"{path} is no log of a run", f'JSON lines, the first with "format": "{FORMAT}"',
                       "record one: tinygrad-nv generate --record LOG")


def _header(path: Path, line: str) -> Header:
    try: data = parse_json(line)
    except ValueError as error: raise _foreign(path) from error
    if not isinstance(data, dict) or data.get("format") != FORMAT: raise _foreign(path)
    if not isinstance(version := data.get("version"), int) or not 1 <= version <= VERSION:
        raise ReplayError(f"{path} has version {version!r:.40} of its format", f"{VERSION} or earlier",
                          "replay it with the package that recorded it, or update this one")
    fields = {"what": dict, "seed": int, "versions": dict, "settings": dict, "inputs": str,
              "inputs_hash": str}
    if wrong := [name for name, kind in fields.items() if not isinstance(data.get(name), kind)]:
        raise ReplayError(f"{path}: its first line has no {wrong[0]}", "a whole log", "record it again")
    return Header(**{name: data[name] for name in fields})


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try: data = parse_json(line)
    except ValueError as error:
        raise ReplayError(f"{path}, line {number} is cut off", "a whole log", "record it again") from error
    if isinstance(data, dict): return data
    raise ReplayError(f"{path}, line {number} is no object", "a whole log", "record it again")


def _run(path: Path, number: int, data: dict[str, Any]) -> KernelRun:
    try:
        words = {name: str(data[name]) for name in ("thread", "kernel", "device", "text", "layer", "why")}
        variables = {str(name): int(value) for name, value in data["variables"].items()}
        return KernelRun(**words, variables=variables, read=tuple(map(str, data["in"])),
                         written=tuple(map(str, data["out"])))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ReplayError(f"{path}, line {number} is no kernel: {error!r:.200}", "a whole log",
                          "record it again") from error
