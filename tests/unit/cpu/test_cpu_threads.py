"""How many threads there are, on machines made of files: masks, quotas of both kinds of control groups."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tinygrad.helpers import Context

from tinygrad_nv.cpu import target
from tinygrad_nv.cpu.isa import PORTABLE
from tinygrad_nv.cpu.kernel import kernel
from tinygrad_nv.runtime.cpu import program as cpu_program
from tinygrad_nv.runtime.cpu import threads
from tinygrad_nv.runtime.cpu.available import Available, cfs, cpu_max, groups, look
from tinygrad_nv.runtime.cpu.pool import pool

FIRST = "9:name=systemd:/x\n4:cpu,cpuacct:/docker/abc\n3:cpuset:/\n0::/system.slice\n"


def made(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(("text", "cores"), [
    ("200000 100000\n", 2.0), ("150000 100000", 1.5), ("max 100000\n", None), ("", None), ("100000", None),
    ("x y", None), ("100000 0", None), ("-1 100000", None)])
def test_cpu_max(text: str, cores: float | None):
    assert cpu_max(text) == cores


@pytest.mark.parametrize(("quota", "period", "cores"), [
    ("50000\n", "100000\n", 0.5), ("-1\n", "100000\n", None), ("", "100000", None), ("400000", "", None)])
def test_cfs(quota: str, period: str, cores: float | None):
    assert cfs(quota, period) == cores


@pytest.mark.parametrize(("text", "paths"), [
    (FIRST, ("/system.slice", "/docker/abc")), ("0::/\n", ("/", "/")), ("", ("/", "/")),
    ("0::/a:b/c\n", ("/a:b/c", "/")), ("nonsense\n2:cpuset:/cpu\n", ("/", "/"))])
def test_the_groups_of_a_process(text: str, paths: tuple[str, str]):
    assert groups(text) == paths


@pytest.mark.parametrize(("files", "count", "why"), [
    ({}, 8, ""),
    ({"sys/fs/cgroup/cpu.max": "300000 100000"}, 3, "cpu.max of cgroup / gives 3 cores' worth of time"),
    ({"sys/fs/cgroup/cpu.max": "max 100000"}, 8, ""),
    ({"sys/fs/cgroup/cpu.max": "1600000 100000"}, 8, ""),
    # the least of a group and of those above it
    ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/b/cpu.max": "500000 100000",
      "sys/fs/cgroup/a/cpu.max": "250000 100000"}, 2, "cpu.max of cgroup /a gives 2.5 cores' worth of time"),
    # cgroup 1, by its path and at the root of a container's mount
    ({"proc/self/cgroup": FIRST, "sys/fs/cgroup/cpu/docker/abc/cpu.cfs_quota_us": "400000",
      "sys/fs/cgroup/cpu/docker/abc/cpu.cfs_period_us": "100000"}, 4,
     "cpu.cfs_quota_us of cgroup /docker/abc gives 4 cores' worth of time"),
    ({"proc/self/cgroup": FIRST, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000",
      "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000"}, 1,
     "cpu.cfs_quota_us of cgroup / gives 0.5 cores' worth of time"),
    ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 8, ""),
    ({"proc/self/cgroup": "0::/../../etc", "etc/cpu.max": "100000 100000"}, 8, "")])
def test_quotas(tmp_path: Path, files: dict[str, str], count: int, why: str):
    found = look(made(tmp_path, files), cores=8, mask=8)
    assert (found.threads, found.why) == (count, why)


def test_a_mask_and_a_quota(tmp_path: Path):
    found = look(made(tmp_path, {"sys/fs/cgroup/cpu.max": "200000 100000"}), cores=16, mask=4)
    assert found.threads == 2
    assert found.why == ("the affinity mask leaves 4 of 16 cores, "
                         "cpu.max of cgroup / gives 2 cores' worth of time")
    found = look(made(tmp_path, {"sys/fs/cgroup/cpu.max": "600000 100000"}), cores=16, mask=4)
    assert (found.threads, found.why) == (4, "the affinity mask leaves 4 of 16 cores")


def test_what_this_process_has():
    found = threads.available()
    assert 1 <= found.threads <= found.cores


def test_the_default_of_tinygrad_is_cut_to_what_there_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NUM_CPU_THREADS", raising=False)
    monkeypatch.setattr(threads, "available", lambda: Available(64, 64, 3.5, "cpu.cfs_quota_us of cgroup /"))
    monkeypatch.setattr(threads, "_DEFAULT", 64)
    with Context(NUM_CPU_THREADS=64):
        assert threads.threads() == target.host().threads == 3
        # who sets it is obeyed
        monkeypatch.setenv("NUM_CPU_THREADS", "64")
        assert threads.threads() == target.host().threads == 64
    monkeypatch.delenv("NUM_CPU_THREADS")
    with Context(NUM_CPU_THREADS=7): assert threads.threads() == 7


def test_parts_are_shared_out_among_as_many(monkeypatch: pytest.MonkeyPatch):
    """A pool of tinygrad's default would have threads that a quota stops while others wait for them."""
    monkeypatch.setattr(cpu_program, "threads_to_use", lambda: 1)
    made = []
    monkeypatch.setattr(cpu_program, "pool", lambda count: made.append(count) or pool(count))
    out = np.zeros(8, np.int32)
    cpu_program.load(kernel("parts", PORTABLE, "out[core_id] = core_id;", [("int", "out")], [], parts=8))(out)
    assert made == [1]
    assert out.tolist() == list(range(8))
