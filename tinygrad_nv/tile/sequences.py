"""Sequences whose states lie in pages, as specs of linear attention, causal convolutions and selective scans
have them.

Protocol: tokens of sequences lie one after the other. Row s of `sequences`, int32, has `COLUMNS`: the
sequence's first token and how many it has; the page with the state that they begin with, −1 for zeros; after
how many tokens the state is `kept`, in which page, −1 for none; and the page that has the state after all of
them. A page is that of the source at the same time, or of no other sequence. Tokens of no sequence have no
results. What references share is in sequences_reference.py.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.gemm.spec import FLOAT16S

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
