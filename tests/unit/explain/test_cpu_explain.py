"""explain() of kernels on a CPU: instruction set, parts, predicted time, C; why others are tinygrad's."""
from __future__ import annotations

import pytest
from tinygrad.dtype import dtypes
from tinygrad.tensor import Tensor

from tinygrad_nv import explain
from tinygrad_nv.cpu import measure
from tinygrad_nv.cpu.gemm.schedules import CPUGemm, CPUGemv
from tinygrad_nv.cpu.isa import PORTABLE
from tinygrad_nv.cpu.kernel import header
from tinygrad_nv.cpu.measure import LAUNCH_SECONDS, Rates
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.cpu.template import CPUSchedule
from tinygrad_nv.errors import RequestError
from tinygrad_nv.explain import KernelRecord, Lowering, levels_cpu
from tinygrad_nv.explain.levels_cpu import CPUMatmul
from tinygrad_nv.tile.gemm.dense import dense

RATES = Rates(1e10, 1e11, 2e11, 4e11)


@pytest.fixture(autouse=True)
def rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured does not depend on the machine."""
    monkeypatch.setattr(measure, "rates", lambda machine: RATES)


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does the instruction set."""
    monkeypatch.setenv("NV_CPU_ISA", "portable")


def layer(dtype=dtypes.float32) -> Tensor:
    x, w = (Tensor.empty(rows, 512, dtype=dtype, device="CPU") for rows in (1, 1000))
    return x @ w.T


def test_a_kernel_has_isa_parts_and_predicted_time():
    kernel, = explain(layer()).kernels
    assert (kernel.template, kernel.isa) == ("gemv", "portable")
    assert kernel.parts == kernel.schedule.parts
    moved = 4 * (512 + 1000 + 512 * 1000)
    assert kernel.bytes == moved
    assert kernel.predicted_s == pytest.approx(moved / 1e10 + LAUNCH_SECONDS)


def test_the_table_and_its_total():
    out, other = layer(), Tensor.empty(64, device="CPU").sin()
    head, *rows, _ = str(explain(out, other)).split("\n\n")[0].splitlines()
    second, first = sorted(rows, key=lambda row: "matmul 1" in row)
    assert head.split()[:8] == ["kernel", "template", "device", "isa", "parts", "flops", "bytes", "predicted"]
    assert "portable" in first
    assert "207.4 µs  matmul 1" in first
    assert "no pattern matched" in second
    assert "portable" not in second
    lowering = explain(out)
    assert str(lowering).splitlines()[2].split()[-2:] == ["207.4", "µs"]
    assert lowering.predicted_s == lowering.kernels[0].predicted_s


def test_a_line_of_each_product():
    text = str(explain(layer())).split("\n\n")[1].splitlines()
    assert text[0].split() == ["schedule", "predicted", "bound", "matmul"]
    assert text[1].startswith("matmul 1  gemv portable")
    assert text[1].endswith("207.4 µs  memory  1x1000x512 f32 NT → f32")


def test_the_levels_of_a_product():
    lowering = explain(layer())
    kernel, = lowering.kernels
    assert lowering.show("spec").splitlines()[1] == "1x1000x512 f32 NT → f32"
    tile = lowering.show("tile")
    assert "predicted  207.4 µs, 4.9 GFLOP/s, bound: memory" in tile
    assert "memory 205.4 µs, arithmetic 10.2 µs, launch 2.0 µs" in tile
    assert "measured   10 GB/s read, 100 GFLOP/s" in tile
    assert kernel.show("c").rstrip() == kernel.source.rstrip()
    text = lowering.show("c")
    assert f"void {kernel.name}(" in text
    assert text.count('#include "vector.h"') == 1
    assert "load_f32(const float" not in text
    assert max(map(len, text.splitlines())) <= 130
    for level in ("ptx", "sass"):
        with pytest.raises(RequestError, match=f"{level.upper()} of {kernel.name} on CPU") as caught:
            lowering.show(level)
        assert "--level c" in str(caught.value)


def test_the_text_to_be_read_is_the_one_that_is_compiled():
    kernel, = explain(layer()).kernels
    named = '#include "vector.h"  // tinygrad_nv/cpu/vector.h'
    shown = levels_cpu.legible(kernel.source).replace(named, header("vector.h"))
    assert "".join(shown.split()) == "".join(kernel.source.split())
    wide = "  for (s64 i = 0; i < 2; i++) { const float x[2] = {1, 2}; y = x[i]; }"
    assert levels_cpu.legible(wide) == wide
    wide += " // a comment; of {several} (words"
    assert levels_cpu.legible(wide).splitlines() == [
        "  for (s64 i = 0; i < 2; i++) {", "    const float x[2] = {1, 2};", "    y = x[i];", "  }",
        "  // a comment; of {several} (words"]


def test_what_repeats_is_said_once():
    x, w, v = (Tensor.empty(*shape, device="CPU") for shape in ((1, 512), (512,), (512,)))
    first = (x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w).contiguous()
    between = (first + 1).contiguous()  # equal kernels one after the other are one line
    second = (between * (between.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * v).contiguous()
    lines = str(explain(second)).splitlines()
    assert "  kernel 1: 1x512: " in lines[1]
    assert lines[3].endswith("  kernel 1")


def test_a_record_without_a_machine_is_a_row_like_others():
    records = [KernelRecord("a", "t", "", "CPU", None, None, 1, 2),
               KernelRecord("b", "t", "", "CPU", None, None, 1, 2, cpu=CPU(PORTABLE, 2), parts=2,
                            predicted_s=0.5e-3)]
    head, a, b, total = str(Lowering(records)).splitlines()
    assert b.split() == ["b", "t", "CPU", "portable", "2", "1", "2", "500.0", "µs"]
    assert a.split() == ["a", "t", "CPU", "1", "2"]
    assert total.split()[-2:] == ["500.0", "µs"]
    assert head.split()[-2:] == ["predicted", "why"]


@pytest.mark.parametrize(("dtype", "schedule", "rate"), [
    ("f32", CPUGemm(), 1e11), ("bf16", CPUGemm(), 2e11), ("bf16", CPUGemv(), 1e11), ("s8", CPUGemm(), 4e11)],
    ids=str)
def test_the_rate_is_that_of_what_is_multiplied(dtype: str, schedule: CPUSchedule, rate: float):
    spec = dense(512, 512, 512, dtype)
    taken = levels_cpu.predict(spec, schedule, spec.flops, 0, RATES)
    assert taken == pytest.approx(spec.flops / rate + LAUNCH_SECONDS)


def test_a_product_bound_by_arithmetic():
    matmul = CPUMatmul(dense(8, 4096, 512, "f32"), CPUGemm(PORTABLE), CPU(PORTABLE, 1))
    assert levels_cpu._limiting_resource(matmul) == "memory"
    matmul = CPUMatmul(dense(512, 512, 512, "f32"), CPUGemm(PORTABLE), CPU(PORTABLE, 1))
    assert levels_cpu._limiting_resource(matmul) == "arithmetic"


# **** why not ****

def test_the_cpu_is_left_to_tinygrad(monkeypatch: pytest.MonkeyPatch):
    out = layer()
    monkeypatch.setenv("NV_CPU", "0")
    assert explain(out).kernels[0].reason == "NV_CPU=0 leaves the CPU to tinygrad"


def test_what_no_template_takes_is_said_with_its_kernel():
    x, w = (Tensor.empty(4, 64, dtype=dtypes.float64, device="CPU") for _ in range(2))
    kernel, = explain(x @ w.T).kernels
    assert kernel.template is None
    assert kernel.reason.startswith("gemm: no kernel multiplies f64; they take f32,")


# **** the command ****

@pytest.fixture(autouse=True)
def schedules(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NV_SCHEDULES", str(tmp_path / "schedules.json"))


def test_a_product_by_itself(command):
    words = ("explain", "--gemm", "4x256x512", "--dtype", "f32", "--arch", "cpu")
    head, line = command(*words).succeeded().out.splitlines()
    assert head.split() == ["schedule", "predicted", "bound", "matmul"]
    assert "portable" in line
    assert line.endswith("4x256x512 f32 NT → f32")
    assert "void " in command(*words, "--level", "c").succeeded().out
    assert "extents   m 4, n 256, k 512" in command(*words, "--level", "spec").succeeded().out
    assert "predicted " in command(*words, "--level", "tile").succeeded().out


def test_what_cannot_be_explained_of_a_cpu(command):
    words = ("explain", "--gemm", "4x256x512", "--dtype", "f32", "--arch", "cpu")
    command(*words, "--level", "ptx").refused("PTX of ", " on CPU", "--level c")
    command(*words, "--sm-count", "4").refused("--sm-count with --arch cpu", "leave it out")
    command("explain", "--gemm", "4x256x512", "--level", "c").refused("C of ", "on sm_90a", "--level ptx")


def test_an_instruction_set_that_is_not_there(command, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tinygrad_nv.cpu.isa.flags", frozenset)
    monkeypatch.setenv("NV_CPU_ISA", "avx512")
    command("explain", "--gemm", "4x256x512", "--arch", "cpu").refused(
        "NV_CPU_ISA=avx512: ", "one of portable\n", "unset NV_CPU_ISA")
