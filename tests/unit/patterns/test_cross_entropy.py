"""Cross entropy of logits and of an output layer, and distillation, held to torch in float64: values and
gradients, beside what torch in float32 makes of the same numbers."""
from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from tinygrad import Tensor, TinyJit, function
from tinygrad.dtype import DType, dtypes
from tinygrad.uop.ops import Ops

from tests.support.patterns.loss_case import IGNORED, Case, close, distilled, gradients, ours
from tinygrad_nv import disabled
from tinygrad_nv.explain import explain
from tinygrad_nv.functional import cross_entropy, distillation, linear_cross_entropy, linear_distillation

F32, BF16, F16 = dtypes.float32, dtypes.bfloat16, dtypes.float16
UNIT = {F32: 0.0, BF16: 2.0**-8, F16: 2.0**-11}
CASES = {"plain": Case(), "smoothing": Case(0.1), "z-loss": Case(z_loss=1e-3), "soft-cap": Case(softcap=30.0),
         "all": Case(0.2, 1e-4, 50.0, 3.0)}


def labels_of(rows: int, size: int, seed: int = 0) -> np.ndarray:
    """Classes, of which each fourth is ignored where there are several."""
    made = np.random.default_rng(seed).integers(0, size, rows)
    if rows > 1: made[::4] = IGNORED
    return made


def rounded(shape: tuple[int, ...], dtype: DType, scale: float = 1.0, seed: int = 0) -> Tensor:
    """Normal numbers of at most ±1e4."""
    made = np.random.default_rng(seed).standard_normal(shape) * scale
    return Tensor(made.clip(-1e4, 1e4).astype(np.float32)).cast(dtype).realize()


def numbers(*tensors: Tensor) -> list[np.ndarray]:
    """What tensors hold."""
    return [each.float().numpy() for each in tensors]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("rows", "size", "scale"), [(3, 1, 1.0), (9, 130, 5.0), (33, 1001, 1e4)])
def test_logits(name: str, rows: int, size: int, scale: float):
    case = CASES[name]
    labels, x = labels_of(rows, size), rounded((rows, size), F32, scale)
    wanted = partial(case.reduced, labels=torch.tensor(labels), reduction="mean")
    exact, plain = (gradients(wanted, numbers(x), kind) for kind in (torch.float64, torch.float32))
    got = ours(lambda x: cross_entropy(x, Tensor(labels), **case.options), [x])
    close(got, exact, plain)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_16_bit_logits(dtype: DType):
    labels, x, case = labels_of(9, 200), rounded((9, 200), dtype, 5.0), CASES["all"]
    wanted = partial(case.reduced, labels=torch.tensor(labels), reduction="mean")
    exact, plain = (gradients(wanted, numbers(x), kind) for kind in (torch.float64, torch.float32))
    got = ours(lambda x: cross_entropy(x, Tensor(labels), **case.options), [x])
    close(got[:1], exact[:1], plain[:1])
    close(got[1:], exact[1:], plain[1:], UNIT[dtype])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("name", "dtype", "biased"), [("plain", F32, False), ("all", F32, True),
                                                       ("plain", BF16, True), ("all", F16, False)])
def test_output_layer(name: str, dtype: DType, biased: bool, reduction: str):
    """In chunks of which the last is smaller."""
    case, labels = CASES[name], labels_of(37, 301)
    given = [rounded((37, 24), dtype), rounded((301, 24), dtype, seed=1), rounded((301,), dtype, seed=2)]
    given = given if biased else given[:2]

    def wanted(hidden: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
        return case.reduced(sum(bias, hidden @ weight.T), torch.tensor(labels), reduction)

    def made(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear_cross_entropy(hidden, weight, Tensor(labels), bias=bias, reduction=reduction, chunk=15,
                                    **case.options)
    exact, plain = (gradients(wanted, numbers(*given), kind) for kind in (torch.float64, torch.float32))
    got = ours(made, given)
    close(got[:1], exact[:1], plain[:1])
    # the gradient of logits is rounded, too; its errors add up over rows and classes as those of any matmul
    close(got[1:], exact[1:], plain[1:], 2 * UNIT[dtype])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("linear", [False, True])
def test_distillation(linear: bool, temperature: float):
    labels = labels_of(21, 130)
    hidden, weight = rounded((21, 24), F32), rounded((130, 24), F32, seed=1)
    taught = rounded((21, 40), F32, seed=2), rounded((130, 40), F32, seed=3)
    logits = Tensor(taught[0].numpy() @ taught[1].numpy().T)
    teacher = {"teacher_hidden": taught[0], "teacher_weight": taught[1]} if linear else \
        {"teacher_logits": logits}

    def wanted(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        given = torch.tensor(logits.numpy()).to(hidden.dtype)
        return distilled(hidden @ weight.T, given, torch.tensor(labels), temperature)
    given = numbers(hidden, weight)
    exact, plain = (gradients(wanted, given, kind) for kind in (torch.float64, torch.float32))
    got = ours(lambda hidden, weight: linear_distillation(
        hidden, weight, Tensor(labels), temperature=temperature, chunk=8, **teacher), [hidden, weight])
    close(got, exact, plain, 2.0**-20)
    x = Tensor(numbers(hidden)[0] @ numbers(weight)[0].T)
    one = distillation(x, logits, Tensor(labels), temperature=temperature).item()
    assert one == pytest.approx(exact[0].item(), rel=1e-5)


def test_whole_numbers_are_exact():
    """Logits of small integers are exact, whatever the chunks."""
    hidden, weight = (Tensor(np.random.default_rng(seed).integers(-2, 3, shape).astype(np.float32))
                      for seed, shape in enumerate(((20, 32), (90, 32))))
    labels = Tensor(labels_of(20, 90))
    logits = Tensor(hidden.numpy() @ weight.numpy().T)
    whole = cross_entropy(logits, labels, reduction="none").numpy()
    for chunk in (7, 20):
        chunked = linear_cross_entropy(hidden, weight, labels, reduction="none", chunk=chunk).numpy()
        assert (chunked == whole).all()


# **** nothing to count ****

def test_no_row_that_counts():
    hidden, weight = rounded((6, 32), F32), rounded((70, 32), F32, seed=1)
    ignored = Tensor([IGNORED] * 6)
    for rows, labels in ((hidden, ignored), (hidden[:0].contiguous(), ignored[:0])):
        for items, value in ((None, np.nan), (5, 0.0), (Tensor(5), 0.0), (Tensor([5]), 0.0)):
            weight.grad = None
            loss = linear_cross_entropy(rows, weight, labels, num_items=items)
            loss.backward()
            assert weight.grad is not None
            assert np.array_equal(loss.numpy(), value, equal_nan=True)
            assert (weight.grad.numpy() == 0).all()
    assert linear_cross_entropy(hidden[:0], weight, ignored[:0], reduction="none").shape == (0,)


def test_rows_that_are_ignored_may_be_nan():
    x = rounded((4, 50), F32)
    bad = (Tensor.arange(4).reshape(4, 1) == 2).where(float("nan"), x).contiguous()
    loss, gradient = ours(lambda x: cross_entropy(x, Tensor([3, 4, IGNORED, 5])), [bad])
    assert np.isfinite(loss)
    assert (gradient[2] == 0).all()


def test_label_that_is_no_class():
    for label in (50, -1):
        loss = cross_entropy(rounded((2, 50), F32), Tensor([3, label]), reduction="none").numpy()
        assert np.isfinite(loss[0])
        assert np.isnan(loss[1])


@pytest.mark.slow
def test_micro_batches_add_up():
    """With the number of items of the whole batch, losses and gradients of parts are those of the batch."""
    hidden, weight, labels = rounded((20, 32), F32), rounded((90, 32), F32, seed=1), labels_of(20, 90)
    whole = ours(lambda h, w: linear_cross_entropy(h, w, Tensor(labels)), [hidden, weight])
    items = int((labels != IGNORED).sum())
    parts = [ours(lambda w, part=part: linear_cross_entropy(  # type: ignore[misc]
        hidden[part].contiguous(), w, Tensor(labels[part]), num_items=items), [weight])
        for part in (slice(0, 8), slice(8, 20))]
    for one, both in ((whole[0], parts[0][0] + parts[1][0]), (whole[2], parts[0][1] + parts[1][1])):
        np.testing.assert_allclose(both, one, rtol=0, atol=2e-6 * np.abs(one).max())


# **** graphs ****

@pytest.mark.slow
def test_everywhere_the_same():
    """Eager, captured, inside @function, and without kernels."""
    given = rounded((12, 32), F32), rounded((90, 32), F32, seed=1)
    labels = Tensor(labels_of(12, 90)).realize()

    def step(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        hidden.grad = weight.grad = None
        loss = linear_cross_entropy(hidden, weight, labels, label_smoothing=0.1, chunk=5)
        loss.backward()
        assert hidden.grad is not None
        assert weight.grad is not None
        return tuple(each.contiguous() for each in (loss, hidden.grad, weight.grad))
    plain = [each.numpy() for each in step(*given)]
    @TinyJit
    def jitted(*given: Tensor) -> tuple[Tensor, ...]:
        made = step(*given)
        Tensor.realize(*made)
        return made
    for _ in range(3): captured = [each.numpy() for each in jitted(*given)]
    for one, other in zip(plain, captured, strict=True): assert (one == other).all()
    inside = function(lambda h, w: linear_cross_entropy(h, w, labels, label_smoothing=0.1, chunk=5))
    assert inside(*given).item() == plain[0].item()
    with disabled(): without = [each.numpy() for each in step(*given)]
    for one, other in zip(plain, without, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6 * np.abs(other).max())


def test_what_is_not_used_is_not_computed():
    """The loss alone has no gradient in it, and the gradient of the weight none of hidden states."""
    hidden, weight = rounded((12, 32), F32), rounded((90, 32), F32, seed=1)
    loss = linear_cross_entropy(hidden, weight, Tensor(labels_of(12, 90)), chunk=12)
    shown = str(explain(loss))
    assert "12x90x32" in shown
    assert "12x90 f32" in shown
    assert "in place" not in shown
    loss.backward()
    assert weight.grad is not None
    shown = str(explain(weight.grad))
    assert "12x90 f32 → f32, in place" in shown
    assert "90x32x12" in shown
    assert "12x32x90" not in shown


@pytest.mark.slow
def test_logits_are_not_kept():
    """The most that a captured step has beside its arguments: chunks, not logits."""
    hidden, weight = rounded((512, 16), F32), rounded((4096, 16), F32, seed=1)
    labels = Tensor(labels_of(512, 4096)).realize()

    @TinyJit
    def step() -> tuple[Tensor, ...]:
        hidden.grad = weight.grad = None
        loss = linear_cross_entropy(hidden, weight, labels, chunk=64)
        loss.backward()
        assert weight.grad is not None
        Tensor.realize(loss, hidden.grad, weight.grad)
        return loss, weight.grad
    for _ in range(3): step()
    assert step.captured is not None
    held = {node for node in step.captured.linear.toposort() if node.op is Ops.BUFFER}
    assert sum(each.nbytes() for each in held) < 64 * 4096 * 4 + 4 * weight.nbytes()
    assert 2 * sum(each.nbytes() for each in held) < 512 * 4096 * 4
