"""`tinygrad-nv ptx check`, `ptx time` and `ptx stats`: a PTX file on the emulator, how long it takes on a
GPU, and the resources that ptxas reports.

Protocol: an argument of the kernel is written as

    5  -3  0x10            an integer              1.5  nan            a float
    zeros:f32:64x64        a buffer of zeros; also ones, arange, random (seeded), integers (random, -4 … 4)
    empty:1024             1024 bytes that were never written
    file.npy               a buffer with an array from a file
    map:BOX:SWIZZLE:ARRAY  a tensor map over one of the arrays above: map:64x64:128B:random:f16:256x256

Types are f16 bf16 f32 f64 and s8 … u64. The exit code is 1 when there are findings.
"""
from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np

from tinygrad_nv.errors import PTXError
from tinygrad_nv.files import MAX_NAMED_BYTES, read_text, require_npy
from tinygrad_nv.ptx.assemble import ARCHITECTURES, Resources, assemble, sass
from tinygrad_nv.ptx.emulator import LATE, Emulator, Finding, Report, TensorMap, Trace
from tinygrad_nv.ptx.emulator.report import LIMIT_KIND
from tinygrad_nv.ptx.parser import parse
from tinygrad_nv.ptx.syntax import PTXModule
from tinygrad_nv.ptx.timing import report as timing_report
from tinygrad_nv.ptx.timing.chrome import chrome
from tinygrad_nv.ptx.timing.gpu import list_gpus

DTYPES = {"f16": np.float16, "bf16": np.uint16, "f32": np.float32, "f64": np.float64,
          "s8": np.int8, "s16": np.int16, "s32": np.int32, "s64": np.int64,
          "u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64}
MOST_ISSUES = 200_000   # of a trace: some 40 MB
ARG_ELEMENTS = 1 << 28  # limit: elements of an array that --arg of ptx check makes; bytes of empty:
# limit: seconds of computing without an end of a CTA, for ptx check and ptx time (--max-seconds)
MOST_SECONDS = 2.0
# limit: MiB of threads and of the checks of what they touch, for ptx check and ptx time (--max-memory)
MOST_MEMORY = 512
FILLS = ("zeros", "ones", "arange", "random", "integers", "empty")


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]
                 ) -> argparse._SubParsersAction[argparse.ArgumentParser]:
    """Adds `ptx` and what it can do; returns its commands, for more."""
    ptx = commands.add_parser("ptx", help="run PTX on the emulated GPU, or ask ptxas about it")
    kinds = ptx.add_subparsers(required=True, metavar="COMMAND")
    check = kinds.add_parser("check", help="run a kernel and print findings and counters",
                             epilog="arguments: 5, 1.5, zeros:f32:64x64, ones:…, arange:…, random:…, "
                                    "integers:…, empty:1024, file.npy, "
                                    "map:64x64:128B:random:f16:256x256")
    add_launch(check)
    runs = check.add_mutually_exclusive_group()
    runs.add_argument("--seed", type=_seed, default=0, metavar="N",
                      help="order of warps and of asynchronous work; late: all of it as late as it may be")
    runs.add_argument("--seeds", type=_count, metavar="N", help="run N times, seeds late, 0, 1, …")
    check.add_argument("--no-check", action="store_true", help="run without the checks")
    check.add_argument("--trace", type=_trace, metavar="CTA:WARP",
                       help="print this warp's instructions to stderr")
    check.add_argument("--save", action="append", default=[], type=_save, metavar="N=FILE.npy",
                       help="write the buffer of argument N, from 0, to a file when done")
    check.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    check.set_defaults(run=run_check)
    timing = kinds.add_parser("time", help="predict how long a kernel takes on a GPU")
    add_launch(timing)
    timing.add_argument("--gpu", default="h100", metavar="NAME",
                        help=f"one of {', '.join(list_gpus())}, or a .toml file (default h100)")
    timing.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    timing.add_argument("--trace", metavar="OUT.json", help="write a trace for chrome://tracing or Perfetto")
    timing.set_defaults(run=run_time)
    stats = kinds.add_parser("stats", help="what ptxas and the disassembler say of a kernel")
    stats.add_argument("file", metavar="FILE.ptx")
    stats.add_argument("--arch", choices=ARCHITECTURES, help="default: the file's target")
    stats.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    stats.set_defaults(run=run_stats)
    return kinds


def add_launch(parser: argparse.ArgumentParser) -> None:
    """Adds what a launch is given: a file, the grid, arguments."""
    parser.add_argument("file", metavar="FILE.ptx")
    parser.add_argument("--grid", type=_extents, default=(1, 1, 1), metavar="X[,Y,Z]",
                        help="CTAs (default 1)")
    parser.add_argument("--block", type=_extents, metavar="X[,Y,Z]",
                        help="threads (default .reqntid, else 128)")
    parser.add_argument("--cluster", type=_extents, default=(1, 1, 1), metavar="X[,Y,Z]",
                        help="CTAs of a cluster")
    parser.add_argument("--arg", action="append", default=[], metavar="VALUE",
                        help="one for each parameter, in order")
    parser.add_argument("--entry", metavar="NAME", help="which entry function, when there are several")
    parser.add_argument("--dynamic-smem", type=int, default=0, metavar="BYTES", help="dynamic shared memory")
    parser.add_argument("--max-seconds", type=_seconds, default=MOST_SECONDS, metavar="S",
                        help="end a launch of which no CTA ends for so long (default %(default)g; 0: never)")
    parser.add_argument("--max-memory", type=_mebibytes, default=MOST_MEMORY << 20, metavar="MIB",
                        help="end a launch whose threads, and the checks of what they touch, take more of "
                             f"the host's memory (default {MOST_MEMORY}; 0: no limit)")
    parser.add_argument("--arch", help="sm_80, sm_86, sm_89, sm_90 or sm_90a (default: the file's target)")


# **** what the command line says ****

def _extents(text: str) -> tuple[int, ...]:
    words = re.split("[,x]", text[:100])
    made = tuple(int(word) for word in words if re.fullmatch(r"\d{1,12}", word.strip(), re.ASCII))
    if len(made) != len(words) or len(made) > 3 or min(made) < 1 or len(text) > 100:
        raise argparse.ArgumentTypeError(f"{_shorten(text)!r} is not one to three integers ≥ 1; "
                                         "write 4 or 4,2,1")
    return (*made, 1, 1)[:3]


def _seed(text: str) -> int | str:
    if text == LATE: return text
    try: return int(text, 0)
    except ValueError: raise argparse.ArgumentTypeError(f"{text[:40]!r} is no integer, nor {LATE}") from None


def _count(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) < 7 and int(text): return int(text)
    raise argparse.ArgumentTypeError(f"{text[:40]!r} is no number of runs, 1 to 999999")


def _seconds(text: str) -> float | None:
    with contextlib.suppress(ValueError):
        if 0 <= (seconds := float(text)) < math.inf: return seconds or None
    raise argparse.ArgumentTypeError(f"{text[:40]!r} is no number of seconds; write 60, or 0 for no limit")


def _mebibytes(text: str) -> int | None:
    if text.isascii() and text.isdigit() and len(text) < 9: return int(text) << 20 or None
    raise argparse.ArgumentTypeError(f"{text[:40]!r} is no number of MiB; write 2048, or 0 for no limit")


def _trace(text: str) -> Trace:
    if (found := re.fullmatch(r"(\d{1,9}):(\d{1,2})", text, re.ASCII)) is None:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not CTA:WARP, such as 0:3")
    return Trace(int(found[1]), (int(found[2]),))


def _save(text: str) -> tuple[int, str]:
    number, equals, name = text.partition("=")
    if not equals or not (number.isascii() and number.isdigit()) or len(number) > 4:
        raise argparse.ArgumentTypeError(f"{_shorten(text)!r} is not N=FILE.npy, such as 2=out.npy")
    return int(number), name


def read(name: str) -> str:
    """A file's text. Raises `PTXError` where it cannot be read."""
    try: return read_text(name, MAX_NAMED_BYTES, pipes=True)
    except (OSError, UnicodeDecodeError) as error:
        raise PTXError(f"{name} cannot be read: {error}", 0, "a text file of PTX") from error


def argument(emu: Emulator, text: str) -> object:
    """Returns what an `--arg` stands for; see the module's protocol. Raises `PTXError` with the word that is
    wrong."""
    if text.startswith("map:"):
        _, box, swizzle, *rest = (*text.split(":", 3), "", "")[:4]
        array, dtype = _array(rest[0])
        return TensorMap.of_tiles(emu.alloc(array), box=_shape(box, text), swizzle=swizzle, dtype=dtype)
    if text.endswith(".npy") or text.partition(":")[0] in FILLS: return emu.alloc(_array(text)[0])
    try:
        if -1 << 63 <= (number := int(text, 0)) < 1 << 64: return number
    except ValueError:
        with contextlib.suppress(ValueError): return float(text)
    raise PTXError(f"--arg {_shorten(text)}", 0,
                   "an integer of 64 bits, a float, zeros:f32:64x64 and its kind, a .npy file, or map:…",
                   "see tinygrad-nv ptx check --help")


def _shorten(text: str) -> str: return text if len(text) <= 80 else f"{text[:80]}…"


def _shape(words: str, text: str) -> tuple[int, ...]:
    extents = [int(word) if word.isascii() and word.isdigit() and len(word) < 20 else -1
               for word in words.split("x")]
    if min(extents) < 0 or len(extents) > 32 or math.prod(extents) > ARG_ELEMENTS:
        raise PTXError(f"--arg {_shorten(text)}: {_shorten(words)!r} is not a shape", 0,
                       f"1 to 32 extents such as 64x64, of {ARG_ELEMENTS} elements at most",
                       "write larger arrays to a .npy file")
    return tuple(extents)


def _array(text: str) -> tuple[np.ndarray | int, str | None]:
    """The array (or number of bytes) of `random:f16:64x64`, and its type's name when NumPy lacks it."""
    if text.endswith(".npy"):
        try:
            require_npy(text)
            return np.load(text, allow_pickle=False), None
        except (OSError, ValueError) as error: raise PTXError(f"--arg {text}: {error}", 0,
                                                              "a NumPy file") from error
    fill, *rest = text.split(":")
    if fill == "empty" and len(rest) == 1: return math.prod(_shape(rest[0], text)), None
    if fill not in FILLS or len(rest) != 2 or rest[0] not in DTYPES:
        raise PTXError(f"--arg {_shorten(text)}", 0,
                       f"FILL:TYPE:SHAPE, FILL one of {', '.join(FILLS[:-1])} and TYPE of "
                       f"{', '.join(DTYPES)}", "for example zeros:f32:64x64")
    values = _values(fill, _shape(rest[1], text))
    if rest[0] != "bf16": return values.astype(DTYPES[rest[0]]), None
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7fff + (bits >> 16 & 1)) >> 16).astype(np.uint16), "bf16"


def _values(fill: str, shape: tuple[int, ...]) -> np.ndarray:
    random = np.random.default_rng(0)
    if fill == "random": return random.standard_normal(shape)
    if fill == "integers": return random.integers(-4, 5, shape)
    if fill == "arange": return np.arange(math.prod(shape)).reshape(shape)
    return np.full(shape, 1.0 if fill == "ones" else 0.0)


# **** ptx check ****

def run_check(arguments: argparse.Namespace) -> int:
    """Runs the kernel; 1 when there are findings."""
    seeds = [arguments.seed] if arguments.seeds is None else [LATE, *range(arguments.seeds - 1)]
    reports: list[Report] = []
    for seed in seeds:
        reports.append(_launch(arguments, seed))
        if any(found.kind == LIMIT_KIND for found in reports[-1].findings): break  # others would take as long
    report = merge_reports(reports)
    print(json.dumps(as_json(report)) if arguments.json else as_text(report))
    return 1 if report.findings else 0


def _launch(arguments: argparse.Namespace, seed: int | str) -> Report:
    """One run, with memory of its own."""
    text = read(arguments.file)
    module = parse(text)
    emu = Emulator(arguments.arch or module.target, check=not arguments.no_check, seed=seed,
                   max_seconds=arguments.max_seconds, max_memory=arguments.max_memory)
    args = [argument(emu, word) for word in arguments.arg]
    block = arguments.block or block_of(module, arguments.entry)
    for number, _ in arguments.save:
        if number >= len(args) or not hasattr(args[number], "numpy"):
            raise PTXError(f"--save {number}: argument {number} is no buffer", 0,
                           "the number of a buffer, from 0")
    report = emu.launch(text, arguments.grid, block, args, arguments.entry, arguments.cluster,
                        arguments.dynamic_smem,
                        arguments.trace)
    for number, name in arguments.save: np.save(name, args[number].numpy())
    return report


def merge_reports(reports: list[Report]) -> Report:
    """The counters of the first run, and what any found: of a kind at a line, the first run's words."""
    findings: list[Finding] = []
    notes: list[Finding] = []
    for report in reports:
        for into, found in ((findings, report.findings), (notes, report.notes)):
            known = {(one.kind, one.ptx_line) for one in into}
            into += [one for one in found if (one.kind, one.ptx_line) not in known]
    return replace(reports[0], findings=findings, notes=notes, seconds=sum(r.seconds for r in reports))


def block_of(module: PTXModule, entry: str | None) -> tuple[int, ...]:
    """.reqntid of an entry function (of the first, without a name), else 128 threads."""
    found = [function for name, function in module.functions.items() if entry in (None, name)]
    return found[0].directives.get("reqntid", (128,)) if found else (128,)


def as_json(report: Report) -> dict[str, object]:
    """Findings and counters as JSON has them."""
    stats = report.stats
    return {"printed": report.printed, "findings": [vars(finding) for finding in report.findings],
            "notes": [vars(note) for note in report.notes],
            "counters": {"warp_instructions": stats.warp_instructions,
                         "global_read_bytes": stats.global_read_bytes,
                         "global_written_bytes": stats.global_written_bytes, "l2_bytes": stats.l2_bytes,
                         "shared_bytes": stats.shared_bytes, "asynchronous_bytes": stats.asynchronous_bytes,
                         "tensor_flops": stats.tensor_flops, "bank_conflicts": stats.bank_conflicts,
                         "sectors_per_request": stats.sectors_per_request,
                         "instructions": dict(stats.instructions)},
            "seconds": report.seconds}


def as_text(report: Report, most: int = 12) -> str:
    """Findings, totals, and the lines that cost most."""
    stats = report.stats
    lines = [*([str(finding) for finding in report.findings] or ["no findings"]), *map(str, report.notes)]
    lines += ["", *(f"{name:<24}{value:>16,}" for name, value in (
        ("warp instructions", stats.warp_instructions), ("global bytes read", stats.global_read_bytes),
        ("global bytes written", stats.global_written_bytes), ("L2 bytes", stats.l2_bytes),
        ("shared bytes", stats.shared_bytes), ("asynchronous bytes", stats.asynchronous_bytes),
        ("tensor-core flops", stats.tensor_flops)))]
    busy = sorted(stats.sites, key=lambda site: (-site.conflicts, -site.sectors, -site.warps))[:most]
    lines += ["", f"{'line':>6} {'warps':>10} {'conflicts':>10} {'sectors/request':>16}  opcode"]
    for site in busy:
        sectors = f"{site.sectors / site.requests:.2f}" if site.requests else "-"
        lines.append(f"{site.line:>6} {site.warps:>10,} {site.conflicts:>10,} {sectors:>16}  {site.opcode}")
    return report.printed + "\n".join(lines)


# **** ptx time ****

def run_time(arguments: argparse.Namespace) -> int:
    """Predicts the time of a launch."""
    text = read(arguments.file)
    module = parse(text)
    emu = Emulator(arguments.arch or module.target, max_seconds=arguments.max_seconds,
                   max_memory=arguments.max_memory)
    found = emu.launch(text, arguments.grid, arguments.block or block_of(module, arguments.entry),
                       [argument(emu, word) for word in arguments.arg], arguments.entry, arguments.cluster,
                       arguments.dynamic_smem, timing=arguments.gpu,
                       log=MOST_ISSUES if arguments.trace else 0).timing
    assert found is not None
    if arguments.trace: Path(arguments.trace).write_text(json.dumps(chrome(found)))
    print(json.dumps(timing_report.as_json(found)) if arguments.json else timing_report.as_text(found))
    return 0


# **** ptx stats ****

def run_stats(arguments: argparse.Namespace) -> int:
    """Assembles the file and prints its resources and SASS instructions."""
    text = read(arguments.file)
    target = arguments.arch or parse(text).target
    # any architecture of ours that can run the target will do when it is none itself
    arch = target if target in ARCHITECTURES else {"sm_86": "sm_89", "sm_90": "sm_90a"}.get(target, target)
    made = assemble(text, arch)
    counts = sass(made)
    if arguments.json:
        print(json.dumps({"arch": arch, "kernels": {name: vars(r) for name, r in made.kernels.items()},
                          "notes": made.notes,
                          "sass": None if counts is None else dict(counts.most_common())}))
        return 0
    print(f"{'kernel':<32} {'registers':>9} {'spills':>8} {'stack':>6} {'shared':>8} {'barriers':>8}   "
          f"({arch})")
    for name, r in made.kernels.items(): print(_row(name, r))
    for note in made.notes: print(f"ptxas: {note}")
    if counts is None: print("no disassembler: SASS is not counted (nvdisasm or cuobjdump would do)")
    else:
        for opcode, count in counts.most_common(): print(f"{opcode:<16}{count:>8,}")
    return 0


def _row(name: str, r: Resources) -> str:
    spills = r.spill_store_bytes + r.spill_load_bytes
    return f"{name:<32} {r.registers:>9} {spills:>8} {r.stack_bytes:>6} {r.shared_bytes:>8} {r.barriers:>8}"
