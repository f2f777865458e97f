"""A model's matrices in FP8: how each is called, the state of their scales, and counters.

Protocol: `Fp8State(recipe, names, device)` has a layer for each name, `LayerFp8`, which is called as
`layer(x, weight)` in place of x Wᵀ. Each has a `meter` of its own, float32 (9): its gradient is what the
quantisation of x, W and g saw in a backward pass (patterns/scaled_gemm/fp8.py). A layer is called once in a
forward pass: of two calls the figures would be added.

    figures = loss.gradient(*state.meters)
    state.schedule_seen(figures)        after each micro-batch: amax is a maximum, counts are sums
    state.schedule_step(go)             after the update; `go`, bool (1): whether the step was taken

Delayed scaling (transformer_engine/common/recipe/delayed_scaling.cu): row 0 of `history`, float32 (steps,
layers, 3), has the largest magnitudes of the step that is under way. At its end

    amax = max over all rows, or row 0          scale = most · 2^−margin / amax, where amax > 0 and is finite
    rows move up by one, row 0 becomes the last, and a row of 0 takes its place

as there, and `scale` begins at 1. A step that is skipped leaves scales and history as they were: what an
infinity made is forgotten. `last`, float32 (2, 3), are counts of the last step: values clamped and values
flushed to zero, of activations, weights and gradients.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from tinygrad import Tensor, dtypes

from tinygrad_nv.functional import FP8_FIGURES, FP8_KINDS, Fp8Linear, fp8_linear
from tinygrad_nv.numerics.recipes import FORMATS, DelayedScaling, Float8BlockScaling, Fp8Recipe
from tinygrad_nv.quant import fp8

COUNTERS = ("clamped", "flushed")
Maximum = Callable[[Tensor], Tensor]


class LayerFp8:
    """One matrix: called in place of x Wᵀ."""

    def __init__(self, how: Fp8Linear, meter: Tensor,
                 scales: Callable[[], tuple[Tensor, ...] | None]) -> None:
        self.how, self.meter, self._scales = how, meter, scales

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """x (…, K) times weight (N, K), transposed, in x's dtype."""
        return fp8_linear(self.how, x, weight, self._scales(), self.meter)


class Fp8State:
    """Scales, histories and counters of the layers of `names`. `maximum` makes largest magnitudes those of
    all ranks."""

    def __init__(self, recipe: Fp8Recipe, names: Sequence[str], device: str | tuple[str, ...] | None = None,
                 maximum: Maximum | None = None) -> None:
        self.recipe, self.names, self.maximum = recipe, tuple(names), maximum
        forward, backward = FORMATS[recipe.fp8_format]
        power_of_two = isinstance(recipe, Float8BlockScaling) and recipe.power_of_two
        self.how = Fp8Linear(forward, backward, recipe.blocks, power_of_two)
        shape, count = (len(FP8_KINDS),), len(self.names)

        def make(value: float, *extents: int) -> Tensor:
            whole = Tensor.full(extents, value, dtype=dtypes.float32, device=device).contiguous()
            return whole.is_param_(False).realize()
        self.meters = [make(0, FP8_FIGURES).is_param_() for _ in self.names]
        self.counts, self.last = make(0, len(COUNTERS), *shape), make(0, len(COUNTERS), *shape)
        self.history = self.scale = None
        if isinstance(recipe, DelayedScaling):
            self.history = make(0, recipe.amax_history_len, count, *shape)
            self.scale = make(1, count, *shape)
        most = [fp8.FORMATS[name].most for name in (forward, forward, backward)]
        self._most = Tensor(np.array(most, np.float32), device=device).realize()
        self.layers = [LayerFp8(self.how, meter, self._scales_of(i)) for i, meter in enumerate(self.meters)]

    def _scales_of(self, number: int) -> Callable[[], tuple[Tensor, ...] | None]:
        def scales() -> tuple[Tensor, ...] | None:
            if self.scale is None: return None
            own = self.scale.detach()[number]
            return tuple(own[i:i + 1] for i in range(len(FP8_KINDS)))
        return scales

    def tensors(self) -> dict[str, Tensor]:
        """Tensors that a run resumes from, by name; none where scales are of the tensors that there are."""
        if self.history is None or self.scale is None: return {}
        return {"amax_history": self.history, "scale": self.scale}

    def schedule_seen(self, figures: Sequence[Tensor]) -> list[Tensor]:
        """Takes in the meters' gradients of a micro-batch; what is to be realized."""
        seen = Tensor.stack(*figures).reshape(len(self.names), 1 + len(COUNTERS), len(FP8_KINDS))
        self.counts.assign(self.counts + seen[:, 1:].sum(0))
        if self.history is None: return [self.counts]
        amax = seen[:, 0] if self.maximum is None else self.maximum(seen[:, 0])
        row = self.history.detach()[:1].maximum(amax)
        self.history.assign(Tensor.cat(row, self.history.detach()[1:]) if len(self.history) > 1 else row)
        return [self.counts, self.history]

    def schedule_step(self, go: Tensor) -> list[Tensor]:
        """Ends a step; what is to be realized."""
        self.last.assign(self.counts)
        self.counts.assign(self.counts.zeros_like())
        if self.history is None or self.scale is None: return [self.last, self.counts]
        assert isinstance(self.recipe, DelayedScaling)
        rows = self.history.detach()
        amax = rows.max(0) if self.recipe.amax_compute_algo == "max" else rows[0]
        wanted = fp8.quotient(self._most * 2.0 ** -self.recipe.margin, amax)
        wanted = wanted.isinf().where(fp8.FLOAT32_MOST, wanted)
        moves = go & (amax > 0) & amax.isfinite()
        self.scale.assign(moves.where(wanted, self.scale.detach()))
        blank = rows[:1].zeros_like()
        rolled = Tensor.cat(blank, rows[2:], rows[:1]) if len(rows) > 1 else blank
        kept = Tensor.cat(blank, rows[1:]) if len(rows) > 1 else blank
        self.history.assign(go.reshape(1, 1, 1).where(rolled, kept))
        return [self.last, self.counts, self.scale, self.history]


def name_counters(counts: np.ndarray) -> dict[str, int]:
    """Counts (2, 3) by name: fp8_clamped_activation, fp8_flushed_gradient …"""
    return {f"fp8_{what}_{kind}": int(counts[i, j]) for i, what in enumerate(COUNTERS)
            for j, kind in enumerate(FP8_KINDS)}
