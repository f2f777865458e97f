"""Requests that a benchmark sends, and when: from a seed, so that every engine gets the same."""
from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tinygrad_nv.errors import RequestError

PROMPT, DECODED = 512, 128      # tokens of llama-bench's tests


@dataclass(frozen=True)
class BenchRequest:
    """A prompt, and the number of output tokens; `text` of one that is sent as a conversation."""
    prompt: tuple[int, ...]
    output: int
    text: str = ""


def random_requests(count: int, input_len: int, output_len: int, vocab: int, seed: int = 0,
                    ratio: float = 0.0, prefix_len: int = 0) -> list[BenchRequest]:
    """Random tokens. Lengths are within (1 ± `ratio`) of those given; all prompts start with the same
    `prefix_len` tokens. The first ids of a vocabulary are left out: in most models they are special tokens.
    """
    chance = random.Random(seed)
    low = min(16, vocab - 1)

    def words(length: int) -> tuple[int, ...]:
        return tuple(chance.randrange(low, vocab) for _ in range(length))

    def about(length: int) -> int:
        return max(1, chance.randint(round(length * (1 - ratio)), round(length * (1 + ratio))))

    prefix = words(prefix_len)
    return [BenchRequest(prefix + words(about(input_len)), about(output_len)) for _ in range(count)]


def requests_from_file(path: Path, count: int, output_len: int,
                       tokens: Callable[[str], list[int]]) -> list[BenchRequest]:
    """The first prompts of a file of JSON lines, each with a "prompt". `tokens` encodes a text."""
    try: lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise RequestError(f"{path} cannot be read: {error}", "a file of JSON lines",
                           "change --dataset-path") from error
    if not lines or not all(isinstance(each, dict) and isinstance(each.get("prompt"), str) and each["prompt"]
                            for each in lines):
        raise RequestError(f"{path} has lines without a prompt", 'JSON lines such as {"prompt": "Once"}',
                           "change --dataset-path")
    texts = [lines[i % len(lines)]["prompt"] for i in range(count)]
    return [BenchRequest(tuple(tokens(text)), output_len, text) for text in texts]


def requests_of_sharegpt(path: Path, count: int, output_len: int | None, tokens: Callable[[str], list[int]],
                         seed: int = 0) -> list[BenchRequest]:
    """Returns the first turns of conversations, shuffled, whose answers are as long as theirs unless
    `output_len` says so. Those that vLLM leaves out are left out: fewer than 4 tokens, a prompt of more than
    1024, or more than 2048 in all."""
    wanted = '[{"conversations": [{"value": "…"}, {"value": "…"}]}, …]'
    try: found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"{path} cannot be read: {error}", wanted, "change --dataset-path") from error
    try:
        pairs = [(each["conversations"][0]["value"], each["conversations"][1]["value"]) for each in found
                 if len(each["conversations"]) > 1]
        if not all(isinstance(text, str) for pair in pairs for text in pair): raise TypeError("no text")
    except (KeyError, TypeError, IndexError) as error:
        raise RequestError(f"{path} is not ShareGPT's JSON", wanted, "change --dataset-path") from error
    random.Random(seed).shuffle(pairs)
    made: list[BenchRequest] = []
    for question, answer in pairs:
        if len(made) == count: break
        ids = tokens(question)
        length = output_len or len(tokens(answer))
        if not (4 <= len(ids) <= 1024 and len(ids) + length <= 2048 and (output_len or length >= 4)): continue
        made.append(BenchRequest(tuple(ids), length, question))
    if not made:
        raise RequestError(f"{path} has no conversation of two turns and a usable length", wanted,
                           "change --dataset-path")
    return [made[at % len(made)] for at in range(count)]


def with_texts(workload: Sequence[BenchRequest], directory: Path) -> list[BenchRequest]:
    """Returns requests with the texts of their prompts, for conversations."""
    from tinygrad_nv.engine.text.tokenizer import Tokenizer
    tokenizer = Tokenizer.load(directory)
    return [replace(one, text=one.text or tokenizer.decode(list(one.prompt))) for one in workload]


def arrivals(count: int, rate: float, seed: int = 0, burstiness: float = 1.0) -> list[float]:
    """Arrival times in seconds, `rate` a second; infinite: all at once. Gaps are Gamma distributed: a
    `burstiness` of 1 is a Poisson process, larger is smoother, smaller is burstier."""
    if rate == float("inf"): return [0.0] * count
    chance, at, made = random.Random(seed), 0.0, []
    for _ in range(count):
        made.append(at)
        at += chance.gammavariate(burstiness, 1 / (rate * burstiness))
    return made


def total(workload: Sequence[BenchRequest]) -> tuple[int, int]:
    """Prompt tokens and output tokens of all requests."""
    return sum(len(one.prompt) for one in workload), sum(one.output for one in workload)
