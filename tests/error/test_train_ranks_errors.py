"""Training over ranks by options: what is refused before a rank starts."""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tinygrad_nv.dist.launcher import Launch, launch
from tinygrad_nv.errors import ConfigError, DistError, PlanError
from tinygrad_nv.train.arguments import TrainingArguments
from tinygrad_nv.train.layout import Layout, layout_of
from tinygrad_nv.train.plan import make_plan
from tinygrad_nv.train.ranks import TrainingRanks
from tinygrad_nv.train.run import _parallel


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
