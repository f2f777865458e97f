"""Streamed text joined is the text decoded whole; stop strings are found wherever pieces are cut."""
from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tinygrad_nv.engine.text.detokenizer import Detokenizer, Echo, StopStrings, overlap
from tinygrad_nv.engine.text.token_bytes import BYTE_OF_CHARACTER

SAMPLE = ["Once upon a time, Zoë met a dog 🐕 and a 猫. “Hooray!” cried the naïve élan — 3,141 times."] * 3


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(SAMPLE, trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False))
    return tokenizer


def sentencepiece_like() -> Tokenizer:
    """Llama 2's arrangement: spaces as ▁, bytes as <0x..> tokens, the decoder strips the first space."""
    pieces = [(f"<0x{b:02X}>", 0.0) for b in range(256)]
    words = ["▁Once", "▁upon", "▁a", "▁", "time", "s", "▁dog", ".", "▁met"]
    vocabulary = {piece: i for i, piece in enumerate([p for p, _ in pieces] + words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(),
                                           decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return tokenizer


TOKENIZERS = {"byte-level": byte_level(), "sentencepiece": sentencepiece_like()}


def joined(tokenizer: Tokenizer, prompt: list[int], answer: list[int]) -> tuple[str, str]:
    """The pieces joined, and what the whole text adds to the window's part of the prompt."""
    text = Detokenizer(tokenizer.decode, prompt)
    pieces = [text.push(i) for i in answer] + [text.flush()]
    context, whole = tokenizer.decode(text.ids[:len(text.ids) - len(answer)]), tokenizer.decode(text.ids)
    assert whole.startswith(context), "a prompt ends with a whole character"
    return "".join(pieces), whole[len(context):]


BYTES = st.integers(0, TOKENIZERS["byte-level"].get_vocab_size() - 1)


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=12), st.lists(BYTES, max_size=30))
def test_pieces_joined_are_the_whole_text(prompt: str, answer: list[int]):
    """Any ids at all, bytes that are no character among them."""
    tokenizer = TOKENIZERS["byte-level"]
    pieces, whole = joined(tokenizer, tokenizer.encode(prompt).ids, answer)
    assert pieces == whole.rstrip("\ufffd"), "all but a character that is cut at the end"


WORDS = st.integers(256, TOKENIZERS["sentencepiece"].get_vocab_size() - 1)
# byte b is token b. Bytes that are no character are left out: sentencepiece's fallback takes good bytes back
# when a bad one follows, which no stream can
CHARACTERS = st.characters(exclude_categories=("Cs",)).map(lambda c: list(c.encode()))


@settings(max_examples=150, deadline=None)
@given(st.lists(WORDS, max_size=8), st.lists(st.one_of(WORDS.map(lambda w: [w]), CHARACTERS), max_size=20))
def test_pieces_joined_are_the_whole_text_with_sentencepiece(prompt: list[int], answer: list[list[int]]):
    pieces, whole = joined(TOKENIZERS["sentencepiece"], prompt, [token for part in answer for token in part])
    assert pieces == whole


def test_half_a_character_is_held_back():
    tokenizer = TOKENIZERS["byte-level"]
    split = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("🐙")
    ids = [tokenizer.token_to_id(t) for t in split[0][0]]
    text = Detokenizer(tokenizer.decode)
    assert [text.push(i) for i in ids] == ["", "", "", "🐙"]
    assert text.push(ids[0]) == ""
    assert text.flush() == "", "vLLM leaves a character out that is cut"


def test_the_first_word_keeps_its_space():
    tokenizer = TOKENIZERS["sentencepiece"]
    once, upon = tokenizer.token_to_id("▁Once"), tokenizer.token_to_id("▁upon")
    text = Detokenizer(tokenizer.decode, [once])
    assert text.push(upon) == " upon", "decode([upon]) alone would strip it"


@settings(max_examples=300, deadline=None)
@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.data())
def test_text_ends_before_the_first_stop_string(text: str, stops: list[str], data: st.DataObject):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    stream = StopStrings(stops)
    shown = "".join(stream.push(piece) for piece in pieces)
    places = [at for stop in stops if (at := text.find(stop)) >= 0]
    assert (stream.found is not None) == bool(places)
    # a later, longer stop may start before a shorter one that is complete first: then the shorter one cut
    if places: assert min(places) <= len(shown) <= max(places)
    assert text.startswith(shown)
    if not places: assert shown + stream.flush() == text


def test_only_what_may_become_a_stop_string_is_held():
    stream = StopStrings(["</s>"])
    assert stream.push("hello <") == "hello "
    assert stream.push("b") == "<b"
    assert stream.push("</s") == ""
    assert stream.push("> never") == ""
    assert stream.found == "</s>"


def test_overlap_is_a_proper_prefix():
    assert overlap("xxab", "abc") == 2
    assert overlap("abc", "abc") == 0
    assert overlap("", "abc") == 0


def byte_ids(name: str, text: str) -> list[int]:
    """Ids of a text, a byte a token."""
    letters = {byte: letter for letter, byte in BYTE_OF_CHARACTER.items()}
    names = (letters[byte] if name == "byte-level" else f"<0x{byte:02X}>" for byte in text.encode())
    return [TOKENIZERS[name].token_to_id(each) for each in names]


def words(*pieces: str) -> list[int]:
    return [TOKENIZERS["sentencepiece"].token_to_id(piece) for piece in pieces]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("start", ["", "é", "猫猫é", "🦊", "🦊🐙猫"])
def test_an_answer_goes_on_with_the_last_character_of_a_prompt(name: str, start: str):
    """Wherever the prompt is cut, the text goes on while it is made, whole characters are not lost, and an
    echoed prompt and its answer are the text decoded whole."""
    decode, ids = TOKENIZERS[name].decode, byte_ids(name, start + "🦊")
    after = byte_ids(name, " runs") if name == "byte-level" else words("time", "s")
    for cut in range(len(ids)):
        prompt, answer = ids[:cut], [*ids[cut:], *after, *byte_ids(name, "🐙"), *after]
        echo, stops = Echo(decode, decode(prompt), prompt), StopStrings(["s"])
        text = Detokenizer(decode, prompt)
        pieces = [text.push(token) for token in answer]
        wanted = decode([*prompt, *answer])
        shown = (start + "🦊").encode()[:cut].decode(errors="ignore")
        there, there_tokens = len(shown), len(shown.encode())
        assert "".join(pieces) == wanted[there:], cut
        assert "".join(echo.push(p, [t], False) for p, t in zip(pieces, answer, strict=True)) == wanted
        assert not text.flush()
        for piece in pieces: stops.push(piece)
        assert stops.found == "s"
        # another word follows
        if not decode(prompt).endswith("\ufffd"): continue
        text, echo = Detokenizer(decode, prompt), Echo(decode, decode(prompt), prompt)
        pieces = [text.push(token) for token in after]
        assert "".join(pieces) == decode([*ids, *after])[len(start) + 1:]
        assert "".join(echo.push(p, [t], False) for p, t in zip(pieces, after, strict=True)) == \
            decode(prompt[:there_tokens]) + decode([*prompt[there_tokens:], *after])


def test_broken_bytes_do_not_end_a_stream():
    """Byte fallback takes a whole run of bytes back; what was shown of it stays, and text goes on."""
    backend = TOKENIZERS["sentencepiece"]
    fox, after = byte_ids("sentencepiece", "🦊"), words("time", "s")
    text = Detokenizer(backend.decode)
    assert [text.push(token) for token in [*fox, fox[0], *after, *fox]] == \
        ["", "", "", "🦊", "", "\ufffdtime", "s", "", "", "", "🦊"]


def test_an_echo_without_an_answer_is_the_prompt():
    backend = TOKENIZERS["byte-level"]
    prompt = byte_ids("byte-level", "a🦊")[:3]
    echo = Echo(backend.decode, backend.decode(prompt), prompt)
    assert [echo.push("", [], False), echo.push("", [], True)] == ["a", "\ufffd"]
