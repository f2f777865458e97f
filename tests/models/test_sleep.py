"""Models that sleep: memory is given back, requests are refused, and tokens after are those of before."""
from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.models.lora_case import adapter, answers
from tinygrad_nv import LLM, LoRARequest, SamplingParams
from tinygrad_nv.errors import ConfigError, EngineError, NVError
from tinygrad_nv.models import weights
from tinygrad_nv.runtime.memory import host_bytes

PROMPTS, COUNT = [[7, 8, 9] * 9, [20]], 8
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    """A cache of 32 MB."""
    with LLM(tiny, device="CPU", num_pages=4096, max_num_seqs=4) as made: yield made


def said(llm: LLM) -> list[tuple[int, ...]]:
    return answers(llm, PROMPTS, [None] * 2, COUNT)


def resident() -> int: return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def memory(llm: LLM) -> list[np.ndarray]:
    """The bytes of the KV cache."""
    found = [host_bytes(tensor) for tensor in llm.runner.store.tensors]
    return [np.frombuffer(each, np.uint8) for each in found if each is not None]


def test_the_cache_is_given_back(llm: LLM):
    before = said(llm)
    steps = dict(llm.runner.steps)
    for each in memory(llm): each[:] = 1
    held, size = resident(), sum(each.nbytes for each in memory(llm))
    llm.sleep()
    dropped = held - resident()
    assert llm.is_sleeping()
    assert size == 32 << 20
    assert 0.95 * size < dropped < 1.2 * size
    assert not any(each.any() for each in memory(llm))
    llm.wake_up()
    assert not llm.is_sleeping()
    assert said(llm) == before
    assert all(llm.runner.steps[shape] is step for shape, step in steps.items()), "nothing is captured anew"


def test_small_buffers_are_given_back(tiny: Path):
    """tinygrad's own mappings, which are shared."""
    with LLM(tiny, device="CPU", num_pages=64, max_num_seqs=4, max_model_len=64) as llm:
        for each in memory(llm): each[:] = 1
        llm.sleep()
        assert not any(each.any() for each in memory(llm))


def test_requests_are_refused_until_all_is_awake(llm: LLM):
    before = said(llm)
    for tags in (["weights", "kv_cache"], ["kv_cache", "weights"]):
        llm.sleep(level=2)
        for tag in tags:
            with pytest.raises(EngineError, match=r"(?s)the model sleeps.*wake_up"): llm.generate("x")
            llm.wake_up(tags=[tag])
        assert not llm.is_sleeping()
        assert said(llm) == before
        llm.wake_up()
        assert said(llm) == before


def test_weights_are_read_again(tiny: Path, make_model: Callable[..., Path], tmp_path: Path):
    """They are those of the files as they are then; until then there are none."""
    path, other = shutil.copytree(tiny, tmp_path / "model"), make_model(initializer_range=0.3)
    with LLM(path, device="CPU", max_num_seqs=4) as llm, LLM(other, device="CPU", max_num_seqs=4) as wanted:
        assert said(llm) != said(wanted)
        llm.sleep(level=2)
        emb = np.frombuffer(host_bytes(weights.list_loaded(llm.model)[0]), np.uint8)[4096:-4096]
        assert not emb.any()
        shutil.copy(other / "model.safetensors", path)
        llm.wake_up()
        assert said(llm) == said(wanted)
        llm.sleep(level=2)
        (path / "model.safetensors").unlink()
        with pytest.raises(NVError): llm.wake_up()
        assert llm.is_sleeping()
        shutil.copy(other / "model.safetensors", path)
        llm.wake_up()
        assert said(llm) == said(wanted)


def test_running_requests_end(llm: LLM):
    for mode, reason in (("abort", "abort"), ("wait", "length")):
        stream = llm.stream(PROMPTS[0], LONG)
        made = [next(stream)]
        llm.sleep(mode=mode)
        made += stream
        assert made[-1].finish_reason == reason
        assert (sum(len(each.tokens) for each in made) == LONG.max_tokens) is (mode == "wait")
        llm.core.pool.assert_conserved([])
        llm.wake_up()


def test_prefixes_are_forgotten(llm: LLM):
    def cached() -> int: return llm.generate({"prompt_token_ids": [5] * 40}, LONG)[0].num_cached_tokens
    cached()
    assert cached() > 0
    llm.sleep()
    llm.wake_up()
    assert cached() == 0


@pytest.mark.slow
def test_a_draft_model_and_adapters(tiny: Path, tmp_path: Path):
    lora = LoRARequest("a", 1, str(adapter(tiny, tmp_path / "a", 1, target_modules="all-linear")))
    with LLM(tiny, device="CPU", speculative=f"draft:{tiny}:3", enable_lora=True, max_num_seqs=4) as llm:
        before = answers(llm, PROMPTS, [None, lora], COUNT)
        for level in (1, 2):
            llm.sleep(level=level)
            llm.wake_up()
            assert answers(llm, PROMPTS, [None, lora], COUNT) == before


def test_what_cannot_sleep_says_so(llm: LLM):
    for call, words in ((lambda: llm.sleep(level=3), r"sleep\(level=3\)"),
                        (lambda: llm.sleep(mode="keep"), "mode='keep'"),
                        (lambda: llm.wake_up(tags=["cache"]), "'cache'.*weights, kv_cache")):
        with pytest.raises(ConfigError, match=f"(?s){words}"): call()
    assert not llm.is_sleeping()


@pytest.mark.slow
def test_quantised_weights_and_gpus_are_refused(tiny: Path):
    with LLM(tiny, device="CPU", quantization="int8", max_num_seqs=4) as llm:
        before = said(llm)
        with pytest.raises(ConfigError, match=r"(?s)are quantised.*use level 1"): llm.sleep(level=2)
        llm.sleep()
        llm.wake_up()
        assert said(llm) == before
    with LLM(tiny, device="EMU", dtype="bfloat16", max_num_seqs=2, max_model_len=64) as llm, \
            pytest.raises(ConfigError, match=r"(?s)on EMU, whose captured steps.*on the CPU"): llm.sleep()
