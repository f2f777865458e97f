"""The object of a config.json, read by key: a wrong value is an error that names the file and the key."""
from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tinygrad_nv.errors import ModelError, brief

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh",
               "gelu_pytorch_tanh": "gelu_tanh"}
CORRECT = "correct the file, or download it again"
MAX_LAYERS = 2048           # limit: layers of a config.json; the deepest published model has 160
MAX_HEADS = 1 << 16         # limit: heads, experts and groups of a config.json
MAX_POSITIONS = 1 << 31     # limit: positions, windows and lengths of a config.json
MAX_TIMESTEPS = 1 << 16     # limit: timesteps of the training of a diffusion model; published ones have 1,000
MAX_SIZE = 1 << 26          # limit: a width of a config.json, and its vocabulary
# the first word that a key contains says its limit
LIMITS = (("layers", MAX_LAYERS), ("n_layer", MAX_LAYERS), ("depth", MAX_LAYERS), ("position", MAX_POSITIONS),
          ("window", MAX_POSITIONS), ("chunk", MAX_POSITIONS), ("length", MAX_POSITIONS),
          ("timesteps", MAX_TIMESTEPS),
          ("heads", MAX_HEADS), ("experts", MAX_HEADS), ("group", MAX_HEADS), ("", MAX_SIZE))
MAX_NUMBER = 1e18          # limit: other numbers of a config.json; the smallest are its inverse


@dataclass(frozen=True)
class Fields:
    """`raw` with the defaults of its family filled in; `name` of the file is used in messages."""
    raw: Mapping[str, Any]
    name: str

    def get(self, key: str, default: Any = None) -> Any:
        """A value as it is; `default` where the key is missing."""
        return self.raw.get(key, default)

    def flag(self, key: str) -> bool:
        """Whether a key is there and true."""
        return bool(self.raw.get(key, False))

    def positive(self, key: str) -> int:
        """An integer above 0, and at most the key's limit. Raises `ModelError`."""
        if not isinstance(value := self.raw.get(key), int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{self.name}: {key} is {brief(value)}", "a positive integer", CORRECT)
        if value > (most := limit_of(key)):
            raise ModelError(f"{self.name}: {key} is {brief(value)}", f"a positive integer, at most {most:,}",
                             CORRECT)
        return value

    def number(self, key: str, least: float = 0.0, zero: bool = False) -> float:
        """A number above `least`, or 0 where that is allowed. Raises `ModelError`."""
        value = self.raw.get(key)
        if zero and value == 0 and not isinstance(value, bool): return 0.0
        expected = f"a number {'≥' if zero else '>'} {least:g}"
        # the comparison refuses NaN and infinity
        if not isinstance(value, int | float) or isinstance(value, bool) or not least < value < math.inf:
            raise ModelError(f"{self.name}: {key} is {brief(value)}", expected, CORRECT)
        if not 1 / MAX_NUMBER <= value <= MAX_NUMBER:
            raise ModelError(f"{self.name}: {key} is {brief(value)}",
                             f"{expected}, from {1 / MAX_NUMBER:g} to {MAX_NUMBER:g}", CORRECT)
        return float(value)

    def one_of(self, key: str, known: Collection[str], fix: str = "") -> str:
        """A text that is one of `known`. Raises `ModelError`."""
        if isinstance(value := self.raw.get(key), str) and value in known: return value
        raise ModelError(f"{self.name}: {key} {brief(value)} is not supported",
                         f"one of: {', '.join(known)}", fix)

    def count(self, key: str, default: int) -> int:
        """A number of layers, which may be 0. Raises `ModelError`."""
        value = self.raw.get(key, default)
        if type(value) is int and 0 <= value <= MAX_POSITIONS: return value
        raise ModelError(f"{self.name}: {key} is {brief(value)}", "a number of layers", CORRECT)

    def layers(self, key: str) -> frozenset[int]:
        """The numbers in a list of layers. Raises `ModelError`."""
        value = self.raw.get(key)
        if isinstance(value, list) and all(type(each) is int for each in value): return frozenset(value)
        raise ModelError(f"{self.name}: {key} is {brief(value)}", "a list of layers", CORRECT)

    def section(self, key: str) -> Mapping[str, Any]:
        """An object, empty where there is none. Raises `ModelError`."""
        if isinstance(value := self.raw.get(key) or {}, dict): return value
        raise ModelError(f"{self.name}: {key} is {brief(value)}", "an object", CORRECT)

    def optional(self, key: str) -> float | None:
        """A number above 0, or None where the key is missing or null. Raises `ModelError`."""
        return None if self.raw.get(key) is None else self.number(key)

    def each_layer(self, key: str, kinds: tuple[type, ...] = (str,)) -> list[Any]:
        """A list with an entry for each layer. Raises `ModelError`."""
        value, layers = self.raw.get(key), self.positive("num_hidden_layers")
        if not isinstance(value, list) or len(value) != layers \
                or not all(isinstance(each, kinds) for each in value):
            raise ModelError(f"{self.name}: {key} is {brief(value)}",
                             f"a list of {layers}, one entry for each layer")
        return value

    def within(self, section: Mapping[str, Any]) -> Fields:
        """The same file's object with the keys of a section before its own."""
        return Fields({**self.raw, **section}, self.name)


def limit_of(key: str) -> int:
    """The largest value of a positive integer of a config.json."""
    return next(most for word, most in LIMITS if word in key)


def activation(f: Fields, key: str) -> str:
    """The activation that a key names, "silu" where it is missing. Raises `ModelError`."""
    return ACTIVATIONS[Fields({key: "silu", **f.raw}, f.name).one_of(key, ACTIVATIONS)]
