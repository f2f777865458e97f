"""The gradient of a table on the emulated GPU, checks on: every bit, rows of many tokens and of none, tokens
of no row, any extents, in any order of warps, and in graphs."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinygrad.dtype import DType

from tinygrad_nv import Tensor, dtypes, explain
from tinygrad_nv.functional import embedding
from tinygrad_nv.ptx.assemble import assemble
from tinygrad_nv.ptx.emulator import Emulator
from tinygrad_nv.runtime.device import NVDevice
from tinygrad_nv.tile.embedding.spec import SEGMENT, EmbeddingGradientSpec, Tokens
from tinygrad_nv.tile.kernel import ProgramsInTurn
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

F32, BF16, F16, S32, S64 = dtypes.float32, dtypes.bfloat16, dtypes.float16, dtypes.int32, dtypes.int64
ARCHES = ("sm_80", "sm_90a")
GUARD = 77
EPSILON = {F32: 2.0**-24, F16: 2.0**-11, BF16: 2.0**-8}


# **** references ****

def as_bits(x: np.ndarray, dtype: DType) -> np.ndarray:
    """Float32 rounded to a dtype, as its bits."""
    if dtype == F32: return x.astype(np.float32).view(np.uint32)
    if dtype == F16: return x.astype(np.float16).view(np.uint16)
    words = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((words + 0x7FFF + (words >> 16 & 1)) >> 16).astype(np.uint16)


def as_floats(bits: np.ndarray, dtype: DType) -> np.ndarray:
    """The other way round."""
    if dtype == BF16: return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float16 if dtype == F16 else np.float32).astype(np.float32)


def wanted(spec: EmbeddingGradientSpec, numbers: np.ndarray, grad: np.ndarray) -> np.ndarray:
    """Float32 sums in the order that the spec states."""
    out = np.zeros((spec.rows, spec.width), np.float32)
    for row in range(spec.rows):
        some = grad[(numbers == row) | (numbers == row - spec.rows)]
        whole = len(some) // SEGMENT
        parts = [one_by_one(some[i * SEGMENT:(i + 1) * SEGMENT]) for i in range(whole)]
        if len(some): out[row] = one_by_one([*parts, *some[whole * SEGMENT:]])
    return out


def one_by_one(rows: Any) -> np.ndarray:
    """A sum from the first to the last."""
    total = np.zeros_like(rows[0])
    for each in rows: total = total + each
    return total


# **** the kernels alone ****

def build(spec: EmbeddingGradientSpec, arch: str) -> ProgramsInTurn:
    """The kernels of the schedule that is chosen."""
    target = GPU(arch)
    return TABLE.build(spec, TABLE.choose(spec, target), target)


def launched(spec: EmbeddingGradientSpec, numbers: np.ndarray, grad: np.ndarray, arch: str, seed: int = 0,
             spoilt: tuple[str, str] = ("", "")) -> np.ndarray:
    """The gradient as bits, of numbers of rows [T] and bits of `grad` [T, H]; nothing may be found, and
    nothing beside the results written."""
    made, emu = build(spec, arch), Emulator(arch, seed=seed)
    lies = spec.tokens
    storage = np.full(lies.offset + 1 + sum((e - 1) * s for e, s in zip(lies.extents, lies.strides,
                                                                     strict=True)), 1 << 30,
                      f"i{lies.dtype.itemsize}")
    np.lib.stride_tricks.as_strided(storage[lies.offset:], lies.extents, [
        stride * storage.itemsize for stride in lies.strides])[...] = numbers.reshape(lies.extents)
    count = spec.rows * spec.width
    out = emu.alloc(np.full(count + 8, GUARD, grad.dtype))
    pointers = [out, *(emu.alloc(each.nbytes) for each in made.scratch), emu.alloc(storage), emu.alloc(grad)]
    for each in made.kernels:
        text = each.ptx.replace(*spoilt) if spoilt[0] else each.ptx
        report = emu.launch(text, each.grid, each.threads, pointers, dynamic_smem=each.dynamic_smem)
        assert report.findings == [], "\n".join(map(str, report.findings))
    got = out.numpy().view(grad.dtype)
    assert (got[count:] == GUARD).all()
    return got[:count].reshape(spec.rows, spec.width)


def checked(numbers: np.ndarray, rows: int, width: int, dtype: DType = F32, arch: str = "sm_90a",
            tokens: Tokens | None = None, seed: int = 0, spoilt: tuple[str, str] = ("", "")) -> None:
    """Random gradients: every bit of sums in the stated order, and near those of float64. A sum of n numbers
    in any order is at most n ε Σ|x| from the exact one; rounding it adds ε of the dtype."""
    spec = EmbeddingGradientSpec(rows, width, dtype, tokens or Tokens(S32, (len(numbers),), (1,)))
    random = np.random.default_rng(seed)
    bits = as_bits(random.standard_normal((len(numbers), width)).astype(np.float32), dtype)
    got = launched(spec, numbers, bits, arch, seed, spoilt)
    grad = as_floats(bits, dtype)
    np.testing.assert_array_equal(got, as_bits(wanted(spec, numbers, grad), dtype))
    exact, size = np.zeros((2, rows, width))
    for number, one in zip(np.where(numbers < 0, numbers + rows, numbers), grad, strict=True):
        if not 0 <= number < rows: continue
        exact[number] += one
        size[number] += abs(one)
    error = abs(as_floats(got, dtype) - exact)
    assert (error <= len(numbers) * EPSILON[F32] * size + EPSILON[dtype] * abs(exact) * 1.01).all()


def drawn(count: int, rows: int, seed: int = 0, beside: int = 3) -> np.ndarray:
    """Numbers of rows: a few many times, from the end too, and some of no row."""
    random = np.random.default_rng(seed)
    made = random.integers(-rows - beside, rows + beside, count)
    return np.where(random.random(count) < 0.6, random.choice([1, rows // 2, rows - 1], count), made)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_every_bit(arch: str, dtype: DType):
    for rows, width, count in ((50, 64, 300), (200, 7, 150), (9, 300, 40), (3, 264, 33), (1, 1, 65)):
        checked(drawn(count, rows), rows, width, dtype, arch, seed=count)


def test_integers():
    """Sums of whole numbers are exact, whatever their order."""
    random = np.random.default_rng(0)
    numbers, whole = drawn(500, 30), random.integers(-8, 9, (500, 40)).astype(np.float32)
    spec = EmbeddingGradientSpec(30, 40, BF16, Tokens(S32, (500,), (1,)))
    exact = np.zeros((30, 40))
    for number, one in zip(numbers, whole, strict=True):
        if -30 <= number < 30: exact[number] += one
    got = as_floats(launched(spec, numbers, as_bits(whole, BF16), "sm_90a"), BF16)
    np.testing.assert_array_equal(got, as_floats(as_bits(exact, BF16), BF16))


@pytest.mark.parametrize("arch", ARCHES)
def test_all_tokens_of_one_row(arch: str):
    """Whole segments, and a rest; a row in the middle of a tile, and one in the last tile."""
    for count in (31, 32, 33, 256, 300):
        for row in (5, 99): checked(np.full(count, row), 100, 24, BF16, arch)


@pytest.mark.parametrize("numbers", [np.full(70, 20), np.full(70, -21), np.array([1 << 30] * 40)], ids=str)
def test_tokens_of_no_row_add_nothing(numbers: np.ndarray):
    """All sums are 0, and written."""
    checked(numbers, 20, 33)


def test_int64_beyond_32_bits():
    numbers = np.array([3, 3 + (1 << 32), -(1 << 32) + 3, -17, 19, 19, 1 << 62] * 12)
    checked(numbers, 20, 16, tokens=Tokens(S64, (84,), (2,), 3))


def test_several_tiles_and_places_of_tokens():
    """Rows of many CTAs; tokens that lie apart, by rows and transposed."""
    sort = build(EmbeddingGradientSpec(9000, 8, F32, Tokens(S32, (700,), (1,))), "sm_80").kernels[0]
    assert sort.grid[0] > 90
    checked(drawn(700, 9000), 9000, 8)
    checked(drawn(60, 40), 40, 8, tokens=Tokens(S32, (12, 5), (7, 1), 2))
    checked(drawn(60, 40), 40, 8, tokens=Tokens(S32, (12, 5), (1, 13)))
    checked(np.full(1, 2), 3, 4, tokens=Tokens(S32, (1,), (0,)))


@pytest.mark.parametrize("count", [8200, 16384])
def test_many_tokens(count: int):
    """A program that sorts takes them a block at a time, or all at once."""
    checked(drawn(count, 40), 40, 4)


def test_a_table_that_ends_with_a_program():
    """The end of its last row is left by one that has no row."""
    checked(drawn(100, 64), 64, 8)


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_generated(data: st.DataObject):
    rows, count = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 200))
    lies = Tokens(data.draw(st.sampled_from([S32, S64])), (count,), (data.draw(st.integers(1, 3)),))
    checked(drawn(count, rows, data.draw(st.integers(0, 99))), rows, data.draw(st.integers(1, 300)),
            data.draw(st.sampled_from([F32, BF16, F16])), data.draw(st.sampled_from(ARCHES)), lies,
            data.draw(st.integers(0, 9)))


def test_a_row_has_the_same_bits_beside_any_others():
    """Whatever tokens of other rows stand between."""
    random = np.random.default_rng(3)
    own = as_bits(random.standard_normal((100, 40)).astype(np.float32), F32)
    made = []
    for others in (0, 37, 210):
        numbers = np.full(100 + others, 4)
        places = np.sort(random.permutation(100 + others)[:others])
        numbers[places] = random.choice([0, 1, 3, 5, 60], others)
        grad = as_bits(random.standard_normal((100 + others, 40)).astype(np.float32), F32)
        grad[numbers == 4] = own
        spec = EmbeddingGradientSpec(64, 40, F32, Tokens(S32, (100 + others,), (1,)))
        made.append(launched(spec, numbers, grad, "sm_90a", seed=others)[4])
    for each in made[1:]: np.testing.assert_array_equal(each, made[0])


# **** what it takes, what it refuses, what the checks find ****

@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a"])
@pytest.mark.parametrize(("rows", "width", "dtype"), [(128256, 4096, BF16), (50257, 768, F32), (7, 7, F16)],
                         ids=str)
def test_what_it_takes(arch: str, rows: int, width: int, dtype: DType):
    spec = EmbeddingGradientSpec(rows, width, dtype, Tokens(S32, (8192,), (1,)))
    made = build(spec, arch)
    assert len(made.kernels) == 3
    for each, registers in zip(made.kernels, (128, 64, 64), strict=True):
        found = assemble(each.ptx, arch).kernels[each.name]
        assert (found.spill_store_bytes, found.spill_load_bytes, found.stack_bytes) == (0, 0, 0)
        assert found.registers <= registers
        assert each.pdl == (arch == "sm_90a")
        assert each.dynamic_smem <= 72 << 10


@pytest.mark.parametrize("extents", [(16384,), (8, 2048)], ids=str)
def test_a_sort_of_many_tokens_has_registers(extents: tuple[int, ...]):
    spec = EmbeddingGradientSpec(128256, 64, BF16, Tokens(S32, extents, (2048, 1)[-len(extents):]))
    sort = build(spec, "sm_90a").kernels[0]
    assert assemble(sort.ptx, "sm_90a").kernels[sort.name].spill_store_bytes == 0


def test_few_tokens_have_no_segments():
    spec = EmbeddingGradientSpec(9, 4, F32, Tokens(S32, (SEGMENT - 1,), (1,)))
    made = build(spec, "sm_80")
    assert [each.name for each in made.kernels] == ["embedding_sort", "embedding_rows"]


def test_what_has_no_kernel_is_said():
    symbolic = EmbeddingGradientSpec(9, 7, F32, Tokens(S32, (4,), (1,)), True)
    assert "a symbolic number of tokens" in str(TABLE.why_not(symbolic, GPU("sm_80")))
    large = EmbeddingGradientSpec(1 << 31, 7, F32, Tokens(S32, (4,), (1,)))
    assert "2147483648 rows, at most 2147483391" in str(TABLE.why_not(large, GPU("sm_80")))


@pytest.mark.parametrize("spoilt", [
    ("bar.sync 0;", ""), ("bar.warp.sync -1;", ""), ("add.f32", "sub.f32"), ("setp.lt.u32", "setp.le.u32"),
    ("%lanemask_lt;", "%lanemask_le;")], ids=lambda each: each[0])
def test_the_checks_can_fail(spoilt: tuple[str, str]):
    """Without barriers races are found; other comparisons, sums and orders are seen."""
    with pytest.raises(AssertionError): checked(drawn(300, 50), 50, 64, BF16, spoilt=spoilt)


# **** graphs ****

@pytest.mark.sampled(1)
def test_in_graphs(gpu: NVDevice):
    """Of `embedding`, added to the gradient of a head of the same weights; the bits of two runs are the
    same."""
    random = np.random.default_rng(0)
    weight = Tensor(random.integers(-3, 4, (40, 24)), device=gpu.device).cast(BF16).contiguous().realize()
    numbers = Tensor(random.integers(-44, 44, (3, 12)).astype(np.int32), device=gpu.device).realize()

    def gradient() -> Tensor:
        hidden = embedding(weight, numbers)
        return (hidden.float() @ weight.float().T).sum().gradient(weight)[0]
    names = [each.template for each in explain(gradient()).kernels]
    assert names.count("embedding") == 2    # rows, and the gradient
    assert names.count("in_turn") == 2
    ours = gradient().float().numpy()
    np.testing.assert_array_equal(gradient().float().numpy(), ours)
    table, some = weight.float().numpy(), numbers.numpy()
    known = (some >= -40) & (some < 40)
    hidden = np.where(known[..., None], table[np.where(known, some, 0)], 0)
    exact = np.tile(hidden.sum((0, 1)), (40, 1))
    for number in some[known]: exact[number] += table.sum(0)
    np.testing.assert_allclose(ours, exact, rtol=3 * 2.0**-8, atol=1e-6)
    gpu.synchronize()
