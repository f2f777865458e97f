"""Requests that vLLM 0.32 accepts and refuses: statuses and kinds of errors that its server answered
(SmolLM2, with a context of 2048; here 512), and values in the forms that pydantic reads."""
from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.server.serve_case import LENGTH, FakeEngine, FakeModel, Live, fake_service, live
from tinygrad_nv.server.limits import RequestLimits

TEXT, CHAT, MESSAGES, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"
USER = [{"role": "user", "content": "a"}]
BASE: dict[str, dict[str, Any]] = {
    TEXT: {"prompt": "a fox", "max_tokens": 2}, CHAT: {"messages": USER, "max_tokens": 2},
    MESSAGES: {"messages": USER, "max_tokens": 2}, RESPONSES: {"input": "a", "max_output_tokens": 2},
    "/tokenize": {"prompt": "a"}, "/detokenize": {"tokens": [5]}, "/v1/embeddings": {"input": "a"}}
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ (documents or []) | length }}"


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(fake_service(FakeEngine(FakeModel(TEMPLATE)), limits=RequestLimits(context=LENGTH),
                           strict=False)) as running: yield running


def ask(server: Live, path: str, **fields: Any) -> tuple[int, Any]:
    answer = server.http.post(path, content=json.dumps({**BASE[path], **fields}),
                              headers={"Content-Type": "application/json"})
    return answer.status_code, answer.json()


def params(server: Live) -> Any:
    engine: Any = server.service.engine
    return engine.asked[-1][1]


def prompt(server: Live) -> list[int]:
    engine: Any = server.service.engine
    return engine.asked[-1][0].ids


@pytest.mark.parametrize(("value", "read"), [
    ("5", 5), (" 5 ", 5), ("5.0", 5), ("1_0", 10), ("+5", 5), (True, 1), (5.0, 5), ("5.5", None), ("", None),
    (5.5, None), ([5], None), ("five", None)])
def test_whole_numbers(server: Live, value: Any, read: int | None):
    status, body = ask(server, TEXT, top_k=value)
    if read is not None: assert (status, params(server).top_k) == (200, read)
    else: assert (status, body["error"]["type"], body["error"]["code"]) == (400, "Bad Request", 400)


@pytest.mark.parametrize(("value", "read"), [
    ("0.5", 0.5), (" .5 ", 0.5), (True, 1.0), ("5e-1", 0.5), ("nan", None), ("inf", None), ("", None),
    (False, None), ("1e1", None), ("half", None)])
def test_numbers(server: Live, value: Any, read: float | None):
    status, _ = ask(server, TEXT, top_p=value)
    assert status == (400 if read is None else 200)
    if read is not None: assert params(server).top_p == read


def test_an_echo_is_the_last_message_if_it_has_the_role_of_the_answer(server: Live):
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [
        {"type": "text", "text": "b"}, {"type": "text", "text": "c"}]}]
    continued = {"continue_final_message": True, "add_generation_prompt": False}
    for messages, fields, front in ((said, {}, "b\nc"), (said[:1], {}, ""), (said[:1], continued, "a")):
        asked = {"messages": messages, "max_tokens": 3, **fields}
        [plain], [made] = (ask(server, CHAT, **asked, echo=echo)[1]["choices"] for echo in (False, True))
        assert made["message"]["content"] == front + plain["message"]["content"]
        answer = server.post({**asked, "echo": True, "stream": True}, CHAT)
        deltas = [json.loads(line[6:])["choices"][0]["delta"].get("content") for line in
                  answer.text.split("\n\n") if line.startswith("data: {")]
        assert "".join(filter(None, deltas)) == made["message"]["content"]
        if front: assert deltas[1] == front
    told = ask(server, CHAT, messages=said, echo=True, logprobs=True, top_logprobs=2)[1]
    assert params(server).prompt_logprobs == 2
    assert len(told["prompt_logprobs"]) == told["usage"]["prompt_tokens"]


def test_booleans(server: Live):
    for value in ("true", "T", "YES", "on", "1", 1, 1.0):
        assert (ask(server, TEXT, ignore_eos=value)[0], params(server).ignore_eos) == (200, True)
    for value in ("off", "0", "no", "F", 0, 0.0):
        assert (ask(server, TEXT, ignore_eos=value)[0], params(server).ignore_eos) == (200, False)
    for value in ("x", "", 2, 0.5, []): assert ask(server, TEXT, ignore_eos=value)[0] == 400


def test_lists_of_token_ids(server: Live):
    for given, read in (([True], [1]), ([5.0, 6], [5, 6]), (["5", 6], [5, 6]), ([["5"]], [5])):
        assert (ask(server, TEXT, prompt=given)[0], prompt(server)) == (200, read)
    for wrong in ([1.5], [-1], [5, "a"], [[5], "a"], ["a", [5]], {}, 5):
        assert ask(server, TEXT, prompt=wrong)[0] == 400
    assert ask(server, "/detokenize", tokens=["5"]) == ask(server, "/detokenize", tokens=[5])


# accepted by both; those with a name have no effect, and the header has it
ACCEPTED: list[tuple[str, dict[str, Any], str]] = [
    (TEXT, {"best_of": 2, "temperature": 0}, "best_of"), (TEXT, {"best_of": 0}, "best_of"),
    (TEXT, {"best_of": "x"}, "best_of"), (TEXT, {"detokenize": False}, "detokenize"),
    (TEXT, {"logit_bias": {"5": 101}}, ""), (TEXT, {"logit_bias": {"5": "1"}}, ""),
    (TEXT, {"model": ""}, ""),
    (TEXT, {"length_penalty": 2.0}, "length_penalty"), (TEXT, {"stream_options": {}}, ""),
    (TEXT, {"max_tokens": LENGTH}, ""), (TEXT, {"stream_interval": "2", "session_id": "s"}, ""),
    (CHAT, {"max_tokens": 9999, "max_completion_tokens": 2}, ""), (CHAT, {"echo": True}, ""),
    (CHAT, {"metadata": 5}, ""), (CHAT, {"tool_choice": "none"}, ""),
    (CHAT, {"thinking_token_budget": -1}, ""), (CHAT, {"add_special_tokens": True}, ""),
    (CHAT, {"messages": [{"role": "king", "content": "hi"}]}, ""),
    (CHAT, {"documents": [{"text": "d"}]}, ""),
    (CHAT, {"chat_template_kwargs": {"add_generation_prompt": True}}, ""),
    (CHAT, {"chat_template_kwargs": {"add_generation_prompt": False}},
     "chat_template_kwargs.add_generation_prompt"),
    (CHAT, {"messages": [{"role": "user"}]}, ""),
    (CHAT, {"continue_final_message": True, "add_generation_prompt": False}, ""),
    (CHAT, {"tools": [{"type": "function", "function": {"name": ""}}]}, ""),
    (RESPONSES, {"top_logprobs": 21}, ""), ("/tokenize", {"messages": USER}, "prompt"),
    ("/detokenize", {"tokens": [5, 99999]}, ""), ("/detokenize", {"tokens": [2 ** 63 - 1]}, ""),
    (CHAT, {"use_beam_search": True, "stream": True}, ""), (MESSAGES, {"temperature": 1.5}, "")]


@pytest.mark.parametrize(("path", "fields", "header"), ACCEPTED, ids=[f"{p} {f}" for p, f, _ in ACCEPTED])
def test_what_is_accepted(server: Live, path: str, fields: dict[str, Any], header: str):
    answer = server.post({**BASE[path], **fields}, path)
    assert (answer.status_code, answer.headers.get("x-ignored-fields", "")) == (200, header), answer.text


# refused by both, and the type of vLLM's error
VALUE, FORM = "BadRequestError", "Bad Request"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (TEXT, {"temperature": 2.5}, VALUE), (TEXT, {"top_p": 0}, VALUE), (TEXT, {"top_k": -2}, VALUE),
    (TEXT, {"max_tokens": 0}, VALUE), (TEXT, {"max_tokens": -1}, VALUE),
    (TEXT, {"max_tokens": LENGTH + 1}, VALUE), (TEXT, {"min_tokens": 3}, VALUE), (TEXT, {"n": 0}, VALUE),
    (TEXT, {"logprobs": 21}, VALUE), (TEXT, {"stream_options": {"include_usage": True}}, VALUE),
    (TEXT, {"structured_outputs": {}}, VALUE),
    (TEXT, {"structured_outputs": {"other": 1}}, VALUE), (TEXT, {"allowed_token_ids": []}, VALUE),
    (TEXT, {"truncate_prompt_tokens": LENGTH + 1}, VALUE), (TEXT, {"logit_bias": {"a": 1}}, VALUE),
    (TEXT, {"suffix": "a"}, VALUE), (TEXT, {"prompt": ""}, VALUE), (TEXT, {"stop": [""]}, VALUE),
    (TEXT, {"thinking_token_budget": -2}, VALUE), (TEXT, {"cache_salt": ""}, VALUE),
    (TEXT, {"bad_words": "a"}, FORM), (TEXT, {"prompt": 5}, FORM), (TEXT, {"max_tokens": "x"}, FORM),
    (TEXT, {"temperature": []}, FORM), (TEXT, {"user": 1}, FORM), (TEXT, {"model": 7}, FORM),
    (TEXT, {"vllm_xargs": 5}, FORM), (TEXT, {"stream_interval": "x"}, FORM),
    (TEXT, {"prompt": [1, "a"]}, FORM),
    (CHAT, {"max_completion_tokens": LENGTH + 1}, VALUE), (CHAT, {"tool_choice": "auto"}, VALUE),
    (CHAT, {"tool_choice": "required"}, VALUE), (CHAT, {"top_logprobs": 2}, VALUE),
    (CHAT, {"messages": None}, FORM), (RESPONSES, {"max_output_tokens": LENGTH + 1}, VALUE),
    (RESPONSES, {"temperature": 3}, VALUE), (RESPONSES, {"metadata": 5}, FORM),
    (RESPONSES, {"input": None}, FORM), ("/detokenize", {"tokens": ["x"]}, FORM),
    ("/detokenize", {"tokens": None}, FORM), ("/tokenize", {"prompt": 5}, FORM)]


@pytest.mark.parametrize(("path", "fields", "kind"), REFUSED, ids=[f"{p} {f}" for p, f, _ in REFUSED])
def test_what_is_refused(server: Live, path: str, fields: dict[str, Any], kind: str):
    status, body = ask(server, path, **fields)
    assert (status, body["error"]["type"], body["error"]["code"]) == (400, kind, 400), body


def test_messages_are_refused_in_anthropics_shape(server: Live):
    for fields in ({"max_tokens": LENGTH + 1}, {"stop_sequences": "a"}, {"max_tokens": 0}):
        status, body = ask(server, MESSAGES, **fields)
        assert (status, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")


def test_statuses(server: Live):
    for path in (TEXT, CHAT, RESPONSES, "/tokenize", "/detokenize"):
        status, body = ask(server, path, model="other")
        error = body["error"]
        assert (status, error["type"], error["param"], error["code"]) == (404, "NotFoundError", "model", 404)
    assert ask(server, "/v1/embeddings")[0] == 404      # of a model that generates
    for path in ("/v1/nothing", "/sleep", "/v1/load_lora_adapter"):
        assert server.post({"lora_name": "a", "lora_path": "b"}, path).status_code == 404
    assert server.http.get(TEXT).status_code == 405
    for content, kind in ((b"{bad", "application/json"), (b"[1]", "application/json"),
                          (b"", "application/json"), (b"{}", "text/plain"),
                          (b"{}", "application/x-www-form-urlencoded")):
        answer = server.http.post(TEXT, content=content, headers={"Content-Type": kind})
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, FORM)
    missing = server.http.get("/v1/responses/resp_x")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, 404)


def test_the_newer_limit_of_a_conversation_counts(server: Live):
    for older, newer, counts in ((5, 3, 3), (3, 5, 5), (4, None, 4)):
        assert ask(server, CHAT, max_tokens=older, max_completion_tokens=newer)[0] == 200
        assert params(server).max_tokens == counts


def test_a_bias_has_bounds(server: Live):
    ask(server, TEXT, logit_bias={"5": 101, "6": -1000, "7": 3})
    assert params(server).logit_bias == {5: 100.0, 6: -100.0, 7: 3.0}


def test_the_side_of_truncation(server: Live):
    assert ask(server, TEXT, prompt=[5, 6, 7, 8], truncate_prompt_tokens=2)[0] == 200
    assert prompt(server) == [7, 8]
    ask(server, TEXT, prompt=[5, 6, 7, 8], truncate_prompt_tokens=2, truncation_side="right")
    assert prompt(server) == [5, 6]
    for path, fields in ((TEXT, {"prompt": "one two three four"}),
                         (CHAT, {"messages": [{"role": "user", "content": "one two three four"}]})):
        ask(server, path, **fields)
        whole = prompt(server)
        ask(server, path, **fields, truncate_prompt_tokens=3, truncation_side="right")
        assert prompt(server) == whole[:3]
    assert ask(server, TEXT, truncate_prompt_tokens=3, truncation_side="up")[0] == 400


def test_what_the_template_gets(server: Live):
    decode = server.service.require_tokenizer().decode
    ask(server, CHAT, messages=[{"role": "king", "content": "hi"}], documents=[{"text": "d"}, {"text": "e"}])
    assert decode(prompt(server)) == "<king>hi2"
    plain = prompt(server)
    ask(server, CHAT, messages=[{"role": "king", "content": "hi"}], documents=[{}, {}],
        add_special_tokens=True)
    assert prompt(server) == server.service.require_tokenizer().encode("<king>hi2")
    assert prompt(server) != plain


def test_token_ids_for_texts(server: Live):
    _, body = ask(server, TEXT, prompt=[5, 6], max_tokens=1, logprobs=1, echo=True,
                  return_tokens_as_token_ids=True)
    told = body["choices"][0]["logprobs"]
    assert told["tokens"] == ["token_id:5", "token_id:6", "token_id:5"]
    assert told["text_offset"] == [0, 10, 20]
    assert all(name.startswith("token_id:") for each in told["top_logprobs"][1:] for name in each)
    _, body = ask(server, CHAT, logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True)
    entry = body["choices"][0]["logprobs"]["content"][0]
    assert entry["token"] == f"token_id:{prompt(server)[0]}"
    assert bytes(entry["bytes"]).decode() == server.service.require_tokenizer().token_text(prompt(server)[0])
    assert entry["top_logprobs"][0]["token"].startswith("token_id:")


def test_the_log_names_the_nearest_field(server: Live, caplog: pytest.LogCaptureFixture):
    with caplog.at_level("WARNING", "tinygrad_nv.server"):
        for _ in range(2): ask(server, TEXT, temprature=1)
    assert caplog.messages == ["ignored_field name=temprature nearest=temperature"]
