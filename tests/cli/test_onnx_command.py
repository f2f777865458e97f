"""`tinygrad-nv onnx`: outputs of files and of random inputs, exported decoders, and messages of mistakes."""
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

TEXT = """<ir_version: 10, opset_import: ["" : 21]> g (float[n, 3] x, float[n, 3] y) => (float[n, 3] z) {
    z = Add(x, y) }"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    onnx.save(onnx.parser.parse_model(TEXT), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def test_files_in_and_out(command, model: Path, tmp_path: Path):
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.save(tmp_path / "x.npy", x)
    given = [word for name in "xy" for word in ("--input", f"{name}={tmp_path / 'x.npy'}")]
    done = command("onnx", "run", str(model), *given, "--out", str(tmp_path / "out"), "--explain").succeeded()
    assert done.out == "z: float32 [2, 3], min 0, max 10, mean 5\n"
    assert "E_" in done.err     # the kernel
    np.testing.assert_array_equal(np.load(tmp_path / "out" / "z.npy"), 2 * x)


def test_random_inputs(command, model: Path):
    done = command("onnx", "run", str(model), "--random", "--dim", "n=4", "--json").succeeded()
    found = json.loads(done.out)["outputs"]["z"]
    assert (found["dtype"], found["shape"]) == ("float32", [4, 3])
    assert found["min"] < 0 < found["max"]


def test_an_exported_decoder(command, tiny: Path, tmp_path: Path):
    done = command("onnx", "export", str(tiny), "-o", str(tmp_path / "tiny.onnx")).succeeded()
    assert done.out == f"{tmp_path / 'tiny.onnx'}\n"
    names = [each.name for each in onnxruntime.InferenceSession(done.out.strip()).get_outputs()]
    assert names == ["logits", "present.0.key", "present.0.value", "present.1.key", "present.1.value"]


@pytest.mark.parametrize(("words", "said"), [
    (["run", "{}"], "no input 'x'\n  expected: --input NAME=FILE for x, y"),
    (["run", "{}", "--input", "x=/nowhere.npy"], "the input 'x' cannot be read from /nowhere.npy"),
    (["run", "{}", "--random", "--dim", "n=few"], "--dim n=few\n  expected: a whole number"),
    (["run", "/nowhere.onnx"], "no file at /nowhere.onnx"),
    (["export", "/nowhere", "-o", "/tmp/never.onnx"], "/nowhere")])
def test_mistakes(command, model: Path, words: list[str], said: str):
    done = command("onnx", *(word.format(model) for word in words))
    assert done.code == 2
    assert said in done.err
