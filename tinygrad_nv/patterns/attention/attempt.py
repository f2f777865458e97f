"""Places where an attention may end, and the first of them that there is a kernel for."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from tinygrad.uop.ops import UOp

from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns import program
from tinygrad_nv.patterns.attention.dims import Sideways
from tinygrad_nv.patterns.attention.spec import Found, flops, nbytes
from tinygrad_nv.patterns.contraction import Unsupported
from tinygrad_nv.patterns.epilogue import Unfused
from tinygrad_nv.patterns.index import NotAffine
from tinygrad_nv.patterns.target import Chosen


@dataclass(frozen=True)
class Attempt:
    """A node that an attention may end in, whether it has rows, and the axes of the result as they lie in
    memory, if not in their order: tinygrad permutes it then."""
    end: UOp
    rows: bool = True
    lying: tuple[int, ...] = ()

    @property
    def order(self) -> tuple[int, ...]:
        """The axes of the end as they lie in memory."""
        return self.lying or tuple(range(len(self.end.shape)))

    def sideways(self) -> list[Attempt]:
        """The same with each of the other axes last."""
        axes = range(len(self.end.shape))
        return [replace(self, lying=(*(i for i in axes if i != last), last)) for last in axes[:-1]]


def make_first(attempts: Iterable[Attempt], make: Callable[[Attempt], None]) -> str:
    """Makes the first attempt that can be made: "", or why there is none."""
    reason, waiting = "", list(attempts)
    while waiting:
        one = waiting.pop(0)
        try: make(one)
        except (Unfused, NotAffine) as no: reason = reason or str(no)
        except SpecError as error: reason = reason or f"{error.found}, not {error.expected}"
        except Unsupported as no:
            reason = reason or str(no)
            if no.final: break
            if isinstance(no, Sideways) and one.rows and not one.lying: waiting += one.sideways()
        else: return ""
    return reason


def call_kernel(attempt: Attempt, made: Found, how: Chosen, inputs: list[UOp],
           *more: program.Output) -> tuple[UOp, ...]:
    """Returns the result of an attention where it ends, and what else its kernel writes."""
    end, order = attempt.end, attempt.order
    out = program.Output(tuple(end.shape[i] for i in order), end.dtype)
    done, *others = how.call(end.device, [out, *more], inputs, rows=made.rows, variables=made.variables,
                               flops=flops(made), nbytes=nbytes(made.spec))
    return done.permute(tuple(map(order.index, range(len(order))))) if attempt.lying else done, *others
