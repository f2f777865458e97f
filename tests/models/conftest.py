"""Random models of every family, written by transformers' own save_pretrained."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.models.families import CASES, saved


@pytest.fixture(scope="session")
def hf_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a case, written on first use."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            saved(CASES[name], made[name], len(name))
        return made[name]
    return make
