"""The cores that this process may compute on, and what limits them.

Protocol: `available()` is the least of what the machine has, what the affinity mask leaves (taskset, cpusets)
and what the control groups of this process and all above them may use: cpu.max of cgroup 2,
cpu.cfs_quota_us over cpu.cfs_period_us of cgroup 1. A fraction of a core is cut off: threads beyond the quota
are stopped for the rest of each period while the others wait for them.

Everything is read below a root directory, so that tests can make up a machine. Only the standard library is
imported: launchers of ranks ask, too. Source: Linux, Documentation/admin-guide/cgroup-v2.rst and
scheduler/sched-bwc.rst.
"""
from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_MOUNTS = ("sys/fs/cgroup/cpu", "sys/fs/cgroup/cpu,cpuacct", "sys/fs/cgroup/cpuacct,cpu")


@dataclass(frozen=True)
class Available:
    """Cores of the machine, those the mask leaves, and cores' worth of time that `group` may use (None: any
    amount)."""
    cores: int
    mask: int
    quota: float | None = None
    group: str = ""

    @property
    def threads(self) -> int:
        """Threads that can run at the same time, at least 1."""
        return max(1, min(self.cores, self.mask, self.cores if self.quota is None else int(self.quota)))

    @property
    def why(self) -> str:
        """Why these are fewer than the machine has cores; "" if they are not."""
        words = []
        if self.mask < self.cores: words.append(f"the affinity mask leaves {self.mask} of {self.cores} cores")
        if self.quota is not None and self.quota < min(self.cores, self.mask):
            words.append(f"{self.group} gives {self.quota:.3g} cores' worth of time")
        return ", ".join(words)


@functools.cache
def available() -> Available:
    """Returns what this process has, looked up once."""
    return look(Path("/"))


def look(root: Path, cores: int = 0, mask: int = 0) -> Available:
    """Returns what a machine has whose files lie below `root`; cores and mask by default this process's."""
    cores = cores or os.cpu_count() or 1
    if not mask: mask = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    limits = [*_quotas(root)]
    return Available(cores, mask, *min(limits)) if limits else Available(cores, mask)


# **** control groups ****

def cpu_max(text: str) -> float | None:
    """Cores' worth of time by the text of cpu.max; None for any amount, or where it is something else."""
    quota, _, period = text.strip().partition(" ")
    return _ratio(quota, period)


def cfs(quota: str, period: str) -> float | None:
    """Returns the CPUs of a quota of cgroup 1, where -1 is any amount."""
    return _ratio(quota, period)


def _ratio(quota: str, period: str) -> float | None:
    try: used, of = int(quota), int(period)
    except ValueError: return None
    return used / of if used > 0 and of > 0 else None


def groups(text: str) -> tuple[str, str]:
    """The paths of a process's groups in cgroup 2 and in cgroup 1's controller of time, by the text of
    /proc/self/cgroup; "/" where it says nothing."""
    second = first = "/"
    for line in text.splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers == "" and path.startswith("/"): second = path
        elif "cpu" in controllers.split(","): first = path or "/"
    return second, first


def _quotas(root: Path) -> list[tuple[float, str]]:
    """Limits and what sets them. The files of the root of a mount are those of a container's group, whose
    path in /proc/self/cgroup may be the one it has outside."""
    second, first = groups(_text(root / "proc/self/cgroup"))
    found = []
    for group in _upwards(second):
        limit = cpu_max(_text(root / "sys/fs/cgroup" / group / "cpu.max"))
        if limit is not None: found.append((limit, f"cpu.max of cgroup /{group}"))
    for mount in _MOUNTS:
        for group in _upwards(first):
            at = root / mount / group
            limit = cfs(_text(at / "cpu.cfs_quota_us"), _text(at / "cpu.cfs_period_us"))
            if limit is not None: found.append((limit, f"cpu.cfs_quota_us of cgroup /{group}"))
    return found


def _upwards(path: str) -> list[str]:
    """A group and those above it, relative to the mount, the root (as "") last."""
    parts = PurePosixPath(path).parts[1:]
    if ".." in parts: parts = ()    # a group outside of the namespace
    return ["/".join(parts[:n]) for n in range(len(parts), -1, -1)]


def _text(file: Path) -> str:
    try: return file.read_text()
    except (OSError, UnicodeDecodeError): return ""
