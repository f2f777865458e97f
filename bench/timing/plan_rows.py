"""Published rows that plans are judged by: bench/timing/plan_check.py. Each has its source; none was measured
here.

torchtitan: github.com/pytorch/torchtitan, benchmarks/ at commit b5bcd76c. Its H100s have 96 GB of HBM2e (2.4
TB/s) and a power limit of 500 W (llama3_h100_202412_torchtitan.md,
asyncTP_llama3_h100_2025-06_torchtitan.md); "selective" there recomputes every second matmul; a pipeline has
as many microbatches as stages. Rows without torch.compile, whose kernels are not fused, and rows of context
parallelism, which a plan does not have, are left out. NeMo: github.com/NVIDIA/NeMo,
docs/source/performance/performance_summary.md at 070a0bb1 (24.07, FP8). gpt-fast:
github.com/pytorch-labs/gpt-fast, README.md at 0f925b5d, A100s at 330 W, batch 1, a prompt of 5 tokens. vLLM:
buildkite.com/vllm/performance-benchmark/builds/9515, batch 8, 32 + 128 tokens. NIM:
docs.nvidia.com/nim/benchmarking/llm, Llama 3.3 70B, version 1.8.0, concurrency 1 and 5. TensorRT-LLM 0.5 and
0.6.1: github.com/NVIDIA/TensorRT-LLM, docs/source/performance.md (release/0.5.0, and commit 138f96d4); of
1.0: docs/source/performance/perf-overview.md at 00f37686, as many sequences as fit. Of versions before 0.8
rows of Llama 70B with long answers are left out: their decode attention read keys once for each of 8 query
heads (docs/source/blogs/XQA-kernel.md there: 2.4 times slower).

All-reduce: vLLM pull requests 24532 (4 GPUs), 24111 (6), 42324 (8: the table says SM 9.0 alone, NCCL's times
are those of 8). The constants of one-shot and two-shot (tile/all_reduce/cost.py) are fitted to those of 4 and
6 GPUs; times of multimem, which plans do not have, are left out. All-gather and reduce-scatter: Megatron-LM
pull request 5596; two nodes: github.com/drmysore/nebius-h100-16gpu-benchmark.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from zlib import crc32

from tinygrad_nv.dist.plan.cluster import Cluster, Device, cluster, device
from tinygrad_nv.dist.plan.collectives import GroupSize, kernel, ways
from tinygrad_nv.dist.plan.layout import Inference, Layout, Training, achievable
from tinygrad_nv.dist.plan.memory import most_sequences
from tinygrad_nv.dist.plan.planning import Plan, plan
from tinygrad_nv.dist.plan.presets import preset
from tinygrad_nv.tile.all_reduce.schedules import OneShot, TwoShot

MIB = 1 << 20


@dataclass(frozen=True)
class Shares:
    """Shares of figures.toml, which are fitted to half of the rows."""
    training: float = achievable("training")
    inference: float = achievable("inference")
    overlap: float = achievable("overlap")


SHARES = Shares()


@dataclass(frozen=True)
class Row:
    """A published figure and the model's. `fitted`: constants of figures.toml were fitted to it, so it judges
    nothing."""
    group: str
    source: str
    name: str
    published: float
    unit: str
    modelled: float
    fitted: bool = False

    @property
    def error(self) -> float:
        """Modelled by published, less 1."""
        return self.modelled / self.published - 1


# **** training ****

@cache
def titan() -> Device:
    """torchtitan's H100."""
    given = device("h100").with_power(500)
    return replace(given, model=replace(given.model, hbm_bytes_per_s=2.4e12), memory_bytes=96 << 30)


def titans(gpus: int) -> Cluster: return replace(cluster(f"{gpus}xH100"), device=titan())


def plan_training(model: str, where: Cluster, layout: Layout, work: Training, shares: Shares) -> Plan:
    work = replace(work, achieved=shares.training, overlap=shares.overlap)
    return plan(preset(model), layout, where, work)


def half(name: str) -> bool:
    """Whether shares are fitted to a row: a hash says, not a person."""
    return crc32(name.encode()) % 2 == 0


def training_row(source: str, name: str, rate: float, made: Plan) -> Row:
    return Row("training", source, name, rate, "tokens/s", made.per_gpu, half(name))


TITAN_1D = ((8, "bf16", 6667, 77.0), (8, "fp8", 8532, 76.8), (128, "bf16", 6514, 62.0),
            (128, "fp8", 8380, 61.8))
TITAN_TP = (("llama-3.1-8b", 64, 8, 12, "bf16", False, 4378), ("llama-3.1-8b", 64, 8, 12, "bf16", True, 4809),
            ("llama-3.1-8b", 64, 8, 12, "fp8", False, 5078), ("llama-3.1-8b", 64, 8, 12, "fp8", True, 5570),
            ("llama-3.1-70b", 256, 32, 16, "bf16", False, 597),
            ("llama-3.1-70b", 256, 32, 16, "bf16", True, 652),
            ("llama-3.1-70b", 256, 32, 16, "fp8", False, 829),
            ("llama-3.1-70b", 256, 32, 16, "fp8", True, 876))
NEMO = (("llama-2-7b", 8, 1, 1, 1, 16847), ("llama-2-13b", 16, 1, 4, 10, 8646),
        ("llama-2-70b", 64, 4, 4, 20, 1707))


def training(shares: Shares) -> Iterator[Row]:
    """Tokens a second of a GPU, and memory."""
    for gpus, precision, rate, gib in TITAN_1D:
        made = plan_training("llama-3.1-8b", titans(gpus), Layout(dp=gpus),
                             Training(batch=2 * gpus, microbatch=2, precision=precision), shares)
        name = f"8B {precision}, {gpus} GPUs, FSDP"
        yield training_row("torchtitan", name, rate, made)
        yield Row("memory", "torchtitan", name, gib, "GiB", made.memory.total / 2**30)
    made = plan_training("llama-3.1-8b", titans(8), Layout(dp=8),
                         Training(batch=8, seq_len=32768, precision="fp8", recompute="full"), shares)
    yield training_row("torchtitan", "8B fp8, 8 GPUs, FSDP, 32k", 3890, made)
    for model, gpus, dp, batch, precision, ahead, rate in TITAN_TP:
        work = Training(batch=dp * batch, microbatch=batch, precision=precision, overlap_tp=ahead,
                        recompute="selective" if "8b" in model else "full")
        made = plan_training(model, titans(gpus), Layout(tp=8, dp=dp, sp=True), work, shares)
        name = f"{model[10:].upper()} {precision}, {gpus} GPUs, FSDP, TP 8{', overlapped' if ahead else ''}"
        yield training_row("torchtitan", name, rate, made)
    for schedule, virtual, rate, gib in (("1f1b", 1, 100, 82.5), ("interleaved", 2, 128, 72.7)):
        work = Training(batch=256, microbatch=4, precision="fp8", recompute="full", schedule=schedule,
                        virtual=virtual, overlap_tp=True)
        made = plan_training("llama-3.1-405b", titans(512), Layout(tp=8, pp=8, dp=8, sp=True), work, shares)
        name = f"405B fp8, 512 GPUs, FSDP 8, TP 8, PP 8, {schedule}"
        yield training_row("torchtitan", name, rate, made)
        yield Row("memory", "torchtitan", name, gib, "GiB", made.memory.total / 2**30)
    for gpus, rate in ((32, 10938), (64, 10753)):
        made = plan_training("llama-3.1-8b", cluster(f"{gpus}xH200"), Layout(dp=gpus),
                             Training(batch=2 * gpus, microbatch=2, precision="fp8"), shares)
        yield training_row("torchtitan", f"8B fp8, {gpus} H200s, FSDP", rate, made)
    for model, gpus, tp, pp, virtual, rate in NEMO:
        layout = Layout(tp=tp, pp=pp, dp=gpus // tp // pp, sp=tp > 1)
        work = Training(batch=128, seq_len=4096, precision="fp8", zero=1, recompute="none", overlap_tp=True,
                        schedule="interleaved" if virtual > 1 else "1f1b", virtual=virtual, grad_bytes=2)
        made = plan_training(model, cluster(f"{gpus}xH100"), layout, work, shares)
        yield training_row("NeMo", f"{model[8:].upper()} fp8, {gpus} GPUs, {layout}", rate, made)


# **** inference ****

def plan_inference(model: str, gpus: str, work: Inference, shares: Shares, watts: float = 0.0) -> Plan:
    """Tensor parallel over all GPUs."""
    work = replace(work, achieved=shares.inference)
    where = cluster(gpus)
    if watts: where = replace(where, device=where.device.with_power(watts))
    return plan(preset(model), Layout(tp=where.gpus), where, work)


GPT_FAST = (("llama-2-7b", "bf16", ((1, 104.9), (2, 168.84), (4, 254.02), (8, 328.43))),
            ("llama-2-70b", "bf16", ((2, 21.32), (4, 38.01), (8, 62.50))),
            ("llama-2-70b", "int8", ((8, 80.44),)), ("llama-2-70b", "int4", ((8, 90.77),)))
VLLM = (("llama-3.1-8b", 1, 833.4), ("llama-3.1-70b", 4, 2077.5), ("mixtral-8x7b", 2, 1917.4))
NIM = ((1, 18.58), (5, 21.83))
# batch, GPUs, prompt, answer, tokens/s of all GPUs
TRT_STATIC = (("llama-2-7b", 64, 1, 128, 128, 9193), ("llama-2-7b", 64, 1, 128, 2048, 5367),
              ("llama-2-7b", 64, 1, 2048, 128, 2058), ("llama-2-7b", 32, 1, 2048, 2048, 2230),
              ("llama-2-70b", 64, 4, 128, 128, 3317), ("llama-2-70b", 64, 4, 2048, 128, 843),
              ("llama-2-70b", 1024, 2, 128, 128, 2 * 2657), ("llama-2-70b", 96, 2, 2048, 128, 2 * 306))
TRT_FIRST = (("llama-2-7b", "1xH100", "fp8", 128, 7), ("llama-2-7b", "1xH100", "fp8", 2048, 36),
             ("llama-2-70b", "4xH100", "fp8", 128, 26), ("llama-2-70b", "4xH100", "fp8", 2048, 109),
             ("llama-2-7b", "1xA100", "bf16", 128, 16), ("llama-2-7b", "1xA100", "bf16", 2048, 133),
             ("llama-2-70b", "4xA100", "bf16", 128, 47), ("llama-2-70b", "4xA100", "bf16", 2048, 377),
             ("llama-2-7b", "1xL40S", "fp8", 128, 14), ("llama-2-7b", "1xL40S", "fp8", 2048, 73))
TRT_MOST = (("llama-3.1-8b", "1xH100", ((128, 2048, 22714), (1000, 1000, 15220), (2048, 2048, 9305))),
            ("llama-3.1-8b", "1xH200", ((128, 2048, 26221), (1000, 1000, 17744), (2048, 2048, 12194))),
            ("llama-3.1-70b", "2xH100", ((128, 2048, 6651), (1000, 1000, 4205), (2048, 2048, 3082))),
            ("llama-3.1-70b", "1xH200", ((128, 2048, 4336), (1000, 1000, 2909), (2048, 2048, 2003))),
            ("llama-3.1-405b", "8xH100", ((128, 2048, 4340), (1000, 1000, 2919), (2048, 2048, 2296))),
            ("llama-3.1-405b", "8xH200", ((128, 2048, 5348), (1000, 1000, 3330), (2048, 2048, 2948))),
            ("qwen3-235b-a22b", "8xH200", ((128, 2048, 42821), (1000, 1000, 23789), (2048, 2048, 16672))))
MOST = 2048     # sequences that TensorRT-LLM has at a time, by default


def latencies(shares: Shares) -> Iterator[Row]:
    """Returns the rows of few sequences: tokens a second, or milliseconds."""
    for model, kind, rows in GPT_FAST:
        for gpus, rate in rows:
            made = plan_inference(model, f"{gpus}xA100", Inference(1, 5, 200, kind), shares, 330)
            name = f"{model[8:].upper()} {kind}, {gpus} A100"
            yield Row("few sequences", "gpt-fast", name, rate, "tokens/s", 1 / made.step_s, half(name))
    for model, number, ms in VLLM:
        made = plan_inference(model, f"{number}xH200", Inference(8, 32, 128), shares)
        name = f"{model} bf16, {number} H200, batch 8"
        yield Row("few sequences", "vLLM", name, ms, "ms", 8 * 128 / made.tokens_per_s * 1e3, half(name))
    for batch, ms in NIM:
        made = plan_inference("llama-3.1-70b", "2xH100", Inference(batch, 5000, 500, "fp8", "fp8"), shares)
        name = f"70B fp8, 2 H100, {batch} of 5000 + 500, a token"
        yield Row("few sequences", "NIM", name, ms, "ms", made.step_s * 1e3, half(name))
    for model, where, kind, length, ms in TRT_FIRST:
        made = plan_inference(model, where, Inference(1, length, 1, kind), shares)
        name = f"{model[8:].upper()} {kind}, {where}, {length} tokens"
        yield Row("first token", "TensorRT-LLM 0.5", name, ms, "ms", made.first_token_s * 1e3, half(name))


def throughputs(shares: Shares) -> Iterator[Row]:
    """Returns the rows of many sequences: output tokens a second."""
    for model, batch, number, prompt, answer, rate in TRT_STATIC:
        made = plan_inference(model, f"{number}xH100", Inference(batch, prompt, answer, "fp8", "fp8"), shares)
        name = f"{model[8:].upper()} fp8, {number} H100, {batch} of {prompt} + {answer}"
        yield Row("many sequences", "TensorRT-LLM 0.5, 0.6.1", name, rate, "tokens/s", made.tokens_per_s,
                  half(name))
    for model, gpus, rows in TRT_MOST:
        where = cluster(gpus)
        for prompt, answer, rate in rows:
            # in steady state answers are half there
            work = Inference(1, prompt, answer // 2, "fp8", "fp8", 0.95)
            batch = min(MOST, most_sequences(preset(model), Layout(tp=where.gpus), work, where))
            made = plan_inference(model, gpus, replace(work, batch=batch, output_len=answer), shares)
            name = f"{model}, {gpus}, {prompt} + {answer}"
            yield Row("many sequences", "TensorRT-LLM 1.0", name, rate, "tokens/s", made.tokens_per_s,
                      half(name))


# **** collectives ****

SIZES = (.5, 1, 1.5, 2, 3, 4)   # MiB
NCCL = ("ring", "tree", "NVLS")
KERNELS = {"one-shot": OneShot, "two-shot": TwoShot}
REDUCED: dict[int, dict[str, tuple[int, ...]]] = {
    4: {"one-shot": (10, 14, 19, 23, 30, 38), "two-shot": (17, 18, 25, 26, 35, 42),
        "NCCL": (21, 23, 25, 28, 33, 39)},
    6: {"one-shot": (13, 21, 30, 38, 53, 70), "two-shot": (15, 17, 20, 26, 29, 37),
        "NCCL": (23, 25, 32, 43, 47, 53)},
    8: {"NCCL": (24, 25, 33, 37, 44, 50)}}
LARGE = ((8, 76), (16, 121), (32, 195), (64, 316), (128, 561))
SHARDED = (("all_gather", ((2, 20.2), (8, 43.4), (32, 118.9), (128, 385.3))),
           ("reduce_scatter", ((2, 18.6), (8, 47.0), (32, 112.6))))
NODES = ((1e6, 88), (1e7, 157), (1e8, 647), (1e9, 4520))
PULLS = {4: "vLLM 24532", 6: "vLLM 24111", 8: "vLLM 42324"}


def took(kind: str, nbytes: float, gpus: int, way: str) -> float:
    """Microseconds of NCCL, or of a kernel over peer memory."""
    where = replace(cluster("8xH100"), per_node=min(8, gpus), nodes=max(1, gpus // 8))
    if way in KERNELS:
        _, alpha, wire, rate = kernel(KERNELS[way], nbytes, gpus, where.device.link)
        return 1e6 * (alpha + wire / rate)
    found = ways(kind, nbytes, GroupSize(gpus, min(8, gpus)), where)
    return 1e6 * min(each.seconds for each in found if each.algorithm.startswith(NCCL))


def collectives() -> Iterator[Row]:
    """Microseconds."""
    for gpus, table in REDUCED.items():
        for way, times in table.items():
            for mib, us in zip(SIZES, times, strict=False):
                yield Row("collectives", PULLS[gpus], f"all-reduce, {gpus} H100, {mib} MiB, {way}", us, "us",
                          took("all_reduce", mib * MIB, gpus, way), way in KERNELS)
    for size, us in LARGE:
        yield Row("collectives", PULLS[8], f"all-reduce, 8 H100, {size} MiB, NCCL", us, "us",
                  took("all_reduce", size * MIB, 8, "NCCL"))
    for kind, rows in SHARDED:
        for size, time in rows:
            name = f"{kind.replace('_', '-')}, 8 H100, {size} MiB"
            yield Row("collectives", "Megatron-LM 5596", name, time, "us", took(kind, size * MIB, 8, "NCCL"))
    for nbytes, us in NODES:
        yield Row("collectives", "Nebius", f"all-reduce, 2 nodes of 8 H100, {nbytes / 1e6:g} MB", us, "us",
                  took("all_reduce", nbytes, 16, "NCCL"))


def rows(shares: Shares = SHARES) -> Iterator[Row]:
    """All of them."""
    yield from training(shares)
    yield from latencies(shares)
    yield from throughputs(shares)
    yield from collectives()
