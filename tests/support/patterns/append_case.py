"""Appends to pages for tests of `kv_append`, and what they leave there, to the bit.

Protocol: `append(lengths, …)` makes new rows, pages full of other numbers, a table, and what else a call
takes; `wanted(case)` is what pages and q must be afterwards. Rotations are computed as the kernel defines
them: b · sin rounded to float32, then a · cos − that, rounded once; numbers of 8 bits are x · (1 / scale),
both rounded to float32, to the nearest.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tests.support.patterns.paged_case import TORCH, fetched, numbers, stored
from tinygrad_nv.patterns.kv_append.named import kv_append

NONE = -1  # an entry of a table without a page
# scales with which some numbers saturate
UNIT = {dtypes.int8: 0.02, dtypes.fp8e4m3: 0.004, dtypes.fp8e5m2: 3e-5}


@dataclass(frozen=True)
class Append:
    """The operands of a call by their names, and their dtypes."""
    given: dict[str, torch.Tensor]
    kinds: dict[str, DType]
    lengths: list[int]
    interleaved: bool = False

    def tensors(self, device: str) -> dict[str, Tensor]:
        """All of them in memory."""
        made = {name: stored(x, self.kinds[name], device) for name, x in self.given.items()
                if name != "table"}
        made["table"] = Tensor(self.given["table"].numpy(), device=device).realize()
        return made | {"lengths": Tensor(np.array(self.lengths, np.int32), device=device).realize()}


def append(lengths: list[int], rows: int = 1, heads: int = 2, d: int = 32, size: int = 8, pages: int = 3,
           dtype: DType = dtypes.float16, kv: DType | None = None, d_v: int | None = None, half: int = 0,
           q_heads: int = 0, interleaved: bool = False, angles: DType = dtypes.float32,
           seed: int = 0) -> Append:
    """Requests of these lengths. Tables have pages as far as requests need them."""
    random = torch.Generator().manual_seed(seed)
    kv, d_v, batch = kv or dtype, d if d_v is None else d_v, len(lengths)
    order = torch.randperm(batch * pages + 2, generator=random).tolist()
    table = torch.full((batch, pages), NONE, dtype=torch.int32)
    for b, length in enumerate(lengths):
        for c in range(min(pages, -(-length // size))): table[b, c] = order.pop()
    stored_pages = batch * pages + 2
    made = {"k_pages": numbers(random, (stored_pages, size, heads, d), kv),
            "v_pages": numbers(random, (stored_pages, size, heads, d_v), kv),
            "k": numbers(random, (batch, rows, heads, d), dtype),
            "v": numbers(random, (batch, rows, heads, d_v), dtype), "table": table}
    kinds = {"k_pages": kv, "v_pages": kv, "k": dtype, "v": dtype}
    if half:
        turns = torch.rand((pages * size, half), generator=random) * 7
        made |= {"cos": turns.cos().to(TORCH[angles]), "sin": turns.sin().to(TORCH[angles])}
        kinds |= {"cos": angles, "sin": angles}
    if q_heads:
        made["q"] = numbers(random, (batch, rows, q_heads, d), dtype)
        kinds["q"] = dtype
    if kv in UNIT:
        for name in ("k_scale", "v_scale"):
            made[name] = (torch.rand((stored_pages, heads), generator=random) + 0.5) * UNIT[kv]
            kinds[name] = dtypes.float32
    return Append(made, kinds, lengths, interleaved)


def infinite(kv: DType) -> Append:
    """Rows with numbers that are too large, infinities among them."""
    case = append([1, 9], rows=1, kv=kv)
    for name in ("k", "v"):
        case.given[name][:, :, 0, :4] = torch.tensor([torch.inf, -torch.inf, 6e4, -6e4])
    return case


def run(case: Append, device: str) -> dict[str, torch.Tensor]:
    """The call, realized: pages, and q where there is one."""
    tensors = case.tensors(device)
    made = kv_append(**tensors, interleaved=case.interleaved)
    assert made[0] is tensors["k_pages"]
    assert made[1] is tensors["v_pages"]
    Tensor.realize(*made)
    return {name: fetched(x) for name, x in zip(("k_pages", "v_pages", "q"), made, strict=False)}


# **** what it must be ****

def wanted(case: Append) -> dict[str, torch.Tensor]:
    """Pages, and q where there is one."""
    x = case.given
    made = {name: x[name].clone() for name in ("k_pages", "v_pages", "q") if name in x}
    batch, rows = x["k"].shape[:2]
    stored_pages, size = x["k_pages"].shape[:2]
    longest = x["table"].shape[1] * size
    for b in range(batch):
        for t in range(rows):
            place = case.lengths[b] - rows + t
            near = min(max(place, 0), longest - 1)
            if "q" in x: made["q"][b, t] = turned(case, x["q"][b, t], near).to(x["q"].dtype)
            page = int(x["table"][b, place // size]) if 0 <= place < longest else NONE
            if not 0 <= page < stored_pages: continue
            for name, new in (("k", turned(case, x["k"][b, t], near)), ("v", x["v"][b, t].float())):
                made[f"{name}_pages"][page, place % size] = narrowed(case, new, name, page)
    return made


def turned(case: Append, heads: torch.Tensor, place: int) -> torch.Tensor:
    """Heads in float32, rotated where there are angles."""
    if "cos" not in case.given: return heads.float()
    cos, sin = (case.given[name][place].double() for name in ("cos", "sin"))
    half = len(cos)
    made = heads.double()
    first = slice(0, 2 * half, 2) if case.interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if case.interleaved else slice(half, 2 * half)
    a, b = made[:, first].clone(), made[:, second].clone()
    made[:, first] = a * cos - (b * sin).float().double()
    made[:, second] = b * cos + (a * sin).float().double()
    return made.float()


def narrowed(case: Append, x: torch.Tensor, name: str, page: int) -> torch.Tensor:
    """Heads [H_kv, D] as pages have them."""
    target = case.given[f"{name}_pages"].dtype
    if f"{name}_scale" not in case.given: return x.to(target)
    x = x * (1 / case.given[f"{name}_scale"][page])[:, None]
    if target == torch.int8: return x.round().clamp(-128, 127).to(target)
    largest = torch.finfo(target).max
    return x.clamp(-largest, largest).to(target)


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Bit for bit, and in every byte."""
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        off = (found[name].view(torch.uint8) != x.view(torch.uint8)).nonzero()
        assert not len(off), f"{len(off)} bytes of {name} differ, the first at {off[0].tolist()}"
