"""Rows of timing/table.py: both matmuls of mixtures of experts beside Triton's (moe_peers.py) and DeepGEMM's.

Tokens are dealt at random, k different experts each. Ours gathers, activates, weights and scatters in the two
kernels. Triton's gathers and scatters; its activation is not counted. DeepGEMM's first release (a6d97a1)
multiplies fp8 rows that lie padded to 128 for each expert (its contiguous layout), and does nothing else:
what brings them there is not counted. Quantised experts stand beside Triton's kernels that make operands of
codes. Operations are those of routed rows, bytes those of experts with rows.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

from bench.lib import moe_peers
from bench.lib.moe_peers import Tile
from bench.lib.specs import BF16
from bench.timing import deepgemm as timing_deepgemm
from bench.timing.gate_cases import GPU_NAME, experts_of
from bench.timing.rows import Checkouts, Launches, Peer, Row
from bench.timing.triton_times import Array, predict
from tinygrad_nv.quant.types import nbytes
from tinygrad_nv.tile.grouped_gemm.spec import GroupedGemmSpec, ScaledGroupedGemmSpec
from tinygrad_nv.tile.quant_grouped.spec import QuantGroupedSpec

TOKENS = (4096, 64)
TRITON = {4096: (Tile(64, 128, 64, 4, 3, 16), Tile(128, 128, 64, 8, 3, 16), Tile(128, 256, 64, 8, 3, 16),
                 Tile(128, 64, 64, 4, 4, 16)),
          64: (Tile(16, 64, 128, 4, 4, 1), Tile(16, 128, 64, 4, 4, 1), Tile(16, 128, 128, 4, 3, 1),
               Tile(16, 64, 64, 4, 4, 1))}      # the last of both: columns of gpt-oss are 45 times 64

QUANTISED = {1024: (Tile(64, 64, 64, 4, 3, 1), Tile(64, 128, 64, 4, 3, 1), Tile(32, 64, 64, 4, 4, 1)),
             64: (Tile(16, 64, 128, 4, 4, 1), Tile(16, 64, 64, 4, 4, 1))}


@dataclass(frozen=True)
class Model:
    """Experts, experts of a token, columns of tokens and of experts."""
    name: str
    experts: int
    top_k: int
    hidden: int
    width: int

    @lru_cache  # noqa: B019  four models
    def deal_experts(self, tokens: int) -> np.ndarray:
        """The expert of each slot."""
        chances = np.random.default_rng(0).random((tokens, self.experts))
        return np.argsort(chances, axis=1)[:, :self.top_k].reshape(-1)

    def routing(self, tokens: int) -> dict[str, np.ndarray]:
        """Returns the routing as the kernels take it."""
        dealt = self.deal_experts(tokens)
        ends = np.bincount(dealt, minlength=self.experts).cumsum()
        return {"offsets": np.concatenate([[0], ends]).astype(np.int32),
                "order": np.argsort(dealt, kind="stable").astype(np.int32)}

    def specs(self, tokens: int, kind: type[GroupedGemmSpec]) -> dict[str, GroupedGemmSpec]:
        """Both matmuls."""
        rows, dtype = tokens * self.top_k, {} if kind is ScaledGroupedGemmSpec else {"dtype": BF16}
        both = kind(self.experts, rows, 2 * self.width, self.hidden, sources=tokens, gather=self.top_k,
                    activation="silu", **dtype)
        down = kind(self.experts, rows, self.hidden, self.width, scatter=True, weighted=True, **dtype)
        return {"gate | up": both, "down": down}


MODELS = (Model("DeepSeek-V3", 256, 8, 7168, 2048), Model("Qwen3-235B", 128, 8, 4096, 1536),
          Model("Mixtral 8x7B", 8, 2, 4096, 14336), Model("gpt-oss-120b", 128, 4, 2880, 2880))


def of_triton(model: Model, tokens: int, spec: GroupedGemmSpec, tile: Tile, _: Checkouts) -> Launches:
    w = {"w": Array("bf16", (spec.groups * spec.n, spec.k))}
    return _of_triton(moe_peers.expert_matmul, model, tokens, spec, tile, w, {})


def of_quantised_triton(model: Model, tokens: int, spec: QuantGroupedSpec, tile: Tile,
                        _: Checkouts) -> Launches:
    one, e8m0 = spec.grouped, spec.type.scale.e8m0
    rows, columns = one.groups * one.n, spec.type.scale.columns
    w = {"w": Array("u8", (rows, one.k // 2)),
         "scales": Array("u8" if e8m0 else "fp16", (rows, one.k // columns))}
    kernel, more = (moe_peers.expert_mxfp4, {}) if e8m0 else (moe_peers.expert_int4, {"GROUP_K": columns})
    return _of_triton(kernel, model, tokens, one, tile, w, more)


def _of_triton(kernel: Any, model: Model, tokens: int, spec: GroupedGemmSpec, tile: Tile,
               matrices: Mapping[str, Array], constants: Mapping[str, int]) -> Launches:
    slots, experts = moe_peers.align_experts(model.deal_experts(tokens), model.experts, tile.m)
    rows, top_k = tokens * model.top_k, model.top_k if spec.gather else 1
    given: dict[str, Array | int] = {
        "x": Array("bf16", (spec.x_rows, spec.k)), **matrices,
        "out": Array("bf16", (rows, spec.n)), "weights": Array("fp32", (rows,)),
        "slots": Array("i32", slots.shape, (), slots), "experts": Array("i32", experts.shape, (), experts),
        "N": spec.n, "K": spec.k, "SLOTS": rows}
    fixed = {"TOP_K": top_k, "WEIGHTED": spec.weighted, "BM": tile.m, "BN": tile.n, "BK": tile.k,
             "GROUP": tile.group, "TILES": len(experts), **constants}
    return [predict(kernel, given, (len(experts) * -(-spec.n // tile.n),), fixed,
                    num_warps=tile.warps, num_stages=tile.stages)]


def of_deepgemm(model: Model, tokens: int, spec: GroupedGemmSpec, checkouts: Checkouts) -> Launches:
    there = checkouts["deepgemm"]
    counts = np.bincount(model.deal_experts(tokens), minlength=model.experts)
    return [timing_deepgemm.predict_grouped(there.folder, there.include, counts, spec.n, spec.k, GPU_NAME)]


def rows() -> Iterator[Row]:
    """bf16 by model, then fp8, then quantised."""
    for kind, words in ((GroupedGemmSpec, "bf16"), (ScaledGroupedGemmSpec, "e4m3, block scales")):
        for model in MODELS:
            if kind is ScaledGroupedGemmSpec and model.name != "DeepSeek-V3": continue
            for tokens in TOKENS:
                for what, spec in model.specs(tokens, kind).items():
                    yield _row(kind, words, model, tokens, what, spec)

    for name, model in (("mxfp4", MODELS[3]), ("int4", MODELS[1])):
        for tokens in QUANTISED:
            for what, spec in model.specs(tokens, GroupedGemmSpec).items():
                yield _quant_row(name, model, tokens, what, experts_of(name, spec))


def _row(kind: type[GroupedGemmSpec], words: str, model: Model, tokens: int, what: str,
         spec: GroupedGemmSpec) -> Row:
    if kind is ScaledGroupedGemmSpec:
        peers = [Peer("DeepGEMM, grouped", partial(of_deepgemm, model, tokens, spec), "deepgemm")]
    else:
        peers = [Peer(f"Triton, {tile}", partial(of_triton, model, tokens, spec, tile))
                 for tile in TRITON[tokens] if spec.n % tile.n == 0 and spec.k % tile.k == 0]
    few = tokens * model.top_k < 64 * model.experts
    active = np.count_nonzero(np.bincount(model.deal_experts(tokens)))
    moved = int(active) * spec.n * spec.k * spec.dtype.itemsize if few else 0
    return Row(f"mixture of experts {words}", f"{model.name}, {tokens} tokens, {what}", spec, tuple(peers),
               flops=0 if few else spec.flops, nbytes=moved, given=model.routing(tokens))


def _quant_row(name: str, model: Model, tokens: int, what: str, spec: QuantGroupedSpec) -> Row:
    one = spec.grouped
    peers = [Peer(f"Triton, {tile}", partial(of_quantised_triton, model, tokens, spec, tile))
             for tile in QUANTISED[tokens] if one.n % tile.n == 0 and one.k % tile.k == 0]
    active = int(np.count_nonzero(np.bincount(model.deal_experts(tokens))))
    moved = active * one.halves * nbytes(spec.type, one.columns, one.k) if tokens == 64 else 0
    return Row(f"mixture of experts {name}", f"{model.name}, {tokens} tokens, {what}", spec, tuple(peers),
               flops=0 if moved else spec.flops, nbytes=moved, given=model.routing(tokens))
