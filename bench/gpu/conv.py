"""The part "conv" of bench/gpu/run.py: TFLOP/s of convolutions beside torch's (cuDNN), channels last.

Convolutions of Stable Diffusion 1.5: its UNet at two images of 512 x 512, and the decoder of its VAE at one.
Images (B, H, W, C) and filters (O, KH, KW, C) are uniform in [-1, 1]; torch has them as channels_last views,
with cuDNN's own search for an algorithm (benchmark=True). What follows a convolution is a bias and a
residual, in one kernel of ours; "compiled" is torch.compile, which has nothing to do for a convolution alone.
GB/s counts each operand and the result once.

Every position of a result is compared with float32, one of 16 with float64.

With --emulate: fewer pixels and channels on the emulator, two sets in turns, whose results must be right.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tinygrad.dtype import DType, dtypes

from bench.gpu.compare import check_on_emulator, spread_numbers
from bench.gpu.launch import Submit, bind_sets, device, load_functions, make_launch
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
    torch_compile,
    verdict_row,
    workloads,
)
from bench.gpu.turns import Bursts
from tinygrad_nv.runtime.driver import Driver
from tinygrad_nv.tile.choose import choose
from tinygrad_nv.tile.conv.spec import ConvSpec
from tinygrad_nv.tile.expression import Load, Sum
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

BF16, F16, F32 = dtypes.bfloat16, dtypes.float16, dtypes.float32
CHECKED = 16        # one of so many positions is compared with float64
AT_ONCE = 4096      # positions
TRIED = 4           # schedules
TUNED: dict[str, str] = {}      # the best of them, by workload
Sets = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class ConvWorkload:
    """Square filters over square images, padded so that `stride` alone makes the result smaller. `ends`: a
    bias and a residual are added."""
    network: str
    batch: int
    side: int
    channels: int
    outputs: int
    kernel: int = 3
    stride: int = 1
    dtype: DType = BF16
    ends: bool = False

    results = ("out",)

    @property
    def name(self) -> str:
        """Name of the row."""
        stride = f", stride {self.stride}" if self.stride > 1 else ""
        ends = ", bias, residual" if self.ends else ""
        return (f"{self.network} {self.batch}x{self.side}x{self.side}x{self.channels} to {self.outputs}, "
                f"{self.kernel}x{self.kernel}{stride}, {'bf16' if self.dtype == BF16 else 'f16'}{ends}")

    @property
    def spec(self) -> ConvSpec:
        """Spec of the convolution."""
        around = self.kernel // 2
        value = Sum() + Load(0, self.dtype, 0, 1).cast(F32) + Load(1, self.dtype, self.outputs, 1).cast(F32)
        return ConvSpec(self.batch, self.side, self.side, self.channels, self.outputs, (self.kernel,) * 2,
                        (self.stride,) * 2, (around,) * 4, self.dtype,
                        value.cast(self.dtype) if self.ends else Sum())

    @property
    def operands(self) -> tuple[str, ...]:
        """In the kernel's order."""
        return "x", "w", *(("bias", "residual") if self.ends else ())

    @property
    def work(self) -> float:
        """Floating-point operations."""
        return float(self.spec.flops)

    @property
    def nbytes(self) -> float:
        """Each operand and the result once."""
        return float(self.spec.nbytes + self.ends * 2 * self.spec.gemm.n * (self.spec.gemm.m + 1))

    def scale_down(self) -> ConvWorkload:
        """Smaller, for the emulator."""
        return replace(self, side=min(self.side, 10), channels=min(self.channels, 64),
                       outputs=min(self.outputs, 72))

    def make_inputs(self, device: str) -> list[dict[str, Any]]:
        """Storages by name, as many sets as exceed twice the L2 cache."""
        import torch
        kind = torch.bfloat16 if self.dtype == BF16 else torch.float16
        spec = self.spec
        result = self.batch, spec.out_height, spec.out_width, self.outputs

        def uniform(*shape: int) -> torch.Tensor:
            return (torch.rand(*shape, device=device) * 2 - 1).to(kind)

        def one() -> dict[str, Any]:
            more = {"bias": uniform(self.outputs), "residual": uniform(*result)} if self.ends else {}
            return {"out": torch.empty(*result, device=device, dtype=kind),
                    "x": uniform(self.batch, self.side, self.side, self.channels),
                    "w": uniform(self.outputs, self.kernel, self.kernel, self.channels), **more}
        return [one() for _ in range(set_count(device, self.nbytes))]

    def unlike(self, one: dict[str, Any]) -> str:
        """How the result in these storages is not the convolution; "" when it is: one of 16 positions by
        float64, then every one by float32."""
        import torch
        m = self.spec.gemm.m
        for rows, kind in ((spread_numbers(m, CHECKED), torch.float64), (list(range(m)), torch.float32)):
            for first in range(0, len(rows), AT_ONCE):
                if words := self._unlike(one, rows[first:first + AT_ONCE], kind): return words
        return ""

    def _unlike(self, one: dict[str, Any], rows: list[int], kind: Any) -> str:
        import torch
        at = torch.tensor(rows, device=one["x"].device)
        exact = patches(self.spec, one["x"], at).to(kind) @ one["w"].reshape(self.outputs, -1).to(kind).T
        # of the last bit of bfloat16; and of the largest sums, as cuDNN may transform operands (Winograd)
        bound = 2.0**-8 * exact.abs() + 2.0**-10 * self.spec.gemm.k**0.5
        if self.ends:   # torch rounds three times
            more = one["bias"].to(kind) + one["residual"].reshape(-1, self.outputs)[at].to(kind)
            exact, bound = exact + more, 2 * bound + 2.0**-7 * (1 + more.abs())
        got = one["out"].reshape(-1, self.outputs)[at].to(kind)
        off = (got - exact).abs() - bound
        if bool((off <= 0).all()): return ""
        row, column = divmod(int(off.argmax()), self.outputs)
        return (f"position {rows[row]}, channel {column}: {got[row, column].item():g}, exactly "
                f"{exact[row, column].item():g}, allowed {bound[row, column].item():g}")


def patches(spec: ConvSpec, x: Any, at: Any) -> Any:
    """Rows of the left operand of the matmul that the convolution is, of these positions."""
    import torch
    above, below, left, right = spec.padding
    wide = torch.nn.functional.pad(x, (0, 0, left, right, above, below))
    image, place = at // (spec.out_height * spec.out_width), at % (spec.out_height * spec.out_width)
    i, j = place // spec.out_width * spec.stride[0], place % spec.out_width * spec.stride[1]
    r, s = (torch.arange(count, device=at.device) for count in spec.kernel)
    found = wide[image[:, None, None], i[:, None, None] + r[:, None], j[:, None, None] + s]
    return found.reshape(len(at), -1)


@workloads("conv")
def shapes() -> Iterator[ConvWorkload]:
    """All rows."""
    yield ConvWorkload("UNet", 2, 64, 320, 320)
    yield ConvWorkload("UNet", 2, 32, 320, 320)
    yield ConvWorkload("UNet", 2, 32, 640, 640, dtype=F16)
    yield ConvWorkload("UNet", 2, 16, 1280, 1280)
    yield ConvWorkload("UNet", 2, 64, 320, 320, stride=2, dtype=F16)
    yield ConvWorkload("UNet", 2, 64, 640, 320, kernel=1)
    yield ConvWorkload("UNet", 2, 64, 320, 320, ends=True)
    yield ConvWorkload("VAE", 1, 256, 256, 256, dtype=F16)
    yield ConvWorkload("VAE", 1, 512, 128, 128)


# **** ours ****

def default(workload: ConvWorkload, gpu: GPU) -> Schedule:
    """The schedule that a graph would get."""
    schedule: Schedule | None = choose(workload.spec, gpu)
    if schedule is None: raise NotMeasured(TABLE.why_not(workload.spec, gpu))
    return schedule


def binds(driver: Driver, workload: ConvWorkload,
          schedule: Schedule) -> Callable[[Mapping[str, int]], Submit]:
    """Makes launches of ours on memory by name."""
    kernels = [TABLE.build(workload.spec, schedule, target(driver))]
    functions, names = load_functions(driver, kernels), ("out", *workload.operands)
    return lambda at: make_launch(driver, kernels, [at[name] for name in names], functions=functions)


def target(driver: Driver) -> GPU:
    """Returns the target that kernels are made for."""
    return GPU(driver.properties.arch, driver.properties.sm_count)


def bind_schedule(workload: ConvWorkload, schedule: Schedule, given: Sets) -> Run:
    """Our kernel with a schedule."""
    return bind_sets(device(), binds(device(), workload, schedule), given)


@contender("conv", "ours")
def ours(workload: ConvWorkload, given: Sets, options: Options) -> Run:
    """Our kernel, by the default schedule."""
    return bind_schedule(workload, default(workload, target(device())), given)


@about("conv")
def describe_schedule(workload: ConvWorkload) -> dict[str, Any]:
    """The schedules of `ours` and of `tune`."""
    return {"schedule": str(default(workload, target(device()))), "tuned": TUNED.get(workload.name, "")}


@emulation("conv")
def run_emulated(workload: Any, options: Options) -> Row:
    """Scaled down, on the emulated driver."""
    from tinygrad_nv.runtime.emulated.driver import EmulatedDriver
    small, driver = workload.scale_down(), EmulatedDriver(options.arch, seed=options.seed)
    schedule = default(workload, GPU(options.arch))
    wrong = check_on_emulator(small, driver, binds(driver, small, schedule))
    return verdict_row(wrong, str(schedule))


# **** the others ****

def bind_torch(workload: ConvWorkload, given: Sets, function: Callable[..., Any]) -> Run:
    """A function of torch, on each set in turn: images and filters as channels_last views."""
    import torch
    torch.backends.cudnn.benchmark = True
    sets = [{name: x if name == "bias" else x.permute(0, 3, 1, 2) for name, x in each.items()
             if name != "out"} for each in given]

    def run(i: int) -> None:
        given[i]["out"] = function(**sets[i], stride=workload.stride, padding=workload.kernel // 2
                                   ).permute(0, 2, 3, 1)
    return run


def theirs(x: Any, w: Any, bias: Any = None, residual: Any = None, stride: int = 1, padding: int = 0) -> Any:
    """The convolution in torch."""
    from torch.nn.functional import conv2d
    made = conv2d(x, w, bias, stride, padding)
    return made if residual is None else made + residual


@contender("conv", "torch")
def cudnn(workload: ConvWorkload, given: Sets, options: Options) -> Run:
    """cuDNN, by torch."""
    return bind_torch(workload, given, theirs)


@contender("conv", "compiled")
def torch_compiled(workload: ConvWorkload, given: Sets, options: Options) -> Run:
    """Compiles a convolution with what follows it by torch's compiler."""
    if not workload.ends: raise NotMeasured("a convolution alone is cuDNN's there too")
    return bind_torch(workload, given, torch_compile(theirs))


# **** another schedule ****

@contender("conv", "tuned")
def tune(workload: ConvWorkload, given: Sets, options: Options) -> Run:
    """Our kernel, by the quickest of the schedules that the cost model likes best."""
    gpu = target(device())
    trials = {s: bind_schedule(workload, s, given) for each in TABLE.templates(gpu.kind, workload.spec)
              for s in [*each.candidates(workload.spec, gpu)][:TRIED]
              if not TABLE.problems(workload.spec, s, gpu)}
    took = {s: min(Bursts(run, len(given)).eager(5) for _ in range(3)) for s, run in trials.items()}
    best = min(took, key=lambda s: took[s])
    TUNED[workload.name] = str(best)
    return trials[best]


timing_part("conv", "convolutions, channels last, bfloat16 and float16", Column("TFLOP/s"), expected_s=6.0)
