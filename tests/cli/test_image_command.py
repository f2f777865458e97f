"""`tinygrad-nv image`."""
from __future__ import annotations

import json

import numpy as np
from PIL import Image

from tests.support.models import diffusion_case as case


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
