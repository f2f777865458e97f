"""DEV=EMU: products inside programs: training, TinyJit, functions, symbolic rows, assignments, switches."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.patterns.matmul_case import BF16, check, extents, rounded, stored, taken, whole
from tests.support.patterns.on_emu import emu, near  # noqa: F401
from tinygrad_nv import (
    Context,
    Device,
    Tensor,
    TinyJit,
    Variable,
    disabled,
    dtypes,
    explain,
    function,
    hooks,
    nn,
)

# **** gradients ****

def test_all_three_products_of_a_layer():
    x, w = whole(2, 8, 48), whole(48, 32)
    given, weight, factor = stored(x), stored(w), whole(2, 8, 32, seed=1)
    loss = ((given @ weight).float() * stored(factor, dtypes.float)).sum()
    dx, dw = loss.gradient(given, weight)
    assert [extents(s) for s in taken(dx)] == [(16, 48, 32)]
    # over batch and rows together; tinygrad's gradient is a transposed view
    assert [extents(s) for s in taken(dw)] == [(32, 48, 16)]
    np.testing.assert_array_equal(dx.float().numpy(), rounded(factor @ w.T))
    wanted = np.einsum("btk,btn->kn", x, factor)
    np.testing.assert_array_equal(dw.float().numpy(), rounded(wanted))


def test_a_batched_product_and_its_gradients():
    a, b = whole(3, 8, 16), whole(3, 16, 24)
    x, y, factor = stored(a), stored(b), whole(3, 8, 24, seed=1)
    da, db = ((x @ y).float() * stored(factor, dtypes.float)).sum().gradient(x, y)
    assert [extents(s) for s in taken(da, db)] == [(3, 8, 16, 24), (3, 24, 16, 8)]
    np.testing.assert_array_equal(da.float().numpy(), rounded(factor @ b.swapaxes(1, 2)))
    np.testing.assert_array_equal(db.float().numpy(), rounded(a.swapaxes(1, 2) @ factor))


def test_a_training_step():
    """Two layers, relu, mean squared error, SGD: every product of the step is ours."""
    x, w1, w2, t = whole(16, 32), whole(32, 48) / 8, whole(48, 16) / 8, whole(16, 16)
    weights = [stored(w) for w in (w1, w2)]
    optimizer = nn.optim.SGD(weights, lr=0.0625)
    with Context(TRAINING=1):
        optimizer.zero_grad()
        loss = ((stored(x) @ weights[0]).relu() @ weights[1] - stored(t)).float().square().mean().backward()
        todo = [loss, *optimizer.schedule_step()]
        assert len(taken(*todo)) == 5
        Tensor.realize(*todo)
    theirs = [torch.tensor(rounded(w)).requires_grad_() for w in (w1, w2)]
    wanted = (torch.relu(torch.tensor(x) @ theirs[0]) @ theirs[1] - torch.tensor(t)).square().mean()
    wanted.backward()
    assert abs(loss.item() - wanted.item()) < 1e-2 * wanted.item()
    for found, one in zip(weights, theirs, strict=True):
        near(found, (one - 0.0625 * one.grad).detach().numpy(), 1e-2)


def test_the_products_of_an_attention(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NV_ATTENTION", "0")
    q, k, v = (whole(1, 4, 16, 32, seed=i) / 4 for i in range(3))
    y = stored(q).scaled_dot_product_attention(stored(k), stored(v), is_causal=True)
    assert [extents(s) for s in taken(y)] == [(4, 16, 16, 32), (4, 16, 32, 16)]
    wanted = torch.nn.functional.scaled_dot_product_attention(*map(torch.tensor, (q, k, v)), is_causal=True)
    near(y, wanted.numpy(), 1e-2)


# **** symbolic rows ****

def rows(y: Tensor, count: int) -> np.ndarray: return y[:count].float().numpy()


def test_symbolic_rows():
    a, b = whole(32, 48), whole(48, 40)
    x, w = stored(a), stored(b)
    for count in (1, 5, 17, 32):
        y = (x[:Variable("rows", 1, 32).bind(count)] @ w).contiguous()
        (spec,) = taken(y)
        assert (spec.symbolic, *extents(spec)) == (True, 32, 40, 48)
        np.testing.assert_array_equal(rows(y, count), (a @ b)[:count])


def test_symbolic_rows_replayed():
    a, b = whole(70, 48), whole(48, 40)
    x, w = stored(a), stored(b)
    step = TinyJit(lambda x, n: (x[:n] @ w).relu().contiguous().realize())
    for count in (3, 17, 70, 1, 64, 65):
        y = step(x, Variable("rows", 1, 70).bind(count))
        np.testing.assert_array_equal(rows(y, count), np.maximum(a @ b, 0)[:count])


def test_symbolic_rows_of_a_computed_operand_and_a_batch():
    a, b = whole(2, 32, 48), whole(48, 40)
    n = Variable("rows", 1, 32).bind(7)
    y = (stored(a)[:, :n] + 1) @ stored(b)
    (spec,) = taken(y)
    assert (spec.symbolic, *extents(spec)) == (True, 2, 32, 40, 48)
    np.testing.assert_array_equal(y.float().sum(1).numpy(), rounded((a + 1) @ b)[:, :7].sum(1))


def test_symbolic_columns_become_rows():
    a, b = whole(32, 48), whole(24, 48)
    y = stored(b) @ stored(a)[:Variable("rows", 1, 32).bind(9)].T
    (spec,) = taken(y)
    assert (spec.symbolic, *extents(spec)) == (True, 32, 24, 48)
    np.testing.assert_array_equal(y.float().sum(1).numpy(), (b @ a[:9].T).sum(1))


# **** captured, in functions, in place ****

def test_captured():
    a, b = stored(whole(24, 48)), stored(whole(48, 40))
    step = TinyJit(lambda x: ((x @ b).relu() @ b.T).realize())
    for seed in range(4):
        x = whole(24, 48, seed=seed, most=1)
        wanted = rounded(np.maximum(x @ b.float().numpy(), 0) @ b.float().numpy().T)
        np.testing.assert_array_equal(step(stored(x)).float().numpy(), wanted)
    assert a.shape == (24, 48)


@pytest.mark.parametrize("precompile", [False, True])
def test_functions(precompile: bool):
    @function(precompile=precompile)
    def layer(x: Tensor, w: Tensor) -> Tensor: return (x @ w).relu()
    a, b = whole(24, 48), whole(48, 40)
    y = layer(stored(a), stored(b)).contiguous()
    (spec,) = taken(y)
    assert extents(spec) == (24, 40, 48)
    np.testing.assert_array_equal(y.float().numpy(), np.maximum(a @ b, 0))


def test_an_operand_assigned_in_place():
    a, b = whole(16, 16), whole(16, 16, seed=1)
    x = stored(a)
    x.assign(x @ stored(b)).realize()
    np.testing.assert_array_equal(x.float().numpy(), a @ b)


def test_a_result_written_into_a_slice():
    a, b = whole(16, 24), whole(24, 16)
    cache = stored(np.zeros((3, 16, 16)))
    cache[1].assign(stored(a) @ stored(b)).realize()
    none = np.zeros((16, 16))
    np.testing.assert_array_equal(cache.float().numpy(), np.stack([none, a @ b, none]))


def test_a_result_is_written_straight_into_its_target():
    a, b = whole(24, 48), whole(48, 40)
    target = stored(np.zeros((24, 40)))
    target.assign(stored(a) @ stored(b))
    assert len(explain(target).kernels) == 1
    np.testing.assert_array_equal(target.float().numpy(), a @ b)


def test_what_was_read_before_an_assignment():
    a, b = whole(16, 16), whole(16, 16, seed=1)
    x, w = stored(a), stored(b)
    before = x @ w
    x.assign(stored(b) + 0)
    after = x @ w
    Tensor.realize(before, x, after)
    np.testing.assert_array_equal(before.float().numpy(), a @ b)
    np.testing.assert_array_equal(after.float().numpy(), b @ b)


def test_shards():
    a, b = whole(8, 16), whole(16, 24)
    devices = ("EMU:24", "EMU:25")
    x, w = stored(a).shard(devices, 0).realize(), stored(b).shard(devices).realize()
    assert [extents(s) for s in taken(x @ w)] == [(4, 24, 16)] * 2
    np.testing.assert_array_equal((x @ w).float().numpy(), a @ b)
    x, w = stored(a).shard(devices, 1).realize(), stored(b).shard(devices, 0).realize()
    np.testing.assert_array_equal((x @ w).float().numpy(), a @ b)


# **** switches ****

def test_switched_off(monkeypatch: pytest.MonkeyPatch):
    a, b = whole(24, 48), whole(48, 40)
    y = stored(a) @ stored(b)
    assert len(taken(y)) == 1
    with disabled(): assert taken(y) == []
    monkeypatch.setenv("NV_GEMM", "0")
    assert taken(y) == []
    np.testing.assert_array_equal(y.float().numpy(), a @ b)
    monkeypatch.setenv("NV_GEMM", "1")
    check(stored(a) @ stored(b), a @ b, (24, 40, 48))


@pytest.mark.parametrize("change", [{"ALLOW_TF32": 1}, {"BEAM": 1}, "NV_GEMM=0", "EMU_ARCH=sm_89",
                                    "NV_SCHEDULES"], ids=str)
def test_schedules_belong_to_their_configuration(change: str | dict[str, int], tmp_path: Path):
    before = hooks.configuration()
    if isinstance(change, dict):
        with Context(**change): assert hooks.configuration() != before
    elif change == "NV_SCHEDULES":
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(change, str(tmp_path / "schedules.json"))
            without = hooks.configuration()
            (tmp_path / "schedules.json").write_text("{}")
            assert without == before    # neither has a file
            assert hooks.configuration() != without
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(*change.split("="))
            assert hooks.configuration() != before
    assert hooks.configuration() == before


# numbers that no other test opens, with another architecture
@pytest.mark.parametrize(("device", "arch"), [("EMU:45", "sm_80"), ("EMU:46", "sm_89")])
def test_kernels_are_made_for_the_device(device: str, arch: str, monkeypatch: pytest.MonkeyPatch):
    a, b = whole(40, 72), whole(72, 56)
    monkeypatch.setenv("EMU_ARCH", arch)
    x, w = (Tensor(v.astype(np.float32), device=device).cast(BF16).contiguous().realize() for v in (a, b))
    y = x @ w
    (kernel,) = explain(y).kernels
    assert (kernel.template, Device[device].driver.properties.arch) == ("mma", arch)
    np.testing.assert_array_equal(y.float().numpy(), rounded(a @ b))


@pytest.mark.slow
def test_other_devices_are_left_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NV_CPU", "0")
    x = Tensor(whole(8, 16).astype(np.float32), device="CPU").cast(BF16)
    assert taken(x @ x.T) == []
