"""What is said of plans for L2, and of windows, that cannot be."""
from __future__ import annotations

import pytest

from tinygrad_nv import Device, Tensor
from tinygrad_nv.errors import DriverError
from tinygrad_nv.runtime.driver import Launch, Window
from tinygrad_nv.runtime.emulated.driver import EmulatedDriver, properties
from tinygrad_nv.runtime.l2 import MIB, Range, persisting, plan, tensor_range

NOTHING = b".version 7.8\n.target sm_80\n.address_size 64\n.visible .entry nothing() { ret; }\n"


@pytest.mark.parametrize("wrong", [Range(0, 0), Range(0, -5), Range(-1, 5), Range(0, 5, reads=-1)])
def test_ranges_that_are_none(wrong: Range):
    with pytest.raises(DriverError) as caught: plan(properties("sm_90a"), [wrong])
    assert caught.value.found.startswith(f"{wrong.nbytes} bytes at ")
    assert caught.value.found.endswith(f"read {wrong.reads:g} times a step")
    assert caught.value.expected == "a range of at least one byte, read 0 times or more"


def test_one_plan_at_a_time():
    x, device = Tensor.ones(64, device="EMU").contiguous().realize(), Device["EMU"]
    made = plan(device.driver.properties, [tensor_range(x)], 1000 * MIB)
    with persisting(device, made):
        with pytest.raises(DriverError) as caught, persisting(device, made): pass
        assert device.window == made.window, "the first stays in force"
    assert caught.value.found == "a second plan for L2 on EMU"
    assert caught.value.expected == "one at a time"
    assert caught.value.fix == "plan for all ranges at once"


@pytest.mark.parametrize("devices", [("EMU", "EMU:1"), "CPU"])
def test_a_tensor_without_memory_on_one_device_of_ours(devices: str | tuple[str, ...]):
    x = Tensor.ones(8)
    with pytest.raises(DriverError) as caught:
        tensor_range(x.shard(devices, 0) if isinstance(devices, tuple) else x.to(devices).contiguous())
    assert caught.value.found == f"a tensor on {devices}"
    assert caught.value.expected == "memory of one device, CUDA or EMU"
    assert caught.value.fix == "give each shard to the device that holds it"


@pytest.fixture
def gpu() -> EmulatedDriver: return EmulatedDriver()


def launch(gpu: EmulatedDriver, window: Window) -> None:
    gpu.submit(Launch(gpu.load(NOTHING).function("nothing"), (1, 1, 1), (1, 1, 1), window=window))


@pytest.mark.parametrize(("offset", "nbytes", "ratio", "found", "expected"), [
    (0, (128 << 20) + 1, 1.0, "a window of 134217729 bytes", "1 to 134217728 on this device"),
    (0, 0, 1.0, "a window of 0 bytes", "1 to 134217728 on this device"),
    (0, 1024, 1.5, "a window with hit ratio 1.5", "0 to 1"),
    (0, 1024, -0.1, "a window with hit ratio -0.1", "0 to 1"),
    (512, 1024, 1.0, "a window of 1024 bytes at 0x", "bytes inside one allocation"),
    (-1 << 20, 1024, 1.0, "a window of 1024 bytes at ", "bytes inside one allocation")])
def test_a_window_that_is_wrong(gpu: EmulatedDriver, offset: int, nbytes: int, ratio: float, found: str,
                                expected: str):
    address = gpu.alloc(1024)
    gpu.set_persisting_l2(1024)
    with pytest.raises(DriverError) as caught: launch(gpu, Window(address + offset, nbytes, ratio))
    assert caught.value.found.startswith(found)
    assert caught.value.expected == expected


def test_a_window_while_nothing_is_set_aside(gpu: EmulatedDriver):
    window = Window(gpu.alloc(1024), 1024)
    with pytest.raises(DriverError) as caught: launch(gpu, window)
    assert caught.value.found == "a launch with a window, and no L2 is set aside for it"
    assert caught.value.expected == "set_persisting_l2 before the launch"


def test_more_than_can_be_set_aside(gpu: EmulatedDriver):
    limit = gpu.properties.persisting_l2_limit
    for nbytes in (-1, limit + 1):
        with pytest.raises(DriverError) as caught: gpu.set_persisting_l2(nbytes)
        assert caught.value.found == f"{nbytes} bytes of L2 to set aside"
        assert caught.value.expected == f"0 to {limit} on this device"
