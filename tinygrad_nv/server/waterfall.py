"""A breakdown of the startup time, without gaps.

Protocol: `Waterfall()` starts with the process, not with the object: the interpreter's start and imports are
its first stage. `mark(name)` assigns all the time since the last mark to `name`, so the stages add up to the
total. `lines()` shows them, each with a bar at its place.
"""
from __future__ import annotations

import os
import time
from pathlib import Path

BAR = 40


def process_age_s() -> float:
    """Seconds since this process was started, to 10 ms; elsewhere than on Linux, its seconds of work."""
    try:
        # field 22 behind the name, which may hold spaces and parentheses
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError): return time.process_time()


class Waterfall:
    """The stages of a start: name to seconds, in the order of their first marks."""

    def __init__(self) -> None:
        self.started = time.perf_counter() - process_age_s()
        self.last = self.started
        self.stages: dict[str, float] = {}

    @property
    def total_s(self) -> float:
        """Seconds from the process's start to the last mark."""
        return self.last - self.started

    def mark(self, name: str) -> None:
        """Assigns the time since the last mark to `name`."""
        now = time.perf_counter()
        spent, self.last = now - self.last, now
        self.stages[name] = self.stages.get(name, 0.0) + spent

    def lines(self) -> list[str]:
        """One line for each stage, and their sum."""
        width, total, at, out = max(map(len, self.stages)), self.total_s or 1.0, 0.0, []
        for name, seconds in self.stages.items():
            first, last = round(BAR * at / total), round(BAR * (at + seconds) / total)
            bar = (" " * first + "█" * max(1, last - first)).ljust(BAR)
            out.append(f"{name:{width}} {seconds:8.3f} s  |{bar[:BAR]}|")
            at += seconds
        return [*out, f"{'sum':{width}} {total:8.3f} s"]
