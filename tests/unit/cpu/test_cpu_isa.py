"""Instruction sets, on processors that are made up: what is found, what is refused, what is asked for; and
what doctor says of them."""
from __future__ import annotations

import pytest
from tinygrad.helpers import Context

from tinygrad_nv.cli import doctor, doctor_cpu
from tinygrad_nv.cpu import isa, measure
from tinygrad_nv.cpu.isa import AMX, AVX2, AVX2_VNNI, AVX512, AVX512_BF16, ISA, LEVELS, NEEDED, PORTABLE
from tinygrad_nv.cpu.measure import Rates
from tinygrad_nv.errors import ConfigError
from tinygrad_nv.runtime.cpu import threads
from tinygrad_nv.runtime.cpu.available import Available

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
