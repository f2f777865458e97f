"""How a kernel in the tile language is computed: sizes of its blocks, and what a GPU makes of them.

Protocol: frozen; each call gives a new one. `Schedule(block=(128, 64), k=64, warps=8, stages=3)`, or from a
default: `Schedule().block(128, 64).k(64).warps(8).stages(3).vector(8).swizzle("xor")`. `numbers` are those
that a kernel's keyword arguments of these names take (BM, BN, BK, BD, warps, stages, vector).
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from tinygrad_nv.errors import ScheduleError, as_well

SWIZZLES = ("xor", "128B", "64B", "32B", "none")
NAMES = {"BM": "block_m", "BN": "block_n", "BK": "block_k", "BD": "block_d", "warps": "warp_count",
         "stages": "depth", "vector": "vector_width", "swizzle": "swizzled"}
METHODS = ("block", "with_block", "k", "warps", "stages", "vector", "swizzle", "with_")
LARGEST = 4096


@dataclass(frozen=True, init=False)
class TileSchedule:
    """`block_m` x `block_n` elements of the result a program, `block_k` of a reduction at once, `warp_count`
    warps, loads `depth` iterations ahead, `vector_width` elements an access."""
    block_m: int = 64
    block_n: int = 64
    block_k: int = 64
    block_d: int = 64
    warp_count: int = 4
    depth: int = 3
    vector_width: int = 8
    swizzled: str = "xor"

    def __init__(self, block: Sequence[int] | None = None, k: int | None = None, warps: int | None = None,
                 stages: int | None = None, vector: int | None = None, swizzle: str | None = None,
                 **fields: Any) -> None:
        given = {"block_k": k, "warp_count": warps, "depth": stages, "vector_width": vector,
                 "swizzled": swizzle}
        if block is not None: given["block_m"], given["block_n"] = _pair(block)
        known = {each: getattr(type(self), each) for each in type(self).__dataclass_fields__}
        made = {**known, **{name: value for name, value in given.items() if value is not None}, **fields}
        if unknown := set(made) - set(known):
            raise ScheduleError(f"{', '.join(sorted(unknown))} of a Schedule", f"some of {', '.join(known)}")
        for name, value in made.items():
            _check(name, value)
            object.__setattr__(self, name, value)

    # **** the fluent form ****

    def block(self, m: int, n: int | None = None, k: int | None = None) -> Self:
        """The block of the result, and of the reduction."""
        made = replace_(self, block_m=m, block_n=self.block_n if n is None else n)
        return made if k is None else made.k(k)

    def with_block(self, m: int, n: int) -> Self:
        """The same as `block`: derives a schedule with another block."""
        return self.block(m, n)

    def k(self, size: int) -> Self:
        """Elements of a reduction at once."""
        return replace_(self, block_k=size)

    def warps(self, count: int) -> Self:
        """Warps of a program."""
        return replace_(self, warp_count=count)

    def stages(self, count: int) -> Self:
        """Iterations that loads begin ahead."""
        return replace_(self, depth=count)

    def vector(self, width: int) -> Self:
        """Elements of an access to memory."""
        return replace_(self, vector_width=width)

    def swizzle(self, name: str) -> Self:
        """How tiles lie in shared memory."""
        return replace_(self, swizzled=name)

    def with_(self, **numbers: Any) -> Self:
        """Other numbers by the names of a search space: BM, BN, BK, BD, warps, stages, vector, swizzle."""
        fields = {NAMES.get(name, name): value for name, value in numbers.items()}
        return replace_(self, **fields)

    def __getattr__(self, name: str) -> Any:
        missing = AttributeError(f"{type(self).__name__} has no {name!r}")
        if name.startswith("_"): raise missing
        raise as_well(ScheduleError(f"{name!r} of a Schedule", f"one of {', '.join(METHODS)}"), missing)

    @property
    def numbers(self) -> Mapping[str, Any]:
        """By the names of a search space."""
        return {name: getattr(self, field) for name, field in NAMES.items()}

    def __str__(self) -> str:
        return (f"{self.block_m}x{self.block_n}, k {self.block_k}, {self.warp_count} warps, "
                f"{self.depth} stages, vectors of {self.vector_width}, swizzle {self.swizzled}")


def replace_(schedule: TileSchedule, **fields: Any) -> Any:
    """A schedule with other fields, checked."""
    known = {each: getattr(schedule, each) for each in type(schedule).__dataclass_fields__}
    return type(schedule)(**{**known, **fields})


def _pair(block: Any) -> tuple[int, int]:
    if isinstance(block, int): return block, TileSchedule.block_n
    if not isinstance(block, (tuple, list)) or len(block) != 2:
        raise ScheduleError(f"block={block!r}", "rows and columns, as (128, 64)")
    return block[0], block[1]


def _check(name: str, value: Any) -> None:
    if name == "swizzled":
        if value not in SWIZZLES: raise ScheduleError(f"swizzle {value!r}", f"one of {', '.join(SWIZZLES)}")
    elif type(value) is not int or not 1 <= value <= LARGEST:
        raise ScheduleError(f"{name}={value!r} of a Schedule", f"an integer from 1 to {LARGEST}")
