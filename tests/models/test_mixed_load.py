"""Many clients of everything at once, of which one in five leaves: no greedy token is changed by what else
runs, and nothing is left behind.

Clients ask over HTTP for completions with adapters and without, with log probabilities of their prompts,
several answers, beams, structured output and penalties, sampled ones in between; wrong ones are refused.
Beside them run beam searches of `LLM`, and an embedding server of the same process. What is right is what
each gives alone.
"""
from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support.models.lora_case import adapter, prompts
from tests.support.server.serve_case import Live, live, llm_service, until
from tinygrad_nv import LLM, BeamSearchParams
from tinygrad_nv.engine.worker.input_buffer import BatchShape
from tinygrad_nv.server.adapters import AdapterNames

CONFIGS: list[dict[str, Any]] = [{"r": 8, "target_modules": "all-linear"},
                                 {"r": 4, "target_modules": ["q_proj", "v_proj"]},
                                 {"r": 3, "target_modules": ["o_proj", "gate_proj"]}]
# without a stream, and with few tokens: each round computes the last page of a beam again
BEAM_FIELDS: dict[str, Any] = {"use_beam_search": True, "stream": False, "max_tokens": 5}
# what clients ask for besides their prompt
KINDS: tuple[dict[str, Any], ...] = (
    {"model": "tales"}, {"model": "a0"}, {"model": "a1"}, {"model": "a2"}, {"model": "a1", "logprobs": 2},
    {"echo": True, "logprobs": 1}, {"model": "a2", "echo": True, "logprobs": 0}, {"n": 2},
    {"repetition_penalty": 1.3}, {"model": "a0", "n": 3, **BEAM_FIELDS},
    {"structured_outputs": {"regex": "(a|b|c| ){6}"}}, {"bad_words": ["e"]})
SAMPLED: dict[str, Any] = {"temperature": 1.0, "n": 2, "top_p": 0.9}
WRONG: tuple[dict[str, Any], ...] = ({"model": "a9"}, {"logprobs": 99}, {"temperature": -1})
BEAMS = BeamSearchParams(beam_width=3, max_tokens=5)


@dataclass
class Seen:
    """What clients saw."""
    whole: int = 0
    left: int = 0
    refused: int = 0
    embedded: int = 0
    searched: int = 0
    errors: list[str] = field(default_factory=list)


@dataclass
class Load:
    """The servers, and what is right: by kind and prompt the tokens, by prompt the vector and the beams."""
    generation: Live
    embedding: Live
    llm: LLM
    tokens: int
    prompts: list[list[int]]
    alone: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    vectors: list[np.ndarray] = field(default_factory=list)
    beams: list[list[tuple[int, ...]]] = field(default_factory=list)


def body(kind: dict[str, Any], prompt: list[int], tokens: int) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
            "return_token_ids": True, **kind}


async def ask(client: httpx.AsyncClient, asked: dict[str, Any], leave_after: int | None = None
              ) -> list[Any] | None:
    """Tokens of each answer, and log probabilities of the prompt where they are asked for; None of a request
    that is left after so many chunks, or soon where there is no stream."""
    if leave_after == 0 or not asked["stream"]:
        options = {} if leave_after is None else {"timeout": 0.02}
        try: made = await client.post("/v1/completions", json={**asked, "stream": False}, **options)
        except httpx.TimeoutException: return None
        if made.status_code != 200: raise RuntimeError(made.text)
        if leave_after is not None: return None
        return [*(choice["token_ids"] for choice in made.json()["choices"]), []]
    answers: dict[int, list[int]] = {}
    values: list[float] = []
    async with client.stream("POST", "/v1/completions", json=asked) as answer:
        if answer.status_code != 200: raise RuntimeError((await answer.aread()).decode())
        count = 0
        async for line in answer.aiter_lines():
            if line == "data: [DONE]": return [*(answers[at] for at in sorted(answers)), values]
            if not line: continue
            data = json.loads(line.removeprefix("data: "))
            if "error" in data: raise RuntimeError(line)
            for choice in data["choices"]:
                answers.setdefault(choice["index"], []).extend(choice["token_ids"])
                if asked.get("echo") and not values and choice["logprobs"]:
                    found = choice["logprobs"]["token_logprobs"][1:len(asked["prompt"])]
                    values = [round(each, 3) for each in found]
            count += 1
            if leave_after is not None and count >= leave_after: return None
    raise RuntimeError("the stream ended without [DONE]")


async def embed(client: httpx.AsyncClient, prompt: list[int]) -> np.ndarray:
    answer = await client.post("/v1/embeddings", json={"input": prompt})
    if answer.status_code != 200: raise RuntimeError(answer.text)
    return np.array(answer.json()["data"][0]["embedding"])


def beam(llm: LLM, prompt: list[int]) -> list[tuple[int, ...]]:
    [made] = llm.beam_search([{"prompt_token_ids": prompt}], BEAMS)
    return [tuple(each.tokens) for each in made.sequences]


async def one_client(number: int, load: Load, seen: Seen, http: tuple[httpx.AsyncClient, httpx.AsyncClient],
                     rounds: int) -> None:
    """A client of its own mind, the same in each run."""
    mind, (client, embeddings) = random.Random(number), http
    for _ in range(rounds):
        at, kind = mind.randrange(len(load.prompts)), mind.randrange(len(KINDS))
        asked = body(KINDS[kind], load.prompts[at], load.tokens)
        try:
            what = mind.random()
            if what < 0.05:
                refused = await client.post("/v1/completions", json=asked | mind.choice(WRONG))
                assert refused.status_code in (400, 404), refused.text
                seen.refused += 1
            elif what < 0.15:
                vector = await embed(embeddings, load.prompts[at])
                assert np.abs(vector - load.vectors[at]).max() <= 1e-6
                seen.embedded += 1
            elif what < 0.25: await ask(client, body(SAMPLED, load.prompts[at], load.tokens))
            else:
                found = await ask(client, asked, mind.randrange(load.tokens) if number % 5 == 0 else None)
                assert found in (None, load.alone[kind, at]), (KINDS[kind], at)
                seen.whole, seen.left = seen.whole + (found is not None), seen.left + (found is None)
        except (AssertionError, RuntimeError, httpx.HTTPError) as error:
            seen.errors.append(f"{type(error).__name__}: {error}"[:300])


def run(load: Load, clients: int, rounds: int, searches: int) -> Seen:
    """All clients at once, and `searches` beam searches beside them."""
    seen = Seen()

    def search() -> None:
        for number in range(searches):
            at = number % len(load.prompts)
            if beam(load.llm, load.prompts[at]) != load.beams[at]: seen.errors.append(f"other beams of {at}")
            seen.searched += 1

    async def main() -> None:
        options: dict[str, Any] = {"timeout": 120, "limits": httpx.Limits(max_connections=None)}
        async with httpx.AsyncClient(base_url=load.generation.url, **options) as one, \
                httpx.AsyncClient(base_url=load.embedding.url, **options) as other:
            await asyncio.gather(*(one_client(number, load, seen, (one, other), rounds)
                                   for number in range(clients)))
    beside = threading.Thread(target=search)
    beside.start()
    asyncio.run(main())
    beside.join()
    return seen


def opened(tiny: Path, folder: Path, tokens: int, count: int, one_step: bool,
           **options: Any) -> Iterator[Load]:
    """The servers, with what each request of `count` prompts gives alone."""
    with LLM(tiny, device="CPU", enable_lora=True, max_loras=2, max_cpu_loras=2, max_model_len=64,
             **options) as llm, LLM(tiny, device="CPU", task="embed", max_model_len=64,
                                    max_num_batched_tokens=64) as embedder:
        assert llm.adapters is not None
        if one_step:    # the largest has room for every batch, with adapters or without
            shapes = [job for job in llm.runner.jobs[0] if isinstance(job, BatchShape)]
            most = max(each.samples for each in shapes)
            llm.runner.warm_up(shapes=[each for each in shapes if each.samples == most])
            llm.runner.warm = True
        names = AdapterNames(llm.adapters.cache, ("tales",))
        for number, config in enumerate(CONFIGS):
            names.add(f"a{number}", str(adapter(tiny, folder / f"a{number}", number, **config)))
        with live(llm_service(llm, adapters=names)) as generation, live(llm_service(embedder)) as embedding:
            load = Load(generation, embedding, llm, tokens, prompts(count, 3, 4, 16))

            async def alone() -> None:
                async with httpx.AsyncClient(base_url=generation.url, timeout=120) as one, \
                        httpx.AsyncClient(base_url=embedding.url, timeout=120) as other:
                    for at, prompt in enumerate(load.prompts):
                        for number, kind in enumerate(KINDS):
                            made = await ask(one, body(kind, prompt, tokens))
                            assert made is not None
                            load.alone[number, at] = made
                        load.vectors.append(await embed(other, prompt))
            asyncio.run(alone())
            load.beams = [beam(llm, prompt) for prompt in load.prompts]
            yield load


@pytest.fixture(scope="module")
def load(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    yield from opened(tiny, tmp_path_factory.mktemp("adapters"), 14, 2, True, max_num_seqs=4,
                      max_num_batched_tokens=16, num_pages=5)


def handles() -> int:
    """Open files and sockets, but the pipes and the cache of tinygrad's compile workers."""
    found = []
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError): found.append(os.readlink(f"/proc/self/fd/{each}"))
    return sum("pipe:" not in each and "cache.db" not in each for each in found)


def before_load(load: Load) -> int:
    """Handles, connections for metrics among them."""
    for server in (load.generation, load.embedding): server.http.get("/metrics")
    return handles()


def require_nothing_left(load: Load, before: int) -> None:
    """Neither requests, sequences, slots, pages, adapters' slots, nor file handles."""
    core = load.llm.core
    for server in (load.generation, load.embedding):
        until(lambda server=server: server.service.active == 0)
        text = server.http.get("/metrics").text
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert re.findall(rf"^tinygrad_nv:{name}{{.*}} (\S+)$", text, re.M) == ["0.0"], name
    until(lambda: not core.has_unfinished)
    load.llm.engine.join(20)
    scheduler = core.scheduler
    assert (core._requests, scheduler.running, scheduler.num_waiting, scheduler.num_new) == ({}, [], 0, 0)
    assert len(scheduler._slots) == core.config.max_seqs
    assert (core.pool.stats().in_use, scheduler.adapters.in_use) == (0, 0)
    assert load.llm.engine._clients == load.generation.service.engine._streams == {}  # type: ignore[attr-defined]
    until(lambda: handles() <= before)


def test_nothing_changes_and_nothing_is_left(load: Load):
    assert len({str(each) for each in load.alone.values()}) > 3 * len(load.prompts), "kinds differ"
    before, preempted = before_load(load), load.llm.core.stats().preempted
    seen = run(load, 40, 1, 2)
    assert seen.errors == []
    assert seen.searched == 2
    assert min(seen.whole, seen.left, seen.refused, seen.embedded) >= 1, seen
    assert load.llm.core.stats().preempted > preempted
    require_nothing_left(load, before)


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    {"max_num_seqs": 16, "max_num_batched_tokens": 64, "num_pages": 24},
    {"max_num_seqs": 8, "max_num_batched_tokens": 32, "num_pages": 12, "speculative": "ngram:3",
     "swap_space": 8 / 1024}], ids=["many", "drafts and host pages"])
def test_200_clients_of_everything(tiny: Path, tmp_path: Path, options: dict[str, Any]):
    """Each asks ten times. Steps are captured as they come."""
    for load in opened(tiny, tmp_path, 24, 4, False, **options):
        run(load, 40, 1, 2)
        before, then = before_load(load), load.llm.core.stats()
        seen = run(load, 200, 10, 40)
        now = load.llm.core.stats()
        print(seen, now)
        assert seen.errors == []
        assert seen.searched == 40
        assert min(seen.whole // 1000, seen.left // 100, seen.refused // 50, seen.embedded // 100) >= 1, seen
        assert now.preempted > then.preempted
        assert now.failed_steps == 0
        require_nothing_left(load, before)
