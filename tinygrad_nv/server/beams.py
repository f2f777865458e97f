"""Beam search of a request with `use_beam_search`, as vLLM has it: the answers are the `n` best beams.

Protocol: `beam_deltas` stands for `Service.run`: it yields each answer as one delta, when all rounds are
done. A round is a batch of all beams of all prompts, each with one new token; what came before is in the
prefix cache. The fields are read in protocol.py.
"""
from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from tinygrad_nv.engine.beam_search import BeamSearchParams, Search
from tinygrad_nv.engine.logprobs import Logprob, of_token
from tinygrad_nv.engine.outputs import Delta, EngineCoreOutput
from tinygrad_nv.engine.text.output_processor import OutputProcessor
from tinygrad_nv.server.errors import APIError, invalid
from tinygrad_nv.server.protocol import Common
from tinygrad_nv.server.record import Record
from tinygrad_nv.server.service import Service


async def beam_deltas(service: Service, prompts: Sequence[list[int]], request: Common,
                      record: Record) -> AsyncGenerator[tuple[int, Delta], None]:
    """See above."""
    assert request.beams is not None
    params, room = request.beams, service.model.length - max(map(len, prompts))
    if request.params.max_tokens is None: params = replace(params, max_tokens=room)
    if params.max_tokens > room:
        raise invalid(f"the prompt has {max(map(len, prompts))} tokens, and max_tokens is "
                      f"{params.max_tokens}, expected at most {service.model.length} together, the context",
                      "max_tokens")
    searches = [Search(prompt, params, service.model.eos) for prompt in prompts]
    deadline = asyncio.get_running_loop().time() + service.limits.request_s
    for _ in range(params.max_tokens):
        if not any(search.beams for search in searches): break
        if asyncio.get_running_loop().time() > deadline:
            raise APIError(504, f"the answer was not complete within {service.limits.request_s:g} s",
                           "request_timeout")
        await _round(service, searches, params, request, record)
    record.params, record.choices = request.params, len(prompts) * request.params.n
    record.prompt_tokens, record.output_tokens, record.reasons = sum(map(len, prompts)), 0, []
    for at, (prompt, search) in enumerate(zip(prompts, searches, strict=True)):
        processor = OutputProcessor(service.model.require_tokenizer(), prompt, request.params)
        for index, beam in enumerate(search.best()):
            tokens = tuple(beam.tokens[len(prompt):])
            record.output_tokens += len(tokens)
            record.reasons.append(beam.finish_reason or "length")
            made = processor.process(EngineCoreOutput(record.id, index, tokens, (), beam.finish_reason,
                                                       beam.stop_reason))
            if made is not None: yield at * request.params.n + index, made


async def _round(service: Service, searches: Sequence[Search], params: BeamSearchParams, request: Common,
                 record: Record) -> None:
    """One more token for each beam."""
    beams = [beam.tokens for search in searches for beam in search.beams]
    found: list[dict[int, Logprob]] = [{} for _ in beams]
    async for at, delta in service.run(beams, params.sampling, request.priority, record, request.salt):
        for each in delta.logprobs: found[at] = of_token(each)
    left = iter(found)
    for search in searches: search.extend([next(left) for _ in search.beams])
