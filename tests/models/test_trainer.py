"""`tinygrad-nv train` from files to directories: runs that go on, evaluations, preferences, errors. And runs
that are killed at random moments: nothing is lost beyond the interval of checkpoints."""
from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tinygrad import Tensor
from transformers import AutoModelForCausalLM

from tinygrad_nv.cli import main
from tinygrad_nv.errors import ConfigError, NVError, TrainingError
from tinygrad_nv.models import tales
from tinygrad_nv.train import arguments
from tinygrad_nv.train.arguments import TrainingArguments
from tinygrad_nv.train.data import Row
from tinygrad_nv.train.log import Log
from tinygrad_nv.train.run import Run, assemble
from tinygrad_nv.train.trainer import train

TALES = Path(tales.__file__).parent
LONG = 48


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """Token ids that repeat, so that they can be learnt."""
    path = tmp_path / "ids.npy"
    np.save(path, np.tile(np.arange(3, 103, dtype=np.uint16), 40))
    return path


def run(directory: Path, data: Path, output: Path, **options: Any) -> Run:
    usual = {"max_steps": 6, "per_device_train_batch_size": 2, "max_length": LONG, "learning_rate": 1e-2,
             "report_to": "none", "save_strategy": "no"}
    given = TrainingArguments(output_dir=str(output), **{**usual, **options})
    return assemble(given, directory, [str(data)])


def log(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]


def test_a_run_from_scratch_learns(hf_model: Callable[[str], Path], shard: Path, tmp_path: Path) -> None:
    """From files to a directory that transformers opens, with an evaluation, its log and curves."""
    output = tmp_path / "out"
    made = train(run(hf_model("llama"), shard, output, from_scratch=True, max_steps=40, eval_steps=20,
                     eval_data=(str(shard),), eval_batches=4, warmup_steps=5))
    rows = log(output)
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 40
    assert losses[0] == pytest.approx(np.log(320), rel=0.02)    # knows nothing yet
    assert losses[-1] < 1
    assert [row["step"] for row in rows if "eval_loss" in row] == [20, 40]
    rates = [row["learning_rate"] for row in rows if "loss" in row]
    np.testing.assert_allclose(rates[:6], 1e-2 * np.array([0, 1, 2, 3, 4, 5]) / 5)
    assert (output / "curves.png").stat().st_size > 10_000
    model, ids = AutoModelForCausalLM.from_pretrained(made.directory, dtype=torch.float32), np.load(shard)
    windows = torch.tensor(ids[:4 * 2 * LONG].astype(np.int64)).reshape(-1, LONG)
    with torch.no_grad(): theirs = model(windows, labels=windows).loss.item()
    assert made.eval_loss == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("options", [
    {"per_device_train_batch_size": 20},    # an epoch ends after 4 steps
    pytest.param({"use_peft": True, "lora_r": 2, "gradient_accumulation_steps": 2},
                     marks=pytest.mark.slow),
    pytest.param({"dtype": "bfloat16", "save_asynchronous": True}, marks=pytest.mark.slow),
    pytest.param({"gradient_checkpointing": True}, marks=pytest.mark.slow),
    pytest.param({"optim": "adamw_8bit"}, marks=pytest.mark.slow)], ids=str)
def test_a_run_that_goes_on_has_the_same_bits(hf_model: Callable[[str], Path], shard: Path, tmp_path: Path,
                                              options: dict[str, Any]) -> None:
    given = {**options, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 9}
    train(run(hf_model("llama"), shard, tmp_path / "whole", **given))
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    for step in (4, 6): shutil.rmtree(tmp_path / "part" / f"checkpoint-{step}")
    train(run(hf_model("llama"), shard, tmp_path / "part", **given, resume_from_checkpoint="latest"))
    name = "adapter_model.safetensors" if "use_peft" in options else "model.safetensors"
    whole, part = (load_file(tmp_path / each / name) if "dtype" not in options else
                   {name: np.frombuffer((tmp_path / each / name).read_bytes(), np.uint8)}
                   for each in ("whole", "part"))
    for name, tensor in whole.items(): np.testing.assert_array_equal(part[name], tensor)
    assert [row["loss"] for row in log(tmp_path / "part")] == [row["loss"] for row in log(tmp_path / "whole")]


@pytest.mark.slow
def test_an_evaluation_of_shorter_rows(tmp_path: Path) -> None:
    """Rows are filled up to the training's: the loss is transformers'."""
    texts = ["The fox ran home. " * 30, "A bird sang. " * 3, "Once upon a time, a dog sat."]
    for name, some in (("long", texts), ("short", texts[1:])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": each}) for each in some))
    made = run(TALES, tmp_path / "long.jsonl", tmp_path / "out", max_length=160, max_steps=1,
               learning_rate=0.0, eval_data=(str(tmp_path / "short.jsonl"),))
    assert made.evaluation is not None
    assert made.evaluation.width < made.data.width
    model = AutoModelForCausalLM.from_pretrained(TALES, dtype=torch.float64)
    total = count = 0.0
    for index in range(len(made.evaluation)):
        ids = torch.tensor(made.evaluation.rows(index)[0].ids[None].astype(np.int64))
        with torch.no_grad(): total += model(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    assert train(made).eval_loss == pytest.approx(total / count, rel=1e-5)


@pytest.mark.slow
def test_preferences(tmp_path: Path) -> None:
    """DPO with an adapter: margins begin at 0 and grow; the loss begins at log 2."""
    data = tmp_path / "pairs.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": f"Once there was a {animal}.", "chosen": " It was happy.",
                                          "rejected": " It was sad and cold."})
                              for animal in ("dog", "cat", "bird", "fish")))
    train(run(TALES, data, tmp_path / "out", method="dpo", use_peft=True, lora_r=4, lora_dropout=0.0,
              max_steps=8))
    rows = log(tmp_path / "out")
    assert rows[0]["loss"] == pytest.approx(np.log(2), rel=1e-6)
    assert rows[0]["rewards/margins"] == pytest.approx(0, abs=1e-5)     # sums of 20 logarithms, of two graphs
    assert rows[-1]["rewards/margins"] > 0.1
    assert rows[-1]["rewards/margins"] == pytest.approx(
        rows[-1]["rewards/chosen"] - rows[-1]["rewards/rejected"], abs=1e-5)
    assert rows[-1]["rewards/accuracies"] == 1


def test_the_loss_of_preferences(tmp_path: Path) -> None:
    """Of a model and another as its reference: transformers' log probabilities in DPO's formula."""
    data = tmp_path / "pairs.jsonl"
    data.write_text(json.dumps({"prompt": "Once there was a dog.", "chosen": " It was happy, and ran.",
                                "rejected": " It was sad."}))
    made = run(TALES, data, tmp_path / "out", method="dpo", beta=0.3, per_device_train_batch_size=1)
    weight = made.model.blocks[0].feed_forward.down.weight
    weight.assign(weight * 1.5).realize()       # no longer the reference
    ours, reference = (AutoModelForCausalLM.from_pretrained(TALES, dtype=torch.float64) for _ in range(2))
    with torch.no_grad(): ours.model.layers[0].mlp.down_proj.weight *= 1.5

    def log_probability(model: torch.nn.Module, row: Row) -> float:
        ids, labels = (torch.tensor(each.astype(np.int64)) for each in (row.ids, row.labels))
        with torch.no_grad(): chances = model(ids[None]).logits[0, :-1].log_softmax(-1)
        own = chances.gather(1, ids[1:, None])[:, 0]
        return own[labels[1:] != -100].sum().item()
    chosen, rejected = (0.3 * (log_probability(ours, row) - log_probability(reference, row))
                        for row in made.data.rows(0))
    assert abs(chosen - rejected) > 0.1
    train(made)
    first = log(tmp_path / "out")[0]
    assert first["rewards/chosen"] == pytest.approx(chosen, rel=1e-4)
    assert first["rewards/rejected"] == pytest.approx(rejected, rel=1e-4)
    assert first["loss"] == pytest.approx(np.log(1 + np.exp(rejected - chosen)), rel=1e-4)


def test_packed_rows_train_as_their_documents(tmp_path: Path) -> None:
    """Loss, gradients' norm and weights after two steps of packed rows are those of a row a document."""
    texts = ["The fox ran home.", "A bird sang. It was late.", "Once upon a time, a dog sat.", "The end."]
    data = tmp_path / "texts.jsonl"
    data.write_text("\n".join(json.dumps({"text": each}) for each in texts))
    made = [run(TALES, data, tmp_path / name, packing=packed, max_length=64, max_steps=2, learning_rate=0.1,
                optim="sgd", per_device_train_batch_size=rows) for name, packed, rows in (("packed", True, 1),
                                                                             ("apart", False, 4))]
    assert [len(each.data) for each in made] == [1, 4]
    for each in made: train(each)
    packed, apart = (log(tmp_path / name) for name in ("packed", "apart"))
    for a, b in zip(packed, apart, strict=True):
        assert (a["loss"], a["grad_norm"]) == pytest.approx((b["loss"], b["grad_norm"]), rel=1e-4)
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("packed", "apart"))
    for name, tensor in one.items(): assert np.abs(tensor - other[name]).max() <= 2e-5, name


def test_the_names_of_an_adapter(hf_model: Callable[[str], Path], shard: Path, tmp_path: Path) -> None:
    """all-linear are all names of layers, as PEFT writes them; --save-strategy no leaves no checkpoint."""
    train(run(hf_model("llama"), shard, tmp_path / "out", use_peft=True,
              lora_target_modules=("all-linear",), max_steps=1))
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj",
                                        "v_proj"]
    assert not list((tmp_path / "out").glob("checkpoint-*"))


def test_a_nan_is_named(hf_model: Callable[[str], Path], shard: Path, tmp_path: Path) -> None:
    made = run(hf_model("llama"), shard, tmp_path / "out")
    weight = made.model.blocks[1].feed_forward.down.weight
    weight.assign(Tensor.full(weight.shape, float("nan"))).realize()
    with pytest.raises(TrainingError, match=r"step 1 is NaN.*model.layers.1, whose "
                                            r"model.layers.1.mlp.down_proj.weight has one"): train(made)


def test_the_command(shard: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Options from a file, of which the command line's win."""
    config = tmp_path / "run.json"
    config.write_text(json.dumps({"max_steps": 9, "max_length": 32, "learning-rate": "1e-3",
                                  "data": str(shard), "lr_scheduler_type": "constant", "report_to": "none"}))
    output = tmp_path / "out"
    assert main(["train", str(TALES), "--config", str(config), "--max_steps", "2", "--output-dir",
                 str(output), "--per-device-train-batch-size", "1", "--no-shuffle"]) == 0
    assert capsys.readouterr().out.startswith(f"{output}: 2 steps in ")
    assert [row["learning_rate"] for row in log(output)] == [1e-3, 1e-3]
    assert main(["train", str(TALES), "--config", str(config), "--max_steps", "2", "--output-dir",
                 str(output), "--per-device-train-batch-size", "1", "--no-shuffle",
                 "--resume-from-checkpoint"]) == 0
    assert capsys.readouterr().out == f"{output}: all 2 steps were done before\n"


def test_a_line_has_the_mean_of_the_steps_since_the_one_before(tmp_path: Path) -> None:
    given = TrainingArguments(output_dir=str(tmp_path), logging_steps=2, report_to="none")
    row = {"grad_norm": 1.0, "learning_rate": 1e-3, "tokens_per_s": 1.0, "memory_bytes": 1, "seconds": 1.0}
    with Log(given, 5, 0) as lines:
        for step, loss in enumerate((8.0, 4.0, 3.0, 1.0, 7.0), 1):
            lines.step({"step": step, "loss": loss, **row})
    assert [(each["step"], each["loss"]) for each in log(tmp_path)] == [(2, 6.0), (4, 2.0), (5, 7.0)]


@pytest.mark.parametrize(("options", "words"), [
    ({"lr_scheduler_type": "up"}, "--lr-scheduler-type up"),
    ({"per_device_train_batch_size": 0}, "--per-device-train-batch-size 0"),
    ({"method": "dpo", "packing": True}, "--packing of preferences"),
    ({"method": "dpo"}, "the data have no preferences"),
    ({"max_length": 999}, "--max-length 999"),
    ({"learning_rate": float("nan")}, "--learning-rate nan"),
    ({"dtype": "float64"}, "--dtype float64"),
    ({"eval_batches": -1}, "--eval-batches -1"),
    ({"use_peft": True, "from_scratch": True}, "--use-peft with --from-scratch"),
    ({"method": "dpo", "z_loss": 0.1}, "--z-loss with --method dpo"),
    ({"lr_scheduler_type": "warmup_stable_decay"}, "without decay"),
    ({"sample_prompts": ("a",), "use_peft": True, "lora_target_modules": ("q_proj", "query")},
     "--lora-target-modules query")], ids=str)
def test_what_cannot_be(shard: Path, tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(NVError, match=words): run(TALES, shard, tmp_path / "out", **options)


def test_values_as_yaml_reads_them() -> None:
    made = arguments.make_arguments({"save_strategy": False, "resume_from_checkpoint": True,
                                     "learning_rate": "1e-4",
                           "gradient_checkpointing_policy": 0.5, "output_dir": 2024, "max_steps": 5.0,
                           "seed": 9007199254740993, "eval_data": "held-out.txt"})
    assert (made.save_strategy, made.resume_from_checkpoint, made.learning_rate) == ("no", "latest", 1e-4)
    assert (made.gradient_checkpointing_policy, made.output_dir, made.max_steps) == ("0.5", "2024", 5)
    assert (made.seed, made.eval_data) == (9007199254740993, ("held-out.txt",))
    for name, value in (("max_steps", float("inf")), ("max_steps", 1.5), ("packing", "maybe"),
                        ("learning_rate", True), ("num_train_epochs", float("inf"))):
        with pytest.raises(ConfigError, match=r"max.steps|packing|learning_rate|num-train-epochs"):
            arguments.make_arguments({name: value})


@pytest.mark.slow
def test_checkpoints_of_another_run(hf_model: Callable[[str], Path], shard: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    given = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    train(run(hf_model("llama"), shard, output, **given))
    with pytest.raises(NVError, match="checkpoint-2 of another run"):
        train(run(hf_model("llama"), shard, output, **given))
    with pytest.raises(NVError, match="another training run: seed is 42 there, and 7 here"):
        train(run(hf_model("llama"), shard, output, **given, seed=7, resume_from_checkpoint="latest"))
    train(run(hf_model("llama"), shard, output, **given, seed=7, overwrite_output_dir=True))


STEPS, EVERY = 12, 2


def command(model: Path, data: Path, output: Path) -> list[str]:
    return [sys.executable, "-m", "tinygrad_nv", "train", str(model), str(data), "--max-steps", str(STEPS),
            "--per-device-train-batch-size", "2", "--max-length", "48", "--learning-rate", "1e-2",
            "--save-steps", str(EVERY), "--output-dir", str(output), "--report-to", "none",
            "--resume-from-checkpoint", "latest"]


def steps_of(output: Path) -> int:
    """The last step that a log has."""
    path = output / "log.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line)["step"] for line in lines if line.endswith("}")]
    return max(found, default=0)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [2, 20])
def test_a_killed_run_goes_on(hf_model: Callable[[str], Path], tmp_path: Path, kills: int) -> None:
    """The weights at the end have the bits of a run that was left alone, and no kill costs more than the
    steps since the last checkpoint."""
    data, chance = tmp_path / "ids.npy", random.Random(kills)
    np.save(data, np.tile(np.arange(3, 103, dtype=np.uint16), 40))
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    subprocess.run(command(hf_model("llama"), data, alone), check=True, capture_output=True)
    begun = time.monotonic()
    subprocess.run(command(hf_model("llama"), data, tmp_path / "timed"), check=True, capture_output=True)
    usual = time.monotonic() - begun    # compiled before
    for _ in range(kills):
        process = subprocess.Popen(command(hf_model("llama"), data, killed), stderr=subprocess.DEVNULL)
        time.sleep(chance.uniform(0.3, 1) * usual)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        before = steps_of(killed)
        whole = [int(each.name.rpartition("-")[2]) for each in killed.glob("checkpoint-*")]
        assert max(whole, default=0) >= before - EVERY, (whole, before)
    subprocess.run(command(hf_model("llama"), data, killed), check=True, capture_output=True)
    assert steps_of(killed) == STEPS
    assert (killed / "model.safetensors").read_bytes() == (alone / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_an_interrupted_run_goes_on(hf_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Ctrl-C ends after the step that runs, with a checkpoint of it."""
    data = tmp_path / "ids.npy"
    np.save(data, np.tile(np.arange(3, 103, dtype=np.uint16), 40))
    alone, stopped = tmp_path / "alone", tmp_path / "stopped"
    subprocess.run(command(hf_model("llama"), data, alone), check=True, capture_output=True)
    process = subprocess.Popen(command(hf_model("llama"), data, stopped), stderr=subprocess.PIPE, text=True)
    while steps_of(stopped) < 3: time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    told = process.communicate()[1]
    assert process.returncode == 130, told
    assert f"stopped after step {steps_of(stopped)}" in told
    assert (stopped / f"checkpoint-{steps_of(stopped)}").is_dir()
    subprocess.run(command(hf_model("llama"), data, stopped), check=True, capture_output=True)
    assert (stopped / "model.safetensors").read_bytes() == (alone / "model.safetensors").read_bytes()
