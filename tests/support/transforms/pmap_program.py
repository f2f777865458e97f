"""A rank of test_vmap.py: examples over ranks, against one device. Integers: results are exact."""
from __future__ import annotations

import numpy as np
from tinygrad import Tensor

from tinygrad_nv.dist.group import init
from tinygrad_nv.dist.mesh import mesh
from tinygrad_nv.transforms import grad, pmap

world = init()
x = np.arange(24, dtype=np.float32).reshape(world.size * 2, -1)
w = np.arange(x.shape[1] * 2, dtype=np.float32).reshape(-1, 2)


def loss(x: Tensor, w: Tensor) -> Tensor: return ((x @ w) * x.sum()).sum()


with mesh(axes={"dp": world.size}):
    out = pmap(lambda x, w: x @ w, (0, None))(Tensor(x), Tensor(w))
    np.testing.assert_array_equal(out.numpy(), x @ w)
    each = pmap(grad(loss, 1), (0, None))(Tensor(x), Tensor(w)).numpy()
    np.testing.assert_array_equal(each, x[:, :, None] * x.sum(1)[:, None, None] * np.ones((1, 1, 2)))
world.close()
print("right")
