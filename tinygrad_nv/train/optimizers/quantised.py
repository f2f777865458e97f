"""State of 8 bits: blockwise dynamic quantisation (Dettmers et al., arXiv 2110.02861), as of bitsandbytes.

Protocol. A block of 256 elements has a scale, its largest magnitude, and a code of 8 bits for each element:
the nearest of 256 numbers in [−1, 1] (of second moments, which have no sign, in [0, 1]) times the scale. The
numbers are a dynamic tree: leading zeros of a code say of which of 7 sizes, 10⁻⁶ to 1, a number is, and the
bits that are left divide what lies between a tenth of the size and the size evenly. So small numbers keep
their relative precision beside large ones. Parameters of fewer than `LEAST` elements keep state of 32 bits.
An update goes on with numbers that have not been rounded.

    codes    u8, of the parameter's shape
    scales   float32, one for each block of elements side by side
"""
from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from tinygrad import Tensor, dtypes

from tinygrad_nv.train.optimizers.state import keep

BLOCK = 256
LEAST = 4096
UNSIGNED = ("exp_avg_sq",)      # slots whose numbers are never negative
EXPONENTS = 7                   # sizes 10⁻⁶ to 1


@functools.cache
def dynamic_map(signed: bool) -> np.ndarray:
    """The numbers of all codes, float32 (256), in rising order."""
    found: list[float] = [0.0, 1.0]
    for i in range(EXPONENTS):
        tenths = np.linspace(0.1, 1, 2**(i if signed else i + 1) + 1)
        middles = (tenths[:-1] + tenths[1:]) / 2 * 10.0**(i - EXPONENTS + 1)
        found += [*middles, *(-middles if signed else [])]
    assert len(found) == 256, "a code for each"
    return np.sort(np.array(found)).astype(np.float32)


@dataclass
class BlockwiseSlot:
    """Codes and scales of a slot."""
    codes: Tensor
    scales: Tensor
    signed: bool

    @staticmethod
    def zeros(shape: tuple[int, ...], device: str | tuple[str, ...] | None, signed: bool) -> BlockwiseSlot:
        """A slot of zeros."""
        count = int(np.prod(shape))
        zero = int(np.searchsorted(dynamic_map(signed), 0.0))
        return BlockwiseSlot(Tensor.full(shape, zero, dtype=dtypes.uint8, device=device).contiguous(),
                             Tensor.zeros(-(-count // BLOCK), device=device).contiguous(), signed)

    def read(self) -> Tensor:
        table = self._table()[self.codes.detach().cast(dtypes.int32)].reshape(-1)
        return (_blocks(table) * self.scales.detach().reshape(-1, 1)).reshape(-1)[:self._count()] \
            .reshape(self.codes.shape).contiguous()

    def write(self, value: Tensor, go: Tensor | None) -> Tensor:
        value = keep(go, value, self.read()).contiguous()
        blocks = _blocks(value.reshape(-1))
        scales = blocks.abs().max(1)
        inverse = (scales > 0).where(scales, 1.0).reciprocal()
        codes = self._nearest(blocks * inverse.reshape(-1, 1)).reshape(-1)[:self._count()]
        self.codes.assign(keep(go, codes.reshape(self.codes.shape).cast(dtypes.uint8), self.codes))
        self.scales.assign(keep(go, scales, self.scales))
        return value

    def tensors(self) -> dict[str, Tensor]: return {"codes": self.codes, "scales": self.scales}

    def _nearest(self, x: Tensor) -> Tensor:
        """The code of the nearest number: eight steps of a search among the middles between numbers."""
        numbers = dynamic_map(self.signed)
        middles = Tensor(np.append((numbers[1:] + numbers[:-1]) / 2, np.float32(np.inf)), device=x.device)
        code = x.zeros_like(dtype=dtypes.int32)
        for bit in (128, 64, 32, 16, 8, 4, 2, 1):
            code = code + (x > middles[code + (bit - 1)]).where(bit, 0).cast(dtypes.int32)
        return code

    def _table(self) -> Tensor: return Tensor(dynamic_map(self.signed), device=self.codes.device)

    def _count(self) -> int: return int(self.codes.numel())


def _blocks(flat: Tensor) -> Tensor:
    """Rows of BLOCK elements, the last one with zeros at its end."""
    rest = -int(flat.numel()) % BLOCK
    return (flat.pad((0, rest)) if rest else flat).reshape(-1, BLOCK)
