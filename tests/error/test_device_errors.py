"""Devices that cannot be opened, and what DEV=EMU says of wrong settings, kernels, and work in the wrong
order."""
from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tinygrad.helpers import Context

from tests.support.runtime.order_case import NBYTES, Bench, N, kernel, mine
from tinygrad_nv import Device, Tensor, dtypes
from tinygrad_nv.errors import ConfigError, DriverError, KernelError, NVError, PTXError
from tinygrad_nv.patterns.program import Output, program
from tinygrad_nv.ptx.builder import Kernel
from tinygrad_nv.runtime.device import EMUDevice
from tinygrad_nv.runtime.driver import Download, Launch, Upload, pointer
from tinygrad_nv.tile.launch import PLAIN, Integer, LaunchConfig, MapArgument

HEAD = ".version 7.8\n.target sm_80\n.address_size 64\n"
# each thread writes out[tid + OFFSET]
KERNEL = HEAD + """.visible .entry k(.param .u64 out)
{
.reg .u64 %a<3>;
.reg .u32 %r<4>;
ld.param.u64 %a1, [out];
mov.u32 %r1, %tid.x;
add.u32 %r2, %r1, OFFSET;
mul.wide.u32 %a2, %r2, 4;
add.u64 %a2, %a1, %a2;
st.global.u32 [%a2], %r1;
ret;
}
"""
LINE = 13  # of the store


@pytest.fixture(autouse=True)
def emu() -> Iterator[None]:
    with Context(DEV="EMU"):
        yield
        Device["EMU"].synchronize()  # an error is raised once


def run(source: str, entry: str = "k", device: str = "EMU", binary: bytes | None = None,
        ctas: int = 1, launch: LaunchConfig = PLAIN) -> Tensor:
    """32 integers that `source` wrote."""
    return Tensor(program(entry, source, device, [Output((32,), dtypes.int32)], [], grid=(ctas, 1, 1),
                          block=(32, 1, 1), binary=binary, launch=launch)[0])


def race(device: str = "EMU") -> Tensor:
    """Two CTAs write the same places."""
    return run(kernel_text(), device=device, ctas=2)


def kernel_text(offset: int = 0) -> str: return KERNEL.replace("OFFSET", str(offset))


def test_a_kernel_that_is_right():
    np.testing.assert_array_equal(run(kernel_text()).numpy(), np.arange(32))


# **** settings ****

@pytest.mark.parametrize(("name", "value", "expected"), [
    ("EMU_ARCH", "sm_75", "one of sm_80, sm_89, sm_90a"), ("EMU_ARCH", "90", "one of sm_80, sm_89, sm_90a"),
    ("EMU_CHECK", "yes", "one of 0, 1"),
    ("EMU_STEP_LIMIT", "1e10", "one of 1000000000, 10000000000, 100000000000")])
def test_settings(name: str, value: str, expected: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught: EMUDevice("EMU:3")
    assert caught.value.found == f"{name}={value}"
    assert expected in caught.value.expected
    assert caught.value.fix.startswith(f"unset {name} for its default")


def test_settings_on_the_command_line(tiny: Path):
    words = ["generate", str(tiny), "hello", "--device", "EMU"]
    done = subprocess.run([sys.executable, "-m", "tinygrad_nv", *words], capture_output=True, text=True,
                          env={**os.environ, "EMU_ARCH": "sm_100"}, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "EMU_ARCH=sm_100\n  expected: one of sm_80, sm_89, sm_90a" in done.stderr
    assert "Traceback" not in done.stderr


# **** kernels ****

def test_a_launch_that_does_not_end(monkeypatch: pytest.MonkeyPatch):
    """It is said to be over the limit, not a deadlock; and with a higher limit it may run."""
    rounds = """mov.u32 %r3, 5000;
AGAIN: add.u32 %r3, %r3, -1;
setp.ne.u32 %p1, %r3, 0;
@%p1 bra AGAIN;
ret;"""
    source = kernel_text().replace("ret;", rounds).replace(".reg .u32", ".reg .pred %p<2>; .reg .u32")
    monkeypatch.setattr(Device["EMU"].driver.emulator, "step_limit", 500)
    out = run(source)
    with pytest.raises(KernelError) as caught: out.numpy()
    assert re.fullmatch(
        r"kernel k: instruction-limit: line \d+: warp 0 of CTA 0 still runs here after 10000 "
        r"warp-instructions, the launch's limit: much work, or an endless loop \[CTA 0; thread 0\]\n"
        r"    \d+: .*", caught.value.found)
    assert caught.value.expected == "a launch that ends within the limit"
    assert caught.value.fix == \
        "make the problem smaller, or raise EMU_STEP_LIMIT; mend a loop that has no end"
    monkeypatch.setattr(Device["EMU"].driver.emulator, "step_limit", 1000)
    np.testing.assert_array_equal(run(source).numpy(), np.arange(32))


def test_out_of_bounds():
    out = run(kernel_text(offset=1))
    with pytest.raises(KernelError) as caught: out.numpy()
    assert f"kernel k: out-of-bounds: line {LINE}: write of 4 bytes at " in caught.value.found
    assert f"\n    {LINE}: st.global.u32 [%a2], %r1;" in caught.value.found
    assert caught.value.expected == "kernels in which the emulator finds nothing"
    assert caught.value.fix.startswith("correct what is named")


def test_a_race():
    out = race()
    with pytest.raises(KernelError, match=f"kernel k: race: line {LINE}"): out.numpy()


def test_a_kernel_that_went_wrong_is_told_at_the_next_synchronisation():
    race().realize()
    with pytest.raises(KernelError, match="race"): Device["EMU"].synchronize()
    Device["EMU"].synchronize()


def test_at_once_with_debug_2(capsys: pytest.CaptureFixture[str]):
    out = race()
    with Context(DEBUG=2), pytest.raises(KernelError, match="race"): out.realize()
    capsys.readouterr()


def test_only_the_first_findings_are_shown():
    for _ in range(5): race().realize()
    with pytest.raises(KernelError) as caught: Device["EMU"].synchronize()
    assert caught.value.found.count("kernel k: race") == 3
    assert re.search(r"\nand \d+ more$", caught.value.found)


def test_memory_that_was_never_written():
    used = Tensor.ones(8).contiguous().realize()  # memory that was in use before is as good as new
    del used
    out = Tensor.empty(8) + 1
    with pytest.raises(KernelError, match=r"uninitialized: line \d+: read of .*never written"): out.numpy()


def test_without_checks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("EMU_CHECK", "0")
    assert race("EMU:4").numpy().shape == (32,)
    assert (Tensor.empty(8, device="EMU:4") + 1).numpy().shape == (8,)
    out = run(kernel_text(offset=1), device="EMU:4")
    with pytest.raises(KernelError, match="out-of-bounds"): out.numpy()


# **** requests ****

@pytest.mark.parametrize(("source", "words"), [
    (KERNEL, "OFFSET"),
    (kernel_text().replace("st.global.u32", "frobnicate.u32"), "PTX line 13: frobnicate.u32"),
    (kernel_text().replace("out)", "out, .param .u32 n)"), "1 arguments for the 2 parameters"),
    (kernel_text().replace("sm_80", "sm_100"), "the module is for sm_100"),
    (kernel_text().replace("ret;\n}", "ret;\n"), "function k is not closed"),
], ids=["constant", "opcode", "parameters", "target", "brace"])
def test_ptx_that_cannot_run(source: str, words: str):
    with pytest.raises(PTXError, match=words): run(source).realize()


def test_an_entry_that_is_not_there():
    with pytest.raises(DriverError, match="the module has no kernel 'other'"):
        run(kernel_text(), "other").realize()


def test_machine_code():
    with pytest.raises(DriverError, match="the module is a cubin"):
        run(kernel_text(), binary=b"\x7fELF\2\1\1").realize()


def test_more_shared_memory_than_there_is():
    with pytest.raises(PTXError, match="300000 bytes of shared memory") as caught:
        run(kernel_text(), launch=LaunchConfig(300000)).realize()
    assert "232448" in caught.value.expected


def test_variables_that_the_integers_of_a_launch_are_not_made_of():
    launch = LaunchConfig(integers=(Integer(0, (1, 2)), Integer(3, (1, 0))))
    with pytest.raises(DriverError) as caught: run(kernel_text(), launch=launch).realize()
    assert caught.value.found == "kernel k with 0 variables"
    assert caught.value.expected == "2, as its LaunchConfig says"


def test_a_tensor_map_of_a_pointer_that_is_not_there():
    launch = LaunchConfig(maps=(MapArgument(1, "u8", (64,), (), (64,)),))
    with pytest.raises(DriverError) as caught: run(kernel_text(), launch=launch).realize()
    assert caught.value.found == "kernel k with 1 pointers and 0 integers"
    assert caught.value.expected == "those that its LaunchConfig names"


def test_more_memory_than_there_is():
    with pytest.raises(MemoryError, match=r"out of memory on EMU: 128.00 GiB for tensors asked"):
        Tensor.empty(1 << 37, dtype=dtypes.uint8).uop.buffer.ensure_allocated()


def test_errors_are_of_one_family():
    assert issubclass(KernelError, DriverError)
    assert issubclass(DriverError, NVError)


# **** order ****

@pytest.fixture
def bench() -> Bench: return Bench()


def found(bench: Bench) -> str:
    with pytest.raises(KernelError) as caught: bench.gpu.synchronize()
    assert caught.value.expected == "kernels in which the emulator finds nothing"
    assert caught.value.fix == \
        "correct what is named; EMU_CHECK=0 runs without race, order and initialisation checks"
    return caught.value.found


def test_streams(bench: Bench):
    bench.gpu.submit(bench.move(bench.b, bench.a), bench.s)
    bench.gpu.submit(bench.launch("tally", bench.b + 128, threads=32), bench.t)
    assert found(bench) == (
        f"order: kernel tally updates, and kernel move writes, bytes 128 to 255 of the 256 allocated at "
        f"{bench.b:#x}, and nothing orders the two: record an event in stream 1 after kernel move, and let "
        f"stream 2 wait for it before kernel tally")


def test_nodes_of_a_graph(bench: Bench):
    graph = bench.gpu.graph()
    for target, source in ((bench.b, bench.a), (bench.c, bench.b)): graph.add(bench.move(target, source))
    graph.instantiate().launch()
    assert found(bench) == (
        f"order: kernel move (node 0 of a graph) writes, and kernel move (node 1 of a graph) reads, bytes 0 "
        f"to 255 of the 256 allocated at {bench.b:#x}, and nothing orders the two: add an edge from node 0 "
        f"to node 1")


def test_page_locked_memory_in_two_streams(bench: Bench):
    host = bench.gpu.host(NBYTES)
    for stream in (bench.s, bench.t): bench.gpu.submit(Download(host, 0, bench.a, NBYTES), stream)
    assert found(bench) == (
        "order: a download writes, and a download writes, bytes 0 to 255 of page-locked memory, and nothing "
        "orders the two: record an event in stream 1 after a download, and let stream 2 wait for it before a "
        "download")


def test_page_locked_memory_written_too_early(bench: Bench):
    host = bench.gpu.host(NBYTES)
    bench.gpu.submit(Upload(bench.b, host, 0, NBYTES), bench.s)
    host.view[3] = 1
    assert found(bench) == (
        "host: byte 3 of page-locked memory was written while an upload of 256 bytes in stream 1 owned it: "
        "record an event after the upload, and wait_for it before the memory is written again")


def test_page_locked_memory_that_is_not_there(bench: Bench):
    host = bench.gpu.host(NBYTES)
    with pytest.raises(DriverError) as caught: bench.gpu.submit(Upload(bench.b, host, 8, NBYTES))
    assert caught.value.found == "bytes 8 to 264 of page-locked memory"
    assert caught.value.expected == "of its 256"
    with pytest.raises(DriverError) as caught:
        bench.gpu.submit(Download(bytearray(4), 0, bench.b, 4))  # type: ignore[arg-type]
    assert caught.value.found == "page-locked memory that is a bytearray"
    assert caught.value.expected == "what host() of an emulated device gave"


def dependent(bench: Bench, waits: bool) -> Launch:
    """A programmatic launch that reads b and, perhaps, waits afterwards."""
    def write(k: Kernel) -> None:
        k.ld("global", "u32", mine(k, k.pointer("source")).at())
        if waits: k.wait_for_previous_grid()
    function = bench.gpu.load(kernel("dependent", write)).function("dependent")
    return Launch(function, (1, 1, 1), (N, 1, 1), (pointer(bench.b),), pdl=True)


def test_a_programmatic_launch_reads_early(bench: Bench):
    bench.gpu.submit(bench.move(bench.b, bench.a))
    bench.gpu.submit(dependent(bench, waits=True))
    said = found(bench)
    assert said.startswith("kernel dependent: race: line ")
    assert " is not ordered after griddepcontrol.wait: it is written by kernel move, which may " in said
    assert ": ld.global.u32 " in said


def test_a_programmatic_launch_that_does_not_wait(bench: Bench):
    bench.gpu.submit(dependent(bench, waits=False))
    words = "a programmatic launch whose CTAs do not all execute it may end before the kernels ahead"
    assert f"the CTA ends without griddepcontrol.wait: {words}" in found(bench)


# **** devices of the command line ****

DOCTOR = "to fix:   run `tinygrad-nv doctor` to see what"


@pytest.mark.parametrize("name", ["NOPE", "nope", "../x", "A.B"])
@pytest.mark.parametrize("subcommand", ["generate", "explain"])
def test_no_such_device(command, tiny: Path, subcommand: str, name: str):
    words = ["hello"] * (subcommand == "generate")
    command(subcommand, tiny, *words, "--device", name).refused(
        f"no such device: {name.upper()}", "expected: CPU, CUDA, EMU or another device of tinygrad", DOCTOR)


@pytest.mark.parametrize("name", ["DISK", "NPY"])
def test_a_device_that_does_not_compute(command, tiny: Path, name: str):
    command("generate", tiny, "hello", "--device", name).refused(
        f"device {name} cannot be opened: it is a storage device",
        "expected: a device this machine has", DOCTOR)


def test_a_renderer_the_device_does_not_have(command, tiny: Path):
    command("generate", tiny, "hello", "--device", "CPU:NOPE").refused(
        "device CPU:NOPE cannot be opened: CPU has no renderer 'NOPE'",
        "expected: a device this machine has", DOCTOR)


@pytest.mark.parametrize(("name", "found"), [("a:b:c:d", "too many ':'"), ("a+b+c", "too many '+'")])
def test_a_name_that_cannot_be_parsed(command, tiny: Path, name: str, found: str):
    command("generate", tiny, "hello", "--device", name).refused(
        f"--device {name}: {found}", "expected: a device of tinygrad, such as CPU or CUDA", DOCTOR)
