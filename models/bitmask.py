"""Sparse tensors as compressed-tensors 0.3 to 0.14 stored them: the elements that are not left out, and which
they are.

    M.compressed    the elements, row after row: of 2:4 sparse ones [N, K / 2], else [number of them]
    M.bitmask       U8 [N, K / 8, rounded up]: bit i mod 8 of byte i // 8 is column i
    M.shape         I64 [2]: N and K
    M.row_offsets   I64 [N], where a row begins in the elements; of 2:4 sparse ones there are none

They stand for M.weight. Source: compressed-tensors 0.13.0, compressors/sparse_compressors/.
"""
from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tinygrad_nv.errors import WeightError

PARTS = ("compressed", "bitmask", "shape", "row_offsets")


def find_masked(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Returns, for each weight that is stored so, the names of its parts. Raises `WeightError` where one
    lacks."""
    every, found = set(names), dict[str, dict[str, str]]()
    for name in sorted(every):
        module, _, last = name.rpartition(".")
        if last != "bitmask": continue
        parts = {part: f"{module}.{part}" for part in PARTS if f"{module}.{part}" in every}
        if missing := [part for part in PARTS[:3] if part not in parts]:
            raise WeightError(f"{name}, and no {module}.{missing[0]}", "all parts of a sparse tensor",
                              "download the directory again")
        found[module if module.endswith(".weight") else f"{module}.weight"] = parts
    return found


def spread(name: str, elements: np.ndarray, mask: np.ndarray, columns: int) -> np.ndarray:
    """Rows of a tensor [R, columns] from their elements and the bytes of their mask. Raises `WeightError`
    where these do not fit."""
    kept = np.unpackbits(mask, axis=1, bitorder="little")[:, :columns].astype(bool)
    if (count := int(kept.sum())) != elements.size:
        raise WeightError(f"{name}: its bitmask keeps {count} elements of {len(mask)} rows, of "
                          f"{elements.size} that are stored", "as many", "download the directory again")
    made = np.zeros(kept.shape, elements.dtype)
    made[kept] = elements.reshape(-1)
    return made
