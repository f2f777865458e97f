"""bench/timing/mutate.py on a kernel of the pairs: what it breaks, and what the emulator says of it."""
from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from bench.timing import mutate

RING = """.version 8.6
.target sm_90a
.address_size 64
.shared .align 128 .b8 line[512];
.shared .align 8 .b64 bar[2];
.visible .entry add_up(.param .u64 from, .param .u64 to) .reqntid 128
{
    .reg .pred %p<3>; .reg .b32 %r<6>; .reg .b64 %d<4>;
    ld.param.u64 %d0, [from]; ld.param.u64 %d1, [to]; mov.u32 %r0, %tid.x;
    setp.ne.u32 %p0, %r0, 0;
    @%p0 bra READY;
    mbarrier.init.shared::cta.b64 [bar], 1;
    fence.proxy.async.shared::cta;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 512;
    mov.u32 %r1, line; mov.u32 %r2, bar;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d0], 512, [%r2];
READY:
    bar.sync 0;
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p1, [bar], 0;
    @!%p1 bra WAIT;
    mov.u32 %r1, line; shl.b32 %r2, %r0, 2; add.u32 %r1, %r1, %r2;
    ld.shared.b32 %r3, [%r1]; add.u32 %r3, %r3, 1; st.shared.b32 [%r1], %r3;
    fence.proxy.async.shared::cta;
    bar.sync 1, 128;
    @%p0 bra END;
    mov.u32 %r1, line;
    cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r1], 512;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
END:
    fence.acq_rel.gpu;
    ret;
}
"""


def test_what_is_broken():
    made = mutate.mutants(RING)
    assert [(one.line, one.how.rpartition(": ")[2]) for one in made] == [
        (12, "left out"), (12, "one arrival more"), (13, "left out"), (13, "another space"), (14, "left out"),
        (14, "16 bytes more"), (14, "16 bytes fewer"), (14, "no bytes"), (18, "left out"),
        (20, "does not wait"), (20, "waits for the other phase"),
        (24, "left out"), (24, "another space"), (25, "left out"),
        (25, "32 threads more"), (25, "32 threads fewer"), (29, "left out"), (30, "left out"),
        (30, "one group more may be pending"), (32, "left out")]
    for one in made:
        changed = [i for i, (x, y) in enumerate(zip(RING.splitlines(), one.text.splitlines(), strict=True), 1)
                   if x != y]
        assert changed == [one.line]


def test_verdicts(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """All that does harm is found. Of the fence of an mbarrier's init there is a note, left out or of global
    memory, and of the last wait; a fence that nothing follows does nothing."""
    (tmp_path / "ring.ptx").write_text(RING)
    monkeypatch.setattr(sys, "argv", ["mutate.py", str(tmp_path / "ring.ptx"), "--arg", "arange:u32:128",
                                      "--arg", "empty:512"])
    assert mutate.main() == 0
    said = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()[:3]) for line in said if " line " in line] == [
        "noted line 13:", "noted line 13:", "noted line 29:", "noted line 30:", "noted line 30:",
        "silent line 32:"]
    assert "20 of 20 mutants: 14 found, 5 noted, 1 silent" in said


def test_what_is_missed_is_said(tmp_path: Path):
    """A run that finds nothing: mutants with other numbers are missed. The kernel itself must be sound."""
    def run(text: str, seed: int | str) -> mutate.Outcome:
        return mutate.Outcome((), (np.int32(text == RING).tobytes(),), (), frozenset(range(99)))

    told: list[str] = []
    made = mutate.survey(run, RING, most=5, tell=told.append)
    assert {verdict.kind for verdict in made} == {"numbers"}
    assert told[-1] == "5 of 20 mutants: 5 numbers"
    with pytest.raises(mutate.PTXError, match="as it stands has findings under seed late: race"):
        mutate.survey(lambda text, seed: mutate.Outcome(("race",), (), (), frozenset()), RING)
