"""Tensor's methods that compute: what each is in tinygrad and in torch, one held against the other.

Rows of numbers: two that are random, one with ±1e4, one with ±inf and 0, one with a NaN. Random rows of
float32 must be as torch has them in float64, within `ulps`. The others too, unless tinygrad without us gives
the same as we: what its formulas make of infinities and NaN, and of roundings to 16 bits at each step, is its
own. Gradients are those of `.sum()`, whose incoming gradient is a constant without storage, or of a weighted
sum.

`CASES` has every method of which the numbers can be wrong, `LEFT` all others, with the reason.
"""
from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType
from torch.nn import functional as F

from tinygrad_nv import disabled

WIDTHS = (3, 63, 64, 65, 1000)
UNIT = {dtypes.float32: 2.0**-24, dtypes.float16: 2.0**-11, dtypes.bfloat16: 2.0**-8}
Operation = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """One method. `ours` and `torch` take as many tensors as `arity`. Random numbers lie in `domain`; a
    result is within `ulps` units of the dtype of 1 + |x| + |result|. `width` is that of rows, 0 for any. With
    `shapes`, which are of a width too, operands are random throughout."""
    name: str
    ours: Operation
    torch: Operation
    arity: int = 1
    grad: bool = True
    domain: tuple[float, float] = (-np.inf, np.inf)
    ulps: float = 32
    width: int = 0
    shapes: Callable[[int], tuple[tuple[int, ...], ...]] | None = None
    half: float = 1e4   # the largest number in float16: asinh and acosh compute squares, and sums that cancel


def _same(names: str, owner: Any = torch, **how: Any) -> list[Case]:
    """Methods that are called the same in torch."""
    return [Case(name, getattr(Tensor, name), getattr(owner, name), **how) for name in names.split()]


POSITIVE, WITHIN, ABOVE = (0.05, np.inf), (-0.95, 0.95), (1.05, np.inf)
ELEMENTS = [
    *_same("abs cos exp2 neg sigmoid sin square tanh atan exp"), *_same("asinh", half=1),
    Case("erf", Tensor.erf, torch.erf, ulps=256),  # by a polynomial, good to 1.5e-7
    *_same("ceil floor round trunc sign logical_not isfinite isinf isnan", grad=False),
    *_same("sqrt rsqrt log log2 log10", domain=POSITIVE), *_same("acos asin atanh", domain=WITHIN, ulps=4096),
    *_same("cosh sinh", domain=(-8, 8), ulps=512), *_same("acosh", domain=ABOVE, ulps=512, half=1.5),
    *_same("reciprocal", domain=(0.1, np.inf)), Case("tan", Tensor.tan, torch.tan, domain=(-1.2, 1.2)),
    *_same("elu celu relu relu6 silu mish softplus logsigmoid hardswish softsign", F),
    # torch has more digits of the two numbers
    Case("selu", Tensor.selu, lambda x: 1.0507 * torch.where(x >= 0, x, 1.67326 * (x.exp() - 1))),
    *_same("leaky_relu hardsigmoid hardtanh", F), Case("swish", Tensor.swish, F.silu),
    Case("gelu", Tensor.gelu, lambda x: F.gelu(x, approximate="tanh")),
    Case("quick_gelu", Tensor.quick_gelu, lambda x: x * (1.702 * x).sigmoid()),
    Case("clamp", lambda x: x.clamp(-1, 2), lambda x: x.clamp(-1, 2)),
    Case("clip", lambda x: x.clip(-1, 2), lambda x: x.clip(-1, 2)),
    Case("pow", lambda x: x.pow(3), lambda x: x.pow(3), ulps=4096),
    *_same("add sub mul maximum minimum copysign", arity=2),
    *_same("logaddexp", arity=2), *_same("div", arity=2, domain=(0.3, 30)),
    *_same("eq ne isclose", arity=2, grad=False),
    *_same("fmod", arity=2, grad=False, domain=(0.3, 30)),
    Case("mod", Tensor.mod, torch.remainder, 2, grad=False, domain=(0.3, 30)),
    Case("lerp", lambda x, y: x.lerp(y, 0.3), lambda x, y: x.lerp(y, 0.3), 2),
    Case("where", lambda x, y: (x > 0).where(x, y), lambda x, y: torch.where(x > 0, x, y), 2),
    Case("masked_fill", lambda x: x.masked_fill(x > 0, 2.0), lambda x: x.masked_fill(x > 0, 2.0)),
]
ROWS = [
    Case("sum", lambda x: x.sum(-1), lambda x: x.sum(-1), ulps=256),
    Case("mean", lambda x: x.mean(-1), lambda x: x.mean(-1)),
    Case("max", lambda x: x.max(-1), lambda x: x.max(-1).values),
    Case("min", lambda x: x.min(-1), lambda x: x.min(-1).values),
    Case("prod", lambda x: x.prod(-1), lambda x: x.prod(-1), domain=(0.98, 1.02), width=65),
    Case("var", lambda x: x.var(-1), lambda x: x.var(-1), ulps=256),
    Case("std", lambda x: x.std(-1), lambda x: x.std(-1), ulps=256),
    Case("var_mean", lambda x: x.var_mean(-1)[0], lambda x: torch.var_mean(x, -1)[0], ulps=256),
    Case("std_mean", lambda x: x.std_mean(-1)[1], lambda x: torch.std_mean(x, -1)[1]),
    Case("argmax", lambda x: x.argmax(-1), lambda x: x.argmax(-1), grad=False),
    Case("argmin", lambda x: x.argmin(-1), lambda x: x.argmin(-1), grad=False),
    Case("all", lambda x: (x > -1).all(-1), lambda x: (x > -1).all(-1), grad=False),
    Case("any", lambda x: (x > 1).any(-1), lambda x: (x > 1).any(-1), grad=False),
    Case("softmax", lambda x: x.softmax(-1), lambda x: x.softmax(-1)),
    Case("softmin", lambda x: (-x).softmax(-1), lambda x: F.softmin(x, -1)),
    Case("log_softmax", lambda x: x.log_softmax(-1), lambda x: x.log_softmax(-1), ulps=256),
    Case("logsumexp", lambda x: x.logsumexp(-1), lambda x: x.logsumexp(-1)),
    Case("layernorm", lambda x: x.layernorm(), lambda x: F.layer_norm(x, x.shape[-1:]), ulps=512),
    Case("normalize", lambda x: x.normalize(dim=-1), lambda x: F.normalize(x, dim=-1)),
    Case("cumsum", lambda x: x.cumsum(-1), lambda x: x.cumsum(-1), ulps=256),
    Case("cumprod", lambda x: x.cumprod(-1), lambda x: x.cumprod(-1), domain=(0.98, 1.02), width=65),
    Case("cummax", lambda x: x.cummax(-1)[0], lambda x: x.cummax(-1).values, width=65),
    Case("cummin", lambda x: x.cummin(-1)[0], lambda x: x.cummin(-1).values, width=65),
    Case("logcumsumexp", lambda x: x.logcumsumexp(-1), lambda x: x.logcumsumexp(-1), width=65, ulps=256),
]


def _target(x: Tensor) -> Tensor:
    return Tensor([i * 7 % x.shape[1] for i in range(x.shape[0])], device=x.device)


def _chosen(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor([i * 7 % x.shape[1] for i in range(x.shape[0])])


def _rows(n: int) -> tuple[tuple[int, ...], ...]: return ((5, n),)


def _matrices(n: int) -> tuple[tuple[int, ...], ...]: return (5, n), (n, 33)


LOSSES = [
    Case("cross_entropy", lambda x: x.cross_entropy(_target(x), reduction="sum"),
         lambda x: F.cross_entropy(x, _chosen(x), reduction="sum"), shapes=_rows, ulps=256),
    Case("nll_loss", lambda x: x.log_softmax(1).nll_loss(_target(x), reduction="sum"),
         lambda x: F.nll_loss(x.log_softmax(1), _chosen(x), reduction="sum"), shapes=_rows, ulps=256),
    Case("sparse_categorical_crossentropy",
         lambda x: x.sparse_categorical_crossentropy(_target(x), reduction="sum"),
         lambda x: F.cross_entropy(x, _chosen(x), reduction="sum"), shapes=_rows, ulps=256),
    Case("binary_crossentropy", lambda x: x.sigmoid().binary_crossentropy((x.detach() > 0.3).float()),
         lambda x: F.binary_cross_entropy(x.sigmoid(), (x > 0.3).to(x.dtype)), shapes=_rows),
    Case("binary_crossentropy_logits", lambda x: x.binary_crossentropy_logits((x.detach() > 0.3).float()),
         lambda x: F.binary_cross_entropy_with_logits(x, (x > 0.3).to(x.dtype)), shapes=_rows),
]
MATRICES = [
    Case("matmul", Tensor.matmul, torch.matmul, 2, shapes=_matrices, ulps=256),
    Case("dot", lambda x, y: x.dot(y).silu(), lambda x, y: F.silu(x @ y), 2, shapes=_matrices, ulps=512),
    Case("linear", lambda x, w, b: x.linear(w, b).gelu(),
         lambda x, w, b: F.gelu(x @ w + b, approximate="tanh"), 3, ulps=512,
         shapes=lambda n: (*_matrices(n), (33,))),
    Case("einsum", lambda x, y: Tensor.einsum("ij,jk->ki", x, y),
         lambda x, y: torch.einsum("ij,jk->ki", x, y), 2, shapes=_matrices, ulps=256),
    Case("conv2d", Tensor.conv2d, F.conv2d, 2, shapes=lambda n: ((2, 3, 9, 7), (4, 3, 3, 3)), ulps=256),
    Case("conv_transpose2d", Tensor.conv_transpose2d, F.conv_transpose2d, 2, ulps=256,
         shapes=lambda n: ((2, 3, 9, 7), (3, 4, 3, 3))),
    Case("avg_pool2d", Tensor.avg_pool2d, lambda x: F.avg_pool2d(x, 2), shapes=lambda n: ((2, 3, 8, 6),)),
    Case("max_pool2d", Tensor.max_pool2d, lambda x: F.max_pool2d(x, 2), shapes=lambda n: ((2, 3, 8, 6),)),
    Case("batchnorm", lambda x, w, b: x.batchnorm(w, b, x.mean((0, 2)),
                                                  (x.var((0, 2), correction=0) + 1e-5).rsqrt()),
         lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), 3,
         # of the weight it is a sum of 5 n terms that is 0: of 5000, tinygrad's own is off by 6e-4 too
         shapes=lambda n: ((5, 3, n), (3,), (3,)), width=65, ulps=512),
    *_same("scaled_dot_product_attention", F, arity=3, shapes=lambda n: ((2, 2, 17, 16),) * 3, ulps=256),
]
CASES = [*ELEMENTS, *ROWS, *LOSSES, *MATRICES]

_LEFT = {
    "makes, moves or describes memory":
        "alu arange as_param assign backward call callify cat chunk clone const const_like contiguous "
        "contiguous_backward custom_kernel data decode_hevc_frame detach diag diagonal element_size "
        "empty empty_like expand eye flatten flip from_blob from_dlpack from_url full full_like gather "
        "gradient invalids is_floating_point is_param_ item linear_with_vars linspace masked_select "
        "max_numel max_unpool2d meshgrid nbytes nonzero numel numpy one_hot ones ones_like pad pad_to "
        "permute realize rearrange repeat repeat_interleave replace reshape roll scatter schedule_linear "
        "sequential shard shard_ shard_like shrink shrink_to size split squeeze stack to to_ tolist "
        "transpose tril triu ufix unflatten unfold unsqueeze view zeros zeros_like",
    "a cast, which every case of another dtype has":
        "bfloat16 bitcast bool cast double float half int long short",
    "of integers":
        "bitwise_and bitwise_not bitwise_or bitwise_xor hash keccak lshift rshift threefry uprod usum",
    "random, and held against its distribution elsewhere":
        "dropout glorot_uniform kaiming_normal kaiming_uniform manual_seed multinomial normal rand "
        "rand_like randint randn randn_like random_bits randperm scaled_uniform uniform",
    "made of the methods here":
        "allclose image_conv2d image_dot interpolate newton_schulz qr scatter_reduce svd",
    "compares and moves":
        "argsort sort topk",
}
LEFT = {name: why for why, names in _LEFT.items() for name in names.split()}


def widths(case: Case) -> tuple[int, ...]: return (case.width,) if case.width else WIDTHS


def plan() -> list[tuple[Case, int, DType]]:
    """Returns cases with widths and dtypes: each in float32, with one width after another, and every third
    one in 16 bits."""
    made = []
    for i, case in enumerate(CASES):
        own = widths(case)
        made.append((case, own[i % len(own)], dtypes.float32))
        half = (dtypes.float16, dtypes.bfloat16)[i // 3 % 2]
        if i % 3 == 0: made.append((case, own[(i + 1) % len(own)], half))
    return made


def groups() -> list[tuple[list[Case], int, DType]]:
    """Returns cases that are computed together, with each width and dtype: every fourth method of elements,
    or those of rows."""
    return [(cases, n, dtype) for n in WIDTHS for dtype in UNIT for cases in (
        *(ELEMENTS[i::4] for i in range(4)), [case for case in ROWS if case.width in (0, n)])]


def named(each: tuple[Case | list[Case], int, DType]) -> str:
    name = each[0].name if isinstance(each[0], Case) else f"{each[0][0].name} and {len(each[0]) - 1} more"
    return f"{name}-{each[1]}-{'bfloat16' if each[2] == dtypes.bfloat16 else each[2].name}"


# **** numbers ****

def operands(case: Case, n: int) -> list[np.ndarray]:
    """float32, the same for a case and a width."""
    random = np.random.default_rng([zlib.crc32(case.name.encode()), n])
    if case.shapes: return [random.standard_normal(shape).astype(np.float32) for shape in case.shapes(n)]
    made = []
    for _ in range(case.arity):
        x, (least, most) = random.standard_normal((5, n)) * [[1], [10], [1], [1], [1]], case.domain
        if np.isfinite(most): x = random.uniform(least, most, x.shape)
        elif np.isfinite(least): x = least + np.abs(x)
        x[2, ::3], x[2, 1::3] = 1e4, -1e4
        x[3, 0], x[3, n // 2], x[3, n - 1] = np.inf, -np.inf, 0
        x[4, n // 3] = np.nan
        made.append(x.astype(np.float32))
    return made


def weight(shape: tuple[int, ...]) -> np.ndarray:
    return np.cos(np.arange(int(np.prod(shape)))).reshape(shape).astype(np.float32)


def results(case: Case, given: list[Tensor], weighted: bool) -> list[Tensor]:
    """Returns the result, and the gradient of its sum by each operand; nothing is computed yet."""
    y = case.ours(*given)
    total = y * Tensor(weight(y.shape), device=y.device).cast(y.dtype) if weighted else y
    return [y, *(total.sum().gradient(*given) if case.grad else ())]


def computed(case: Case, given: list[Tensor], weighted: bool) -> list[np.ndarray]:
    return [each.float().numpy() for each in results(case, given, weighted)]


def exact(case: Case, given: list[Tensor], weighted: bool) -> list[np.ndarray]:
    """The same by torch in float64; what the dtype cannot hold is infinite."""
    wide = [torch.tensor(x.float().numpy(), dtype=torch.float64, requires_grad=case.grad) for x in given]
    y = case.torch(*wide)
    made = [y]
    if case.grad:
        w = Tensor(weight(tuple(y.shape)), device="CPU").cast(given[0].dtype).float().numpy()
        made += torch.autograd.grad((y * torch.tensor(w) if weighted else y).sum(), wide)
    narrow = getattr(torch, {"float": "float32", "half": "float16"}.get(given[0].dtype.name, "bfloat16"))
    return [x.detach().to(narrow).double().numpy() if x.is_floating_point() else x.numpy() for x in made]


def close(found: np.ndarray, wanted: np.ndarray, bound: np.ndarray) -> np.ndarray:
    """Where two agree: both NaN, equal, or no further apart than the bound."""
    with np.errstate(invalid="ignore"):
        return (np.isnan(found) & np.isnan(wanted)) | (found == wanted) | (np.abs(found - wanted) <= bound)


def tensors(case: Case, n: int, dtype: DType, device: str) -> list[Tensor]:
    most = case.half if dtype == dtypes.float16 else np.inf
    numbers = (np.where(np.isfinite(x), x.clip(-most, most), x) for x in operands(case, n))
    return [Tensor(x, device=device).cast(dtype).contiguous() for x in numbers]


def difference(case: Case, given: list[Tensor], weighted: bool, found: list[np.ndarray]) -> str:
    """Says what is wrong with a case's results; "" where nothing is."""
    wanted, dtype = exact(case, given, weighted), given[0].dtype
    kind = "weighted gradient" if weighted else "gradient"
    x = np.nan_to_num(np.abs(given[0].float().numpy()), posinf=0)
    theirs: list[np.ndarray] = []
    for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
        what = f"{case.name} {dtype.name} {x.shape[-1]}, {kind if i else 'value'}"
        if one.shape != other.shape: return f"{what}: shape {one.shape}, not {other.shape}"
        if case.shapes: size = np.asarray(x.max())
        elif case in ELEMENTS: size = x
        else: size = x.max(-1, keepdims=one.ndim > 1)
        one, other = one.astype(np.float64), other.astype(np.float64)
        bound = case.ulps * UNIT[dtype] * (1 + size + np.abs(np.nan_to_num(other, posinf=0, neginf=0)))
        off = ~close(one, other, bound)
        if off.any() and not case.shapes and (dtype != dtypes.float32 or not off[:2].any()):
            with disabled(): theirs = theirs or computed(case, given, weighted)
            plain = theirs[i].astype(np.float64)
            # where torch has no number, units are those of tinygrad's: x / 1e-12 of a row with a NaN
            of_plain = case.ulps * UNIT[dtype] * np.abs(np.nan_to_num(plain, posinf=0, neginf=0))
            off &= ~close(one, plain, np.where(np.isfinite(other), bound, of_plain))
        if off.any():
            at = tuple(np.argwhere(off)[0])
            return f"{what} at {at} of {one.shape}: {one[at]}, not {other[at]}; {off.sum()} such"
    return ""


def wrong(case: Case, n: int, dtype: DType, device: str, weighted: bool = False) -> str:
    """What is wrong with a case, in launches of its own; "" where nothing is."""
    given = [each.realize() for each in tensors(case, n, dtype, device)]
    return difference(case, given, weighted, computed(case, given, weighted))


# **** many cases a kernel ****

def stacked(made: Sequence[Tensor]) -> list[np.ndarray]:
    """Returns the numbers of Tensors, those of one shape and dtype stored by one kernel."""
    found: dict[int, np.ndarray] = {}
    for kind in {(each.shape, each.dtype) for each in made}:
        own = [i for i, each in enumerate(made) if (each.shape, each.dtype) == kind]
        both = Tensor.stack(*(made[i] for i in own)).contiguous().realize()
        found.update(zip(own, both.float().numpy(), strict=True))
    return [found[i] for i in range(len(made))]


def wrong_together(cases: Sequence[Case], n: int, dtype: DType, device: str) -> list[str]:
    """Says what is wrong with each of many cases of rows, all computed in a few launches, with gradients of
    plain and of weighted sums."""
    given = [tensors(case, n, dtype, device) for case in cases]
    Tensor.realize(*(each for some in given for each in some))
    plan = [(case, some, weighted) for case, some in zip(cases, given, strict=True)
            for weighted in ([False, True] if case.grad else [False])]
    made = [results(*each) for each in plan]
    numbers = iter(stacked([each for some in made for each in some]))
    found = [difference(*each, [next(numbers) for _ in some]) for each, some in zip(plan, made, strict=True)]
    return [each for each in found if each]


def wrongs(case: Case, device: str) -> list[str]:
    """Says what is wrong with a case in all widths and dtypes, with gradients of plain and weighted sums."""
    found = [wrong(case, n, dtype, device, weighted) for n in widths(case) for dtype in UNIT
             for weighted in (False, True)]
    return [each for each in found if each]
