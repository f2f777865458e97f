"""Resize and Upsample.

Protocol: each dimension is resized by itself: its result is a matmul with a matrix of weights [new, old],
made on the host in float64, or a gather where a point has one source (nearest).
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from tinygrad import Tensor

from tinygrad_nv.errors import OnnxError
from tinygrad_nv.onnx.limits import budget
from tinygrad_nv.onnx.table import op


@dataclass(frozen=True)
class Sampling:
    """The attributes that decide weights."""
    antialias: int = 0
    coordinate_transformation_mode: str = "half_pixel"
    cubic_coeff_a: float = -0.75
    exclude_outside: int = 0
    extrapolation_value: float = 0.0
    keep_aspect_ratio_policy: str = "stretch"
    mode: str = "nearest"
    nearest_mode: str = "round_prefer_floor"

    def places(self, old: int, new: int, scale: float, region: tuple[float, float]) -> np.ndarray:
        """Coordinate in the old dimension of each point of the new one."""
        # in float32, as runtimes have it: it decides which of two points is the nearest
        i = np.arange(new, dtype=np.float32)
        scale = np.float32(scale)   # type: ignore[assignment]
        match self.coordinate_transformation_mode:
            case "half_pixel": return (i + 0.5) / scale - 0.5
            case "asymmetric": return i / scale
            case "align_corners":
                length = old * scale    # it may be no whole number
                return np.zeros(new) if length == 1 or new == 1 else i * (old - 1) / (length - 1)
            case "pytorch_half_pixel": return (i + 0.5) / scale - 0.5 if new > 1 else np.full(new, -0.5)
            case "half_pixel_symmetric":
                adjustment = new / (old * scale)
                return old / 2 * (1 - adjustment) + (i + 0.5) / scale - 0.5
            case "tf_half_pixel_for_nn": return (i + 0.5) / scale
            case "tf_crop_and_resize":
                first, last = region
                if new == 1: return np.full(1, 0.5 * (first + last) * (old - 1))
                return first * (old - 1) + i * (last - first) * (old - 1) / (new - 1)
        raise OnnxError(f"coordinate_transformation_mode={self.coordinate_transformation_mode!r}",
                        "half_pixel, asymmetric, align_corners, pytorch_half_pixel, "
                        "half_pixel_symmetric, tf_half_pixel_for_nn, tf_crop_and_resize")

    def nearest(self, places: np.ndarray, old: int) -> np.ndarray:
        """The one source of each place."""
        rounding: dict[str, Callable[[np.ndarray], np.ndarray]] = {
            "round_prefer_floor": lambda x: np.ceil(x - 0.5),
            "round_prefer_ceil": lambda x: np.floor(x + 0.5),
            "floor": np.floor, "ceil": np.ceil, "before 11": np.ceil if len(places) < old else np.floor}
        return rounding[self.nearest_mode](places).clip(0, old - 1).astype(np.int64)

    def kernel(self, x: np.ndarray) -> np.ndarray:
        """The weight of a point at a distance: a triangle, or Keys' cubic."""
        d, a = np.abs(x), self.cubic_coeff_a
        if self.mode == "linear": return np.maximum(0.0, 1 - d)
        near = ((a + 2) * d - (a + 3)) * d * d + 1
        far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
        return np.where(d <= 1, near, np.where(d < 2, far, 0.0))

    def weights(self, places: np.ndarray, old: int, scale: float) -> np.ndarray:
        """The matrix [new, old]. Points outside count for those at the border, or not at all."""
        stretch = min(scale, 1.0) if self.antialias else 1.0
        reach = math.ceil((1 if self.mode == "linear" else 2) / stretch)
        budget().check_bytes((len(places), max(old, 2 * reach)), 8)
        made = np.zeros((len(places), old))
        for row, place in enumerate(places):
            points = np.arange(math.floor(place) - reach + 1, math.floor(place) + reach + 1)
            weight = self.kernel((points - place) * stretch)
            if self.exclude_outside: weight = np.where((points >= 0) & (points < old), weight, 0.0)
            np.add.at(made[row], points.clip(0, old - 1), weight / weight.sum())
        return made


@op("Resize", since=11, host=(1, 2, 3))
def resize(x: Tensor, roi: np.ndarray | None = None, scales: np.ndarray | None = None,
           sizes: np.ndarray | None = None, axes: Sequence[int] | None = None,
           **attributes: object) -> Tensor:
    """x with dimensions of other extents, by factors or by extents."""
    sampling = Sampling(**attributes)   # type: ignore[arg-type]
    dims = [each % x.ndim for each in axes] if axes else list(range(x.ndim))
    if scales is not None and scales.size: factors, extents = [float(each) for each in scales], None
    else:
        assert sizes is not None, "neither scales nor sizes"
        factors, extents = _by_sizes(x, dims, sizes, sampling.keep_aspect_ratio_policy)
    made, outside = x, None
    for i, d in enumerate(dims):
        old = int(x.shape[d])
        # the product that runtimes compute, in float32
        new = math.floor(np.float32(old) * np.float32(factors[i])) if extents is None else extents[i]
        budget().check_bytes((*made.shape[:d], new, *made.shape[d + 1:]), x.dtype.itemsize)
        region = (float(roi[i]), float(roi[i + len(dims)])) if roi is not None and roi.size else (0.0, 1.0)
        places = sampling.places(old, new, factors[i], region)
        if not (new == old and factors[i] == 1 and region == (0.0, 1.0)):
            made = _dimension(made, d, places, factors[i], sampling)
        beyond = (places < 0) | (places > old - 1)
        if sampling.coordinate_transformation_mode == "tf_crop_and_resize" and beyond.any():
            mask = Tensor(beyond).reshape([-1 if j == d else 1 for j in range(x.ndim)])
            outside = mask if outside is None else outside | mask
    return made if outside is None else outside.where(sampling.extrapolation_value, made).cast(x.dtype)


def _by_sizes(x: Tensor, dims: Sequence[int], sizes: np.ndarray,
              policy: str) -> tuple[list[float], list[int]]:
    """Factors and extents for extents that are asked for."""
    old, wanted = [int(x.shape[d]) for d in dims], [int(each) for each in sizes]
    factors = [n / m for n, m in zip(wanted, old, strict=True)]
    if policy == "stretch": return factors, wanted
    one = min(factors) if policy == "not_larger" else max(factors)
    return [one] * len(dims), [math.floor(one * n + 0.5) for n in old]


def _dimension(x: Tensor, d: int, places: np.ndarray, scale: float, sampling: Sampling) -> Tensor:
    """x with one dimension resized."""
    old = int(x.shape[d])
    if sampling.mode == "nearest":
        return x[(slice(None),) * d + (Tensor(sampling.nearest(places, old)),)]
    weights = Tensor(sampling.weights(places, old, scale).astype(np.float32)).cast(x.dtype)
    return (x.transpose(d, -1) @ weights.T).transpose(d, -1)


@op("Resize", since=10, host=(1,))
@op("Upsample", since=9, host=(1,))
def upsample(x: Tensor, scales: np.ndarray, mode: str = "nearest") -> Tensor:
    """Resize of old opsets: the place of a point is its number / scale."""
    return resize(x, None, scales, mode=mode.removeprefix("bi"), nearest_mode="before 11",
                  coordinate_transformation_mode="asymmetric")


@op("Upsample", since=7)
def upsample_7(x: Tensor, scales: Sequence[float], mode: str = "nearest") -> Tensor:
    """Resizes as `upsample` does, its scales an attribute."""
    return upsample(x, np.asarray(scales), mode)


@op("Upsample")
def upsample_1(x: Tensor, height_scale: float, width_scale: float, mode: str = "nearest") -> Tensor:
    """Resizes images as `upsample` does, its scales an attribute each."""
    return upsample(x, np.asarray([1.0, 1.0, height_scale, width_scale]), mode)
