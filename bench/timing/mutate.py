"""How much of what can be wrong with a kernel's synchronisation the emulator finds: breaks each synchronising
instruction of a PTX file, one at a time, and runs every broken kernel.

    python bench/timing/mutate.py FILE.ptx --grid 2 --arg map:64x64:128B:random:f16:256x64 --arg empty:1024

The launch is given as to `tinygrad-nv ptx check`. The kernel as it stands must have no findings. A mutant is

    found      findings under every seed
    sometimes  findings under some seeds, not under all
    noted      no finding, but a note that the kernel as it stands does not have
    numbers    no finding, but a buffer differs from what the kernel as it stands wrote: missed
    silent     no finding, and all buffers are the same: what was broken was not needed in this launch
               (another instruction orders the same, or nothing follows), or it is missed. Each is listed
    refused    no PTX any more

The exit code is 1 when numbers differ without a finding.
"""
from __future__ import annotations

import argparse
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tinygrad_nv.errors import PTXError
from tinygrad_nv.ptx import command
from tinygrad_nv.ptx.emulator import LATE, Buffer, Emulator, Report
from tinygrad_nv.ptx.parser import parse

SEEDS = (LATE, 0)
# a statement with its guard, in a line; wgmma.mma_async and copies themselves are no synchronisation
STATEMENT = re.compile(
    r"(?P<guard>@!?[%\w$]+\s+)?(?<![\w.%])(?P<opcode>(?:(?:bar|barrier|mbarrier|fence|membar|setmaxnreg)\.|"
    r"griddepcontrol\.|wgmma\.(?:fence|commit_group|wait_group)|"
    r"cp\.async\.(?:commit_group|wait_group|wait_all|mbarrier)|cp\.async\.bulk\.(?:commit_group|wait_group)|tensormap\.cp_fenceproxy|"
    r"(?:ld|st|atom|red)\.[\w.:]*(?:acquire|release|acq_rel))[\w.:]*)(?P<operands>[^;]*);")
ORDERS = ("acquire", "release", "acq_rel")


@dataclass(frozen=True)
class Mutant:
    """A kernel with one instruction broken: the line (from 1), what was done to it, and the text."""
    line: int
    how: str
    text: str


@dataclass(frozen=True)
class Outcome:
    """A run: its findings and notes as text, the bytes of every buffer when it ended, and the lines that were
    executed."""
    findings: tuple[str, ...]
    outputs: tuple[bytes, ...]
    notes: tuple[str, ...]
    lines: frozenset[int]


def outcome(report: Report, buffers: Sequence[Buffer]) -> Outcome:
    """Returns the outcome of a launch."""
    notes = tuple(f"note: line {one.ptx_line}: {one.message}" for one in report.notes)
    return Outcome(tuple(map(str, report.findings)), tuple(b.numpy().tobytes() for b in buffers), notes,
                   frozenset(site.line for site in report.stats.sites))


Run = Callable[[str, int | str], Outcome]  # a text under a seed


# **** mutants ****

def mutants(text: str, entry: str | None = None) -> list[Mutant]:
    """Every mutant of an entry function (of all, without a name), in the order of lines."""
    functions = parse(text).functions
    bodies = [function.body for name, function in functions.items() if entry in (None, name)]
    inside = {instruction.line for body in bodies for instruction in body}
    lines, out = text.splitlines(), []
    for number, line in enumerate(lines):
        code = line.partition("//")[0] if number + 1 in inside else ""
        for found in STATEMENT.finditer(code):
            for how, broken in mutations(found):
                changed = code[:found.start()] + broken + code[found.end():]
                out.append(Mutant(number + 1, f"{found['opcode']}{found['operands'].rstrip()}: {how}",
                                  "\n".join([*lines[:number], changed, *lines[number + 1:]]) + "\n"))
    return out


def mutations(found: re.Match[str]) -> Iterator[tuple[str, str]]:
    """Yields the ways to break a statement: how, and the text that takes its place."""
    guard, opcode, operands = found["guard"] or "", found["opcode"], found["operands"]
    words, items = opcode.split("."), arguments(operands)

    def statement(name: str = opcode, given: Sequence[str] = items) -> str:
        return f"{guard}{name} {', '.join(given)};"

    if words[:2] in (["mbarrier", "try_wait"], ["mbarrier", "test_wait"]):
        yield "does not wait", f"{guard}mov.pred {items[0]}, -1;"
        if "parity" in words: yield "waits for the other phase", flip_parity(guard, opcode, items)
    elif words[0] in ("ld", "st", "atom", "red"):
        yield "relaxed", statement(weaken(words))
        return
    elif result(words): yield from ()
    else: yield "left out", ""
    if any(word in ORDERS for word in words) and words[0] in ("mbarrier", "barrier"):
        yield "relaxed", statement(weaken(words))
    yield from other_counts(words, items, statement)


def arguments(operands: str) -> list[str]:
    """Operands apart: commas within braces and brackets do not count."""
    return [each.strip() for each in re.split(r",(?![^\[{]*[\]}])", operands) if each.strip()]


def result(words: Sequence[str]) -> bool:
    """Whether others need what the instruction gives, so that it cannot be left out."""
    return "red" in words or "pending_count" in words


def weaken(words: Sequence[str]) -> str:
    """The opcode without its order; barrier.cluster.wait has no relaxed form."""
    return ".".join("relaxed" if word in ORDERS else word for word in words)


def flip_parity(guard: str, opcode: str, items: Sequence[str]) -> str:
    """A wait for the other parity."""
    rest = ", ".join(items[3:])
    return (f"{{ .reg .b32 other_parity; xor.b32 other_parity, {items[2]}, 1; {guard}{opcode} {items[0]}, "
            f"{items[1]}, other_parity{', ' + rest if rest else ''}; }}")


def other_counts(words: Sequence[str], items: list[str],
                 made: Callable[..., str]) -> Iterator[tuple[str, str]]:
    """Constants that are wrong by a little: groups, threads, arrivals, bytes; and fences of another space."""
    def last(by: int) -> str: return made(given=[*items[:-1], str(int(items[-1], 0) + by)])

    constant = bool(items) and re.fullmatch(r"\d+|0x[\da-f]+", items[-1]) is not None
    if "wait_group" in words and constant:
        yield "one group more may be pending", last(1)
        if words[:3] == ["cp", "async", "bulk"] and "read" not in words:
            yield "only reads are waited for", made(".".join([*words, "read"]))
    elif words[0] in ("bar", "barrier") and constant and len(items) == 2:
        yield "32 threads more", last(32)
        if int(items[1], 0) > 32: yield "32 threads fewer", last(-32)
    elif words[:2] == ["mbarrier", "init"] and constant:
        yield "one arrival more", last(1)
        if int(items[1], 0) > 1: yield "one arrival fewer", last(-1)
    elif "expect_tx" in words:
        if constant: yield from (("16 bytes more", last(16)), ("16 bytes fewer", last(-16)))
        if words[1].startswith("arrive"):
            yield "no bytes", made(".".join(w for w in words if w != "expect_tx"), items[:-1])
    elif words[:3] == ["fence", "proxy", "async"]:
        there = "shared::cta" if "global" in words else "global"
        yield "another space", made(f"fence.proxy.async.{there}")


# **** runs ****

@dataclass(frozen=True)
class MutantVerdict:
    """A mutant, its class as the module's head has them, and the first finding."""
    mutant: Mutant
    kind: str
    said: str = ""


def judge(run: Run, right: Outcome, mutant: Mutant, seeds: Sequence[int | str] = SEEDS) -> MutantVerdict:
    """Runs a mutant under the seeds; `right` is what the kernel as it stands came to."""
    try: runs = [run(mutant.text, seed) for seed in seeds]
    except PTXError as error: return MutantVerdict(mutant, "refused", str(error).splitlines()[0])
    said = next((one.findings[0] for one in runs if one.findings), "")
    if all(one.findings for one in runs): return MutantVerdict(mutant, "found", said)
    if any(not one.findings and one.outputs != right.outputs for one in runs):
        return MutantVerdict(mutant, "numbers", said)
    noted = [note for one in runs for note in one.notes if note not in right.notes]
    if noted and not said: return MutantVerdict(mutant, "noted", noted[0])
    return MutantVerdict(mutant, "sometimes" if said else "silent", said)


def survey(run: Run, text: str, most: int | None = None, seeds: Sequence[int | str] = SEEDS,
           tell: Callable[[str], None] = print, entry: str | None = None) -> list[MutantVerdict]:
    """The verdicts on all mutants of an entry function, or on `most` of them drawn by chance. Instructions
    that the launch never executes are left alone. Raises `PTXError` when the kernel as it stands has
    findings."""
    runs = [run(text, seed) for seed in seeds]
    for seed, one in zip(seeds, runs, strict=True):
        if one.findings:
            raise PTXError(f"the kernel as it stands has findings under seed {seed}: {one.findings[0]}", 0,
                           "a launch without findings", "correct the kernel or its arguments")
    every = [mutant for mutant in mutants(text, entry) if mutant.line in runs[0].lines]
    chosen = every if most is None or most >= len(every) else random.Random(0).sample(every, most)
    verdicts = []
    for mutant in sorted(chosen, key=lambda one: one.line):
        verdicts.append(verdict := judge(run, runs[0], mutant, seeds))
        said = f" ({verdict.said})" if verdict.said else ""
        if verdict.kind != "found": tell(f"{verdict.kind:<10} line {mutant.line}: {mutant.how}{said}")
    counts = Counter(verdict.kind for verdict in verdicts).most_common()
    tell(f"{len(chosen)} of {len(every)} mutants: " + ", ".join(f"{n} {kind}" for kind, n in counts))
    return verdicts


def launcher(options: argparse.Namespace) -> Run:
    """Runs as the command line says. A mutant stops at ten times the steps of the kernel as it stands, which
    runs first."""
    limit = options.step_limit

    def run(text: str, seed: int | str) -> Outcome:
        nonlocal limit
        module = parse(text)
        emu = Emulator(options.arch or module.target, seed=seed, step_limit=limit)
        args = [command.argument(emu, word) for word in options.arg]
        buffers = list(emu.buffers.values())
        block = options.block or command.block_of(module, options.entry)
        report = emu.launch(text, options.grid, block, args, options.entry, options.cluster,
                            options.dynamic_smem)
        if limit == options.step_limit: limit = 10 * report.stats.warp_instructions + 100_000
        return outcome(report, buffers)
    return run


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    command.add_launch(parser)
    parser.add_argument("--most", type=int, metavar="N", help="try N mutants, drawn by chance (default: all)")
    parser.add_argument("--step-limit", type=int, default=20_000_000, metavar="N",
                        help="warp-instructions of the kernel as it stands at most")
    options = parser.parse_args()
    began = time.perf_counter()
    try: verdicts = survey(launcher(options), command.read(options.file), options.most, entry=options.entry)
    except PTXError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{time.perf_counter() - began:.0f} s")
    return int(any(verdict.kind == "numbers" for verdict in verdicts))


if __name__ == "__main__": sys.exit(main())
