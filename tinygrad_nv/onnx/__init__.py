"""ONNX models as Tensor programs, and Tensor programs as ONNX models.

    from tinygrad_nv.onnx import OnnxRunner, export
    outputs = OnnxRunner("model.onnx")({"input": x})
    export(fn, (x,), "fn.onnx")

Reading order. Import: `elements` (types of elements that tinygrad lacks), `model` (reading and checking a
file), `table` (which function computes an op), `ops/` (those functions, by subject), `host` (shape arithmetic
without a device), `fusion` (attention as exporters write them), `scope` (the values of a graph while it runs,
and ops that ONNX defines by other ops), `runner`. Export: `exporting/`.

The package `onnx` reads and checks models. tinygrad's own operators (tinygrad.nn.onnx) compute what they
compute rightly; importing them opens the default device, so that waits for the first model.
"""
from __future__ import annotations

from importlib.util import find_spec

from tinygrad_nv.errors import OnnxError

if find_spec("onnx") is None:
    raise OnnxError("the package onnx is not installed", "onnx 1.23 or newer",
                    "pip install 'tinygrad-nv[onnx]'")

from tinygrad_nv.onnx.exporting import export, export_model
from tinygrad_nv.onnx.runner import OnnxRunner

__all__ = ["OnnxRunner", "export", "export_model"]
