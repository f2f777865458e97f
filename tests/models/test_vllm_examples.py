"""Programs like vLLM's examples: the same calls and arguments, with the names of tinygrad_nv; tokenizer,
metrics, caches, and corners of arguments, as vLLM has them."""
from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.support.models.embedding_case import ENCODERS, add_vocabulary, save
from tinygrad_nv import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from tinygrad_nv.cli import DEFAULT_MODEL
from tinygrad_nv.engine.metrics import Counter, Gauge, Histogram, Vector
from tinygrad_nv.errors import ConfigError, EngineError, RequestError

MODEL = str(DEFAULT_MODEL)
PROMPTS = ["Hello, my name is", "The president of the United States is", "The capital of France is",
           "The future of AI is"]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.mark.slow
def test_basic():
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    llm = LLM(model=MODEL)
    outputs = llm.generate(PROMPTS, sampling_params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.prompt == prompt
        assert isinstance(output.outputs[0].text, str)
    llm.close()


def test_chat():
    llm = LLM(model=MODEL, max_model_len=256)
    sampling_params = llm.get_default_sampling_params()
    sampling_params.max_tokens = 8
    sampling_params.temperature = 0.0
    conversation = [{"role": "system", "content": "You are a helpful assistant"},
                    {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello!"},
                    {"role": "user", "content": "Write an essay about the importance of higher education."}]
    [output] = llm.chat(conversation, sampling_params, use_tqdm=False, chat_template=TEMPLATE)
    conversations = [conversation for _ in range(4)]
    outputs = llm.chat(conversations, sampling_params, use_tqdm=True, chat_template=TEMPLATE)
    assert [each.outputs[0].text for each in outputs] == [output.outputs[0].text] * 4
    llm.close()


@pytest.mark.slow
def test_prefix_caching():
    prefix = "You are an expert school principal, skilled in effectively managing faculty and staff. " * 3
    generating_prompts = [prefix + prompt for prompt in PROMPTS]
    sampling_params = SamplingParams(temperature=0.0)
    regular_llm = LLM(model=MODEL, gpu_memory_utilization=0.4, max_model_len=256)
    outputs = regular_llm.generate(generating_prompts, sampling_params)
    regular_generated_texts = [output.outputs[0].text for output in outputs]
    regular_llm.close()
    prefix_cached_llm = LLM(model=MODEL, enable_prefix_caching=True, gpu_memory_utilization=0.4,
                            max_model_len=256)
    prefix_cached_llm.generate(generating_prompts[0], sampling_params)
    outputs = prefix_cached_llm.generate(generating_prompts, sampling_params)
    assert [output.outputs[0].text for output in outputs] == regular_generated_texts
    assert all(output.num_cached_tokens > 0 for output in outputs)
    assert any(metric.name == "vllm:prefix_cache_hits" and metric.value > 0
               for metric in prefix_cached_llm.get_metrics())
    prefix_cached_llm.close()


@pytest.mark.slow
def test_structured_outputs():
    llm = LLM(model=MODEL, max_model_len=100)
    choice = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["Positive", "Negative"]))
    outputs = llm.generate(prompts="Classify this sentiment: vLLM is wonderful!", sampling_params=choice)
    assert outputs[0].outputs[0].text in ("Positive", "Negative")
    regex = StructuredOutputsParams(regex=r"\w+@\w+\.com\n")
    outputs = llm.generate(prompts="The address:", sampling_params=SamplingParams(
        structured_outputs=regex, stop=["\n"], max_tokens=50, temperature=0))
    assert "@" in outputs[0].outputs[0].text or outputs[0].outputs[0].finish_reason == "length"
    schema = {"type": "object", "required": ["brand", "old"], "additionalProperties": False,
              "properties": {"brand": {"enum": ["BMW", "Fiat"]}, "old": {"type": "boolean"}}}
    outputs = llm.generate(prompts="A car: ", sampling_params=SamplingParams(
        structured_outputs=StructuredOutputsParams(json=schema), max_tokens=60))
    assert set(json.loads(outputs[0].outputs[0].text)) == {"brand", "old"}
    llm.close()


def test_beam_search():
    llm = LLM(model=MODEL, max_model_len=128)
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    outputs = llm.beam_search([{"prompt": "Hello, my name is "}, {"prompt": "The dog"}], params)
    for output in outputs:
        assert len(output.sequences) == 3
        for sequence in output.sequences:
            assert sequence.text == llm.get_tokenizer().decode(sequence.tokens, skip_special_tokens=True)
            assert sequence.cum_logprob < 0
    llm.close()


@pytest.mark.parametrize("kind", ["Model", pytest.param("ForSequenceClassification", marks=pytest.mark.slow)])
def test_embed_classify_and_score(tmp_path: Path, kind: str):
    save(tmp_path, f"Bert{kind}", {**ENCODERS["Bert"], **({} if kind == "Model" else {"num_labels": 1})})
    add_vocabulary(tmp_path)
    llm = LLM(model=str(tmp_path), runner="pooling", enforce_eager=True)
    text_1, texts_2 = "a cat", ["the dog", "a cat"]
    if kind == "Model":
        for output in llm.embed(texts_2):
            embeds = output.outputs.embedding
            assert len(embeds) == output.outputs.hidden_size == 64
            assert np.linalg.norm(embeds) == pytest.approx(1, abs=1e-5)
    else:
        for output in llm.classify(texts_2):
            assert output.outputs.num_classes == len(output.outputs.probs) == 1
    scores = [output.outputs.score for output in llm.score(text_1, texts_2)]
    assert len(scores) == 2
    assert scores[0] != scores[1]
    llm.close()


GREEDY = SamplingParams(temperature=0, max_tokens=12)
TALE = "Once upon a time a little fox ran to the river. The bird sang. "
CHAT_TEMPLATE = ("{% for message in messages %}<{{ message.role }}> {{ message.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}<assistant> {% endif %}{{ tools }}")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(DEFAULT_MODEL, device="CPU", max_model_len=256, max_num_seqs=4, max_num_batched_tokens=64,
             enable_prefix_caching=1, collect_metrics=True,
             speculative_config={"method": "ngram", "num_speculative_tokens": 3}) as made: yield made


def test_a_tokenizer_is_transformers(llm: LLM):
    ours, theirs = llm.get_tokenizer(), AutoTokenizer.from_pretrained(DEFAULT_MODEL)
    ids = theirs.encode(TALE)
    assert ours.encode(TALE) == ids == ours(TALE).input_ids == llm.tokenize(TALE)
    assert ours.encode(TALE, add_special_tokens=False) == theirs.encode(TALE, add_special_tokens=False)
    assert ours([TALE, "a"])["attention_mask"] == theirs([TALE, "a"])["attention_mask"]
    assert ours.decode(ids) == theirs.decode(ids)
    assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.batch_decode([ids, ids[:4]]) == [theirs.decode(ids), theirs.decode(ids[:4])]
    assert ours.decode(ids[3]) == theirs.decode(ids[3])
    for name in ("eos_token", "eos_token_id", "bos_token", "bos_token_id", "pad_token_id", "unk_token_id",
                 "vocab_size", "all_special_ids", "all_special_tokens"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.get_vocab() == ours.vocab == theirs.get_vocab()
    assert ours.get_added_vocab() == theirs.get_added_vocab()
    assert len(ours) == len(theirs)
    assert ours.tokenize("a fox") == theirs.tokenize("a fox")
    names = theirs.convert_ids_to_tokens(ids)
    assert ours.convert_ids_to_tokens(ids) == names
    assert ours.convert_tokens_to_ids(names) == ids
    talk = [{"role": "user", "content": "Hi there"}]
    for more in ({}, {"add_generation_prompt": True}):
        told = {"chat_template": CHAT_TEMPLATE, **more}
        text = theirs.apply_chat_template(talk, tokenize=False, **told)
        assert ours.apply_chat_template(talk, tokenize=False, **told) == text
        assert ours.apply_chat_template(talk, **told) == theirs.encode(text, add_special_tokens=False)
    with pytest.raises(AttributeError, match="'pad'"): _ = ours.pad


def test_metrics(llm: LLM):
    before = {each.name: each for each in llm.get_metrics()}
    made = llm.generate([TALE * 3] * 2, GREEDY)
    made += llm.generate(TALE * 3, replace(GREEDY, max_tokens=40))
    found = {each.name: each for each in llm.get_metrics()}
    def gained(name: str) -> Any: return found[name].value - before[name].value
    assert all(type(found[name]) is Gauge and found[name].value == 0 for name in (
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"))
    assert type(found["vllm:prompt_tokens"]) is Counter
    assert gained("vllm:prompt_tokens") == sum(len(each.prompt_token_ids) for each in made)
    assert gained("vllm:generation_tokens") == 64
    assert gained("vllm:prefix_cache_hits") == sum(each.num_cached_tokens for each in made) > 0
    places = found["vllm:spec_decode_num_accepted_tokens_per_pos"]
    assert type(places) is Vector
    assert len(places.values) == 3
    assert sum(places.values) == found["vllm:spec_decode_num_accepted_tokens"].value
    assert places.values == sorted(places.values, reverse=True)
    first, then = (each["vllm:request_generation_tokens"] for each in (before, found))
    assert type(then) is Histogram
    assert (then.count - first.count, then.sum - first.sum) == (3, 64)
    bounds = ("10.0", "20.0", "50.0", "+Inf")
    assert [then.buckets[each] - first.buckets[each] for each in bounds] == [0, 2, 3, 3]
    assert found["vllm:time_to_first_token_seconds"].sum < found["vllm:e2e_request_latency_seconds"].sum
    assert {each.labels["model_name"] for each in found.values()} == {str(DEFAULT_MODEL)}


def test_the_prefix_cache_is_emptied(llm: LLM):
    def cached() -> int: return llm.generate(TALE * 2, GREEDY)[0].num_cached_tokens
    cached()
    assert cached() > 0
    assert llm.reset_prefix_cache()
    assert cached() == 0
    llm.core.pool.assert_conserved([])


def test_what_is_not_there_says_so(llm: LLM):
    params = llm.get_default_sampling_params()
    assert params == llm.defaults
    params.max_tokens = 3
    assert llm.defaults.max_tokens == 256


def test_fields_are_set_and_checked():
    params = SamplingParams(max_tokens=7)
    params.stop, params.temperature = "end", 0
    assert params == SamplingParams(max_tokens=7, stop=("end",), temperature=0)
    with pytest.raises(RequestError, match="temperature is -1"): params.temperature = -1
    with pytest.raises(RequestError, match="did you mean temperature"): params.temperatur = 1
    assert params == SamplingParams(max_tokens=7, stop=("end",), temperature=0)


def test_a_template_takes_what_the_kwargs_say(llm: LLM):
    """The call's own arguments come before them, where they are not None, as in vLLM 0.32."""
    talk, tool = [{"role": "user", "content": "Hi"}], {"type": "function", "function": {"name": "f"}}
    def prompt(**more: Any) -> str | None:
        return llm.chat(talk, GREEDY, **{"chat_template": CHAT_TEMPLATE, **more})[0].prompt
    assert prompt() == "<user> Hi\n<assistant> None"
    assert prompt(chat_template_kwargs={"add_generation_prompt": False}) == "<user> Hi\n<assistant> None"
    own = {"chat_template": "{{ tools }}"}
    assert prompt(chat_template=None, chat_template_kwargs=own, tools=[tool]) == str([tool])
    assert prompt(chat_template=None, chat_template_kwargs={"tools": [tool], **own}) == str([tool])


def test_what_a_request_took_is_told_where_it_is_asked_for():
    """With vLLM's names; its times are of a clock, its arrival of the calendar."""
    with LLM(MODEL, device="CPU", max_model_len=64, max_num_seqs=1, disable_log_stats=False, max_logprobs=1,
             chat_template="{{ messages[0].content }}!", spec_method="ngram", spec_tokens=2) as llm:
        before = time.time()
        [made] = llm.chat([{"role": "user", "content": "Hi"}], GREEDY)
        assert (made.prompt, llm.get_world_size()) == ("Hi!", 1)
        assert before - 1 <= made.metrics.arrival_time <= time.time()
        assert made.metrics.queued_ts <= made.metrics.first_token_ts <= made.metrics.last_token_ts
        assert made.metrics.num_generation_tokens == len(made.token_ids)
        assert llm.core.config.num_speculative_tokens == 2
        for asked in ("logprobs", "prompt_logprobs"):
            llm.generate(TALE, replace(GREEDY, **{asked: 1}))
            with pytest.raises(RequestError, match=f"{asked} is 2"):
                llm.generate(TALE, replace(GREEDY, **{asked: 2}))


def test_a_prompt_that_is_not_to_come_from_the_cache(llm: LLM):
    long = "A frog sat on a log. " * 8
    llm.generate(long, GREEDY)
    assert llm.generate(long, GREEDY)[0].num_cached_tokens > 0
    [made] = llm.generate(long, replace(GREEDY, skip_reading_prefix_cache=True))
    assert made.num_cached_tokens == 0
    assert made.token_ids == llm.generate(long, GREEDY)[0].token_ids


def test_flat_log_probabilities_are_a_list_of_dictionaries(llm: LLM):
    asked = replace(GREEDY, logprobs=2, prompt_logprobs=1)
    [plain], [flat] = llm.generate(TALE, asked), llm.generate(TALE, replace(asked, flat_logprobs=True))
    for one, two in ((plain.outputs[0].logprobs, flat.outputs[0].logprobs),
                     (plain.prompt_logprobs[1:], flat.prompt_logprobs[1:])):
        assert [*two] == one
        assert [*two[2:4]] == one[2:4]
        assert two[-1] == one[-1]
        assert len(two) == len(one)
    assert flat.prompt_logprobs[0] == {}
    for change in (lambda: flat.prompt_logprobs.insert(0, {}), lambda: flat.prompt_logprobs.pop()):
        with pytest.raises(TypeError): change()


def test_words_about_arguments_of_calls(llm: LLM):
    for given, words in (({"tokenization_kwargs": {"truncation_side": "top"}}, "tokenization_kwargs is"),
                         ({"tokenization_kwargs": {"truncate_prompt_tokens": 0}}, "tokenization_kwargs is"),
                         ({"tokenization_kwargs": {"padding": True}}, "tokenization_kwargs has padding"),
                         ({"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs is")):
        with pytest.raises(RequestError, match=words): llm.generate(TALE, GREEDY, **given)
    for wrong in ([], ["Hi"], [{"content": "Hi"}], [{"role": "user", "content": 5}], [[]]):
        with pytest.raises(RequestError, match=r"a message|messages is"):
            llm.chat(wrong or [wrong], GREEDY, chat_template=TEMPLATE)
    with pytest.raises(RequestError, match="thinking_token_budget is 5"):
        llm.generate(TALE, replace(GREEDY, thinking_token_budget=5))
    with pytest.raises(RequestError, match="structured_outputs of a beam search"):
        BeamSearchParams(2, 2, structured_outputs=StructuredOutputsParams(choice=["a"]))


def test_white_space_is_what_its_pattern_says(llm: LLM):
    [wave] = llm.get_tokenizer().encode("~", add_special_tokens=False)
    schema = {"type": "array", "items": {"enum": [1]}, "minItems": 2, "maxItems": 2}
    def text(**more: Any) -> str:
        params = StructuredOutputsParams(json=schema, **more)
        biased = replace(GREEDY, structured_outputs=params, logit_bias={wave: 100})
        return llm.generate(TALE, biased)[0].text
    assert text(whitespace_pattern="~") == "[~1~,~1~]"
    assert "~" not in text()
    with pytest.raises(RequestError, match="whitespace_pattern"):
        StructuredOutputsParams(json={}, whitespace_pattern=5)


def test_blanks_before_bad_words_are_left_out(llm: LLM):
    plain = llm.generate(TALE, replace(GREEDY, max_tokens=30))[0].text
    word = next(word for word in plain.split() if word.isalpha() and len(word) > 2)
    for blanks in ("", " ", "  \n"):
        [made] = llm.generate(TALE, replace(GREEDY, max_tokens=30, bad_words=[blanks + word]))
        assert word not in made.text.split()


def test_end_tokens_alone_make_no_answer_of_many(llm: LLM):
    params = replace(GREEDY, allowed_token_ids=list(llm.eos))
    assert llm.generate(TALE, params)[0].token_ids == [llm.eos[0]]
    with pytest.raises(RequestError, match="min_tokens is 3, and only end tokens"):
        llm.generate(TALE, replace(params, min_tokens=3))
    assert len(llm.generate(TALE, replace(params, min_tokens=3, ignore_eos=True))[0].token_ids) == 12
    with pytest.raises(RequestError, match="only end tokens"):
        llm.generate(TALE, replace(GREEDY, allowed_token_ids=[7], stop_token_ids=[7], min_tokens=1))


@pytest.mark.parametrize(("given", "sharing"), [(0, False), (False, False), (1, True), (None, True)])
def test_flags_are_numbers_too(given: Any, sharing: bool):
    with LLM(DEFAULT_MODEL, device="CPU", max_model_len=64, max_num_seqs=1,
             enable_prefix_caching=given) as made: assert made.core.pool.sharing == sharing


def test_a_closed_model_runs_no_task():
    with pytest.raises(ConfigError, match="enable_prefix_caching is 'no'"):
        LLM("/no/such/directory", enable_prefix_caching="no")
    with LLM(DEFAULT_MODEL, device="CPU", max_model_len=64, max_num_seqs=1) as made: pass
    with pytest.raises(EngineError, match="the model is closed"): made.reset_prefix_cache()
