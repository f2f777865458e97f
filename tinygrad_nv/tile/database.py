"""Schedules that were found by trying: a file that outlives the process.

Protocol: an `Entry` is keyed by spec, architecture and toolchain version (`toolchain()`): another ptxas makes
other code; and by its provenance: measured on a GPU, modelled for one, or counted (clock.py). `find_winner`
takes the one whose time says most of the target (`rank`): measured on the same GPU, on another one of the
architecture, modelled for the GPU, counted; nothing that was modelled for another. Where NV_SCHEDULES names
no file, what comes with the package (shipped.json) takes part, after entries of the same rank. The
architecture of a CPU is its instruction set and threads, its toolchain what identifies the C compiler. The
file is JSON (`FORMAT`), at NV_SCHEDULES, or schedules.json in the cache directory. It is read again whenever
it changed, and replaced as a whole under a lock, merged with what others wrote since, so that several
processes may tune.
A file that cannot be read is renamed to *.corrupt-N with a warning and an empty one takes its place; an entry
that cannot be read, or that legality no longer accepts, is ignored with a note.
"""
from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import subprocess
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinygrad_nv import cache, config, private
from tinygrad_nv.errors import NVError, ScheduleError
from tinygrad_nv.files import parse_json, read_text
from tinygrad_nv.tile.clock import HOWS, How
from tinygrad_nv.tile.limits import SMEM_BYTES
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.spec_json import is_tuned, spec_from_json, spec_to_json
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE
from tinygrad_nv.toolchain import find_compiler
from tinygrad_nv.version import __version__

FORMAT = "tinygrad_nv schedules 1"
SHIPPED = Path(__file__).parent / "shipped.json"
ORIGIN_CHARACTERS = 200
MOST_BYTES = 64 << 20       # limit: bytes of a file of schedules (an entry has less than 4 KB)
CPU_NAMES = re.compile(r"cpu \S+, [1-9]\d{0,4} threads")
Key = tuple[str, str, str, How, str]     # a spec's JSON, architecture, toolchain, how, GPU
OPTIONAL: dict[str, type[str] | type[bool]] = {"gpu": str, "origin": str, "driver": str, "commit": str,
                                               "throttled": bool}
MEASURED, THROTTLED, SIBLING, MODELLED, COUNTED = range(5)      # what a time says of a GPU (`Entry.rank`)


class ScheduleWarning(UserWarning):
    """A schedule database, or an entry of one, that is not used."""


def _kind(arch: str) -> str | None:
    """The kind of target that an architecture is of; None of one that no entry has."""
    if arch in SMEM_BYTES: return "gpu"
    return "cpu" if CPU_NAMES.fullmatch(arch) else None


@dataclass(frozen=True)
class Entry:
    """A winner. `seconds` are known as `how` says: "measured" on a device, "modelled" for a GPU, or "counted"
    by the emulator. `gpu`: which, by its name in ptx/timing/gpus, "" for one without figures. Of what was
    measured: `driver` is the driver's version, `throttled` whether power or heat kept the clock down, and
    `commit` the project's, "" for what its version says (`origin`)."""
    spec: Any
    arch: str
    toolchain: str
    schedule: Schedule
    seconds: float
    how: How = "counted"
    gpu: str = ""
    origin: str = ""
    driver: str = ""
    commit: str = ""
    throttled: bool = False

    @property
    def key(self) -> Key: return _text(self.spec), self.arch, self.toolchain, self.how, self.gpu

    @property
    def provenance(self) -> str:
        """How its seconds are known, for a reader."""
        if not self.gpu: return self.how
        where = f"{self.how} {'on' if self.how == 'measured' else 'for'} {self.gpu}"
        return where + (", throttled" if self.throttled else "")

    def rank(self, gpu: str) -> int | None:
        """How much its time says of a GPU, 0 the most; None for nothing."""
        if self.how == "measured":
            if self.gpu not in ("", gpu): return SIBLING
            return THROTTLED if self.throttled else MEASURED
        if self.how == "modelled": return MODELLED if self.gpu == gpu else None
        return COUNTED

    def to_json(self) -> dict[str, Any]:
        """Returns the entry as plain data."""
        return {"spec": spec_to_json(self.spec), "arch": self.arch, "toolchain": self.toolchain,
                "schedule": self.schedule.to_json(), "seconds": self.seconds, "how": self.how,
                **{name: value for name in OPTIONAL if (value := getattr(self, name))}}

    @staticmethod
    def from_json(data: Any) -> Entry:
        """An entry of plain data. Raises an `NVError` for what is none."""
        try: arch, toolchain, seconds, how = (data[x] for x in ("arch", "toolchain", "seconds", "how"))
        except (KeyError, TypeError) as error:
            raise ScheduleError(f"{str(data)[:200]} is no entry: {error} is missing",
                                "an entry that --export wrote") from error
        kind = _kind(arch) if type(arch) is str else None
        more = {name: data.get(name, kind_of()) for name, kind_of in OPTIONAL.items()}
        if kind is None or type(toolchain) is not str \
                or type(seconds) not in (int, float) \
                or not 0 < seconds < 1e9 or how not in HOWS \
                or any(type(more[name]) is not kind_of for name, kind_of in OPTIONAL.items()) \
                or any(len(str(value)) > ORIGIN_CHARACTERS for value in more.values()) \
                or not {"modelled": more["gpu"], "counted": not more["gpu"]}.get(how, True):
            raise ScheduleError(f"an entry of {arch!r:.99}, {toolchain!r:.99}, {seconds!r:.99}, {how!r:.99}, "
                                f"{more['gpu']!r:.99}",
                                f"one of {', '.join(SMEM_BYTES)}, a version, seconds, and counted, measured "
                                "on some GPU, or modelled for one")
        spec = spec_from_json(data.get("spec"))
        schedule = (spec.schedule_of(data.get("schedule")) if _is_of_user(spec)
                    else TABLE.read(kind, data.get("schedule")))
        if not schedule.on(arch): raise ScheduleError(f"{schedule} in an entry of {arch!r}")
        return Entry(spec, arch, toolchain, schedule, float(seconds), how, **more)


def toolchain(kind: str = "gpu") -> str:
    """Returns the compiler of a kind of target: the version of ptxas, "driver" where there is none and the
    driver compiles; the C compiler. Raises `ToolchainError` where there is no C compiler."""
    return find_compiler().identity if kind == "cpu" else _ptxas()


@functools.cache
def _ptxas() -> str:
    from tinygrad_nv.ptx.assemble import find_program  # a CPU's schedules ask for no assembler
    if (program := find_program("ptxas")) is None: return "driver"
    done = subprocess.run([str(program), "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"V(\d[\d.]*)", done.stdout)
    return f"ptxas {found[1]}" if found else f"ptxas {done.stdout.strip()[-40:]}"


def path() -> Path:
    """Returns the path of the database."""
    return Path(_where())


def _where() -> str:
    places = map(os.environ.get, ("NV_CACHE_DIR", "XDG_CACHE_HOME", "HOME"))
    return _path(str(config.get("NV_SCHEDULES")), *places)


@functools.lru_cache(8)
def _path(named: str, *_: str | None) -> str:
    """The database's path for these values of what it depends on. Each schedule that is looked up asks for
    it: to make it again takes 20 µs."""
    if named: return str(Path(named).expanduser())
    there = cache.readable() / "schedules.json"
    return str(there if there.is_file() else cache_directory() / "schedules.json")


def cache_directory() -> Path:
    """Returns the directory in which what was found by trying outlives the process."""
    return cache.directory()


def state() -> tuple[str, tuple[int, ...] | None]:
    """Returns a key that changes whenever `lookup` may answer otherwise."""
    file = _where()
    mark = _mark(file)
    return ("", None) if mark is None else (file, mark)     # no file is the same anywhere


def tuning_key(spec: Any) -> Any:
    """The spec that stands for all those which have one winner."""
    return getattr(spec, "tuning_key", spec)


def _is_of_user(spec: Any) -> bool:
    """Tells whether a spec is of a user's kernel, which reads its schedules itself (language/searched.py)."""
    return hasattr(spec, "schedule_of")


def _text(spec: Any) -> str: return json.dumps(spec_to_json(spec), separators=(",", ":"))


# **** reading ****

def problems(spec: Any, schedule: Schedule, target: Any) -> Sequence[str]:
    """Why a schedule cannot be. Whether a user's kernel can have one shows when it is written."""
    return () if _is_of_user(spec) else TABLE.problems(spec, schedule, target)


def lookup(spec: Any, arch: str, target: Any = None) -> Any:
    """Returns the schedule that `find_winner` finds, on a GPU of the architecture without a target."""
    entry = find_winner(spec, arch, target or GPU(arch))
    return None if entry is None else entry.schedule


def find_winner(spec: Any, arch: str, target: Any, file: Path | None = None) -> Entry | None:
    """The winner for a spec on a target; None where there is no legal one. One that is not legal is noted.
    What compiles is asked for where there is a file. `file`: another than the database's, without those that
    come with the package."""
    if not is_tuned(spec): return None
    own = _group(file or path())
    gpu = getattr(target, "figures", "")
    # of no CPU, and of no GPU that is unknown: reading them imports the templates' schedules
    shipped = _load_shipped() if gpu and file is None and not config.get("NV_SCHEDULES") else {}
    if arch not in own and arch not in shipped: return None
    text = _text(tuning_key(spec))
    here, there = (each.get(arch, {}).get(text, ()) for each in (own, shipped))
    if here: here = [each for each in here if each.toolchain == toolchain(_kind(arch) or "gpu")]
    found = [(rank, each.gpu != gpu, each) for each in (*here, *there)
             if (rank := each.rank(gpu)) is not None]
    for _, _, entry in sorted(found, key=lambda one: one[:2]):
        if not (wrong := problems(spec, entry.schedule, target)): return entry
        if entry in here:
            note(f"{entry.schedule} of {file or path()} is ignored for {spec}: {'; '.join(wrong)}")
    return None


Groups = Mapping[str, Mapping[str, Sequence[Entry]]]    # by architecture and a spec's JSON


def _group_entries(some: Iterable[Entry]) -> Groups:
    made: dict[str, dict[str, list[Entry]]] = {}
    for each in some: made.setdefault(each.arch, {}).setdefault(_text(each.spec), []).append(each)
    return made


@functools.cache
def _load_shipped() -> Groups:
    """Schedules that come with the package, made with some version of ptxas."""
    return _group_entries(parse(SHIPPED.read_text(), SHIPPED))


def _group(file: Path) -> Groups:
    """The entries of a file, as they are looked up."""
    found = _read(file)
    if file not in _groups or _groups[file][0] is not found:
        _groups[file] = found, _group_entries(found.values())
    return _groups[file][1]


def entries(file: Path | None = None) -> list[Entry]:
    """All there are, in the order of the file."""
    return list(_read(file or path()).values())


_known: dict[Path, tuple[tuple[int, ...], dict[Key, Entry]]] = {}
_groups: dict[Path, tuple[dict[Key, Entry], Groups]] = {}
_noted: set[str] = set()


def _read(file: Path, locked: bool = False) -> dict[Key, Entry]:
    """The entries of a file, from memory while it is unchanged. `locked`: by the caller."""
    if (mark := _mark(file)) is None: return {}
    if file in _known and _known[file][0] == mark: return _known[file][1]
    # also a link, or another user's, as NV_SCHEDULES may name one: every entry is checked
    try: made = {entry.key: entry for entry in parse(read_text(file, MOST_BYTES), file)}
    except OSError as error:
        note(f"the schedule database cannot be read: {error}")
        return {}
    except (NVError, UnicodeDecodeError) as error:
        _set_aside(file, mark, f"{file} is no schedule database ({str(error).partition(chr(10))[0]})", locked)
        return {}
    _known[file] = mark, made
    return made


def _mark(file: str | Path) -> tuple[int, ...] | None:
    """Returns a key that changes when a file does; None when there is none."""
    try: stat = os.stat(file)
    except OSError: return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def parse(text: str, source: Path) -> list[Entry]:
    """The entries of a file's text, less those that cannot be read. Raises `ScheduleError` when all of it is
    something else."""
    try: data = parse_json(text)
    except ValueError as error:
        raise ScheduleError(f"{source} is no JSON: {error!s:.200}", "a file that --export wrote") from error
    fits = isinstance(data, dict) and data.get("format") == FORMAT
    if not fits or not isinstance(data.get("entries"), list):
        raise ScheduleError(f"{source} is no schedule database", f"an object with format {FORMAT!r}",
                            "name a file that --export wrote")
    made = []
    for number, one in enumerate(data["entries"]):
        try: made.append(Entry.from_json(one))
        except NVError as error: note(f"entry {number} of {source} is ignored: {error.found}")
    return made


def note(words: str) -> None:
    """Once for each text."""
    if words in _noted: return
    _noted.add(words)
    warnings.warn(words, ScheduleWarning, stacklevel=2)


def _set_aside(file: Path, mark: tuple[int, ...], why: str, locked: bool) -> None:
    """Renames a file that cannot be read, so that it is neither lost nor read again; not one that another
    process put in its place meanwhile."""
    try:
        with contextlib.nullcontext() if locked else _lock(file):
            if _mark(file) != mark: return
            number = 1
            while (aside := file.with_name(f"{file.name}.corrupt-{number}")).exists(): number += 1
            os.rename(file, aside)
    except OSError as error: note(f"{why}, and cannot be renamed: {error}")
    else: warnings.warn(f"{why}; it is set aside as {aside.name}", ScheduleWarning, stacklevel=2)


# **** writing ****

def store(new: Iterable[Entry], file: Path | None = None) -> None:
    """Adds entries, in place of those with the same key. Raises OSError where the file cannot be written."""
    file = file or path()
    private.make(file.parent)
    with _lock(file):
        _write(file, {**_read(file, locked=True), **{entry.key: entry for entry in new}}.values())


def merge(new: Iterable[Entry], file: Path | None = None) -> tuple[int, int]:
    """Adds entries whose key there is not, and puts those that are faster in place of others, and what was
    not throttled in place of what was. How many were added, and replaced."""
    before = {entry.key: entry for entry in entries(file)}
    added, faster = [], []
    for each in new:
        if (old := before.get(each.key)) is None: added.append(each)
        elif (each.throttled, each.seconds) < (old.throttled, old.seconds): faster.append(each)
    store([*added, *faster], file)
    return len(added), len(faster)


def origin(on: str = "") -> str:
    """Returns the origin of an entry that is found now: the version, and what it was measured on."""
    made = f"tinygrad_nv {__version__}" + (f" on {on}" if on else "")
    return made[:ORIGIN_CHARACTERS]


def clear() -> int:
    """Takes all entries out; how many there were."""
    file = path()
    if not file.exists(): return 0
    with _lock(file):
        count = len(_read(file, locked=True))
        with contextlib.suppress(FileNotFoundError): file.unlink()
    return count


def dump(which: Iterable[Entry]) -> str:
    """The text of a file with these entries."""
    return json.dumps({"format": FORMAT, "entries": [entry.to_json() for entry in which]}, indent=1) + "\n"


def _write(file: Path, which: Iterable[Entry]) -> None:
    private.write(file, dump(which).encode())


def _lock(file: Path) -> AbstractContextManager[None]:
    return private.lock_file(file.with_name(f"{file.name}.lock"))
