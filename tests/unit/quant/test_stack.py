"""Stacks of matrices: other layouts have the same numbers, each matrix padded to tiles of its own; outer
scales that divide become ones that multiply."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tinygrad import Tensor

from tests.support.cpu.cpu_quant_case import elements, stored
from tinygrad_nv.quant import types
from tinygrad_nv.quant.stack import QStack
from tinygrad_nv.quant.tensor import in_memory
from tinygrad_nv.quant.types import MXFP4, NVFP4, QType, Scale, stack_buffers

COUNT, N, K = 3, 20, 96
DIVIDED = replace(NVFP4, outer=Scale(1, 0), divided=True)
LAST = replace(types.INT8 @ types.per_channel_scale(), outer=types.per_channel_scale(), outer_last=True)


def made(type: QType) -> tuple[QStack, np.ndarray]:
    """A random stack in rows, and its numbers."""
    each = [stored(type, N, K, seed=i) for i in range(COUNT)]
    buffers = {}
    for name, (shape, dtype) in stack_buffers(type, (COUNT, N, K)).items():
        data = Tensor(np.concatenate([one[name] for one in each]), device="CPU")
        buffers[name] = data.bitcast(in_memory(dtype)).reshape(shape).contiguous()
    return QStack(type, (COUNT, N, K), buffers), np.stack([elements(type, N, K, one) for one in each])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", ["tiles", "fragments"])
def test_layouts(layout: types.Layout):
    stack, wanted = made(MXFP4)
    assert np.array_equal(stack.dequantize().numpy(), wanted)
    assert np.array_equal(stack.with_layout(layout).dequantize().numpy(), wanted)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("type", [DIVIDED, LAST], ids=["divided", "last"])
def test_outer_scales_that_multiply(type: QType):
    """Within a unit of float32's last place for the reciprocal, and one for each multiplication."""
    stack, _ = made(type)
    wanted, found = stack.dequantize().numpy(), stack.with_multipliers()
    assert found.type == type.with_multipliers()
    np.testing.assert_allclose(found.dequantize().numpy(), wanted, rtol=3 * 2.0**-23, atol=0)
