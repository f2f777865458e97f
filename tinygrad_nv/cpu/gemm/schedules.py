"""How a matmul is computed on a CPU: the schedules of its templates, and those by default.

Protocol: `variants` gives the schedules that differ in one number, halved or doubled and rounded to what the
others need, or of a blocked product in the shape that is kept in registers; each once, legal or not.
"""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Self

from tinygrad_nv.cpu.gemm.layout import PER, few_rows, for_tiles, kind_of, orient, tile_multiples
from tinygrad_nv.cpu.kernel import up
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.cpu.template import CPUSchedule
from tinygrad_nv.tile.gemm.spec import INT8S, GemmSpec
from tinygrad_nv.tile.template import AnyTemplate
from tinygrad_nv.tile.templates import TABLE


@dataclass(frozen=True)
class CPUGemmSchedule(CPUSchedule, ABC):
    """`block_m`, `block_n` and `block_k` elements are what a part keeps in its caches."""
    block_m: int = 0
    block_n: int = 0
    block_k: int = 0

    @property
    def registers(self) -> tuple[int, int]:
        """Rows and columns of what the innermost loop keeps in registers; zeros where they are no numbers of
        the schedule."""
        return 0, 0

    @property
    def block(self) -> str:
        """Blocks that a part keeps in its caches, in words."""
        return f"{self.block_m}x{self.block_n}x{self.block_k}"

    def variants(self, spec: GemmSpec, target: CPU) -> list[Self]:
        """Returns the schedules near to it."""
        return [s for s in dict.fromkeys(one.fit_to(spec) for one in self._neighbours(target)) if s != self]

    @abstractmethod
    def fit_to(self, spec: GemmSpec) -> Self:
        """Returns the schedule with blocks rounded to multiples, and no larger than the product."""

    def _neighbours(self, target: CPU) -> Iterator[Self]:
        for name in ("block_k", "block_m", "block_n", "rows", "parts"):
            value: Any = getattr(self, name, 0)
            if value > 1: yield replace(self, **{name: value // 2})
            if value: yield replace(self, **{name: value * 2})
        yield replace(self, parts=target.threads)

    def _round_blocks(self, spec: GemmSpec, m: int, n: int, k: int) -> Self:
        rows, columns = up(min(self.block_m, spec.m), m), up(min(self.block_n, spec.n), n)
        return replace(self, block_m=rows, block_n=columns, block_k=up(min(self.block_k, spec.k), k))

    def words(self) -> list[str]:
        made, (rows, columns) = [*super().words(), f"block {self.block}"], self.registers
        return [*made, f"registers {rows}x{columns}"] if rows or columns else made


@dataclass(frozen=True)
class Amx(CPUGemmSchedule):
    """By AMX tiles (amx.py)."""
    template: ClassVar[str] = "amx"

    def fit_to(self, spec: GemmSpec) -> Self:
        turned = for_tiles(spec)
        return self._round_blocks(turned, *tile_multiples(turned))


@dataclass(frozen=True)
class CPUGemm(CPUGemmSchedule):
    """Schedule of packed operands (blocked/kernel.py): `rows` x `columns` sums in registers."""
    rows: int = 0
    columns: int = 0
    template: ClassVar[str] = "gemm"

    @property
    def registers(self) -> tuple[int, int]: return self.rows, self.columns

    def fit_to(self, spec: GemmSpec) -> Self:
        turned, unit = orient(spec, self.isa), self.isa.lanes * PER[kind_of(spec, self.isa)]
        return self._round_blocks(turned, self.rows, self.columns,
                                  unit) if self.rows and self.columns else self

    def _neighbours(self, target: CPU) -> Iterator[Self]:
        for vectors in (1, 2, 3, 4):
            most = (self.isa.registers - vectors - 1) // vectors
            yield replace(self, rows=most, columns=vectors * self.isa.lanes)
        yield from super()._neighbours(target)


@dataclass(frozen=True)
class CPUGemv(CPUGemmSchedule):
    """Schedule of few rows (gemv/kernel.py): chunks of `block_n` columns; `block_m` rows of a and `rows`
    streams of b at a time; 0 `block_k` is all of k. Where columns of b lie side by side, `columns` of them
    stay in registers for a block of k."""
    rows: int = 0
    columns: int = 0
    template: ClassVar[str] = "gemv"
    widens: ClassVar[bool] = True

    @property
    def registers(self) -> tuple[int, int]: return self.rows, self.columns

    def fit_to(self, spec: GemmSpec) -> Self:
        most = few_rows(spec)
        return replace(self, block_m=min(self.block_m, most.m),
                       block_n=up(min(self.block_n, most.n), self.isa.lanes))


FEWEST_BY_FOURS = 5    # rows of bytes that are not for gemv


@lru_cache(4096)
def default(spec: GemmSpec, target: CPU) -> CPUGemmSchedule | None:
    """The default schedule, where none was tuned; None when no template takes the matmul."""
    return next(iter(starts(spec, target)), None)


def starts(spec: GemmSpec, target: CPU) -> list[CPUGemmSchedule]:
    """Returns the default schedule of each template that takes a matmul, the fastest first."""
    return [s for template in _order_templates(spec, target) for s in template.candidates(spec, target)
            if not template.problems(spec, s, target)]


def _order_templates(spec: GemmSpec, target: CPU) -> tuple[AnyTemplate, ...]:
    """Templates, the fastest first. On Zen 4 gemv is for all of its 16 rows, but not of bytes, of which gemm
    multiplies four at once: 16 rows by 4096 x 2048 take 2.1 ms, 4.5 by gemv; 4 rows the same."""
    by_fours = spec.a.dtype in INT8S and target.isa.vnni and min(spec.m, spec.n) >= FEWEST_BY_FOURS
    gemv, *others = TABLE.templates(target.kind, spec)
    return (*others, gemv) if by_fours else (gemv, *others)
