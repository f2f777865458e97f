"""Workloads of the part "train" (gpu/train.py): what a step of training does beside matmuls and attention.

Protocol: a workload has a `spec`, and its `names` are those of storages in the order of the kernel's
pointers, without scratch memory. `theirs(one)` is the same in torch's functions: results by name.
`exact(one)` gives results in float64, and how far from them each may be, a few rows at a time.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from tinygrad.dtype import DType, dtypes

from bench.gpu.parts import MOST_SETS, set_count
from tinygrad_nv.tile.column_sum.spec import ColumnSumSpec
from tinygrad_nv.tile.cross_entropy.spec import CrossEntropySpec
from tinygrad_nv.tile.embedding.spec import EmbeddingGradientSpec, Tokens
from tinygrad_nv.tile.expression import Apply, Load
from tinygrad_nv.tile.norm.spec import NormSpec, gate_gradient
from tinygrad_nv.tile.rope.spec import Angles, RopeGradientSpec, RopeSpec

BF16, F32, S32 = dtypes.bfloat16, dtypes.float32, dtypes.int32
EPS = 1e-5                  # of norms
BETA1, BETA2, TINY, RATE, DECAY = 0.9, 0.95, 1e-8, 1e-3, 0.1    # of AdamW
STEP = 10                   # the number of ours' step
IGNORED = -100              # a class
TOGETHER = 512              # rows, or columns, that are compared together
ROUNDED = 1.01 * 2.0**-8    # what rounding to bfloat16 may change, and a little more
One = dict[str, Any]
Near = tuple[str, Any, Any, Any]    # a result, which part of it, exactly, and how far off it may be


def torch_dtype(dtype: DType) -> Any:
    """torch's."""
    import torch
    return {BF16: torch.bfloat16, F32: torch.float32}[dtype]


def wide(x: Any) -> Any:
    """float32 of bfloat16; what is wider as it is."""
    import torch
    return x.float() if x.dtype == torch.bfloat16 else x


class Workload:
    """Base of the workloads of training."""
    results: ClassVar[tuple[str, ...]] = ("out",)
    names: tuple[str, ...] = ()
    most_sets: ClassVar[int] = MOST_SETS
    nbytes: float

    def one(self, device: str) -> One:
        """A set of storages by name."""
        raise NotImplementedError

    def make_inputs(self, device: str) -> list[One]:
        """Returns as many sets of inputs as exceed twice the L2 cache."""
        return [self.one(device) for _ in range(set_count(device, self.nbytes, self.most_sets))]

    def theirs(self, one: One) -> One:
        """Results by name, in torch's functions."""
        raise NotImplementedError

    def compilable(self, one: One) -> One:
        """Returns the function that torch.compile is given."""
        return self.theirs(one)

    def exact(self, one: One) -> Iterator[Near]:
        """Results, part by part."""
        raise NotImplementedError

    def unlike(self, one: One) -> str:
        """How the results in these storages are not what they must be; "" when they are."""
        for name, part, exact, allowed in self.exact(one):
            off = (one[name][part].double() - exact).abs() - allowed
            if not bool((off <= 0).all()): return f"{name}: {off.max().item():g} more off than allowed"
        return ""


@dataclass(frozen=True)
class CrossEntropy(Workload):
    """Losses of rows of logits and the gradient of these. torch gets float32 of bfloat16 logits, as
    transformers has it, and gives the gradient as bfloat16."""
    rows: int
    size: int
    dtype: DType = F32

    results = ("gradient", "losses")
    names = ("gradient", "losses", "logits", "labels")

    @property
    def name(self) -> str:
        """Name of the row."""
        return f"cross entropy {self.rows}x{self.size} {'f32' if self.dtype == F32 else 'bf16'} → bf16"

    @property
    def spec(self) -> CrossEntropySpec:
        """Spec of the kernel."""
        return CrossEntropySpec(self.rows, self.size, self.dtype, gradient=BF16)

    @property
    def work(self) -> float:
        """Logits."""
        return float(self.rows * self.size)

    @property
    def nbytes(self) -> float:  # type: ignore[override]
        """Logits and their gradient, each once."""
        return float(self.spec.nbytes)

    def scale_down(self) -> CrossEntropy:
        """Smaller, and of several CTAs a row still where it was."""
        return replace(self, rows=3, size=20480)

    def one(self, device: str) -> One:
        """Logits as of a model that has learnt something; one of some rows has no class."""
        import torch
        logits = (torch.randn(self.rows, self.size, device=device) * 2).to(torch_dtype(self.dtype))
        labels = torch.randint(self.size, (self.rows,), device=device)
        labels[::7] = IGNORED
        return {"gradient": torch.empty(self.rows, self.size, device=device, dtype=torch.bfloat16),
                "losses": torch.empty(self.rows, device=device), "logits": logits,
                "labels": labels.int(), "classes": labels, "ones": torch.ones(self.rows, device=device)}

    def theirs(self, one: One) -> One:
        import torch
        leaf = one["logits"].detach().requires_grad_()
        losses = torch.nn.functional.cross_entropy(leaf.float(), one["classes"], reduction="none")
        gradient, = torch.autograd.grad(losses, leaf, one["ones"])
        return {"gradient": gradient.bfloat16(), "losses": losses.detach()}

    def compilable(self, one: One) -> One:
        """Without autograd, so that the cast of the gradient is fused, too; also for float64."""
        import torch
        x, classes, at = wide(one["logits"]), one["classes"], one["classes"].clamp(min=0)[:, None]
        log, known = x.logsumexp(1, keepdim=True), classes != IGNORED
        own = torch.arange(self.size, device=x.device) == at
        gradient = torch.where(known[:, None], (x - log).exp() - own.to(x.dtype), 0.0)
        if x.dtype == torch.float32: gradient = gradient.bfloat16()
        return {"gradient": gradient, "losses": torch.where(known, (log - x.gather(1, at))[:, 0], 0.0)}

    def exact(self, one: One) -> Iterator[Near]:
        for first in range(0, self.rows, TOGETHER):
            part = slice(first, min(first + TOGETHER, self.rows))
            found = self.compilable({"logits": one["logits"][part].double(), "classes": one["classes"][part]})
            losses, gradient = found["losses"], found["gradient"]
            yield "losses", part, losses, 2.0**-17 * losses.abs() + 2.0**-17
            yield "gradient", part, gradient, ROUNDED * gradient.abs() + 2.0**-22


@dataclass(frozen=True)
class EmbeddingGradient(Workload):
    """The gradient of a table of rows of bfloat16. Tokens are as frequent as words are: the i-th most often
    is there 1 / i times as often as the first."""
    vocabulary: int
    width: int
    tokens: int

    names = ("out", "tokens", "grad")

    @property
    def name(self) -> str:
        """Name of the row."""
        return f"embedding gradient {self.vocabulary}x{self.width}, {self.tokens} tokens"

    @property
    def spec(self) -> EmbeddingGradientSpec:
        """Spec of the kernel."""
        return EmbeddingGradientSpec(self.vocabulary, self.width, BF16, Tokens(S32, (self.tokens,), (1,)))

    @property
    def work(self) -> float:
        """Elements of the table."""
        return float(self.vocabulary * self.width)

    @property
    def nbytes(self) -> float:  # type: ignore[override]
        """The table and the rows of the gradient, each once."""
        return 2.0 * self.width * (self.vocabulary + self.tokens) + 4 * self.tokens

    def scale_down(self) -> EmbeddingGradient: return EmbeddingGradient(200, 72, 300)

    def one(self, device: str) -> One:
        import torch
        weights = 1 / torch.arange(1, self.vocabulary + 1, device=device, dtype=torch.float32)
        tokens = torch.multinomial(weights, self.tokens, replacement=True)
        some: One = {"device": device, "dtype": torch.bfloat16}
        return {"out": torch.empty(self.vocabulary, self.width, **some), "tokens": tokens.int(),
                "numbers": tokens, "grad": torch.randn(self.tokens, self.width, **some)}

    def theirs(self, one: One) -> One:
        import torch
        return {"out": torch.ops.aten.embedding_dense_backward(one["grad"], one["numbers"], self.vocabulary,
                                                               -1, False)}

    def exact(self, one: One) -> Iterator[Near]:
        import torch
        for first in range(0, self.width, TOGETHER):
            part, grad = slice(first, first + TOGETHER), one["grad"][:, first:first + TOGETHER].double()
            sums, sizes = (torch.zeros(self.vocabulary, grad.shape[1], dtype=grad.dtype, device=grad.device)
                           .index_add_(0, one["numbers"], x) for x in (grad, grad.abs()))
            yield "out", (slice(None), part), sums, sums.abs() * ROUNDED + 2.0**-15 * sizes


@dataclass(frozen=True)
class Columns(Workload):
    """Sums of columns: of gradients, for a bias, or of gradients times normed rows, for a norm's weight. Sums
    of squares of rows are there, as the norm's own kernel leaves them."""
    what: str
    m: int
    n: int

    @property
    def name(self) -> str:
        """Name of the row."""
        return f"{self.what} gradient {self.m}x{self.n}"

    @property
    def names(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of storages."""
        return ("out", "grad") if self.what == "bias" else ("out", "x", "squares", "grad")

    @property
    def spec(self) -> ColumnSumSpec:
        """Spec of the kernel."""
        if self.what == "bias":
            return ColumnSumSpec(self.m, self.n, Load(0, BF16, self.n, 1).cast(F32), BF16)
        x, grad = (Load(i, BF16, self.n, 1) for i in (0, 2))
        root = Apply("sqrt", (Load(1, F32, 1, 0) * (1 / self.n) + EPS,), F32)
        term = ((x.cast(F32) * root.reciprocal()).cast(BF16) * grad).cast(F32)
        return ColumnSumSpec(self.m, self.n, term, BF16)

    @property
    def work(self) -> float:
        """Terms."""
        return float(self.m * self.n)

    @property
    def nbytes(self) -> float:  # type: ignore[override]
        """Operands once."""
        return 2.0 * self.work if self.what == "bias" else 4.0 * self.work + 4 * self.m

    def scale_down(self) -> Columns: return replace(self, m=100, n=264)

    def one(self, device: str) -> One:
        import torch
        some: One = {"device": device, "dtype": torch.bfloat16}
        x, grad = (torch.randn(self.m, self.n, **some) for _ in range(2))
        return {"out": torch.empty(self.n, **some), "x": x, "squares": x.float().square().sum(1),
                "grad": grad}

    def theirs(self, one: One) -> One:
        if self.what == "bias": return {"out": one["grad"].sum(0)}
        scale = (one["squares"] * (1 / self.n) + EPS).rsqrt()[:, None]
        normed = (wide(one["x"]) * scale).to(one["x"].dtype)
        return {"out": (normed * one["grad"]).sum(0)}

    def exact(self, one: One) -> Iterator[Near]:
        for first in range(0, self.n, TOGETHER):
            part = slice(first, first + TOGETHER)
            terms = one["grad"][:, part].double()
            if self.what != "bias":
                scale = (one["squares"].double() * (1 / self.n) + EPS).rsqrt()[:, None]
                terms = terms * (one["x"][:, part].double() * scale)
            # each term may be rounded twice, to either side: some seven standard deviations of that
            sums, deviation = terms.sum(0), terms.square().sum(0).sqrt()
            yield "out", part, sums, ROUNDED * sums.abs() + 4 * ROUNDED * deviation


@dataclass(frozen=True)
class Rope(Workload):
    """Rotary positions of q and k of q|k|v, and v copied, by all contenders; or the gradient, where that of q
    is float32, as our attention adds it up."""
    batch: int
    tokens: int
    heads: int
    kv_heads: int
    d: int
    gradient: bool = False

    @property
    def name(self) -> str:
        """Name of the row."""
        return (f"rope{' gradient' * self.gradient} {self.batch}x{self.tokens}, {self.heads}/{self.kv_heads} "
                f"heads of {self.d}")

    @property
    def results(self) -> tuple[str, ...]:  # type: ignore[override]
        """Returns the results that are compared."""
        return ("qkv",) if self.gradient else ("q", "k", "v")

    @property
    def names(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of storages."""
        return (*(("qkv", "q", "k", "v") if self.gradient else ("q", "k", "v", "qkv")), "cos", "sin")

    @property
    def spec(self) -> RopeSpec:
        """Spec of the kernel."""
        given = (self.batch, self.tokens, self.heads, self.kv_heads, self.d, self.d // 2, BF16,
                 Angles(F32, self.d // 2))
        return RopeGradientSpec(*given, wide_q=True) if self.gradient else RopeSpec(*given)

    @property
    def work(self) -> float:
        """Elements of q|k|v."""
        return float(self.batch * self.tokens * self.spec.width)

    @property
    def nbytes(self) -> float:  # type: ignore[override]
        """Operands and results once."""
        return float(self.spec.nbytes)

    def scale_down(self) -> Rope:
        return replace(self, batch=2, tokens=20, heads=4, kv_heads=2)

    def one(self, device: str) -> One:
        import torch
        def heads(count: int, dtype: Any = torch.bfloat16) -> Any:
            return torch.randn(self.batch, count, self.tokens, self.d, device=device).to(dtype)
        half = self.d // 2
        steps = 10000.0 ** (-torch.arange(half, device=device) / half)
        angles = torch.arange(self.tokens, device=device)[:, None] * steps
        width = self.spec.width
        return {"q": heads(self.heads, torch.float32 if self.gradient else torch.bfloat16),
                "k": heads(self.kv_heads), "v": heads(self.kv_heads),
                "qkv": torch.randn(self.batch, self.tokens, width, device=device).bfloat16(),
                "cos": angles.cos(), "sin": angles.sin()}

    @staticmethod
    def rotate(x: Any, cos: Any, sin: Any) -> Any:
        """x (B, H, T, D) rotated, in float32 or float64."""
        import torch
        low, high = wide(x).chunk(2, -1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

    def theirs(self, one: One) -> One:
        import torch
        cos, sin, dtype = one["cos"], one["sin"], one["k"].dtype
        if self.gradient:
            q, k = (self.rotate(one[name], cos, -sin).to(dtype) for name in "qk")
            return {"qkv": torch.cat([q, k, one["v"]], 1).transpose(1, 2).flatten(2).contiguous()}
        heads = one["qkv"].unflatten(-1, (-1, self.d)).transpose(1, 2)
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], 1)
        return {"q": self.rotate(q, cos, sin).to(dtype), "k": self.rotate(k, cos, sin).to(dtype),
                "v": v.clone(memory_format=torch.contiguous_format)}

    def exact(self, one: One) -> Iterator[Near]:
        import torch
        double = {name: one[name].double() for name in self.names}
        if self.gradient: double["q"] = one["q"].bfloat16().double()
        for name, x in self.theirs(double).items():
            # a pair's size: how far roundings of its elements can turn into each other
            pairs = x.unflatten(-1, (-1, 2, self.d // 2)).square().sum(-2, keepdim=True).sqrt()
            size = torch.cat([pairs, pairs], -2).flatten(-3)
            yield name, ..., x, ROUNDED * x.abs() + 2.0**-7 * size * self.gradient + 2.0**-18 * size


@dataclass(frozen=True)
class GatedGradient(Workload):
    """The gradient of gate|up of silu(gate) · up, and that alone."""
    m: int
    n: int

    names = ("out", "both", "grad")

    @property
    def name(self) -> str:
        """Name of the row."""
        return f"silu·mul gradient {self.m}x{self.n}"

    @property
    def spec(self) -> NormSpec:
        """Spec of the kernel."""
        return gate_gradient(self.m, self.n, BF16, "silu")

    @property
    def work(self) -> float:
        """Elements of the gradient."""
        return 2.0 * self.m * self.n

    @property
    def nbytes(self) -> float:  # type: ignore[override]
        """Operands and result once."""
        return 10.0 * self.m * self.n

    def scale_down(self) -> GatedGradient: return replace(self, m=5, n=520)

    def one(self, device: str) -> One:
        import torch
        out, both = (torch.randn(self.m, 2 * self.n, device=device).bfloat16() for _ in range(2))
        return {"out": out, "both": both, "grad": torch.randn(self.m, self.n, device=device).bfloat16()}

    def theirs(self, one: One) -> One:
        import torch
        gate, up = one["both"].chunk(2, -1)
        of_gate = torch.ops.aten.silu_backward(one["grad"] * up, gate)
        return {"out": torch.cat([of_gate, one["grad"] * torch.nn.functional.silu(gate)], -1)}

    def exact(self, one: One) -> Iterator[Near]:
        for first in range(0, self.m, TOGETHER):
            part = slice(first, first + TOGETHER)
            double = {name: one[name][part].double() for name in ("both", "grad")}
            exact, size = self.theirs(double)["out"], double["grad"].abs().repeat(1, 2)
            yield "out", part, exact, 2 * ROUNDED * exact.abs() + 2.0**-16 * size
