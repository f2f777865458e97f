"""Images at places between their points: GridSample, RoiAlign, DeformConv; and Col2Im.

Protocol: a place is coordinates in points of the image. Its value is a weighted sum of the points around it,
which are gathered from the flattened image; padding decides what lies outside. Averages over a region's
samples are two matmuls, since weights of rows and columns are independent.
"""
from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from tinygrad import Tensor, dtypes

from tinygrad_nv.onnx.limits import budget
from tinygrad_nv.onnx.table import op


def _keys(t: Tensor) -> list[Tensor]:
    """Weights of four points for a place t after the second (Keys' cubic convolution, a = -0.75)."""
    a = -0.75
    def near(x: Tensor) -> Tensor: return ((a + 2) * x - (a + 3)) * x * x + 1
    def far(x: Tensor) -> Tensor: return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


def _reflect(x: Tensor, low: float, high: float) -> Tensor:
    """x, mirrored at the borders until it lies between them."""
    extent = high - low
    if extent == 0: return x.const_like(low)
    beyond = x - low
    t = beyond - (beyond / (2 * extent)).floor() * (2 * extent)
    return (t > extent).where(2 * extent - t, t) + low


@op("GridSample")
def grid_sample(x: Tensor, grid: Tensor, align_corners: int = 0, mode: str = "linear",
                padding_mode: str = "zeros") -> Tensor:
    """x [N, C, D1, …] at the places of grid [N, O1, …, k], whose coordinates are -1 to 1, the last dimension
    first."""
    extents = [int(n) for n in x.shape[2:]]
    places, borders = [], []
    for d, n in enumerate(extents):
        g = grid[..., len(extents) - 1 - d].cast(dtypes.float32)
        low, high = (0.0, n - 1.0) if align_corners else (-0.5, n - 0.5)
        place = (g + 1) / 2 * (n - 1) if align_corners else ((g + 1) * n - 1) / 2
        if mode == "nearest": place = place.round()
        # of a cubic each point is clipped, not the place between them
        if padding_mode == "border" and "cubic" not in mode: place = place.clip(0, n - 1)
        if padding_mode == "reflection": place = _reflect(place, low, high)
        places.append(place)
        borders.append((low, high))
    made = _interpolate(x, places, borders, mode.removeprefix("bi"), padding_mode)
    return made.reshape(*x.shape[:2], *grid.shape[1:-1]).cast(x.dtype)


def _interpolate(x: Tensor, places: list[Tensor], borders: list[tuple[float, float]], mode: str,
                  padding: str) -> Tensor:
    """The values at places [N, …] of each dimension: [N, C, number of places]."""
    corners = []
    for place in places:
        first = place.floor()
        t = place - first
        points = {"nearest": [(0, None)], "linear": [(0, 1 - t), (1, t)]}.get(mode)
        if points is None: points = list(zip((-1, 0, 1, 2), _keys(t), strict=True))
        corners.append([(first + i, weight) for i, weight in points])
    total: Tensor | None = None
    for corner in itertools.product(*corners):
        weights = [weight for _, weight in corner if weight is not None]
        value = _points(x, [index for index, _ in corner], borders, padding)
        for weight in weights: value = value * weight.reshape(weight.shape[0], 1, -1)
        total = value if total is None else total + value
    assert total is not None
    return total


def _points(x: Tensor, indices: list[Tensor], borders: list[tuple[float, float]], padding: str) -> Tensor:
    """The elements of x at whole coordinates [N, …]: [N, C, number]."""
    batch, flat, inside = int(x.shape[0]), None, None
    for index, n, (low, high) in zip(indices, x.shape[2:], borders, strict=True):
        seen = (index >= 0) & (index <= int(n) - 1)
        inside = seen if inside is None else inside & seen
        if padding == "reflection": index = _reflect(index, low, high)
        index = index.clip(0, int(n) - 1).cast(dtypes.int32)
        flat = index if flat is None else flat * int(n) + index
    assert flat is not None
    assert inside is not None
    rows = flat.reshape(batch, 1, -1).expand(batch, int(x.shape[1]), -1)
    made = x.reshape(batch, int(x.shape[1]), -1).gather(2, rows)
    return inside.reshape(batch, 1, -1).where(made, 0) if padding == "zeros" else made


# **** regions ****

@op("RoiAlign", since=10, host=(1, 2), call=True)
def roi_align(call: Any, x: Tensor, regions: np.ndarray, batches: np.ndarray, mode: str = "avg",
              output_height: int = 1, output_width: int = 1, sampling_ratio: int = 0,
              spatial_scale: float = 1.0, coordinate_transformation_mode: str = "") -> Tensor:
    """Averages, or maxima, of samples in the cells of regions [number, 4] of images x [N, C, H, W]."""
    usual = "half_pixel" if call.node.version >= 16 else ""
    half = (coordinate_transformation_mode or usual) == "half_pixel"
    made = []
    for region, batch in zip(regions, batches, strict=True):
        x1, y1, x2, y2 = (float(each) * spatial_scale - (0.5 if half else 0.0) for each in region)
        rows = _samples(y1, y2, output_height, int(x.shape[2]), sampling_ratio, half)
        columns = _samples(x1, x2, output_width, int(x.shape[3]), sampling_ratio, half)
        image = x[int(batch)]
        if mode == "avg":
            made.append(Tensor(rows.mean(1)).cast(x.dtype) @ image @ Tensor(columns.mean(1)).cast(x.dtype).T)
            continue
        flat = [Tensor(each.reshape(-1, each.shape[-1])).cast(x.dtype) for each in (rows, columns)]
        found = flat[0] @ image @ flat[1].T
        made.append(found.reshape(-1, *rows.shape[:2], *columns.shape[:2]).max((2, 4)))
    return Tensor.stack(*made)


def _samples(first: float, last: float, cells: int, extent: int, ratio: int, half: bool) -> np.ndarray:
    """Weights of the points for each sample of each cell: [cells, samples, extent]."""
    size = last - first if half else max(last - first, 1.0)
    number = ratio if ratio > 0 else math.ceil(size / cells)
    budget().expect(cells * number, 1)
    budget().check_bytes((cells, number, extent), 4)
    places = first + (np.arange(cells)[:, None] + (np.arange(number) + 0.5) / number) * (size / cells)
    made = np.zeros((cells, number, extent), dtype=np.float32)
    for place in np.ndindex(cells, number):
        at = float(places[place])
        if not -1 <= at <= extent: continue
        at = max(at, 0.0)
        low = min(int(at), extent - 1)
        t = 0.0 if low == extent - 1 else at - low
        made[(*place, low)] += 1 - t
        if t: made[(*place, low + 1)] += t
    return made


# **** convolutions ****

@op("DeformConv")
def deform_conv(x: Tensor, w: Tensor, offset: Tensor, bias: Tensor | None = None, mask: Tensor | None = None,
                dilations: Sequence[int] = (1, 1), group: int = 1, kernel_shape: Sequence[int] = (),
                offset_group: int = 1, pads: Sequence[int] = (0, 0, 0, 0), strides: Sequence[int] = (1, 1)
                ) -> Tensor:
    """A 2D convolution whose points are moved by offsets [N, groups · points · 2, H, W]."""
    n, channels, h, wide = (int(each) for each in x.shape)
    points = [(i, j) for i in range(int(w.shape[2])) for j in range(int(w.shape[3]))]
    oh, ow = (int(each) for each in offset.shape[2:])
    moved = offset.reshape(n * offset_group, len(points), 2, oh, ow)
    images = x.reshape(n * offset_group, channels // offset_group, h, wide)
    values = []
    for k, (i, j) in enumerate(points):
        rows = Tensor.arange(oh).reshape(oh, 1) * strides[0] - pads[0] + i * dilations[0]
        columns = Tensor.arange(ow).reshape(1, ow) * strides[1] - pads[1] + j * dilations[1]
        places = [moved[:, k, 0] + rows, moved[:, k, 1] + columns]
        value = _interpolate(images, places, [(0.0, 0.0)] * 2, "linear", "zeros")
        if mask is not None:
            value = value * mask.reshape(n * offset_group, len(points), 1, oh * ow)[:, k]
        values.append(value.reshape(n, group, channels // group, oh * ow))
    sampled = Tensor.stack(*values, dim=3)
    weights = w.reshape(group, int(w.shape[0]) // group, channels // group, len(points))
    made = Tensor.einsum("ngckp,gock->ngop", sampled, weights).reshape(n, int(w.shape[0]), oh, ow)
    return made if bias is None else made + bias.reshape(1, -1, 1, 1)


@op("Col2Im", host=(1, 2))
def col2im(x: Tensor, image: np.ndarray, block: np.ndarray, dilations: Sequence[int] = (),
           pads: Sequence[int] = (), strides: Sequence[int] = ()) -> Tensor:
    """The sum of blocks [N, C · points, blocks], each where it was cut out of an image."""
    k = len(image)
    dilation, stride = dilations or [1] * k, strides or [1] * k
    pad = pads or [0] * 2 * k
    padded = [int(n) + pad[d] + pad[d + k] for d, n in enumerate(image)]
    counts = [(n - dilation[d] * (int(block[d]) - 1) - 1) // stride[d] + 1 for d, n in enumerate(padded)]
    n, points = int(x.shape[0]), math.prod(map(int, block))
    blocks = x.reshape(n, int(x.shape[1]) // points, points, *counts)
    total = None
    budget().expect(points, 4)
    for i, place in enumerate(np.ndindex(*map(int, block))):
        value = blocks[:, :, i]
        for d in range(k): value = _spread(value, d + 2, stride[d], place[d] * dilation[d], padded[d])
        total = value if total is None else total + value
    assert total is not None
    return total.shrink((None, None, *((pad[d], pad[d] + int(m)) for d, m in enumerate(image))))


def _spread(x: Tensor, d: int, stride: int, first: int, extent: int) -> Tensor:
    """x along a dimension of an extent, at first, first + stride, …, and zeros elsewhere."""
    n = int(x.shape[d])
    made = x.unsqueeze(d + 1).pad((*[None] * (d + 1), (0, stride - 1), *[None] * (x.ndim - d - 1)))
    made = made.reshape(*x.shape[:d], n * stride, *x.shape[d + 1:])
    made = made.shrink((*[None] * d, (0, (n - 1) * stride + 1), *[None] * (x.ndim - d - 1)))
    after = extent - first - int(made.shape[d])
    return made.pad((*[None] * d, (first, after), *[None] * (x.ndim - d - 1)))
