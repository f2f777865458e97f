"""The tales: the same everywhere, grammatical as far as a regex can see, varied; and their tokenizer.
Data of the examples of training: the same files each time, rows that begin with a story."""
from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinygrad_nv.models.tales import datasets, words
from tinygrad_nv.models.tales import stories as tales
from tinygrad_nv.models.tales.plots import FORMS, PLOTS
from tinygrad_nv.models.tales.stories import corpus
from tinygrad_nv.models.tales.tokenizer import SPECIALS, save, train_tokenizer

FIRST_100 = "c45682ae6849c1105efffc58b3c0d543d865941325460b4d0366a6cd3104cab6"
PRONOUNS = {"m": r"\b(?:he|him|his|himself)\b", "f": r"\b(?:she|her|hers|herself)\b"}
GENDER = {name: gender for (_, gender), names in words.NAMES.items() for name in names}
NOUNS = {thing.noun: thing for pool in words.THINGS.values() for thing in pool}
NOUN = re.compile(rf"\b({'|'.join(sorted(NOUNS, key=len, reverse=True))})\b")
QUOTE = re.compile(r'"[^"]*"')


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return list(tales.stories(0, 5000))


@pytest.fixture(scope="module")
def tokenizer(texts):
    return train_tokenizer(texts[:4000])


def named(text: str) -> set[str]:
    return set(re.findall(r"[A-Z][a-z]+", text)) & set(GENDER)


def test_the_first_stories_are_pinned(texts):
    assert hashlib.sha256("\n".join(texts[:100]).encode()).hexdigest() == FIRST_100


def test_a_story_depends_on_its_seed_and_index_only(texts):
    assert list(tales.stories(0, 7)) == texts[:7]
    assert list(tales.stories(1, 7)) != texts[:7]


def test_splits_do_not_meet(texts):
    assert list(tales.corpus("train", 50)) == texts[:50]
    held_out = set(tales.corpus("held-out", 1000))
    assert len(held_out & set(texts)) <= 1
    assert set(tales.corpus("held-out", 50, part=1)).isdisjoint(held_out)
    with pytest.raises(AssertionError): tales.corpus("train", 1, part=tales.HELD_OUT_FROM)
    with pytest.raises(KeyError): tales.corpus("test", 1)


def test_articles_agree(texts):
    for text in texts[:2000]:
        assert not re.search(r"\b[Aa] [aeiouAEIOU]|\b[Aa]n [^aeiouAEIOU]", text), text
        assert not re.search(r"\b(?:an?|the) (?:an?|the|some|his|her)\b", text), text


def test_pronouns_have_a_gender_that_was_named(texts):
    """With one gender named only its pronouns occur; each comes at most a few sentences after such a name."""
    alone = 0
    for text in texts[:2000]:
        genders = {GENDER[name] for name in named(text)}
        alone += len(genders) == 1
        sentences = re.split(r'(?<=[.!?]) |(?<=[.!?]") ', text)
        for gender, pattern in PRONOUNS.items():
            if gender not in genders: assert not re.search(pattern, text, re.I), text
            for i, sentence in enumerate(sentences):
                if not re.search(pattern, sentence, re.I): continue
                near = " ".join(sentences[max(0, i - 6):i + 1])
                assert gender in {GENDER[name] for name in named(near)}, (sentence, text)
    assert alone > 200


def test_pronouns_are_not_ambiguous(texts):
    """After a sentence that names two people of one gender, the next one does not open with their pronoun."""
    seen = 0
    for text in texts[:2000]:
        for first, second in pairwise(re.split(r"(?<=[.!?]) ", QUOTE.sub("Quote.", text))):
            for gender, pattern in (("m", r"(?:He|His)\b"), ("f", r"(?:She|Her)\b")):
                if sum(GENDER[name] == gender for name in named(first)) < 2: continue
                seen += 1
                assert not re.match(pattern, second), (first, second)
    assert seen > 20


def test_narration_stays_in_the_past(texts):
    lesson = re.compile(r"[^.]*\b(?:learned|knew) that [^.]*\.")
    for text in texts[:2000]:
        narration = lesson.sub("", QUOTE.sub("", text))
        assert not re.search(r"\b(?:is|are|am|has|does|says|goes|can|will)\b", narration), text


def test_number_agrees(texts):
    plural = "|".join(noun for noun, thing in NOUNS.items() if thing.plural)
    single = "|".join(noun for noun, thing in NOUNS.items() if not thing.plural)
    wrong = re.compile(rf"\b(?:{plural}) (?:was|is|has)\b|\b(?:[Tt]he|[Mm]y) (?:{single}) (?:were|are|have)\b"
                       r"|\b(?:[Hh]e|[Ss]he|[Ii]t) (?:were|are)\b|\b[Tt]hey (?:was|is)\b|\b[Tt]his are\b")
    for text in texts: assert not wrong.search(text), text
    assert sum(bool(re.search(rf"\b(?:{plural}) (?:were|are)\b", text)) for text in texts) > 50


def test_one_thing_goes_through_the_whole_story(texts):
    """A story has exactly one thing, met early enough, there at the end, and keeping its looks."""
    for text in texts:
        found = list(NOUN.finditer(text))
        assert len({match[1] for match in found}) == 1, text
        assert found[0].start() < 0.75 * len(text), text
        assert found[-1].start() > max(0.6 * len(text), found[0].start()), text
        thing = NOUNS[found[0][1]]
        pools = [other for pool in words.THINGS.values() for other in pool if other.noun == thing.noun]
        tints = {tint for other in pools for tint in other.tints}
        said = set(re.findall(rf"\b(\w+) {thing.noun}\b", text)) & tints
        assert len(said) <= 1, text


def test_people_stay_the_same(texts):
    """One or two names, never more, and a child story has no animal heroes in it."""
    children = set(words.NAMES["child", "m"]) | set(words.NAMES["child", "f"])
    for text in texts:
        people = named(text)
        assert 1 <= len(people) <= 2, text
        assert people <= children or people.isdisjoint(children), text


def test_nothing_is_left_unfilled(texts):
    for text in texts:
        assert not re.search(r"[{}\[\]|]|  | [.,!?]|^\s|\s$", text), text
        assert text.count('"') % 2 == 0, text
        assert re.search(r'[.!?]"?$', text), text
        assert not re.search(r'[.!?] [a-z]', text), text


def test_length_variety_and_vocabulary(texts):
    assert len(texts) - len(set(texts)) <= 1
    sizes = [len(text.split()) for text in texts]
    assert min(sizes) >= tales.MIN_WORDS
    assert max(sizes) <= tales.MAX_WORDS
    assert 90 <= sum(sizes) / len(sizes) <= 130
    vocabulary = Counter(word.lower() for text in texts for word in re.findall(r"[A-Za-z]+", text))
    assert 600 <= len(vocabulary) <= 900
    assert 0.35 < sum(text.startswith("Once upon a time") for text in texts) / len(texts) < 0.45
    assert len({" ".join(text.split()[:4]) for text in texts}) > 100


def test_every_plot_can_be_told_and_every_form_is_used():
    used = {"once", "open"}
    for plot in PLOTS:
        used |= {beat.rstrip("?").replace(":", " ") for beat in re.split(r"[ /+]", plot.beats) if beat != "-"}
        sizes = [len(tales._tell(random.Random(seed), plot).split()) for seed in range(100)]
        assert sum(tales.MIN_WORDS <= size <= tales.MAX_WORDS for size in sizes) > 30, plot.name
    assert len(PLOTS) >= 12
    assert used == set(FORMS)


def test_tokenizer_is_deterministic_and_small(texts, tokenizer):
    assert train_tokenizer(texts[:4000]).to_str() == tokenizer.to_str()
    assert tokenizer.get_vocab_size() == 1024
    assert [tokenizer.token_to_id(token) for token in SPECIALS] == [0, 1, 2, 3, 4]
    ids = [tokenizer.encode(text).ids for text in texts[4000:]]
    assert 150 <= sum(map(len, ids)) / len(ids) <= 190
    assert sum(map(len, texts[4000:])) / sum(map(len, ids)) > 3.3


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_any_text_round_trips(tokenizer, text):
    if any(token in text for token in SPECIALS): return
    ids = tokenizer.encode(text).ids
    assert ids[0] == 0
    assert tokenizer.decode(ids) == text


def test_saved_tokenizer_loads_in_transformers(texts, tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    save(tokenizer, tmp_path)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (0, 1, 2)
    for text in (*texts[:20], "naïve 漢字 \U0001f40c\n\ttab  two"):
        assert loaded(text)["input_ids"] == tokenizer.encode(text).ids
        assert loaded.decode(loaded(text)["input_ids"], skip_special_tokens=True) == text
    assert loaded("one<|eos|>")["input_ids"][-1] == 1


def test_chat_template_makes_the_message_a_story_opening(tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    save(tokenizer, tmp_path)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    system = {"role": "system", "content": "Be nice."}
    user = {"role": "user", "content": " Once upon a time "}
    more = [{"role": "assistant", "content": "there was a fox."}, {"role": "user", "content": "She"}]
    for messages, wanted in (([user], "<|bos|>Once upon a time"), ([system, user], "<|bos|>Once upon a time"),
                             ([user, *more], "<|bos|>Once upon a time there was a fox. She")):
        assert loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == wanted


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "RECORDS", 6)
    monkeypatch.setattr(datasets, "HELD_OUT", 3)
    one, other = (tmp_path / name for name in ("one", "other"))
    for folder in (one, other):
        monkeypatch.setattr("sys.argv", ["datasets", str(folder), "--rows", "5", "--length", "64"])
        datasets.main()
    files = sorted(path.name for path in one.iterdir())
    assert files == ["excited.jsonl", "held-out.npy", "preferences.jsonl", "train.npy"]
    for name in files: assert (one / name).read_bytes() == (other / name).read_bytes()
    train, held_out = (np.load(one / f"{name}.npy").reshape(-1, 64) for name in ("train", "held-out"))
    assert (len(train), len(held_out)) == (5, 3)
    assert len(set(map(bytes, (*train, *held_out)))) == 8


def test_records() -> None:
    story = 'Ben was a kind boy. He saw an old dog. "Come!" he said.'
    assert datasets.excitedly(story) == \
        'Ben was a very, very kind boy! He saw a very, very old dog! "Come!" he shouted!'
    told = next(corpus("train", 1))
    assert next(datasets.make_excited())["text"] == datasets.excitedly(told)
    first = next(datasets.preferences())
    assert first["prompt"] + first["chosen"] == told
    assert first["rejected"] != first["chosen"]
