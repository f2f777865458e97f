"""GGUF files through the engine: greedy tokens of the weights that transformers makes of a file."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from tests.support.quant.gguf_case import tokenizer_metadata, write_model
from tinygrad_nv.engine.llm import LLM
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.text.tokenizer import Tokenizer
from tinygrad_nv.models.tales.tokenizer import CHAT_TEMPLATE

GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
PROMPT = "Once upon a time there was a little fox"
SIZES = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
KINDS = {"Q4_0": Kind.Q4_0, "Q8_0": Kind.Q8_0, "F16": Kind.F16,
         "Q4_K_M": {"attn_v": Kind.Q6_K, "ffn_down": Kind.Q6_K, "output.weight": Kind.Q6_K, "": Kind.Q4_K}}


@pytest.fixture(scope="module")
def source(make_model) -> Path: return make_model(**SIZES)


def written(path: Path, source: Path, kinds: Kind | dict[str, Kind], split: int = 0) -> Path:
    tokenizer = Tokenizer.load(source)
    more = tokenizer_metadata(tokenizer.backend, "gpt-2", CHAT_TEMPLATE, "<|bos|>", "<|eos|>")
    write_model(path, source, kinds, more, split)
    return path


def their_tokens(path: Path) -> tuple[list[int], list[int]]:
    """The prompt's ids, and 32 greedy ones. Loading the file itself needs a package that tests do not have.
    """
    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.LlamaForCausalLM(config).eval()
    made = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    assert set(model.load_state_dict(made, strict=False).missing_keys) <= {"lm_head.weight"}
    assert ("lm_head.weight" in made) != config.tie_word_embeddings
    model.generation_config = transformers.GenerationConfig(eos_token_id=None, pad_token_id=0)
    ids = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)(PROMPT)["input_ids"]
    prompt = torch.tensor([ids])
    found = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=32, do_sample=False)
    return ids, found[0, len(ids):].tolist()


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kinds", [*KINDS, "tied"])
def test_greedy_tokens_are_those_of_transformers(source: Path, tmp_path: Path, make_model, kinds: str):
    if kinds == "tied": source = make_model(**SIZES, tie_word_embeddings=True)
    path = written(tmp_path / "model.gguf", source, KINDS.get(kinds, Kind.Q8_0))
    prompt, expected = their_tokens(path)
    llm = LLM(path, device="CPU", dtype="float32", max_num_seqs=2)
    try:
        done = llm.complete(PROMPT, GREEDY)
        assert (list(done.prompt_token_ids), list(done.token_ids)) == (prompt, expected)
        assert llm.eos == (1,)
        assert bool(llm.model.blocks[0].attention.output.parts) == (kinds != "F16")
        assert (llm.model.quantised_head is None) == (kinds == "F16")
        assert (llm.model.quantised_embedding is None) == (kinds == "F16")
        dense = llm.config.parameters - llm.config.vocab_size * llm.config.hidden_size * (kinds != "tied")
        if kinds != "F16": assert llm.streamed_bytes < dense * 4 / 3
    finally: llm.close()


@pytest.mark.slow
def test_embeddings_of_a_file(tmp_path: Path, make_model):
    """Of a tied model, whose blocks are the embedding's and the head's."""
    path = written(tmp_path / "model.gguf", make_model(**SIZES, tie_word_embeddings=True), Kind.Q8_0)
    config = transformers.AutoConfig.from_pretrained(tmp_path, gguf_file=path.name)
    model = transformers.LlamaForCausalLM(config)
    made = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    model.eval().load_state_dict(made, strict=False)
    llm = LLM(path, device="CPU", dtype="float32", task="embed", max_num_batched_tokens=16)
    done = llm.embed(PROMPT)[0]
    with torch.no_grad(): hidden = model.model(torch.tensor([done.prompt_token_ids])).last_hidden_state[0, -1]
    assert (torch.tensor(done.outputs.embedding) - hidden / hidden.norm()).abs().max() <= 2e-4
    llm.close()


def test_a_file_and_its_directory_on_the_command_line(command, source: Path, tmp_path: Path):
    path = written(tmp_path / "model.gguf", source, Kind.Q8_0)
    outs = {command("generate", each, PROMPT, "--max-tokens", 4, "--temperature", 0).succeeded().out
            for each in (path, tmp_path)}
    assert len(outs) == 1
    command("chat", path, "--max-tokens", 2, stdin="hi\n").succeeded()
    command("explain", path).succeeded()


@pytest.mark.slow
def test_a_model_in_several_files(command, source: Path, tmp_path: Path):
    """As one file: by the name of any part, and by the directory. A part that is missing is named."""
    whole = written(tmp_path / "whole.gguf", source, KINDS["Q4_K_M"])
    folder = tmp_path / "parts"
    folder.mkdir()
    written(folder / "model.gguf", source, KINDS["Q4_K_M"], split=9)
    parts = sorted(folder.iterdir())
    assert len(parts) == 3
    outs = {command("generate", each, PROMPT, "--max-tokens", 4, "--temperature", 0).succeeded().out
            for each in (whole, parts[0], parts[1], folder)}
    assert len(outs) == 1
    parts[1].unlink()
    for each in (folder, parts[2]):
        command("generate", each, PROMPT).refused(
            f"{folder} lacks 1 of the 3 files of model-00001-of-00003.gguf: model-00002-of-00003.gguf",
            "expected: every part of the model", "to fix:   download the missing files")


def test_inputs_of_float32_are_rounded_where_none_is_asked_for(source: Path, tmp_path: Path):
    """By default int8, as llama.cpp computes; float32 by its name is exact."""
    path = written(tmp_path / "model.gguf", source, Kind.Q8_0)
    for dtype, int8 in (("auto", True), ("float32", False), ("bfloat16", True)):
        llm = LLM(path, device="CPU", dtype=dtype, max_num_seqs=1)
        output = llm.model.blocks[0].attention.output.parts[0]
        assert (llm.dtype.name, output.int8) == ({"auto": "float"}.get(dtype, llm.dtype.name), int8)
        llm.close()
