"""PyTorch: a backend of torch.compile, and functions of Tensors as functions of torch's tensors.

    import tinygrad_nv.torch

    compiled = torch.compile(model, backend="tinygrad_nv")      # forward and backward
    tinygrad_nv.torch.explain(compiled, tokens)                 # what torch computes, and why
    tinygrad_nv.torch.function(fn)                              # a function of Tensors, differentiable

Read in this order:
  lowering/        operators of ATen in Tensors
  interpreter.py   a graph of them in Tensors; what cannot be
  memory.py        torch's memory as buffers
  captured.py      a graph's launches for one set of shapes
  program.py       a graph, captured for each set of shapes
  compiler.py      graphs in whole and in part
  backend.py       what torch.compile calls
  report.py        explain
  function.py      function
"""
from importlib.util import find_spec

from tinygrad_nv.errors import TorchError, as_well

if find_spec("torch") is None:
    raise as_well(TorchError("the package torch is not installed", "PyTorch 2.13",
                             "pip install 'tinygrad-nv[torch]'"), ImportError())

from tinygrad_nv.torch.backend import backend, register
from tinygrad_nv.torch.function import function
from tinygrad_nv.torch.report import GraphReport, Report, explain

__all__ = ["GraphReport", "Report", "backend", "explain", "function"]

register()
