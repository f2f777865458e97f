"""Sentinels: the first number that is not finite, who made it, and of what; and what is no finding.
Recorded runs: repeated bit for bit, or the kernel at which they part, by name and both hashes."""
from __future__ import annotations

import gc
import json
import math
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinygrad import Tensor, TinyJit, dtypes
from tinygrad.dtype import DType

from tests.support.numerics import replay_case
from tinygrad_nv import layer
from tinygrad_nv.cpu.language import kernel as programs_in_c
from tinygrad_nv.errors import NumericsError, ReplayError
from tinygrad_nv.numerics.policy import deterministic
from tinygrad_nv.numerics.replay import record, replay
from tinygrad_nv.numerics.replay.log import read
from tinygrad_nv.numerics.verify import sentinels
from tinygrad_nv.numerics.verify.scan import CODES, finite, first_bad


def drawn(*shape: int, scale: float = 1.0) -> Tensor:
    values = np.random.default_rng(sum(shape)).standard_normal(shape) * scale
    return Tensor(values.astype(np.float32)).realize()


def buffer_of(values: np.ndarray, dtype: DType) -> Tensor:
    return Tensor(values.astype(np.float32)).cast(dtype).contiguous().realize()


# **** scanning ****

@pytest.mark.sampled(10)
@pytest.mark.parametrize("dtype", [each for each in CODES if each != dtypes.float64], ids=str)
@pytest.mark.parametrize("place", [0, 1, 4095, 4096, 9999])
def test_the_first_bad_number_is_found(dtype: DType, place: int):
    values = np.linspace(-3, 3, 10000)
    assert first_bad(buffer_of(values, dtype).uop.base.buffer, dtype) == -1
    values[[place, 9999]] = np.nan
    held = buffer_of(values, dtype)
    for nan_only in (False, True): assert first_bad(held.uop.base.buffer, dtype, nan_only) == place


def test_whether_a_tensor_is_finite_of_views_constants_and_shards():
    held = buffer_of(np.array([1, 2, 3, np.nan]), dtypes.float32)
    assert [finite(each) for each in (held[:2], held[2:], held, Tensor.full((3,), 1.0), Tensor([1, 2]),
                                      Tensor.full((3,), math.inf))] == [True, False, False, True, True, False]
    devices = "CPU:0", "CPU:1"
    assert [finite(each.shard(devices, 0)) for each in (held, held.isnan().where(0, held))] == [False, True]


@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.bfloat16, dtypes.float16])
def test_infinities_and_the_largest_number(dtype: DType):
    most = {dtypes.float32: 3.4028234e38, dtypes.bfloat16: 3.38e38, dtypes.float16: 65504}[dtype]
    held = buffer_of(np.array([0, -most, most, -np.inf, np.inf]), dtype)
    assert first_bad(held.uop.base.buffer, dtype) == 3
    assert first_bad(held.uop.base.buffer, dtype, nan_only=True) == -1


# **** findings ****

def test_an_overflow_names_its_layer_and_operands():
    w, v = drawn(64, 64), drawn(64, 64, scale=1e20)
    with sentinels({"w": w, "v": v}, stop=False) as found:
        with layer("net.0"): y = (drawn(64, 64, scale=1e20) @ w).contiguous()
        with layer("net.1"): (y @ v).contiguous().realize()
    first = found.first
    assert first is not None
    assert (first.layer, first.op) == ("net.1", "__matmul__")
    assert math.isinf(first.value)
    assert [each.name for each in first.operands][1:] == ["v"]
    assert first.operands[0].name.endswith("(__matmul__, layer net.0)")
    assert first.operands[1].most is not None
    np.testing.assert_allclose(first.operands[1].most, v.numpy().max(), rtol=1e-6)
    assert first.cause == "its operands were finite"
    assert not any(each.bad for each in first.operands)


def test_the_largest_operand_is_followed_upstream():
    big = drawn(64, 64, scale=1e15)
    with sentinels({"big": big}, stop=False) as found:
        one = (big * 1e3).contiguous()
        two = (one + 1).contiguous()
        (two @ two.T * 1e10).realize()
    assert found.first is not None
    assert [each.name for each in found.first.upstream][-1] == "big"


def test_a_weight_that_is_not_finite_is_the_cause():
    values = np.ones((64, 64), np.float32)
    values[3, 5] = np.nan
    w = Tensor(values).realize()
    with pytest.raises(NumericsError, match=r"w had 1 of 4096 that are not finite"), sentinels({"w": w}):
        (drawn(64, 64) @ w).realize()


def test_a_gradient_is_found_and_called_backward():
    """√0: the value is 0, its slope is not."""
    x = Tensor(np.array([4.0, 0.0, 1.0], np.float32)).realize()
    with sentinels(stop=False) as found:
        with layer("head"): out = x.sqrt()
        out.sum().gradient(x)[0].realize()
    assert found.first is not None
    assert (found.first.what, found.first.element) == ("infinity", 1)
    assert found.first.layer == "head"
    assert found.first.op.endswith("bw")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("times", [1, 4])
def test_a_captured_step_is_checked_kernel_by_kernel(times: int):
    """Replays too, in memory that has the infinities of the replay before."""
    w = drawn(32, 32)

    @TinyJit
    def step(x: Tensor) -> Tensor:
        with layer("net"): return ((x @ w).contiguous() * 1e30).contiguous().exp().realize()
    with sentinels():
        for _ in range(3): step((drawn(32, 32) * 0).realize())
    for _ in range(times):
        with sentinels(stop=False) as found: step(drawn(32, 32, scale=5.0))
        assert found.first is not None
        assert found.first.layer == "net"
        step(drawn(32, 32, scale=5.0))
    with sentinels() as found: step((drawn(32, 32) * 0).realize())
    assert found.first is None
    assert found.kernels >= 3


def test_numbers_are_those_of_a_run_without():
    w = drawn(64, 64)
    def run() -> np.ndarray: return (drawn(64, 64) @ w).softmax().square().sum().gradient(w)[0].numpy()
    plain = run()
    with sentinels() as found: checked = run()
    assert np.array_equal(plain, checked)
    assert found.elements > 0


# **** what is no finding ****

def test_memory_that_a_kernel_leaves_alone_is_not_its_result():
    """Rows of a cache that were never written, and later ones."""
    values = np.full((8, 16), np.nan, np.float32)
    values[2] = np.inf
    cache = Tensor(values).realize()
    with sentinels() as found:
        for row in range(4): cache[row:row + 1].assign(drawn(1, 16)).realize()
    assert found.first is None
    after = cache.numpy()
    assert np.isfinite(after[:4]).all()
    assert np.isnan(after[4:]).all()


def test_a_row_that_is_written_is():
    cache = Tensor(np.full((8, 16), np.nan, np.float32)).realize()
    with pytest.raises(NumericsError, match="element 16 of"), sentinels():
        cache[1:2].assign(drawn(1, 16) * float("nan")).realize()


def test_infinities_may_pass():
    with sentinels(infinite=False) as found:
        masked = drawn(4, 4).masked_fill(Tensor.ones(4, 4).tril() == 0, -math.inf).contiguous().realize()
        assert found.first is None
    with pytest.raises(NumericsError, match="NaN in element"), sentinels(infinite=False):
        (masked.sum() - masked.sum(1)).realize()


def test_what_was_freed_is_freed():
    with sentinels() as found:
        made = (drawn(64, 64) + 1).contiguous().realize()
        held = weakref.ref(made.uop.base.buffer)
        del made
        gc.collect()
        assert held() is None
        (drawn(64, 64) * 2).realize()
    assert found.first is None


def test_one_at_a_time():
    words = r"(?s)sentinels inside sentinels.*end the outer"
    with sentinels(), pytest.raises(NumericsError, match=words), sentinels(): pass
    with sentinels(): pass


def test_the_message():
    v = drawn(64, 64, scale=1e30)
    with pytest.raises(NumericsError) as caught, sentinels({"v": v}), layer("blocks.3"):
        (v @ v).contiguous().realize()
    for words in ("in element 0 of a tensor of 4096 f32, written by gemm_64x64x64 (__matmul__, layer",
                  "layer blocks.3); its operands were finite", "operand   v: f32, 4096 elements",
                  "expected: finite numbers",
                  "sentinels(infinite=False) lets infinities pass"):
        assert words in str(caught.value)


def rows(*shape: int) -> Tensor:
    return Tensor(np.random.default_rng(3).standard_normal(shape).astype(np.float32)).realize()


@pytest.fixture
def log(tmp_path: Path) -> Path: return tmp_path / "run.log"


def test_the_same_bits(log: Path):
    made = record(log, replay_case.step, rows(3, 64), scale=2.0)
    found = read(log)
    assert [run.layer for run in found.kernels] == ["blocks.0", "blocks.1"]
    assert found.header.what["function"] == "tests.support.numerics.replay_case:step"
    assert (log.with_name("run.log.safetensors")).is_file()
    assert made.shape == (3, 48)
    report = replay(log)
    assert (report.same, report.kernels, report.rewritten) == (True, 2, 0)
    assert str(report) == "repeated bit for bit: 2 kernels"


@pytest.mark.parametrize("dtype", [dtypes.bfloat16, dtypes.float16, dtypes.int8, dtypes.int32], ids=str)
def test_arguments_of_every_kind(log: Path, dtype: Any):
    x = rows(3, 64).cast(dtype).realize()
    record(log, lambda_free, x, [1, 2.5], None, name="a")
    assert replay(log).same


def lambda_free(x: Tensor, numbers: list[float], nothing: None, name: str) -> tuple[Tensor, Tensor]:
    return x * numbers[0], (x.float() + numbers[1]) * len(name)


def test_a_kernel_that_changed_is_named(log: Path, monkeypatch: pytest.MonkeyPatch):
    record(log, replay_case.step, rows(1, 64))
    with deterministic(): report = replay(log)
    parted = report.parted
    assert parted is not None
    assert (parted.number, parted.before.kernel, parted.now.kernel) == (1, "gemv_1x48x64", "gemm_1x48x64")
    assert ("NV_DETERMINISTIC", "none", "1") in report.changed


def test_a_kernel_with_another_source_and_other_bits(log: Path, monkeypatch: pytest.MonkeyPatch):
    record(log, replay_case.step, rows(3, 64))
    build = programs_in_c.build
    monkeypatch.setenv("NV_PROGRAM_CACHE", "0")

    def broken(*words: Any, **more: Any) -> Any:
        made = build(*words, **more)
        return replace(made, source=made.source.replace("= exp2_(", "= 0.001f + exp2_("))
    monkeypatch.setattr(programs_in_c, "build", broken)
    from tinygrad_nv.hooks.rewrites import configured_cache
    from tinygrad_nv.patterns.target import Chosen
    Chosen.build.cache_clear()
    configured_cache.clear()
    try: report = replay(log)
    finally:
        monkeypatch.undo()
        Chosen.build.cache_clear()
        configured_cache.clear()
    assert report.parted is not None
    assert (report.parted.number, report.parted.before.layer) == (2, "blocks.1")
    words = str(report)
    assert "equal operands, another source, other results" in words
    for run in (report.parted.before, report.parted.now):
        assert f"{run.kernel}, source {run.text}, results {run.written[0]}" in words
    assert report.parted.before.text != report.parted.now.text
    assert replay(log).same


def test_a_weight_that_changed_is_told_from_a_kernel(log: Path, monkeypatch: pytest.MonkeyPatch):
    record(log, replay_case.step, rows(3, 64))
    other = replay_case.WEIGHT.copy()
    other[5, 7] = 0
    monkeypatch.setitem(replay_case.held, "weight", Tensor(other).realize())
    parted = replay(log).parted
    assert parted is not None
    assert parted.number == 1
    assert parted.what == "operand 2 of 2 differs, and no kernel wrote it: it was loaded"


def test_generators_begin_at_the_seed(log: Path):
    made = record(log, replay_case.drawn, 5, seed=11)
    again = record(log, replay_case.drawn, 5, seed=12)
    assert all((made[name].numpy() != again[name].numpy()).any() for name in made)
    assert replay(log).same


def test_a_captured_function_runs_kernel_by_kernel(log: Path):
    for _ in range(3): replay_case.captured(rows(3, 64))
    record(log, replay_case.captured, rows(3, 64))
    assert len(read(log).kernels) >= 1
    assert replay(log).same


def test_a_result_without_tensors(log: Path):
    assert record(log, replay_case.counted, 100) == 4950
    assert replay(log).same


def test_another_kernel_runs(log: Path):
    record(log, replay_case.forgetful, rows(40, 50).abs())
    parted = replay(log).parted
    assert parted is not None
    assert parted.number == 1


def test_what_does_not_run_any_more(log: Path):
    record(log, replay_case.step, rows(3, 64))
    parted = replay(log, lambda x: x @ replay_case.held["weight"]).parted
    assert parted is not None
    assert parted.number == 1 or parted.what == "it does not run now"


def test_large_memory_is_hashed_again_when_it_was_written(log: Path):
    def twice(x: Tensor) -> Tensor:
        x.assign(x + 1).realize()
        x.assign(x * 2).realize()
        return x + 0
    record(log, grown, rows(600, 600))
    assert len({run.read for run in read(log).kernels}) == len(read(log).kernels) > 2
    assert replay(log).same
    assert not replay(log, twice).same


def grown(x: Tensor) -> Tensor:
    x.assign(x + 1).realize()
    x.assign(x + 1).realize()
    return x + 0


def test_a_run_that_fails_leaves_a_log_that_is_refused(log: Path):
    with pytest.raises(ZeroDivisionError): record(log, failing, rows(3, 64))
    assert json.loads(log.read_text().splitlines()[-1])["kernel"]
    with pytest.raises(ReplayError, match="and the run did not"): replay(log)


def failing(x: Tensor) -> Tensor:
    (x + 1).realize()
    return x / (1 // 0)
