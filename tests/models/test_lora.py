"""Adapters beside each other in one batch: the tokens of each are PEFT's, those without one are the base's,
whatever else is there; families, quantised bases, chunks, drafts, prefixes, few pages and few slots."""
from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.support.models.lora_case import adapter, answers, greedy, prompts
from tinygrad_nv import LLM, LoRARequest, SamplingParams
from tinygrad_nv.engine.scheduling.scheduler_output import SamplerOutput, SchedulerOutput
from tinygrad_nv.engine.worker.input_buffer import BatchShape

COUNT, PROMPTS = 12, prompts(5, 0)
ADAPTERS: list[dict[str, Any]] = [
    {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
    {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"], "use_rslora": True},
    {"r": 5, "target_modules": r".*\.(k_proj|down_proj|up_proj)", "lora_alpha": 3,
     "rank_pattern": {"down_proj": 2, r"layers\.1\..*k_proj": 11}, "alpha_pattern": {"k_proj": 20}},
    {"r": 3, "target_modules": ["o_proj", "gate_proj"], "layers_to_transform": [1]}]


@pytest.fixture(scope="module")
def loras(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    """Adapters of `ADAPTERS`."""
    folder = tmp_path_factory.mktemp("adapters")
    return [LoRARequest(f"a{i}", i, str(adapter(tiny, folder / f"a{i}", i, **config)))
            for i, config in enumerate(ADAPTERS, 1)]


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    """Two slots for adapters, of four sequences."""
    with LLM(tiny, device="CPU", enable_lora=True, max_loras=2, max_cpu_loras=3, max_num_seqs=4,
             max_num_batched_tokens=16, max_model_len=64) as made: yield made


@pytest.fixture(scope="module")
def expected(tiny: Path, loras: list[LoRARequest]) -> dict[str, list[tuple[int, ...]]]:
    """The tokens of prompts, with each adapter and without ("")."""
    return {"" if lora is None else lora.lora_name:
            greedy(tiny, PROMPTS, None if lora is None else Path(lora.lora_path), COUNT)
            for lora in (None, *loras)}


def of(expected: dict[str, list[tuple[int, ...]]], order: list[LoRARequest | None]) -> list[tuple[int, ...]]:
    """The tokens of prompts, each with its adapter."""
    return [expected[lora.lora_name if lora else ""][i] for i, lora in enumerate(order)]


def require_nothing_held(llm: LLM) -> None:
    assert llm.core.scheduler.adapters.in_use == 0
    assert llm.core.pool.stats().in_use == 0


def test_a_mixed_batch_has_the_tokens_of_peft(llm: LLM, loras: list[LoRARequest],
                                              expected: dict[str, list[tuple[int, ...]]]):
    """Five kinds of requests over two slots and three places in host memory: adapters come and go while
    others run."""
    assert len({row for rows in expected.values() for row in rows}) == 25, "adapters change tokens"
    for order in ([None, *loras], [*loras[::-1], None]):
        assert answers(llm, PROMPTS, order, COUNT) == of(expected, order)
    assert llm.adapters is not None
    assert llm.adapters.cache.loads > 4, "adapters were dropped, and read again"
    require_nothing_held(llm)


@pytest.mark.slow
def test_ranks_of_8_to_64(tiny: Path, tmp_path: Path):
    """In one batch, over slots of the largest."""
    given, paths = prompts(4, 4), [adapter(tiny, tmp_path / f"r{rank}", rank, r=rank, lora_alpha=4,
                                           target_modules="all-linear") for rank in (8, 16, 64)]
    loras = [None, *(LoRARequest(path.name, i, str(path)) for i, path in enumerate(paths, 1))]
    with LLM(tiny, device="CPU", enable_lora=True, max_loras=3, max_lora_rank=64, max_num_seqs=4) as made:
        assert answers(made, given, loras, COUNT) == [
            greedy(tiny, [prompt], path, COUNT)[0]
            for prompt, path in zip(given, [None, *paths], strict=True)]


@pytest.mark.slow
def test_few_pages_change_no_token(tiny: Path, loras: list[LoRARequest],
                                   expected: dict[str, list[tuple[int, ...]]]):
    """Sequences are preempted, and go on with their adapter, maybe in another slot; prompts are cut."""
    with LLM(tiny, device="CPU", enable_lora=True, max_loras=2, max_num_seqs=8, max_num_batched_tokens=32,
             block_size=4, num_pages=22, max_model_len=64) as made:
        for order in ([None, *loras], [*loras[::-1], None], [loras[0], None] * 2 + [loras[1]]):
            assert answers(made, PROMPTS * 2, order * 2, COUNT) == of(expected, order) * 2
        assert made.core.stats().preempted > 0
        require_nothing_held(made)


def test_prefixes_are_shared_within_an_adapter_alone(llm: LLM, loras: list[LoRARequest],
                                                     expected: dict[str, list[tuple[int, ...]]]):
    cached, at = [], max(range(5), key=lambda i: len(PROMPTS[i]))
    for lora in (None, None, loras[0], loras[1], loras[0], loras[1]):
        [made] = llm.generate({"prompt_token_ids": PROMPTS[at], "cache_salt": "own"},
                              SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True),
                              lora_request=lora, use_tqdm=False)
        assert tuple(made.token_ids) == expected[lora.lora_name if lora else ""][at]
        cached.append(made.num_cached_tokens)
    assert [count >= 16 for count in cached] == [False, True, False, False, True, True]
    assert cached[::2][:2] == [0, 0]


def test_several_answers_to_one_prompt(llm: LLM, loras: list[LoRARequest],
                                       expected: dict[str, list[tuple[int, ...]]]):
    [made] = llm.generate({"prompt_token_ids": PROMPTS[3]},
                          SamplingParams(temperature=0, n=3, max_tokens=COUNT, ignore_eos=True),
                          lora_request=loras[2], use_tqdm=False)
    assert {tuple(each.token_ids) for each in made.outputs} == {expected["a3"][3]}


def test_cancelled_requests_give_their_slots_back(llm: LLM, loras: list[LoRARequest]):
    for lora, count in itertools.product(loras, (1, 3)):
        stream = llm.stream(prompts(1, 5)[0], SamplingParams(max_tokens=40, ignore_eos=True),
                            lora_request=lora)
        for _ in range(count): next(stream)
        stream.close()
    llm.engine.join(30)
    require_nothing_held(llm)


def test_without_adapters_the_step_is_that_without_lora(llm: LLM, loras: list[LoRARequest],
                                                        expected: dict[str, list[tuple[int, ...]]]):
    """A batch without adapters runs steps that have none, beside those that have."""
    ran, launch = list[bool](), llm.runner.launch
    def launched(batch: SchedulerOutput) -> Future[SamplerOutput]:
        ran.append(BatchShape.of(batch).adapted)
        return launch(batch)
    with patch.object(llm.runner, "launch", launched):
        assert answers(llm, PROMPTS[:2], [None] * 2, COUNT) == expected[""][:2]
        assert not any(ran)
        assert answers(llm, PROMPTS[:1], [loras[0]], COUNT) == expected["a1"][:1]
        assert any(ran)
    assert {shape.adapted for shape in llm.runner.steps} == {False, True}


@pytest.mark.slow
def test_draft_tokens(tiny: Path, loras: list[LoRARequest], expected: dict[str, list[tuple[int, ...]]]):
    """Drafts of repeated prompts are verified with the adapter."""
    given = PROMPTS
    with LLM(tiny, device="CPU", enable_lora=True, max_loras=4, speculative="ngram:3", max_num_seqs=8,
             max_model_len=200) as made:
        order = [None, *loras]
        assert answers(made, given, order, COUNT) == of(expected, order)
        # what follows is drafted from the answers of before
        longer = [[*prompt, *expected[each.lora_name if each else ""][i]] * 2
                  for i, (prompt, each) in enumerate(zip(given, order, strict=True))]
        wanted = answers(made, longer, order, COUNT)
        assert made.core.stats().drafted > 0
    with LLM(tiny, device="CPU", enable_lora=True, max_loras=4, max_model_len=200) as plain:
        assert answers(plain, longer, order, COUNT) == wanted


FAMILIES = {"qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
            "mistral": ("MistralForCausalLM", {"sliding_window": 16, "head_dim": 32}),
            "gemma3": ("Gemma3ForCausalLM", {"head_dim": 24, "sliding_window": 16,
                                             "layer_types": ["sliding_attention", "full_attention"]}),
            "phi3": ("Phi3ForCausalLM", {"pad_token_id": 0, "num_key_value_heads": 2}),
            "qwen3": ("Qwen3ForCausalLM", {"head_dim": 32}),
            "qwen2-moe": ("Qwen2MoeForCausalLM", {
                "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
                "shared_expert_intermediate_size": 56})}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, make_model: Any, tmp_path: Path):
    """Biases, fused projections, shared experts, norms of heads."""
    name, fields = FAMILIES[family]
    model, given = make_model(name, **fields), prompts(4, 1)
    targets = {"phi3": ["qkv_proj", "gate_up_proj", "down_proj"],
               "qwen2-moe": ["q_proj", "shared_expert.up_proj", "shared_expert.down_proj"]}.get(
        family, "all-linear")
    found = adapter(model, tmp_path / "a", 1, target_modules=targets, lora_alpha=4)
    lora = LoRARequest("a", 1, str(found))
    with LLM(model, device="CPU", dtype="float32", enable_lora=True, max_num_seqs=4) as made:
        assert answers(made, given, [lora, None] * 2, COUNT) == [
            greedy(model, [prompt], found if i % 2 == 0 else None, COUNT)[0]
            for i, prompt in enumerate(given)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_adapters_of_16_bits_beside_float32(dtype: str, tiny: Path, tmp_path: Path):
    """lora_dtype rounds adapters; those that are stored so are exact."""
    found = adapter(tiny, tmp_path / "a", 1, target_modules="all-linear", lora_alpha=16)
    given, lora = prompts(3, 1), LoRARequest("a", 1, str(found))
    state = {name: tensor.to(getattr(torch, dtype)).float()
             for name, tensor in _load(found / "adapter_model.safetensors").items()}
    _save(state, found / "adapter_model.safetensors")
    with LLM(tiny, device="CPU", enable_lora=True, lora_dtype=dtype) as made:
        assert answers(made, given, [lora] * 3, COUNT) == greedy(tiny, given, found, COUNT)


def _load(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file
    return load_file(path)


def _save(state: dict[str, torch.Tensor], path: Path) -> None:
    from safetensors.torch import save_file
    save_file(state, path)


@pytest.mark.slow
def test_a_quantised_base_has_adapters(tiny: Path, loras: list[LoRARequest], tmp_path: Path):
    """A batch gives each request the tokens that it has alone, and adapters change them."""
    given = prompts(4, 2)
    with LLM(tiny, device="CPU", quantization="int8", enable_lora=True, max_num_seqs=4) as made:
        order = [None, loras[0], loras[1], loras[0]]
        together = answers(made, given, order, COUNT)
        alone = [answers(made, [prompt], [lora], COUNT)[0] for prompt, lora in zip(given, order, strict=True)]
        assert together == alone
        assert all(answers(made, [prompt], [None], COUNT)[0] != tokens
                   for prompt, tokens in zip(given[1:], together[1:], strict=True))
