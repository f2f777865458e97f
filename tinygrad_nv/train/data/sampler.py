"""The order of rows: seeded, resumable, the same for any number of ranks.

Protocol: a global batch of `Sampler(rows, batch, ...)` is `batch` indices: those of an optimiser's step, for
all ranks and their micro-batches. Which these are does not depend on the number of ranks. `next(state)` gives
the indices and the state after them; the state is four integers, and any batch is found from it at once: the
order of an epoch is a permutation that is computed index by index, not stored.

An epoch's last batch has fewer indices where `batch` does not divide the rows, as in transformers' Trainer,
or is left out (`drop_last`).

`share(indices, rank, world, accumulation, rows)` says which of them a rank has: micro-batch m of rank r is
the one with number m·world + r, as accelerate deals them.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tinygrad_nv.errors import DataError

ROUNDS = 16             # of the permutation
GOLDEN = 0x9E3779B97F4A7C15
WORD = (1 << 64) - 1


@dataclass(frozen=True)
class SamplerState:
    """Position of training: `offset` indices of epoch `epoch` were used, of a data set of `rows`."""
    epoch: int
    offset: int
    seed: int
    rows: int

    def to_json(self) -> dict[str, int]:
        """For a checkpoint."""
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> SamplerState:
        """The state of a checkpoint. Raises `DataError` where it is none."""
        names = ("epoch", "offset", "seed", "rows")
        values = [data.get(name) for name in names] if isinstance(data, Mapping) else []
        if not values or not all(type(value) is int and value >= 0 for value in values):
            raise DataError(f"the sampler's state is {data!r}", f"integers from 0 on: {', '.join(names)}",
                            "resume from another checkpoint")
        return SamplerState(*(int(data[name]) for name in names))


@dataclass(frozen=True)
class Sampler:
    """The batches of a data set of `rows` indices. `shuffle` False: file order, the same each epoch."""
    rows: int
    batch: int
    seed: int = 42
    shuffle: bool = True
    drop_last: bool = False

    def __post_init__(self) -> None:
        assert min(self.rows, self.batch, self.seed + 1) > 0, self
        if not self.batches:
            raise DataError(f"{self.rows} rows, and {self.batch} in a batch",
                            "one batch or more, since the last one is dropped",
                            "lower the batch, or leave --dataloader-drop-last out")

    @property
    def batches(self) -> int:
        """Batches of an epoch."""
        return self.rows // self.batch if self.drop_last else -(-self.rows // self.batch)

    @property
    def start(self) -> SamplerState:
        """Before the first batch."""
        return SamplerState(0, 0, self.seed, self.rows)

    def require(self, state: SamplerState) -> None:
        """Raises `DataError` for the state of another data set or seed."""
        for words, own, other in (("{} rows", self.rows, state.rows), ("seed {}", self.seed, state.seed)):
            if own != other:
                found = f"the checkpoint is of {words.format(other)}, this run of {words.format(own)}"
                raise DataError(found,
                                "the data, the options of data and the seed that training began with",
                                "resume with these, or start a new run")
        if state.offset >= self.rows and state.offset:
            raise DataError(f"the checkpoint is at row {state.offset} of {self.rows}", "a row that there is",
                            "resume from another checkpoint")

    def next(self, state: SamplerState) -> tuple[np.ndarray, SamplerState]:
        """The next global batch, int64 [batch] or fewer at the end of an epoch, and the state after it."""
        end = min(state.offset + self.batch, self.rows)
        positions = np.arange(state.offset, end)
        indices = permute(positions, self.rows, self.seed, state.epoch) if self.shuffle else positions
        over = self.rows - end < (self.batch if self.drop_last else 1)
        return indices, SamplerState(state.epoch + over, 0 if over else end, self.seed, self.rows)


def share(indices: np.ndarray, rank: int, world: int, accumulation: int, rows: int) -> list[np.ndarray]:
    """The indices of each micro-batch of a rank: `rows`, or fewer where the global batch has fewer."""
    numbers = [micro * world + rank for micro in range(accumulation)]
    return [indices[number * rows:(number + 1) * rows] for number in numbers]


# **** the permutation ****

def permute(positions: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
    """Where a permutation of `count` indices has these positions, int64: a Feistel network over the smallest
    4^h that holds them, applied again to what is beyond `count` (cycle walking; Black and Rogaway, "Ciphers
    with arbitrary finite domains", 2002). The bits are of integer arithmetic alone: the same on every system
    and with every version of numpy."""
    half = np.uint64(max(2, ((count - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = _keys(seed, epoch)
    def network(values: np.ndarray) -> np.ndarray:
        left, right = values >> half, values & mask
        for key in keys: left, right = right, left ^ (_mix(right + key) & mask)
        return (left << half) | right
    out = network(np.asarray(positions).astype(np.uint64))
    while (beyond := out >= np.uint64(count)).any(): out[beyond] = network(out[beyond])
    return out.astype(np.int64)


def _keys(seed: int, epoch: int) -> Sequence[np.uint64]:
    """Returns the keys of each round: SplitMix64, begun with the seed and the epoch."""
    begin = _mix(np.array([seed & WORD], np.uint64)) + np.uint64(epoch * GOLDEN & WORD)
    steps = np.array([number * GOLDEN & WORD for number in range(1, ROUNDS + 1)], np.uint64)
    return list(_mix(_mix(begin) + steps))


def _mix(values: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer (Steele, Lea and Flood, 2014), element by element, modulo 2^64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(values ^ (values >> np.uint64(31)))
