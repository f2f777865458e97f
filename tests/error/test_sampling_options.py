"""Sampling and model options out of their range."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.errors import RequestError

OUT_OF_RANGE = [
    *[("top_p", value, "a number in (0, 1]") for value in ("0", "-0.1", "1.5", "nan", "inf", "-inf")],
    *[("temperature", value, "a number from 0 (greedy) to 3.4e38") for value in ("-1", "nan", "inf", "1e39")],
    *[("min_p", value, "a number in [0, 1]") for value in ("-0.1", "1.01", "nan")],
    *[("top_k", value, "a whole number ≥ 1, or 0 for every token") for value in ("-2", "1" + "0" * 400)],
    *[("repetition_penalty", value, "a number > 0 and at most 3.4e38 (1 is none)")
      for value in ("0", "-1", "nan", "inf", "1e308")],
    *[("max_tokens", value, "a whole number ≥ 1") for value in ("0", "-5")],
    *[("seed", value, "a whole number in [0, 2^64)") for value in ("-2", str(1 << 64))],
]


@pytest.mark.parametrize(("name", "value", "expected"), OUT_OF_RANGE,
                         ids=[f"{name}={value[:8]}" for name, value, _ in OUT_OF_RANGE])
def test_out_of_range(command, tiny: Path, name: str, value: str, expected: str):
    option = f"--{name.replace('_', '-')}={value}"
    number = float(value) if name in ("top_p", "temperature", "min_p", "repetition_penalty") else int(value)
    words = (f"{name} is {number}", f"expected: {expected}", f"to fix:   change {name}")
    if isinstance(number, int) and abs(number) >= 1 << 64:
        words = (f"argument --{name.replace('_', '-')}: {value[:40]}", "is no number of 64 bits")
    command("generate", tiny, "hello", option).refused(*words)


@pytest.mark.parametrize(("option", "value", "kind"), [
    ("--top-p", "high", "float"), ("--max-tokens", "1.5", "int"), ("--seed", "", "int"),
    ("--top-k", "all", "int")])
def test_not_a_number(command, tiny: Path, option: str, value: str, kind: str):
    command("generate", tiny, "hello", option, value).refused(
        f"argument {option}: invalid {kind} value: {value!r}", "usage: tinygrad-nv generate")


def test_an_empty_stop_string(command, tiny: Path):
    command("generate", tiny, "hello", "--stop", "").refused(
        "stop is ('',)", "expected: non-empty strings", "to fix:   change stop")


NAN, INF = float("nan"), float("inf")
REFUSED: list[tuple[str, Any, str]] = [
    *[("temperature", x, "a number from 0 (greedy) to 3.4e38") for x in (NAN, INF, True, "1", None)],
    *[("top_p", x, "a number in (0, 1]") for x in (True, "0.5")],
    *[("top_k", x, "a whole number ≥ 1, or 0 for every token") for x in (True, 1.0, None)],
    *[(name, x, "a number in [-2, 2] (0 is none)") for name in ("presence_penalty", "frequency_penalty")
      for x in (-2.1, 2.1, NAN, -INF, False)],
    *[("repetition_penalty", x, "a number > 0 and at most 3.4e38 (1 is none)") for x in (NAN, True)],
    *[("n", x, "a whole number ≥ 1") for x in (0, -1, True, 1.5)],
    *[("max_tokens", x, "a whole number ≥ 1") for x in (True, 1.0)],
    *[("min_tokens", x, "a whole number ≥ 0") for x in (-1, True, None)],
    ("min_tokens", 17, "at most max_tokens, 16"),
    *[("seed", x, "a whole number in [0, 2^64)") for x in (True, 0.5)],
    *[(name, x, "a whole number from 0 to 20") for name in ("logprobs", "prompt_logprobs")
      for x in (-1, 21, True, 2.0)],
    *[(name, x, "True or False") for name in ("ignore_eos", "include_stop_str_in_output") for x in (1, None)],
    *[("stop", x, "non-empty strings") for x in (("a", ""), (1,), 5)],
    *[("structured_outputs", x, "StructuredOutputsParams") for x in ("a*", {"regex": "a*"}, False)],
    *[("stop_token_ids", x, "token ids") for x in ((True,), (-1,), ("a",), 5)],
    *[("logit_bias", x, "a bias for token ids") for x in ({-1: 1.0}, {"1": 1.0}, {True: 1.0}, [(1, 1.0)])],
]


@pytest.mark.parametrize(("name", "value", "expected"), REFUSED, ids=[f"{n}={v!r}" for n, v, _ in REFUSED])
def test_parameters_that_are_none(name: str, value: Any, expected: str):
    with pytest.raises(RequestError) as caught: SamplingParams(**{name: value})
    error = caught.value
    assert (error.found, error.expected, error.fix) == (f"{name} is {value!r}", expected, f"change {name}")


@pytest.mark.parametrize("bias", [100.1, -101, NAN, INF, True, "1", None])
def test_a_bias_out_of_range(bias: Any):
    with pytest.raises(RequestError) as caught: SamplingParams(logit_bias={7: bias})
    assert caught.value.found == f"logit_bias of token 7 is {bias!r}"
    assert caught.value.expected == "a number in [-100, 100]"


def test_more_biases_than_there_may_be():
    assert SamplingParams(logit_bias=dict.fromkeys(range(300), 1.0)).filters.bias
    with pytest.raises(RequestError, match="logit_bias has 301 entries") as caught:
        SamplingParams(logit_bias=dict.fromkeys(range(301), 1.0))
    assert caught.value.expected == "at most 300"


def test_a_bias_of_no_token():
    params = SamplingParams(logit_bias={99: 1.0, 100: 1.0})
    params.require_vocabulary(101)
    with pytest.raises(RequestError, match="token id 100, which is not in the vocabulary") as caught:
        params.require_vocabulary(100)
    assert caught.value.expected == "0 to 99"


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
    directory = spoil(max_position_embeddings=2 ** 31)
    command("generate", directory, "hello", "--max-model-len", 2 ** 31).refused(
        "out of memory",
        "expected: room for weights, for the cache of the whole context and for --swap-space",
        "to fix:   lower --max-model-len or --swap-space, or use --dtype bfloat16")
