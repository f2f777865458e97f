"""Kernels written with the builder: their text, what ptxas says of it, and errors at the writer's line."""
from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from tinygrad_nv.errors import PTXError
from tinygrad_nv.ptx.assemble import ARCHITECTURES, assemble
from tinygrad_nv.ptx.builder import SINK, Kernel, PairOperand
from tinygrad_nv.ptx.builder.hopper import descriptor_bits
from tinygrad_nv.ptx.parser import parse
from tinygrad_nv.ptx.sass import disassemble


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def vector_add(arch: str) -> Kernel:
    """c = a + b, four floats a thread."""
    k = Kernel("vector_add", arch=arch, threads=128)
    a, b, c, n = k.pointer("a"), k.pointer("b"), k.pointer("c"), k.param("n", "u32")
    with k.comment("four elements a thread"):
        i = (k.ctaid.x * 128 + k.tid.x) * 4
    with k.if_(i < n):
        offset = i.to("u64") * 4
        x = k.ld("global.nc", "f32", (a + offset).at(), 4)
        y = k.ld("global.nc", "f32", (b + offset).at(), 4)
        k.st("global", "f32", (c + offset).at(), [u + v for u, v in zip(x, y, strict=True)])
    return k


GOLDEN = """.version 8.7
.target sm_80
.address_size 64

.visible .entry vector_add(
    .param .u64 .ptr .global .align 16 a,
    .param .u64 .ptr .global .align 16 b,
    .param .u64 .ptr .global .align 16 c,
    .param .u32 n)
.reqntid 128
{
    .reg .u32 %u<3>;
    .reg .pred %p<1>;
    .reg .u64 %ud<5>;
    .reg .f32 %f<12>;
    .reg .u64 %a;
    .reg .u64 %b;
    .reg .u64 %c;
    .reg .u32 %n;
    .reg .u32 %ctaid_x;
    .reg .u32 %tid_x;

    ld.param.u64 %a, [a];
    cvta.to.global.u64 %a, %a;
    ld.param.u64 %b, [b];
    cvta.to.global.u64 %b, %b;
    ld.param.u64 %c, [c];
    cvta.to.global.u64 %c, %c;
    ld.param.u32 %n, [n];
    mov.u32 %ctaid_x, %ctaid.x;
    mov.u32 %tid_x, %tid.x;
    // four elements a thread
    mul.lo.u32 %u0, %ctaid_x, 128;
    add.u32 %u1, %u0, %tid_x;
    mul.lo.u32 %u2, %u1, 4;
    setp.lt.u32 %p0, %u2, %n;
    @!%p0 bra $endif_1;
        cvt.u64.u32 %ud0, %u2;
        mul.lo.u64 %ud1, %ud0, 4;
        add.u64 %ud2, %a, %ud1;
        ld.global.nc.v4.f32 {%f0, %f1, %f2, %f3}, [%ud2];
        add.u64 %ud3, %b, %ud1;
        ld.global.nc.v4.f32 {%f4, %f5, %f6, %f7}, [%ud3];
        add.u64 %ud4, %c, %ud1;
        add.f32 %f8, %f0, %f4;
        add.f32 %f9, %f1, %f5;
        add.f32 %f10, %f2, %f6;
        add.f32 %f11, %f3, %f7;
        st.global.v4.f32 [%ud4], {%f8, %f9, %f10, %f11};
    $endif_1:
    ret;
}
"""


def test_text_is_readable():
    assert vector_add("sm_80").ptx() == GOLDEN


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_vector_add_assembles(arch: str):
    assert assemble(vector_add(arch).ptx(), arch).kernels["vector_add"].spill_store_bytes == 0


def pipeline(stages: int = 4) -> Kernel:
    """A 128x128 bf16 product: one producer warpgroup, two consumers of 64x128 each, `stages` stages of 64 of
    K.
    """
    k = Kernel("gemm", threads=384, min_ctas=1)
    a_map, b_map = k.tensor_map("a_map"), k.tensor_map("b_map")
    out, steps = k.pointer("out"), k.param("steps", "s32")
    a = k.shared("a", stages * 16384, align=1024)
    b = k.shared("b", stages * 16384, align=1024)
    full, empty = k.mbarriers("full", stages), k.mbarriers("empty", stages)
    with k.if_(k.tid.x == 0):
        for i in range(stages):
            k.mbarrier_init(full[i], 1)
            k.mbarrier_init(empty[i], 2)
        k.fence_mbarrier_init()
    k.sync()
    group = k.tid.x >> 7
    stage, phase = k.reg("u32", 0, "stage"), k.reg("u32", 0, "phase")

    def advance() -> None:
        nonlocal stage, phase
        stage += 1
        with k.if_(stage == stages):
            stage.set(0)
            phase ^= 1

    with k.if_(group == 0):
        k.setmaxnreg(40, more=False)
        with k.if_(k.tid.x == 0), k.comment("producer"), k.loop(0, steps) as step:
            k.mbarrier_wait(empty[stage], phase ^ 1)
            k.mbarrier_expect(full[stage], 32768)
            offset, at = stage * 16384, step * 64
            k.tma_load(a.address(offset).at(), a_map, [at, 0], full[stage])
            k.tma_load(b.address(offset).at(), b_map, [at, 0], full[stage])
            advance()
    with k.else_():
        k.setmaxnreg(232, more=True)
        acc = k.regs("f32", 64, 0.0)
        bits = descriptor_bits(16, 1024)
        with k.comment("consumers"), k.loop(0, steps):
            k.mbarrier_wait(full[stage], phase)
            tile_a = k.descriptor(a.address(stage * 16384 + (group - 1) * 8192), bits)
            tile_b = k.descriptor(b.address(stage * 16384), bits)
            k.wgmma_fence()
            for j in range(4): k.wgmma("m64n128k16", "f32.bf16.bf16", acc, tile_a + 2 * j, tile_b + 2 * j)
            k.wgmma_commit()
            k.wgmma_wait()
            with k.if_((k.tid.x & 127) == 0): k.mbarrier_arrive(empty[stage])
            advance()
        place = out + (k.tid.x - 128).to("u64") * 256
        for i in range(0, 64, 4): k.st("global", "f32", place.at(4 * i), acc[i:i + 4])
    return k


def test_tma_and_wgmma_pipeline():
    k = pipeline()
    assert k.dynamic_smem == 2 * 4 * 16384 + 64
    text = k.ptx()
    made = assemble(text, "sm_90a")
    assert made.kernels["gemm"].spill_store_bytes == 0
    assert not [note for note in made.notes if "C75" in note]
    assert ".extern .shared .align 1024 .b8 gemm_smem[];" in text
    assert "// gemm_smem+65536: b[65536]" in text
    assert len(parse(text).functions["gemm"].body) > 100


def test_descriptor():
    """Start address in units of 16 bytes, 14 bits; LBO from bit 16, SBO from bit 32, swizzle from bit 62."""
    assert descriptor_bits(0, 1024) == 0x4000004000000000
    assert descriptor_bits(8192, 1024, "64B") == 0x8000004002000000
    k = Kernel("describe", threads=128)
    k.descriptor(k.param("tile", "u32"), descriptor_bits(0, 512, "32B"))
    lines = [line.strip() for line in k.ptx().splitlines()]
    at = lines.index("and.b32 %u0, %tile, 262143;")
    assert lines[at + 1:at + 4] == ["shr.u32 %u1, %u0, 4;", "cvt.u64.u32 %ud0, %u1;",
                                    f"or.b64 %ud0, %ud0, {0xC000002000000000 - (1 << 64)};"]


def test_static_memory_up_to_48_kib():
    k = pipeline(stages=1)
    assert k.dynamic_smem == 0
    assert ".shared .align 1024 .b8 b[16384];" in k.ptx()
    assert assemble(k.ptx(), "sm_90a").kernels["gemm"].shared_bytes >= 32784


def test_cluster_and_multicast():
    k = Kernel("cast", threads=128, cluster=(2, 1, 1))
    source = k.tensor_map("source")
    tile, bar = k.shared("tile", 8192, align=1024), k.mbarriers("bar")
    with k.if_(k.tid.x == 0):
        k.mbarrier_init(bar[0], 1)
        k.fence_mbarrier_init()
    k.cluster_arrive(relaxed=True)
    k.cluster_wait()
    with k.if_(k.tid.x == 0):
        k.mbarrier_expect(bar[0], 8192)
        with k.if_(k.special("cluster_ctarank") == 0):
            k.tma_load(tile.at(), source, [0, 0], bar[0], multicast=k.reg("b16", 3))
    k.mbarrier_wait(bar[0], 0)
    other = k.special("cluster_ctarank") ^ 1
    value = k.ld("shared::cluster", "f32", k.mapa(tile.address(), other).at())[0]
    k.st("shared", "f32", tile.at(), value)
    k.mbarrier_arrive_remote(bar.address(), other)
    k.cluster_arrive()
    k.cluster_wait()
    text = k.ptx()
    assert ".reqnctapercluster 2, 1, 1" in text
    assert ".multicast::cluster [tile], [%source, {0, 0}], [bar], %h0;" in text
    assemble(text, "sm_90a")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_named_barriers_loops_and_else(arch: str):
    k = Kernel("phases", arch=arch, threads=256)
    out, n = k.pointer("out"), k.param("n", "s32")
    total = k.reg("s32", 0, "total")
    with k.if_(k.tid.x < 128):
        with k.loop(0, n, 2) as i: total += i
        k.arrive(1, 256)
    with k.else_():
        left = k.reg("s32", n)
        with k.while_(lambda: left > 0):
            left.set(left // 2)
            k.break_(left == 7)
        total.set(k.select(left == 0, total - 1, -total))
        k.sync(1, 256)
    scaled = (total.to("f32") / 3.0).to("s32") % 17
    k.st("global", "s32", (out + k.tid.x.to("u64") * 4).at(), scaled)
    text = k.ptx()
    assemble(text, arch)
    assert text.index("bra $endelse") < text.index("$endif_1:") < text.index("$endelse_3:")


@pytest.mark.slow
def test_a_loop_that_is_not_unrolled():
    """Twenty rounds: ptxas writes all of them out, unless it is told not to."""
    def multiplies(marked: bool) -> int:
        k = Kernel("rounds", threads=32)
        out = k.pointer("out")
        value = k.ld("global", "f32", out.at())[0]
        with k.loop(0, 20):
            if marked: k.nounroll()
            k.emit("fma.rn.f32", value, value, value, value)
        k.st("global", "f32", out.at(), value)
        return disassemble(assemble(k.ptx(), "sm_90a").cubin).count("FFMA ")
    assert (multiplies(False), multiplies(True)) == (20, 1)


def test_dependent_launch():
    k = Kernel("second", threads=128)
    data = k.pointer("data")
    k.launch_dependents()
    k.wait_for_previous_grid()
    with k.if_(k.elect()): k.st("global", "u32", data.at(4), 7)
    assemble(k.ptx(), "sm_90a")


@pytest.mark.parametrize("arch", ["sm_80", "sm_89"])
def test_ampere_product(arch: str):
    k = Kernel("small", arch=arch, threads=32)
    source, out = k.pointer("source"), k.pointer("out")
    tile = k.shared("tile", 1024, align=128)
    k.cp_async(tile.address(k.tid.x * 16).at(), (source + k.tid.x.to("u64") * 16).at(), 16)
    k.cp_async_commit()
    k.cp_async_wait()
    k.sync()
    a, acc = k.ldmatrix(tile.at()), k.regs("f32", 4, 0.0)
    k.mma("m16n8k16", "f32.bf16.bf16.f32", acc, a, a[:2], acc)
    k.st("global", "f32", (out + k.tid.x.to("u64") * 16).at(), acc)
    assemble(k.ptx(), arch)


def test_emit_takes_every_row():
    k = Kernel("every_row", threads=32)
    d, p = k.reg("b32"), k.reg("pred")
    k.emit("lop3.b32", d, k.tid.x, 15, 3, 0xEA)
    k.emit("shfl.sync.bfly.b32", PairOperand(d, p), d, 1, 31, -1)
    k.emit("elect.sync", PairOperand(SINK, p), -1)
    k.emit("mov.b32", d, 5, guard=~p)
    k.emit("fma.rn.f32", k.reg("f32", 1.5), k.reg("f32", -0.0), 2.0, 3.0)
    text = k.ptx()
    assert "@!%p0 mov.b32 %r0, 5;" in text
    assert "0f40000000, 0f40400000;" in text
    assemble(text, "sm_90a")


def here() -> int:
    """The line of the caller."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def test_errors_name_the_writers_line():
    k = Kernel("wrong", threads=32)
    line = here() + 1
    with pytest.raises(PTXError) as caught: k.emit("add.s32", k.reg("s32"), k.reg("f32"), 1)
    assert caught.value.line == line
    assert caught.value.found.startswith(f"test_builder.py:{line}: add.s32: operand 2: %f0 is .f32")
    outside = [entry for entry in caught.traceback if Path(entry.path).parent.name not in ("builder", "isa")]
    assert (Path(outside[-1].path).name, outside[-1].lineno + 1) == ("test_builder.py", line)


@pytest.mark.parametrize(("write", "words"), [
    (lambda k: k.reg("u32") + k.reg("u64"), r"%u0 is \.u32, %ud0 is \.u64"),
    (lambda k: k.reg("u32") < k.reg("s32"), r"%u0 is \.u32, %s0 is \.s32"),
    (lambda k: k.reg("s32") / 2, "f32 or f64"),
    (lambda k: k.reg("f32") + 1, "1 is an integer"),
    (lambda k: k.reg("f32") & 1, "an integer or a predicate"),
    (lambda k: k.reg("u32") + (1 << 40), "does not fit in .u32"),
    (lambda k: k.reg("u32", 1.5), "1.5 is no integer"),
    (lambda k: k.reg("u17"), "no registers of type u17"),
    (lambda k: bool(k.reg("u32") == 0), "no value while the kernel is written"),
    (lambda k: k.tid.x.set(3), "must not be written"),
    (lambda k: k.emit("mov.u32", k.tid.x, 3), "must not be written"),
    (lambda k: k.if_(k.reg("u32")).__enter__(), "no predicate"),
    (lambda k: k.else_().__enter__(), "else_ without an if_"),
    (lambda k: k.break_(), "break_ outside a loop"),
    (lambda k: k.nounroll(), "nounroll outside a loop"),
    (lambda k: k.sync(16), r"16 is not one of 0\.\.15"),
    (lambda k: k.sync(1, 100), "100 is not one of"),
    (lambda k: k.shared("t", 300000), "at most 232448 on sm_90a"),
    (lambda k: k.shared("t", 64, align=48), "a power of two"),
    (lambda k: k.shared("t", 64).at(64), "offset 64 of t"),
    (lambda k: k.mbarriers("m", 2)[2], "offset 16 of m"),
    (lambda k: k.mbarrier_init(k.mbarriers("m")[0], 0), "0 arrivals"),
    (lambda k: k.mbarrier_wait(k.mbarriers("m")[0], 2), "parity 2"),
    (lambda k: k.mbarrier_expect(k.mbarriers("m")[0], 1 << 20), "bytes in one phase"),
    (lambda k: k.setmaxnreg(40, more=False), "unknown register count"),
    (lambda k: k.tma_load(k.shared("t", 128).at(), k.tensor_map("m"), [0], k.mbarriers("b")[0]), "128 bytes"),
    (lambda k: k.wgmma("m64n8k16", "f32.bf16.bf16", k.regs("f32", 3), k.reg("b64"), k.reg("b64")),
     "3 elements, 4 are expected"),
    (lambda k: k.wgmma("m64n8k32", "f32.e4m3.e4m3", k.regs("f32", 4), k.reg("b64"), k.reg("b64"),
                       trans=(True, False)), "MN-major"),
    (lambda k: k.ld("global", "f32", k.reg("u32").at()), "an address of 64 bits"),
    (lambda k: k.param("x", "pred"), "a parameter of type pred"),
    (lambda k: (k.param("x", "u32"), k.param("x", "u64")), "two parameters x"),
    (lambda k: (k.pointer("x"), k.shared("x", 16)), "a parameter and a tile x"),
    (lambda k: (k.mbarriers("x"), k.param("x", "u32")), "a parameter and a tile x"),
    (lambda k: k.emit("mov.u32", k.reg("u32"), "text"), "is no operand"),
    (lambda k: k.emit("cp.async.cg.shared.global.L2::cache_hint", k.reg("u32").at(), k.reg("u64").at(), 16,
                      k.reg("b64")), r"a copy with a cache policy, of which ptxas 12\.9 and 13\.0"),
    (lambda k: k.emit("frob.u32"), "no instruction frob")])
def test_errors(write, words: str):
    with pytest.raises(PTXError, match=words) as caught: write(Kernel("wrong", threads=32))
    assert re.match(r"test_builder\.py:\d+: ", caught.value.found)


@pytest.mark.parametrize("write", [
    lambda k: k.wgmma_fence(), lambda k: k.elect(), lambda k: k.tensor_map("m"),
    lambda k: k.launch_dependents(), lambda k: k.fence_proxy_async(), lambda k: k.cluster_wait()])
def test_what_an_architecture_lacks(write):
    with pytest.raises(PTXError, match=r"needs? sm_90a?, the target is sm_80"):
        write(Kernel("k", arch="sm_80"))


@pytest.mark.parametrize(("made", "words"), [
    ({"arch": "sm_70"}, "unknown architecture"), ({"threads": 2048}, "2048 threads in a block"),
    ({"arch": "sm_80", "cluster": (2,)}, "clusters need sm_90"),
    ({"version": (7, 8)}, "does not have sm_90a")])
def test_errors_of_a_kernels_head(made: dict, words: str):
    with pytest.raises(PTXError, match=words): Kernel("k", **made)


@pytest.mark.parametrize("name", ["laneid", "nwarpid", "cluster_ctarank", "cluster_nctarank", "tid.x"])
def test_a_special_register_is_not_hidden_by_its_copy(name: str):
    k = Kernel("copy", arch="sm_90a", threads=32)
    out = k.pointer("out")
    k.st("global", "u32", out.at(), k.special(name))
    made = k.ptx()
    assert f"mov.u32 {k.special(name)}, %{name};" in made
    assert str(k.special(name)) != f"%{name}"
    assemble(made, "sm_90a")


def test_what_was_checked_once_is_checked_again_for_other_kinds():
    """Instructions are remembered by the types of their operands, and by the values of integers."""
    k = Kernel("kinds", arch="sm_90a", threads=128)
    word, half, wide, flag = k.reg("u32"), k.reg("b16"), k.reg("f32"), k.reg("pred")
    for _ in range(2):
        k.emit("add.u32", word, word, 1)
        for wrong in (half, wide, flag, 1.0, 1 << 32):
            with pytest.raises(PTXError): k.emit("add.u32", word, word, wrong)
        k.emit("setmaxnreg.dec.sync.aligned.u32", 40)
        with pytest.raises(PTXError): k.emit("setmaxnreg.dec.sync.aligned.u32", 41)
        with pytest.raises(PTXError): k.emit("add.u32", k.tid.x, word, 1)
        with pytest.raises(PTXError): k.emit("add.u32", word, word, 1, guard=word)
