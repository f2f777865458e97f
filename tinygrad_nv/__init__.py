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
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path

__all__ = ["LLM", "BeamSearchParams", "CompiledFunction", "Context", "Device", "GlobalCounters",
           "KernelRecord", "LoRARequest", "Lowering", "PoolingParams", "RequestOutput", "SamplingParams",
           "StructuredOutputsParams", "Tensor", "TinyJit", "Transcriber", "TranscriptionParams", "UOp",
           "Variable", "__version__", "compile", "disable", "disabled", "dtypes", "enable", "enabled",
           "explain", "function", "kernel", "layer", "load", "memory_report", "nn", "timeline"]


LATER = {"KernelRecord": "tinygrad_nv.explain.lowering", "Lowering": "tinygrad_nv.explain.lowering",
         "LLM": "tinygrad_nv.engine.llm", "BeamSearchParams": "tinygrad_nv.engine.beam_search",
         "PoolingParams": "tinygrad_nv.engine.embedding.params",
         "SamplingParams": "tinygrad_nv.engine.sampling",
         "RequestOutput": "tinygrad_nv.engine.request_output",
         "LoRARequest": "tinygrad_nv.engine.lora.request",
         "StructuredOutputsParams": "tinygrad_nv.engine.structured_output.params",
         "Transcriber": "tinygrad_nv.engine.speech.transcriber",
         "TranscriptionParams": "tinygrad_nv.engine.speech.params",
         "CompiledFunction": "tinygrad_nv.engine.bundled.function",
         "compile": "tinygrad_nv.engine.bundled.function", "load": "tinygrad_nv.engine.bundled.function",
         "kernel": "tinygrad_nv.language.decorator",
         "timeline": "tinygrad_nv.runtime.observe.timeline"}


if interrupt.is_command(): collection.seldom()


class _ModelsFinder(MetaPathFinder):
    """Finds tinygrad_nv.models in a checkout, where models/ stands beside the package. Installed, it is
    inside, where others find it."""

    def __init__(self, package: Path) -> None: self.package = package

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        models = self.package.parent / "models"
        if name != "tinygrad_nv.models" or not (models.parent / "pyproject.toml").is_file(): return None
        return spec_from_file_location(name, models / "__init__.py", submodule_search_locations=[str(models)])


def __getattr__(name: str) -> object:
    """What `LATER` has, loaded when asked for: importing tinygrad_nv stays as fast as tinygrad."""
    if name == "__version__":
        from importlib.metadata import version
        return version("tinygrad_nv")
    if (module := LATER.get(name)) is not None: return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# before that of an editable install, which may be another checkout's
sys.meta_path.insert(0, _ModelsFinder(Path(__file__).resolve().parent))


def _compiles_alone() -> bool:
    """Whether this process needs the compilers' modules alone: a compile worker of tinygrad, or
    tinygrad-nv-cc, which starts for each kernel. The rest takes half a second of a processor to import."""
    process = type(multiprocessing.current_process())
    return process.__name__ == "_WorkerProcess" or Path(next(iter(sys.argv), "")).stem == "tinygrad-nv-cc"


if not _compiles_alone():
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
