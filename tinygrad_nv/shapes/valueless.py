"""Code that runs on tensors without values: `realize` leaves those alone, and what reads their values is
refused.

Protocol. `without_values(depends, refusal)` holds inside a `with`, and inside others of them: a Tensor of
which `depends` says True is not realized, and reading it raises what `refusal` returns. All other tensors are
as ever. Of tensors that would be realized the graph is lost, and with it the shape of what depends on a name,
or a gradient.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from tinygrad import Tensor

from tinygrad_nv import hooks

Depends = Callable[[Tensor], bool]
_stack: list[tuple[Depends, Callable[[], Exception]]] = []


def _realize(theirs: Any, self: Tensor, *others: Tensor, **options: Any) -> Tensor:
    rest = [each for each in (self, *others) if not any(depends(each) for depends, _ in _stack)]
    if rest: theirs(rest[0], *rest[1:], **options)
    return self


def _read(theirs: Any, self: Tensor) -> Any:
    for depends, refusal in reversed(_stack):
        if depends(self): raise refusal()
    return theirs(self)


@contextlib.contextmanager
def without_values(depends: Depends, refusal: Callable[[], Exception]) -> Iterator[None]:
    """Nothing of which `depends` says True gets a value inside."""
    if not _stack:
        hooks.add_method("realize", _realize, always=True)
        hooks.add_method("_buffer", _read, always=True)
    _stack.append((depends, refusal))
    try: yield
    finally:
        _stack.pop()
        if not _stack:
            hooks.remove_method("_buffer")
            hooks.remove_method("realize")
