"""Ragged attention as a named function: its body, what is refused, its gradient, its kernel."""
from __future__ import annotations

import itertools
import math

import pytest
import torch
from tinygrad import Tensor, dtypes

from tinygrad_nv import disabled, explain
from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns.attention.varlen import varlen_attention

LENGTHS = [(5, 9), (0, 4), (7, 7), (6, 2), (3, 0), (1, 12)]


def storages(heads: int = 4, kv_heads: int = 2, d: int = 8, more: int = 2) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    q, k = (sum(each) + more for each in zip(*LENGTHS, strict=True))
    return [torch.randn(n, h, d, generator=random, dtype=torch.float64).float()
            for n, h in ((q, heads), (k, kv_heads), (k, kv_heads))]


def ends() -> list[torch.Tensor]:
    return [torch.tensor([0, *each]).cumsum(0).int() for each in zip(*LENGTHS, strict=True)]


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: float = -math.inf,
             last: float = math.inf, scale: float | None = None, cap: float | None = None,
             sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Each sequence by itself, in float64."""
    out, (cu_q, cu_k) = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64), ends()
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    for b, (rows, keys) in enumerate(LENGTHS):
        mine, own, values = (x[cu[b]:cu[b + 1]].double().transpose(0, 1)
                             for x, cu in ((q, cu_q), (k, cu_k), (v, cu_k)))
        s = mine @ own.transpose(-1, -2) * (scale or q.shape[2] ** -0.5)
        if cap is not None: s = (s / cap).tanh() * cap
        away = torch.arange(keys)[None] - torch.arange(rows)[:, None] - (keys - rows)
        s = torch.where((away >= first) & (away <= last), s, -torch.inf)
        if sinks is not None: s = torch.cat([s, sinks.double()[:, None, None].expand(-1, rows, 1)], -1)
        p = s.softmax(-1).nan_to_num(0)[..., :keys]
        out[cu_q[b]:cu_q[b + 1]] = (p @ values).transpose(0, 1)
    return out


def called(tensors: list[torch.Tensor], **how: object) -> torch.Tensor:
    given = [Tensor(x.numpy()) for x in (*tensors, *ends())]
    return torch.from_numpy(varlen_attention(*given, 8, 12, **how).numpy()).double()  # type: ignore[arg-type]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("how", "first", "last"), [
    ({}, -math.inf, math.inf), ({"causal": True}, -math.inf, 0), ({"causal": True, "window": 3}, -2, 0),
    ({"window": 3}, -2, 2)], ids=str)
def test_the_body_is_each_sequence_by_itself(how: dict[str, object], first: float, last: float):
    tensors = storages()
    assert (called(tensors, **how) - expected(*tensors, first, last)).abs().max() < 1e-6


def test_sinks():
    """One more logit of each head; of −∞ none."""
    tensors, sinks = storages(), torch.tensor([0.5, -torch.inf, 3.0, 1e30])
    wanted = expected(*tensors, last=0, sinks=sinks)
    got = called(tensors, causal=True, sinks=Tensor(sinks.numpy()))
    assert (got - wanted).abs().max() < 1e-6
    assert not got[:, 3].any()
    with pytest.raises(SpecError, match="sinks of shape"): called(tensors, sinks=Tensor.ones(3))


def test_scale_and_softcap():
    tensors = storages()
    wanted = expected(*tensors, scale=2.0, cap=1.5)
    assert (called(tensors, scale=2.0, softcap=1.5) - wanted).abs().max() < 1e-5


def test_distances():
    """Biases by how far a key is from its row, which a body and a kernel add."""
    q, k, v = storages()
    k, v = (torch.randn(len(q), 2, 8, generator=torch.Generator().manual_seed(i)) for i in range(2))
    cu, bias = ends()[0], torch.randn(4, 2 * 9 - 1, generator=torch.Generator().manual_seed(2))
    wanted = torch.zeros(*q.shape, dtype=torch.float64)
    for b in range(len(cu) - 1):
        mine, own, values = (x[cu[b]:cu[b + 1]].double().transpose(0, 1) for x in
                             (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)))
        away = torch.arange(mine.shape[1])[None] - torch.arange(mine.shape[1])[:, None]
        s = mine @ own.transpose(-1, -2) * 8 ** -0.5 + bias[:, away + 8]
        wanted[cu[b]:cu[b + 1]] = (s.softmax(-1) @ values).transpose(0, 1)
    given, at = [Tensor(x.numpy(), device="CPU") for x in (q, k, v)], Tensor(cu.numpy(), device="CPU")
    half = Tensor(bias.numpy() / 2, device="CPU").realize()
    made = varlen_attention(*given, at, at, 9, 9, distances=half * 2)
    assert [kernel.template for kernel in explain(made).kernels][-1] == "flash"
    assert (torch.from_numpy(made.numpy()).double() - wanted).abs().max() < 1e-6
    with disabled(): assert (torch.from_numpy(varlen_attention(
        *given, at, at, 9, 9, distances=half * 2).numpy()).double() - wanted).abs().max() < 1e-6
    with pytest.raises(SpecError, match="an odd number, at least 17"):
        varlen_attention(*given, at, at, 9, 9, distances=half[:, 2:])
    with pytest.raises(SpecError, match="with other keys than rows"):
        varlen_attention(*given, at, at.contiguous(), 9, 9, distances=half)


def test_neighbours_do_not_meet():
    """Rows of other sequences are NaN, and those after the last one."""
    tensors, (cu_q, cu_k) = storages(), ends()
    usual = called(tensors, causal=True)
    for b in (0, 2):
        spoilt = [x.clone() for x in tensors]
        for x, cu in zip(spoilt, (cu_q, cu_k, cu_k), strict=True):
            x[:cu[b]] = torch.nan
            x[cu[b + 1]:] = torch.nan
        mine = slice(cu_q[b], cu_q[b + 1])
        assert torch.equal(called(spoilt, causal=True)[mine], usual[mine])


def test_what_is_longer_than_the_most_is_cut_off():
    q, k, v = (Tensor.ones(n, 1, 8) for n in (6, 6, 6))
    cu = Tensor([0, 6], dtype=dtypes.int32)
    out = varlen_attention(q, k, v, cu, cu, 4, 6).numpy()
    assert (out[:4] == 1).all()
    assert (out[4:] == 0).all()


@pytest.mark.slow
def test_gradients():
    """Of what follows, by rows of no sequence too."""
    tensors = [x.double().requires_grad_() for x in storages()]
    weights = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(1))
    (expected(*tensors, -math.inf, 0) * weights.double()).sum().backward()
    given = [Tensor(x.detach().float().numpy()) for x in tensors]
    cu = [Tensor(x.numpy()) for x in ends()]
    total = (varlen_attention(*given, *cu, 8, 12, causal=True) * Tensor(weights.numpy())).sum()
    for mine, theirs in zip(total.gradient(*given), tensors, strict=True):
        assert theirs.grad is not None
        assert (torch.from_numpy(mine.numpy()).double() - theirs.grad).abs().max() < 1e-5


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", [{"causal": True}, {}, {"causal": True, "window": 3, "softcap": 1.5},
                                 {"causal": True, "sinks": True}], ids=str)
def test_gradients_of_the_same_tokens_are_a_kernel(how: dict[str, object], monkeypatch: pytest.MonkeyPatch):
    """Sequences of 0, 1 and more tokens than are asked for, rows of none; sinks. Within 1e-5 (values of about
    1), as the reference implementation is."""
    monkeypatch.setenv("NV_CPU", "1")
    tensors, cu = [x[:22].double().requires_grad_() for x in storages()], torch.tensor([0, 5, 5, 6, 20]).int()
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(3)).double().requires_grad_()
    wanted, inputs = alone(tensors, cu, sinks if "sinks" in how else None, how), [*tensors]
    if "sinks" in how: inputs.append(sinks)
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1)).double()
    gradients = torch.autograd.grad((wanted * weights).sum(), inputs)
    for ours in (True, False):
        given = [Tensor(x.detach().float().numpy(), device="CPU").realize() for x in inputs]
        at = Tensor(cu.numpy(), device="CPU").realize()
        more = {**how, **({"sinks": given[3]} if "sinks" in how else {})}
        out = varlen_attention(*given[:3], at, at, 12, 12, **more)   # type: ignore[arg-type]
        made = (out * Tensor(weights.float().numpy(), device="CPU")).sum().gradient(*given)
        if ours:
            names = [kernel.template for kernel in explain(out, *made).kernels]
            assert (names.count("flash"), names.count("flash_backward")) == (1, 1)
            Tensor.realize(out, *made)
        else:
            with disabled(): Tensor.realize(out, *made)
        for mine, theirs in zip((out, *made), (wanted, *gradients), strict=True):
            assert (torch.from_numpy(mine.numpy()).double() - theirs).abs().max() < 1e-5


def alone(tensors: list[torch.Tensor], cu: torch.Tensor, sinks: torch.Tensor | None,
          how: dict[str, object]) -> torch.Tensor:
    """The first 12 rows of each sequence by itself, in float64; causal or full, with a window."""
    (q, k, v), rows = tensors, []
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    for begin, end in itertools.pairwise(cu):
        n = min(12, int(end - begin))
        mine, own, values = (x[begin:begin + n].transpose(0, 1) for x in (q, k, v))
        s = mine @ own.transpose(-1, -2) * q.shape[2] ** -0.5
        if (cap := how.get("softcap")) is not None: s = (s / cap).tanh() * cap
        away = torch.arange(n)[:, None] - torch.arange(n)[None]
        seen = (away >= 0) if how.get("causal") else away == away
        if "window" in how: seen = seen & (away < how["window"])   # type: ignore[operator]
        s = s.masked_fill(~seen, -torch.inf)
        if sinks is not None: s = torch.cat([s, sinks[:, None, None].expand(4, n, 1)], -1)
        rows += [(s.softmax(-1)[..., :n] @ values).transpose(0, 1), q.new_zeros(int(end - begin) - n, 4, 8)]
    return torch.cat([*rows, q.new_zeros(len(q) - int(cu[-1]), 4, 8)])


Q, K = (9, 4, 8), (6, 2, 8)
ENDS = Tensor([0, 4], dtype=dtypes.int32)


@pytest.mark.parametrize(("words", "change"), [
    (r"q of shape \(9, 32\)", {"q": Tensor.zeros(9, 32)}), ("k of shape", {"k": Tensor.zeros(6, 2, 4)}),
    ("v of shape", {"v": Tensor.zeros(3, 2, 8)}), ("k of f16", {"k": Tensor.zeros(*K).half()}),
    ("q of s32", {"q": Tensor.zeros(*Q).int()}), ("cu_q of s64", {"cu_q": ENDS.long()}),
    ("cu_k of shape", {"cu_k": ENDS[:1]}), ("most_q=0", {"most_q": 0}), ("most_k='8'", {"most_k": "8"}),
    ("where each sequence", {"cu_q": ENDS[:1], "cu_k": ENDS[:1]}), ("window=0", {"window": 0}),
    ("window=2.5", {"window": 2.5}),
    ("4 query heads over 3", {"k": Tensor.zeros(6, 3, 8), "v": Tensor.zeros(6, 3, 8)}),
    ("softcap=0", {"softcap": 0.0}), ("softcap=inf", {"softcap": math.inf}),
    ("scale=nan", {"scale": math.nan})])
def test_what_cannot_be(words: str, change: dict[str, object]):
    given = {"q": Tensor.zeros(*Q), "k": Tensor.zeros(*K), "v": Tensor.zeros(*K), "cu_q": ENDS, "cu_k": ENDS,
             "most_q": 4, "most_k": 4}
    with pytest.raises(SpecError, match=words): varlen_attention(**given | change)  # type: ignore[arg-type]
