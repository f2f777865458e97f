"""/completion and /props, as llama.cpp's server has them."""
from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.server.serve_case import NAME, FakeEngine, FakeModel, fake_service, live
from tinygrad_nv.server.limits import RequestLimits

TIMINGS = ("prompt_n", "prompt_ms", "prompt_per_second", "predicted_n", "predicted_ms",
           "predicted_per_second")


def test_a_prompt_is_completed():
    engine = FakeEngine(FakeModel(), pieces=("y", "e", "\n"), stopped_by="zz")
    asked: dict[str, Any] = {"prompt": "Once", "n_predict": 9, "cache_prompt": True, "temperature": 0.5,
                             "top_k": 5, "repeat_penalty": 1.1, "stop": ["zz"], "seed": -1, "id_slot": 0,
                             "logit_bias": [[5, 1.5], [7, False]], "typical_p": 1.0, "samplers": ["top_k"]}
    with live(fake_service(engine)) as server:
        answer = server.post(asked, "/completion")
        made = answer.json()
        assert (made["content"], made["stop"], made["stop_type"], made["stopping_word"]) == (
            "ye\n", True, "word", "zz")
        assert (made["tokens_predicted"], made["tokens_evaluated"]) == (3, len(engine.asked[-1][0].ids or []))
        assert (made["has_new_line"], made["truncated"], made["prompt"]) == (True, False, "Once")
        assert all(made["timings"][name] > 0 for name in TIMINGS)
        assert made["generation_settings"]["n_predict"] == 9
        assert made["model"] == NAME
        params = engine.asked[-1][1]
        assert (params.max_tokens, params.temperature, params.top_k, params.stop) == (9, 0.5, 5, ["zz"])
        assert params.logit_bias == {5: 1.5, 7: -100}
        assert params.repetition_penalty == 1.1
        text = server.post({**asked, "stream": True, "n_probs": 2}, "/completion").text
        events = [json.loads(event.removeprefix("data: ")) for event in text.strip().split("\n\n")]
        assert [each["content"] for each in events] == ["y", "e", "\n", ""]
        assert [each["stop"] for each in events] == [False, False, False, True]
        probability = events[0]["completion_probabilities"][0]
        assert probability["token"] == "y"
        assert [set(each) for each in probability["top_logprobs"]] == [
            {"id", "token", "bytes", "logprob"}] * 2
        engine.stopped_by = None
        assert server.post({"prompt": [5, 6], "n_predict": 2}, "/completion").json()["stop_type"] == "limit"
        assert server.post({"prompt": "a"}, "/completion").json()["stop_type"] == "eos"
        assert engine.asked[-1][1].max_tokens is None
        made = server.post({"prompt": "a", "n_predict": 0}, "/completion").json()
        assert (made["content"], made["tokens_predicted"], made["stop_type"]) == ("", 0, "limit")
        server.post({"prompt": "a", "json_schema": {"type": "object"}}, "/completion")
        assert engine.asked[-1][1].structured_outputs.json == {"type": "object"}
        server.post({"prompt": "a", "grammar": 'root ::= "x"'}, "/completion")
        assert engine.asked[-1][1].structured_outputs.grammar == 'root ::= "x"'


def test_the_servers_limit_of_tokens_holds():
    engine = FakeEngine(FakeModel())
    with live(fake_service(engine, RequestLimits(output_tokens=2))) as server:
        for given, most in ((None, 2), (-1, 2), (-2, 2), (9, 2), (1, 1), (0, 1)):
            server.post({"prompt": "a", "n_predict": given}, "/completion")
            assert engine.asked[-1][1].max_tokens == most


@pytest.mark.parametrize(("more", "words"), [
    ({"mirostat": 2}, "mirostat is not served"), ({"n_predict": "many"}, "n_predict is a string"),
    ({"repeat_penalty": -1}, "repeat_penalty"), ({"logit_bias": [["a", 1]]}, "logit_bias has 'a'"),
    ({"prompt": ["a", "b"]}, "prompt has several prompts"), ({"prompt": None}, "prompt is missing")])
def test_what_is_refused(more: dict[str, Any], words: str):
    with live(fake_service()) as server:
        answer = server.post({"prompt": "a", **more}, "/completion")
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]


def test_props_tell_of_the_model():
    with live(fake_service(keys=frozenset({"k"}))) as server:
        assert server.http.get("/props").status_code == 401
        made = server.http.get("/props", headers={"x-api-key": "k"}).json()
        assert made["default_generation_settings"]["n_ctx"] == 512
        assert made["model_alias"] == NAME
        assert made["chat_template"] == FakeModel().tokenizer.template
        assert made["modalities"] == {"vision": False, "audio": False}
