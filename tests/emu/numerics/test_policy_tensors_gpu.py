"""DEV=EMU: a matmul's sums are those of the model of tensor cores, its store what policies say: all bits."""
from __future__ import annotations

import numpy as np
import pytest
from tinygrad.dtype import DType

from tests.support.patterns.on_emu import emu
from tinygrad_nv import Tensor, dtypes, explain
from tinygrad_nv.numerics.policy import Policied, accum, loss_scale, saturate, stochastic_round
from tinygrad_nv.numerics.semantics import FORMATS, decode, dot, encode, tensor_core
from tinygrad_nv.numerics.tensors import matmul
from tinygrad_nv.tile.attention.dropout import philox
from tinygrad_nv.tile.expression import short

__all__ = ["emu"]
M, N, K = 20, 24, 64
bf16, f16, f32 = dtypes.bfloat16, dtypes.float16, dtypes.float32


@pytest.mark.parametrize(("dtype", "out", "scale", "kernels"), [
    (f16, f16 @ saturate, 100.0, 1), (bf16, bf16 @ stochastic_round(3), 1.0, 2),
    (f16, f16 @ loss_scale(8.0), 1.0, 1), (bf16, f16 @ saturate, 300.0, 1)], ids=str)
def test_matmuls(dtype: DType, out: Policied, scale: float, kernels: int):
    of, to, random = FORMATS[short(dtype)], FORMATS[short(out.dtype)], np.random.default_rng(0)
    a, b = (encode(random.standard_normal(shape) * scale, of) for shape in ((M, K), (K, N)))
    x, w = (Tensor(each).bitcast(dtype).contiguous().realize() for each in (a, b))
    made = matmul(x, w, of=(dtype @ accum(f32), dtype), out=out)
    found = [k.template for k in explain(made).kernels if k.flops]
    assert (found[0], len(found)) == ("wgmma", kernels)
    sums = dot(tensor_core("sm_90a", "wgmma", of.name), a, b, np.zeros((M, N), np.uint32))
    values = decode(sums, FORMATS["f32"])
    at = np.arange(M * N, dtype=np.uint64)
    words = philox((at, at * 0, at * 0, at * 0), [np.uint64(3), np.uint64(0)])
    noise = (words[0] & np.uint64(0xffff)).astype(np.int64)
    drawn, clamp = "stochastic" in str(out), "saturate" in str(out)
    wanted = encode(values * (8 if "loss_scale" in str(out) else 1), to, "rs" if drawn else "rn", clamp,
                    noise.reshape(M, N))
    memory = made.realize().to("CPU").contiguous().realize().uop.base.buffer.as_memoryview()
    np.testing.assert_array_equal(np.frombuffer(memory, to.kind).reshape(M, N), wanted)
    if clamp: assert (np.abs(decode(wanted, to)) == to.largest).any()
