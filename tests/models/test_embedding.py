"""Embedding models: hidden states are those of transformers, and vectors what sentence-transformers makes of
them. And served, started as a user does."""
from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers
from tinygrad import Tensor, dtypes

from tests.support.lazy import lazy
from tests.support.models.embedding_case import (
    DECODER,
    ENCODERS,
    add_modules,
    add_vocabulary,
    hidden_states,
    ragged,
    save,
)
from tests.support.models.families import BASE, CASES, KEEPING_STATES
from tinygrad_nv.engine.llm import LLM
from tinygrad_nv.engine.worker.embedding_runner import EmbeddingRunner, step_sizes
from tinygrad_nv.errors import ModelError, RequestError
from tinygrad_nv.models.embedding_model import EmbeddingConfig, EmbeddingModel, read_embedding_config
from tinygrad_nv.models.encoder import Encoder
from tinygrad_nv.models.encoder_config import read_encoder_config
from tinygrad_nv.models.pooling import Pooling, read_pooling
from tinygrad_nv.runtime.programs import Compilations

TEXTS = ragged((7, 1, 20))
# families whose attention is not that of packed sequences, and what of it
REFUSED = {"DeepseekV2": "multi-head latent attention", "DeepseekV3": "multi-head latent attention",
           "GptOss": "attention sinks", "Llama4": "windows in chunks",
           **dict.fromkeys(KEEPING_STATES, "layers that keep states"),
           **dict.fromkeys(("KimiLinear", "BailingHybrid"), "multi-head latent attention")}


def vectors(llm: LLM, prompts: Any, **options: Any) -> np.ndarray:
    return np.array([each.outputs.embedding for each in llm.embed(prompts, **options)], np.float32)


def unit(x: np.ndarray) -> np.ndarray: return x / np.linalg.norm(x, axis=-1, keepdims=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dense_layers_of_half_the_size_are_read_as_float32(tmp_path: Path, dtype: torch.dtype):
    dense = torch.nn.Linear(64, 24).to(dtype)
    add_modules(tmp_path, {"pooling_mode_mean_tokens": True}, False, (dense,))
    made, x = read_pooling(tmp_path), torch.randn(3, 64)
    assert made is not None
    with torch.no_grad(): expected = dense.float()(x).tanh().numpy()
    assert np.abs(made.dense[0](x.numpy()) - expected).max() < 1e-6


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", ENCODERS)
def test_hidden_states_of_encoders(tmp_path: Path, family: str):
    """max |h − theirs| ≤ 2e-4 · max |h|, measured 3e-7 to 3e-6. Rows after the last text are padding, and
    RoBERTa's padding token in a text has the row of padding."""
    theirs = save(tmp_path, f"{family}Model", ENCODERS[family])
    texts = [*TEXTS, *([[5, 1, 7]] if family in ("Roberta", "XLMRoberta", "Camembert", "MPNet") else [])]
    config = read_encoder_config(tmp_path)
    assert config is not None
    model = EmbeddingModel(EmbeddingConfig(config, Pooling("cls")), dtypes.float32, "CPU", 64)
    model.load(tmp_path)
    assert isinstance(model.network, Encoder)
    ends = np.cumsum([0, *map(len, texts)]).astype(np.int32)
    starts, given = np.append(ends, ends[-1:]), np.zeros((2, 32), np.int32)
    given[0, :ends[-1]] = np.concatenate(texts)
    given[1, :ends[-1]] = np.concatenate([model.positions(np.array(text)) for text in texts])
    tokens, positions, at = (Tensor(each, device="CPU") for each in (*given, starts))
    made = model.network(tokens, model.network.batch(at, positions, 32)).numpy()
    for i, text in enumerate(texts):
        expected = hidden_states(theirs, text)
        assert np.abs(made[ends[i]:ends[i + 1]] - expected).max() <= 2e-4 * np.abs(expected).max()


OLDER: dict[str, dict[str, Any]] = {
    "NomicBert": {"n_embd": 64, "n_inner": 96, "n_layer": 2, "n_head": 4, "n_positions": 66,
                  "rotary_emb_base": 50, "activation_function": "swiglu", "rotary_emb_fraction": 1.0,
                  "layer_norm_epsilon": 1e-12, "rotary_scaling_factor": None, "prenorm": False},
    "ModernBert": {**ENCODERS["ModernBert"], "global_attn_every_n_layers": 2, "global_rope_theta": 500.0,
                   "local_rope_theta": 100.0, "rope_parameters": None, "layer_types": None}}
NEWER = {"NomicBert": {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
         "ModernBert": {"layer_types": ["full_attention", "sliding_attention"] * 2,
                        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 500.0},
                                            "sliding_attention": {"rope_type": "default",
                                                                  "rope_theta": 100.0}}}}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", OLDER)
def test_fields_of_older_files(tmp_path: Path, family: str):
    """As nomic-embed and ModernBERT were published; and a masked language model's names of tensors."""
    known = {key: value for key, value in ENCODERS[family].items() if key != "head_dim"}
    theirs = save(tmp_path, f"{family}ForMaskedLM", {**known, **NEWER[family]})
    given = {key: value for key, value in OLDER[family].items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(
        {"architectures": [f"{family}ForMaskedLM"], "vocab_size": 120, "dtype": "float32", **given}))
    base = getattr(theirs, theirs.base_model_prefix)
    expected = unit(np.stack([hidden_states(base, text)[0] for text in TEXTS]))
    llm = LLM(tmp_path, device="CPU", max_num_batched_tokens=32)
    assert np.abs(vectors(llm, TEXTS) - expected).max() <= 2e-4
    llm.close()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["mean", "cls", "lasttoken"])
def test_pooling(tmp_path: Path, kind: str):
    """With a dense layer for the mean, as such models have it; names of flags, and of version 5."""
    theirs, dense = save(tmp_path, "BertModel", ENCODERS["Bert"]), None
    names = {"mean": {"pooling_mode_mean_tokens": True}, "cls": {"pooling_mode_cls_token": True},
             "lasttoken": {"pooling_mode": "lasttoken"}}
    if kind == "mean": dense = torch.nn.Linear(64, 24)
    add_modules(tmp_path, names[kind], kind != "cls", () if dense is None else (dense,),
                max_seq_length=48)
    llm = LLM(tmp_path, device="CPU", max_num_batched_tokens=32)
    expected = np.stack([{"mean": x.mean(0), "cls": x[0], "lasttoken": x[-1]}[kind]
                         for x in (hidden_states(theirs, text) for text in TEXTS)])
    if dense is not None:
        with torch.no_grad(): expected = dense(torch.tensor(expected)).tanh().numpy()
    if kind != "cls": expected = unit(expected)
    assert np.abs(vectors(llm, TEXTS) - expected).max() <= 2e-4 * np.abs(expected).max()
    assert llm.length == 48
    if dense is not None:
        assert np.allclose(vectors(llm, TEXTS, dimensions=5), unit(expected[:, :5]), atol=1e-4)
    other = vectors(llm, TEXTS, normalize=kind == "cls")
    assert np.allclose(unit(other), unit(expected), atol=1e-4)
    assert np.allclose(np.linalg.norm(other, axis=1), 1, atol=1e-5) == (kind == "cls")
    llm.close()


def test_texts_and_many_prompts(tmp_path: Path):
    """More prompts than a step or the queue holds, in their order; vocab.txt; the outputs have vLLM's
    fields."""
    theirs = save(tmp_path, "BertModel", ENCODERS["Bert"])
    add_vocabulary(tmp_path)
    llm = LLM(tmp_path, device="CPU", max_num_seqs=3, max_num_batched_tokens=16, max_model_len=20,
              max_queue=4)
    texts = ["fox", "a bear and a fox", "Zoo", "", "b " * 9, "c"] * 2
    tokenizer = transformers.BertTokenizer.from_pretrained(tmp_path)
    made = llm.embed(texts)
    for text, one in zip(texts, made, strict=True):
        ids = tokenizer(text)["input_ids"]
        assert list(one.prompt_token_ids) == ids
        expected = unit(hidden_states(theirs, ids)[0])     # CLS, as vLLM pools where no file says how
        assert np.abs(np.array(one.outputs.embedding) - expected).max() <= 2e-4
    assert llm.embed([]) == []
    assert [each.prompt_token_ids for each in llm.embed("fox")] == [made[0].prompt_token_ids]
    cut = llm.embed("a bear", truncate_prompt_tokens=4)[0].prompt_token_ids
    assert cut == [2, *made[1].prompt_token_ids[1:3], 3]
    assert len(llm.embed("a " * 50, truncate_prompt_tokens=-1)[0].prompt_token_ids) == 20
    assert llm.embed([[5, 6, 7]], truncate_prompt_tokens=2)[0].prompt_token_ids == [5, 6]
    with pytest.raises(RequestError, match="the prompt has 52 tokens, the context holds 20"):
        llm.embed("a " * 50)
    llm.close()


def test_a_decoder_without_head(tmp_path: Path):
    """As Qwen3-Embedding is saved: Qwen3ForCausalLM in config.json, tensors without "model.", the last
    token."""
    theirs = save(tmp_path, "Qwen3Model", {**DECODER, "tie_word_embeddings": False})
    add_modules(tmp_path, {"pooling_mode_lasttoken": True})
    expected = unit(np.stack([hidden_states(theirs, text)[-1] for text in TEXTS]))
    for architecture in ("Qwen3Model", "Qwen3ForCausalLM"):
        data = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**data, "architectures": [architecture]}))
        llm = LLM(tmp_path, device="CPU", max_num_batched_tokens=32)
        assert np.abs(vectors(llm, TEXTS) - expected).max() <= 2e-4
        llm.close()


BOTH_WAYS: dict[str, dict[str, Any]] = {
    "EuroBertModel": {"num_key_value_heads": 2}, "LlamaModel": {"is_causal": False},
    "MistralModel": {"is_causal": False, "sliding_window": 4},
    "Gemma3TextModel": {"use_bidirectional_attention": True, "sliding_window": 8,
                        "query_pre_attn_scalar": 16, "num_hidden_layers": 7}}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("cls", BOTH_WAYS)
def test_decoders_that_attend_in_both_directions(tmp_path: Path, cls: str):
    """Without a head, and without modules.json but for Gemma 3 with two dense layers: EmbeddingGemma."""
    theirs = save(tmp_path, cls, {**DECODER, "pad_token_id": 0, **BOTH_WAYS[cls]})
    expected = np.stack([hidden_states(theirs, text).mean(0) for text in TEXTS])
    if cls == "Gemma3TextModel":
        dense = torch.nn.Linear(64, 96, bias=False), torch.nn.Linear(96, 48, bias=False)
        add_modules(tmp_path, {"pooling_mode_mean_tokens": True}, True, dense, "linear.Identity")
        with torch.no_grad(): expected = dense[1](dense[0](torch.tensor(expected))).numpy()
    expected = unit(expected)
    llm = LLM(tmp_path, device="CPU", max_num_batched_tokens=32)
    assert np.abs(vectors(llm, TEXTS) - expected).max() <= 2e-4
    llm.close()
    if cls == "EuroBertModel": return
    (tmp_path / "modules.json").unlink(missing_ok=True)
    data = json.loads((tmp_path / "config.json").read_text())
    family = cls.removesuffix("Model").removesuffix("Text")
    (tmp_path / "config.json").write_text(json.dumps({**data, "architectures": [f"{family}ForCausalLM"]}))
    with pytest.raises(ModelError, match="not implemented for models that generate"):
        LLM(tmp_path, device="CPU")
    assert read_embedding_config(tmp_path, "embed") is not None


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", [case if case in ("mistral", "gemma2") else
                                  pytest.param(case, marks=pytest.mark.slow) for case in CASES
                                  if CASES[case].family not in REFUSED])
def test_decoders_that_generate(tmp_path: Path, case: str):
    """task="embed" of every family: windows, soft-caps, experts, ropes. The last token, normalised."""
    family, fields = CASES[case].family, {**BASE, **CASES[case].fields}
    theirs = save(tmp_path, f"{family}ForCausalLM", fields)
    texts = ragged((40, 3, 17), 1)
    llm = LLM(tmp_path, device="CPU", max_num_batched_tokens=64, task="embed")
    expected = unit(np.stack([hidden_states(theirs.model, text)[-1] for text in texts]))
    assert np.abs(vectors(llm, texts) - expected).max() <= 2e-4
    llm.close()


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case].family in REFUSED])
def test_decoders_that_are_refused(hf_model: Callable[[str], Path], case: str):
    assert read_embedding_config(hf_model(case)) is None
    with pytest.raises(ModelError, match=f"has {REFUSED[CASES[case].family]} .* not computed yet"):
        read_embedding_config(hf_model(case), "embed")


def test_sizes_of_steps():
    assert step_sizes(8) == [8]
    assert step_sizes(100) == [8, 16, 32, 48, 64, 96, 128]
    assert step_sizes(512) == [8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512]


@pytest.mark.slow
def test_sizes_that_are_captured(tmp_path: Path):
    """Without a warm-up a size is captured when it has come often; after one, none is captured any more."""
    save(tmp_path, "BertModel", ENCODERS["Bert"])
    llm = LLM(tmp_path, device="CPU", max_num_batched_tokens=32)
    assert llm.embedder is not None
    runner: EmbeddingRunner = llm.embedder.runner
    assert runner.max_tokens == 66
    runner.run([[5] * 48])
    for _ in range(7): runner.run([[5] * 12])
    assert list(runner.steps) == [48]
    runner.run([[5] * 12])
    assert list(runner.steps) == [48, 16]
    expected = runner.run([[5] * 20])
    runner.warm_up()
    assert (sorted(runner.steps), sorted(runner.token_steps)) == ([8, 16, 32, 48, 96], [8, 16, 96])
    counted = Compilations()
    for length in range(1, 67):
        for _ in range(9 if length == 12 else 1): runner.run([[5] * length])
        runner.run_tokens([[5] * length])
    assert counted.since() == 0
    np.testing.assert_allclose(runner.run([[5] * 20]), expected, rtol=1e-5, atol=1e-6)
    llm.close()


def test_a_shared_step_gives_what_each_text_gives(tmp_path: Path):
    """Nothing of a text gets into another's vector, NaN neither: texts of one step, and each alone in a step
    of the same size."""
    save(tmp_path, "BertModel", ENCODERS["Bert"])
    add_modules(tmp_path, {"pooling_mode_cls_token": True})
    llm = LLM(tmp_path, device="CPU")
    assert llm.embedder is not None
    runner: EmbeddingRunner = llm.embedder.runner
    together = runner.run(TEXTS)
    for i, text in enumerate(TEXTS):
        alone = runner.run([text, [9] * (28 - len(text))])
        assert np.abs(together[i] - alone[0]).max() <= 1e-5 * np.abs(together).max()
    llm.close()


def test_models_say_what_they_do(tmp_path: Path):
    save(tmp_path, "BertModel", ENCODERS["Bert"])
    llm = LLM(tmp_path, device="CPU")
    with pytest.raises(RequestError, match="makes embeddings, and generates no text"): llm.generate([[5, 6]])
    with pytest.raises(ModelError, match="is an encoder"): LLM(tmp_path, device="CPU", task="generate")
    with pytest.raises(RequestError, match="the task is 'speak'"): LLM(tmp_path, device="CPU", task="speak")
    llm.close()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Bert", "MPNet", "NomicBert", "ModernBert"])
def test_bfloat16(tmp_path: Path, family: str):
    """An error of at most 1.5 × transformers' own; measured 1.08 to 1.12."""
    exact = save(tmp_path, f"{family}Model", ENCODERS[family])
    add_modules(tmp_path, {"pooling_mode_mean_tokens": True}, False)
    cls = getattr(transformers, f"{family}Model")
    theirs = cls.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    expected, rounded = (np.stack([hidden_states(model, text).mean(0) for text in ragged((7, 1, 20, 33))])
                         for model in (exact, theirs))
    llm = LLM(tmp_path, device="CPU", dtype="bfloat16")
    made = vectors(llm, ragged((7, 1, 20, 33)))
    assert np.square(made - expected).mean() ** 0.5 <= 1.5 * np.square(rounded - expected).mean() ** 0.5
    llm.close()


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
        assert (answer.status_code, answer.json()["error"]["reason"]) == (404, "unsupported_task")
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
