"""Predicted times of every template's kernels beside those of the last accepted commit. No GPU is needed.

    python bench/timing/gates.py [PATTERN ...]              compares; exit code 1 where a kernel got worse
    python bench/timing/gates.py --refresh [PATTERN ...]    accepts what there is now, and says what changed

Each case of timing/gate_cases.py is built, assembled, and predicted on an H100, or an L40S where its
template is of sm_89 (tinygrad_nv/ptx/timing/).
baseline.json has, of each of its kernels, the predicted time, how busy the units are, registers, what
SASS spends on its tensor-core instructions, and by lines of PTX the cycles of the critical path, and those
that a warp waits on average. Worse is, of a kernel:

    a time, or, of its main loop, instructions around a tensor-core instruction, waits for all wgmmas, or
    additions of float32 beside a QGMMA, more than LIMIT above the baseline; fewer exponentials while a wgmma
    is under way; a byte that spills; a wgmma that ptxas serialises (C7510, C7511, …), which is an error of
    the assembly.

The report names the lines of PTX that take longer than they did. Predictions are no measurements, and
change with the timing model and with ptxas: a commit that changes those refreshes the baseline, too.
"""
from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.lib.measure import each
from bench.timing.gate_cases import GPU_NAME, GateCase, cases, contents
from tinygrad_nv.errors import NVError
from tinygrad_nv.ptx.sass import Loop, main_loop
from tinygrad_nv.ptx.timing.critical import PARTS
from tinygrad_nv.ptx.timing.listing import listing
from tinygrad_nv.ptx.timing.model import Timing
from tinygrad_nv.ptx.timing.simulator import REASONS, Cause
from tinygrad_nv.tile.database import toolchain
from tinygrad_nv.tile.emulated import timings
from tinygrad_nv.tile.kernel import Chain, TileKernel
from tinygrad_nv.tile.templates import TABLE

BASELINE = Path(__file__).parent / "baseline.json"
LIMIT = 0.03
KEPT, SHOWN = 16, 4     # lines of a kernel
LEAST = 0.002           # of a launch's cycles, below which a line is not shown
LONGEST = 80            # characters of a line
NAMES = re.compile(r"[%$][\w$.]+|\[[^]]*\]")
Record = dict[str, Any]
Place = tuple[str, str, str]                # PTX, SASS, what takes the cycles
Spent = tuple[str, str, str, float, int]    # the same, cycles, and the line that has most of them


def records(case: GateCase) -> list[Record]:
    """Returns the baseline's records of a case's kernels. Raises the project's errors where ptxas refuses
    one, or has serialised its wgmmas."""
    made = TABLE.build(case.spec, case.schedule, case.target)
    kernels = [kernel for one in ([made.first, made.second] if isinstance(made, Chain) else [made])
               for kernel in one.kernels]
    predicted = timings(made, case.spec, case.gpu_name, given=contents(case.spec))
    return [record(case, *pair) for pair in zip(kernels, predicted, strict=True)]


def record(case: GateCase, kernel: TileKernel, timing: Timing) -> Record:
    """Returns the record of one kernel."""
    made = listing(kernel.ptx, case.target.arch)
    used, loop = made.resources[kernel.name], main_loop(made.kernels[kernel.name])
    return {"kernel": kernel.name, "schedule": str(case.schedule), "us": round(timing.seconds * 1e6, 3),
            "cycles": timing.cycles, "limiter": timing.limiter, "registers": used.registers,
            "spilled_bytes": used.spill_store_bytes + used.spill_load_bytes,
            "units": {name: round(share, 3) for name, share in timing.units.items() if share >= 0.01},
            "loop": {} if loop is None else facts(loop), "path": path(timing, kernel.ptx),
            "waits": waits(timing, kernel.ptx)}


def facts(loop: Loop) -> dict[str, float]:
    """Returns the facts of a main loop's tensor-core instructions."""
    around = round(loop.around / loop.tensor, 3)
    made: dict[str, float] = {"instructions around a tensor-core instruction": around}
    groups = loop.after_waits("MUFU.EX2")
    if groups: made["waits for all wgmmas"] = sum(not left for left, _ in groups)
    if any(count for _, count in groups):
        made["exponentials while a wgmma is under way"] = sum(count for left, count in groups if left)
    if loop.counts["QGMMA"]:
        made["additions beside a QGMMA"] = round(loop.counts["FADD"] / loop.counts["QGMMA"], 3)
    return made


def waits(timing: Timing, text: str) -> list[Spent]:
    """Cycles that a warp waits, on average."""
    job, run = timing.recorded[0]
    numbers, reasons = np.nonzero(run.waited[:, 1:])
    cycles = run.waited[numbers, reasons + 1] * (timing.cycles / max(1, run.cycles) / len(job.warps))
    return most(timing, text, numbers, [REASONS[reason + 1] for reason in reasons], cycles)


def path(timing: Timing, text: str) -> list[Spent]:
    """Cycles of the critical path."""
    job, run = timing.recorded[0]
    cycles = (run.path[:, 2] - run.path[:, 1]) * (timing.cycles / max(1, run.cycles))
    names = [PARTS[Cause(cause)].name for cause in run.path[:, 3]]
    return most(timing, text, job.steps["instr"][run.path[:, 0]], names, cycles)


def most(timing: Timing, text: str, numbers: np.ndarray, reasons: Sequence[str],
         cycles: np.ndarray) -> list[Spent]:
    """The most of some cycles by PTX, SASS and reason, with a line; lines that differ in registers alone are
    one."""
    lines, sums = text.splitlines(), defaultdict[tuple[int, str], float](float)
    for number, reason, each_cycles in zip(numbers.tolist(), reasons, cycles.tolist(), strict=True):
        sums[number, reason] += each_cycles
    spent, longest = defaultdict[Place, float](float), dict[Place, tuple[float, int]]()
    for (number, reason), count in sums.items():
        if number >= len(timing.code.instructions): continue    # of what no SASS is
        each, line = timing.code.instructions[number], int(timing.code.lines[number])
        sass = each.opcode + each.modifiers
        key = NAMES.sub("_", lines[line - 1].strip())[:LONGEST] if line else "no line", sass, reason
        spent[key] += count
        longest[key] = max(longest.get(key, (0.0, 0)), (count, line))
    kept = sorted(spent, key=lambda key: -spent[key])[:KEPT]
    return [(*key, round(spent[key], 1), longest[key][1]) for key in kept]


# **** two records of a kernel ****

def worse(old: Record, new: Record) -> list[str]:
    """In what a kernel got worse; empty where it did not."""
    out = []
    if new["us"] > (1 + LIMIT) * old["us"]:
        out.append(f"{new['us'] / old['us'] - 1:+.1%}: {old['us']:.1f} us, now {new['us']:.1f} us")
    if new["spilled_bytes"]: out.append(f"{new['spilled_bytes']} bytes spill")
    for name, before in old["loop"].items():
        now, fewer_is_better = new["loop"].get(name), not name.startswith("exponentials")
        if now is None: out.append(f"no {name}, which were {before:g}")
        elif (now > (1 + LIMIT) * before) if fewer_is_better else (now < (1 - LIMIT) * before):
            out.append(f"{now:g} {name}, which were {before:g}")
    return out


def differences(old: Record, new: Record) -> list[str]:
    """Returns where the critical path became longer, where warps wait longer than they did, and what else is
    not as it was: lines of a report."""
    out = [*slower_lines("on the critical path", old["path"], new["path"], new["cycles"]),
           *slower_lines("a warp waits", old["waits"], new["waits"], new["cycles"])]
    for name in ("schedule", "limiter", "registers"):
        if old[name] != new[name]: out.append(f"{name}: was {old[name]}, now {new[name]}")
    return out


def slower_lines(words: str, old: Sequence[Spent], new: Sequence[Spent], cycles: int) -> Iterator[str]:
    """The lines that take more cycles than they did, the most first."""
    before = {each[:3]: each[3] for each in old}
    least = old[-1][3] if len(old) == KEPT else 0.0
    more = sorted(((each[3] - before.get(each[:3], least), each) for each in new), reverse=True)
    for count, (ptx, sass, reason, now, line) in more[:SHOWN]:
        if count <= LEAST * cycles: return
        was = f"{before[ptx, sass, reason]:,.0f}" if (ptx, sass, reason) in before else f"below {least:,.0f}"
        yield f"{count:+10,.0f} cycles {words}: line {line}: {ptx}  [{sass}, {reason}: {was}, now {now:,.0f}]"


def judge(case: GateCase, baseline: Mapping[str, Sequence[Record]]) -> list[str]:
    """Lines of a report on a case that got worse; empty where it did not."""
    if (known := baseline.get(case.name)) is None:
        return [f"{case.name}: not in {BASELINE.name}: python bench/timing/gates.py --refresh"]
    try: lines = compare(case.name, known, records(case))
    except NVError as error: return [f"{case.name}: {error.found}"]
    other = json.loads(BASELINE.read_text())["toolchain"] if lines else toolchain()
    return lines + [f"    the baseline is of {other}, this is {toolchain()}"] * (other != toolchain())


def compare(name: str, known: Sequence[Record], found: Sequence[Record]) -> list[str]:
    """Compares records."""
    if len(known) != len(found): return [f"{name}: {len(known)} kernels, now {len(found)}"]
    out = []
    for old, new in zip(known, found, strict=True):
        if said := worse(old, new):
            out += [f"{name}, {new['kernel']}: {'; '.join(said)}",
                    *(f"    {line}" for line in differences(old, new))]
    return out


# **** the baseline ****

def read() -> dict[str, list[Record]]:
    """The baseline; empty where there is none."""
    if not BASELINE.is_file(): return {}
    known: dict[str, list[Record]] = json.loads(BASELINE.read_text())["cases"]
    for each_record in (one for found in known.values() for one in found):
        for name in ("path", "waits"): each_record[name] = [tuple(row) for row in each_record[name]]
    return known


def render_baseline(known: Mapping[str, Sequence[Record]]) -> str:
    """A baseline's text, with each wait in a line of its own."""
    text = json.dumps({"gpu": GPU_NAME, "toolchain": toolchain(), "cases": known}, indent=1)
    def join_lines(found: re.Match[str]) -> str: return re.sub(r"\s*\n\s*", " ", found[0])
    return re.sub(r"\[\s+\"[^\[\]]*\]|\{[^\[\]{}]*\}", join_lines, text) + "\n"


def changes(old: Mapping[str, Sequence[Record]], new: Mapping[str, Sequence[Record]]) -> Iterator[str]:
    """Returns the changes that a refresh makes: time and facts of each kernel that is not as it was."""
    for name, found in new.items():
        for number, now in enumerate(found):
            before = old[name][number] if len(old.get(name, ())) == len(found) else None
            if before is None:
                yield f"new     {name}, {now['kernel']}: {now['us']:.1f} us, {now['limiter']}"
                continue
            ratio = now["us"] / before["us"] - 1
            times = f"{before['us']:.1f} us, now {now['us']:.1f} us ({ratio:+.1%})"
            said = [times] if abs(ratio) > 1e-3 else []
            said += [f"{fact} {before['loop'].get(fact, 0):g}, now {value:g}"
                     for fact, value in now["loop"].items() if before["loop"].get(fact) != value]
            said += [f"{fact} {before[fact]}, now {now[fact]}" for fact in ("registers", "schedule")
                     if before[fact] != now[fact]]
            verdict = "WORSE" if worse(before, now) else "better" if ratio < -1e-3 else "changed"
            if said: yield f"{verdict:<7} {name}, {now['kernel']}: {'; '.join(said)}"
    for name in old.keys() - new.keys(): yield f"gone    {name}"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*", metavar="PATTERN", help="parts of names (default: all)")
    parser.add_argument("--refresh", action="store_true", help="accept what there is now")
    given = parser.parse_args()
    wanted = [case for case in cases() if not given.patterns or any(p in case.name for p in given.patterns)]
    known = read()
    if given.refresh:
        found = {case.name: records(case) for case in each(wanted)}
        there = {case.name for case in cases()}
        kept = {name: one for name, one in known.items() if name in there} | found
        print("\n".join(changes(known, kept)) or "nothing changed")
        BASELINE.write_text(render_baseline(dict(sorted(kept.items()))))
        return 0
    lines = [line for case in each(wanted) for line in judge(case, known)]
    print("\n".join(lines) or f"{len(wanted)} cases, none worse by more than {LIMIT:.0%}")
    return 1 if lines else 0


if __name__ == "__main__": sys.exit(main())
