"""The scale of a float16 loss: small gradients stay numbers, and large ones make the step one that is skipped.

Protocol: `LossScaler(how, device)` has `scale`, float32 (1), and `growth_tracker`, int32 (1), of steps since
it moved last. A loss is multiplied by `scale`; `schedule_update(go)` moves it after the step, where `go`, bool
(1), is whether the gradients were finite. The rule is torch's (aten/src/ATen/native/cuda/AmpKernels.cu,
_amp_update_scale_): backoff and a tracker of 0 after one that was not; growth after `growth_interval` that
were, unless the scale would be infinite.
"""
from __future__ import annotations

from tinygrad import Tensor, dtypes

from tinygrad_nv.numerics.recipes import LossScaling


class LossScaler:
    """The scale and its state on a device."""

    def __init__(self, how: LossScaling, device: str | tuple[str, ...] | None = None) -> None:
        self.how = how
        self.scale = Tensor([how.init_scale], dtype=dtypes.float32, device=device).contiguous()
        self.growth_tracker = Tensor([0], dtype=dtypes.int32, device=device).contiguous()
        Tensor.realize(*self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """The state, by name."""
        return {"loss_scale": self.scale.is_param_(False), "growth_tracker": self.growth_tracker.is_param_(False)}

    @property
    def inverse(self) -> Tensor:
        """What gradients are multiplied by, float32 (1), before the scale moves."""
        return self.scale.detach().reciprocal()

    def schedule_update(self, go: Tensor) -> list[Tensor]:
        """Moves the scale; what is to be realized."""
        how, scale = self.how, self.scale.detach()
        tracker = self.growth_tracker + 1
        grows = go & (tracker >= how.growth_interval)
        grown = scale * how.growth_factor
        grown = grown.isfinite().where(grown, scale)
        self.scale.assign(go.where(grows.where(grown, scale), scale * how.backoff_factor))
        self.growth_tracker.assign((go & (tracker < how.growth_interval)).where(tracker, 0))
        return [self.scale, self.growth_tracker]
