"""Trained models, as packages ship them: SmolLM2's tokens, likelihoods and answers, MiniLM's sentences."""
from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from tests.support import SUPPORT
from tests.support.models import trained
from tinygrad_nv import LLM, SamplingParams

IDS = json.loads((SUPPORT / "models" / "trained_ids.json").read_text())     # trained_ids.py made it
TEXT = (Path(__file__).parents[2] / "LICENSE").read_text() + """
Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do:
once or twice she had peeped into the book her sister was reading, but it had no pictures or
conversations in it, "and what is the use of a book," thought Alice, "without pictures or conversations?"
So she was considering in her own mind (as well as she could, for the day made her feel very sleepy and
stupid), whether the pleasure of making a daisy-chain would be worth the trouble of getting up and
picking the daisies, when suddenly a White Rabbit with pink eyes ran close by her. Water boils at 100
degrees Celsius. In 1969 two people walked on the Moon.
""".replace("\n", " ")
SENTENCES = ["A fox runs through the snow.", "The animal hurries over white ground.",
             "Interest rates rose by a quarter point in March, and bonds fell."]


@pytest.fixture(scope="module")
def smollm2() -> LLM: return LLM(str(trained.smollm2()), max_model_len=512, max_num_seqs=2)


def likelihoods(llm: LLM, ids: Sequence[int]) -> np.ndarray:
    """Log probabilities of a prompt's tokens from the second on."""
    asked = SamplingParams(max_tokens=1, prompt_logprobs=0)
    rows = llm.generate([{"prompt_token_ids": list(ids)}], asked)[0].prompt_logprobs
    return np.array([row[token].logprob for token, row in zip(ids[1:], rows[1:], strict=True)])


def test_tokens_are_llama_cpps(smollm2: LLM) -> None:
    tokenizer = smollm2.get_tokenizer()
    wrong = [(text, found, ids) for text, ids in IDS
             if (found := tokenizer.encode(text, add_special_tokens=False)) != ids
             or tokenizer.decode(ids, skip_special_tokens=False) != text]
    assert wrong == []
    assert len(IDS) == 42


def float32_likelihoods(ids: Sequence[int]) -> np.ndarray:
    """Those of transformers, which dequantises the file."""
    path = trained.smollm2()
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    with torch.no_grad(): logits = model(torch.tensor([ids])).logits[0].log_softmax(-1).numpy()
    return logits[np.arange(len(ids) - 1), ids[1:]]


def test_likelihoods_with_activations_of_int8(smollm2: LLM) -> None:
    """The mean within 0.01 of float32. llama.cpp, which has such activations, too, is 0.002 away; of single
    tokens it is 0.15 away, root mean square."""
    ids = smollm2.get_tokenizer().encode(TEXT)
    away = likelihoods(smollm2, ids) - float32_likelihoods(ids)
    assert abs(away.mean()) <= 0.01
    assert np.sqrt((away ** 2).mean()) <= 0.2


@pytest.mark.slow
def test_likelihoods_in_float32() -> None:
    llm = LLM(str(trained.smollm2()), dtype="float32", max_model_len=512, max_num_seqs=1)
    ids = llm.get_tokenizer().encode(TEXT)
    np.testing.assert_allclose(likelihoods(llm, ids), float32_likelihoods(ids), atol=1e-3)


def test_a_chat_stops(smollm2: LLM) -> None:
    """Each answer at the token that ends a turn, which is no part of it."""
    asked = ["Write one short sentence about the sea.", "Say hello."]
    answers = smollm2.chat([[{"role": "user", "content": each}] for each in asked],
                           SamplingParams(temperature=0, max_tokens=200))
    for each in answers:
        answer = each.outputs[0]
        assert (answer.finish_reason, answer.token_ids[-1]) == ("stop", 2), answer
        assert answer.text.strip()
        assert "<|im_" not in answer.text


def test_sentences(tmp_path: Path) -> None:
    """MiniLM in the engine and through torch.compile: transformers' vectors."""
    folder = trained.minilm(tmp_path)
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    given = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    mask = given["attention_mask"][..., None]
    with torch.no_grad():
        states = model(**given).last_hidden_state * mask
        compiled = torch.compile(model, backend="tinygrad_nv")(**given).last_hidden_state * mask
    assert (compiled - states).abs().max() <= 2e-5 * states.abs().max()
    wanted = torch.nn.functional.normalize(states.sum(1) / mask.sum(1), dim=-1).numpy()
    found = np.array([each.outputs.embedding for each in LLM(str(folder)).embed(SENTENCES)])
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    near, far = wanted[0] @ wanted[1], wanted[0] @ wanted[2]
    assert near > 0.3 > far + 0.1     # the vectors are a trained model's
