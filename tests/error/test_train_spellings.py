"""Options of `train` as transformers and TRL spell them."""
from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tinygrad_nv import cli
from tinygrad_nv.errors import ConfigError
from tinygrad_nv.train.arguments import TrainingArguments, make_arguments


def given(*words: str) -> dict[str, Any]:
    found = vars(cli.parse_arguments(["train", "MODEL", *words, "DATA"]))
    assert found["words"] == ["MODEL", "DATA"]
    return found


@pytest.mark.parametrize(("words", "name", "value"), [
    (["--packing", "True"], "packing", True), (["--packing=False"], "packing", False),
    (["--gradient_checkpointing", "false"], "gradient_checkpointing", False),
    (["--use_peft"], "use_peft", True),
    (["--no_shuffle"], "shuffle", False), (["--bf16"], "bf16", True), (["--bf16", "False"], "bf16", False),
    (["--per_device_train_batch_size", "3"], "per_device_train_batch_size", 3),
    (["--torch_dtype", "bfloat16"], "torch_dtype", "bfloat16"), (["--lora_r=4"], "lora_r", 4)])
def test_options_and_their_values(words: list[str], name: str, value: Any):
    assert given(*words)[name] == value


def test_every_field_has_one_spelling_in_the_help(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit): cli.parse_arguments(["train", "--help"])
    shown = capsys.readouterr().out
    for each in dataclasses.fields(TrainingArguments):
        assert f"--{each.name.replace('_', '-')}" in shown
        if "_" in each.name: assert f"--{each.name}" not in shown


def test_names_of_a_dtype():
    for given in ({"bf16": True}, {"torch_dtype": "bfloat16"}):
        assert make_arguments(given).dtype == "bfloat16"
    assert make_arguments({"fp16": "True", "packing": "no"}).dtype == "float16"
    assert make_arguments({"bf16": False}).dtype == "float32"
    assert make_arguments({"bf16": True, "dtype": "bfloat16"}).dtype == "bfloat16"
    with pytest.raises(ConfigError,
                       match="bf16 and dtype float16"): make_arguments({"bf16": True, "dtype": "float16"})
    with pytest.raises(ConfigError, match="packing: 'maybe'"): make_arguments({"packing": "maybe"})
