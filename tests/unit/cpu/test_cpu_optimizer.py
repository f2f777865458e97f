"""Updates of many tensors in one launch on the CPU: numbers, parts, levels, what is not written."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tinygrad import dtypes

from tests.support.cpu.optimizer_spec_case import SPECS, given_of
from tests.support.tile.reference_case import right, run
from tinygrad_nv import Tensor, explain
from tinygrad_nv.cpu.isa import detect, why_not
from tinygrad_nv.cpu.kernel import CPUKernel
from tinygrad_nv.cpu.target import host
from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns.optimizer import Entry, adamw_update, sum_squares
from tinygrad_nv.runtime.cpu.program import load
from tinygrad_nv.tile.optimizer.spec import CHUNK, AdamWSpec, SquaresSpec
from tinygrad_nv.tile.templates import TABLE

HERE = replace(host(), threads=2)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", SPECS)
def test_numbers(name: str):
    spec = SPECS[name]
    schedule = replace(TABLE.choose(spec, HERE), parts=3)
    given = given_of(spec)
    right(spec, given, run(spec, schedule, HERE, given))


@pytest.mark.parametrize("level", ["portable", "avx2", "avx512"])
def test_levels(level: str, monkeypatch: pytest.MonkeyPatch):
    if why_not(level): pytest.skip(why_not(level))
    monkeypatch.setenv("NV_CPU_ISA", level)
    here = replace(HERE, isa=detect())
    for spec in (SPECS["f32"], SPECS["squares"]):
        given = given_of(spec)
        right(spec, given, run(spec, TABLE.choose(spec, here), here, given))


def test_a_step_that_is_not_taken_writes_nothing():
    spec = SPECS["bf16 with masters"]
    given = given_of(spec)
    given["control"][0] = 0
    given["g1"][:] = torch.nan
    got = run(spec, replace(TABLE.choose(spec, HERE), parts=2), HERE, given)
    for key, x in got.items(): assert torch.equal(x, given[key].double()), key


@pytest.mark.parametrize("spec", [SPECS["f32"], SPECS["squares"]], ids=str)
def test_no_bit_depends_on_parts(spec: AdamWSpec | SquaresSpec):
    found = []
    for parts in (1, 2, 7):
        got = run(spec, replace(TABLE.choose(spec, HERE), parts=parts), HERE, given_of(spec))
        found.append([x.numpy().tobytes() for x in got.values()])
    assert found[0] == found[1] == found[2]


def test_parts_are_worth_a_thread():
    assert TABLE.choose(AdamWSpec((1000,), (0,), 0.9, 0.99, 1e-8), HERE).parts == 1
    assert TABLE.choose(AdamWSpec((1 << 22,), (0,), 0.9, 0.99, 1e-8), HERE).parts == 2
    made = TABLE.build(SquaresSpec((5,)), TABLE.choose(SquaresSpec((5,)), HERE), HERE)
    assert isinstance(made, CPUKernel)
    sums = np.zeros(1, np.float32)
    load(made)(sums, np.arange(5, dtype=np.float32))
    assert sums[0] == 30


# **** by name ****

def entries(count: int, elements: int = 40, dtype: Any = dtypes.float32) -> list[Entry]:
    random = np.random.default_rng(1)

    def made(kind: Any = dtypes.float32) -> Tensor:
        return Tensor(np.square(random.standard_normal(elements)).astype(np.float32)).cast(kind).contiguous()
    masters = [None if dtype == dtypes.float32 else made() for _ in range(count)]
    held = [Entry(made(dtype), made(), made(), made(), i % 2, masters[i]) for i in range(count)]
    Tensor.realize(*(x for each in held for x in (*each.outputs, each.grad)))
    return held


def test_as_many_launches_as_pointers_need():
    held = entries(40)
    control = Tensor([1.0, 1.0, 2.0, 0.9, 0.1, 0.8, 0.2])
    adamw_update(held, control, 0.9, 0.99, 1e-8)
    shown = explain(*(each.x for each in held))
    assert [kernel.template for kernel in shown.kernels].count("optimizer") == 3    # 14 tensors each
    shown = explain(sum_squares([each.grad for each in held]))
    assert [kernel.template for kernel in shown.kernels if kernel.template != "-"] == ["optimizer"]


def test_kinds_are_launches_of_their_own():
    held = entries(2) + entries(3, dtype=dtypes.bfloat16)
    adamw_update(held, Tensor([1.0, 1.0, 2.0, 0.9, 0.1, 0.8, 0.2]), 0.9, 0.99, 1e-8)
    shown = explain(*(each.x for each in held))
    assert [kernel.template for kernel in shown.kernels].count("optimizer") == 2


def test_part_of_a_larger_storage_is_left_to_tinygrad():
    """With the same numbers, and the rest of it unchanged."""
    held, control = entries(1, 32)[0], Tensor([1.0, 1.0, 2.0, 0.9, 0.1])
    whole = held.x.cat(held.x).contiguous().realize()
    before = whole.numpy()
    part = whole[32:]
    adamw_update([replace(held, x=part)], control, 0.9, 0.99, 1e-8)
    found = part.numpy()
    held = entries(1, 32)[0]
    adamw_update([held], control, 0.9, 0.99, 1e-8)
    np.testing.assert_allclose(found, held.x.numpy(), rtol=1e-6)
    np.testing.assert_array_equal(whole.numpy()[:32], before[:32])


def test_sums_of_squares():
    random = np.random.default_rng(2)
    given = [random.standard_normal(count).astype(np.float32) for count in (CHUNK + 5, 3, 2 * CHUNK)]
    sums = sum_squares([Tensor(x) for x in given])
    assert sums.shape == (5,)
    exact = sum(np.square(x.astype(np.float64)).sum() for x in given)
    assert sums.numpy().astype(np.float64).sum() == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize(("change", "words"), [
    ({"grad": Tensor.zeros(3)}, "state and gradient"),
    ({"exp_avg": Tensor.zeros(40).half()}, "state that is"),
    ({"master": Tensor.zeros(40)}, "float with masters|float32 with masters"),
    ({"x": Tensor.zeros(40).cast(dtypes.bfloat16)}, "without masters")])
def test_what_does_not_fit(change: dict[str, Any], words: str):
    with pytest.raises(SpecError, match=words):
        adamw_update([replace(entries(1)[0], **change)], Tensor.zeros(5), 0.9, 0.99, 1e-8)


@pytest.mark.parametrize(("make", "words"), [
    (lambda: SquaresSpec(()), "one element at least"), (lambda: SquaresSpec((3, 0)), "one element at least"),
    (lambda: SquaresSpec((3,), dtypes.int32), "numbers of s32"),
    (lambda: AdamWSpec((3,), (0, 1), 0.9, 0.99, 1e-8), "groups")])
def test_specs_that_are_none(make: Any, words: str):
    with pytest.raises(SpecError, match=words): make()
