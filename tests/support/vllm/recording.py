"""Answers of vLLM to the requests of the table, and the known differences from them.

`answers.jsonl.gz` has a line of JSON for each request: its name and vLLM's answer. `differences.json` has two
tables. "found" lists, for each difference (as compare.py tells it), the requests whose answers have it; where
many of an endpoint have it and neither status nor text is concerned, one of them is followed by " …".
"reasons" says of each difference what it is: `where` has patterns of differences and requests, the first one
that fits counts; `kind` is "more" (accepted here, refused by vLLM), "refused", "extra" (told besides) or
"other".
bench/serving/vllm_differences.py writes the first file and "found".
"""
from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.vllm.answers import Answer
from tests.support.vllm.compare import Difference

HERE = Path(__file__).parent
ANSWERS, DIFFERENCES = HERE / "answers.jsonl.gz", HERE / "differences.json"
OTHERS = " …"           # behind a request: others of its endpoint may have the difference, too
FEW = 3                 # of one endpoint, each of which is listed
KINDS = ("more", "refused", "extra", "other")
OPTIONS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--max-model-len", "512", "--dtype",
           "float32")
REASONING = ("--reasoning-parser", "qwen3")
Found = dict[str, list[str]]        # difference: requests


@dataclass(frozen=True)
class Reason:
    """Why the answers differ: `here` says how."""
    kind: str
    here: str
    why: str
    where: tuple[tuple[str, str], ...]

    def fits(self, what: str, name: str) -> bool:
        """Whether this is the reason for a difference in a request."""
        return any(fits(difference, what) and fits(request, name) for difference, request in self.where)


def fits(pattern: str, text: str) -> bool:
    """Whether a text is like a pattern, in which * is any text."""
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), text) is not None


def read_answers() -> dict[str, Answer]:
    """Returns vLLM's answers, by the request's name."""
    with gzip.open(ANSWERS, "rt", encoding="utf-8") as file: return dict(json.loads(line) for line in file)


def write_answers(answers: Mapping[str, Answer]) -> None:
    """Writes vLLM's answers. Equal ones give equal bytes."""
    text = "".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in answers.items())
    ANSWERS.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def read_differences() -> tuple[list[Reason], Found]:
    """Returns the reasons, and the known differences."""
    data = json.loads(DIFFERENCES.read_text())
    return [Reason(each["kind"], each["here"], each["why"], tuple(map(tuple,
                                                            each["where"]))) for each in data["reasons"]
            ], data["found"]


def write_found(found: Found) -> None:
    """Writes the known differences; the reasons stay."""
    data: dict[str, Any] = json.loads(DIFFERENCES.read_text()) | {"found": found}
    DIFFERENCES.write_text(json.dumps(data, ensure_ascii=False, indent=1) + "\n")


def find_reason(reasons: Iterable[Reason], what: str, name: str) -> Reason | None:
    """Returns the reason for a difference in a request, the first one that fits."""
    return next((each for each in reasons if each.fits(what, name.removesuffix(OTHERS))), None)


def shorten(differences: Mapping[str, Iterable[Difference]]) -> Found:
    """Returns the table of the differences of each request."""
    table: dict[Difference, dict[str, list[str]]] = {}
    for name, found in differences.items():
        for each in found:
            table.setdefault(Difference(each.what), {}).setdefault(name.partition(": ")[0], []).append(name)
    return {each.what: [name for names in endpoints.values() for name in
                        (names if each.counts or len(names) <= FEW else [names[0] + OTHERS])]
            for each, endpoints in sorted(table.items(), key=lambda item: item[0].what)}


def check(name: str, found: Iterable[Difference], known: Found) -> list[str]:
    """Returns what is wrong with the differences of a request: which are new, and which known ones are gone.
    """
    seen = {each.what for each in found}
    wrong = [f"{what} (new)" for what in seen if not _is_known(name, known.get(what, ()))]
    return wrong + [f"{what} (gone)" for what, names in known.items()
                    if what not in seen and (name in names or name + OTHERS in names)]


def _is_known(name: str, names: Iterable[str]) -> bool:
    endpoint = name.partition(": ")[0]
    return any(each == name or (each.endswith(OTHERS) and each.partition(": ")[0] == endpoint)
               for each in names)


def agreement(requests: Iterable[str], known: Found) -> float:
    """Returns the share of the requests whose status, finish reason and greedy text are vLLM's."""
    every = list(requests)
    differ = {name for what, names in known.items() if Difference(what).counts for name in names}
    return len({*every} - differ) / len(every)
