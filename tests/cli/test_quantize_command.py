"""`tinygrad-nv quantize`: compressed-tensors and transformers read what it writes, and it runs here."""
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from reader_case import read, same
from safetensors.torch import load_file
from tinygrad import Tensor, dtypes
from tinygrad_nv.models import weights
from tinygrad_nv.models.config import read_config
from tinygrad_nv.models.llama import Llama
from transformers import AutoModelForCausalLM

from tinygrad_nv.quantize.rounding import from_e4m3, to_e4m3
from tinygrad_nv.quantize.schemes import FORMATS, SCHEMES

LAYER = "model.layers.1.mlp.down_proj"
IDS = [5, 17, 80, 33, 2, 9, 120]


@pytest.fixture(scope="module")
def source(make_model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of bfloat16, whose matrices are several groups and blocks wide."""
    out = tmp_path_factory.mktemp("source")
    model = AutoModelForCausalLM.from_pretrained(make_model(hidden_size=256, intermediate_size=384))
    model.to(torch.bfloat16).save_pretrained(out)
    return out


def logits(directory: Path) -> np.ndarray:
    model = Llama(read_config(directory), dtypes.float32, "CPU")
    weights.load(model, directory)
    return model(Tensor([IDS], dtype=dtypes.int32, device="CPU")).numpy()


CASES = [("w4a16",), ("w4a16", "--asymmetric", "--group-size", "64"), ("w4a16", "--observer", "mse"),
         ("w8a16",), ("w8a8",), ("fp8",), ("fp8-block",)]


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_compressed_tensors(command, source: Path, tmp_path: Path, case: tuple[str, ...]):
    """Its own decompressor gives the bits that we read, whose error is as small as the bits allow."""
    out = tmp_path / "made"
    said = json.loads(command("quantize", source, "--scheme", *case, "--out", out, "--json").succeeded().out)
    data, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    config = QuantizationConfig(**data["quantization_config"])
    scheme = config.config_groups["group_0"]
    mine = {name.removeprefix(f"{LAYER}."): each for name, each in tensors.items() if name.startswith(LAYER)}
    wanted = BaseCompressor.get_value_from_registry(config.format).decompress(mine, scheme)["weight"]
    shape = tuple(load_file(source / "model.safetensors")[f"{LAYER}.weight"].shape)
    found, _ = read(data["quantization_config"], tensors, shape, LAYER)
    assert same(found, wanted)
    original = load_file(source / "model.safetensors")[f"{LAYER}.weight"].float()
    error = float((found_of(found) - original).norm() / original.norm())
    assert error < {4: 0.12, 8: 0.03}[SCHEMES[case[0]].bits]
    assert next(each["error"] for each in said["layers"] if each["layer"] == LAYER) == \
        pytest.approx(error, rel=1e-3)


def found_of(matrix) -> torch.Tensor:
    return torch.tensor(matrix.dequantize().numpy())


@pytest.mark.parametrize("case", [("w4a16",), ("fp8-block",), ("w8a8",)], ids=" ".join)
def test_transformers_reads_it(command, source: Path, tmp_path: Path, case: tuple[str, ...]):
    """Both dequantised: the same logits."""
    out = tmp_path / "made"
    command("quantize", source, "--scheme", *case, "--out", out).succeeded()
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    for module in model.modules():      # weights alone: inputs are not rounded here
        if hasattr(module, "quantization_enabled"): module.quantization_enabled = False
    with torch.no_grad(): wanted = model(torch.tensor([IDS])).logits.float().numpy()
    assert np.abs(logits(out) - wanted).max() < 2e-2 * np.abs(wanted).max()


@pytest.mark.parametrize(("format", "scheme"), [(format, each) for format, names in FORMATS.items()
                                                for each in names])
def test_other_formats_have_the_same_matrices(command, source: Path, tmp_path: Path, format: str,
                                              scheme: str):
    """AWQ rounds with zero points, and both AWQ and GPTQ have float16 scales."""
    outs = [tmp_path / "theirs", tmp_path / "plain"]
    command("quantize", source, "--scheme", scheme, "--format", format, "--out", outs[0]).succeeded()
    command("quantize", source, "--scheme", scheme, "--out", outs[1],
            *["--asymmetric"] * (format == "awq")).succeeded()
    made = [logits(each) for each in outs]
    assert np.abs(made[0] - made[1]).max() < 0.05 * np.abs(made[1]).max()


def test_e4m3_is_torchs():
    drawn = np.random.default_rng(0).standard_normal(1 << 16) * np.logspace(-6, 3, 1 << 16)
    x = np.concatenate([drawn, from_e4m3(np.arange(255, dtype=np.uint8)), [0.0, -0.0, 448.0, 464.0, 1e9]])
    x = x[~np.isnan(x)].astype(np.float32)
    wanted = torch.tensor(x).clamp(-448, 448).to(torch.float8_e4m3fn)
    np.testing.assert_array_equal(to_e4m3(x), wanted.view(torch.uint8).numpy())
    every = np.arange(256, dtype=np.uint8)
    theirs = torch.tensor(every).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(from_e4m3(every), theirs)


def test_what_is_ignored_stays(command, source: Path, tmp_path: Path):
    out = tmp_path / "made"
    command("quantize", source, "--scheme", "w8a8", "--out", out, "--ignore", "re:.*o_proj", "--ignore",
            "lm_head", "--ignore", "re:.*embed.*").succeeded()
    tensors, plain = load_file(out / "model.safetensors"), load_file(source / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight"
    assert torch.equal(tensors[name], plain[name])
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert ignored == ["lm_head", *(f"model.layers.{i}.self_attn.o_proj" for i in range(2))]
    assert np.isfinite(logits(out)).all()


def test_it_is_the_same_each_time_and_goes_on(command, source: Path, tmp_path: Path):
    """A shard that was written before is not made again; the directory is the same."""
    outs = [tmp_path / "a", tmp_path / "b"]
    for out in outs: command("quantize", source, "--scheme", "w4a16", "--out", out).succeeded()
    files = [{each.name: each.read_bytes() for each in out.iterdir()} for out in outs]
    assert files[0] == files[1]
    assert sorted(files[0]) == sorted(each.name for each in source.iterdir())
