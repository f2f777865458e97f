"""The tokenizer in a GGUF file's metadata.

Protocol: `tokenizer_of(file)` makes a `tokenizers.Tokenizer`, `special_tokens(file)` has the texts of special
tokens by name. Two kinds are read: byte-level BPE ("gpt2"), whose text is split by a pattern that
tokenizer.ggml.pre names, and SentencePiece's BPE ("llama"), which has scores instead of merges: it merges the
pair whose result has the highest score. Tokens of type control are special; those that are user-defined are
found in text before anything else. No normaliser is stored: Qwen's tokenizers have NFC.

Where readers differ, tokens are those of the tokenizer.json that a file was converted from. `default`, of
files that do not name a pattern, is read as GPT-2's. SentencePiece puts a blank in front of every text and
after special tokens, also before a blank.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tinygrad_nv.engine.text.gguf_patterns import DIGITS, NFC, PATTERNS, WHOLE
from tinygrad_nv.errors import TokenizerError
from tinygrad_nv.models.tokenizer_limits import is_bare, message_of, require_pieces

if TYPE_CHECKING:
    from tinygrad_nv.quant.gguf.file import GGUFFile

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4    # types of tokens
GEMMA = ("gemma", "gemma2", "gemma3")
# of Phi-3's special tokens, those that do not take the blanks behind them, which no metadata say
KEEPS_BLANKS = ("<unk>", "<s>", "<|endoftext|>")
SPECIAL = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
           "pad_token": "padding_token_id"}


def tokenizer_of(file: GGUFFile) -> Tokenizer:
    """The tokenizer. Raises `TokenizerError` for a kind that is not read, or for metadata that do not fit."""
    given = {key.removeprefix("tokenizer.ggml."): value for key, value in file.metadata.items()
             if key.startswith("tokenizer.ggml.")}
    kind, pre = given.get("model"), given.get("pre", "default")
    if kind not in ("gpt2", "llama"):
        raise TokenizerError(f"{file.path}: tokenizer.ggml.model is {kind!r}", "gpt2 or llama", _OTHER)
    tokens = _list(file, given, "tokens", str)
    types = _list(file, given, "token_type", int) if "token_type" in given else []
    try:
        if kind == "gpt2": made = _byte_level(file, given, tokens, pre)
        else: made = _sentencepiece(file, given, tokens)
        phi3 = kind == "llama" and file.metadata.get("general.architecture") == "phi3"
        _add_tokens(made, tokens, types, phi3)
        _add_ends(made, given, tokens, kind == "llama" or pre in WHOLE)
    except TokenizerError: raise
    except BaseException as error:  # the library raises bare Exception, and panics are no Exception
        if not isinstance(error, Exception) and not is_bare(error): raise
        raise TokenizerError(f"{file.path}: its tokenizer cannot be made: {message_of(error)}",
                             "tokens, merges and ids that fit together", _OTHER) from error
    return made


_OTHER = "put the model's tokenizer.json beside the file and name their directory, or pass token ids"


def special_tokens(file: GGUFFile) -> dict[str, str]:
    """Texts of special tokens, by names as "bos_token"."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    found = {name: file.metadata.get(f"tokenizer.ggml.{key}") for name, key in SPECIAL.items()}
    return {name: tokens[token] for name, token in found.items()
            if isinstance(tokens, list) and isinstance(token, int) and 0 <= token < len(tokens)}


def _list(file: GGUFFile, given: Mapping[str, Any], key: str, kind: type) -> list[Any]:
    found = given.get(key)
    if not isinstance(found, list) or not all(isinstance(each, kind) for each in found):
        raise TokenizerError(f"{file.path} has no tokenizer.ggml.{key}",
                             "the metadata that llama.cpp writes", _OTHER)
    return found


def _byte_level(file: GGUFFile, given: Mapping[str, Any], tokens: list[str], pre: str) -> Tokenizer:
    if pre not in PATTERNS and pre not in DIGITS:
        raise TokenizerError(f"{file.path}: tokenizer.ggml.pre is {pre!r}",
                             f"one of {', '.join([*PATTERNS, *DIGITS])}", _OTHER)
    merges, vocabulary = _list(file, given, "merges", str), _number_tokens(tokens)
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    for left, right in pairs:   # the library would end the process
        if not {left, right, left + right} <= vocabulary.keys():
            raise TokenizerError(f"{file.path}: merge {left!r} {right!r} is not of tokens",
                                 "merges of two tokens to a token", _OTHER)
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre in WHOLE))
    level, patterns = pre_tokenizers.ByteLevel, PATTERNS.get(pre)
    split: list[Any] = [level(add_prefix_space=False, use_regex=True)]
    if pre in DIGITS: split.insert(0, pre_tokenizers.Digits(individual_digits=True))
    if patterns:
        split = [*(pre_tokenizers.Split(Regex(each), "isolated") for each in patterns),
                 level(add_prefix_space=False, use_regex=False)]
    made.pre_tokenizer = pre_tokenizers.Sequence(split)
    made.decoder = decoders.ByteLevel()
    if pre in NFC: made.normalizer = normalizers.NFC()
    return made


def _sentencepiece(file: GGUFFile, given: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    # Gemma's runs of blanks are written as blanks; its tokens are in the order of merges, its scores are not
    gemma = file.metadata.get("general.architecture") in GEMMA
    pieces = ["▁" * len(token) if gemma and token and not token.strip(" ") else token for token in tokens]
    scores = [-float(i) for i in range(len(tokens))] if gemma else _list(file, given, "scores", float)
    require_pieces(pieces, str(file.path), scores)
    unknown = special_tokens(file).get("unk_token")
    made = Tokenizer(models.BPE(vocab=_number_tokens(pieces), merges=merges_of(pieces, scores),
                                unk_token=unknown,
                                fuse_unk=True, byte_fallback=True))
    prefix = given.get("add_space_prefix", not gemma)
    blanks = normalizers.Replace(" ", "▁")
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), blanks]) if prefix else blanks
    parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix: parts.append(decoders.Strip(" ", 1, 0))
    made.decoder = decoders.Sequence(parts)
    return made


def _number_tokens(tokens: Sequence[str]) -> dict[str, int]: return {token: i for i,
                                                                     token in enumerate(tokens)}


def merges_of(pieces: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Pairs of pieces that make a piece, the best first."""
    score = dict(zip(pieces, scores, strict=True))
    found = [(piece[:at], piece[at:]) for piece in pieces for at in range(1, len(piece))
             if piece[:at] in score and piece[at:] in score]
    return sorted(found, key=lambda pair: (-score[pair[0] + pair[1]], -len(pair[0]), -len(pair[1])))


def _add_tokens(made: Tokenizer, tokens: Sequence[str], types: Sequence[int], phi3: bool) -> None:
    """Adds the tokens that are found in text before it is split."""
    def make_token(token: str, special: bool) -> AddedToken:
        return AddedToken(token, normalized=False, special=special,
                          rstrip=phi3 and token not in KEEPS_BLANKS)
    kinds = list(zip(tokens, types, strict=False))
    vocabulary = made.get_vocab()
    made.add_special_tokens([make_token(token, True) for token, kind in kinds if kind in (UNKNOWN, CONTROL)])
    made.add_tokens([make_token(token, False) for token, kind in kinds
                     if kind == USER_DEFINED and token in vocabulary])


def _add_ends(made: Tokenizer, given: Mapping[str, Any], tokens: Sequence[str], bos: bool) -> None:
    """The bos and eos tokens around a text, where it has them."""
    ends = [given.get(f"{name}_token_id") if given.get(f"add_{name}_token", usual) else None
            for name, usual in (("bos", bos), ("eos", False))]
    if ends == [None, None]: return
    first, last = (None if token is None else tokens[token] for token in ends)
    single = [text for text in (first, "$A", last) if text is not None]
    second = [f"{text}:1" for text in (first, "$B", last) if text is not None]
    made.post_processor = processors.TemplateProcessing(
        single=single, pair=single + second,
        special_tokens=[(text, token) for text, token in zip((first, last), ends, strict=True)
                        if text is not None])
