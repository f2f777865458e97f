"""DEV=EMU, checks on: the runner's steps over pages choose what the whole context does, on both
architectures, with one upload and one launch of a graph for a step; and a model that two GPUs have."""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.support.engine import parallel_on_gpus
from tests.support.graphs.pool_case import device
from tinygrad_nv import Tensor, dtypes
from tinygrad_nv.engine.scheduling.scheduler_output import Sample, ScheduledSeq, SchedulerOutput
from tinygrad_nv.engine.worker.model_runner import ModelRunner
from tinygrad_nv.kvcache.page_allocator import CopyKind, PageCopy
from tinygrad_nv.models.config import ModelConfig
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.rope import RopeConfig
from tinygrad_nv.runtime import driver
from tinygrad_nv.runtime.device import NVDevice
from tinygrad_nv.runtime.emulated.driver import EmulatedDriver

SIZE, VOCAB, LENGTH = 8, 64, 24


class Counting(EmulatedDriver):
    """Notes what is submitted, outside graphs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.submitted: list[str] = []

    def submit(self, work: driver.Work, stream: driver.Stream | None = None) -> None:
        self.submitted.append(type(work).__name__)
        super().submit(work, stream)


@pytest.fixture(scope="module", params=["sm_90a", pytest.param("sm_80", marks=pytest.mark.slow)])
def gpu(request: pytest.FixtureRequest) -> NVDevice:
    """A device of each architecture."""
    return device(Counting, arch=request.param)


def network(name: str) -> Llama:
    """Two layers of random parameters, the second with a window; 4 query heads over 2 key heads."""
    config = ModelConfig("LlamaForCausalLM", VOCAB, 64, 96, 2, 4, 2, 16, LENGTH,
                         (RopeConfig("default", 10000.0, 16, LENGTH),) * 2, windows=(None, 6))
    made = Llama(config, dtypes.float16, name)
    random = np.random.default_rng(0)
    def fill(x: Tensor, scale: float, mean: float = 0.0) -> None:
        numbers = (random.standard_normal(x.shape) * scale + mean).astype(np.float16)
        x.assign(Tensor(numbers, device=name)).realize()
    for x in (made.embedding, made.head): fill(x, 1.0)
    fill(made.norm.weight, 0.1, 1.0)
    for block in made.blocks:
        attention, forward = block.attention, block.feed_forward
        for linear in (attention.qkv, attention.output, forward.gate_up, forward.down):
            fill(linear.weight, 0.15)
        for norm in (block.attention_norm, block.feed_forward_norm): fill(norm.weight, 0.1, 1.0)
    return made


def check(model: Llama, prompt: list[int], tokens: list[int]) -> None:
    """Each token has the largest logit that the whole context gives, but for rounding of float16."""
    logits = model(Tensor([prompt + tokens], dtype=dtypes.int32, device=model.device)).float().numpy()[0]
    for place, token in enumerate(tokens, len(prompt)):
        assert logits[place - 1][token] >= logits[place - 1].max() - 0.05, place


def test_a_chunk_beside_decode_rows_pages_moved_and_steps_ahead(gpu: NVDevice):
    model = network(gpu.device)
    runner = ModelRunner(model, pages=12, page_size=SIZE, max_seqs=2, max_len=LENGTH, host_pages=2)
    try:
        one, two = [3, 9, 27], [50, 11, 33, 2, 7, 60, 31, 12, 5, 40]
        first, second = (7, 1, 4), (2, 9, 0)
        def run(*seqs: ScheduledSeq, copies: tuple[PageCopy, ...] = ()) -> list[int]:
            return runner.launch(SchedulerOutput(seqs, copies)).result().tokens.tolist()
        got = {0: run(ScheduledSeq(0, 0, tuple(one), first, (Sample(2, 0, 3),))), 1: list[int]()}
        # a chunk of the second prompt beside the first's next token
        chosen = run(ScheduledSeq(0, 3, (), first, (Sample(0, 0, 4),)),
                     ScheduledSeq(1, 0, tuple(two), second, (Sample(9, 1, 10),)))
        got[0].append(chosen[0])
        got[1].append(chosen[1])
        # the first's only page so far goes to the host and comes back elsewhere, the second's is copied
        copies = (PageCopy(CopyKind.DEVICE_TO_HOST, 7, 1), PageCopy(CopyKind.HOST_TO_DEVICE, 1, 5),
                  PageCopy(CopyKind.DEVICE_TO_DEVICE, 2, 8))
        first, second = (5, 1, 4), (8, 9, 0)
        steps = [(ScheduledSeq(0, 4 + i, (), first, (Sample(0, 0, 5 + i),)),
                  ScheduledSeq(1, 10 + i, (), second, (Sample(0, 1, 11 + i),))) for i in range(3)]
        pending = [runner.launch(SchedulerOutput(seqs, () if i else copies)) for i, seqs in enumerate(steps)]
        for each in pending:
            for slot, token in enumerate(each.result().tokens): got[slot].append(int(token))
        count_tokens = gpu.driver
        assert isinstance(count_tokens, Counting)
        count_tokens.submitted.clear()
        for slot, token in enumerate(run(ScheduledSeq(0, 7, (), first, (Sample(0, 0, 8),)),
                                         ScheduledSeq(1, 13, (), second, (Sample(0, 1, 14),)))):
            got[slot].append(token)
        assert count_tokens.submitted == ["Upload", "Download"]     # all else is in graphs
        check(model, one, got[0])
        check(model, two, got[1])
        gpu.synchronize()
    finally: runner.close()


@pytest.mark.slow
def test_a_first_step_of_single_tokens_reads_nothing_that_was_never_written(gpu: NVDevice):
    """Each token is looked for among those sampled last, too, and none was sampled yet."""
    model = network(gpu.device)
    runner = ModelRunner(model, pages=6, page_size=SIZE, max_seqs=2, max_len=LENGTH)
    try:
        batch = SchedulerOutput((ScheduledSeq(0, 0, (3,), (1, 2, 3), (Sample(0, 0, 1),)),))
        check(model, [3], runner.launch(batch).result().tokens.tolist())
    finally: runner.close()


@pytest.mark.slow
def test_tokens_are_those_of_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=301, max_position_embeddings=256, initializer_range=0.2, bos_token_id=0, eos_token_id=1)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)

    def tokens(ranks: int) -> object:
        done = subprocess.run([sys.executable, parallel_on_gpus.__file__, str(tmp_path), str(ranks)],
                              capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])
    assert tokens(2) == tokens(1)
