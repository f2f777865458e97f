"""Workloads of the part "language" of bench/gpu/run.py (gpu/tile_language.py): matmuls, attention, rows and
4-bit weights, each with its kernel in the tile language, our template, Triton's and torch's."""
from __future__ import annotations

import functools
import json
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from bench.gpu import attention as gpu_attention
from bench.gpu import elementwise as gpu_elementwise
from bench.gpu.gemm import GemmWorkload
from bench.gpu.gemm_contenders import bind_default
from bench.gpu.launch import device
from bench.gpu.parts import (
    NotMeasured,
    Options,
    Run,
    Workload,
    set_count,
)
from bench.gpu.quant_contenders import pack_gptq
from bench.gpu.quant_data import buffers_of, dequantise, in_tiles
from bench.gpu.quant_workloads import compare_rows
from bench.gpu.turns import Bursts
from bench.lib import kernels_language as kernels
from bench.lib import specs
from tinygrad_nv.language.kernels import Kernel
from tinygrad_nv.stdlib import attention as flash
from tinygrad_nv.tile.language.schedule import TileSchedule

MODELLED = Path(__file__).parents[1] / "results" / "language_gpu_model.json"
SCHEDULE = re.compile(r"(\d+)x(\d+), k (\d+), (\d+) warps, (\d+) stages")
GROUP, SPLIT, FEW = 128, 8, 64      # of 4-bit weights: elements of a scale; parts of K, for so many rows
EMULATED_SMS = 3                    # fewer than programs, whose number it does not divide
TILES = {"bf16": (((128, 256, 64), 8, 3), ((128, 128, 64), 8, 4)),
         "e4m3": (((128, 256, 128), 8, 3), ((128, 128, 128), 8, 4))}
UNASKED = ("ACC", "B_IS_NK")                # what Triton's matmul of e4m3 does not take
INT4 = specs.QTYPES["int4"]
PLACES = tuple(4 * (i // 2) + 16 * (i % 2) for i in range(8))   # of eight codes in a word of the language's
Sets = Sequence[dict[str, Any]]


class LanguageWorkload(Workload, Protocol):
    """A workload of gpu/parts.py. `case` is that of language_gpu_model.py whose schedule it has; `names` says
    which storages the kernel's tensors are that are not called so."""
    @property
    def names(self) -> Mapping[str, str]: ...

    @property
    def zero_bytes(self) -> int:
        """Bytes of the result that are zero before a launch."""

    @property
    def case(self) -> str: ...

    @property
    def is_predicted(self) -> bool:
        """Whether the case has these shapes, too."""

    @property
    def kernel_call(self) -> tuple[Kernel, tuple[Tensor, ...], dict[str, Any]]:
        """The kernel and a call's arguments."""

    def scale_down(self) -> Any: ...

    @abstractmethod
    def template(self, given: Sets, options: Options) -> Run:
        """Runs of the other contenders, for a GPU."""

    @abstractmethod
    def triton(self, given: Sets, options: Options) -> Run: ...

    @abstractmethod
    def torch(self, given: Sets, options: Options) -> Run: ...


def empty(*shape: int, dtype: DType = dtypes.bfloat16) -> Tensor:
    """A Tensor that is never realized: shapes are what is asked for."""
    return Tensor.empty(*shape, dtype=dtype, device="CPU")


@functools.cache
def model_cases() -> dict[str, dict[str, Any]]:
    """Cases of an H100 by name."""
    return {each["case"]: each for each in json.loads(MODELLED.read_text())["h100"]}


def schedule_of(workload: LanguageWorkload) -> TileSchedule:
    """The timing model's."""
    found = SCHEDULE.search(model_cases()[workload.case]["schedule"])
    assert found is not None, workload.case
    m, n, k, warps, stages = map(int, found.groups())
    return TileSchedule(block=(m, n), k=k, warps=warps, stages=stages)


# **** matmuls ****

@dataclass(frozen=True)
class Matmul:
    """a @ b of bfloat16, a bᵀ of e4m3, with float32 results."""
    m: int
    n: int
    k: int
    case: str
    dtype: str = "bf16"

    results = ("out",)
    names: ClassVar = {"result": "out"}
    zero_bytes = 0

    @property
    def name(self) -> str:
        """Name of the row."""
        return f"gemm {self.m}x{self.n}x{self.k} {self.dtype}"

    @property
    def is_predicted(self) -> bool: return self.name == self.case

    @property
    def narrow(self) -> bool:
        """Whether operands have 8 bits."""
        return self.dtype == "e4m3"

    @property
    def plain(self) -> GemmWorkload:
        """The same as x @ w.T, for comparisons."""
        return GemmWorkload(self.name, self.m, self.n, self.k, fp8=self.narrow)

    @property
    def work(self) -> float:
        """Floating-point operations."""
        return self.plain.work

    @property
    def nbytes(self) -> float:
        """Each operand and the result once."""
        return self.plain.nbytes + 2.0 * self.m * self.n

    @property
    def kernel_call(self) -> tuple[Kernel, tuple[Tensor, ...], dict[str, Any]]:
        if not self.narrow: return kernels.matmul, (empty(self.m, self.k), empty(self.k, self.n)), {}
        a, b = (empty(rows, self.k, dtype=dtypes.fp8e4m3) for rows in (self.m, self.n))
        return kernels.matmul_nt, (a, b), {}

    def scale_down(self) -> Matmul:
        """Programs in twos, and an odd number of steps."""
        block = schedule_of(self)
        return replace(self, m=2 * block.block_m, n=2 * block.block_n, k=5 * block.block_k)

    def make_inputs(self, device: str) -> list[dict[str, Any]]:
        """Storages by name, as many sets as exceed twice the L2 cache."""
        import torch
        kind = torch.float8_e4m3fn if self.narrow else torch.bfloat16

        def uniform(*shape: int) -> torch.Tensor:
            return (torch.rand(*shape, device=device) * 2 - 1).to(kind)
        b = (self.n, self.k) if self.narrow else (self.k, self.n)
        return [{"out": torch.empty(self.m, self.n, device=device), "a": uniform(self.m, self.k),
                 "b": uniform(*b)} for _ in range(set_count(device, self.nbytes))]

    def unlike(self, one: dict[str, Any]) -> str:
        """How the result in these storages is not the product; "" when it is."""
        b = one["b"] if self.narrow else one["b"].T.contiguous()
        return self.plain.unlike({**one, "b": b})

    def template(self, given: Sets, options: Options) -> Run:
        """By the default schedule."""
        return bind_default(specs.matmul(self.m, self.n, self.k, specs.E4M3 if self.narrow else specs.BF16,
                                         "KK" if self.narrow else "KM", dtypes.float32), given)

    def torch(self, given: Sets, options: Options) -> Run:
        """cuBLAS."""
        import torch
        one = torch.ones((), device=given[0]["a"].device)

        def run(i: int) -> None:
            a, b = given[i]["a"], given[i]["b"]
            if self.narrow: given[i]["out"] = torch._scaled_mm(a, b.T, one, one, out_dtype=torch.float32,
                                                               use_fast_accum=False)
            else: given[i]["out"] = torch.mm(a, b, out_dtype=torch.float32)
        return run

    def triton(self, given: Sets, options: Options) -> Run:
        """With descriptors, the quickest tile that fits. Its results are bfloat16, for which there is room
        in shared memory."""
        from triton.tools.tensor_descriptor import TensorDescriptor

        from bench.lib.gemm_peers import KERNELS, Peer, blocks, constants
        from bench.timing.language_triton import matmul_promoting
        for one in given: one["out"] = one["out"].bfloat16()
        found: list[tuple[float, Run]] = []
        why = ""
        for block, warps, stages in TILES[self.dtype]:
            peer = Peer("descriptors", block, warps, stages, "K" if self.narrow else "MN", self.dtype)
            grid = (-(-self.m // block[0]) * -(-self.n // block[1]),)
            fixed = {**constants(peer), "M": self.m, "N": self.n, "K": self.k, "num_warps": warps,
                     "num_stages": stages}
            if self.narrow:
                kernel, fixed = matmul_promoting, {n: x for n, x in fixed.items() if n not in UNASKED}
            else: kernel = KERNELS[peer.kind]
            boxes = dict(zip(("a", "b", "out"), blocks(peer), strict=True))
            described = [{name: TensorDescriptor.from_tensor(each[name], list(box))
                          for name, box in boxes.items()} for each in given]
            run = partial(_triton_matmul, kernel[grid], described, fixed)
            try: found.append((min(Bursts(run, len(given)).eager(3) for _ in range(2)), run))
            except Exception as error: why = f"{type(error).__name__}: {error}".partition("\n")[0]
        if not found: raise NotMeasured(f"no tile fits: {why}")
        return min(found, key=lambda each: each[0])[1]


def _triton_matmul(kernel: Any, described: Sets, fixed: dict[str, Any], i: int) -> None:
    one = described[i]
    kernel(a=one["a"], b=one["b"], c=one["out"], **fixed)


# **** attention ****

@dataclass(frozen=True)
class Flash(gpu_attention.Forward):
    """One of the part "attention"."""
    names: ClassVar = {"result": "out"}
    zero_bytes = 0

    @property
    def name(self) -> str:
        """Name of the row."""
        return f"flash {self.heads}x{self.tokens}x{self.d} bf16{' causal' if self.causal else ''}"

    @property
    def case(self) -> str: return f"flash 16x4096x{self.d} bf16"

    @property
    def is_predicted(self) -> bool: return not self.causal

    @property
    def kernel_call(self) -> tuple[Kernel, tuple[Tensor, ...], dict[str, Any]]:
        q = empty(self.batch, self.heads, self.tokens, self.d)
        return flash.forward, (q, q, q), {"causal": self.causal, "scale": self.d**-0.5}

    def scale_down(self) -> Flash:
        """Four blocks of keys."""
        return replace(self, heads=2, tokens=512)

    def make_inputs(self, device: str) -> list[dict[str, Any]]:
        """And LSE."""
        import torch
        rows = self.batch, self.heads, self.tokens
        return [{**one, "lse": torch.empty(*rows, device=device)} for one in super().make_inputs(device)]

    def template(self, given: Sets, options: Options) -> Run:
        """By the default schedule."""
        return gpu_attention.ours(self, given, options)

    def torch(self, given: Sets, options: Options) -> Run:
        """cuDNN."""
        return gpu_attention.cudnn(self, given, options)

    def triton(self, given: Sets, options: Options) -> Run:
        """The tutorial's kernel."""
        return gpu_attention.triton(self, given, options)


# **** rows ****

@dataclass(frozen=True)
class Rows(gpu_elementwise.ElementwiseWorkload):
    """One of the part "memory"."""
    names: ClassVar = {"result": "out"}
    zero_bytes = 0

    @property
    def name(self) -> str:
        """Name of the row."""
        return f"{'rms norm' if self.form == 'rms' else self.form} {self.m}x{self.n} bf16"

    @property
    def case(self) -> str: return f"{'rms norm' if self.form == 'rms' else self.form} 4096x4096 bf16"

    @property
    def is_predicted(self) -> bool: return self.name == self.case

    @property
    def work(self) -> float:
        """Bytes, which say more of these."""
        return self.nbytes

    @property
    def kernel_call(self) -> tuple[Kernel, tuple[Tensor, ...], dict[str, Any]]:
        x = empty(self.m, self.n)
        if self.form == "softmax": return kernels.softmax, (x,), {}
        return kernels.rms_norm, (x, empty(self.n)), {"eps": gpu_elementwise.EPS}

    def scale_down(self) -> Rows:
        """Few whole rows, as one that is not whole has another schedule."""
        return replace(self, m=3)

    def template(self, given: Sets, options: Options) -> Run:
        """By the default schedule."""
        return gpu_elementwise.ours(self, given, options)

    def torch(self, given: Sets, options: Options) -> Run:
        """torch's own functions."""
        return gpu_elementwise.torch_eager(self, given, options)

    def triton(self, given: Sets, options: Options) -> Run:
        """A row in a program; persistent programs."""
        from bench.lib import memory_peers
        if self.form == "rms":
            norm = memory_peers.rms_norm[(self.m,)]
            return lambda i: norm(given[i]["out"], given[i]["x"], given[i]["w"], N=self.n, num_warps=4)
        ctas = min(self.m, 8 * device().properties.sm_count)
        softmax = memory_peers.softmax[(ctas,)]
        return lambda i: softmax(given[i]["out"], given[i]["x"], self.m, N=self.n, CTAS=ctas, STAGES=4,
                                 num_warps=4)


# **** 4-bit weights ****

@dataclass(frozen=True)
class Quantised:
    """Float16 times codes of 4 bits; of few rows K is cut in parts, whose float32 sums are added to zeros.
    Numbers are those that bfloat16 has, too."""
    m: int
    n: int
    k: int

    results = ("out",)
    names: ClassVar = {"result": "out", "x": "a", "packed": "words", "scales": "scales of groups"}
    type = INT4

    @property
    def name(self) -> str:
        """Name of the row."""
        return f"w4a16 {self.m}x{self.n}x{self.k} f16"

    @property
    def case(self) -> str: return f"w4a16 {16 if self.zero_bytes else 4096}x4096x4096 f16"

    @property
    def is_predicted(self) -> bool: return self.name == self.case

    @property
    def zero_bytes(self) -> int:
        """Bytes of float32 that parts of K are added to."""
        return 4 * self.m * self.n if self.m <= FEW else 0

    @property
    def work(self) -> float:
        """Floating-point operations."""
        return 2.0 * self.m * self.n * self.k

    @property
    def nbytes(self) -> float:
        """Codes, scales, operand and result once."""
        return self.n * self.k * (0.5 + 2 / GROUP) + 2.0 * self.m * (self.n + self.k)

    @property
    def kernel_call(self) -> tuple[Kernel, tuple[Tensor, ...], dict[str, Any]]:
        given = (empty(self.m, self.k, dtype=dtypes.float16), empty(self.n, self.k // 8, dtype=dtypes.int32),
                 empty(self.k // GROUP, self.n, dtype=dtypes.float16))
        if not self.zero_bytes: return kernels.w4a16, given, {"group": GROUP}
        return kernels.w4a16_split, given, {"group": GROUP, "split": SPLIT}

    def scale_down(self) -> Quantised:
        """A few programs."""
        return replace(self, m=min(self.m, 512), n=256, k=2048 if self.zero_bytes else 256)

    def make_inputs(self, device: str) -> list[dict[str, Any]]:
        """Storages by name, as many sets as exceed twice the L2 cache: `rows` are codes as bytes [n, k] and
        scales [n, groups], `codes` and `scales` the template's, `words` and `scales of groups` the
        language's."""
        import torch
        kind = torch.float32 if self.zero_bytes else torch.float16
        places = torch.tensor(PLACES, dtype=torch.int32, device=device)

        def one() -> dict[str, Any]:
            laid, rows = buffers_of(self.type, self.n, self.k, device)
            scales = rows["scales"].bfloat16().half()
            laid["scales"] = in_tiles(scales, self.type, "scales", self.k).reshape(-1)
            words = (rows["codes"].view(self.n, -1, 8).int() << places).sum(-1, dtype=torch.int32)
            x = (torch.rand(self.m, self.k, device=device) * 2 - 1).bfloat16().half()
            return {"out": torch.empty(self.m, self.n, device=device, dtype=kind), "a": x, **laid,
                    "rows codes": rows["codes"], "rows scales": scales, "words": words,
                    "scales of groups": scales.T.contiguous()}
        return [one() for _ in range(set_count(device, self.nbytes))]

    def unlike(self, one: dict[str, Any]) -> str:
        """How the result in these storages is not the product; "" when it is: elements and the result may
        have been rounded to bfloat16."""
        return compare_rows(self, one["out"], one["a"], dequantise(self.type, one, self.k),
                            self.k**0.5 * 2.0**-8)

    def halves(self, given: Sets) -> None:
        """Results in float16."""
        for one in given: one["out"] = one["out"].half()

    def template(self, given: Sets, options: Options) -> Run:
        """By the default schedule."""
        self.halves(given)
        return bind_default(specs.quant_matmul(self.type, self.m, self.n, self.k, specs.F16), given)

    def torch(self, given: Sets, options: Options) -> Run:
        """cuBLAS, of the dequantised matrix."""
        import torch
        self.halves(given)
        weights = [dequantise(self.type, one, self.k).half() for one in given]
        return lambda i: torch.mm(given[i]["a"], weights[i].T, out=given[i]["out"])

    def triton(self, given: Sets, options: Options) -> Run:
        """With the model's tiles: words of columns, for few rows words of rows and parts of K."""
        from bench.timing.language_triton import w4a16, w4a16_turned
        split = SPLIT if self.zero_bytes else 1
        bm, bn, bk, warps, stages = (16, 64, 128, 4, 3) if self.zero_bytes else (256, 128, 64, 8, 3)
        kernel = (w4a16_turned if self.zero_bytes else w4a16)[-(-self.m // bm), -(-self.n // bn), split]
        columns = [pack_gptq(one["rows codes"], 4) for one in given]
        words = [each.T.contiguous() for each in columns] if self.zero_bytes else columns

        def run(i: int) -> None:
            one = given[i]
            if self.zero_bytes: one["out"].zero_()
            kernel(one["a"], words[i], one["scales of groups"], one["out"], self.m, self.n, self.k, BM=bm,
                   BN=bn, BK=bk, GROUP=GROUP, SPLIT=split, num_warps=warps, num_stages=stages)
        return run
