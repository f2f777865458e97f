"""Timelines on DEV=EMU, and on DEV=CUDA over the fake driver: the same answers, every launch once, a trace
that is valid, and nothing left."""
from __future__ import annotations

import functools
import itertools
import json
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
from tinygrad.engine import realize
from tinygrad.helpers import to_function_name

from tests.support.graphs.pool_case import Paged, batch, device, eager, pool_of, same
from tests.support.patterns.on_emu import emu  # noqa: F401
from tests.support.runtime.nvml_fake import FakeNVML
from tests.support.runtime.on_cuda import cuda
from tinygrad_nv import Device, Tensor, TinyJit, Variable, dtypes, explain, hooks, layer, timeline
from tinygrad_nv.errors import KernelError
from tinygrad_nv.patterns.program import Output, program
from tinygrad_nv.runtime.device import NVDevice
from tinygrad_nv.runtime.driver import Launch
from tinygrad_nv.runtime.emulated.driver import EmulatedDriver
from tinygrad_nv.runtime.observe import ranges, telemetry
from tinygrad_nv.runtime.observe import timeline as timelines
from tinygrad_nv.tile.database import Entry, store, toolchain
from tinygrad_nv.tile.launch import LaunchConfig, Zeroed

KERNELS = 8                         # of `model`
ROWS = Variable("rows", 1, 16)


def integers(*shape: int, seed: int = 0) -> Tensor:
    values = np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float16)
    return Tensor(values).realize()


@functools.cache
def weights() -> list[Tensor]: return [integers(32, 32, seed=seed) for seed in range(4)]


def model(x: Tensor) -> Tensor:
    """Integers in, integers out: whatever order things are done in, bits are the same."""
    w = weights()
    for i in range(2):
        with layer(f"layers.{i}"):
            with layer("up"): h = ((x @ w[2 * i]) / 64).trunc().contiguous()
            with layer("down"): x = (x + ((h @ w[2 * i + 1]) / 64).trunc()).contiguous()
    return x


@pytest.fixture
def launched(monkeypatch) -> list[str]:
    """The names of all kernels that the emulator runs from now on."""
    names: list[str] = []
    run = EmulatedDriver.run
    def counted(self, work, into, *more: Any, **named: Any) -> Any:
        if isinstance(work, Launch): names.append(work.function.name)
        return run(self, work, into, *more, **named)
    monkeypatch.setattr(EmulatedDriver, "run", counted)
    return names


def names_of(t: timelines.Timeline) -> Counter[str]:
    """As the module has them."""
    return Counter(to_function_name(k.name) for k in t.kernels if not k.is_copy)


def untouched() -> bool:
    opened = Device["EMU"]
    assert isinstance(opened, NVDevice)
    return opened.observer is None and not hooks.is_watched() and not ranges.tracking()


# **** the same answers, every launch once ****

def test_eager_kernels(launched):
    x = integers(16, 32, seed=9)
    wanted = model(x).numpy()
    launched.clear()
    with timeline() as t: found = model(x).realize()
    assert names_of(t) == Counter(launched)
    np.testing.assert_array_equal(found.numpy(), wanted)
    assert all(k.seconds > 0 and k.device == "EMU" for k in t.kernels)
    assert untouched()


def test_replays_of_a_captured_step_with_a_variable(launched):
    step = TinyJit(lambda x, rows: model(x[:rows]).sum(0).realize())
    xs = [integers(16, 32, seed=seed) for seed in range(6)]
    wanted = [model(x[:4 + i]).sum(0).numpy() for i, x in enumerate(xs)]
    for i in range(3): np.testing.assert_array_equal(step(xs[i], ROWS.bind(4 + i)).numpy(), wanted[i])
    launched.clear()
    with timeline() as t:
        for i in (3, 4): np.testing.assert_array_equal(step(xs[i], ROWS.bind(4 + i)).numpy(), wanted[i])
    assert names_of(t) == Counter(launched)
    assert len(launched) > 4
    np.testing.assert_array_equal(step(xs[5], ROWS.bind(9)).numpy(), wanted[5])
    assert untouched()


def test_a_step_captured_inside_replays_afterwards():
    x = integers(16, 32, seed=9)
    wanted, step = model(x).numpy(), TinyJit(lambda x: model(x).realize())
    with timeline() as t:
        for _ in range(3): np.testing.assert_array_equal(step(x).numpy(), wanted)
    layers = {k.layer for k in t.kernels if not k.is_copy}
    assert layers == {f"layers.{i}.{s}" for i in (0, 1) for s in ("up", "down")}
    np.testing.assert_array_equal(step(integers(16, 32, seed=9)).numpy(), wanted)


@pytest.mark.slow
def test_a_pool_runs_kernel_by_kernel(launched):
    opened = device()
    plain, pooled = Paged(opened.device), Paged(opened.device)
    pool = pool_of(pooled, device=opened.device)
    given = [batch(2, seed) for seed in range(3)]
    wanted = [eager(plain, each, pool._size_of[2], opened.device) for each in given]
    same(pool(**given[0]), wanted[0])
    launched.clear()
    with timeline() as t: same(pool(**given[1]), wanted[1])
    assert names_of(t) == Counter(launched)
    assert len(launched) > 1
    same(pool(**given[2]), wanted[2])


def test_memory_that_must_be_zero_is():
    """A kernel that adds to what is in its buffer, which is zero before each launch."""
    text = """.version 7.8
.target sm_80
.address_size 64
.visible .entry count(.param .u64 out)
{
    .reg .b32 %r;
    .reg .b64 %a;
    ld.param.u64 %a, [out];
    atom.global.add.u32 %r, [%a], 1;
    ret;
}
"""
    def counted() -> Tensor:
        return Tensor(program("count", text, "EMU", [Output((1,), dtypes.uint32)], [], grid=(3, 1, 1),
                              block=(1, 1, 1), nbytes=4, launch=LaunchConfig(zeroed=(Zeroed(0, 4),)))[0])
    with timeline() as t:
        for _ in range(2): assert counted().item() == 3
    assert names_of(t)["count"] == 2


def test_a_kernel_that_goes_wrong_is_told_and_leaves_nothing():
    text = """.version 7.8
.target sm_80
.address_size 64
.visible .entry wild(.param .u64 out)
{
    .reg .b64 %a;
    ld.param.u64 %a, [out];
    st.global.u32 [%a+1048576], 1;
    ret;
}
"""
    with pytest.raises(KernelError, match="wild"), timeline():
        Tensor(program("wild", text, "EMU", [Output((1,), dtypes.uint32)], [], block=(1, 1, 1))[0]).realize()
    assert untouched()
    assert Tensor([1, 2]).add(1).tolist() == [2, 3]


def test_an_error_in_the_block_passes_and_what_there_was_is_written(tmp_path):
    def fails() -> None:
        model(integers(16, 32)).realize()
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), timeline(tmp_path / "t.json") as t: fails()
    assert untouched()
    assert len([k for k in t.kernels if not k.is_copy]) == KERNELS
    assert len(json.loads((tmp_path / "t.json").read_text())["traceEvents"]) > 4


# **** what is said of a kernel ****

def test_records_have_launch_layer_and_prediction():
    x = integers(16, 32, seed=9)
    with timeline() as t: model(x).realize()
    first = next(kernel for kernel in t.kernels if not kernel.is_copy)    # weights may be copied first
    assert (first.layer, first.op, first.template) == ("layers.0.up", "__matmul__", "gemv")
    assert first.block[0] > 1
    assert first.flops == 2 * 16 * 32 * 32
    assert first.forecast is not None
    assert first.forecast.model == "cost model"
    assert first.ratio == first.seconds / first.forecast.seconds
    with timeline() as t: (x + 1).realize()
    assert t.kernels[0].forecast is not None
    assert t.kernels[0].forecast.model == "roofline"


def test_a_prediction_of_a_tuned_schedule_says_how_it_is_known(tmp_path, monkeypatch):
    monkeypatch.setenv("NV_SCHEDULES", str(tmp_path / "schedules.json"))
    x, w = integers(16, 32, seed=9), integers(32, 32, seed=8)
    record, = explain(x @ w).kernels
    for how, gpu, said in (("modelled", "h200", "cost model"), ("modelled", "h100", "modelled for h100"),
                           ("measured", "", "cost model")):
        entry = Entry(record.spec, "sm_90a", toolchain(), record.schedule, 4.25e-6, how, gpu)
        store([entry])
        with timeline() as t: (x @ w).realize()
        assert t.kernels[0].forecast.model == said
        assert (t.kernels[0].forecast.seconds == 4.25e-6) == said.startswith("modelled")
        assert ("measured: 4.2 µs" in str(explain(x @ w))) == (how == "measured")
        assert ("modelled for h100: 4.2 µs" in str(explain(x @ w))) == (gpu == "h100")
        assert f", {said}" in t.table()


def test_predictions_are_for_the_rows_there_are():
    step = TinyJit(lambda x, rows: (x[:rows] @ weights()[0]).realize())
    x = integers(16, 32)
    for rows in (3, 4): step(x, ROWS.bind(rows))
    with timeline() as t:
        for rows in (1, 16): step(x, ROWS.bind(rows))
    few, many = (k for k in t.kernels if k.template)
    assert many.flops == 16 * few.flops
    assert few.forecast.seconds < many.forecast.seconds


def test_the_table_sums_up():
    with timeline() as t:
        for _ in range(3): model(integers(16, 32)).realize()
    lines = t.table().splitlines()
    assert lines[0].split()[:3] == ["kernel", "template", "count"]
    counts = {line.split()[0]: int(line.split()[2]) for line in lines[1:-2]}
    assert sum(counts.values()) == 3 * KERNELS == int(lines[-2].split()[1])
    assert lines[-1] == "times are of the emulation, not of a GPU"
    layers = t.table("layer")
    assert all(layers.count(f"layers.{i}.{s} ") == 1 for i in (0, 1) for s in ("up", "down"))


def test_tables_of_nothing():
    with timeline() as t: pass
    assert t.table().splitlines()[-1].split() == ["all", "0", "0.0", "-", "-"]


# **** the trace ****

def test_the_trace_is_valid(tmp_path):
    path = tmp_path / "trace.json"
    with timeline(path) as t: model(integers(16, 32)).numpy()
    trace = json.loads(path.read_text())
    assert trace["metadata"]["times"] == "times are of the emulation, not of a GPU"
    assert trace["metadata"]["predicted_for"] == {"EMU": "H100 SXM"}
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} <= {"X", "M", "C"}
    spans = [event for event in events if event["ph"] == "X"]
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in spans)
    kinds = Counter(event["cat"] for event in spans)
    assert kinds["kernel"] == kinds["predicted"] == sum(names_of(t).values()) == KERNELS
    assert kinds["layer"] == 6  # two layers with two parts each
    _properly_nested([event for event in spans if event["tid"] == 0])
    predicted = [event for event in spans if event["cat"] == "predicted"]
    for one, following in itertools.pairwise(predicted):
        assert following["ts"] == pytest.approx(one["ts"] + one["dur"], abs=2e-3)
    args = next(event for event in spans if event["cat"] == "kernel")["args"]
    assert set(args) == {"layer", "op", "template", "grid", "block", "bytes", "flops", "measured_us",
                         "predicted_us", "ratio", "bound", "predicted_by", "reason"}
    named = {(event["pid"], event.get("tid")) for event in events if event["ph"] == "M"}
    assert {(event["pid"], event["tid"]) for event in spans} <= named


def _properly_nested(events: list[dict[str, Any]]) -> None:
    """Of two events one is inside the other, or they are apart; and kernels are in their layers."""
    def interval(event: dict[str, Any]) -> tuple[int, int]:
        begin = round(event["ts"] * 1e3)
        return begin, begin + round(event["dur"] * 1e3)
    for i, one in enumerate(events):
        for two in events[i + 1:]:
            (a, b), (c, d) = interval(one), interval(two)
            assert b <= c or d <= a or (a <= c and d <= b) or (c <= a and b <= d)
    for kernel in (event for event in events if event["cat"] == "kernel"):
        a, b = interval(kernel)
        around = [event["args"]["layer"] for event in events if event["cat"] == "layer"
                  and interval(event)[0] <= a and b <= interval(event)[1]]
        assert kernel["args"]["layer"] in around


# **** drivers of GPUs ****

def test_on_a_gpu_each_pair_is_held_back_and_counters_are_read(monkeypatch):
    """Over a driver that is not called emulated: a kernel that waits, an event, the launch, an event."""
    done: list[str] = []
    class Recorded(EmulatedDriver):
        emulated = False

        def submit(self, work, stream=None):
            done.append(work.function.name if isinstance(work, Launch) else type(work).__name__)
            super().submit(work, stream)

        def record(self, event, stream=None):
            done.append("event")
            super().record(event, stream)
    hold = timelines._hold
    monkeypatch.setattr(timelines, "_hold", lambda opened: hold(opened, 3))
    monkeypatch.setitem(sys.modules, "pynvml", FakeNVML())
    monkeypatch.setattr(telemetry, "_of_ordinal", lambda nvml, ordinal: 0)
    opened = device(Recorded)
    x = Tensor([1.0, 2.0], device=opened.device).realize()
    with timeline() as t: assert (x * 2).tolist() == [2.0, 4.0]
    assert "times" not in t.notes
    assert list(t.notes["empty_pair_us"]) == [opened.device]
    kernel = t.kernels[0].name
    at = done.index(kernel)
    assert done[at - 2:at + 2] == ["hold", "event", kernel, "event"]
    assert done.count("hold") == 2 * 5 + 1  # nothing, five times; the kernel
    counters = [event for event in t.trace()["traceEvents"] if event["ph"] == "C"]
    assert {event["name"] for event in counters} == {"SM clock", "memory clock", "power", "memory used",
                                                     "temperature"}
    assert {event["args"]["MHz"] for event in counters if event["name"] == "SM clock"} == {1980}


def test_launches_of_beams_candidates_are_not_recorded():
    x = integers(16, 32)
    call = (x + 1).schedule_linear().src[0]
    with timeline() as t: next(realize.time_call(call.replace()))
    assert not t.kernels


def test_replays_are_timed_kernel_by_kernel(monkeypatch):
    hold = timelines._hold
    monkeypatch.setattr(timelines, "_hold", lambda opened: hold(opened, 3))
    values = np.random.default_rng(0).integers(-3, 4, (3, 16, 32)).astype(np.float32)
    with cuda("PTX"):
        def step(x: Tensor) -> Tensor:
            with layer("one"): y = (x * 2 + 1).contiguous()
            with layer("two"): return (y.sum(-1) * 3).realize()
        jitted = TinyJit(step)
        with timeline() as t:
            for x in values:
                np.testing.assert_array_equal(jitted(Tensor(x).realize()).numpy(), (x * 2 + 1).sum(-1) * 3)
        kernels = [k for k in t.kernels if not k.is_copy]
        assert len(kernels) == 6
        assert [k.layer for k in kernels] == ["one", "two"] * 3
        assert {k.device for k in kernels} == {"CUDA"}
        assert t.notes["empty_pair_us"]["CUDA"] >= 0
        assert "times" not in t.notes
        again = jitted(Tensor(values[0]).realize()).numpy()
        np.testing.assert_array_equal(again, (values[0] * 2 + 1).sum(-1) * 3)
        del jitted
