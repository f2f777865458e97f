"""Instruction sets, on processors that are made up: what is found, what is refused, what is asked for;
AVX-VNNI by its machine code; and how many threads there are, on machines made of files."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tinygrad.device import Device
from tinygrad.dtype import dtypes
from tinygrad.helpers import Context

from tests.support.cpu import cpu_gemv_case
from tests.support.cpu.cpu_quant_case import BF16, TYPES, built, default, matmul, run, stored, tiles
from tests.support.tile.gemm_case import arguments, product, reference
from tinygrad_nv.cli import doctor, doctor_cpu
from tinygrad_nv.cpu import isa, measure, target
from tinygrad_nv.cpu.gemm.blocked import kernel as gemm
from tinygrad_nv.cpu.isa import AMX, AVX2, AVX2_VNNI, AVX512, AVX512_BF16, ISA, LEVELS, NEEDED, PORTABLE
from tinygrad_nv.cpu.kernel import CPUKernel, kernel
from tinygrad_nv.cpu.measure import Rates
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.errors import ConfigError
from tinygrad_nv.runtime.cpu import program as cpu_program
from tinygrad_nv.runtime.cpu import threads
from tinygrad_nv.runtime.cpu.available import Available, cfs, cpu_max, groups, look
from tinygrad_nv.runtime.cpu.pool import pool
from tinygrad_nv.runtime.cpu.program import LoadedKernel, load
from tinygrad_nv.tile.templates import TABLE
from tinygrad_nv.toolchain import compile_object

OLD = frozenset({"sse2"})
HASWELL = OLD | set(NEEDED["avx2"])
ALDER_LAKE = HASWELL | {"avx_vnni"}
SKYLAKE = HASWELL | set(NEEDED["avx512"])
ZEN4 = SKYLAKE | {"avx512_bf16", "avx512_vnni"}
SAPPHIRE = ZEN4 | {"amx_tile", "amx_bf16", "amx_int8"}
DENIED = "arch_prctl: Operation not permitted"


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch):
    """Makes this machine another."""
    def made(flags: frozenset[str], machine: str = "x86_64", refused: str = "") -> None:
        monkeypatch.setattr(isa, "flags", lambda: flags)
        monkeypatch.setattr(isa, "amx_refused", lambda: refused)
        monkeypatch.setattr(isa.platform, "machine", lambda: machine)
        monkeypatch.setattr(measure, "rates", lambda machine: Rates(2e10, 1e11, 2e11, 4e11))
        for cached in (isa.best, isa.of_level): cached.cache_clear()
    yield made
    for cached in (isa.best, isa.of_level): cached.cache_clear()


CASES = [(OLD, "portable", "the processor lacks avx2, fma, f16c"), (HASWELL, "avx2", "lacks avx512f"),
         (ALDER_LAKE, "avx2-vnni", "lacks avx512f"),
         (SKYLAKE, "avx512", "lacks avx512_bf16, avx512_vnni, amx_tile, amx_bf16, amx_int8"),
         (ZEN4, "avx512-bf16-vnni", "the processor lacks amx_tile, amx_bf16, amx_int8"),
         (SAPPHIRE, "amx", "")]


@pytest.mark.parametrize(("flags", "found", "lacks"), CASES, ids=[case[1] for case in CASES])
def test_the_best_of_what_a_processor_has(processor, flags: frozenset[str], found: str, lacks: str):
    processor(flags)
    assert str(isa.detect()) == found
    higher = [level for level in LEVELS if isa.why_not(level)]
    assert isa.there() + higher == list(LEVELS)
    if lacks: assert lacks in isa.why_not(higher[0])
    line = doctor_cpu.instructions()
    assert (line.state, line.fix) == ("ok", "")
    assert line.what.startswith(f"C for {found}, vectors of ")
    assert line.what.endswith(isa.why_not(higher[0]) if higher else "512 bits")


def test_an_arm_processor(processor):
    processor(SAPPHIRE, "aarch64")
    assert isa.detect() == PORTABLE
    assert isa.why_not("avx2") == "aarch64 is not x86-64"
    assert doctor_cpu.instructions().what.endswith("; not avx2: aarch64 is not x86-64")


def test_permission_refused(processor, monkeypatch: pytest.MonkeyPatch):
    processor(SAPPHIRE, refused=DENIED)
    assert str(isa.detect()) == "avx512-bf16-vnni"
    assert isa.why_not("amx") == f"the system refuses the use of AMX tiles ({DENIED})"
    line = doctor_cpu.instructions()
    assert line.what.endswith(f"not amx: the system refuses the use of AMX tiles ({DENIED})")
    assert "Linux 5.16" in line.fix
    assert "seccomp" in line.fix
    monkeypatch.setenv("NV_CPU_ISA", "amx")
    with pytest.raises(ConfigError, match="NV_CPU_ISA=amx: the system refuses"): isa.detect()


@pytest.mark.parametrize(("asked", "found"), [("portable", "portable"), ("avx2", "avx2"), ("auto", "amx"),
                                              ("avx512", "avx512-bf16-vnni"), ("amx", "amx")])
def test_less_than_there_is(processor, monkeypatch: pytest.MonkeyPatch, asked: str, found: str):
    processor(SAPPHIRE)
    monkeypatch.setenv("NV_CPU_ISA", asked)
    assert str(isa.detect()) == found
    assert ("NV_CPU_ISA; amx is there" in doctor_cpu.instructions().what) == (found != "amx")


@pytest.mark.parametrize("asked", ["avx512", "amx"])
def test_more_than_there_is(processor, monkeypatch: pytest.MonkeyPatch, asked: str):
    processor(HASWELL)
    monkeypatch.setenv("NV_CPU_ISA", asked)
    with pytest.raises(ConfigError, match=f"NV_CPU_ISA={asked}: the processor lacks avx512f") as caught:
        isa.detect()
    assert (caught.value.expected, caught.value.fix) == (
        "one of portable, avx2", "unset NV_CPU_ISA for the best of them")
    line = doctor_cpu.instructions()
    assert (line.state, line.fix) == ("broken", caught.value.fix)


def test_the_text_of_cpuinfo():
    text = "processor\t: 0\nflags\t\t: fpu sse2 avx2\n\nprocessor\t: 1\nflags\t\t: fpu\n"
    assert isa.flags_of(text) == {"fpu", "sse2", "avx2"}
    assert isa.flags_of("processor\t: 0\nFeatures\t: fp asimd\n") == frozenset()
    assert isa.flags_of("") == frozenset()


def test_the_system_is_asked_once_and_answers():
    words = isa.amx_refused()
    assert words == "" or words.startswith(("arch_prctl: ", isa.sys.platform))


@pytest.mark.parametrize(("kind", "lanes", "registers", "target"), [
    (PORTABLE, 4, 16, ""), (AVX2, 8, 16, "avx2,fma,f16c"),
    (AVX2_VNNI, 8, 16, "avx2,fma,f16c,avxvnni"), (AVX512, 16, 32, "avx512vl"),
    (AVX512_BF16, 16, 32, "avx512vl,avx512bf16,avx512vnni"), (AMX, 16, 32, "amx-tile,amx-bf16,amx-int8"),
    (ISA("amx", bf16=True, vnni=True, emulated=True), 16, 32, "")], ids=str)
def test_what_a_level_is(kind: ISA, lanes: int, registers: int, target: str):
    assert (kind.lanes, kind.registers) == (lanes, registers)
    assert kind.clang.endswith(target)
    assert bool(kind.clang) == bool(target)


# **** doctor ****

def test_kernels_are_switched_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NV_CPU", "0")
    assert doctor_cpu.instructions().what == doctor_cpu.speed().what == "switched off: NV_CPU=0"


@pytest.mark.parametrize(("found", "asked", "what", "fix"), [
    (Available(8, 8), 0, "8 on 8 cores", ""),
    (Available(8, 2), 0, "2 on 8 cores: the affinity mask leaves 2 of 8 cores", ""),
    (Available(8, 8, 3.5, "cpu.max of cgroup /a"), 0,
     "3 on 8 cores: cpu.max of cgroup /a gives 3.5 cores' worth of time", ""),
    (Available(1, 1), 0, "1 on 1 core", ""),
    (Available(8, 8), 4, "4 on 8 cores, by NUM_CPU_THREADS", ""),
    (Available(8, 2), 6, "6 on 8 cores, by NUM_CPU_THREADS: the affinity mask leaves 2 of 8 cores",
     "2 can run at the same time: NUM_CPU_THREADS=2")])
def test_threads_and_why_not_more(monkeypatch: pytest.MonkeyPatch, found: Available, asked: int, what: str,
                                  fix: str):
    monkeypatch.delenv("NUM_CPU_THREADS", raising=False)
    monkeypatch.setattr(threads, "available", lambda: found)
    monkeypatch.setattr(threads, "_DEFAULT", 8)
    with Context(NUM_CPU_THREADS=asked or 8):
        line = doctor_cpu.cores()
    assert (line.state, line.what, line.fix) == ("ok", what, fix)


def test_rates(processor, monkeypatch: pytest.MonkeyPatch, tmp_path):
    processor(HASWELL)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measure, "processor", lambda: "a processor")
    assert doctor_cpu.speed().what == ("20 GB/s read, 100 GFLOP/s f32, 200 GFLOP/s bf16, 400 GOP/s s8 on "
                                       f"a processor; kept in {tmp_path}/tinygrad_nv/cpu.json")


def test_doctor_has_lines_of_the_cpu(processor):
    processor(SKYLAKE)
    subjects = [line.subject for line in doctor.examine()]
    at = subjects.index("C compiler") + 1
    assert subjects[at:at + 3] == ["CPU kernels", "CPU threads", "CPU rates"]


# **** AVX-VNNI ****


TARGET = CPU(AVX2_VNNI, 2)
BYTES = product(33, 50, 90, dtypes.int8)
QUANTISED = matmul(replace(TYPES["Q6_K"], layout="tiles"), 3, 21, 512, BF16, int8=True)


def quantised() -> CPUKernel: return TABLE.build(QUANTISED, default(QUANTISED, AVX2_VNNI)[1], TARGET)


def of_bytes() -> CPUKernel: return gemm.build(BYTES, gemm.default(BYTES, TARGET))


@pytest.mark.parametrize("made", [quantised, of_bytes])
def test_machine_code(made):
    """For a processor that has no more than the level says: VPDPBUSD of 256 bits by VEX, none by EVEX."""
    compiler = Device["CPU"].renderer.compiler
    plain = ["-march=x86-64" if word.startswith("-march") else word for word in compiler.arguments]
    assert plain != compiler.arguments
    code = compile_object(compiler.found, plain, made().source)
    at = range(len(code) - 4)
    vex = [i for i in at if code[i] == 0xc4 and code[i + 1] & 31 == 2 and code[i + 2] & 0x87 == 5
           and code[i + 3] == 0x50]
    assert len(vex) >= 8
    assert not [i for i in at if code[i] == 0x62 and code[i + 1] & 7 == 2 and code[i + 2] & 0x83 == 1
                and code[i + 4] == 0x50]


def loaded(kernel: CPUKernel) -> LoadedKernel:
    """With the encoding that this processor has."""
    if "avx_vnni" in isa.flags(): return load(kernel)
    if not {"avx512_vnni", "avx512vl"} <= isa.flags(): pytest.skip("no VPDPBUSD of 256 bits here")
    source = kernel.source.replace("%{vex%} ", "").replace("avxvnni", "avx512vl,avx512vnni")
    assert source != kernel.source
    return load(replace(kernel, source=source))


def test_quantised_matrices():
    """The same bits as AVX2 without them."""
    x = np.random.default_rng(0).standard_normal((3, 512)).astype(np.float32)
    given = tiles(TYPES["Q6_K"], 21, 512, stored(TYPES["Q6_K"], 21, 512, 1))
    want = run(built(QUANTISED, isa.AVX2), QUANTISED, x, given)
    np.testing.assert_array_equal(run(loaded(quantised()), QUANTISED, x, given), want)


def test_bytes():
    given = arguments(BYTES)
    assert torch.equal(cpu_gemv_case.run(loaded(of_bytes()), BYTES, given), reference(BYTES, given))


# **** threads ****


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
