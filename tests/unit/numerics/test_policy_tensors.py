"""Policies in ordinary Tensor programs: stores bit for bit as the executable model's, what operands come
to, and what is refused. Policies of dtypes: what they are, print and come to where operands meet."""
from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tinygrad_nv import explain
from tinygrad_nv.cpu import isa
from tinygrad_nv.errors import NumericsError
from tinygrad_nv.numerics import tensors
from tinygrad_nv.numerics.meet import meet
from tinygrad_nv.numerics.policy import (
    NARROW,
    REACH,
    Policied,
    accum,
    deterministic,
    holds,
    loss_scale,
    saturate,
    stochastic_round,
)
from tinygrad_nv.numerics.semantics import FORMATS, dot, encode
from tinygrad_nv.numerics.semantics.formats import BF16
from tinygrad_nv.numerics.semantics.units import Chain, Pairs
from tinygrad_nv.tile.attention.dropout import philox
from tinygrad_nv.tile.expression import short

bf16, f16, f32, e4m3, e5m2 = dtypes.bfloat16, dtypes.float16, dtypes.float32, dtypes.fp8e4m3, dtypes.fp8e5m2
SEED = 7 << 32 | 5
random = np.random.default_rng(0)


def numbers(count: int = 4000) -> np.ndarray:
    """Of all sizes, and edges."""
    sizes = random.standard_normal(count) * 10.0 ** random.integers(-12, 7, count)
    edges = [0, -0.0, np.inf, -np.inf, 65504, 65519.9, 65520, 448, 464, 465, -1e9, 2**-24, 2**-25, 2**-26 * 3,
             1e-45, 3.4e38, -3.39e38, 57344, 61440, 1 / 3]
    return np.concatenate([sizes, edges]).astype(np.float32)


def codes(x: Tensor) -> np.ndarray:
    """As they lie in memory."""
    buffer = x.contiguous().realize().uop.base.buffer
    return np.frombuffer(buffer.as_memoryview(), {1: np.uint8, 2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def noise(count: int, seed: int = SEED) -> np.ndarray:
    at = np.arange(count, dtype=np.uint64)
    key = [np.uint64(seed & 0xffffffff), np.uint64(seed >> 32)]
    return (philox((at, at * 0, at * 0, at * 0), key)[0] & np.uint64(0xffff)).astype(np.int64)


def model(x: np.ndarray, dtype: DType, rounding: str = "rn", clamp: bool = False) -> np.ndarray:
    """Codes; FP8 ends at its largest number."""
    of = FORMATS[short(dtype)]
    return encode(x.astype(np.float64), of, rounding, clamp or of.bits == 8, noise(len(x))).astype(of.kind)


@pytest.mark.parametrize("dtype", [bf16, f16, e4m3, e5m2], ids=short)
@pytest.mark.parametrize(("policy", "rounding"), [(None, "rn"), (saturate, "rn"),
                                                  (stochastic_round(SEED), "rs")],
                         ids=["plain", "saturate", "stochastic"])
def test_stores(dtype: DType, policy: object, rounding: str):
    x = numbers()
    found = codes(tensors.store(Tensor(x), dtype if policy is None else dtype @ policy))
    np.testing.assert_array_equal(found, model(x, dtype, rounding, policy is saturate))


def test_nan_stays_nan():
    for dtype in (bf16, f16, e4m3, e5m2):
        for policy in (saturate, stochastic_round(1)):
            assert np.isnan(tensors.store(Tensor([np.nan, -np.nan]), dtype @ policy).float().numpy()).all()


def test_stochastic_rounding_has_the_mean_of_what_it_rounds():
    x = np.full(20000, 1 + 2.0**-10, np.float32)
    for dtype in (bf16, e4m3):
        mean = tensors.store(Tensor(x), dtype @ stochastic_round(3)).float().numpy().mean()
        unit = 2.0**-7 if dtype == bf16 else 2.0**-3
        # of 20000 draws six standard deviations
        assert abs(mean - x[0]) < 6 * unit * 0.5 / 20000**0.5


def test_without_a_seed_the_generator_draws():
    x = Tensor(numbers()).realize()
    def drawn() -> np.ndarray: return codes(tensors.store(x, bf16 @ stochastic_round)).copy()
    Tensor.manual_seed(1)
    first, second = drawn(), drawn()
    Tensor.manual_seed(1)
    assert (drawn() == first).all()
    assert (first != second).any()


@pytest.mark.parametrize("to", [bf16 @ stochastic_round(3), f16 @ stochastic_round(3), e4m3, e5m2,
                                e4m3 @ stochastic_round(3), bf16 @ saturate], ids=str)
def test_the_gradient_of_a_store_is_that_of_a_cast(to: object):
    x = drawn(f32, 40)
    weight = Tensor(random.integers(-4, 5, 40).astype(np.float32)).realize()    # numbers of all dtypes
    found, = (tensors.store(x, to).float() * weight).sum().gradient(x)
    np.testing.assert_array_equal(found.numpy(), weight.numpy())
    far = Tensor([1e9, 2.0]).realize()
    found, = tensors.store(far, e4m3).float().sum().gradient(far)
    assert found.tolist() == [0, 1]     # of a number that was clamped


def test_a_store_of_a_tensor_on_several_devices():
    x = drawn(f32, 8, 5)
    parts = x.shard(("CPU:0", "CPU:1"), 0).realize()
    np.testing.assert_array_equal(codes(tensors.store(parts, bf16 @ stochastic_round(SEED)).to("CPU")),
                                  codes(tensors.store(x, bf16 @ stochastic_round(SEED))))


@pytest.mark.parametrize("dtype", [dtypes.int8, dtypes.uint8])
def test_integers_saturate(dtype: DType):
    x = np.array([-1000, -129, -128, 0, 127, 128, 255, 256, 99999], np.int32)
    info = np.iinfo(np.int8 if dtype == dtypes.int8 else np.uint8)
    found = tensors.store(Tensor(x), dtype @ saturate).numpy()
    np.testing.assert_array_equal(found, x.clip(info.min, info.max))


# **** operations ****

def drawn(dtype: DType, *shape: int, scale: float = 1.0) -> Tensor:
    values = (random.standard_normal(shape) * scale).astype(np.float32)
    return Tensor(values).cast(dtype).contiguous().realize()


@pytest.mark.parametrize("level", isa.there())
@pytest.mark.parametrize("out", [bf16 @ stochastic_round(SEED), bf16 @ saturate, f16 @ saturate, f32,
                                 e4m3 @ saturate], ids=str)
def test_matmuls_store_their_sums_as_they_are_told(out: object, level: str, monkeypatch: pytest.MonkeyPatch):
    """In the order of the class, one block of k: FMAs, or pairs where there is VDPBF16PS, with AMX, too."""
    monkeypatch.setenv("NV_CPU_ISA", level)
    a, b = drawn(bf16, 6, 64, scale=40), drawn(bf16, 64, 40, scale=40)
    with deterministic():
        made = tensors.matmul(a, b, of=bf16 @ accum(f32), out=out)
        assert "gemm" in [k.template for k in explain(made).kernels]
        found = codes(made)
    unit = Pairs() if isa.of_level(level).bf16 else Chain(BF16, BF16)
    left, right = (encode(x.float().numpy().astype(np.float64), BF16) for x in (a, b))
    total = dot(unit, left, right, np.zeros((6, 40), np.uint32)).view(np.float32).ravel()
    rounding = "rs" if "stochastic" in str(out) else "rn"
    clamp = "saturate" in str(out)
    wanted = total.view(np.uint32) if out == f32 else model(total, out.dtype, rounding, clamp)
    np.testing.assert_array_equal(found, wanted)


def test_a_clamp_is_the_matmuls_epilogue():
    a, b = drawn(bf16, 6, 64), drawn(bf16, 64, 40)
    found = explain(tensors.matmul(a, b, of=bf16, out=f16 @ saturate)).kernels
    assert len(found) == 1
    assert "where" in str(found[0].spec)


def test_sums_that_templates_do_not_keep_are_tinygrads():
    a, b = drawn(f16, 6, 64), drawn(f16, 64, 40)
    found = explain(tensors.matmul(a, b, of=f16 @ accum(f16))).kernels
    assert [k.template for k in found] == [None]
    assert found[0].reason == "gemm: the sum is accumulated in f16"
    for call in (lambda: tensors.rmsnorm(a, of=f16 @ accum(f16)),
                 lambda: tensors.attention(a, a, a, of=f16 @ accum(f16))):
        with pytest.raises(NumericsError, match="softmax and norms have no other sums"): call()


def test_loss_scales_are_powers_of_two_that_change_no_digit():
    a, b = drawn(f16, 6, 64), drawn(f16, 64, 40)
    scaled = tensors.store(a, f16 @ loss_scale(8.0))
    plain = tensors.matmul(a, b, of=f16, out=f32).numpy()
    both = f16 @ loss_scale(8.0), f16
    np.testing.assert_array_equal(tensors.matmul(scaled, b, of=both, out=f32).numpy(), plain)
    back = tensors.matmul(scaled, b, of=both, out=bf16 @ loss_scale(2.0))
    np.testing.assert_array_equal(codes(back), codes(Tensor(plain * 2).cast(bf16)))
    np.testing.assert_array_equal(tensors.softmax(scaled, of=f16 @ loss_scale(8.0), out=f32).numpy(),
                                  tensors.softmax(a, of=f16, out=f32).numpy())


@pytest.mark.parametrize("causal", [True, False])
def test_attention(causal: bool):
    q, k, v = (drawn(bf16, 1, 2, 9, 16) for _ in range(3))
    sums = tensors.attention(q, k, v, of=bf16, out=f32, is_causal=causal)
    assert [x.template for x in explain(sums).kernels] == ["flash"]
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(torch.from_numpy(x.float().numpy()).double() for x in (q, k, v)), is_causal=causal).numpy()
    assert np.abs(sums.numpy() - exact).max() < 2**-7
    found = codes(tensors.attention(q, k, v, of=bf16, out=bf16 @ stochastic_round(SEED), is_causal=causal))
    np.testing.assert_array_equal(found, model(sums.numpy().ravel(), bf16, "rs"))


NORMS: list[Callable[..., Tensor]] = [tensors.rmsnorm, tensors.layernorm, tensors.softmax]


@pytest.mark.parametrize("norm", NORMS)
def test_norms(norm: Callable[..., Tensor]):
    x = drawn(bf16, 5, 300)
    wide = norm(x, of=bf16, out=f32).numpy()
    for out in (bf16 @ stochastic_round(SEED), bf16 @ saturate, e4m3 @ saturate):
        rounding = "rs" if "stochastic" in str(out) else "rn"
        wanted = model(wide.ravel(), out.dtype, rounding)
        np.testing.assert_array_equal(codes(norm(x, of=bf16, out=out)), wanted)
        found = [each.template for each in explain(norm(x, of=bf16, out=out)).kernels if each.flops]
        assert found == (["norm"] if out == bf16 @ saturate else ["norm", None])


def test_what_is_deterministic_has_the_same_bits_alone_and_among_others():
    x, w = drawn(f32, 64, 1500), drawn(f32, 1500, 40)
    def first(rows: int, of: object) -> np.ndarray:
        return tensors.matmul(x[:rows].clone().realize(), w, of=of).numpy()[0]
    assert (first(1, f32 @ deterministic) == first(64, f32 @ deterministic)).all()
    assert (first(1, f32) != first(64, f32)).any()


def test_what_does_not_fit_is_refused_before_anything_runs():
    a, b = Tensor.empty(4, 8, dtype=f16), Tensor.empty(8, 4, dtype=bf16)
    with pytest.raises(NumericsError, match="the left operand is f16, and said to be bf16"):
        tensors.matmul(a, b, of=bf16)
    with pytest.raises(NumericsError, match="neither f16 nor bf16 holds"):
        tensors.matmul(a, b, of=(f16, bf16))
    with pytest.raises(NumericsError, match="values of different scales are added"):
        tensors.add(a, a, of=(f16 @ loss_scale(8.0), f16))
    with pytest.raises(NumericsError, match="their product has a scale of 16"):
        tensors.matmul(a, a.T, of=(f16 @ loss_scale(8.0), f16 @ loss_scale(2.0)))
    q = Tensor.empty(1, 1, 4, 8, dtype=f16)
    with pytest.raises(NumericsError, match="softmax is not linear"):
        tensors.attention(q, q, q, of=(f16 @ loss_scale(8.0), f16, f16))


def test_sums_of_integers_are_exact():
    a, b = (Tensor(random.integers(-128, 128, shape).astype(np.int8)).realize()
            for shape in ((5, 70), (70, 9)))
    wanted = a.numpy().astype(np.int32) @ b.numpy().astype(np.int32)
    np.testing.assert_array_equal(tensors.matmul(a, b, of=dtypes.int8, out=dtypes.int32).numpy(), wanted)
    clamped = tensors.matmul(a, b, of=dtypes.int8, out=dtypes.int8 @ saturate).numpy()
    np.testing.assert_array_equal(clamped, wanted.clip(-128, 127))


int8, int32 = dtypes.int8, dtypes.int32


def test_a_policied_dtype_is_a_value():
    made = bf16 @ accum(f32) @ stochastic_round
    assert str(made) == "bf16 @accum(f32) @stochastic_round"
    assert made == bf16 @ stochastic_round @ accum(f32)
    assert len({made, bf16 @ stochastic_round @ accum(f32), bf16 @ accum(f32)}) == 2
    assert (made.dtype, made.accumulator) == (bf16, f32)
    assert made @ accum(f32) == made
    assert pickle.loads(pickle.dumps(made)) == made


@pytest.mark.parametrize(("made", "text"), [
    (bf16 @ stochastic_round(seed=3) @ deterministic, "bf16 @stochastic_round(seed=3) @deterministic"),
    (f16 @ loss_scale(2.0 ** 16) @ accum(f16), "f16 @accum(f16) @loss_scale(65536)"),
    (e5m2 @ saturate @ loss_scale(8), "e5m2 @saturate @loss_scale(8)"),
    (int8 @ accum(int32), "s8 @accum(s32)"),
    (f32 @ deterministic, "f32 @deterministic"), (Policied(bf16), "bf16")])
def test_print(made: Policied, text: str):
    assert str(made) == text


def test_what_holds_what_is_what_values_say():
    """Over every value of 8 and 16 bits."""
    torch = pytest.importorskip("torch")
    kinds = {e4m3: torch.float8_e4m3fn, e5m2: torch.float8_e5m2, f16: torch.float16, bf16: torch.bfloat16}
    for narrow in NARROW:
        bits = torch.arange(2 ** (8 * narrow.itemsize), dtype=torch.int32)
        bits = bits.to(torch.uint8 if narrow.itemsize == 1 else torch.uint16)
        values = bits.view(kinds[narrow]).double()
        values = values[values.isfinite()]
        for wide in NARROW:
            same = bool((values.to(kinds[wide]).double() == values).all())
            assert holds(wide, narrow) is same, (wide, narrow)
        assert all(holds(wide, narrow) for wide in REACH if wide not in NARROW)


@pytest.mark.parametrize(("a", "b", "operation", "text"), [
    (bf16 @ accum(f32), bf16, "multiply", "bf16 @accum(f32)"),
    (bf16 @ accum(f32), bf16 @ accum(f32) @ saturate, "multiply", "bf16 @accum(f32) @saturate"),
    (bf16 @ stochastic_round, f32, "add", "f32"), (e4m3 @ accum(f32), e5m2, "multiply", "f16 @accum(f32)"),
    (f16 @ loss_scale(8), f16, "multiply", "f16 @loss_scale(8)"),
    (f16 @ loss_scale(8), f16 @ loss_scale(8), "add", "f16 @loss_scale(8)"),
    (int8 @ accum(int32), int8, "multiply", "s8 @accum(s32)"), (bf16 @ deterministic, e4m3, "add",
                                                                 "bf16 @deterministic")])
def test_meet(a: Policied, b: Policied, operation: str, text: str):
    assert str(meet(a, b, operation)) == str(meet(b, a, operation)) == text


def test_importing_policies_loads_no_numpy():
    text = ("import sys, tinygrad_nv, tinygrad_nv.numerics.meet\n"
            "assert 'numpy' not in sys.modules, 'numpy'")
    assert subprocess.run([sys.executable, "-c", text], check=False).returncode == 0
