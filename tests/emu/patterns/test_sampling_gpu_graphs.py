"""DEV=EMU, checks on: the sampler on a device; its tokens are those of the CPU, and in how many kernels."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tinygrad.helpers import Context

from tests.support.engine.sampler_case import Case, logits_of
from tests.support.graphs.pool_case import device
from tinygrad_nv import Tensor, TinyJit, dtypes, explain
from tinygrad_nv.engine.sampling import Filters, SamplingParams
from tinygrad_nv.engine.worker.sampler import count_tokens, next_tokens
from tinygrad_nv.engine.worker.sampler_state import SamplerState, pack_mask
from tinygrad_nv.runtime.device import NVDevice

V = 130
KINDS = [SamplingParams(temperature=0), SamplingParams(temperature=0.7, top_k=4, seed=4),
         SamplingParams(top_p=0.7, temperature=1.2, seed=1 << 60), SamplingParams(min_p=0.2, seed=6),
         SamplingParams(temperature=0, repetition_penalty=1.4, presence_penalty=1.0),
         SamplingParams(frequency_penalty=1.5, seed=7, top_k=9, top_p=0.9, logit_bias={5: 7.0, 9: -100.0})]
SEEN, SAID = (0, 5, 9, 17), (9, 9, 30)


@pytest.fixture(scope="module", params=["sm_80", "sm_90a"])
def gpu(request: pytest.FixtureRequest) -> NVDevice:
    """A device of each architecture."""
    return device(arch=request.param)


@pytest.fixture(scope="module")
def hopper() -> NVDevice:
    """One device for what does not depend on the architecture."""
    return device()


@pytest.mark.sampled(1)
def test_tokens_are_those_of_the_cpu(gpu: NVDevice):
    """Of a step of all kinds. Noise and probabilities differ in last bits, which choose no token here."""
    xs = np.stack([logits_of(i, 2, V) for i in range(len(KINDS))])
    places, filters = list(range(10, 10 + len(KINDS))), Filters(mask=True)
    masks = np.stack([pack_mask(V, [int(x.argmax())] if i % 2 else ()) for i, x in enumerate(xs)])
    for kind in KINDS: filters |= kind.filters
    with Context(DEV="CPU"):
        expected = Case(KINDS, V, SEEN, SAID, device="CPU").tokens(xs, places, filters, masks)
    assert Case(KINDS, V, SEEN, SAID, device=gpu.device).tokens(xs, places, filters, masks) == expected
    gpu.synchronize()


def test_a_rows_token_is_the_same_bits_whatever_its_neighbours(hopper: NVDevice):
    """Filtered logits of one row, of three and of ten."""
    params = SamplingParams(temperature=0.9, top_p=0.9, min_p=0.001, seed=1)
    xs = np.stack([logits_of(i, 2, V) for i in range(10)])
    made = [Case([params] * R, V, device=hopper.device).apply_filters(xs[:R])[0] for R in (1, 3, 10)]
    for other in made[1:]: np.testing.assert_array_equal(made[0].view(np.uint32), other.view(np.uint32))


def kernels(params: SamplingParams, gpu: NVDevice, rows: int = 2, size: int = V, count: bool = False
            ) -> list[str]:
    case = Case([params] * rows, size, device=gpu.device)
    logits = Tensor.empty(rows, size, device=gpu.device)
    places = Tensor.empty(rows, dtype=dtypes.int32, device=gpu.device).realize()
    made = case.made(logits.realize(), places)
    if count: made = count_tokens(case.state, case.rows, made)
    return [k.template or "tinygrad" for k in explain(made).kernels]


@pytest.mark.sampled(1)
def test_a_sampler_is_few_kernels(gpu: NVDevice):
    """As many as on a CPU."""
    assert kernels(SamplingParams(temperature=0.0), gpu) == ["choice"]
    begin = kernels(SamplingParams(), gpu)[:-1]
    assert kernels(SamplingParams(), gpu) == [*begin, "choice"]
    assert len(begin) == 2
    assert kernels(SamplingParams(top_k=4), gpu) == [*begin, "threshold", "choice"]
    assert kernels(SamplingParams(top_p=0.9), gpu) == [*begin, "norm", "threshold", "choice"]
    assert kernels(SamplingParams(min_p=0.1), gpu)[-2:] == ["norm", "choice"]
    assert kernels(SamplingParams(), gpu, 1, 9000) == [*begin, "choice", "pieces"]
    everything = replace(KINDS[-1], min_p=0.1, repetition_penalty=1.1)
    assert kernels(everything, gpu, count=True)[-6:] == ["threshold", "norm", "threshold", "norm", "choice",
                                                         "count"]
    assert len(kernels(everything, gpu, count=True)) <= 11


@pytest.mark.slow
def test_steps_of_a_captured_sampler(hopper: NVDevice):
    """Tokens are counted in place, step by step, as on the CPU; long rows in pieces."""
    params = SamplingParams(seed=3, frequency_penalty=1.0, presence_penalty=0.5, temperature=0.5)

    def said(name: str) -> list[list[int]]:
        slots, size = SamplerState(3, 4500, name), 4500
        for slot in (0, 2): slots.start_slot(slot, params, slot, (1, 2, 3))
        rows = Tensor([2, -1, 0], dtype=dtypes.int32, device=name).realize()
        x = np.stack([logits_of(2, 0.5, size)] * 3)
        x[:, [7, 8, 9]] = 6
        logits, places = Tensor(x, device=name).realize(), Tensor([4, 5, 6], device=name).cast(dtypes.int32)
        places = places.contiguous().realize()

        @TinyJit
        def step() -> Tensor:
            tokens = next_tokens(logits, params.filters, slots, rows, places).contiguous()
            Tensor.realize(tokens, count_tokens(slots, rows, tokens))
            return tokens
        made = [step().tolist() for _ in range(5)]
        assert slots.counts.numpy().sum(1).tolist() == [6.5, 0, 6.5]
        return [[each[0], each[2]] for each in made]
    ours = said(hopper.device)
    with Context(DEV="CPU"): assert said("CPU") == ours
    assert len({token for each in ours for token in each}) > 2
