"""bench/timing/emitted.py: names and comments are no difference, anything else is; and how two files
differ."""
from __future__ import annotations

import re
from collections import Counter

import pytest

from bench.timing import emitted, emitted_cases
from bench.timing.emitted_cases import cases
from tinygrad_nv.cpu.target import CPU

PTX = """.version 8.7
.target sm_80
// launch: dynamic_smem=0
.visible .entry gemm_mma(
    .param .u64 .ptr .global .align 16 out,
    .param .align 64 .b8 map_a[128])
.reqntid 64
{
    .reg .u32 %u<3>;
    .reg .pred %p<1>;
    .reg .u64 %out;
    .reg .u32 %tid_x;
    .reg .u32 %tile;
    .shared .align 1024 .b8 ring[8192];

    ld.param.u64 %out, [out];
    mov.u32 %tid_x, %tid.x;
    mov.u32 %u0, ring+16;
    mov.u32 %tile, 0;
    $loop_1:
        // a step
        add.u32 %u1, %u0, %tid_x;
        ld.shared.u32 %u2, [%u1+4];
        setp.lt.u32 %p0, %tile, %u2;
        @%p0 bra $loop_1;
    bar.sync 0;
    ret;
}
"""
PTX_NAMES = {"gemm_mma": "matmul", "tile": "step", "ring": "bar", "loop_1": "again_7", "out": "result",
             "map_a": "a_map", "// a step": "/* of K */", "u<3>": "u<9>", "step": "u8",
             r"\n    \.reg \.u32 %u8;": ""}
PTX_CHANGES = (("add.u32", "sub.u32"), ("%u0, %tid_x", "%u0, %tile"), ("ring+16", "ring+32"),
               ("8192", "4096"), (".reqntid 64", ".reqntid 128"), ("%tid.x", "%tid.y"), ("[128]", "[64]"),
               ("bar.sync 0", "bar.sync 1"), ("ret;", "exit;"), ("sm_80", "sm_89"),
               (".reg .u32 %tile", ".reg .s32 %tile"),
               ("        @%p0 bra $loop_1;\n    bar", "        @%p0 bra $end;\n    $end:\n    bar"))

C = """#define W 8
typedef struct { float *sums; int many; } scratch;
INLINE s64 least(s64 a, s64 b) { return a < b ? a : b; }
void decode(u16 *restrict out, const u16 *restrict q, int core_id) {
  float total[4][W] __attribute__((aligned(64))), top = -__builtin_inff();  // running
  VECTOR(float, 4) h; union { float f; s32 i; } both = {top};
  for (s64 r = 0, n = least(core_id, 4); r < n; r++) {
    vf x = load_bf16(q + r); total[r][0] += sum_(x) * 1e-3f;
  }
  for (s64 r = 0; r < 4; r++) {
    scratch z; z.many = both.i; h.x = z.sums[r] - top; store_n_bf16(out + r, h.x, 1);
  }
}
"""
C_NAMES = {"decode": "attention", "least": "smaller", "total": "row_sum", "top": "row_max", "many": "count",
           "scratch": "memory", "sums": "added", "z": "here", "core_id": "part", "out": "result", "r": "row",
           "both": "bits", "i": "whole", "h": "half", "// running": "/* of all keys */", "  ": " ",
           "a < b ": "a<b"}
C_CHANGES = (("r < n; r++", "r < n; r--"), ("a < b ? a : b", "a < b ? b : a"), ("load_bf16", "load_f16"),
             ("h.x =", "h.y ="), ("* 1e-3f", "* 1e-4f"), ("out + r", "q + r"), ("const u16", "u16"),
             ("z.sums[r] - top", "top - z.sums[r]"), ("W 8", "W 16"), ("both.i", "both.f"),
             ("s64 r = 0; r < 4", "int r = 0; r < 4"))


def one(text: str = "", schedule: str = "mma", threads: int = 64) -> emitted.Record:
    return emitted.record("gemm", "PTX", schedule, [{"threads": threads}], text)


@pytest.mark.parametrize(("text", "names", "normal"), [(PTX, PTX_NAMES, emitted.ptx_text),
                                                       (C, C_NAMES, emitted.c_text)], ids=["PTX", "C"])
def test_names_and_comments_are_no_difference(text, names, normal):
    renamed = text
    for old, new in names.items():
        pattern = rf"(?<!\w){old}(?!\w)"
        assert re.search(pattern, renamed), old
        renamed = re.sub(pattern, new, renamed)
        assert normal(renamed) == normal(text), (old, new)


@pytest.mark.parametrize(("old", "new"), PTX_CHANGES)
def test_other_changes_of_ptx_are(old: str, new: str):
    assert old in PTX
    assert emitted.ptx_text(PTX.replace(old, new)) != emitted.ptx_text(PTX)


@pytest.mark.parametrize(("old", "new"), C_CHANGES)
def test_other_changes_of_c_are(old: str, new: str):
    assert old in C
    assert emitted.c_text(C.replace(old, new)) != emitted.c_text(C)


def test_a_local_variable_of_one_scope_renamed():
    text = "void f(int a) { { int x = a; g(x); } { int x = 2; g(x); } g(a); }"
    other = "void f(int a) { { int y = a; g(y); } { int x = 2; g(x); } g(a); }"
    assert emitted.c_text(text) == emitted.c_text(other)
    assert emitted.c_text(text) != emitted.c_text(text.replace("g(a)", "g(x)"))


def test_what_differs_is_said(capsys):
    a = {"same": one("ret;\n"), "gone": one(), "text": one("add;\nret;\n"), "threads": one(),
         "other schedule": one(schedule="mma 64x64")}
    b = {"same": one("ret;\n"), "new": one(), "text": one("sub;\nret;\n"), "threads": one(threads=128),
         "other schedule": one(schedule="mma 64x32")}
    assert list(emitted.compare(a, b)) == [("text", ["text"]), ("threads", ["launch"]),
                                           ("other schedule", ["schedule"])]
    assert emitted.report(a, b, {}, (), 40)
    said = capsys.readouterr().out
    for words in ("in the first alone: gone", "in the second alone: new", "schedule: mma 64x64 -> mma 64x32",
                  "launch: threads 64 -> 128", "-add;", "+sub;",
                  "1 equal, 3 differ (schedule 1, launch 1, text 1), 1 in the first alone, 1 in the second"):
        assert words in said
    assert list(emitted.compare(a, b, left_out=("schedule", "launch"))) == [("text", ["text"])]
    both = [{"text": each["text"]} for each in (a, b)]
    assert emitted.report(*both, {}, (), 0)
    assert list(emitted.compare(a, b, {"add": "sub"}, ("schedule", "launch"))) == []
    assert not emitted.report(a, a, {}, (), 40)


def test_cases_are_of_all_families_and_their_kernels_are_made():
    every = list(cases())
    assert len({case.name for case in every}) == len(every) > 220
    found = Counter(case.family for case in every)
    families = ("gemm", "gemv", "attention", "attention backward", "decode", "kv_append", "norm", "sampling",
                "embedding")
    assert all(found[family] >= 8 and any(name.startswith("CPU") and family in name for name in found)
               for family in families)
    few = list({case.family: case for case in every}.values())
    made = emitted.make_records(few)
    assert all(made[case.name]["kind"] in ("PTX", "C") and made[case.name]["launch"] for case in few)
    assert "header: vector.h" in made
    assert not emitted.report(made, emitted.make_records(few), {}, (), 40)


@pytest.mark.slow
def test_no_template_copies_by_cp_async_with_a_cache_policy():
    """Of those ptxas makes an illegal instruction; the builder refuses them."""
    texts = [kernel.ptx for case in cases() if not isinstance(case.target, CPU) and case.schedule is None
             for kernel in emitted_cases.emit(case).kernels]
    assert sum("cp.async.cg" in text for text in texts) > 20
    assert not any(re.search(r"cp\.async\.c[ag]\S*cache_hint", text) for text in texts)
