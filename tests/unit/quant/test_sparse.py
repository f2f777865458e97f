"""2:4 sparse matrices: which columns are kept, and what is stored comes back."""
from __future__ import annotations

import numpy as np
import pytest
from tinygrad import Tensor, dtypes

from tinygrad_nv.quant.sparse import SparseTensor, codes_of, compress, pack_metadata, two_of_four


def test_the_two_largest_are_kept():
    """As a stable sort has them, of equal ones the first."""
    size = np.random.default_rng(0).integers(0, 4, (64, 128)).astype(np.float32)
    order = np.argsort(-size.reshape(-1, 4), -1, kind="stable")
    wanted = np.zeros((64 * 32, 4), bool)
    np.put_along_axis(wanted, order[:, :2], True, -1)
    np.testing.assert_array_equal(two_of_four(size), wanted.reshape(64, 128))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("dtype", "kind"), [(dtypes.float16, np.float16), (dtypes.int8, np.int8)])
@pytest.mark.parametrize("shape", [(16, 64), (37, 132), (5, 4)])
def test_a_matrix_comes_back(dtype, kind, shape: tuple[int, int]):
    w = np.random.default_rng(1).integers(-9, 10, shape).astype(kind)
    kept = two_of_four(np.abs(w.astype(np.float32)))
    arrays = compress(w, kept) | {"scales": 2.0 ** (np.arange(shape[0], dtype=np.float32) % 8)[:, None]}
    made = SparseTensor.of(dtype, shape, arrays, "CPU")
    assert isinstance(made.values, Tensor)
    assert made.values.shape == (shape[0], shape[1] // 2)
    np.testing.assert_array_equal(made.dense().numpy(), w * kept * arrays["scales"])


def test_metadata_of_lanes():
    """Row 9's columns 20 and 22: 16-bit elements have them in lane 4 + 1, the upper half's second four bits;
    8-bit ones in lane 4 + 1 as rows from 8 on, its sixth."""
    kept = np.tile([True, True, False, False], (16, 16))
    kept[9, 20:24] = [True, False, True, False]
    for itemsize, lane, place in ((2, 4 + 1, 16 + 4), (1, 4 + 1, 20)):
        words = pack_metadata(codes_of(kept), itemsize).reshape(32)
        wanted = np.full(32, 0x44444444, np.uint32)
        wanted[lane] ^= (0b0100 ^ 0b1000) << place
        np.testing.assert_array_equal(words, wanted)
