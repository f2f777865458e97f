"""Training over ranks by options: what is refused before a rank starts."""
from __future__ import annotations

from typing import Any

import pytest

from tinygrad_nv.dist.launcher import Launch, launch
from tinygrad_nv.errors import ConfigError, DistError
from tinygrad_nv.train.arguments import TrainingArguments
from tinygrad_nv.train.layout import layout_of


@pytest.mark.parametrize(("options", "words"), [
    ({"tensor_parallel_size": 2}, "--tensor-parallel-size 2, which training does not have"),
    ({"sequence_parallel": True}, "--sequence-parallel, which training does not have"),
    ({"enable_expert_parallel": True}, "--enable-expert-parallel, which"),
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


def test_restarts_of_several_hosts() -> None:
    with pytest.raises(DistError, match=r"(?s)--max-restarts 1 with --nodes 2.*0 with several hosts"):
        launch(Launch(("true",), 1, 2, master_addr="127.0.0.1", master_port=29500, max_restarts=1))
    with pytest.raises(DistError, match="--max-restarts -1"): launch(Launch(("true",), 1, max_restarts=-1))
