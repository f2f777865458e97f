"""Recording a launch for its prediction: warps that load run alone, where that changes nothing."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bench.lib.specs import matmul
from tinygrad_nv.ptx.emulator import Emulator
from tinygrad_nv.ptx.timing import model, recording
from tinygrad_nv.ptx.timing.gpu import figures
from tinygrad_nv.ptx.timing.l2 import read_bytes
from tinygrad_nv.ptx.timing.recording import Recording, counted
from tinygrad_nv.tile.emulated import timings
from tinygrad_nv.tile.gemm.schedules import Wgmma
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

HEAD = """.version 8.0
.target sm_90a
.address_size 64
.visible .entry kernel(.param .u64 a, .param .u64 flag)
{
    .reg .pred %p<3>;
    .reg .b32 %r<8>;
    .reg .b64 %d<5>;
    .shared .align 4 .b8 told[4];
    ld.param.u64 %d1, [a];
    ld.param.u64 %d2, [flag];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, told;
"""
# the second of two warps reads a block that the first chooses: its own, or in the other text by itself
LOADED = """    shr.u32 %r4, %r1, 5;
    setp.ne.u32 %p1, %r4, 0;
    @%p1 bra LOADS;
    shl.b32 %r5, %r2, 7;
    st.shared.u32 [%r3], %r5;
LOADS:
    bar.sync 0;
    @!%p1 bra DONE;
    CHOSEN
    and.b32 %r6, %r1, 31;
    mad.lo.u32 %r5, %r6, 4, %r5;
    cvt.u64.u32 %d3, %r5;
    add.u64 %d3, %d1, %d3;
    ld.global.u32 %r7, [%d3];
    st.global.u32 [%d3], %r7;
DONE:
    ret;
}
"""
# all clusters but the last wait for it
WAITING = """    mov.u32 %r4, %nctaid.x;
    sub.u32 %r4, %r4, 1;
    setp.eq.u32 %p1, %r2, %r4;
    @%p1 bra LAST;
AGAIN:
    ld.acquire.gpu.global.u32 %r5, [%d2];
    setp.eq.u32 %p2, %r5, 0;
    @%p2 bra AGAIN;
    bra DONE;
LAST:
    mov.u32 %r6, 1;
    st.release.gpu.global.u32 [%d2], %r6;
DONE:
    ret;
}
"""


def record(monkeypatch: pytest.MonkeyPatch, run) -> Recording:
    """The recording of the prediction that `run` asks for."""
    kept: list[Recording] = []
    with monkeypatch.context() as patched:
        original = model.record_launch
        patched.setattr(model, "record_launch", lambda *words: kept.append(original(*words)) or kept[-1])
        run()
    return kept[0]


def launch(text: str, threads: int) -> None:
    emu = Emulator("sm_90a")
    a, flag = emu.alloc(np.zeros(4 * 32, np.int32)), emu.alloc(np.zeros(1, np.int32))
    emu.launch(HEAD + text, (4, 1, 1), (threads, 1, 1), [a, flag], timing="h100")


@pytest.mark.parametrize("streamed", [False, True])
def test_loading_warps_alone_read_what_they_read_beside_others(streamed, monkeypatch: pytest.MonkeyPatch):
    """With stream-K other warps read sums of parts of a tile, but in the first CTA: 0.3 % of the bytes."""
    target = GPU("sm_90a", 6)
    small = replace(figures("h100"), sms=6)
    monkeypatch.setattr(model, "figures", lambda _: small)
    spec, schedule = matmul(128 * 5, 128 * 3, 8192), Wgmma().block(128, 128).k(64).stages(2)
    if streamed: schedule = schedule.stream_k()
    made = TABLE.build(spec, schedule, target)
    found = []
    for readers in (recording._readers, lambda _: 0):
        monkeypatch.setattr(recording, "_readers", readers)
        found.append(record(monkeypatch, lambda: timings(made, spec, "h100")))
    alone, beside = found
    assert 0 < bin(alone.tapes.readers).count("1") < 4
    assert len(counted(alone.tapes)) < len(counted(beside.tapes)) == len(alone.tapes.warps)
    assert 0.995 * beside.reads.nbytes < alone.reads.nbytes <= beside.reads.nbytes
    assert (alone.reads.nbytes == beside.reads.nbytes) is not streamed
    assert all(beside.reads.first[source] == share for source, share in alone.reads.first.items())


def test_a_warp_that_is_told_what_to_load_does_not_run_alone(monkeypatch: pytest.MonkeyPatch):
    for chosen, alone in (("shl.b32 %r5, %r2, 7;", True), ("ld.shared.u32 %r5, [%r3];", False)):
        found = record(monkeypatch, lambda: launch(LOADED.replace("CHOSEN", chosen), 64))  # noqa: B023
        assert found.tapes.readers == (2 if alone else 0)
        assert found.reads.nbytes == 4 * 128
        assert sum(int(read_bytes(each.notes).sum()) for each in found.tapes.warps) == 128


def test_clusters_that_wait_for_others_are_recorded_beside_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recording, "LIMIT", 100_000)
    found = record(monkeypatch, lambda: launch(WAITING, 32))
    assert found.tapes.limit == 0
    assert found.reads.nbytes > 0
