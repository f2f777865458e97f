"""Tensor functions and language models as ONNX files.

Reading order: `builder` (nodes and constants of a graph), `nodes` (each UOp as ONNX nodes), `elementwise`,
`contraction` (matmuls and table look-ups, found among reductions), `function` (`export`), `llama`
(`export_model`: decoders with their keys and values as inputs and outputs).
"""
from tinygrad_nv.onnx.exporting.function import export
from tinygrad_nv.onnx.exporting.llama import export_model

__all__ = ["export", "export_model"]
