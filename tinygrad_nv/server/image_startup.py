"""From the command line to a server that makes images: startup.py for Stable Diffusion.

Protocol: as startup.py, whose options of models that generate text have no effect here.
"""
from __future__ import annotations

import argparse
import asyncio
import gc
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tinygrad import dtypes

from tinygrad_nv.engine.image_engine import ImageEngine
from tinygrad_nv.engine.outputs import Delta
from tinygrad_nv.engine.prompts import Prompt, TextOrTokens
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.text.tokenizer import Tokenizer
from tinygrad_nv.errors import NVError, RequestError
from tinygrad_nv.models.diffusion.pipeline import ImageParams, StableDiffusion
from tinygrad_nv.models.diffusion.png import require_pillow
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

DTYPES = {"auto": dtypes.float32, "float32": dtypes.float32, "float16": dtypes.float16,
          "bfloat16": dtypes.bfloat16}


def images_only() -> RequestError:
    """The error of a prompt for text."""
    return RequestError("the model makes images", "a prompt for an image", "POST /v1/images/generations")


class ImageModel:
    """`StableDiffusion` as the server knows models: it answers no prompts with text."""

    def __init__(self, model: StableDiffusion) -> None:
        self.defaults, self.length = SamplingParams(), model.tokenizers[0].length
        self.eos: tuple[int, ...] = (model.tokenizers[0].end,)

    def tokenize(self, prompt: TextOrTokens, truncate_prompt_tokens: int | None = None,
                 truncation_side: str = "left") -> list[int]:
        """Raises `RequestError`."""
        raise images_only()

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (),
                    /, **extra: Any) -> list[int]:
        """Raises `RequestError`."""
        raise images_only()

    def require_tokenizer(self) -> Tokenizer:
        """Raises `RequestError`."""
        raise images_only()


class ImageEngineClient:
    """`ImageEngine`, as the server knows engines."""

    def __init__(self, engine: ImageEngine) -> None: self.engine = engine

    @property
    def failure(self) -> NVError | None: return None

    def generate(self, prompt: Prompt, params: SamplingParams, *, request_id: str | None = None,
                 priority: int = 0, lora_request: object = None) -> AsyncIterator[Delta]:
        raise images_only()

    def stats(self) -> Any: return self.engine.stats()

    async def refresh_stats(self) -> None: """They are always current."""

    async def stop(self, drain_s: float = 0.0) -> None: await self.engine.stop(drain_s)


def run(arguments: argparse.Namespace, directory: Path) -> None:
    """The command `serve` of Stable Diffusion. Returns when the server was told to stop."""
    waterfall = Waterfall()
    set_up(arguments.uvicorn_log_level)
    waterfall.mark("import")
    require_pillow()
    options = http_options(arguments)
    options.check()
    bound_socket, keys = open_socket(arguments), api_keys(arguments)
    if arguments.device: use(arguments.device)
    model = load(arguments, directory)
    waterfall.mark("load weights")
    if arguments.warm_up: warm_up(model, waterfall)
    gc.collect()
    gc.freeze()
    names = tuple(arguments.served_model_name)
    engine = ImageEngine(model, arguments.max_queue)
    metrics = Metrics(names[0], model.tokenizers[0].length, engine.stats, arguments.metrics_prefix)
    service = Service(ImageEngineClient(engine), ImageModel(model), names, limits(arguments), metrics, keys,
                      cors=cors(arguments), hosts=hosts(arguments), images=engine,
                      strict=arguments.strict_requests)
    LOG.info(line("images", xl=model.xl, size=f"{model.size}x{model.size}"))

    def ready() -> None:
        waterfall.mark("listen")
        for each in waterfall.lines(): LOG.info("waterfall %s", each)
        LOG.info(line("ready", url=url(bound_socket, options), model=",".join(names), device=model.device,
                      pid=os.getpid(), keys=len(keys), seconds=waterfall.total_s))

    try: asyncio.run(serve(Server(service, options), [bound_socket], arguments.log_interval, ready))
    finally: engine.close()
    LOG.info(line("stopped"))


def load(arguments: argparse.Namespace, directory: Path) -> StableDiffusion:
    """Loads the model of the command line. Raises `RequestError` for a dtype that there is not."""
    if arguments.dtype not in DTYPES:
        raise RequestError(f"--dtype {arguments.dtype}", f"one of: {', '.join(DTYPES)}")
    return StableDiffusion(directory, dtype=DTYPES[arguments.dtype])


def warm_up(model: StableDiffusion, waterfall: Waterfall) -> None:
    """Compiles and captures the steps of an image of the model's own size."""
    compiled = programs_compiled()
    model.generate("", ImageParams(steps=1, seed=0))
    waterfall.mark("capture")
    LOG.info(line("startup", stage="compile and capture", steps=1, compiled=programs_compiled() - compiled,
                  seconds=waterfall.stages["capture"]))
