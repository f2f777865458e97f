"""What cannot be shared with another library: found, expected, what to do."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tinygrad_nv import Tensor, TinyJit, Variable
from tinygrad_nv.errors import DLPackError


class Elsewhere:
    """A tensor on a device of DLPack's that tinygrad has not."""
    def __init__(self, kind: int) -> None: self.kind = kind
    def __dlpack__(self, **asked: Any) -> object: return np.ones(3).__dlpack__()
    def __dlpack_device__(self) -> tuple[int, int]: return self.kind, 0


class NoCapsule(Elsewhere):
    def __dlpack__(self, **asked: Any) -> object: return 7


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "gradient": (lambda: Tensor(torch.ones(3, requires_grad=True)), r"x\.detach\(\)"),
    "sparse": (lambda: Tensor(torch.ones(3, 3).to_sparse()), "dense tensor"),
    "conjugated": (lambda: Tensor(torch.ones(3, dtype=torch.complex64).conj()), "conj"),
    "complex": (lambda: Tensor(torch.ones(3, dtype=torch.complex64)), "elements of complex, 64 bits"),
    "an AMD GPU": (lambda: Tensor.from_dlpack(Elsewhere(10)), r"kind 10[\s\S]*x\.cpu\(\)"),
    "a GPU that is not there": (lambda: Tensor.from_dlpack(Elsewhere(2)), r"GPU 0[\s\S]*x\.cpu\(\)"),
    "no capsule": (lambda: Tensor.from_dlpack(NoCapsule(1)), "__dlpack__ returned int"),
    "a list": (lambda: Tensor.from_dlpack([1, 2]), r"a list[\s\S]*takes lists"),
    "the emulator": (lambda: torch.from_dlpack(Tensor([1.0], device="EMU")),
                     r"on EMU[\s\S]*tensor\.to\('CPU'\)"),
    "several devices": (lambda: torch.from_dlpack(Tensor([1.0, 2.0]).shard(("CPU", "CPU:1"), 0)),
                        "2 devices"),
    "a symbolic shape": (lambda: np.from_dlpack(Tensor.ones(9).contiguous()[:Variable("n", 1, 9).bind(3)]),
                         "symbolic"),
    "another kind of device": (lambda: Tensor([1.0]).__dlpack__(dl_device=(2, 0)), "DLPack device"),
}


@pytest.mark.parametrize("case", CASES)
def test_refused(case: str):
    made, words = CASES[case]
    with pytest.raises(DLPackError, match=words) as caught: made()
    assert isinstance(caught.value, BufferError)
    assert caught.value.expected or caught.value.fix


def test_memory_is_not_shared_from_within_a_capture():
    def step(x: Tensor) -> Tensor: return Tensor(torch.from_dlpack((x + 1).realize()) * 2).realize()
    jitted = TinyJit(step)
    jitted(Tensor([1.0]).realize())
    with pytest.raises(DLPackError, match="TinyJit"): jitted(Tensor([1.0]).realize())
