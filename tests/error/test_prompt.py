"""Prompts that are empty, too long, not text, or not tokens."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tinygrad_nv import LLM, SamplingParams
from tinygrad_nv.errors import RequestError, TokenizerError


def test_an_empty_prompt(command, tiny: Path):
    command("generate", tiny, "").refused(
        "the prompt is empty", "expected: at least one character", "to fix:   write a prompt")


def test_no_token_ids(command, tiny: Path):
    command("generate", tiny, "--prompt-ids", "").refused(
        "the prompt has no tokens", "expected: at least one token id", "to fix:   pass a longer prompt")


@pytest.mark.parametrize(("ids", "bad"), [("300", 300), ("5,-1", -1), ("9" * 30, int("9" * 30))])
def test_a_token_id_out_of_the_vocabulary(command, tiny: Path, ids: str, bad: int):
    command("generate", tiny, "--prompt-ids", ids).refused(
        f"token id {bad} is not in the vocabulary", "expected: 0 to 299",
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
