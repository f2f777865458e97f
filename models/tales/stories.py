"""The teller of small English stories: seeded, endless, and the same on every platform.

    story(rng)                 one story of 60 to 140 words
    stories(seed, count)       the story stream of a seed; story i does not depend on count
    corpus(split, count)       split "train" or "held-out", from seeds that never meet

A story is a plot (`plots.PLOTS`) told by a cast: every beat of the plot is one randomly chosen sentence form,
filled by a `Teller`, who keeps track of who was mentioned and writes a pronoun only where it is clear.
Held-out text comes from seeds at and above HELD_OUT_FROM; training text only from seeds below it.
"""
from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

from . import words
from .plots import FORMS, PLOTS, Plot

HELD_OUT_FROM = 1_000_000
MIN_WORDS, MAX_WORDS = 60, 140
ONCE_SHARE = 0.4          # of the stories begin with "Once upon a time"
PRONOUN_REACH = 3         # sentences after which a character is named again

T = TypeVar("T")
_PRONOUNS = {"m": {"he": "he", "him": "him", "his": "his", "hers": "his", "himself": "himself"},
             "f": {"he": "she", "him": "her", "his": "her", "hers": "hers", "himself": "herself"}}
_NUMBER = {False: {"it": "it", "them": "it", "was": "was", "is": "is", "this": "this"},
           True: {"it": "they", "them": "them", "was": "were", "is": "are", "this": "these"}}
_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SENTENCE = re.compile(r'(?<=[.!?]) (?=[A-Z"]|\{[A-Z])|(?<=[.!?]") (?=[A-Z"]|\{[A-Z])')
_FIELD = re.compile(r"\{(\w+)\}")
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiou])")


class Person(NamedTuple):
    name: str
    gender: str
    kind: str        # "girl", "boy" or a species


def pick(rng: random.Random, options: Sequence[T]) -> T:
    """One of `options`. Only rng.random() is promised to give the same numbers in every Python version."""
    return options[int(rng.random() * len(options))]


class Teller:
    """One story being told: its cast and scenery, and who can be called "he" or "she" right now."""

    def __init__(self, rng: random.Random, plot: Plot) -> None:
        self.rng = rng
        self.parts: list[str] = []
        self.cast = pick(rng, plot.cast.split())
        self.hero = self._person(pick(rng, "mf"))
        other = "m" if self.hero.gender == "f" else "f"
        self.friend = self._person(other if rng.random() < 0.7 else self.hero.gender, self.hero)
        self.elder = pick(rng, words.ELDERS)
        self.thing = pick(rng, words.THINGS[plot.things])
        self.met_friend = self.told_when = False
        self.named_at = {"hero": 0, "friend": 0}     # sentence in which the name was last written
        self.sentence = 0
        # who was mentioned, in order, by gender: in the last sentence with anybody, and so far in this one
        self.before: dict[str, tuple[str, ...]] = {"m": (), "f": ()}
        self.here: dict[str, tuple[str, ...]] = {"m": (), "f": ()}
        self.fixed = self._scenery(plot) | self._thing_words()

    def _person(self, gender: str, hero: Person | None = None) -> Person:
        """A new person of this gender, unlike the hero in name and, among animals, in species."""
        names = words.NAMES[self.cast, gender]
        kinds = words.SPECIES if self.cast == "animal" else ("boy" if gender == "m" else "girl",)
        name = pick(self.rng, [name for name in names if not hero or name != hero.name])
        others = [kind for kind in kinds if not hero or kind != hero.kind]
        return Person(name, gender, pick(self.rng, others or kinds))

    def _scenery(self, plot: Plot) -> dict[str, str]:
        rng = self.rng
        season = pick(rng, plot.seasons.split())
        weather = pick(rng, [w for w in words.WEATHERS if season in w.seasons])
        needs = [tag for tag in (plot.place, "wild" if self.cast == "animal" else "",
                                 "winter" if season == "winter" else "") if tag]
        place = pick(rng, [p for p in words.PLACES if all(tag in p.tags.split() for tag in needs)])
        spots = list(place.spots)
        chosen = [spots.pop(int(rng.random() * len(spots))) for _ in range(3)]
        time = pick(rng, ("morning", "afternoon", "day"))
        when = pick(rng, (f"one {weather.word} {time}", f"one {weather.word} {season} {time}",
                          f"one {time} in {season}", f"on a {weather.word} {season} {time}"))
        return {"place": place.name, "at": place.at, "full_when": when, "sky": pick(rng, weather.sky),
                "spot1": chosen[0], "spot2": chosen[1], "spot3": chosen[2],
                "distract": pick(rng, words.DISTRACTIONS[season]),
                "home": pick(rng, words.HOMES[self.cast]), "neighbor": pick(rng, words.NEIGHBORS[self.cast]),
                "ingredient": pick(rng, words.INGREDIENTS), "pet": pick(rng, words.PETS[self.cast]),
                "hand": "hand" if self.cast == "child" else "paw", "mom": self.elder.address}

    def _thing_words(self) -> dict[str, str]:
        rng, thing = self.rng, self.thing
        look, tint, form = pick(rng, thing.looks), pick(rng, thing.tints), rng.random()
        shown = [look, tint] if form < 0.6 else [tint] if form < 0.8 else [look]
        self.last_word = shown[-1]
        bare = thing.noun if thing.article != "a" else f"a {thing.noun}"
        return {"a_obj": " ".join([thing.article, *shown, thing.noun]), "noun": thing.noun, "any_obj": bare,
                **_NUMBER[thing.plural]}

    def say(self, beat: str) -> None:
        """Tell `beat` in one of its forms."""
        text = pick(self.rng, FORMS[beat])
        while choice := _CHOICE.search(text):
            text = text[:choice.start()] + pick(self.rng, choice[1].split("|")) + text[choice.end():]
        for sentence in _SENTENCE.split(" ".join(text.split())):
            self.sentence += 1
            for gender, roles in self.here.items():
                if roles: self.before[gender] = roles
            self.here = {"m": (), "f": ()}
            self.parts.append(_FIELD.sub(self._fill, sentence))

    def _fill(self, match: re.Match[str]) -> str:
        tag = match[1]
        text = self._value(tag.lower())
        return text[0].upper() + text[1:] if tag[0].isupper() else text

    def _value(self, tag: str) -> str:
        if tag in self.fixed: return self.fixed[tag]
        if tag in ("hero", "friend", "new_friend"): return self._name(tag)
        if tag in _PRONOUNS["m"]: return self._pronoun("hero", tag)
        if tag[0] == "f" and tag[1:] in _PRONOUNS["m"]: return self._pronoun("friend", tag[1:])
        if tag == "elder": return self._elder()
        if tag == "obj":
            return f"{self.last_word} {self.thing.noun}" if self.rng.random() < 0.25 else self.thing.noun
        if tag == "when": return self._when()
        if tag == "a_pet": return f"a {pick(self.rng, ('little', 'small', 'tiny'))} {self.fixed['pet']}"
        assert tag == "a_kind", f"unknown field {tag!r}"
        return f"a {pick(self.rng, words.TRAITS)} {pick(self.rng, ('little', 'young'))} {self.hero.kind}"

    def _when(self) -> str:
        if self.told_when: return pick(self.rng, ("that day", "later that day", "a little later"))
        self.told_when = True
        return self.fixed["full_when"]

    def _mention(self, role: str, gender: str) -> None:
        if role not in self.here[gender]: self.here[gender] += (role,)

    def _name(self, tag: str) -> str:
        role = "hero" if tag == "hero" else "friend"
        person = self.hero if role == "hero" else self.friend
        first, self.met_friend = role == "friend" and not self.met_friend, self.met_friend or role == "friend"
        species = f" the {person.kind}" if self.cast == "animal" else ""
        prefix = ""
        if first and tag == "friend": prefix = f"{self._pronoun('hero', 'his')} friend "
        if tag == "new_friend": prefix, species = f"a {person.kind} named ", ""
        self.named_at[role] = self.sentence
        self._mention(role, person.gender)
        return prefix + person.name + (species if first else "")

    def _pronoun(self, role: str, form: str) -> str:
        """The pronoun if it can only mean `role`: first of its gender here, or the only one just before."""
        person = self.hero if role == "hero" else self.friend
        here, before = self.here[person.gender], self.before[person.gender]
        clear = here[0] == role if here else before == (role,)
        near = self.sentence - self.named_at[role] <= PRONOUN_REACH
        if form == "himself" or (clear and (near or role in here)):
            self._mention(role, person.gender)
            return _PRONOUNS[person.gender][form]
        self.named_at[role] = self.sentence
        self._mention(role, person.gender)
        return person.name + ("'s" if form in ("his", "hers") else "")

    def _elder(self) -> str:
        text = f"{self._pronoun('hero', 'his')} {self.elder.word}"
        self._mention("elder", self.elder.gender)
        return text

    def text(self) -> str:
        """Everything told so far, with "a" made "an" where the next word wants it."""
        return _ARTICLE.sub(r"\1n ", " ".join(self.parts))


def _tell(rng: random.Random, plot: Plot) -> str:
    teller = Teller(rng, plot)
    teller.say("once" if rng.random() < ONCE_SHARE else "open")
    for step in plot.beats.split():
        for beat in pick(rng, step.split("/")).split("+"):
            if beat == "-" or (beat.endswith("?") and rng.random() < 0.5): continue
            teller.say(beat.rstrip("?").replace(":", " "))
    return teller.text()


def story(rng: random.Random) -> str:
    """One story of MIN_WORDS to MAX_WORDS words; tellings outside of that are told anew."""
    while True:
        text = _tell(rng, pick(rng, PLOTS))
        if MIN_WORDS <= len(text.split()) <= MAX_WORDS: return text


def stories(seed: int, count: int) -> Iterator[str]:
    """The first `count` stories of `seed`, each from a generator of its own."""
    return (story(random.Random(seed * 2**32 + index)) for index in range(count))


def corpus(split: str, count: int, part: int = 0) -> Iterator[str]:
    """`count` stories of split "train" or "held-out"; another `part` gives other stories of the split."""
    first = {"train": 0, "held-out": HELD_OUT_FROM}[split]
    assert 0 <= part < HELD_OUT_FROM, f"part {part} would leave the split"
    return stories(first + part, count)
