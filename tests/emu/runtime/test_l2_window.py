"""An access-policy window on DEV=EMU: which launches carry it, what the emulated driver refuses, and that
answers stay what they are."""
from __future__ import annotations

import numpy as np
import pytest
from tinygrad.engine.realize import graph_cache
from tinygrad.uop.ops import Ops

from tests.support.patterns.on_emu import emu, equal, floats  # noqa: F401
from tinygrad_nv import Device, Tensor, TinyJit
from tinygrad_nv.errors import DriverError
from tinygrad_nv.runtime.driver import Launch, Window, Work
from tinygrad_nv.runtime.emulated.driver import EmulatedDriver
from tinygrad_nv.runtime.graph import NVGraph
from tinygrad_nv.runtime.l2 import MIB, L2Plan, Range, persisting, plan, tensor_range

FAR_MORE = 1000 * MIB   # bytes a step, so that nothing stays by itself


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """The launches that run, eager or of a graph."""
    heard: list[Launch] = []
    run = EmulatedDriver.run

    def listening(self: EmulatedDriver, work: Work, *args: object, **kwargs: object) -> object:
        if isinstance(work, Launch): heard.append(work)
        return run(self, work, *args, **kwargs)

    monkeypatch.setattr(EmulatedDriver, "run", listening)
    return heard


def windows(ran: list[Launch]) -> list[Window | None]:
    """What the launches since the last call carried."""
    found = [launch.window for launch in ran]
    ran.clear()
    assert found
    return found


def planned(tensor: Tensor) -> L2Plan:
    made = plan(Device["EMU"].driver.properties, [tensor_range(tensor)], FAR_MORE)
    assert made.window is not None
    return made


def test_eager_launches_carry_the_window_while_it_is_in_force(ran: list[Launch]):
    x, device = Tensor(floats(64)).realize(), Device["EMU"]
    made = planned(x)
    with persisting(device, made):
        assert device.driver.set_aside_bytes == made.set_aside_bytes == 256
        equal((x + 1).realize(), floats(64) + 1)
        assert windows(ran) == [made.window]
    assert (device.driver.set_aside_bytes, device.window) == (0, None)
    equal((x + 2).realize(), floats(64) + 2)
    assert windows(ran) == [None]


def test_the_window_of_a_tensor_is_its_memory():
    base = Tensor(floats(64)).realize()
    whole, half = tensor_range(base), tensor_range(base[32:])
    assert (whole.nbytes, half.nbytes) == (256, 128)
    assert Device["EMU"].driver.properties.window_limit > whole.nbytes
    other = tensor_range(Tensor(floats(64)).realize())
    assert other.allocation != whole.allocation
    assert whole.allocation == whole.address


def test_launches_of_a_graph_carry_it_too_and_lose_it(ran: list[Launch]):
    weight = Tensor(floats(8, 8)).realize()
    jit = TinyJit(lambda x: ((x @ weight).relu().contiguous() + 1).realize())

    def step(seed: int) -> list[Window | None]:
        x = np.random.default_rng(seed).integers(-3, 3, (8, 8)).astype(np.float32)
        found = jit(Tensor(x).realize()).numpy()
        np.testing.assert_allclose(found, np.maximum(x @ floats(8, 8), 0) + 1, rtol=1e-5, atol=1e-5)
        return windows(ran)
    for seed in range(3): assert set(step(seed)) == {None}
    made = planned(weight)
    with persisting(Device["EMU"], made):
        for seed in (3, 4): assert set(step(seed)) == {made.window}
    assert set(step(5)) == {None}
    assert jit.captured is not None
    graphs = [graph_cache[call.src[0]] for call in jit.captured.linear.src
              if call.src[0].op is Ops.CUSTOM_FUNCTION]
    assert [type(graph) for graph in graphs] == [NVGraph]


def test_a_plan_without_a_window_changes_nothing(ran: list[Launch]):
    x, device = Tensor(floats(64)).realize(), Device["EMU"]
    with persisting(device, plan(device.driver.properties, [tensor_range(x)])) as made:
        assert made.window is None
        (x + 1).realize()
    assert windows(ran) == [None]


def test_it_is_taken_back_after_an_exception():
    x, device = Tensor(floats(64)).realize(), Device["EMU"]
    with pytest.raises(KeyError), persisting(device, planned(x)): raise KeyError
    assert (device.driver.set_aside_bytes, device.window) == (0, None)


# **** what the emulated driver refuses ****

COPY = """.version 7.8
.target sm_80
.address_size 64
.visible .entry nothing() { ret; }
"""


@pytest.fixture
def gpu() -> EmulatedDriver: return EmulatedDriver()


def launch(gpu: EmulatedDriver, window: Window | None) -> None:
    gpu.submit(Launch(gpu.load(COPY.encode()).function("nothing"), (1, 1, 1), (1, 1, 1), window=window))


def test_a_window_that_is_right(gpu: EmulatedDriver):
    address = gpu.alloc(1 << 20)
    gpu.set_persisting_l2(1 << 20)
    launch(gpu, Window(address, 1 << 20, 0.5))
    launch(gpu, Window(address + 256, 4096, 0))


def test_a_window_over_memory_that_was_given_back(gpu: EmulatedDriver):
    address = gpu.alloc(1024)
    gpu.set_persisting_l2(1024)
    launch(gpu, Window(address, 1024))
    gpu.free(address)
    with pytest.raises(DriverError, match="a window of 1024 bytes"): launch(gpu, Window(address, 1024))


def test_a_node_keeps_its_window(gpu: EmulatedDriver):
    address, function = gpu.alloc(1024), gpu.load(COPY.encode()).function("nothing")
    graph = gpu.graph()
    node = graph.add(Launch(function, (1, 1, 1), (1, 1, 1)))
    with pytest.raises(DriverError, match="node 0 is updated with another access-policy window"):
        graph.instantiate().update(node, Launch(function, (1, 1, 1), (1, 1, 1), window=Window(address, 1024)))


def test_ranges_of_one_allocation_share_a_window(gpu: EmulatedDriver):
    address = gpu.alloc(8 * MIB)
    pages = [Range(address + page * MIB, MIB, allocation=address) for page in (0, 1, 2, 5)]
    made = plan(gpu.properties, pages, FAR_MORE)
    assert made.window == Window(address, 6 * MIB)
    gpu.set_persisting_l2(made.set_aside_bytes)
    launch(gpu, made.window)
