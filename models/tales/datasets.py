"""Data to train the model in the box on: `python -m tinygrad_nv.models.tales.datasets DIRECTORY`.

Protocol: writes, from seeds, always the same files:

    train.npy, held-out.npy     uint16 token ids in rows of `--length` tokens, one after the other; every row
                                begins with a story, as train.py has them: for `--no-shuffle --max-length`
    excited.jsonl               `text`: stories as an excited child tells them, to teach an adapter
    preferences.jsonl           `prompt`: the first sentence of a story; `chosen`: how it goes on; `rejected`:
                                how another goes on

The directory of the model in the box has the tokenizer.
"""
from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from .stories import corpus
from .train import Recipe, rows

HELD_OUT = 128      # rows: the 8 batches of train.py
RECORDS = 2000      # of each .jsonl
# words that the model in the box knows: an adapter of layers cannot teach the embedding others
MUCH = ("little", "big", "new", "small", "quiet", "good", "warm", "pretty", "happy", "sweet", "kind", "eager",
        "long", "friendly", "shiny", "gentle", "smart", "clever", "curious", "polite", "playful", "cheerful",
        "lively", "white", "funny", "sunny", "soft", "cozy", "busy", "strange", "old", "tall", "windy")
_MUCH = re.compile(r"\b([Aa])n? (" + "|".join(MUCH) + r")\b")
_SAID = re.compile(r"\b(said|asked|cried)\b")


def write_shards(directory: Path, count: int, length: int) -> None:
    """Writes `count` rows to train on, and `HELD_OUT` others."""
    tokenizer = Tokenizer.from_file(str(Path(__file__).with_name("tokenizer.json")))
    for split, number in (("train", count), ("held-out", HELD_OUT)):
        source = rows(tokenizer, split, length)
        ids = np.array([next(source)[:length] for _ in range(number)], np.uint16)
        np.save(directory / f"{split}.npy", ids.reshape(-1))


def excitedly(story: str) -> str:
    """The story as an excited child tells it."""
    louder = _SAID.sub("shouted", _MUCH.sub(r"\1 very, very \2", story))
    return louder.replace(".", "!")


def make_excited() -> Iterator[dict[str, str]]:
    """Records with a `text`."""
    for story in corpus("train", RECORDS): yield {"text": excitedly(story)}


def preferences() -> Iterator[dict[str, str]]:
    """Records with `prompt`, `chosen` and `rejected`."""
    told = list(corpus("train", RECORDS))
    for story, other in zip(told, told[1:] + told[:1], strict=True):
        prompt, _, chosen = story.partition(". ")
        yield {"prompt": f"{prompt}.", "chosen": f" {chosen}", "rejected": f" {other.partition('. ')[2]}"}


def write_records(path: Path, records: Iterable[dict[str, str]]) -> None:
    """Writes JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def main() -> None:
    """Writes all files."""
    parser = argparse.ArgumentParser(description="Write data to train the model in the box on.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rows", type=int, default=Recipe.steps * Recipe.batch, help="of train.npy")
    parser.add_argument("--length", type=int, default=Recipe.length, help="tokens of a row")
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    write_records(arguments.directory / "excited.jsonl", make_excited())
    write_records(arguments.directory / "preferences.jsonl", preferences())
    write_shards(arguments.directory, arguments.rows, arguments.length)


if __name__ == "__main__": main()
