"""Arguments and states of families of sequences (sequences.py), which their references share, in plain
tinygrad (reference.py)."""
from __future__ import annotations

from collections.abc import Sequence

from tinygrad import Tensor
from tinygrad.dtype import DType, dtypes

from tinygrad_nv.tile.reference import Argument, Given, dense, gather
from tinygrad_nv.tile.sequences import COLUMNS, SequenceSpec


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
