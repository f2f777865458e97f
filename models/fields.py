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
        """An integer above 0. Raises `ModelError`."""
        if not isinstance(value := self.raw.get(key), int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{self.name}: {key} is {value!r}", "a positive integer", CORRECT)
        return value

    def number(self, key: str, least: float = 0.0) -> float:
        """A number above `least`. Raises `ModelError`."""
        value = self.raw.get(key)
        # the comparison refuses NaN, infinity, and integers that no float holds
        if (not isinstance(value, int | float) or isinstance(value, bool)
            or not least < value <= sys.float_info.max):
            raise ModelError(f"{self.name}: {key} is {value!r}", f"a number > {least:g}", CORRECT)
        return float(value)

    def optional(self, key: str) -> float | None:
        """A number above 0, or None where the key is missing or null. Raises `ModelError`."""
        return None if self.raw.get(key) is None else self.number(key)

    def each_layer(self, key: str, kinds: tuple[type, ...] = (str,)) -> list[Any]:
        """A list with an entry for each layer. Raises `ModelError`."""
        value, layers = self.raw.get(key), self.positive("num_hidden_layers")
        if not isinstance(value, list) or len(value) != layers \
                or not all(isinstance(each, kinds) for each in value):
            raise ModelError(f"{self.name}: {key} is {value!r}",
                             f"a list of {layers}, one entry for each layer")
        return value

    def within(self, section: Mapping[str, Any]) -> Fields:
        """The same file's object with the keys of a section before its own."""
        return Fields({**self.raw, **section}, self.name)


def activation(f: Fields, key: str) -> str:
    """The activation that a key names, "silu" where it is missing. Raises `ModelError`."""
    act = f.get(key, "silu")
    if not isinstance(act, str) or act not in ACTIVATIONS:
        raise ModelError(f"{f.name}: {key} {act!r} is not supported", f"one of: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[act]
