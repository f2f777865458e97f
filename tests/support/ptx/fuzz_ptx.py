"""Mutated PTX on the emulator: every text must end in a report or a `PTXError`, within a budget.

    python -m tests.support.ptx.fuzz_ptx --count 4000 --seed 0

The seeds are the kernels of pairs/, with their launches, and kernels of random instructions of the
instruction table on registers with extreme values. A mutant has one to four changes: of a number, a word, a
line or a byte. Processes run the mutants in turn, so that what ends one, a sanitizer's report say, is told
with the number of the mutant; `--only N` runs that one again in this process. One that reaches the limit of
time runs again alone, with a longer one: it is told as slow where it ends in a report, and as a timeout where
it does not. The exit code is 1 when any mutant ended otherwise.
"""
from __future__ import annotations

import argparse
import faulthandler
import functools
import multiprocessing
import os
import random
import re
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.ptx.pairs import ALL
from tinygrad_nv.errors import PTXError
from tinygrad_nv.ptx import isa
from tinygrad_nv.ptx.emulator import LATE, Emulator
from tinygrad_nv.ptx.emulator.native import library

STEPS = 20_000        # warp-instructions of a mutant: 20 times as many where no thread polls
SECONDS = 60          # of one mutant, under a sanitizer
ALONE = 600           # of one that took longer beside others
ENDS = ("refused", "found", "runs")
CHUNK = 200           # mutants a process runs
NUMBERS = ("0", "1", "-1", "3", "7", "31", "32", "33", "63", "64", "127", "128", "255", "1024", "65535",
           "65536", "0x7fffffff", "0x80000000", "0xffffffff", "0xfffffff0", "0x100000000",
           "0x7fffffffffffffff",
           "0x8000000000000000", "0xffffffffffffffff", "0xffffffffffffffe0", "0f7FC00000", "0f7F800000",
           "0fFF800000", "0f4F000000", "0d7FF8000000000000", "0d7FF0000000000000", "0dC3E0000000000001",
           "1e308", "99999999999999999999")
# what a register of so many bits may hold: the ends of integers, NaN, infinities, addresses of windows
EXTREMES = {16: ("0", "1", "0x8000", "0x7fff", "0xffff", "0x7c00", "0x7e00", "0xfc00"),
            32: ("0", "1", "0x400", "0x410", "31", "32", "0x7fffffff", "0x80000000", "0xffffffff",
                 "0xfffffffc",
                 "0x7fc00000", "0x7f800000", "0xff800000", "0x4f000000", "0x1000400"),
            64: ("0", "1", "0x400", "0x700000000", "0x700000010", "0x70000ffff", "0x7fffffffffffffff",
                 "0x8000000000000000", "0xffffffffffffffff", "0xfffffffffffffff8", "0x7ff8000000000000",
                 "0x7ff0000000000000", "0x43e0000000000000", "0x7f0000000400", "0x7f00ffffffff",
                 "0x7e0000000000",
                 "0x7effffffffff", "0x7d0000000000", "0x7dffffffffff")}
TOKENS = re.compile(r"[%.$\w:]+|[^\s\w]|\s+")
NUMBER = re.compile(r"(?<![\w%.$])(?:0[xX][0-9a-fA-F]+|\d+)(?![\w.])")


@dataclass(frozen=True)
class Seed:
    """A kernel that is right or nearly so, and its launch."""
    name: str
    text: str
    arguments: Callable[[Emulator], Sequence[object]]
    grid: int = 1
    block: int = 64
    cluster: int = 1
    arch: str = "sm_90a"


@functools.cache
def kernels() -> tuple[Seed, ...]:
    """Those of pairs/, cured."""
    return tuple(Seed(case.name, case.source(None), lambda emu, case=case: case.setup(emu)[0], case.grid,
                      case.block, case.cluster, case.arch) for case in ALL)


def instructions(rng: random.Random) -> Seed:
    """A kernel of random instructions, on registers that hold extreme values."""
    forms = rng.choices(isa.FORMS, k=8)
    lines = []
    for form in forms:
        if form.lowest(next(iter(form.opcodes())), "sm_90a", ()) is None: continue
        lines.append(isa.example(form, rng.choice(list(form.opcodes())), rng.randrange(len(form.operands)),
                                 rng.random() < 0.5))
    body = "\n".join(line for line in lines if not line.startswith(("exit", "ret", "trap")))
    named = sorted(set(re.findall(r"%([busf])(16|32|64)_(\d+)", body)))
    filled = "\n".join(f"mov.b{bits} %{kind}{bits}_{number}, {rng.choice(EXTREMES[int(bits)])};"
                       for kind, bits, number in named)
    text = (".version 8.8\n.target sm_90a\n.address_size 64\n.shared .align 128 .b8 sh[4096];\n"
            ".visible .entry k(.param .u64 p)\n.maxntid 128\n{\n" + isa.REGISTERS
            + f"{filled}\n{body}\nLABEL: ret;\nTABLE: .branchtargets LABEL, LABEL;\n}}\n")
    return Seed("instructions", text, lambda emu: [emu.alloc(np.zeros(4096, np.uint8))])


def mutated(text: str, rng: random.Random) -> str:
    """The text with one to four changes."""
    for _ in range(rng.randint(1, 4)): text = rng.choice((number, number, word, line, line, byte))(text, rng)
    return text


def number(text: str, rng: random.Random) -> str:
    """Another constant."""
    if not (found := list(NUMBER.finditer(text))): return text
    chosen = rng.choice(found)
    return text[:chosen.start()] + rng.choice(NUMBERS) + text[chosen.end():]


def word(text: str, rng: random.Random) -> str:
    """A word left out, or in place of another."""
    words = TOKENS.findall(text)
    words[rng.randrange(len(words))] = "" if rng.random() < 0.3 else rng.choice(words)
    return "".join(words)


def line(text: str, rng: random.Random) -> str:
    """A line left out, twice, or at the place of another."""
    lines = text.split("\n")
    at, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    match rng.randrange(3):
        case 0: del lines[at]
        case 1: lines.insert(other, lines[at])
        case _: lines[at], lines[other] = lines[other], lines[at]
    return "\n".join(lines)


def byte(text: str, rng: random.Random) -> str:
    """Another byte."""
    at = rng.randrange(len(text) + 1)
    return text[:at] + chr(rng.choice((*range(32, 127), 0, 10, 0xe9))) + text[at + rng.randrange(2):]


def mutant(seed: int, index: int) -> tuple[Seed, str]:
    """A seed's launch, and the text to run."""
    rng = random.Random(f"{seed} {index}")
    made = instructions(rng) if rng.random() < 0.5 else rng.choice(kernels())
    return made, made.text if made.name == "instructions" and rng.random() < 0.5 else mutated(made.text, rng)


def outcome(seed: int, index: int) -> str:
    """What a mutant comes to: "refused", "found" or "runs". Anything else raises."""
    one, text = mutant(seed, index)
    order = (0, 1, 2, LATE)[index % 4]
    try:
        emu = Emulator(one.arch, seed=order, step_limit=STEPS, exact=index % 3 == 0)
        report = emu.launch(text, one.grid, one.block, one.arguments(emu), cluster=one.cluster)
    except PTXError: return "refused"
    return "found" if report.findings else "runs"


def _run(seed: int, first: int, stop: int, said: str, send: Any) -> None:
    """A process: mutants [first, stop). Sends each number before it runs and what came of it."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with Path(said).open("w") as errors:
        faulthandler.enable(errors)
        os.dup2(errors.fileno(), 2)
        for index in range(first, stop):
            send.send((index, "begun"))
            try: send.send((index, outcome(seed, index)))
            except Exception: send.send((index, traceback.format_exc()))


def watch(seed: int, first: int, stop: int, seconds: float, said: str) -> Iterator[tuple[int, str]]:
    """Runs the mutants [first, stop) until one ends the process: "timeout" or its stderr says how."""
    fork = multiprocessing.get_context("fork")
    receive, send = fork.Pipe(duplex=False)
    process = fork.Process(target=_run, args=(seed, first, stop, said, send))
    process.start()
    send.close()
    running, late = None, False
    while not (late := not receive.poll(seconds)):
        try: index, what = receive.recv()
        except EOFError: break
        running = index if what == "begun" else None
        if running is None: yield index, what
    if late: process.kill()
    process.join()
    if running is None: return
    yield running, "timeout" if late else \
        f"ended its process ({process.exitcode}):\n{Path(said).read_text(errors='replace')[:4000]}"


def survey(seed: int, count: int, tell: Callable[[str], None] = print, seconds: float = SECONDS,
           alone: float = ALONE) -> tuple[Counter[str], list[int]]:
    """How many mutants came to what, and the numbers of those that ended otherwise."""
    counts, bad, at = Counter[str](), list[int](), 0
    kernels()
    library()  # compiled once
    with tempfile.TemporaryDirectory() as folder:
        said = str(Path(folder) / "stderr")
        while at < count:
            for index, told in watch(seed, at, min(at + CHUNK, count), seconds, said):
                at, what = index + 1, told
                if what == "timeout":
                    what = next((again for _, again in watch(seed, index, index + 1, alone, said)), what)
                    tell(f"mutant {index}: {seconds:g} s were too few; alone within {alone:g} s: {what}")
                    counts["slow"] += what in ENDS
                counts[what if what in ENDS or what == "timeout" else "crash"] += 1
                if what in ENDS: continue
                bad.append(index)
                tell(f"mutant {index}: {what}")
    return counts, bad


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--count", type=int, default=4000, metavar="N", help="mutants (default 4000)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="which mutants (default 0)")
    parser.add_argument("--only", type=int, metavar="N", help="print this mutant and run it in this process")
    options = parser.parse_args()
    if options.only is not None:
        print(mutant(options.seed, options.only)[1], flush=True)
        print(outcome(options.seed, options.only))
        return 0
    began = time.perf_counter()
    counts, bad = survey(options.seed, options.count)
    print(f"{options.count} mutants in {time.perf_counter() - began:.0f} s: {counts['runs']} run, "
          f"{counts['found']} with findings, {counts['refused']} refused ({counts['slow']} of them slow), "
          f"{counts['timeout']} reached the limit of time, {counts['crash']} ended otherwise {bad or ''}")
    return int(bool(bad))


if __name__ == "__main__": sys.exit(main())
