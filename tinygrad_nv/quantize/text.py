"""Text for calibration and evaluation, as sequences of tokens.

Protocol: `tokens(directory, texts, count, length)` encodes texts, each cut into sequences of at most `length`
tokens: no sequence has tokens of two texts. `texts(path)` reads a file: text, which is one text, or JSONL,
of which each line is one, with "text" or "messages" (through the model's chat template). Without a file there
are the stories that the model in the box was trained with; held-out ones are of seeds apart.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tinygrad_nv.engine.text.tokenizer import Tokenizer
from tinygrad_nv.errors import RequestError
from tinygrad_nv.files import parse_json, read_text
from tinygrad_nv.models.config import ModelConfig
from tinygrad_nv.models.tales.stories import corpus

MAX_CALIBRATION_BYTES = 256 << 20    # limit: bytes of a text that calibrates
STORIES = 1 << 16       # of a split: more than are read
LEAST = 2               # tokens of a sequence: one predicts the other
PIECE = 1 << 16         # characters that are encoded at a time
Text = str | list[Any]  # a text, or a conversation's messages


@dataclass(frozen=True)
class Sequences:
    """Token ids of sequences, one after the other, and how many each has."""
    ids: np.ndarray
    lengths: tuple[int, ...]


def stories(split: str) -> Iterator[str]:
    """Stories of "train" or "held-out"."""
    return corpus(split, STORIES)


def tokens(directory: Path, config: ModelConfig, texts: Iterable[Text], count: int, length: int,
           most: int | None = None) -> Sequences:
    """At most `count` sequences of at most `length` tokens, no more once they have `most` tokens. Raises
    `RequestError` where there is none."""
    if count < 1 or length < LEAST:
        raise RequestError(f"{count} sequences of {length} tokens", f"1 or more, of {LEAST} or more",
                           "change --samples or --length")
    tokenizer, found, length = Tokenizer.load(directory), list[list[int]](), min(length, config.max_positions)
    for ids in _encode(tokenizer, texts, config):
        for begin in range(0, len(ids), length):
            if len(piece := ids[begin:begin + length]) >= LEAST: found.append(piece)
            if len(found) == count or (most is not None and sum(map(len, found)) >= most):
                return _join(found)
    if not found:
        raise RequestError("the text has no tokens", f"{LEAST} or more tokens", "name another file")
    return _join(found)


def _join(found: Sequence[Sequence[int]]) -> Sequences:
    return Sequences(np.concatenate([np.array(each, np.int64) for each in found]), tuple(map(len, found)))


def _encode(tokenizer: Tokenizer, texts: Iterable[Text], config: ModelConfig) -> Iterator[list[int]]:
    """Ids of each text, those of a long one in pieces, and the token that ends it."""
    end = list(config.eos_token_ids[:1])
    for text in texts:
        if not isinstance(text, str): yield [*tokenizer.encode_chat(text), *end]
        elif len(text) <= PIECE: yield [*tokenizer.encode(text), *end]
        else:
            for begin in range(0, len(text), PIECE): yield tokenizer.encode(text[begin:begin + PIECE])


def texts(path: Path) -> list[Text]:
    """Returns the texts of a file. Raises `RequestError`."""
    def wrong(found: str) -> RequestError:
        return RequestError(f"{path}{found}", 'text, or JSONL with "text" or "messages" in each line',
                            "name another file")
    try: text = read_text(path, MAX_CALIBRATION_BYTES)
    except UnicodeDecodeError as error: raise wrong(f" is not UTF-8, at byte {error.start}") from error
    except OSError as error: raise wrong(f" cannot be read: {error.strerror}") from error
    if not text.strip(): raise wrong(" is empty")
    if path.suffix != ".jsonl": return [text]
    found: list[Text] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip(): continue
        try: data = parse_json(line)
        except ValueError as error: raise wrong(f", line {number}: no JSON") from error
        one = next((data[key] for key, kind in (("text", str), ("messages", list))
                    if isinstance(data, dict) and isinstance(data.get(key), kind)), None)
        if not one: raise wrong(f', line {number}: neither "text" nor "messages"')
        found.append(one)
    return found
