"""Adapters in slots and in host memory: which is evicted, what waits, what is loaded again."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tests.support.engine.engine_fake import FakeDevice
from tinygrad_nv.engine.core import EngineCore
from tinygrad_nv.engine.engine_config import EngineConfig
from tinygrad_nv.engine.lora.request import LoRARequest
from tinygrad_nv.engine.lora.serving import AdapterCache
from tinygrad_nv.engine.lora.slots import AdapterSlots, AdapterUse
from tinygrad_nv.engine.metrics import Latencies, metrics
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.scheduling.request import Request
from tinygrad_nv.errors import RequestError
from tinygrad_nv.kvcache.pool import PagePool
from tinygrad_nv.models.lora import AdapterMatrices
from tinygrad_nv.models.peft import Adapter


def made(name: str) -> Adapter:
    return Adapter(name, {"m": AdapterMatrices(np.zeros((1, 1)), np.zeros((1, 1)))}, name.encode())


A, B, C = made("a"), made("b"), made("c")


def test_the_least_recently_used_slot_is_taken():
    slots = AdapterSlots(2)
    assert [slots.acquire(each) for each in (A, B, A)] == [0, 1, 0]
    assert slots.take_loads() == ((0, A), (1, B))
    assert (slots.acquire(C), slots.find(C), slots.in_use) == (None, None, 2)
    slots.release(0)
    assert slots.acquire(C) is None, "a sequence is left"
    slots.release(1)
    slots.release(0)
    assert (slots.acquire(C), slots.take_loads()) == (1, ((1, C),))
    assert (slots.acquire(A), slots.take_loads()) == (0, ()), "it was still there"


def test_slots_in_use_are_filled_again_after_a_failure():
    slots = AdapterSlots(2)
    slots.acquire(A)
    slots.release(0 if slots.acquire(B) == 0 else 1)
    slots.take_loads()
    slots.invalidate()
    assert slots.take_loads() == ((0, A),)
    assert (slots.acquire(B), slots.take_loads()) == (1, ((1, B),))


def test_the_cache_drops_the_least_recently_used():
    read: list[str] = []
    def reads(request: LoRARequest) -> Adapter:
        read.append(request.lora_name)
        return made(request.lora_name)
    cache, asked = AdapterCache(2, reads), [LoRARequest(name, i, "/x") for i, name in enumerate("abc", 1)]
    for i in (0, 1, 0, 2, 0, 1): cache.load(asked[i])
    assert (read, cache.numbers(), cache.loads) == (["a", "b", "c", "b"], [1, 2], 4)
    assert (cache.is_cached(asked[0]), cache.is_cached(asked[2]), cache.remove(1), cache.remove(1)) == \
        (True, False, True, False)
    with pytest.raises(RequestError, match="number 2, which 'b' of /x has"):
        cache.load(LoRARequest("z", 2, "/z"))


class Slots(FakeDevice):
    """A device that knows what is in its slots, and what each step read."""

    def __init__(self, *given: object, **more: object) -> None:
        super().__init__(*given, **more)  # type: ignore[arg-type]
        self.held: dict[int, Adapter] = {}
        self.read: list[set[str]] = []

    def load_adapter(self, slot: int, adapter: Adapter) -> None: self.held[slot] = adapter

    def launch(self, batch):
        self.read.append({self.held[seq.adapter].name for seq in batch.seqs if seq.adapter >= 0})
        return super().launch(batch)


def added(core: EngineCore, adapters: Sequence[Adapter | None], tokens: int = 4) -> None:
    for i, adapter in enumerate(adapters):
        salt = adapter.digest if adapter else b""
        core.add(Request(f"{i}", [1 + i, 2, 3], SamplingParams(max_tokens=tokens, ignore_eos=True),
                         arrival_s=float(i), salt=salt, adapter=adapter))


def run(core: EngineCore, adapters: Sequence[Adapter | None], tokens: int = 4) -> dict[str, int]:
    added(core, adapters, tokens)
    counts: dict[str, int] = {}
    while core.has_unfinished:
        for each in core.step():
            assert each.error is None
            counts[each.request] = counts.get(each.request, 0) + len(each.tokens)
    return counts


def test_requests_wait_for_slots_and_all_run():
    pool = PagePool(64, 4)
    device = Slots(64, 4)
    core = EngineCore(device, pool, EngineConfig(max_seqs=8, max_batched_tokens=64, max_len=100,
                                                 max_adapters=2))
    order = [A, None, B, C, A, None, C, B]
    assert run(core, order) == dict.fromkeys(map(str, range(8)), 4)
    assert max(map(len, device.read)) == 2
    assert {name for read in device.read for name in read} == {"a", "b", "c"}
    assert core.scheduler.adapters.in_use == 0


def test_what_runs_and_what_waits_is_told():
    """As vLLM's metric, which models without adapters have not."""
    core = EngineCore(Slots(64, 4), PagePool(64, 4), EngineConfig(max_seqs=8, max_batched_tokens=64,
                                                                  max_len=100, max_adapters=2))
    added(core, [B, None, A, B, C, A])
    core.step()
    use = core.stats().adapters
    assert use == AdapterUse(2, ("a", "b"), ("a", "c"))
    [told] = [each for each in metrics(core.stats(), Latencies(), "m")
              if each.name == "vllm:lora_requests_info"]
    assert told.labels == {"max_lora": "2", "running_lora_adapters": "a,b", "waiting_lora_adapters": "a,c"}
    run(core, [])
    assert core.stats().adapters == AdapterUse(2, (), ())
    without = EngineConfig(max_seqs=8, max_len=100)
    assert EngineCore(Slots(64, 4), PagePool(64, 4), without).stats().adapters is None


def test_an_adapter_for_a_model_that_has_none():
    core = EngineCore(Slots(64, 4), PagePool(64, 4), EngineConfig(max_seqs=8, max_len=100))
    with pytest.raises(RequestError, match="with adapter 'a', and the model has none"): run(core, [A])
