"""multimem on emulated GPUs: what it reads, writes and reduces in all of them, and where it must not."""
from __future__ import annotations

import numpy as np
import pytest

from tinygrad_nv.errors import PTXError
from tinygrad_nv.ptx.emulator import Buffer, Emulator, Finding, Peers
from tinygrad_nv.ptx.emulator.peers import Work, launching

HEAD = ".version 8.4\n.target sm_90a\n.address_size 64\n"
F16, F32 = np.float16, np.float32


def kernel(body: str) -> str:
    return HEAD + f"""
.visible .entry k(.param .u64 all, .param .u64 out) {{
    .reg .u64 %all, %out;
    .reg .b32 %a, %b, %c, %d;
    .reg .b64 %w;
    ld.param.u64 %all, [all];
    ld.param.u64 %out, [out];
    {body}
    ret;
}}
"""


def ran(body: str, contents: list[np.ndarray], offset: int = 0,
        seed: int = 1) -> tuple[bytes, list[bytes], list[Finding]]:
    """What GPU 1 stores, the memory of all GPUs after that, and what is found."""
    gpus = [Emulator(ordinal=i) for i in range(len(contents))]
    peers = Peers(gpus, seed)
    buffers: list[Buffer] = [gpu.alloc(each) for gpu, each in zip(gpus, contents, strict=True)]
    every = peers.multicast(buffers)
    out, found = gpus[1].zeros(16), list[Finding]()

    def nothing() -> Work: yield from ()

    def work() -> Work:
        report = yield launching(gpus[1], kernel(body), 1, 1, (every.ptr + offset, out.ptr))
        assert report is not None
        found.extend(report.findings)
    peers.run([nothing(), work(), *(nothing() for _ in gpus[2:])])
    return out.numpy().tobytes(), [each.numpy().tobytes() for each in buffers], found


STORE = "st.global.v4.b32 [%out], {%a, %b, %c, %d};"


@pytest.mark.parametrize(("body", "numbers", "result"), [
    ("multimem.ld_reduce.weak.global.add.u32 %a, [%all]; st.global.u32 [%out], %a;",
     [np.array([each, 9], np.uint32) for each in (1, 2, 0xFFFFFFFF)], np.uint32(2)),
    ("multimem.ld_reduce.weak.global.max.s32 %a, [%all]; st.global.u32 [%out], %a;",
     [np.array([each, 9], np.int32) for each in (-5, -2, -7)], np.int32(-2)),
    ("multimem.ld_reduce.weak.global.and.b64 %w, [%all]; st.global.b64 [%out], %w;",
     [np.array([each, 9], np.uint64) for each in (7, 13, 0xFF)], np.uint64(5)),
    ("multimem.ld_reduce.relaxed.sys.global.add.f64 %w, [%all]; st.global.b64 [%out], %w;",
     [np.array([each, 9.0]) for each in (0.5, 0.25, 4.0)], np.float64(4.75)),
    (f"multimem.ld_reduce.weak.global.add.v4.f32 {{%a, %b, %c, %d}}, [%all]; {STORE}",
     [np.array([each, 2, 3, 4], F32) for each in (1, 2, 3)], np.array([6, 6, 9, 12], F32)),
    (f"multimem.ld_reduce.acquire.sys.global.add.acc::f32.v4.f16x2 {{%a, %b, %c, %d}}, [%all]; {STORE}",
     [np.array([each, 1, 2, 3, 4, 5, 6, 7], F16) for each in (1, 2, 3)],
     np.array([6, 3, 6, 9, 12, 15, 18, 21], F16))])
def test_reads_reduce_all_gpus(body: str, numbers: list[np.ndarray], result: np.generic | np.ndarray) -> None:
    for seed in range(3):
        out, _, found = ran(body, numbers, seed=seed)
        assert found == []
        assert out[:result.nbytes] == result.tobytes()


def test_sums_of_halves_in_float32_are_rounded_once() -> None:
    """2048 + 1 + 1: each addition in f16 loses the 1."""
    numbers = [np.array([each] * 8, F16) for each in (2048, 1, 1)]
    for sums, right in ((".acc::f32", 2050), ("", 2048)):
        body = f"multimem.ld_reduce.weak.global.add{sums}.v4.f16x2 {{%a, %b, %c, %d}}, [%all]; {STORE}"
        results = {float(np.frombuffer(ran(body, numbers, seed=seed)[0], F16)[0]) for seed in range(8)}
        assert right in results
        assert sums == "" or results == {2050}


@pytest.mark.parametrize(("body", "result"), [
    ("mov.u32 %a, 7; multimem.st.weak.global.u32 [%all], %a;", [7, 7, 7]),
    ("mov.u32 %a, 7; multimem.red.relaxed.sys.global.add.u32 [%all], %a;", [8, 9, 10]),
    ("mov.u32 %a, 2; multimem.red.release.sys.global.max.u32 [%all], %a;", [2, 2, 3]),
    ("mov.u32 %a, 1; multimem.red.global.or.b32 [%all], %a;", [1, 3, 3])])
def test_writes_reach_all_gpus(body: str, result: list[int]) -> None:
    _, memory, found = ran(body, [np.array([each, 9], np.uint32) for each in (1, 2, 3)])
    assert found == []
    assert [np.frombuffer(each, np.uint32).tolist() for each in memory] == [[each, 9] for each in result]


READ = "multimem.ld_reduce.weak.global.add.u32 %a, [%all];"


@pytest.mark.parametrize(("body", "offset", "kind", "words"), [
    (READ, 8, "out-of-bounds", "no address of a multicast object"), (READ, 2, "misaligned", "not a multiple"),
    ("multimem.st.weak.global.v4.f32 [%all], {%a, %b, %c, %d};", 0, "out-of-bounds", "no address of a"),
    ("ld.global.u32 %a, [%all];", 0, "out-of-bounds", "read of 4 bytes")])
def test_what_is_outside(body: str, offset: int, kind: str, words: str) -> None:
    """Ordinary loads do not reach a multicast object."""
    *_, found = ran(body, [np.zeros(2, np.uint32)] * 3, offset)
    assert [each.kind for each in found] == [kind]
    assert words in found[0].message


def test_races_are_seen_in_every_gpu() -> None:
    """GPU 0 writes its own memory while GPU 1 reads that of all."""
    gpus = [Emulator(ordinal=i) for i in range(2)]
    peers = Peers(gpus, 1)
    buffers = [gpu.zeros(16) for gpu in gpus]
    every, found = peers.multicast(buffers), list[Finding]()

    def work(gpu: int, body: str, address: int) -> Work:
        report = yield launching(gpus[gpu], kernel(body), 1, 1, (address, gpus[gpu].zeros(16)))
        assert report is not None
        found.extend(report.findings)
    peers.run([work(0, "mov.u32 %a, 1; st.global.u32 [%all], %a;", buffers[0].ptr), work(1, READ, every.ptr)])
    assert [each.kind for each in found] == ["race"]


def test_objects_that_cannot_be() -> None:
    gpus = [Emulator(ordinal=i) for i in range(2)]
    with pytest.raises(PTXError, match="2 buffers of"):
        Peers(gpus).multicast([gpus[0].zeros(16), gpus[1].zeros(32)])
