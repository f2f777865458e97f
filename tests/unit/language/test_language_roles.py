"""Roles and pipes on the CPU and in the interpreter: the sequential meaning. Placement and movement: each
is kept, or refused in words. `verify.numerics` on functions of tiles: their ranges are looked at while a
kernel is debugged. What policies of dtypes say is what stores and sums of kernels do."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tinygrad import Device, Tensor, dtypes
from tinygrad import Tensor as Plain

from tinygrad_nv import TinyJit, explain, timeline
from tinygrad_nv.errors import EffectError, NumericsError
from tinygrad_nv.language import *


@kernel
def matmul(a: KTile["M", "K", f32], b: KTile["K", "N", f32], *, stages: int) -> OTile["M", "N", f32]:
    T = tile.context()
    pipe, acc = tile.pipe(stages), tile.zeros((T.m, T.n), f32)
    with tile.role("producer"):
        for k in tile.range_k(a.shape, T.k):
            pipe.acquire()
            pipe.commit(a[T.m, k], b[k, T.n])
    with tile.role("consumer"):
        for _ in tile.range_k(a.shape, T.k):
            x, y = pipe.wait()
            acc = tile.dot(x, y, acc)
            pipe.release()
    return acc


@pytest.mark.parametrize("stages", [1, 3])
def test_matmul(stages: int) -> None:
    Tensor.manual_seed(0)
    a, b = Tensor.randint(70, 200, low=-4, high=5).float(), Tensor.randint(200, 90, low=-4, high=5).float()
    wanted = a.numpy() @ b.numpy()
    np.testing.assert_array_equal(matmul(a, b, stages=stages).numpy(), wanted)
    np.testing.assert_array_equal(matmul.interpret(a, b, stages=stages), wanted)


def test_what_is_read() -> None:
    """A pipe's stages are an attribute of the loop in which the consumer waits; the producer has no loop."""
    a, b = Tensor.zeros(64, 128), Tensor.zeros(128, 64)
    made = matmul.program(a, b, stages=5)
    loops = [op for op in made.body.walk() if op.name == "for"]
    assert [op.attributes["pipe"] for op in loops] == [5]
    loads = [op for op in loops[0].regions[0].ops if op.name == "load_block"]
    assert [op.attributes["tensor"] for op in loads] == ["a", "b"]
    lines = matmul.fn.__code__.co_firstlineno
    assert all(op.line.number == lines + 7 for op in loads)


@kernel(grid=(1,))
def twice(x: KTile["R", "N", f32], out: OTile["R", "N", f32]):
    """A pipe that is filled again behind its consumer, around a loop of the kernel."""
    pipe = tile.pipe(2)
    total = 0.0
    for _ in tile.range(2):
        with tile.role("producer"):
            for k in tile.range(x.shape[0]):
                pipe.acquire()
                pipe.commit(x[k, :])
        with tile.role("consumer"):
            for k in tile.range(x.shape[0]):
                row = pipe.wait()
                total = total + tile.sum(row)
                out[k, :] = row * total
                pipe.release()


def test_a_pipe_that_is_filled_again() -> None:
    x = Tensor.randint(4, 8, low=-3, high=4).float().realize()
    rows, total = x.numpy(), 0.0
    for _ in range(2):
        wanted = []
        for row in rows:
            total += row.sum()
            wanted.append(row * total)
    np.testing.assert_array_equal(twice(x).numpy(), np.array(wanted))
    np.testing.assert_array_equal(twice.interpret(x), np.array(wanted))


@kernel(grid=lambda N: (cdiv(N, 64),))
def doubled(x: KTile["N", f32], out: OTile["N", f32]):
    rows = tile.block(tile.program_id(0) * 64, 64)
    out[rows] = x[rows] * 2


@kernel(grid=lambda N: (cdiv(N, 64),), schedule=Schedule(stages=1))
def columns(x: KTile["M", "N", f32], out: OTile["N", f32]):
    at = tile.block(tile.program_id(0) * 64, 64)
    total = tile.zeros((64,), f32)
    for rows in tile.range_m(x.shape, 16): total += tile.sum(x[rows, at], 0)
    out[at] = total


def test_device() -> None:
    """Tensors are made there, and those of elsewhere are refused by name."""
    here = Plain.ones(100).contiguous().realize()
    with device("EMU") as name:
        assert name == "EMU"
        x = Plain.ones(100).contiguous().realize()
        assert x.device == "EMU"
        np.testing.assert_array_equal(doubled(x).numpy(), np.full(100, 2, np.float32))
        with pytest.raises(EffectError, match=r"kernel doubled in device\(EMU\): x is on CPU"): doubled(here)
    assert Plain.ones(1).device == Device.DEFAULT
    with pytest.raises(EffectError, match=r"device\('DISK"), device("DISK:/tmp/x"): pass


def test_prefetch_into_smem() -> None:
    """A load in a loop can be ahead; one that is not, or a schedule of one stage, cannot."""
    x = Plain.ones(64, 70).contiguous().realize()
    with prefetch(x, into="smem", overlap="compute"):
        np.testing.assert_array_equal(columns(x).numpy(), np.full(70, 64, np.float32))
        with pytest.raises(EffectError, match="does not load it in a loop"): doubled(x.reshape(-1))
    on_gpu = x.to("EMU").realize()
    with prefetch(on_gpu, into="smem"):
        with pytest.raises(EffectError, match="has a schedule of 1 stage"): columns(on_gpu)
        made = columns.with_schedule(Schedule(stages=2))(on_gpu)
        np.testing.assert_array_equal(made.numpy(), np.full(70, 64, np.float32))


def test_prefetch_elsewhere() -> None:
    x = Plain.ones(64).contiguous().realize()
    words = r'prefetch\(into="l2"\) of tensors on CPU'
    with pytest.raises(EffectError, match=words), prefetch(x, into="l2"): pass
    with pytest.raises(EffectError, match="into='tape'"), prefetch(x, into="tape"): pass
    with pytest.raises(EffectError, match="a int to be moved"), prefetch(3): pass
    with device("EMU"), prefetch(x, into="hbm", overlap=None):
        assert x.device == "EMU"
        with prefetch(x, into="l2"): made = doubled(x).numpy()
        np.testing.assert_array_equal(made, np.full(64, 2, np.float32))
    assert offload(x).device == "CPU"


def test_explain_and_the_timeline_say_so() -> None:
    x = Plain.ones(64, 70).contiguous().realize()
    with timeline() as seen, device("EMU"), prefetch(x, into="hbm"), prefetch(x, into="smem"), \
            prefetch(x, into="l2"):
        made = columns.with_schedule(Schedule(stages=3))(x)
        why = explain(made).kernels[0].reason
        made.realize()
        offload(made).realize()
    assert why.endswith("x comes to smem 3 stages ahead; x is kept in L2")
    assert [(each.is_copy, each.name.partition(",")[2] or each.reason) for each in seen.kernels] == [
        (True, " EMU <- CPU"), (False, why), (True, " CPU <- EMU")]


def test_donate() -> None:
    """The kernel writes into the memory that is given; without it into its own."""
    x, out = Plain.arange(64).float().contiguous().realize(), Plain.zeros(64).contiguous().realize()
    doubled(x, out).realize()
    assert not out.numpy().any()
    made = doubled(x, donate(out))
    np.testing.assert_array_equal(made.numpy(), np.arange(64, dtype=np.float32) * 2)
    np.testing.assert_array_equal(out.numpy(), np.arange(64, dtype=np.float32) * 2)
    with pytest.raises(Exception, match="donate for x, which it does not write"): doubled(donate(x))


@verify.numerics(stable=True, bounded=[-100, 100])
def attention_score(q: Tile, k: Tile) -> Tile:
    return tile.dot(q, tile.transpose(k)) * tile.rsqrt(float(q.shape[-1]))


@kernel
def scores(q: KTile["M", "D", f32], k: KTile["N", "D", f32]) -> OTile["M", "N", f32]:
    T = tile.context()
    return attention_score(q[T.m, :], k[T.n, :])


@verify.numerics()
def halves(x: Tile) -> Any: return {"low": x * 0.5, "high": tile.log(x)}


@kernel
def logs(x: KTile["N", f32]) -> OTile["N", f32]:
    T = tile.context()
    total = tile.zeros((T.m,), f32)
    for _ in tile.range(2): total = total + halves(tile.load(x, T.m, other=1.0))["high"]
    return total


@pytest.fixture
def debugged(monkeypatch: pytest.MonkeyPatch) -> None: monkeypatch.setenv("NV_DEBUG", "1")


def ones(rows: int, scale: float = 1.0) -> Plain: return (Plain.ones(rows, 64) * scale).contiguous().realize()


def test_what_is_within_its_range(debugged: None):
    np.testing.assert_array_equal(scores(ones(70), ones(90)).numpy(), np.full((70, 90), 8.0))


def test_what_is_not(debugged: None):
    with pytest.raises(NumericsError, match=r"elements of 128 … 128\n.*numbers of -100 … 100") as found:
        scores(ones(70, 4.0), ones(90, 4.0))
    assert "test_language_roles.py:162: " in str(found.value)
    assert "attention_score in program (0, 0, 0) of kernel scores" in str(found.value)


def test_it_names_the_place_in_a_result_and_loops(debugged: None):
    x = np.ones(70, np.float32)
    x[66] = 0
    with pytest.raises(NumericsError, match=r"halves\['high'\] in program \(1, 0, 0\).*1 of 64 elements"):
        logs(Plain(x))


def test_nothing_is_looked_at_without_debugging():
    assert (scores(ones(70, 4.0), ones(90, 4.0)) == 128).all().item()
    assert "promise" not in str(scores.program(ones(70), ones(90)))


def test_what_is_built_is_the_same(monkeypatch: pytest.MonkeyPatch):
    plain = scores.program(ones(70), ones(90)).key
    monkeypatch.setenv("NV_DEBUG", "1")
    assert scores.program(ones(70), ones(90)).key == plain


def test_a_captured_call_has_no_values_to_look_at(debugged: None):
    step = TinyJit(lambda q, k: scores(q, k).realize())
    for _ in range(2): step(ones(70), ones(90))
    assert (step(ones(70, 4.0), ones(90, 4.0)) == 128).all().item()


N = 4096


@kernel(grid=lambda N: (cdiv(N, 256),))
def rounded_up_or_down(x: KTile["N", f32], out: OTile["N", bf16 @stochastic_round(seed=7)]):
    rows = tile.block(tile.program_id(0) * 256, 256)
    out[rows] = x[rows]


@kernel(grid=lambda N: (cdiv(N, 256),))
def clamped(x: KTile["N", f32], out: OTile["N", f16 @saturate]):
    rows = tile.block(tile.program_id(0) * 256, 256)
    out[rows] = x[rows]


@kernel
def narrow_sums(a: KTile["M", "K", f16 @accum(f16)], b: KTile["K", "N", f16]) -> OTile["M", "N", f32]:
    T = tile.context()
    return tile.dot(a[T.m, :], b[:, T.n])


@kernel(grid=lambda N: (cdiv(N, 256),))
def summed(x: KTile["N", f32], out: OTile["1", f32 @deterministic]):
    tile.atomic_add(out, tile.sum(x[tile.block(tile.program_id(0) * 256, 256)]), 0)


def test_stochastic_round() -> None:
    """Each number becomes one of its two neighbours, as often as it is near; the same ones at each call."""
    step, start = 2.0**-7, 1.0
    share = np.linspace(0, 1, N, endpoint=False)
    x = Plain((start + share * step).astype(np.float32))
    made = rounded_up_or_down(x).float().numpy()
    assert set(np.unique(made)) <= {np.float32(start), np.float32(start + step)}
    up = made > start
    for low in np.arange(0, 1, 0.125):
        part = up[(share >= low) & (share < low + 0.125)]
        assert abs(part.mean() - (low + 0.0625)) < 4 * np.sqrt(0.25 / part.size)
    np.testing.assert_array_equal(made, rounded_up_or_down(x).float().numpy())
    exact = Plain(np.array([np.inf, -np.inf, 0.0, 1.0, -2.0], np.float32))
    np.testing.assert_array_equal(rounded_up_or_down(exact).float().numpy(), exact.numpy())
    assert np.isnan(rounded_up_or_down(Plain([float("nan")])).float().numpy()).all()


def test_saturate() -> None:
    x = Plain(np.array([1e6, -1e6, np.inf, -np.inf, 3.0, np.nan], np.float32))
    np.testing.assert_array_equal(clamped(x).float().numpy(),
                                  np.array([65504, -65504, 65504, -65504, 3, np.nan], np.float32))


def test_the_same_on_the_emulator() -> None:
    x = Plain(np.random.default_rng(0).standard_normal(600).astype(np.float32)).realize()
    for one in (rounded_up_or_down, clamped):
        checked = one.check(x, arch="sm_80")
        assert not checked.findings
        np.testing.assert_array_equal(checked.outputs["out"], one(x).float().numpy())


def test_sums_that_are_not_kept() -> None:
    a = Plain.ones(8, 8, dtype=dtypes.float16)
    with pytest.raises(NumericsError, match=r"narrow_sums \(.*\): a: .*accum\(f16\)"): narrow_sums(a, a)


def test_sums_in_any_order() -> None:
    with pytest.raises(NumericsError, match="atomic_add of floats in kernel summed, which is deterministic"):
        summed(Plain.ones(1000))


@kernel
def dequantised(x: KTile["M", "K", f32], w: QTile["K", "N", int8], scale: KTile["N", f32]) -> OTile["M", "N",
                                                                                                    f32]:
    T = tile.context()
    acc = tile.zeros((T.m, T.n), f32)
    for k in tile.range_k(x.shape, T.k):
        acc = tile.dot_dequant_i8(x[T.m, k], tile.load_qint8(w, k, T.n, scale=scale[T.n]), acc=acc)
    return acc


def test_int8_codes() -> None:
    """Small integers: exact."""
    rng = np.random.default_rng(1)
    x, w = (rng.integers(-4, 5, shape) for shape in ((30, 100), (100, 50)))
    scale = 2.0 ** rng.integers(-3, 3, 50)
    made = dequantised(*(Plain(each.astype(kind)) for each, kind in
                         ((x, np.float32), (w, np.int8), (scale, np.float32))))
    np.testing.assert_array_equal(made.numpy(), x @ w * scale)
