"""Mixtures of experts as workloads of the part "moe" of bench/gpu.py."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from gpu_compare import spaced
from tinygrad.dtype import dtypes

from tinygrad_nv.tile.grouped_gemm.spec import GroupedGemmSpec

SETS = 4                # routings, over the same matrices: what one reads exceeds twice the L2 cache
CHECKED = 32            # rows that are compared with float64


@dataclass(frozen=True)
class Shape:
    """Of a layer: `hidden` columns, `experts` of `width` columns between gate | up and down, `k` a token."""
    hidden: int
    width: int
    experts: int
    k: int


MODELS = {"DeepSeek-V3": Shape(7168, 2048, 256, 8), "Qwen3-235B": Shape(4096, 1536, 128, 8),
          "Mixtral": Shape(4096, 14336, 8, 2), "gpt-oss-20b": Shape(2880, 2880, 32, 4)}


@dataclass(frozen=True)
class MoEWorkload:
    """Of `tokens` tokens a `part`: "gate_up" multiplies their rows, gathered, with silu(gate) · up; "down"
    multiplies rows of that, weighted, each to its slot; "layer" does both, and adds the k results of each
    token. Routing is even, and done before."""
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
        """Of tokens' rows."""
        s = self.shape
        return GroupedGemmSpec(s.experts, self.rows, 2 * s.width, s.hidden, dtypes.bfloat16, self.tokens, s.k,
                               activation="silu")

    @property
    def down(self) -> GroupedGemmSpec:
        """Of rows in the order of experts."""
        s = self.shape
        return GroupedGemmSpec(s.experts, self.rows, s.hidden, s.width, dtypes.bfloat16, scatter=True,
                               weighted=True)

    @property
    def stages(self) -> tuple[tuple[GroupedGemmSpec, dict[str, str]], ...]:
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
    def nbytes(self) -> float:
        """Of the matrices of as many experts as even routing is expected to have, and of rows once."""
        distinct = self.shape.experts * (1 - (1 - self.shape.k / self.shape.experts) ** self.tokens)
        return sum(2 * (distinct * spec.n * spec.k + spec.x_rows * spec.k + spec.rows * spec.columns)
                   for spec, _ in self.stages)

    def scaled(self) -> MoEWorkload:
        """Smaller, for the emulator."""
        small = Shape(128, 64, min(self.shape.experts, 8), min(self.shape.k, 4))
        return replace(self, shape=small, tokens=min(self.tokens, 24))

    def given(self, device: str) -> list[dict[str, Any]]:
        """Storages by name; matrices are the same in all sets."""
        import torch
        s, kind = self.shape, {"device": device, "dtype": torch.bfloat16}
        def matrix(n: int, k: int) -> Any:
            made = torch.empty(s.experts, n, k, **kind)
            for each in made: each.uniform_(-(3 / k) ** 0.5, (3 / k) ** 0.5)    # results of variance 1
            return made
        matrices = {}
        if self.part != "down": matrices["gate_up"] = matrix(2 * s.width, s.hidden)
        if self.part != "gate_up": matrices["down"] = matrix(s.hidden, s.width)

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
        """How results are not what they must be, of some rows in float64; "" when they are."""
        name, = self.results
        for row, terms in self._exact(one):
            got, exact = one[name][row].double(), sum(terms)
            # programs of torch round to bfloat16, a relative 2^-9, after each operation: gate, whose error
            # silu triples where it is negative, up, silu, their product, what down makes, its weight, the
            # sum. `down` adds errors of any sign, which are as large as a row's usual element
            bound = 8 * 2.0**-9 * sum(each.abs() + each.square().mean().sqrt() for each in terms)
            off = (got - exact).abs() - bound
            if bool((off <= 0).all()): continue
            at = int(off.nan_to_num(float("inf")).argmax())
            return (f"{name} row {row}, column {at}: {got[at].item():g}, exactly {exact[at].item():g}, "
                    f"allowed {bound[at].item():g}")
        return ""

    def _exact(self, one: dict[str, Any]) -> Iterator[tuple[int, list[Any]]]:
        """Some rows of the result, and what they are the sum of."""
        if self.part == "layer":
            for token in spaced(self.tokens, max(1, self.tokens // CHECKED)):
                slots = range(token * self.shape.k, (token + 1) * self.shape.k)
                yield token, [self._down(one, slot, self._gate_up(one, slot)) for slot in slots]
            return
        for at in spaced(self.rows, max(1, self.rows // CHECKED)):
            slot = int(one["order"][at])
            if self.part == "gate_up": yield at, [self._gate_up(one, slot)]
            else: yield slot, [self._down(one, slot, one["inner"][at].double())]

    def _gate_up(self, one: dict[str, Any], slot: int) -> Any:
        import torch
        w = one["gate_up"][one["experts"].flatten()[slot]].double()
        gate, up = (w @ one["x"][slot // self.shape.k].double()).chunk(2)
        return torch.nn.functional.silu(gate) * up

    def _down(self, one: dict[str, Any], slot: int, inner: Any) -> Any:
        return one["weights"][slot].double() * (one["down"][one["experts"].flatten()[slot]].double() @ inner)
