"""torch.compile(model, backend="tinygrad_nv").

Protocol. torch's dynamo records a function as a graph; aot_autograd makes it one of ATen's operators without
mutations, and where gradients are asked for, two: forward and backward. Each is `compile_module`
(compiler.py). Operators that the table does not have are decomposed where torch knows how.

Extents that vary are numbers in a call: a graph with dynamic shapes is captured for each set of them.
"""
from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._dynamo.backends import registry
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext
from torch.fx import GraphModule

from tinygrad_nv.errors import TorchError
from tinygrad_nv.torch.compiler import compile_module
from tinygrad_nv.torch.lowering import TABLE

NAME = "tinygrad_nv"
# operators of torch's core that are made of others which the table has
CORE = [getattr(torch.ops.aten, name) for name in (
    "_adaptive_avg_pool2d", "_native_batch_norm_legit", "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit_no_training", "addmv", "batch_norm_backward", "clamp", "hardtanh",
    "linalg_vector_norm", "native_batch_norm", "native_group_norm")]
_numbers = itertools.count()


def backend(module: GraphModule, example_inputs: list[Any], **options: Any) -> Callable[..., Any]:
    """Compiles a graph of dynamo's. Raises `TorchError` for options, of which there are none."""
    if options:
        raise TorchError(f"options {', '.join(sorted(options))} of the backend {NAME}", "none",
                         f'torch.compile(model, backend="{NAME}")')
    number = next(_numbers)
    made: Callable[..., Any] = aot_autograd(
        fw_compiler=_compiler(f"graph {number} forward"), bw_compiler=_compiler(f"graph {number} backward"),
        inference_compiler=_compiler(f"graph {number}"), decompositions=decompositions(),
        keep_inference_input_mutations=True)(module, example_inputs)
    return made


def decompositions() -> dict[Any, Callable[..., Any]]:
    """torch's decompositions of operators that the table does not have: of those that are not in its core,
    and of `CORE`. What torch decomposes itself, in every graph, needs none."""
    every = {**core_aten_decompositions(), **get_decompositions(CORE)}
    return {operator: made for operator, made in every.items()
            if operator not in TABLE and not _composite(operator)}


def _composite(operator: Any) -> bool:
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return isinstance(operator, torch._ops.OpOverload) and operator.has_kernel_for_dispatch_key(key)


def _compiler(name: str) -> Callable[..., Any]:
    def compile_graph(module: GraphModule, example_inputs: list[Any]) -> Any:
        context = TracingContext.try_get()
        data = context.fw_metadata if context is not None and "backward" not in name else None
        static = frozenset(data.static_input_indices) if data is not None else frozenset()
        graph = compile_module(module, static, name)
        def call_boxed(args: list[Any]) -> list[Any]:
            given = list(args)
            args.clear()    # torch's memory of arguments can be reused as soon as the graph is done with it
            return graph(*given)
        call_boxed._boxed_call = True  # type: ignore[attr-defined]
        return call_boxed
    return compile_graph


def register() -> None:
    """Gives torch.compile the backend by its name, unless torch has found it as an entry point: it registers
    that itself once this module is loaded, and takes no name twice."""
    if NAME not in registry._BACKENDS: registry.register_backend(compiler_fn=backend, name=NAME)
