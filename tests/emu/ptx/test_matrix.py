"""ldmatrix, stmatrix, movmatrix and wmma."""
from __future__ import annotations

import numpy as np
import pytest

from tests.support.ptx.kernel_texts import run
from tests.support.ptx.tensor_case import (
    HEADER,
    decode,
    encode,
    integers,
    kinds_found,
    listed,
    numbers,
    randoms,
    words,
)
from tinygrad_nv.errors import PTXError
from tinygrad_nv.ptx.emulator import Emulator
from tinygrad_nv.ptx.emulator.fragments import matrix_fragment
from tinygrad_nv.ptx.emulator.report import Report

# lane l copies 16 bytes of `in` to %s + 16 l of shared memory
COPY = """.reg .b64 %in, %out, %o, %g;
.reg .b32 %t, %s, %a, %x, %r<5>, %u<5>;
.shared .align 128 .b8 tile[8192];
ld.param.u64 %in, [in];
ld.param.u64 %out, [out];
mov.u32 %t, %tid.x;
mul.wide.u32 %o, %t, 4;
mov.u32 %s, tile;
"""


def launch(body: str, data: np.ndarray, results: int, arch: str = "sm_90a", dtype: type = np.uint32,
           block: int = 32) -> tuple[np.ndarray, Report]:
    """Runs a body of one warp on `in` (copied to shared memory too) and gives `out`."""
    size = -(-data.nbytes // 128) * 128
    copies = "".join(f"add.u64 %g, %in, %o;\nld.global.b32 %x, [%g + {i}];\nshl.b32 %a, %t, 2;\n"
                     f"add.u32 %a, %a, %s;\n"
                     f"st.shared.b32 [%a + {i}], %x;\n" for i in range(0, size, 128))
    text = HEADER.format(arch=arch) + "{\n" + COPY + copies + "bar.sync 0;\n" + body + "ret;\n}"
    emu = Emulator(arch=arch)
    padded = np.zeros(size + 4 * (block - 32), np.uint8)  # threads past the first warp read further
    padded[:data.nbytes] = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    out = emu.alloc(np.zeros(results, dtype))
    report = emu.launch(text, 1, block, [emu.alloc(padded), out])
    return out.numpy(), report


def row_address(pitch: int) -> str:
    """%a: the address of row %t."""
    return f"mad.lo.u32 %a, %t, {pitch}, %s;\n"


def store(count: int) -> str:
    return "add.u64 %g, %out, %o;\n" + "".join(f"st.global.b32 [%g + {128 * i}], %r{i};\n"
                                               for i in range(count))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("pitch", "conflicts"), [(16, 0), (48, 0), (128, 7)])
def test_ldmatrix(count: int, transposed: bool, pitch: int, conflicts: int) -> None:
    """Register i has matrix i, from the rows that lanes 8i .. 8i + 7 point at; other lanes may point
    anywhere."""
    rng = np.random.default_rng(1)
    data = rng.integers(0, 1 << 16, (32, pitch // 2)).astype(np.uint16)
    body = (row_address(pitch) + f"setp.ge.u32 %p, %t, {8 * count};\nselp.b32 %a, 3, %a, %p;\n"
            + f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' * transposed}.shared.b16 "
            + f"{listed('r', count)}, [%a];\n"
            + store(count))
    got, report = launch(".reg .pred %p;\n" + body, data, 32 * count)
    assert not report.findings
    row, column = matrix_fragment(transposed)
    halves = got.reshape(count, 32, 1) >> np.uint32([0, 16]) & 0xffff
    for i in range(count): np.testing.assert_array_equal(halves[i], data[8 * i + row, column])
    (site,) = (s for s in report.stats.sites if s.opcode.startswith("ldmatrix"))
    assert site.conflicts == conflicts * count


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_stmatrix(count: int, transposed: bool) -> None:
    rng = np.random.default_rng(2)
    data = rng.integers(0, 1 << 32, (count, 32)).astype(np.uint32)
    loads = "".join(f"add.u64 %g, %in, %o;\nld.global.b32 %r{i}, [%g + {128 * i}];\n" for i in range(count))
    body = (loads + "add.u32 %s, %s, 4096;\n" + row_address(16)
            + f"stmatrix.sync.aligned.m8n8.x{count}{'.trans' * transposed}.shared.b16 [%a], "
            + f"{listed('r', count)};\n"
            + "bar.sync 0;\nshl.b32 %a, %t, 2;\nadd.u32 %a, %a, %s;\n"
            + "".join(f"ld.shared.b32 %r{i}, [%a + {128 * i}];\n" for i in range(count)) + store(count))
    got, report = launch(body, data, 32 * count)
    assert not report.findings
    matrices = got.view(np.uint16).reshape(count, 8, 8)
    row, column = matrix_fragment(transposed)
    halves = data[:, :, None] >> np.uint32([0, 16]) & 0xffff
    np.testing.assert_array_equal(matrices[:, row, column], halves)


def test_movmatrix() -> None:
    data = np.random.default_rng(3).integers(0, 1 << 16, (8, 8)).astype(np.uint16)
    row, column = matrix_fragment(False)
    registers = data[row, column].astype(np.uint32) @ np.array([1, 1 << 16], np.uint32)
    body = ("add.u64 %g, %in, %o;\nld.global.b32 %x, [%g];\nmovmatrix.sync.aligned.m8n8.trans.b16 %r0, %x;\n"
            + store(1))
    got, report = launch(body, registers, 32)
    assert not report.findings
    np.testing.assert_array_equal(got[:, None] >> np.uint32([0, 16]) & 0xffff, data.T[row, column])


@pytest.mark.parametrize(("instruction", "kind"), [
    ("add.u32 %a, %a, 8;\nldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r0, %r1, %r2, %r3}, [%a];",
     "misaligned"),
    ("add.u32 %a, %a, 4096;\nldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r0}, [%a];", "uninitialized"),
    ("add.u32 %a, %a, 8000;\nldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r0, %r1, %r2, %r3}, [%a];",
     "out-of-bounds"),
    ("mov.b32 %r0, %x;\nadd.u32 %a, %a, 8192;\nstmatrix.sync.aligned.m8n8.x1.shared.b16 [%a], {%r0};",
     "out-of-bounds"),
])
def test_what_goes_wrong(instruction: str, kind: str) -> None:
    _, report = launch(row_address(16) + instruction + "\n", np.zeros((32, 8), np.uint16), 1)
    assert kind in kinds_found(report)


def test_rows_of_another_warp_need_a_barrier() -> None:
    """Warp 1 loads with ldmatrix what warp 0 stores."""
    store_rows = "mov.b32 %r0, %x;\nsetp.lt.u32 %p, %t, 32;\n@%p st.shared.b32 [%a + 4096], %x;\n"
    load_rows = ("and.b32 %x, %t, 7;\nmad.lo.u32 %a, %x, 16, %s;\nsetp.lt.u32 %p, %t, 32;\n@%p bra end;\n"
                 "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r0}, [%a + 4096];\nend:\n")
    for barrier, found in (("", {"race"}), ("bar.sync 0;\n", set())):
        body = ".reg .pred %p;\nshl.b32 %a, %t, 2;\nadd.u32 %a, %a, %s;\n" + store_rows + barrier + load_rows
        _, report = launch(body, np.zeros(96, np.uint32), 1, block=64)
        assert kinds_found(report) == found, report.findings


def test_matrices_of_later_architectures_are_refused() -> None:
    with pytest.raises(PTXError, match="m16n16"):
        launch("ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r0, %r1}, [%s];\n",
               np.zeros(32, np.uint32), 1)


# **** wmma ****

WMMA = [*[((m, n, 16), d, kind, kind) for m, n in ((16, 16), (32, 8), (8, 32)) for d, kind in
          (("f32", "f16"), ("f16", "f16"), ("f32", "bf16"), ("s32", "s8"), ("s32", "u8"))],
        ((16, 16, 8), "f32", "tf32", "tf32"), ((8, 8, 32), "s32", "s4", "s4"),
        ((8, 8, 32), "s32", "u4", "u4")]
BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "s8": 1, "u8": 1, "f32": 4, "s32": 4}


def fragment_size(kind: str, rows: int, columns: int, operand: bool) -> int:
    """Registers that the PTX manual gives a fragment."""
    if operand and kind == "f16": return 8
    return max(rows * columns * {"s4": 4, "u4": 4}.get(kind, 8 * BYTES.get(kind, 0)) // 1024, 1)


def packed(codes: np.ndarray, kind: str) -> np.ndarray:
    """Codes as bytes of memory."""
    if kind in ("s4", "u4"): return (codes.reshape(-1, 2) @ np.array([1, 16])).astype(np.uint8)
    return codes.astype({1: np.uint8, 2: np.uint16, 4: np.uint32}[BYTES[kind]]).reshape(-1).view(np.uint8)


@pytest.mark.sampled(18)
@pytest.mark.parametrize(("shape", "d", "a", "b"), WMMA, ids=lambda x: "x".join(map(str, x))
                         if isinstance(x, tuple) else x)
@pytest.mark.parametrize(("left", "right", "out"), [("row", "col", "row"), ("col", "row", "col"),
                                                    ("row", "row", "col")])
def test_wmma(shape: tuple[int, int, int], d: str, a: str, b: str, left: str, right: str, out: str) -> None:
    m, n, k = shape
    if a in ("s4", "u4"): left, right = "row", "col"  # the only layouts they have

    rng = np.random.default_rng(4)
    x, y = integers(rng, a, (m, k)), integers(rng, b, (k, n))
    c = rng.integers(-9, 10, (m, n))
    parts = [packed(np.ascontiguousarray(x if left == "row" else x.T), a),
             packed(np.ascontiguousarray(y if right == "row" else y.T), b), packed(words(c, d), d)]
    starts = np.cumsum([0, *(-(-len(p) // 32) * 32 for p in parts)])
    data = np.zeros(starts[-1], np.uint8)
    for part, at in zip(parts, starts, strict=False): data[at:at + len(part)] = part
    na, nb, nc = fragment_size(a, m, k, True), fragment_size(b, n, k, True), fragment_size(d, m, n, False)
    name = f"m{m}n{n}k{k}"
    steps = k if left == "row" else m, n if right == "row" else k, n
    types = f"{d}.{d}" if a == "f16" else f"{d}.{a}.{b}.{d}"
    body = (f".reg .b32 %fa<{na}>, %fb<{nb}>, %fc<{nc}>;\n"
            f"wmma.load.a.sync.aligned.{left}.{name}.shared.{a} {listed('fa', na)}, [%s], {steps[0]};\n"
            f"add.u64 %g, %in, {starts[1]};\n"
            f"wmma.load.b.sync.aligned.{right}.{name}.global.{b} {listed('fb', nb)}, [%g], {steps[1]};\n"
            f"add.u32 %s, %s, {starts[2]};\n"
            f"wmma.load.c.sync.aligned.row.{name}.shared.{d} {listed('fc', nc)}, [%s];\n"
            f"wmma.mma.sync.aligned.{left}.{right}.{name}.{types} {listed('fc', nc)}, {listed('fa', na)}, "
            f"{listed('fb', nb)}, {listed('fc', nc)};\n"
            f"wmma.store.d.sync.aligned.{out}.{name}.{d} [%out], {listed('fc', nc)}, "
            f"{n if out == 'row' else m};\n")
    got, report = launch(body, data, m * n, dtype=np.uint16 if d == "f16" else np.uint32)
    assert not report.findings, report.findings
    result = got.reshape(m, n) if out == "row" else got.reshape(n, m).T
    want = decode(x, a) @ decode(y, b) + c
    np.testing.assert_array_equal(numbers(np.ascontiguousarray(result).astype(np.uint32), d), want)


def test_wmma_of_single_bits() -> None:
    rng = np.random.default_rng(5)
    x, y = rng.integers(0, 2, (8, 128)), rng.integers(0, 2, (8, 128))
    data = np.packbits(np.concatenate([x, y]).astype(np.uint8), axis=1, bitorder="little")
    body = ("wmma.load.a.sync.aligned.row.m8n8k128.shared.b1 {%r0}, [%s], 128;\nadd.u32 %s, %s, 128;\n"
            "wmma.load.b.sync.aligned.col.m8n8k128.shared.b1 {%r1}, [%s], 128;\n"
            "mov.b32 %r2, 0;\nmov.b32 %r3, 5;\nwmma.mma.xor.popc.sync.aligned.row.col.m8n8k128.s32.b1.b1.s32 "
            "{%r2, %r3}, {%r0}, {%r1}, {%r2, %r3};\n"
            "wmma.store.d.sync.aligned.row.m8n8k128.global.s32 [%out], {%r2, %r3}, 8;\n")
    got, report = launch(body, data, 64)
    assert not report.findings
    product = (x[:, None] ^ y[None]).sum(-1)
    assert set((got.reshape(8, 8) - product).flat) == {0, 5}  # register 1 of each lane began at 5


@pytest.mark.parametrize(("shape", "element", "stride"), [("m8n8k128", "b1", 31), ("m8n8k32", "s4", 1)])
def test_wmma_of_an_odd_stride_keeps_to_its_fragment(shape: str, element: str, stride: int) -> None:
    """Rows then begin within a byte, whose last elements are none of the lane's. Written, they would change
    constants of the kernel."""
    emu = Emulator()
    out = emu.alloc(np.zeros((6, 32), np.uint32))
    constants = (0, 4, 5, 31, 1, 32)
    body = ("mad.wide.u32 %d1, %t, 4, %a0; mov.b32 %r3, s;\n"
            + "".join(f"mov.b32 %r1, {n};\n" for n in constants)
            + f"wmma.load.a.sync.aligned.row.{shape}.shared.{element} {{%r2}}, [%r3], {stride};\n"
            + "".join(f"mov.b32 %r1, {n}; st.global.u32 [%d1+{128 * i}], %r1;\n"
                      for i, n in enumerate(constants)))
    run(body, out, emu=emu, variables=".shared .align 128 .b8 s[4096];\n")
    assert (out.numpy().reshape(6, 32) == np.array(constants)[:, None]).all()


def test_wmma_of_doubles() -> None:
    rng = np.random.default_rng(6)
    x, y, c = (rng.integers(-9, 10, shape).astype(np.float64) for shape in ((8, 4), (4, 8), (8, 8)))
    data = np.concatenate([x.reshape(-1), y.reshape(-1), c.reshape(-1)])
    body = (".reg .f64 %fa, %fb, %fc<2>;\n"
            "wmma.load.a.sync.aligned.row.m8n8k4.shared.f64 {%fa}, [%s], 4;\nadd.u32 %s, %s, 256;\n"
            "wmma.load.b.sync.aligned.row.m8n8k4.shared.f64 {%fb}, [%s], 8;\nadd.u32 %s, %s, 256;\n"
            "wmma.load.c.sync.aligned.row.m8n8k4.shared.f64 {%fc0, %fc1}, [%s], 8;\n"
            "wmma.mma.sync.aligned.row.row.m8n8k4.f64.f64.f64.f64 {%fc0, %fc1}, {%fa}, {%fb}, {%fc0, %fc1};\n"
            "wmma.store.d.sync.aligned.row.m8n8k4.global.f64 [%out], {%fc0, %fc1}, 8;\n")
    got, report = launch(body, data, 64, dtype=np.float64)
    assert not report.findings
    np.testing.assert_array_equal(got.reshape(8, 8), x @ y + c)


def test_wmma_rounds_like_mma() -> None:
    """Random numbers: 17 terms truncated below 2^-24 of the sum of magnitudes, and the result at 2^-23."""
    rng = np.random.default_rng(7)
    x, y = randoms(rng, "bf16", (16, 16)), randoms(rng, "bf16", (16, 16))
    data = packed(np.concatenate([x, y]), "bf16")
    body = (".reg .b32 %fa<4>, %fb<4>, %fc<8>;\n" + "".join(f"mov.b32 %fc{i}, 0;\n" for i in range(8))
            + f"wmma.load.a.sync.aligned.row.m16n16k16.shared.bf16 {listed('fa', 4)}, [%s], 16;\n"
            + "add.u32 %s, %s, 512;\n"

            + f"wmma.load.b.sync.aligned.row.m16n16k16.shared.bf16 {listed('fb', 4)}, [%s], 16;\n"
            + f"wmma.mma.sync.aligned.row.row.m16n16k16.f32.bf16.bf16.f32 {listed('fc', 8)}, "
            + f"{listed('fa', 4)}, {listed('fb', 4)}, {listed('fc', 8)};\n"
            + f"wmma.store.d.sync.aligned.row.m16n16k16.global.f32 [%out], {listed('fc', 8)}, 16;\n")
    got, _ = launch(body, data, 256, dtype=np.float32)
    left, right = decode(x, "bf16"), decode(y, "bf16")
    error = np.abs(got.reshape(16, 16) - left @ right)
    assert (error <= np.abs(left) @ np.abs(right) * (17 * 2.0 ** -24 + 2.0 ** -23)).all()
    np.testing.assert_array_equal(encode(left, "bf16"), x)
