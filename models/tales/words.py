"""Word tables of the stories: names, things, places, weather. Plain tuples, so that their order is fixed.

The order is part of the data: a story draws by position, so inserting a word changes every story after it.
A name has one gender everywhere, which is what lets a reader (or a model) predict the pronoun from the name.
A word that names a thing is used for nothing else, so a story's thing can be recognised in its text.
"""
from __future__ import annotations

from typing import NamedTuple

NAMES: dict[tuple[str, str], tuple[str, ...]] = {
    ("child", "m"): (
        "Tom", "Ben", "Sam", "Max", "Leo", "Jack", "Tim", "Finn", "Noah", "Oliver", "Henry",
        "Adam", "Peter", "Oscar", "Luke", "Daniel"),
    ("child", "f"): (
        "Lily", "Mia", "Anna", "Sue", "Lucy", "Emma", "Ella", "Zoe", "Sara", "Molly", "Nora",
        "Kate", "Grace", "Ruby", "Amy", "Jane"),
    ("animal", "m"): (
        "Pip", "Rusty", "Bruno", "Gus", "Milo", "Otis", "Hugo", "Toby"),
    ("animal", "f"): (
        "Hazel", "Dolly", "Tilly", "Bella", "Penny", "Fern", "Clover", "Mabel"),
}
SPECIES = ("rabbit", "bear", "fox", "mouse", "squirrel", "kitten", "mole", "hedgehog")
TRAITS = ("kind", "curious", "cheerful", "gentle", "clever", "playful", "quiet", "happy", "friendly",
          "polite", "lively", "smart", "sweet", "eager")


class Elder(NamedTuple):
    word: str
    address: str
    gender: str


ELDERS = (Elder("mother", "Mom", "f"), Elder("mom", "Mom", "f"), Elder("father", "Dad", "m"),
          Elder("dad", "Dad", "m"), Elder("grandmother", "Grandma", "f"), Elder("grandma", "Grandma", "f"),
          Elder("grandfather", "Grandpa", "m"), Elder("grandpa", "Grandpa", "m"))
NEIGHBORS = {"child": ("the old farmer", "the baker", "the kind teacher", "the old woman next door",
                       "the old man next door", "the shopkeeper"),
             "animal": ("the old owl", "the old turtle", "the wise badger", "the kind goose", "the old goat")}
PETS = {"child": ("bird", "puppy", "kitten", "duckling", "rabbit", "squirrel"),
        "animal": ("bird", "duckling", "turtle", "frog")}
HOMES = {"child": ("in a small village", "in a little house near the sea", "in a town by a river",
                   "in a white house on a hill", "at the edge of a town", "in a busy town",
                   "on a quiet street", "near a big forest"),
         "animal": ("in a cozy den under an oak tree", "in a hole by a river", "in a burrow under a hill",
                    "in a hollow tree", "at the edge of a forest", "in a little house made of sticks")}


class Thing(NamedTuple):
    noun: str
    article: str             # "a", "some" or "a pair of"
    plural: bool
    looks: tuple[str, ...]   # size, age or feel: comes first
    tints: tuple[str, ...]   # colour or material: comes second


_COLORS = "red blue green yellow purple orange pink white brown"


def _things(nouns: str, looks: str, tints: str = _COLORS, article: str = "a",
            plural: bool | None = None) -> tuple[Thing, ...]:
    many = article != "a" if plural is None else plural
    return tuple(Thing(noun, article, many, tuple(looks.split()), tuple(tints.split()))
                 for noun in nouns.split(", "))


_TOYS = _things("ball, toy car, toy train, drum", "big little shiny new")
_CUDDLY = _things("teddy bear, doll", "soft little big pretty")
_CLOTH = _things("scarf, sweater, coat, blanket", "soft warm thick new")
_HATS = _things("hat, cap", "warm funny new old")
_MITTENS = _things("mittens, socks", "warm soft thick new", article="a pair of")
_TREASURE = (*_things("shell, feather, button, marble", "pretty tiny smooth little"),
             *_things("key, coin, bell", "shiny old little", "gold silver"))
_KITES = _things("kite, toy plane, balloon", "big pretty new")
_BOATS = _things("toy boat, paper boat", "little pretty new")
_FOOD = (*_things("apple, pear", "sweet big fresh", "red green yellow"),
         *_things("sandwich, muffin", "big tasty fresh", "cheese honey"),
         *_things("cookies, pancakes", "warm sweet tasty", "honey nut", "some"),
         *_things("berries, plums", "sweet fresh juicy", "red blue", "some"))
_BAKED = (*_things("cake, pie", "big sweet round", "carrot lemon honey"),
          *_things("cookies, buns", "sweet soft warm", "honey nut lemon", "some"),
          *_things("bread, soup", "hot fresh tasty", "carrot onion", "some", plural=False))

THINGS: dict[str, tuple[Thing, ...]] = {
    "keep": (*_TOYS, *_CUDDLY, *_HATS, *_MITTENS, *_TREASURE, *_KITES[:2], _BOATS[0], _CLOTH[0]),
    "fly": (*_KITES, *_HATS, _CLOTH[0]),
    "float": (*_BOATS, _TOYS[0], *_HATS),
    "break": (*_TOYS[1:], *_KITES[:2], _BOATS[0], *_things("wagon, sled", "big little shiny new")),
    "toy": (*_TOYS, *_CUDDLY, *_KITES, _BOATS[0], *_things("puppet, puzzle", "funny new pretty")),
    "comfort": (*_CUDDLY, _CLOTH[3], *_things("lamp, toy bunny", "little pretty new")),
    "wrap": _CLOTH,
    "food": _FOOD,
    "baked": _BAKED,
    "gift": (*_things("card, crown, necklace, picture", "pretty little lovely"), _CLOTH[0], _HATS[0]),
    "call": (_TOYS[3], _TREASURE[6], *_things("whistle, horn", "shiny little new")),
    "prize": (*_things("ribbon, flag", "big shiny pretty"), _KITES[0],
              *_things("medal, cup", "big shiny round", "gold silver")),
    "shop": (*_TOYS, *_CUDDLY, *_KITES[:2], *_things("book, music box, lamp", "big little pretty")),
    "fragile": _things("cup, vase, bowl, plate, jar, teapot", "pretty old tall little"),
    "load": _things("basket, bag, box, sack, bucket", "big heavy old"),
    "plant": (*_things("sunflower, tulip", "tall lovely big", "yellow orange"),
              *_things("pumpkin, tomato, melon", "big round fat", "orange red yellow")),
    "ride": _things("bike, scooter, skateboard", "shiny new fast"),
    "glide": _KITES[:1],
    "tune": (_TOYS[3], *_things("flute, fiddle, trumpet", "shiny little new")),
}


class Place(NamedTuple):
    name: str
    at: str
    tags: str                # tree, water, wild (animals live there), winter (nice in the cold, too)
    spots: tuple[str, ...]


PLACES = (
    Place("the park", "in the park", "tree winter", ("under the slide", "behind a bench",
          "next to the swings", "near the gate", "under a bush")),
    Place("the garden", "in the garden", "tree winter", ("under a bush", "behind the shed", "near the gate",
          "next to the wall", "behind the fence")),
    Place("the woods", "in the woods", "tree wild winter", ("behind a log", "under a pine tree",
          "between two rocks", "next to a stump", "under a bush")),
    Place("the beach", "on the beach", "water", ("behind a rock", "in the wet sand", "under an old net",
          "next to the water", "near the dunes")),
    Place("the meadow", "in the meadow", "tree wild", ("in the tall grass", "by the fence", "behind a rock",
          "under a bush", "next to a stump")),
    Place("the farm", "on the farm", "tree winter", ("in the hay", "behind the barn", "under the cart",
          "by the fence", "next to the well")),
    Place("the river", "by the river", "tree water wild", ("in the reeds", "behind a rock",
          "under the bridge", "next to a log", "in the tall grass")),
    Place("the hill", "on the hill", "tree wild winter", ("behind a rock", "under a bush", "near the path",
          "next to a stump", "between two rocks")),
    Place("the lake", "by the lake", "tree water wild", ("in the reeds", "under the dock", "behind a log",
          "between two rocks", "near the path")),
    Place("the playground", "at the playground", "winter", ("under the slide", "next to the swings",
          "behind a bench", "by the fence", "in the sand")),
)


class Weather(NamedTuple):
    word: str
    seasons: tuple[str, ...]
    sky: tuple[str, ...]


WEATHERS = (
    Weather("sunny", ("spring", "summer", "autumn"), ("The sun was bright and the sky was blue.",
            "There was not a cloud in the sky.", "The sun was shining on the trees.")),
    Weather("warm", ("spring", "summer"), ("The air smelled of flowers.", "Bees were humming in the flowers.",
            "The grass was green and soft.")),
    Weather("hot", ("summer",), ("It was so hot that the birds were resting in the shade.",
            "The sun was high in the sky.")),
    Weather("windy", ("spring", "autumn"), ("The wind pushed the clouds across the sky.",
            "The trees were dancing in the wind.")),
    Weather("cool", ("autumn",), ("Red and yellow leaves covered the ground.",
            "The leaves were falling from the trees.")),
    Weather("cloudy", ("spring", "autumn", "winter"), ("Gray clouds hung in the sky.",
            "The sun was hiding behind the clouds.")),
    Weather("cold", ("winter",), ("The ground was white with snow.", "The puddles had turned to ice.")),
    Weather("snowy", ("winter",), ("Soft snow covered the trees.", "Snow was falling without a sound.")),
)
DISTRACTIONS = {"spring": ("chase a butterfly", "pick some flowers", "look at a frog", "watch the bees"),
                "summer": ("chase a butterfly", "pick some flowers", "watch the ants", "rest in the shade"),
                "autumn": ("jump in the leaves", "watch a snail", "look for nuts"),
                "winter": ("make a snowman", "watch a little robin", "slide on the ice")}
INGREDIENTS = ("milk", "flour", "butter", "sugar", "salt")
