"""Attentions of tests through a driver, the GPU's or the emulated one, in the place of the emulator.

Protocol: `put(monkeypatch, driver)` lets `run` of attention_case.py, decode_case.py and backward_case.py
launch on a driver. What the emulator would take for unwritten holds bytes of 255 there: NaN, where it is
floats. Reports are empty: a GPU finds nothing.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from bench.gpu.launch import make_launch
from tests.support.tile import attention_case, backward_case, decode_case
from tests.support.tile.gemm_case import GUARD, TORCH, bits
from tinygrad_nv.ptx.emulator.report import Report
from tinygrad_nv.runtime.driver import Driver
from tinygrad_nv.tile.kernel import TileKernel

Given = Mapping[str, torch.Tensor]


@dataclass
class Kept:
    """A storage on its way to a device, as the emulator's buffers are: bytes, and which of them are written.
    """
    data: np.ndarray
    valid: np.ndarray | None = None

    @property
    def bytes(self) -> bytes:
        """With 255 for what is not written."""
        if self.valid is None: return self.data.tobytes()
        return np.where(np.resize(self.valid, self.data.size) != 0, self.data, 255).astype(np.uint8).tobytes()


def kept(storage: torch.Tensor) -> Kept:
    """All of it written."""
    return Kept(np.frombuffer(bits(storage), np.uint8).copy())


def results(driver: Driver, kernels: Sequence[TileKernel], storages: Sequence[Kept | int],
            wanted: Iterable[int], integers: Sequence[int] = (), rows: int = 0,
            zeroed: Mapping[int, int] | None = None) -> list[bytes]:
    """Bytes of the wanted storages after a launch; a number instead of a storage is a workspace's bytes."""
    sizes = [each if isinstance(each, int) else each.data.size for each in storages]
    addresses = [driver.alloc(size) for size in sizes]
    try:
        for address, each in zip(addresses, storages, strict=True):
            if isinstance(each, Kept): driver.copy_in(address, memoryview(each.bytes))
        fills = [(addresses[number], nbytes) for number, nbytes in (zeroed or {}).items()]
        make_launch(driver, kernels, addresses, integers, rows, fills)(None)
        found = []
        for number in wanted:
            out = bytearray(sizes[number])
            driver.copy_out(memoryview(out), addresses[number])
            found.append(bytes(out))
    finally:
        for address in addresses: driver.free(address)
    return found


def tensors(found: Sequence[bytes], names: Sequence[str], given: Given) -> dict[str, torch.Tensor]:
    """Storages by name, of the dtypes that were given."""
    return {name: torch.frombuffer(bytearray(data), dtype=given[name].dtype)
            for name, data in zip(names, found, strict=True)}


def put(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> None:
    """Lets attentions be launched on the driver."""
    def forward(made: Any, spec: Any, given: Given, arch: str, seed: int = 0, check: bool = True,
                **extents: int) -> tuple[dict[str, torch.Tensor], Report]:
        at = attention_case.actual(spec, extents)
        storages = {name: kept(given[name]) for name in attention_case.places(spec)}
        attention_case.forget(spec, storages, at)  # type: ignore[arg-type]
        names = [name for name in ("out", "l") if name in storages]
        found = results(driver, [made], list(storages.values()), range(len(names)),
                        [at[name] for name in spec.symbolic], at["s_q"])
        return tensors(found, names, given), Report()

    def backward(made: Any, spec: Any, given: Given, arch: str, seed: int = 0, check: bool = True,
                 **extents: int) -> tuple[dict[str, torch.Tensor], Report]:
        at, names = attention_case.actual(spec.forward, extents), list(backward_case.places(spec))
        order: list[Kept | int] = [kept(given[name]) for name in names]
        zeroed = {0: given["dq"].nbytes}
        if made.flags:
            order.insert(1, 4 * made.flags)
            zeroed[1] = 4 * made.flags
        wanted = [names.index(name) + bool(made.flags and name != "dq") for name in backward_case.RESULTS]
        found = results(driver, [made], order, wanted, [at[name] for name in spec.forward.symbolic],
                        at["s_kv"], zeroed)
        return tensors(found, backward_case.RESULTS, given), Report()

    def decode(made: Any, spec: Any, given: Any, arch: str = "sm_80", seed: int = 0,
               check: bool = True) -> tuple[torch.Tensor, list[Report]]:
        size, dtype = decode_case.size_of(spec, spec.out, spec.d_v), TORCH[spec.out.dtype]
        order: list[Kept | int] = [kept(torch.full((size,), GUARD, dtype=dtype))]
        if made.workspace_bytes: order.append(made.workspace_bytes)
        for name in ("q", "k", "v", "table", "lengths", "k_scale", "v_scale"):
            if name == "v" and given.together: order.append(order[-1])
            elif name in given.storages: order.append(kept(given.storages[name]))
        found = results(driver, made.kernels, order, [0])
        return torch.frombuffer(bytearray(found[0]), dtype=dtype), [Report()]

    monkeypatch.setattr(attention_case, "launched", forward)
    monkeypatch.setattr(backward_case, "launched", backward)
    monkeypatch.setattr(decode_case, "launched", decode)
