"""Tokenizers of each kind, a model that samples uniformly among allowed tokens, and a schema check."""
from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from tinygrad_nv.cli import DEFAULT_MODEL
from tinygrad_nv.engine.structured_output.matcher import GrammarCompiler, GrammarMatcher
from tinygrad_nv.engine.structured_output.params import StructuredOutputsParams as Structured
from tinygrad_nv.engine.text.tokenizer import Tokenizer

LETTERS = "▁abcdefghijklmnopqrstuvwxyz{}[]\":,0123456789"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
KINDS = ("tales", "byte-level BPE", "SentencePiece BPE", "SentencePiece unigram")


def _byte_level() -> Backend:
    made = Backend(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    text = ['the quick fox {"a": 12} jumps, "b" [true, false, null] 345 over', "ein Straßenköter, 日本語"] * 9
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator(text, trainer)
    made.add_tokens(["ab cd"])      # written as it is, not in characters for bytes
    return made


def _sentencepiece() -> Backend:
    words = ["<unk>", "<s>", "</s>", *BYTES, *LETTERS, "▁t", "he", "▁the", "tr", '":']
    made = Backend(models.BPE(vocab={word: i for i, word in enumerate(words)}, fuse_unk=True,
                              merges=[("▁", "t"), ("h", "e"), ("▁t", "he"), ("t", "r"), ('"', ":")],
                              byte_fallback=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                      decoders.Strip(" ", 1, 0)])
    made.add_special_tokens(["<s>", "</s>", "<unk>"])
    return made


def _unigram() -> Backend:
    words = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((byte, -10.0) for byte in BYTES),
             *((letter, -5.0) for letter in LETTERS), ("▁the", -2.0), ("▁true", -3.0), ("▁{", -4.0)]
    made = Backend(models.Unigram(words, 0, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()])
    made.add_special_tokens(["<s>", "</s>"])
    return made


@cache
def tokenizer(kind: str) -> tuple[Tokenizer, int, int]:
    """A tokenizer, its number of ids and its end token."""
    if kind == "tales": return Tokenizer.load(DEFAULT_MODEL), 2048, 1
    makers = {"byte-level BPE": (_byte_level, 1), "SentencePiece BPE": (_sentencepiece, 2),
              "SentencePiece unigram": (_unigram, 2)}
    maker, eos = makers[kind]
    made = maker()
    return Tokenizer(made, {}, None), made.get_vocab_size(), eos


@cache
def grammars(kind: str, spare: int = 0) -> GrammarCompiler:
    """A grammar compiler over a tokenizer; the model's vocabulary has `spare` ids that the tokenizer lacks.
    """
    words, size, eos = tokenizer(kind)
    return GrammarCompiler(words, size + spare, [eos])


def allowed(mask: np.ndarray) -> list[int]:
    """Ids with a bit."""
    return [int(i) for i in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))]


def written(matcher: GrammarMatcher, eos: int, rng: np.random.Generator, most: int = 400) -> list[int]:
    """The output of a model that finds every token equally likely. After `most` tokens it takes end tokens
    and quotes where it can, to end unbounded texts."""
    ids: list[int] = []
    while not matcher.is_finished:
        choice = allowed(matcher.mask())
        assert choice
        if len(ids) > most and eos in choice: return ids
        token = int(choice[rng.integers(len(choice))])
        if token == eos: return ids
        ids.append(token)
        matcher.accept(token)
        assert len(ids) < 3 * most, "it does not end"
    return ids


def text(kind: str, ids: Sequence[int]) -> str:
    """Text of tokens that stand in the middle of another."""
    decode, before = tokenizer(kind)[0].decode, tokenizer(kind)[0].encode("a", special=False)
    return decode([*before, *ids])[len(decode(before)):]


def holds(value: Any, schema: Any) -> bool:
    """Whether a JSON value matches a schema; supports the keywords that the tests use."""
    if isinstance(schema, bool): return schema
    kinds = {"string": str, "integer": int, "number": int | float, "boolean": bool, "null": type(None),
             "array": list, "object": dict}
    if "anyOf" in schema and not any(holds(value, each) for each in schema["anyOf"]): return False
    if "enum" in schema and value not in schema["enum"]: return False
    if "const" in schema and value != schema["const"]: return False
    kind = schema.get("type")
    if isinstance(value, bool) and kind not in (None, "boolean"): return False
    if kind is not None and not isinstance(value, kinds[kind]): return False
    if isinstance(value, str):
        if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 1 << 30): return False
        if "pattern" in schema and not re.search(schema["pattern"], value): return False
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not schema.get("minimum", value) <= value <= schema.get("maximum", value): return False
        if "multipleOf" in schema and value % schema["multipleOf"]: return False
    if isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 1 << 30): return False
        if not all(holds(each, schema.get("items", True)) for each in value): return False
    if isinstance(value, dict):
        known = schema.get("properties", {})
        if any(name not in value for name in schema.get("required", ())): return False
        other = schema.get("additionalProperties", True)
        return all(holds(each, known.get(name, other)) for name, each in value.items())
    return True


PERSON = {"type": "object", "additionalProperties": False, "required": ["name", "age", "tags"],
          "properties": {"name": {"type": "string", "minLength": 1, "maxLength": 9},
                         "age": {"type": "integer", "minimum": 0, "maximum": 150},
                         "tags": {"type": "array", "maxItems": 3, "items": {"enum": ["a", "ä b", "☃"]}},
                         "more": {"anyOf": [{"type": "null"}, {"type": "boolean"}]}}}
SCHEMAS = {"person": PERSON, "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
           "even": {"type": "integer", "multipleOf": 4, "minimum": -50, "maximum": 60},
           "list": {"type": "array", "minItems": 2, "maxItems": 4, "items": {"type": "number"}},
           "constant": {"const": {"x": [1, None, "a/b"]}}, "object": {"type": "object", "maxProperties": 0}}


def schema(name: str) -> Structured:
    """A schema of `SCHEMAS`."""
    return Structured(json=SCHEMAS[name])
