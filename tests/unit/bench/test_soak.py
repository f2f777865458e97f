"""bench/serving/soak.py on a server whose engine needs no model: each fault that is planted is told, and no
other."""
from __future__ import annotations

import asyncio
import os
from argparse import Namespace
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import pytest

from bench.serving import soak
from bench.serving.soak_requests import KINDS, Answer, cases
from bench.serving.soak_servers import Running
from tests.support.server.serve_case import FakeEngine, FakeModel, FakeStats, fake_service, live
from tinygrad_nv.engine.outputs import Delta

# what a server refuses by itself; an engine is what refuses a pattern
WRONG = tuple(each for each in soak.WRONG if "structured_outputs" not in each)
CHOSEN = cases(("greedy", "logprobs", "stop", "samples", "chat"))[::5]


@dataclass
class FaultyEngine(FakeEngine):
    """An engine with one fault, from the first pause of the load on: "text", "page", "descriptor", "hang"."""
    fault: str = ""
    late: bool = False

    def stats(self) -> FakeStats:
        used = 0.1 if self.fault == "page" and self.late else 0.0
        return FakeStats(len(self.running), kv_used=used, generated_tokens=self.generated)

    async def _answer(self, prompt: list[int], params: Any, name: str) -> AsyncIterator[Delta]:
        if self.late and self.fault == "descriptor": os.dup(2)
        if self.late and self.fault == "hang": await asyncio.sleep(60)
        async for each in super()._answer(prompt, params, name):
            yield replace(each, text="other") if self.late and self.fault == "text" else each


def soaked(fault: str, seconds: float = 2.0) -> dict[str, Any]:
    """The report of a short load."""
    how = Namespace(seconds=seconds, clients=6, leave=0.2, warm_up=0.2, slope=1e9)
    engine, pause = FaultyEngine(FakeModel(), fault=fault), soak.pause

    async def pause_then_fault(load: soak.Load, warming: bool = False) -> None:
        await pause(load, warming)
        engine.late = engine.late or not warming
    with live(fake_service(engine)) as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(soak, "pause", pause_then_fault)
        patch.setattr(soak, "WRONG", WRONG)
        parts = urlsplit(server.url)
        running = {"lookup": Running((parts.hostname or "", parts.port or 0), os.getpid())}
        return asyncio.run(soak.run(soak.Load(running, True), CHOSEN, how))


def test_a_clean_server_passes():
    data = soaked("")
    assert data["faults"] == []
    assert min(data["finished"], data["left"], data["refused"], data["pauses"]) >= 1, data
    assert {*data["kinds"]} == {case.kind.name for case in CHOSEN}
    assert data["servers"]["lookup"]["tokens"] > data["finished"]
    soak.show(data)


@pytest.mark.parametrize(("fault", "words"), [
    ("text", "another answer than alone"), ("page", "is not idle: {'kv_cache_usage_perc': 0.1}"),
    ("descriptor", "more than before"), ("hang", "no answer within")])
def test_a_fault_is_told(fault: str, words: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(soak, "DRAIN_S", 0.2)
    monkeypatch.setattr(soak, "LIMIT_S", 1.0)
    held = set(os.listdir("/proc/self/fd"))
    try: data = soaked(fault)
    finally:
        for each in set(os.listdir("/proc/self/fd")) - held:
            if os.path.exists(f"/proc/self/fd/{each}"): os.close(int(each))
    assert any(words in each for each in data["faults"]), data["faults"]


def test_the_slope_of_memory_is_of_what_follows_the_warm_up():
    at = [2.0 * i for i in range(300)]
    def grows(rate: float) -> list[tuple[float, ...]]:
        """MB a minute, after a warm-up of its own, with a spike and noise."""
        return [(t, min(t, 100) + rate * t / 60 + (40 if i == 200 else i % 3 / 10)) for i, t in enumerate(at)]
    assert soak.slope(grows(0)) == pytest.approx(0, abs=0.01)
    assert soak.slope(grows(0.5)) == pytest.approx(0.5, abs=0.01)


def test_answers_differ_in_what_is_said():
    def made(*events: dict[str, Any]) -> Answer:
        answer = Answer()
        for each in events: answer.add(each)
        return answer
    def choice(text: str, **more: Any) -> dict[str, Any]:
        return {"choices": [{"index": 0, "text": text, **more}]}
    alone = made(choice("ab", token_ids=[1, 2], finish_reason="stop"))
    assert made(choice("a", token_ids=[1]), choice("b", token_ids=[2], finish_reason="stop")
                ).difference(alone, True) == ""
    assert "finish" in made(choice("ab", token_ids=[1, 2], finish_reason="length")).difference(alone, True)
    assert "tokens" in made(choice("ab", token_ids=[1, 3], finish_reason="stop")).difference(alone, True)
    first, second = ({"id": name, "output": [{"text": text}]} for name, text in (("1", "a"), ("2", "b")))
    assert made(first).difference(made({**first, "id": "3"}), True) == ""
    assert made(first).difference(made(second), True)
    with pytest.raises(RuntimeError, match="out of pages"): made({"error": {"message": "out of pages"}})


def test_each_name_is_one_kind():
    assert len({each.name for each in KINDS}) == len(KINDS)
