"""What tinygrad_nv.torch and tinygrad_nv.jax say of what they cannot take."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tinygrad import Tensor

import tinygrad_nv.jax
import tinygrad_nv.torch
from tinygrad_nv.errors import TorchError


@pytest.mark.parametrize(("call", "words"), [
    (lambda: tinygrad_nv.torch.function(Tensor.exp)(torch.empty(3, device="meta")),
     ("a tensor on meta", "a tensor on the CPU", "x.cpu() first")),
    (lambda: tinygrad_nv.torch.function(Tensor.exp)(torch.eye(3).to_sparse()),
     ("a tensor of layout torch.sparse_coo", "a dense one", "x.to_dense()")),
    (lambda: tinygrad_nv.torch.function(Tensor.exp)(torch.ones(3, dtype=torch.complex64)),
     ("a tensor of torch.complex64", "a dtype that both have")),
    (lambda: tinygrad_nv.torch.function(lambda x: 3)(torch.ones(3)),
     ("a function that returns a int", "Tensors, or a tree of them")),
    (lambda: tinygrad_nv.torch.function(lambda x, y: x)(torch.ones(3), np.ones(3)),
     ("has no hash", "give arrays as tensors")),
    (lambda: tinygrad_nv.torch.function(lambda x: x.cast("fp8e4m3"))(torch.ones(3)),
     ("torch has no dtypes.fp8e4m3",)),
    (lambda: tinygrad_nv.torch.backend(None, [], mode="max-autotune"),  # type: ignore[arg-type]
     ("options mode of the backend tinygrad_nv", "none", 'torch.compile(model, backend="tinygrad_nv")')),
    (lambda: tinygrad_nv.jax.function(Tensor.exp)(jnp.ones(3, jnp.complex64)),
     ("an array of complex64", "a dtype that tinygrad has")),
    (lambda: tinygrad_nv.jax.function(lambda x: 3)(jnp.ones(3)),
     ("a function that returns a int", "Tensors, or a tree of them")),
    (lambda: tinygrad_nv.jax.function(lambda x, y: x)(jnp.ones(3), [set()]),
     ("has no hash", "give it as an array")),
    (lambda: tinygrad_nv.jax.function(lambda x: x.cast("fp8e4m3"))(jnp.ones(3)),
     ("a result of dtypes.fp8e4m3", "a dtype that JAX has")),
], ids=["device", "layout", "dtype", "result", "constant", "result dtype", "options", "jax dtype",
        "jax result", "jax constant", "jax result dtype"])
def test_refused_in_words(call: Callable[[], Any], words: tuple[str, ...]):
    with pytest.raises(TorchError) as caught: call()
    for each in words: assert each in str(caught.value)
