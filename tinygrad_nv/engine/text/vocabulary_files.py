"""Tokenizers of directories without tokenizer.json: a SentencePiece model (sentencepiece.py), byte-level BPE
(vocab.json and merges.txt), or WordPiece (vocab.txt).

Protocol: `read(directory, config, special, added)` returns a `tokenizers.Tokenizer` and the special tokens by
name, None where the directory has none of these files. `config` is tokenizer_config.json, `special` what it
and special_tokens_map.json name, `added` is added_tokens.json. Files say nothing of how text is split: its
class does, Qwen2Tokenizer for example, GPT-2's where it is not known.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tinygrad_nv.engine.text import sentencepiece
from tinygrad_nv.engine.text.gguf_patterns import QWEN2 as QWEN2_PATTERN
from tinygrad_nv.engine.text.sentencepiece_file import read_model
from tinygrad_nv.engine.text.tokenizer_config import add_ends, add_tokens
from tinygrad_nv.errors import TokenizerError, brief
from tinygrad_nv.files import MAX_TOKENIZER_BYTES, read_json, read_text
from tinygrad_nv.models.tokenizer_limits import is_bare, message_of

Config = Mapping[str, Any]
MODELS = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "spm.model")
# by transformers' class, where config.json's tokenizer_class has no name for them
WORDPIECE = {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]",
             "mask_token": "[MASK]"}
ROBERTA = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "sep_token": "</s>",
           "cls_token": "<s>", "pad_token": "<pad>", "mask_token": "<mask>"}
GPT2 = {"unk_token": "<|endoftext|>", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
MAX_LINES = 2_000_000   # limit: lines of vocab.txt and merges.txt; the largest have 512 000
QWEN2 = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}


def read(directory: Path, config: Config, special: Mapping[str, str],
         added: Config) -> tuple[Tokenizer, dict[str, str]] | None:
    """The tokenizer and its special tokens. Raises `TokenizerError` for files that are damaged."""
    for name in MODELS:
        if (path := directory / name).is_file():
            return _make(path, config, special, added, _sentencepiece)
    vocabulary, merges = directory / "vocab.json", directory / "merges.txt"
    if vocabulary.is_file() and merges.is_file():
        return _make(vocabulary, config, special, added, _byte_level)
    if (path := directory / "vocab.txt").is_file(): return _make(path, config, special, added, _wordpiece)
    return None


def _make(path: Path, config: Config, special: Mapping[str, str], added: Config,
          make: Callable[..., tuple[Tokenizer, dict[str, str]]]) -> tuple[Tokenizer, dict[str, str]]:
    try: return make(path, config, special, added)
    except TokenizerError: raise
    except BaseException as error:  # the library raises bare Exception, and panics are no Exception
        if not isinstance(error, Exception) and not is_bare(error): raise
        raise TokenizerError(f"{path}: its tokenizer cannot be made: {message_of(error)}",
                             "files of one tokenizer, as they were published",
                             "download them again, or put a tokenizer.json into the directory") from error


def _class(config: Config) -> str: return str(config.get("tokenizer_class", "")).removesuffix("Fast")


def _sentencepiece(path: Path, config: Config, special: Mapping[str, str],
                   added: Config) -> tuple[Tokenizer, dict[str, str]]:
    model = read_model(path)
    usual = ROBERTA if _class(config) == "XLMRobertaTokenizer" else sentencepiece.special_tokens(model)
    special = {**usual, **special}
    made = sentencepiece.tokenizer_of(model, config)
    add_tokens(made, config, added, special, str(path))
    sentencepiece.add_usual_ends(made, model, config, special)
    return made, special


def _byte_level(path: Path, config: Config, special: Mapping[str, str],
                added: Config) -> tuple[Tokenizer, dict[str, str]]:
    name, level = _class(config), pre_tokenizers.ByteLevel
    vocabulary = read_json(path, MAX_TOKENIZER_BYTES)
    lines = _lines(path.parent / "merges.txt")
    pairs = [(left, right) for left, _, right in (line.partition(" ") for line in lines
                                                  if line and not line.startswith("#version"))]
    for left, right in pairs:   # the library would end the process
        if not {left, right, left + right} <= vocabulary.keys():
            raise TokenizerError(f"{path.parent / 'merges.txt'}: merge {brief(left)} {brief(right)} "
                                 "is not of tokens",
                                 "merges of two tokens to a token", "download both files again")
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    prefix = bool(config.get("add_prefix_space", False))
    if name.startswith("Qwen2"):
        made.normalizer = normalizers.NFC()
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(QWEN2_PATTERN), "isolated"),
             level(add_prefix_space=prefix, use_regex=False)])
    else: made.pre_tokenizer = level(add_prefix_space=prefix)
    made.decoder = decoders.ByteLevel()
    usual = QWEN2 if name.startswith("Qwen2") else ROBERTA if name.startswith("Roberta") else GPT2
    special = {**{key: text for key, text in usual.items() if text in vocabulary or usual is not GPT2},
               **special}
    add_tokens(made, config, added, special, str(path))
    if name.startswith("Roberta"): add_ends(made, special["cls_token"], special["sep_token"])
    else: add_ends(made, *(special.get(f"{end}_token") if config.get(f"add_{end}_token") else None
                           for end in ("bos", "eos")))
    return made, special


def _lines(path: Path) -> list[str]:
    text = read_text(path, MAX_TOKENIZER_BYTES).removesuffix("\n")
    if (count := text.count("\n")) > MAX_LINES:
        raise TokenizerError(f"{path} has {count} lines", f"at most {MAX_LINES}", "download the file again")
    return text.split("\n")


def _wordpiece(path: Path, config: Config, special: Mapping[str, str],
               added: Config) -> tuple[Tokenizer, dict[str, str]]:
    # not splitlines: vocabularies have tokens such as U+2028
    lines = _lines(path)
    special = {**WORDPIECE, **special}
    vocabulary = {text: i for i, text in enumerate(lines)}
    for each in ("unk_token", "cls_token", "sep_token"):
        if special[each] not in vocabulary:
            raise TokenizerError(f"{path} lacks the {each} {brief(special[each])}", "a token on each line",
                                 "download the file again, or correct tokenizer_config.json")
    made = Tokenizer(models.WordPiece(vocabulary, unk_token=special["unk_token"]))
    made.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=bool(config.get("tokenize_chinese_chars", True)),
        strip_accents=config.get("strip_accents"), lowercase=bool(config.get("do_lower_case", True)))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(prefix="##")
    add_tokens(made, config, added, special, str(path))
    first, last = (special[name] for name in ("cls_token", "sep_token"))
    made.post_processor = processors.TemplateProcessing(
        single=[first, "$A", last], pair=[first, "$A", last, "$B:1", f"{last}:1"],
        special_tokens=[(text, vocabulary[text]) for text in (first, last)])
    return made, special
