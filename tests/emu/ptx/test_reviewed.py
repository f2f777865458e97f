"""Programs that no other test resembles: found by running strange ones.

Each case is a program that once hung the machine, ended it with a Python error, or was judged wrongly.
"""
from __future__ import annotations

import numpy as np
import pytest

from tinygrad_nv.errors import PTXError
from tinygrad_nv.ptx.emulator import Emulator, Report


def module(body: str, parameters: str = "", head: str = "", target: str = "sm_90a") -> str:
    """A module with one entry function `k`; some registers are declared."""
    return f"""
.version 8.6
.target {target}
.address_size 64
{head}
.visible .entry k({parameters})
{{
.reg .pred %p<8>;
.reg .b32 %r<32>;
.reg .b64 %d<32>;
{body}
ret;
}}
"""


def launch(text: str, *args: object, block: int = 32, grid: int = 1, seed: int = 0, **options: int) -> Report:
    """One launch with a step limit that no case here comes near."""
    emu = Emulator(arch="sm_90a", seed=seed, step_limit=200_000)
    return emu.launch(text, grid=grid, block=block, args=args, **options)


def kinds(report: Report) -> set[str]:
    """The kinds of its findings."""
    return {finding.kind for finding in report.findings}


# **** lanes that part at barriers ****

@pytest.mark.parametrize("seed", range(4))
def test_lane_left_alone_at_a_barrier(seed: int) -> None:
    """Lane 0 waits with bar.sync while the rest of its warp exits and another warp waits at an mbarrier that
    nothing completes: a deadlock, at both places."""
    report = launch(module("""
        .shared .align 8 .b8 bar[8];
        mov.u32 %r0, %tid.x;
        setp.ne.u32 %p0, %r0, 0;
        @!%p0 mbarrier.init.shared::cta.b64 [bar], 1;
        bar.sync 1;
        setp.ge.u32 %p1, %r0, 32;
        @%p1 bra OTHER;
        @%p0 bra END;
        bar.sync 0;
        bra END;
        OTHER: mbarrier.try_wait.parity.shared::cta.b64 %p2, [bar], 0;
        @!%p2 bra OTHER;
        END:"""), block=64, seed=seed)
    assert "deadlock" in kinds(report)


@pytest.mark.parametrize("seed", range(4))
def test_barrier_within_halves_of_a_warp(seed: int) -> None:
    """Halves of each warp come to the same bar.sync a different number of times."""
    report = launch(module("""
        mov.u32 %r0, %tid.x;
        and.b32 %r1, %r0, 1;
        mov.u32 %r2, 0;
        setp.ne.u32 %p0, %r1, 0;
        @%p0 bra LATER;
        AGAIN: bar.sync 0;
        LATER: bar.sync 0;
        add.u32 %r2, %r2, 1;
        setp.lt.u32 %p1, %r2, 3;
        @%p1 bra AGAIN;"""), block=64, seed=seed)
    assert "barrier" in kinds(report)


# **** the ends of bodies, and what no machine has ****

@pytest.mark.parametrize("body", ["", "A:", ".reg .b32 %x;", "{ }"])
def test_empty_body(body: str) -> None:
    """It does nothing."""
    text = f".version 8.0\n.target sm_90a\n.address_size 64\n.visible .entry k() {{ {body} }}\n"
    assert launch(text, block=64, grid=3).findings == []


@pytest.mark.parametrize("guard", ["@%p0", "@!%p0"])
def test_body_that_ends_with_a_guarded_instruction(guard: str) -> None:
    """Lanes for which the guard is false return as well."""
    emu = Emulator()
    out = emu.alloc(np.zeros(32, np.int32))
    text = module(f"""
        ld.param.b64 %d0, [out];
        mov.u32 %r0, %tid.x;
        setp.lt.u32 %p0, %r0, 10;
        mad.wide.u32 %d0, %r0, 4, %d0;
        {guard} st.global.b32 [%d0], %r0;""", ".param .b64 out").replace("ret;", "")
    assert emu.launch(text, 1, 32, [out]).findings == []
    lanes = np.arange(32)
    assert (out.numpy() == np.where((lanes < 10) == (guard == "@%p0"), lanes, 0)).all()


@pytest.mark.parametrize(("body", "parameters"), [
    (".local .align 4 .b8 depot[2147483648];", ""), ("", ".param .align 8 .b8 p[40000]"),
    (".local .align 4 .b8 depot[-16];", ""), (".shared .align 12 .b8 s[16];", ""),
    (".shared .b8;", ""), (".shared s[4];", ""), (".reg .b32 %x<%y>;", "")])
def test_declarations_that_cannot_be(body: str, parameters: str) -> None:
    """An error before anything runs, that names the line."""
    with pytest.raises(PTXError) as error: launch(module(body, parameters), bytes(40000))
    assert error.value.line > 0


# **** loops that never wait ****

@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("body", [
    "cp.async.ca.shared.global [s], [%d0], 16; cp.async.commit_group;",
    "cp.async.bulk.prefetch.L2.global [%d0], 16; cp.async.ca.shared.global [s], [%d0], 4;",
    "wgmma.fence.sync.aligned; wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 "
    "{%r4, %r5, %r6, %r7}, %d1, %d1, 0, 1, 1, 0, 0;"])
def test_work_in_flight_is_bounded(body: str) -> None:
    """What a loop issues without ever waiting for it does not pile up: this took minutes."""
    emu = Emulator(step_limit=100_000)
    source = emu.alloc(np.zeros(16, np.uint8))
    report = emu.launch(module(f".shared .align 16 .b8 s[1024]; mov.b64 %d1, 64; ld.param.b64 %d0, [a];\n"
                               f"L: {body} bra L;", ".param .b64 a"), 1, 128, [source])
    assert "instruction-limit" in kinds(report)
    assert report.seconds < 60


# **** lanes of one warp ****

COPY = """
    .shared .align 16 .b8 s[512];
    ld.param.b64 %d0, [a]; ld.param.b64 %d1, [out];
    mov.u32 %r0, %tid.x; mov.u32 %r1, s;
    mad.lo.u32 %r2, %r0, 16, %r1; mad.wide.u32 %d0, %r0, 16, %d0; mad.wide.u32 %d1, %r0, 4, %d1;
    cp.async.cg.shared.global [%r2], [%d0], 16;
    cp.async.wait_all;
    SYNC
    xor.b32 %r3, %r0, OTHER; mad.lo.u32 %r3, %r3, 16, %r1;
    ld.shared.b32 %r4, [%r3+4];
    st.global.b32 [%d1], %r4;"""


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("sync", "other", "found"), [
    ("", 1, {"async-hazard"}), ("bar.warp.sync -1;", 1, set()), ("bar.sync 0;", 31, set()), ("", 0, set())])
def test_copies_of_other_lanes(sync: str, other: int, found: set[str], seed: int) -> None:
    """cp.async.wait_all waits for a thread's own copies: those of other lanes take a barrier."""
    emu = Emulator(seed=seed)
    values = np.arange(128, dtype=np.int32)
    out = emu.alloc(np.zeros(32, np.int32))
    text = module(COPY.replace("SYNC", sync).replace("OTHER", str(other)), ".param .b64 a, .param .b64 out")
    assert kinds(emu.launch(text, 1, 32, [emu.alloc(values), out])) == found
    assert (out.numpy() == values.reshape(32, 4)[np.arange(32) ^ other, 1]).all()


@pytest.mark.parametrize(("collective", "found"), [
    ("match.any.sync.b32 %r9, 5, -1;", set()), ("", {"race"}),
    ("shfl.sync.idx.b32 %r9, %r0, 0, 31, -1;", {"race"})])
def test_elected_lane_invalidates_what_all_used(collective: str, found: set[str]) -> None:
    """As libcu++'s pipelines end; a shuffle does not order memory."""
    report = launch(module(f"""
        .shared .align 8 .b8 bar[8];
        mov.u32 %r0, %tid.x; setp.ne.u32 %p0, %r0, 0;
        @!%p0 mbarrier.init.shared::cta.b64 [bar], 32;
        bar.warp.sync -1;
        mbarrier.arrive.shared::cta.b64 _, [bar];
        {collective}
        @!%p0 mbarrier.inval.shared::cta.b64 [bar];"""))
    assert kinds(report) == found


# **** large numbers ****

@pytest.mark.slow
def test_more_clusters_than_the_checker_tells_apart() -> None:
    """A thread knows its own write also in CTA 2^20 and beyond."""
    emu = Emulator()
    out = emu.alloc(4 * 1_050_000)
    report = emu.launch(module("""
        ld.param.b64 %d0, [out]; mov.u32 %r0, %ctaid.x; mad.wide.u32 %d0, %r0, 4, %d0;
        st.global.b32 [%d0], %r0; ld.global.b32 %r1, [%d0];""", ".param .b64 out"), 1_050_000, 1, [out])
    assert report.findings == []
    assert (out.numpy().view(np.int32) == np.arange(1_050_000)).all()


def test_addresses_wrap() -> None:
    """Offsets are taken modulo 2^64, and out of bounds there."""
    report = launch(module("mov.b64 %d0, 0; ld.global.u8 %r0, [%d0+99999999999999999999];"))
    assert kinds(report) == {"out-of-bounds"}


@pytest.mark.parametrize("address", ["0xffffffffffffffff", "0x7fffffffffffffff+0x7fffffffffffffff"])
def test_constant_addresses_are_of_local_memory(address: str) -> None:
    """As ptxas has it."""
    with pytest.raises(PTXError, match="an address must be in a register, or a variable's"):
        launch(module(f"ld.global.u8 %r0, [{address}];"))


@pytest.mark.parametrize("dynamic", [-1, 1.5, "1"])
def test_dynamic_shared_memory_is_a_number_of_bytes(dynamic: object) -> None:
    """Anything else is an error that names it."""
    with pytest.raises(PTXError, match="dynamic_smem"):
        Emulator().launch(module(""), 1, 32, dynamic_smem=dynamic)  # type: ignore[arg-type]
