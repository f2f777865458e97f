"""Continuous batching changes no token: requests of all kinds that come at random between steps, share
pages, lose them, are cut into chunks, forked and cancelled, give exactly the tokens that each gives
alone. Families with experts, alternating windows, sinks, chunks or layers without rope, served together:
few pages, so that requests are preempted, chunks of prompts, shared prefixes. Each gets the tokens that
it gets alone."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinygrad_nv.cli import DEFAULT_MODEL
from tinygrad_nv.engine.core import EngineCore
from tinygrad_nv.engine.engine_config import EngineConfig
from tinygrad_nv.engine.llm import LLM
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.scheduling.request import Request
from tinygrad_nv.engine.scheduling.scheduler_output import SamplerOutput, SchedulerOutput
from tinygrad_nv.engine.worker.model_runner import ModelRunner
from tinygrad_nv.kvcache.pool import PagePool, PagePoolStats

SEQS, LENGTH, PAGES, HOST_PAGES = 8, 160, 14, 4
Tokens = dict[tuple[str, int], list[int]]


class Watched:
    """A device whose batches are kept."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner, self.batches = runner, list[SchedulerOutput]()

    def __getattr__(self, name: str) -> object: return getattr(self.runner, name)

    def launch(self, batch: SchedulerOutput) -> Future[SamplerOutput]:
        self.batches.append(batch)
        return self.runner.launch(batch)


@dataclass
class Run:
    """What came of some requests, and what happened to them."""
    tokens: Tokens = field(default_factory=dict)
    prompts: dict[str, list[float]] = field(default_factory=dict)
    reasons: dict[tuple[str, int], str] = field(default_factory=dict)
    batches: Sequence[SchedulerOutput] = ()
    preempted: int = 0
    offloaded: int = 0
    failed: int = 0
    pages: PagePoolStats | None = None


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    made = LLM(DEFAULT_MODEL, device="CPU", max_model_len=LENGTH, max_num_seqs=SEQS, num_pages=PAGES,
               max_num_batched_tokens=32, swap_space=HOST_PAGES * 32768 / 2**30)
    assert made.core.pool.stats().host_total == HOST_PAGES
    yield made
    made.close()


def drive(llm: LLM, requests: Sequence[Request], arrivals: Sequence[int], cancelled: dict[str, int],
          config: EngineConfig, pool: PagePool) -> Run:
    """Runs requests on a core of their own. `arrivals` are the steps before which they come; some are
    `cancelled` when their first answer has so many tokens, 0: one step after they came."""
    device, run, step = Watched(llm.runner), Run(), 0
    core = EngineCore(device, pool, config)
    coming = sorted(zip(arrivals, range(len(requests)), strict=True), reverse=True)
    while coming or core.has_unfinished:
        if not core.has_unfinished: step = max(step, coming[-1][0])
        while coming and coming[-1][0] <= step:
            request = requests[coming.pop()[1]]
            core.add(request)
            run.tokens |= {(request.id, index): [] for index in range(request.params.n)}
        for chosen in core.step():
            assert chosen.error is None
            run.tokens[chosen.request, chosen.index] += chosen.tokens
            if chosen.prompt_logprobs: run.prompts[chosen.request] = [
                each.chosen for each in chosen.prompt_logprobs]
            if chosen.finish_reason: run.reasons[chosen.request, chosen.index] = chosen.finish_reason
        for name, count in list(cancelled.items()):
            if (name, 0) in run.tokens and len(run.tokens[name, 0]) >= count: core.abort(name)
        step += 1
    stats = core.stats()
    run.batches, run.preempted, run.offloaded = device.batches, stats.preempted, stats.offloaded
    run.failed, run.pages = stats.failed_steps, pool.stats()
    assert run.pages.in_use == run.pages.host_in_use == 0
    return run


def alone(llm: LLM, requests: Sequence[Request]) -> Run:
    """Each by itself, with all pages, nothing shared and every step looked at."""
    config = EngineConfig(max_seqs=SEQS, max_batched_tokens=128, max_len=LENGTH, overlap=False)
    made = Run()
    for request in requests:
        run = drive(llm, [request], [0], {}, config, PagePool(PAGES, 16, sharing=False))
        made.tokens |= run.tokens
        made.prompts |= run.prompts
    return made


def some(count: int, seed: int, shared: int) -> list[Request]:
    """Requests of mixed lengths, some of which begin alike."""
    rng = np.random.default_rng(seed)
    def ids(length: int) -> list[int]: return [int(i) for i in rng.integers(5, 2048, length)]
    openings = [ids(length) for length in rng.integers(17, 50, shared)]
    made = []
    for at in range(count):
        prompt = [*(openings[rng.integers(shared)] if rng.random() < 0.6 else []), *ids(rng.integers(1, 30))]
        draws = [{"temperature": 0.0}] * 3 + [{"temperature": 0.8}, {"temperature": 1.2, "top_p": 0.9},
                                              {"temperature": 1.0, "top_k": 40, "repetition_penalty": 1.2}]
        params = SamplingParams(**draws[rng.integers(len(draws))], seed=int(rng.integers(1 << 40)),
                                n=int(rng.choice([1, 1, 1, 1, 2, 3])), ignore_eos=True,
                                max_tokens=int(rng.choice([3, 20, 60, 80])),
                                prompt_logprobs=0 if at % 5 == 4 else None,
                                # so that some end at unpredictable positions
                                stop_token_ids=tuple(range(5, 100)) if rng.random() < 0.3 else ())
        made.append(Request(f"r{at}", prompt, params, arrival_s=float(at)))
    return made


def check(llm: LLM, count: int, seed: int) -> None:
    """Batched as alone, and everything that may disturb it did."""
    rng, requests = np.random.default_rng(seed), some(count, seed, shared=max(2, count // 12))
    arrivals = np.cumsum(rng.exponential(1.0, count)).astype(int).tolist()
    cancelled = {each.id: int(rng.choice([0, 1, 2, 6, 20])) for each in requests if rng.random() < 0.15}
    config = EngineConfig(max_seqs=SEQS, max_batched_tokens=24, max_len=LENGTH)
    run = drive(llm, requests, arrivals, cancelled, config, PagePool(PAGES, 16, host_pages=HOST_PAGES))
    expected = alone(llm, requests)
    for name, values in run.prompts.items():
        assert values == pytest.approx(expected.prompts[name], abs=1e-4), name
    assert len(run.prompts) >= count // 8
    for name, tokens in expected.tokens.items():
        got = run.tokens[name]
        if run.reasons[name] == "abort": assert got == tokens[:len(got)], name
        else: assert got == tokens, name
    kinds = {False: 0, True: 0}     # greedy or not
    for each in requests:
        survived = [run.reasons[each.id, index] != "abort" for index in range(each.params.n)]
        kinds[each.params.temperature > 0] += sum(survived)
    assert min(kinds.values()) >= count // 6
    # **** it happened ****
    seqs = [work for batch in run.batches for work in batch.seqs]
    assert 0 < run.offloaded < run.preempted, "pages went to the host, and were computed again"
    assert run.failed == 0
    assert run.pages is not None
    assert run.pages.hits > 0
    assert run.pages.evictions > 0
    assert run.pages.copies > 0, "written by one of n, shared by others"
    assert run.pages.restores > 0
    aborted = [name for name, reason in run.reasons.items() if reason == "abort"]
    assert any(run.tokens[name] for name in aborted), "cancelled in the middle"
    assert sum(work.num_tokens > 1 and not work.samples for work in seqs) > 0, "chunks"
    assert sum(not work.tokens for work in seqs) > len(seqs) / 4, "scheduled before the token was known"
    mixed = [{seq.num_tokens > 1 for seq in batch.seqs} == {False, True} for batch in run.batches]
    assert any(mixed), "mixed"
    assert max(batch.num_tokens for batch in run.batches) > SEQS
    assert "stop" in run.reasons.values()
    assert "length" in run.reasons.values()


@pytest.mark.slow
def test_64_requests_together_give_the_tokens_of_each_alone(llm: LLM):
    check(llm, 64, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 20))
def test_so_do_others(llm: LLM, seed: int):
    check(llm, 64, seed)


GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
RANDOM = np.random.default_rng(5)
PREFIX = [int(i) for i in RANDOM.integers(3, 320, 40)]
PROMPTS = [[*PREFIX[:shared], *(int(i) for i in RANDOM.integers(3, 320, own))]
           for shared, own in ((0, 5), (40, 3), (40, 30), (0, 61), (32, 1), (0, 17))]


# pages so few that sequences are preempted, tokens of a page, and the windows of the groups of layers
PLAIN, ALTERNATING = (14, 16, (None,)), (33, 8, (16, None, 16))
CASES = {"qwen2-moe": PLAIN, "deepseek-v3": PLAIN, "mixtral": PLAIN, "qwen3-moe": PLAIN, "olmoe": PLAIN,
         "smollm3": PLAIN, "phi4": PLAIN, "deepseek-v2": PLAIN, "deepseek-v2-lite": PLAIN,
         "deepseek-v3-halves": PLAIN, "gemma2": ALTERNATING, "gemma3": ALTERNATING,
         "gpt-oss": ALTERNATING, "llama4": (33, 8, (16, 16, None)),
         "olmo3": (25, 16, (20, 20, 20, None)),
         "gpt-oss-narrow": (22, 8, (1, None)),
         # layers that keep states, beside attention and alone
         "lfm2": PLAIN, "lfm3": (22, 8, (16, None)), "qwen3-next": PLAIN, "falcon-h1": PLAIN,
         "nemotron-h-moe": PLAIN, "mamba2": PLAIN, "olmo-hybrid": PLAIN,
         "kimi-linear": PLAIN, "ling": PLAIN, "minimax": PLAIN}
QUICK = ("deepseek-v3", "qwen3-next")   # a mixture of experts with latents, and one with states
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in CASES if name not in QUICK]


@pytest.mark.parametrize("case", [*QUICK, *SLOW])
def test_together_as_alone(hf_model: Callable[[str], Path], case: str, monkeypatch: pytest.MonkeyPatch):
    """Twice, so that the second time prefixes are found. After each step every page is accounted for."""
    monkeypatch.setenv("NV_DEBUG", "1")
    def opened(**more: Any) -> LLM: return LLM(hf_model(case), device="CPU", max_model_len=96, **more)
    one = opened(max_num_seqs=1, enable_prefix_caching=False)
    alone = [list(one.complete(prompt, GREEDY).token_ids) for prompt in PROMPTS]
    one.close()
    pages, size, windows = CASES[case]
    many = opened(max_num_seqs=4, num_pages=pages, page_size=size, max_num_batched_tokens=32)
    assert many.core.pool.windows == windows
    for _ in range(2): assert [list(each.token_ids) for each in many.generate(PROMPTS, GREEDY)] == alone
    stats = many.core.stats()
    assert stats.preempted > 0
    assert stats.prefix_hits > 0
    many.close()
