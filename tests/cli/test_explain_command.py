"""`tinygrad-nv explain`: one matmul at every level, and the kernels of a model."""
from __future__ import annotations

import re
from pathlib import Path

import pytest

from tinygrad_nv.explain import levels
from tinygrad_nv.language.passes import NAMES
from tinygrad_nv.ptx import assemble
from tinygrad_nv.ptx.emulator import Emulator
from tinygrad_nv.tile.limits import SMEM_BYTES

EXTENTS = "256x384x512"
ARCHITECTURES = ("sm_80", "sm_89", "sm_90a")


@pytest.fixture(autouse=True)
def no_schedules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedules are the cost model's, whatever was tuned on this machine."""
    monkeypatch.setenv("NV_SCHEDULES", str(tmp_path / "schedules.json"))


def gemm(command, *more: str) -> str: return command("explain", "--gemm", EXTENTS, *more).succeeded().out


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_matmul_as_a_table(command, arch: str):
    head, line = gemm(command, "--arch", arch).splitlines()
    assert head.split() == ["schedule", "predicted", "bound", "registers", "shared", "matmul"]
    assert line.startswith("gemm_wgmma" if arch == "sm_90a" else "gemm_mma")
    assert "µs" in line
    assert line.endswith("256x384x512 bf16 NT → bf16")


def test_the_spec_of_a_matmul(command):
    lines = gemm(command, "--level", "spec", "--dtype", "f16", "--majors", "NN", "--epilogue",
                 "bias+relu").splitlines()
    assert lines[0].startswith("256x384x512 f16 NN → f16, ")
    rows = {line[:8].strip(): line[10:] for line in lines[2:]}
    assert rows["extents"] == "m 256, n 384, k 512"
    assert rows["a"] == "f16, K-major, strides m 512, k 1; rows aligned to 16 B"
    assert rows["b"] == "f16, N-major, strides n 1, k 384; rows aligned to 16 B"
    assert rows["x0"] == "f16, strides m 0, n 1"
    assert rows["epilogue"] == "t0 = (sum + x0[n].f32)"
    assert lines[-1].strip() == "out = where((0 < t0), t0, 0).f16"


def test_a_long_epilogue_is_told_in_steps(command):
    """Of a row of a table, or a first line, as much as there is room for; the steps are whole."""
    lines = gemm(command, "--level", "spec", "--epilogue", "bias+gelu+residual").splitlines()
    assert len(lines[0]) == 110
    assert lines[0].endswith("…")
    assert max(map(len, lines[1:])) <= 110
    steps = [line.strip().removeprefix("epilogue").strip() for line in lines if " = " in line]
    assert [step.split(" = ")[0] for step in steps] == [*(f"t{i}" for i in range(len(steps) - 1)), "out"]
    assert all(f"t{i}" in "".join(steps[i + 1:]) for i in range(len(steps) - 1))
    assert gemm(command, "--epilogue", "bias+gelu+residual").splitlines()[1].endswith("…")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_how_a_matmul_is_computed(command, arch: str):
    text = gemm(command, "--level", "tile", "--arch", arch)
    rows = {line[:10].strip(): line[11:] for line in text.splitlines()[2:] if line[:1] != " "}
    needed = {"tiles", "steps", "stages", "grid", "predicted", "shared", "registers", "outline"}
    assert needed <= set(rows)
    assert ("maps" in rows) == (arch == "sm_90a")
    assert "waves" in rows["grid"]
    assert "bound: " in rows["predicted"]


def dynamic_smem(text: str) -> int:
    """The bytes that the first line of a kernel's text says."""
    found = re.match(r"// launch: dynamic_smem=(\d+) cluster=[12],1,1 pdl=[01]\n", text)
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_text_of_a_matmul_says_how_it_is_launched(command, arch: str):
    text = gemm(command, "--level", "ptx", "--arch", arch)
    assert dynamic_smem(text) <= SMEM_BYTES[arch]
    assert ("\n// tensormap: pointer=" in text) == (arch == "sm_90a")
    assert f".target {arch}" in text


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_what_ptxas_makes_of_a_matmul(command, arch: str):
    # 8192 along k: ptxas unrolls short loops away
    text = command("explain", "--gemm", "2048x2048x8192", "--level", "sass", "--arch", arch).succeeded().out
    head, loop, *code = text.splitlines()
    assert re.fullmatch(rf"// {len(code)} instructions, \d+ registers, \d+ bytes spilled", head)
    assert int(loop.split()[-4]) > 0
    assert any(("HGMMA" if arch == "sm_90a" else "HMMA") in line for line in code)


def test_without_ptxas_all_but_sass_is_there(command, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(assemble, "find_program", lambda name: None)
    monkeypatch.setattr(levels, "find_program", lambda name: None)
    assert "  -  " in gemm(command).splitlines()[1]
    assert "registers  - (no ptxas)" in gemm(command, "--level", "tile")
    command("explain", "--gemm", EXTENTS, "--level", "sass").refused(
        "ptxas is not there", "pip install 'tinygrad-nv[emulator]'")


def test_the_text_runs_on_the_emulator(command):
    """What is printed is the kernel and its launch: they compute."""
    asked = ("explain", "--gemm", "512x512x64", "--arch", "sm_80", "--dtype", "f16", "--level")
    text, table = (command(*asked, level).succeeded().out for level in ("ptx", "tile"))
    emu = Emulator("sm_80", check=False)
    out, a, b = emu.alloc(2 * 512 * 512), emu.alloc(2 * 512 * 64), emu.alloc(2 * 512 * 64)
    # of a sum that short nothing is split: no workspace
    grid = next(line for line in table.splitlines() if line.startswith("grid")).split()
    extents = tuple(int(extent) for extent in grid[1].split("x"))
    report = emu.launch(text, extents, int(grid[4]), [out, a, b], dynamic_smem=dynamic_smem(text))
    assert report.findings == []
    assert report.stats.tensor_flops == 2 * 512 * 512 * 64


# **** what cannot be ****

@pytest.mark.parametrize(("words", "said"), [
    (["--gemm", EXTENTS, "--dtype", "int4"], ["operands of dtype 'int4'", "one of bf16, f16"]),
    (["--gemm", EXTENTS, "--out", "int4"], ["a result of dtype 'int4'", "one of bf16, f16"]),
    (["--gemm", EXTENTS, "--majors", "NX"], ["majors 'NX'", "one of NN, NT, TN, TT"]),
    (["--gemm", EXTENTS, "--epilogue", "bias+swish"], ["'swish'", "relu"]),
    (["--gemm", EXTENTS, "--dtype", "f32"], ["no template takes 256x384x512 f32", "tf32"]),
    (["--gemm", EXTENTS, "--sm-count", "-1"], ["--sm-count -1"]),
    (["--gemm", EXTENTS, "somewhere"], ["a model (somewhere) and --gemm", "one of them"]),
    (["--gemm", "0x4x4"], ["m=0", "an extent ≥ 1"]),
    (["--gemm", EXTENTS, "--kernel", "1", "--device", "EMU"], ["--kernel, --device with --gemm", "leave it"]),
    (["--arch", "sm_80", "--sm-count", "9"], ["--arch, --sm-count without --gemm", "add --gemm"]),
    (["--prefill", "0"], ["--prefill 0", "1 to 512 tokens"]),
    (["--prefill", "100000"], ["--prefill 100000", "1 to 512 tokens"]),
    (["--prefill", "-1"], ["--prefill -1", "1 to 512 tokens"]),
    (["--kernel", "1"], ["--kernel without --level", "--level spec|tile|ptx|sass|c, or --pass"]),
    (["--gemm", EXTENTS, "--pass", "ptx"], ["--pass with --gemm", "--level spec|tile"]),
    (["--pass", "sass"], ["pass 'sass'", "all, or one of source, trace, masks", "places, c (CPU)"]),
    (["--pass", "ptx", "--level", "ptx"], ["--level with --pass", "leave one out"]),
    (["--program", "k.py:f", "--level", "ptx"], ["--level with --program"]),
    (["--program", "k.py:f", "--gemm", EXTENTS], ["--gemm and --program", "leave one out"]),
    (["--program", "k.py:f", "--epilogue", "relu"], ["--epilogue without --gemm"]),
    (["--program", "k.py:f", "--prefill", "9"], ["--prefill with --program", "options of one kernel"]),
    (["--program", "k.py"], ["--program k.py", "FILE.py:KERNEL"]),
    (["--program", "nowhere.py:f"], ["no file nowhere.py"]),
    (["--set", "N=3"], ["--set without --program"]),
])
def test_what_cannot_be_explained(command, words: list[str], said: list[str]):
    command("explain", *words).refused(*said)


@pytest.mark.parametrize(("words", "said"), [
    (["--gemm", "4096"], "'4096' is not [BATCHx]MxNxK; write 4096x4096x4096"),
    (["--level", "cubin"], "invalid choice: 'cubin'"), (["--arch", "sm_70"], "invalid choice: 'sm_70'")])
def test_words_that_are_refused_by_the_parser(command, words: list[str], said: str):
    command("explain", *words).refused(said)


# **** one kernel of a file ****

PROGRAM = """
from tinygrad_nv.language import *

@kernel(grid=lambda R, BM: (cdiv(R, BM),))
def rescale(x: KTile["R", "N", f32], out: OTile["R", "N", f32], *, by: float = 2.0, BM: int = 4):
    rows = tile.block(tile.program_id(0) * BM, BM)
    out[rows, :] = x[rows, :] * by

@kernel
def with_cache(q: KTile["S", "D", bf16], cache) -> OTile["S", "D", bf16]: return q[:, :]

@kernel
def of_any(x: KTile["N"], out: OTile["N", f32]): out[0] = 0
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    """A file with kernels, and the name of one."""
    (tmp_path / "rescale.py").write_text(PROGRAM)
    return f"{tmp_path / 'rescale.py'}:rescale"


@pytest.mark.parametrize("arch", [*ARCHITECTURES, "cpu"])
def test_a_kernel_of_a_file_as_a_table_of_its_passes(command, program: str, arch: str):
    sizes = ("--set", "R=50", "--set", "N=64", "--set", "by=3.5")
    asked = ("explain", "--program", program, *sizes, "--arch", arch)
    head, *lines = command(*asked).succeeded().out.splitlines()
    assert head == "pass" + " " * (head.index("lines") - 4) + "lines"
    names = [line.split()[0] for line in lines]
    assert names == [*NAMES["cpu" if arch == "cpu" else "gpu"]]
    assert len({line.index(line.split()[2]) for line in lines}) == 1     # columns are aligned
    for line in lines:
        text = command(*asked, "--pass", line.split()[0]).succeeded().out
        assert len(text.splitlines()) == int(line.split()[1])
    assert "value=0x1.c000000000000p+1" in command(*asked, "--pass", "trace").succeeded().out
    assert re.findall(r"^// \d+ (\w+): ", command(*asked, "--pass", "all").succeeded().out, re.M) == names


@pytest.mark.parametrize(("name", "words", "said"), [
    ("rescale", ["--set", "R=50"], ['the shape of x: KTile["R", "N", f32]', "sizes of N", "--set N=64"]),
    ("rescale", ["--set", "R=50", "--set", "N=4", "--set", "K=4"], ["K of kernel rescale", "some of R, N"]),
    ("rescale", ["--set", "R=50", "--set", "N=4", "--pass", "c"], ["pass 'c'", "ptx (GPU)"]),
    ("rescale", ["--set", "R=0", "--set", "N=4"], ["no elements"]),
    ("rescale", ["--set", "R"], ["--set R", "NAME=VALUE"]),
    ("other", [], ["has no kernel other", "one of rescale, with_cache, of_any"]),
    ("with_cache", ["--set", "S=8", "--set", "D=8"], ["argument cache of kernel", "kernel.passes(…)"]),
    ("of_any", ["--set", "N=8"], ["has no dtype", "add the dtype"])])
def test_kernels_of_files_that_cannot_be_explained(command, program: str, name: str, words: list[str],
                                                   said: list[str]):
    command("explain", "--program", program.replace(":rescale", f":{name}"), *words).refused(*said)


# **** models ****

def test_passes_of_a_model(command, tiny: Path):
    """Kernels of a record print passes where they are programs."""
    options = (tiny, "--device", "EMU", "--dtype", "bfloat16")
    found = command("explain", *options, "--pass", "layout").succeeded().out
    heads = re.findall(r"^// kernel (\d+) of \d+: (\w+) on EMU", found, re.M)
    assert {name for _, name in heads} == {"norm", "embedding", "kv_append"}
    assert found.count("value ") == len(heads)
    number = next(number for number, name in heads if name == "norm")
    one = command("explain", *options, "--pass", "trace", "--kernel", number).succeeded().out
    assert one.splitlines()[1].startswith("program norm(")
    command("explain", *options, "--pass", "trace", "--kernel", "nothing").refused("no kernel 'nothing'")


@pytest.mark.slow
def test_a_model_without_kernels_of_ours(command, tiny: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NV_CPU", "0")
    assert command("explain", tiny, "--level", "tile", "--device", "CPU").succeeded().out == (
        "no kernel of ours\n")
    command("explain", tiny, "--level", "tile", "--kernel", "3", "--device", "CPU").refused(
        "no kernel '3' of ours", "none: no kernel is ours", "run with DEV=EMU")


def test_products_of_a_model(command, tiny: Path):
    """A decode step and a prefill on the emulated GPU: rows of the table refer to lines of matmuls."""
    options = (tiny, "--device", "EMU", "--dtype", "bfloat16")
    for words, rows in (((), 1), (("--prefill", 24), 24)):
        table, matmuls = command("explain", *options, *words).succeeded().out.split("\n\n")
        numbers = {line.split()[-1] for line in table.splitlines() if line.split()[-2:-1] == ["matmul"]}
        listed = matmuls.splitlines()[1:]
        assert numbers == {line.split()[1].strip(",") for line in listed}
        assert len(numbers) >= 5
        # the last one makes the logits of one token
        assert all(f"  {rows}x" in line for line in listed[:-1])
    number = listed[0].split()[1].strip(",")
    first = command("explain", *options, "--level", "spec", "--kernel", number).succeeded().out
    assert first.startswith(f"// kernel {number} of ")
    assert f"k {listed[0].rpartition('x')[2].split()[0]}" in first
