"""NV_DEBUG=1: block tables and lengths are looked at before kernels follow them.

Protocol: `checked(…)` gives table and lengths as they are, or with NV_DEBUG=1 copies of them, made by a
custom function that reads both on the host each time they are used, also in a replayed TinyJit, and raises a
`PageError` with request and token. Such a function waits for the device, and no graph can hold it. What a
TinyJit or GraphPool has captured before stays as it is.

An attention needs 0 ≤ length ≤ the table's tokens, and a page for each that its rows see; an append a page
for each new token, or −1, which writes nothing.
"""
from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from tinygrad import Tensor
from tinygrad.engine import realize
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv import config, hooks
from tinygrad_nv.errors import PageError

if TYPE_CHECKING:
    import numpy as np

FUNCTION = "nv_check_pages"


@dataclass(frozen=True)
class Limits:
    """Limits that a table is held against: pages there are, tokens of each, new rows of a request, how many
    keys a row sees (0: all), and whether −1 is an entry. `name` is the function that asks."""
    name: str
    pages: int
    size: int
    rows: int
    window: int = 0
    holes: bool = False

    def check(self, table: np.ndarray, lengths: np.ndarray) -> None:
        """Raises `PageError` for the first request that does not fit."""
        most = table.shape[1] * self.size
        for request, length in enumerate(lengths.tolist()):
            if not 0 <= length <= most:
                raise PageError(f"{self.name}: request {request} has length {length}",
                                f"0 to {most}: {table.shape[1]} pages of {self.size} tokens",
                                "correct its length, or give requests longer tables")
            for number in range(self.first(length) // self.size, -(-length // self.size)):
                entry = int(table[request, number])
                if 0 <= entry < self.pages or (self.holes and entry == -1): continue
                tokens = f"{number * self.size} to {min(length, (number + 1) * self.size) - 1} of {length}"
                none = ", or -1: none" if self.holes else ""
                raise PageError(f"{self.name}: request {request} has page {entry} at entry {number} of its "
                                f"block table, for tokens {tokens}",
                                f"a page from 0 to {self.pages - 1}{none}",
                                "correct the block table, or the request's length")

    def first(self, length: int) -> int:
        """The first token of a request that matters."""
        if self.holes: return max(0, length - self.rows)
        return max(0, length - self.rows - self.window + 1) if self.window else 0


def check_pages_used(limits: Limits, table: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Returns table and lengths, that raise `PageError` when they are computed and do not fit; as they are
    without NV_DEBUG=1."""
    if not config.get("NV_DEBUG"): return table, lengths
    if not _registered:
        hooks.add_custom_function(FUNCTION, _execute, lambda call: ((0, 1), (2, 3)))
        _registered.append(FUNCTION)
    body = UOp(Ops.CUSTOM_FUNCTION, arg=":".join([FUNCTION, *map(str, astuple(limits))]))
    given = [x.uop.contiguous() for x in (table, lengths)]
    made = [UOp.invalids(*x.shape, dtype=x.dtype, device=x.device) for x in (table, lengths)]
    call = body.call(*made, *given)
    return Tensor(made[0].after(call)), Tensor(made[1].after(call))


_registered: list[str] = []


def _execute(ctx: realize.ExecContext, call: UOp, ast: UOp) -> list[float | None]:
    """Looks at both, and copies them."""
    import numpy as np
    name, *numbers = ast.arg.split(":")[1:]
    pages, size, rows, window = map(int, numbers[:4])
    outs = [each.buffer.ensure_allocated() for each in realize.resolve_params(call, ctx.input_uops)]
    table, lengths = (np.frombuffer(each.as_memoryview(), np.int32) for each in outs[2:])
    Limits(name, pages, size, rows, window, numbers[4] == "True").check(
        table.reshape(len(lengths), -1), lengths)
    for out, source in zip(outs[:2], outs[2:], strict=True): out.copy_from(source)
    return []
