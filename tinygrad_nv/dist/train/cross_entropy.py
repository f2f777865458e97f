"""The cross entropy of an output layer whose vocabulary is cut over ranks.

Protocol (Megatron-LM, arXiv 1909.08053, section 3): a rank has the logits of its own tokens, and of each row
the ranks exchange the largest, then the sum of exponentials, the logit of the label and, for smoothing, the
sum of logits. Formulas are those of one rank (tile/cross_entropy/): with
x = softcap · tanh(logits / divisor / softcap), ε `label_smoothing` and V tokens in all,

    loss = (1 − ε) (lse − x[label]) + ε (lse − mean(x)) + z_loss · lse²,    0 where the label is `ignore`

The backward pass computes logits again from log-sum-exps, which alone are kept. `chunk` rows have logits at a
time. The gradient of hidden states is that of this rank's tokens: `Parallel.to_head`, or the gathering of
tokens, adds up the ranks'. Logits and losses are float32.
"""
from __future__ import annotations

import math
from dataclasses import dataclass

from tinygrad import Tensor, dtypes

from tinygrad_nv.dist.collectives.functions import all_reduce
from tinygrad_nv.dist.group import Group
from tinygrad_nv.dist.train.graph import with_gradient

CHUNK_BYTES = 64 << 20      # of float32 logits that are there at a time
MOST_CHUNKS = 16            # each adds some twenty kernels to a step


@dataclass(frozen=True)
class VocabularyLoss:
    """Tokens [first, first + count) of a vocabulary of `size` are this rank's; matrices of it may have more
    rows, which are no tokens."""
    group: Group
    first: int
    count: int
    size: int
    softcap: float | None = None
    divisor: float = 1.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    ignore: int = -100

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int = 0) -> Tensor:
        """Losses, float32 (T), of hidden states (T, H), this rank's rows of the output layer (V', H), and
        labels int32 (T) of the whole vocabulary. `chunk` 0: as many rows as `CHUNK_BYTES` hold."""
        rows, columns = int(hidden.shape[0]), int(weight.shape[0])
        most = chunk or max(CHUNK_BYTES // (4 * columns), -(-rows // MOST_CHUNKS))
        ends = [(at, min(at + most, rows)) for at in range(0, rows, most)]
        found = [self._sums(hidden[a:b], weight, labels[a:b], f"rows from {a}") for a, b in ends]
        lse, own, total = (Tensor.cat(*(each[i] for each in found)).contiguous().detach() for i in range(3))
        value = self._losses(lse, own, total, labels)

        def back(grad: Tensor, hidden: Tensor, weight: Tensor, labels: Tensor, lse: Tensor
                 ) -> list[Tensor | None]:
            made = [self._backward(grad[a:b], hidden[a:b], weight, labels[a:b], lse[a:b]) for a, b in ends]
            of_weight = made[0][1]
            for _, more in made[1:]: of_weight = (of_weight + more).contiguous()
            return [Tensor.cat(*(each for each, _ in made)).cast(hidden.dtype),
                    of_weight.cast(weight.dtype), None, None]
        return with_gradient("vocabulary loss", value, [hidden, weight, labels, lse], back)

    def _logits(self, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """x (T, V'), -inf where there is no token, and its slope."""
        logits = hidden.linear(weight.T).contiguous().float() / self.divisor
        slope = logits.const_like(1 / self.divisor)
        if self.softcap is not None:
            kept = (logits / self.softcap).tanh()
            logits, slope = kept * self.softcap, (1 - kept * kept) / self.divisor
        return self._there(weight).where(logits, -math.inf), slope

    def _there(self, weight: Tensor) -> Tensor:
        """Tells which rows of a matrix are tokens, bool (1, V')."""
        return (Tensor.arange(int(weight.shape[0])).to(weight.device) < self.count).unsqueeze(0)

    def _is_label(self, labels: Tensor, weight: Tensor) -> Tensor:
        """Tells where the label is, bool (T, V')."""
        columns = Tensor.arange(int(weight.shape[0]), dtype=dtypes.int32).to(weight.device)
        return ((labels - self.first).unsqueeze(1) == columns.unsqueeze(0)) & self._there(weight)

    def _sums(self, hidden: Tensor, weight: Tensor, labels: Tensor, name: str
                ) -> tuple[Tensor, Tensor, Tensor]:
        """Over all ranks' tokens: log-sum-exp, the label's x, and the sum of x; each (T)."""
        x, _ = self._logits(hidden.detach(), weight.detach())
        top = all_reduce(x.max(-1).contiguous(), self.group, "max", name=f"largest logits of {name}")
        there = self._there(weight)
        made = Tensor.stack((x - top.unsqueeze(1)).exp().sum(-1),
                            self._is_label(labels, weight).where(x, 0).sum(-1), there.where(x, 0).sum(-1))
        added = all_reduce(made.contiguous(), self.group, name=f"sums of logits of {name}")
        return added[0].log() + top, added[1], added[2]

    def _losses(self, lse: Tensor, own: Tensor, total: Tensor, labels: Tensor) -> Tensor:
        made = (lse - own) * (1 - self.label_smoothing)
        if self.label_smoothing: made = made + (lse - total / self.size) * self.label_smoothing
        if self.z_loss: made = made + lse * lse * self.z_loss
        known = (labels >= 0) & (labels < self.size)
        return (labels != self.ignore).where(known.where(made, math.nan), 0)

    def _backward(self, grad: Tensor, hidden: Tensor, weight: Tensor, labels: Tensor, lse: Tensor
                  ) -> tuple[Tensor, Tensor]:
        """The gradients of some rows, and of the matrix by them, float32."""
        x, slope = self._logits(hidden, weight)
        p = (x - lse.unsqueeze(1)).exp()
        if self.z_loss: p = p * (1 + 2 * self.z_loss * lse).unsqueeze(1)
        made = p - self._is_label(labels, weight).where(1 - self.label_smoothing, 0.0)
        if self.label_smoothing:
            made = made - self._there(weight).where(self.label_smoothing / self.size, 0.0)
        scale = (labels != self.ignore).where(grad, 0).unsqueeze(1)
        counted = (labels != self.ignore).unsqueeze(1)
        logits = counted.where(made * slope * scale, 0).cast(hidden.dtype).contiguous()
        return logits.float() @ weight.float(), logits.float().T @ hidden.float()
