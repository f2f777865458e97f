"""Our server's answers beside vLLM's, to every request of tests/support/vllm/.

    python bench/serving/vllm_differences.py                       # records vLLM's answers, compares ours
    python bench/serving/vllm_differences.py --url http://localhost:9100 --reasoning-url http://localhost:9101
    python bench/serving/vllm_differences.py --missing --url …     # records those that are not recorded yet
    python bench/serving/vllm_differences.py --recorded            # ours beside the recording

Prints each kind of difference with both answers, and the share of requests that agree in status, finish
reason and greedy text. Writes the recording, the known differences and the table of docs/vllm.md. Without
URLs it starts vLLM (tinygrad_nv/benchmarks/vllm_environment.py makes its environment) twice: without and with
a parser of reasoning. Both sides have SmolLM2's weights in float32.
"""
from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.serving.vllm_models import write_model
from bench.serving.vllm_servers import OURS, THEIRS, Server
from tests.support.models.trained import smollm2
from tests.support.vllm import recording
from tests.support.vllm.answers import Answer, ask
from tests.support.vllm.compare import Difference, compare
from tests.support.vllm.request import Request
from tests.support.vllm.table import requests
from tinygrad_nv import cache

DOCS = Path(__file__).parents[2] / "docs" / "vllm.md"
BEGIN, END = "<!-- written by bench/serving/vllm_differences.py -->\n", "<!-- end -->\n"
TITLES = {"more": "vLLM refuses, accepted here", "refused": "vLLM accepts, refused here",
          "extra": "told here besides", "other": "differs"}
SCALE_OUT = ("--enable-scale-out",)


@contextlib.contextmanager
def start(side: str, reasoning: bool, url: str | None) -> Iterator[str]:
    """Yields the URL of a server, which is started unless `url` has one."""
    if url is not None:
        yield url
        return
    model = smollm2() if side == OURS else write_model("smollm2-135m-float32", cache.folder("bench-models"))
    options = recording.OPTIONS + recording.REASONING * reasoning + SCALE_OUT
    with tempfile.TemporaryDirectory() as folder:
        server = Server(side, model, Path(folder) / "log", options)
        try:
            with server.turn(): yield server.url
        finally: server.close()


def ask_all(side: str, table: Mapping[str, Request], urls: Mapping[bool, str | None]) -> dict[str, Answer]:
    """Returns a server's answers, by the request's name."""
    answers: dict[str, Answer] = {}
    for reasoning, url in urls.items():
        if not any(request.reasoning == reasoning for request in table.values()): continue
        with start(side, reasoning, url) as place:
            for name, request in table.items():
                if request.reasoning == reasoning: answers[name] = ask(place, request)
    return {name: answers[name] for name in table}


def describe(found: Mapping[str, list[Difference]]) -> Iterator[str]:
    """Yields each kind of difference, with the values of the first request that has it."""
    rows = sorted((each.what, name, each) for name, differences in found.items() for each in differences)
    for what, group in groupby(rows, key=lambda row: row[0]):
        every = list(group)
        yield f"{what}: {len(every)} requests, the first {every[0][1]!r}"
        for side, value in ((THEIRS, every[0][2].theirs), (OURS, every[0][2].ours)):
            yield f"    {side}: {json.dumps(value, ensure_ascii=False)[:200]}"


def make_table() -> str:
    """Returns the table of docs/vllm.md: of each reason what differs, why, and in how many requests."""
    reasons, known = recording.read_differences()
    lines = []
    for kind, title in TITLES.items():
        lines += [f"| {title} | why |", "|---|---|"]
        lines += [f"| {each.here} | {each.why} |" for each in reasons if each.kind == kind] + [""]
    every = requests()
    share = recording.agreement(every, known)
    lines.append(f"{share:.1%} of {len(every)} requests agree in status, finish reason and greedy text.")
    return "\n".join(lines) + "\n"


def write_docs() -> None:
    """Writes the table between its marks."""
    before, _, rest = DOCS.read_text().partition(BEGIN)
    DOCS.write_text(before + BEGIN + "\n" + make_table() + "\n" + END + rest.partition(END)[2])


def main() -> None:
    """Asks both servers, or ours, and writes what differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", help="vLLM's server without a parser of reasoning")
    parser.add_argument("--reasoning-url", help="vLLM's server with --reasoning-parser qwen3")
    parser.add_argument("--ours", nargs=2, default=(None, None), metavar="URL",
                        help="our servers, without and with")
    parser.add_argument("--recorded", action="store_true", help="take vLLM's answers from the recording")
    parser.add_argument("--missing", action="store_true",
                        help="ask vLLM only what is not in the recording")
    parser.add_argument("--print-only", action="store_true", help="write no differences")
    given = parser.parse_args()
    table = requests()
    if not given.recorded:
        recorded = recording.read_answers() if given.missing else {}
        recorded |= ask_all(THEIRS, {name: each for name, each in table.items() if name not in recorded},
                            {False: given.url, True: given.reasoning_url})
        recording.write_answers({name: recorded[name] for name in table})
    theirs, ours = recording.read_answers(), ask_all(OURS, table, {False: given.ours[0], True: given.ours[1]})
    found = {name: compare(request, theirs[name], ours[name]) for name, request in table.items()}
    print("\n".join(describe(found)))
    known = recording.shorten(found)
    print(f"{sum(not each for each in found.values())} of {len(table)} requests without any difference, "
          f"{recording.agreement(table, known):.2%} agree in status, finish reason and greedy text")
    if given.print_only: return
    recording.write_found(known)
    write_docs()


if __name__ == "__main__": main()
