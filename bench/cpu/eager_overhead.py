"""Cost of the hooks in an eager program that has no kernel of tinygrad_nv.

    python bench/cpu/eager_overhead.py [--repeat 300] [--dry]

Small tensors, so that the host's part is nearly all there is. Each repetition runs a program once with the
hooks and once with `hooks.disabled()`, one after the other; the figure is the ratio of the medians. Times are
of the thread's processor (`time.thread_time`), so that others who use the machine do not count.

 CPU, run          realize() of a program that was scheduled before, as in a loop
 CPU, schedule     the same with SCACHE=0: the schedule is made anew each time
 EMU, schedule     DEV=EMU, SCACHE=0, up to the schedule: nothing runs
"""
from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from tinygrad import Tensor
from tinygrad.helpers import Context

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.lib.measure import each, save, table
from tinygrad_nv import hooks

TARGET = 1.10
PROGRAMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a + b": lambda a, b: a + b,
    "((a + b) * a - b).relu()": lambda a, b: ((a + b) * a - b).relu(),
    "where(a > 0.5, a, b)": lambda a, b: (a > 0.5).where(a, b),
    "a.sum()": lambda a, b: a.sum(),
    "a.sum(-1)": lambda a, b: a.sum(-1),
    "a.max(0)": lambda a, b: a.max(0),
    "a.mean(-1)": lambda a, b: a.mean(-1),
    "a.clone()": lambda a, b: a.clone(),
    "a.T.contiguous()": lambda a, b: a.T.contiguous(),
    "a.cat(b)": lambda a, b: a.cat(b),
    "a[3:17, ::2] + 1": lambda a, b: a[3:17, ::2] + 1,
    "a[0, 0]": lambda a, b: a[0, 0].contiguous(),
}


def kinds() -> dict[str, tuple[str, int, Callable[[Tensor], object]]]:
    """Device, SCACHE, and what is done with a result."""
    return {"CPU, run": ("CPU", 1, lambda made: made.realize()),
            "CPU, schedule": ("CPU", 0, lambda made: made.realize()),
            "EMU, schedule": ("EMU", 0, lambda made: made.schedule_linear())}


def time_step(step: Callable[[], object]) -> float:
    """Microseconds of the thread's processor."""
    begun = time.thread_time()
    step()
    return (time.thread_time() - begun) * 1e6


def compare(device: str, program: Callable[[Tensor, Tensor], Tensor], done: Callable[[Tensor], object],
            repeat: int) -> tuple[float, float]:
    """Median microseconds with the hooks, and without."""
    a, b = (Tensor.rand(64, 64, device="CPU").to(device).realize() for _ in range(2))
    def step() -> None: done(program(a, b))
    for _ in range(3):
        step()
        with hooks.disabled(): step()
    gc.collect()
    ours, plain = list[float](), list[float]()
    for _ in range(repeat):
        ours.append(time_step(step))
        with hooks.disabled(): plain.append(time_step(step))
    return median(ours), median(plain)


def main() -> None:
    """Times all programs, and writes the result."""
    parser = argparse.ArgumentParser(description=" ".join((__doc__ or "").split("\n\n")[0].split()))
    parser.add_argument("--repeat", type=int, default=300, help="times each is run (default 300)")
    parser.add_argument("--dry", action="store_true", help="print only")
    args = parser.parse_args()
    wanted = [f"{kind}: {name}" for kind in kinds() for name in PROGRAMS]
    spent: dict[str, tuple[float, float]] = {}
    for name in each(wanted):
        kind, _, program = name.partition(": ")
        device, cache, done = kinds()[kind]
        with Context(SCACHE=cache, DEBUG=0):
            spent[name] = compare(device, PROGRAMS[program], done, args.repeat)
    ratios = {name: ours / plain for name, (ours, plain) in spent.items()}
    print(table(("µs of the processor", "with hooks", "tinygrad alone", "ratio"),
                [(name, f"{ours:.0f}", f"{plain:.0f}", f"{ratios[name]:.3f}")
                 for name, (ours, plain) in spent.items()]))
    print(f"wanted: at most {TARGET:.2f}; largest {max(ratios.values()):.3f}, median "
          f"{median(ratios.values()):.3f}")
    record = {"repeat": args.repeat, "target": TARGET, "load": os.getloadavg(),
              "us": {name: {"with": ours, "without": plain, "ratio": ratios[name]}
                     for name, (ours, plain) in spent.items()}}
    if not args.dry: save("eager_overhead", record)


if __name__ == "__main__": main()
