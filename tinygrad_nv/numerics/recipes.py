"""Recipes of precision, by name.

Protocol: a `PrecisionRecipe` is frozen and says of a run

    weights     the dtype of weights and activations, and of matmuls that are not in FP8
    master      whether the optimiser has float32 weights, of which those are rounded copies; without,
                bfloat16 is rounded stochastically (train/optimizers/optimizer.py)
    loss        how the loss is scaled (float16)
    fp8         how operands of linear layers get their scales; None: no FP8

FP8 recipes have the names and defaults of Transformer Engine's
(transformer_engine/common/recipe/__init__.py): "hybrid" has activations and weights in e4m3 and gradients in
e5m2, "e4m3" all in e4m3.

By the scale of a float16 loss small gradients stay numbers; a step whose gradients overflow is skipped.
`LossScaler(how, device)` has `scale`, float32 (1), and `growth_tracker`, int32 (1), of steps since
it moved last. A loss is multiplied by `scale`; `schedule_update(go)` moves it after the step, where `go`,
bool (1), is whether the gradients were finite. The rule is torch's (aten/src/ATen/native/cuda/AmpKernels.cu,
_amp_update_scale_): backoff and a tracker of 0 after one that was not; growth after `growth_interval` that
were, unless the scale would be infinite.

`HighPrecision(patterns)` is the rule of what stays in high precision: it has globs (fnmatch: `*` is any text,
dots too) on names of modules as a checkpoint has them, model.layers.0.mlp.down_proj. `why(name, shape)` is
the reason for which a matrix is not multiplied in FP8, or None. `ALWAYS` are those of every run, with
reasons; a user's patterns come on top: `model.layers.0.*` for the first layer, `*.down_proj` for one kind of
matrix.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar, TypeAlias

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tinygrad_nv.errors import ConfigError
from tinygrad_nv.functional import FP8_ALIGNED

FORMATS = {"hybrid": ("e4m3", "e5m2"), "e4m3": ("e4m3", "e4m3")}
ALGORITHMS = ("max", "most_recent")
NAMES = {dtypes.float32: "float32", dtypes.bfloat16: "bfloat16", dtypes.float16: "float16"}
ALWAYS: Mapping[str, str] = {
    "lm_head": "logits need more digits than FP8 has",
    "*embed*": "rows of a table are copied, not multiplied",
    "*norm*": "statistics of rows are float32",
    "*router*": "a rounded score chooses another expert",
    "*.gate": "a rounded score chooses another expert",
    "*.experts.*": "grouped matmuls of experts have no FP8 gradients here",
}


@dataclass(frozen=True)
class LossScaling:
    """torch.amp.GradScaler's: the loss is multiplied by `init_scale`, by `backoff_factor` times that after a
    step whose gradients are not finite, and by `growth_factor` times it after `growth_interval` others.
    Raises `ConfigError`."""
    init_scale: float = 2.0 ** 16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        if not 0 < self.init_scale < float("inf"):
            raise ConfigError(f"init_scale {self.init_scale}", "a number above 0")
        if not self.growth_factor > 1: raise ConfigError(f"growth_factor {self.growth_factor}", "above 1")
        if not 0 < self.backoff_factor < 1:
            raise ConfigError(f"backoff_factor {self.backoff_factor}", "above 0, below 1")
        if self.growth_interval < 1:
            raise ConfigError(f"growth_interval {self.growth_interval}", "1 or more steps")


@dataclass(frozen=True)
class DelayedScaling:
    """A scale for each tensor, of the largest magnitudes of the last `amax_history_len` steps ("max"), or of
    the last ("most_recent"): most / 2^margin / amax. Raises `ConfigError`."""
    fp8_format: str = "hybrid"
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    margin: int = 0
    blocks: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_format(self.fp8_format)
        if self.amax_history_len < 1:
            raise ConfigError(f"amax_history_len {self.amax_history_len}", "1 or more steps")
        if self.amax_compute_algo not in ALGORITHMS:
            raise ConfigError(f"amax_compute_algo {self.amax_compute_algo!r}", ", ".join(ALGORITHMS))
        if not -64 <= self.margin <= 64:
            raise ConfigError(f"margin {self.margin}", "-64 to 64, of which 2 to the power is taken")


@dataclass(frozen=True)
class Float8CurrentScaling:
    """A scale for each tensor, of its own largest magnitude: a pass over it before the one that rounds."""
    fp8_format: str = "hybrid"
    blocks: ClassVar[bool] = False

    def __post_init__(self) -> None: _check_format(self.fp8_format)


@dataclass(frozen=True)
class Float8BlockScaling:
    """A scale, a power of two unless `power_of_two` is False, for each 1 x 128 elements of activations and
    gradients, and each 128 x 128 of weights, of their own largest magnitude (arXiv 2412.19437, 3.3.2)."""
    fp8_format: str = "e4m3"
    power_of_two: bool = True
    blocks: ClassVar[bool] = True

    def __post_init__(self) -> None: _check_format(self.fp8_format)


Fp8Recipe: TypeAlias = DelayedScaling | Float8CurrentScaling | Float8BlockScaling


@dataclass(frozen=True)
class PrecisionRecipe:
    """See above. Raises `ConfigError` for what cannot be."""
    weights: DType = dtypes.float32
    master: bool = True
    loss: LossScaling | None = None
    fp8: Fp8Recipe | None = None

    def __post_init__(self) -> None:
        if self.weights not in NAMES:
            raise ConfigError(f"weights of {self.weights.name}", ", ".join(NAMES.values()))
        if not self.master and self.weights != dtypes.bfloat16:
            raise ConfigError(f"weights of {NAMES[self.weights]} without master weights", "bfloat16",
                              "stochastic rounding is of bfloat16")

    def __str__(self) -> str:
        made = [f"weights of {NAMES[self.weights]}"]
        if self.weights != dtypes.float32:
            made.append("float32 master weights" if self.master else "rounded stochastically")
        if self.loss is not None: made.append(f"loss scale from {self.loss.init_scale:g}")
        if self.fp8 is not None: made.append(f"{type(self.fp8).__name__} {self.fp8.fp8_format}")
        return ", ".join(made)


def _check_format(given: str) -> None:
    if given not in FORMATS: raise ConfigError(f"fp8_format {given!r}", ", ".join(FORMATS))


RECIPES = {
    "float32": PrecisionRecipe(),
    "bfloat16": PrecisionRecipe(dtypes.bfloat16),
    "bfloat16_sr": PrecisionRecipe(dtypes.bfloat16, master=False),
    "float16": PrecisionRecipe(dtypes.float16, loss=LossScaling()),
    "fp8_delayed": PrecisionRecipe(dtypes.bfloat16, fp8=DelayedScaling()),
    "fp8_current": PrecisionRecipe(dtypes.bfloat16, fp8=Float8CurrentScaling()),
    "fp8_block": PrecisionRecipe(dtypes.bfloat16, fp8=Float8BlockScaling()),
}


class LossScaler:
    """The scale and its state on a device."""

    def __init__(self, how: LossScaling, device: str | tuple[str, ...] | None = None) -> None:
        self.how = how
        def make(value: float, dtype: DType) -> Tensor:
            return Tensor([value], dtype=dtype, device=device).contiguous().is_param_(False)
        self.scale, self.growth_tracker = make(how.init_scale, dtypes.float32), make(0, dtypes.int32)
        Tensor.realize(*self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """The state, by name."""
        return {"loss_scale": self.scale, "growth_tracker": self.growth_tracker}

    @property
    def inverse(self) -> Tensor:
        """Factor of the gradients, float32 (1), before the scale moves."""
        return self.scale.detach().reciprocal()

    def schedule_update(self, go: Tensor) -> list[Tensor]:
        """Moves the scale; what is to be realized."""
        # factors in float64, as torch has them; rounded once
        how, scale = self.how, self.scale.detach().cast(dtypes.float64)
        tracker = self.growth_tracker + 1
        grows = go & (tracker >= how.growth_interval)
        grown = scale * how.growth_factor
        grown = grown.cast(dtypes.float32).isfinite().where(grown, scale)
        moved = go.where(grows.where(grown, scale), scale * how.backoff_factor)
        self.scale.assign(moved.cast(dtypes.float32))
        self.growth_tracker.assign((go & (tracker < how.growth_interval)).where(tracker, 0))
        return [self.scale, self.growth_tracker]


@dataclass(frozen=True)
class HighPrecision:
    """The rule of a run: `ALWAYS` and a user's patterns."""
    patterns: tuple[str, ...] = ()

    def excludes(self, name: str) -> bool:
        """Whether a user's pattern names a matrix."""
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)

    def why(self, name: str, shape: tuple[int, int]) -> str | None:
        """The reason for which a matrix of a shape stays in high precision, None where it does not."""
        for pattern, reason in ALWAYS.items():
            if fnmatchcase(name, pattern): return reason
        for pattern in self.patterns:
            if fnmatchcase(name, pattern): return f"excluded by {pattern}"
        if any(extent % FP8_ALIGNED for extent in shape):
            return f"{shape[0]} x {shape[1]}, no multiples of {FP8_ALIGNED}"
        return None
