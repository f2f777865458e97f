"""Lazy imports: every place that the code names as a string is there,
and a matmul opens few files."""
from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import tinygrad_nv
from tinygrad_nv.tile.templates import TABLE

PACKAGE = Path(tinygrad_nv.__file__).parent


def lazy_places() -> Iterator[str]:
    """Yields the arguments of all calls of `lazy_import`."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if "lazy_import(" not in (text := path.read_text()): continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "lazy_import":
                yield ast.literal_eval(node.args[0])


def lacks(place: str) -> bool:
    """Tells whether a module lacks the attribute of "module:attribute"."""
    module, _, name = place.partition(":")
    return not callable(getattr(import_module(module), name, None))


def test_every_place_is_there():
    places = list(lazy_places())
    assert len(places) > 10
    assert [place for place in places if lacks(place)] == []
    assert lacks("tinygrad_nv.patterns.gemm.match:rewrit")


CODE = """
import sys
import numpy as np
from tinygrad_nv import Tensor
def opened(): return {name for name in sys.modules if name.startswith("tinygrad_nv.")}
before = opened()
a, b = (Tensor(np.full((64, 64), n, np.float16)).realize() for n in (2, 3))
loaded = opened()
assert (a @ b).numpy()[5, 7] == 384
print(len(opened() - loaded), len(opened() - before), *opened())
"""


@pytest.mark.parametrize(("device", "matmul", "every"), [("CPU", 45, 60), ("EMU", 90, 160)])
def test_a_matmul_opens_few_files(device: str, matmul: int, every: int):
    """Nothing of other families: those for the matmul, and all since `import tinygrad_nv`."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True,
                          env={**os.environ, "DEV": device, "NV_SPEC": "0"})
    of_matmul, since_import, *names = done.stdout.split()
    assert int(of_matmul) <= matmul
    assert int(since_import) <= every
    others = {*TABLE.specs.values()} - {"gemm", "norm", "attention", "column_sum"}     # whose specs are read
    folders = tuple(f"tinygrad_nv.{kind}.{family}" for kind in ("tile", "cpu") for family in others)
    assert [name for name in names if name.startswith(("tinygrad_nv.quant", *folders))] == []


STORY = """
import sys
from pathlib import Path
from tinygrad_nv import LLM, SamplingParams, models
with LLM(Path(models.__file__).parent / "tales", max_num_seqs=1, max_model_len=32) as llm:
    assert llm.generate("Once", SamplingParams(temperature=0, max_tokens=2))[0].outputs[0].token_ids
print(*(name for name in sys.modules if name.startswith("tinygrad_nv.")))
"""


def test_a_text_model_opens_no_other_architectures():
    """Neither towers of images, nor encoders, experts, GGUF, or what writes kernels for GPUs."""
    done = subprocess.run([sys.executable, "-c", STORY], capture_output=True, text=True, check=True,
                          env={**os.environ, "DEV": "CPU", "NV_SPEC": "0"})
    names = done.stdout.split()
    assert "tinygrad_nv.models.llama" in names
    others = ("models.qwen_vl", "models.encoder", "models.embedding_model", "models.gguf.",
              "models.classifier", "engine.vision", "engine.embedding.embedder", "patterns.router.named",
              "patterns.quant_grouped", "patterns.scaled_gemm", "ptx.builder", "cpu.quant_gemm",
              "cpu.grouped_gemm", "cpu.attention")
    assert [name for name in names if name.startswith(tuple(f"tinygrad_nv.{each}" for each in others))] == []
