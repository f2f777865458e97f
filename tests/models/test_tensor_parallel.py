"""Networks of several ranks: logits of each family are those of one device."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.dist import rank_programs
from tests.support.models.families import CASES, saved
from tinygrad_nv.errors import ModelError
from tinygrad_nv.models.config import read_config
from tinygrad_nv.models.parallel import local_config

PROGRAM = "models/logits_program.py"


def require_right(directories: list[str], ranks: int, timeout_s: float) -> None:
    made = rank_programs.run(PROGRAM, ranks, *directories, timeout_s=timeout_s)
    assert all(each.code == 0 for each in made), "".join(each.text for each in made)
    for directory in directories: assert f"{directory}: right" in made[0].text, made[0].text


def test_two_ranks(tmp_path: Path):
    """Norms over all heads, and experts that stay whole, of which a rank has one more than the other."""
    case = CASES["olmoe"]
    one = replace(case, fields={**case.fields, "num_hidden_layers": 1})
    require_right([f"{saved(one, tmp_path, 7)}+ep"], 2, 300)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_family(hf_model: Callable[[str], Path], ranks: int):
    """Of those that have experts also with experts that stay whole."""
    arguments = []
    for name in CASES:
        config = read_config(hf_model(name))
        for experts in (False, True):
            try: local_config(config, ranks, experts)
            except ModelError: continue
            arguments.append(f"{hf_model(name)}{'+ep' * experts}")
    assert len(arguments) > len(CASES) * 2 // 3
    require_right(arguments, ranks, 3600)
