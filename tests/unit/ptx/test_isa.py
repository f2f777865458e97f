"""The instruction table, held against ptxas: every row assembles where the table says, and nowhere below."""
from __future__ import annotations

import itertools
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tinygrad_nv.errors import PTXError
from tinygrad_nv.ptx import isa
from tinygrad_nv.ptx.assemble import require_ptxas
from tinygrad_nv.ptx.isa.forms import Form
from tinygrad_nv.ptx.isa.operands import problem, sample
from tinygrad_nv.ptx.parser import parse
from tinygrad_nv.ptx.syntax import Instruction

ARCHES = ("sm_80", "sm_89", "sm_90", "sm_90a")
VERSIONS = [*((7, minor) for minor in range(9)), *((8, minor) for minor in range(9)), (9, 0)]
LINES = (Path(__file__).parent / "opcodes.txt").read_text().splitlines()
OPCODES = [line for line in LINES if not line.startswith("#")]
ERROR = re.compile(r"line (\d+); (?:error|fatal)\s*: (.*)")
Version = tuple[int, int]


@cache
def instances() -> list[tuple[Form, str, dict[str, Version | None]]]:
    """Instances of every row, each alternative and each operand list at least once, with the lowest version
    the table gives them on each architecture."""
    out = []
    for form in isa.FORMS:
        for modifiers in form.opcodes():
            made = {isa.example(form, modifiers, i, optional): isa.slots_of(form, modifiers, i, optional)
                    for i in range(len(form.operands)) for optional in (True, False)}
            out += [(form, text, {arch: form.lowest(modifiers, arch, slots) for arch in ARCHES})
                    for text, slots in made.items()]
    return out


def module(arch: str, version: Version, kernels: list[list[str]]) -> str:
    """A module with one instruction a line."""
    registers = isa.REGISTERS
    if version < (8, 3): registers = registers.replace(".reg .b128 %b128_<160>;\n", "\n")
    out = [f".version {version[0]}.{version[1]}\n.target {arch}\n.address_size 64"]
    for i, lines in enumerate(kernels):
        out += [f".visible .entry k{i}(.param .u64 p)\n.maxntid 128\n.minnctapersm 1\n{{\n{registers}LABEL:",
                "TABLE: .branchtargets LABEL;", *lines, "ret;\n}"]
    return "\n".join(out) + "\n"


def ptxas(text: str, arch: str, directory: Path) -> str:
    """What ptxas says of a module, "" if it takes it."""
    (directory / "k.ptx").write_text(text)
    command = [str(require_ptxas()), "-w", "-O0", f"-arch={arch}", "k.ptx", "-o", "k.cubin"]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=120)
    return done.stdout + done.stderr if done.returncode else ""


def refused(lines: list[str], arch: str, version: Version, directory: Path) -> dict[int, str]:
    """Which of the lines ptxas refuses, and why. After some errors it reads no further, so it is asked again
    without the lines it has refused; a second kernel of the same name keeps it from generating code."""
    rest, out = list(lines), {}
    while True:
        text = module(arch, version, [rest]) + ".visible .entry k0(.param .u64 p) { ret; }\n"
        first = text.splitlines().index("LABEL:") + 3
        said = {int(found[1]) - first: found[2] for found in ERROR.finditer(ptxas(text, arch, directory))}
        new = {i: why for i, why in said.items() if 0 <= i < len(rest) and rest[i]}
        if not new: return out
        out |= new
        for i in new: rest[i] = ""


def chunks(texts: list[str], size: int) -> Iterator[list[str]]:
    for start in range(0, len(texts), size): yield texts[start:start + size]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", ARCHES)
def test_every_row_assembles_at_its_lowest_version(arch: str, tmp_path: Path):
    """Kernels of one row each, of at most 16 instructions, grouped by version."""
    by_version: dict[Version, dict[str, list[str]]] = {}
    for form, text, lowest in instances():
        if (version := lowest[arch]) is not None:
            by_version.setdefault(version, {}).setdefault(form.text, []).append(text)
    assert sum(len(rows) for rows in by_version.values()) > 350
    for version, rows in by_version.items():
        kernels = [chunk for texts in rows.values() for chunk in chunks(texts, 16)]
        assert not ptxas(module(arch, version, kernels), arch, tmp_path)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("arch", ARCHES)
def test_one_version_below_is_refused(arch: str, tmp_path: Path):
    floor = isa.ARCH_VERSIONS[arch]
    below: dict[Version, list[str]] = {}
    for _, text, lowest in instances():
        if (version := lowest[arch]) is not None and version > floor:
            below.setdefault(VERSIONS[VERSIONS.index(version) - 1], []).append(text)
    assert len(below) >= 4
    for version, texts in below.items():
        said = refused(texts, arch, version, tmp_path)
        assert [text for i, text in enumerate(texts) if i not in said] == []


@pytest.mark.parametrize(("arch", "least"), [("sm_80", 900), ("sm_89", 900), ("sm_90", 500)])
def test_the_architecture_below_is_refused(arch: str, least: int, tmp_path: Path):
    texts = [text for _, text, lowest in instances() if lowest[arch] is None]
    assert len(texts) > least
    said = refused(texts, arch, (9, 0), tmp_path)
    assert [text for i, text in enumerate(texts) if i not in said] == []


OTHERS = ("[%b64_1]", "[%b32_1]", "[64]", "!%pred_1", "%pred_1", "%f32_1", "%f64_1", "%b32_1", "%b64_1",
          "%s32_1", "%tid.x", "{%b32_1}", "_", "1", "-1", "64", "1.5")


def test_no_operand_passes_that_ptxas_refuses(tmp_path: Path):
    """Each of OTHERS in place of a row's own operands: what the table lets through assembles. (But for set,
    setp, where a constant passes as the predicate, and cvt, where registers may be too wide.)"""
    lines = "\n".join(f"word {text};" for text in OTHERS)
    head = ".version 9.0\n.target sm_90a\n.address_size 64\n.visible .entry k(.param .u64 p)\n{\n"
    body = parse(f"{head}{isa.REGISTERS}{lines}\nret;\n}}\n").functions["k"].body
    others = [(text, made.operands[0]) for text, made in zip(OTHERS, body, strict=False)]
    passed = []
    for form in isa.FORMS:
        if form.mnemonic in ("bra", "brx", "call", "set", "setp", "cvt", "createpolicy"): continue
        modifiers = next((one for one in form.opcodes() if form.lowest(one, "sm_90a") is not None), None)
        if modifiers is None: continue
        use, slots = form.use(modifiers), isa.slots_of(form, modifiers)
        own = [sample(slot, use, i) for i, slot in enumerate(slots)]
        for i, slot in enumerate(slots):
            for text, operand in others:
                if problem(slot, operand, use): continue
                passed.append(".".join((form.mnemonic, *modifiers)) + " "
                              + ", ".join([*own[:i], text, *own[i + 1:]]) + ";")
    said = {text: why for chunk in chunks(passed, 200)
            for i, why in refused(chunk, "sm_90a", (9, 0), tmp_path).items() for text in (chunk[i],)}
    assert len(passed) > 2000
    assert said == {}


@pytest.mark.parametrize("opcode", OPCODES)
def test_generated_opcodes_resolve(opcode: str):
    """What Triton and nvcc emit: found, and none of it beyond sm_90a."""
    mnemonic, *modifiers = opcode.split(".")
    form = isa.find(mnemonic, tuple(modifiers))
    assert opcode.startswith(form.key)
    assert form.lowest(tuple(modifiers), "sm_90a") is not None


@pytest.mark.parametrize("opcodes", [
    "shf.{l,r}.{wrap,clamp}.b32", "{min,max}.{relu.s32,NaN.f32,NaN.bf16x2,f64,u64}",
    "fma.rn.{relu.bf16x2,oob.f16x2,f64}",
    "{addc,subc}.cc.u64", "{mad,madc}.{lo,hi}.cc.s32", "{mul24,mad24}.lo.u32", "{dp2a.lo,dp4a}.u32.s32",
    "{clz,popc,brev}.b32", "bfind.shiftamt.s64", "bmsk.{clamp,wrap}.b32", "szext.{clamp,wrap}.{u32,s32}",
    "testp.{normal,subnormal}.f64",
    "cvt.rn.satfinite.{e4m3x2,e5m2x2}.{f32,f16x2}", "cvt.rna.tf32.f32", "cvt.pack.sat.s8.s32.b32",
    "mma.{sp,sp::ordered_metadata}.sync.aligned.m16n8k32.row.col.f32.bf16.bf16.f32",
    "mma.sync.aligned.m16n8k{16,32}.row.col.f16.{e4m3,e5m2}.e4m3.f16",
    "wgmma.mma_async.sp.sync.aligned.m64n{8,256}k64.s32.{s8,u8}.{s8,u8}",
    "cp.async.bulk.tensor.{1d,5d}.shared::cta.global.tile.mbarrier::complete_tx::bytes",
    "cp.reduce.async.bulk.tensor.5d.global.shared::cta.{inc,dec,xor}.bulk_group",
    "tensormap.replace.tile.{swizzle_mode,fill_mode,elemtype}.global.b1024.b32", "vote.sync.{uni,any}.pred",
    "match.{any,all}.sync.b64", "redux.sync.{min.u32,and.b32}",
    "red.async.relaxed.cluster.mbarrier::complete_tx::bytes.or.b32",
    "mbarrier.{arrive_drop,arrive.noComplete}.shared.b64", "prefetch.global.{L1,L2,L2::evict_last}",
    "ld.global.v2.b64", "createpolicy.{range.L2::evict_last,cvt.L2}.b64",
    "{discard.global.L2,applypriority.global.L2::evict_normal}", "atom.{exch,cas}.b128",
    "red.global.max.noftz.v4.bf16x2", "getctarank.shared::cluster.u32", "isspacep.shared::cluster"])
def test_what_hopper_has_resolves(opcodes: str):
    """Braces stand for alternatives; every one is an instruction of sm_90a."""
    parts = [part.split(",") for part in re.split(r"[{}]", opcodes)]
    for words in itertools.product(*parts):
        mnemonic, *modifiers = "".join(words).split(".")
        assert isa.find(mnemonic, tuple(modifiers)).lowest(tuple(modifiers), "sm_90a") is not None


def test_order_of_modifiers_is_free_but_for_types():
    assert isa.find("ldmatrix", ("sync", "aligned", "x4", "m8n8", "shared", "b16")).key == "ldmatrix"
    assert isa.find("ld", ("b32", "global")) is isa.find("ld", ("global", "b32"))
    assert isa.find("cvt", ("rn", "f32", "s32")).use(("rn", "f32", "s32")).types == ("f32", "s32")
    with pytest.raises(PTXError, match=r"no instruction cvt\.rn\.s32\.f32"):
        isa.find("cvt", ("rn", "s32", "f32"))


@pytest.mark.parametrize(("opcode", "key"), [
    ("add.s32", "add"), ("cp.async.cg.shared.global", "cp.async"), ("cp.async.wait_all", "cp.async.wait_all"),
    ("cp.async.bulk.wait_group.read", "cp.async.bulk.wait_group"), ("bar.warp.sync", "bar.warp.sync"),
    ("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group", "cp.async.bulk.tensor"),
    ("barrier.cluster.wait.aligned", "barrier.cluster.wait"), ("fence.acq_rel.gpu", "fence"),
    ("fence.proxy.async.shared::cta", "fence.proxy.async"),
    ("mbarrier.arrive.expect_tx.shared.b64", "mbarrier.arrive"),
    ("wmma.load.a.sync.aligned.row.m16n16k16.bf16", "wmma.load"), ("shfl.sync.idx.b32", "shfl.sync"),
    ("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16", "wgmma.mma_async")])
def test_keys(opcode: str, key: str):
    mnemonic, *modifiers = opcode.split(".")
    assert isa.key_of(mnemonic, tuple(modifiers)) == key


def instruction(text: str) -> Instruction:
    """The instruction at line 8 of a kernel."""
    registers = ".reg .pred %p<9>; .reg .b32 %r<99>; .reg .f32 %f<99>; .reg .b64 %rd<9>; .reg .b16 %h<9>;"
    head = ".version 8.7\n.target sm_90a\n.address_size 64\n.visible .entry k(.param .u64 p)\n{\n"
    return parse(f"{head}{registers}\nLAB:\n{text}\nret;\n}}\n").functions["k"].body[0]


@pytest.mark.parametrize("text", [
    "add.s32 %r1, %r2, -5;", "mov.b32 %r1, %tid.x;", "mov.b64 {%r1, %r2}, %rd1;", "@%p1 bra LAB;",
    "mov.pred %p1, !%p2;",
    "ld.global.v2.b16 {%r1, _}, [%rd1+4];", "st.shared.f32 [%r1], 0f3F800000;", "cvt.u64.u32 %rd1, %tid.x;",
    "cvt.rn.bf16x2.f32 %r1, %f1, %f2;", "bar.sync 3, 128;", "setp.lt.f32 %p1|%p2, %f1, 1.0;",
    "elect.sync _|%p1, -1;", "ld.global.b16 {%h1}, [%rd1];", "mov.pred %p1, -1;",
    "mbarrier.arrive.shared::cta.b64 _, [%r1];", "add.f32 %r1, %r2, %r3;",
    "cp.async.cg.shared.global [%r1], [%rd1], 16, %r2;", "cp.async.cg.shared.global [%r1], [%rd1], 16, !%p1;",
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
    ".L2::cache_hint [%r1], [%rd1, {%r2, 0}], [%r3], %h1, %rd2;",
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1,%f2,%f3,%f4}, {%r1,%r2,%r3,%r4}, "
    "%rd1, %p1, 1, -1, 1;",
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1,%f2,%f3,%f4}, %rd2, %rd1, 0, 1, -1, 1, 0;"])
def test_what_is_right_passes(text: str):
    isa.check(instruction(text), "sm_90a", (8, 7))


@pytest.mark.parametrize(("text", "words"), [
    ("frobnicate.s32 %r1;", "no instruction frobnicate"),
    ("add.ftz.s32 %r1, %r2, %r3;", r"no instruction add\.ftz\.s32"),
    ("add.s32 %r1, %r2;", "2 operands, 3 are expected"),
    ("add.s32 %r1, %f2, %r3;", r"operand 2: %f2 is \.f32, \.s32 is expected"),
    ("add.s32 %r1, %rd2, 1;", r"%rd2 is \.b64, \.s32 is expected"),
    ("add.s32 5, %r2, %r3;", "a destination must be a register"),
    ("add.f32 %f1, %f2, 1;", "operand 3: 1 is an integer"),
    ("add.s32 %r1, %r2, 1.5;", "1.5 is no integer"),
    ("add.f16 %h1, %h2, 1.0;", "a constant cannot be .f16"),
    ("add.s32 %r1, %tid.x, 3;", "must be moved to a register first"),
    ("ld.global.b32 %r1, [%r2];", "an address of 64 bits is expected"),
    ("ld.shared.b32 %r1, %r2;", "an address in brackets is expected"),
    ("ld.global.v4.b32 {%r1, %r2}, [%rd1];", "2 elements, 4 are expected"),
    ("bar.sync 16;", r"16 is not one of 0\.\.15"),
    ("bar.sync 1, 33;", r"33 is not one of 32\.\.1024 in steps of 32"),
    ("setmaxnreg.inc.sync.aligned.u32 28;", r"28 is not one of 24\.\.256 in steps of 8"),
    ("cp.async.cg.shared.global [%r1], [%rd1], 8;", "8 is not one of 16"),
    ("cp.async.bulk.commit_group 1;", "1 operands, 0 are expected"),
    ("cp.async.bulk.prefetch.tensor.3d.L2.global [%rd1, {%r1, %r2}];", "2 coordinates, 3 are expected"),
    ("cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1], 20;", "20 is not one of"),
    ("wgmma.mma_async.sync.aligned.m64n12k16.f32.bf16.bf16 {%f1}, %rd2, %rd1, 0, 1, 1, 0, 0;",
     "no instruction"),
    ("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1,%f2}, %rd2, %rd1, 0, 1, 1, 0, 0;",
     "2 elements, 4 are expected"),
    ("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1,%f2,%f3,%f4}, %rd2, %rd1, 0, 2, 1, 0, 0;",
     "2 is not one of -1, 1"),
    ("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1,%f2,%f3,%f4}, %rd2, %rd1, 2, 1, 1, 0, 0;",
     "operand 4: not 0 or 1"),
    ("mbarrier.arrive.shared::cluster.b64 %rd1, [%r1];", "the sink _ is expected"),
    ("elect.sync %r1, -1;", "a pair")])
def test_what_is_wrong_names_the_line(text: str, words: str):
    with pytest.raises(PTXError, match=words) as caught: isa.check(instruction(text), "sm_90a", (8, 7))
    assert caught.value.line == 8


@pytest.mark.parametrize(("text", "arch", "version", "words"), [
    ("wgmma.fence.sync.aligned;", "sm_80", (8, 0),
     r"wgmma\.fence\.sync\.aligned needs sm_90a, the target is sm_80"),
    ("wgmma.fence.sync.aligned;", "sm_90", (8, 0), "needs sm_90a, the target is sm_90"),
    ("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r1], %r2, [%r3];", "sm_90a", (8, 0),
     r"needs .version 8\.1 on sm_90a, the text has 8\.0"),
    ("cp.async.ca.shared.global [%r1], [%rd1], 4, %p1;", "sm_80", (7, 4), r"needs .version 7\.5"),
    ("mbarrier.arrive.shared.b64 %rd1, [%r1], 2;", "sm_89", (8, 7), "needs sm_90,"),
    ("ret;", "sm_70", (7, 0), "unknown architecture sm_70")])
def test_what_a_target_lacks(text: str, arch: str, version: Version, words: str):
    with pytest.raises(PTXError, match=words): isa.check(instruction(text), arch, version)


def test_nearest_forms_are_named():
    with pytest.raises(PTXError) as caught: isa.find("cp", ("async", "bulk", "tensor", "6d", "global"))
    assert "cp.async.bulk.tensor" in caught.value.expected
    with pytest.raises(PTXError) as caught: isa.find("fam", ("rn", "f32"))
    assert "fma" in caught.value.fix
