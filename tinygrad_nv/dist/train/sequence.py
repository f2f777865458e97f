"""Sequence parallel training: between the halves of tensor parallel layers a rank has its part of the tokens.

Protocol (Megatron-LM, arXiv 2205.05198, section 4.2.2). Norms, residuals and dropout are computed on 1/n of
the tokens (`axis`, 1 of (B, S, D)), and their activations take 1/n of the memory. `begin_half` gathers all
tokens before a half of a layer whose matrices are cut, `sum_halves` adds what the ranks' halves made and
leaves each rank its tokens: an all_gather and a reduce_scatter, which carry what one all_reduce does.

    x = sequence.own(embedded)                  # of every rank's whole tensor, its part
    h = sequence.begun(norm(x)); x = x + sequence.summed(half(h))
    y = sequence.whole(x)                       # for what all ranks compute alike, such as a loss

Gradients are those of one loss that all ranks compute alike. A parameter that a rank applies to its own
tokens, such as a norm's weight, is passed through `share`, which sums its gradient over ranks.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad import Tensor

from tinygrad_nv.dist.collectives.functions import all_gather, copy_to_ranks, part, reduce_scatter
from tinygrad_nv.dist.group import Group
from tinygrad_nv.dist.train.graph import with_gradient
from tinygrad_nv.errors import DistError


@dataclass(frozen=True)
class SequenceParallel:
    """The tokens of a group of ranks, along an axis of their tensors."""
    group: Group
    axis: int = 1

    def begin_half(self, x: Tensor, name: str = "") -> Tensor:
        """All ranks' tokens: the input of a half of a layer."""
        return all_gather(x, self.group, self.axis, name=name)

    def sum_halves(self, x: Tensor, name: str = "") -> Tensor:
        """Returns this rank's tokens of the sum over ranks."""
        return reduce_scatter(x, self.group, self.axis, name=name)

    def own(self, x: Tensor) -> Tensor:
        """Returns this rank's tokens of what all ranks have alike. Raises `DistError`."""
        if self.group.size == 1: return x
        count, ranks = int(x.shape[self.axis]), self.group.size
        if count % ranks:
            raise DistError(f"{count} tokens over {ranks} sequence parallel ranks", f"a multiple of {ranks}",
                            "pad the sequence")
        return with_gradient("own tokens", self._part(x), [x],
                             lambda grad, _: [all_gather(grad, self.group, self.axis, name="own tokens")])

    def whole(self, x: Tensor) -> Tensor:
        """All ranks' tokens, of which all ranks make the same."""
        if self.group.size == 1: return x
        made = all_gather(x, self.group, self.axis, name="all tokens")
        return with_gradient("all tokens", made, [x], lambda grad, _: [self._part(grad)])

    def share(self, weight: Tensor, name: str = "") -> Tensor:
        """A parameter that each rank applies to its own tokens."""
        return copy_to_ranks(weight, self.group, name)

    def _part(self, x: Tensor) -> Tensor:
        return part(x, self.axis, self.group.rank, self.group.size).contiguous()
