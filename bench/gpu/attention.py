"""The part "attention" of bench/gpu/run.py: TFLOP/s of the forward pass beside torch (cuDNN,
FlashAttention-2), Triton and FlashAttention-3.

FlashAttention's protocol (arXiv 2205.14135): bfloat16, 16384 tokens and 2048 elements of width in all, heads
of 64, 128 and 256, sequences of 512 to 32768 tokens (one at least), causal or full, normal values; the work
of a causal pass is half of a full one's. A grouped one, as in Llama 3 8B, has 32 heads of 8.

One of 32 rows of every head, every row of short sequences, is compared with float64.

With --emulate: two heads of at most 200 tokens on the emulator, two sets in turns, whose results must be
right.
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tinygrad.dtype import dtypes

from bench.gpu.compare import check_on_emulator, spread_numbers
from bench.gpu.launch import bind_sets, device, make_launch, schedule_for
from bench.gpu.parts import (
    Column,
    NotMeasured,
    Options,
    Row,
    Run,
    about,
    contender,
    emulation,
    set_count,
    timing_part,
    verdict_row,
    workloads,
)
from tinygrad_nv.runtime.driver import Driver
from tinygrad_nv.tile.attention.spec import FULL, AttentionSpec, Band, Rows
from tinygrad_nv.tile.expression import Sum
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

TOKENS, WIDTH = 16384, 2048
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
CHECKED = 32        # one of so many rows of each head is compared with float64,
SHORT = 1024        # every row of sequences of so many tokens
AT_ONCE = 1 << 26   # scores: 512 MiB of float64
EMULATED_TOKENS = 200
TRITON_TILES = {64: ((128, 128), 4, 3), 128: ((128, 128), 8, 2), 256: ((128, 64), 8, 2)}
Sets = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Forward:
    """softmax(q kᵀ / √d) v of `batch` sequences with `heads` heads, `kv_heads` of keys."""
    batch: int
    heads: int
    tokens: int
    d: int
    causal: bool
    kv_heads: int = 0

    results = ("out",)

    @property
    def keys(self) -> int:
        """Heads of keys."""
        return self.kv_heads or self.heads

    @property
    def name(self) -> str:
        """Name of the row."""
        grouped = f" of {self.kv_heads}" if self.kv_heads else ""
        return (f"d {self.d} {'causal' if self.causal else 'full'} {self.tokens} tokens, "
                f"{self.heads}{grouped} heads x {self.batch}")

    @property
    def work(self) -> float:
        """Floating-point operations of both products."""
        return 4.0 * self.batch * self.heads * self.tokens**2 * self.d / (2 if self.causal else 1)

    @property
    def nbytes(self) -> float:
        """q, k, v and the result once."""
        return 4.0 * self.batch * self.tokens * self.d * (self.heads + self.keys)

    @property
    def spec(self) -> AttentionSpec:
        """Spec of dense [batch, heads, tokens, d]."""
        group = self.heads // self.keys
        head = self.tokens * self.d
        q = Rows(dtypes.bfloat16, self.d, (self.heads * head, group * head, head))
        k = Rows(dtypes.bfloat16, self.d, (self.keys * head, head, 0))
        return AttentionSpec(self.tokens, self.tokens, self.d, self.d, q, k, k, q,
                             (self.batch, self.keys, group), Sum() * (1 / math.sqrt(self.d)),
                             Band(last=0) if self.causal else FULL)

    def scale_down(self) -> Forward:
        """Smaller, for the emulator."""
        return replace(self, batch=1, heads=2, kv_heads=1 if self.kv_heads else 0,
                       tokens=min(self.tokens, EMULATED_TOKENS))

    def make_inputs(self, device: str) -> list[dict[str, Any]]:
        """q, k, v and out by name, as many sets as exceed twice the L2 cache."""
        import torch
        def normal(heads: int) -> torch.Tensor:
            return torch.randn(self.batch, heads, self.tokens, self.d, device=device).bfloat16()
        return [{"q": normal(self.heads), "k": normal(self.keys), "v": normal(self.keys),
                 "out": normal(self.heads)}
                for _ in range(set_count(device, self.nbytes))]

    def rows_to_compare(self, device: Any) -> Any:
        """Rows of a head that are compared with float64."""
        import torch
        return torch.tensor(spread_numbers(self.tokens, CHECKED if self.tokens > SHORT else 1), device=device)

    def unlike(self, one: dict[str, Any]) -> str:
        """How the result in these storages is not the attention; "" when it is: one of 32 rows of every
        head of every sequence, every row of short ones, against float64."""
        import torch
        device = one["q"].device
        rows = self.rows_to_compare(device)
        hidden = torch.arange(self.tokens, device=device) > rows[:, None] if self.causal else None
        group, count = self.heads // self.keys, max(1, AT_ONCE // (len(rows) * self.tokens))
        for first in range(0, self.batch * self.heads, count):
            at = torch.arange(first, min(first + count, self.batch * self.heads), device=device)
            b, head = at // self.heads, at % self.heads
            q = one["q"][b[:, None], head[:, None], rows].double()
            k, v = (one[name][b, head // group].double() for name in "kv")
            scores = q @ k.mT / math.sqrt(self.d)
            p = (scores if hidden is None else scores.masked_fill(hidden, -math.inf)).softmax(-1)
            # p and the result are rounded to 2⁻⁹ of themselves, sums of p |v| bound the rest
            got, exact, bound = one["out"][b[:, None], head[:, None], rows].double(), p @ v, p @ v.abs()
            off = (got - exact).abs() - 2.0**-7 * bound - 1e-6
            if bool((off <= 0).all()): continue
            which, row = divmod(int(off.amax(-1).argmax()), len(rows))
            return (f"sequence {int(b[which])}, head {int(head[which])}, row {int(rows[row])}: off by "
                    f"{off[which, row].max().item():g} more than allowed")
        return ""


@workloads("attention")
def shapes() -> Iterator[Forward]:
    """All rows."""
    for d in (128, 64, 256):
        for causal in (True, False):
            for tokens in LENGTHS:
                yield Forward(max(1, TOKENS // tokens), WIDTH // d, tokens, d, causal)
    for tokens in (2048, 8192): yield Forward(TOKENS // tokens, 32, tokens, 128, True, 8)


# **** ours ****

def bind_launch(driver: Driver, workload: Forward, addresses: Mapping[str, int]) -> Any:
    """A launch of ours on out, q, k and v."""
    gpu, spec = driver.properties, workload.spec
    machine = GPU(gpu.arch, gpu.sm_count)
    made = TABLE.build(spec, schedule_for(spec, gpu.arch), machine)
    return make_launch(driver, [made], [addresses[name] for name in ("out", "q", "k", "v")], rows=spec.s_q)


@contender("attention", "ours")
def ours(workload: Forward, given: Sets, options: Options) -> Run:
    """Our kernel, by the default schedule."""
    gpu = device()
    return bind_sets(gpu, partial(bind_launch, gpu, workload), given)


@about("attention")
def describe_schedule(workload: Forward) -> dict[str, Any]:
    """The schedule that `ours` takes."""
    return {"schedule": str(schedule_for(workload.spec, device().properties.arch))}


@emulation("attention")
def run_emulated(workload: Any, options: Options) -> Row:
    """The attention scaled down, on the emulated driver."""
    from tinygrad_nv.runtime.emulated.driver import EmulatedDriver
    small, driver = workload.scale_down(), EmulatedDriver(options.arch, seed=options.seed)
    wrong = check_on_emulator(small, driver, partial(bind_launch, driver, small))
    return verdict_row(wrong, str(schedule_for(workload.spec, options.arch)))


# **** the others ****

def sdpa(backend: str, workload: Forward, given: Sets) -> Run:
    """torch's scaled_dot_product_attention with one backend. It makes its result: that of its set."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as attend

    def run(i: int) -> None:
        one = given[i]
        with sdpa_kernel(getattr(SDPBackend, backend)):
            one["out"] = attend(one["q"], one["k"], one["v"], is_causal=workload.causal,
                                enable_gqa=bool(workload.kv_heads))

    torch.cuda.synchronize()
    return run


@contender("attention", "cuDNN")
def cudnn(workload: Forward, given: Sets, options: Options) -> Run:
    """torch with cuDNN's attention."""
    return sdpa("CUDNN_ATTENTION", workload, given)


@contender("attention", "FlashAttention-2")
def flash(workload: Forward, given: Sets, options: Options) -> Run:
    """torch with its FlashAttention, which is version 2: no wgmma, no TMA."""
    return sdpa("FLASH_ATTENTION", workload, given)


@contender("attention", "FlashAttention-3")
def flash3(workload: Forward, given: Sets, options: Options) -> Run:
    """FlashAttention-3's kernel, or its package where it is installed."""
    from bench.gpu import fa3
    return fa3.contender(workload, given, options)


@contender("attention", "Triton")
def triton(workload: Forward, given: Sets, options: Options) -> Run:
    """The tutorial's kernel, with descriptors on Hopper."""
    import torch
    from triton.tools.tensor_descriptor import TensorDescriptor

    from bench.lib.attention_peers import Flash, forward_kernel
    if workload.kv_heads: raise NotMeasured("its tutorial has as many heads of keys")
    hopper = device().properties.arch == "sm_90a"
    block, warps, stages = TRITON_TILES[workload.d] if hopper else ((128, 64), 4 + 4 * (workload.d > 64), 2)
    one = Flash("forward", workload.d, block, warps, stages, workload.causal, hopper)
    logs = torch.empty(workload.batch * workload.heads * workload.tokens, device="cuda")

    def operand(name: str, tensor: Any) -> Any:
        flat = tensor.view(-1, workload.d)
        return TensorDescriptor.from_tensor(flat, list(one.box(name))) if hopper else flat
    sets = [{name: operand(name, each[name]) for name in ("q", "k", "v", "out")} for each in given]
    grid = (workload.tokens // block[0], workload.batch * workload.heads)
    fixed = {"log": logs, "S": workload.tokens, "scale": math.log2(math.e) / math.sqrt(workload.d),
             **one.constants, "num_warps": warps, "num_stages": stages}
    return partial(_launch_triton, forward_kernel[grid], sets, fixed)


def _launch_triton(made: Any, sets: Sequence[dict[str, Any]], fixed: dict[str, Any], i: int) -> None:
    made(**sets[i], **fixed)


timing_part("attention", "flash attention, forward, bfloat16", Column("TFLOP/s"), expected_s=8.0)
