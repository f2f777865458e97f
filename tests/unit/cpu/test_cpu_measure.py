"""What the machine reads and computes in a second: measured once, kept on disk, the roofline of it."""
from __future__ import annotations

import multiprocessing
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from tinygrad.device import Device
from tinygrad.dtype import dtypes

from tinygrad_nv.cpu import isa, measure
from tinygrad_nv.cpu.isa import AMX, AVX2, AVX2_VNNI, AVX512, AVX512_BF16, ISA, LEVELS, PORTABLE
from tinygrad_nv.cpu.measure import LAUNCH_SECONDS, Rates
from tinygrad_nv.cpu.target import CPU, host

FAST = Rates(2e10, 1e11, 2e11, 4e11)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measure._rates.cache_clear()
    return tmp_path


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> list[CPU]:
    """The machines that were measured."""
    made: list[CPU] = []
    monkeypatch.setattr(measure, "measure_rates", lambda target: made.append(target) or FAST)
    return made


# **** the clock ****

@pytest.mark.parametrize("level", [level for level in LEVELS if not isa.why_not(level)])
def test_every_level_here_is_measured(level: str):
    here = CPU(isa.of_level(level), 2, l3_bytes=1 << 20)
    found = measure.measure_rates(here)
    assert all(1e8 < value < 1e16 for value in asdict(found).values()), found
    # measured by itself where there are instructions; whatever else runs makes the ratio anything
    assert (found.bf16 != found.f32) == here.isa.bf16
    assert (found.s8 != found.f32) == here.isa.vnni


@pytest.mark.parametrize("kind", [PORTABLE, AVX2, AVX2_VNNI, AVX512, AVX512_BF16, AMX], ids=str)
def test_the_kernel_compiles_for_what_is_not_here(kind: ISA):
    code = Device["CPU"].renderer.compiler.compile(measure.measure_kernel(kind, 16).source)
    assert code.startswith(b"\x7fELF")


# **** on disk ****

def test_rates_are_measured_once_and_kept(cache: Path, count: list[CPU]):
    here = host()
    assert measure.load_rates(here) is None
    assert measure.rates(here) == measure.rates(here) == FAST
    measure._rates.cache_clear()
    assert measure.rates(here) == measure.load_rates(here) == FAST
    assert len(count) == 1
    assert measure.path() == cache / "tinygrad_nv" / "cpu.json"


def _asked(here: CPU, found: object) -> None:
    measure._rates.cache_clear()
    found.put(measure.rates(here))  # type: ignore[attr-defined]


def test_another_process_reads_them(count: list[CPU]):
    measure.rates(host())
    made = multiprocessing.get_context("fork").Queue()
    other = multiprocessing.get_context("fork").Process(target=_asked, args=(host(), made))
    other.start()
    assert made.get(timeout=30) == FAST
    other.join()
    assert len(count) == 1


def test_threads_and_level_are_measured_apart(count: list[CPU]):
    here = host()
    other = AVX2 if here.isa == AMX else AMX
    others = [replace(here, threads=here.threads + 1), replace(here, isa=other), replace(here, l1_bytes=1)]
    for each in [here, *others]: measure.rates(each)
    assert count == [here, *others[:2]]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "x"}', '{"format": "tinygrad_nv cpu rates 1"}',
                                  '{"format": "tinygrad_nv cpu rates 1", "rates": {"KEY": 3}}',
                                  '{"format": "tinygrad_nv cpu rates 1", "rates": {"KEY": {"bandwidth": 1}}}',
                                  '{"format": "tinygrad_nv cpu rates 1", "rates": {"KEY": {"bandwidth": -1, '
                                  '"f32": 1, "bf16": 1, "s8": 1}}}', "[" * 100_000])
def test_a_broken_file_is_measured_again(count: list[CPU], text: str):
    here = host()
    measure.path().write_text(text.replace("KEY", measure.key(here)))
    assert measure.rates(here) == FAST
    measure._rates.cache_clear()
    assert measure.rates(here) == FAST
    assert len(count) == 1


def test_a_directory_that_cannot_be_written(count: list[CPU], cache: Path):
    (cache / "tinygrad_nv").write_text("a file")
    assert measure.rates(host()) == measure.rates(host()) == FAST
    assert len(count) == 1


# **** the roofline ****

@pytest.mark.parametrize(("flops", "nbytes", "rate", "seconds"), [
    (0, 2e10, 0.0, 1.0), (1e11, 1e10, 0.0, 1.0), (1e11, 1e10, 2e11, 0.5), (0, 0, 0.0, 0.0)])
def test_the_longer_of_moving_and_computing(flops: float, nbytes: float, rate: float, seconds: float):
    assert FAST.seconds(flops, nbytes, rate) == pytest.approx(seconds + LAUNCH_SECONDS)


def test_the_rate_of_a_dtype():
    kinds = (dtypes.float32, dtypes.float16, dtypes.bfloat16, dtypes.int8, dtypes.uint8)
    assert [FAST.of(kind) / 1e11 for kind in kinds] == [1, 1, 2, 4, 4]
