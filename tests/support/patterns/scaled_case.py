"""Matmuls of codes for tests: operands, the answer in float64, and how far float32 may be from it."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from tinygrad.dtype import DType

from tinygrad_nv import Tensor, dtypes
from tinygrad_nv.functional import scaled_matmul
from tinygrad_nv.quant.tensor import QTensor
from tinygrad_nv.quant.types import INT8, QType

F32 = dtypes.float32


@dataclass(frozen=True)
class Codes:
    """x and W as float64 codes and scales; scales of x (1, 1), (m, 1) or (m, groups)."""
    type: QType
    x: np.ndarray
    x_scale: np.ndarray
    w: np.ndarray
    w_scale: np.ndarray

    @staticmethod
    def of(type: QType, m: int, n: int, k: int, whole: bool = False, exact: bool = True) -> Codes:
        """Integers and powers of two, without `exact` any codes and scales; `whole`: one scale of x."""
        rng = np.random.default_rng((m, n, k))
        groups = k // type.scale.columns if type.scale.columns else 1
        shapes = (1, 1) if whole else (m, groups), type.scale.blocks(n, k)
        def scales(shape: tuple[int, ...]) -> np.ndarray:
            made = 2.0 ** rng.integers(-3, 3, shape) if exact else rng.uniform(0.01, 1, shape)
            return made.astype(np.float32).astype(np.float64)
        def codes(*shape: int) -> np.ndarray:
            if exact: return rng.integers(-4, 5, shape).astype(np.float64)
            if type.element == INT8: return rng.integers(-128, 128, shape).astype(np.float64)
            drawn = torch.from_numpy(rng.standard_normal(shape) * 100).to(torch.float8_e4m3fn)
            return drawn.double().numpy()
        return Codes(type, codes(m, k), scales(shapes[0]), codes(n, k), scales(shapes[1]))

    @property
    def answer(self) -> np.ndarray:
        return self.left @ self.right.T

    @property
    def magnitudes(self) -> np.ndarray:
        """Of what is added up."""
        return np.abs(self.left) @ np.abs(self.right).T

    @property
    def left(self) -> np.ndarray:
        groups = self.x_scale.shape[1]
        return self.x * np.repeat(self.x_scale, self.x.shape[1] // groups, 1)

    @property
    def right(self) -> np.ndarray:
        (n, k), (down, across) = self.w.shape, self.w_scale.shape
        rows, columns = self.type.scale.rows or n, self.type.scale.columns or k
        assert (down, across) == (-(-n // rows), -(-k // columns))
        return self.w * np.repeat(np.repeat(self.w_scale, rows, 0), columns, 1)[:n, :k]

    def bits(self, values: np.ndarray) -> np.ndarray:
        if self.type.element == INT8: return values.astype(np.int8)
        return torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    def matrix(self, device: str | None = None) -> QTensor:
        scales = Tensor(self.w_scale.astype(np.float32), device=device).cast(self.type.scale.dtype)
        return QTensor(self.type, self.w.shape, {"codes": Tensor(self.bits(self.w), device=device).realize(),
                                                 "scales": scales.contiguous().realize()})

    def by_name(self, bias: np.ndarray | None = None, dtype: DType = F32,
                device: str | None = None) -> Tensor:
        more = None if bias is None else Tensor(bias.astype(np.float32), device=device).realize()
        x, scale = (Tensor(each, device=device).realize()
                    for each in (self.bits(self.x), self.x_scale.astype(np.float32)))
        return scaled_matmul(x, scale, self.matrix(device), more, dtype)
