"""Rows of timing/table.py: attention and its gradient beside FlashAttention-3's and Triton's.

Problems are those of FlashAttention-3's paper: 16384 tokens in all, 2048 columns of all heads, float16 as
[batch, tokens, heads, d], with l; its figures count half the work for a causal mask. FlashAttention-3: its
release of July 2024 (timing/fa3.py) for the forward pass of 16 bits; what the release has not yet, e4m3 and
a backward pass of its own, as in 2025 (fa3_current.cu: hopper/ with CUTLASS 4.x). Of e4m3 a head has one
scale. Of a gradient the main kernel counts: delta is given, and dq is left in float32, which is zero before.
Triton: attention_peers.py, bfloat16 as [batch, heads, tokens, d], beside some rows without a mask alone: a
launch of a program for each block is predicted from few of them, which under a causal mask tell too little.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from bench.lib.attention_peers import KERNELS, Flash
from bench.lib.specs import BF16, F16, attention, backward, with_fp8_scales
from bench.timing import fa3 as timing_fa3
from bench.timing import programs as timing_programs
from bench.timing.gate_cases import CAUSAL, GPU_NAME
from bench.timing.rows import Checkouts, Launches, Peer, Row
from bench.timing.triton_times import Array, Given, predict
from tinygrad_nv.ptx.timing.model import Timing
from tinygrad_nv.tile.attention.backward_spec import BackwardSpec
from tinygrad_nv.tile.attention.spec import FULL, AttentionSpec

ALL, COLUMNS = 16384, 2048
Tokens = dict[int, tuple[int, ...]]  # by head size
FORWARD: Tokens = {128: (1024, 2048, 4096, 8192, 16384), 64: (1024, 4096, 16384), 256: (1024, 4096, 16384)}
EIGHTS: Tokens = {128: (1024, 4096, 16384)}
BACKWARD: Tokens = {128: (2048, 16384), 64: (2048, 16384)}
WITH_TRITON = {"attention": 4096, "attention gradient": 2048}
LEFT_OUT = ("VARLEN", "PAGEDKV", "APPENDKV", "LOCAL", "SPLIT", "SOFTCAP", "PACKGQA")
FLAGS = ("-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED", "-DCUTLASS_ENABLE_GDC_FOR_SM90",
         *(f"-DFLASHATTENTION_DISABLE_{name}" for name in LEFT_OUT))
# block, warps, stages: the best of seven each
TRITON, TRITON_BACKWARD = ((64, 64), 4, 3), {64: ((64, 64), 4, 3), 128: ((64, 64), 4, 2)}


def spec_of(d: int, causal: bool, tokens: int) -> AttentionSpec:
    return attention(tokens, tokens, d, F16, ALL // tokens, COLUMNS // d, band=CAUSAL if causal else FULL,
                     bshd=True, lse=True)


def eights_of(d: int, causal: bool, tokens: int) -> AttentionSpec:
    spec = attention(tokens, tokens, d, F16, ALL // tokens, COLUMNS // d, out=BF16, bshd=True,
                     band=CAUSAL if causal else FULL, lse=True)
    return with_fp8_scales(spec, 0)


def backward_of(d: int, causal: bool, tokens: int) -> BackwardSpec:
    return backward(tokens, tokens, d, F16, batch=ALL // tokens, heads=COLUMNS // d,
                    band=CAUSAL if causal else FULL, bshd=True)


def of_release(d: int, causal: bool, tokens: int, checkouts: Checkouts) -> Launches:
    there = checkouts["flash_attention"]
    return [timing_fa3.predict(timing_fa3.build(there.folder, there.include, d), causal, tokens)]


def of_2025(gradient: bool, d: int, causal: bool, tokens: int, checkouts: Checkouts) -> Launches:
    """Its longest launch: of a backward pass the two around it make delta, and round dq."""
    there = checkouts["flash_attention_2025"]
    text = Path(__file__).with_name("fa3_current.cu").read_text()
    flags = [*FLAGS, *["-DBACKWARD"] * gradient, f"-DHEAD_DIM={d}"]
    made = timing_programs.program(f"fa3_{'backward' if gradient else 'e4m3'}_{d}", text,
                                   (there.folder / "hopper", *there.include), flags)
    return [max(timing_programs.launches(made, tokens, int(causal)), key=lambda one: one.seconds)]


def of_triton(flashes: Sequence[Flash], tokens: int, checkouts: Checkouts) -> Launches:
    return [of_flash(flash, tokens) for flash in flashes]


def of_flash(flash: Flash, tokens: int) -> Timing:
    return predict_flash(flash, tokens, ALL // tokens * (COLUMNS // flash.d))


def predict_flash(flash: Flash, tokens: int, heads: int, gpu: str = GPU_NAME) -> Timing:
    """Predicts a launch of Triton's attention on heads of all sequences."""
    fn, fixed = KERNELS[flash.what], flash.constants
    numbers: dict[str, Given] = {"S": tokens, "scale": 0.1, "root": 0.1}
    def argument(name: str) -> Given:
        if name in numbers: return numbers[name]
        if name in ("log", "delta"): return Array("fp32", (heads * tokens,))
        return Array("bf16", (heads * tokens, flash.d), flash.box(name) if flash.descriptors else ())
    rows = flash.block[flash.what == "dk, dv"]
    return predict(fn, {name: argument(name) for name in fn.arg_names if name not in fixed},
                   (tokens // rows, heads), fixed, gpu, num_warps=flash.warps, num_stages=flash.stages)


def rows() -> Iterator[Row]:
    """Forward by head size, e4m3, then the gradient."""
    for name, make, heads, passes in (("attention", spec_of, FORWARD, 2),
                                      ("attention e4m3", eights_of, EIGHTS, 2),
                                      ("attention gradient", backward_of, BACKWARD, 5)):
        for d, causal, tokens in problems(heads):
            words = f"d {d}{', causal' if causal else ''}, {tokens} tokens"
            # as the paper counts them: half for a causal mask
            flops = passes * 2 * ALL * tokens * COLUMNS // (2 if causal else 1)
            yield Row(name, words, make(d, causal, tokens), tuple(peers(name, d, causal, tokens)), flops)


def problems(heads: Tokens) -> Iterator[tuple[int, bool, int]]:
    """Head sizes, masks, tokens."""
    for d, counts in heads.items():
        for causal in (False, True):
            for tokens in counts: yield d, causal, tokens


def peers(name: str, d: int, causal: bool, tokens: int) -> Iterator[Peer]:
    """Returns the peers of a problem."""
    gradient = name == "attention gradient"
    if name == "attention":
        yield Peer("FlashAttention-3", partial(of_release, d, causal, tokens), "flash_attention")
    else:
        yield Peer("FlashAttention-3 of 2025", partial(of_2025, gradient, d, causal, tokens),
                   "flash_attention_2025")
    if causal or WITH_TRITON.get(name) != tokens: return
    flashes = [Flash(what, d, *TRITON_BACKWARD[d]) for what in ("dk, dv", "dq")] if gradient else \
        [Flash("forward", d, *TRITON, descriptors=True)]
    yield Peer(str(flashes[0]), partial(of_triton, flashes, tokens))
