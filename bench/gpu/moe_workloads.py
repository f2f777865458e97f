"""Mixtures of experts as workloads of the part "moe" of bench/gpu/run.py."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tinygrad.dtype import dtypes

from bench.gpu.compare import spread_numbers
from bench.gpu.quant_data import buffers_of, dequantise
from tinygrad_nv.quant.types import QType
from tinygrad_nv.quant.types import nbytes as nbytes_of
from tinygrad_nv.tile.grouped_gemm.spec import GroupedGemmSpec
from tinygrad_nv.tile.quant_grouped.spec import QuantGroupedSpec

SETS = 4                # routings, over the same matrices: what one reads exceeds twice the L2 cache
CHECKED = 32            # rows that are compared with float64
BOUND = 3.0             # two maxima of a row's errors, of other orders of sums
Kept = Callable[[Any], Any]


@dataclass(frozen=True)
class Shape:
    """Shape of a layer: `hidden` columns, `experts` of `width` columns between gate | up and down, `k` a
    token."""
    hidden: int
    width: int
    experts: int
    k: int


MODELS = {"DeepSeek-V3": Shape(7168, 2048, 256, 8), "Qwen3-235B": Shape(4096, 1536, 128, 8),
          "Mixtral": Shape(4096, 14336, 8, 2), "gpt-oss-20b": Shape(2880, 2880, 32, 4)}


@dataclass(frozen=True)
class MoEWorkload:
    """Work on `tokens` tokens, a `part`: "gate_up" multiplies their rows, gathered, with silu(gate) · up;
    "down" multiplies rows of that, weighted, each to its slot; "layer" does both, and adds the k results of
    each token. Routing is even, and done before."""
    name: str
    shape: Shape
    tokens: int
    part: str

    def __str__(self) -> str: return self.name

    @property
    def results(self) -> tuple[str, ...]:
        return ({"gate_up": "inner", "down": "out", "layer": "sum"}[self.part],)

    @property
    def rows(self) -> int:
        """Slots: a token's experts, of all tokens."""
        return self.tokens * self.shape.k

    @property
    def gate_up(self) -> GroupedGemmSpec:
        """Spec of the matmul of tokens' rows."""
        s = self.shape
        return GroupedGemmSpec(s.experts, self.rows, 2 * s.width, s.hidden, dtypes.bfloat16, self.tokens, s.k,
                               activation="silu")

    @property
    def down(self) -> GroupedGemmSpec:
        """Spec of the matmul of rows in the order of experts."""
        s = self.shape
        return GroupedGemmSpec(s.experts, self.rows, s.hidden, s.width, dtypes.bfloat16, scatter=True,
                               weighted=True)

    @property
    def stages(self) -> tuple[tuple[Any, dict[str, str]], ...]:
        """Specs, and which storage each of their arguments is."""
        same = {name: name for name in ("offsets", "order", "weights")}
        first = self.gate_up, {**same, "out": "inner", "x": "x", "w": "gate_up"}
        second = self.down, {**same, "out": "out", "x": "inner", "w": "down"}
        return {"gate_up": (first,), "down": (second,), "layer": (first, second)}[self.part]

    @property
    def work(self) -> float:
        """Floating-point operations."""
        return float(sum(spec.flops for spec, _ in self.stages))

    @property
    def distinct(self) -> float:
        """Number of experts that even routing is expected to have."""
        return self.shape.experts * (1 - (1 - self.shape.k / self.shape.experts) ** self.tokens)

    @property
    def nbytes(self) -> float:
        """Bytes of the matrices of as many experts as even routing is expected to have, and of rows once."""
        return sum(2 * (self.distinct * spec.n * spec.k + spec.x_rows * spec.k + spec.rows * spec.columns)
                   for spec, _ in self.stages)

    def scale_down(self) -> MoEWorkload:
        """Smaller, for the emulator."""
        small = Shape(128, 64, min(self.shape.experts, 8), min(self.shape.k, 4))
        return replace(self, shape=small, tokens=min(self.tokens, 24))

    def make_matrices(self, device: str) -> dict[str, Any]:
        """Matrices of all experts."""
        import torch
        s = self.shape

        def matrix(n: int, k: int) -> Any:
            made = torch.empty(s.experts, n, k, device=device, dtype=torch.bfloat16)
            for each in made: each.uniform_(-(3 / k) ** 0.5, (3 / k) ** 0.5)    # results of variance 1
            return made
        matrices = {}
        if self.part != "down": matrices["gate_up"] = matrix(2 * s.width, s.hidden)
        if self.part != "gate_up": matrices["down"] = matrix(s.hidden, s.width)
        return matrices

    def make_inputs(self, device: str) -> list[dict[str, Any]]:
        """Storages by name; matrices are the same in all sets."""
        import torch
        s, kind = self.shape, {"device": device, "dtype": torch.bfloat16}
        matrices = self.make_matrices(device)

        def one() -> dict[str, Any]:
            weights, experts = torch.rand(self.tokens, s.experts, device=device).topk(s.k)
            order = experts.flatten().argsort(stable=True)
            counts = experts.flatten().bincount(minlength=s.experts)
            offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
            return {"x": torch.randn(self.tokens, s.hidden, **kind), "order": order.int(),
                    "inner": torch.randn(self.rows, s.width, **kind), "offsets": offsets.int(),
                    "weights": (weights / weights.sum(1, keepdim=True)).float().flatten(), "experts": experts,
                    "out": torch.empty(self.rows, s.hidden, **kind),
                    "sum": torch.empty(self.tokens, s.hidden, **kind), **matrices}
        return [one() for _ in range(SETS)]

    def unlike(self, one: dict[str, Any]) -> str:
        """How results are not what they must be, of some rows in float64; "" when they are. An error may be
        `BOUND` times the row's largest of the same operations with bfloat16 results, as torch rounds them."""
        name, = self.results
        both = zip(self._rows(one, _exactly), self._rows(one, _round_bf16), strict=True)
        for (row, exact), (_, plain) in both:
            got, allowed = one[name][row].double(), BOUND * (plain - exact).abs().max()
            off = (got - exact).abs()
            if bool((off <= allowed).all()): continue
            at = int(off.nan_to_num(float("inf")).argmax())
            return (f"{name} row {row}, column {at}: {got[at].item():g}, exactly {exact[at].item():g}, "
                    f"allowed {allowed.item():g}")
        return ""

    def _rows(self, one: dict[str, Any], kept: Kept) -> Iterator[tuple[int, Any]]:
        """Some rows of the result in float64; `kept` is what each operation keeps of its result."""
        if self.part == "layer":
            for token in spread_numbers(self.tokens, max(1, self.tokens // CHECKED)):
                slots = range(token * self.shape.k, (token + 1) * self.shape.k)
                yield token, kept(sum(self._down(one, slot, self._gate_up(one, slot, kept), kept)
                                      for slot in slots))
            return
        for at in spread_numbers(self.rows, max(1, self.rows // CHECKED)):
            slot = int(one["order"][at])
            if self.part == "gate_up": yield at, self._gate_up(one, slot, kept)
            else: yield slot, self._down(one, slot, one["inner"][at].double(), kept)

    def _gate_up(self, one: dict[str, Any], slot: int, kept: Kept) -> Any:
        import torch
        w = one["gate_up"][one["experts"].flatten()[slot]].double()
        gate, up = kept(w @ one["x"][slot // self.shape.k].double()).chunk(2)
        return kept(kept(torch.nn.functional.silu(gate)) * up)

    def _down(self, one: dict[str, Any], slot: int, inner: Any, kept: Kept) -> Any:
        made = kept(one["down"][one["experts"].flatten()[slot]].double() @ inner)
        return kept(one["weights"][slot].double() * made)


@dataclass(frozen=True)
class QuantMoEWorkload(MoEWorkload):
    """gate_up with matrices of a type. Contenders have them in bfloat16, as "gate_up"."""
    type: QType

    @property
    def kernel_type(self) -> QType:
        """The type, laid out as kernels take it."""
        return replace(self.type, layout="fragments")

    @property
    def stages(self) -> tuple[tuple[Any, dict[str, str]], ...]:
        spec = QuantGroupedSpec(self.gate_up, self.kernel_type)
        names = "x", "offsets", "order", *spec.buffers
        return (spec, {**{name: name for name in names}, "out": "inner"}),

    @property
    def nbytes(self) -> float:
        one = self.gate_up
        return (self.distinct * nbytes_of(self.kernel_type, one.n, one.k)
                + 2 * (one.x_rows * one.k + one.rows * one.columns))

    def make_matrices(self, device: str) -> dict[str, Any]:
        """The stack's buffers, matrix behind matrix, and what they stand for: "exact", and rounded."""
        import torch
        one = self.gate_up
        made = [buffers_of(self.type, one.n, one.k, device) for _ in range(one.groups)]
        stack = {name: torch.cat([laid[name] for laid, _ in made]) for name in made[0][0]}
        exact = torch.stack([
            dequantise(self.type, {f"rows {name}": data for name, data in rows.items()}, one.k)
            for _, rows in made])
        return {**stack, "exact": exact, "gate_up": exact.bfloat16()}

    def make_inputs(self, device: str) -> list[dict[str, Any]]:
        """Storages by name, rows such that results have a variance of 1."""
        given = super().make_inputs(device)
        for one in given: one["x"] /= one["exact"][0].std() * self.shape.hidden**0.5
        return given

    def _gate_up(self, one: dict[str, Any], slot: int, kept: Kept) -> Any:
        """Kernels may round what they dequantise, or not."""
        name = "exact" if kept is _exactly else "gate_up"
        return super()._gate_up({**one, "gate_up": one[name]}, slot, kept)


def _exactly(x: Any) -> Any: return x


def _round_bf16(x: Any) -> Any: return x.bfloat16().double()
