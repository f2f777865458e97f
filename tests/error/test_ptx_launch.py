"""What a launch refuses, before anything runs: text, entry, shapes, shared memory, arguments."""
from __future__ import annotations

import numpy as np
import pytest

from tinygrad_nv.errors import PTXError
from tinygrad_nv.ptx.emulator import Emulator, TensorMap

HEAD = ".version 8.7\n.target sm_90a\n.address_size 64\n"
KERNEL = HEAD + ".visible .entry k(.param .u64 p, .param .u32 n) { ret; }\n"


def refused(*words: str, text: str = KERNEL, arch: str = "sm_90a", **launch) -> None:
    emu = Emulator(arch)
    given = {"grid": 1, "block": 32, "args": [emu.alloc(4), 1], **launch}
    with pytest.raises(PTXError) as error: emu.launch(text, **given)
    assert [word for word in words if word not in str(error.value)] == [], str(error.value)


@pytest.mark.parametrize(("args", "words"), [
    ([], ["0 arguments", "2 parameters of k", "p (.u64), n (.u32)"]),
    ([1, 2, 3], ["3 arguments", "2 parameters"]),
    (["text", 1], ["argument 0 (p)", "'text'", "a buffer"]),
    ([np.zeros(4), 1], ["argument 0 (p)", "ndarray", "emu.alloc"]),
    ([0, 1 << 32], ["argument 1 (n)", "4294967296", "32 bits"]),
    ([0, -(1 << 31) - 1], ["argument 1 (n)", "32 bits"]),
    ([0, 1.5], ["argument 1 (n)", "1.5", ".u32"]),
    ([0, b"abc"], ["argument 1 (n)", "4 bytes, not 3"]),
    ([None, 1], ["argument 0 (p)", "NoneType"]),
])
def test_arguments(args: list[object], words: list[str]):
    refused(*words, args=args)


def test_a_buffer_where_an_integer_is_wanted():
    emu = Emulator()
    with pytest.raises(PTXError, match=r"argument 1 \(n\) is Buffer(.|\n)*8 bytes"):
        emu.launch(KERNEL, 1, 32, [0, emu.alloc(4)])


def test_a_tensor_map_where_a_pointer_is_wanted():
    emu = Emulator()
    tensor_map = TensorMap.of_tiles(emu.alloc(np.zeros((64, 64), np.float16)), box=(64, 64))
    with pytest.raises(PTXError, match=r"argument 0 \(p\) is TensorMap(.|\n)*128"):
        emu.launch(KERNEL, 1, 32, [tensor_map, 1])


@pytest.mark.parametrize(("launch", "words"), [
    ({"grid": 0}, ["grid=0", "≥ 1"]), ({"grid": (1, 2, 3, 4)}, ["grid=(1, 2, 3, 4)", "one to three"]),
    ({"grid": (1, 70_000)}, ["grid=(1, 70000, 1)", "65535"]), ({"block": 1.5}, ["block=1.5"]),
    ({"grid": (2**31 - 1, 65535, 65535)}, ["9223090559730712575 CTAs", "at most 16777216"]),
    ({"grid": 10**9}, ["1000000000 CTAs", "at most 16777216"]),
    ({"block": 1025}, ["block=(1025, 1, 1)", "1024"]), ({"block": (32, 33)}, ["1056 threads", "1024"]),
    ({"block": (1, 1, 65)}, ["block=(1, 1, 65)", "64"]),
    ({"cluster": 2}, ["grid=(1, 1, 1)", "multiple of cluster=(2, 1, 1)"]),
    ({"grid": 32, "cluster": 32}, ["a cluster of 32", "at most 16"]),
    ({"dynamic_smem": -1}, ["dynamic_smem=-1"]),
    ({"dynamic_smem": 232_449}, ["232449 bytes of shared memory", "232448 on sm_90a", "smaller tiles"]),
    ({"entry": "other"}, ["'other'", "one of: k"]),
])
def test_shapes(launch: dict[str, object], words: list[str]):
    refused(*words, **launch)


def test_architectures():
    with pytest.raises(PTXError, match=r"'sm_70'(.|\n)*sm_90a"): Emulator("sm_70")
    with pytest.raises(PTXError, match=r"resident=0(.|\n)*at least 1 cluster"): Emulator(resident=0)
    refused("for sm_90a, the emulator is sm_80", "Emulator(arch='sm_90a')", arch="sm_80")
    refused("for sm_90a, the emulator is sm_90", arch="sm_90")
    text = KERNEL.replace("sm_90a", "sm_80")
    refused("166912 on sm_80", text=text, arch="sm_80", dynamic_smem=166_913)
    refused("no cluster below sm_90", text=text, arch="sm_80", grid=2, cluster=2)


def test_directives():
    refused("block=(32, 1, 1)", ".reqntid (64, 1, 1)", text=KERNEL.replace(") {", ") .reqntid 64 {"))
    refused("32 threads", ".maxntid 16", text=KERNEL.replace(") {", ") .maxntid 16 {"))
    refused("cluster=(4, 1, 1)", ".reqnctapercluster (2, 1, 1)", grid=4, cluster=4,
            text=KERNEL.replace(") {", ") .reqnctapercluster 2 {"))


@pytest.mark.parametrize(("line", "words"), [
    ("frobnicate.b32 %r1, %r2;", ["line 6", "frobnicate.b32"]),
    ("tcgen05.wait::ld.sync.aligned;", ["line 6", "tcgen05"]),
    ("add.s32 %r1, %r2;", ["line 6", "add.s32"]),
    ("mov.u32 %r1, %unheard_of;", ["line 6", "%unheard_of"]),
    ("mov.u32 %r1, nowhere;", ["line 6", "nowhere"]),
    ("bra NOWHERE;", ["line 6", "NOWHERE"]),
    ("ld.global.b32 %r1, %r2;", ["line 6", "brackets"]),
])
def test_lines_that_are_not_understood(line: str, words: list[str]):
    text = f"{HEAD}.visible .entry k() {{\n.reg .b32 %r<4>;\n{line}\nret; }}\n"
    refused(*words, text=text, args=[])


def test_text_that_is_none():
    for text in ("", "hello", HEAD + ".visible .entry k( {"):
        refused("line", text=text)
    refused("PTX text is expected, not int", text=5)  # type: ignore[arg-type]
    refused("0 entry functions", text=HEAD)
    refused("2 entry functions: k, l", "entry=", text=KERNEL + ".visible .entry l() { ret; }")


def test_memory():
    emu = Emulator()
    with pytest.raises(PTXError, match="an allocation of -1 bytes"): emu.alloc(-1)
    with pytest.raises(PTXError, match="an allocation of a list"): emu.alloc([1, 2])  # type: ignore[arg-type]
    buffer = emu.alloc(16)
    with pytest.raises(PTXError, match="8 bytes written to a buffer of 16"):
        buffer.write(np.zeros(8, np.uint8))
    emu.free(buffer)
    with pytest.raises(PTXError, match="freed twice"): emu.free(buffer)


@pytest.mark.parametrize(("version", "body", "said"), [
    ("9.0", "mbarrier.init.b64 [%r1], 1;", "an address of 64 bits is expected"),
    ("9.0", "mbarrier.arrive.b64 _, [%r1];", "an address of 64 bits is expected"),
    ("9.0", "mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 2;", "2 is not one of 0..1"),
    ("9.0", "getctarank.u64 %r1, %r2;", "%r2 is .b32, .u64 is expected"),
    ("9.0", "getctarank.shared::cluster.u32 %r1, %tid.x;", "%tid.x must be moved to a register first"),
    ("9.0", "ld.shared.b32 %r1, [64];", "an address must be in a register, or a variable's"),
    ("9.0", "setp.eq.s32 !%p1, %r1, %r2;", "%p1 must not be negated"),
    ("9.0", "shfl.sync.idx.b32 %r1, %r2, 0, 31, 1.5;", "1.5 is no integer"),
    ("8.5", "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%d1], 16, [%r2];",
     "needs .version 8.6 on sm_90a"),
    ("8.0", "fence.proxy.tensormap::generic.release.gpu;", "needs .version 8.3 on sm_90a"),
    ("9.0", "mul.f32 %f1, %f2, 3.0; mul.f32 %f1, %f2, 3;", "3 is an integer, .f32 needs 3.0")])
def test_what_ptxas_refuses(version: str, body: str, said: str):
    text = (f".version {version}\n.target sm_90a\n.address_size 64\n.visible .entry k() {{\n.reg .b32 %r<3>; "
            f".reg .b64 %d<3>; .reg .f32 %f<3>; .reg .pred %p<3>;\n{body}\nret; }}\n")
    with pytest.raises(PTXError) as caught: Emulator().launch(text, 1, 32)
    assert said in str(caught.value)
    assert caught.value.line == 6
