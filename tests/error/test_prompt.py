"""Prompts, sampling options, drafts and constraints of structured output that cannot be: the words."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from tinygrad_nv import LLM, SamplingParams
from tinygrad_nv.cli import DEFAULT_MODEL
from tinygrad_nv.engine.speculation.draft_model import require_same_vocabulary
from tinygrad_nv.engine.speculation.ngram import parse_speculative
from tinygrad_nv.engine.structured_output.matcher import GrammarCompiler
from tinygrad_nv.engine.structured_output.params import MAX_BYTES
from tinygrad_nv.engine.structured_output.params import StructuredOutputsParams as Structured
from tinygrad_nv.engine.text.token_bytes import token_bytes
from tinygrad_nv.engine.text.tokenizer import Tokenizer
from tinygrad_nv.errors import ConfigError, ModelError, RequestError, TokenizerError


def test_an_empty_prompt(command, tiny: Path):
    command("generate", tiny, "").refused(
        "the prompt is empty", "expected: at least one character", "to fix:   write a prompt")


def test_no_token_ids(command, tiny: Path):
    command("generate", tiny, "--prompt-ids", "").refused(
        "the prompt has no tokens", "expected: at least one token id", "to fix:   pass a longer prompt")


@pytest.mark.parametrize(("ids", "bad"), [("300", 300), ("5,-1", -1), ("9" * 30, int("9" * 30))])
def test_a_token_id_out_of_the_vocabulary(command, tiny: Path, ids: str, bad: int):
    command("generate", tiny, "--prompt-ids", ids).refused(
        f"token id {bad} is out of vocabulary", "expected: 0 to 299",
        "to fix:   use ids of this model's tokenizer")


@pytest.mark.parametrize("count", [256, 257, 1000])
def test_a_prompt_longer_than_the_context(command, tiny: Path, count: int):
    command("generate", tiny, "--prompt-ids", "5," * count).refused(
        f"the prompt has {count} tokens, the context holds 256",
        "expected: at most 255, so that one can be added",
        "to fix:   shorten the prompt or raise --max-model-len")


def test_a_prompt_longer_than_the_context_that_was_asked_for(command, tiny: Path):
    command("generate", tiny, "--prompt-ids", "5," * 8, "--max-model-len", 8).refused(
        "the prompt has 8 tokens, the context holds 8", "at most 7")


def test_a_question_longer_than_the_context_is_refused_and_the_chat_goes_on(command, tiny: Path):
    outcome = command("chat", tiny, "--max-tokens", 2, "--ignore-eos",
                      stdin="hello\n" + "hello " * 400 + "\nhello\n").succeeded()
    assert outcome.out.count("\n\n") == 2
    assert "the context holds 256" in outcome.err
    assert outcome.err.count("to fix:") == 1


@pytest.mark.parametrize("text", ["1,x", "1;2", "1.5", "[1,2]", "0x10", "9" * 5000])
def test_token_ids_that_are_not_numbers(command, tiny: Path, text: str):
    command("generate", tiny, "--prompt-ids", text).refused(
        f"argument --prompt-ids: '{text[:100]}", "is not a list of token ids; write 1,2,3")


def test_a_prompt_that_is_not_utf8(command, tiny: Path):
    """Python hands bytes that are not UTF-8 over as lone surrogates."""
    command("generate", tiny, "caf\udce9").refused(
        "the prompt is not UTF-8: '\\udce9' at character 3", "expected: UTF-8 text", "--prompt-ids")


@pytest.mark.parametrize("words", [[], ["a", "b", "c"]])
def test_too_few_or_too_many_words(command, words: list[str]):
    command("generate", *words).refused(
        f"{len(words)} positional arguments", "expected: [MODEL] with --prompt-ids, else [MODEL] PROMPT",
        "to fix:   put the prompt in quotes")


def test_a_prompt_beside_token_ids(command, tiny: Path):
    command("generate", tiny, "hello", "--prompt-ids", "5").refused(
        "2 positional arguments", "expected: [MODEL] with --prompt-ids", "put the prompt in quotes")


def test_a_model_without_a_prompt(command, tiny: Path):
    command("generate", tiny).refused(
        f"{tiny} is a model, and no prompt follows it", "expected: [MODEL] PROMPT",
        "to fix:   add the text to continue, in quotes")


def test_what_is_no_prompt(tiny: Path):
    llm = LLM(tiny, max_num_seqs=1)
    params = SamplingParams(max_tokens=1)
    for wrong in (5, None, {"prompt": 5}, [{"prompt": ["x"]}], [[1.5]], [None]):
        with pytest.raises(RequestError, match=r"a prompt of type \w+: .*\n  expected: a text, or a list of"):
            llm.generate(wrong, params)  # type: ignore[arg-type]
    for right in ("a", {"prompt": "x"}, [{"prompt_token_ids": [5]}], [5, 9], np.array([5, 9]),
                  [np.array([5, 9])], ["a"], [[5]]):
        assert len(llm.generate(right, params)) == 1  # type: ignore[arg-type]
    assert len(llm.generate("a", [params])) == 1


def test_stop_strings_without_a_tokenizer(tiny: Path, tmp_path: Path):
    for each in tiny.iterdir():
        if "token" not in each.name: (tmp_path / each.name).write_bytes(each.read_bytes())
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
        LLM(tmp_path, max_num_seqs=1).generate([5, 9], SamplingParams(stop=("x",)))


# **** options ****

OUT_OF_RANGE = [
    *[("top_p", value, "a number in (0, 1]") for value in ("0", "-0.1", "1.5", "nan", "inf", "-inf")],
    *[("temperature", value, "a number from 0 (greedy) to 2") for value in ("-1", "nan", "inf", "2.1")],
    *[("min_p", value, "a number in [0, 1]") for value in ("-0.1", "1.01", "nan")],
    *[("top_k", value, "a whole number ≥ 1, or 0 for every token") for value in ("-2", "1" + "0" * 400)],
    *[("repetition_penalty", value, "a number > 0 and at most 3.4e38 (1 is none)")
      for value in ("0", "-1", "nan", "inf", "1e308")],
    *[("max_tokens", value, "a whole number ≥ 1") for value in ("0", "-5")],
    *[("seed", value, "a whole number in [-2^63, 2^64)") for value in (str(1 << 64), str(-(1 << 64)))],
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
        "stop is ['']", "expected: non-empty strings", "to fix:   change stop")


NAN, INF = float("nan"), float("inf")
REFUSED: list[tuple[str, Any, str]] = [
    *[("temperature", x, "a number from 0 (greedy) to 2") for x in (2.1, NAN, INF, True, "1", None)],
    *[("top_p", x, "a number in (0, 1]") for x in (True, "0.5")],
    *[("top_k", x, "a whole number ≥ 1, or 0 for every token") for x in (True, 1.0, None)],
    *[(name, x, "a number in [-2, 2] (0 is none)") for name in ("presence_penalty", "frequency_penalty")
      for x in (-2.1, 2.1, NAN, -INF, False)],
    *[("repetition_penalty", x, "a number > 0 and at most 3.4e38 (1 is none)") for x in (NAN, True)],
    *[("n", x, "a whole number ≥ 1") for x in (0, -1, True, 1.5)],
    *[("max_tokens", x, "a whole number ≥ 1") for x in (True, 1.0)],
    *[("min_tokens", x, "a whole number ≥ 0") for x in (-1, True, None)],
    ("min_tokens", 17, "at most max_tokens, 16"),
    *[("seed", x, "a whole number in [-2^63, 2^64)") for x in (True, 0.5)],
    *[(name, x, "a whole number from 0 to 20") for name in ("logprobs", "prompt_logprobs")
      for x in (-1, 21, False, 2.0)],
    *[(name, x, "True or False") for name in ("ignore_eos", "include_stop_str_in_output") for x in (2, "a")],
    *[("stop", x, "non-empty strings") for x in (["a", ""], [1], 5)],
    *[("structured_outputs", x, "StructuredOutputsParams") for x in ("a*", {"regex": "a*"}, False)],
    *[("stop_token_ids", x, "token ids") for x in ([True], [-1], ["a"], 5)],
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
    with pytest.raises(RequestError, match="token id 100, which is out of vocabulary") as caught:
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


# **** structured output ****

def nested(depth: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "string"}
    for _ in range(depth): made = {"properties": {"a": made}}
    return made


def named(count: int) -> dict[str, Any]: return {"properties": {f"p{i}": {} for i in range(count)}}


@pytest.mark.parametrize(("form", "words"), [
    ({}, "structured output with no constraint\n  expected: exactly one of json, regex, choice, "
         "grammar, json_object\n  to fix:   add one of them"),
    ({"regex": "a", "json_object": True}, "structured output with regex and json_object\n"),
    ({"regex": ""}, "the regex of the structured output is empty"),
    ({"regex": 3}, "the regex of the structured output is a int\n  expected: a text"),
    ({"regex": "a\ud800"}, r"the regex of the structured output is not UTF-8: '\ud800' at character 1"),
    ({"regex": "a" * (MAX_BYTES + 1)}, f"has {MAX_BYTES + 1} bytes\n  expected: at most {MAX_BYTES}"),
    ({"choice": []}, "the choice of the structured output is []\n  expected: texts, none empty"),
    ({"choice": ["a", ""]}, "the choice of the structured output is ['a', '']\n  expected: texts, none "),
    ({"choice": "ab"}, "the choice of the structured output is 'ab'\n  expected: a list of texts"),
    ({"choice": ["a", 1]}, "the choice of the structured output is ['a', 1]\n  expected: a list of "),
    ({"choice": ["a"] * 4097}, "choice of the structured output has 4097 texts\n  expected: at most 4096"),
    ({"grammar": "root ::= ("}, "the grammar of the structured output is not understood: "),
    ({"json": "{"}, "the JSON schema of the structured output is not JSON: "),
    ({"json": "[" * 100_000}, "the JSON schema of the structured output is not JSON: "),
    ({"json": False}, "the JSON schema of the structured output matches no value"),
    ({"json": {"enum": []}}, "the JSON schema of the structured output matches no value"),
    ({"json": [1]}, "the JSON schema of the structured output is a list\n  expected: an object, "),
    ({"json": {"const": float("nan")}}, "the JSON schema of the structured output is not JSON: "),
    ({"json": {"const": {1, 2}}}, "the JSON schema of the structured output is not JSON: "),
    ({"json": {"items": named(500), "$defs": {"a": named(1500)}}}, "has 2000 properties or more\n  expected: "
     "at most 1000"),
    ({"json": nested(60)}, "is more than 100 levels deep\n  expected: at most 100"),
    ({"json": {"items": {"multipleOf": 99999989}}}, "has multipleOf 99999989\n  expected: multiples "
     "of at most 10000, or of so much shifted by digits"),
    ({"json": {"$defs": {"a": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}},
                               "required": ["a"]}}, "$ref": "#/$defs/a"}}, "matches no value, or none that"),
    *(({"json": {"anyOf": [{"properties": {"a": {"type": kind, word: value}}}]}},
       f"has {word} {value!r}\n  expected: a whole number from 0 on")
      for kind, word, value in (("string", "minLength", True), ("object", "minProperties", False),
                                ("object", "minProperties", -1), ("array", "maxItems", 0.5),
                                ("string", "maxLength", "3"), ("array", "minItems", [1]))),
    ({"json": {"contains": {}, "minContains": False}}, "has minContains False\n"),
    ({"json": {"additionalProperties": False, "maxProperties": True}}, "has maxProperties True\n"),
    ({"json": {"propertyNames": {"minLength": False}}}, "has minLength False\n"),
    ({"json": {"x-guidance": {"lenient": True}}}, "has x-guidance\n  expected: keywords of JSON "),
])
def test_an_invalid_constraint(form: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError) as caught: Structured(**form)
    assert words in str(caught.value)


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    return GrammarCompiler(Tokenizer.load(DEFAULT_MODEL), 2048, [1], seconds=1.0)


LEAVE = "to fix:   leave it out, and check the answer for it afterwards"


@pytest.mark.sampled(18)
@pytest.mark.parametrize(("form", "words"), [
    ({"regex": "(a"}, "the regex of the structured output cannot be compiled: unclosed group\n  expected: a "
                      "regex of bounded size that some text matches, without look-around or back-references"),
    ({"regex": "(?=a)b"}, "look-around, including look-ahead and look-behind, is not supported"),
    ({"regex": r"(a)\1"}, "backreferences are not supported"),
    ({"grammar": "start: other"}, 'unknown name: "other"'),
    ({"grammar": "start: start"}, "the grammar of the structured output cannot be compiled"),
    ({"json": {"not": {"const": 1}}}, f'the JSON schema uses "not", which cannot be enforced while tokens '
     f"are sampled\n  expected: keywords that docs/structured.md names\n  {LEAVE}"),
    ({"json": {"type": "array", "uniqueItems": True, "contains": {}}}, "uniqueItems"),
    ({"json": {"if": {"type": "string"}, "then": {"maxLength": 1}}}, 'the JSON schema uses "if"'),
    ({"json": {"type": "object", "propertyNames": {"maxLength": 3}}}, 'the JSON schema uses "propertyNames"'),
    ({"json": {"type": "object", "unevaluatedProperties": False}}, '"unevaluatedProperties"'),
    ({"json": {"$dynamicRef": "#a"}}, 'the JSON schema uses "$dynamicRef"'),
    ({"json": {"$ref": "http://example.com/a"}}, "the JSON schema of the structured output cannot "),
    ({"json": {"type": "string", "format": "iri"}}, "the JSON schema has format 'iri', which is not "
     "known\n  expected: date-time, time, date, duration, email, hostname, ipv4, ipv6, uuid or uri"),
    ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum (5) is greater than maximum"),
    ({"json": {"type": "object", "minProperties": 2}}, None),
    ({"json": {"properties": {"a": {}, "b": {}}, "minProperties": 2}}, "min/maxProperties only "),
    ({"json": {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(4)]}
                                for i in range(8)]}}, "schema too large"),
    ({"json": {"allOf": [{"type": "integer", "multipleOf": m} for m in (97, 89, 101)]}},
     "the JSON schema takes more than 1 s to compile\n  expected: a grammar that compiles in that time"),
    ({"json": {"properties": {f"p{i}": {"type": "string"} for i in range(5000)}}}, "the JSON schema "),
])
def test_a_constraint_that_cannot_be_enforced(grammars: GrammarCompiler, form: dict[str, Any],
                                              words: str | None) -> None:
    if words is None:
        grammars.matcher(Structured(**form))
        return
    with pytest.raises(RequestError) as caught: grammars.matcher(Structured(**form))
    assert words in str(caught.value)


def test_a_tokenizer_whose_bytes_are_not_known() -> None:
    words = Backend(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    with pytest.raises(TokenizerError) as caught: token_bytes(words, 2)
    assert str(caught.value) == (
        "structured output needs the bytes of each token, and its decoder does not give them (none)\n"
        "  expected: byte-level BPE, or SentencePiece\n  to fix:   use a model with such a tokenizer")


# **** speculative decoding ****

@pytest.mark.parametrize("text", ["", "ngram", "ngram:0", "ngram:8", "ngram:x", "ngram:a:3", "draft:3",
                                  "draft::3", "draft:/a", "draft:/a:9", "medusa:3", "ngram:-1", "ngram:²"])
def test_words_that_name_no_drafts(text: str) -> None:
    with pytest.raises(ConfigError) as caught: parse_speculative(text)
    assert str(caught.value) == (
        f"--speculative {text}\n  expected: ngram:K, or draft:DIR:K with a model's directory, and K from 1 "
        "to 7 tokens\n  to fix:   change --speculative, or leave it out")


def words(vocabulary: dict[str, int]) -> Tokenizer:
    return Tokenizer(Backend(models.WordLevel(vocabulary, unk_token="a")), {}, None)


def test_a_draft_model_with_another_vocabulary() -> None:
    with pytest.raises(ModelError) as caught:
        require_same_vocabulary(Tokenizer.load(DEFAULT_MODEL), words({"a": 69, "b": 1, "c": 2}), (2048, 2048))
    assert str(caught.value) == (
        "the draft model has another vocabulary: 2 of its 3 tokens differ\n"
        "  expected: a smaller model of the same family\n"
        "  to fix:   choose another model for --speculative draft:DIR:K, or use ngram:K")
    with pytest.raises(ModelError, match="it has 7 tokens, the model 8"):
        require_same_vocabulary(None, None, (8, 7))


def test_the_same_vocabulary_with_other_padding() -> None:
    require_same_vocabulary(words({"a": 0, "b": 1}), words({"b": 1, "a": 0}), (32, 64))
    require_same_vocabulary(None, words({"a": 0}), (8, 8))
