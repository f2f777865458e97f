"""Calls of libraries in streams and graphs: what is ordered with them, and what runs beside."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from tinygrad_nv import Device, Tensor, TinyJit, dtypes
from tinygrad_nv.errors import KernelError
from tinygrad_nv.patterns.program import Output, program
from tinygrad_nv.runtime import library_call
from tinygrad_nv.runtime.driver import Fill
from tinygrad_nv.runtime.edges import EdgeChain
from tinygrad_nv.runtime.library_call import LibraryCall
from tinygrad_nv.tile.launch import LaunchConfig

COUNT = 32


@dataclass(frozen=True)
class Doubled:
    """What the library of these tests does."""
    name: str


def twice(call: object, device: str, buffers: tuple[int, ...]) -> LibraryCall:
    """float32 numbers, doubled."""
    (out, given), driver = buffers, Device[device].driver

    def enqueue(stream: int) -> None:
        source, target = (driver.memory_at(at, 4 * COUNT, "test").view(np.float32) for at in (given, out))
        target[:] = 2 * source
    return LibraryCall(str(call), ((given, 4 * COUNT),), ((out, 4 * COUNT),), enqueue)


def doubled(x: Tensor, name: str = "") -> Tensor:
    made, = program("doubled", f"// {name}", str(x.device), [Output((COUNT,), dtypes.float32)],
                    [x.contiguous().uop], binary=b"a call", launch=LaunchConfig(call=Doubled(name)))
    return Tensor(made)


@pytest.fixture(autouse=True)
def submitted(monkeypatch) -> list[tuple[str, int | None]]:
    """What is submitted, and to which stream; None is stream 0 in order."""
    library_call.register(Doubled, twice)
    found: list[tuple[str, int | None]] = []
    driver = Device["EMU"].driver
    submit = driver.submit

    def noted(work, stream=None):
        found.append((type(work).__name__, None if stream is None else stream.number))
        submit(work, stream)
    monkeypatch.setattr(driver, "submit", noted)
    return found


def numbers(first: int = 0) -> Tensor:
    return Tensor(np.arange(first, first + COUNT, dtype=np.float32), device="EMU").realize()


def test_eager_calls_have_a_stream_of_their_own(submitted):
    made = doubled(numbers()) + 1
    submitted.clear()
    made.realize()
    (first, stream), last = submitted
    assert first == "LibraryCall"
    assert stream, "a stream that is not stream 0"
    assert last == ("Launch", None), "a kernel that needs the result waits for it"
    np.testing.assert_array_equal(made.numpy(), 2 * np.arange(COUNT) + 1)


def test_a_kernel_with_other_memory_runs_beside(submitted):
    device = Device["EMU"]
    x, out, other = numbers(), numbers(), numbers(5)
    device.call(twice(Doubled("x"), "EMU", (out.uop.buffer._buf, x.uop.buffer._buf)))
    submitted.clear()
    made = (other + 1).realize()
    assert submitted == [("Launch", 0)]
    assert device.driver.beside is not None
    np.testing.assert_array_equal(made.numpy(), np.arange(5, 5 + COUNT) + 1)
    assert device.driver.beside is None, "a copy to the host comes after all"
    np.testing.assert_array_equal(out.numpy(), 2 * np.arange(COUNT))


def test_a_kernel_that_overwrites_what_a_call_reads_waits(submitted):
    device = Device["EMU"]
    x, out = numbers(), numbers()
    device.call(twice(Doubled("x"), "EMU", (out.uop.buffer._buf, x.uop.buffer._buf)))
    submitted.clear()
    x.assign(x * 0).realize()
    assert submitted == [("Launch", None)]
    np.testing.assert_array_equal(out.numpy(), 2 * np.arange(COUNT))


def test_without_the_wait_the_emulator_finds_it():
    device = Device["EMU"]
    x, out = numbers(), numbers()
    device.call(twice(Doubled("x"), "EMU", (out.uop.buffer._buf, x.uop.buffer._buf)))
    device.driver.submit(Fill(x.uop.buffer._buf, 0, 4 * COUNT), device.driver.stream_0)
    with pytest.raises(KernelError, match="nothing orders the two"): device.synchronize()


def test_in_a_graph_calls_follow_one_another_and_kernels_do_not():
    @TinyJit
    def step(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return doubled(x, "a").realize(), doubled(x + 1, "b").realize(), (x * 3).realize()
    for i in range(4):
        a, b, c = step(numbers(i))
        whole = np.arange(i, i + COUNT)
        np.testing.assert_array_equal(a.numpy(), 2 * whole)
        np.testing.assert_array_equal(b.numpy(), 2 * (whole + 1))
        np.testing.assert_array_equal(c.numpy(), 3 * whole)
    assert [call.src[0].arg for call in step.captured.linear.src] == ["graph"]


def test_edges_of_calls():
    chain, call = EdgeChain(132), LibraryCall("x", (), (), lambda stream: None)
    assert chain.add(call, []) == ()
    assert chain.add(Fill(0, 0, 4), []) == ()
    assert chain.add(call, [1]) == (0, 1), "one after the other, though no data asks for it"
