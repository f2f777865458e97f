"""Numerics as part of a type: how sums are kept, how a store rounds, what happens beyond the range.

    from tinygrad_nv.numerics.policy import accum, deterministic, loss_scale, saturate, stochastic_round
    activation = dtypes.bfloat16 @ accum(dtypes.float32) @ stochastic_round

Protocol: `dtype @ policy` is a `Policied`, frozen and hashable, and `Policied @ policy` one with a policy
more. Policies stand in one order, so what means the same is equal: str() is
`bf16 @accum(f32) @stochastic_round`.

    accum(dtype)        sums of products are kept in `dtype`
    stochastic_round    a store rounds up as often as the number lies near the upper neighbour; with
                        stochastic_round(seed=1) the same bits at every run
    saturate            a store clamps to the largest finite number, instead of infinity
    loss_scale(k)       the tensor has k times its values: a gradient of a loss times k
    deterministic       bits depend neither on the batch nor on how a sum is split; `with deterministic():`
                        says so of everything inside

Raises `NumericsError` where a policy means nothing for a dtype, and where two contradict each other:

    accum       an accumulator holds every operand exactly: its significand is as long and its exponents reach
                as far. bf16 @accum(f16) overflows, f32 @accum(bf16) drops digits. Sums of integers are of 32
                bits or more
    the others  narrow a float32 result; a dtype that is as wide has nothing to round, to clamp or to scale
    saturate    with loss_scale hides the overflow by which a scale is known to be too large. FP8 is
                exempt: its conversions clamp on every unit
    deterministic with stochastic_round needs a seed

`meet` (meet.py) says what two operands come to.
"""
from __future__ import annotations

import itertools
import math
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

from tinygrad.dtype import DType, dtypes

from tinygrad_nv import config
from tinygrad_nv.errors import NumericsError
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.order import SETTING

FP8 = dtypes.fp8_ocp
NARROW = (dtypes.float16, dtypes.bfloat16, *FP8)
# significand's bits with the hidden one, exponent of the smallest number, exponent beyond the largest
REACH = {dtypes.float64: (53, -1074, 1024), dtypes.float32: (24, -149, 128), dtypes.bfloat16: (8, -133, 128),
         dtypes.float16: (11, -24, 16), dtypes.fp8e4m3: (4, -9, 9), dtypes.fp8e5m2: (3, -16, 16)}
LARGEST_SEED = 2**64


@dataclass(frozen=True)
class Policy:
    """One statement about numbers of a dtype; `dtype @ policy` makes a `Policied`."""
    order: ClassVar[int] = 0

    def __rmatmul__(self, dtype: DType) -> Policied:
        if not isinstance(dtype, DType):
            raise NumericsError(f"{dtype!r} @{self}", "a dtype on the left of a policy: bf16 @accum(f32)")
        return Policied(dtype, (self,))

    def check(self, dtype: DType) -> None:
        """Raises `NumericsError` where the policy means nothing for a dtype."""


PolicyOf = TypeVar("PolicyOf", bound=Policy)


@dataclass(frozen=True)
class Accumulate(Policy):
    """Sums of products are kept in a dtype."""
    dtype: DType
    order: ClassVar[int] = 1

    def __str__(self) -> str: return f"accum({short(self.dtype)})"

    def check(self, dtype: DType) -> None:
        """An accumulator holds every operand exactly."""
        shown = f"{short(dtype)} @{self}"
        if dtypes.is_int(dtype):
            if not holds_sums(self.dtype, dtype):
                raise NumericsError(shown, f"integers of 32 bits or more for sums of {short(dtype)}",
                                    "accum(int32), and a scale after the sum")
            return
        if dtype not in REACH: raise NumericsError(shown, "floats or integers: only they are summed")
        if self.dtype not in REACH:
            raise NumericsError(shown, f"a float that holds every {short(dtype)}: {_wide_enough(dtype)}")
        if not holds(self.dtype, dtype):
            raise NumericsError(f"{shown}: {_loss(dtype, self.dtype)}",
                                f"a float that holds every {short(dtype)}: {_wide_enough(dtype)}")


@dataclass(frozen=True)
class StochasticRound(Policy):
    """A store rounds to one of the two neighbours, with the chance of its nearness. Without a seed bits are
    those of Tensor.manual_seed's generator."""
    seed: int | None = None
    order: ClassVar[int] = 2

    def __post_init__(self) -> None:
        if self.seed is not None and not (type(self.seed) is int and 0 <= self.seed < LARGEST_SEED):
            raise NumericsError(f"stochastic_round(seed={self.seed!r})", "an integer of 64 bits, 0 or more")

    def __call__(self, seed: int) -> StochasticRound: return StochasticRound(seed)

    def __str__(self) -> str:
        return "stochastic_round" + (f"(seed={self.seed})" if self.seed is not None else "")

    def check(self, dtype: DType) -> None:
        """Only a dtype narrower than the sums has something to round."""
        _check_narrow(self, dtype, "nothing is rounded on the way from a float32 sum", NARROW)


@dataclass(frozen=True)
class Saturate(Policy):
    """A store clamps to the largest finite number of its sign; NaN stays NaN."""
    order: ClassVar[int] = 3

    def __str__(self) -> str: return "saturate"

    def check(self, dtype: DType) -> None:
        """float32 sums reach no further than float32."""
        if dtypes.is_int(dtype) and dtype.itemsize < dtypes.int32.itemsize: return
        _check_narrow(self, dtype, "sums reach no further than it does", (*NARROW, dtypes.int8, dtypes.uint8))


@dataclass(frozen=True)
class LossScale(Policy):
    """The tensor has `scale` times its values. A power of two: multiplying by it rounds nothing."""
    scale: float
    order: ClassVar[int] = 4

    def __post_init__(self) -> None:
        if not (isinstance(self.scale, int | float) and 0 < self.scale < math.inf
                and math.frexp(self.scale)[0] == 0.5):
            raise NumericsError(f"loss_scale({self.scale!r})", "a power of two above 0",
                                "loss_scale(2.0 ** 16): by a power of two no gradient is rounded")

    def __str__(self) -> str: return f"loss_scale({self.scale:g})"

    def check(self, dtype: DType) -> None:
        """A scale keeps small gradients from a narrow dtype's zero."""
        _check_narrow(self, dtype, "small gradients are numbers of it without a scale", NARROW)


@dataclass(frozen=True)
class Deterministic(Policy):
    """Bits depend neither on the batch nor on how a sum is split. Called, it is a switch: inside
    `with deterministic():` that holds for every kernel that this thread schedules (tile/order.py)."""
    order: ClassVar[int] = 5

    def __call__(self) -> AbstractContextManager[None]: return config.override(SETTING, 1)

    def __str__(self) -> str: return "deterministic"


def accum(dtype: DType) -> Accumulate:
    """Sums of products are kept in `dtype`: bf16 @ accum(dtypes.float32)."""
    return Accumulate(dtype)


def loss_scale(scale: float) -> LossScale:
    """The tensor has `scale` times its values, a power of two: f16 @ loss_scale(2.0 ** 16)."""
    return LossScale(scale)


stochastic_round = StochasticRound()
saturate = Saturate()
deterministic = Deterministic()


@dataclass(frozen=True)
class Policied:
    """A dtype and its policies, in one order. Raises `NumericsError` for what contradicts itself."""
    dtype: DType
    policies: tuple[Policy, ...] = ()

    def __post_init__(self) -> None:
        ordered = tuple(sorted(dict.fromkeys(self.policies), key=lambda each: each.order))
        object.__setattr__(self, "policies", ordered)
        for each in ordered: each.check(self.dtype)
        for first, second in itertools.pairwise(ordered):
            if first.order == second.order:
                raise NumericsError(f"{self}: {first} and {second}", "one of them for one tensor")
        if why := contradiction(self.dtype, ordered): raise NumericsError(f"{self}: {why[0]}", why[1], why[2])

    def __matmul__(self, policy: Policy) -> Policied:
        if not isinstance(policy, Policy):
            raise NumericsError(f"{self} @ {policy!r}", "a policy: accum(f32), stochastic_round, saturate, "
                                "loss_scale(k), deterministic")
        return replace(self, policies=(*self.policies, policy))

    def __str__(self) -> str: return " ".join([short(self.dtype), *(f"@{each}" for each in self.policies)])

    def get(self, kind: type[PolicyOf]) -> PolicyOf | None:
        """The policy of a kind, None where nothing is said."""
        return _of(kind, self.policies)

    @property
    def accumulator(self) -> DType | None:
        """The dtype in which sums are kept; None: as the operation has it by default."""
        return None if (found := self.get(Accumulate)) is None else found.dtype


def with_policies(dtype: DType | Policied) -> Policied:
    """A dtype alone, as one without policies."""
    return dtype if isinstance(dtype, Policied) else Policied(dtype)


def _of(kind: type[PolicyOf], policies: tuple[Policy, ...]) -> PolicyOf | None:
    return next((each for each in policies if isinstance(each, kind)), None)


def contradiction(dtype: DType, policies: tuple[Policy, ...]) -> tuple[str, str, str] | None:
    """Why policies cannot be of one tensor, what could, and how to say it."""
    rounds = _of(StochasticRound, policies)
    if _of(Deterministic, policies) and rounds is not None and rounds.seed is None:
        return ("bits that are drawn anew at every run are not deterministic", "a seed",
                "stochastic_round(seed=…)")
    if _of(Saturate, policies) and _of(LossScale, policies) and dtype not in FP8:
        return ("a store that saturates hides the overflow by which a loss scale is known to be too large",
                "one of them", "leave saturate out: a step with infinite gradients is skipped")
    return None


def holds(wide: DType, narrow: DType) -> bool:
    """Whether every float of `narrow` is one of `wide`."""
    (bits, low, high), (wanted, lowest, highest) = REACH[wide], REACH[narrow]
    return bits >= wanted and low <= lowest and high >= highest


def holds_sums(wide: DType, narrow: DType) -> bool:
    """Whether an integer dtype is one for sums of products of another."""
    if not dtypes.is_int(wide) or wide.itemsize < max(narrow.itemsize, dtypes.int32.itemsize): return False
    return dtypes.is_unsigned(narrow) or not dtypes.is_unsigned(wide)


def _wide_enough(dtype: DType) -> str:
    return ", ".join(f"accum({short(each)})" for each in REACH if holds(each, dtype) and each not in FP8)


def _loss(narrow: DType, wide: DType) -> str:
    (bits, _, high), (kept, _, highest) = REACH[narrow], REACH[wide]
    if highest < high: return f"sums overflow from 2^{highest} on, and {short(narrow)} reaches 2^{high}"
    if kept < bits: return f"{kept} bits of significand for operands of {bits}"
    return f"{short(narrow)} has smaller numbers than {short(wide)}"


def _check_narrow(policy: Policy, dtype: DType, why: str, expected: tuple[DType, ...]) -> None:
    if dtype in NARROW: return
    raise NumericsError(f"{short(dtype)} @{policy}: {why}", f"one of {', '.join(map(short, expected))}")
