"""An all-reduce on emulated GPUs: operands, the answer, a run with delays by seed.

Protocol: `run` launches a kernel so many times on every GPU, each time with another x and with results that
nothing has written, and returns the results of every call; `found` is all that was found. `correct` runs it,
allows no finding, and compares with what `expected` computes with torch: floats added in float32 in order of
ranks, each step rounded to the dtype. Call i is of schedule i mod n of `schedules`, where these are several
that share a workspace.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from tinygrad.dtype import DType, dtypes

from tests.support.tile.report_case import told
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
    epoch: int = 0      # rounds so far
    behind: int = 0     # so many fewer of them had a phase 1
    others: tuple[AllReduceSchedule, ...] = ()
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

    @property
    def schedules(self) -> tuple[AllReduceSchedule, ...]:
        """Of the calls, in turns."""
        return self.schedule, *self.others

    def given(self, call: int) -> list[torch.Tensor]:
        """x of each GPU in a call."""
        return [rolled(x, call * (rank + 1)) for rank, x in enumerate(self.x)]

    def run(self, calls: int = 1, seed: int = 1, edit: Edit | None = None) -> list[list[list[torch.Tensor]]]:
        """The results of each call on each GPU."""
        kernels = [TABLE.build(self.spec, each, GPU(self.arch)) for each in self.schedules]
        texts = [each.ptx if edit is None else edit(each.ptx) for each in kernels]
        assert edit is None or all(text != each.ptx for text, each in zip(texts, kernels, strict=True))
        gpus = [Emulator(self.arch, ordinal=i) for i in range(self.spec.world)]
        workspaces = [workspace(gpu, self.schedule, self.epoch, self.behind) for gpu in gpus]
        table = np.array([each.ptr for each in workspaces], np.uint64)
        peers = Peers(gpus, seed)
        multicast = peers.multicast(workspaces).ptr if Multimem in map(type, self.schedules) else 0
        made: list[list[list[torch.Tensor]]] = [[[] for _ in gpus] for _ in range(calls)]

        def work(rank: int) -> Work:
            gpu = gpus[rank]
            after = [gpu.alloc(bits(each)) for each in (self.residual, self.weight) if each is not None]
            there, x = gpu.alloc(table), gpu.alloc(bits(self.x[rank]))
            for call in range(calls):
                number = call % len(kernels)
                kernel, every = kernels[number], type(self.schedules[number]) is Multimem
                x.write(bits(self.given(call)[rank]))
                outs = [gpu.alloc(self.spec.nbytes) for _ in range(2 if self.spec.columns else 1)]
                args = (*outs, x, *after, there, *([multicast] if every else []), np.uint32(rank))
                report = yield launching(gpu, texts[number], kernel.grid, kernel.threads, args, kernel.name)
                assert report is not None
                self.found += told(report)
                made[call][rank] = [tensor(out, self.spec.dtype) for out in outs]
        self.found = []
        peers.run([work(rank) for rank in range(self.spec.world)])
        return made

    def expected(self, call: int = 0) -> list[torch.Tensor]:
        """out, and residual_out behind it."""
        dtype, given = TORCH[self.spec.dtype], self.given(call)
        if not dtypes.is_float(self.spec.dtype): return [wrapped(given)]
        total = given[0].float()
        for each in given[1:]: total = total + each.float()
        total = total.to(dtype)
        if self.residual is None or self.weight is None: return [total]
        new = (total.float() + self.residual.float()).to(dtype)
        rows = new.view(-1, self.spec.columns).float()
        scale = 1 / torch.sqrt(rows.square().mean(-1, keepdim=True) + self.spec.eps)
        return [((rows * scale).to(dtype).float() * self.weight.float()).to(dtype).flatten(), new]

    def correct(self, calls: int = 1, seed: int = 1) -> None:
        """Every GPU has the same bits: those expected. Normalized rows may be apart by `norm_bound`."""
        made = self.run(calls, seed)
        assert self.found == [], "\n".join(map(str, self.found))
        for call, results in enumerate(made):
            for each in results:
                assert [bits(one).tobytes() for one in each] == [bits(one).tobytes() for one in results[0]]
            for got, want in zip(results[0][::-1], self.expected(call)[::-1], strict=True):
                if got is results[0][0] and self.spec.columns: self.norm_close(got, want)
                else: assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))

    def norm_close(self, got: torch.Tensor, want: torch.Tensor) -> None:
        """Sums of squares in another order, a root and a reciprocal: before it is rounded a value differs by
        a few units of float32, after that by one unit of the dtype in each of two roundings."""
        unit = {BF16: 2.0**-7, F16: 2.0**-10, F32: 2.0**-20}[self.spec.dtype]
        assert ((got.double() - want.double()).abs() <= 2 * unit * want.double().abs()).all()


def workspace(gpu: Emulator, schedule: AllReduceSchedule, epoch: int, behind: int) -> Buffer:
    """Flags and epochs after so many rounds, of which `behind` had no phase 1; the rest is never written."""
    made = gpu.alloc(schedule.workspace.nbytes)
    assert made.valid is not None
    lines = made.data[:schedule.workspace.data].view(np.uint32).reshape(schedule.channels, -1)
    lines[:], lines[:, 8:16], lines[:, 17] = epoch, epoch - behind, epoch - behind
    made.valid[:schedule.workspace.data] = 1
    return made


def rolled(x: torch.Tensor, by: int) -> torch.Tensor:
    """The elements moved on, the last ones first: of any dtype."""
    width = x.element_size()
    return x.view(torch.uint8).view(-1, width).roll(by, 0).flatten().view(x.dtype)


def bits(x: torch.Tensor) -> np.ndarray: return x.contiguous().view(torch.uint8).numpy()


def tensor(buffer: Buffer, dtype: DType) -> torch.Tensor:
    return torch.frombuffer(bytearray(buffer.numpy().tobytes()), dtype=TORCH[dtype])


def wrapped(x: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of integers, modulo their width."""
    kind = {4: np.uint32, 8: np.uint64}[x[0].element_size()]
    total = sum(bits(each).view(kind) for each in x)
    return torch.from_numpy(np.asarray(total, kind).view(np.uint8).copy()).view(x[0].dtype)
