"""A server under load: many streaming clients at once, some of which leave in the middle.

Every client asks, reads its stream to the end, and asks again until the time is up; one request in `--drop`
is left after a random part of its answer. Answers are greedy, so each that is read to its end must be, letter
by letter, what the same prompt gave before the load. At the end nothing may run and no page may be in use.
The server's resident memory is sampled every second: growth is the median of the last quarter over that of
the second.

    python bench/serve_load.py --clients 200 --seconds 600 --json load.json --plot load.png
"""
from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from measure import git, processor

PROMPTS = ("Once upon a time there was a little fox", "One day a bear", "The girl found a key in the wood",
           "Tom and his dog", "It rained all day, and the mouse", "In the morning the sun", "A bird had lost",
           "The old tree by the river")


@dataclass
class LoadResult:
    """What happened. Series have an entry a second: (seconds, resident MB, running, KV used, tokens)."""
    finished: int = 0
    dropped: int = 0
    failed: list[str] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    series: list[tuple[float, float, float, float, float]] = field(default_factory=list)


async def ask(address: tuple[str, int], body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The events of a streamed completion. Raises for a status other than 200 and a stream without [DONE]."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        data = json.dumps(body).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
                     b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head.partition(b"\r\n")[0]: raise RuntimeError(head.partition(b"\r\n")[0].decode())
        while True:
            line = await reader.readline()  # a chunk's size, or a line of an event
            if not line: raise RuntimeError("the stream ended without [DONE]")
            if line.startswith(b"data: [DONE]"): return
            if line.startswith(b"data: "): yield json.loads(line[6:])
    finally: writer.close()


async def whole(address: tuple[str, int], body: dict[str, Any], leave_after: int | None = None,
                first_s: list[float] | None = None) -> str | None:
    """The text of an answer; None when it was left after so many characters."""
    text, reason, begun = "", None, time.perf_counter()
    events = ask(address, body)
    try:
        async for event in events:
            if "error" in event: raise RuntimeError(event["error"]["message"])
            if first_s is not None: first_s.append(time.perf_counter() - begun)
            first_s = None
            text += event["choices"][0]["text"]
            reason = event["choices"][0]["finish_reason"]
            if leave_after is not None and len(text) >= leave_after: return None
    finally: await events.aclose()  # type: ignore[attr-defined]
    if reason is None: raise RuntimeError("the stream ended without a finish reason")
    return text


async def client(number: int, address: tuple[str, int], expected: dict[str, str], arguments: Any,
                 ends: float, result: LoadResult) -> None:
    """One client until `ends`."""
    random_ = random.Random(number)
    while time.monotonic() < ends:
        prompt = random_.choice(PROMPTS)
        # a token is two characters and more
        leave = random_.randint(1, 2 * arguments.tokens) if random_.random() < 1 / arguments.drop else None
        try: text = await whole(address, body(prompt, arguments.tokens), leave, result.first_s)
        except (RuntimeError, OSError, asyncio.IncompleteReadError) as error:
            result.failed.append(f"{type(error).__name__}: {error}")
            continue
        if text is None: result.dropped += 1
        elif text == expected[prompt]: result.finished += 1
        else: result.failed.append(f"another text than alone: {text[:60]!r}")


def body(prompt: str, tokens: int) -> dict[str, Any]:
    """The request of a client."""
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}


async def figures(address: tuple[str, int]) -> dict[str, float]:
    """The engine's metrics by name."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    return {name: float(value) for name, value in re.findall(r"^\w+:(\w+){[^}]*} (\S+)\r?$", text, re.M)}


def resident_mb(process: int) -> float:
    """Memory of a process that is in RAM."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * 4096 / 1e6


async def watch(address: tuple[str, int], process: int, result: LoadResult) -> None:
    """Fills the series, for ever."""
    begun = time.monotonic()
    while True:
        now = await figures(address)
        result.series.append((time.monotonic() - begun, resident_mb(process), now["num_requests_running"],
                              now["kv_cache_usage_perc"], now["generation_tokens_total"]))
        await asyncio.sleep(1)


async def measure(url: str, process: int, arguments: Any) -> dict[str, Any]:
    """The load, and what came of it."""
    parts = urlsplit(url)
    address, result = (parts.hostname or "127.0.0.1", parts.port or 80), LoadResult()
    expected = {prompt: await whole(address, body(prompt, arguments.tokens)) or "" for prompt in PROMPTS}
    before, begun = await figures(address), time.monotonic()
    watching = asyncio.ensure_future(watch(address, process, result))
    await asyncio.gather(*(client(number, address, expected, arguments, begun + arguments.seconds, result)
                           for number in range(arguments.clients)))
    seconds = time.monotonic() - begun
    watching.cancel()
    deadline = time.monotonic() + 5
    while (after := await figures(address))["num_requests_running"] and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    return report(arguments, result, seconds, before, after)


def report(arguments: Any, result: LoadResult, seconds: float, before: dict[str, float],
           after: dict[str, float]) -> dict[str, Any]:
    """The JSON object."""
    memory = [entry[1] for entry in result.series]
    quarter = max(1, len(memory) // 4)
    early = statistics.median(memory[quarter:2 * quarter] or memory)
    late = statistics.median(memory[-quarter:])
    tokens = after["generation_tokens_total"] - before["generation_tokens_total"]
    return {"clients": arguments.clients, "seconds": round(seconds, 2), "finished": result.finished,
            "dropped": result.dropped, "failed": len(result.failed),
            "errors": sorted(set(result.failed))[:10],
            "tokens_per_s": round(tokens / seconds, 1), "preemptions": after["num_preemptions_total"],
            "ttft_s": {name: round(value, 4) for name, value in zip(
                ("median", "p90", "p99"), percentiles(result.first_s, (50, 90, 99)), strict=True)},
            "running_after": after["num_requests_running"], "kv_used_after": after["kv_cache_usage_perc"],
            "resident_mb": {"second_quarter": round(early, 1), "last_quarter": round(late, 1),
                            "growth": round(late / early - 1, 4)},
            "series": [[round(value, 4) for value in entry] for entry in result.series]}


def percentiles(values: list[float], parts: tuple[int, ...]) -> list[float]:
    """Percentiles by the nearest rank; 0 of no values."""
    ordered = sorted(values) or [0.0]
    return [ordered[min(len(ordered) - 1, len(ordered) * part // 100)] for part in parts]


def plot(data: dict[str, Any], path: Path) -> None:
    """Memory, running requests, pages and tokens/s over time."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    at, memory, running, used, tokens = zip(*data["series"], strict=True)
    rate = [0.0, *((b - a) / (t - s) for a, b, s, t in zip(tokens, tokens[1:], at, at[1:], strict=False))]
    figure, axes = plt.subplots(4, 1, sharex=True, figsize=(8, 8), layout="constrained")
    for axis, values, name in zip(axes, (memory, running, [100 * u for u in used], rate),
                                  ("resident MB", "running", "KV used, %", "tokens/s"), strict=True):
        axis.plot(at, values, linewidth=1, color="#4a7c10")
        axis.set_ylabel(name)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].set_title(f"{data['clients']} clients: {data['finished']} answers read, {data['dropped']} left, "
                      f"{data['failed']} failed")
    axes[-1].set_xlabel("seconds")
    figure.savefig(path, dpi=130)


@contextmanager
def server(options: list[str]) -> Iterator[tuple[str, int]]:
    """`tinygrad-nv serve` on a free port: its address and process."""
    command = [sys.executable, "-m", "tinygrad_nv", "serve", "--port", "0", "--log-interval", "60", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        lines = (re.search(r" ready url=(\S+)", line) for line in process.stderr)
        found = next((match for match in lines if match), None)
        if found is None: sys.exit("the server did not start")
        # its log must not fill the pipe
        drained = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)
        try: yield found[1], process.pid
        finally: drained.terminate()
    finally:
        process.terminate()
        process.wait(60)


def main() -> int:
    """Runs the load; 1 when a client failed, a page leaked or memory grew."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200, help="at a time (default 200)")
    parser.add_argument("--seconds", type=float, default=600, help="(default 600)")
    parser.add_argument("--tokens", type=int, default=32, help="of an answer (default 32)")
    parser.add_argument("--drop", type=int, default=5, help="one request in so many is left (default 5)")
    parser.add_argument("--growth", type=float, default=0.02, help="of memory that is allowed (default 0.02)")
    parser.add_argument("--url", help="of a server that runs, with --pid (default: one is started)")
    parser.add_argument("--pid", type=int, help="of that server")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures go, with the series")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a picture of the series (matplotlib)")
    parser.add_argument("options", nargs="*", help="further ones of `tinygrad-nv serve`, after --")
    arguments = parser.parse_args()
    if arguments.url: data = asyncio.run(measure(arguments.url, arguments.pid, arguments))
    else:
        with server(arguments.options) as (url, process):
            data = asyncio.run(measure(url, process, arguments))
    data = {"machine": processor(), "commit": git("rev-parse", "--short", "HEAD"), **data}
    if arguments.json: arguments.json.write_text(json.dumps(data) + "\n")
    if arguments.plot: plot(data, arguments.plot)
    print(json.dumps({key: value for key, value in data.items() if key != "series"}, indent=1))
    leaked = data["running_after"] or data["kv_used_after"]
    return int(bool(data["failed"] or leaked or data["resident_mb"]["growth"] > arguments.growth))


if __name__ == "__main__": sys.exit(main())
