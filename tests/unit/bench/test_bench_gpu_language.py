"""The parts "conv" and "language" of bench/gpu/run.py on the emulated driver, and what their comparisons
find."""
from __future__ import annotations

from argparse import Namespace

import pytest

from bench.gpu import conv as gpu_conv
from bench.gpu import tile_language as gpu_language
from bench.gpu.compare import differs, wrong

OPTIONS = Namespace(emulate=True, arch="sm_90a", seed=0)
CONVS = {each.name: each for each in gpu_conv.shapes()}
ROWS = {each.name: each for each in gpu_language.shapes()}


@pytest.mark.parametrize("name", ["UNet 2x64x64x320 to 320, 3x3, stride 2, f16",
                                  "UNet 2x64x64x320 to 320, 3x3, bf16, bias, residual"])
def test_convolutions(name: str):
    small = CONVS[name].scale_down()
    assert gpu_conv.run_emulated(small, OPTIONS)["status"] == "emulated"
    given = small.make_inputs("cpu")
    assert wrong(small, given, gpu_conv.cudnn(small, given, OPTIONS)) == ""
    given[1]["out"][0, 3, 2, 5] += 1
    assert differs(small, given).startswith("set 1: position ")


@pytest.mark.parametrize("name", ["softmax 4096x4096 bf16", "w4a16 16x4096x4096 f16"])
def test_kernels_of_the_language(name: str):
    assert gpu_language.run_emulated(ROWS[name], OPTIONS)["status"] == "emulated"
    small = ROWS[name].scale_down()
    given = small.make_inputs("cpu")
    assert wrong(small, given, small.torch(given, OPTIONS)) == ""
    given[0]["out"][1, 7] += 1
    assert differs(small, given).startswith("set 0: ")


def test_schedules_are_those_of_the_model():
    for each in ROWS.values():
        assert str(gpu_language.schedule_of(each)) == gpu_language.model_cases()[each.case]["schedule"]
