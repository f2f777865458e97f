"""Rows of a table on the CPU: the bits of the body, in graphs and steps."""
from __future__ import annotations

import numpy as np
import pytest
from tinygrad import Tensor, TinyJit, Variable, dtypes
from tinygrad.dtype import DType

from tinygrad_nv import disabled, explain
from tinygrad_nv.cpu.isa import ISA
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.errors import SpecError
from tinygrad_nv.functional import embedding
from tinygrad_nv.tile.embedding.spec import EmbeddingSpec, Tokens
from tinygrad_nv.tile.templates import TABLE

F32, BF16, F16 = dtypes.float32, dtypes.bfloat16, dtypes.float16
RNG = np.random.default_rng
pytestmark = pytest.mark.usefixtures("cpu_device")


def table(v: int, h: int, dtype: DType = F32) -> Tensor:
    return Tensor(RNG(v).standard_normal((v, h)).astype(np.float32)).cast(dtype).contiguous().realize()


def numbers(v: int, *shape: int, dtype: DType = dtypes.int32) -> Tensor:
    """Tokens, some of them many times, some from the end and some of no row."""
    ids = RNG(1).integers(-v - 4, v + 4, shape)
    ids[::2] %= 5
    return Tensor(ids).cast(dtype).contiguous().realize()


def templates(*tensors: Tensor) -> list[str | None]:
    return [each.template for each in explain(*tensors).kernels]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("dtype", "of"), [(F32, dtypes.int32), (BF16, dtypes.int64), (F16, dtypes.int32)],
                         ids=str)
def test_bits_are_those_of_the_body(dtype: DType, of: DType):
    weight, tokens = table(50, 40, dtype), numbers(50, 4, 12, dtype=of)
    for some in (tokens, tokens.T[2:9, 1:3], *[tokens[0, 0]] * (dtype == F32)):
        grad = Tensor(RNG(2).integers(-4, 5, (*some.shape, 40))).cast(dtype).contiguous().realize()

        def both(some: Tensor = some, grad: Tensor = grad) -> list[Tensor]:
            made = embedding(weight, some)
            return [made, *made.gradient(weight, gradient=grad)]
        assert templates(*both()) == ["embedding"] * 2
        ours = [each.float().numpy() for each in both()]
        with disabled(): theirs = [each.float().numpy() for each in both()]
        for a, b in zip(ours, theirs, strict=True): np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("shape", [(3, 77), (500, 256), (400, 520)], ids=str)
def test_gradients_of_several_programs(shape: tuple[int, int]):
    """Long chains, columns beyond whole blocks, blocks of several threads: sums in the order of tokens."""
    weight, tokens = table(*shape), numbers(shape[0], 300)
    grad = Tensor(RNG(2).standard_normal((300, shape[1])).astype(np.float32)).realize()
    made, = embedding(weight, tokens).gradient(weight, gradient=grad)
    exact = np.zeros(shape, np.float32)
    for number, row in zip(tokens.numpy(), grad.numpy(), strict=True):
        if -shape[0] <= number < shape[0]: exact[number] += row
    np.testing.assert_array_equal(made.numpy(), exact)


def test_few_tokens_are_shared_out():
    """As many parts as there is work for threads, of fewer tokens than a program has of many."""
    spec = EmbeddingSpec(100, 4096, F32, Tokens(dtypes.int32, (8,), (1,)))
    assert [TABLE.choose(spec, CPU(ISA("avx2"), threads)).parts for threads in (1, 2, 64)] == [1, 2, 2]


def test_a_large_table_is_one_kernel():
    weight, tokens = table(33000, 3), numbers(33000, 5)
    made = embedding(weight, tokens)
    assert templates(made) == ["embedding"]
    with disabled():
        assert len(explain(weight[tokens]).kernels) == 2
        wanted = weight[tokens].numpy()
    np.testing.assert_array_equal(made.numpy(), wanted)


def test_a_symbolic_number_of_tokens():
    weight, tokens, n = table(20, 8), numbers(20, 2, 9)[1], Variable("n", 1, 9)
    found = embedding(weight, tokens[:n.bind(4)].reshape(1, n.bind(4))).contiguous()
    assert "embedding" in templates(found)

    @TinyJit
    def step(some: Tensor) -> Tensor: return embedding(weight, some).contiguous().realize()
    wanted = embedding(weight, tokens).numpy()
    for count in (9, 3, 1, 6):
        got = step(tokens[:n.bind(count)])
        np.testing.assert_array_equal(got.shrink_to((count, 8)).numpy(), wanted[:count])


@pytest.mark.parametrize("dtype", [dtypes.uint8, dtypes.int8], ids=str)
def test_rows_of_bytes(dtype: DType):
    rows, tokens = RNG(3).integers(-128, 128, (50, 7)).astype(np.int8), numbers(50, 6)
    weight = Tensor(rows.view(np.uint8), device="CPU").bitcast(dtype).contiguous().realize()
    made = embedding(weight, tokens)
    assert templates(made) == ["embedding"]
    with disabled(): np.testing.assert_array_equal(made.numpy(), embedding(weight, tokens).numpy())


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_rows_of_any_bits(dtype: DType):
    """Signalling NaN, too, whose bits a conversion would change."""
    bits, tokens = RNG(3).integers(0, 256, (50, 20 * dtype.itemsize)).astype(np.uint8), numbers(50, 60)
    bits[:, dtype.itemsize - 1::dtype.itemsize] |= 0x7F
    weight = Tensor(bits, device="CPU").bitcast(dtype).contiguous().realize()
    made, known = embedding(weight, tokens), (tokens >= -50) & (tokens < 50)
    assert templates(made) == ["embedding"]
    found, number = made.bitcast(dtypes.uint8).numpy(), tokens.numpy()
    np.testing.assert_array_equal(found, np.where(known.numpy()[:, None], bits[number % 50], 0))


def test_what_is_no_table_or_no_numbers_is_refused():
    weight, tokens = table(4, 3), numbers(4, 2)
    for given in ((weight[0], tokens), (weight, tokens.float())):
        with pytest.raises(SpecError): embedding(*given)
    bytes_ = tokens.maximum(0).cast(dtypes.uint8)
    assert "embedding" not in templates(embedding(weight, bytes_))
    np.testing.assert_array_equal(embedding(weight, bytes_).numpy(), weight[bytes_].numpy())
    for fails in (lambda: EmbeddingSpec(0, 3, F32, Tokens(dtypes.int32, (1,), (1,))),
                  lambda: EmbeddingSpec(2, 3, dtypes.int32, Tokens(dtypes.int32, (1,), (1,))),
                  lambda: EmbeddingSpec(2, 3, F32, Tokens(dtypes.int32, (1, 2), (2, 1)), True)):
        with pytest.raises(SpecError): fails()
