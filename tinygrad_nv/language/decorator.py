"""`kernel`, the decorator: @kernel, @kernel(grid=…), @kernel.schedule(…), @kernel.autotune(…),
@kernel.auto.

Under `vmap` there is one kernel over all examples, of n times as many programs (tile/language/batching.py).
Arguments that are the same for all examples stay as they are. The gradient is that of one example,
batched. A kernel that writes into a donated Tensor is refused: each example would write into the same.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tinygrad import Tensor
from tinygrad.uop.ops import UOp

from tinygrad_nv.errors import TransformError
from tinygrad_nv.language.autotune import AUTO, Autotuned
from tinygrad_nv.language.kernels import Call, Kernel, body
from tinygrad_nv.patterns import named
from tinygrad_nv.tile.language.batching import batch_program
from tinygrad_nv.tile.language.schedule import TileSchedule
from tinygrad_nv.transforms.batching.functions import gradient_of
from tinygrad_nv.transforms.batching.graph import repeat_node
from tinygrad_nv.transforms.batching.named import add_rule


def _over_examples(node: UOp, arguments: Sequence[UOp | None], n: int) -> list[UOp]:
    """The results [n, …] of a call."""
    call: Call = node.arg.aux
    if call.donated:
        written = ", ".join(sorted(call.donated))
        raise TransformError(f"vmap of kernel {call.label}, which writes into {written}",
                             "a kernel with results of its own", "leave donate() out")
    inputs = [each.name for each in call.program.tensors if not each.output]
    names = [name for name, new in zip(inputs, arguments, strict=False) if new is not None]
    program = batch_program(call.program, n, names)
    given = [new if new is not None else old if i < len(inputs) else repeat_node(old, n)
             for i, (old, new) in enumerate(zip(node.src[1:], arguments, strict=True))]
    own = [new is not None or i >= len(inputs) for i, new in enumerate(arguments)]
    back = None if node.arg.grad_fxn is None else gradient_of(node, own, n)
    made = named.call(replace(call, key=program.key, program=program), body, *map(Tensor, given), grad=back)
    return [each.uop for each in made]


add_rule(Call, _over_examples)


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
