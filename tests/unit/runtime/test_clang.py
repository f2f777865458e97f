"""The compiler of the CPU device: who is found, what it is given, and whose objects a cache serves."""
import functools
import json
import os
import pickle
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tinygrad.engine import worker
from tinygrad.helpers import Target
from tinygrad.renderer import cstyle
from tinygrad.runtime import ops_cpu
from tinygrad.runtime.support import compiler_cpu

from tinygrad_nv import Device, Tensor, hooks, toolchain
from tinygrad_nv.errors import ToolchainError
from tinygrad_nv.runtime.cpu import device as cpu_device
from tinygrad_nv.runtime.cpu.clang import ClangRenderer, ToolchainCompiler, clang_arguments
from tinygrad_nv.toolchain import find_compiler

ROOT = Path(__file__).resolve().parents[3]
NO_ZIGLANG = "import sys; sys.modules['ziglang'] = None"
TARGET = Target("CPU", "CLANG", arch="x86_64,native")


def executable(path, script="exit 1"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A PATH with nothing in it, and no CC."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path


# **** who is found ****

def test_CC_wins_over_clang_in_path_wins_over_ziglang(path, monkeypatch):
    pytest.importorskip("ziglang")
    assert find_compiler().origin == "ziglang"
    clang = executable(path / "bin" / "clang")
    assert find_compiler().command == (str(clang),)
    assert find_compiler().origin == "PATH"
    other = executable(path / "other compiler")
    monkeypatch.setenv("CC", str(other))
    assert (find_compiler().origin, find_compiler().command) == ("CC", (str(other),))


def test_plain_c_is_left_to_gcc_where_there_is_nothing_else(path, monkeypatch):
    monkeypatch.setattr(toolchain, "zig_binary", lambda: None)
    gcc = executable(path / "bin" / "gcc")
    assert find_compiler(any_c=True).command == (str(gcc),)
    with pytest.raises(ToolchainError): find_compiler()
    gcc.rename(cc := path / "bin" / "cc")
    assert find_compiler(any_c=True).command == (str(cc),)
    clang = executable(path / "bin" / "clang")
    assert find_compiler(any_c=True).command == (str(clang),)


def test_clang_serves_under_its_other_names(path, monkeypatch):
    """A cc that is clang where there is nothing else, and Debian's names, of which the newest."""
    monkeypatch.setattr(toolchain, "zig_binary", lambda: None)
    cc = executable(path / "bin" / "cc", 'echo "Some clang version 16.0.6"')
    assert find_compiler().command == (str(cc),)
    for version in ("9", "16", "cpp-17"): executable(path / "bin" / f"clang-{version}")
    assert find_compiler().command == (str(path / "bin" / "clang-16"),)


def test_the_renderer_uses_what_is_found_and_keeps_it(path):
    first = executable(path / "bin" / "clang")
    renderer = ClangRenderer(TARGET)
    assert renderer.compiler.found.command == (str(first),)
    first.unlink()
    assert renderer.compiler.found.command == (str(first),)


def test_a_pickled_renderer_takes_its_compiler_along(path, monkeypatch):
    executable(path / "bin" / "clang")
    sent, key = pickle.dumps(ClangRenderer(TARGET)), ClangRenderer(TARGET).compiler.cachekey
    monkeypatch.setenv("PATH", "")
    arrived = pickle.loads(sent)
    assert type(arrived) is ClangRenderer
    assert (arrived.target, arrived.compiler.found.origin, arrived.compiler.cachekey) == (TARGET, "PATH", key)


# **** what the compiler is given ****

@pytest.mark.parametrize("arch", ["x86_64,native", "x86_64,znver2,avx2,-sse4a", "arm64,native",
                                  "riscv64,native"])
def test_arguments_are_those_of_tinygrads_own_compiler(arch, monkeypatch):
    theirs = compiler_cpu.ClangCompiler(arch.split(","))
    ran = []
    monkeypatch.setattr(compiler_cpu.subprocess, "check_output", lambda command, input: ran.append(command))
    theirs.compile("int x;")
    assert [clang_arguments(theirs)] == [command[1:] for command in ran]
    assert f"--target={theirs.arch}-none-unknown-elf" in clang_arguments(theirs)


def test_the_source_goes_through_the_found_compiler(path):
    log = path / "log"
    executable(path / "bin" / "clang", f'echo "$@" > {log}; /bin/cat >> {log}; printf "\\177ELF-object"')
    compiler = ClangRenderer(TARGET).compiler
    assert compiler.compile("int answer;") == b"\x7fELF-object"
    arguments, source = log.read_text().split("\n", 1)
    assert arguments == " ".join(compiler.arguments)
    assert source == "int answer;"


# **** caches ****

@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    from tinygrad import helpers
    monkeypatch.setattr(helpers, "CACHEDB", str(tmp_path / "cache.db"))
    monkeypatch.setattr(helpers, "_db_connection", None)
    monkeypatch.setattr(helpers, "_db_tables", set())


@pytest.mark.usefixtures("own_cache")
def test_a_changed_compiler_never_serves_stale_objects(path):
    clang = executable(path / "bin" / "clang", 'printf "\\177ELF-one"')
    assert ClangRenderer(TARGET).compiler.compile_cached("int x;") == b"\x7fELF-one"
    executable(clang, 'printf "\\177ELF-another"')
    assert ClangRenderer(TARGET).compiler.compile_cached("int x;") == b"\x7fELF-another"


@pytest.mark.usefixtures("own_cache")
def test_an_unchanged_compiler_is_not_asked_twice(path):
    count = path / "count"
    executable(path / "bin" / "clang", f'echo x >> {count}; printf "\\177ELF-one"')
    for _ in range(2): assert ClangRenderer(TARGET).compiler.compile_cached("int x;") == b"\x7fELF-one"
    assert count.read_text() == "x\n"


@pytest.mark.usefixtures("own_cache")
def test_NV_PROGRAM_CACHE_0_compiles_afresh(path, monkeypatch):
    monkeypatch.setenv("NV_PROGRAM_CACHE", "0")
    count = path / "count"
    executable(path / "bin" / "clang", f'echo x >> {count}; printf "\\177ELF-one"')
    for _ in range(2): ClangRenderer(TARGET).compiler.compile_cached("int x;")
    assert count.read_text() == "x\nx\n"


def test_changed_arguments_change_the_cache_key(path, monkeypatch):
    executable(path / "bin" / "clang")
    before = ClangRenderer(TARGET).compiler.cachekey
    monkeypatch.setattr("tinygrad_nv.runtime.cpu.clang.clang_arguments", lambda clang: ["-O3"])
    assert ClangRenderer(TARGET).compiler.cachekey != before
    assert find_compiler().identity in before


# **** in tinygrad ****

def test_the_cpu_device_compiles_with_it():
    cpu = Device["CPU"]
    assert type(cpu.renderer) is ClangRenderer
    assert isinstance(cpu.compiler, ToolchainCompiler)
    assert cpu._renderer_name(ClangRenderer) == "CLANG"


def test_it_renders_small_integers_alone_differently():
    own = {name for name in vars(ClangRenderer) if not name.startswith("__")}
    assert own == {"compiler", "string_rewrite"}
    assert ClangRenderer.__mro__[1] is cstyle.ClangRenderer


def test_the_hook_can_be_put_back_and_stays_while_disabled():
    with hooks.disabled(): assert ops_cpu.ClangRenderer is ClangRenderer
    hooks.remove_cpu()
    assert ops_cpu.ClangRenderer is cstyle.ClangRenderer
    assert type(Device)._select_device.func.__module__ == "tinygrad.device"
    cpu_device.install()
    assert ops_cpu.ClangRenderer is ClangRenderer


WORKERS = """
from tinygrad_nv import Tensor
from tinygrad.engine import worker
x = Tensor([[1.0, 2.0], [3.0, 4.0]])
print(((x * 3).sum(0).contiguous() + x.sum(1).contiguous().max() + x.exp().contiguous().min()).tolist())
assert worker.worker_pool is not None, "nothing was compiled by a worker"
"""


def run(script, **env):
    unset = {name: value for name, value in os.environ.items() if name not in ("CC", "DEV")}
    return subprocess.run([sys.executable, "-c", script], env={**unset, "PYTHONPATH": str(ROOT), **env},
                          capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_spawned_compile_workers_use_it():
    done = run(WORKERS, PARALLEL="2", CCACHE="0", CACHELEVEL="0")
    assert done.returncode == 0, done.stderr
    assert [round(v, 2) for v in json.loads(done.stdout)] == [21.72, 27.72]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("env", [{}, {"NV": "0"}, {"DEV": "CPU"}])
def test_a_missing_compiler_is_our_error_however_the_device_is_chosen(tmp_path, env):
    """tinygrad's own device choice would say `no usable devices`, or list what each renderer lacks."""
    script = f"{NO_ZIGLANG}; from tinygrad_nv import Tensor; (Tensor([1.0]) + 1).tolist()"
    done = run(script, PATH=str(tmp_path), **env)
    last = done.stderr.strip().splitlines()[-3:]
    assert last[0] == "tinygrad_nv.errors.ToolchainError: no C compiler for the CPU device"
    assert "pip install 'tinygrad-nv[cpu]'" in last[2]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("first", ["", "import tinygrad.runtime.ops_cpu;"])
def test_it_does_not_matter_when_the_cpu_device_is_imported(first):
    done = run(f"""{first}
import sys, tinygrad_nv
from tinygrad_nv.hooks import devices as hook_devices; from tinygrad_nv import hooks
from tinygrad_nv.runtime.cpu import device as cpu_device
assert ("tinygrad.runtime.ops_cpu" in sys.modules) is bool({first!r})
hooks.remove_cpu(); cpu_device.install(); cpu_device.install()
from tinygrad.runtime import ops_cpu
from tinygrad_nv.runtime.cpu import clang
assert ops_cpu.ClangRenderer is clang.ClangRenderer
assert not any(isinstance(finder, hook_devices._CPUFinder) for finder in sys.meta_path)
hooks.remove_cpu()
assert ops_cpu.ClangRenderer.__module__ == "tinygrad.renderer.cstyle"
""")
    assert done.returncode == 0, done.stderr


def test_taken_back_before_the_cpu_device_is_imported_nothing_is_replaced():
    done = run("""
from tinygrad_nv import hooks
hooks.remove_cpu()
from tinygrad.runtime import ops_cpu
assert ops_cpu.ClangRenderer.__module__ == "tinygrad.renderer.cstyle"
""")
    assert done.returncode == 0, done.stderr


def test_importing_finds_no_compiler_and_opens_no_device(tmp_path):
    script = "from tinygrad_nv import Tensor, Device; Tensor.empty(3) + 1; assert not Device._opened_devices"
    done = run(f"{NO_ZIGLANG}; {script}", PATH=str(tmp_path), DEV="CPU")
    assert done.returncode == 0, done.stderr


def test_a_compile_error_is_explained(path):
    executable(path / "bin" / "clang", "echo 'unknown type name' >&2; exit 1")
    with pytest.raises(ToolchainError, match="did not compile a kernel:\nunknown type name"):
        ClangRenderer(TARGET).compiler.compile("nonsense")


def test_compiler_property_is_lazy(path):
    renderer = ClangRenderer(TARGET)
    assert isinstance(vars(ClangRenderer)["compiler"], functools.cached_property)
    assert renderer.found is None


LOADED = "[name for name in sys.modules if name.startswith(('numpy', 'tinygrad_nv.patterns'))]"


def test_the_wrapper_loads_nothing_it_does_not_need():
    """It is started for each kernel: all of the package takes longer to import than a kernel to compile."""
    script = f"import sys; sys.argv[0] = '/bin/tinygrad-nv-cc'; import tinygrad_nv.toolchain; print({LOADED})"
    done = subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(ROOT)},
                          capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_compile_worker_loads_nothing_it_does_not_need():
    renderer = Device["CPU"].renderer
    assert isinstance(renderer, ClangRenderer)
    with worker._WorkerContext().Pool(1, worker._init_worker) as pool:
        assert pool.apply(len, ([renderer],)) == 1
        assert pool.apply(eval, (LOADED.replace("sys", "__import__('sys')"),)) == []


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16"])
def test_small_integers_wrap_around_inside_an_expression(dtype):
    limits, rng = np.iinfo(dtype), np.random.default_rng(0)
    x, y = (rng.integers(limits.min, limits.max, (2, 37), dtype, endpoint=True) for _ in range(2))
    found = ((Tensor(x) - Tensor(y)).float() + (Tensor(x) * Tensor(y) + Tensor(y)).float() * 0.5).numpy()
    expected = (x - y).astype(np.float32) + (x * y + y).astype(np.float32) * np.float32(0.5)
    assert (found == expected).all()
