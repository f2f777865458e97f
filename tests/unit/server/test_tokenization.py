"""/tokenize and /detokenize."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.server.serve_case import LENGTH, NAME, FakeEngine, FakeModel, Live, fake_service, live

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}" \
    "{% if add_generation_prompt %}assistant:{% endif %}"
MODEL = FakeModel(TEMPLATE)
TOKENIZER = MODEL.tokenizer
TURNS = [{"role": "user", "content": "A fox."}, {"role": "assistant", "content": "It"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(fake_service(FakeEngine(MODEL), strict=True)) as running: yield running


def ask(server: Live, path: str = "/tokenize", **fields: Any) -> Any:
    answer = server.post(fields, path)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_prompt_is_tokenized_and_back(server: Live):
    text = "Once upon a time there was a fox"
    for special in (True, False):
        made = ask(server, prompt=text, model=NAME, add_special_tokens=special, return_token_strs=True)
        ids = TOKENIZER.encode(text, special)
        assert made == {"count": len(ids), "max_model_len": LENGTH, "tokens": ids,
                        "token_strs": [TOKENIZER.backend.id_to_token(token) for token in ids]}
        assert ask(server, "/detokenize", tokens=ids) == {"prompt": TOKENIZER.decode(ids, False)}
    assert ask(server, prompt="")["tokens"] == TOKENIZER.encode("")
    assert ask(server, prompt="a")["token_strs"] is None


def test_special_tokens_are_known_by_their_texts():
    texts = {TOKENIZER.backend.id_to_token(token) for token in TOKENIZER.special_ids}
    assert texts
    assert all(map(TOKENIZER.special_text, texts))
    assert not TOKENIZER.special_text("a")


def test_a_conversation_is_tokenized_as_it_is_answered(server: Live):
    assert ask(server, messages=TURNS[:1])["tokens"] == MODEL.encode_chat(TURNS[:1])
    continued = {"continue_final_message": True, "add_generation_prompt": False}
    assert ask(server, messages=TURNS, **continued)["tokens"] == MODEL.encode_chat(TURNS, **continued)
    assert ask(server, messages=TURNS, **continued)["tokens"] != ask(server, messages=TURNS)["tokens"]


@pytest.mark.parametrize(("path", "fields", "words"), [
    ("/tokenize", {}, "one of prompt and messages is expected"),
    ("/tokenize", {"prompt": "a", "messages": TURNS}, "one of prompt and messages is expected"),
    ("/tokenize", {"prompt": ["a"]}, "prompt is a list, expected a string"),
    ("/tokenize", {"prompt": "a", "temperature": 1}, "unknown field 'temperature'"),
    ("/tokenize", {"messages": TURNS[:1], "temperature": 1}, "unknown field 'temperature'"),
    ("/tokenize", {"messages": TURNS[:1], "add_special_tokens": True}, "add_special_tokens is not served"),
    ("/tokenize", {"prompt": "a" * 3_000_000}, "the prompt has 3000000 characters"),
    ("/tokenize", {"prompt": "a", "model": "other"}, "the model 'other' is not served"),
    ("/detokenize", {}, "tokens is missing"),
    ("/detokenize", {"tokens": [1.5]}, "tokens is a list, expected"),
    ("/detokenize", {"tokens": [10 ** 30]}, "which is not in the vocabulary"),
    ("/detokenize", {"tokens": [99999]}, "the id 99999, which is not in the vocabulary")])
def test_fields_out_of_range(server: Live, path: str, fields: dict[str, Any], words: str):
    answer = server.post(fields, path)
    assert answer.status_code == (404 if "other" in words else 400)
    assert words in answer.json()["error"]["message"], answer.text
