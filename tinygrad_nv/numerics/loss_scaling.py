"""The scale of a float16 loss: small gradients stay numbers; a step whose gradients overflow is skipped.

Protocol: `LossScaler(how, device)` has `scale`, float32 (1), and `growth_tracker`, int32 (1), of steps since
it moved last. A loss is multiplied by `scale`; `schedule_update(go)` moves it after the step, where `go`,
bool (1), is whether the gradients were finite. The rule is torch's (aten/src/ATen/native/cuda/AmpKernels.cu,
_amp_update_scale_): backoff and a tracker of 0 after one that was not; growth after `growth_interval` that
were, unless the scale would be infinite.
"""
from __future__ import annotations

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tinygrad_nv.numerics.recipes import LossScaling


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
