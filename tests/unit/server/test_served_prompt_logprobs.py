"""Echoed prompts with log probabilities, as lm-eval-harness asks for them, and prompt_logprobs."""
from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest

from tests.support.lazy import lazy
from tests.support.server.serve_case import NAME, FakeModel, Live, fake_service, live
from tinygrad_nv.engine.outputs import Delta, TokenLogprobs
from tinygrad_nv.server.completions import completion_logprobs, prompt_first
from tinygrad_nv.server.limits import RequestLimits

openai = lazy("openai")

TOKENIZER = FakeModel().tokenizer
IDS = [[11, 40, 90, 25], [300, 17]]
TEXTS = [[TOKENIZER.token_text(token) for token in ids] for ids in IDS]


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(fake_service()) as running: yield running


def ask(server: Live, path: str = "/v1/completions", **fields: Any) -> Any:
    answer = server.post({"model": NAME, **fields}, path)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("most", [0, 1])
def test_a_harness_reads_loglikelihoods(server: Live, most: int):
    """The request of lm-eval's local-completions; with a token it leaves the last entry out."""
    made = ask(server, prompt=IDS, temperature=0, max_tokens=most, logprobs=1, seed=1234, echo=True)
    assert made["usage"]["completion_tokens"] == 2      # vLLM counts a token that is not shown
    for choice, ids, texts in zip(made["choices"], IDS, TEXTS, strict=True):
        found, count = choice["logprobs"], len(ids) + most
        assert choice["finish_reason"] == "length"
        assert {len(found[key]) for key in found} == {count}
        assert set(found) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
        assert found["token_logprobs"][:len(ids)] == [None, *(-float(i) for i in range(1, len(ids)))]
        assert found["tokens"][:len(ids)] == texts
        assert found["text_offset"] == [len("".join(found["tokens"][:i])) for i in range(count)]
        assert found["top_logprobs"][0] is None
        for i, token in enumerate(ids[1:], 1):
            assert found["top_logprobs"][i] == {texts[i]: -i, TOKENIZER.token_text(token + 1): -i / 2 - 1}
        assert choice["text"].startswith(TOKENIZER.decode(ids))
        assert (choice["text"] == TOKENIZER.decode(ids)) == (most == 0)


def test_echo_streams_with_logprobs(server: Live):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client:
        whole = client.completions.create(model=NAME, prompt=IDS[0], max_tokens=3, logprobs=2, echo=True, n=2)
        chunks = [*client.completions.create(model=NAME, prompt=IDS[0], max_tokens=3, logprobs=2, echo=True,
                                             n=2, stream=True)]
    for choice in whole.choices:
        mine = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].index == choice.index]
        assert choice.logprobs is not None
        assert len(choice.logprobs.tokens) == len(IDS[0]) + 3
        for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [item for each in mine for item in getattr(each, key)] == getattr(choice.logprobs, key)


def test_prompt_logprobs_are_dictionaries(server: Live):
    made = ask(server, prompt=IDS, n=2, max_tokens=1, prompt_logprobs=2, echo=True, logprobs=3,
               return_token_ids=True)
    for at, choice in enumerate(made["choices"]):
        ids = IDS[at // 2]
        assert choice["prompt_token_ids"] == ids
        assert choice["prompt_logprobs"][0] is None
        for i, (token, found) in enumerate(zip(ids[1:], choice["prompt_logprobs"][1:], strict=True), 1):
            assert found == {str(token): {"logprob": -i, "rank": 7, "decoded_token": TEXTS[at // 2][i]}, **{
                str(token + j): {"logprob": -i / 2 - j, "rank": j,
                                 "decoded_token": TOKENIZER.token_text(token + j)} for j in (1, 2)}}
        assert len(choice["logprobs"]["top_logprobs"][1]) == 4
    assert ask(server, prompt="a", max_tokens=1)["choices"][0]["prompt_logprobs"] is None
    turns = [{"role": "user", "content": "A fox."}]
    made = ask(server, "/v1/chat/completions", messages=turns, max_tokens=2, prompt_logprobs=0,
               return_token_ids=True)
    assert [None if each is None else [*each] for each in made["prompt_logprobs"]] == [
        None, *([str(token)] for token in made["prompt_token_ids"][1:])]


@pytest.mark.parametrize(("fields", "words"), [
    ({"max_tokens": 0}, "max_tokens is 0, expected at least 1"),
    ({"prompt_logprobs": 21}, "prompt_logprobs is 21, expected 0 to 20"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs are not streamed")])
def test_fields_out_of_range(server: Live, fields: dict[str, Any], words: str):
    answer = server.post({"prompt": "a", **fields})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_a_server_may_allow_less():
    with live(fake_service(limits=RequestLimits(logprobs=2))) as server:
        for field in ("logprobs", "prompt_logprobs"):
            answer = server.post({"prompt": "a", field: 3})
            assert f"{field} is 3, expected 0 to 2" in answer.text
            assert server.post({"prompt": "a", "max_tokens": 1, field: 2}).status_code == 200


def test_other_choices_wait_for_the_first_one():
    """The engine may give another choice's delta first; each choice's first delta gets the prompt's."""
    told = (TokenLogprobs(3, "c", -1.0, 1),)

    async def deltas() -> AsyncGenerator[tuple[int, Delta], None]:
        for at in (1, 3, 1, 2): yield at, Delta(at % 2, "x", (1,))
        yield 0, Delta(0, "y", (1,), prompt_logprobs=told)
        for at in (1, 0): yield at, Delta(at, "z", (1,))

    async def made() -> list[tuple[int, str, int]]:
        return [(at, each.text, len(each.prompt_logprobs)) async for at, each in prompt_first(deltas(), 2)]
    assert asyncio.run(made()) == [(3, "x", 0), (2, "x", 0), (1, "x", 1), (1, "x", 0), (0, "y", 1),
                                   (1, "z", 0), (0, "z", 0)]


def test_of_equal_texts_the_likeliest_is_told():
    each = TokenLogprobs(1, "\ufffd", -0.1, 1, ((1, "\ufffd", -0.1), (2, "\ufffd", -3.0)))
    assert completion_logprobs([each], 0, 2, False)[0]["top_logprobs"] == [{"\ufffd": -0.1}]
