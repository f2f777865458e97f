"""`tinygrad-nv ptx check` and `ptx stats`: what they print, what they refuse, and how they end."""
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tinygrad_nv.cli import main

SCALE = """.version 8.0
.target sm_80
.address_size 64
.visible .entry scale(.param .u64 x, .param .u64 out, .param .f32 by, .param .u32 n)
{
    .reg .pred %p; .reg .b32 %r<4>; .reg .b64 %d<4>; .reg .f32 %f<3>;
    ld.param.u64 %d0, [x]; ld.param.u64 %d1, [out]; ld.param.f32 %f0, [by]; ld.param.u32 %r0, [n];
    mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x; mad.lo.u32 %r1, %r1, %r2, %r3;
    setp.ge.u32 %p, %r1, %r0;
    @%p bra END;
    mad.wide.u32 %d2, %r1, 4, %d0; mad.wide.u32 %d3, %r1, 4, %d1;
    ld.global.f32 %f1, [%d2];
    mul.f32 %f2, %f1, %f0;
    st.global.f32 [%d3], %f2;
END: ret;
}
"""
ARGS = ["--grid", "4", "--block", "64", "--arg", "arange:f32:200", "--arg", "empty:800", "--arg", "1.5",
        "--arg"]


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "scale.ptx").write_text(SCALE)
    return str(tmp_path / "scale.ptx")


def test_a_sound_kernel(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = str(tmp_path / "out.npy")
    assert main(["ptx", "check", file, *ARGS, "200", "--save", f"1={out}"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("no findings\n")
    assert "global bytes read" in said.out
    assert "st.global.f32" in said.out
    assert said.err == ""
    np.testing.assert_array_equal(np.load(out).view(np.float32), 1.5 * np.arange(200))


def test_a_kernel_with_a_bug(file: str, capsys: pytest.CaptureFixture[str]):
    assert main(["ptx", "check", file, *ARGS, "201"]) == 1
    assert "out-of-bounds: line 12: " in capsys.readouterr().out


def test_several_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """What a late run alone finds; a note is printed and is no finding."""
    text = """.version 8.0
.target sm_90a
.address_size 64
.shared .align 16 .b64 bar;
.shared .align 16 .b8 tile[16];
.visible .entry hasty(.param .u64 from)
{
    .reg .pred %p<3>; .reg .b32 %r<3>; .reg .b64 %d<3>;
    ld.param.u64 %d0, [from]; mov.u32 %r0, tile; mov.u32 %r1, bar;
    mbarrier.init.shared::cta.b64 [%r1], 1;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 16;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r0], [%d0], 16, [%r1];
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p0, [%r1], 0;
    @!%p0 bra ONCE;
    ret;
ONCE: mbarrier.try_wait.parity.shared::cta.b64 %p0, [%r1], 0;
    ld.shared.b32 %r2, [%r0];
    ret;
}
"""
    (tmp_path / "hasty.ptx").write_text(text)
    command = ["ptx", "check", str(tmp_path / "hasty.ptx"), "--block", "1", "--arg", "arange:u32:4"]
    assert main([*command, "--seeds", "2"]) == 1
    said = capsys.readouterr().out
    assert said.count("async-hazard: line 17") == 1
    assert "note: line 12: the init of its mbarrier (line 10)" in said
    assert main([*command, "--seed", "late", "--json"]) == 1
    assert [note["kind"] for note in json.loads(capsys.readouterr().out)["notes"]] == ["note"]


def test_json(file: str, capsys: pytest.CaptureFixture[str]):
    assert main(["ptx", "check", file, *ARGS, "201", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert {finding["kind"] for finding in report["findings"]} == {"out-of-bounds"}
    assert report["counters"]["instructions"]["ret"] == 8


def test_a_trace_goes_to_stderr(file: str, capsys: pytest.CaptureFixture[str]):
    assert main(["ptx", "check", file, *ARGS, "200", "--trace", "1:1"]) == 0
    said = capsys.readouterr().err
    assert "cta 1 warp 1" in said
    assert "mul.f32" in said


def test_stats(file: str, capsys: pytest.CaptureFixture[str]):
    assert main(["ptx", "stats", file]) == 0
    said = capsys.readouterr().out
    assert "registers" in said
    assert "scale" in said
    assert "(sm_80)" in said
    assert main(["ptx", "stats", file, "--arch", "sm_90a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kernels"]["scale"]["spill_store_bytes"] == 0


@pytest.mark.parametrize(("words", "said"), [
    (["--arg", "1"], "1 arguments for the 4 parameters of scale"),
    (["--arg", "zeros:f99:4"], "zeros:f99:4"), (["--arg", "zeros:f32:4y"], "'4y' is not a shape"),
    (["--arg", "nothing.npy"], "nothing.npy"), (["--arg", "hello"], "an integer of 64 bits, a float"),
    (["--save", "0=x.npy"], "argument 0 is no buffer"), (["--arch", "sm_70"], "sm_70"),
    (["--dynamic-smem", "999999"], "shared memory"),
])
def test_what_is_refused(file: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    tail = [*ARGS, "200"] if words[0] in ("--arch", "--dynamic-smem") else []
    assert main(["ptx", "check", file, *words, *tail]) == 2
    written = capsys.readouterr()
    assert said in written.err
    assert "Traceback" not in written.err
    assert written.out == ""


@pytest.mark.parametrize("words", [["--grid", "0"], ["--block", "a"], ["--trace", "0"], ["--save", "x"]])
def test_words_that_are_wrong(file: str, words: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_: main(["ptx", "check", file, *words])
    assert exit_.value.code == 2
    assert words[0] in capsys.readouterr().err


def test_files_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "binary.ptx").write_bytes(b"\xff\xfe\x00")
    for name in ("missing.ptx", "binary.ptx", "."):
        for command in ("check", "stats"):
            assert main(["ptx", command, str(tmp_path / name)]) == 2
            assert "cannot be read" in capsys.readouterr().err
