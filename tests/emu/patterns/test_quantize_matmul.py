"""DEV=EMU and CPUs: a matmul writes codes of what is made of its result, where their scale is static: bit for
bit those of the result as it would be stored."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tinygrad import Variable

from tests.support.patterns.on_emu import emu  # noqa: F401
from tests.support.patterns.scaled_case import Codes
from tinygrad_nv import Tensor, TinyJit, dtypes, explain
from tinygrad_nv.functional import prepare_matrix, quant_matmul, quantize, scaled_matmul, sparse_matmul
from tinygrad_nv.quant import SparseTensor
from tinygrad_nv.quant.activations import quantize_activations
from tinygrad_nv.quant.sparse import compress, two_of_four
from tinygrad_nv.quant.tensor import QTensor
from tinygrad_nv.quant.types import E4M3, INT8, Scale, per_block_scale, per_channel_scale

BF16, F16, F32 = dtypes.bfloat16, dtypes.float16, dtypes.float32
WHOLE, STATIC = Scale(0, 0), 0.37
SLOW = pytest.mark.slow
INT8_FIRST = pytest.mark.parametrize("element", ["int8", pytest.param("e4m3", marks=SLOW)])
E4M3_FIRST = pytest.mark.parametrize("element", ["e4m3", pytest.param("int8", marks=SLOW)])
TYPES = {"int8": INT8 @ per_channel_scale(), "e4m3": E4M3 @ per_channel_scale(),
         "blocks": E4M3 @ per_block_scale(128, 128)}
Make = Callable[[], Tensor]


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None: monkeypatch.setenv("EMU_ARCH", "sm_90a")


def templates(*made: Tensor) -> list[str]: return [str(each.template) for each in explain(*made).kernels]


def bits(codes: Tensor) -> np.ndarray:
    """Codes, those of −0 in e4m3 as those of 0."""
    found = codes.numpy()
    return np.where(found == 128, 0, found).astype(found.dtype) if found.dtype == np.uint8 else found


def same(make: Make, element: str, fused: bool = True, scale: float = STATIC) -> list[str]:
    """The codes of what is made are those of what would be stored; by its kernel, if `fused`."""
    codes = quantize(make(), element, WHOLE, scale)[0]
    told = templates(codes)
    assert ("quantize" not in told) == fused, explain(codes)
    stored = make().contiguous().realize()
    wanted = quantize_activations(Tensor(stored.float().numpy(), device="CPU"), element, WHOLE, scale)[0]
    np.testing.assert_array_equal(bits(codes), bits(wanted))
    assert codes.shape == stored.shape
    assert np.unique(wanted.numpy()).size > 8       # not all at the ends
    return told


def floats(*shape: int, dtype: object = BF16, device: str | None = None, seed: int = 0) -> Tensor:
    """Integers, whose sums are exact."""
    drawn = np.random.default_rng((seed, *shape)).integers(-4, 5, shape).astype(np.float32)
    return Tensor(drawn, device=device).cast(dtype).contiguous().realize()


def of_codes(name: str, m: int, n: int = 64, k: int = 128, exact: bool = True,
             device: str | None = None) -> Make:
    """A matmul of codes of x with a static scale, to bfloat16."""
    given = Codes.of(TYPES[name], m, n, k, whole=True, exact=exact)
    if name == "blocks": given = Codes.of(TYPES[name], m, n, k, exact=exact)
    x, w = Tensor(given.bits(given.x), device=device).realize(), given.matrix(device)
    if name == "int8": w = prepare_matrix(w, codes=True)
    scales = Tensor(given.x_scale.astype(np.float32), device=device).realize()
    scale = scales if name == "blocks" else float(given.x_scale.item()) * (1 if exact else 2.0 ** -7)
    return lambda: scaled_matmul(x, scale, w, None, BF16)


def chains(n: int, device: str | None = None) -> dict[str, Callable[[Tensor], Tensor]]:
    """What lies between two matmuls."""
    bias, residual = floats(n, device=device, seed=1), floats(5, n, device=device, seed=2)
    return {"nothing": lambda x: x, "bias, relu²": lambda x: (x + bias.cast(x.dtype)).relu().square() * 0.125,
            "gelu": lambda x: x.gelu(), "residual": lambda x: (x + residual.cast(x.dtype)).float() * 0.5,
            "gate": lambda x: x[..., :n // 2].silu() * x[..., n // 2:],
            "gate, other order": lambda x: x[..., n // 2:].silu() * x[..., :n // 2],
            "heads": lambda x: x.reshape(5, 1, n).silu().reshape(1, 5, n)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("chain", ["nothing", "bias, relu²", "gelu", "residual", "gate", "gate, other order",
                                   "heads"])
@pytest.mark.parametrize(("name", "element"), [("e4m3", "e4m3"), pytest.param("int8", "int8", marks=SLOW),
                                               pytest.param("int8", "e4m3", marks=SLOW),
                                               pytest.param("e4m3", "int8", marks=SLOW)])
def test_what_is_between_is_computed_too(name: str, chain: str, element: str):
    make = of_codes(name, 5)
    told = same(lambda: chains(64)[chain](make()), element)
    assert len(told) == 1


@INT8_FIRST
@pytest.mark.parametrize("m", [pytest.param(1, marks=SLOW), 70])
def test_any_number_of_rows(m: int, element: str):
    for name in ("int8", "e4m3"):
        make = of_codes(name, m, 144)
        assert same(lambda make=make: make().silu(), element) == ["gemv" if m == 1 else "wgmma"]


@pytest.mark.slow
@E4M3_FIRST
def test_of_blocks(element: str):
    """Scales of groups, which have no parts: silu(gate) · up is a kernel of its own."""
    make = of_codes("blocks", 70, 256, 256)
    assert same(lambda: make().relu(), element) == ["scaled_wgmma"]
    gated = chains(256)["gate"]
    assert same(lambda: gated(make()), element, fused=False) == ["scaled_wgmma", "quantize"]
    told = explain(quantize(gated(make()), element, WHOLE, STATIC)[0])
    assert "not in the matmul before it: scales of a batch" in str(told)


@INT8_FIRST
@pytest.mark.parametrize("dtype", [BF16, pytest.param(F16, marks=SLOW), pytest.param(F32, marks=SLOW)],
                         ids=["bf16", "f16", "f32"])
def test_matmuls_of_the_graph(dtype: object, element: str):
    x, w = floats(5, 96, dtype=dtype), floats(64, 96, dtype=dtype, seed=3)
    for chain in chains(64).values():
        told = same(lambda chain=chain: chain(x @ w.T * 0.25), element)
        assert len(told) == 1
    rows = floats(70, 96, dtype=dtype)
    if dtype != F32: assert same(lambda: (rows @ w.T).silu(), element) == ["wgmma"]


@INT8_FIRST
def test_quantised_and_sparse_matrices(element: str):
    rng = np.random.default_rng(1)
    arrays = {"codes": rng.integers(-3, 4, (64, 128)).astype(np.int8),
              "scales": np.full((64, 1), 0.5, np.float32)}
    w, x = prepare_matrix(QTensor.of(INT8 @ per_channel_scale(), (64, 128), arrays, "EMU")), floats(5, 128)
    assert same(lambda: quant_matmul(x, w).silu(), element) == ["quant_gemv"]
    dense = rng.integers(-3, 4, (64, 128)).astype(np.float16)
    sparse = SparseTensor.of(F16, (64, 128), compress(dense, two_of_four(np.abs(dense))), "EMU")
    half = floats(16, 128, dtype=F16)
    assert same(lambda: sparse_matmul(half, sparse).silu(), element) == ["sparse_wgmma"]


@INT8_FIRST
def test_random_numbers_are_rounded_as_the_graph_says(element: str):
    """To bfloat16 first, then to codes."""
    make = of_codes("int8", 40, 64, 300, exact=False)
    same(make, element, scale=30.0)
    x = Tensor(np.random.default_rng(0).standard_normal((40, 96)).astype(np.float32)).cast(BF16).realize()
    w = Tensor(np.random.default_rng(1).standard_normal((64, 96)).astype(np.float32)).cast(BF16).realize()
    same(lambda: (x @ w.T).silu(), element)


@pytest.mark.parametrize(("arch", "name", "element"), [
    ("sm_80", "int8", "int8"), pytest.param("sm_89", "e4m3", "e4m3", marks=SLOW),
    pytest.param("sm_89", "int8", "e4m3", marks=SLOW)])
def test_architectures(arch: str, name: str, element: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("EMU_ARCH", arch)
    device = f"EMU:{arch[3:]}"
    for m in (5, 70):
        make = of_codes(name, m, device=device)
        assert same(lambda make=make: make().silu(), element) == ["gemv" if m == 5 else "mma"]


@pytest.mark.slow
def test_what_a_template_cannot_store(monkeypatch: pytest.MonkeyPatch):
    """e4m3 begins with sm_89: before it matmuls store floats, and the reference makes codes."""
    monkeypatch.setenv("EMU_ARCH", "sm_80")
    make = of_codes("int8", 70, device="EMU:80")
    codes = quantize(make(), "e4m3", WHOLE, STATIC)[0]
    assert templates(codes)[0] == "mma"
    assert "begin with sm_89" in str(explain(codes))
    wanted = quantize_activations(Tensor(make().float().numpy(), device="CPU"), "e4m3", WHOLE, STATIC)[0]
    np.testing.assert_array_equal(bits(codes), bits(wanted))


@INT8_FIRST
def test_a_result_with_other_users_is_stored(element: str):
    x, w = of_codes(element, 5), floats(64, 96)
    rows = floats(5, 96)
    for make in (x, lambda: rows @ w.T):
        made = make()
        codes, total = quantize(made.silu(), element, WHOLE, STATIC)[0], (made * 2).contiguous()
        assert templates(codes, total).count("quantize") == 1
        Tensor.realize(codes, total)
        alone = make().contiguous().realize()
        np.testing.assert_array_equal(total.float().numpy(), 2 * alone.float().numpy())
        wanted = quantize_activations(Tensor(alone.silu().float().numpy(), device="CPU"), element, WHOLE,
                                      STATIC)[0]
        np.testing.assert_array_equal(bits(codes), bits(wanted))


def test_a_value_between_with_other_users_is_stored():
    make = of_codes("int8", 5)
    hidden = make() + 1
    codes, total = quantize(hidden * 0.5, "int8", WHOLE, STATIC)[0], hidden.sum()
    assert "quantize" in templates(codes, total)
    stored = (make() + 1).contiguous().realize()
    wanted = quantize_activations(Tensor((stored * 0.5).float().numpy(), device="CPU"), "int8", WHOLE,
                                  STATIC)[0]
    np.testing.assert_array_equal(codes.numpy(), wanted.numpy())


def test_scales_of_rows_need_all_of_a_row():
    codes, scales = quantize(of_codes("int8", 5)(), "int8", Scale(1, 0))
    assert isinstance(scales, Tensor)
    assert templates(codes, scales) == ["gemv", "quantize"]


@pytest.mark.slow
def test_parts_of_a_result_are_stored():
    """Half of the columns, rows in another order: not the matmul's elements in their order."""
    make = of_codes("int8", 6)
    for part in (lambda x: x[:, :32], lambda x: x.flip(0), lambda x: x.transpose(0, 1),
                 lambda x: x.reshape(6, 4, 16).transpose(1, 2).reshape(6, 64)):
        same(lambda part=part: part(make()), "int8", fused=False)


@pytest.mark.parametrize("element", ["int8", "e4m3"])
@pytest.mark.parametrize("dtype", [pytest.param(BF16, marks=SLOW), F32], ids=["bf16", "f32"])
def test_numbers_without_codes(dtype: object, element: str):
    """Infinities, NaN and what is too large become what the kernel that stores first makes of them."""
    values = [np.inf, -np.inf, np.nan, 3e38, -3e38, 47.3, -47.5, 0.0, -0.0, 1e-30, 0.185, 0.555]
    x, w = np.zeros((len(values), 32), np.float32), np.zeros((16, 32), np.float32)
    x[:, 0], w[:, 0] = values, 1
    a, b = (Tensor(each).cast(dtype).contiguous().realize() for each in (x, w))
    codes = quantize(a @ b.T, element, WHOLE, STATIC)[0]
    later = quantize((a @ b.T).contiguous().realize(), element, WHOLE, STATIC)[0]
    assert templates(codes) != ["quantize"] == templates(later)
    np.testing.assert_array_equal(codes.numpy(), later.numpy())
    most = 127 if element == "int8" else 0x7E
    assert list(codes.numpy()[[0, 3, 5], 0]) == [most, most, 127 if element == "int8" else 0x70]


@E4M3_FIRST
def test_symbolic_rows(element: str):
    given = Codes.of(TYPES[element], 12, 64, 128, whole=True)
    rows, x, w = Variable("rows", 1, 12).bind(9), Tensor(given.bits(given.x)).realize(), given.matrix()
    def codes(x: Tensor) -> Tensor:
        return quantize(chains(64)["gate"](scaled_matmul(x, 0.5, w, None, BF16)), element, WHOLE, STATIC)[0]
    total = codes(x[:rows]).cast(dtypes.int32).sum(1)
    assert "quantize" not in templates(total)
    wanted = np.where(np.arange(12) < 9, codes(x).numpy().astype(np.int64).sum(1), 0)
    np.testing.assert_array_equal(total.pad(((0, 12 - rows),)).contiguous().numpy(), wanted)


def test_between_two_matmuls_of_codes_there_is_no_pass():
    """matmul with gate and codes, matmul: in a captured step."""
    first, second = of_codes("e4m3", 5), Codes.of(TYPES["e4m3"], 5, 64, 32).matrix()
    def made(hidden: Tensor) -> Tensor:
        return scaled_matmul(*quantize(chains(64)["gate"](hidden), "e4m3", WHOLE, STATIC), second)
    assert templates(made(first())) == ["gemv", "gemv"]
    step = TinyJit(lambda: made(first()).realize())
    found = [step().float().numpy() for _ in range(3)]
    wanted = made(first().contiguous().realize()).float().numpy()
    for each in found: np.testing.assert_array_equal(each, wanted)


def test_a_matmul_of_a_larger_match_is_left_to_it():
    """That of an attention's probabilities, and one whose operand is a sum."""
    q, k, v = (floats(1, 2, 64, 64, seed=i) for i in range(3))
    made = ((q @ k.transpose(-2, -1)) * 0.125).softmax(-1).cast(BF16) @ v
    codes = quantize(made.transpose(1, 2).reshape(1, 64, 128), "int8", WHOLE, STATIC)[0]
    assert templates(codes) == ["flash_wgmma", "quantize"]
    x, w = floats(5, 64), floats(64, 64, seed=1)
    same(lambda: ((x @ w.T) * 0.125) @ w.T * 0.125, "int8", fused=False)


# **** CPUs ****

@pytest.mark.slow
@INT8_FIRST
def test_on_a_cpu(element: str):
    """As the kernel that makes the same of a stored result."""
    def check(make: Make, chain: str) -> None:
        after = chains(64, "CPU")[chain]
        codes = quantize(after(make()), element, WHOLE, STATIC)[0]
        later = quantize(after(make().contiguous().realize()), element, WHOLE, STATIC)[0]
        assert len(templates(codes)) == 1
        assert templates(codes) != templates(later) == ["quantize"]
        np.testing.assert_array_equal(codes.numpy(), later.numpy())
    for name, m in (("int8", 5), ("int8", 40), ("e4m3", 5)):
        make = of_codes(name, m, device="CPU")
        same(make, element)
        check(make, "gate")
    for dtype, m in ((F32, 5), (BF16, 40)):
        x, w = floats(m, 96, dtype=dtype, device="CPU"), floats(64, 96, dtype=dtype, device="CPU", seed=3)
        check(lambda x=x, w=w: x @ w.T * 0.25, "gelu")


@pytest.mark.parametrize("element", ["int8", "e4m3"])
def test_numbers_without_codes_on_a_cpu(element: str):
    x, w = np.zeros((4, 32), np.float32), np.zeros((16, 32), np.float32)
    x[:, 0], w[:, 0] = [np.inf, -np.inf, 3e38, np.nan], 1
    a, b = (Tensor(each, device="CPU").realize() for each in (x, w))
    codes = quantize(a @ b.T, element, WHOLE, STATIC)[0]
    later = quantize((a @ b.T).contiguous().realize(), element, WHOLE, STATIC)[0]
    assert templates(codes) != templates(later) == ["quantize"]
    np.testing.assert_array_equal(codes.numpy(), later.numpy())
