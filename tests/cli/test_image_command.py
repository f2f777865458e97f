"""`tinygrad-nv image`; `tinygrad-nv onnx`: outputs, exported decoders, messages; adapters of `generate` and
`serve`."""
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from PIL import Image
from tinygrad import Tensor

from tests.support.models import diffusion_case as case
from tinygrad_nv.cli import DEFAULT_MODEL, parse_arguments
from tinygrad_nv.models.config import read_config
from tinygrad_nv.server.startup import lora_modules, lora_options
from tinygrad_nv.train.export import save_adapter


def test_images(command, tmp_path):
    """Files of two images tell how each was made."""
    options = ["image", "a red cat", "--model", case.directory(), "--device", "CPU", "--steps", "2",
               "--size", "16x24", "--scheduler", "dpm++", "--guidance-scale", "1"]
    done = command(*options, "-n", "2", "--seed", "3", "-o", tmp_path / "x.png", "--json").succeeded()
    told = json.loads(done.out)
    assert told["files"] == [str(tmp_path / f"x-{i}.png") for i in (1, 2)]
    assert told["seeds"] == [3, 4]
    assert "2 steps in " in done.err
    images = [Image.open(path) for path in told["files"]]
    assert [image.size for image in images] == [(16, 24)] * 2
    made = json.loads(images[1].text["parameters"])
    assert (made["prompt"], made["seed"], made["scheduler"]) == ("a red cat", 4, "dpm++")
    assert np.asarray(images[0]).std() > 1


def test_options_are_checked_before_the_model_is_loaded(command, tmp_path):
    model = ["--model", case.directory(), "-o", tmp_path / "x.png"]
    command("image", "a cat").refused("no model is named", "--model with a directory", "hf download")
    command("image", "a cat", *model[:2], "-o", "x.jpg").refused("--out is x.jpg", "ends in .png")
    command("image", "a cat", *model[:2], "-o", tmp_path / "no" / "x.png").refused("there is no directory")
    command("image", "a cat", *model, "--scheduler", "heun").refused("'heun'", "ddim, euler, dpm++")
    assert "not a size such as 512x768" in command("image", "a cat", *model, "--size", "9").err
    command("image", "a cat", *model, "--size", "17x16").refused("images of 17x16", "multiples of 2")
    command("image", "a cat", *model, "--steps", "0").refused("0 steps", "1 to 1000")


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


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """An adapter may have another rank than --max-lora-rank's default."""
    config, random = read_config(DEFAULT_MODEL), np.random.default_rng(3)
    def drawn(*shape: int) -> Tensor:
        return Tensor(random.normal(size=shape).astype(np.float32), device="CPU")
    matrices = {f"model.layers.{layer}.self_attn.q_proj": (drawn(20, config.hidden_size),
                                                           drawn(config.hidden_size, 20))
                for layer in range(config.num_layers)}
    return save_adapter(tmp_path / "adapter", matrices, 20, 40, target_modules=["q_proj"])


def test_generate(command, adapter: Path):
    words = ("generate", "Once upon a time", "--max-tokens", 8, "--temperature", 0)
    plain, other = command(*words).succeeded(), command(*words, "--lora", f"mine={adapter}").succeeded()
    assert plain.out != other.out
    command(*words, "--lora", adapter).refused("NAME=DIR")
    command(*words, "--lora", "mine=/nowhere").refused("adapter_config.json")


def test_serve(adapter: Path):
    found = parse_arguments(["serve", "--lora", f"mine={adapter}", "other=/there"])
    assert lora_options(found)["enable_lora"]
    assert lora_modules(found, ("base",)) == [("mine", str(adapter)), ("other", "/there")]
