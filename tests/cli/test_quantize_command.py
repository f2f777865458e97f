"""`tinygrad-nv quantize`: compressed-tensors and transformers read what it writes, and it runs here. Sparse
matrices too, in either storage."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.cli.quantize_case import logits, same_layers
from tests.support.quant.reader_case import read, same
from tinygrad_nv.quant.floats import from_e4m3, to_e4m3
from tinygrad_nv.quantize import directory
from tinygrad_nv.quantize.files import unwritable
from tinygrad_nv.quantize.schemes import FORMATS, SCHEMES

LAYER = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def source(make_model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of bfloat16, whose matrices are several groups and blocks wide."""
    out = tmp_path_factory.mktemp("source")
    model = AutoModelForCausalLM.from_pretrained(make_model(hidden_size=256, intermediate_size=384))
    model.to(torch.bfloat16).save_pretrained(out)
    return out


CASES = [("w4a16",), ("w4a16", "--asymmetric", "--group-size", "64"), ("w4a16", "--observer", "mse"),
         ("w8a16",), ("w8a8",), ("fp8",), ("fp8-block",), ("mxfp4",)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_compressed_tensors(command, source: Path, tmp_path: Path, case: tuple[str, ...]):
    """Its own decompressor gives the bits that we read, whose error is as small as the bits allow."""
    from compressed_tensors.compressors import BaseCompressor  # 2 s of collecting tests otherwise
    from compressed_tensors.quantization import QuantizationConfig
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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", [("w4a16",), ("fp8",), ("fp8-block",), ("w8a8",)], ids=" ".join)
def test_transformers_reads_it(command, source: Path, tmp_path: Path, case: tuple[str, ...]):
    """The same of each layer, given the same, with inputs rounded as the scheme has them. Logits may differ
    by more: a number that lies between two codes may go the other way, and nothing calms this model."""
    out = tmp_path / "made"
    command("quantize", source, "--scheme", *case, "--out", out).succeeded()
    wanted = same_layers(out)
    assert np.abs(logits(out) - wanted).max() < 0.1 * np.abs(wanted).max()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("format", "scheme"), [(format, each) for format, names in FORMATS.items()
                                                for each in names if "sparse" not in format])
def test_other_formats(command, source: Path, tmp_path: Path, format: str, scheme: str):
    """Rounded as well as compressed-tensors' are, with zero points of AWQ: scales differ in their dtypes."""
    errors = []
    for out, more in (("theirs", ["--format", format]), ("plain", ["--asymmetric"] * (format == "awq"))):
        command("quantize", source, "--scheme", scheme, "--out", tmp_path / out, *more).succeeded()
        data = json.loads((tmp_path / out / "config.json").read_text())
        original = load_file(source / "model.safetensors")[f"{LAYER}.weight"].float()
        found, _ = read(data["quantization_config"], load_file(tmp_path / out / "model.safetensors"),
                        tuple(original.shape), LAYER)
        errors.append(float((found_of(found) - original).norm()))
        assert np.isfinite(logits(tmp_path / out)).all()
    assert errors[0] == pytest.approx(errors[1], rel=0.02)


def test_e4m3_is_torchs():
    drawn = np.random.default_rng(0).standard_normal(1 << 16) * np.logspace(-6, 3, 1 << 16)
    x = np.concatenate([drawn, from_e4m3(np.arange(255, dtype=np.uint8)), [0.0, -0.0, 448.0, 464.0, 1e9]])
    x = x[~np.isnan(x)].astype(np.float32)
    wanted = torch.tensor(x).clamp(-448, 448).to(torch.float8_e4m3fn)
    np.testing.assert_array_equal(to_e4m3(x), wanted.view(torch.uint8).numpy())
    every = np.arange(256, dtype=np.uint8)
    theirs = torch.tensor(every).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(from_e4m3(every), theirs)


@pytest.mark.slow
def test_what_is_ignored_stays(command, source: Path, tmp_path: Path):
    out = tmp_path / "made"
    command("quantize", source, "--scheme", "w8a8", "--out", out, "--ignore", "re:.*o_proj", "--ignore",
            "lm_head").succeeded()
    tensors, plain = load_file(out / "model.safetensors"), load_file(source / "model.safetensors")
    for name in ("model.layers.0.self_attn.o_proj.weight", "model.embed_tokens.weight"):
        assert torch.equal(tensors[name], plain[name])
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert ignored == ["lm_head", *(f"model.layers.{i}.self_attn.o_proj" for i in range(2))]
    assert np.isfinite(logits(out)).all()


@pytest.mark.slow
def test_a_head_that_is_the_embedding_is_ignored(command, make_model, tmp_path: Path):
    """Else transformers takes it for a quantised layer, and loads nothing."""
    plain, out = make_model(tie_word_embeddings=True), tmp_path / "made"
    command("quantize", plain, "--scheme", "w4a16", "--group-size", "32", "--out", out).succeeded()
    assert json.loads((out / "config.json").read_text())["quantization_config"]["ignore"] == ["lm_head"]
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.fixture(scope="module")
def sharded(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sharded")
    AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(
        out, max_shard_size="600KB")
    return out


def files(directory: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in directory.iterdir()}


def test_it_is_the_same_each_time(command, sharded: Path, tmp_path: Path):
    outs = [tmp_path / "a", tmp_path / "b"]
    for out in outs: command("quantize", sharded, "--scheme", "w4a16", "--out", out).succeeded()
    assert files(outs[0]) == files(outs[1])
    assert sorted(files(outs[0])) == sorted(files(sharded))
    assert np.isfinite(logits(outs[0])).all()


def test_it_goes_on_after_the_last_whole_shard(command, sharded: Path, tmp_path: Path,
                                               monkeypatch: pytest.MonkeyPatch):
    """A disk that is full leaves no directory that loads; afterwards what was made is not made again."""
    calls, write = list[str](), directory.write

    def full(path: Path, *rest: Any) -> dict[str, int]:
        if len(calls) == 2: raise unwritable(path, OSError(28, "No space left on device"))
        calls.append(path.name)
        return write(path, *rest)
    words = "quantize", sharded, "--scheme", "w4a16", "--out", tmp_path / "made"
    monkeypatch.setattr(directory, "write", full)
    command(*words).refused("No space left on device", "to fix:   free some space")
    assert not (tmp_path / "made").exists()
    assert not (tmp_path / "made.partial" / "config.json").exists()
    calls.clear()
    monkeypatch.setattr(directory, "write", lambda *given: calls.append(given[0].name) or write(*given))
    command(*words).succeeded()
    command(*words[:-1], tmp_path / "whole").succeeded()
    assert len(calls) == 2 * len(list(sharded.glob("*.safetensors"))) - 2
    assert files(tmp_path / "made") == files(tmp_path / "whole")


@pytest.mark.parametrize(("words", "found", "fix"), [
    (("--scheme", "w3a3"), "scheme 'w3a3'", "change --scheme"),
    (("--scheme", "fp8", "--format", "awq"), "format awq of scheme fp8", "change --format or --scheme"),
    (("--scheme", "fp8", "--format", "exl2"), "format 'exl2'", "change --format"),
    (("--scheme", "w4a16", "--observer", "max"), "observer 'max'", "change --observer"),
    (("--scheme", "w8a8", "--group-size", "64"), "groups of 64 inputs in scheme w8a8",
     "leave --group-size out"),
    (("--scheme", "w4a16", "--group-size", "12"), "groups of 12 inputs", "change --group-size"),
    (("--scheme", "w4a16", "--group-size", "160"), "columns, in groups of 160",
     "choose another --group-size"),
    (("--scheme", "mxfp4", "--group-size", "64"), "groups of 64 inputs in scheme mxfp4",
     "leave --group-size out"),
    (("--scheme", "w8a8", "--asymmetric"), "zero points in scheme w8a8", "leave --asymmetric out")])
def test_what_does_not_go_together(command, source: Path, tmp_path: Path, words: tuple[str, ...], found: str,
                                   fix: str):
    command("quantize", source, "--out", tmp_path / "made", *words).refused(found, f"to fix:   {fix}")
    assert list(tmp_path.glob("made*/config.json")) == []


def test_directories_that_are_not_taken(command, source: Path, tmp_path: Path):
    made = tmp_path / "made"
    command("quantize", source, "--scheme", "w8a8", "--out", made).succeeded()
    command("quantize", source, "--scheme", "w8a8", "--out", made).refused(f"{made} exists", "choose another")
    command("quantize", made, "--scheme", "w8a8", "--out", tmp_path / "twice").refused(
        f"{made} is quantised already", "quantise the model that it was made from")


@pytest.fixture(scope="module")
def half(make_model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of bfloat16."""
    out = tmp_path_factory.mktemp("source")
    model = AutoModelForCausalLM.from_pretrained(make_model(hidden_size=64, intermediate_size=96))
    model.to(torch.bfloat16).save_pretrained(out)
    return out


def fours(directory: Path) -> torch.Tensor:
    """The layer of a dense directory, in float32, four columns a row."""
    return load_file(directory / "model.safetensors")[f"{LAYER}.weight"].float().reshape(-1, 4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", [("2:4",), ("fp8", "--sparsity", "2:4"), ("w8a8", "--sparsity", "2:4")],
                         ids=" ".join)
def test_transformers_reads_sparse_matrices(command, half: Path, tmp_path: Path, case: tuple[str, ...]):
    """And the same stored with a bitmask gives the same logits here, from half of the bytes."""
    dense, masked = tmp_path / "dense", tmp_path / "masked"
    command("quantize", half, "--scheme", *case, "--out", dense, "--no-report").succeeded()
    wanted = same_layers(dense)
    made = logits(dense)
    assert np.abs(made - wanted).max() < 0.1 * np.abs(wanted).max()
    command("quantize", half, "--scheme", *case, "--out", masked, "--no-report", "--format",
            "sparse-24-bitmask").succeeded()
    np.testing.assert_array_equal(logits(masked), made)
    tensors = load_file(masked / "model.safetensors")
    assert f"{LAYER}.weight" not in tensors
    assert tensors[f"{LAYER}.compressed"].shape == (64, 48)
    before, after = fours(half), fours(dense)
    assert ((after != 0).sum(1) == 2).all()
    if case[0] == "2:4":    # the two largest, as they were
        assert torch.equal(after.abs().sum(1), before.abs().topk(2, 1).values.sum(1))
        assert torch.equal(after, torch.where(after != 0, before, 0))


def test_the_report_and_the_config(command, half: Path, tmp_path: Path):
    out = tmp_path / "made"
    said = json.loads(command("quantize", half, "--scheme", "2:4", "--out", out, "--json").succeeded().out)
    error = float((fours(out) - fours(half)).norm() / fours(half).norm())
    assert next(each["error"] for each in said["layers"] if each["layer"] == LAYER) == \
        pytest.approx(error, rel=1e-3)
    found = json.loads((out / "config.json").read_text())["quantization_config"]["sparsity_config"]
    assert (found["format"], found["sparsity_structure"]) == ("dense", "2:4")
    assert found["ignore"] == ["lm_head"]


@pytest.mark.parametrize(("words", "found"), [
    (("--scheme", "w4a16", "--sparsity", "2:4"), "sparsity 2:4 of scheme w4a16"),
    (("--scheme", "fp8", "--sparsity", "1:4"), "sparsity '1:4'"),
    (("--scheme", "w8a8", "--method", "gptq", "--sparsity", "2:4"), "by method gptq"),
    (("--scheme", "w4a16", "--format", "sparse-24-bitmask"), "format sparse-24-bitmask of scheme w4a16")])
def test_what_sparsity_refuses(command, half: Path, tmp_path: Path, words: tuple[str, ...], found: str):
    command("quantize", half, "--out", tmp_path / "made", *words).refused(found)
    assert list(tmp_path.iterdir()) == []
