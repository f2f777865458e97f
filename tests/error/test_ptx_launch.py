"""What a launch refuses before anything runs, and PTX that asks for more than can be had, nests without end,
or is no text."""
from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from tinygrad_nv import cli
from tinygrad_nv.errors import PTXError
from tinygrad_nv.ptx.emulator import Emulator, TensorMap
from tinygrad_nv.ptx.parser import parse
from tinygrad_nv.ptx.tokens import MOST_BYTES

HEAD = ".version 8.7\n.target sm_90a\n.address_size 64\n"
KERNEL = HEAD + ".visible .entry k(.param .u64 p, .param .u32 n) { ret; }\n"


def launch_refused(*words: str, text: str = KERNEL, arch: str = "sm_90a", **launch) -> None:
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
    launch_refused(*words, args=args)


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
    launch_refused(*words, **launch)


def test_architectures():
    with pytest.raises(PTXError, match=r"'sm_70'(.|\n)*sm_90a"): Emulator("sm_70")
    with pytest.raises(PTXError, match=r"resident=0(.|\n)*at least 1 cluster"): Emulator(resident=0)
    launch_refused("for sm_90a, the emulator is sm_80", "Emulator(arch='sm_90a')", arch="sm_80")
    launch_refused("for sm_90a, the emulator is sm_90", arch="sm_90")
    text = KERNEL.replace("sm_90a", "sm_80")
    launch_refused("166912 on sm_80", text=text, arch="sm_80", dynamic_smem=166_913)
    launch_refused("no cluster below sm_90", text=text, arch="sm_80", grid=2, cluster=2)


def test_directives():
    launch_refused("block=(32, 1, 1)", ".reqntid (64, 1, 1)", text=KERNEL.replace(") {", ") .reqntid 64 {"))
    launch_refused("32 threads", ".maxntid 16", text=KERNEL.replace(") {", ") .maxntid 16 {"))
    launch_refused("cluster=(4, 1, 1)", ".reqnctapercluster (2, 1, 1)", grid=4, cluster=4,
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
    launch_refused(*words, text=text, args=[])


def test_text_that_is_none():
    for text in ("", "hello", HEAD + ".visible .entry k( {"):
        launch_refused("line", text=text)
    launch_refused("PTX text is expected, not int", text=5)  # type: ignore[arg-type]
    launch_refused("0 entry functions", text=HEAD)
    launch_refused("2 entry functions: k, l", "entry=", text=KERNEL + ".visible .entry l() { ret; }")


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


def kernel(body: str, variables: str = "", parameters: str = "", directives: str = "") -> str:
    head = f"{HEAD}{variables}\n.entry k({parameters}) {directives}"
    return f"{head}{{ .reg .b32 %r<4>; .reg .pred %p<4>;\n{body}\nret;\n}}\n"


def refused(text: str, *words: str) -> None:
    with pytest.raises(PTXError) as error: Emulator().launch(text, 1, 32)
    said = str(error.value)
    assert [word for word in words if word not in said] == [], said
    assert len(said) < 1000


@pytest.mark.parametrize("size", ["4294967296", "9223372036854775808", "18446744073709551616", "65536][65536",
                                  "4294967296][4294967296", "1 << 40", "999999999999", "1" + "0" * 300])
@pytest.mark.parametrize("space", ["global", "const", "shared", "local", "param"])
def test_sizes(space: str, size: str):
    if space == "param": text = kernel("", parameters=f".param .b8 x[{size}]")
    elif space == "local": text = kernel(f".local .b8 x[{size}];")
    else: text = kernel("", f".{space} .b8 x[{size}];")
    refused(text, "PTX line", "x[")


def test_sizes_of_all_variables():
    three = "".join(f".global .b8 x{i}[134217728];\n" for i in range(3))
    refused(kernel("", three), "line 6", "x2", "402653184", "at most 268435456")
    many = ", ".join(f"x{i}" for i in range(20_000))
    refused(kernel("", f".global .b8 {many};"), "line 4", "20000 variables", "16384")


@pytest.mark.parametrize("alignment", ["0", "3", "-4", "1099511627776", "131072", "1" + "0" * 300])
def test_alignments(alignment: str):
    for text in (kernel("", f".shared .align {alignment} .b8 x[4];"),
                 kernel(f".local .align {alignment} .b8 x[4];"),
                 kernel("", parameters=f".param .align {alignment} .b8 x[4]")):
        refused(text, "PTX line", "an alignment of")


@pytest.mark.parametrize("number", ["1" + "0" * 3000, "9" * 100_000, "0x" + "f" * 5000, "0" + "7" * 6000,
                                    "1." + "0" * 6000], ids=len)
def test_numbers_of_many_digits(number: str):
    for text in (kernel(f"mov.b32 %r1, {number};"), kernel(f"ld.global.b32 %r1, [%r2+{number}];"),
                 kernel("", f".global .f32 x = {number};"), kernel("", f".global .b8 x[{number}];"),
                 kernel("", directives=f".maxntid {number} "), kernel(f".reg .b32 %x<{number}>;"),
                 kernel(f"bar.sync {number};")):
        refused(text, "PTX line")


@pytest.mark.parametrize(("text", "words"), [
    (kernel("mov.b32 %r1, ~0f7FC00000;"), ("line 6", "nan as an integer")),
    (kernel("mov.b32 %r1, (.s64)0f7F800000;"), ("line 6", "inf as an integer")),
    (kernel("mov.f32 %r1, 1e308;"), ("line 6", "mov.f32")),
    (kernel("", ".global .f16 x = 1e300;"), ("line 4", "initial value of .f16")),
    (kernel("", ".global .b8 x[2] = {1, 2, 3};"), ("line 4", "3 bytes for x, which has 2")),
    (kernel("", '.global .b8 x[] = "\\U99999999";'), ("line 4", "no bytes")),
    (kernel("", '.global .b8 x[] = "\\xZZ";'), ("line 4", "no bytes")),
    (kernel("mov.b32 %r1, " + "(" * 5000 + "1;"), ("line 6", "nested more than 100 deep")),
    (kernel("mov.b32 %r1, " + "-" * 5000 + "1;"), ("line 6", "nested more than 100 deep")),
    (kernel("mov.b32 %r1, " + "{" * 5000), ("line 6", "nested more than 100 deep")),
    (kernel("setp.eq.b32 " + "%p1|" * 5000 + "%p2, %r1, %r1;"), ("line 6", "nested more than 100 deep")),
    (kernel("{" * 100_000), ("line 6", "nested more than 100 deep")),
    (kernel("", ".global .b8 x[] = " + "{" * 5000), ("line 4", "nested more than 100 deep")),
    (kernel(".reg .b32 %x<089>;"), ("line 6", "089 is not a number")),
    (kernel("mov.b32 %r" + "9" * 6000 + ", 1;"), ("line 6",)),
    (kernel("call;"), ("line 6", "no function")),
    (kernel("bra NOWHERE;"), ("line 6", "NOWHERE is not defined")),
    (kernel("add.u32 %r1;"), ("line 6",)),
    (kernel("mov.b32 %r1, \u0663;"), ("line 6", "unexpected")),
    (kernel("call (x), vprintf, (x, x);", ".global .b8 x[8];"), ("line 6", "no .param variable")),
    (kernel("a" * 100_000 + " %r1;"), ("line 6", "is no instruction")),
    (kernel("add" + ".u32" * 10_000 + " %r1, %r2, %r3;"), ("line 6", "is no instruction")),
    *((kernel("", directives=f".maxntid 32 {what} "), ("line 5", what.split()[0])) for what in (
        ".maxnreg", ".reqntid", ".reqnctapercluster", ".reqnctapercluster 0", ".minnctapersm",
        ".minnctapersm 0", ".maxntid 1, 1, 1, 1", ".reqntid 0")),
    (f"{HEAD}.section .debug", ("line 4", ".section has no block")),
    (" " * (MOST_BYTES + 1), (f"{MOST_BYTES + 1} characters", f"at most {MOST_BYTES}")),
])
def test_what_cannot_be(text: str, words: tuple[str, ...]):
    refused(text, *words)


def test_calls_that_double():
    doubling = "".join(f".func f{i}() {{ call f{i - 1}; call f{i - 1}; ret; }}\n" for i in range(1, 61))
    refused(kernel("call f60;", ".func f0() { ret; }\n" + doubling), "PTX line", "more than 8192 calls")
    chain = "".join(f".func f{i}() {{ call f{i - 1}; ret; }}\n" for i in range(1, 3000))
    refused(kernel("call f2999;", ".func f0() { ret; }\n" + chain), "more than 100 calls in each other")


def test_many_instructions():
    refused(kernel("add.u32 %r1,%r1,%r1;" * 140_000), "line 6", "131073 instructions of function k",
            "at most 131072")
    body = ".reg .b32 %r;" + "not.b32 %r,%r;" * 90_000
    three = "".join(f".func f{i}() {{ {body} ret; }}\n" for i in range(3))
    refused(kernel("", three), "line 6", "of function f2", "262145 of all functions")


def test_branches_whose_meeting_places_are_far_apart():
    """6,000 branches go to both ends of 6,000 that follow each other: 4 * 10^7 steps one by one."""
    far = "".join(f"B{i}: @%p1 bra D0;\n@%p2 bra D5999;\n" for i in range(6_000))
    row = "".join(f"D{i}: @%p1 bra D{i + 1};\n" for i in range(6_000))
    begun = time.thread_time()
    Emulator().prepare(kernel(f"{far}{row}D6000:"))
    assert time.thread_time() - begun < 3


def test_large_but_honest():
    """What compiled kernels have is read as before."""
    block = "{ .reg .b64 %d<9>; L: mov.b64 %d1, 0x7fffffffffffffff; bra L; }\n"
    made = parse(kernel(block * 2000, ".global .align 1024 .b8 x[16777216];"))
    assert len(made.functions["k"].body) == 4001
    assert made.variables["x"].nbytes == 1 << 24
    emu = Emulator()
    text = kernel("mov.u64 %d1, x; ld.global.u32 %r1, [%d1+16777212]; add.u32 %r1, %r1, 7; "
                  "st.global.u32 [%d1], %r1;", ".global .b8 x[16777216];")
    text = text.replace(".reg .pred", ".reg .b64 %d<2>; .reg .pred")
    assert emu.launch(text, 1, 1).findings == []
    assert emu.variables(text)["x"].numpy()[:8].view(np.uint32).tolist() == [7, 0]


@pytest.mark.parametrize("loop", ["L: bra L;", "L: add.u32 %r1, %r1, 1; bra.uni L;", "L: bar.sync 0; bra L;",
                                  "L: ld.volatile.global.u32 %r1, [x]; bra L;",
                                  "L: @%p1 bra M; bra L; M: bra L;"])
def test_loops_without_a_way_out(loop: str):
    """Said with the line after some million instructions, long before the launch's limit."""
    emu = Emulator()
    found = emu.launch(kernel(loop, ".global .b32 x;"), 1, 32).findings
    assert {finding.kind for finding in found} >= {"instruction-limit"}, found
    said = next(str(finding) for finding in found if finding.kind == "instruction-limit")
    assert "line 6" in said
    assert "4194304 warp-instructions" in said
    assert "no way leads to an exit" in said


def test_a_loop_without_a_way_out_that_no_thread_enters():
    text = kernel("mov.u32 %r1, 0; setp.eq.u32 %p1, %r1, 0; @%p1 bra END; L: bra L; END:")
    assert Emulator().launch(text, 1, 32).findings == []


ALWAYS = "mov.u32 %r1, 0; setp.eq.u32 %p1, %r1, 0;\n"


@pytest.mark.parametrize("loop", ["L: @%p1 bra L;", "T: .branchtargets L, M;\nL: brx.idx %r1, T; M:",
                                  "L: st.global.u32 [x], %r1; @%p1 bra L;",
                                  "L: ld.volatile.global.u32 %r2, [x]; @%p1 bra L;"], ids="abcd")
def test_loops_that_depend_on_data(loop: str):
    """End when no CTA has ended for `max_seconds` of computing, and say where."""
    emu = Emulator(max_seconds=0.2)
    begun = time.thread_time()
    found = emu.launch(kernel(ALWAYS + loop, ".global .b32 x;"), 1000, 256).findings
    assert time.thread_time() - begun < 2
    said = next(each for each in found if each.kind == "instruction-limit")
    assert said.ptx_line in (7, 8)
    assert "no CTA has ended for 0.2 s of computing" in said.message


def test_long_launches_whose_ctas_end():
    """Take longer than `max_seconds`, and end."""
    loop = "mov.u32 %r1, 0; L: add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 2000; @%p1 bra L;"
    begun = time.thread_time()
    report = Emulator(max_seconds=0.1, check=False).launch(kernel(loop), 2000, 64)
    assert time.thread_time() - begun > 0.1
    assert report.findings == []


def test_time_of_a_launch_that_does_not_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "a.ptx"
    file.write_text(kernel(ALWAYS + "L: @%p1 bra L;"))
    assert cli.main(["ptx", "time", str(file), "--max-seconds", "0.2"]) == 2
    said = capsys.readouterr().err
    wanted = ("PTX line 7", "instruction-limit", "a launch that ends")
    assert [word for word in wanted if word not in said] == []
    assert cli.main(["ptx", "check", str(file), "--max-seconds", "0.2", "--seeds", "9"]) == 1
    assert "no CTA has ended for 0.2 s of computing" in capsys.readouterr().out


@pytest.mark.parametrize("options", [["--grid", "1" + "0" * 5000], ["--grid", "4,-1"], ["--grid", "1,1,1,1"],
                                     ["--block", "x"], ["--max-seconds", "nan"], ["--max-seconds", "-1"]],
                         ids="abcdef")
def test_options_of_a_launch(options: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended: cli.main(["ptx", "check", "a.ptx", *options])
    said = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2
    assert [word for word in (options[0], "write ") if word not in said] == []
    assert len(said) < 250


def test_a_fifo_as_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Without a writer. A pipe of a shell is read."""
    os.mkfifo(fifo := tmp_path / "a.ptx")
    assert cli.main(["ptx", "check", str(fifo)]) == 2
    assert "it is a FIFO, and a regular file is expected" in capsys.readouterr().err
    read, write = os.pipe()
    os.write(write, kernel("").encode())
    os.close(write)
    assert cli.main(["ptx", "check", f"/dev/fd/{read}"]) == 0
    os.close(read)


def test_wide_conversions_of_printf():
    """No more than what is shown is made: a precision of 10⁹ would take 1 GB."""
    form = b"%.1000000000f|%99999999999d|%0*d|%s"
    text = (HEAD + ".extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);\n"
            f".global .align 1 .b8 form[{len(form) + 1}] = {{{', '.join(map(str, form))}, 0}};\n"
            ".entry k() { .reg .b64 %d<2>; .reg .b32 %r; .param .b64 p0; .param .b64 p1; .param .b32 r0; "
            ".local .align 8 .b64 w[6]; mov.u64 %d1, 0; st.local.u64 [w], %d1; st.local.u64 [w+8], %d1; "
            "mov.u32 %r, 2147483647; st.local.u32 [w+12], %r; mov.u64 %d0, w; cvta.local.u64 %d0, %d0; "
            "st.param.b64 [p1], %d0; mov.u64 %d0, form; cvta.global.u64 %d0, %d0; st.param.b64 [p0], %d0; "
            "call.uni (r0), vprintf, (p0, p1); ret; }")
    printed = Emulator().launch(text, 1, 1).printed
    assert printed.startswith("0.000")
    assert len(printed) < 4096


def test_targets_of_all_branches():
    labels = ", ".join(["L"] * 100_000)
    refused(kernel(f"L: mov.u32 %r1, 0; T: .branchtargets {labels};\n" + "brx.idx %r1, T;\n" * 100), "line 9",
            "more than 262144 targets")
