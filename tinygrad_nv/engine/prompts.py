"""Prompts: a text or token ids, one or many of them."""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import Any, cast

import numpy as np

from tinygrad_nv.errors import RequestError

Prompt = str | Sequence[int]


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts; a single prompt becomes a list of one. Raises `RequestError` for other types."""
    if isinstance(prompts, str): return [prompts]
    if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable): raise _not_a_prompt(prompts)
    many = list(prompts)
    if many and all(isinstance(each, int | np.integer) for each in many): return [cast(Prompt, prompts)]
    return cast(list[Prompt], many)


def as_token_ids(prompt: Iterable[Any]) -> list[int]:
    """The token ids of a prompt that is not a text. Raises `RequestError` for other types."""
    try: return [index(token) for token in prompt]
    except TypeError: raise _not_a_prompt(prompt) from None


def _not_a_prompt(found: Any) -> RequestError:
    return RequestError(f"a prompt of type {type(found).__name__}: {str(found)[:40]}",
                        "a text, or a list of token ids", "pass prompt texts, or lists of ids")
