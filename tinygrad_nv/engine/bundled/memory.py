"""Memory that host and kernels of a bundle have in common: what it has, and where inputs lie in it."""
from __future__ import annotations

import hashlib
from dataclasses import asdict

import numpy as np
from tinygrad.device import Buffer

from tinygrad_nv.bundle.manifest import canonical
from tinygrad_nv.engine.worker.input_buffer import InputLayout


def layout_of(layout: InputLayout) -> str:
    """A hash of where the inputs of a step lie, which host and kernels have to agree on."""
    return hashlib.sha256(canonical([asdict(each) for each in layout.fields])).hexdigest()


def bytes_of(buffer: Buffer) -> memoryview:
    """Returns the content of a device's memory."""
    return np.frombuffer(buffer.ensure_allocated().as_memoryview(), np.uint8).data
