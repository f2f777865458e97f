"""Programs written for vLLM's Python API, on the model in the box."""
from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest

from tests.support.server.serve_case import live, llm_service
from tinygrad_nv import LLM, SamplingParams
from tinygrad_nv.cli import DEFAULT_MODEL
from tinygrad_nv.engine.async_engine import AsyncEngine
from tinygrad_nv.engine.request_output import RequestOutput
from tinygrad_nv.engine.sampling import RequestOutputKind
from tinygrad_nv.engine.structured_output.params import StructuredOutputsParams
from tinygrad_nv.errors import ConfigError, RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPT = "Once upon a time"
TEMPLATE = ("{% for message in messages %}<{{ message.role }}> {{ message.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}<assistant> {{ mood }}{% endif %}")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """With arguments that scripts for vLLM have."""
    with LLM(model=str(DEFAULT_MODEL), dtype="auto", seed=0, max_model_len=256, tensor_parallel_size=1,
             trust_remote_code=False, enforce_eager=False, enable_prefix_caching=True, block_size=16,
             gpu_memory_utilization=0.9, swap_space=0, max_num_seqs=8, max_num_batched_tokens=64,
             speculative_config={"method": "ngram", "num_speculative_tokens": 3}, disable_log_stats=True,
             device="CPU") as made: yield made


def ids(llm: LLM, text: str) -> list[int]: return llm.require_tokenizer().encode(text)


def test_fields_of_an_output(llm: LLM):
    [output] = llm.generate([PROMPT], replace(GREEDY, logprobs=2), use_tqdm=False)
    assert isinstance(output, RequestOutput)
    assert (output.prompt, list(output.prompt_token_ids)) == (PROMPT, ids(llm, PROMPT))
    assert output.finished
    assert output.prompt_logprobs is None
    [answer] = output.outputs
    assert (answer.index, answer.finish_reason, answer.stop_reason) == (0, "length", None)
    assert len(answer.token_ids) == len(answer.logprobs) == 12
    assert answer.cumulative_logprob == pytest.approx(
        sum(each[token].logprob for each, token in zip(answer.logprobs, answer.token_ids, strict=True)))
    for each, token in zip(answer.logprobs, answer.token_ids, strict=True):
        assert next(iter(each)) == token
        assert each[token].rank == 1
        assert each[token].decoded_token in answer.text


def test_log_probabilities_of_named_tokens(llm: LLM):
    """They are those that all tokens have, whatever is likely."""
    params = replace(GREEDY, max_tokens=3)
    [wide] = llm.generate([PROMPT], replace(params, logprobs=20))
    for places in ([18, 0], [7]):
        named = [[*each][1:][place] for each in wide.outputs[0].logprobs[:1] for place in places]
        [made] = llm.generate([PROMPT], replace(params, logprob_token_ids=named))
        assert made.outputs[0].token_ids == wide.outputs[0].token_ids
        first, found = wide.outputs[0].logprobs[0], made.outputs[0].logprobs
        assert all({*each} == {*named, token}
                   for each, token in zip(found, made.outputs[0].token_ids, strict=True))
        assert {token: found[0][token].logprob for token in named} == pytest.approx(
            {token: first[token].logprob for token in named}, abs=1e-6)
    with pytest.raises(RequestError, match="logprob_token_ids has token id"):
        llm.generate([PROMPT], replace(params, logprob_token_ids=[10**6]))


def test_prompts_of_all_kinds(llm: LLM):
    """The same tokens make the same answer, whatever they come as."""
    made = llm.generate([PROMPT, {"prompt": PROMPT}, ids(llm, PROMPT),
                         {"prompt_token_ids": ids(llm, PROMPT), "cache_salt": "mine"}], GREEDY)
    assert len({each.text for each in made}) == 1
    assert [each.prompt for each in made] == [PROMPT, PROMPT, None, None]
    assert llm.generate({"prompt": PROMPT}, GREEDY)[0].text == made[0].text


def test_a_salt_keeps_prefixes_apart(llm: LLM):
    long = ids(llm, "The little bird sang. " * 8)
    def cached(**more: Any) -> int:
        return llm.generate({"prompt_token_ids": long, **more}, GREEDY)[0].num_cached_tokens
    assert cached(cache_salt="one") == 0
    assert cached(cache_salt="one") > 0
    assert cached(cache_salt="two") == 0


@pytest.mark.parametrize("prompt", [
    {}, {"prompt": PROMPT, "messages": []}, {"prompt": 5}, {"multi_modal_data": {"image": 1}},
    {"prompt": PROMPT, "cache_salt": 3}, {"prompt_token_ids": "abc"}, {"messages": "x"}], ids=str)
def test_prompts_that_are_refused(llm: LLM, prompt: dict[str, Any]):
    with pytest.raises(RequestError, match="a prompt "): llm.generate(prompt, GREEDY)


def test_chat(llm: LLM):
    """Through a template of the call; messages as a prompt go through the model's."""
    talk = [{"role": "user", "content": "Hi there"}]
    [made] = llm.chat(talk, GREEDY, chat_template=TEMPLATE, chat_template_kwargs={"mood": "gladly:"},
                      use_tqdm=False)
    assert made.prompt == "<user> Hi there\n<assistant> gladly:"
    several = llm.chat([talk, talk], GREEDY, chat_template=TEMPLATE, chat_template_kwargs={"mood": "gladly:"})
    assert [each.text for each in several] == [made.text] * 2
    going_on = [*talk, {"role": "assistant", "content": "The cat is "}]
    [made] = llm.chat(going_on, GREEDY, chat_template=TEMPLATE, continue_final_message=True)
    assert made.prompt == "<user> Hi there\n<assistant> The cat is "
    [made] = llm.chat(going_on, GREEDY, chat_template=TEMPLATE, add_generation_prompt=False)
    assert made.prompt == "<user> Hi there\n<assistant> The cat is \n"
    for content in ("<", "assistant", "x "):     # which the template writes elsewhere, too
        [made] = llm.chat([{"role": "assistant", "content": content}], GREEDY, continue_final_message=True,
                          chat_template=TEMPLATE + "<end>")
        assert made.prompt == f"<assistant> {content}"
    for template, last in (("nothing", "Hi"), (TEMPLATE, " ")):
        with pytest.raises(RequestError, match="continue_final_message"):
            llm.chat([{"role": "user", "content": last}], GREEDY, chat_template=template,
                     continue_final_message=True)


def test_parts_of_a_content_are_texts(llm: LLM):
    parts = [{"type": "text", "text": "A girl"}, {"type": "text", "text": "ran."}]
    [made] = llm.chat([{"role": "user", "content": parts}], GREEDY, chat_template=TEMPLATE)
    assert made.prompt.startswith("<user> A girl\nran.\n")
    with pytest.raises(RequestError, match="a content of parts"):
        llm.chat([{"role": "user", "content": [{"type": "image_url"}]}], GREEDY, chat_template=TEMPLATE)


def test_arguments_of_earlier_calls_are_data(llm: LLM):
    """As in the API: JSON texts, cut ones, and none; a template that reads objects gets one."""
    template = ("{% for m in messages %}{% for c in m.tool_calls or [] %}["
                "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }};{% endfor %}]"
                "{% endfor %}{% endfor %}x")
    for given, wanted in (('{"a": 1}', "[a=1;]"), ({"a": 1}, "[a=1;]"), ('{"a": "1', '[arguments={"a": "1;]'),
                          (None, "[]"), ("", "[]"), ("[2]", "[arguments=[2];]")):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": given}}
        [made] = llm.chat([{"role": "assistant", "content": None, "tool_calls": [call]},
                           {"role": "tool", "tool_call_id": "c", "content": "r"}], GREEDY,
                          chat_template=template)
        assert made.prompt == wanted + "x"
    for odd in (5, [5], [{"function": "f"}]):      # the template says what it makes of these
        [made] = llm.chat([{"role": "user", "content": "a", "tool_calls": odd}], GREEDY,
                          chat_template="{{ messages[0].tool_calls }}")
        assert made.prompt == str(odd)


@pytest.mark.slow
def test_a_seed_of_the_model_repeats_its_answers():
    def drawn() -> list[str]:
        with LLM(DEFAULT_MODEL, device="CPU", max_num_seqs=2, max_model_len=64, seed=4) as made:
            return [each.text for each in made.generate([PROMPT] * 2, SamplingParams(max_tokens=8))]
    first = drawn()
    assert first == drawn()
    assert first[0] != first[1]


# **** sampling ****

def test_defaults_are_vllms():
    made = SamplingParams()
    assert {name: getattr(made, name) for name in (
        "n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p",
        "top_k", "min_p", "seed", "ignore_eos", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs",
        "detokenize", "skip_special_tokens", "spaces_between_special_tokens", "logits_processors",
        "truncate_prompt_tokens", "include_stop_str_in_output", "output_kind", "structured_outputs",
        "allowed_token_ids")} == {
        "n": 1, "best_of": None, "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1,
        "temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "seed": None, "ignore_eos": False,
        "max_tokens": 16, "min_tokens": 0, "logprobs": None, "prompt_logprobs": None, "detokenize": True,
        "skip_special_tokens": True, "spaces_between_special_tokens": True, "logits_processors": None,
        "truncate_prompt_tokens": None, "include_stop_str_in_output": False,
        "output_kind": RequestOutputKind.CUMULATIVE, "structured_outputs": None, "allowed_token_ids": None}
    assert {each.name for each in fields(made)} >= {"bad_words", "stop", "stop_token_ids", "logit_bias"}


def test_what_stands_for_nothing():
    made = SamplingParams(stop="end", stop_token_ids=None, bad_words=None, logit_bias=None)
    assert (made.stop, made.stop_token_ids, made.bad_words, made.logit_bias) == (["end"], [], [], None)
    assert SamplingParams(stop=None) == SamplingParams()


@pytest.mark.parametrize("given", [
    {"best_of": 3}, {"logits_processors": [print]}, {"seed": 2 ** 64}, {"allowed_token_ids": []},
    {"bad_words": [""]},
    {"truncate_prompt_tokens": 0}, {"truncate_prompt_tokens": -2}, {"stop": ["a"], "detokenize": False},
    {"output_kind": 2}, {"skip_special_tokens": "no"}, {"temperature": 2.5}, {"stream_interval": 0},
    {"thinking_token_budget": -2}, {"logprob_token_ids": [-1]}, {"guided_decoding": {}}, {"extra_args": 5},
    {"allowed_token_ids": "12"}, {"bad_words": [*map(str, range(1001))]}, {"bad_words": ["a" * 65537]},
    {"stop": "a" * 1025}], ids=lambda given: str(given)[:60])
def test_params_that_are_refused(given: dict[str, Any]):
    name = min(given)
    with pytest.raises(RequestError, match=f"{'stop' if name == 'detokenize' else name} (is|has)"):
        SamplingParams(**given)


def test_allowed_tokens(llm: LLM):
    allowed = ids(llm, "cat dog bird.")
    for params in (replace(GREEDY, temperature=1, n=3), GREEDY):
        [made] = llm.generate(PROMPT, replace(params, allowed_token_ids=allowed))
        assert all(len(each.token_ids) == 12 and set(each.token_ids) <= set(allowed) for each in made.outputs)
    with pytest.raises(RequestError, match="allowed_token_ids has token id"):
        llm.generate(PROMPT, replace(GREEDY, allowed_token_ids=[10**9]))


def test_bad_words_do_not_come(llm: LLM):
    """Each word of an answer is forbidden in turn; one that does not come changes nothing."""
    plain = llm.generate(PROMPT, replace(GREEDY, max_tokens=30))[0].text
    words = sorted({word for word in plain.split() if word.isalpha()})
    assert len(words) > 5
    for made, word in zip(llm.generate([PROMPT] * len(words), [
            replace(GREEDY, max_tokens=30, bad_words=[word]) for word in words]), words, strict=True):
        assert word not in made.text.split()
    params = replace(GREEDY, max_tokens=30, bad_words=["xylophone", "quartz"])
    assert llm.generate([PROMPT], params)[0].text == plain


def test_rules_beside_a_structured_output(llm: LLM):
    choice = StructuredOutputsParams(choice=["red", "green", "blue"])
    for word in ("red", "green", "blue"):
        own = llm.require_tokenizer().encode(word, special=False)
        params = replace(GREEDY, structured_outputs=choice, allowed_token_ids=[*own, *llm.eos])
        assert llm.generate(PROMPT, params)[0].text == word
    none = replace(GREEDY, structured_outputs=choice, allowed_token_ids=ids(llm, "zzz")[-1:])
    with pytest.raises(RequestError, match="leave no token"): llm.generate([PROMPT], none)
    own = llm.require_tokenizer().encode("blue", special=False)
    [made] = llm.generate([PROMPT], replace(none, structured_outputs=StructuredOutputsParams(regex="blue!!"),
                                            allowed_token_ids=own))
    assert (made.text, made.finish_reason) == ("blue", "stop")      # "!" is not allowed
    [made] = llm.generate([PROMPT], replace(GREEDY, structured_outputs=StructuredOutputsParams(
        choice=["yes", "no"]), bad_words=[llm.require_tokenizer().token_text(llm.eos[0])]))
    assert (made.text in ("yes", "no"), made.finish_reason) == (True, "stop")


def test_an_answer_that_is_complete_keeps_its_last_token(llm: LLM):
    """Where no token could follow it."""
    [there] = llm.require_tokenizer().encode(" there", special=False)
    base = replace(GREEDY, allowed_token_ids=[there], bad_words=["there there"])
    for more, text, reason in (({"max_tokens": 1}, " there", "length"), ({"stop": ["there"]}, " ", "stop"),
                               ({}, " there", "stop")):
        made = llm.generate(PROMPT, replace(base, **more))[0]
        assert (made.text, made.finish_reason, made.token_ids[0]) == (text, reason, there)


def test_prompts_are_cut_off_at_their_beginning(llm: LLM):
    tokens = ids(llm, "The dog ran after the cat. " * 3)
    for most in (1, 7, len(tokens), 10**6):
        [made] = llm.generate([tokens], replace(GREEDY, truncate_prompt_tokens=most))
        assert list(made.prompt_token_ids) == tokens[-most:]
    text = "The dog ran after the cat. " * 3
    [made] = llm.generate(text, replace(GREEDY, truncate_prompt_tokens=7))
    assert list(made.prompt_token_ids) == [tokens[0], *tokens[-6:]], "the special token is kept"
    talk = [{"role": "user", "content": text * 30}]
    [made] = llm.chat(talk, replace(GREEDY, truncate_prompt_tokens=9), chat_template=TEMPLATE)
    assert len(made.prompt_token_ids) == 9
    [made] = llm.generate([[*tokens] * 40], replace(GREEDY, truncate_prompt_tokens=-1, max_tokens=1))
    assert len(made.prompt_token_ids) == 255


def test_texts_with_special_tokens_and_without_any(llm: LLM):
    [end] = llm.eos
    base = replace(GREEDY, allowed_token_ids=[end], ignore_eos=True, max_tokens=2)
    assert llm.generate(PROMPT, base)[0].text == ""
    written = llm.require_tokenizer().token_text(end)
    assert llm.generate(PROMPT, replace(base, skip_special_tokens=False))[0].text == 2 * written
    made = llm.generate(PROMPT, replace(GREEDY, detokenize=False))[0]
    assert (made.text, made.token_ids) == ("", llm.generate(PROMPT, GREEDY)[0].token_ids)


# **** arguments ****

@pytest.mark.parametrize(("given", "words"), [
    ({"data_parallel_hybrid_lb": True}, "data_parallel_hybrid_lb is True, and rank 0 gives requests to"),
    ({"data_parallel_size": 0}, "data_parallel_size is 0"),
    ({"enable_prompt_embeds": True}, "enable_prompt_embeds is True"),
    ({"gpu_memory_utilisation": 0.5}, "no argument"),
    ({"runner": "draft"}, "runner is 'draft'"),
    ({"speculative_config": "ngram"}, "speculative_config is 'ngram'"),
    ({"speculative_config": {"method": "eagle", "num_speculative_tokens": 2}}, "speculative_config is"),
    ({"speculative_config": {"method": "draft_model", "num_speculative_tokens": 2}}, "speculative_config is"),
    ({"max_num_seqs": "8"}, "max_num_seqs is '8'"), ({"swap_space": float("nan")}, "swap_space is nan"),
    ({"block_size": True}, "block_size is True"),
    ({"max_logprobs": "all"}, "max_logprobs is 'all'"), ({"max_logprobs": -2}, "max_logprobs is -2"),
    ({"max_model_len": "9"}, "max_model_len is '9'"),
    ({"load_format": "pt"}, "load_format is 'pt'"), ({"enable_chunked_prefill": False}, "is False")], ids=str)
def test_arguments_that_are_refused(given: dict[str, Any], words: str):
    """Before anything is read."""
    with pytest.raises(ConfigError, match=words): LLM("/no/such/directory", **given)


def test_none_is_the_default():
    given = dict.fromkeys((
        "max_num_seqs", "max_num_batched_tokens", "block_size", "swap_space", "max_model_len", "quantization",
        "enable_prefix_caching", "num_gpu_blocks_override", "kv_cache_memory_bytes", "speculative_config",
        "seed", "hf_overrides"))
    with LLM(DEFAULT_MODEL, device="CPU", **given) as made:
        assert (made.core.config.max_seqs, made.runner.page_size, made.core.pool.sharing) == (64, 16, True)


def test_an_unknown_argument_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean gpu_memory_utilization"):
        LLM("/no/such/directory", gpu_memory_utilisation=0.5)


def test_an_adapter_is_refused(llm: LLM):
    with pytest.raises(RequestError, match="lora_request of type str"): llm.generate(PROMPT, lora_request="x")


def test_a_bar_counts_prompts(llm: LLM):
    seen: list[Any] = []

    class Bar:
        def __init__(self, **given: Any) -> None: seen.append(given["total"])
        def update(self, count: int) -> None: seen.append(count)
        def close(self) -> None: seen.append("closed")
    llm.generate([PROMPT] * 3, replace(GREEDY, max_tokens=1), use_tqdm=Bar)
    assert seen == [3, 1, 1, 1, "closed"]


def test_priorities_are_as_many_as_prompts(llm: LLM):
    assert len(llm.generate([PROMPT] * 2, replace(GREEDY, max_tokens=1), priority=[1, 0])) == 2
    with pytest.raises(RequestError, match="1 priorities for 2 prompts"):
        llm.generate([PROMPT] * 2, GREEDY, priority=[1])


@pytest.mark.parametrize(("given", "words"), [
    ({"priority": ["high"]}, "priority is 'high'"), ({"priority": [0.5]}, "priority is 0.5"),
    ({"sampling_params": {"n": 1}}, "sampling_params of type dict"),
    ({"sampling_params": SamplingParams(n=65)}, "n is 65"),
    ({"prompts": [b"abc"]}, "a prompt of type bytes"), ({"prompts": [[True, False]]}, "a prompt of type list")
], ids=str)
def test_what_is_refused_before_anything_runs(llm: LLM, given: dict[str, Any], words: str):
    steps = llm.core.stats().steps
    with pytest.raises(RequestError, match=words): llm.generate(**{"prompts": [PROMPT], **given})
    assert llm.core.stats().steps == steps
    assert len(llm.generate(iter(ids(llm, PROMPT)), iter([GREEDY]))) == 1


def test_an_engine_of_a_loop_takes_what_generate_takes(llm: LLM):
    """Salts, truncation and messages."""
    long = ids(llm, "A frog sat on a log. " * 8)

    async def cached(**more: Any) -> int:
        found = [delta async for delta in engine.generate({"prompt_token_ids": long, **more}, GREEDY)]
        return max(delta.cached_tokens for delta in found)

    async def all_of_them() -> list[int]:
        await engine.start()
        return [await cached(cache_salt=salt) for salt in ("x", "x", "y", "\ud800")]
    engine = AsyncEngine(llm)
    found = asyncio.run(all_of_them())
    assert [each > 0 for each in found] == [False, True, False, False]


PATHS = [("/v1/completions", "prompt", "max_tokens"), ("/v1/chat/completions", "messages", "max_tokens"),
         ("/v1/responses", "input", "max_output_tokens")]


@pytest.mark.parametrize(("path", "field", "most"), PATHS)
def test_cached_tokens_tell_nothing_of_other_keys(llm: LLM, path: str, field: str, most: str):
    def cached(key: str, text: str) -> int:
        asked = [{"role": "user", "content": text}] if field == "messages" else text
        usage = server.post({field: asked, most: 1}, path, headers={"Authorization": f"Bearer {key}"}
                            ).json()["usage"]
        return usage.get("prompt_tokens_details", usage.get("input_tokens_details"))["cached_tokens"]
    text = path + " Once upon a time there was a fox who lived in a wood and had a friend. " * 3
    with live(llm_service(llm, keys=frozenset({"one", "two"}), prompt_details=True)) as server:
        assert [cached("one", text), cached("two", text)] == [0, 0]
        own = cached("one", text)
        assert own >= 32
        assert own == cached("two", text)
        server.service.shared_prefixes = True
        assert [cached("one", "A " + text), cached("two", "A " + text)] == [0, own]
        server.service.shared_prefixes, server.service.keys = False, frozenset({"one"})
        assert cached("one", "A " + text) == own
