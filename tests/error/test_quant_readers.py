"""Quantised checkpoints that are not whole, or of a kind that is not read."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tinygrad_nv.errors import ModelError, WeightError
from tinygrad_nv.quant.readers.reader import Stored, reader_of

L, SHAPE = "model.layers.0.mlp.up_proj", (64, 128)
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
AWQ_STORED = {f"{L}.qweight": ("I32", (128, 8)), f"{L}.qzeros": ("I32", (4, 8)),
              f"{L}.scales": ("F16", (4, 64))}

GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": True}
GPTQ_STORED = {f"{L}.qweight": ("I32", (16, 64)), f"{L}.qzeros": ("I32", (4, 8)),
               f"{L}.scales": ("F16", (4, 64)), f"{L}.g_idx": ("I32", (128,))}


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


def arrays(config: dict[str, Any], stored: Stored, data: dict[str, np.ndarray], *texts: str,
           shape: tuple[int, int] = SHAPE) -> None:
    """The layer's tensors are refused when they are read: `data` are some of them, the others are 0."""
    kinds = {"I32": np.int32, "F16": np.float16, "BF16": np.uint16, "F32": np.float32, "I64": np.int64,
             "I8": np.int8}
    found = reader_of(config, "config.json").matrix(L, shape, stored)
    assert found is not None

    def get(name: str) -> np.ndarray:
        kind, extents = stored[name]
        return data.get(name.removeprefix(f"{L}."), np.zeros(extents, kinds.get(kind, np.uint8)))
    refused(lambda: found.arrays(get), *texts)


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


def test_gptq_settings():
    config({**GPTQ, "bits": 5}, "bits of quantization_config is 5", "one of 2, 3, 4, 8")
    config({**GPTQ, "bits": None}, "bits of quantization_config is None")
    config({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format of quantization_config is 'marlin'",
           "one of gptq, gptq_v2")
    config({**GPTQ, "group_size": -2}, "group_size of quantization_config is -2")
    config({**GPTQ, "sym": "yes"}, "sym of quantization_config is 'yes'", "one of True, False")
    mixed = {**GPTQ, "dynamic": {".*up_proj": {"bits": 7}}}
    refused(lambda: reader_of(mixed, "config.json").matrix(L, SHAPE, GPTQ_STORED),
            "config.json: bits of quantization_config is 7", error=ModelError)


@pytest.mark.parametrize("name", ["qweight", "qzeros", "scales", "g_idx"])
def test_gptq_lacks(name: str):
    matrix(GPTQ, without(GPTQ_STORED, name), f"{L}.{name} is missing", "expected: ")


def test_gptq_shapes():
    matrix(GPTQ, replaced(GPTQ_STORED, "qweight", "I32", 15, 64), "qweight is I32 [15, 64]", "I32 [16, 64]")
    matrix({**GPTQ, "bits": 8}, GPTQ_STORED, "qweight is I32 [16, 64]", "I32 [32, 64]")
    matrix(GPTQ, replaced(GPTQ_STORED, "qzeros", "I32", 4, 64), "qzeros is I32 [4, 64]", "I32 [4, 8]")
    matrix({**GPTQ, "group_size": 64}, GPTQ_STORED, "qzeros is I32 [4, 8]", "I32 [2, 8]")
    matrix(GPTQ, replaced(GPTQ_STORED, "g_idx", "I32", 64), "g_idx is I32 [64]", "I32 or I64 [128]")


def test_gptq_groups_of_inputs():
    groups = np.arange(128, dtype=np.int32) // 32
    points = {"qzeros": np.full((4, 8), 0x77777777, np.int32)}
    for wrong, text in (((5, 9), "groups from 0 to 9"), ((5, -1), "groups from -1 to 3"),
                        ((5, 2), "31 columns of group 0")):
        bad = groups.copy()
        bad[wrong[0]] = wrong[1]
        arrays(GPTQ, GPTQ_STORED, {"g_idx": bad, **points}, f"{L}.g_idx has {text}",
               "groups 0 to 3, of 32 columns each")
    arrays({**GPTQ, "desc_act": False}, GPTQ_STORED, {"g_idx": groups[::-1].copy(), **points},
           f"{L}.g_idx orders inputs, but desc_act is false", "set desc_act to true")


def test_gptq_zero_points_that_are_not_symmetric():
    data = {"g_idx": np.arange(128, dtype=np.int32) // 32, "qzeros": np.full((4, 8), 0x77777778, np.int32)}
    arrays(GPTQ, GPTQ_STORED, data, f"{L}.qzeros has zero points other than 8", "set sym to false")
