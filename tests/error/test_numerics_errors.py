"""Policies of dtypes, recipes of precision, safe norms, sentinels and replay: what is refused, in words."""
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinygrad import dtypes

from tinygrad_nv import Tensor, layer
from tinygrad_nv.errors import ConfigError, NumericsError, ReplayError, SpecError
from tinygrad_nv.functional import Fp8Linear, fp8_linear
from tinygrad_nv.numerics import (
    DelayedScaling,
    Float8CurrentScaling,
    HighPrecision,
    LossScaling,
    PrecisionRecipe,
)
from tinygrad_nv.numerics.meet import meet
from tinygrad_nv.numerics.policy import (
    accum,
    deterministic,
    loss_scale,
    saturate,
    stochastic_round,
    with_policies,
)
from tinygrad_nv.numerics.replay import record, replay
from tinygrad_nv.numerics.replay.recorder import record_kernels
from tinygrad_nv.numerics.safe import layernorm_safe, logsumexp_safe, rmsnorm_safe, softmax_safe
from tinygrad_nv.numerics.verify import numerics, sentinels
from tinygrad_nv.train import network
from tinygrad_nv.train.arguments import TrainingArguments
from tinygrad_nv.train.network import in_fp8
from tinygrad_nv.train.optimizers import StateOptions

f16, bf16, f32 = dtypes.float16, dtypes.bfloat16, dtypes.float32
e4m3, int8, int32 = dtypes.fp8e4m3, dtypes.int8, dtypes.int32


@pytest.mark.parametrize(("make", "words"), [
    (lambda: bf16 @ accum(f32) @ accum(bf16), r"(?s)accum\(f32\) and accum\(bf16\).*one of them"),
    (lambda: bf16 @ accum(f16), r"(?s)bf16 @accum\(f16\): sums overflow from 2\^16 on.*accum\(bf16\)"),
    (lambda: f32 @ accum(bf16), r"(?s)8 bits of significand for operands of 24.*accum\(f64\), accum\(f32\)"),
    (lambda: f16 @ accum(bf16), "8 bits of significand for operands of 11"),
    (lambda: int8 @ accum(int8), r"(?s)s8 @accum\(s8\).*integers of 32 bits or more"),
    (lambda: int8 @ accum(f32), r"accum\(int32\), and a scale after the sum"),
    (lambda: dtypes.int8 @ accum(dtypes.uint32), "integers of 32 bits"),
    (lambda: dtypes.bool @ accum(f32), "floats or integers"),
    (lambda: bf16 @ accum(int32), "a float that holds every bf16"),
    (lambda: f32 @ stochastic_round, r"(?s)f32 @stochastic_round: nothing is rounded.*f16, bf16, e4m3, e5m2"),
    (lambda: f32 @ saturate, "f32 @saturate: sums reach no further"),
    (lambda: int32 @ saturate, "s32 @saturate"),
    (lambda: f32 @ loss_scale(8), r"f32 @loss_scale\(8\): small gradients"),
    (lambda: loss_scale(3), r"(?s)loss_scale\(3\).*a power of two"),
    (lambda: loss_scale(float("inf")), "a power of two"), (lambda: loss_scale(-2), "a power of two"),
    (lambda: stochastic_round(seed=-1), "an integer of 64 bits"),
    (lambda: bf16 @ stochastic_round(seed=1) @ stochastic_round(seed=2), "seed=1.*and.*seed=2"),
    (lambda: bf16 @ stochastic_round @ deterministic, r"(?s)drawn anew.*stochastic_round\(seed=…\)"),
    (lambda: f16 @ saturate @ loss_scale(8), "(?s)hides the overflow.*leave saturate out"),
    (lambda: bf16 @ accum(f32) @ 3, "@ 3"), (lambda: 3 @ accum(f32), r"(?s)3 @accum\(f32\).*a dtype"),
])
def test_policies(make: Callable[[], Any], words: str):
    with pytest.raises(NumericsError, match=words): make()


@pytest.mark.parametrize(("a", "b", "operation", "words"), [
    (bf16 @ accum(f32), bf16 @ accum(bf16), "multiply", r"accum\(f32\) and accum\(bf16\) in one operation"),
    (bf16, f16, "add", "neither bf16 nor f16 holds"),
    (int8, bf16, "multiply", "(?s)codes meet floats.*dequantise"),
    (int8, dtypes.uint8, "multiply", "neither integer holds"),
    (f16 @ loss_scale(8), f16 @ loss_scale(4), "multiply", "a scale of 32"),
    (f16 @ loss_scale(8), f16, "add", "(?s)different scales are added.*divide"),
    (f16 @ loss_scale(8), f16 @ saturate, "multiply", "hides the overflow"),
    (bf16 @ deterministic, bf16 @ stochastic_round, "add", "drawn anew"),
    (bf16 @ accum(bf16), f32, "multiply", "8 bits of significand for operands of 24")])
def test_operands_that_do_not_meet(a: Any, b: Any, operation: str, words: str):
    with pytest.raises(NumericsError, match=words) as caught: meet(a, b, operation, ("q", "k"))
    assert f"q is {with_policies(a)}, k is {with_policies(b)}" in str(caught.value)


def test_an_operation_that_is_none():
    with pytest.raises(NumericsError, match=r"(?s)operation 'power'.*multiply, add"):
        meet(bf16, bf16, "power")


@pytest.mark.parametrize(("make", "words"), [
    (lambda: LossScaling(0.0), "init_scale 0.0"),
    (lambda: LossScaling(growth_factor=1.0), "growth_factor 1.0"),
    (lambda: LossScaling(backoff_factor=1.0), "backoff_factor 1.0"),
    (lambda: LossScaling(growth_interval=0), "growth_interval 0"),
    (lambda: DelayedScaling("e5m2"), r"(?s)fp8_format 'e5m2'.*hybrid, e4m3"),
    (lambda: DelayedScaling(amax_history_len=0), "amax_history_len 0"),
    (lambda: DelayedScaling(amax_compute_algo="mean"), r"(?s)amax_compute_algo 'mean'.*max, most_recent"),
    (lambda: DelayedScaling(margin=100), "margin 100"),
    (lambda: PrecisionRecipe(dtypes.int8), "weights of"),
    (lambda: PrecisionRecipe(dtypes.float16, master=False), "weights of float16 without master weights"),
    (lambda: StateOptions(loss_scaling=LossScaling(), skip_nonfinite=False),
     "loss_scaling without skip_nonfinite"),
    (lambda: TrainingArguments(precision="fp8"), r"(?s)--precision fp8.*fp8_delayed, fp8_current, fp8_block"),
    (lambda: TrainingArguments(precision="fp8_block", dtype="float16"),
     r"(?s)--dtype float16 with --precision fp8_block.*weights of bfloat16.*leave --dtype out"),
    (lambda: TrainingArguments(precision="bfloat16_sr", zero_stage=1),
     "--precision bfloat16_sr with --zero-stage 1"),
    (lambda: TrainingArguments(precision="fp8_delayed", zero_stage=3),
     r"(?s)--precision fp8_delayed with --zero-stage 3.*--zero-stage 2 or less"),
    (lambda: TrainingArguments(fp8_exclude=("*",)), r"(?s)--fp8-exclude with --precision float32.*fp8_block"),
    (lambda: TrainingArguments(precision="fp8_delayed", fp8_margin=99), "margin 99"),
    (lambda: TrainingArguments(precision="fp8_delayed", fp8_amax_compute_algo="least"),
     "--fp8-amax-compute-algo least"),
    (lambda: TrainingArguments(precision="fp8_delayed", fp8_format="e5m2"), r"(?s)--fp8-format e5m2.*hybrid"),
])
def test_recipes(make: Callable[[], Any], words: str):
    with pytest.raises(ConfigError, match=words): make()


def test_rules_that_leave_nothing(tmp_path: Path):
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
              "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
              "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64,
              "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = network.draw_weights(tmp_path, dtypes.float32, 0)
    with pytest.raises(ConfigError, match=r"(?s)FP8 without a matrix.*q_proj: excluded by \*.*lm_head"):
        in_fp8(model, Float8CurrentScaling(), HighPrecision(("*",)))
    with pytest.raises(ConfigError, match=r"(?s)--fp8-exclude down_proj, which names no matrix.*"
                                          r"model.layers.0.self_attn.q_proj"):
        in_fp8(model, Float8CurrentScaling(), HighPrecision(("down_proj",)))


@pytest.mark.parametrize(("how", "x", "w", "scales", "meter", "words"), [
    (Fp8Linear(), (4, 32), (16, 48), None, 9, r"x of shape \(4, 32\), w of \(16, 48\)"),
    (Fp8Linear(), (4, 40), (16, 40), None, 9, r"(?s)a matrix of \(16, 40\) in FP8.*multiples of 16"),
    (Fp8Linear("e3m4"), (4, 32), (16, 32), None, 9, r"(?s)formats e3m4, e5m2.*e4m3, e5m2"),
    (Fp8Linear(blocks=True), (4, 32), (16, 32), (1, 1, 1), 9, "scales of tensors with blocks"),
    (Fp8Linear(), (4, 32), (16, 32), None, 8, r"a meter of float \(8,\)")])
def test_layers(how: Fp8Linear, x: tuple[int, ...], w: tuple[int, ...], scales: tuple[int, ...] | None,
                meter: int, words: str):
    given = None if scales is None else tuple(Tensor.ones(n) for n in scales)
    with pytest.raises(SpecError, match=words):
        fp8_linear(how, Tensor.ones(*x), Tensor.ones(*w), given, Tensor.zeros(meter))


@pytest.mark.parametrize(("make", "words"), [
    (lambda: softmax_safe(Tensor.empty(2, 3, dtype=dtypes.int32)),
     r"(?s)softmax_safe of s32.*f32, bf16, f16.*x.float"),
    (lambda: logsumexp_safe(Tensor.empty(2, 3, dtype=dtypes.float64)), "logsumexp_safe of f64"),
    (lambda: layernorm_safe(Tensor.empty(2, 3), eps=0.0), r"(?s)layernorm_safe with eps=0.0.*1e-13 or more"),
    (lambda: rmsnorm_safe(Tensor.empty(2, 3), eps=1e-20), r"(?s)rmsnorm_safe with eps=1e-20.*1e-13 or more"),
    (lambda: rmsnorm_safe(Tensor.empty(2, 3), eps=float("nan")), "eps=nan"),
])
def test_safe_norms(make: Callable[[], Any], words: str):
    with pytest.raises(NumericsError, match=words): make()


def test_a_number_that_is_not_finite():
    w = Tensor(np.array([1e30, np.nan], np.float32)).realize()
    with pytest.raises(NumericsError) as caught, sentinels({"head.weight": w}), layer("head"):
        (w * 2).contiguous().realize()
    for words in ("NaN in element 1 of a tensor of 2 f32, written by", "layer head)",
                  "head.weight had 1 of 2 that are not finite",
                  "operand   head.weight: f32, 2 elements, 1e+30",
                  "expected: finite numbers", "to fix:   look at the operand of the largest magnitude first"):
        assert words in str(caught.value)


def test_a_result_out_of_its_range(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NV_DEBUG", "1")

    @numerics(bounded=[-1, 1])
    def doubled(x: Tensor) -> Tensor: return x * 2
    with pytest.raises(NumericsError) as caught: doubled(Tensor([3.0, -0.5]))
    for words in ("doubled has elements of -1 … 6", "by its graph alone they lie in",
                  "expected: numbers of -1 … 1", "to fix:   scale its operands, or state a wider range"):
        assert words in str(caught.value)


def doubled(x: Tensor, by: float = 2.0) -> Tensor: return x * by


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Of a run of one kernel."""
    record(tmp_path / "run.log", doubled, Tensor([1.0, 2.0]).realize())
    return tmp_path / "run.log"


def refused(log: Path, found: str, *words: str) -> None:
    with pytest.raises(ReplayError) as caught: replay(log)
    assert found in caught.value.found
    for word in words: assert word in str(caught.value)


def changed(log: Path, line: int, **fields: Any) -> None:
    lines = log.read_text().splitlines()
    lines[line] = json.dumps({**json.loads(lines[line]), **fields})
    log.write_text("\n".join(lines) + "\n")


def test_no_file(tmp_path: Path):
    refused(tmp_path / "none.log", "No such file", "record one: tinygrad-nv generate --record LOG")


@pytest.mark.parametrize("text", [b"", b"\xff\xfe\x00", b"hello\n", b"[1, 2]\n", b'{"format": "other"}\n',
                                  b"{}\n{}\n"])
def test_files_of_other_kinds(tmp_path: Path, text: bytes):
    (tmp_path / "other.log").write_bytes(text)
    refused(tmp_path / "other.log", "is no log of a run", '"format": "tinygrad_nv run"')


@pytest.mark.parametrize("version", [2, 0, "1", None])
def test_other_versions(log: Path, version: Any):
    changed(log, 0, version=version)
    refused(log, f"has version {version!r} of its format", "1 or earlier", "update this one")


def test_a_log_that_ends_early(log: Path):
    lines = log.read_text().splitlines()
    log.write_text("\n".join(lines[:-1]) + "\n")
    refused(log, "ends after 1 kernels, and the run did not", "record it again")
    log.write_text("\n".join([lines[0], lines[-1]]) + "\n")
    refused(log, "has 0 kernels and says 1")
    log.write_text(lines[0] + "\n" + lines[1][:40])
    refused(log, "line 2 is cut off")
    log.write_text(lines[0] + "\n3\n" + lines[2])
    refused(log, "line 2 is no object")


def test_lines_that_are_no_kernel(log: Path):
    changed(log, 1, variables=[])
    refused(log, "line 2 is no kernel")


def test_a_first_line_without_what_it_needs(log: Path):
    changed(log, 0, what=3)
    refused(log, "its first line has no what")


def test_arguments_that_are_not_there(log: Path):
    kept = log.with_name("run.log.safetensors")
    kept.write_bytes(kept.read_bytes()[:-4] + b"\x00\x00\x00\x00")
    refused(log, "run.log.safetensors is not what was recorded")
    kept.unlink()
    refused(log, "run.log.safetensors is not there", "move both files together")


@pytest.mark.parametrize(("name", "words"), [
    ("no_such_module:doubled", "which cannot be imported"), ("/no/such/file.py:doubled", "be imported"),
    ("json:no_such_name", "which has none"), ("json:", "which has none")])
def test_functions_that_are_not_there(log: Path, name: str, words: str):
    changed(log, 0, what={**json.loads(log.read_text().splitlines()[0])["what"], "function": name})
    refused(log, words, "call replay(path, fn)")
    assert replay(log, doubled).same


def test_a_command_line_is_for_the_command(log: Path):
    changed(log, 0, what={"command": ["generate", "x"]})
    refused(log, "is of a command line: generate x", f"tinygrad-nv replay {log}")


# **** recording ****

def test_functions_without_a_name(tmp_path: Path):
    def inside(x: Tensor) -> Tensor: return x
    for fn in (inside, lambda x: x):
        with pytest.raises(ReplayError, match="cannot be found again by its name"):
            record(tmp_path / "run.log", fn, Tensor([1.0]))


def test_arguments_that_are_no_json(tmp_path: Path):
    with pytest.raises(ReplayError, match="argument 2 is <object") as caught:
        record(tmp_path / "run.log", doubled, Tensor([1.0]), object())
    assert "Tensors, and what JSON can say" in str(caught.value)
    with pytest.raises(ReplayError, match="a keyword argument is"):
        record(tmp_path / "run.log", doubled, Tensor([1.0]), by={1, 2})


def test_arguments_that_are_too_large(tmp_path: Path):
    with pytest.raises(ReplayError, match="at most 1073741824, which are kept whole"):
        record(tmp_path / "run.log", doubled, Tensor.empty(1 << 14, 1 << 15))


def test_a_file_that_cannot_be_written(tmp_path: Path):
    with pytest.raises(ReplayError, match="a file that can be written"):
        record(tmp_path / "none" / "run.log", doubled)


def test_one_recorder_at_a_time():
    with record_kernels(lambda run: None), pytest.raises(ReplayError, match="inside of one"), \
            record_kernels(lambda run: None): pass
