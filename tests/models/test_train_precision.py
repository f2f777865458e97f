"""Training by recipes of precision: what is logged, skipped, saved, and gone on from."""
from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinygrad import Tensor

from tinygrad_nv.errors import TrainingError
from tinygrad_nv.models import tales
from tinygrad_nv.models.quantised.repack_file import bytes_of
from tinygrad_nv.train.arguments import TrainingArguments
from tinygrad_nv.train.run import Run, assemble
from tinygrad_nv.train.trainer import train

TALES = Path(tales.__file__).parent
KINDS = ("activation", "weight", "gradient")
COUNTERS = [f"fp8_{what}_{kind}" for what in ("clamped", "flushed") for kind in KINDS]
TINY = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 128, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "hidden_act": "silu", "tie_word_embeddings": True, "initializer_range": 0.2}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A directory with a model's configuration and token ids."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    np.save(tmp_path / "ids.npy", np.tile(np.arange(3, 103, dtype=np.uint16), 40))
    return tmp_path


def run(home: Path, output: str, **options: Any) -> Run:
    usual = {"max_steps": 4, "per_device_train_batch_size": 2, "max_length": 24, "learning_rate": 1e-2,
             "report_to": "none", "save_strategy": "no", "from_scratch": True,
             "lr_scheduler_type": "constant"}
    given = TrainingArguments(output_dir=str(home / output), **{**usual, **options})
    return assemble(given, home, [str(home / "ids.npy")], "CPU")


def log(home: Path, output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (home / output / "log.jsonl").read_text().splitlines()]


def state(made: Run) -> dict[str, bytes]:
    """The bits of all that a run goes on from."""
    return {name: bytes(bytes_of(each)) for name, each in made.tensors().items()}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("precision", [
    "fp8_delayed", "float16", pytest.param("fp8_block", marks=pytest.mark.slow),
    pytest.param("fp8_current", marks=pytest.mark.slow), pytest.param("bfloat16_sr", marks=pytest.mark.slow)])
def test_a_run_that_goes_on_has_the_same_bits(home: Path, precision: str) -> None:
    """Of two micro-batches a step; it learns, and the scales are among what is saved."""
    given = {"precision": precision, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 9,
             "gradient_accumulation_steps": 2, "fp8_amax_history_len": 2}
    whole = run(home, "whole", **given)
    train(whole)
    shutil.copytree(home / "whole", home / "part")
    shutil.rmtree(home / "part" / "checkpoint-4")
    again = run(home, "part", **given, resume_from_checkpoint="latest")
    train(again)
    assert state(again) == state(whole)
    rows = log(home, "whole")
    assert [row["loss"] for row in log(home, "part")] == [row["loss"] for row in rows]
    assert rows[-1]["loss"] < rows[0]["loss"]
    names = {"fp8_delayed": {"fp8.amax_history", "fp8.scale"},
             "float16": {"optimizer.loss_scale", "optimizer.growth_tracker"}}.get(precision, set())
    assert names <= state(again).keys()
    if precision.startswith("fp8"): assert all(name in rows[0] for name in COUNTERS)
    if precision == "float16": assert [row["loss_scale"] for row in rows] == [65536.0] * 4


@pytest.mark.sampled(1)
@pytest.mark.parametrize("precision", ["fp8_delayed", "fp8_current", "float16"])
def test_a_poisoned_batch_changes_nothing(home: Path, capsys: pytest.CaptureFixture[str],
                                          precision: str) -> None:
    """An infinity in the gradient: the step is skipped and said, its history forgotten, and the next is
    whole. Float16 alone halves the scale of its loss."""
    made = run(home, "out", precision=precision, max_steps=3)
    original, steps, states = made.objective.fill, [0], list[dict[str, bytes]]()

    def fill(batch: Any, count: int, number: int) -> None:
        steps[0] += 1
        states.append(state(made))
        original(batch, count, number)
        # the loss is divided by what a mean is over
        if steps[0] == 2: made.objective.inputs.count.assign(Tensor([0.0])).realize()
    made.objective.fill = fill     # type: ignore[method-assign]
    train(made)
    changed = {name for name in states[2] if states[2][name] != states[1][name]}
    scale = {"optimizer.loss_scale"} if precision == "float16" else set()
    # of a scale that has just moved the tracker is 0
    assert changed - {"optimizer.lr", "optimizer.growth_tracker"} == {"optimizer.skipped"} | scale
    last = state(made)
    assert {name for name in states[2] if states[2][name] != last[name]} > {"optimizer.step"}
    rows = log(home, "out")
    assert [bool(row.get("skipped")) for row in rows] == [False, True, False]
    assert "step 2 changed nothing: the norm of its gradients is" in capsys.readouterr().err
    if precision == "float16": assert [row["loss_scale"] for row in rows] == [65536.0, 65536.0, 32768.0]


def test_overflows_are_counted(home: Path) -> None:
    """Weights a thousand times as large as those that the scale is of: all but some are clamped."""
    made = run(home, "out", precision="fp8_delayed", max_steps=1, fp8_exclude=("*.q_proj",))
    assert made.fp8 is not None
    assert len(made.fp8.state.names) == 3
    linear = made.model.blocks[0].feed_forward.down
    linear.weight.assign(linear.weight * 1e5).realize()
    wanted = int((np.abs(linear.weight.float().numpy()) > 464).sum())
    assert wanted > 1000
    train(made)
    row = log(home, "out")[0]
    assert row["fp8_clamped_weight"] == wanted
    assert row["fp8_flushed_gradient"] > 0, "the first step's scale is 1"


@pytest.mark.slow
def test_a_line_has_the_counts_of_all_its_steps(home: Path) -> None:
    for name, steps in (("each", 1), ("all", 4)):
        train(run(home, name, precision="fp8_delayed", logging_steps=steps))
    (last,), rows = log(home, "all"), log(home, "each")
    assert {name: last[name] for name in COUNTERS} == {name: sum(row[name] for row in rows)
                                                       for name in COUNTERS}


@pytest.mark.slow
def test_recomputed_layers_have_the_same_bits(home: Path) -> None:
    """Figures of the quantisation come out of regions, too."""
    runs = [run(home, str(again), precision="fp8_delayed", gradient_checkpointing=again)
            for again in (False, True)]
    for made in runs: train(made)
    own, other = (state(made) for made in runs)
    assert own["fp8.amax_history"] == other["fp8.amax_history"]
    assert log(home, "False")[-1]["loss"] == pytest.approx(log(home, "True")[-1]["loss"], rel=1e-3)


@pytest.mark.slow
def test_an_adapter_on_layers_in_fp8(tmp_path: Path) -> None:
    """The matrices stay; their gradient is not computed, that of x is."""
    (tmp_path / "texts.jsonl").write_text("\n".join(
        json.dumps({"text": f"The fox sang {n} songs and went home."}) for n in range(8)))
    given = TrainingArguments(output_dir=str(tmp_path / "out"), max_steps=6, per_device_train_batch_size=4,
                              max_length=24, use_peft=True, lora_r=4, learning_rate=1e-2, report_to="none",
                              save_strategy="no", precision="fp8_current", lr_scheduler_type="constant")
    made = assemble(given, TALES, [str(tmp_path / "texts.jsonl")], "CPU")
    before = made.model.blocks[0].feed_forward.down.weight.float().numpy()
    train(made)
    rows = log(tmp_path, "out")
    assert rows[-1]["loss"] < rows[0]["loss"]
    np.testing.assert_array_equal(made.model.blocks[0].feed_forward.down.weight.float().numpy(), before)


def test_a_nan_of_fp8_is_named(home: Path) -> None:
    """An infinite weight is NaN in FP8: the run ends with its layer."""
    made = run(home, "out", precision="fp8_current", max_steps=1)
    weight = made.model.blocks[0].feed_forward.down.weight
    values = weight.float().numpy()
    values[0, 0] = np.inf
    weight.assign(Tensor(values).cast(weight.dtype)).realize()
    with pytest.raises(TrainingError, match=r"is model.layers.0, whose model.layers.0.mlp.down_proj.weight"):
        train(made)
