"""From the command line to a server that transcribes: startup.py for a Whisper model.

Protocol: as startup.py, whose options of models that generate have no effect here.
"""
from __future__ import annotations

import argparse
import asyncio
import gc
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tinygrad_nv.engine.outputs import Delta
from tinygrad_nv.engine.prompts import Prompt, TextOrTokens
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.speech.batching import SpeechEngine
from tinygrad_nv.engine.speech.transcriber import Transcriber
from tinygrad_nv.engine.text.tokenizer import Tokenizer
from tinygrad_nv.errors import NVError, RequestError
from tinygrad_nv.runtime.memory_pool import UTILIZATION
from tinygrad_nv.runtime.programs import programs_compiled
from tinygrad_nv.server.log import LOG, line, set_up
from tinygrad_nv.server.metrics import Metrics
from tinygrad_nv.server.service import Service
from tinygrad_nv.server.serving import Server, serve, url
from tinygrad_nv.server.startup import (
    Waterfall,
    api_keys,
    cors,
    hosts,
    http_options,
    limits,
    open_socket,
    use,
)

AT_ONCE = 16    # recordings that run at a time at most, unless --max-num-seqs says less: each has its window


class SpeechModel:
    """A `Transcriber` as the server knows models: it has a tokenizer, and answers no prompts."""

    def __init__(self, transcriber: Transcriber) -> None:
        self.defaults, self.length = SamplingParams(), transcriber.config.max_tokens
        self.tokenizer = transcriber.model.tokenizer
        self.eos: tuple[int, ...] = (transcriber.model.tokens.end,)

    def tokenize(self, prompt: TextOrTokens, truncate_prompt_tokens: int | None = None,
                 truncation_side: str = "left") -> list[int]:
        """Ids of a prompt."""
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (),
                    /, **extra: Any) -> list[int]:
        """Raises `RequestError`."""
        raise transcribes_only()

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer."""
        return self.tokenizer


class SpeechEngineClient:
    """`SpeechEngine`, as the server knows engines."""

    def __init__(self, engine: SpeechEngine) -> None: self.engine = engine

    @property
    def failure(self) -> NVError | None: return self.engine.failure

    def generate(self, prompt: Prompt, params: SamplingParams, *, request_id: str | None = None,
                 priority: int = 0, lora_request: object = None) -> AsyncIterator[Delta]:
        raise transcribes_only()

    def stats(self) -> Any: return self.engine.stats()

    async def refresh_stats(self) -> None: """They are always current."""

    async def stop(self, drain_s: float = 0.0) -> None: await self.engine.stop(drain_s)


def transcribes_only() -> RequestError:
    """The error of a prompt."""
    return RequestError("the model transcribes recordings", "a recording", "POST /v1/audio/transcriptions")


def run(arguments: argparse.Namespace, directory: Path) -> None:
    """The command `serve` of a Whisper model. Returns when the server was told to stop."""
    waterfall = Waterfall()
    set_up(arguments.uvicorn_log_level)
    waterfall.mark("import")
    options = http_options(arguments)
    options.check()
    bound_socket, keys = open_socket(arguments), api_keys(arguments)
    if arguments.device: use(arguments.device)
    transcriber = load(arguments, directory, waterfall)
    if arguments.warm_up: warm_up(transcriber, waterfall)
    gc.collect()
    gc.freeze()
    names = tuple(arguments.served_model_name)
    service = service_of(transcriber, names, arguments, keys)

    def ready() -> None:
        waterfall.mark("listen")
        for each in waterfall.lines(): LOG.info("waterfall %s", each)
        LOG.info(line("ready", url=url(bound_socket, options), model=",".join(names),
                      device=transcriber.device, pid=os.getpid(), keys=len(keys), seconds=waterfall.total_s))

    try: asyncio.run(serve(Server(service, options), [bound_socket], arguments.log_interval, ready))
    finally: transcriber.close()
    LOG.info(line("stopped"))


def service_of(transcriber: Transcriber, names: tuple[str, ...], arguments: argparse.Namespace,
               keys: frozenset[str]) -> Service:
    """Returns the service of a transcriber."""
    metrics = Metrics(names[0], transcriber.config.max_tokens, transcriber.engine.stats,
                      arguments.metrics_prefix)
    LOG.info(line("speech", mels=transcriber.config.mels, languages=len(transcriber.model.tokens.languages),
                  max_num_seqs=transcriber.runner.max_seqs))
    return Service(SpeechEngineClient(transcriber.engine), SpeechModel(transcriber), names, limits(arguments),
                   metrics, keys, cors=cors(arguments), hosts=hosts(arguments), speech=transcriber,
                   tokenizer_info=arguments.enable_tokenizer_info_endpoint,
                   strict=arguments.strict_requests)


def load(arguments: argparse.Namespace, directory: Path, waterfall: Waterfall) -> Transcriber:
    """Loads the model of the command line."""
    def stage(name: str) -> None:
        waterfall.mark(name)
        LOG.info(line("startup", stage=name, seconds=waterfall.stages[name]))
    fraction = arguments.gpu_memory_utilization
    return Transcriber(directory, dtype=arguments.dtype, stage=stage, max_queue=arguments.max_queue,
                       max_num_seqs=min(arguments.max_num_seqs, AT_ONCE),
                       gpu_memory_utilization=UTILIZATION if fraction is None else fraction)


def warm_up(transcriber: Transcriber, waterfall: Waterfall) -> None:
    """Compiles and captures the steps that every load needs."""
    compiled, steps = programs_compiled(), 0

    def progress(done: int, total: int) -> None:
        nonlocal steps
        waterfall.mark("capture")
        steps = total
    transcriber.warm_up(progress)
    LOG.info(line("startup", stage="compile and capture", steps=steps,
                  compiled=programs_compiled() - compiled, seconds=waterfall.stages["capture"]))
