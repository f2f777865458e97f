"""tokenizer_config.json beside tokenizer.json: ids and texts are transformers'. Directories without
tokenizer.json: SentencePiece models give the ids that the sentencepiece library gave."""
from __future__ import annotations

import base64
import json
import random
import string
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.support.engine.sentencepiece_golden import FILE
from tests.unit.engine.test_text import TOKENIZERS
from tinygrad_nv.engine.text.sentencepiece_file import parse_model
from tinygrad_nv.engine.text.tokenizer import Tokenizer
from tinygrad_nv.errors import TokenizerError

TEXTS = ("time", "Once <tool> upon<end>a time", " time", "<s>Once", "a <tool>")
TOOL = {"content": "<tool>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False,
        "special": True}


def directory(path: Path, name: str, special: list[str], **config: Any) -> Path:
    backend = type(TOKENIZERS[name]).from_str(TOKENIZERS[name].to_str())
    backend.add_special_tokens(special)
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "unk_token": "<s>",
        "eos_token": "<end>", **config}))
    return path


def same(path: Path) -> None:
    own, theirs = Tokenizer.load(path), transformers.AutoTokenizer.from_pretrained(path)
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False)
        assert own.encode(text, special=False) == ids, text
        for skip in (True, False):
            assert own.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip), (text, skip)


@pytest.mark.parametrize("config", [
    {}, {"split_special_tokens": True}, {"additional_special_tokens": ["<tool>"]},
    {"extra_special_tokens": {"tool_token": "<tool>"}}, {"tool_token": "<tool>"}, {"pad_token": "<tool>"},
    {"added_tokens_decoder": {"400": TOOL}}, {"added_tokens_decoder": {"400": {**TOOL, "special": False}}},
    {"added_tokens_decoder": {"400": {**TOOL, "lstrip": True, "rstrip": True}}},
    {"added_tokens_decoder": {"1": {**TOOL, "content": "Once"}}},
    {"additional_special_tokens": ["<tool>"], "split_special_tokens": True},
    {"tokenizer_class": "GPT2TokenizerFast", "add_prefix_space": True}, {"add_prefix_space": True}], ids=str)
def test_tokens_that_only_the_configuration_names(tmp_path: Path, config: dict[str, Any]):
    same(directory(tmp_path, "byte-level", ["<s>", "<end>"], **config))


def test_special_tokens_that_the_vocabulary_does_not_mark(tmp_path: Path):
    path = directory(tmp_path, "byte-level", [])
    same(path)
    assert Tokenizer.load(path).special_texts == ("<s>", "<end>")


@pytest.mark.parametrize(("name", "content"), [
    ("added_tokens.json", {"<tool>": 400}),
    ("special_tokens_map.json", {"additional_special_tokens": ["<tool>"]})])
def test_older_files(tmp_path: Path, name: str, content: Any):
    (directory(tmp_path, "byte-level", ["<s>", "<end>"]) / name).write_text(json.dumps(content))
    same(tmp_path)


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("legacy", [True, False])
def test_the_blank_in_front_of_a_text(tmp_path: Path, prefix: bool, legacy: bool):
    same(directory(tmp_path, "sentencepiece", ["<s>", "<end>"], tokenizer_class="LlamaTokenizerFast",
                   add_prefix_space=prefix, legacy=legacy))


@pytest.mark.parametrize(("config", "words"), [
    ({"added_tokens_decoder": {"x": TOOL}}, "added_tokens_decoder has 'x'"),
    ({"added_tokens_decoder": {"4": "<tool>"}}, "4 has '<tool>'"),
    ({"added_tokens_decoder": {"²": TOOL}}, "added_tokens_decoder has '²'"),
    ({"added_tokens_decoder": {"9" * 4400: TOOL}}, "added_tokens_decoder has '999"),
    ({"eos_token": "\ud800"}, "tokenizer_config.json is not JSON: it has .ud800, which is no character"),
    ({"additional_special_tokens": [4]}, "additional_special_tokens has '4'")])
def test_what_is_no_token_is_named(tmp_path: Path, config: dict[str, Any], words: str):
    with pytest.raises(TokenizerError, match=words):
        Tokenizer.load(directory(tmp_path, "byte-level", ["<s>"], **config))


# **** other files ****


GOLDEN = json.loads(FILE.read_text())
KEPT = ["", " ", "Hello, World!", "naïve café", "你好 world", "a  b\n\nc\t d", "3.14 and 12345", "🙂🙂",
         "don't we'll", "<s>a</s>", "unaffable AFFABLE", "\x00\x07 x", "e\u0301 \u00a0y"]


def load(directory: Path, model: bytes, file: str = "tokenizer.model", **config: Any) -> Tokenizer:
    (directory / file).write_bytes(model)
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.load(directory)


def model_of(name: str) -> bytes: return base64.b64decode(GOLDEN[name]["model"])


@pytest.mark.parametrize("name", GOLDEN)
def test_ids_are_those_of_sentencepiece(tmp_path: Path, name: str):
    made = load(tmp_path, model_of(name))
    assert len(GOLDEN[name]["cases"]) > 100
    for text, ids, _ in GOLDEN[name]["cases"]: assert made.encode(text, special=False) == ids, repr(text)


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_text_comes_back(tmp_path: Path, name: str):
    made = load(tmp_path, model_of(name))
    for _, ids, text in GOLDEN[name]["cases"]: assert made.decode(ids) == text


def test_ends_and_chunks_of_llama(tmp_path: Path):
    """A bos token in front where the config does not say otherwise; blanks in front as `legacy` says."""
    model, name = model_of("llama"), "LlamaTokenizer"
    old, new = (load(tmp_path, model, tokenizer_class=name, legacy=each) for each in (True, False))
    bos, eos = old.encode("")[0], old.backend.token_to_id("</s>")
    assert old.encode("a </s>b") == [bos, *old.encode("a ", special=False), eos,
                                     *old.encode("b", special=False)]
    assert new.encode("a")[1:] == old.encode("a", special=False)
    assert new.backend.id_to_token(new.encode("<s>b", special=False)[1]) == "b"
    assert old.backend.id_to_token(old.encode("<s>b", special=False)[1]) == "▁b"
    # transformers' default
    assert load(tmp_path, model, tokenizer_class=name).encode("<s>b") == new.encode("<s>b")
    both = load(tmp_path, model, add_bos_token=False, add_eos_token=True)
    assert both.encode("a") == [*old.encode("a", special=False), eos]
    assert old.special == {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    assert old.decode([bos, *old.encode("so it is", special=False), eos]) == "so it is"


def test_added_tokens_and_template(tmp_path: Path):
    """As Phi-3 has them: names of pieces changed, tokens after the vocabulary, blanks after them dropped."""
    size = len(parse_model(model_of("llama")).pieces)
    added = {"2": {"content": "<|end|>", "special": True}, str(size): {"content": "<|user|>", "special": True,
                                                                      "rstrip": True},
             str(size + 1): {"content": "<tool>", "special": False}}
    made = load(tmp_path, model_of("llama"), added_tokens_decoder=added, eos_token="<|end|>",
                add_bos_token=False, chat_template="{{ '<|user|>\n' + messages[0].content }}{{ eos_token }}")
    ids = made.encode_chat([{"role": "user", "content": "it"}])
    assert [ids[0], ids[-1]] == [size, 2]
    assert ids[1:-1] == made.encode("it", special=False)
    assert made.decode([size, size + 1, 2]) == "<tool>"


def test_a_template_writes_the_beginning_token_itself(tmp_path: Path):
    made = load(tmp_path, model_of("llama"), tokenizer_class="LlamaTokenizer",
                chat_template="{{ bos_token + messages[0].content }}")
    ids, bos = made.encode_chat([{"role": "user", "content": "it"}]), made.backend.token_to_id("<s>")
    assert (ids[0], ids.count(bos)) == (bos, 1)


def test_fairseq_ids(tmp_path: Path):
    """XLM-RoBERTa: the pieces from the third on follow four tokens of its own."""
    made = load(tmp_path, model_of("t5"), "sentencepiece.bpe.model", tokenizer_class="XLMRobertaTokenizer")
    plain = {text: ids for text, ids, _ in GOLDEN["t5"]["cases"]}
    text = next(text for text in plain if len(plain[text]) > 4 and min(plain[text]) > 2)
    assert made.encode(text) == [0, *(each + 1 for each in plain[text]), 2]
    assert made.encode("<mask>", special=False) == [made.backend.get_vocab_size() - 1]


@pytest.mark.parametrize(("kind", "config"), [("Bert", {}), ("Bert", {"do_lower_case": False}), ("GPT2", {}),
                                              ("Qwen2", {}), ("Roberta", {})])
def test_ids_are_those_of_transformers(tmp_path: Path, kind: str, config: dict[str, Any]):
    """vocab.txt, and vocab.json with merges.txt."""
    write_vocabulary(tmp_path, kind)
    written = {"tokenizer_class": f"{kind}Tokenizer", **config}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(written))
    theirs = getattr(transformers, f"{kind}Tokenizer").from_pretrained(tmp_path, **config)
    ours, rng = Tokenizer.load(tmp_path), random.Random(0)
    texts = KEPT + ["".join(rng.choices(string.printable + "éß你🙂", k=12)) for _ in range(40)]
    for text in texts: assert ours.encode(text) == theirs(text)["input_ids"], repr(text)


def write_vocabulary(directory: Path, kind: str) -> None:
    """Files of a small vocabulary."""
    if kind == "Bert":
        letters = [*"abcdefghijklmnopqrstuvwxyzABHW0123456789.,!'-é你", *"[]"]
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{each}" for each in letters),
                 "hello", "world", "un", "##aff", "##able"]
        (directory / "vocab.txt").write_text("\n".join(dict.fromkeys(words)) + "\n", encoding="utf-8")
        return
    level = list(bytes_to_unicode().values())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("o", "r"), ("Ġw", "or"),
              ("1", "2")]
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"] if kind == "Roberta" else ["<|endoftext|>"]
    vocabulary = {text: i for i, text in enumerate([*special, *level, *(a + b for a, b in merges)])}
    (directory / "vocab.json").write_text(json.dumps(vocabulary))
    (directory / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in merges))
