"""A model in several replicas: what test_data_parallel.py runs as a program of its own, since ranks share the
cores of their process."""
from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from enum import StrEnum
from typing import NoReturn

from tinygrad_nv.engine.async_engine import AsyncEngine
from tinygrad_nv.engine.executor import plan
from tinygrad_nv.engine.executor.replicas import Replicas
from tinygrad_nv.engine.llm import LLM
from tinygrad_nv.engine.outputs import Delta
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.structured_output.params import StructuredOutputsParams
from tinygrad_nv.engine.worker.model_runner import ModelRunner
from tinygrad_nv.errors import ConfigError, DistError, NVError, QueueFull, WeightError

PROMPTS = ["Once upon a time", "The little dog", "Lily and Tom went to", "One day", "A bird sat", "The end"]
GREEDY = SamplingParams(temperature=0, max_tokens=16)
HOW = (GREEDY, replace(GREEDY, temperature=0.8, seed=3, n=2, top_p=0.9),
       replace(GREEDY, max_tokens=6, prompt_logprobs=1, logprobs=2),
       replace(GREEDY, structured_outputs=StructuredOutputsParams(regex="[a-f ]{5}[0-9]{3}")),
       replace(GREEDY, stop=(" a",)))


def opened(directory: str, **more: object) -> LLM:
    return LLM(directory, max_num_seqs=2, max_num_batched_tokens=32, **more)     # type: ignore[arg-type]


def answers(llm: LLM, kinds: int) -> list[object]:
    """Tokens of many prompts at once, with so many kinds of parameters, which no batch may change."""
    found = llm.generate([prompt for _ in HOW[:kinds] for prompt in PROMPTS],
                         [how for how in HOW[:kinds] for _ in PROMPTS], use_tqdm=False)
    return [[(each.finish_reason, list(each.token_ids)) for each in one.outputs] for one in found]


def logprobs(llm: LLM) -> list[float]:
    """Log probabilities of a prompt's tokens."""
    one = llm.generate(PROMPTS[0], HOW[2], use_tqdm=False)[0]
    return [next(iter(each.values())).logprob for each in one.prompt_logprobs or () if each]


def several(llm: LLM) -> dict[str, object]:
    """What is of replicas alone: each has had work, and a request that is given up ends."""
    engine = llm.engine
    assert isinstance(engine, Replicas)
    stream = llm.stream("Once", replace(GREEDY, max_tokens=400, ignore_eos=True))
    next(stream)
    stream.close()
    end = time.monotonic() + 20
    while llm.metrics["running"] and time.monotonic() < end: time.sleep(0.02)
    engine.refresh_stats()
    stats = engine.replica_stats()
    for _ in range(2): llm.generate([PROMPTS[0] * 12] * 4, GREEDY, use_tqdm=False)
    engine.refresh_stats()
    hits = [each.prefix_hits for each in engine.replica_stats()]
    llm.reset_prefix_cache()
    llm.generate([PROMPTS[0] * 12] * 2, GREEDY, use_tqdm=False)
    refused = ""
    try: llm.sleep()
    except ConfigError as error: refused = error.found
    return {"tokens": [each.generated_tokens for each in stats], "running": [each.running for each in stats],
            "hits": hits, "more": llm.metrics["prefix_hits"] - sum(hits), "refused": refused,
            "drafted": [each.drafted for each in stats]}


class Color(StrEnum):
    """A type that other ranks do not have."""
    RED = "red"


def unreadable(llm: LLM) -> list[str]:
    """What becomes of requests that other replicas cannot read: the answer, or the error."""
    choice, found = StructuredOutputsParams(choice=[Color.RED, "blue"]), list[str]()
    for _ in range(llm.engine.max_seqs // 2):
        one, = llm.generate("Once", replace(GREEDY, structured_outputs=choice), use_tqdm=False)[0].outputs
        found.append(one.text if one.error is None else one.error.found)
    return found


async def limited(llm: LLM) -> tuple[int, str]:
    """How many requests of 6 at once a server refuses, and how."""
    engine, refused = AsyncEngine(llm), list[str]()
    await engine.start()
    async def answered(deltas: AsyncIterator[Delta]) -> None:
        async for _ in deltas: pass
    async with asyncio.TaskGroup() as tasks:
        for _ in range(6):
            try: tasks.create_task(answered(engine.generate("Once", GREEDY)))
            except QueueFull as error: refused.append(error.found)
            else: await asyncio.sleep(0)    # it is submitted; no output comes before the loop goes on
    await engine.stop()
    return len(refused), refused[0] if refused else ""


def lost(llm: LLM) -> tuple[str, bool]:
    """A replica that is killed while requests run: their error, and whether it came soon."""
    assert llm.ranks is not None
    assert llm.ranks.local is not None
    os.kill(llm.ranks.local.processes.members[0].process.pid, signal.SIGKILL)
    began, found = time.monotonic(), ""
    try:
        while True: llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    except DistError as error: found = error.found
    return found, time.monotonic() - began < 10


def failing(directory: str, size: str, when: str) -> None:
    """Of ranks of a launcher: rank 1 fails when it loads the model, or captures steps. A second one, for
    which there are no ranks any more."""
    def fail(*_: object, **more: object) -> NoReturn: raise WeightError("a tensor is missing", "all of them")
    if os.environ["RANK"] == "1":
        if when == "load": plan.load_weights = fail
        else: ModelRunner.warm_up = fail    # type: ignore[method-assign]
    for _ in range(2):
        began = time.monotonic()
        try:
            with opened(directory, **{size: 2}) as llm: llm.capture(lambda done, total: None)
        except NVError as error: print(f"{type(error).__name__}: {error.found}", flush=True)
        print("quick:", time.monotonic() - began < 60, flush=True)


def main() -> None:
    directory, how = sys.argv[1:3]
    if how == "failing": return failing(directory, *sys.argv[3:])
    with opened(directory, **json.loads(how)) as llm:
        kinds = int(sys.argv[3])
        more = ({"logprobs": logprobs(llm)} if kinds > 2 else
                {"logprobs": [], "unreadable": unreadable(llm), "limited": asyncio.run(limited(llm))})
        print(json.dumps({**more, "answers": answers(llm, kinds), "several": several(llm),
                          "lost": lost(llm)}), flush=True)


if __name__ == "__main__": main()
