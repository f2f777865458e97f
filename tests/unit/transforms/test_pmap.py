"""Examples over devices of one process, and over ranks (pmap_program.py)."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tinygrad import Tensor

from tests.support import SUPPORT
from tests.support.transforms.transform_case import RNG
from tinygrad_nv.dist.mesh import mesh
from tinygrad_nv.errors import TransformError
from tinygrad_nv.transforms import grad, pmap

ROOT = Path(__file__).resolve().parents[3]
X, W = (RNG.integers(-4, 5, shape).astype(np.float32) for shape in ((4, 3), (3, 2)))
DEVICES = ("CPU:0", "CPU:1")


def layer(x: Tensor, w: Tensor) -> Tensor: return (x @ w).relu()


def test_devices_of_a_process():
    with mesh(DEVICES, axes={"dp": 2}):
        out = pmap(layer, (0, None))(Tensor(X), Tensor(W))
    assert set(out.device) == {"CPU", "CPU:1"}
    assert out.uop.axis == 0
    np.testing.assert_array_equal(out.numpy(), np.maximum(X @ W, 0))


def test_gradients_over_devices_and_of_each_example():
    over = mesh(DEVICES, axes={"dp": 2})
    x, w = Tensor(X), Tensor(W)
    found = grad(lambda w: pmap(layer, (0, None), mesh=over)(x, w).sum())(w)
    np.testing.assert_array_equal(found.numpy(), X.T @ (X @ W > 0))
    each = pmap(grad(lambda x, w: layer(x, w).sum(), 1), (0, None), mesh=over)(x, w)
    np.testing.assert_array_equal(each.numpy(), X[:, :, None] * (X @ W > 0)[:, None])


def test_trees_and_other_axes():
    over = mesh(DEVICES, axes={"dp": 2})
    out = pmap(lambda p: {"y": p["x"] * 2, "w": p["w"] + 1}, ({"x": 1, "w": None},), mesh=over)(
        {"x": Tensor(X.T.copy()), "w": Tensor([1.0])})
    np.testing.assert_array_equal(out["y"].numpy(), X * 2)
    assert out["w"].numpy().tolist() == [[2.0]] * 4


def test_examples_that_do_not_divide():
    with pytest.raises(TransformError, match="pmap of 3 examples over 2 devices"):
        pmap(layer, (0, None), mesh=mesh(DEVICES, axes={"dp": 2}))(Tensor(X[:3]), Tensor(W))


def test_ranks():
    program = SUPPORT / "transforms" / "pmap_program.py"
    command = ("-m", "tinygrad_nv", "launch", "-n", "2", sys.executable, str(program))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True,
                          check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("right") == 2, done.stdout
