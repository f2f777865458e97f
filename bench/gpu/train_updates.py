"""Workloads of the part "train" (gpu/train.py) that are of optimisers: AdamW over all parameters, and the
norm of gradients. The protocol is that of train_workloads.py.

A step of AdamW changes its own operands, so results of one run say nothing after several: `Update.unlike`
makes one more step (`one["again"]`), from whatever the tensors hold, and compares that. `one["t"]` gives the
number of that step.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tinygrad.dtype import DType

from bench.gpu.train_workloads import (
    BETA1,
    BETA2,
    BF16,
    DECAY,
    F32,
    RATE,
    ROUNDED,
    STEP,
    TINY,
    Near,
    One,
    Workload,
    torch_dtype,
)
from tinygrad_nv.tile.optimizer.spec import AdamWSpec, SquaresSpec


def gpt2() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Extents of the parameters of GPT-2 124M as bench/timing/train_gpu_model.py has it, those with decay
    first."""
    layer = (2304 * 768, 768 * 768, 4096 * 768, 768 * 2048)
    return (50304 * 768, *layer * 12), (768,) * 25


def llama(layers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the parameters of so many layers of Llama 3.1 8B."""
    return (6144 * 4096, 4096 * 4096, 28672 * 4096, 4096 * 14336) * layers, (4096,) * 2 * layers


@dataclass(frozen=True)
class Update(Workload):
    """A step of AdamW over all parameters: float32 ones, or bfloat16 ones with masters and gradients of
    bfloat16. Matrices decay, vectors do not."""
    model: str
    decayed: tuple[int, ...]
    others: tuple[int, ...]
    dtype: DType = F32

    results = ()

    @property
    def name(self) -> str:
        """Name of the row."""
        return f"AdamW {self.model} {'f32' if self.dtype == F32 else 'bf16, masters'}"

    @property
    def spec(self) -> AdamWSpec:
        """Spec of the update."""
        groups = (0,) * len(self.decayed) + (1,) * len(self.others)
        return AdamWSpec((*self.decayed, *self.others), groups, BETA1, BETA2, TINY, self.dtype, self.dtype)

    @property
    def names(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of storages."""
        return (*(f"{kind}{i}" for kind, _ in self.spec.kinds for i in range(len(self.spec.counts))),
                "control")

    @property
    def work(self) -> float:
        """Parameters."""
        return float(sum(self.spec.counts))

    @property
    def nbytes(self) -> float:  # type: ignore[override]
        """Bytes that are read and written, each once."""
        return float(self.spec.nbytes)

    def scale_down(self) -> Update: return replace(self, decayed=(20000, 500, 333), others=(64, 64))

    def make_inputs(self, device: str) -> list[One]:
        """One set: it exceeds every cache."""
        return [self.one(device)]

    def one(self, device: str) -> One:
        import torch
        spec, made = self.spec, One()
        for i, count in enumerate(spec.counts):
            w, m, v, g = (torch.randn(count, device=device) for _ in range(4))
            made |= {f"m{i}": m, f"v{i}": v.square_().add_(0.1), f"g{i}": g.to(torch_dtype(self.dtype)),
                     f"x{i}": w.div_(50).to(torch_dtype(self.dtype))}
            if spec.master: made[f"w{i}"] = w
        size = RATE / (1 - BETA1**STEP)
        control = [1.0, 1.0, (1 - BETA2**STEP)**-0.5, 1 - RATE * DECAY, size, 1.0, size]
        return {**made, "control": torch.tensor(control, device=device)}

    def unlike(self, one: One) -> str:
        """How one more step is not what it must be."""
        spec = self.spec
        kinds = [kind for kind, _ in spec.kinds if kind != "g"]
        before = {f"{kind}{i}": one[f"{kind}{i}"].clone() for kind in kinds for i in range(len(spec.counts))}
        one["again"]()
        t = one["t"]()
        for i, group in enumerate(spec.groups):
            own = f"{'w' if spec.master else 'x'}{i}"
            g, m, v, w = (x.double() for x in (one[f"g{i}"], before[f"m{i}"], before[f"v{i}"], before[own]))
            mean, square = BETA1 * m + (1 - BETA1) * g, BETA2 * v + (1 - BETA2) * g.square()
            size = RATE / (1 - BETA1**t) / (square.sqrt() * (1 - BETA2**t)**-0.5 + TINY)
            after = w * (1 - RATE * DECAY * (group == 0)) - size * mean
            near = [(f"m{i}", mean, 2.0**-20 * (m.abs() + g.abs())), (f"v{i}", square, 2.0**-20 * square),
                    (own, after, 2.0**-21 * w.abs() + 2.0**-17 * size * (m.abs() + g.abs()))]
            if spec.master: near.append((f"x{i}", after, ROUNDED * after.abs() + near[-1][2]))
            for name, exact, allowed in near:
                off = (one[name].double() - exact).abs() - allowed
                if not bool((off <= 0).all()): return f"{name}: {off.max().item():g} more off than allowed"
        return ""


@dataclass(frozen=True)
class Squares(Workload):
    """The norm of all gradients, bfloat16. Ours gives sums of squares of parts of tensors, which torch adds
    up, and takes the root."""
    model: str
    counts: tuple[int, ...]

    results = ("norm",)

    @property
    def name(self) -> str:
        """Name of the row."""
        return f"norm of gradients {self.model} bf16"

    @property
    def spec(self) -> SquaresSpec:
        """Spec of the sums."""
        return SquaresSpec(self.counts, BF16)

    @property
    def names(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of storages."""
        return ("sums", *(f"g{i}" for i in range(len(self.counts))))

    @property
    def work(self) -> float:
        """Elements."""
        return float(sum(self.counts))

    @property
    def nbytes(self) -> float:  # type: ignore[override]
        """Gradients once."""
        return float(self.spec.nbytes)

    def scale_down(self) -> Squares: return replace(self, counts=(20000, 500, 64))

    def one(self, device: str) -> One:
        import torch
        made = {f"g{i}": torch.randn(count, device=device).bfloat16() for i, count in enumerate(self.counts)}
        return {**made, "sums": torch.empty(sum(self.spec.chunks), device=device),
                "norm": torch.empty(1, device=device)}

    def theirs(self, one: One) -> One:
        import torch
        grads = [one[f"g{i}"] for i in range(len(self.counts))]
        norms = torch._foreach_norm(grads, 2, torch.float32)
        return {"norm": torch.linalg.vector_norm(torch.stack(norms)).view(1)}

    def exact(self, one: One) -> Iterator[Near]:
        total = sum(one[f"g{i}"].double().square().sum() for i in range(len(self.counts)))
        assert not isinstance(total, int)
        yield "norm", ..., total.sqrt().view(1), 2.0**-16 * total.sqrt()
