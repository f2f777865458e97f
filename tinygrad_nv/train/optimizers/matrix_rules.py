"""Rules that look at a parameter as a matrix: Muon and Adafactor (rules.py has the protocol)."""
from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar, Literal

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tinygrad_nv.errors import ConfigError
from tinygrad_nv.train.optimizers.rules import At, Numbers, Shapes, lerp, narrow

AdjustLR = Literal["original", "match_rms_adamw"]


def orthogonalize(x: Tensor, steps: int, coefficients: tuple[float, float, float], eps: float,
                   dtype: DType) -> Tensor:
    """A matrix (or a stack of them) whose singular values Newton and Schulz's quintic iteration has brought
    near 1; float32. Each step is x ← a x + (b A + c A²) x with A = x xᵀ (Jordan,
    https://kellerjordan.github.io/posts/muon/): matmuls of `dtype` with float32 results."""
    a, b, c = coefficients
    tall = int(x.shape[-2]) > int(x.shape[-1])
    norm = x.square().sum((-2, -1), keepdim=True).sqrt().maximum(eps)
    y = (x / norm).cast(dtype).contiguous()
    if tall: y = y.transpose(-2, -1).contiguous()
    for _ in range(steps):
        # both terms have the rounded A: where A is near 1 their errors nearly cancel
        gram = (y @ y.transpose(-2, -1)).contiguous()
        square = b * gram.float() + c * gram.matmul(gram, dtype=dtypes.float32)
        y = (a * y.float() + square.cast(dtype).contiguous().matmul(y, dtype=dtypes.float32)).cast(dtype)
        y = y.contiguous()
    return (y.transpose(-2, -1) if tall else y).cast(dtypes.float32)


@dataclass(frozen=True)
class MuonRule:
    """Momentum, orthogonalised (Jordan et al.; Liu et al., arXiv 2502.16982), as torch.optim.Muon:

        B ← B + (1 − μ)(g − B);  O = NS(g + μ (B − g) with Nesterov's momentum, else B)
        x ← x (1 − lr λ) − lr · ratio · O

    ratio: √max(1, rows / columns) ("original"), or 0.2 √max(rows, columns) ("match_rms_adamw"), with which
    learning rate and weight decay of AdamW can be kept. Projections that lie one below the other in a
    parameter (`At.rows`) are orthogonalised each by itself.
    """
    momentum: float = 0.95
    nesterov: bool = True
    steps: int = 5
    coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315)
    eps: float = 1e-7
    adjust_lr: AdjustLR = "original"
    dtype: DType = dtypes.bfloat16
    name: ClassVar[str] = "muon"
    elementwise: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.adjust_lr not in ("original", "match_rms_adamw"):
            raise ConfigError(f"adjust_lr {self.adjust_lr!r}", "original or match_rms_adamw")
        if self.dtype not in (dtypes.bfloat16, dtypes.float32):
            raise ConfigError(f"Newton-Schulz in {self.dtype.name}", "bfloat16 or float32")

    def slots(self, shape: tuple[int, ...]) -> Shapes: return {"momentum_buffer": shape}

    def advance(self, x: Tensor, g: Tensor, slots: Numbers, at: At) -> dict[str, Tensor]:
        return {"momentum_buffer": lerp(slots["momentum_buffer"], g, 1 - self.momentum)}

    def move(self, x: Tensor, g: Tensor, old: Numbers, new: Numbers, at: At) -> Tensor:
        buffer = new["momentum_buffer"]
        update = lerp(g, buffer, self.momentum) if self.nesterov else buffer
        spans = list(pairwise(accumulate(at.rows or (int(x.shape[-2]),), initial=0)))
        made = [self.ratio(end - first, int(x.shape[-1])) *
                orthogonalize(update[..., first:end, :], self.steps, self.coefficients, self.eps, self.dtype)
                for first, end in spans]
        change = made[0] if len(made) == 1 else made[0].cat(*made[1:], dim=-2)
        return x * at.decay - narrow(at.lr) * change

    def ratio(self, rows: int, columns: int) -> float:
        """Returns the factor of a matrix's learning rate."""
        if self.adjust_lr == "original": return math.sqrt(max(1.0, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))


@dataclass(frozen=True)
class AdafactorRule:
    """Second moments by row and by column (Shazeer and Stern, arXiv 1804.04235), as torch.optim.Adafactor:

        ρ = min(lr, 1/√t);  α = max(eps2, rms(x)) ρ;  x ← x (1 − lr λ);  1 − β = t^beta2_decay
        R ← R + (1 − β)(mean over columns of g² − R);  C ← C + (1 − β)(mean over rows of g² − C)
        V = R C / max(mean(R), eps1);  U = g / √max(V, eps1²);  x ← x − α U / max(1, rms(U) / d)

    Vectors have V itself for a moment. `eps1` 0 is the float32 epsilon, as torch takes it.
    """
    beta2_decay: float = -0.8
    eps1: float = 0.0
    eps2: float = 1e-3
    d: float = 1.0
    name: ClassVar[str] = "adafactor"
    elementwise: ClassVar[bool] = False

    def slots(self, shape: tuple[int, ...]) -> Shapes:
        if len(shape) < 2: return {"variance": shape}
        return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}

    def advance(self, x: Tensor, g: Tensor, slots: Numbers, at: At) -> dict[str, Tensor]:
        weight = narrow(at.step.pow(self.beta2_decay))
        square = g * g
        if "variance" in slots: means = {"variance": square}
        else: means = {"row_var": square.mean(-1, keepdim=True), "col_var": square.mean(-2, keepdim=True)}
        return {name: slots[name] + weight * (mean - slots[name]) for name, mean in means.items()}

    def move(self, x: Tensor, g: Tensor, old: Numbers, new: Numbers, at: At) -> Tensor:
        eps1 = self.eps1 or 2.0**-23
        if "variance" in new: estimate = new["variance"]
        else:
            rows = new["row_var"]
            estimate = rows * new["col_var"] / rows.mean(-2, keepdim=True).maximum(eps1)
        update = g * estimate.maximum(eps1 * eps1).rsqrt()
        rate = narrow(at.lr.minimum(1 / at.step.sqrt())) * _rms(x).maximum(self.eps2)
        return x * at.decay - (rate / (_rms(update) / self.d).maximum(1.0)) * update


def _rms(x: Tensor) -> Tensor: return x.square().mean().sqrt().reshape(1)
