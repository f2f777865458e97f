"""Requests that can never run, engines that cannot be, and steps that fail: in words."""
from __future__ import annotations

from concurrent.futures import Future

import pytest

from tinygrad_nv.engine.core import EngineCore
from tinygrad_nv.engine.engine_config import EngineConfig
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.scheduling.request import Request
from tinygrad_nv.engine.scheduling.scheduler_output import SamplerOutput, SchedulerOutput
from tinygrad_nv.errors import ConfigError, NVError, QueueFull, RequestError
from tinygrad_nv.kvcache.pool import PagePool


class Device:
    """Samples token 0, or fails."""
    vocab_size, max_seqs = 100, 4

    def __init__(self, error: Exception | None = None) -> None: self.error = error

    def launch(self, batch: SchedulerOutput) -> Future[SamplerOutput]:
        if self.error is not None: raise self.error
        raise AssertionError("nothing is launched here")

    def start_slot(self, *_) -> None: pass


def engine(pages: int = 64, **config) -> EngineCore:
    """An engine core whose device runs nothing."""
    return EngineCore(Device(), PagePool(pages, 4), EngineConfig(**{"max_seqs": 4, "max_len": 64, **config}))


def refused(core: EngineCore, words: str, prompt=(1, 2), priority: int = 0, kind=RequestError,
            **params) -> NVError:
    """The error of a request."""
    with pytest.raises(kind, match=words) as caught:
        core.add(Request("a", list(prompt), SamplingParams(**params), priority))
    assert not core.has_unfinished
    return caught.value


def test_prompts():
    assert refused(engine(), "the prompt has no tokens", ()).expected == "at least one token id"
    error = refused(engine(), "token id 100 is out of vocabulary", (1, 100))
    assert (error.expected, error.fix) == ("0 to 99", "use ids of this model's tokenizer")
    refused(engine(), "token id -1 is out of vocabulary", (-1,))
    # it would fail a step, and with it the answers of other requests
    refused(engine(), "logit_bias has token id 100, which is out of vocabulary: 100 tokens",
            logit_bias={100: 1.0})


def test_a_prompt_longer_than_the_context():
    error = refused(engine(), "the prompt has 64 tokens, the context holds 64", [1] * 64)
    assert error.expected == "at most 63, so that one can be added"


def test_a_prompt_longer_than_all_pages():
    # 8 pages of 4 tokens, of which up to 7 may be padding
    error = refused(engine(8), "the prompt has 25 tokens, the cache of keys and values holds 25", [1] * 25)
    assert "give the cache more memory" in error.fix
    core = engine(8)
    core.add(Request("a", [1] * 24, SamplingParams()))
    assert core.has_unfinished


def test_more_answers_than_run_at_a_time():
    error = refused(engine(), "n is 5, and 4 sequences run at a time", n=5)
    assert error.expected == "1 to 4"


def test_priorities():
    error = refused(engine(), "priority is 1001", priority=1001)
    assert error.expected == "-1000 to 1000, smaller first"


def test_an_id_twice():
    core = engine()
    core.add(Request("a", [1], SamplingParams()))
    with pytest.raises(RequestError, match="request 'a' is running"):
        core.add(Request("a", [1], SamplingParams()))


def test_a_full_queue():
    core = engine(queue_limit=1)
    core.add(Request("first", [1], SamplingParams()))
    with pytest.raises(QueueFull, match="1 requests wait") as caught:
        core.add(Request("second", [1], SamplingParams()))
    assert caught.value.expected == "at most 1"


@pytest.mark.parametrize(("config", "words", "expected"), [
    ({"max_seqs": 0}, "max_num_seqs is 0", "at least 1"),
    ({"max_batched_tokens": 7}, "max_num_batched_tokens is 7", "a group of 8"),
    ({"max_batched_tokens": 3, "max_seqs": 4}, "max_num_batched_tokens is 3", "max_num_seqs = 4"),
    ({"max_len": 1}, "max_model_len is 1", "one prompt token and one output token"),
    ({"queue_limit": 0}, "max_queue is 0", "at least 1"),
    ({"ageing_s": 0.0}, "ageing_s is 0.0", "a number > 0"),
    ({"ageing_s": float("nan")}, "ageing_s is nan", "a number > 0"),
    ({"offload_cost": -1.0}, "offload_cost is -1.0", "≥ 0"),
    ({"num_speculative_tokens": 65}, "num_speculative_tokens is 65", "0 to 64"),
    ({"max_seqs": 5}, "max_seqs is 5", "at most 4: the device has no more slots"),
])
def test_engines(config, words, expected):
    with pytest.raises(ConfigError, match=words) as caught: engine(**config)
    assert expected in caught.value.expected


def test_a_pool_that_holds_no_sequence():
    with pytest.raises(ConfigError, match="a pool of 2 pages of 4 tokens") as caught: engine(2)
    assert caught.value.expected == "pages for 9 tokens"


def test_a_step_that_raises():
    core = engine()
    core.executor = Device(MemoryError("no memory"))
    core.add(Request("a", [1], SamplingParams()))
    chosen = [each for _ in range(3) for each in core.step()]
    assert [(each.request, each.finish_reason) for each in chosen] == [("a", "error")]
    assert "a step of the engine failed: MemoryError: no memory" in str(chosen[0].error)
    assert "lower --max-num-seqs" in str(chosen[0].error)
    try: divmod(1, 0)
    except ZeroDivisionError as error: core.executor = Device(error)
    core.add(Request("c", [1], SamplingParams()))
    chosen = [each for _ in range(3) for each in core.step()]
    words = "ZeroDivisionError: integer division or modulo by zero, test_engine_errors.py:"
    assert words in str(chosen[0].error)
    assert "report it" in str(chosen[0].error)
    assert isinstance(chosen[0].error.__cause__, ZeroDivisionError)
    core.executor = Device(RequestError("the driver's own words"))
    core.add(Request("b", [1], SamplingParams()))
    chosen = [each for _ in range(3) for each in core.step()]
    assert chosen[0].error is core.executor.error     # errors of the package are passed on unchanged
    assert not core.has_unfinished
    core.pool.assert_conserved([])


@pytest.mark.parametrize("call", ["start_slot", "fork"])
def test_a_slot_that_cannot_be_set(call):
    """Its step fails, and the engine goes on."""
    core = engine()
    core.executor = Device(MemoryError("launched"))
    def refuse(*_) -> None: raise RuntimeError(f"no {call}")
    setattr(core.executor, call, refuse)
    core.add(Request("a", [1], SamplingParams(n=2)))
    chosen = [each for _ in range(3) for each in core.step()]
    assert [each.finish_reason for each in chosen] == ["error", "error"]
    assert f"RuntimeError: no {call}" in str(chosen[0].error)
    assert not core.has_unfinished
    core.pool.assert_conserved([])
