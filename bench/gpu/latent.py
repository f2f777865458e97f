"""The part "latent" of bench/gpu/run.py: decode attention over pages of latents (MLA), GB/s and TFLOP/s.

DeepSeek-V3's absorbed attention, bfloat16: latents of 512 elements and 64 of a rotated key, which all query
heads share, the former as values too; 128 heads, and the 16 that each of 8 GPUs has. One new row for each
request, pages of 64 tokens in random order, every request as long as the row says. GB/s count latents once.
torch multiplies with a softmax in float32 between, over latents in one piece, no pages; "copy" moves as many
bytes, half of them read and half written.

With --emulate: at most two requests of 200 tokens, two sets in turns, whose results must be right.
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from bench.gpu.compare import check_on_emulator
from bench.gpu.elementwise import copy
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
from bench.lib import specs
from tinygrad_nv.runtime.driver import Driver
from tinygrad_nv.tile.decode.spec import DecodeSpec
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

RANK, ROPE, PAGE = 512, 64, 64
D = ROPE + RANK
SCALE = 1 / math.sqrt(D)
NAMES = ("out", "q", "k", "table", "lengths")
Sets = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class LatentWorkload:
    """One step of `batch` requests of `tokens` tokens with `heads` query heads."""
    heads: int
    batch: int
    tokens: int

    results = ("out",)

    @property
    def name(self) -> str:
        """Name of the row."""
        return f"{self.heads} heads, batch {self.batch}, {self.tokens} tokens"

    @property
    def pages(self) -> int:
        """Pages of a request."""
        return -(-self.tokens // PAGE)

    @property
    def work(self) -> float:
        """Floating-point operations of both matmuls."""
        return 2.0 * self.batch * self.heads * self.tokens * (D + RANK)

    @property
    def nbytes(self) -> float:
        """Latents."""
        return 2.0 * self.batch * self.tokens * D

    @property
    def spec(self) -> DecodeSpec:
        """Latents [pages, page size, d], q [batch, heads, d], out [batch, heads, rank]."""
        return specs.latent(self.batch, self.heads, 1, RANK, ROPE, page_size=PAGE, pages=self.pages)

    def scale_down(self) -> LatentWorkload:
        """Smaller, for the emulator."""
        return LatentWorkload(min(self.heads, 64), min(self.batch, 2), min(self.tokens, 200))

    def make_inputs(self, device: str) -> list[dict[str, Any]]:
        """Storages by name, as many sets as exceed twice the L2 cache."""
        import torch
        every, kind = self.batch * self.pages, {"device": device, "dtype": torch.bfloat16}

        def one() -> dict[str, Any]:
            return {"out": torch.empty(self.batch, self.heads, RANK, **kind),
                    "q": torch.randn(self.batch, self.heads, D, **kind),
                    "k": torch.randn(every, PAGE, D, **kind),
                    "table": torch.randperm(every, device=device).int().view(self.batch, self.pages),
                    "lengths": torch.full((self.batch,), self.tokens, dtype=torch.int32, device=device)}
        return [one() for _ in range(set_count(device, self.nbytes))]

    def latents(self, one: dict[str, Any], request: int) -> Any:
        """A request's latents in one piece."""
        return one["k"][one["table"][request].long()].view(-1, D)[:self.tokens]

    def unlike(self, one: dict[str, Any]) -> str:
        """How the result in these storages is not the attention; "" when it is: every request, against
        float64."""
        for b in range(self.batch):
            k = self.latents(one, b).double()
            p, v = (one["q"][b].double() @ k.T * SCALE).softmax(-1), k[:, ROPE:]
            off = (one["out"][b].double() - p @ v).abs()
            if not bool((off <= 2.0**-7 * (p @ v.abs()) + 1e-6).all()):
                return f"request {b}: off by {off.max().item():g}"
        return ""


@workloads("latent")
def shapes() -> Iterator[LatentWorkload]:
    """All rows."""
    for heads in (128, 16):
        for batch, tokens in ((1, 2048), (16, 2048), (64, 2048), (16, 16384)):
            yield LatentWorkload(heads, batch, tokens)


# **** ours ****

def bind_launch(driver: Driver, workload: LatentWorkload, addresses: Mapping[str, int]) -> Any:
    """A launch of ours on memory by name, and on a workspace of its own."""
    spec, arch = workload.spec, driver.properties.arch
    made = TABLE.build(spec, schedule_for(spec, arch), GPU(arch, driver.properties.sm_count))
    space = [driver.alloc(each.nbytes) for each in made.scratch]
    return make_launch(driver, made.kernels, [addresses["out"], *space, *(addresses[n] for n in NAMES[1:])])


@contender("latent", "ours")
def ours(workload: LatentWorkload, given: Sets, options: Options) -> Run:
    """Our kernels, by the default schedule."""
    gpu = device()
    return bind_sets(gpu, partial(bind_launch, gpu, workload), given, NAMES)


@about("latent")
def describe_schedule(workload: LatentWorkload) -> dict[str, Any]:
    """The schedule that `ours` takes."""
    return {"schedule": str(schedule_for(workload.spec, device().properties.arch))}


@emulation("latent")
def run_emulated(workload: Any, options: Options) -> Row:
    """The step scaled down, on the emulated driver."""
    from tinygrad_nv.runtime.emulated.driver import EmulatedDriver
    small, driver = workload.scale_down(), EmulatedDriver(options.arch, seed=options.seed)
    wrong = check_on_emulator(small, driver, partial(bind_launch, driver, small))
    return verdict_row(wrong, str(schedule_for(workload.spec, options.arch)))


# **** the others ****

contender("latent", "copy")(copy)


@contender("latent", "torch")
def torch_matmuls(workload: LatentWorkload, given: Sets, options: Options) -> Run:
    """torch's matmuls and softmax over latents [batch, tokens, d]."""
    import torch
    sets = [(one["q"], torch.stack([workload.latents(one, b) for b in range(workload.batch)]))
            for one in given]

    def run(i: int) -> None:
        q, k = sets[i]
        p = (q @ k.mT * SCALE).softmax(-1, dtype=torch.float32).to(q.dtype)
        given[i]["out"] = p @ k[..., ROPE:]

    if given[0]["k"].is_cuda: torch.cuda.synchronize()
    return run


timing_part("latent", "decode attention over latents (MLA), bfloat16", Column("GB/s", "nbytes", 1e9, ".0f"),
            expected_s=8.0, also=Column("TFLOP/s"))
