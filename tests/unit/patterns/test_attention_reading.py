"""Named attention: the specs that its arguments give are those that the matcher finds in its reference
implementation, and no kernel is added to move a result. Nothing runs."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tinygrad.dtype import DType

from tests.support.patterns import attention_graph
from tests.support.patterns.attention_graph import BF16, F16, F32, B, D, positions
from tinygrad_nv import Tensor, Variable, dtypes, explain
from tinygrad_nv.functional import scaled_dot_product_attention
from tinygrad_nv.patterns.attention import match
from tinygrad_nv.patterns.attention import named as attention_named
from tinygrad_nv.patterns.attention.lower_backward import split_batch
from tinygrad_nv.patterns.attention.named import FlashAttention, attend
from tinygrad_nv.tile.attention.backward_spec import BackwardSpec
from tinygrad_nv.tile.attention.spec import AttentionSpec
from tinygrad_nv.tile.decode.spec import DecodeSpec

GPU, CPU = attention_graph.DEVICE, "CPU"
Three = tuple[Tensor, Tensor, Tensor]
SPECS = (AttentionSpec, BackwardSpec, DecodeSpec)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None: attention_graph.use(monkeypatch)


def lying(layout: str, dtype: DType, device: str, heads: int, rows: int, part: int) -> Tensor:
    """[B, heads, rows, D] as models have it."""
    def of(*shape: int) -> Tensor: return attention_graph.of(*shape, dtype=dtype, device=device)
    if layout == "by rows": return of(B, rows, heads, D).transpose(1, 2)
    first = part * heads
    if layout == "fused": return of(B, rows, 3 * heads, D)[:, :, first:first + heads].transpose(1, 2)
    if layout == "expanded": return of(1, heads, rows, D).expand(B, heads, rows, D)
    if layout == "columns": return of(B, heads, D, rows).transpose(2, 3)
    if layout == "computed": return of(B, heads, rows, D) * 2
    return of(B, heads, rows, D)


LAYOUTS = ["dense", "by rows", "fused", "expanded", "columns", "computed"]


def operands(layout: str = "dense", dtype: DType = BF16, device: str = GPU, group: int = 2, rows: int = 24,
             keys: int = 40) -> Three:
    return (lying(layout, dtype, device, 2 * group, rows, 0), lying(layout, dtype, device, 2, keys, 1),
            lying(layout, dtype, device, 2, keys, 2))


def specs(*tensors: Tensor) -> list[Any]:
    return [kernel.spec for kernel in explain(*tensors).kernels if isinstance(kernel.spec, SPECS)]


def by_name(*tensors: Tensor) -> list[Any]:
    """Specs, without the matcher."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(match._AttentionMatcher, "matches", lambda self: {})
        return specs(*tensors)


def same(what: FlashAttention, given: Three, *mask: Tensor,
         after: Callable[[Tensor], Tensor] = lambda x: x) -> None:
    found = specs(after(attention_named.forward(what, *given, *mask)[0]))
    assert len(found) == 1
    assert by_name(after(attend(what, *given, *mask))) == found


# **** specs of a result alone ****

WHATS = [FlashAttention(), FlashAttention(causal=True), FlashAttention(scale=0.3), FlashAttention(window=7),
         FlashAttention(causal=True, window=7, softcap=5.0), FlashAttention(softcap=1.5, scale=0.7)]


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("device", "dtype"), [(GPU, BF16), (GPU, F16), (CPU, F32), (CPU, BF16)], ids=str)
@pytest.mark.parametrize("what", WHATS, ids=str)
def test_scores(what: FlashAttention, device: str, dtype: DType):
    same(what, operands(dtype=dtype, device=device))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, group: int): same(FlashAttention(causal=True), operands(layout, group=group))


@pytest.mark.parametrize("keys", [40, 512])  # flash attention, and decode attention
@pytest.mark.parametrize("layout", LAYOUTS[:4])
@pytest.mark.parametrize("group", [1, 4])
def test_a_single_row(group: int, layout: str, keys: int):
    same(FlashAttention(), operands(layout, rows=1, keys=keys, group=group))


def full(*shape: int, dtype: DType = F32) -> Tensor: return attention_graph.of(*shape, dtype=dtype)


ROW, COLUMN = positions()
MASKS: dict[str, Callable[[], Tensor]] = {
    "bool": lambda: full(B, 4, 24, 40, dtype=dtypes.bool),
    "of keys": lambda: full(B, 1, 1, 40, dtype=dtypes.bool),
    "floats": lambda: full(1, 4, 24, 40), "halves": lambda: full(B, 1, 24, 40, dtype=BF16),
    "of rows": lambda: full(1, 1, 24, 1), "one": lambda: full(1, 1, 1, 1),
    "causal": lambda: (COLUMN <= ROW).reshape(1, 1, 24, 40),
    "few keys": lambda: (COLUMN < 33).reshape(1, 1, 1, 40),
    "shifted": lambda: (COLUMN <= ROW + 16).where(0, -float("inf")).reshape(1, 1, 24, 40).cast(F32),
    "window": lambda: ((COLUMN <= ROW) * (ROW - COLUMN < 9)).reshape(1, 1, 24, 40),
    "distances": lambda: ((COLUMN - ROW) * 0.125).reshape(1, 1, 24, 40).cast(F32),
    "slopes": lambda: full(4, 1, 1) * (COLUMN - ROW).cast(F32).reshape(1, 1, 24, 40),
    "start": lambda: (ROW + Variable("start", 0, 16).bind(3) >= COLUMN).reshape(1, 1, 24, 40)}


@pytest.mark.sampled(13)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("layout", ["dense", "fused"])
def test_masks(name: str, layout: str): same(FlashAttention(), operands(layout), MASKS[name]())


AFTER: dict[str, Callable[[Tensor], Tensor]] = {
    "by rows": lambda x: x.transpose(1, 2).reshape(B, 24, -1), "heads last": lambda x: x.permute(0, 2, 3, 1),
    "heads first": lambda x: x.permute(1, 0, 2, 3), "flat": lambda x: x.reshape(-1, D),
    "cast": lambda x: x.transpose(1, 2).cast(F16), "read": lambda x: x.transpose(1, 2) * 2}


# a result of 16 bits that is cast once more is rounded twice, and lies as the first rounding leaves it
@pytest.mark.parametrize(("after", "device", "dtype"), [
    *((after, CPU, F32) for after in AFTER),
    *((after, GPU, BF16) for after in AFTER if after != "cast")], ids=str)
def test_what_follows(after: str, device: str, dtype: DType):
    same(FlashAttention(causal=True), operands(dtype=dtype, device=device), after=AFTER[after])


# **** with the LSE, and backward ****

@pytest.mark.sampled(5)
@pytest.mark.parametrize(("device", "dtype"), [(GPU, BF16), (CPU, F32)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("what", "mask"), [(WHATS[1], ""), (WHATS[4], ""), (WHATS[1], "floats"),
                                            (WHATS[2], "causal")])
def test_training(what: FlashAttention, mask: str, layout: str, device: str, dtype: DType):
    given = operands(layout, dtype, device)
    known = MASKS | {"floats": lambda: attention_graph.of(1, 4, 24, 40, dtype=F32, device=device)}
    masks = [known[mask]()] if mask else []
    def found(turned: bool) -> AttentionSpec:
        out = attention_named.forward(what, *given, *masks)[0]
        (spec,) = specs(out.transpose(1, 2).contiguous() if turned else out)
        return replace(spec, lse=True)
    out = attend(what, *given, *masks)
    made = by_name(out, *out.gradient(*given, gradient=lying("dense", dtype, device, 4, 24, 0)))
    forward, backward = sorted(made, key=lambda spec: isinstance(spec, BackwardSpec))
    assert forward == found(layout in ("by rows", "fused"))
    assert backward.forward == split_batch(found(False), (B, 2, 2))


@pytest.mark.parametrize("layout", ["dense", "by rows"])
def test_training_of_a_single_row(layout: str):
    """Query heads of a key head are the kernel's rows."""
    given = operands(layout, rows=1)
    (spec,) = specs(attention_named.forward(FlashAttention(), *given)[0])
    assert isinstance(spec, AttentionSpec)
    assert spec.s_q == 2
    out = attend(FlashAttention(), *given)
    made = by_name(out, *out.gradient(*given, gradient=lying("dense", BF16, GPU, 4, 1, 0)))
    forward, backward = sorted(made, key=lambda spec: isinstance(spec, BackwardSpec))
    assert forward == replace(spec, lse=True)
    assert backward.forward == split_batch(forward, (B, 2, 1))


# **** numbers of kernels ****

@pytest.mark.parametrize("layout", ["dense", "by rows"])
@pytest.mark.parametrize(("device", "dtype"), [(GPU, BF16), (CPU, F32)], ids=str)
def test_a_result_is_written_where_it_is_read(device: str, dtype: DType, layout: str):
    q, k, v = operands(layout, dtype, device, rows=40)
    y = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert len(explain(y).kernels) == len(explain(y.transpose(1, 2).reshape(B, 40, -1)).kernels) == 1
    by_rows = y.transpose(1, 2).reshape(B, 40, -1)
    weight = attention_graph.of(by_rows.shape[-1], 64, dtype=dtype, device=device)
    assert len(explain(by_rows @ weight).kernels) == 2


def test_a_result_of_several_users_is_stored_once():
    y = scaled_dot_product_attention(*operands(), enable_gqa=True)
    made = explain(y.transpose(1, 2) * 2, y + 1).kernels
    assert [isinstance(kernel.spec, AttentionSpec) for kernel in made].count(True) == 1
    assert len(made) == 3
