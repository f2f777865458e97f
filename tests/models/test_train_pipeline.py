"""`tinygrad-nv train` with --context-parallel-size and --pipeline-parallel-size: losses, norms and weights
of one rank, of the same rows."""
from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from tests.support.models.train_ranks_case import (
    STEADY,
    Make,
    described,
    log,
    near,
    no_farther,
    same,
    token_ids,
    trained,
    weights,
)
from tinygrad_nv.cli import DEFAULT_MODEL

CONTEXT = ("--context-parallel-size", "2")
FAMILIES = {"llama": {"num_key_value_heads": 1, "num_attention_heads": 2},
            "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16,
                      "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return token_ids(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_two_ranks(data: Path, tmp_path: Path, family: str) -> None:
    """Rows of 30 tokens, which are padded to four chunks of 8, and evaluations."""
    model = described(tmp_path, **FAMILIES[family])
    given = ("--from-scratch", *STEADY, "--max-length", "30", "--eval-data", str(data), "--eval-batches", "2")
    trained(model, data, tmp_path / "one", *given)
    told = trained(model, data, tmp_path / "two", *given, *CONTEXT)
    assert "parameters to train over 2 ranks" in told
    near(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    ("--zero-stage", "1"), ("--zero-stage", "2"), ("--zero-stage", "3"), ("--dtype", "float16"),
    ("--gradient-checkpointing",), ("--gradient-accumulation-steps", "2"), ("--optim", "muon"),
    ("--use-peft", "--lora-r", "2", "--lora-dropout", "0")], ids=" ".join)
def test_with_others(hf_model: Make, data: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    """Whatever else a run has. Float16 rounds other sums, and is compared with itself sharded no nearer than
    its own steps of 2⁻¹¹."""
    model, given = hf_model("llama"), (*STEADY, *options)
    trained(model, data, tmp_path / "one", *given)
    trained(model, data, tmp_path / "two", *given, *CONTEXT)
    if "muon" in options:
        trained(model, data, tmp_path / "apart", *given, "--per-device-train-batch-size", "1",
                "--gradient-accumulation-steps", "2")
        return no_farther(tmp_path / "two", tmp_path / "one", tmp_path / "apart")
    if "--dtype" not in options and "--use-peft" not in options: near(tmp_path / "two", tmp_path / "one")
    for one, two in zip(log(tmp_path / "two"), log(tmp_path / "one"), strict=True):
        assert one["loss"] == pytest.approx(two["loss"], rel=2 ** -11 if "--dtype" in options else 1e-5)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("zero", ["0", "2"])
def test_with_data_parallel_ranks(data: Path, tmp_path: Path, zero: str) -> None:
    """Two contexts of two ranks, against one rank with two micro-batches."""
    model, given = described(tmp_path, num_hidden_layers=2), ("--from-scratch", *STEADY)
    trained(model, data, tmp_path / "one", *given, "--gradient-accumulation-steps", "2")
    trained(model, data, tmp_path / "four", *given, *CONTEXT, "-dp", "2", "--zero-stage", zero)
    near(tmp_path / "four", tmp_path / "one")


@pytest.mark.slow
def test_resumed(data: Path, tmp_path: Path) -> None:
    """The bits of a run that never stopped; with one rank, which has the same parameters, as near as its
    sums are."""
    model = described(tmp_path)
    given = ("--from-scratch", *STEADY, "--save-strategy", "steps", "--save-steps", "4",
             "--save-total-limit", "9")
    trained(model, data, tmp_path / "whole", *given, *CONTEXT)
    for name, ranks in (("again", CONTEXT), ("one", ())):
        trained(model, data, tmp_path / name, *given, *CONTEXT)
        for step in (8, 10):
            shutil.rmtree(tmp_path / name / f"checkpoint-{step}")
        told = trained(model, data, tmp_path / name, *given, *ranks, "--resume-from-checkpoint", "latest")
        assert "steps 5 to 10" in told
    same(tmp_path / "again", tmp_path / "whole")
    near(tmp_path / "one", tmp_path / "whole")


# **** pipelines ****

STAGES = ("--pipeline-parallel-size", "2")
FOUR = ("--gradient-accumulation-steps", "4")


@pytest.mark.parametrize(("family", "order"), [
    ("llama", "1f1b"), *(pytest.param(*each, marks=pytest.mark.slow) for each in (
        ("qwen3", "1f1b"), ("llama", "gpipe"), ("qwen3", "interleaved"), ("llama", "zero-bubble")))])
def test_two_stages(data: Path, tmp_path: Path, family: str, order: str) -> None:
    """From scratch: weights are drawn as on one rank. The embedding of llama is tied, on both stages; an
    evaluation on the way."""
    model = described(tmp_path, num_hidden_layers=4 if order == "interleaved" else 2, **FAMILIES[family])
    given = ("--from-scratch", *STEADY, *FOUR, "--per-device-train-batch-size", "1", "--eval-data", str(data),
             "--eval-batches", "2")
    trained(model, data, tmp_path / "one", *given)
    told = trained(model, data, tmp_path / "two", *given, *STAGES, "--pipeline-schedule", order)
    near(tmp_path / "two", tmp_path / "one")
    assert told.split(" parameters")[0].split()[-1] == \
        f"{sum(each.size for each in weights(tmp_path / 'one').values()):,}", "of all stages"


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    ("--zero-stage", "1"), ("--zero-stage", "2"), ("--dtype", "float16"), ("--optim", "muon"),
    ("--gradient-checkpointing",), ("--context-parallel-size", "2")], ids=" ".join)
@pytest.mark.parametrize("ranks", [("-dp", "2"), ()], ids=["data", "alone"])
def test_pipelines_with_others(hf_model: Make, data: Path, tmp_path: Path, options: tuple[str, ...],
                     ranks: tuple[str, ...]) -> None:
    """Whatever else a run has, with one pipeline or two. Sums of float16 are rounded, to steps of 2⁻¹¹."""
    model, few = hf_model("llama"), ("--gradient-accumulation-steps", "2")
    one = tuple(each for each in options if options[0] != "--context-parallel-size")
    trained(model, data, tmp_path / "one", *STEADY, *one, *(FOUR if ranks else few))
    trained(model, data, tmp_path / "two", *STEADY, *options, *few, *STAGES, *ranks)
    if "muon" in options:
        trained(model, data, tmp_path / "all", *STEADY, *one, "--per-device-train-batch-size",
                "8" if ranks else "4")
        return no_farther(tmp_path / "two", tmp_path / "one", tmp_path / "all")
    if "--dtype" not in options: near(tmp_path / "two", tmp_path / "one")
    for a, b in zip(log(tmp_path / "two"), log(tmp_path / "one"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=2 ** -11 if "--dtype" in options else 1e-5)
    return None


@pytest.mark.slow
def test_packed_rows(tmp_path: Path) -> None:
    """Documents do not see each other on any stage."""
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join("a fox saw a dog " * n for n in (1, 3, 5, 2, 4, 1, 2)))
    given = (*STEADY, "--packing", "--gradient-accumulation-steps", "2", "--max-length", "64",
             "--sample-by", "paragraph")
    trained(Path(DEFAULT_MODEL), text, tmp_path / "one", *given)
    trained(Path(DEFAULT_MODEL), text, tmp_path / "two", *given, *STAGES)
    near(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
def test_four_stages(data: Path, tmp_path: Path) -> None:
    """Stages between the first and the last; three layers of five are alone on theirs."""
    model, given = described(tmp_path, num_hidden_layers=5), ("--from-scratch", *STEADY, *FOUR)
    trained(model, data, tmp_path / "one", *given)
    trained(model, data, tmp_path / "four", *given, "-pp", "4")
    near(tmp_path / "four", tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("-dp", "2", "--zero-stage", "1")], ids=["alone", "sharded"])
def test_resumed_pipelines(data: Path, tmp_path: Path, more: tuple[str, ...]) -> None:
    """The bits of a run that never stopped. Another layout is refused."""
    model, out = described(tmp_path, num_hidden_layers=2), tmp_path / "again"
    given = ("--from-scratch", *STEADY, *FOUR, *more, "--save-strategy", "steps", "--save-steps", "4",
             "--save-total-limit", "9")
    trained(model, data, tmp_path / "whole", *given, *STAGES)
    trained(model, data, out, *given, *STAGES)
    for step in (8, 10): shutil.rmtree(out / f"checkpoint-{step}")
    told = trained(model, data, out, *given, *STAGES, "--resume-from-checkpoint", "latest")
    assert "steps 5 to 10" in told
    same(out, tmp_path / "whole")
    told = trained(model, data, out, *given, "--resume-from-checkpoint", "latest", code=2)
    assert "pipeline_parallel_size is 2 there, and 1 here" in told


@pytest.mark.slow
def test_the_layer_that_is_not_finite(hf_model: Make, data: Path, tmp_path: Path) -> None:
    """A weight of the second stage is NaN: all ranks end, with the name of its layer."""
    model = tmp_path / "model"
    shutil.copytree(hf_model("llama"), model)
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][0, 0] = float("nan")
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    told = trained(model, data, tmp_path / "out", *STAGES, code=2)
    assert "is NaN; the first layer with a value that is not finite is model.layers.1" in told
