"""The part "memory" of bench/gpu/run.py: norms, softmax, silu·mul and rows of an embedding, GB/s beside
torch's.

bfloat16, rows of Llama 3 8B's hidden size and of its feed-forward network, from a decode step's few to those
of training; group norms of Stable Diffusion's UNet and VAE, channels last. GB/s count what must move:
operands and result once. "torch" is its own functions as they are called, with `torch.compile` where there is
a Triton ("compiled"); "copy" moves as many bytes, half of them read and half written: ours over it is the
share of the bandwidth that a copy reaches.

With --emulate: at most 8 rows of 512 elements, images of 8 x 8 positions, two sets in turns, whose results
must be right.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tinygrad.dtype import dtypes

from bench.gpu.compare import Partly, check_on_emulator
from bench.gpu.launch import bind_sets, device, make_launch
from bench.gpu.parts import (
    MOST_SETS,
    Column,
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
from tinygrad_nv.runtime.driver import Driver
from tinygrad_nv.tile.embedding.spec import EmbeddingSpec, Tokens
from tinygrad_nv.tile.expression import Apply, Load, Sum, silu
from tinygrad_nv.tile.gemm.spec import Result
from tinygrad_nv.tile.group_norm.spec import GroupNormSpec
from tinygrad_nv.tile.norm.spec import Computed, NormSpec, Statistic
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

HIDDEN, WIDE, VOCAB, EPS, GROUPS = 4096, 14336, 128256, 1e-5, 32
KIND, F32 = dtypes.bfloat16, dtypes.float32
Sets = Sequence[dict[str, Any]]
# elements of a row of each operand, in rows' lengths; m: of every row
OPERANDS = {"rms": {"x": "m", "w": ""}, "residual": {"x": "m", "w": "", "r": "m"},
            "layer": {"x": "m", "w": "", "b": ""}, "softmax": {"x": "m"}, "silu·mul": {"x": "mm"},
            "embedding": {"w": "v", "tokens": "t"}}


def rms(m: int, n: int, residual: bool = False) -> NormSpec:
    """x / √(mean x² + eps) · w, of x + r."""
    x = Load(0, KIND, n, 1) + Load(2, KIND, n, 1) if residual else Load(0, KIND, n, 1)
    f = x.cast(F32)
    scaled = f * Apply("sqrt", (Sum() * (1 / n) + EPS,), F32).reciprocal()
    return dense_rows(m, n, scaled.cast(KIND) * Load(1, KIND, 0, 1), Statistic("add", f * f))


def layer(m: int, n: int) -> NormSpec:
    """(x − mean) / √(variance + eps) · w + b."""
    f = Load(0, KIND, n, 1).cast(F32) - Sum() * (1 / n)
    scaled = (f * Apply("sqrt", (Sum(part=1) * (1 / n) + EPS,), F32).reciprocal()).cast(KIND)
    value = scaled * Load(1, KIND, 0, 1) + Load(2, KIND, 0, 1)
    return dense_rows(m, n, value, Statistic("add", Load(0, KIND, n, 1).cast(F32)), Statistic("add", f * f))


def softmax(m: int, n: int) -> NormSpec:
    """2^((x − max) log2 e) over their sum."""
    x = Load(0, KIND, n, 1)
    e = ((x.cast(F32) - Sum(KIND).cast(F32)) * 1.4426950408889634).exp2()
    return dense_rows(m, n, (e * Sum(part=1).reciprocal()).cast(KIND), Statistic("max", x),
                      Statistic("add", e))


def silu_gate_up(m: int, n: int) -> NormSpec:
    """silu(gate) · up, both in rows of 2 n."""
    gate, up = Load(0, KIND, 2 * n, 1), Load(0, KIND, 2 * n, 1, (), n)
    return dense_rows(m, n, silu(gate.cast(F32)).cast(KIND) * up)


def dense_rows(m: int, n: int, value: Any, *statistics: Statistic) -> NormSpec:
    """A spec with a dense result."""
    return NormSpec(m, n, statistics, (Computed(Result(KIND, n, 1), value),))


SPECS: dict[str, Callable[[int, int], NormSpec]] = {
    "rms": rms, "residual": lambda m, n: rms(m, n, True), "layer": layer, "softmax": softmax,
    "silu·mul": silu_gate_up}


@dataclass(frozen=True)
class ElementwiseWorkload:
    """`m` rows of `n` elements of a form; of an embedding, of a table of `table` rows."""
    form: str
    m: int
    n: int
    table: int = VOCAB

    results = ("out",)

    @property
    def name(self) -> str:
        """Name of the row."""
        return f"{self.form} {self.m}x{self.n}"

    @property
    def rows(self) -> int:
        """Rows of the result."""
        return self.m

    @property
    def operands(self) -> dict[str, str]:
        """Operands by name, in the kernel's order, as of OPERANDS."""
        return OPERANDS[self.form]

    @property
    def spec(self) -> NormSpec | EmbeddingSpec | GroupNormSpec:
        """Spec of the kernel."""
        if self.form != "embedding": return SPECS[self.form](self.m, self.n)
        return EmbeddingSpec(self.table, self.n, KIND, Tokens(dtypes.int32, (self.m,), (1,)))

    @property
    def work(self) -> float:
        """Elements of the result."""
        return float(self.rows * self.n)

    @property
    def nbytes(self) -> float:
        """Operands and result, each once; of an embedding the rows that are asked for."""
        if self.form == "embedding": return 4.0 * self.work + 4 * self.m
        rows = sum(self.rows * len(of) if of else 1 for of in self.operands.values())
        return 2.0 * self.n * (rows + self.rows)

    def plan(self) -> str:
        """Ours in words."""
        return "copy" if self.form == "embedding" else str(TABLE.choose(self.spec, GPU("sm_90a")))

    def in_torch(self, one: dict[str, Any]) -> Any:
        """The result by torch's own functions."""
        return theirs(self.form, one)

    def scale_down(self) -> ElementwiseWorkload:
        """Smaller, for the emulator."""
        return replace(self, m=min(self.m, 8), n=min(self.n, 512), table=50)

    @property
    def most_sets(self) -> int:
        """How many sets take turns at most: each of an embedding has a table."""
        return 4 if self.form == "embedding" else MOST_SETS

    def make_inputs(self, device: str) -> list[dict[str, Any]]:
        """Operands by name, as many sets as exceed twice the L2 cache."""
        import torch

        def operand(of: str) -> Any:
            if of == "t": return torch.randint(self.table, (self.m,), device=device, dtype=torch.int32)
            shape = {"": (self.n,), "v": (self.table, self.n)}.get(of, (self.rows, self.n * len(of)))
            return torch.randn(*shape, device=device, dtype=torch.bfloat16)

        def one() -> dict[str, Any]:
            out = torch.empty(self.rows, self.n, device=device, dtype=torch.bfloat16)
            return {"out": out, **{name: operand(of) for name, of in self.operands.items()}}
        return [one() for _ in range(set_count(device, self.nbytes, self.most_sets))]

    def unlike(self, one: dict[str, Any]) -> str:
        """How the result in these storages is not what it must be; "" when it is."""
        exact = self.in_torch({name: x.double() if x.is_floating_point() else x for name, x in one.items()})
        off = (one["out"].double() - exact).abs()
        # three roundings to bfloat16 on the way, some of them before a bias was added
        size = exact.abs() + one["b"].abs().double() if "b" in one else exact.abs()
        bound = 3 * 2.0**-8 * size + 2.0**-8
        if bool((off <= bound).all()): return ""
        at = (off / bound).nan_to_num(float("inf")).argmax().item()
        row, column = divmod(at, self.n)
        return (f"{one['out'][row, column].item():g} in row {row}, column {column}, exactly "
                f"{exact[row, column].item():g}; {int((~(off <= bound)).sum())} elements are off")


@dataclass(frozen=True)
class GroupNormWorkload(ElementwiseWorkload):
    """Group norm of `m` channels-last images of `side` x `side` positions, `n` channels in `GROUPS` groups;
    silu of it, where the form says so."""
    side: int = 64

    @property
    def name(self) -> str:
        """Name of the row."""
        group, comma, silu_word = self.form.partition(",")
        return f"{group} {self.m}x{self.side}x{self.side}x{self.n}{comma}{silu_word}"

    @property
    def rows(self) -> int:
        """Positions of all images."""
        return self.m * self.side**2

    @property
    def operands(self) -> dict[str, str]: return OPERANDS["layer"]

    @property
    def spec(self) -> GroupNormSpec:
        """Spec of the kernels."""
        return GroupNormSpec(self.m, self.side**2, self.n, GROUPS, EPS, "silu" in self.form, KIND, KIND)

    def scale_down(self) -> GroupNormWorkload:
        """Smaller, for the emulator."""
        return replace(self, n=min(self.n, 320), side=min(self.side, 8))

    def in_torch(self, one: dict[str, Any]) -> Any:
        """Returns images as torch has them in its channels_last format."""
        from torch.nn import functional as f
        x = one["x"].view(self.m, self.side, self.side, self.n).permute(0, 3, 1, 2)
        y = f.group_norm(x, GROUPS, one["w"], one["b"], EPS)
        return (f.silu(y) if self.spec.silu else y).permute(0, 2, 3, 1).reshape(self.rows, self.n)


def theirs(form: str, x: dict[str, Any]) -> Any:
    """The form in torch."""
    from torch.nn import functional as f
    if form == "embedding": return f.embedding(x["tokens"], x["w"])
    if form == "softmax": return x["x"].softmax(-1)
    if form == "silu·mul":
        gate, up = x["x"].chunk(2, -1)
        return f.silu(gate) * up
    if form == "layer": return f.layer_norm(x["x"], x["w"].shape, x["w"], x["b"], EPS)
    return f.rms_norm(x["x"] + x["r"] if form == "residual" else x["x"], x["w"].shape, x["w"], EPS)


@workloads("memory")
def shapes() -> Iterator[ElementwiseWorkload]:
    """All rows."""
    yield GroupNormWorkload("group norm", 2, 320, side=64)
    for m, n, side in ((2, 320, 64), (2, 1280, 16), (1, 128, 512)):
        yield GroupNormWorkload("group norm, silu", m, n, side=side)
    for form in ("rms", "residual", "layer", "softmax"):
        for m in (1, 64, 1024, 16384): yield ElementwiseWorkload(form, m, HIDDEN)
    yield ElementwiseWorkload("rms", 1 << 19, 128)
    yield ElementwiseWorkload("softmax", 64, VOCAB)
    for m in (1, 64, 1024, 16384): yield ElementwiseWorkload("silu·mul", m, WIDE)
    for m in (1, 64, 16384): yield ElementwiseWorkload("embedding", m, HIDDEN)


# **** ours ****

def bind_launch(driver: Driver, workload: ElementwiseWorkload, addresses: Mapping[str, int]) -> Any:
    """A launch of ours on memory by name, and on a workspace of its own."""
    spec, gpu = workload.spec, GPU(driver.properties.arch)
    made = TABLE.build(spec, TABLE.choose(spec, gpu), gpu)
    space = [driver.alloc(each.nbytes) for each in made.scratch]
    pointers = [addresses["out"], *space, *(addresses[name] for name in workload.operands)]
    return make_launch(driver, made.kernels, pointers, rows=workload.m)


@contender("memory", "ours")
def ours(workload: ElementwiseWorkload, given: Sets, options: Options) -> Run:
    """Our kernel."""
    gpu = device()
    return bind_sets(gpu, partial(bind_launch, gpu, workload), given)


@about("memory")
def describe_schedule(workload: ElementwiseWorkload) -> dict[str, Any]:
    """The plan of `ours`."""
    return {"schedule": workload.plan()}


@emulation("memory")
def run_emulated(workload: Any, options: Options) -> Row:
    """Scaled down, on the emulated driver."""
    from tinygrad_nv.runtime.emulated.driver import EmulatedDriver
    small, driver = workload.scale_down(), EmulatedDriver(options.arch, seed=options.seed)
    wrong = check_on_emulator(small, driver, partial(bind_launch, driver, small))
    return verdict_row(wrong, workload.plan())


# **** the others ****

def bind_torch(given: Sets, function: Callable[..., Any]) -> Run:
    """A function of torch, on each set in turn."""
    def run(i: int) -> None: given[i]["out"] = function(given[i])
    return run


@contender("memory", "torch")
def torch_eager(workload: ElementwiseWorkload, given: Sets, options: Options) -> Run:
    """torch's own functions."""
    return bind_torch(given, workload.in_torch)


@contender("memory", "compiled")
def torch_compiled(workload: ElementwiseWorkload, given: Sets, options: Options) -> Run:
    """The same by torch.compile."""
    return bind_torch(given, torch_compile(workload.in_torch))


@contender("memory", "copy")
def copy(workload: Any, given: Sets, options: Options) -> Run:
    """Copies as many bytes as must move, half of them read: what the memory's bandwidth is worth."""
    import torch
    half = max(1, int(workload.nbytes) // 2)
    pairs = [[torch.empty(half, device="cuda", dtype=torch.uint8) for _ in range(2)] for _ in given]
    return Partly(lambda i: pairs[i][0].copy_(pairs[i][1]), 0)


timing_part("memory", "norms, softmax, silu·mul and embeddings, bfloat16",
            Column("GB/s", "nbytes", 1e9, ".0f"), expected_s=8.0,
            also=Column("G elements/s", "work", 1e9, ".1f"))
