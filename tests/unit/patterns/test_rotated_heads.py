"""Rotary positions by name: torch's numbers and gradients, one kernel each, the same bits when captured."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tinygrad import Tensor, TinyJit, dtypes
from tinygrad.dtype import DType
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tests.support.tile.reference_case import right, run, storages
from tinygrad_nv import disabled, explain
from tinygrad_nv.cpu import isa
from tinygrad_nv.cpu.target import host
from tinygrad_nv.functional import rotate_heads
from tinygrad_nv.tile.rope.spec import Angles, RopeGradientSpec, RopeSpec
from tinygrad_nv.tile.templates import TABLE

F32, BF16, F16 = dtypes.float32, dtypes.bfloat16, dtypes.float16
LEVELS = [each for each in (isa.PORTABLE, isa.AVX2, isa.AVX512) if not isa.why_not(each.level)]
B, T, H, KV, D = 2, 7, 3, 1, 32
pytestmark = pytest.mark.usefixtures("cpu_device")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("level", LEVELS, ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_every_instruction_set(dtype: DType, level: isa.ISA):
    """Heads that vectors divide and others; the same bits by any number of parts."""
    target = replace(host(), isa=level)
    for kind in (RopeSpec, RopeGradientSpec):
        for d, half in ((32, 16), (26, 11)):
            spec = kind(B, T, H, KV, d, half, dtype, Angles(F32, half, half * T, 1))
            given, schedule = storages(spec, seed=d), TABLE.choose(spec, target)
            found = [run(spec, replace(schedule, parts=parts), target, given) for parts in (1, 3)]
            for name, each in found[0].items(): assert torch.equal(each, found[1][name])
            right(spec, given, found[0])


def normal(seed: int) -> Tensor:
    """q|k|v."""
    made = np.random.default_rng(seed).standard_normal((B, T, (H + 2 * KV) * D))
    return Tensor(made.astype(np.float32)).realize()


def angles(*shape: int) -> tuple[np.ndarray, np.ndarray]:
    made = np.random.default_rng(5).uniform(-4, 4, shape)
    return np.cos(made).astype(np.float32), np.sin(made).astype(np.float32)


def theirs(x: torch.Tensor, cos: np.ndarray, sin: np.ndarray) -> tuple[torch.Tensor, ...]:
    """q, k and v by transformers, of q|k|v."""
    q, k, v = x.reshape(B, T, -1, D).transpose(1, 2).split([H, KV, KV], 1)
    both = [torch.from_numpy(np.concatenate([each, each], -1)).double() for each in (cos, sin)]
    both = [each.expand(B, T, D) for each in both]
    return *apply_rotary_pos_emb(q, k, *both), v


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shape", [(T, D // 2), (B, T, D // 2)], ids=["positions", "documents"])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_gradients_are_those_of_torch(dtype: DType, shape: tuple[int, ...]):
    """float32 within 1e-5 of the largest, else two roundings; also of large numbers."""
    random, (cos, sin) = np.random.default_rng(1), angles(*shape)
    x, *grads = (random.standard_normal(each).astype(np.float32) for each in
                 ((B, T, (H + 2 * KV) * D), (B, H, T, D), (B, KV, T, D), (B, KV, T, D)))
    x[0, 0], x[0, 1] = x[0, 0] * 1e4, 0
    held = Tensor(x).cast(dtype).contiguous().realize()
    tables = [Tensor(each).contiguous().realize() for each in (cos, sin)]
    given = [Tensor(each).cast(dtype).contiguous().realize() for each in grads]

    def made() -> list[Tensor]:
        outs = rotate_heads(held, *tables, H, KV)
        loss = sum(((a.float() * b.float()).sum() for a, b in zip(outs, given, strict=True)), Tensor(0.0))
        return [*outs, loss.gradient(held)[0]]
    found = made()
    names = [each.template for each in explain(*found).kernels]
    assert names.count("rope") == 2, names
    true = torch.from_numpy(held.float().numpy()).double().requires_grad_()
    outs = theirs(true, cos, sin)
    sum((a * torch.from_numpy(b.float().numpy()).double()).sum() for a, b in zip(outs, given, strict=True)
        ).backward()
    error = {F32: 1e-6, BF16: 2.0**-7, F16: 2.0**-9}[dtype]
    for mine, wanted in zip(found, (*outs, true.grad), strict=True):
        exact = wanted.detach().numpy()
        off = np.abs(mine.float().numpy() - exact)
        assert (off <= error * (np.abs(exact) + 1e-2 * np.abs(exact).max())).all()
    with disabled(): plain = [each.float().numpy() for each in made()]
    for mine, other in zip(found, plain, strict=True):
        off = np.abs(mine.float().numpy() - other)
        assert (off <= error * (np.abs(other) + 1e-2 * np.abs(other).max())).all()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2)], ids=str)
def test_some_results_are_derived(used: tuple[int, ...]):
    """tinygrad does not say of which results the gradients are."""
    x = normal(2)
    cos, sin = angles(T, D // 2)

    def made() -> Tensor:
        outs = rotate_heads(x, Tensor(cos), Tensor(sin), H, KV)
        return sum(((outs[i] * outs[i] * (i + 1)).sum() for i in used), Tensor(0.0)).gradient(x)[0]
    found = made().numpy()
    with disabled(): np.testing.assert_allclose(found, made().numpy(), rtol=1e-5, atol=1e-5)
    assert np.abs(found).max() > 1


def test_rows_of_a_table_are_read_where_they_lie():
    """And a captured step has the same bits."""
    x = normal(3)
    cos, sin = (Tensor(each).realize()[3:3 + T] for each in angles(20, D // 2))
    assert [each.template for each in explain(*rotate_heads(x, cos, sin, H, KV)).kernels] == ["rope"]

    def step() -> Tensor: return rotate_heads(x, cos, sin, H, KV)[0].square().sum().gradient(x)[0].realize()
    once, captured = step().numpy(), TinyJit(step)
    for _ in range(4): np.testing.assert_array_equal(captured().numpy(), once)
