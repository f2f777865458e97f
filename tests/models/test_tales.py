"""The model in the box: the files it should have, the numbers transformers gives for them, text that reads,
and exactly these tokens with speculation."""
from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tinygrad_nv.cli import DEFAULT_MODEL
from tinygrad_nv.engine.core import EngineStats
from tinygrad_nv.engine.llm import LLM
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.structured_output.params import StructuredOutputsParams as Structured
from tinygrad_nv.models.tales.stories import corpus
from tinygrad_nv.models.tales.train import CONFIG, Recipe, batches, loss_of, rows


@pytest.fixture(scope="module")
def llm() -> LLM: return LLM(DEFAULT_MODEL, device="CPU")


@pytest.fixture(scope="module")
def tales(llm: LLM) -> list[str]:
    """Whole stories, sampled as the box's own defaults say."""
    opening = "Once upon a time"
    return [opening + llm.complete(opening, SamplingParams(**{**vars(llm.defaults), "seed": seed})).text
            for seed in range(12)]


def test_it_is_small_and_its_record_is_that_of_the_recipe():
    files = [f for f in DEFAULT_MODEL.iterdir() if f.suffix in (".json", ".safetensors")]
    assert sum(f.stat().st_size for f in files) <= 5e6
    assert json.loads((DEFAULT_MODEL / "config.json").read_text()) == CONFIG
    record = json.loads((DEFAULT_MODEL / "training.json").read_text())
    assert record["recipe"] == vars(Recipe(steps=record["recipe"]["steps"]))
    assert record["curve"][-1]["step"] == record["recipe"]["steps"] == Recipe.steps


def test_transformers_reads_it_and_agrees(llm: LLM):
    prompt = "Once upon a time, a little fox named"
    ids = AutoTokenizer.from_pretrained(DEFAULT_MODEL)(prompt)["input_ids"]
    assert ids == llm.tokenize(prompt)
    model = AutoModelForCausalLM.from_pretrained(DEFAULT_MODEL)
    made = model.generate(torch.tensor([ids]), max_new_tokens=64, min_new_tokens=64, do_sample=False,
                          top_p=None, temperature=None, pad_token_id=2)
    ours = llm.complete(prompt, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
    with torch.no_grad(): margin = model(made).logits[0, len(ids) - 1:-1].topk(2).values.diff().abs().min()
    assert list(ours.token_ids) == made[0, len(ids):].tolist(), f"smallest margin {margin}"


def test_held_out_loss_is_the_recorded_one(llm: LLM):
    """The loss the record states, on the same 8 batches, to its 4 decimals and float32's rounding."""
    tokenizer, recipe = llm.require_tokenizer().backend, Recipe()
    exam = batches(rows(tokenizer, "held-out", recipe.length), recipe.batch)
    losses = [loss_of(llm.model, next(exam)).item() for _ in range(8)]
    record = json.loads((DEFAULT_MODEL / "training.json").read_text())["curve"][-1]
    assert float(np.mean(losses)) == pytest.approx(record["held_out"], abs=2e-4)
    assert record["held_out"] - record["train"] < 0.05, "it learned the grammar, not the stories"


def test_stories_end_by_themselves_in_whole_sentences(tales: list[str]):
    for tale in tales:
        assert re.search(r'[.!?]"?$', tale.strip()), tale
        assert tale.count('"') % 2 == 0, tale
        assert 40 <= len(tale.split()) <= 250, tale


def test_stories_are_made_of_words_of_the_language(tales: list[str]):
    """At most 1 word in 300 that no story of 3,000 uses."""
    def words(text: str) -> list[str]: return re.findall(r"[A-Za-z']+", text)
    known = {word.lower() for story in corpus("train", 3000) for word in words(story)}
    used = [word for tale in tales for word in words(tale)]
    assert sum(word.lower() not in known for word in used) <= len(used) / 300


@pytest.mark.slow
def test_stories_are_not_copies(tales: list[str]):
    assert len(set(tales)) == len(tales)
    assert not set(tales) & set(corpus("train", 20_000))


def test_rows_begin_with_a_story_and_have_one_length(llm: LLM):
    source = rows(llm.require_tokenizer().backend, "train", 160)
    for row in (next(source) for _ in range(50)):
        assert (len(row), row[0]) == (161, 0)
        assert all(row[i + 1] == 0 for i in range(160) if row[i] == 1), "after an end comes a beginning"


def test_splits_are_apart():
    assert not set(corpus("train", 2000)) & set(corpus("held-out", 2000))


@pytest.mark.slow
def test_training_repeats_itself_and_learns():
    """Two runs of 8 small steps: the same curve to the last bit, and falling. Minutes, most of them
    compiling."""
    from tinygrad_nv.models.config import parse_config
    from tinygrad_nv.models.llama import Llama
    from tinygrad_nv.models.tales.tokenizer import train_tokenizer
    from tinygrad_nv.models.tales.train import train
    small = {**CONFIG, "num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 2,
             "num_key_value_heads": 1, "intermediate_size": 96, "vocab_size": 512}
    tokenizer = train_tokenizer(corpus("train", 500), 512)
    curves = [train(Llama(parse_config(small)), tokenizer, Recipe(steps=8, batch=4, length=64, warm_up=2))
              for _ in range(2)]
    for a, b in zip(*curves, strict=True): assert (a["train"], a["held_out"]) == (b["train"], b["held_out"])
    assert curves[0][-1]["held_out"] < np.log(512)


AGE = {"type": "object", "additionalProperties": False, "required": ["age"],
       "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}}}
ASKED = [("Once upon a time", SamplingParams(max_tokens=40, temperature=0.0)),
         ("A dog", SamplingParams(max_tokens=40, temperature=0.9, seed=3, top_p=0.9, n=2)),
         ("The dog ran. The dog ran. The dog", SamplingParams(max_tokens=40, temperature=0.0)),
         ("A cat", SamplingParams(max_tokens=30, seed=1, repetition_penalty=1.2)),
         ("Once", SamplingParams(max_tokens=40, seed=3, structured_outputs=Structured(json=AGE)))]


def answers(speculative: str | None) -> tuple[list[list[tuple[int, ...]]], EngineStats]:
    """Tokens of all answers, and figures."""
    llm = LLM(DEFAULT_MODEL, max_num_seqs=8, num_pages=128, speculative=speculative)
    try:
        prompts, params = zip(*ASKED, strict=True)
        done = llm.generate(list(prompts), list(params))
        return [[each.token_ids for each in one.outputs] for one in done], llm.core.stats()
    finally: llm.close()


@pytest.fixture(scope="module")
def without() -> tuple[list[list[tuple[int, ...]]], EngineStats]: return answers(None)


def test_copies_change_no_token(without) -> None:
    tokens, stats = answers("ngram:4")
    assert tokens == without[0]
    assert stats.drafted >= stats.accepted > 0


@pytest.mark.slow
def test_a_model_that_drafts_for_itself_is_always_right(without) -> None:
    tokens, stats = answers(f"draft:{DEFAULT_MODEL}:4")
    assert tokens == without[0]
    assert stats.accepted > 100
    # behind an end token, and where the form of an answer forbids what the draft had
    assert stats.drafted - stats.accepted < 20
    assert stats.steps < without[1].steps
