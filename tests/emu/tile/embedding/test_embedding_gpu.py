"""Rows of a table on the emulated GPU, checks on: every bit, tokens of no row, any extents, what it takes."""
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinygrad.dtype import DType

from tinygrad_nv import Tensor, TinyJit, Variable, dtypes, explain
from tinygrad_nv.functional import embedding
from tinygrad_nv.ptx.assemble import assemble
from tinygrad_nv.ptx.emulator import Emulator
from tinygrad_nv.ptx.emulator.report import Report
from tinygrad_nv.runtime.device import NVDevice
from tinygrad_nv.tile.embedding.spec import EmbeddingSpec, Tokens
from tinygrad_nv.tile.kernel import TileKernel
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

F32, BF16, U8, S32, S64 = dtypes.float32, dtypes.bfloat16, dtypes.uint8, dtypes.int32, dtypes.int64
ARCHES = ("sm_80", "sm_90a")
GUARD = 77


def build(spec: EmbeddingSpec, arch: str) -> TileKernel:
    """The kernel of the default schedule."""
    made: TileKernel = TABLE.build(spec, TABLE.choose(spec, GPU(arch)), GPU(arch))
    return made


def checked(rows: int, width: int, count: int, arch: str, dtype: DType = F32, tokens: DType = S32,
            stride: int = 1, most: int | None = None, seed: int = 0,
            spoilt: tuple[str, str] = ("", "")) -> Report:
    """`count` tokens `stride` apart, at most `most` where they are symbolic: bits, and none beside them."""
    random, size = np.random.default_rng(seed), f"u{dtype.itemsize}"
    spec = EmbeddingSpec(rows, width, dtype, Tokens(tokens, (most or count,), (stride,), 1), most is not None)
    made, emu = build(spec, arch), Emulator(arch, seed=seed)
    weight = random.integers(0, 1 << 16, (rows, width)).astype(size)
    numbers = np.full(2 + (count - 1) * stride, 1 << 30, f"i{tokens.itemsize}")
    numbers[1::stride] = random.integers(-rows - 3, rows + 3, count)
    out = emu.alloc(np.full(((most or count) * width + 8), GUARD, size))
    text = made.ptx.replace(*spoilt) if spoilt[0] else made.ptx
    report = emu.launch(text, made.grid_for(count), made.threads,
                        [out, emu.alloc(weight), emu.alloc(numbers), *([np.uint32(count)] if most else [])])
    assert report.findings == [], "\n".join(map(str, report.findings))
    wanted = np.full((most or count) * width + 8, GUARD, size)
    for row, number in zip(wanted[:count * width].reshape(count, width), numbers[1::stride], strict=True):
        row[:] = weight[number] if -rows <= number < rows else 0
    np.testing.assert_array_equal(out.numpy().view(size), wanted)
    return report


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("tokens", [S32, S64], ids=str)
def test_every_bit(arch: str, tokens: DType):
    for width, dtype in ((64, F32), (7, F32), (7, BF16), (6, BF16), (1028, BF16), (2056, F32), (1, BF16),
                         (144, U8), (6, U8), (7, U8)):
        checked(9, width, 5, arch, dtype, tokens)
    checked(50, 16, 300, arch, BF16, tokens, stride=3)
    checked(50, 16, 5, arch, BF16, tokens, most=40)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_generated(data: st.DataObject):
    count = data.draw(st.integers(1, 60))
    checked(data.draw(st.integers(1, 40)), data.draw(st.integers(1, 300)), count,
            data.draw(st.sampled_from(ARCHES)), data.draw(st.sampled_from([F32, BF16])),
            data.draw(st.sampled_from([S32, S64])), data.draw(st.integers(1, 4)),
            data.draw(st.sampled_from([None, count, count + 7])), data.draw(st.integers(0, 9)))


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a"])
@pytest.mark.parametrize(("width", "dtype"), [(4096, BF16), (4096, F32), (128, BF16), (7, F32)], ids=str)
def test_what_it_takes(arch: str, width: int, dtype: DType):
    spec = EmbeddingSpec(128256, width, dtype, Tokens(S32, (64,), (1,)))
    made = build(spec, arch)
    found = assemble(made.ptx, arch).kernels[made.name]
    assert (found.spill_store_bytes, found.spill_load_bytes, found.stack_bytes) == (0, 0, 0)
    assert found.registers <= 48
    assert made.pdl == (arch == "sm_90a")


def test_what_has_no_kernel_is_said():
    for rows, count, words in ((1 << 31, 4, "2147483648 rows"), (9, 1 << 31, "2147483648 tokens")):
        spec = EmbeddingSpec(rows, 7, U8, Tokens(S32, (count,), (1,)))
        assert TABLE.why_not(spec, GPU("sm_80")) == f"{words}, at most 2147483391"


def test_tokens_of_tables_of_many_elements():
    """Rows one by one, where 32 bits do not count all elements: as many threads, and the same bits."""
    small, large = (EmbeddingSpec(rows, 8, F32, Tokens(S32, (64,), (1,))) for rows in (1 << 10, 1 << 29))
    assert TABLE.choose(small, GPU("sm_80")).rows > TABLE.choose(large, GPU("sm_80")).rows == 1
    assert build(large, "sm_80").ptx


def test_rows_are_moved_by_16_bytes_in_whole_sectors():
    report = checked(9, 2048, 6, "sm_90a", BF16)
    moved = [site for site in report.stats.sites if ".v4.b32" in site.opcode and "global" in site.opcode]
    assert len(moved) == 2
    for site in moved: assert site.sectors * 32 == site.threads * 16


def test_the_checks_can_fail():
    with pytest.raises(AssertionError): checked(9, 64, 40, "sm_80", spoilt=("setp.lt.s32", "setp.le.s32"))


@pytest.mark.sampled(1)
def test_in_graphs(gpu: NVDevice):
    random = np.random.default_rng(0)
    weight = Tensor(random.standard_normal((40, 24)), device=gpu.device).cast(BF16).contiguous().realize()
    numbers = Tensor(random.integers(-44, 44, (3, 12)), device=gpu.device)
    for tokens in (numbers.cast(S32).contiguous().realize(), numbers.realize()):
        for some in (tokens, tokens.T[2:9, 1:3], tokens[0, 0]):
            assert [each.template for each in explain(embedding(weight, some)).kernels] == ["embedding"]
            number, table = some.numpy(), weight.float().numpy()
            known = ((number >= -40) & (number < 40))[..., None]
            rows = np.where(known, table[np.where(known[..., 0], number, 0)], 0)
            np.testing.assert_array_equal(embedding(weight, some).float().numpy(), rows)
    gpu.synchronize()


def test_some_rows_of_a_step_and_a_gradient(gpu: NVDevice):
    """Hidden rows that are computed; a symbolic number of tokens; the gradient."""
    x = Tensor(np.arange(60, dtype=np.float32).reshape(12, 5), device=gpu.device).realize()
    wanted = Tensor(np.array([3, 11, 0, 5], np.int32), device=gpu.device).realize()
    step = TinyJit(lambda which: embedding((x + 1).contiguous(), which).contiguous().realize())
    for rows in (1, 4, 2):
        length = Variable("rows", 1, 4).bind(rows)
        got = step(wanted[:length])[:rows].numpy()[:rows]
        np.testing.assert_array_equal(got, x.numpy()[[3, 11, 0, 5][:rows]] + 1)
    grad, = embedding(x, wanted).sum().gradient(x)
    np.testing.assert_array_equal(grad.numpy()[:, 0], [1, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 1])
    gpu.synchronize()
