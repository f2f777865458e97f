"""Fields about the tokens of a prompt, and about which tools may be called. /tokenize and /detokenize."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.server.serve_case import LENGTH, NAME, FakeEngine, FakeModel, Live, fake_service, live

TEXT = "Once upon a time there was a little fox"
TOKENIZER = FakeModel().tokenizer
PLAIN, WITH_SPECIAL = TOKENIZER.encode(TEXT, special=False), TOKENIZER.encode(TEXT)
TEMPLATE = ("{% for m in messages %}{{ m.content }}{% endfor %}"
            "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}")
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
         for name in ("look", "walk", "sleep")]


@pytest.fixture(scope="module")
def engine() -> FakeEngine: return FakeEngine(FakeModel(TEMPLATE))


@pytest.fixture(scope="module")
def server(engine: FakeEngine) -> Iterator[Live]:
    with live(fake_service(engine, strict=True)) as running: yield running


def ask(server: Live, path: str = "/v1/completions", **fields: Any) -> dict[str, Any]:
    answer = server.post({"max_tokens": 2, **fields}, path)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_special_tokens_may_be_left_out(server: Live, engine: FakeEngine):
    for special, ids in ((True, WITH_SPECIAL), (False, PLAIN)):
        made = ask(server, prompt=TEXT, add_special_tokens=special)
        assert engine.asked[-1][0].ids == ids
        assert made["usage"]["prompt_tokens"] == len(ids)
    assert len(WITH_SPECIAL) == len(PLAIN) + 1
    ask(server, prompt=[5, 6], add_special_tokens=False)
    assert engine.asked[-1][0].ids == [5, 6]


def test_prompts_are_truncated_at_their_beginning(server: Live, engine: FakeEngine):
    made = ask(server, prompt=TEXT, truncate_prompt_tokens=4, echo=True)
    ids = engine.asked[-1][0].ids
    assert ids is not None
    assert (len(ids), ids[-3:]) == (4, PLAIN[-3:])
    assert made["choices"][0]["text"].startswith(TOKENIZER.decode(ids))
    ask(server, prompt=TEXT, truncate_prompt_tokens=4, add_special_tokens=False)
    assert engine.asked[-1][0].ids == PLAIN[-4:]
    ask(server, prompt=PLAIN, truncate_prompt_tokens=3)
    assert engine.asked[-1][0].ids == PLAIN[-3:]
    # what is longer than the context, too
    for path, prompt in (("/v1/completions", {"prompt": TEXT * 500}),
                         ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT * 500}]})):
        assert server.post(prompt, path).status_code == 400
        ask(server, path, **prompt, truncate_prompt_tokens=-1)
        assert len(engine.asked[-1][0].ids or ()) == 511
        ask(server, path, **prompt, truncate_prompt_tokens=5)
        assert (engine.asked[-1][0].ids or [])[-4:] == PLAIN[-4:]


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_some_tools_are_allowed(server: Live, engine: FakeEngine, mode: str):
    chosen = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [
        {"type": "function", "function": {"name": name}} for name in ("sleep", "look")]}}
    ask(server, "/v1/chat/completions", messages=[{"role": "user", "content": "how?"}], tools=TOOLS,
        tool_choice=chosen)
    prompt, params = engine.asked[-1]
    text = TOKENIZER.decode(prompt.ids or [])
    assert ("look" in text, "walk" in text, "sleep" in text) == (True, False, True)
    constraint = params.structured_outputs
    assert (constraint is not None) == (mode == "required")
    if constraint is not None: assert "walk" not in str(constraint.json)


@pytest.mark.parametrize(("tools", "words"), [
    ([], "tool_choice.allowed_tools names no tool, expected some of tools: look, walk, sleep"),
    ([{"type": "function", "function": {"name": "fly"}}], "names 'fly', expected some of tools: look")])
def test_tools_that_cannot_be_allowed(server: Live, tools: list[Any], words: str):
    chosen = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools}}
    answer = server.post({"messages": [{"role": "user", "content": "a"}], "tools": TOOLS,
                          "tool_choice": chosen}, "/v1/chat/completions")
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize("field", ["audio", "web_search_options", "kv_transfer_params",
                                   "mm_processor_kwargs", "vllm_xargs", "logits_processors"])
def test_what_no_model_here_has_is_refused_by_name(server: Live, field: str):
    asked = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    answer = server.post({**asked, field: {"a": 1}}, "/v1/chat/completions")
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(f"{field} is not served; to fix: leave it out")
    assert server.post({**asked, field: None}, "/v1/chat/completions").status_code == 200


ROLES = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}" \
    "{% if add_generation_prompt %}assistant:{% endif %}"
MODEL = FakeModel(ROLES)
TOKENS = MODEL.tokenizer
TURNS = [{"role": "user", "content": "A fox."}, {"role": "assistant", "content": "It"}]


@pytest.fixture(scope="module")
def tokenizing() -> Iterator[Live]:
    with live(fake_service(FakeEngine(MODEL), strict=True)) as running: yield running


def read(server: Live, path: str = "/tokenize", **fields: Any) -> Any:
    answer = server.post(fields, path)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_prompt_is_tokenized_and_back(tokenizing: Live):
    text = "Once upon a time there was a fox"
    for special in (True, False):
        made = read(tokenizing, prompt=text, model=NAME, add_special_tokens=special, return_token_strs=True)
        ids = TOKENS.encode(text, special)
        assert made == {"count": len(ids), "max_model_len": LENGTH, "tokens": ids,
                        "token_strs": [TOKENS.backend.id_to_token(token) for token in ids]}
        assert read(tokenizing, "/detokenize", tokens=ids) == {"prompt": TOKENS.decode(ids, False)}
    assert read(tokenizing, prompt="")["tokens"] == TOKENS.encode("")
    assert read(tokenizing, prompt="a")["token_strs"] is None


def test_special_tokens_are_known_by_their_texts():
    texts = {TOKENS.backend.id_to_token(token) for token in TOKENS.special_ids}
    assert texts
    assert all(map(TOKENS.special_text, texts))
    assert not TOKENS.special_text("a")


def test_a_conversation_is_tokenized_as_it_is_answered(tokenizing: Live):
    assert read(tokenizing, messages=TURNS[:1])["tokens"] == MODEL.encode_chat(TURNS[:1])
    continued = {"continue_final_message": True, "add_generation_prompt": False}
    assert read(tokenizing, messages=TURNS, **continued)["tokens"] == MODEL.encode_chat(TURNS, **continued)
    ended = read(tokenizing, messages=TURNS)["tokens"]
    assert read(tokenizing, messages=TURNS, **continued)["tokens"] != ended


@pytest.mark.parametrize(("path", "fields", "words"), [
    ("/tokenize", {}, "one of prompt and messages is expected"),
    ("/tokenize", {"prompt": "a", "messages": TURNS}, "prompt is given beside messages"),
    ("/tokenize", {"prompt": ["a"]}, "prompt is a list, expected a string"),
    ("/tokenize", {"prompt": "a", "temperature": 1}, "unknown field 'temperature'"),
    ("/tokenize", {"messages": TURNS[:1], "temperature": 1}, "unknown field 'temperature'"),
    ("/tokenize", {"prompt": "a" * 3_000_000}, "the prompt has 3000000 characters"),
    ("/tokenize", {"prompt": "a", "model": "other"}, "the model 'other' is not served"),
    ("/detokenize", {}, "tokens is missing"),
    ("/detokenize", {"tokens": [1.5]}, "tokens is a list, expected"),
    ("/detokenize", {"tokens": [10 ** 30]}, "tokens has the id 10000000000000000000")])
def test_fields_out_of_range(tokenizing: Live, path: str, fields: dict[str, Any], words: str):
    answer = tokenizing.post(fields, path)
    assert answer.status_code == (404 if "other" in words else 400)
    assert words in answer.json()["error"]["message"], answer.text
