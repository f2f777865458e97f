"""Recorded answers of vLLM 0.32 (bench/serving/vllm_api_differences.py), and ours to the same calls."""
from __future__ import annotations

import json
from typing import Any

import pytest

from bench.serving.vllm_api_differences import RECORD, agree, answer_as_ours, read_differences
from tinygrad_nv.cli import DEFAULT_MODEL

THEIRS: dict[str, Any] = json.loads(RECORD.read_text())["answers"]
KNOWN = read_differences()


@pytest.fixture(scope="module")
def ours() -> dict[str, Any]: return dict(answer_as_ours(DEFAULT_MODEL, THEIRS))


def test_answers_are_vllms(ours: dict[str, Any]):
    """But those that are listed, with a reason."""
    different = {call for call, theirs in THEIRS.items() if not agree(theirs, ours[call])}
    assert different == KNOWN.keys(), "\n".join(
        f"{call}\n  vLLM: {THEIRS[call]}\n  ours: {ours[call]}" for call in different ^ KNOWN.keys())


def test_no_error_is_an_accident(ours: dict[str, Any]):
    """What is refused has a typed error, or is no call of Python."""
    errors = {found["error"] for found in ours.values() if isinstance(found, dict) and "error" in found}
    assert errors <= {"RequestError", "ConfigError", "TokenizerError", "TypeError", "AttributeError"}


@pytest.mark.parametrize(("one", "two"), [
    (1, True), (1, 2), ("a", None), ([1], [1, 2]), ([1], (1,)), ({"a": 1}, {"b": 1}), (0.5, 0.502), (None, 0),
    ({"error": "TypeError"}, [1]), ([[0.5]], [[0.6]]), ({"a": [1.0]}, {"a": ["1.0"]})], ids=str)
def test_what_does_not_agree(one: Any, two: Any):
    assert not agree(one, two)
    assert not agree(two, one)


def test_what_agrees():
    for one, two in ((0.5, 0.5004), ({"error": "ValueError"}, {"error": "RequestError"}),
                     ([{"a": -0.0}], [{"a": 0.0}])):
        assert agree(one, two)
