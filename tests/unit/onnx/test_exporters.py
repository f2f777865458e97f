"""Transformers that torch exported give what torch gives, and their attention is a kernel of this package."""
from __future__ import annotations

import numpy as np
import pytest
from tinygrad.helpers import Context

from tests.support.onnx import exported_models
from tinygrad_nv import explain
from tinygrad_nv.onnx import OnnxRunner

LAYERS = 2


@pytest.mark.parametrize("name", [pytest.param(each, marks=() if each == "llama" else pytest.mark.slow)
                                  for each in exported_models.MODELS])
def test_a_transformer_is_that_of_torch(name: str):
    case = exported_models.exported(name)
    with Context(DEV="CPU"):
        made = OnnxRunner(case.model)(case.inputs)["output"]
        templates = [each.template for each in explain(made).kernels]
        found = made.numpy()
    # a row of padding sees nothing in torch's mask, and is no result
    shown = case.inputs.get("attention_mask", np.ones(case.wanted.shape[:2])).astype(bool)
    np.testing.assert_allclose(found[shown], case.wanted[shown], atol=2e-5)
    attention = [each for each in templates if each in ("flash", "decode", "attention")]
    assert len(attention) == LAYERS, templates
    assert templates.count("norm") == 2 * LAYERS + 1, templates
    assert templates.count("gemm") + templates.count("gemv") >= 4 * LAYERS
