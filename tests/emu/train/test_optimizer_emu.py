"""Training on the emulated GPU: activations on the host in between, with copies beside kernels; steps of one
launch for all parameters, with paged state and the weights of the CPU."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tinygrad import Device, Tensor, TinyJit

from tests.support.patterns.on_emu import emu  # noqa: F401
from tests.support.train.optimizer_case import gradients, numbers, parameters, ran
from tinygrad_nv import explain
from tinygrad_nv.runtime.driver import Download, Upload
from tinygrad_nv.runtime.observe.memory_timeline import MemoryTimeline, memory_timeline
from tinygrad_nv.train.optimizers import StateOptions, adamw, lion
from tinygrad_nv.train.regions import checkpoint

ROWS, WIDTH = 256, 64
INPUT = ROWS * WIDTH * 4    # bytes of a layer's input


def stepped(policy: str, layers: int, monkeypatch: pytest.MonkeyPatch | None = None
            ) -> tuple[list[np.ndarray], MemoryTimeline, list[Any]]:
    """A captured step of layers of a matmul and its activation: results, memory, and what was copied in the
    step that was captured, each with whether it was in the stream of kernels."""
    random = np.random.default_rng(5)
    def drawn(*shape: int) -> Tensor:
        return Tensor(random.standard_normal(shape).astype(np.float32) / 4, device="EMU").realize()
    weights, x = [drawn(WIDTH, WIDTH) for _ in range(layers)], drawn(ROWS, WIDTH)

    def step() -> tuple[Tensor, ...]:
        h = x.relu().contiguous()
        for w in weights:
            def layer(h: Tensor, w: Tensor = w) -> Tensor:
                return (h + (h @ w).contiguous().silu().contiguous()).contiguous()
            h = checkpoint(layer, policy)(h)
        loss = h.square().mean()
        made = loss, *loss.gradient(*weights)
        Tensor.realize(*made)
        return made
    jit = TinyJit(step)
    jit(), jit()
    copied, driver = list[Any](), Device["EMU"].driver
    if monkeypatch is not None:
        submit = driver.submit

        def watched(work: Any, stream: Any = None) -> None:
            if isinstance(work, Upload | Download): copied.append((type(work), stream is None))
            submit(work, stream)
        monkeypatch.setattr(driver, "submit", watched)
    return [each.numpy() for each in jit()], memory_timeline(jit), copied


def test_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every input but the last layer's goes to the host and back, in a stream of its own, and the results are
    those of "full" to the bit. The emulator would report a kernel that does not wait."""
    expected, full, _ = stepped("full", 5)
    made, off, copied = stepped("offload", 5, monkeypatch)
    for want, found in zip(expected, made, strict=True): np.testing.assert_array_equal(found, want)
    assert copied == [(Download, False)] * 4 + [(Upload, False)] * 4
    assert off.peak.nbytes <= full.peak.nbytes - INPUT
    names = [moment.name for moment in off.at]
    assert [names.count(name) for name in ("offload", "prefetch", "prefetched")] == [4, 4, 4]


@pytest.mark.slow
def test_prefetch_is_ahead() -> None:
    """An input is on its way back while kernels of the layer behind it run, and layers that are more take no
    more memory but tokens."""
    _, few, _ = stepped("offload", 4)
    _, more, _ = stepped("offload", 6)
    names = [moment.name for moment in more.at]
    starts, ends = ([i for i, name in enumerate(names) if name == each]
                    for each in ("prefetch", "prefetched"))
    for start, end in zip(starts, ends, strict=True): assert end - start >= 3
    assert more.peak.nbytes - few.peak.nbytes <= 2 * 4 * 2


def test_one_launch():
    held = parameters("EMU")
    optimizer = adamw(held, 1e-2, options=StateOptions(max_grad_norm=1.0))
    given = {name: Tensor(x, device="EMU").realize() for name, x in gradients(0).items()}
    shown = explain(*optimizer.schedule_step(given))
    assert [kernel.template for kernel in shown.kernels].count("optimizer") == 2    # the norm, the update


@pytest.mark.sampled(1)
@pytest.mark.parametrize("paged", [False, True])
def test_as_on_the_cpu(paged: bool):
    options = StateOptions(max_grad_norm=1.0, paged=paged)
    found, optimizer = ran(lambda held: adamw(held, 1e-2, options=options), 4, device="EMU")
    wanted, _ = ran(lambda held: adamw(held, 1e-2, options=options), 4)
    for name, x in wanted.items(): np.testing.assert_allclose(found[name], x, rtol=2e-6, atol=2e-6)
    assert all((np.abs(found[name] - x) > 1e-3).any() for name, x in numbers(1).items())
    states = [x for name, x in optimizer.state_dict().items() if "exp_avg" in name]
    assert {x.device for x in states} == {"CPU" if paged else "EMU"}


@pytest.mark.slow
def test_paged_lion():
    found, _ = ran(lambda held: lion(held, 1e-2, options=StateOptions(paged=True)), 3, device="EMU")
    wanted, _ = ran(lambda held: lion(held, 1e-2), 3)
    for name, x in wanted.items(): np.testing.assert_allclose(found[name], x, rtol=1e-6, atol=1e-6)
