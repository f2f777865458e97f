"""CUDADriver through the real cuda.bindings to the C functions of a driver library: a stub that says what
it was asked. What the fake cannot find: a type that the bindings refuse, a struct that they lay out
otherwise. Calls of libraries on the CUDA driver: in a stream by its handle, in a graph as what the
library put into a captured stream."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support import SUPPORT, with_root
from tests.support.runtime import cuda_fake
from tinygrad_nv.errors import DistError
from tinygrad_nv.runtime.cuda.driver import CUDADriver
from tinygrad_nv.runtime.driver import Copy, Fill
from tinygrad_nv.runtime.library_call import LibraryCall
from tinygrad_nv.toolchain import find_compiler

HERE = SUPPORT / "runtime"


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the driver library."""
    directory, compiler = tmp_path_factory.mktemp("stub"), find_compiler()
    subprocess.run([*compiler.command, "-shared", "-fPIC", "-O1", str(HERE / "libcuda_stub.c"), "-o",
                    str(directory / "libcuda.so.1")], check=True, env=compiler.environment())
    return directory


def lines_of(script: str, stub: Path, **environment: str) -> list[str]:
    """The lines of a run: the stub's, and the script's own after '# '."""
    path = os.pathsep.join([str(stub), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
    done = subprocess.run([sys.executable, str(HERE / script)], capture_output=True, text=True, check=False,
                          timeout=120, env=with_root(LD_LIBRARY_PATH=path, **environment))
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


@pytest.fixture(scope="module")
def said(stub: Path) -> list[str]: return lines_of("on_libcuda_stub.py", stub)


def in_order(said: list[str], *wanted: str) -> None:
    """These lines, one after the other, with nothing in between."""
    at = said.index(wanted[0])
    assert said[at:at + len(wanted)] == list(wanted)


def test_the_device_and_its_pool(said: list[str]):
    in_order(said, "# missing ''", "pool: type 1, handles 0, location 1, id 0",
             f"pool attribute 4 = {2**64 - 1:x}", "pool attribute 3 = 0", "# stub sm_90a 232448")
    assert "access: location 1, id 3, flags 3, count 1" in said
    assert "limit 6 = 4096" in said
    # 4096 bytes reserved, 1024 used
    assert f"# ({2**20 + 3072}, {2**30}) 3072" in said


def test_modules_and_functions(said: list[str]):
    in_order(said, "function add", f"function attribute 8 = {232448 - 1}", "function attribute 14 = 1",
             "# 4 1024 (8, 4)")
    assert "# loading a module: line 1: it is broken: CUDA_ERROR_INVALID_PTX (words)" in said
    assert "# the module has no kernel 'nope'" in said
    loads = [line for line in said if line.startswith("load: ")]
    assert len(loads) == 3  # the probe that clusters are counted with, too
    assert all(line.endswith("options 2 5 6, log 16384") for line in loads)


def test_copies(said: list[str]):
    in_order(said, "host 33554432, flags 1", "upload 64: 0 63", "download 4", "# 07070707")


def test_launches(said: list[str]):
    in_order(said, "launch: grid 3 2 1, block 64 2 1, shared 0, arguments 700000001000 5, extra (nil)",
             "launch: grid 2 1 1, block 64 1 1, shared 60000, arguments 700000001000 5, extra (nil)",
             "attribute 4: 2 1 1", "attribute 6: 1", "attribute 1: window of 4096, ratio 0.5, 2 1",
             "fill 9, 30")


def test_how_many_clusters_run_at_once(said: list[str]):
    in_order(said, "occupancy: block 128, shared 232448, attribute 4: 8 1 1", "# 15")


def test_a_tensor_map(said: list[str]):
    in_order(said, "map: at % 128 = 0, type 9, rank 2, dims 128 64, stride 256, box 64 32, steps 1 1, "
             "0 3 0 0", "# abab")


def test_events(said: list[str]): assert "# 1.5" in said


def test_graphs(said: list[str]):
    whole, early = "edge: port 0 to 0, type 0", "edge: port 1 to 0, type 1"
    in_order(said, "memset node: value 1, element 1, width 64, height 1, context c0",
             "kernel node: after 0, grid 3, block 64, shared 0, arguments 700000001000 5, extra 0", whole,
             "kernel node: after 0, grid 2, block 64, shared 60000, arguments 700000001000 5, extra 0",
             "node attribute 4: 2 1 1", "node attribute 1: window of 4096, ratio 0.5, 2 1", early,
             "memcpy node: 2 - device to 2 - device, 32 x 1 x 1", whole,
             "memcpy node: 1 host - to 2 - device, 8 x 1 x 1", whole,
             "memcpy node: 2 - device to 1 host -, 9 x 1 x 1", whole, "instantiate 0", "set memset: 2",
             "set kernel: arguments 1", "set kernel: arguments 700000001000", "set memcpy: 33")


def test_nothing_is_left(said: list[str]):
    assert said.count("host free") == 2
    assert said[-1] == "# closed 0"


# **** what the driver does not have, what a fork does not have ****

@pytest.fixture(scope="module")
def edges(stub: Path) -> list[str]:
    return [line.removeprefix("# ") for line in
            lines_of("edges_of_libcuda_stub.py", stub, STUB_WITHOUT="cuCtxSetLimit") if line[:2] == "# "]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("version", ["installed", "13.0", "13.1", "13.2", "13.3", "13.4"])
def test_a_function_that_the_library_does_not_have(edges: list[str], version: str):
    """Each release of cuda.bindings says it in its own way; ours is a DriverError."""
    line, = (line for line in edges if line.startswith(f"{version}: "))
    kind, _, words = line.removeprefix(f"{version}: ").partition(" ")
    assert kind == "DriverError"
    assert words.startswith("cuCtxSetLimit: ")
    assert "this one supports CUDA 13.0" in words
    assert "update the NVIDIA driver" in words


def test_an_error_of_another_kind_stays_what_it_is(edges: list[str]):
    assert "other: DynamicLibNotFoundError no such library" in edges


def test_a_fork_is_told_to_spawn(edges: list[str]):
    line, = (line for line in edges if line.startswith("fork: "))
    for words in ("DriverError", "CUDA_ERROR_NOT_INITIALIZED", "GPU 0 was opened in process", "is a fork",
                  "a process that opens the GPU itself", "set_start_method('spawn')"):
        assert words in line


def test_a_fork_opens_no_gpu_and_destroys_nothing(edges: list[str]):
    assert [line for line in edges if line.startswith("in the fork: ")] == [
        "in the fork: the NVIDIA driver does not start in a fork of a process that used it: start processes "
        "with multiprocessing.set_start_method('spawn')", "in the fork: closed"]
    assert edges[-2:] == ["the fork ended with 0", "closed 0"]


NUMBERS = np.arange(16, dtype=np.uint8)


def read(gpu: CUDADriver, address: int) -> list[int]:
    out = np.empty_like(NUMBERS)
    gpu.copy_out(memoryview(out), address)
    return out.tolist()


def copied(fake: cuda_fake.Fake, source: int, target: int) -> LibraryCall:
    """A library that copies, by calls of its own."""
    def enqueue(stream: int) -> None:
        assert not fake.cuMemcpyDtoDAsync(target, source, 16, stream)[0]
    return LibraryCall("a copy", ((source, 16),), ((target, 16),), enqueue)


@pytest.fixture
def fake():
    with cuda_fake.installed() as made: yield made


def test_streams_and_graphs(fake):
    gpu = CUDADriver()
    a, b, c = (gpu.alloc(16) for _ in range(3))
    gpu.copy_in(a, memoryview(NUMBERS))
    gpu.submit(copied(fake, a, b))
    assert read(gpu, b) == NUMBERS.tolist()
    graph = gpu.graph()
    first = graph.add(Fill(b, 7, 16))
    second = graph.add(copied(fake, b, c), [first])
    graph.add(Copy(a, c, 16), [second])
    executable = graph.instantiate()
    executable.launch()
    assert read(gpu, a) == [7] * 16
    gpu.copy_in(a, memoryview(NUMBERS))
    executable.update(second, copied(fake, a, c))
    executable.launch()
    assert read(gpu, c) == NUMBERS.tolist()
    assert fake.calls["cuGraphDestroy"] == 2    # what was captured is copied into the graph
    del executable, graph
    gpu.close()


def test_a_library_that_fails_ends_the_capture(fake):
    gpu = CUDADriver()

    def enqueue(stream: int) -> None: raise DistError("no peer")
    with pytest.raises(DistError, match="no peer"): gpu.graph().add(LibraryCall("x", (), (), enqueue))
    assert not fake.captures
    gpu.close()
