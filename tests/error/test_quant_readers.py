"""Quantised checkpoints that are not whole, or of a kind that is not read."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tinygrad_nv.errors import ModelError, WeightError
from tinygrad_nv.quant.readers.reader import Stored, reader_of

L, SHAPE = "model.layers.0.mlp.up_proj", (64, 128)
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
AWQ_STORED = {f"{L}.qweight": ("I32", (128, 8)), f"{L}.qzeros": ("I32", (4, 8)),
              f"{L}.scales": ("F16", (4, 64))}


def refused(call: Callable[[], object], *texts: str, error: type[ModelError] = WeightError) -> None:
    """The call raises the error, whose message has all of the texts."""
    with pytest.raises(error) as caught: call()
    for text in texts: assert text in str(caught.value)
    assert caught.value.fix


def matrix(config: dict[str, Any], stored: Stored, *texts: str, shape: tuple[int, int] = SHAPE) -> None:
    """The layer's tensors are refused before any is read."""
    refused(lambda: reader_of(config, "config.json").matrix(L, shape, stored), *texts)


def config(settings: dict[str, Any], *texts: str) -> None:
    """The settings are refused."""
    refused(lambda: reader_of(settings, "config.json"), "config.json: ", *texts, error=ModelError)


def without(stored: Stored, name: str) -> Stored:
    return {key: value for key, value in stored.items() if key != f"{L}.{name}"}


def replaced(stored: Stored, name: str, kind: str, *shape: int) -> Stored:
    return {**stored, f"{L}.{name}": (kind, shape)}


def test_unknown_kind():
    config({"quant_method": "hqq"}, "quant_method is 'hqq'", "one of awq, gptq, compressed-tensors, fp8")
    config({}, "quant_method is None", "one of awq, gptq")


def test_awq_settings():
    config({**AWQ, "bits": 8}, "bits of quantization_config is 8", "one of 4")
    config({**AWQ, "version": "gemv_fast"}, "version of quantization_config is 'gemv_fast'", "one of gemm")
    config({**AWQ, "group_size": 0}, "group_size of quantization_config is 0", "columns of a group, or -1")
    config({**AWQ, "group_size": "128"}, "group_size of quantization_config is '128'")


@pytest.mark.parametrize("name", ["qweight", "scales"])
def test_awq_lacks(name: str):
    matrix(AWQ, without(AWQ_STORED, name), f"{L}.{name} is missing", "expected: ")


def test_awq_shapes():
    matrix(AWQ, replaced(AWQ_STORED, "qweight", "I32", 128, 7), "qweight is I32 [128, 7]", "I32 [128, 8]")
    matrix(AWQ, replaced(AWQ_STORED, "qweight", "F16", 128, 8), "qweight is F16 [128, 8]", "I32 [128, 8]")
    matrix(AWQ, replaced(AWQ_STORED, "qzeros", "I32", 4, 64), f"{L}.qzeros is I32 [4, 64]", "I32 [4, 8]")
    matrix({**AWQ, "group_size": 128}, AWQ_STORED, f"{L}.scales is F16 [4, 64]", "F16 or BF16 [1, 64]")
    odd = {f"{L}.qweight": ("I32", (33, 8)), f"{L}.scales": ("F16", (2, 64))}
    matrix(AWQ, odd, "33 columns of 4 bits", "whole bytes", shape=(64, 33))
