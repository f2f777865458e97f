"""Selective scans on the CPU: every instruction set against the recurrence in float64; the function by its
kernel and by its reference, in a captured graph, and its errors."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tinygrad import Tensor, TinyJit
from tinygrad.dtype import DType, dtypes

from tests.support.cpu.cpu_gemv_case import LEVELS
from tests.support.tile.gemm_case import GUARD
from tests.support.tile.reference_case import Given
from tests.support.tile.scan_case import given_of, recurrence, right, spec_of, table
from tinygrad_nv import disabled, explain
from tinygrad_nv.cpu import isa
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.errors import SpecError
from tinygrad_nv.functional import selective_scan
from tinygrad_nv.tile.selective_scan.spec import Rows, SelectiveScanSpec
from tinygrad_nv.tile.templates import TABLE

F32, BF16, F16 = dtypes.float32, dtypes.bfloat16, dtypes.float16


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.level)
@pytest.mark.parametrize(("channels", "states", "dtype"), [(70, 16, BF16), (33, 5, F32), (1, 1, F16)])
def test_chunks(level: isa.ISA, channels: int, states: int, dtype: DType):
    for seed in range(3):
        rows, pages = table((5, 0, 9, 1, 17, 12), seed)
        right(spec_of(rows, pages, channels, states, dtype, more=3), rows, CPU(level, 2), seed)


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.level)
def test_one_token_each(level: isa.ISA):
    rows = [(0, 1, -1, 0, -1, 0), (1, 1, 1, 0, -1, 4), (2, 0, -1, 0, -1, -1), (3, 1, 3, 0, -1, 3)]
    right(spec_of(rows, 5, 70, 16, BF16, single=True), rows, CPU(level, 2))


ROWS = [(0, 6, 2, 4, 3, 2), (6, 1, -1, 0, -1, 0), (7, 0, -1, 0, -1, -1), (7, 9, 1, 0, -1, -1)]
SPEC = SelectiveScanSpec(16, len(ROWS), 40, 8, 4, Rows(F32, 40), Rows(F32, 8), Rows(F32, 8))


def make_tensors(given: Given, apart: bool = False) -> dict[str, Tensor]:
    """Arguments of the function; B and C are columns of one matrix, or of a transposed one each."""
    made = {each.name: Tensor(given[each.name].reshape(each.places[0].extents).numpy()).realize()
            for each in TABLE.arguments(SPEC)[1:]}
    if apart: return made | {name: made[name].T.contiguous().realize().T for name in "bc"}
    both = made["b"].cat(made["c"], dim=1).contiguous().realize()
    return {**made, "b": both[:, :8], "c": both[:, 8:]}


@pytest.mark.parametrize(("own", "apart"), [(True, False), (True, True), (False, False)])
def test_function_and_its_reference(own: bool, apart: bool):
    given = given_of(SPEC, ROWS)
    wanted, states = recurrence(SPEC, given, ROWS)
    made = make_tensors(given, apart)
    out, after = selective_scan(**made)
    if own:
        assert "selective_scan" in [each.template for each in explain(out).kernels]
        Tensor.realize(out, after)
    else:
        with disabled(): Tensor.realize(out, after)
    np.testing.assert_allclose(out.numpy(), np.where(wanted == GUARD, out.numpy(), wanted), atol=1e-5)
    np.testing.assert_allclose(made["states"].numpy(), states, atol=1e-5)


def test_captured_steps_go_on_from_their_pages():
    given, row = given_of(SPEC, ROWS), [(0, 16, 1, 0, -1, 1)]
    given["sequences"] = torch.tensor(row * len(ROWS), dtype=torch.int32).flatten()
    given["sequences"][6:] = torch.tensor((16, 0, -1, 0, -1, -1), dtype=torch.int32).repeat(len(ROWS) - 1)
    made = make_tensors(given)

    @TinyJit
    def step() -> Tensor: return Tensor.realize(*selective_scan(**made))
    for _ in range(4):
        wanted, states = recurrence(SPEC, given, row)
        np.testing.assert_allclose(step().numpy(), wanted, atol=1e-5)
        given["states"] = torch.from_numpy(states.astype(np.float32)).flatten()


@pytest.mark.parametrize(("name", "shape", "found"), [
    ("step", (16, 41), "step"), ("a", (9, 40), "b"), ("c", (16, 7), "c"), ("states", (4, 40, 8), "states"),
    ("sequences", (4, 5), "sequences")])
def test_shapes_that_do_not_fit_are_named(name: str, shape: tuple[int, ...], found: str):
    made = make_tensors(given_of(SPEC, ROWS))
    made[name] = Tensor.zeros(*shape, dtype=made[name].dtype)
    with pytest.raises(SpecError, match=found): selective_scan(**made)


def test_states_of_another_dtype_are_refused():
    made = make_tensors(given_of(SPEC, ROWS))
    with pytest.raises(SpecError, match="states"):
        selective_scan(**{**made, "states": made["states"].half()})
    with pytest.raises(SpecError, match="an extent"): replace(SPEC, states=0)
    with pytest.raises(SpecError, match="one of each"): replace(SPEC, single=True)
