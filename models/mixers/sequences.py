"""The sequences of a step, and the states that they begin with and leave, whatever kind of batch it is.

Protocol: `runs(batch, x)` cuts the tokens of x (B, T, …), taken as one row after the other, into `Run`s: each
has a table of sequences (tile/sequences.py), of one token each or of any number. `LayerStates`
are a layer's states in pages (kvcache/store.py), in the order of its mixer's `states`. A mixer threads them
through its functions of runs, by `over_runs`; what these return is joined again. States after a step are in
the `written` of its batch, to be realized with its results.

    whole sequences     begin with zeros and leave nothing; in training they are plain tinygrad (plain.py)
    a contiguous cache  row b's states are page b's; rows at their start begin with zeros
    pages               the batch says which (kvcache/state_table.py)
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType
from tinygrad.helpers import TRAINING

from tinygrad_nv import functional as F
from tinygrad_nv.errors import ModelError
from tinygrad_nv.kvcache.store import LayerStates

from ..dense import DenseBatch
from ..layers import RMSNorm, StoredLinear
from ..paged import PackedBatch, PagedBatch
from . import plain
from .config import StateShape

Batch: TypeAlias = DenseBatch | PagedBatch | PackedBatch
States: TypeAlias = tuple[Tensor, ...]


class Mixer(Protocol):
    """A layer's mixer: of tokens (B, T, hidden), with the layer's states, which it changes. `linears`,
    `norms` and `tensors` are its parameters by their names in a checkpoint."""

    @property
    def linears(self) -> list[StoredLinear]: ...

    @property
    def norms(self) -> dict[str, RMSNorm]: ...

    @property
    def tensors(self) -> dict[str, Tensor]: ...

    def __call__(self, x: Tensor, batch: Batch, cache: Any) -> Tensor: ...


@dataclass(frozen=True)
class Run:
    """Tokens first … end − 1 of a step, and the table of their sequences; `single`: one token each. `whole`
    sequences of training have no table that is read."""
    first: int
    end: int
    table: Tensor
    single: bool
    whole: int = 0

    def clear(self, rows: Tensor) -> Tensor:
        """Rows of tokens, 0 of those that are no sequence's: no kernel has written these."""
        if self.whole: return rows
        token, first = Tensor.arange(rows.shape[0]).reshape(-1, 1), self.table[:, 0].reshape(1, -1)
        owned = ((token >= first) & (token < first + self.table[:, 1].reshape(1, -1))).any(1).contiguous()
        return owned.reshape(-1, *(1,) * (rows.ndim - 1)).where(rows, 0)

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, windows: Tensor,
                 silu: bool = False) -> tuple[Tensor, Tensor]:
        """`causal_conv` of the step's rows x (…, C) by weights (C, 1, K), of those that are the run's."""
        own = x[self.first:self.end]
        if not self.whole:
            return F.causal_conv(own, weight.squeeze(1), bias, windows, self.table, silu=silu,
                                 single=self.single)
        made = plain.convolve(own.reshape(self.whole, -1, x.shape[-1]), weight.squeeze(1), bias, silu)
        return made.reshape(own.shape), windows

    def attend(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, states: Tensor,
               scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """`linear_attention` of the run's q, k and v, with the step's decays and rates."""
        decay, beta = decay[self.first:self.end], None if beta is None else beta[self.first:self.end]
        if not self.whole:
            return F.linear_attention(q, k, v, decay, beta, states, self.table, scale=scale,
                                      single=self.single)
        q, k, v, decay = (each.reshape(self.whole, -1, *each.shape[1:]) for each in (q, k, v, decay))
        rate = None if beta is None else beta.reshape(self.whole, -1, beta.shape[1])
        return plain.attend(q, k, v, decay, rate, scale).flatten(0, 1), states

    def scan(self, x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor,
             states: Tensor) -> tuple[Tensor, Tensor]:
        """`selective_scan` of the run's x, steps, b and c."""
        if not self.whole: return F.selective_scan(x, step, a, b, c, states, self.table, single=self.single)
        x, step, b, c = (each.reshape(self.whole, -1, each.shape[-1]) for each in (x, step, b, c))
        return plain.scan(x, step, a, b, c).flatten(0, 1), states


def runs(batch: Batch, x: Tensor, cached: bool) -> list[Run]:
    """The runs of tokens x (B, T, …); `cached`: with states."""
    if isinstance(batch, PagedBatch):
        made, first = [], 0
        for group in batch.groups:
            assert group.states is not None, "a batch for a model with states"
            end = first + group.num_tokens
            made.append(Run(first, end, group.states, group.tokens_per_sequence == 1))
            first = end
        return made
    B, T = (int(n) for n in x.shape[:2])
    assert isinstance(batch, DenseBatch), "refused by embedding_model.py"
    if batch.documents is not None:
        raise ModelError("rows of several documents (packing) for layers that keep states",
                         "a document in each row", "train without packing")
    row = Tensor.arange(B).cast(dtypes.int32)
    source, target = row * 0 - 1, row if cached else row * 0 - 1
    if cached:
        assert batch.lengths is not None
        source = (batch.lengths > T).where(row, -1)
    return [Run(0, B * T, _table(row * T, row * 0 + T, source, target), T == 1,
                B if TRAINING and not cached else 0)]


def _table(first: Tensor, count: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """A table of sequences of which no state is kept but the last."""
    none = first * 0
    return Tensor.stack(first, count, source, none, none - 1, target, dim=1).cast(dtypes.int32).contiguous()


def over_runs(batch: Batch, x: Tensor, states: LayerStates | States | None, shapes: Sequence[StateShape],
              fn: Callable[[Run, States], tuple[Tensor, States]], dtype: DType) -> Tensor:
    """Joins the rows of tokens that `fn(run, states)` returns beside the states after the run: (B, T, …)."""
    if states is None:
        own: States = tuple(Tensor.empty(1, *each.shape, dtype=each.dtype or dtype, device=x.device)
                            for each in shapes)
    else:
        given = states.tensors if isinstance(states, LayerStates) else states
        own = tuple(Tensor(each.uop) for each in given)     # so that what is read depends on what is written
    made = []
    for run in runs(batch, x, states is not None):
        out, own = fn(run, own)
        made.append(run.clear(out))
    # nothing of the step reads them, and tinygrad's own kernels write what is realized
    if states is not None and not isinstance(batch, PackedBatch): batch.written.extend(own)
    joined = made[0] if len(made) == 1 else made[0].cat(*made[1:])
    return joined.reshape(*x.shape[:2], *joined.shape[1:])
