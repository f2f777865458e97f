"""What a user may ask of the sampler, and the sampler as tensor code.

Protocol: `SamplingParams` is checked when made. `next_token(logits, filters, knobs, …)` runs on the device
inside the captured step; the values are in tensors (`Knobs`), so changing them replays the same graph, and
only which filters are in use (`SamplingParams.filters`) selects another one.

The order is that of transformers: repetition penalty, temperature, top-k, top-p, min-p, draw. The draw is
the Gumbel maximum of the filtered logits with noise from Threefry on (seed, position, token): no state goes
from one draw to the next, so the same seed and logits give the same token whatever was drawn before (Salmon
et al., SC 2011; Gumbel-max: Maddison et al., arXiv 1411.0030).
"""
from __future__ import annotations

import secrets
import sys
from dataclasses import dataclass

from tinygrad import Tensor, dtypes

from tinygrad_nv.errors import RequestError
from tinygrad_nv.patterns.sampling import largest, noisy

# the smallest and largest normal numbers of float32
FLOAT32_MIN, FLOAT32_MAX = 2.0 ** -126, (2 - 2.0 ** -23) * 2.0 ** 127
# vLLM's bound: a logit 2e-4 below the largest is 20 below it once divided by this, and noise makes up for 19
GREEDY_BELOW = 1e-5
KNOBS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Filters:
    """Which parts of the sampler a request needs; equal filters share a captured graph."""
    draw: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    penalty: bool = False


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop. Names and meanings are vLLM's.

    `temperature` 0 is greedy (as is anything below `GREEDY_BELOW`). `top_k` 0 or -1 keeps every token.
    `top_p` in (0, 1]; `min_p` in [0, 1], relative to the likeliest token. `seed` None draws a fresh one.
    `stop` strings end the text and are not part of it; ids in `stop_token_ids` end it like the model's own
    end tokens, which `ignore_eos` disables.
    """
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = 256
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _range(self, "temperature", 0 <= self.temperature <= FLOAT32_MAX, "a number ≥ 0 (0 is greedy)")
        _range(self, "top_k", isinstance(self.top_k, int) and -1 <= self.top_k <= sys.maxsize,
               "a whole number ≥ 1, or 0 for every token")
        _range(self, "top_p", 0 < self.top_p <= 1, "a number in (0, 1]")
        _range(self, "min_p", 0 <= self.min_p <= 1, "a number in [0, 1]")
        _range(self, "repetition_penalty", 0 < self.repetition_penalty <= FLOAT32_MAX,
               "a number > 0 (1 is none)")
        _range(self, "max_tokens", self.max_tokens is None or self.max_tokens >= 1, "a whole number ≥ 1")
        _range(self, "seed", self.seed is None or 0 <= self.seed < 1 << 64, "a whole number in [0, 2^64)")
        _range(self, "stop", all(self.stop), "non-empty strings")

    @property
    def filters(self) -> Filters:
        """What the device has to compute."""
        draw = self.temperature >= GREEDY_BELOW
        return Filters(draw, draw and self.top_k > 0, draw and self.top_p < 1, draw and self.min_p > 0,
                       self.repetition_penalty != 1)


def _range(params: SamplingParams, name: str, holds: bool, expected: str) -> None:
    if not holds: raise RequestError(f"{name} is {getattr(params, name)!r}", expected, f"change {name}")


@dataclass(frozen=True)
class Knobs:
    """A request's numbers on the device: `values` float32 (5,) in the order of `KNOBS`, `seed` uint32
    (2,)."""
    values: Tensor
    seed: Tensor

    @staticmethod
    def create(device: str | None) -> Knobs:
        """Device buffers, to be set for each request."""
        values = Tensor.empty(len(KNOBS), dtype=dtypes.float32, device=device)
        return Knobs(values, Tensor.empty(2, dtype=dtypes.uint32, device=device))

    def row(self, name: str) -> Tensor:
        """The knob `name`, shape (1,)."""
        i = KNOBS.index(name)
        return self.values[i:i + 1]


def request_numbers(params: SamplingParams) -> tuple[list[float], list[int], int]:
    """Contents of `Knobs.values` and `Knobs.seed` for a request, and the seed that was taken."""
    seed = secrets.randbits(32) if params.seed is None else params.seed
    # a number that float32 rounds to 0 would divide by it, or put a threshold above every token
    values = [max(float(getattr(params, name)), FLOAT32_MIN) for name in KNOBS]
    return values, [seed & 0xFFFFFFFF, seed >> 32], seed


def next_token(logits: Tensor, filters: Filters, knobs: Knobs, seen: Tensor, position: Tensor) -> Tensor:
    """The next token, int32 (1,), from float32 logits (V,).

    `seen` is bool (V,): tokens of prompt and text so far. `position` is the place the token will have, int
    (1,): with the seed it selects the noise.
    """
    logits = filtered(logits, filters, knobs, seen)
    if filters.draw: logits = noisy(logits, knobs.seed, position)
    return logits.argmax().cast(dtypes.int32).reshape(1)


def filtered(logits: Tensor, filters: Filters, knobs: Knobs, seen: Tensor) -> Tensor:
    """float32 logits (V,) after every filter in use, -inf where a token is out.

    A draw is by their softmax. Without one only the penalty applies: nothing else changes which is largest.
    """
    if filters.penalty:
        penalty = knobs.row("repetition_penalty")
        logits = seen.where((logits > 0).where(logits / penalty, logits * penalty), logits).contiguous()
    if not filters.draw: return logits
    logits = (logits / knobs.row("temperature")).contiguous()
    if filters.top_k: logits = largest(logits, None, knobs.values, KNOBS.index("top_k"))
    if filters.top_p:
        logits = largest(logits, logits.softmax(-1).contiguous(), knobs.values, KNOBS.index("top_p"))
    if filters.min_p:
        # p ≥ min_p · p_max, in logarithms
        logits = (logits >= logits.max() + knobs.row("min_p").log()).where(logits, -float("inf")).contiguous()
    return logits
