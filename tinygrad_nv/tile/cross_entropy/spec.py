"""Cross entropy of rows of logits, with the gradient of the logits; distillation of rows from others.

Protocol: a row has `size` logits l of float32, bfloat16 or float16, its class y (int32), and where it is
`scaled` a float32 w. In float32, natural logarithms:

    x_j  = l_j / divisor, with a soft-cap c: c · tanh(l_j / (divisor · c))
    LSE  = log Σ e^x_j
    loss = (1 - ε) (LSE - x_y) + ε (LSE - Σ x_j / size) + z · LSE²         ε: label smoothing
    p_j  = e^(x_j - LSE)
    dl_j = w · ((1 + 2 z LSE) p_j - (1 - ε) [j = y] - ε / size) · dx_j / dl_j

w is 1 of rows that are not scaled; the loss is not multiplied by it. A row whose class is `ignore_index` has
a loss and a gradient of 0, whatever its logits are. A class that is neither below `size` nor ignored has a
loss of NaN, and p without a target for a gradient. LSE - x_y is max - x_y + log Σ e^(x - max), so that large
logits cost no digits.

Distillation has logits t of a teacher beside those of each row, and a temperature T:

    q    = softmax(t / T)
    loss = T² KL(q ‖ softmax(x / T))         dl_j = w · T · (softmax(x / T)_j - q_j) · dx_j / dl_j

T² keeps gradients as large as those of T = 1 (Hinton et al., arXiv 1503.02531). The teacher's logits have
neither divisor nor soft-cap: they are what its softmax takes.

Sources: label smoothing: Szegedy et al., arXiv 1512.00567, as torch.nn.functional.cross_entropy has it;
z-loss: PaLM, arXiv 2204.02311; soft-cap: Gemma 2, arXiv 2408.00118.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile.expression import short

LOGITS = (dtypes.float32, dtypes.bfloat16, dtypes.float16)
MOST_CLASSES = 1 << 30


@dataclass(frozen=True)
class Loss:
    """The numbers of a loss. Raises `SpecError` for what they cannot be."""
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    divisor: float = 1.0

    def __post_init__(self) -> None:
        if not -1 << 31 <= self.ignore_index < 1 << 31:
            raise SpecError(f"ignore_index={self.ignore_index}", "an int32")
        if not 0 <= self.label_smoothing <= 1:
            raise SpecError(f"label_smoothing={self.label_smoothing}", "0 to 1")
        if not (isfinite(self.z_loss) and self.z_loss >= 0):
            raise SpecError(f"z_loss={self.z_loss}", "a finite number from 0 on")
        for name, number in (("softcap", self.softcap), ("divisor", self.divisor)):
            if number is not None and not (isfinite(number) and number > 0):
                raise SpecError(f"{name}={number}", "a finite number above 0")

    def words(self) -> str:
        """Returns words for the differences from the plain loss."""
        named = {"smoothing": self.label_smoothing, "z": self.z_loss, "soft-cap": self.softcap,
                 "divisor": 0 if self.divisor == 1 else self.divisor}
        return "".join(f", {name} {value:g}" for name, value in named.items() if value)


@dataclass(frozen=True)
class RowsSpec:
    """Rows of logits. `gradient`: the dtype of dl, None where it is not asked for; `in_place`: it is written
    over the logits; `scaled`: rows have a w each. Raises `SpecError` for rows of nothing, for logits that are
    no floats, and for a gradient of another dtype in place."""
    rows: int
    size: int
    dtype: DType
    loss: Loss = Loss()
    gradient: DType | None = None
    in_place: bool = False
    scaled: bool = False

    def __post_init__(self) -> None:
        if min(self.rows, self.size) < 1 or self.size > MOST_CLASSES:
            raise SpecError(f"{self.rows} rows of {self.size} logits", f"one or more, of 1 to {MOST_CLASSES}")
        if self.dtype not in LOGITS or (self.gradient or self.dtype) not in LOGITS:
            raise SpecError(f"logits of {short(self.dtype)}", "float32, bfloat16 or float16")
        if self.in_place and self.gradient != self.dtype:
            raise SpecError("a gradient of another dtype in place of logits", "one dtype")
        if self.scaled and self.gradient is None:
            raise SpecError("rows with a scale and without a gradient", "a gradient")

    @property
    def flops(self) -> int:
        """Operations: an exponential in each pass is ten."""
        return (12 if self.gradient is None else 28) * self.rows * self.size

    @property
    def nbytes(self) -> int:
        """Bytes that are read and written where a row stays in a cache from one pass to the next."""
        each = self.dtype.itemsize + (0 if self.gradient is None else self.gradient.itemsize)
        return self.rows * self.size * each

    def __str__(self) -> str:
        made = "" if self.gradient is None else f" → {short(self.gradient)}" + ", in place" * self.in_place
        scaled = ", scaled" * self.scaled
        return f"{self.rows}x{self.size} {short(self.dtype)}{made}{scaled}{self.loss.words()}"


@dataclass(frozen=True)
class CrossEntropySpec(RowsSpec):
    """Cross entropy of rows. Kernels: the gradient, or the logits where it is in their place; losses, float32
    [rows]; logits, unless they came before; labels, int32 [rows]; w, float32 [rows], of scaled rows."""


@dataclass(frozen=True)
class DistillationSpec(RowsSpec):
    """Distillation of rows. Kernels: as of a `CrossEntropySpec`, with the teacher's logits behind the
    labels. Raises `SpecError` for a temperature that is none, and for a loss that has no such numbers."""
    teacher: DType = dtypes.float32
    temperature: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (isfinite(self.temperature) and self.temperature > 0):
            raise SpecError(f"temperature={self.temperature}", "a finite number above 0")
        if self.teacher not in LOGITS:
            raise SpecError(f"a teacher's logits of {short(self.teacher)}", "float32, bfloat16 or float16")
        if self.loss != replace(self.loss, label_smoothing=0.0, z_loss=0.0):
            raise SpecError("distillation with label smoothing or z-loss", "neither")

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.rows * self.size * self.teacher.itemsize

    @property
    def flops(self) -> int: return 2 * super().flops

    def __str__(self) -> str:
        return f"{super().__str__()}, teacher {short(self.teacher)}, temperature {self.temperature:g}"
