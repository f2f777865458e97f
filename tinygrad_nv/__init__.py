"""tinygrad_nv: NVIDIA-native lowering for tinygrad.

Protocol: `from tinygrad_nv import Tensor, nn, TinyJit` gives tinygrad's own objects. Importing this package
changes how they are lowered; `enable`, `disable` and `disabled()` switch that at run time, and NV=0 in the
environment leaves it off. `explain(tensor)` shows which kernel will run for what, and why.

Reading order: `registration` (what an import does), `hooks/` (the plugin points in tinygrad),
`patterns/program` (how a kernel of this package gets into the graph), `explain/`. Then a family from end to
end: `patterns/gemm`, `tile/gemm`, `ptx/builder`, `runtime/device`. docs/glossary.md has the terms.
"""
# ruff: noqa: E402  (Ctrl-C is the command's before anything takes time)
from tinygrad_nv import collection, interrupt

interrupt.starting()

import importlib
import multiprocessing
import sys
from pathlib import Path

__all__ = ["LLM", "BeamSearchParams", "CompiledFunction", "Context", "Device", "GlobalCounters",
           "KernelRecord", "LoRARequest", "Lowering", "PoolingParams", "RequestOutput", "SamplingParams",
           "StructuredOutputsParams", "Tensor", "TinyJit", "Transcriber", "TranscriptionParams", "UOp",
           "Variable", "__version__", "compile", "disable", "disabled", "dtypes", "enable", "enabled",
           "explain", "function", "kernel", "layer", "load", "memory_report", "nn", "timeline"]


LATER = {"KernelRecord": "tinygrad_nv.explain.lowering", "Lowering": "tinygrad_nv.explain.lowering",
         "LLM": "tinygrad_nv.engine.llm", "BeamSearchParams": "tinygrad_nv.engine.beam_search",
         "PoolingParams": "tinygrad_nv.engine.embedding.outputs",
         "SamplingParams": "tinygrad_nv.engine.sampling",
         "RequestOutput": "tinygrad_nv.engine.request_output",
         "LoRARequest": "tinygrad_nv.engine.lora.request",
         "StructuredOutputsParams": "tinygrad_nv.engine.structured_output.params",
         "Transcriber": "tinygrad_nv.engine.speech.transcriber",
         "TranscriptionParams": "tinygrad_nv.engine.speech.params",
         "CompiledFunction": "tinygrad_nv.engine.bundled.function",
         "compile": "tinygrad_nv.engine.bundled.function", "load": "tinygrad_nv.engine.bundled.function",
         "__version__": "tinygrad_nv.version",
         "kernel": "tinygrad_nv.language.decorator",
         "timeline": "tinygrad_nv.runtime.observe.timeline"}


if interrupt.is_command(): collection.seldom()


def __getattr__(name: str) -> object:
    """Returns a name that `LATER` has, loaded when asked for: importing tinygrad_nv stays as fast as
    tinygrad. In a brief process all names are: one that compiles imports the module of a user's function that
    a kernel calls."""
    if (module := LATER.get(name)) is not None: return getattr(importlib.import_module(module), name)
    if name not in __all__: raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = importlib.import_module("tinygrad_nv.registration")
    globals().update({each: getattr(found, each) for each in __all__ if each not in LATER})
    return globals()[name]


def _is_brief() -> bool:
    """Tells whether this process needs no more: a compile worker of tinygrad, tinygrad-nv-cc, which starts
    for each kernel, or `tinygrad-nv --version`. The rest takes half a second of a processor to import."""
    if interrupt.asks_version(): return True
    process = type(multiprocessing.current_process())
    return process.__name__ == "_WorkerProcess" or Path(next(iter(sys.argv), "")).stem == "tinygrad-nv-cc"


if not _is_brief():
    from tinygrad_nv.registration import (
        Context,
        Device,
        GlobalCounters,
        Tensor,
        TinyJit,
        UOp,
        Variable,
        disable,
        disabled,
        dtypes,
        enable,
        enabled,
        explain,
        function,
        layer,
        memory_report,
        nn,
    )
