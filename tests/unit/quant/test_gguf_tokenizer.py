"""Tokenizers of GGUF files: ids and texts equal those of the tokenizer.json that was converted, and those
of transformers' reading of the file. GGUF files through the engine: greedy tokens of the weights that
transformers makes of a file."""
from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as Backend
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.tokenization_utils_base import generate_merges

from tests.support.quant.gguf_case import add, tokenizer_metadata, write_model
from tinygrad_nv.cli import DEFAULT_MODEL
from tinygrad_nv.engine.llm import LLM
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.text.gguf import merges_of
from tinygrad_nv.engine.text.gguf_patterns import PATTERNS
from tinygrad_nv.engine.text.tokenizer import Tokenizer
from tinygrad_nv.models.config import read_config
from tinygrad_nv.models.tales.tokenizer import CHAT_TEMPLATE

TEXTS = ["", "a", "Hello, world!", "It's I'LL we've DON'T", "one  two   three    ",
         "line\nline\r\n\r\n  line\t\tx", "1234567 12 3.1415 2024-11-23", "naïve café Über straße",
         "日本語と한국어 العربية हिन्दी", "🦊👩\u200d👩\u200d👧 e\u0301 ½ ﬁ",
         "<|user|>hi<|eos|> <think> <|user",
         "def f(x):\n    return x[0] != y // 2\n", "a\u00a0b\u2003c\u200bd", "___ --- ... ''' \"\"\"",
         "HTTPServer camelCase ABCdef", "x" * 70, "▁ <0x41> </s>"]
SPECIALS = ("<|bos|>", "<|eos|>", "<|user|>")
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
# one after the other
DEEPSEEK3 = (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
             "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
             "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+")
O200K = GGUF_PRE_TOKENIZER_SPLITS["gpt-4o"]
QWEN2 = transformers.models.qwen2.tokenization_qwen2.PRETOKENIZE_REGEX


def corpus() -> list[str]: return [*TEXTS, *(f" {text} the then there theft 12 123" for text in TEXTS)] * 3


def byte_level(pre: str) -> Backend:
    """As tokenizer.json of a model with this pattern has it."""
    made = Backend(models.BPE(ignore_merges=pre == "llama-bpe"))
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.pre_tokenizer = {
        "llama-bpe": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), plain]),
        "qwen2": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN2), "isolated"), plain]),
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), whole]),
        "gpt-4o": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(O200K), "isolated"), plain]),
        "deepseek-v3": pre_tokenizers.Sequence(
            [*(pre_tokenizers.Split(Regex(each), "isolated") for each in DEEPSEEK3), plain]),
        "gpt-2": whole}[pre]
    if pre == "qwen2": made.normalizer = normalizers.NFC()
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(corpus(), trainers.BpeTrainer(
        vocab_size=700, show_progress=False, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIALS]))
    if pre == "llama-bpe":  # a token that no merges make: texts that are one are not split
        data = json.loads(made.to_str())
        assert "ĠcamelCase" in data["model"]["vocab"]
        data["model"]["merges"] = [pair for pair in data["model"]["merges"] if "".join(pair) != "ĠcamelCase"]
        made = Backend.from_str(json.dumps(data))
    made.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    made.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A <|bos|>:1 $B:1", special_tokens=[("<|bos|>", 0)])
    return made


def sentencepiece(prefix: bool) -> Backend:
    """As tokenizer.json of Llama 2 has it; without a prefix, of Gemma."""
    first = ["<unk>", "<s>", "</s>"]
    trained = Backend(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split(Regex("▁?[^▁]+|▁+"), "isolated")
    trained.train_from_iterator((" " + text for text in corpus() if text.isascii()), trainers.BpeTrainer(
        vocab_size=400, show_progress=False, special_tokens=first))
    pieces = sorted(trained.get_vocab(), key=lambda token: trained.get_vocab()[token])[3:]
    tokens = [*first, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    # every way to make a piece, the earlier piece first
    merges = [(piece[:at], piece[at:]) for piece in pieces for at in range(len(piece) - 1, 0, -1)
              if piece[:at] in pieces and piece[at:] in pieces]
    made = Backend(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True,
                              byte_fallback=True))
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in first])
    blanks = normalizers.Replace(" ", "▁")
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), blanks]) if prefix else blanks
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                      *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


def write(path: Path, metadata: dict[str, object], kind: str = "llama") -> None:
    """A file without tensors, with sizes that transformers' config needs."""
    writer = gguf.GGUFWriter(path, kind)
    sizes = {"context_length": 64, "block_count": 1, "feed_forward_length": 8, "embedding_length": 8,
             "attention.head_count": 1}
    for key, value in ({f"{kind}.{name}": size for name, size in sizes.items()} | metadata).items():
        add(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def require_equal(path: Path, original: Backend, skip: str = "") -> None:
    """Ids and texts are the original's, and transformers' but of texts that contain one of `skip`."""
    found, theirs = Tokenizer.load(path), transformers.AutoTokenizer.from_pretrained(
        path.parent, gguf_file=path.name)
    assert found.backend.get_vocab_size() == original.get_vocab_size()
    for text in TEXTS:
        for special in (True, False):
            ids = original.encode(text, add_special_tokens=special).ids
            assert found.encode(text, special) == ids, text
            if not set(skip) & set(text):
                assert list(theirs(text, add_special_tokens=special)["input_ids"]) == ids, text
        assert found.decode(ids) == original.decode(ids), text
        assert found.backend.decode(ids, skip_special_tokens=False) == \
            original.decode(ids, skip_special_tokens=False), text


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "smollm", "gpt-4o", "deepseek-v3"])
def test_byte_level(tmp_path: Path, pre: str):
    original, path = byte_level(pre), tmp_path / "model.gguf"
    write(path, tokenizer_metadata(original, pre, CHAT_TEMPLATE, "<|bos|>", "<|eos|>"))
    # transformers has no NFC for Qwen, no digits one by one, no patterns of DeepSeek, and splits camelCase
    require_equal(path, original, {"qwen2": "\u0301", "smollm": "0123456789", "llama-bpe": "C",
                                   "deepseek-v3": "".join(TEXTS)}.get(pre, ""))
    made = Tokenizer.load(path)
    assert made.special == {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    assert made.render([{"role": "user", "content": "hi"}]) == "<|bos|>hi"
    assert made.silent(made.encode("<|user|>", False)[0])
    assert not made.silent(made.encode("<think>", False)[0])


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(tmp_path: Path, prefix: bool):
    original, path = sentencepiece(prefix), tmp_path / "model.gguf"
    metadata = tokenizer_metadata(original, None, None, "<s>", "</s>", "<unk>")
    write(path, metadata | {"tokenizer.ggml.add_space_prefix": prefix})
    # transformers puts a blank in front of all files' texts, and none after a special token
    require_equal(path, original, "<" if prefix else "".join(TEXTS))
    assert Tokenizer.load(path).encode(" hi") == original.encode(" hi").ids


def test_merges_are_those_of_transformers():
    """Also of equal scores, of which a longer first half wins."""
    pieces = sorted({text[at:end] for text in TEXTS for at in range(len(text))
                     for end in range(at + 1, at + 6)})
    scores = np.random.default_rng(0).integers(0, 9, len(pieces)).astype(float).tolist()
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    expected = generate_merges(vocabulary, dict(zip(pieces, scores, strict=True)))
    def rank(pair: tuple[str, str]) -> tuple[float, int, int]:
        return -scores[vocabulary[pair[0] + pair[1]]], -len(pair[0]), -len(pair[1])
    assert sorted(merges_of(pieces, scores), key=rank) == sorted(expected, key=rank)
    assert [rank(pair) for pair in merges_of(pieces, scores)] == [rank(pair) for pair in expected]


def test_the_bundled_model(tmp_path: Path):
    original, path = Tokenizer.load(DEFAULT_MODEL), tmp_path / "model.gguf"
    write(path, tokenizer_metadata(original.backend, "gpt-2", original.template, "<|bos|>", "<|eos|>"))
    require_equal(path, original.backend)
    assert Tokenizer.load(path).template == original.template


@pytest.mark.parametrize("kind", ["gemma", "gemma2", "gemma3"])
def test_gemma_merges_in_the_order_of_tokens(tmp_path: Path, kind: str):
    """Its runs of blanks are stored as blanks, its scores say nothing."""
    original, path = sentencepiece(False), tmp_path / "model.gguf"
    metadata = tokenizer_metadata(original, None, None, "<s>", "</s>", "<unk>")
    blanks = [" " * len(token) if set(token) == {"▁"} else token
              for token in metadata["tokenizer.ggml.tokens"]]
    write(path, metadata | {"tokenizer.ggml.tokens": blanks, "tokenizer.ggml.scores": [0.0] * len(blanks)},
          kind)
    made = Tokenizer.load(path)
    for text in TEXTS: assert made.encode(text) == original.encode(text).ids, text


def test_special_tokens_of_phi3_take_the_blanks_behind_them(tmp_path: Path):
    original, path = sentencepiece(True), tmp_path / "model.gguf"
    added = [AddedToken(token, special=True, normalized=False, rstrip=token != "<|endoftext|>")
             for token in ("<|endoftext|>", "<|user|>", "<|end|>")]
    original.add_special_tokens(added)
    texts = "<|user|>\n a", "<|end|>  a", "<|endoftext|> a"
    expected = [original.encode(text).ids for text in texts]
    for kind in ("phi3", "llama"):
        write(path, tokenizer_metadata(original, None, None, "<s>", "<|endoftext|>", "<unk>"), kind)
        ids = [Tokenizer.load(path).encode(text) for text in texts]
        assert (ids == expected) == (kind == "phi3")
        assert ids[2] == expected[2]


@pytest.mark.parametrize(("texts", "ends"), [
    (("<|user|>", "<|end|>", "<|endoftext|>"), ("</s>", "<|end|>", "<|endoftext|>")),
    (("<end_of_turn>",), ("</s>", "<end_of_turn>")),
    (("<|end|>", "<|return|>", "<|call|>"), ("</s>", "<|return|>", "<|call|>"))])
def test_tokens_that_end_an_answer(tmp_path: Path, texts: tuple[str, ...], ends: tuple[str, ...]):
    """By their texts, as files have only one of them; gpt-oss's <|end|> ends a message of several."""
    original, path = sentencepiece(True), tmp_path / "model.gguf"
    original.add_special_tokens([AddedToken(text, special=True) for text in texts])
    metadata = tokenizer_metadata(original, None, None, "<s>", "</s>", "<unk>")
    write(path, metadata | {"llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.vocab_size": 600})
    assert set(read_config(path).eos_token_ids) == {original.token_to_id(text) for text in ends}


def test_ends(tmp_path: Path):
    """What is added around a text: as the file says, else as llama.cpp does."""
    original, path = byte_level("gpt-2"), tmp_path / "model.gguf"
    metadata = tokenizer_metadata(original, "gpt-2", None, "<|bos|>", "<|eos|>")
    for pre, added, ends in (("gpt-2", {}, (False, False)), ("llama-bpe", {}, (True, False)),
                             ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, (True, True)),
                             ("llama-bpe", {"add_bos_token": False}, (False, False))):
        given = metadata | {"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": None}
        write(path, given | {f"tokenizer.ggml.{name}": value for name, value in added.items()})
        ids = Tokenizer.load(path).encode("hi")
        assert (ids[0] == 0, ids[-1] == 1) == ends


def test_a_tokenizer_beside_the_file_is_read_first(tmp_path: Path):
    write(tmp_path / "model.gguf", {})
    byte_level("gpt-2").save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).encode("<|eos|>", False) == [1]


def test_patterns_are_those_of_transformers():
    for name, patterns in PATTERNS.items():
        if name in GGUF_PRE_TOKENIZER_SPLITS: assert patterns == (GGUF_PRE_TOKENIZER_SPLITS[name],), name


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
