"""Servers under everything at once, for hours: adapters, structured output, drafts, samples, embeddings, and
clients that leave.

    python bench/serving/soak.py --hours 1 --json soak.json --plot soak.png

Clients ask what soak_requests.py has, of the three servers in soak_servers.py, with few pages and two slots
for three adapters. What each case gives alone is known before the load. Checked:

    equal       an answer that is read to its end is the one that its case gives alone: tokens, text, calls,
                and with --deterministic (default) log probabilities and what is sampled by a seed
    whole       every request ends within `LIMIT_S`, and none fails that should not
    idle        every `PAUSE_S` all clients wait: nothing runs, no page is in use, no descriptor and no thread
                is there that was not there before
    memory      resident MB do not grow by more than `--slope` a minute (Theil and Sen, after a warm-up)
    counted     /metrics has counted at least the tokens and the requests that clients saw

Exits with 1 if one of them does not hold. `--only greedy --plain` is a plain load.
"""
from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.lib.measure import git, processor, table
from bench.serving.soak_requests import WRONG, Answer, Case, cases, vary
from bench.serving.soak_servers import Running, ask, figures, servers

LIMIT_S = 120.0         # for one request
PAUSE_S = 60.0          # between two looks at idle servers
DRAIN_S = 10.0          # until a server whose clients are gone is idle
WARM_UP = 0.25          # of the load, whose memory does not count, and in which threads may start
POOL_THREADS = 8        # that a server's pools start when work first comes together: a leak has more
IDLE = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


@dataclass
class Load:
    """The servers, what each case gives alone, and what came of the load. `series` of each server has
    seconds, resident_mb, running, kv_used, tokens and preemptions every other second; `held` is what it may
    hold at a pause: descriptors and threads."""
    running: dict[str, Running]
    exact: bool
    alone: dict[Case, Answer] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    by_kind: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    series: dict[str, list[tuple[float, ...]]] = field(default_factory=dict)
    held: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    active: int = 0
    open: asyncio.Event = field(default_factory=asyncio.Event)

    def fault(self, what: str) -> None:
        """Notes it."""
        self.faults.append(what)
        print(f"FAULT {what[:500]}", file=sys.stderr, flush=True)


# **** clients ****

async def read(load: Load, case: Case, body: dict[str, Any], leave_after: int | None = None) -> Answer | None:
    """The answer; None of a request that is left after so many characters, or, where nothing is streamed,
    after so many milliseconds."""
    answer, begun = Answer(), time.monotonic()
    events = ask(load.running[case.kind.server].address, case.kind.path, body)
    limit = LIMIT_S if leave_after is None or body.get("stream") else leave_after / 1000
    try:
        async with asyncio.timeout(limit):
            async for event in events:
                if not answer.choices and body.get("stream"): load.first_s.append(time.monotonic() - begun)
                answer.add(event)
                if leave_after is not None and answer.length >= leave_after: return None
    except TimeoutError:
        if limit < LIMIT_S: return None
        raise RuntimeError(f"no answer within {LIMIT_S:.0f} s") from None
    finally: await events.aclose()  # type: ignore[attr-defined]
    return answer


async def expect_refusal(load: Load, address: tuple[str, int], wrong: dict[str, Any]) -> None:
    """A request that is wrong must be refused."""
    try:
        async for _ in ask(address, "/v1/completions", {"prompt": "One", "max_tokens": 4, **wrong}):
            load.fault(f"{str(wrong)[:80]} was not refused")
    except RuntimeError as error:
        if not str(error).startswith("4"): raise
    load.counts["refused"] += 1


async def client(number: int, load: Load, ends: float, leave: float) -> None:
    """One client until `ends`, the same in each run."""
    random_, all_cases = random.Random(number), list(load.alone)
    while await load.open.wait() and time.monotonic() < ends:
        case, chance = random_.choice(all_cases), random_.random()
        address, body = load.running[case.kind.server].address, vary(case, random_)
        load.active += 1
        try:
            if chance < leave / 10 and case.kind.server != "embed":
                await expect_refusal(load, address, random_.choice(WRONG))
            elif chance < leave / 5:
                async for _ in ask(address, case.kind.path, body, half=True): pass
                load.counts["left"] += 1
            else: await one_answer(load, case, body, random_.randint(0, 60) if chance < leave else None)
        except (RuntimeError, OSError, asyncio.IncompleteReadError, json.JSONDecodeError) as error:
            load.fault(f"{case.kind.name}: {type(error).__name__}: {error}; {json.dumps(body)}")
        finally: load.active -= 1


async def one_answer(load: Load, case: Case, body: dict[str, Any], leave_after: int | None) -> None:
    """An answer is read to its end and compared, or left."""
    answer = await read(load, case, body, leave_after)
    if answer is None:
        load.counts["left"] += 1
        return
    load.counts["finished"] += 1
    load.by_kind[case.kind.name] += 1
    load.tokens[case.kind.server] += answer.num_tokens
    if case.kind.sampled and not load.exact: return
    if found := answer.difference(load.alone[case], load.exact):
        load.counts["differing"] += 1
        load.fault(f"{case.kind.name}: another answer than alone: {found}; {json.dumps(body)}")


# **** what is watched ****

async def watch(load: Load, begun: float) -> None:
    """Fills the series, for ever."""
    while True:
        for name, each in load.running.items():
            now = await figures(each.address)
            load.series.setdefault(name, []).append(
                (round(time.monotonic() - begun, 2), round(each.resident_mb, 3), now["num_requests_running"],
                 round(now["kv_cache_usage_perc"], 4), now["generation_tokens_total"],
                 now["num_preemptions_total"]))
        await asyncio.sleep(2)


async def pause(load: Load, warming: bool = False) -> None:
    """Has all clients wait, and looks at idle servers. What they hold while `warming` is what they may hold.
    """
    load.open.clear()
    deadline = time.monotonic() + LIMIT_S + DRAIN_S
    while load.active and time.monotonic() < deadline: await asyncio.sleep(0.02)
    for name, each in load.running.items():
        deadline = time.monotonic() + DRAIN_S
        while busy := {field: value for field, value in (await figures(each.address)).items()
                       if field in IDLE and value}:
            if time.monotonic() > deadline:
                load.fault(f"{name} is not idle: {busy}")
                break
            await asyncio.sleep(0.05)
        if warming: load.held[name] |= each.holds + Counter(threads=POOL_THREADS)
        while more := each.holds - load.held[name]:
            if time.monotonic() > deadline:
                load.fault(f"{name} holds {dict(more)} more than before")
                break
            await asyncio.sleep(0.1)
    load.counts["pauses"] += 1
    load.open.set()


def slope(series: list[tuple[float, ...]]) -> float:
    """MB a minute by which resident memory grows: the median of the slopes between all samples after the
    warm-up."""
    kept = np.array([each[:2] for each in series if each[0] >= WARM_UP * series[-1][0]])
    kept = kept[::-(-len(kept) // 800)]
    at, memory = kept.T
    first, second = np.triu_indices(len(kept), 1)
    if not len(first): return 0.0
    return float(np.median((memory[second] - memory[first]) / (at[second] - at[first]))) * 60


# **** the load ****

async def run(load: Load, chosen: Iterable[Case], arguments: Any) -> dict[str, Any]:
    """The load, and what came of it."""
    for case in chosen:
        answer = await read(load, case, {**case.body, "stream": case.kind.streams})
        assert answer is not None
        load.alone[case] = answer
    load.first_s.clear()
    load.open.set()
    await warm_up(load, arguments)
    await pause(load, warming=True)
    before = {name: await figures(each.address) for name, each in load.running.items()}
    for each in (load.counts, load.by_kind, load.tokens, load.first_s): each.clear()
    begun = time.monotonic()
    ends, watching = begun + arguments.seconds, asyncio.ensure_future(watch(load, begun))
    clients = asyncio.gather(*(client(number, load, ends, arguments.leave)
                               for number in range(arguments.clients)))
    while not clients.done():
        await asyncio.wait([clients], timeout=min(PAUSE_S, max(1.0, arguments.seconds / 5)))
        if clients.done() or time.monotonic() > ends: continue
        await pause(load, time.monotonic() < begun + WARM_UP * arguments.seconds)
        print(progress(load, time.monotonic() - begun), flush=True)
    await clients
    seconds = time.monotonic() - begun
    watching.cancel()
    await pause(load)
    after = {name: await figures(each.address) for name, each in load.running.items()}
    return report(load, arguments, seconds, before, after)


async def warm_up(load: Load, arguments: Any) -> None:
    """A load until servers have captured all their steps, whose memory does not count."""
    ends = time.monotonic() + arguments.warm_up
    await asyncio.gather(*(client(-1 - number, load, ends, arguments.leave)
                           for number in range(arguments.clients)))


def progress(load: Load, seconds: float) -> str:
    """One line."""
    memory = " ".join(f"{name}={series[-1][1]:.1f}" for name, series in load.series.items())
    return (f"seconds={seconds:.0f} finished={load.counts['finished']} left={load.counts['left']} "
            f"refused={load.counts['refused']} faults={len(load.faults)} resident_mb: {memory}")


def report(load: Load, arguments: Any, seconds: float, before: dict[str, dict[str, float]],
           after: dict[str, dict[str, float]]) -> dict[str, Any]:
    """The JSON object; what does not hold is among its faults."""
    by_server, generated = dict[str, dict[str, Any]](), 0.0
    for name, series in load.series.items():
        def increase(field: str, name: str = name) -> float: return after[name][field] - before[name][field]
        tokens, holds = increase("generation_tokens_total"), load.running[name].holds
        generated += tokens
        growth = round(slope(series), 4)
        if tokens < load.tokens[name]:
            load.fault(f"{name} counted {tokens} tokens, clients read {load.tokens[name]}")
        if growth > arguments.slope: load.fault(f"{name}: resident memory grows by {growth} MB a minute")
        by_server[name] = {
            "tokens": tokens, "preemptions": increase("num_preemptions_total"),
            "prefix_hits": increase("prefix_cache_hits_total"),
            "http_requests": increase("http_requests_total"),
            "compilations_after_ready": after[name]["compilations_after_ready_total"],
            "resident_mb": [series[0][1], series[-1][1]], "slope_mb_per_min": growth,
            "descriptors": holds.total() - holds["threads"], "threads": holds["threads"]}
    requests = sum(each["http_requests"] for each in by_server.values())
    if requests < load.counts["finished"] + load.counts["refused"]:
        load.fault(f"servers counted {requests} requests, clients ended {load.counts['finished']}")
    ordered = sorted(load.first_s) or [0.0]
    return {"clients": arguments.clients, "seconds": round(seconds, 1), "deterministic": load.exact,
            "finished": load.counts["finished"], "left": load.counts["left"],
            "refused": load.counts["refused"], "differing": load.counts["differing"],
            "pauses": load.counts["pauses"], "failed": len(load.faults) - load.counts["differing"],
            "faults": load.faults[:20], "answers_per_s": round(load.counts["finished"] / seconds, 2),
            "tokens_per_s": round(generated / seconds, 1),
            "first_token_s": {f"p{part}": round(ordered[len(ordered) * part // 100], 4)
                              for part in (50, 90, 99)},
            "servers": by_server, "kinds": dict(load.by_kind.most_common()), "series": load.series}


def show(data: dict[str, Any]) -> None:
    """Prints the tables."""
    print(table(("server", "tokens", "preempted", "prefix hits", "MB", "MB a minute", "files", "threads"),
                [(name, f"{each['tokens']:,.0f}", f"{each['preemptions']:.0f}", f"{each['prefix_hits']:,.0f}",
                  f"{each['resident_mb'][0]:.1f} … {each['resident_mb'][1]:.1f}",
                  f"{each['slope_mb_per_min']:+.3f}", str(each["descriptors"]), str(each["threads"]))
                 for name, each in data["servers"].items()]))
    print(table(("kind", "answers"), [(name, str(count)) for name, count in data["kinds"].items()]))
    print(f"{data['clients']} clients, {data['seconds']} s: {data['finished']} answers read, {data['left']} "
          f"left, {data['refused']} refused, {data['differing']} differing, {data['failed']} failed, "
          f"{data['answers_per_s']} answers and {data['tokens_per_s']} tokens a second")
    for each in data["faults"]: print(f"FAULT {each}")


def plot(data: dict[str, Any], path: Path) -> None:
    """Memory, running sequences, pages and tokens a second over time, of each server."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(4, 1, sharex=True, figsize=(8, 8), layout="constrained")
    for name, series in data["series"].items():
        at, memory, running, used, tokens, _ = np.array(series).T
        rate = np.diff(tokens, prepend=tokens[0]) / np.diff(at, prepend=at[0] - 2)
        for axis, values in zip(axes, (memory, running, 100 * used, rate), strict=True):
            axis.plot(at / 60, values, linewidth=1, label=name)
    for axis, name in zip(axes, ("resident MB", "running", "KV used, %", "tokens/s"), strict=True):
        axis.set_ylabel(name)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend()
    axes[0].set_title(f"{data['clients']} clients: {data['finished']} answers read, {data['left']} left, "
                      f"{data['differing']} differing, {data['failed']} failed")
    axes[-1].set_xlabel("minutes")
    figure.savefig(path, dpi=130)


def main() -> int:
    """Runs the load; 1 if something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    time_ = parser.add_mutually_exclusive_group()
    time_.add_argument("--hours", type=float, help="(default 1)")
    time_.add_argument("--seconds", type=float, help="instead")
    parser.add_argument("--clients", type=int, default=24, help="at a time (default 24)")
    parser.add_argument("--leave", type=float, default=0.2, help="share of requests left (default 0.2)")
    parser.add_argument("--warm-up", type=float, default=90, help="seconds of load before (default 90)")
    parser.add_argument("--slope", type=float, default=0.2, help="MB a minute that memory may grow (0.2)")
    parser.add_argument("--only", nargs="+", default=(), metavar="KIND", help="kinds that begin with this")
    parser.add_argument("--plain", action="store_true", help="servers without --deterministic")
    parser.add_argument("--tree", type=Path, metavar="DIR", help="sources of the servers (default: these)")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="where the servers' logs go")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures go, with the series")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a picture of the series (matplotlib)")
    parser.add_argument("options", nargs="*", help="further ones of `tinygrad-nv serve`, after --")
    arguments = parser.parse_args()
    arguments.seconds = arguments.seconds or 3600 * (arguments.hours or 1.0)
    chosen = cases(arguments.only)
    names = {case.kind.server for case in chosen}
    options = [*([] if arguments.plain else ["--deterministic"]), *arguments.options]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))    # with its servers
    with servers(names, options, arguments.tree, arguments.logs) as running:
        load = Load(running, not arguments.plain)
        try: data = asyncio.run(run(load, chosen, arguments))
        except OSError as error: sys.exit(f"a server does not answer: {error!r}; faults: {load.faults[:20]}")
    data = {"machine": processor(), "commit": git("rev-parse", "--short", "HEAD"), **data}
    if arguments.json: arguments.json.write_text(json.dumps(data) + "\n")
    if arguments.plot: plot(data, arguments.plot)
    show(data)
    return int(bool(data["faults"]))


if __name__ == "__main__": sys.exit(main())
