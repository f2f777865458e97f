"""Long texts: bounds of their tokens, and calls that other threads need not wait for."""
from __future__ import annotations

import itertools
import json
import random
import time
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from tinygrad_nv.cli import DEFAULT_MODEL
from tinygrad_nv.engine.text.gguf_patterns import PATTERNS
from tinygrad_nv.engine.text.prompt_length import TextBound
from tinygrad_nv.engine.text.sentencepiece import _normalizer
from tinygrad_nv.engine.text.sentencepiece_file import SentencePieceModel
from tinygrad_nv.engine.text.tokenizer import Tokenizer
from tinygrad_nv.engine.text.tokenizer_config import configure
from tinygrad_nv.errors import RequestError

ALPHABET = pre_tokenizers.ByteLevel.alphabet()
LINES = ["the fox and the dog", "The   dog!\n\n", "a fox, 1234 times", "é́ über"] * 20
TALES = Tokenizer.load(DEFAULT_MODEL)


def byte_level(*steps: Any, normalizer: Any = None, added: tuple[AddedToken, ...] = ()) -> Backend:
    made = Backend(models.BPE())
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not steps)
    made.pre_tokenizer, made.decoder = pre_tokenizers.Sequence([*steps, letters]), decoders.ByteLevel()
    if normalizer is not None: made.normalizer = normalizer
    made.train_from_iterator(LINES, trainers.BpeTrainer(vocab_size=300, initial_alphabet=ALPHABET,
                                                        show_progress=False))
    made.add_tokens(list(added))
    return made


def byte_fallback() -> Backend:
    """As Llama 2's: bytes for what is not in the vocabulary, and a blank that is a letter."""
    pieces = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz", "th", "the"]
    made = Backend(models.BPE({piece: at for at, piece in enumerate(pieces)}, [("t", "h"), ("th", "e")],
                              unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return made


def word_piece() -> Backend:
    made = Backend(models.WordPiece({"[UNK]": 0, "a": 1, "fox": 2}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return made


BOUNDED = {
    "gpt2": byte_level(), "tales": TALES.backend, "fallback": byte_fallback(),
    "nfc": byte_level(normalizer=normalizers.NFC()), "nfkc": byte_level(normalizer=normalizers.NFKC()),
    "split": byte_level(pre_tokenizers.Split(Regex(r"\s+|\w+"), "isolated"), pre_tokenizers.Digits()),
    "added": byte_level(added=(AddedToken("<|end|>", rstrip=True), AddedToken("<|a very long token|>")))}
UNBOUNDED = {
    "unknown words": word_piece(), "stripped": byte_level(normalizer=normalizers.Strip()),
    "accents": byte_level(normalizer=normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])),
    "shorter": byte_level(normalizer=normalizers.Replace(Regex(" {2,}"), " ")),
    "shorter text": byte_level(normalizer=normalizers.Replace("ab", "a")),
    "removed": byte_level(pre_tokenizers.Split(" ", "removed")),
    "unknown letters": Backend(models.BPE({"a": 0}, []))}
PARTS = ("the", " ", "   ", "\n", "a", "aaaa", "é", "e\u0301\u0302\u0323", "\u0300" * 5, "😀", "\0",
         "ｆｏｘ", "ﬁ", "漢", "1234", "<|end|>", "<|a very long token|>", "\u3000", "각",
         "\u1112\u1161\u11ab", "\u03b1\u0313\u0300\u0345")


@pytest.mark.parametrize("name", BOUNDED)
def test_no_text_has_fewer_tokens(name: str):
    backend, draw = BOUNDED[name], random.Random(name)
    bound = TextBound.of(backend)
    texts = ["".join(draw.choices(PARTS, k=draw.randrange(1, 30))) for _ in range(200)]
    texts += [part * 50 for part in PARTS]
    for text in texts:
        assert bound.least(text) <= len(backend.encode(text, add_special_tokens=False).ids), text
    longest = max(map(len, backend.get_vocab())) * (4 if name.startswith("nf") else 1)
    assert bound.least("a" * 100 * longest) == 100


@pytest.mark.parametrize("name", UNBOUNDED)
def test_nothing_is_said_of_tokenizers_that_drop_text(name: str):
    assert TextBound.of(UNBOUNDED[name]).least("a " * 1000) == 0


def test_blanks_of_added_tokens_are_not_counted():
    bound = TextBound.of(BOUNDED["added"])
    blanks = " \t\n\u00a0\u3000"
    assert bound.least("<|end|>" + blanks * 1000) == 1
    assert bound.least("x" + blanks * 1000 + "x" * 99) == 5     # of 21 letters, as <|a very long token|>


def test_a_long_prompt_is_refused_by_its_size():
    small = Tokenizer(TALES.backend, TALES.special, None, most=1000)
    small.require_fitting("é" * 500, 600)
    for text in ("é" * 501, "a" * 1001):
        with pytest.raises(RequestError, match="at most 1000 bytes"):
            small.require_fitting(text, 10, truncated=True)
    with pytest.raises(RequestError, match="1000 characters, 77 or more tokens"):
        TALES.require_fitting("a" * 1000, 76)
    TALES.require_fitting("a" * 1000, 77)


# **** ids ****

def surrounding() -> Tokenizer:
    made = byte_level()
    made.add_special_tokens(["[CLS]", "[SEP]"])
    ids = [(text, made.token_to_id(text)) for text in ("[CLS]", "[SEP]")]
    made.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0", pair="[CLS]:0 $A:0 [SEP]:0 [SEP]:1 $B:1 [SEP]:1", special_tokens=ids)
    return Tokenizer(made, {}, None)


@pytest.mark.parametrize("tokenizer", [surrounding(), TALES])
def test_ids_of_long_texts_are_those_of_the_library(tokenizer: Tokenizer):
    text, backend = "The fox 😀 and\n\n the dog! " * 200, tokenizer.backend
    for special in (True, False):
        assert tokenizer.encode(text, special) == backend.encode(text, add_special_tokens=special).ids
    ids = tokenizer.encode(text, special=False)
    assert tokenizer.decode(ids) == backend.decode(ids) == text
    for most in (1, 2, 3, 50, 10_000):
        for side in ("left", "right"):
            if most > backend.num_special_tokens_to_add(False):
                backend.enable_truncation(most, direction=side)
                expected = backend.encode(text).ids
                backend.no_truncation()
                assert tokenizer.encode_truncated(text, most, side) == expected, (most, side)
            assert len(tokenizer.encode_truncated(text, most, side)) <= most
    for one, two in itertools.product((1, 2, 5, 6, 8, 9), repeat=2):
        for most in range(4, 21):
            backend.enable_truncation(most)
            made = backend.encode("x " * one, "y " * two)
            backend.no_truncation()
            assert tokenizer.encode_pair("x " * one, "y " * two, most) == (made.ids, made.type_ids)
    made = backend.encode(text, "a fox")
    assert tokenizer.encode_pair(text, "a fox") == (made.ids, made.type_ids)


# **** long runs of blanks ****

def time_of(task: Any) -> float:
    begun = time.perf_counter()
    task()
    return time.perf_counter() - begun


@pytest.mark.parametrize("run", [" ", "▁"])
def test_blanks_at_the_end_are_found_at_once(run: str):
    """Of n blanks before a letter, each began a search of the rest: 30 s for these."""
    model = SentencePieceModel.__new__(SentencePieceModel)
    for name, value in (("charsmap", b""), ("remove_blanks", True), ("escape_blanks", True)):
        object.__setattr__(model, name, value)
    steps = _normalizer(model, True)
    assert time_of(lambda: steps.normalize_str("a" + run * 60_000 + "a")) < 3
    assert steps.normalize_str(f"  a{run * 3}b {run * 2} ") == ("▁a▁b" if run == " " else "▁a▁▁▁b")


def test_white_space_at_the_end_is_found_at_once():
    steps = [pre_tokenizers.Split(Regex(each), "isolated") for each in ("[\r\n]", r"\s+$", r"\w+")]
    made = Backend(models.BPE())
    for each in (steps, steps[1:]):
        made.pre_tokenizer = pre_tokenizers.Sequence(each)
        configure(made, {}, {}, {}, {})
        state = json.loads(made.pre_tokenizer.__getstate__())
        found = [step["pattern"]["Regex"] for step in state["pretokenizers"]]
        assert (r"\s+$" in found) == (each is not steps)
    made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    expected = [made.pre_tokenizer.pre_tokenize_str(text) for text in TEXTS]
    configure(made, {}, {}, {}, {})
    assert [made.pre_tokenizer.pre_tokenize_str(text) for text in TEXTS] == expected
    for pattern in PATTERNS["deepseek-llm"]:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        assert time_of(lambda: split.pre_tokenize_str("a" + " " * 60_000 + "a")) < 3, pattern  # noqa: B023
    assert time_of(lambda: made.pre_tokenizer.pre_tokenize_str("a" + " " * 60_000 + "a")) < 3


TEXTS = ["a  b \n\t c  ", "  ", "a", " a\u3000\u3000", "\n \n", "a \t\r\n  b \u00a0"]
