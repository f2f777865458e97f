"""`tinygrad-nv tune`: finds the best schedule of a matmul or an attention; manages the schedule database.

Protocol: `tune M N K`, `tune --attention BxHxSxD` and `tune --decode BxHxSxD` try candidates (tile/tune.py),
print them as a table, the best first, and store the best; a matmul with --arch cpu, or DEV=CPU, those of
cpu/gemm/tune.py on this machine. With DEV=CUDA they are measured; otherwise nothing is measured: times are
modelled for the GPU of --gpu, or counted where the timing model has no figures, and the table says which.
`--list`, `--export`, `--import` and `--clear` manage the database at NV_SCHEDULES. Notes about ignored
entries go to stderr. Times are microseconds.
"""
from __future__ import annotations

import argparse
import json
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinygrad.helpers import DEV

from tinygrad_nv.errors import RequestError, SpecError, ToolchainError
from tinygrad_nv.explain.levels import shorten
from tinygrad_nv.files import read_text
from tinygrad_nv.progress import bar
from tinygrad_nv.ptx.assemble import ARCHITECTURES
from tinygrad_nv.ptx.timing.gpu import figures
from tinygrad_nv.ptx.timing.gpu import list_gpus as known_gpus
from tinygrad_nv.table import align_columns
from tinygrad_nv.tile import database
from tinygrad_nv.tile.attention import dense as attention
from tinygrad_nv.tile.decode import dense as decode
from tinygrad_nv.tile.gemm.cost import predict
from tinygrad_nv.tile.gemm.dense import MAJORS, RESULTS, TYPES, WORDS, dense
from tinygrad_nv.tile.gemm.schedules import GemmSchedule
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.known_error import describe_error
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

if TYPE_CHECKING:
    from tinygrad_nv.tile.tune import Candidate

CPU = "cpu"
MODEL_OF = {"counted": "cost", "modelled": "timing"}    # by how a time is known
OF_MATMULS: dict[str, Any] = {"out": "", "majors": "NT", "batch": (), "epilogue": "", "symbolic": False}
OF_ATTENTION: dict[str, Any] = {"keys": 0, "causal": False, "backward": False, "layout": "BHSD"}
OF_DECODE: dict[str, Any] = {"kv_dtype": "", "page_size": 16}
OF_HEADS: dict[str, Any] = {"kv_heads": 0}


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `tune`."""
    tune = commands.add_parser("tune", help="find the best schedule of a matmul or attention, and store it",
                               usage="%(prog)s [options] M N K | --attention BxHxSxD | --decode BxHxSxD")
    tune.add_argument("extents", nargs="*", type=_extents, metavar="M N K",
                      help="of a matmul: rows, columns, length of sums; also as MxNxK")
    tune.add_argument("--gemm", type=_shape, metavar="MxNxK", help="the same as M N K")
    tune.add_argument("--attention", type=_heads, metavar="BxHxSxD",
                      help="an attention: batch, heads, rows, elements of a head")
    tune.add_argument("--decode", type=_heads, metavar="BxHxSxD",
                      help="a decode attention: requests, heads, tokens at most, elements of a head")
    tune.add_argument("--dtype", default="bf16", choices=TYPES, help="of the operands (default bf16)")
    matmul = tune.add_argument_group("matmul")
    matmul.add_argument("--out", choices=RESULTS,
                        help="of the result (default: as the operands; bf16 for fp8, s32 for bytes)")
    matmul.add_argument("--majors", choices=MAJORS, help="BLAS's letters (default NT: x @ w.T)")
    matmul.add_argument("--batch", type=_batch, metavar="B[xB…]", help="batch dimensions")
    matmul.add_argument("--epilogue", metavar="WORD+…", help=f"epilogue operations: {', '.join(WORDS)}")
    matmul.add_argument("--symbolic", action="store_const", const=True,
                        help="M is the maximum of a symbolic extent")
    heads = tune.add_argument_group("attention")
    heads.add_argument("--kv-heads", type=_extent, metavar="N", help="key heads (default: as many as heads)")
    heads.add_argument("--keys", type=_extent, metavar="N", help="of a sequence (default: as many as rows)")
    heads.add_argument("--causal", action="store_const", const=True, help="rows see what stands before them")
    heads.add_argument("--backward", action="store_const", const=True, help="the gradient")
    heads.add_argument("--layout", choices=attention.LAYOUTS, help="of operands in memory (default BHSD)")
    heads.add_argument("--kv-dtype", choices=decode.KV_WORDS, help="of a cache, with --decode")
    heads.add_argument("--page-size", type=_extent, metavar="N", help="tokens of a page, with --decode (16)")
    search = tune.add_argument_group("search")
    search.add_argument("--arch", choices=(*ARCHITECTURES, CPU),
                        help="default sm_90a, or cpu with DEV=CPU")
    search.add_argument("--gpu", metavar="NAME",
                        help=f"the GPU that times are modelled for, one of {', '.join(known_gpus())} "
                        "(default: NV_TIMING_GPU, or the first of the architecture)")
    search.add_argument("--sm-count", type=_extent, metavar="N",
                        help="SMs of the GPU (default: as the architecture's first has)")
    search.add_argument("--beam", type=_extent, default=2, metavar="N",
                        help="4 N candidates, 8 N on a CPU (default 2)")
    kept = tune.add_argument_group("database").add_mutually_exclusive_group()
    kept.add_argument("--list", action="store_true", help="print what is stored")
    kept.add_argument("--export", metavar="FILE", help="write what is stored to a file")
    kept.add_argument("--import", metavar="FILE", dest="import_", help="add what a file has")
    kept.add_argument("--merge", metavar="FILE",
                      help="add what a file has and the database has not, or has slower")
    kept.add_argument("--clear", action="store_true", help="forget what is stored")
    tune.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    tune.set_defaults(run=run)


def _extent(text: str) -> int:
    try: value = int(text)
    except ValueError: value = 0
    if value < 1: raise argparse.ArgumentTypeError(f"{text!r} is not an integer ≥ 1")
    return value


def _extents(text: str) -> tuple[int, ...]: return tuple(map(_extent, text.lower().split("x")))


def _shape(text: str) -> tuple[int, ...]:
    if len(made := _extents(text)) == 3: return made
    raise argparse.ArgumentTypeError(f"{text!r} is not MxNxK; write 512x512x512")


def _batch(text: str) -> tuple[int, ...]: return tuple(map(_extent, re.split("[,x]", text)))


def _heads(text: str) -> tuple[int, ...]:
    if len(made := _batch(text)) == 4: return made
    raise argparse.ArgumentTypeError(f"{text!r} is not BxHxSxD; write 2x16x4096x128")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    about = any((arguments.list, arguments.export, arguments.import_, arguments.merge, arguments.clear))
    heads = bool(arguments.attention) + bool(arguments.decode)
    if heads > 1: raise RequestError("--attention and --decode", "one of them", "leave one out")
    arguments.extents = [*(arguments.gemm or ()), *(each for word in arguments.extents for each in word)]
    if len(arguments.extents) != (0 if about or heads else 3):
        raise RequestError(f"{len(arguments.extents)} numbers", "none with --attention, --decode, --list, "
                           "--export, --import or --clear, else three: M N K or MxNxK",
                           "tinygrad-nv tune 4096 4096 4096")
    if (file := database.path()).is_dir():
        raise RequestError(f"{file} is a directory", "a file for the schedule database",
                           f"NV_SCHEDULES={file / 'schedules.json'}")
    with _notes():
        if arguments.list: _list(arguments)
        elif arguments.export: _export(Path(arguments.export))
        elif arguments.import_: _import(Path(arguments.import_))
        elif arguments.merge: _merge(Path(arguments.merge))
        elif arguments.clear: print(f"{database.clear()} schedules forgotten")
        else: _tune(arguments)
    return 0


@contextmanager
def _notes() -> Iterator[None]:
    """Prints warnings of the database to stderr."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", database.ScheduleWarning)
        try: yield
        finally:
            for warning in caught: print(f"note: {warning.message}", file=sys.stderr)


# **** what is tuned ****

def _spec(arguments: argparse.Namespace) -> Any:
    """Returns the spec that the words describe. Raises `RequestError` for an option of something else,
    `SpecError` for a word that there is not."""
    what, allowed = "a matmul", OF_MATMULS
    if arguments.attention: what, allowed = "an attention", OF_ATTENTION | OF_HEADS
    if arguments.decode: what, allowed = "a decode attention", OF_DECODE | OF_HEADS
    every = OF_MATMULS | OF_ATTENTION | OF_DECODE | OF_HEADS
    if strange := [name for name in every if name not in allowed and getattr(arguments, name) is not None]:
        raise RequestError(f"--{strange[0].replace('_', '-')} of {what}",
                           ", ".join(f"--{name.replace('_', '-')}" for name in allowed), "leave it out")
    given: dict[str, Any] = {name: value if (said := getattr(arguments, name)) is None else said
             for name, value in allowed.items()}
    if arguments.attention:
        backward, (batch, heads, rows, d) = given.pop("backward"), arguments.attention
        spec = attention.dense(batch, heads, rows, d, arguments.dtype, **given)
        return attention.gradient(spec) if backward else spec
    if arguments.decode:
        batch, heads, tokens, d = arguments.decode
        return decode.dense(batch, heads, tokens, d, arguments.dtype, **given)
    m, n, k = arguments.extents
    return dense(m, n, k, arguments.dtype, **given)


def _target(arguments: argparse.Namespace) -> GPU:
    """The GPU that the words ask for. Raises `RequestError` for words that do not fit together, `ConfigError`
    for a GPU without figures."""
    if arguments.gpu is None:
        if DEV.device == "CUDA" and arguments.arch is None and arguments.sm_count is None:
            from tinygrad_nv.patterns.target import target_of
            there = target_of("CUDA")
            assert isinstance(there, GPU), "a driver of ours has GPUs"
            return there
        return GPU(arguments.arch or "sm_90a", arguments.sm_count or 0)
    named = figures(arguments.gpu)
    if arguments.arch not in (None, named.arch) or arguments.sm_count not in (None, named.sms):
        raise RequestError(f"--gpu {arguments.gpu} with another --arch or --sm-count",
                           f"{named.arch} and {named.sms} SMs, which it has", "leave them out")
    return GPU(named.arch, named.sms, model=arguments.gpu)


def _tune(arguments: argparse.Namespace) -> None:
    from tinygrad_nv.tile.emulated import clock_of
    from tinygrad_nv.tile.tune import schedules, tune
    spec = _spec(arguments)
    if arguments.arch is None and arguments.gpu is None and DEV.device == "CPU": arguments.arch = CPU
    if arguments.arch == CPU:
        _tune_cpu(spec, arguments)
        return
    gpu = _target(arguments)
    if not schedules(spec, gpu, 0):
        reason = TABLE.why_not(spec, gpu)
        raise SpecError(f"no template takes {_format_spec(spec, arguments)} on {gpu.arch}: {reason}")
    if arguments.gpu is not None and clock_of(gpu) is None:
        raise ToolchainError("the timing model lacks ptxas or nvdisasm", "both",
                             "pip install 'tinygrad-nv[emulator]'")
    with bar(f"trying schedules of {spec}") as progress: tried = tune(spec, gpu, arguments.beam, progress)
    best = tried[0]
    if arguments.json:
        print(json.dumps({"spec": _format_spec(spec, arguments), "arch": gpu.arch, "flops": _flops(spec),
                          "how": best.how, "gpu": gpu.figures if best.how == "modelled" else "",
                          "candidates": [_as_json(candidate) for candidate in tried]}))
        return
    print("\n".join(_table(tried)))
    if best.seconds is None: raise SpecError("no candidate can be used", "", "raise --beam")
    rate = f", {_flops(spec) / best.seconds / 1e12:.1f} TFLOP/s" if _flops(spec) else ""
    said = {"counted": "by the cost model", "measured": "measured",
            "modelled": f"modelled for {gpu.figures}, not measured"}[best.how]
    print(f"\n{_format_spec(spec, arguments)} on {gpu.arch}: {best.schedule}\n"
          f"{best.seconds * 1e6:.2f} us{rate} {said}; kept in {database.path()}")
    model = MODEL_OF.get(best.how)
    if model is not None: print(f"the {model} model: {describe_error(spec, model)}")


def _table(tried: Sequence[Candidate]) -> list[str]:
    """A line for each candidate: the cost model's time, the timing model's, and that which ranks it."""
    def us(seconds: float | None) -> str: return "-" if seconds is None else f"{seconds * 1e6:.2f}"
    how, costs = tried[0].how, [one.predicted for one in tried]
    columns = {"schedule": [str(one.schedule) for one in tried],
               "predicted us": [us(cost and cost.seconds) for cost in costs],
               "modelled us": [us(one.modelled) for one in tried],
               f"{how} us": [us(one.seconds) if not one.why else shorten(one.why, 32) for one in tried],
               "bound": [cost.bound if cost else "-" for cost in costs],
               "registers": [str(one.registers or "-") for one in tried],
               "shared bytes": [f"{one.smem_bytes:,}" for one in tried]}
    kept = {name: cells for name, cells in columns.items() if {*cells} != {"-"}}
    rows = [tuple(kept), *zip(*kept.values(), strict=True)]
    return align_columns(rows, tuple(i for i, name in enumerate(kept) if name not in ("schedule", "bound")))


def _tune_cpu(spec: Any, arguments: argparse.Namespace) -> None:
    from tinygrad_nv.cpu.gemm.schedules import default
    from tinygrad_nv.cpu.gemm.tune import CPUCandidate, tune
    from tinygrad_nv.cpu.target import host
    from tinygrad_nv.explain.levels_cpu import CPUMatmul
    for name, value in (("--sm-count", arguments.sm_count), ("--gpu", arguments.gpu)):
        if value is not None: raise RequestError(f"{name} on a CPU", "an option of GPUs", "leave it out")
    if not isinstance(spec, GemmSpec):
        raise RequestError(f"{spec} on a CPU", "a matmul: attentions have one schedule there",
                           "--arch sm_90a")
    here = host()
    if default(spec, here) is None:
        reason = TABLE.why_not(spec, here)
        raise SpecError(f"no template takes {_format_spec(spec, arguments)} on {here.arch}: {reason}")
    with bar(f"trying schedules of {spec}") as progress: tried = tune(spec, here, arguments.beam, progress)
    predicted = {one.schedule: CPUMatmul(spec, one.schedule, here).seconds for one in tried}
    if arguments.json:
        candidates = [{"schedule": one.schedule.to_json(), "predicted_s": predicted[one.schedule],
                       "measured_s": one.seconds, "why": one.why} for one in tried]
        print(json.dumps({"spec": _format_spec(spec, arguments), "arch": here.arch, "flops": spec.flops,
                          "candidates": candidates}))
        return

    def row(one: CPUCandidate) -> tuple[str, ...]:
        measured = shorten(one.why, 32) if one.seconds is None else f"{one.seconds * 1e6:.2f}"
        return str(one.schedule), f"{predicted[one.schedule] * 1e6:.2f}", measured
    print("\n".join(align_columns([("schedule", "predicted us", "measured us"), *map(row, tried)], (1, 2))))
    if (best := tried[0]).seconds is None: raise SpecError("no candidate can be used", "", best.why)
    print(f"\n{_format_spec(spec, arguments)} on {here.arch}: {best.schedule}\n"
          f"{best.seconds * 1e6:.2f} us, {spec.flops / best.seconds / 1e9:.1f} GFLOP/s; kept in "
          f"{database.path()}")


def _format_spec(spec: Any, arguments: argparse.Namespace) -> str:
    """Returns a spec as text; a matmul's with its epilogue as it was given on the command line."""
    if not isinstance(spec, GemmSpec): return str(spec)
    words = f", {arguments.epilogue}" if arguments.epilogue else ""
    return str(spec).split(", ")[0] + words


def _flops(spec: Any) -> int:
    """Operations of a spec that says them, 0 of others: a cache's bytes are what counts."""
    return getattr(spec, "flops", 0)


def _as_json(one: Candidate) -> dict[str, object]:
    seconds = {"modelled_s": one.modelled, **({f"{one.how}_s": one.seconds} if not one.why else {})}
    return {"schedule": one.schedule.to_json(),
            "predicted_s": None if one.predicted is None else one.predicted.seconds,
            "bound": None if one.predicted is None else one.predicted.bound, **seconds,
            "registers": one.registers, "smem_bytes": one.smem_bytes, "why": one.why}


# **** the database ****

def _list(arguments: argparse.Namespace) -> None:
    entries = database.entries()
    if arguments.json:
        print(json.dumps({"path": str(database.path()), "entries": [entry.to_json() for entry in entries]}))
        return
    if not entries:
        print(f"no schedules in {database.path()}")
        return
    rows = [("spec", "arch", "toolchain", "schedule", "us", "bound", "how", "origin")]
    for entry in entries:
        rows.append((shorten(str(entry.spec), 60), entry.arch, entry.toolchain,
                     str(entry.schedule), f"{entry.seconds * 1e6:.2f}", _bottleneck(entry), entry.provenance,
                     entry.origin or "-"))
    print("\n".join(align_columns(rows, (4,))))


def _bottleneck(entry: database.Entry) -> str:
    """Returns the bottleneck on a GPU, by the cost model."""
    if not isinstance(entry.schedule, GemmSchedule): return "-"
    return predict(entry.spec, entry.schedule, entry.arch).bound


def _export(file: Path) -> None:
    entries = database.entries()
    file.write_text(database.dump(entries))
    print(f"{len(entries)} schedules written to {file}")


def _wrong(entry: database.Entry) -> list[str]:
    """Why an entry's schedule is not legal on its target."""
    from tinygrad_nv.cpu.target import CPU as Processor
    from tinygrad_nv.cpu.template import CPUSchedule
    s = entry.schedule
    target = Processor(s.isa, 1) if isinstance(s, CPUSchedule) else GPU(entry.arch)
    return [*database.problems(entry.spec, s, target)]


def _import(file: Path) -> None:
    legal = _legal(file)
    database.store(legal)
    print(f"{len(legal)} schedules added to {database.path()}")


def _merge(file: Path) -> None:
    legal = _legal(file)
    added, faster = database.merge(legal)
    print(f"{added} schedules added to {database.path()}, {faster} replaced by faster ones, "
          f"{len(legal) - added - faster} left out")


def _legal(file: Path) -> list[database.Entry]:
    """The entries of a file whose schedules are legal; others are noted."""
    try: text = read_text(file, database.MOST_BYTES, pipes=True)
    except (OSError, ValueError) as error:
        raise RequestError(f"{file} cannot be read: {error}", "a file that --export wrote") from error
    legal = []
    for entry in database.parse(text, file):
        if wrong := _wrong(entry):
            database.note(f"{entry.schedule} is ignored for {entry.spec}: {'; '.join(wrong)}")
        else: legal.append(entry)
    return legal
