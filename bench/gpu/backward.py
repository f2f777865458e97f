"""The part "backward" of bench/gpu/run.py: TFLOP/s of the backward pass beside torch (cuDNN,
FlashAttention-2) and Triton.

The shapes of gpu/attention.py; the work is 2.5 times the forward's (five products for two). Ours is all that
a gradient takes: delta, the kernel, and dq's rounding; the first and the last are torch's kernels here. torch
is asked for dq, dk and dv of a forward pass that has been done.

One of 32 rows of each gradient of every head, every row of short sequences, is compared with float64.

With --emulate: two heads of at most 150 tokens, two sets in turns, whose gradients must be right.
"""
from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from bench.gpu.attention import LENGTHS, TOKENS, WIDTH, Forward
from bench.gpu.compare import check_on_emulator
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
    timing_part,
    verdict_row,
    workloads,
)
from tinygrad_nv.runtime.driver import Driver
from tinygrad_nv.tile.attention.backward_spec import BackwardSpec
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

EMULATED_TOKENS = 150
TRITON_TILES = {"dk, dv": {64: ((64, 128), 8, 2), 128: ((64, 128), 8, 2), 256: ((32, 64), 8, 2)},
                "dq": {64: ((128, 64), 8, 2), 128: ((128, 64), 8, 2), 256: ((64, 32), 8, 2)}}
RESULTS = ("dq", "dk", "dv")
NAMES = ("dk", "dv", "q", "k", "v", "grad", "l", "delta")
Sets = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Backward:
    """The gradients of an attention."""
    forward: Forward
    deterministic: bool = False

    results = RESULTS

    @property
    def name(self) -> str:
        """Name of the row."""
        return self.forward.name + (", deterministic" if self.deterministic else "")

    @property
    def work(self) -> float:
        """Floating-point operations of the five products."""
        return 2.5 * self.forward.work

    @property
    def nbytes(self) -> float:
        """q, k, v, the result, and the gradients of all of them once."""
        return 2 * self.forward.nbytes

    @property
    def spec(self) -> BackwardSpec:
        """Spec of dense [batch, heads, tokens, d]."""
        one = replace(self.forward.spec, lse=True)
        return BackwardSpec(one, one.out, one.k, one.v, self.deterministic)

    def scale_down(self) -> Backward:
        """Smaller, for the emulator."""
        small = self.forward.scale_down()
        return replace(self, forward=replace(small, tokens=min(small.tokens, EMULATED_TOKENS)))

    def make_inputs(self, device: str) -> list[dict[str, Any]]:
        """Storages by name; l is exact, out that of float32."""
        import torch
        sets = self.forward.make_inputs(device)
        for one in sets:
            one["grad"] = torch.randn(one["q"].shape, device=device).bfloat16()
            one["out"], one["l"] = forward(self.forward, one)
            one["delta"] = (one["grad"].float() * one["out"]).sum(-1)
            one["sum"] = torch.empty(one["q"].shape, device=device)
            for name in RESULTS: one[name] = torch.empty_like(one[name[1]])
        return sets

    def unlike(self, one: dict[str, Any]) -> str:
        """How the gradients in these storages are others; "" when they are right: rows as of the
        forward pass, of every head of every sequence, against float64."""
        few = self.forward
        places = few.rows_to_compare(one["q"].device)
        for b, head in ((b, head) for b in range(few.batch) for head in range(few.keys)):
            for name, (exact, bound) in gradients(few, one, b, head, places).items():
                heads = slice(head * (group := few.heads // few.keys), (head + 1) * group)
                got = one[name][b, heads if name == "dq" else head][..., places, :].double()
                off = (got - exact).abs() - bound
                if not bool((off <= 0).all()):
                    return (f"{name}: sequence {b}, head {head} of keys: off by {off.max().item():g} more "
                            "than allowed")
        return ""


def forward(workload: Forward, one: dict[str, Any]) -> tuple[Any, Any]:
    """The result and l, a head and a few rows at a time."""
    import torch
    out, log = torch.empty_like(one["q"]), torch.empty(one["q"].shape[:3], device=one["q"].device)
    group, step = workload.heads // workload.keys, 2048
    for b, head in ((b, head) for b in range(workload.batch) for head in range(workload.heads)):
        k, v = (one[name][b, head // group].float() for name in "kv")
        for first in range(0, workload.tokens, step):
            scores = one["q"][b, head, first:first + step].float() @ k.T / math.sqrt(workload.d)
            if workload.causal:
                hidden = torch.ones_like(scores, dtype=torch.bool).triu(first + 1)
                scores = scores.masked_fill(hidden, -math.inf)
            log[b, head, first:first + step] = scores.logsumexp(-1)
            out[b, head, first:first + step] = scores.softmax(-1) @ v
    return out, log


def gradients(workload: Forward, one: dict[str, Any], b: int, head: int,
              places: Any) -> dict[str, tuple[Any, Any]]:
    """Returns the gradients of a sequence's head of keys: dq of its query heads, its dk and dv, at these
    places, and how far bfloat16 may be from them. l is given, and delta is what the given result makes it."""
    import torch
    group, root = workload.heads // workload.keys, 1 / math.sqrt(workload.d)
    heads = slice(head * group, (head + 1) * group)
    q, grad, out = (one[name][b, heads].double() for name in ("q", "grad", "out"))
    k, v = (one[name][b, head].double() for name in "kv")
    l, delta, every = one["l"][b, heads].double(), (grad * out).sum(-1), torch.arange(len(k), device=k.device)

    # who makes delta of a result that is not rounded has it 2⁻⁹ of this sum off; `error_bound` allows 2⁻⁶
    unsure = (grad * out).abs().sum(-1) / 8

    def score(rows: torch.Tensor, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """p, ds, and what bounds ds, of these rows and columns."""
        s = q[:, rows] @ k[columns].T * root - l[:, rows, None]
        if workload.causal: s = s.masked_fill(columns > rows[:, None], -math.inf)
        p, dp, mean = s.exp(), grad[:, rows] @ v[columns].T, delta[:, rows, None]
        return p, p * (dp - mean) * root, p * (dp.abs() + mean.abs() + unsure[:, rows, None]) * root

    def error_bound(sums: torch.Tensor) -> torch.Tensor: return 2.0**-6 * sums + 1e-5
    _, ds, left = score(places, every)
    found = {"dq": (ds @ k, error_bound(left @ k.abs()))}
    p, ds, left = score(every, places)
    return found | {"dk": ((ds.mT @ q).sum(0), error_bound((left.mT @ q.abs()).sum(0))),
                    "dv": ((p.mT @ grad).sum(0), error_bound((p.mT @ grad.abs()).sum(0)))}


@workloads("backward")
def shapes() -> Iterator[Backward]:
    """All rows."""
    for d in (128, 64, 256):
        for causal in (True, False):
            for tokens in LENGTHS:
                yield Backward(Forward(max(1, TOKENS // tokens), WIDTH // d, tokens, d, causal))
    yield Backward(Forward(2, 32, 8192, 128, True, 8))
    yield Backward(Forward(2, 16, 8192, 128, True), True)


# **** ours ****

def bind_launch(driver: Driver, workload: Backward, addresses: Mapping[str, int]) -> Any:
    """A launch of ours on memory by name: `sum` is dq in float32."""
    gpu, spec = driver.properties, workload.spec
    made = TABLE.build(spec, schedule_for(spec, gpu.arch), GPU(gpu.arch, gpu.sm_count))
    one = spec.forward
    zeroed = [(addresses["sum"], 4 * one.matrices * one.s_q * one.d)]
    flags = [driver.alloc(4 * made.flags)] if made.flags else []
    zeroed += [(each, 4 * made.flags) for each in flags]
    pointers = [addresses["sum"], *flags, *(addresses[name] for name in NAMES)]
    return make_launch(driver, [made], pointers, rows=one.s_kv, zeroed=zeroed)


@contender("backward", "ours")
def ours(workload: Backward, given: Sets, options: Options) -> Run:
    """delta, our kernel by the default schedule, dq's rounding."""
    import torch
    gpu = device()
    kept = [dict(each) for each in given]
    launch = bind_sets(gpu, partial(bind_launch, gpu, workload), kept, ("sum", *NAMES))

    def run(i: int) -> None:
        one = kept[i]
        torch.sum(one["grad"].float() * one["out"], -1, out=one["delta"])
        launch(i)
        one["dq"].copy_(one["sum"])

    return run


@about("backward")
def describe_schedule(workload: Backward) -> dict[str, Any]:
    """The schedule that `ours` takes."""
    return {"schedule": str(schedule_for(workload.spec, device().properties.arch))}


@emulation("backward")
def run_emulated(workload: Any, options: Options) -> Row:
    """The gradients scaled down, on the emulated driver."""
    from tinygrad_nv.runtime.emulated.driver import EmulatedDriver
    small, driver = workload.scale_down(), EmulatedDriver(options.arch, seed=options.seed)
    wrong = check_on_emulator(small, driver, partial(bind_launch, driver, small),
                              ("sum", "dk", "dv"), lambda one: one.update(dq=one["sum"].bfloat16()))
    return verdict_row(wrong, str(schedule_for(workload.spec, options.arch)))


# **** the others ****

def autograd(backend: str, workload: Backward, given: Sets) -> Run:
    """torch's gradient of scaled_dot_product_attention with one backend."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as attend
    if workload.deterministic: raise NotMeasured("ours alone: what the order costs")
    ends = []
    for each in given:
        leaves = [each[name].detach().requires_grad_() for name in "qkv"]
        with sdpa_kernel(getattr(SDPBackend, backend)):
            q, k, v = leaves
            ends.append((attend(q, k, v, is_causal=workload.forward.causal,
                                enable_gqa=bool(workload.forward.kv_heads)), leaves))

    def run(i: int) -> None:
        out, leaves = ends[i]
        made = torch.autograd.grad(out, leaves, given[i]["grad"], retain_graph=True)
        given[i].update(zip(RESULTS, made, strict=True))

    torch.cuda.synchronize()
    return run


@contender("backward", "cuDNN")
def cudnn(workload: Backward, given: Sets, options: Options) -> Run:
    """torch with cuDNN's attention."""
    return autograd("CUDNN_ATTENTION", workload, given)


@contender("backward", "FlashAttention-2")
def flash(workload: Backward, given: Sets, options: Options) -> Run:
    """torch with its FlashAttention, which is version 2."""
    return autograd("FLASH_ATTENTION", workload, given)


@contender("backward", "Triton")
def triton(workload: Backward, given: Sets, options: Options) -> Run:
    """The tutorial's two kernels, and torch's delta."""
    import torch

    from bench.lib.attention_peers import KERNELS, Flash
    one = workload.forward
    if one.kv_heads or workload.deterministic: raise NotMeasured("its tutorial has as many heads of keys")
    root = 1 / math.sqrt(one.d)
    logs = [each["l"] * math.log2(math.e) for each in given]
    launches = []
    for what, tiles in TRITON_TILES.items():
        tile, warps, stages = tiles[one.d]
        flash = Flash(what, one.d, tile, warps, stages, one.causal)
        grid = (one.tokens // tile[1 if what == "dk, dv" else 0], one.batch * one.heads)
        fixed = {"S": one.tokens, "scale": root * math.log2(math.e), "root": root, **flash.constants,
                 "num_warps": warps, "num_stages": stages}
        launches.append(partial(KERNELS[what][grid], **fixed))
    kept = [dict(each) for each in given]

    def run(i: int) -> None:
        given[i].update({name: kept[i][name] for name in RESULTS})
        each = kept[i]
        torch.sum(each["grad"].float() * each["out"], -1, out=each["delta"])
        shared = {**{name: each[name] for name in ("q", "k", "v", "grad", "delta")}, "log": logs[i]}
        launches[0](**shared, dk=each["dk"], dv=each["dv"])
        launches[1](**shared, dq=each["dq"])

    return run


timing_part("backward", "flash attention, backward, bfloat16", Column("TFLOP/s"), expected_s=12.0)
