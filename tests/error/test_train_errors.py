"""Options, optimisers, losses and functions of training that cannot be: what was found, what is accepted."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tinygrad import Tensor, dtypes

from tinygrad_nv import cli
from tinygrad_nv.errors import ConfigError, ModelError, SpecError
from tinygrad_nv.functional import (
    cross_entropy,
    distillation,
    gate_up,
    linear_cross_entropy,
    linear_distillation,
    rotate_heads,
)
from tinygrad_nv.models.config import read_config
from tinygrad_nv.quant.activations import SparseWeight
from tinygrad_nv.quant.sparse import SparseTensor, buffers
from tinygrad_nv.quant.tensor import in_memory
from tinygrad_nv.tile.column_sum.spec import ColumnSumSpec
from tinygrad_nv.tile.expression import Load, Sum
from tinygrad_nv.tile.rope.spec import Angles, RopeSpec
from tinygrad_nv.train import network
from tinygrad_nv.train.arguments import TrainingArguments, make_arguments
from tinygrad_nv.train.optimizers import (
    ParameterGroup,
    ScheduleOptions,
    StateOptions,
    WeightAverage,
    adafactor,
    adamw,
    lion,
    muon,
    schedule,
    sgd,
)
from tinygrad_nv.train.plan import rank_memory
from tinygrad_nv.train.regions import checkpoint


@pytest.mark.parametrize(("options", "words"), [
    ({"quantization": "int3", "use_peft": True}, r"(?s)--quantization int3.*fp8_per_block.*bitsandbytes"),
    ({"quantization": "int8"}, r"(?s)--quantization int8 without --use-peft.*an adapter"),
    ({"load_in_4bit": True}, r"(?s)--quantization bitsandbytes without --use-peft"),
    ({"load_in_4bit": True, "quantization": "fp8", "use_peft": True},
     r"(?s)--load-in-4bit with --quantization fp8.*bitsandbytes")])
def test_options(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words): TrainingArguments(**options)      # type: ignore[arg-type]


def test_weights(tiny: Path) -> None:
    model = network.open_network(tiny, dtypes.float32, quantization="int8")
    with pytest.raises(ModelError, match=r"(?s)the weights are quantised.*an adapter.*--use-peft"):
        network.require_trainable(model, adapter=False, fp8=False)
    with pytest.raises(ModelError, match=r"(?s)quantised, and --precision is of FP8.*--precision bfloat16"):
        network.require_trainable(model, adapter=True, fp8=True)
    network.require_trainable(model, adapter=True, fp8=False)
    sparse = SparseTensor(dtypes.bfloat16, (8, 64), *(
        Tensor.empty(*shape, dtype=in_memory(dtype))
        for shape, dtype in buffers(dtypes.bfloat16, 8, 64).values()))
    model.blocks[0].feed_forward.down.parts = SparseWeight(sparse),
    with pytest.raises(ModelError, match=r"(?s)the weights are 2:4 sparse.*dense weights"):
        network.require_trainable(model, adapter=True, fp8=False)


def test_plans(tiny: Path) -> None:
    config = replace(read_config(tiny), quantization={"quant_method": "awq"})
    with pytest.raises(ConfigError, match=r"(?s)--plan of quantised weights.*--quantization"):
        rank_memory(config, TrainingArguments(use_peft=True, max_length=16), 1, "CPU")


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


def test_policies():
    words = r"(?s)policy 'all'.*full, selective, dots, offload, none, or a budget"
    with pytest.raises(ConfigError, match=words): checkpoint(lambda x: x, "all")
    with pytest.raises(ConfigError, match=r"(?s)budget 1.5.*a share from 0 to 1"):
        checkpoint(lambda x: x, budget=1.5)
    with pytest.raises(ConfigError, match=r"policy 'half'"):
        TrainingArguments(gradient_checkpointing_policy="half")
    with pytest.raises(ConfigError, match=r"budget -1.0"):
        TrainingArguments(gradient_checkpointing_policy="-1")


def test_results():
    with pytest.raises(SpecError, match=r"a region that returns a tuple"):
        checkpoint(lambda x: (x, x))(Tensor.empty(2))


def held(dtype: Any = dtypes.float32) -> dict[str, Tensor]:
    return {"a.weight": Tensor.zeros(4, 4, dtype=dtype).contiguous(), "a.bias": Tensor.zeros(4).contiguous()}


@pytest.mark.parametrize(("make", "words"), [
    (lambda: adamw({}), "an optimizer without parameters"),
    (lambda: adamw(held(), -1.0), "learning rate -1.0"),
    (lambda: adamw(held(), betas=(0.9, 1.0)), r"betas \(0.9, 1.0\)"),
    (lambda: lion(held(), betas=(-0.1, 0.9)), "betas"),
    (lambda: adamw(held(dtypes.int32)), "a.weight of int"),
    (lambda: adamw(held(dtypes.float16), options=StateOptions(master=False)),
     "a.weight of half without master weights|a.weight of float16 without master weights"),
    (lambda: adamw(held(), groups=[ParameterGroup(("a.weight",))]), "a.bias in no parameter group"),
    (lambda: adamw(held(), groups=[ParameterGroup(("b",))]), "a parameter group with 'b'"),
    (lambda: adamw(held(), groups=[ParameterGroup(("a.bias",)), ParameterGroup(("a.bias", "a.weight"))]),
     "a.bias in two parameter groups"),
    (lambda: adamw(held(), weight_decay=-0.1), "weight decay -0.1"),
    (lambda: adamw(held(), options=StateOptions(rows={"b": (1,)})), "rows of 'b'"),
    (lambda: muon(held(), options=StateOptions(rows={"a.weight": (1, 2)})), "rows 1, 2 of a.weight"),
    (lambda: StateOptions(max_grad_norm=0.0), "max_grad_norm 0.0"),
    (lambda: StateOptions(bits=4), "state of 4 bits"),
    (lambda: StateOptions(bits=8, paged=True), "paged state of 8 bits"),
    (lambda: StateOptions(seed=-1), "seed -1"),
    (lambda: sgd(held(), momentum=-1.0), "momentum -1.0"),
    (lambda: sgd(held(), nesterov=True), "nesterov without momentum"),
    (lambda: adafactor(held(), beta2_decay=0.1), "beta2_decay 0.1"),
    (lambda: adafactor(held(), d=0.5), "d 0.5"),
    (lambda: muon(held(), ns_steps=0), "0 steps of Newton-Schulz"),
    (lambda: muon(held(), adjust_lr="none"), "adjust_lr 'none'"),
    (lambda: muon(held(), dtype=dtypes.float16), "Newton-Schulz in"),
    (lambda: WeightAverage(held(), 1.0), "a decay of 1.0"),
    (lambda: schedule("cosin", 10), "lr_scheduler_type 'cosin'"),
    (lambda: schedule("linear", 0), "0 warm-up steps of 0"),
    (lambda: schedule("cosine_with_min_lr", 9, 0, ScheduleOptions(min_lr_rate=2)), "min_lr_rate 2"),
    (lambda: schedule("warmup_stable_decay", 9, 5, ScheduleOptions(decay_steps=5)),
     "5 steps of warm-up and 5 of decay in 9"),
    (lambda: schedule("warmup_stable_decay", 9, 0, ScheduleOptions(decay_type="sqrt")), "a curve 'sqrt'"),
])
def test_words(make: Callable[[], Any], words: str):
    with pytest.raises(ConfigError, match=words): make()


LOGITS, HIDDEN, WEIGHT = Tensor.zeros(4, 9), Tensor.zeros(4, 8), Tensor.zeros(9, 8)
LABELS = Tensor.zeros(4, dtype=dtypes.int32)


def linear(**options: Any) -> Tensor: return linear_cross_entropy(HIDDEN, WEIGHT, LABELS, **options)


def taught(**options: Any) -> Tensor: return linear_distillation(HIDDEN, WEIGHT, LABELS, **options)


CASES: dict[str, tuple[Callable[[], Tensor], str]] = {
    "labels' shape": (lambda: cross_entropy(LOGITS, LABELS[:3]), r"labels \(3,\) beside logits \(4, 9\)"),
    "labels' dtype": (lambda: cross_entropy(LOGITS, LABELS.float()), "labels of f32\n  expected: integers"),
    "logits' dtype": (lambda: cross_entropy(LOGITS.int(), LABELS), "logits of s32"),
    "reduction": (lambda: linear(reduction="max"), "reduction='max'\n  expected: \"mean\", \"sum\""),
    "items of a sum": (lambda: linear(reduction="sum", num_items=3), "num_items with reduction='sum'"),
    "no items": (lambda: linear(num_items=0), "num_items=0\n  expected: a number of labels, from 1 on"),
    "smoothing": (lambda: linear(label_smoothing=1.5), "label_smoothing=1.5\n  expected: 0 to 1"),
    "z-loss": (lambda: linear(z_loss=-1.0), "z_loss=-1.0"),
    "soft-cap": (lambda: linear(softcap=0.0), "softcap=0.0\n  expected: a finite number above 0"),
    "divisor": (lambda: linear(divisor=0.0), "divisor=0.0"),
    "ignored": (lambda: linear(ignore_index=1 << 40), "ignore_index=1099511627776\n  expected: an int32"),
    "chunk": (lambda: linear(chunk=-1), "chunk=-1\n  expected: a number of rows, or 0"),
    "bias": (lambda: linear(bias=Tensor.zeros(8)), r"bias of f32 \(8,\)\n  expected: floats \(9,\)"),
    "weight": (lambda: linear_cross_entropy(HIDDEN, WEIGHT.half(), LABELS), r"weight of f16 \(9, 8\)"),
    "temperature": (lambda: distillation(LOGITS, LOGITS, temperature=0.0), "temperature=0.0"),
    "teacher's logits": (lambda: distillation(LOGITS, LOGITS[:, :3]), r"a teacher's logits of f32 \(4, 3\)"),
    "no teacher": (lambda: taught(), "a teacher of nothing"),
    "half a teacher": (lambda: taught(teacher_hidden=HIDDEN), "a teacher of hidden states"),
    "two teachers": (lambda: taught(teacher_logits=LOGITS, teacher_weight=WEIGHT), "of logits and a weight"),
    "teacher's classes": (lambda: taught(teacher_hidden=HIDDEN, teacher_weight=WEIGHT[:5]),
                          r"teacher_weight of f32 \(5, 8\)\n  expected: f32 \(9, 8\)")}


@pytest.mark.parametrize("name", CASES)
def test_refused(name: str):
    made, words = CASES[name]
    with pytest.raises(SpecError, match=words): made()


F32, BF16 = dtypes.float32, dtypes.bfloat16
X, COS = Tensor.empty(2, 7, 5 * 32), Tensor.empty(7, 16)


@pytest.mark.parametrize(("both", "activation", "words"), [
    (Tensor.empty(2, 8), "relu", ("activation='relu'", "one of silu, gelu_tanh, gelu")),
    (Tensor.empty(2, 7), "silu", ("gate | up of shape (2, 7)", "gate, then up")),
    (Tensor.empty(2, 8, dtype=dtypes.int32), "silu", ("gate | up of int", "float32, bfloat16 or float16"))])
def test_gated_activations(both: Tensor, activation: str, words: tuple[str, ...]):
    with pytest.raises(SpecError) as refused: gate_up(both, activation)
    assert all(each in str(refused.value) for each in words), refused.value


@pytest.mark.parametrize(("x", "cos", "sin", "heads", "words"), [
    (X, COS, COS, 0, ("0 and 1 heads", "one or more")),
    (X[0], COS, COS, 3, ("q|k|v of shape", "(B, T, 5 D)")),
    (X, COS[1:], COS[1:], 3, ("cos (6, 16)", "(7, half) or (2, 7, half)", "half ≤ 16")),
    (X, COS, COS.cast(BF16), 3, ("of both",)), (X.cast(dtypes.int32), COS, COS, 3, ("q|k|v of int",))])
def test_rotated_heads(x: Tensor, cos: Tensor, sin: Tensor, heads: int, words: tuple[str, ...]):
    with pytest.raises(SpecError) as refused: rotate_heads(x, cos, sin, heads, 1)
    assert all(each in str(refused.value) for each in words), refused.value


def test_specs():
    x = Load(0, F32, 4, 1)
    for term, words in ((x.cast(BF16), "terms of bf16"), (x * Sum(), "a statistic in a term"),
                        (Load(0, F32, 4, 1, (8,)), "loads of a batch")):
        with pytest.raises(SpecError, match=words): ColumnSumSpec(8, 4, term)
    with pytest.raises(SpecError, match="no more rotated"): RopeSpec(1, 1, 1, 1, 8, 5, F32, Angles(F32, 5))
    with pytest.raises(SpecError, match="s32"): RopeSpec(1, 1, 1, 1, 8, 4, dtypes.int32, Angles(F32, 4))
