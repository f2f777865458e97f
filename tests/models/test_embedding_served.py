"""`tinygrad-nv serve` of an embedding model, started as a user does."""
from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
import transformers

from tests.support.lazy import lazy
from tests.support.models.embedding_case import ENCODERS, add_modules, add_vocabulary, hidden_states, save

openai = lazy("openai")

OPTIONS = ("--port", "0", "--device", "CPU", "--served-model-name", "bert", "--max-num-batched-tokens", "32")


@pytest.mark.slow
def test_an_embedding_model_is_served(tmp_path: Path):
    theirs, texts = save(tmp_path, "BertModel", ENCODERS["Bert"]), ["a fox", "a bear and a fox"]
    add_vocabulary(tmp_path)
    add_modules(tmp_path, {"pooling_mode_mean_tokens": True})
    ids = transformers.BertTokenizer.from_pretrained(tmp_path)(texts)["input_ids"]
    command = [sys.executable, "-m", "tinygrad_nv", "serve", str(tmp_path), *OPTIONS]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        start = ""
        while (found := re.search(r" ready url=(\S+)", start)) is None: start += process.stderr.readline()
        assert "embeddings dimensions=64 pooling=mean max_model_len=66 max_num_batched_tokens=66" in start
        with openai.OpenAI(base_url=f"{found[1]}/v1", api_key="none") as client:
            made = client.embeddings.create(model="bert", input=texts)
        assert made.usage.prompt_tokens == sum(map(len, ids))
        for one, its in zip(made.data, ids, strict=True):
            mean = hidden_states(theirs, its).mean(0)
            assert np.abs(np.array(one.embedding) - mean / np.linalg.norm(mean)).max() <= 2e-4
        asked = {"messages": [{"role": "user", "content": "hello"}]}
        answer = httpx.post(f"{found[1]}/v1/chat/completions", json=asked, timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_task")
        process.terminate()
        assert process.wait(60) == 0


@pytest.mark.slow
def test_a_reranker_is_served(tmp_path: Path):
    theirs = save(tmp_path, "BertForSequenceClassification", {**ENCODERS["Bert"], "num_labels": 1,
                                                              "type_vocab_size": 2})
    add_vocabulary(tmp_path)
    documents = ["a bear", "zoo", "a fox and a bear"]
    tokenizer = transformers.BertTokenizer.from_pretrained(tmp_path)
    with torch.no_grad():
        expected = [float(theirs(**tokenizer("a fox", text, return_tensors="pt")).logits.sigmoid())
                    for text in documents]
    command = [sys.executable, "-m", "tinygrad_nv", "serve", str(tmp_path), *OPTIONS]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        start = ""
        while (found := re.search(r" ready url=(\S+)", start)) is None: start += process.stderr.readline()
        with httpx.Client(base_url=found[1], timeout=60) as client:
            asked = {"query": "a fox", "documents": documents}
            made = client.post("/v1/rerank", json=asked).json()["results"]
            assert [each["index"] for each in made] == sorted(range(3), key=lambda at: -expected[at])
            assert np.allclose([each["relevance_score"] for each in made], sorted(expected)[::-1], atol=2e-4)
            made = client.post("/score", json={"text_1": "a fox", "text_2": documents}).json()["data"]
            assert np.allclose([each["score"] for each in made], expected, atol=2e-4)
            made = client.post("/classify", json={"input": documents[0]}).json()["data"]
            assert (made[0]["label"], made[0]["num_classes"]) == ("LABEL_0", 1)
        process.terminate()
        assert process.wait(60) == 0
