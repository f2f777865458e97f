"""Beam search: transformers' beams where end tokens are ignored, else those of vLLM's definition."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from tests.support.server.serve_case import live, llm_service
from tinygrad_nv import LLM, BeamSearchParams
from tinygrad_nv.cli import DEFAULT_MODEL
from tinygrad_nv.engine.beam_search import Search
from tinygrad_nv.engine.logprobs import Logprob
from tinygrad_nv.errors import RequestError

TALE = "Once upon a time a little fox ran to the river. The bird sang. "
PROMPTS = ["The dog", TALE]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(DEFAULT_MODEL, device="CPU", max_model_len=256, max_num_seqs=8,
             max_num_batched_tokens=64) as made: yield made


@pytest.fixture(scope="module")
def theirs() -> torch.nn.Module: return AutoModelForCausalLM.from_pretrained(DEFAULT_MODEL).eval()


@pytest.mark.slow
def test_they_are_transformers(llm: LLM, theirs: torch.nn.Module):
    params = BeamSearchParams(beam_width=4, max_tokens=12, ignore_eos=True)
    found = llm.beam_search(PROMPTS, params)
    for prompt, output in zip(PROMPTS, found, strict=True):
        ids = llm.tokenize(prompt)
        theirs.generation_config = GenerationConfig(pad_token_id=2)
        made = theirs.generate(torch.tensor([ids]), num_beams=4, num_return_sequences=4, max_new_tokens=12,
                               do_sample=False, output_scores=True, return_dict_in_generate=True)
        assert [each.tokens for each in output.sequences] == made.sequences.tolist()
        assert [each.cum_logprob / 12 for each in output.sequences] == pytest.approx(
            made.sequences_scores.tolist(), abs=1e-4)
        for each in output.sequences:
            assert (each.finish_reason, len(each.logprobs)) == ("length", 12)
            assert each.text == llm.tokenizer.decode(each.tokens, skip_special_tokens=True)  # vLLM's default
    assert llm.core.stats().prefix_hits > 0
    alone = llm.beam_search(PROMPTS, params, concurrency_limit=1)
    assert [[each.tokens for each in output.sequences] for output in alone] == [
        [each.tokens for each in output.sequences] for output in found]
    with pytest.raises(RequestError, match="and max_tokens is 250"):
        llm.beam_search(TALE, replace(params, max_tokens=250))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("penalty", [0.0, 1.0, 3.0])
def test_they_are_vllms(llm: LLM, theirs: torch.nn.Module, penalty: float):
    """Against a plain search over transformers' logits, of a story that is about to end."""
    ids = llm.generate(TALE, replace(llm.defaults, temperature=0, max_tokens=150))[0]
    assert ids.finish_reason == "stop"
    start, eos = [*ids.prompt_token_ids, *ids.token_ids[:-6]], llm.eos
    beams, ended = [(start, 0.0)], list[tuple[list[int], float]]()
    def score(beam: tuple[list[int], float]) -> float:
        return beam[1] / (len(beam[0]) - (beam[0][-1] in eos)) ** penalty
    for _ in range(10):
        made = []
        for tokens, total in beams:
            with torch.no_grad(): logits = theirs(torch.tensor([tokens])).logits[0, -1].double()
            values, top = logits.log_softmax(-1).topk(6)
            made += [([*tokens, int(token)], total + float(value))
                     for value, token in zip(values, top, strict=True)]
        ended += [each for each in made if each[0][-1] in eos]
        beams = sorted((each for each in made if each[0][-1] not in eos), key=score, reverse=True)[:3]
    expected = sorted(ended + beams, key=score, reverse=True)[:3]
    [output] = llm.beam_search([{"prompt_token_ids": start}],
                               BeamSearchParams(beam_width=3, max_tokens=10, length_penalty=penalty))
    assert [each.tokens for each in output.sequences] == [tokens for tokens, _ in expected]
    assert [each.cum_logprob for each in output.sequences] == pytest.approx(
        [total for _, total in expected], abs=1e-3)
    assert any(each.finish_reason == "stop" for each in output.sequences)


def test_a_search():
    """A beam that ends is compared with those that go on by its length without the end token."""
    def found(**values: float) -> dict[int, Logprob]:
        return {int(token[1:]): Logprob(value) for token, value in values.items()}
    search = Search([7], BeamSearchParams(2, 5), (0,))
    search.extend([found(t1=-1.0, t0=-1.5, t2=-2.0, t3=-3.0)])
    assert [each.tokens for each in search.beams] == [[7, 1], [7, 2]]
    search.extend([found(t1=-1.0, t2=-1.1), found(t0=-0.1, t1=-9.0)])
    assert [each.tokens for each in search.beams] == [[7, 1, 1], [7, 1, 2]]
    assert [(each.tokens, each.finish_reason, each.stop_reason) for each in search.best()] == [
        ([7, 1, 1], "length", None), ([7, 1, 2], "length", None)]
    search.params = replace(search.params, length_penalty=0.0)
    assert [each.tokens for each in search.best()] == [[7, 0], [7, 1, 1]]


@pytest.mark.parametrize(("given", "words"), [
    ({"beam_width": 11}, "beam_width is 11"), ({"beam_width": 0}, "beam_width is 0"),
    ({"max_tokens": 0}, "max_tokens is 0"), ({"temperature": -1.0}, "temperature is -1.0"),
    ({"length_penalty": "x"}, "length_penalty is 'x'")], ids=str)
def test_params_that_are_refused(given: dict[str, object], words: str):
    with pytest.raises(RequestError, match=words):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, **given})


def test_they_are_served(llm: LLM):
    """n is the width; usage counts the tokens of the answers."""
    params = BeamSearchParams(beam_width=3, max_tokens=5, length_penalty=0.5)
    expected = llm.beam_search(PROMPTS, params)
    asked = {"prompt": PROMPTS, "n": 3, "max_tokens": 5, "use_beam_search": True, "length_penalty": 0.5,
             "return_token_ids": True}
    with live(llm_service(llm)) as server:
        made = server.post(asked).json()
        turns = [{"role": "user", "content": PROMPTS[0]}]
        spoken = server.post({"messages": turns, "n": 3, "max_completion_tokens": 5, "use_beam_search": True,
                              "length_penalty": 0.5}, "/v1/chat/completions").json()
    beams = [(beam, len(llm.tokenize(prompt))) for prompt, output in zip(PROMPTS, expected, strict=True)
             for beam in output.sequences]
    assert [choice["token_ids"] for choice in made["choices"]] == [beam.tokens[own:] for beam, own in beams]
    for prompt, choice in zip([PROMPTS[0]] * 3 + [PROMPTS[1]] * 3, made["choices"], strict=True):
        ids = [*llm.tokenize(prompt), *choice["token_ids"]]
        assert prompt + choice["text"] == llm.require_tokenizer().decode(ids)
        assert choice["finish_reason"] == "length"
    assert made["usage"] == {"prompt_tokens": sum(map(len, map(llm.tokenize, PROMPTS))),
                             "completion_tokens": 30, "total_tokens": made["usage"]["total_tokens"],
                             "prompt_tokens_details": None, "completion_tokens_details": None}
    [output] = llm.beam_search([{"prompt_token_ids": llm.encode_chat(turns)}], params)
    assert [choice["message"]["content"] for choice in spoken["choices"]] == [
        made["choices"][at]["text"] for at in range(3)]
    assert [beam.tokens for beam in output.sequences] == [beam.tokens for beam, _ in beams[:3]]
