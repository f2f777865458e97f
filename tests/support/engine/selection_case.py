"""Selection by mass in NumPy, in the units of the spec (tile/sampling/spec.py), and rows whose sums are
nearly the target."""
from __future__ import annotations

import numpy as np

from tinygrad_nv.tile.sampling.spec import MOST_UNITS


def ordered(x: np.ndarray) -> np.ndarray:
    """float32 as uint32 in the same order."""
    bits = x.view(np.uint32)
    return np.where(bits >> 31 == 1, ~bits, bits | np.uint32(1 << 31))


def scale_of(target: np.float32) -> float:
    """Units of one, for a finite target."""
    exponent = int(np.frexp(target)[1]) - 1 if target > 0 else -127
    return 2.0 ** min(29 - exponent, 127)


def selected(keys: np.ndarray, weights: np.ndarray, target: np.float32) -> int:
    """The largest t of which the units reach the target, 0 if there is none; t is a key then."""
    if not target < np.inf: return 0
    if target <= 0: return 0xFFFFFFFF
    scaled = np.maximum(np.nan_to_num(weights.astype(np.float64)), 0) * scale_of(target)
    units = np.rint(np.minimum(scaled, MOST_UNITS)).astype(np.int64)
    order = np.argsort(keys)[::-1]
    enough = np.flatnonzero(np.cumsum(units[order]) >= float(target) * scale_of(target))
    return int(keys[order][enough[0]]) if len(enough) else 0


def weighted_rows(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Logits [R, size] that are flat, peaked, equal, rounded, all -inf, hardly any finite, or in order; with
    probabilities, integers, or huge numbers for weights; targets, and what is kept of each."""
    random, made = np.random.default_rng(size), list[tuple[np.ndarray, np.ndarray, float, np.ndarray]]()
    with np.errstate(invalid="ignore"):
        for kind in range(9):
            x = random.standard_normal(size).astype(np.float32) * (1, 9, 3, 1, 1, 1, 3, 3, 2)[kind]
            if kind == 2: x[:] = 2.5
            if kind == 3: x[:] = np.round(x)
            if kind == 4: x[:] = -np.inf
            if kind == 5: x[random.permutation(size)[20:]] = -np.inf
            if kind == 6: x.sort()
            if kind == 7: x[:2] = np.nan, np.array(0xFFC00000, np.uint32).view(np.float32)
            weights = np.exp(x - np.max(x))
            weights = (weights / weights.sum()).astype(np.float32)
            if kind == 8: weights = random.integers(0, 9, size).astype(np.float32)
            targets = (7, size * 2, size * 5) if kind == 8 else (1e-30, 0.3, 0.95, 1.5)
            for target in (*targets, 0, -1, np.inf, np.nan):
                keys, own = ordered(x), np.float32(target)
                made.append((x, weights, target,
                             np.where(keys >= selected(keys, weights, own), x, np.float32(-np.inf))))
    x, weights, targets, kept = map(np.stack, zip(*made, strict=True))
    weights[-1] = 1e38      # of a target that is no number: nothing overflows
    return x, weights.astype(np.float32), targets.astype(np.float32), kept


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
    near = [weights[keys >= key].sum(dtype=np.float64).astype(np.float32) for key in keys[:keys_tried]]
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
