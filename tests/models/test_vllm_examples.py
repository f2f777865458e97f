"""Programs like vLLM's examples: the same calls and arguments, with the names of tinygrad_nv."""
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.models.embedding_case import ENCODERS, add_vocabulary, save
from tinygrad_nv import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from tinygrad_nv.cli import DEFAULT_MODEL

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
            assert sequence.text == llm.get_tokenizer().decode(sequence.tokens)
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
