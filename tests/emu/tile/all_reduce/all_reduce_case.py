"""An all-reduce on emulated GPUs: operands, the answer, a run with delays by seed.

Protocol: `run` launches a kernel so many times on every GPU, and returns the results of the last call;
`found` is all that was found. `correct` runs it, allows no finding, and compares with what `expected`
computes with torch: floats added in float32 in order of ranks, each step rounded to the dtype.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from tinygrad.dtype import DType, dtypes

from tinygrad_nv.ptx.emulator import Buffer, Emulator, Finding, Peers
from tinygrad_nv.ptx.emulator.peers import Work, launching
from tinygrad_nv.tile.all_reduce.schedules import AllReduceSchedule, Multimem
from tinygrad_nv.tile.all_reduce.spec import AllReduceSpec
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

BF16, F16, F32, S32, S64 = dtypes.bfloat16, dtypes.float16, dtypes.float32, dtypes.int32, dtypes.int64
TORCH = {BF16: torch.bfloat16, F16: torch.float16, F32: torch.float32, S32: torch.int32, S64: torch.int64,
         dtypes.uint32: torch.uint32, dtypes.uint64: torch.uint64}
Edit = Callable[[str], str]


@dataclass
class Case:
    """A kernel's operands on every GPU."""
    spec: AllReduceSpec
    schedule: AllReduceSchedule
    x: list[torch.Tensor]
    residual: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    arch: str = "sm_90a"
    found: list[Finding] = field(default_factory=list)

    @classmethod
    def drawn(cls, spec: AllReduceSpec, schedule: AllReduceSchedule, seed: int = 0, whole: bool = True,
              arch: str = "sm_90a") -> Case:
        """Whole numbers from −8 to 8, or normal ones."""
        random = torch.Generator().manual_seed(seed)

        def numbers(count: int) -> torch.Tensor:
            if whole: return torch.randint(-8, 9, (count,), generator=random).to(TORCH[spec.dtype])
            return torch.randn(count, generator=random).to(TORCH[spec.dtype])
        x = [numbers(spec.count) for _ in range(spec.world)]
        if not spec.columns: return cls(spec, schedule, x, arch=arch)
        return cls(spec, schedule, x, numbers(spec.count), numbers(spec.columns), arch)

    def run(self, calls: int = 1, seed: int = 1, edit: Edit | None = None) -> list[list[torch.Tensor]]:
        """The results of each GPU."""
        kernel = TABLE.build(self.spec, self.schedule, GPU(self.arch))
        text = kernel.ptx if edit is None else edit(kernel.ptx)
        assert edit is None or text != kernel.ptx
        gpus = [Emulator(self.arch, ordinal=i) for i in range(self.spec.world)]
        workspaces = [workspace(gpu, self.schedule) for gpu in gpus]
        table = np.array([each.ptr for each in workspaces], np.uint64)
        outs = [[gpu.alloc(self.spec.nbytes) for _ in range(2 if self.spec.columns else 1)] for gpu in gpus]
        peers = Peers(gpus, seed)
        every = [peers.multicast(workspaces).ptr] if isinstance(self.schedule, Multimem) else []
        xs = [gpu.alloc(bits(x)) for gpu, x in zip(gpus, self.x, strict=True)]

        def work(rank: int) -> Work:
            gpu = gpus[rank]
            after = [gpu.alloc(bits(each)) for each in (self.residual, self.weight) if each is not None]
            args = (*outs[rank], xs[rank], *after, gpu.alloc(table), *every, np.uint32(rank))
            for _ in range(calls):
                report = yield launching(gpu, text, kernel.grid, kernel.threads, args, kernel.name)
                assert report is not None
                self.found += [*report.findings, *report.notes]
        self.found = []
        peers.run([work(rank) for rank in range(self.spec.world)])
        return [[tensor(out, self.spec.dtype) for out in each] for each in outs]

    def expected(self) -> list[torch.Tensor]:
        """out, and residual_out behind it."""
        dtype = TORCH[self.spec.dtype]
        if not dtypes.is_float(self.spec.dtype): return [wrapped(self.x)]
        total = self.x[0].float()
        for each in self.x[1:]: total = total + each.float()
        total = total.to(dtype)
        if self.residual is None or self.weight is None: return [total]
        new = (total.float() + self.residual.float()).to(dtype)
        rows = new.view(-1, self.spec.columns).float()
        scale = 1 / torch.sqrt(rows.square().mean(-1, keepdim=True) + self.spec.eps)
        return [((rows * scale).to(dtype).float() * self.weight.float()).to(dtype).flatten(), new]

    def correct(self, calls: int = 1, seed: int = 1) -> None:
        """Every GPU has the same bits: those expected. Normed rows may be apart by `norm_bound`."""
        results = self.run(calls, seed)
        assert self.found == [], "\n".join(map(str, self.found))
        right = self.expected()
        for each in results:
            assert [bits(one).tobytes() for one in each] == [bits(one).tobytes() for one in results[0]]
        for got, want in zip(results[0][::-1], right[::-1], strict=True):
            if got is results[0][0] and self.spec.columns: self.norm_close(got, want)
            else: assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))

    def norm_close(self, got: torch.Tensor, want: torch.Tensor) -> None:
        """Sums of squares in another order, a root and a reciprocal: before it is rounded a value differs by
        a few units of float32, after that by one unit of the dtype in each of two roundings."""
        unit = {BF16: 2.0**-7, F16: 2.0**-10, F32: 2.0**-20}[self.spec.dtype]
        assert ((got.double() - want.double()).abs() <= 2 * unit * want.double().abs()).all()


def workspace(gpu: Emulator, schedule: AllReduceSchedule) -> Buffer:
    """Flags and epochs are zero, the rest is never written."""
    made = gpu.alloc(schedule.workspace.nbytes)
    assert made.valid is not None
    made.data[:schedule.workspace.data], made.valid[:schedule.workspace.data] = 0, 1
    return made


def bits(x: torch.Tensor) -> np.ndarray: return x.contiguous().view(torch.uint8).numpy()


def tensor(buffer: Buffer, dtype: DType) -> torch.Tensor:
    return torch.frombuffer(bytearray(buffer.numpy().tobytes()), dtype=TORCH[dtype])


def wrapped(x: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of integers, modulo their width."""
    kind = {4: np.uint32, 8: np.uint64}[x[0].element_size()]
    total = sum(bits(each).view(kind) for each in x)
    return torch.from_numpy(np.asarray(total, kind).view(np.uint8).copy()).view(x[0].dtype)
