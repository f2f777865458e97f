"""Selection by mass in NumPy, in the order of the spec (tile/sampling/spec.py), and rows whose sums are
nearly the target."""
from __future__ import annotations

import numpy as np

from tinygrad_nv.tile.sampling.spec import LANES


def ordered(x: np.ndarray) -> np.ndarray:
    """float32 as uint32 in the same order."""
    bits = x.view(np.uint32)
    return np.where(bits >> 31 == 1, ~bits, bits | np.uint32(1 << 31))


def mass(keys: np.ndarray, weights: np.ndarray, least: int) -> np.float32:
    """Σ weights[keys ≥ least], in the order of the spec."""
    rows = -(-len(keys) // LANES)
    kept = np.pad(np.where(keys >= least, weights, np.float32(0)), (0, rows * LANES - len(keys)))
    lanes = np.zeros(LANES, np.float32)
    for row in kept.reshape(LANES, rows).T: lanes += row
    total = np.float32(0)
    for lane in lanes: total += lane
    return total


def selected(keys: np.ndarray, weights: np.ndarray, target: np.float32) -> int:
    """The largest t of which the mass reaches the target, 0 if there is none; t is a key then."""
    return max((int(key) for key in keys if mass(keys, weights, key) >= target), default=0)


def near_targets(size: int, alike: bool, keys_tried: int = 8
                 ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Logits [size] with equals, -inf and -0; weights; targets [R] at, just above and just below what masses
    are, and infinity; and what is kept of the logits for each, [R, size]."""
    random = np.random.default_rng(size)
    x = random.standard_normal(size).astype(np.float32)
    x[:3] = x[3]
    x[size // 3:size // 2] = -np.inf
    x[4] = -0.0
    keys, weights = ordered(x), np.ones(size, np.float32)
    if not alike:
        weights = random.random(size).astype(np.float32)
        weights[size // 2:] *= random.integers(0, 2, size - size // 2)
    near = [mass(keys, weights, int(key)) for key in keys[:keys_tried]]
    targets = [goal for each in near
               for goal in (each, np.nextafter(each, np.float32(1e9)), np.nextafter(each, np.float32(0)))]
    targets.append(np.float32(np.inf))
    kept = [np.where(keys >= selected(keys, weights, goal), x, np.float32(-np.inf)) for goal in targets]
    return x, weights, np.array(targets, np.float32), np.stack(kept)


def counted_rows(size: int, stride: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits [R, size], of which the largest of some are so far apart, or equal, or NaN; how many of each are
    wanted, and what is kept."""
    random, made = np.random.default_rng(size), list[tuple[np.ndarray, float, np.ndarray]]()
    for wanted in (1, 2, 3.5, size // stride + 2, size // 2, size, size + 1, np.inf, np.nan, 0, -1):
        for kind in range(3):
            x = random.standard_normal(size).astype(np.float32)
            x[:4] = -np.inf, -0.0, 0.0, -0.0
            if kind == 1: x[::stride] += 10
            if kind == 2: x[:] = np.round(x)
            if kind == 2: x[5:7] = np.array([0x7FC00000, 0xFFC00000], np.uint32).view(np.float32)
            keys, count = ordered(x), size + 1 if wanted != wanted else min(np.ceil(wanted), size + 1)
            least = 0 if count > size else 0xFFFFFFFF if count <= 0 else np.sort(keys)[::-1][int(count) - 1]
            made.append((x, wanted, np.where(keys >= least, x, np.float32(-np.inf))))
    rows, targets, kept = zip(*made, strict=True)
    return np.stack(rows), np.array(targets, np.float32), np.stack(kept)


def above(x: np.ndarray) -> list[int]:
    """The upper word of the key of the largest of each row (tile/sampling/spec.py)."""
    best = np.where(x.max(1) == 0, np.float32(0), x.max(1))
    return [int(each) for each in np.where(np.isnan(best), 0xFFFFFFFF, ordered(best))]


def hard_rows(size: int) -> np.ndarray:
    """Rows of logits whose largest is twice there, -0 before 0, NaN, -inf alone, and some below 0."""
    x = np.random.default_rng(size).standard_normal((6, size)).astype(np.float32)
    x[0, [size // 4, size - 9]] = 9
    x[1] = -1
    x[1, [13, size - 40]] = -0.0, 0.0
    x[2, size - 2] = np.nan
    x[3] = -np.inf
    x[4] -= 20
    x[5, :size // 2] = -np.inf
    return x
