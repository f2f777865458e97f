"""Training with pipelines and contexts: what is refused before a step runs."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tinygrad import dtypes

from tinygrad_nv.dist.train.schedules import one_f_one_b
from tinygrad_nv.errors import ConfigError, ModelError, PlanError
from tinygrad_nv.models.config import ModelConfig, parse_config
from tinygrad_nv.train import context_parallel
from tinygrad_nv.train.arguments import TrainingArguments
from tinygrad_nv.train.plan import make_plan
from tinygrad_nv.train.stages import stage_models

PIPE = {"pipeline_parallel_size": 2}


@pytest.mark.parametrize(("options", "words"), [
    ({"pipeline_parallel_size": 0}, "--pipeline-parallel-size 0"),
    ({"context_parallel_size": 0}, "--context-parallel-size 0"),
    ({"pipeline_schedule": "1f1b"}, "(?s)--pipeline-schedule 1f1b without stages.*"
                                    "--pipeline-parallel-size N"),
    ({**PIPE, "pipeline_schedule": "zigzag"}, "(?s)--pipeline-schedule zigzag.*1f1b, gpipe, interleaved, "
                                              "zero-bubble"),
    ({**PIPE, "method": "dpo"}, "(?s)--method dpo with --pipeline-parallel-size 2.*some layers alone"),
    ({**PIPE, "use_peft": True}, "--use-peft with --pipeline-parallel-size 2"),
    ({**PIPE, "zero_stage": 3}, "--zero-stage 3 with --pipeline-parallel-size 2"),
    ({**PIPE, "precision": "fp8_current"}, "--precision fp8_current with --pipeline-parallel-size 2"),
    ({**PIPE, "sample_prompts": ("a fox",)}, "--sample-prompts with --pipeline-parallel-size 2"),
    ({**PIPE, "pipeline_schedule": "interleaved"}, "(?s)--gradient-accumulation-steps 1.*a multiple of 2 "
                                                   "micro-batches"),
    ({**PIPE, "pipeline_schedule": "interleaved", "zero_stage": 2, "gradient_accumulation_steps": 2},
     "(?s)--zero-stage 2 with --pipeline-schedule interleaved.*--zero-stage 1, or 1f1b")], ids=str)
def test_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words): TrainingArguments(**options)


def config(**more: object) -> ModelConfig:
    return parse_config({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 300,
                         "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
                         "num_attention_heads": 2, "max_position_embeddings": 64, **more}, "config.json")


@pytest.mark.parametrize(("options", "fields", "words"), [
    ({"method": "dpo"}, {}, "--method dpo, whose rows are whole"),
    ({"packing": True}, {}, "--packing, whose rows have several documents"),
    ({}, {"windows": (8, None)}, "attention in a sliding window"),
    ({}, {"sinks": True}, "attention with sinks")], ids=str)
def test_attention_that_is_not_in_parts(options: dict[str, Any], fields: dict[str, Any],
                                        words: str) -> None:
    """Causal attention over whole rows is all that goes round ranks."""
    arguments = TrainingArguments(context_parallel_size=2, **options)
    with pytest.raises(ConfigError, match=f"(?s)--context-parallel-size 2 and {words}.*causal attention over "
                                          "whole rows"):
        context_parallel.require(replace(config(), **fields), arguments)
    context_parallel.require(config(), TrainingArguments(context_parallel_size=2))


def test_more_stages_than_layers() -> None:
    with pytest.raises(ModelError, match=r"(?s)3 stages of a pipeline, and num_hidden_layers is 2.*most 2"):
        stage_models(config(), dtypes.float32, None, one_f_one_b(3, 1), 0)


@pytest.mark.parametrize("name", ["pipeline", "context"])
def test_plans(name: str) -> None:
    with pytest.raises(PlanError, match=f"--plan with --{name}-parallel-size 2"):
        make_plan("model", config(), TrainingArguments(**{f"{name}_parallel_size": 2}))
