"""Which requests a benchmark makes, and when: from a seed, so that every engine gets the same."""
from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tinygrad_nv.errors import RequestError


@dataclass(frozen=True)
class Ask:
    """A prompt, and how many tokens are to follow it."""
    prompt: tuple[int, ...]
    output: int


def made_up(count: int, input_len: int, output_len: int, vocab: int, seed: int = 0, ratio: float = 0.0,
            prefix_len: int = 0) -> list[Ask]:
    """Random tokens. Lengths are within (1 ± `ratio`) of those given; all begin with the same `prefix_len`
    tokens. The first tokens of a vocabulary are special ones in most models, so they are left out."""
    chance = random.Random(seed)
    low = min(16, vocab - 1)

    def words(length: int) -> tuple[int, ...]:
        return tuple(chance.randrange(low, vocab) for _ in range(length))

    def about(length: int) -> int:
        return max(1, chance.randint(round(length * (1 - ratio)), round(length * (1 + ratio))))

    prefix = words(prefix_len)
    return [Ask(prefix + words(about(input_len)), about(output_len)) for _ in range(count)]


def from_file(path: Path, count: int, output_len: int, tokens: object) -> list[Ask]:
    """The first prompts of a file of JSON lines, each with a "prompt". `tokens` encodes a text."""
    try: lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise RequestError(f"{path} cannot be read: {error}", "a file of JSON lines",
                           "change --dataset-path") from error
    if not lines or not all(isinstance(each, dict) and isinstance(each.get("prompt"), str) and each["prompt"]
                            for each in lines):
        raise RequestError(f"{path} has lines without a prompt", 'JSON lines such as {"prompt": "Once"}',
                           "change --dataset-path")
    assert callable(tokens)
    return [Ask(tuple(tokens(lines[i % len(lines)]["prompt"])), output_len) for i in range(count)]


def arrivals(count: int, rate: float, seed: int = 0, burstiness: float = 1.0) -> list[float]:
    """Seconds from the beginning at which requests arrive, `rate` a second; infinite: all at once. Gaps are
    Gamma distributed: with a `burstiness` of 1 a Poisson process, smoother above and in bursts below."""
    if rate == float("inf"): return [0.0] * count
    chance, at, made = random.Random(seed), 0.0, []
    for _ in range(count):
        made.append(at)
        at += chance.gammavariate(burstiness, 1 / (rate * burstiness))
    return made


def total(asks: Sequence[Ask]) -> tuple[int, int]:
    """Tokens of all prompts, and those to follow them."""
    return sum(len(ask.prompt) for ask in asks), sum(ask.output for ask in asks)
