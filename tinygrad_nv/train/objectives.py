"""Objectives that are learnt: sums over a batch, of which the first is the loss.

Protocol: an objective has `inputs`, buffers of a batch on the device, which `fill` writes; `sums()` builds
the graph of the sums of a batch in these buffers, float32 () each: the loss, then those of `names`. A
captured step thus serves every batch. `count(batch)` is what a mean is over.

    Supervised   the cross entropy of each token that has a label, in nats; means are by token
    Preference   DPO (arXiv 2305.18290): −log σ(β ((log π(c) − log ρ(c)) − (log π(r) − log ρ(r)))) of a chosen
                 and a rejected answer, of the model π and a reference ρ that stays; means are by pair
"""
from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from tinygrad import Tensor, dtypes

from tinygrad_nv.functional import linear_cross_entropy
from tinygrad_nv.models.dense import DenseBatch, Documents, SequencePart
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.runtime.memory import write
from tinygrad_nv.train.data import IGNORE, Batch
from tinygrad_nv.train.data.batch import PADDING

if TYPE_CHECKING:    # a run of one rank does not load it
    from tinygrad_nv.models.parallel import Parallel


class RowsPart(SequencePart, Protocol):
    """The columns that this process has, of rows that are padded to so many tokens."""
    padded: int

    def cut(self, rows: np.ndarray) -> np.ndarray: ...


class Inputs:
    """Buffers of a batch: tokens, targets, positions and segments, int32 (rows, width); `count`, float32 (1),
    what a mean is over; `number`, uint32 (1), of the micro-batch in the run, from which dropout is drawn.
    With a `part` buffers have its columns alone."""

    def __init__(self, rows: int, width: int, device: str | None, part: RowsPart | None = None) -> None:
        self.part, self.padded = part, width if part is None else part.padded
        if part is not None: width = int(part.places.shape[0])
        def buffer(kind: object, *shape: int) -> Tensor:
            made = Tensor.zeros(*shape, dtype=kind, device=device).contiguous()
            return made.is_param_(False).realize()
        self.arrays = tuple(buffer(dtypes.int32, rows, width) for _ in range(4))
        self.tokens, self.targets, self.positions, self.segments = self.arrays
        self.count, self.number = buffer(dtypes.float32, 1), buffer(dtypes.uint32, 1)

    def fill(self, batch: Batch, count: int, number: int) -> None:
        """Puts a batch into the buffers, which may be wider than its rows: the rest is padding."""
        fills = ((batch.ids, 0), (batch.targets, IGNORE), (batch.positions, 0), (batch.segments, PADDING))
        missing = self.padded - batch.ids.shape[1]
        for tensor, (array, value) in zip(self.arrays, fills, strict=True):
            whole = np.pad(array, ((0, 0), (0, missing)), constant_values=value)
            own = whole if self.part is None else self.part.cut(whole)
            write(tensor, 0, np.ascontiguousarray(own, np.int32).reshape(-1).data.cast("B"))
        write(self.count, 0, np.array([count], np.float32).data.cast("B"))
        write(self.number, 0, np.array([number & 0xFFFFFFFF], np.uint32).data.cast("B"))

    def of(self, model: Llama, documents: bool) -> DenseBatch:
        """The batch as layers take it. `documents`: rows have several, which do not see each other."""
        found = Documents(self.positions, self.segments) if documents else None
        return DenseBatch(0, model.rope_tables, None, found, self.part)


class Objective(Protocol):
    """Objective of a model."""
    model: Llama
    inputs: Inputs

    @property
    def names(self) -> tuple[str, ...]: ...
    def fill(self, batch: Batch, count: int, number: int) -> None: ...
    def count(self, batch: Batch) -> int: ...
    def sums(self) -> list[Tensor]: ...


@dataclass(frozen=True)
class LossOptions:
    """`documents`: rows have several documents, which do not see each other. The others are those of
    `linear_cross_entropy`."""
    documents: bool = False
    label_smoothing: float = 0.0
    z_loss: float = 0.0


def losses(model: Llama, inputs: Inputs, options: LossOptions, reduction: Literal["sum", "none"]) -> Tensor:
    """The cross entropy of targets: their sum, or with "none" each, (rows, width)."""
    hidden = model.states_of_batch(inputs.tokens, inputs.of(model, options.documents))
    return cross_entropy(model, hidden, inputs, options, reduction)


def cross_entropy(model: Llama, hidden: Tensor, inputs: Inputs, options: LossOptions,
                  reduction: Literal["sum", "none"]) -> Tensor:
    """`losses` of the last layer's normalised output."""
    config = model.config
    if model.parallel is not None and model.parallel.ranks > 1:
        return _of_parts(model, model.parallel, hidden, inputs, options, reduction)
    return linear_cross_entropy(hidden, model.head, inputs.targets,
                                reduction=reduction,
                                softcap=config.logit_softcap, divisor=config.logit_divisor,
                                label_smoothing=options.label_smoothing, z_loss=options.z_loss)


def _of_parts(model: Llama, parallel: Parallel, hidden: Tensor, inputs: Inputs, options: LossOptions,
              reduction: Literal["sum", "none"]) -> Tensor:
    """Returns the sums of a rank that has a part of the vocabulary, or all where it is the only one."""
    from tinygrad_nv.dist.train.cross_entropy import VocabularyLoss  # which loads dist/
    own, config = parallel.vocabulary, parallel.whole
    loss = VocabularyLoss(own.group, own.tokens.start, own.count, own.size, config.logit_softcap,
                          config.logit_divisor, options.label_smoothing, options.z_loss, IGNORE)
    rows = parallel.to_head(hidden).reshape(-1, config.hidden_size)
    made = loss(rows, model.head, inputs.targets.reshape(-1))
    return made.sum() if reduction == "sum" else made.reshape(inputs.targets.shape)


class Supervised:
    """Objective of a model's next tokens."""
    names: tuple[str, ...] = ()

    def __init__(self, model: Llama, rows: int, width: int, options: LossOptions | None = None,
                 inputs: Inputs | None = None) -> None:
        self.model, self.options = model, options or LossOptions()
        self.inputs = inputs or Inputs(rows, width, model.device)

    def fill(self, batch: Batch, count: int, number: int) -> None:
        """Puts a batch into the buffers."""
        self.inputs.fill(batch, count, number)

    def count(self, batch: Batch) -> int:
        """Tokens with loss."""
        return batch.loss_tokens

    def sums(self) -> list[Tensor]: return [losses(self.model, self.inputs, self.options, "sum")]


class Preference:
    """Objective of pairs of answers: row i of a batch is chosen, row n/2 + i rejected. `reference` is in
    force while the reference's log probabilities are built: of the same model without its adapter, or another
    model."""
    names = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")

    def __init__(self, model: Llama, reference: Llama, rows: int, width: int, beta: float,
                 without: Callable[[], AbstractContextManager[None]], inputs: Inputs | None = None) -> None:
        self.model, self.reference, self.beta, self.without = model, reference, beta, without
        self.inputs = inputs or Inputs(rows, width, model.device)

    def fill(self, batch: Batch, count: int, number: int) -> None:
        """Puts a batch into the buffers."""
        self.inputs.fill(batch, count, number)

    def count(self, batch: Batch) -> int:
        """Pairs."""
        return int((batch.labels[:len(batch.labels) // 2] != IGNORE).any(1).sum())

    def sums(self) -> list[Tensor]:
        own = self._log_probabilities(self.model)
        with self.without(): other = self._log_probabilities(self.reference).detach()
        chosen, rejected = (own - other).chunk(2)   # of the rewards over beta
        pairs = (self.inputs.targets != IGNORE).any(1).chunk(2)[0].float()
        margins = (chosen - rejected) * self.beta
        # −log σ(x) = log(1 + e^−x), which does not overflow in this form
        loss = (margins.neg().maximum(0) + (1 + margins.abs().neg().exp()).log()) * pairs
        logged = (chosen * self.beta, rejected * self.beta, margins, (margins > 0).float())
        return [loss.sum(), *((each.detach() * pairs).sum() for each in logged)]

    def _log_probabilities(self, model: Llama) -> Tensor:
        """Returns log probabilities of each row's targets, summed, float32 (rows,)."""
        return -losses(model, self.inputs, LossOptions(), "none").sum(-1)
