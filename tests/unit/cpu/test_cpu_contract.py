"""What every template of the CPU keeps to: no bit of a result depends on the parts or their order, and the C
of every instruction set compiles, also of those that this processor lacks, and needs no library."""
from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tinygrad.device import Device
from tinygrad.dtype import dtypes
from tinygrad.runtime.support.elf import elf_loader

from tests.emu.tile.attention.test_flash_backward_scores import scores
from tests.support.cpu import cpu_backward_case, cpu_flash_case, cpu_gemv_case
from tests.support.cpu.cpu_quant_case import TYPES, matmul
from tests.support.tile import attention_case, backward_case
from tests.support.tile.attention_case import attention
from tests.support.tile.backward_case import backward
from tests.support.tile.decode_case import decode
from tests.support.tile.gemm_case import arguments, product
from tests.unit.cpu.test_cpu_gemv import gate
from tinygrad_nv.cpu.attention.backward.kernel import CPUFlashBackward
from tinygrad_nv.cpu.attention.flash import CPUFlash
from tinygrad_nv.cpu.decode.split import CPUDecode
from tinygrad_nv.cpu.gemm.schedules import Amx, CPUGemm, CPUGemv
from tinygrad_nv.cpu.isa import AMX, AVX2, AVX512, AVX512_BF16, ISA, PORTABLE
from tinygrad_nv.cpu.quant_gemm.schedules import QuantDots, QuantGemm, QuantGemv, QuantPanels
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.cpu.template import CPUSchedule
from tinygrad_nv.runtime.cpu.program import load
from tinygrad_nv.tile.attention.spec import Band
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.templates import TABLE
from tinygrad_nv.toolchain import compile_object

F32, BF16, E4M3 = dtypes.float32, dtypes.bfloat16, dtypes.fp8e4m3
BEST, EMULATED = cpu_gemv_case.BEST, ISA("amx", bf16=True, vnni=True, emulated=True)
CAUSAL = Band(last=0)
TRAINED = partial(attention, band=CAUSAL, lse=True)


def default(spec: Any, schedule: type[CPUSchedule], isa: ISA = BEST) -> Any:
    """What a template chooses by itself for two threads."""
    return next(iter(TABLE.find_template("cpu", schedule.template).candidates(spec, CPU(isa, 2))))


# **** parts ****

Results = Sequence[torch.Tensor | None]
Runs = Callable[[CPUSchedule, Sequence[int] | None], Results]


def dense(spec: GemmSpec) -> Runs:
    given = arguments(spec, integers=False)
    return lambda s, order: [cpu_gemv_case.run(load(TABLE.build(spec, s, CPU(s.isa, 2))), spec, given, order)]


def forward(spec: Any) -> Runs:
    given = attention_case.arguments(spec)
    return lambda s, order: cpu_flash_case.run(cpu_flash_case.loaded(spec, s), spec, given, order)


def gradients(spec: Any) -> Runs:
    given = backward_case.arguments(spec)

    def run(s: CPUSchedule, order: Sequence[int] | None) -> Results:
        made = cpu_backward_case.launched(spec, given, s, order)
        return [made[name] for name in backward_case.RESULTS]
    return run


GEMM = [{"parts": 1, "rows": 6, "block_m": 24, "block_n": 64, "block_k": 64}, {"parts": 2}, {"parts": 7},
        {"parts": 5, "rows": 3, "block_m": 9, "block_n": 32}]
TILES = {"block_m": 64, "block_n": 64}
PARTS: dict[str, tuple[Callable[[Any], Runs], Any, type[CPUSchedule], ISA, list[dict[str, int]]]] = {
    **{f"gemv of {m} rows, {majors}": (dense, product(m, 300, 257, F32, majors=majors, batch=(2,)), CPUGemv,
                                       BEST, [{"parts": 1}, {"parts": 3}, {"parts": 7, "block_n": 64}])
       for m in (1, 5) for majors in ("KK", "KM")},
    **{f"gemm of {name}": (dense, product(70, 130, 300, dtype, out=F32), CPUGemm, BEST, GEMM)
       for name, dtype in (("f32", F32), ("bf16", BF16))},
    "amx": (dense, product(150, 130, 600, out=F32), Amx, EMULATED,
            [*({"parts": parts, **TILES} for parts in (1, 3, 9)),
             {"parts": 2, "block_m": 160, "block_n": 32}]),
    "flash": (forward, TRAINED(150, 150, 64, F32, 1, 2, 3), CPUFlash, BEST,
              [{"parts": parts, "rows": 24, "heads": 2} for parts in (1, 3, 8)]),
    # six key heads: they are shared out among up to six parts, blocks of them among more
    "flash_backward": (gradients, backward(210, 260, 20, F32, batch=2, heads=3, group=2, band=Band(-150, 20),
                                           start=40, score=scores(50)["soft-cap"]), CPUFlashBackward, BEST,
                       [{"parts": parts, "block_m": 48, "block_n": 64} for parts in (3, 1, 2, 6, 7, 50)])}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", PARTS)
def test_bits_depend_on_neither_parts_nor_their_order(name: str):
    runs, spec, schedule, isa, changes = PARTS[name]
    run, first = runs(spec), replace(default(spec, schedule, isa), **changes[0])
    assert not TABLE.problems(spec, first, CPU(isa, 2))
    want = run(first, None)
    for change in changes:
        s = replace(first, **change)
        for order in (None, range(s.parts)[::-1], random.Random(s.parts).sample(range(s.parts), s.parts)):
            for one, other in zip(want, run(s, order), strict=True):
                assert one is other is None or torch.equal(one.view(torch.uint8), other.view(torch.uint8))


# **** machine code ****

COMPILED: dict[str, tuple[Any, type[CPUSchedule], dict[str, bool]]] = {
    "gemv by columns": (product(3, 50, 70, BF16, majors="KM"), CPUGemv, {}),
    "gemv by rows": (gate(50, 90, 1, BF16, "K"), CPUGemv, {}),
    "gemm": (product(33, 50, 90, BF16), CPUGemm, {}),
    "quant_gemv": (matmul(TYPES["nf4"], 3, 50, 96, BF16), QuantGemv, {}),
    "quant_gemm": (matmul(TYPES["gptq 2 bits"], 33, 50, 96, BF16), QuantGemm, {}),
    **{f"quant_dots of {name}": (matmul(replace(TYPES[name], layout="tiles"), 5, 50, 512, BF16, int8=True),
                                 QuantDots, {}) for name in ("Q6_K", "Q8_0")},
    **{f"{schedule.template} of {name}":
       (matmul(replace(TYPES[name].of_rows(), layout="tiles"), m, 50, 512, BF16), schedule, {})
       for name, m, schedule in (("nf4", 5, QuantDots), ("e4m3 blocks", 50, QuantPanels))},
    "flash": (replace(TRAINED(50, 150, 40, BF16), kept=200), CPUFlash, {}),
    "flash_backward": (backward(50, 70, 40, BF16, band=CAUSAL), CPUFlashBackward, {}),
    **{words: (decode(heads=3, group=5, s_q=3, d=80, d_v=40, pages=64, dtype=BF16, kv=E4M3, window=99),
               CPUDecode, {"divided": divided})
       for words, divided in (("decode", False), ("decode, divided", True))}}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("isa", [PORTABLE, AVX2, AVX512, AVX512_BF16, AMX], ids=str)
@pytest.mark.parametrize("name", COMPILED)
def test_every_level_compiles_without_libraries(name: str, isa: ISA):
    compiler, (spec, schedule, change) = Device["CPU"].renderer.compiler, COMPILED[name]
    made = TABLE.build(spec, replace(default(spec, schedule, isa), **change), CPU(isa, 2))
    for kernel in made.kernels:
        binary = compile_object(compiler.found, compiler.arguments, kernel.source)
        elf_loader(binary)  # refuses what is undefined
