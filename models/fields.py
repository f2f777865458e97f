"""The object of a config.json, read by key: a wrong value is an error that names the file and the key."""
from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tinygrad_nv.errors import ModelError

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh",
               "gelu_pytorch_tanh": "gelu_tanh"}
CORRECT = "correct the file, or download it again"
MAX_LAYERS = 2048           # limit: layers of a config.json; the deepest published model has 160
MAX_HEADS = 1 << 16         # limit: heads, experts and groups of a config.json
MAX_POSITIONS = 1 << 31     # limit: positions, windows and lengths of a config.json
MAX_SIZE = 1 << 26          # limit: a width of a config.json, and its vocabulary
# the first word that a key contains says its limit
LIMITS = (("layers", MAX_LAYERS), ("n_layer", MAX_LAYERS), ("depth", MAX_LAYERS), ("position", MAX_POSITIONS),
          ("window", MAX_POSITIONS), ("chunk", MAX_POSITIONS), ("length", MAX_POSITIONS),
          ("heads", MAX_HEADS), ("experts", MAX_HEADS), ("group", MAX_HEADS), ("", MAX_SIZE))
MAX_SHOWN = 200


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

    def number(self, key: str, least: float = 0.0) -> float:
        """A number above `least`. Raises `ModelError`."""
        value = self.raw.get(key)
        # the comparison refuses NaN, infinity, and integers that no float holds
        if (not isinstance(value, int | float) or isinstance(value, bool)
            or not least < value <= sys.float_info.max):
            raise ModelError(f"{self.name}: {key} is {brief(value)}", f"a number > {least:g}", CORRECT)
        return float(value)

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


def brief(value: Any) -> str:
    """A value as messages show it."""
    if isinstance(value, int) and value.bit_length() > 4096: return "a number of thousands of digits"
    return text if len(text := repr(value)) <= MAX_SHOWN else text[:MAX_SHOWN] + "…"


def activation(f: Fields, key: str) -> str:
    """The activation that a key names, "silu" where it is missing. Raises `ModelError`."""
    act = f.get(key, "silu")
    if not isinstance(act, str) or act not in ACTIVATIONS:
        raise ModelError(f"{f.name}: {key} {act!r} is not supported", f"one of: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[act]
