"""Training over ranks: options and plans that are refused before a rank starts or anything is sent."""
from __future__ import annotations

import socket
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tinygrad import Tensor, dtypes, nn

from tinygrad_nv.dist.collectives.functions import shift
from tinygrad_nv.dist.group import Group
from tinygrad_nv.dist.launcher import Launch, launch
from tinygrad_nv.dist.train.data_parallel import average_gradients
from tinygrad_nv.dist.train.experts import LocalExperts, dispatch
from tinygrad_nv.dist.train.fully_sharded import FullySharded
from tinygrad_nv.dist.train.pipeline import Pipeline, Recomputed
from tinygrad_nv.dist.train.ring_attention import ring_attention, zigzag
from tinygrad_nv.dist.train.schedules import one_f_one_b
from tinygrad_nv.dist.train.sequence import SequenceParallel
from tinygrad_nv.errors import ConfigError, DistError, ModelError, PlanError
from tinygrad_nv.models.config import ModelConfig, parse_config
from tinygrad_nv.train import context_parallel
from tinygrad_nv.train.arguments import TrainingArguments
from tinygrad_nv.train.layout import Layout, layout_of
from tinygrad_nv.train.plan import make_plan
from tinygrad_nv.train.ranks import TrainingRanks
from tinygrad_nv.train.run import _parallel
from tinygrad_nv.train.stages import stage_models


@pytest.mark.parametrize(("options", "words"), [
    ({"sequence_parallel": True}, "(?s)--sequence-parallel without --tensor-parallel-size.*2 or more"),
    ({"tensor_parallel_size": 0}, "--tensor-parallel-size 0"),
    ({"tensor_parallel_size": 2, "use_peft": True}, "(?s)--use-peft with --tensor-parallel-size 2, whose "
                                                    "ranks have parts of matrices.*weights that are all"),
    ({"tensor_parallel_size": 2, "zero_stage": 3}, "(?s)--zero-stage 3 with --tensor-parallel-size 2.*"
                                                   "--zero-stage 2 or less"),
    ({"tensor_parallel_size": 2, "precision": "fp8_delayed"}, "(?s)--precision fp8_delayed with "
                                                              "--tensor-parallel-size 2.*16 or 32 bits"),
    ({"tensor_parallel_size": 2, "optim": "muon"}, "(?s)--optim muon with --tensor-parallel-size 2.*adamw"),
    ({"tensor_parallel_size": 4, "optim": "adafactor"}, "--optim adafactor with --tensor-parallel-size 4"),
    ({"enable_expert_parallel": True}, "--enable-expert-parallel without --tensor-parallel-size"),
    ({"tensor_parallel_size": 2, "method": "dpo"}, "--method dpo with --tensor-parallel-size 2"),
    ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
     "(?s)--pipeline-parallel-size 2 with --tensor-parallel-size 2.*data parallel ranks"),
    ({"tensor_parallel_size": 2, "context_parallel_size": 2},
     "--context-parallel-size 2 with --tensor-parallel-size 2"),
    ({"zero_stage": 4}, r"(?s)--zero-stage 4.*0, 1, 2 or 3"),
    ({"zero_stage": 3, "use_peft": True}, r"(?s)--zero-stage 3 with --use-peft.*weights that are all "
                                          "trained.*choose --zero-stage 2"),
    ({"zero_stage": 1, "optim": "muon"}, "(?s)--optim muon with --zero-stage 1, whose ranks have parts of "
                                         "matrices.*adamw, lion or sgd"),
    ({"data_parallel_size": -1}, "--data-parallel-size -1"),
    ({"max_restarts": -1}, "--max-restarts -1")], ids=str)
def test_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words): TrainingArguments(**options)


def test_other_numbers_of_ranks() -> None:
    for fitting in (0, 2): layout_of(TrainingArguments(data_parallel_size=fitting), 2)
    with pytest.raises(ConfigError, match=r"(?s)--data-parallel-size 4, and a launcher has started 2 ranks.*"
                                          "leave the option out"):
        layout_of(TrainingArguments(data_parallel_size=4), 2)


def test_layouts_that_do_not_divide() -> None:
    four = TrainingArguments(tensor_parallel_size=4)
    with pytest.raises(ConfigError, match=r"(?s)--tensor-parallel-size 4, and a launcher has started 6 "
                                          "ranks.*a multiple of 4 ranks.*start as many"): layout_of(four, 6)
    both = TrainingArguments(tensor_parallel_size=2, data_parallel_size=2)
    with pytest.raises(ConfigError, match=r"(?s)--data-parallel-size 2 and --tensor-parallel-size 2, and a "
                                          r"launcher has started 1 rank\b.*4 ranks"): layout_of(both, 1)
    assert (layout_of(both, 4).data, layout_of(four, 8).data) == (2, 2)


def part_of(**fields: Any) -> tuple[TrainingRanks, Any]:
    """Rank 0 of two tensor parallel ranks, of which no other is there, and a config."""
    ranks = TrainingRanks.__new__(TrainingRanks)
    ranks.layout, ranks.rank = Layout(tensor=2), 0
    return ranks, SimpleNamespace(**{"moe": None, "latent": None, "num_kv_heads": 2, **fields})


def test_models_that_do_not_divide() -> None:
    ranks, config = part_of(moe=SimpleNamespace(experts=5))
    given = TrainingArguments(tensor_parallel_size=2, enable_expert_parallel=True)
    with pytest.raises(ConfigError, match=r"(?s)5 experts over 2 ranks.*as many experts on each"):
        _parallel(given, ranks, config)
    ranks, config = part_of(num_kv_heads=1)
    given = TrainingArguments(tensor_parallel_size=2, zero_stage=1)
    with pytest.raises(ConfigError, match=r"(?s)--zero-stage 1 with 1 key and value heads over 2 tensor"):
        _parallel(given, ranks, config)


def test_plans() -> None:
    with pytest.raises(PlanError, match=r"(?s)--plan with --tensor-parallel-size 2.*data parallel ranks.*"
                                        "tinygrad-nv plan"):
        make_plan("model", SimpleNamespace(), TrainingArguments(tensor_parallel_size=2))   # type: ignore[arg-type]


def test_restarts_of_several_hosts() -> None:
    with pytest.raises(DistError, match=r"(?s)--max-restarts 1 with --nodes 2.*0 with several hosts"):
        launch(Launch(("true",), 1, 2, master_addr="127.0.0.1", master_port=29500, max_restarts=1))
    with pytest.raises(DistError, match="--max-restarts -1"): launch(Launch(("true",), 1, max_restarts=-1))


@pytest.fixture(scope="module")
def pair() -> Group:
    """Rank 0 of 2, which is never called."""
    return Group("0-1", (0, 1), 0, 1.0)


def empty(*shape: int) -> Tensor: return Tensor.empty(*shape, dtype=dtypes.float32, device="CPU")


def test_a_parameter_without_a_gradient(pair: Group):
    used, unused = empty(2, 2), empty(3, 2)
    used.sum().backward()
    with pytest.raises(DistError, match=r"1 of 2 parameters have no gradient, the first of shape \(3, 2\)"):
        average_gradients([used, unused], pair)


def test_layers_of_several_dtypes(pair: Group):
    layer = nn.Linear(2, 2)
    layer.weight = layer.weight.cast(dtypes.float16)
    with pytest.raises(DistError, match=r"layer 1 has parameters of \['float', 'half'\]"):
        FullySharded([nn.Linear(2, 2), layer], pair)
    with pytest.raises(DistError, match="layer 0 has parameters of no dtype"):
        FullySharded([Tensor.relu], pair)


def test_pipelines_that_do_not_fit(pair: Group):
    stage = Recomputed(lambda x: x, [])
    with pytest.raises(DistError, match="a schedule of 3 ranks in a group of 2"):
        Pipeline(one_f_one_b(3, 3), pair, {0: stage}, (2,), dtypes.float32)
    with pytest.raises(DistError, match=r"(?s)rank 0 has stages \[1\].*\[0\], by the schedule"):
        Pipeline(one_f_one_b(2, 2), pair, {1: stage}, (2,), dtypes.float32)
    wide = Recomputed(lambda: Tensor.ones(3, device="CPU").contiguous(), [])
    with pytest.raises(DistError, match=r"F0 of stage 0 makes float \(3,\)"):
        Pipeline(one_f_one_b(2, 2), pair, {0: wide}, (2,), dtypes.float32).run()


def test_sequences_that_do_not_divide(pair: Group):
    with pytest.raises(DistError, match="5 tokens over 2 sequence parallel ranks"):
        SequenceParallel(pair).own(empty(1, 5, 4))
    with pytest.raises(DistError, match="a sequence of 6 over 2 ranks"): zigzag(empty(1, 1, 6, 4), pair)
    q = empty(1, 2, 3, 4)
    with pytest.raises(DistError, match="3 positions a rank"): ring_attention(q, q, q, pair)
    with pytest.raises(DistError, match="parts of one length"): ring_attention(q, q[:, :, :2], q, pair)


def test_experts_that_do_not_divide(pair: Group):
    experts = LocalExperts(empty(4, 8), empty(4, 6, 8), empty(4, 8, 3))
    with pytest.raises(DistError, match="4 experts on rank 0 of 2, of 4 of the router"):
        dispatch(empty(2, 8), experts, pair)


def test_shifts(pair: Group):
    with pytest.raises(DistError, match="shift of a tensor on PYTHON"):
        shift(Tensor.empty(2, device="PYTHON"), pair)


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
def test_pipeline_options(options: dict[str, Any], words: str) -> None:
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
def test_pipeline_plans(name: str) -> None:
    with pytest.raises(PlanError, match=f"--plan with --{name}-parallel-size 2"):
        make_plan("model", config(), TrainingArguments(**{f"{name}_parallel_size": 2}))


# **** ranks that cannot be started or found; tests/unit/dist has what ranks themselves say ****

@pytest.mark.parametrize(("words", "said"), [
    (("-n", "2"), ("no COMMAND", "tinygrad-nv launch -n 2 python train.py")),
    (("-n", "0", "true"), ("-n 0", "1 or more ranks")),
    (("-n", "2", "no-such-program"), ("'no-such-program' cannot be started: No such file", "in PATH")),
    (("-n", "2", "/"), ("'/' cannot be started: Permission denied",)),
    (("-n", "2", "--nodes", "2", "true"), ("--nodes 2 without --master-addr and --master-port",
                                           "the host with --node-rank 0")),
    (("-n", "2", "--nodes", "2", "--node-rank", "2", "true"), ("--node-rank 2 of --nodes 2", "0 to 1")),
    (("-n", "2", "--nodes", "0", "true"), ("--node-rank 0 of --nodes 0", "1 or more hosts")),
    (("-n", "2", "--master-port", "70000", "true"), ("--master-port 70000", "1 to 65535")),
    (("-n", "2", "--grace", "-1", "true"), ("--grace -1", "seconds, 0 or more")),
    (("-n", "2", "--log-dir", "/proc/none", "true"), ("the system refused", "/proc/none"))])
def test_launches_that_cannot_be(words: tuple[str, ...], said: tuple[str, ...], command):
    command("launch", *words).refused(*said)


def test_a_port_that_is_taken(command):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command("launch", "-n", "2", "--master-port", port, "true").refused(
            f"port {port} of 127.0.0.1 is taken", "a free port for the store of rank 0",
            "choose another --master-port")


@pytest.mark.parametrize("text", ["abc", "8", ""])
def test_numbers_that_are_none(text: str, command):
    assert command("launch", "-n", text, "-n").code == 2
