"""The part "paged" of bench/gpu/run.py: decode attention over pages, GB/s beside what a copy moves.

Llama 3 8B's layer, bfloat16: 32 query heads of 8 of keys, d 128, one new row for each request, pages of 16
tokens in random order, every request as long as the row says. GB/s count keys and values once. "copy" moves
as many bytes in all, half of them read and half written: ours over it is the share of the bandwidth that a
copy reaches. torch attends over keys and values in one piece each, no pages.

With --emulate: at most two requests of 200 tokens, two sets in turns, whose results must be
right.
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tinygrad.dtype import dtypes

from bench.gpu.compare import Partly, check_on_emulator
from bench.gpu.launch import bind_sets, device, make_launch, schedule_for
from bench.gpu.parts import (
    Column,
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
from tinygrad_nv.tile.attention.spec import Rows
from tinygrad_nv.tile.decode.spec import DecodeSpec, Pages
from tinygrad_nv.tile.expression import Sum
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

HEADS, KV_HEADS, D, PAGE = 32, 8, 128, 16
MOST_BYTES = 16 << 30
NAMES = ("out", "q", "k", "v", "table", "lengths")
Sets = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Paged:
    """One step of `batch` requests of `tokens` tokens."""
    batch: int
    tokens: int

    results = ("out",)

    @property
    def name(self) -> str:
        """Name of the row."""
        return f"batch {self.batch}, {self.tokens} tokens"

    @property
    def pages(self) -> int:
        """Pages of a request."""
        return -(-self.tokens // PAGE)

    @property
    def work(self) -> float:
        """Floating-point operations of both products."""
        return 4.0 * self.batch * HEADS * self.tokens * D

    @property
    def nbytes(self) -> float:
        """Keys and values."""
        return 4.0 * self.batch * self.tokens * KV_HEADS * D

    @property
    def spec(self) -> DecodeSpec:
        """Pages [pages, page size, heads, d], q and out [batch, heads, d]."""
        group, kind = HEADS // KV_HEADS, dtypes.bfloat16
        q = Rows(kind, HEADS * D, (HEADS * D, group * D, D))
        k = Pages(kind, PAGE * KV_HEADS * D, KV_HEADS * D, D)
        return DecodeSpec(self.batch, KV_HEADS, group, 1, D, D, PAGE, self.pages, q, k, k, q,
                          score=Sum() * (1 / math.sqrt(D)))

    def scale_down(self) -> Paged:
        """Smaller, for the emulator."""
        return replace(self, batch=min(self.batch, 2), tokens=min(self.tokens, 200))

    def make_inputs(self, device: str) -> list[dict[str, Any]]:
        """Storages by name, as many sets as exceed twice the L2 cache."""
        import torch
        every = self.batch * self.pages

        def one() -> dict[str, Any]:
            k, v = (torch.randn(every, PAGE, KV_HEADS, D, device=device, dtype=torch.bfloat16)
                    for _ in range(2))
            q = torch.randn(self.batch, HEADS, D, device=device, dtype=torch.bfloat16)
            table = torch.randperm(every, device=device).int().view(self.batch, self.pages)
            lengths = torch.full((self.batch,), self.tokens, dtype=torch.int32, device=device)
            return {"out": torch.empty_like(q), "q": q, "k": k, "v": v, "table": table, "lengths": lengths}
        return [one() for _ in range(set_count(device, self.nbytes))]

    def unlike(self, one: dict[str, Any]) -> str:
        """How the result in these storages is not the attention; "" when it is: every request, against
        float64."""
        import torch
        for b in range(self.batch):
            k, v = (one[name][one["table"][b].long()].view(-1, KV_HEADS, D)[:self.tokens].double()
                    for name in "kv")
            q = one["q"][b].view(KV_HEADS, -1, D).double()
            p = (torch.einsum("hgd,thd->hgt", q, k) / math.sqrt(D)).softmax(-1)
            exact, bound = (torch.einsum("hgt,thd->hgd", p, x) for x in (v, v.abs()))
            off = (one["out"][b].view(exact.shape).double() - exact).abs()
            if not bool((off <= 2.0**-7 * bound + 1e-6).all()):
                return f"request {b}: off by {off.max().item():g}"
        return ""


@workloads("paged")
def shapes() -> Iterator[Paged]:
    """All rows, of at most 16 GiB of keys and values."""
    for tokens in (512, 2048, 8192, 32768, 131072):
        for batch in (1, 4, 16, 64, 256):
            if (row := Paged(batch, tokens)).nbytes <= MOST_BYTES: yield row


# **** ours ****

def bind_launch(driver: Driver, workload: Paged, addresses: Mapping[str, int]) -> Any:
    """A launch of ours on memory by name, and on a workspace of its own."""
    spec, arch = workload.spec, driver.properties.arch
    made = TABLE.build(spec, schedule_for(spec, arch), GPU(arch))
    space = [driver.alloc(made.workspace_bytes)] if made.workspace_bytes else []
    return make_launch(driver, made.kernels, [addresses["out"], *space, *(addresses[n] for n in NAMES[1:])])


@contender("paged", "ours")
def ours(workload: Paged, given: Sets, options: Options) -> Run:
    """Our kernels, by the default schedule."""
    gpu = device()
    return bind_sets(gpu, partial(bind_launch, gpu, workload), given, NAMES)


@about("paged")
def describe_schedule(workload: Paged) -> dict[str, Any]:
    """The schedule that `ours` takes."""
    return {"schedule": str(schedule_for(workload.spec, device().properties.arch))}


@emulation("paged")
def run_emulated(workload: Any, options: Options) -> Row:
    """The step scaled down, on the emulated driver."""
    from tinygrad_nv.runtime.emulated.driver import EmulatedDriver
    small, driver = workload.scale_down(), EmulatedDriver(options.arch, seed=options.seed)
    wrong = check_on_emulator(small, driver, partial(bind_launch, driver, small))
    return verdict_row(wrong, str(schedule_for(workload.spec, options.arch)))


# **** the others ****

@contender("paged", "copy")
def copy(workload: Paged, given: Sets, options: Options) -> Run:
    """Copies keys to memory in turns, as many bytes read and written as ours reads: what the memory's
    bandwidth is worth."""
    import torch
    targets = [torch.empty_like(each["k"]) for each in given[:2]]
    return Partly(lambda i: targets[i % len(targets)].copy_(given[i]["k"]), 0)


@contender("paged", "torch")
def torch_sdpa(workload: Paged, given: Sets, options: Options) -> Run:
    """torch's scaled_dot_product_attention over keys and values [batch, heads, tokens, d]."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention as attend
    shape = (workload.batch, -1, KV_HEADS, D)
    sets = [[each["q"].view(workload.batch, HEADS, 1, D),
             *(each[name][each["table"].flatten().long()].view(shape)[:, :workload.tokens].transpose(1, 2)
               .contiguous() for name in "kv")] for each in given[:2]]

    def run(i: int) -> None:
        q, k, v = sets[i % 2]
        given[i % 2]["out"] = attend(q, k, v, enable_gqa=True).view(workload.batch, HEADS, D)

    torch.cuda.synchronize()
    return Partly(run, 2)


timing_part("paged", "decode attention over pages, bfloat16", Column("GB/s", "nbytes", 1e9, ".0f"),
            expected_s=8.0, also=Column("TFLOP/s"))
