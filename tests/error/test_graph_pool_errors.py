"""What is said of inputs, steps and settings of a graph pool, and of plans for L2, that cannot be."""
from __future__ import annotations

from collections.abc import Iterator
from threading import Thread
from typing import Any

import numpy as np
import pytest
from tinygrad.helpers import Context

from tinygrad_nv import Device, Tensor, TinyJit, Variable, dtypes
from tinygrad_nv.errors import DriverError, GraphError
from tinygrad_nv.graphs import GraphPool, Input
from tinygrad_nv.runtime.driver import Launch, Window
from tinygrad_nv.runtime.emulated.driver import EmulatedDriver, properties
from tinygrad_nv.runtime.l2 import MIB, Range, persisting, plan, tensor_range

INPUTS = {"x": Input((4,), dtypes.float32), "lengths": Input((), dtypes.int32)}
X, LENGTHS = np.ones((3, 4), np.float32), np.zeros(3, np.int32)
N = Variable("n", 0, 9)


@pytest.fixture(autouse=True)
def emu() -> Iterator[None]:
    with Context(DEV="EMU"): yield


def pool_of(step: Any = None, inputs: dict[str, Input] = INPUTS, **more: Any) -> GraphPool:
    return GraphPool(step or (lambda x, lengths: x * lengths.reshape(-1, 1)), inputs, (2, 4), "EMU", **more)


def refused(*words: str) -> Any: return pytest.raises(GraphError, match="(?s)" + ".*".join(words))


@pytest.mark.parametrize(("given", "words"), [
    ({"x": X}, ["input 'lengths' is missing", "expected: x, lengths"]),
    ({}, ["input 'x' is missing"]),
    ({"x": X, "lengths": LENGTHS, "tables": LENGTHS},
     ["there is no input 'tables'", "x, lengths, and bound Variables by other names"]),
    ({"x": X, "lengths": LENGTHS, "n": N}, ["there is no input 'n'"]),
    ({"x": X[:, :3], "lengths": LENGTHS},
     [r"input 'x' has shape \(3, 3\) and is float32", r"rows of shape \(4,\) and float32"]),
    ({"x": X.astype(np.float64), "lengths": LENGTHS}, [r"input 'x' has shape \(3, 4\) and is float64"]),
    ({"x": np.float32(1), "lengths": LENGTHS}, ["input 'x' has shape .* and is float32"]),
    ({"x": X, "lengths": [0, 0, 0]}, ["input 'lengths' .* is list", "an array or a Tensor"]),
    ({"x": X, "lengths": np.array(3, np.int32)}, [r"input 'lengths' has shape \(\) and is int32"]),
    ({"x": X, "lengths": LENGTHS[:2]}, ["input 'lengths' has 2 rows, 'x' has 3", "as many rows"]),
    ({"x": X[:0], "lengths": LENGTHS[:0]}, ["a batch of 0 rows", "1 to 4: sizes 2, 4"]),
    ({"x": np.ones((5, 4), np.float32), "lengths": np.zeros(5, np.int32)},
     ["a batch of 5 rows", "1 to 4: sizes 2, 4", "split the batch, or make the pool with a larger size"]),
])
def test_inputs_that_are_not_what_was_said(given: dict[str, Any], words: list[str]):
    with refused(*words): pool_of()(**given)


def test_tensors_that_are_not_what_was_said():
    pool, there = pool_of(), Tensor(X).realize()
    with refused(r"input 'x' has shape \(3, 4\) and is int32"):
        pool(x=there.cast(dtypes.int32), lengths=LENGTHS)
    with refused("input 'x' is on CPU", "an array, or a Tensor on EMU", r"fix:   .to\('EMU'\)"):
        pool(x=Tensor(X, device="CPU"), lengths=LENGTHS)
    with refused("input 'b' has shape .*a Tensor \\(numpy has no such type\\)"):
        pool_of(lambda b: b + 1, {"b": Input((2,), dtypes.bfloat16)})(b=np.ones((1, 2), np.uint16))


def test_variables_that_change_their_names():
    pool = pool_of(lambda x, lengths, n: x + n)
    with pytest.raises(TypeError, match="'m'"): pool(x=X, lengths=LENGTHS, m=Variable("m", 0, 1).bind(1))
    pool(x=X, lengths=LENGTHS, n=N.bind(1))
    with refused("Variables none", "expected: n, as before"): pool(x=X, lengths=LENGTHS)
    with refused("Variables m, n", "expected: n, as before"):
        pool(x=X, lengths=LENGTHS, n=N.bind(1), m=Variable("m", 0, 1).bind(1))
    with refused("Variables none", "expected: n, as before"): pool.capture()


@pytest.mark.parametrize(("step", "words"), [
    (lambda x, lengths: x.sum(), [r"the step returns something of shape \(\) for a batch of 4",
                                  "a row for each of the batch", "padding would be in the sum"]),
    (lambda x, lengths: {"a": x, "b": x[:1]}, [r"returns output 'b' of shape \(1, 4\) for a batch of 4"]),
    (lambda x, lengths: (x, x.to("CPU")), ["returns output 1 on CPU", "a Tensor on EMU"]),
    (lambda x, lengths: [x, 3], ["returns output 1 of type int", "a tuple, list or dict of Tensors"]),
    (lambda x, lengths: None, ["returns something of type NoneType"]),
    (lambda x, lengths: (), ["the step returns nothing"]),
])
def test_results_that_are_no_rows(step: Any, words: list[str]):
    with refused(*words): pool_of(step)(x=X, lengths=LENGTHS)


def test_a_pool_inside_a_tinyjit():
    pool = pool_of()
    @TinyJit
    def outer(x: Tensor) -> Tensor: return (pool(x=X, lengths=LENGTHS) + x.sum()).realize()
    outer(Tensor(X).realize())
    with refused("a GraphPool is called while a step is captured", "remove the TinyJit"):
        outer(Tensor(X).realize())
    np.testing.assert_array_equal(pool(x=X, lengths=LENGTHS + 2).numpy(), X * 2)


def test_a_pool_in_the_middle_of_its_own_call():
    """Of another thread, in fact: here while the step reads a number, and so runs as it is written."""
    found: list[GraphError] = []
    def other() -> None:
        try: pool(x=X, lengths=LENGTHS)
        except GraphError as error: found.append(error)
    def step(x: Tensor, lengths: Tensor) -> Tensor:
        biggest = x.max().item()
        (thread := Thread(target=other)).start()
        thread.join()
        return x + biggest
    pool = pool_of(step)
    for _ in range(2): np.testing.assert_array_equal(pool(x=X, lengths=LENGTHS).numpy(), X + X.max())
    with refused("in the middle of its own call", "one call at a time", "take turns"): raise found[0]
    assert len(found) == 2


def test_extents_that_a_variable_has_are_named():
    pool = pool_of(lambda x, lengths, n: x.reshape(-1, 4, 1).expand(x.shape[0], 4, n + 1))
    with refused(r"something of shape \(4, 4, \(n\+1\)\) for a batch of 4"):
        pool(x=X, lengths=LENGTHS, n=N.bind(1))


def test_a_variable_that_the_step_binds():
    with refused("the step binds Variable n itself", "given in every call", r"pool\(…, n=Variable"):
        pool_of(lambda x, lengths: x + N.bind(1))(x=X, lengths=LENGTHS)


@pytest.mark.parametrize(("calls", "does"), [(1, "captures"), (2, "replays")])
def test_a_tinyjit_inside_a_pool(calls: int, does: str):
    inner = TinyJit(lambda x: (x + 1).realize())
    for _ in range(calls): inner(Tensor(np.zeros((4, 4), np.float32)).realize())
    with refused(f"{does} a TinyJit while it is captured", "the pool captures the whole step"):
        pool_of(lambda x, lengths: inner(x) * 2)(x=X, lengths=LENGTHS)


@pytest.mark.parametrize("how", ["bound", "replaced", "gone"])
def test_weights_that_are_replaced(how: str):
    held = {"w": Tensor(np.full(4, 3, np.float32)).realize()}
    pool = pool_of(lambda x, lengths: x * held["w"])
    np.testing.assert_array_equal(pool(x=X, lengths=LENGTHS).numpy(), X * 3)
    other = Tensor(np.full(4, 5, np.float32)).realize()
    if how == "bound": held["w"] = other
    elif how == "replaced": held["w"].replace(other)
    else: del held["w"]
    with refused(r"a Tensor of shape \(4,\) that the step uses has been replaced since size 4 was captured",
                 "weights and caches that are kept", r"pool.reset\(\)"):
        pool(x=X, lengths=LENGTHS)
    if how == "gone": return
    pool.reset()
    np.testing.assert_array_equal(pool(x=X, lengths=LENGTHS).numpy(), X * 5)


def test_a_pool_that_is_closed():
    pool = pool_of()
    pool(x=X, lengths=LENGTHS)
    pool.close()
    with refused(r"called after close\(\)"): pool(x=X, lengths=LENGTHS)


@pytest.mark.parametrize(("make", "words"), [
    (lambda: pool_of(inputs={}), ["a pool without inputs"]),
    (lambda: pool_of(inputs={"x": Input((4, 0))}), [r"input 'x' has rows of shape \(4, 0\)"]),
    (lambda: pool_of(inputs={"x": Input((), dtypes.uint8, -1)}), ["'x' of dtypes.uchar is padded with -1"]),
    (lambda: pool_of(inputs={"x": Input((), dtypes.int32, 0.5)}),
     ["is padded with 0.5", "a value of dtypes.int"]),
    (lambda: pool_of(inputs={"x": Input((), dtypes.int32, float("nan"))}), ["is padded with nan"]),
    (lambda: GraphPool(lambda x: x, INPUTS, ()), ["sizes none", "at least one"]),
    (lambda: GraphPool(lambda x: x, INPUTS, (0, 2)), ["sizes 0, 2", "each 1 or more"]),
    (lambda: GraphPool(lambda x: x, INPUTS, 4), ["sizes 4", "a list of Python's integers"]),
    (lambda: GraphPool(lambda x: x, INPUTS, (True, 2)), ["sizes True, 2", "Python's integers"]),
    (lambda: pool_of(limit_bytes=0), ["a limit of 0 bytes"]),
    (lambda: pool_of(staging=1), ["1 page-locked buffers", "2 or more"]),
    (lambda: pool_of().capture((3,)), ["no size 3", "one of 2, 4"]),
    (lambda: pool_of().capture(x=X), ["input 'x' for a capture", "Variables alone"]),
])
def test_pools_that_cannot_be(make: Any, words: list[str]):
    with refused(*words): make()


# **** plans for L2 ****

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
