"""Data to train the model in the box on: `python -m tinygrad_nv.models.tales.datasets DIRECTORY`.

Protocol: writes, from seeds, always the same files:

    train.npy, held-out.npy     uint16 token ids in rows of `--length` tokens, one after the other; every row
                                begins with a story, as train.py has them: for `--no-shuffle --max-length`
    pirates.jsonl               `text`: stories as a pirate tells them, to teach an adapter
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
PIRATE = {"little": "wee", "friend": "matey", "friends": "mateys", "house": "ship", "home": "aboard",
          "garden": "deck", "lake": "sea", "river": "sea", "forest": "island", "woods": "island",
          "happy": "merry", "yes": "aye", "Yes": "Aye", "my": "me", "My": "Me", "you": "ye", "You": "Ye",
          "mom": "captain", "mother": "captain", "dad": "captain", "father": "captain", "toy": "treasure"}
_WORD = re.compile(r"\b(" + "|".join(PIRATE) + r")\b")


def write_shards(directory: Path, count: int, length: int) -> None:
    """Writes `count` rows to train on, and `HELD_OUT` others."""
    tokenizer = Tokenizer.from_file(str(Path(__file__).with_name("tokenizer.json")))
    for split, number in (("train", count), ("held-out", HELD_OUT)):
        source = rows(tokenizer, split, length)
        ids = np.array([next(source)[:length] for _ in range(number)], np.uint16)
        np.save(directory / f"{split}.npy", ids.reshape(-1))


def as_pirate(story: str) -> str:
    """The story as a pirate tells it."""
    return f"Ahoy! {_WORD.sub(lambda found: PIRATE[found[1]], story)} Yo ho ho!"


def pirates() -> Iterator[dict[str, str]]:
    """Records with a `text`."""
    for story in corpus("train", RECORDS): yield {"text": as_pirate(story)}


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
    write_records(arguments.directory / "pirates.jsonl", pirates())
    write_records(arguments.directory / "preferences.jsonl", preferences())
    write_shards(arguments.directory, arguments.rows, arguments.length)


if __name__ == "__main__": main()
