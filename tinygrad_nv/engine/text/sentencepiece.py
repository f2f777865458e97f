"""The tokenizer of a directory with a SentencePiece model and no tokenizer.json.

Protocol: `tokenizer_of(model, config)` makes a `tokenizers.Tokenizer` that gives the ids of the sentencepiece
library: its normalisation, blanks as ▁, a blank in front, BPE by score or Unigram, bytes for what is not in
the vocabulary. Pieces of type control are found in text, as transformers does and SentencePiece does not;
user-defined pieces are never split or merged. One difference is the tokenizers library's: it normalises
letters with their combining marks together where SentencePiece takes them one by one.

`config` is tokenizer_config.json. `legacy: true` puts a blank in front of each text between special tokens,
false in front of the first; transformers' LlamaTokenizer is false without the key. XLM-RoBERTa's ids are
those of fairseq: <s>, <pad>, </s>, <unk>, the pieces from the third on, and <mask>.
"""
from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tinygrad_nv.engine.text.sentencepiece_file import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    SentencePieceModel,
)
from tinygrad_nv.engine.text.tokenizer_config import add_ends
from tinygrad_nv.models.tokenizer_limits import require_bounded, require_pieces

BLANK = "▁"
FAIRSEQ = ("XLMRobertaTokenizer", "XLMRobertaTokenizerFast")
_FAIRSEQ_FIRST = ("<s>", "<pad>", "</s>", "<unk>")


def tokenizer_of(model: SentencePieceModel, config: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer. Raises bare exceptions of the tokenizers library for a model that it refuses."""
    name = str(config.get("tokenizer_class", ""))
    prefix = config.get("add_prefix_space")
    prefix = model.dummy_prefix if prefix is None else bool(prefix)
    first = not config.get("legacy", not name.startswith("Llama"))
    pieces = _pieces(model, config, name in FAIRSEQ)
    texts, scores, _ = zip(*pieces, strict=True)
    require_pieces(texts, "the SentencePiece model", scores)
    if model.charsmap:
        charsmap = base64.b64encode(model.charsmap).decode()
        require_bounded({"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap}},
                        "the SentencePiece model")
    made = Tokenizer(_network(model, pieces))
    made.normalizer = _normalizer(model, prefix and not first)
    if (split := _split(model, pieces, prefix and first)) is not None: made.pre_tokenizer = split
    made.decoder = _decoder(model, prefix)
    made.add_special_tokens([AddedToken(piece, normalized=False, special=True)
                             for piece, _, kind in pieces if kind in (CONTROL, UNKNOWN)])
    return made


def add_usual_ends(made: Tokenizer, model: SentencePieceModel, config: Mapping[str, Any],
                   special: Mapping[str, str]) -> None:
    """The tokens around a text: those that the config asks for, or those of the class where it does not."""
    name = str(config.get("tokenizer_class", "")).removesuffix("Fast")
    if name.startswith("XLMRoberta"): usual = True, True
    elif name.startswith("T5"): usual = False, True
    else: usual = model.kind == "bpe" and special.get("bos_token") is not None, False
    wanted = [config.get(f"add_{end}_token") for end in ("bos", "eos")]
    given = [own if one is None else bool(one) for one, own in zip(wanted, usual, strict=True)]
    add_ends(made, special.get("bos_token") if given[0] else None,
             special.get("eos_token") if given[1] else None)


def special_tokens(model: SentencePieceModel) -> dict[str, str]:
    """Texts of the special tokens that the model names."""
    found = {"unk_token": model.unk_id, "bos_token": model.bos_id, "eos_token": model.eos_id,
             "pad_token": model.pad_id}
    return {name: text for name, token in found.items() if (text := model.piece(token)) is not None}


def _pieces(model: SentencePieceModel, config: Mapping[str, Any],
            fairseq: bool) -> list[tuple[str, float, int]]:
    """Text, score and type of each id, with the names that `added_tokens_decoder` gives them."""
    pieces = list(zip(model.pieces, model.scores, model.types, strict=True))
    if fairseq:
        first = [(text, 0.0, UNKNOWN if text == "<unk>" else CONTROL) for text in _FAIRSEQ_FIRST]
        pieces = [*first, *pieces[3:], ("<mask>", 0.0, CONTROL)]
    added, known = config.get("added_tokens_decoder"), {text for text, _, _ in pieces}
    for token, entry in (added if isinstance(added, dict) else {}).items():
        text = entry.get("content") if isinstance(entry, dict) else None
        if str(token).isdigit() and int(token) < len(pieces) and isinstance(text, str) and text not in known:
            pieces[int(token)] = text, *pieces[int(token)][1:]
    return pieces


def _network(model: SentencePieceModel, pieces: Sequence[tuple[str, float, int]]) -> Any:
    unknown = next((i for i, (_, _, kind) in enumerate(pieces) if kind == UNKNOWN), model.unk_id)
    if model.kind == "unigram":
        return models.Unigram([(text, score) for text, score, _ in pieces], unknown, model.byte_fallback)
    return models.BPE(vocab={text: i for i, (text, _, _) in enumerate(pieces)}, merges=_merges(pieces),
                      unk_token=pieces[unknown][0], fuse_unk=True, byte_fallback=model.byte_fallback,
                      ignore_merges=any(kind == USER_DEFINED for _, _, kind in pieces))


def _merges(pieces: Sequence[tuple[str, float, int]]) -> list[tuple[str, str]]:
    """Pairs of pieces that make a piece, the highest score first."""
    score = {text: score for text, score, kind in pieces if kind == NORMAL}
    found = [(text[:at], text[at:]) for text in score for at in range(1, len(text))
             if text[:at] in score and text[at:] in score]
    return sorted(found, key=lambda pair: -score[pair[0] + pair[1]])


def _normalizer(model: SentencePieceModel, prefix: bool) -> Any:
    parts: list[Any] = []
    if model.charsmap: parts.append(normalizers.Precompiled(model.charsmap))
    # A blank before, and ++: else each blank of a long run is a new beginning that fails at the run's end.
    if model.remove_blanks:
        parts += [normalizers.Replace(Regex(r"\A +|(?<! ) ++\z"), ""),
                  normalizers.Replace(Regex(" {2,}"), " ")]
    if prefix: parts.append(normalizers.Prepend(BLANK if model.escape_blanks else " "))
    if model.escape_blanks: parts.append(normalizers.Replace(" ", BLANK))
    # those that the text itself has, too
    if model.remove_blanks: parts.append(normalizers.Replace(Regex(f"(?<!{BLANK}){BLANK}++\\z"), ""))
    return normalizers.Sequence(parts)


def _split(model: SentencePieceModel, pieces: Sequence[tuple[str, float, int]], prefix: bool) -> Any:
    """A blank in front of the first text, and user-defined pieces, the longest first."""
    parts: list[Any] = []
    if prefix: parts.append(pre_tokenizers.Metaspace(replacement=BLANK, prepend_scheme="first", split=False))
    if own := sorted((text for text, _, kind in pieces if kind == USER_DEFINED), key=len, reverse=True):
        parts.append(pre_tokenizers.Split(Regex("|".join(map(re.escape, own))), "isolated"))
    return pre_tokenizers.Sequence(parts) if parts else None


def _decoder(model: SentencePieceModel, prefix: bool) -> Any:
    parts: list[Any] = [decoders.Replace(BLANK, " ")]
    if model.byte_fallback: parts.append(decoders.ByteFallback())
    parts.append(decoders.Fuse())
    if prefix: parts.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(parts)
