"""`import tinygrad_nv`: what it brings, what it does not load, and where models/ is found."""
import os
import subprocess
import sys
from pathlib import Path

import tinygrad

import tinygrad_nv

ROOT = Path(__file__).resolve().parents[2]


def run(script):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True,
                          check=False)


def test_tinygrads_names_are_tinygrads_own_objects():
    for name in ("Tensor", "TinyJit", "Variable", "dtypes", "function", "Device", "Context", "nn"):
        assert getattr(tinygrad_nv, name) is getattr(tinygrad, name)
    assert all(hasattr(tinygrad_nv, name) for name in tinygrad_nv.__all__)


def test_import_loads_no_device_and_no_numpy():
    done = run("import sys, tinygrad_nv\n"
               "print(*[m for m in sys.modules if m.startswith(('tinygrad.runtime.ops_', 'numpy'))])")
    # what EMU and CUDA open is registered; neither the emulator, cuda-python nor dist is loaded
    assert (done.stdout, done.stderr) == ("tinygrad.runtime.ops_emu tinygrad.runtime.ops_cuda\n", "")
    done = run("import sys, tinygrad_nv\n"
               "print(*[m for m in sys.modules if m.startswith((\n"
               "    'tinygrad_nv.ptx.emulator', 'tinygrad_nv.dist', 'cuda', 'mpi4py', 'torch', 'jax'))])")
    assert (done.stdout, done.stderr) == ("\n", "")


def test_models_of_a_checkout_are_importable():
    done = run("import tinygrad_nv; print(*tinygrad_nv.__path__); import tinygrad_nv.models")
    assert done.stderr == ""


def test_models_beside_the_package_count_only_in_a_checkout(tmp_path):
    find = tinygrad_nv._ModelsFinder(tmp_path / "tinygrad_nv").find_spec
    (tmp_path / "models").mkdir()
    assert find("tinygrad_nv.models") is None
    (tmp_path / "pyproject.toml").touch()
    assert find("tinygrad_nv.models").submodule_search_locations == [str(tmp_path / "models")]


def test_nothing_else_of_a_checkout_is_in_the_package():
    assert run("import tinygrad_nv.tests").returncode != 0
    assert run("import tinygrad_nv.models.llama").stderr == ""
