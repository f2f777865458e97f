"""An instruction set that was asked for, and that this machine lacks."""
from __future__ import annotations

import pytest

from tinygrad_nv import Tensor
from tinygrad_nv.cpu import isa
from tinygrad_nv.errors import ConfigError


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor without AVX."""
    monkeypatch.setattr(isa, "flags", lambda: frozenset({"sse2"}))
    monkeypatch.setattr(isa.platform, "machine", lambda: "x86_64")
    isa.best.cache_clear()
    yield
    isa.best.cache_clear()


@pytest.mark.usefixtures("old")
@pytest.mark.parametrize("asked", ["avx2", "avx512", "amx"])
def test_a_level_the_processor_lacks(monkeypatch: pytest.MonkeyPatch, asked: str):
    x, w = (Tensor.ones(rows, 64, device="CPU").contiguous().realize() for rows in (1, 32))
    monkeypatch.setenv("NV_CPU_ISA", asked)
    with pytest.raises(ConfigError, match=f"NV_CPU_ISA={asked}: the processor lacks ") as caught:
        (x @ w.T).realize()
    assert str(caught.value).splitlines()[1:] == ["  expected: one of portable",
                                                  "  to fix:   unset NV_CPU_ISA for the best of them"]


@pytest.mark.usefixtures("old")
def test_the_command_line_says_so(command, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NV_CPU_ISA", "amx")
    command("explain", "--gemm", "4x64x64", "--arch", "cpu").refused(
        "NV_CPU_ISA=amx: the processor lacks avx512f", "expected: one of portable",
        "to fix:   unset NV_CPU_ISA for the best of them")


def test_a_level_there_is_not(command, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NV_CPU_ISA", "sse2")
    command("explain", "--gemm", "4x64x64", "--arch", "cpu").refused(
        "NV_CPU_ISA=sse2", "one of auto, portable, avx2, avx512, amx",
        "unset NV_CPU_ISA for its default, auto")
