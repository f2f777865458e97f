"""`kernel`, the decorator: @kernel, @kernel(grid=…), @kernel.schedule(…), @kernel.autotune(…),
@kernel.auto."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tinygrad_nv.language import batches  # noqa: F401  (kernels under vmap)
from tinygrad_nv.language.autotune import AUTO, Autotuned
from tinygrad_nv.language.kernels import Kernel
from tinygrad_nv.tile.language.schedule import TileSchedule


class _Decorator:
    """Makes kernels of functions."""

    def __call__(self, fn: Any = None, *, grid: Any = None, schedule: TileSchedule | None = None) -> Any:
        """@kernel, or @kernel(grid=…, schedule=…). `grid`: how many programs there are, as numbers or as a
        function of dimensions and constants by name; without it programs follow the result."""
        if fn is not None: return Kernel(fn, grid, schedule)
        return lambda made: Kernel(made, grid, schedule)

    def schedule(self, *args: Any, grid: Any = None, **kwargs: Any) -> Callable[[Callable[..., Any]], Kernel]:
        """@kernel.schedule(base.with_block(64, 64)), or with the arguments of a Schedule."""
        made = args[0] if args and isinstance(args[0], TileSchedule) else TileSchedule(*args, **kwargs)
        return lambda fn: Kernel(fn, grid, made)

    def autotune(self, space: Mapping[str, Sequence[Any]], metric: str = "latency_ms",
                 budget_ms: float = 2000,
                 cache: str | Path | None = None, grid: Any = None,
                 schedule: TileSchedule | None = None) -> Callable[[Callable[..., Any]], Autotuned]:
        """@kernel.autotune(space=dict(BM=[64, 128], warps=[4, 8])): searches when it is first called with
        certain shapes, for `budget_ms`, and keeps what it finds in a directory, `cache`."""
        return lambda fn: Autotuned(fn, grid, schedule, space, metric, budget_ms, cache)

    def auto(self, fn: Any = None, *, grid: Any = None, budget_ms: float = 2000) -> Any:
        """@kernel.auto: `autotune` over usual blocks, warps and stages."""
        if fn is not None: return Autotuned(fn, grid, None, AUTO, "latency_ms", budget_ms, None)
        return lambda made: Autotuned(made, grid, None, AUTO, "latency_ms", budget_ms, None)


kernel = _Decorator()
