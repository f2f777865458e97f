"""The tokenizer of CLIP's text encoders: byte-level BPE (arXiv 2103.00020, section 2.4).

Protocol: `read_tokenizer(directory)` takes tokenizer.json, or vocab.json with merges.txt. `encode(text)`
gives start, the tokens of the text, end, and padding up to `length`; a text that is too long is cut off
before its end.
"""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from tinygrad_nv.errors import TokenizerError, brief
from tinygrad_nv.files import MAX_TOKENIZER_BYTES, require_size

from ..config import read_json
from ..tokenizer_limits import read_backend

START, END = "<|startoftext|>", "<|endoftext|>"
WORDS = r"""<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"""


@dataclass(frozen=True)
class TextTokenizer:
    """`length` tokens of each text, of which the last are `pad`."""
    tokenizer: Tokenizer
    start: int
    end: int
    pad: int
    length: int

    def encode(self, text: str) -> tuple[list[int], int]:
        """`length` token ids of a text, and how many of the text's were cut off."""
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        room = self.length - 2
        made = [self.start, *ids[:room], self.end]
        return made + [self.pad] * (self.length - len(made)), max(0, len(ids) - room)


def read_tokenizer(directory: Path, length: int) -> TextTokenizer:
    """The tokenizer of a directory. Raises `TokenizerError`."""
    config = read_json(path) if (path := directory / "tokenizer_config.json").is_file() else {}
    special = read_json(path) if (path := directory / "special_tokens_map.json").is_file() else {}
    made = _tokenizer(directory)

    def number(name: str, default: str) -> int:
        token = config.get(name, special.get(name, default))
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and (found := made.token_to_id(token)) is not None: return int(found)
        raise TokenizerError(f"{directory}: {name} {brief(token)} is no token of its vocabulary",
                             "a token of vocab.json", "download the directory again")
    pad = number("pad_token", END)
    return TextTokenizer(made, number("bos_token", START), number("eos_token", END), pad, length)


def _tokenizer(directory: Path) -> Tokenizer:
    """Raises `TokenizerError` for files that are missing, or are none of a tokenizer."""
    whole, vocabulary, merges = (directory / name for name in ("tokenizer.json", "vocab.json", "merges.txt"))
    if not whole.is_file() and not (vocabulary.is_file() and merges.is_file()):
        raise TokenizerError(f"{directory} holds no tokenizer",
                             "tokenizer.json, or vocab.json and merges.txt",
                             "download the directory again")
    if whole.is_file(): return read_backend(whole, {WORDS}, expected="files as transformers writes them")
    try:
        for each in (vocabulary, merges): require_size(each, MAX_TOKENIZER_BYTES)
        return _bpe(*models.BPE.read_file(str(vocabulary), str(merges)))
    except Exception as error:  # tokenizers raises Exception itself
        raise TokenizerError(f"the tokenizer in {directory} cannot be read: {error}",
                             "files as transformers writes them", "download the directory again") from error


def _bpe(vocabulary: dict[str, int], merges: Any) -> Tokenizer:
    made = Tokenizer(models.BPE(vocabulary, merges, end_of_word_suffix="</w>", unk_token=END))
    made.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "),
                                            normalizers.Lowercase()])
    made.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(WORDS), behavior="removed", invert=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made.add_special_tokens([AddedToken(token, normalized=False) for token in (START, END)])
    return made
