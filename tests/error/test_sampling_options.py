"""Sampling and model options out of their range."""
from __future__ import annotations

from pathlib import Path

import pytest

OUT_OF_RANGE = [
    *[("top_p", value, "a number in (0, 1]") for value in ("0", "-0.1", "1.5", "nan", "inf", "-inf")],
    *[("temperature", value, "a number ≥ 0 (0 is greedy)") for value in ("-1", "nan", "inf", "1e39")],
    *[("min_p", value, "a number in [0, 1]") for value in ("-0.1", "1.01", "nan")],
    *[("top_k", value, "a whole number ≥ 1, or 0 for every token") for value in ("-2", "1" + "0" * 400)],
    *[("repetition_penalty", value, "a number > 0 (1 is none)") for value in ("0", "-1", "nan", "inf")],
    *[("max_tokens", value, "a whole number ≥ 1") for value in ("0", "-5")],
    *[("seed", value, "a whole number in [0, 2^64)") for value in ("-1", str(1 << 64))],
]


@pytest.mark.parametrize(("name", "value", "expected"), OUT_OF_RANGE,
                         ids=[f"{name}={value[:8]}" for name, value, _ in OUT_OF_RANGE])
def test_out_of_range(command, tiny: Path, name: str, value: str, expected: str):
    option = f"--{name.replace('_', '-')}={value}"
    number = float(value) if name in ("top_p", "temperature", "min_p", "repetition_penalty") else int(value)
    command("generate", tiny, "hello", option).refused(
        f"{name} is {number!r}", f"expected: {expected}", f"to fix:   change {name}")


@pytest.mark.parametrize(("option", "value", "kind"), [
    ("--top-p", "high", "float"), ("--max-tokens", "1.5", "int"), ("--seed", "", "int"),
    ("--top-k", "all", "int")])
def test_not_a_number(command, tiny: Path, option: str, value: str, kind: str):
    command("generate", tiny, "hello", option, value).refused(
        f"argument {option}: invalid {kind} value: {value!r}", "usage: tinygrad-nv generate")


def test_an_empty_stop_string(command, tiny: Path):
    command("generate", tiny, "hello", "--stop", "").refused(
        "stop is ('',)", "expected: non-empty strings", "to fix:   change stop")


@pytest.mark.parametrize("name", ["int8", "BF16", "float64", ""])
def test_an_unknown_dtype(command, tiny: Path, name: str):
    command("generate", tiny, "hello", "--dtype", name).refused(
        f"unknown dtype {name!r}", "expected: auto, float32, float16, bfloat16", "to fix:   change --dtype")


@pytest.mark.parametrize(("text", "tokens"), [
    ("257", 257), ("32k", 32000), ("32K", 32768), ("0.001k", 1), ("1", 1), ("-5", -5), ("1m", 10 ** 6),
    ("9M", 9 << 20)])
def test_a_context_the_model_does_not_have(command, tiny: Path, text: str, tokens: int):
    command("generate", tiny, "hello", f"--max-model-len={text}").refused(
        f"max_model_len is {tokens}", "expected: 2 to 256, the model's own length", "change --max-model-len")


@pytest.mark.parametrize("text", ["many", "", "k", "4x", "1.5", "nank", "infk", "1e400m"])
def test_a_context_that_is_no_number(command, tiny: Path, text: str):
    command("generate", tiny, "hello", f"--max-model-len={text}").refused(
        f"argument --max-model-len: {text!r} is not a number of tokens; write 4096, 32k or 32K")


def test_a_context_no_machine_holds(command, spoil):
    directory = spoil(max_position_embeddings=10 ** 15)
    command("generate", directory, "hello", "--max-model-len", 10 ** 14).refused(
        "out of memory", "expected: room for the weights and for the cache of the whole context",
        "to fix:   lower --max-model-len, or use --dtype bfloat16")
