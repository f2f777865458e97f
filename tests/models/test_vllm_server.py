"""Answers of the server beside vLLM's, which were recorded (tests/support/vllm/): each difference is a known
one, and each known one is still there. Both serve SmolLM2's weights in float32."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.support.models import trained
from tests.support.server.serve_case import Live, live, llm_service
from tests.support.vllm import recording
from tests.support.vllm.answers import ask
from tests.support.vllm.compare import compare
from tests.support.vllm.request import MODEL
from tests.support.vllm.table import requests
from tinygrad_nv import LLM
from tinygrad_nv.server.service import Parsers

REQUESTS, VLLM = requests(), recording.read_answers()
REASONS, KNOWN = recording.read_differences()


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    llm = LLM(str(trained.smollm2()), dtype="float32", max_model_len=512, device="CPU")
    service = llm_service(llm, parsers=Parsers("none", "hermes"), scale_out=True)
    service.names = (MODEL,)
    service.limits = replace(service.limits, context=llm.length)
    with live(service) as running: yield running
    llm.close()


@pytest.mark.sampled(40)
@pytest.mark.parametrize("name", REQUESTS)
def test_differences_from_vllm_are_the_known_ones(server: Live, name: str) -> None:
    request = REQUESTS[name]
    server.service.parsers = Parsers("qwen3" if request.reasoning else "none", "hermes")
    found = compare(request, VLLM[name], ask(server.url, request))
    wrong = recording.check(name, found, KNOWN)
    assert not wrong, (wrong, [each for each in found if f"{each.what} (new)" in wrong])


def test_recording_has_every_request_and_no_other() -> None:
    assert VLLM.keys() == REQUESTS.keys()
    assert len(REQUESTS) >= 300


def test_every_known_difference_has_a_reason_and_every_reason_a_difference() -> None:
    used = set()
    for what, names in KNOWN.items():
        for name in names:
            assert name.removesuffix(recording.OTHERS) in REQUESTS, name
            reason = recording.find_reason(REASONS, what, name)
            assert reason, (what, name)
            used.add(reason)
    assert used == {*REASONS}, [each.here for each in REASONS if each not in used]
    for reason in REASONS:
        assert reason.kind in recording.KINDS
        assert reason.why


def test_agreement_in_status_finish_reason_and_greedy_text_stays() -> None:
    assert recording.agreement(REQUESTS, KNOWN) >= 986 / 1026
