"""Predicted times of every template's kernels beside those of the last accepted commit. No GPU is needed.

    python bench/timing_gates.py [PATTERN ...]              compares; exit code 1 where a kernel got worse
    python bench/timing_gates.py --refresh [PATTERN ...]    accepts what there is now, and says what changed

Each case of timing_gate_cases.py is built, assembled, and predicted on an H100 (tinygrad_nv/ptx/timing/).
timing_baseline.json has, of each of its kernels, the predicted time, how busy the units are, registers, what
SASS spends on its tensor-core instructions, and where warps wait: cycles of a launch that a warp spends at a
line of PTX, on average. Worse is, of a kernel:

    a time, or instructions around a tensor-core instruction of the main loop, or its additions of float32
    beside a QGMMA, more than LIMIT above the baseline; fewer exponentials while a wgmma is under way; a byte
    that spills; a wgmma that ptxas serialises (C7510, C7511, …), which is an error of the assembly.

The report names the lines of PTX where warps wait longer than they did. Predictions are no measurements, and
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

from measure import each
from timing_gate_cases import GPU_NAME, HOPPER, GateCase, cases

from tinygrad_nv.errors import NVError
from tinygrad_nv.ptx.sass import Loop, main_loop
from tinygrad_nv.ptx.timing.listing import listing
from tinygrad_nv.ptx.timing.model import Timing
from tinygrad_nv.ptx.timing.simulator import REASONS
from tinygrad_nv.tile.database import toolchain
from tinygrad_nv.tile.emulated import timings
from tinygrad_nv.tile.kernel import Chain, TileKernel
from tinygrad_nv.tile.templates import TABLE

BASELINE = Path(__file__).parent / "timing_baseline.json"
LIMIT = 0.03
KEPT, SHOWN = 24, 5     # waits of a kernel
NAMES = re.compile(r"[%$][\w$.]+|\[[^]]*\]")
Record = dict[str, Any]


def records(case: GateCase) -> list[Record]:
    """What the baseline has of a case's kernels. Raises the project's errors where ptxas refuses one, or has
    serialised its wgmmas."""
    made = TABLE.build(case.spec, case.schedule, HOPPER)
    kernels = [kernel for one in ([made.first, made.second] if isinstance(made, Chain) else [made])
               for kernel in one.kernels]
    return [record(case, *pair) for pair in zip(kernels, timings(made, case.spec, GPU_NAME), strict=True)]


def record(case: GateCase, kernel: TileKernel, timing: Timing) -> Record:
    """Of one kernel."""
    used = listing(kernel.ptx, HOPPER.arch).resources[kernel.name]
    loop = main_loop(sorted(timing.code.instructions, key=lambda one: one.address))
    return {"kernel": kernel.name, "schedule": str(case.schedule), "us": round(timing.seconds * 1e6, 3),
            "cycles": timing.cycles, "limiter": timing.limiter, "registers": used.registers,
            "spilled_bytes": used.spill_store_bytes + used.spill_load_bytes,
            "units": {name: round(share, 3) for name, share in timing.units.items() if share >= 0.01},
            "loop": {} if loop is None else facts(loop), "waits": waits(timing, kernel.ptx)}


def facts(loop: Loop) -> dict[str, float]:
    """What a main loop spends on its tensor-core instructions."""
    made = {"instructions around a tensor-core instruction": round(loop.around / loop.tensor, 3)}
    groups = loop.after_waits("MUFU.EX2")
    if any(count for _, count in groups):
        made["exponentials while a wgmma is under way"] = sum(count for left, count in groups if left)
    if loop.counts["QGMMA"]:
        made["additions beside a QGMMA"] = round(loop.counts["FADD"] / loop.counts["QGMMA"], 3)
    return made


def waits(timing: Timing, text: str) -> list[list[Any]]:
    """Cycles that a warp waits, on average, the most first: PTX, SASS, for what, cycles, the line. Lines that
    differ in registers alone are one; so is what an instruction's own issue takes."""
    job, run = timing.recorded[0]
    lines = text.splitlines()
    scale = timing.cycles / max(1, run.cycles) / len(job.warps)
    spent: dict[tuple[str, str, str], float] = defaultdict(float)
    longest: dict[tuple[str, str, str], tuple[int, int]] = {}
    for number, one in enumerate(timing.code.instructions):
        for reason, cycles in enumerate(run.waited[number].tolist()):
            if not cycles: continue
            said = NAMES.sub("_", lines[one.ptx_line - 1].strip()) if one.ptx_line else "no line"
            key = said, one.opcode + one.modifiers, REASONS[reason]
            spent[key] += cycles * scale
            longest[key] = max(longest.get(key, (0, 0)), (cycles, one.ptx_line))
    most = sorted(spent, key=lambda key: -spent[key])[:KEPT]
    return [[*key, round(spent[key], 1), longest[key][1]] for key in most]


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
    """Where warps wait longer than they did, and what else is different: lines of a report."""
    before = {tuple(one[:3]): one[3] for one in old["waits"]}
    least = old["waits"][-1][3] if len(old["waits"]) == KEPT else 0.0
    grown = sorted(((one[3] - before.get(tuple(one[:3]), least), one) for one in new["waits"]),
                   key=lambda pair: -pair[0])
    out = []
    for more, (ptx, sass, reason, cycles, line) in grown[:SHOWN]:
        if more <= 0.002 * new["cycles"]: break
        was = before.get((ptx, sass, reason))
        words = f"was {was:,.0f}" if was is not None else f"was below {least:,.0f}" if least else "was none"
        out.append(f"{more:+10,.0f} cycles a warp at line {line}: {ptx[:72]}  [{sass} for {reason}: "
                   f"{words}, now {cycles:,.0f}]")
    for name in ("schedule", "limiter", "registers"):
        if old[name] != new[name]: out.append(f"{name}: was {old[name]}, now {new[name]}")
    return out


def judged(case: GateCase, baseline: Mapping[str, Sequence[Record]]) -> list[str]:
    """Lines of a report on a case that got worse; empty where it did not."""
    if (known := baseline.get(case.name)) is None:
        return [f"{case.name}: not in {BASELINE.name}: python bench/timing_gates.py --refresh"]
    try: found = records(case)
    except NVError as error: return [f"{case.name}: {error.found}"]
    return compared(case.name, known, found)


def compared(name: str, known: Sequence[Record], found: Sequence[Record]) -> list[str]:
    """The same of records."""
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
    return known


def written(known: Mapping[str, Sequence[Record]]) -> str:
    """A baseline's text, with each wait in a line of its own."""
    text = json.dumps({"gpu": GPU_NAME, "toolchain": toolchain(), "cases": known}, indent=1)
    def joined(found: re.Match[str]) -> str: return re.sub(r"\s*\n\s*", " ", found[0])
    return re.sub(r"\[\s+\"[^\[\]]*\]|\{[^\[\]{}]*\}", joined, text) + "\n"


def changes(old: Mapping[str, Sequence[Record]], new: Mapping[str, Sequence[Record]]) -> Iterator[str]:
    """What a refresh changes: time and facts of each kernel that is not as it was."""
    for name, found in new.items():
        for number, now in enumerate(found):
            before = old[name][number] if len(old.get(name, ())) == len(found) else None
            if before is None:
                yield f"new     {name}, {now['kernel']}: {now['us']:.1f} us, {now['limiter']}"
                continue
            ratio = now["us"] / before["us"] - 1
            said = [f"{before['us']:.1f} us, now {now['us']:.1f} us ({ratio:+.1%})"] if abs(ratio) > 1e-3 else []
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
        BASELINE.write_text(written(dict(sorted(kept.items()))))
        return 0
    lines = [line for case in each(wanted) for line in judged(case, known)]
    print("\n".join(lines) or f"{len(wanted)} cases, none worse by more than {LIMIT:.0%}")
    return 1 if lines else 0


if __name__ == "__main__": sys.exit(main())
