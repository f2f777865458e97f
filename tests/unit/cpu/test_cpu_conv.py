"""Convolutions and group norm of every instruction set that this processor has: whole numbers to the bit,
others against float64, the same bits for other numbers of parts; the C of other sets compiles."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tinygrad.device import Device
from tinygrad.dtype import dtypes
from tinygrad.helpers import Context
from tinygrad.runtime.support.elf import elf_loader

from tests.support.tile.reference_case import Given, right, run, same, storages
from tinygrad_nv.cpu.isa import AVX2, AVX512, AVX512_BF16, PORTABLE, why_not
from tinygrad_nv.cpu.target import CPU, host
from tinygrad_nv.tile.conv.spec import ConvSpec
from tinygrad_nv.tile.expression import Load, Sum, silu
from tinygrad_nv.tile.group_norm.spec import GroupNormSpec
from tinygrad_nv.tile.templates import TABLE
from tinygrad_nv.toolchain import compile_object

F32, BF16, F16 = dtypes.float32, dtypes.bfloat16, dtypes.float16
HERE = replace(host(), threads=2)
TARGETS = [replace(HERE, isa=isa) for isa in dict.fromkeys((HERE.isa, PORTABLE, AVX2))
           if not why_not(isa.level)]


def conv(*extents: int, kernel: tuple[int, int] = (3, 3), stride: tuple[int, int] = (1, 1),
         padding: tuple[int, int, int, int] = (1, 1, 1, 1), dtype: Any = F32, **more: Any) -> ConvSpec:
    """A convolution of B, H, W, C, O."""
    b, h, w, c, o = extents
    return ConvSpec(b, h, w, c, o, kernel, stride, padding, dtype, **more)


BIAS = Sum() + Load(0, F32, 0, 1)
PLAIN = {
    "3x3": conv(2, 7, 5, 20, 40), "f16": conv(1, 7, 5, 20, 40, dtype=F16),
    "3x3 bf16, odd channels": conv(2, 6, 5, 7, 19, dtype=BF16),
    "stride 2, padding below": conv(1, 9, 8, 6, 24, stride=(2, 2), padding=(0, 1, 0, 1)),
    "1x1": conv(2, 6, 7, 33, 16, kernel=(1, 1), padding=(0,) * 4),
    "one row, 1x5": conv(1, 1, 40, 9, 12, kernel=(1, 5), stride=(1, 3), padding=(0, 0, 2, 2)),
    "filters of the image's size": conv(2, 4, 4, 3, 10, kernel=(4, 4), padding=(0,) * 4),
    "padding wider than the image": conv(1, 2, 1, 4, 8, padding=(3, 4, 2, 5)),
    "several blocks": conv(1, 20, 17, 70, 90)}
FUSED = {"bias, residual, silu": conv(1, 5, 6, 8, 24, epilogue=silu(BIAS + Load(1, F32, 24, 1))),
         "bias f16": conv(1, 5, 6, 8, 24, dtype=F16,
                          epilogue=(Sum() + Load(0, F16, 0, 1).cast(F32)).cast(F16))}
NORMS = {
    "shift, silu": GroupNormSpec(2, 63, 32, 8, 1e-5, True, F32, F32, F32),
    "odd": GroupNormSpec(1, 13, 21, 3, 1e-6, False, F32, F32),
    "one group": GroupNormSpec(2, 5, 70, 1, 1e-5, True, F16, F16),
    "a group each": GroupNormSpec(1, 150, 12, 12, 1e-5, False, BF16, F32, BF16)}
CASES = [(name, target) for name in (*PLAIN, *FUSED)
         for target in (TARGETS if name.startswith("3x3") else TARGETS[:1])]


@pytest.fixture(autouse=True)
def in_order() -> Iterator[None]:
    """Sums of references are from first to last, and compiled sooner."""
    with Context(NOOPT=1): yield


def ran(spec: Any, target: CPU, given: Given, parts: int = 1) -> dict[str, torch.Tensor]:
    schedule = TABLE.choose(spec, target)
    assert schedule is not None
    return run(spec, replace(schedule, parts=parts), target, given)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("name", "target"), CASES, ids=lambda x: x if isinstance(x, str) else x.arch)
def test_convolutions(name, target):
    spec = {**PLAIN, **FUSED}[name]
    given = storages(spec, seed=len(name))
    made = ran(spec, target, given)
    right(spec, given, made)
    if target is TARGETS[0]: assert torch.equal(ran(spec, target, given, 3)["out"], made["out"])
    if name in PLAIN:
        given = storages(spec, integers=True)
        same(spec, given, ran(spec, target, given))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NORMS)
def test_group_norms(name):
    spec = NORMS[name]
    given = storages(spec, seed=len(name))
    for target in TARGETS:
        made = ran(spec, target, given)
        right(spec, given, made)
        assert torch.equal(ran(spec, target, given, 3)["out"], made["out"])


def test_group_norm_of_large_means_and_many_positions():
    spec = GroupNormSpec(1, 20000, 8, 2, 1e-5, False, F32, F32)
    given = storages(spec)
    given["x"].mul_(3).add_(1000)
    out = ran(spec, HERE, given)["out"]
    f = given["x"].double().view(1, 20000, 2, 4)
    f = (f - f.mean((1, 3), keepdim=True)) / (f.var((1, 3), keepdim=True, unbiased=False) + 1e-5).sqrt()
    wanted = f.view(1, 20000, 8) * given["weight"].double() + given["bias"].double()
    # x is off by 2⁻²⁴ · 1000 where it is multiplied by about 1/3, twice
    assert (out - wanted).abs().max() < 2e-4


def test_a_row_has_the_same_bits_in_a_larger_batch():
    spec = conv(1, 7, 5, 20, 40)
    several, given = replace(spec, batch=3), storages(replace(spec, batch=3))
    ordered = TABLE.choose_ordered(several, HERE), TABLE.choose_ordered(spec, HERE)
    assert None not in ordered
    many, one = (run(which, each.schedule, HERE, {**given, "x": given["x"][:which.batch * 700],
                                                  "out": given["out"][:which.batch * 1400]})["out"]
                 for which, each in zip((several, spec), ordered, strict=True))
    assert torch.equal(many[:35], one)


@pytest.mark.parametrize("isa", [PORTABLE, AVX2, AVX512, AVX512_BF16], ids=str)
def test_c_compiles(isa):
    compiler: Any = Device["CPU"].renderer.compiler
    for spec in (PLAIN["3x3 bf16, odd channels"], NORMS["one group"]):
        target = CPU(isa, 2)
        made = TABLE.build(spec, TABLE.choose(spec, target), target)
        # refuses what is undefined
        elf_loader(compile_object(compiler.found, compiler.arguments, made.source))
