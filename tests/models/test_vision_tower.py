"""Patches and the vision tower of Qwen2.5-VL agree with transformers'."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tinygrad import dtypes

from tests.support.models.vision_case import IMAGE, PIXELS, picture, processed, written
from tinygrad_nv.engine.vision.encoder import VisionEncoder
from tinygrad_nv.models.qwen_vl.config import read_vision
from tinygrad_nv.models.qwen_vl.images import patches, prompt_positions

SIZES = [(90, 130), (20, 30), (56, 56), (400, 300), (15, 200)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    directory = tmp_path_factory.mktemp("vision")
    return directory, written(directory)


@pytest.mark.parametrize("size", SIZES)
def test_patches(model, size):
    """As Qwen2VLImageProcessorPil has them: max difference 1e-6 · max."""
    config = read_vision(model[0])
    assert config is not None
    assert config.images.max_pixels == PIXELS["max_pixels"]
    made, grid = patches(picture(1, *size), config)
    theirs = processed([picture(1, *size)])
    assert theirs["image_grid_thw"].tolist() == [[1, grid.height * 2, grid.width * 2]]
    expected = theirs["pixel_values"].numpy()
    assert np.abs(made - expected).max() <= 1e-6 * np.abs(expected).max()


def test_rows(model):
    """max |row − theirs| ≤ 2e-4 · max |row|, of images of several sizes."""
    directory, reference = model
    encoder = VisionEncoder.of(directory, dtypes.float32, "CPU")
    assert encoder is not None
    encoder.load(directory)
    for seed, size in enumerate(SIZES):
        given = processed([picture(seed, *size)])
        with torch.no_grad():
            expected = reference.model.visual(given["pixel_values"], given["image_grid_thw"])
        expected = expected.pooler_output.numpy()
        made = encoder.run(picture(seed, *size))
        assert made.rows.shape == expected.shape
        assert np.abs(made.rows - expected).max() <= 2e-4 * np.abs(expected).max()


def test_positions(model: tuple[Path, object]):
    """As `get_rope_index`, of two images amid text."""
    _, reference = model
    config = read_vision(model[0])
    assert config is not None
    images = [picture(0), picture(1, 56, 200)]
    grids = [patches(each, config)[1] for each in images]
    ids = [5, 6, *[IMAGE] * grids[0].rows, 7, 8, 9, *[IMAGE] * grids[1].rows, 10]
    given = torch.tensor([ids])
    theirs, delta = reference.model.get_rope_index(given, mm_token_type_ids=(given == IMAGE).int(),
                                                   image_grid_thw=processed(images)["image_grid_thw"])
    made = prompt_positions(np.array(ids) == IMAGE, grids)
    assert np.array_equal(made, theirs[:, 0].numpy())
    assert made.max() + 1 - len(ids) == delta.item()
