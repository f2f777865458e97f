"""Levels of explain(): records of matmuls on DEV=EMU, their kernels built again, what each level says.
Equal layers of a model are one block of explain's table, and the totals are those of all. Hashes of
steps: the same in any process, others where a graph or a schedule differs."""
from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinygrad.helpers import Context

from tinygrad_nv import Tensor, dtypes, explain
from tinygrad_nv.errors import RequestError, ScheduleError, ToolchainError
from tinygrad_nv.explain import KernelRecord, Lowering, levels, repetitions
from tinygrad_nv.explain import explain as explain_tensors
from tinygrad_nv.explain.levels import ScheduledGemm, show
from tinygrad_nv.patterns.program import Output, call, program
from tinygrad_nv.patterns.target import Chosen
from tinygrad_nv.runtime.note import Note
from tinygrad_nv.tile.gemm.dense import dense
from tinygrad_nv.tile.gemm.schedules import GemmSchedule, Mma, Wgmma

MMA = Mma().block(64, 64).k(32).warps(2, 2).stages(3)
WGMMA = Wgmma().block(128, 64).stages(3)
GATE = dense(96, 64, 128, "bf16", epilogue="gate")


@pytest.fixture
def emu() -> Iterator[None]:
    with Context(DEV="EMU"): yield


def multiplied(x: Tensor, w: Tensor, schedule: GemmSchedule = MMA, reason: str = "x @ w.T") -> Tensor:
    """x @ w.T by a kernel of ours."""
    spec = dense(x.shape[0], w.shape[0], x.shape[1], "f16")
    kernel = ScheduledGemm(spec, schedule, "sm_90a", 132).kernel
    return Tensor(call(kernel, "EMU", [Output((spec.m, spec.n), dtypes.half)], [x.uop, w.uop],
                         flops=spec.flops, note=Note(f"gemm_{schedule.template}", reason, spec, schedule))[0])


def halves(*shape: int) -> Tensor: return Tensor.ones(*shape, dtype=dtypes.half).contiguous().realize()


@pytest.fixture
def lowering(emu: None) -> Lowering:
    """Two matmuls by mma.sync that are one kernel, one by wgmma, one kernel of another kind."""
    x, w, v = halves(96, 128), halves(64, 128), halves(64, 64)
    first = multiplied(x, w)
    again = multiplied(multiplied((x + 1).contiguous(), w), v, WGMMA)
    text = ".version 7.8\n.target sm_80\n.visible .entry nothing(.param .u64 o, .param .u64 i)\n{\nret;\n}\n"
    other = Tensor(program("nothing", text, "EMU", [Output((4,), dtypes.half)], [w.uop],
                           note=Note("other", "no matmul", "a spec", "a schedule"))[0])
    return explain(first, again, other)


# **** records ****

@pytest.mark.parametrize("schedule", [MMA, WGMMA], ids=str)
def test_a_note_leads_to_the_kernel_that_runs(emu: None, schedule: GemmSchedule):
    record, = explain(multiplied(halves(96, 128), halves(64, 128), schedule)).kernels
    clusters = ((2, 66), (4, 31), (8, 15))  # that the device has room for
    assert record.matmul == ScheduledGemm(dense(96, 64, 128, "f16"), schedule, "sm_90a", 132, clusters)
    assert record.matmul.kernel.ptx == record.source
    assert record.matmul.kernel.launch == record.launch
    Chosen.build.cache_clear()
    assert record.matmul.kernel.ptx == record.source


@pytest.mark.parametrize(("arch", "device"), [("sm_80", "EMU:80"), ("sm_90a", "EMU:90")])
def test_the_kernel_of_a_product_that_a_pattern_found(arch: str, device: str,
                                                      monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("EMU_ARCH", arch)  # read when the device is opened, here alone
    x, w = (Tensor.empty(rows, 128, dtype=dtypes.half, device=device) for rows in (96, 64))
    record, = explain((x @ w.T).relu()).kernels
    assert record.matmul is not None
    assert record.matmul.arch == arch
    assert record.matmul.kernel.ptx == record.source


def test_records_of_others_are_no_products(lowering: Lowering):
    kinds = {record.name: record.matmul is not None for record in lowering.kernels}
    assert kinds.pop("nothing") is False
    assert kinds.pop("gemm_mma") is kinds.pop("gemm_wgmma") is True
    assert not any(kinds.values()), "tinygrad's"


def test_kernels_that_differ_in_buffers_alone_are_one(lowering: Lowering):
    assert [(record.name, times) for record, times in lowering.distinct] == [
        (name, 2 if name == "gemm_mma" else 1)
        for name in dict.fromkeys(k.name for k in lowering.kernels if k.template)]
    assert len(lowering.distinct) == 3


def test_the_table_has_a_line_for_each_product(lowering: Lowering):
    table, matmuls = str(lowering).split("\n\n")
    assert table.splitlines()[-1].split()[:4] == [str(len(lowering.kernels)), "in", "all", "4"]
    head, *lines = matmuls.splitlines()
    assert head.split() == ["schedule", "predicted", "bound", "registers", "shared", "matmul"]
    at = head.index("schedule")
    found = [(i, *pair) for i, pair in enumerate(lowering.distinct, 1) if pair[0].matmul]
    for (i, record, times), line in zip(found, lines, strict=True):
        assert line[:at].strip() == f"matmul {i}" + (f", {times} times" if times > 1 else "")
        assert line[at:].startswith(str(record.schedule))
        assert line.endswith(str(record.spec))
        assert sum(row.startswith(record.name) and row.endswith(f"  matmul {i}")
                   for row in table.splitlines()) == times


# **** show ****

@pytest.mark.parametrize("level", ["spec", "tile", "ptx"])
def test_each_kernel_of_ours_is_shown_once(lowering: Lowering, level: str):
    text = lowering.show(level)
    heads = [line for line in text.splitlines() if line.startswith("// kernel ")]
    assert [head.split()[5] for head in heads] == [record.name for record, _ in lowering.distinct]
    assert heads[0].startswith("// kernel 1 of 3: ")
    assert sum(head.endswith("on EMU, 2 times") for head in heads) == 1
    for record, _ in lowering.distinct: assert record.show(level).rstrip() in text


def test_one_kernel_by_number_or_by_name(lowering: Lowering):
    names = [record.name for record, _ in lowering.distinct]
    for number, name in enumerate(names, 1):
        text = lowering.show("tile", name)
        assert text == lowering.show("tile", number) == lowering.show("tile", str(number))
        assert text.startswith(f"// kernel {number} of 3: {name}")
    with pytest.raises(RequestError, match="no kernel 'gemm' of ours") as caught: lowering.show("ptx", "gemm")
    assert all(f"({name})" in caught.value.expected for name in names)


def test_a_kernel_that_is_no_product_has_its_note_and_its_text(lowering: Lowering):
    other = next(record for record in lowering.kernels if record.name == "nothing")
    assert (other.show("spec"), other.show("tile")) == ("a spec", "a schedule")
    assert other.show("ptx").startswith("// launch: dynamic_smem=0 cluster=1,1,1 pdl=0\n.version 7.8")


def test_machine_code_of_every_kernel_of_ours(lowering: Lowering):
    text = lowering.show("sass")
    assert text.count("EXIT") >= 3
    assert {"HMMA", "HGMMA"} <= {word.partition(".")[0] for word in text.split()}


def test_a_level_there_is_not(lowering: Lowering):
    for shown in (lowering, *lowering.kernels):
        with pytest.raises(RequestError, match="level 'cubin'") as caught: shown.show("cubin")
        assert caught.value.expected == "one of spec, tile, ptx, sass, c"


def test_no_kernel_of_ours():
    assert Lowering([]).show("tile") == "no kernel of ours"
    with pytest.raises(RequestError, match="no kernel 1 of ours"): Lowering([]).show("tile", 1)


def test_machine_code_of_a_kernel_for_a_cpu():
    record = KernelRecord("k", "silu_mul", "", "CPU", None, None, 0, 0, "void k() {}")
    assert record.show("c") == "void k() {}"
    for level in ("ptx", "sass"):
        with pytest.raises(RequestError, match=f"{level.upper()} of k on CPU"): record.show(level)


def test_c_of_a_kernel_for_a_gpu(lowering: Lowering):
    for shown in (lowering, *lowering.kernels):
        with pytest.raises(RequestError, match=r"C of \w+ on") as caught: shown.show("c")
        assert "--level ptx" in str(caught.value)


# **** what the levels say ****

def test_the_spec_of_a_gate():
    assert show(ScheduledGemm(GATE, MMA, "sm_80", 108), "spec").splitlines()[2:] == [
        "extents   m 96, n 64, k 128",
        "parts     2 of b, 8192 elements apart",
        "a         bf16, K-major, strides m 128, k 1; rows aligned to 16 B",
        "b         bf16, K-major, strides n 128, k 1; rows aligned to 16 B",
        "out       bf16, N-major, strides m 64, n 1",
        "sums      f32",
        "work      3.1 MFLOP, at least 68 KiB moved",
        "epilogue  out = ((sum * reciprocal((1 + exp2((sum * -1.4427))))) * sum1).bf16"]


def test_a_batch_a_broadcast_and_rows_known_at_launch():
    spec = dense(40, 64, 128, "e4m3", batch=(2, 3), symbolic=True)
    lines = show(ScheduledGemm(spec, WGMMA, "sm_90a", 132), "spec").splitlines()
    assert lines[2] == "extents   m at most 40, n 64, k 128, batch 2x3"
    assert "batch 15360 5120" in lines[3]


@pytest.mark.parametrize(("schedule", "arch"), [(MMA, "sm_80"), (WGMMA, "sm_90a")], ids=str)
def test_shared_memory_is_accounted_for(schedule: GemmSchedule, arch: str):
    matmul = ScheduledGemm(dense(96, 64, 256), schedule, arch, 100)
    pieces = levels.map_shared_memory(matmul.kernel.ptx)
    assert all(start + size <= after for (start, _, size), (after, _, _) in pairwise(pieces))
    assert levels.smem_bytes(matmul) == pieces[-1][0] + pieces[-1][2]
    rings = sum(size for _, name, size in pieces if "ring" in name)
    assert rings == schedule.depth * schedule.stage_bytes(2)
    if matmul.kernel.dynamic_smem: assert levels.smem_bytes(matmul) == matmul.kernel.dynamic_smem


def test_maps_are_those_of_the_launch():
    matmul = ScheduledGemm(dense(96, 64, 256), WGMMA, "sm_90a", 100)
    text = show(matmul, "tile")
    for argument in matmul.kernel.maps:
        assert f"pointer {argument.pointer}: bf16 {'x'.join(map(str, argument.dims))}" in text
    assert "map_a, pointer 1" in text
    assert "map_b, pointer 2" in text


def test_the_outline_is_the_remarks_of_the_kernel():
    text = "{\n    // a_smem+0: ring[5]\n    // first\n        // rows 0\n    mov;\n        // rows 8\n}\n"
    assert levels.outline(text) == ["first", "  rows 0"]


def test_registers_are_those_of_ptxas():
    matmul = ScheduledGemm(dense(96, 64, 256), MMA, "sm_80", 108)
    found = levels.resources(matmul)
    assert found is not None
    assert f"registers  {found.registers} a thread, 0 bytes spilled" in show(matmul, "tile")
    head, line = levels.table([("1", matmul)])
    end = head.index("registers") + len("registers")
    assert line[:end].split()[-1] == str(found.registers)


def test_without_ptxas(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(levels, "find_program", lambda name: None)
    monkeypatch.setattr("tinygrad_nv.ptx.assemble.find_program", lambda name: None)
    matmul = ScheduledGemm(dense(96, 64, 256), MMA, "sm_80", 108)
    assert levels.resources(matmul) is None
    assert "registers  - (no ptxas)" in show(matmul, "tile")
    with pytest.raises(ToolchainError, match="ptxas is not there"): show(matmul, "sass")


def test_an_impossible_schedule_is_refused_with_the_arithmetic():
    matmul = ScheduledGemm(dense(96, 64, 256), MMA.block(100, 64), "sm_80", 108)
    with pytest.raises(ScheduleError): show(matmul, "tile")
    assert "m 96, n 64, k 256" in show(matmul, "spec")


def test_figures():
    assert [levels.seconds(x) for x in (1.25e-6, 999e-6, 0.0123)] == ["1.2 µs", "999.0 µs", "12.30 ms"]
    assert [levels.nbytes(x) for x in (0, 1023, 1024, 3 << 20)] == ["0 B", "1023 B", "1 KiB", "3 MiB"]


@pytest.mark.parametrize(("text", "found"), [
    ("", []),
    ("abc", [(0, 1, 1), (1, 1, 1), (2, 1, 1)]),
    ("aab", [(0, 1, 2), (2, 1, 1)]),
    ("eabcabcabcz", [(0, 1, 1), (1, 3, 3), (10, 1, 1)]),
    ("aabaab", [(0, 3, 2)]),
    ("abababab", [(0, 2, 4)]),
])
def test_repetitions(text: str, found: list[tuple[int, int, int]]):
    assert repetitions(text) == found


def test_repetitions_are_the_sequence():
    numbers = random.Random(0)
    for _ in range(200):
        row = numbers.choices("ab", k=numbers.randrange(20))
        assert [each for start, length, times in repetitions(row)
                for each in row[start:start + length] * times] == row


def test_layers_are_one_block():
    x = Tensor(np.ones((4, 64), np.float32), device="CPU").realize()
    weights = [Tensor(np.ones((64, 64), np.float32), device="CPU").realize() for _ in range(6)]
    for weight in weights: x = (x.softmax() @ weight).contiguous()
    lowering = explain(x)
    assert len(lowering.kernels) == 12
    assert [(len(block), times) for block, times in lowering.blocks] == [(2, 6)]
    lines = str(lowering).splitlines()
    assert lines[1].strip() == "2 kernels × 6:"
    assert lines[2].startswith("  ")
    total = next(line for line in lines if line.startswith("12 in all"))
    assert f"{sum(kernel.flops for kernel in lowering.kernels):,}" in total
    assert "12 ours" in total


def test_one_kernel_again_and_again():
    x = Tensor(np.ones((4, 64), np.float32), device="CPU").realize()
    for _ in range(5): x = x.softmax().contiguous()
    assert " × 5 " in str(explain(x)).splitlines()[1]


PROGRAM = """
from tinygrad import Tensor
from tinygrad_nv import explain
for _ in range(3): (Tensor.ones(7, 5).contiguous() * 3).realize()      # another history
print(explain(step()).hash)
"""
STEP = """
def step(n=64, dtype="float32", scale=2.0):
    from tinygrad import Tensor, dtypes
    x, w = (Tensor.empty(n, 96, dtype=getattr(dtypes, dtype), device="CPU") for _ in range(2))
    return ((x @ w.T).relu() * scale).softmax().contiguous().cumsum(1)
"""
scope: dict[str, Any] = {}
exec(STEP, scope)


def lowering_of(**changes: Any) -> Lowering: return explain_tensors(scope["step"](**changes))


def test_another_process_has_the_same_hash() -> None:
    wanted = lowering_of().hash
    for seed in ("1", "2"):
        done = subprocess.run([sys.executable, "-c", STEP + PROGRAM], capture_output=True, text=True,
                              check=True, env={**os.environ, "PYTHONHASHSEED": seed})
        assert done.stdout.strip() == wanted


def test_what_differs_has_another_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [lowering_of(**each).hash for each in ({}, {"n": 65}, {"dtype": "bfloat16"}, {"scale": 3.0})]
    monkeypatch.setenv("NV_NORM", "0")
    found.append(lowering_of().hash)
    monkeypatch.setenv("NV_CPU_ISA", "portable")    # another schedule
    found.append(lowering_of().hash)
    assert len(set(found)) == len(found)


def test_kernels_of_tinygrad_count() -> None:
    x = Tensor.empty(100, device="CPU")
    assert explain_tensors(x.cumsum()).hash != explain_tensors(x.cumsum() + 1).hash
    assert explain_tensors(x.cast(dtypes.int32)).hash == explain_tensors(x.cast(dtypes.int32)).hash


def test_the_command(command: Any, tiny: Path) -> None:
    lines = command("explain", tiny, "--hash", "--device", "CPU").succeeded().out.splitlines()
    assert lines[0].split() == ["kernel", "graph", "schedule", "times"]
    assert lines[-1].startswith("step ")
    assert lines == command("explain", tiny, "--hash", "--device", "CPU").succeeded().out.splitlines()
    other = command("explain", tiny, "--hash", "--prefill", "9", "--device", "CPU").succeeded().out
    assert other.splitlines()[-1] != lines[-1]
    command("explain", tiny, "--hash", "--level", "c").refused("--hash with")
