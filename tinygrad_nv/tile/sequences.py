"""Sequences whose states lie in pages, as specs of linear attention, causal convolutions and selective scans
have them.

Protocol: tokens of sequences lie one after the other. Row s of `sequences`, int32, has `COLUMNS`: the
sequence's first token and how many it has; the page with the state that they begin with, −1 for zeros; after
how many tokens the state is `kept`, in which page, −1 for none; and the page that has the state after all of
them. A page is that of the source at the same time, or of no other sequence. Tokens of no sequence have no
results.

The rest is what their references share (tile/reference.py).
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tinygrad import Tensor
from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.gemm.spec import FLOAT16S
from tinygrad_nv.tile.reference import Argument, Given, dense, gather

FLOATS = (dtypes.float32, *FLOAT16S)
COLUMNS = ("first", "count", "source", "border", "kept", "target")


class SequenceSpec(Protocol):
    """`sequences` over `tokens` tokens, whose states lie in `pages`. `single`: no sequence has more than a
    token, and that of sequence s is s."""

    @property
    def tokens(self) -> int: ...

    @property
    def sequences(self) -> int: ...

    @property
    def pages(self) -> int: ...

    @property
    def single(self) -> bool: ...


def check(spec: SequenceSpec, extents: Sequence[str], kinds: Sequence[DType]) -> None:
    """Raises `SpecError` for one of the `extents` below 1, a dtype that is not of `FLOATS`, or a `single`
    spec that has other than one token for each sequence."""
    for name in ("tokens", "sequences", *extents, "pages"):
        if getattr(spec, name) < 1: raise SpecError(f"{name}={getattr(spec, name)}", "an extent ≥ 1")
    if spec.single and spec.tokens != spec.sequences:
        raise SpecError(f"{spec.tokens} tokens of {spec.sequences} sequences", "one of each")
    for dtype in kinds:
        if dtype not in FLOATS: raise SpecError(short(dtype), ", ".join(map(short, FLOATS)))


def describe(spec: SequenceSpec) -> str:
    """Returns the numbers of sequences and tokens in words."""
    return f"{spec.sequences} sequences, {'one token each' if spec.single else f'{spec.tokens} tokens'}"


def table_argument(spec: SequenceSpec) -> Argument:
    """Returns the argument `sequences`. Usual ones have equally many tokens each, and states in pages of
    their own, in place."""
    each, usual = max(1, spec.tokens // spec.sequences), list[int]()
    for s in range(spec.sequences): usual += [s * each, each, s % spec.pages, 0, -1, s % spec.pages]
    return Argument("sequences", dtypes.int32, (dense(spec.sequences, len(COLUMNS)),),
                    values=range(-1, min(spec.tokens, spec.pages) + 1), usual=usual)


def gather_inputs(arguments: Sequence[Argument], given: Given,
                  wide: DType) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the table of sequences, and the other arguments that are read, of dtype `wide`."""
    x = {each.name: gather(given[each.name], each.places[0]) for each in arguments if each.role != "out"}
    return x.pop("sequences"), {name: each.cast(wide) for name, each in x.items()}


def split_columns(table: Tensor) -> tuple[Tensor, ...]:
    """Returns `COLUMNS` of a table, (S, 1) each."""
    return tuple(table[:, i:i + 1] for i in range(len(COLUMNS)))


def load_states(states: Tensor, source: Tensor) -> Tensor:
    """Returns the states (S, …) in pages (S, 1), zeros for −1."""
    found = states[source.reshape(-1).maximum(0)]
    return (source >= 0).reshape(-1, *(1,) * (states.ndim - 1)).where(found, 0)


def store_states(states: Tensor, pages: Tensor, new: Tensor) -> Tensor:
    """Returns `states` with those of sequences, `new` (S, …), in their pages (S, 1), −1 for none."""
    match = Tensor.arange(states.shape[0]).reshape(1, -1) == pages                          # (S, P)
    mixed = new[match.cast(dtypes.int32).argmax(0)]
    return match.any(0).reshape(-1, *(1,) * (states.ndim - 1)).where(mixed, states)
