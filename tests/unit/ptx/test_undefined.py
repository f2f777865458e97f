"""The emulator's arithmetic in C, compiled with traps for what C leaves undefined, on the ends of all types:
nothing overflows, is shifted too far, or becomes an integer that cannot hold it. `.ci/nightly` has the whole
emulator."""
from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import pytest

from tinygrad_nv.ptx.emulator.native import SOURCES
from tinygrad_nv.toolchain import find_compiler

PARTS = ("integer.c", "bits.c", "compare.c", "float.c", "half.c", "convert.c", "dot.c")
TRAPS = ("-fsanitize=undefined,float-cast-overflow", "-fsanitize-trap=all")
DRIVER = r"""
static const u64 ends[] = {0, 1, 31, 32, 63, 64, 255, 127, 128, 0x7fff, 0x8000, 0x7c00, 0x7e00, 0xfc00,
    0x7fffffff, 0x80000000, 0xffffffff, 0x7f800000, 0xff800000, 0x7fc00000, 0x4f000000, 0xcf000001,
    0x7f7fffff,
    0x7fffffffffffffff, 0x8000000000000000, 0xffffffffffffffff, 0x7ff0000000000000, 0xfff0000000000000,
    0x7ff8000000000000, 0x43e0000000000000, 0xc3e0000000000001, 0x7fefffffffffffff};
enum { ENDS = sizeof ends / sizeof *ends, FILES = 6, BYTES = 512 };
static u8 regs[FILES * BYTES] __attribute__((aligned(128)));
static u64 state = 1;
static u64 drawn(void) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return state >> 33;
}
static void fill(void) {
    for (u32 i = 0; i < sizeof regs; i += 8) memcpy(regs + i, &ends[drawn() % ENDS], 8);
    for (u32 i = 0; i < sizeof regs; i += 4) {
        u32 x = (u32)ends[drawn() % ENDS];
        if (drawn() & 1) memcpy(regs + i, &x, 4);
    }
}

static void run(Handler *handler, int from, int from_end, int to, int to_end) {
    static Machine m;
    static Warp w;
    w.regs = regs, w.alive = w.lanes = ~0u;
    for (int i = 0; i < 40; i++) for (int f = from; f < from_end; f++) for (int t = to; t < to_end; t++) {
        fill();
        Op op = {.d = 0, .a = BYTES, .b = 2 * BYTES, .c = 3 * BYTES, .e = 4 * BYTES, .guard = -1,
                 .imm = (i64)ends[drawn() % ENDS], .flags = (u32)drawn() & 127, .more = f << 8 | t,
                 .width = (u16)(1 << drawn() % 4), .vector = (u16)(drawn() % 4),
                 .wide = from_end > 1 && f > 5 && f < 8};
        if (from_end == 1) op.vector = (u16)(1 + drawn() % 2);  /* values of a word; else a rounding */
        handler(&m, &w, &op, (u32)drawn() | 1);
    }
}

static void dots(void) {
    u32 c[16 * 16] __attribute__((aligned(64)));
    for (int element = F16; element <= U4; element++) for (int i = 0; i < 60; i++) {
        for (int k = 0; k < 16; k++) {
            for (int j = 0; j < 8; j++) dot_tile.raw_b[k * dot_ld(8) + j] = (u32)ends[drawn() % ENDS];
            for (int row = 0; row < 16; row++) dot_tile.raw_a[row][k] = (u32)ends[drawn() % ENDS];
        }
        for (int at = 0; at < 256; at++) c[at] = (u32)ends[drawn() % ENDS];
        bool whole = element >= S8;
        Dot d = {.a = element, .b = element, .result = whole ? RESULT_S32 : (int)drawn() % 2,
                 .rows = 16, .n = 8, .k = 16,
                 .step = drawn() & 1 ? 16 : 8, .bits = drawn() & 1 ? 25 : 13,
                 .keep = ~0u, .exact = drawn() & 1, .saturate = drawn() & 1, .negate_a = drawn() & 1,
                 .c = c, .ldc = 16};
        dot(&d, false);
    }
}
int main(void) { CALLS dots(); return 0; }
"""
RANGES = {"cvt_integer": (0, 8, 0, 8), "cvt_from_integer": (0, 8, 8, 13), "cvt_to_integer": (8, 12, 0, 8),
          "cvt_float": (8, 12, 8, 13), "cvt_pair": (10, 11, 8, 10), "cvt_f16x2_f8x2": (13, 15, 8, 9)}


def ended(folder: Path, tmp_path: Path) -> int:
    """The exit code of the program that runs all handlers of PARTS."""
    compiler, main = find_compiler(any_c=True), tmp_path / "slice.c"
    parts = '#include "core.h"\n' + "".join(f'#include "{part}"\n' for part in PARTS)
    flags = ["-O0", "-std=gnu11", "-march=native", "-ffp-contract=off", "-fno-strict-aliasing",
             "-DSHARED_BASE=1024", "-w", f"-I{folder}", *TRAPS]

    def compiled(*more: str) -> str:
        return subprocess.run([*compiler.command, *flags, str(main), *more], capture_output=True, text=True,
                              check=True, env=compiler.environment()).stdout
    main.write_text(parts)
    names = sorted(set(re.findall(r"\bint op_(\w+)\(", compiled("-E"))))
    assert len(names) > 250
    calls = "".join("run(op_{}, {}, {}, {}, {});\n".format(name, *RANGES.get(name, (0, 1, 0, 4)))
                    for name in names)
    main.write_text(parts + DRIVER.replace("CALLS", calls))
    compiled("-o", str(tmp_path / "slice"), "-lm")
    return subprocess.run([tmp_path / "slice"], check=False, timeout=60).returncode


@pytest.mark.parametrize(("file", "sound", "wrong"), [
    ("", "", ""),
    ("convert.c", "    if (x >= limit) return highest_of(to);\n", ""),
    ("integer.c", "(u32)((i64)a * b >> 32)", "(u32)(a * b)")], ids=["as it is", "of a float", "product"])
def test_nothing_is_undefined(tmp_path: Path, file: str, sound: str, wrong: str) -> None:
    (folder := tmp_path / "csrc").mkdir()
    for each in SOURCES.iterdir():
        text = each.read_text()
        if each.name == file:
            assert text.count(sound) == 1
            text = text.replace(sound, wrong)
        (folder / each.name).write_text(text)
    assert ended(folder, tmp_path) == (-signal.SIGILL if file else 0)
