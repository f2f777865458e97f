"""Helpers of the tests that run tinygrad on DEV=CUDA, over the fake of NVIDIA's driver library."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from tinygrad.helpers import Context

from tests.support.runtime.cuda_fake import Fake, installed
from tinygrad_nv import Tensor, hooks
from tinygrad_nv.runtime.cuda.device import CUDADevice

NEWEST = (99, 0)    # a driver that takes whatever PTX NVRTC makes


@contextmanager
def cuda(renderer: str = "", **options: Any) -> Iterator[Fake]:
    """DEV=CUDA, with the fake's GPUs; afterwards the device is closed, and nothing is left on it."""
    with installed(**{"version": NEWEST, **options}) as fake:
        try:
            with Context(DEV=f"CUDA:{renderer}" if renderer else "CUDA"): yield fake
        finally:
            hooks.remove_device("CUDA")
            hooks.add_device("CUDA", CUDADevice)


def on_both(made: Callable[[], Tensor], device: str = "CPU") -> tuple[np.ndarray, np.ndarray]:
    """What a program gives on the default device, and on another."""
    here = made().numpy()
    with Context(DEV=device): return here, made().numpy()
