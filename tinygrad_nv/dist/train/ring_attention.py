"""Attention over a sequence of which each rank has a part: ranks pass keys and values on in a circle.

Protocol (Ring Attention, arXiv 2310.01889). `ring_attention(q, k, v, group)` takes each rank's part, q
[B, H, S/n, D], and gives its part of the result. Keys and values are shifted n - 1 times; for each pair of a
query part and a key part a flash attention gives a result and its LSE, which are merged in float32:

    l = log(exp l1 + exp l2),   out = out1 exp(l1 - l) + out2 exp(l2 - l)

A causal attention needs `zigzag` order (Llama 3, arXiv 2407.21783, section 3.3.2): of 2 n chunks rank r has
r and 2 n - 1 - r. Then every rank computes as much: in each shift a pair of its later chunk with the
earlier one that came, and a second pair, of earlier chunks or of later ones. Which one is a value in memory
(`Group.is_rank`), so all ranks build the same graph.

The backward pass sends keys and values round once more, with their gradients, which are n shifts: memory is
that of a rank's part and of the tensors it sends, for any n. Each pair is a flash attention's backward pass
with the LSE of the whole row.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad import Tensor

from tinygrad_nv.dist.collectives.functions import all_gather, shift
from tinygrad_nv.dist.group import Group
from tinygrad_nv.dist.train.graph import with_gradient
from tinygrad_nv.errors import DistError
from tinygrad_nv.patterns.attention import named as flash
from tinygrad_nv.patterns.named import call

HIDDEN = flash.HIDDEN


def zigzag(x: Tensor, group: Group, axis: int = -2) -> Tensor:
    """Returns this rank's part of a whole sequence along an axis: chunks r and 2 n - 1 - r of 2 n. Raises
    `DistError`."""
    parts, axis = 2 * group.size, axis % x.ndim
    if int(x.shape[axis]) % parts:
        raise DistError(f"a sequence of {x.shape[axis]} over {group.size} ranks", f"a multiple of {parts}",
                        "pad the sequence")
    chunks = x.chunk(parts, axis)
    return chunks[group.rank].cat(chunks[parts - 1 - group.rank], dim=axis).contiguous()


def unzigzag(x: Tensor, group: Group, axis: int = -2) -> Tensor:
    """The whole sequence, of all ranks' parts."""
    if group.size == 1: return x
    axis %= x.ndim
    chunks = all_gather(x, group, axis, name="sequence").chunk(2 * group.size, axis)
    return Tensor.cat(*chunks[::2], *reversed(chunks[1::2]), dim=axis)


def ring_attention(q: Tensor, k: Tensor, v: Tensor, group: Group, *, causal: bool = True,
                   scale: float | None = None, softcap: float | None = None) -> Tensor:
    """The attention of this rank's queries [B, H, S/n, D] over all ranks' keys [B, H_kv, S/n, D] and values;
    causal in `zigzag` order. `scale` and `softcap` are those of `FlashAttention`. Raises `DistError`."""
    if k.shape != v.shape or q.shape[2:] != k.shape[2:]:
        raise DistError(f"q {q.shape}, k {k.shape} and v {v.shape}", "parts of one length and head size")
    if causal and group.size > 1 and int(q.shape[2]) % 2:
        raise DistError(f"{q.shape[2]} positions a rank", "two chunks of equal length: zigzag order")
    ring = _Attention(group, causal, *(flash.FlashAttention(each, scale, softcap)
                                       for each in (causal, False)))
    out, lse = ring.forward(q, k, v)

    def back(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> list[Tensor | None]:
        return [*ring.backward(q, k, v, out, lse, grad.contiguous()), None, None]
    return with_gradient("ring attention", out, [q, k, v, out, lse], back)


@dataclass(frozen=True)
class _Attention:
    """`own` is the attention of a rank's part over itself, `other` that of a chunk over an earlier one."""
    group: Group
    causal: bool
    own: flash.FlashAttention
    other: flash.FlashAttention

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out in q's dtype, and l."""
        sent = _join(k, v)
        made = _attend(self.own, q, k, v)
        for step in range(1, self.group.size):
            sent = shift(sent, self.group, name="keys and values")
            k, v = _part(sent)
            if not self.causal:
                made = _merge(made, _attend(self.other, q, k, v))
                continue
            early = self._early(step, str(q.device))
            (qa, qb), (ka, kb), (va, vb) = (each.chunk(2, 2) for each in (q, k, v))
            first, second = (tuple(each.chunk(2, 2)[half] for each in made) for half in (0, 1))
            second = _merge(second, _attend(self.other, qb, ka, va))
            out, lse = _attend(self.other, *(early.where(a, b) for a, b in ((qa, qb), (ka, kb), (va, vb))))
            # a pair that is not this half's has no weight in it
            first = _merge(first, (out, early.squeeze(-1).where(lse, HIDDEN)))
            second = _merge(second, (out, early.squeeze(-1).where(HIDDEN, lse)))
            made = tuple(a.cat(b, dim=2).contiguous() for a, b in zip(first, second, strict=True))
        return made[0].cast(q.dtype).contiguous(), made[1].contiguous()

    def backward(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
                 grad: Tensor) -> list[Tensor]:
        """The gradients of q, k and v."""
        delta = (grad.float() * out.float()).sum(-1).contiguous()
        rows = lse, delta, grad
        dq, *made = (each.float() for each in _derive(self.own, q, k, v, *rows))
        sent, summed, before = _join(k, v), _join(*made), grad
        for step in range(1, self.group.size):
            # one behind the other, so that ranks send in the same order
            before = sent = shift(sent, self.group, name="keys and values again", after=before)
            before = summed = shift(summed, self.group, name="gradients of keys and values", after=before)
            k, v = _part(sent)
            if not self.causal:
                own, *made = _derive(self.other, q, k, v, *rows)
                dq, summed = dq + own, (summed + _join(*made).float()).contiguous()
                continue
            early = self._early(step, str(q.device))
            (qa, qb), (ka, kb), (va, vb) = (each.chunk(2, 2) for each in (q, k, v))
            halves = [each.chunk(2, 2) for each in rows]
            late = [each[1] for each in halves]
            chosen = [(early if each[0].ndim == 4 else early.squeeze(-1)).where(*each) for each in halves]
            dqb, *ofa = _derive(self.other, qb, ka, va, *late)
            dqx, *ofx = _derive(self.other, early.where(qa, qb), early.where(ka, kb), early.where(va, vb),
                                 *chosen)
            own = early.where(dqx, 0).cat(dqb + early.where(0, dqx), dim=2)
            both = [(a + early.where(x, 0)).cat(early.where(0, x), dim=2)
                    for a, x in zip(ofa, ofx, strict=True)]
            dq, summed = (dq + own).contiguous(), (summed + _join(*both).float()).contiguous()
        if self.group.size > 1:
            summed = shift(summed, self.group, name="gradients of keys and values", after=before)
        return [dq.cast(q.dtype), *(each.cast(k.dtype) for each in _part(summed))]

    def _early(self, step: int, device: str) -> Tensor:
        """Whether what came in a shift is of a rank before this one, bool (1, 1, 1, 1)."""
        ranks = [self.group.is_rank(r) for r in range(step, self.group.size)]
        return (sum(ranks[1:], ranks[0]) > 0).reshape(1, 1, 1, 1).to(device)


Made = tuple[Tensor, ...]


def _attend(what: flash.FlashAttention, q: Tensor, k: Tensor, v: Tensor) -> Made:
    """out and l, float32."""
    out, lse = call(what, flash.forward, *_contiguous(q, k, v))
    return out.float(), lse


def _derive(what: flash.FlashAttention, q: Tensor, k: Tensor, v: Tensor, *rows: Tensor) -> Made:
    """The gradients of q, k and v, of the LSE, delta and gradient of rows."""
    return call(flash.FlashAttentionBackward(what), flash.backward, *_contiguous(q, k, v, *rows))


def _merge(a: Made, b: Made) -> Made:
    """Two attentions of the same rows over different columns as one."""
    (out_a, lse_a), (out_b, lse_b) = a, b
    top = lse_a.maximum(lse_b)
    base = (top == HIDDEN).where(0, top).detach()
    of_a, of_b = (lse_a - base).exp(), (lse_b - base).exp()
    total = of_a + of_b
    share_a, share_b = ((each / total).unsqueeze(-1) for each in (of_a, of_b))
    return (out_a * share_a + out_b * share_b).contiguous(), (total.log() + base).contiguous()


def _join(k: Tensor, v: Tensor) -> Tensor: return Tensor.stack(k, v).contiguous()


def _part(sent: Tensor) -> tuple[Tensor, Tensor]: return sent[0], sent[1]


def _contiguous(*tensors: Tensor) -> list[Tensor]: return [each.contiguous() for each in tensors]
