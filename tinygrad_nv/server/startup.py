"""From the command line to a listening server, with the time of every stage.

Protocol: `run` binds the port before it loads the model, so that a port conflict is reported at once. Then it
loads and warms up the model, and serves until it is told to stop. Each stage is logged when it ends, and is a
line of the waterfall, so that a start that hangs shows where. Warm-up may take minutes; it logs progress
every few seconds.

`Waterfall()` is a breakdown of the startup time, without gaps. It starts with the process, not with the
object: the interpreter's start and imports are its first stage. `mark(name)` assigns all the time since the
last mark to `name`, so the stages add up to the total. `lines()` shows them, each with a bar at its place.
"""
from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from logging import DEBUG, INFO
from pathlib import Path
from typing import Any

from tinygrad.helpers import DEV

from tinygrad_nv import config
from tinygrad_nv.engine.async_engine import AsyncEngine
from tinygrad_nv.engine.command_line import llm_arguments
from tinygrad_nv.engine.llm import LLM
from tinygrad_nv.engine.worker import prebuilt_steps
from tinygrad_nv.errors import RequestError
from tinygrad_nv.runtime.programs import programs_compiled
from tinygrad_nv.server.adapters import AdapterNames
from tinygrad_nv.server.limits import RequestLimits
from tinygrad_nv.server.log import LOG, line, set_up
from tinygrad_nv.server.metrics import Metrics
from tinygrad_nv.server.origins import Hosts
from tinygrad_nv.server.service import CORS, EmbeddingEngineClient, Parsers, Service
from tinygrad_nv.server.serving import HTTPOptions, Server, bind, bind_path, serve, url
from tinygrad_nv.server.tracing import Tracer
from tinygrad_nv.version import __version__

PROGRESS_S = 5.0    # between lines about a warm-up
# tokenizing as many takes about a second, and up to 400 MB meanwhile
MAX_PROMPT_BYTES = 1 << 20      # limit: bytes of a prompt, or 16 for each token of --max-model-len if more
BYTES_PER_TOKEN = 16
BAR = 40


def run(arguments: argparse.Namespace, directory: Path) -> None:
    """The command `serve`. Returns when the server was told to stop."""
    waterfall = Waterfall()
    set_up(arguments.uvicorn_log_level)
    waterfall.mark("import")
    options = http_options(arguments)
    options.check()
    endpoint = arguments.otlp_traces_endpoint
    tracer = None if endpoint is None else Tracer.to(endpoint)
    bound_socket, keys = open_socket(arguments), api_keys(arguments)
    if arguments.device: use(arguments.device)
    # a text is tokenized in one thread: the others are the engine's (and a fork would complain of them)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    llm = load(arguments, directory, waterfall)
    names = tuple(arguments.served_model_name)
    adapters = open_adapters(llm, names, arguments)
    if arguments.enable_sleep_mode: llm.sleeper.require_memory()
    if arguments.warm_up: warm_up(llm, waterfall)
    # loaded objects are permanent: exclude them from garbage collection
    gc.collect()
    gc.freeze()
    engine = AsyncEngine(llm) if llm.embedder is None else EmbeddingEngineClient(llm.embedder.engine)
    metrics = Metrics(names[0], llm.length, engine.stats, arguments.metrics_prefix,
                      llm.compilations_after_ready)
    most = None if llm.embedder is not None else llm.limit
    bounds = replace(limits(arguments), output_tokens=most, context=llm.length)
    service = Service(engine, llm, names, bounds, metrics, keys, llm.embedder, parsers(arguments),
                      adapters=adapters, cors=cors(arguments), hosts=hosts(arguments),
                      shared_prefixes=arguments.shared_prefix_cache,
                      sleeping=llm if arguments.enable_sleep_mode else None,
                      vision=None if llm.vision is None else llm,
                      tokenizer_info=arguments.enable_tokenizer_info_endpoint,
                      prompt_details=arguments.enable_prompt_tokens_details,
                      root=arguments.model or str(directory),
                      fingerprint=fingerprint(llm), tracer=tracer,
                      scale_out=arguments.enable_scale_out,
                      strict=arguments.strict_requests,
                      force_usage=arguments.enable_force_include_usage,
                      ids_for_texts=arguments.return_tokens_as_token_ids)
    LOG.info(capacity_line(llm))

    def ready() -> None:
        waterfall.mark("listen")
        for each in waterfall.lines(): LOG.info("waterfall %s", each)
        LOG.info(line("ready", url=url(bound_socket, options), model=",".join(names), device=llm.device,
                      pid=os.getpid(),
                      keys=len(keys), seconds=waterfall.total_s))
        if llm.embedder is None: llm.follow(_later(), _log_missed)

    async def main() -> None:
        if isinstance(engine, AsyncEngine): await engine.start()
        await serve(Server(service, options), [bound_socket], arguments.log_interval, ready)

    try: asyncio.run(main())
    finally:
        llm.close()
        if tracer is not None: tracer.close()
    LOG.info(line("stopped"))


def use(device: str) -> None:
    """Makes `device` tinygrad's default in this process."""
    try: DEV.value = device
    except RuntimeError as error:
        raise RequestError(f"--device {device}: {error}", "a device of tinygrad, such as CPU or CUDA",
                           "run `tinygrad-nv doctor` to see what this machine has") from error


def load(arguments: argparse.Namespace, directory: Path, waterfall: Waterfall) -> LLM:
    """Loads the model of the command line."""
    def stage(name: str) -> None:
        waterfall.mark(name)
        LOG.info(line("startup", stage=name, seconds=waterfall.stages[name]))
    llm = LLM(directory, stage=stage, **model_options(arguments))
    if arguments.seed is not None: llm.defaults = replace(llm.defaults, seed=arguments.seed)
    if (given := arguments.chat_template) is not None:
        llm.tokenizer = llm.require_tokenizer().with_template(given)
    if (form := arguments.chat_template_content_format) != "auto":
        llm.tokenizer = replace(llm.require_tokenizer(), content_format=form)
    most = max(MAX_PROMPT_BYTES, BYTES_PER_TOKEN * llm.length)
    for each in (llm, llm.embedder):
        if each is None or each.tokenizer is None: continue
        each.tokenizer = replace(each.tokenizer, most=most)
    return llm


def open_adapters(llm: LLM, names: tuple[str, ...], arguments: argparse.Namespace) -> AdapterNames | None:
    """The adapters of --lora-modules, read; None of a model that is served without."""
    if llm.embedder is not None or llm.adapters is None: return None
    # vLLM has no option for it
    of_environment = os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "").lower() in ("1", "true")
    made = AdapterNames(llm.adapters.cache, names, arguments.allow_runtime_lora_updating or of_environment)
    for name, path in lora_modules(arguments, names):
        made.add(name, path)
        LOG.info(line("adapter", name=name, path=path))
    return made


def warm_up(llm: LLM, waterfall: Waterfall) -> None:
    """Compiles and captures the steps that every load needs. The time of a step that compiled kernels counts
    as "compile", that of others as "capture"."""
    compiled = first = programs_compiled()
    steps, logged = 0, time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal compiled, steps, logged
        if 0 < done < total and (now_s := time.monotonic()) >= logged + PROGRESS_S:
            logged = now_s
            LOG.info(line("warm_up", done=done, steps=total))
        waterfall.mark("capture" if (now := programs_compiled()) == compiled else "compile")
        compiled, steps = now, max(steps, total)

    if llm.embedder is not None: llm.embedder.warm_up(progress)
    else: _warm_up_generation(llm, progress)
    llm.ready()
    LOG.info(line("startup", stage="compile and capture", steps=steps, compiled=compiled - first,
                  seconds=waterfall.stages.get("compile", 0) + waterfall.stages.get("capture", 0)))


def _warm_up_generation(llm: LLM, progress: Callable[[int, int], None]) -> None:
    if (store := llm.runner.step_store) is not None and store.note:
        # that there are none is usual: they are made for releases
        LOG.log(DEBUG if store.note == prebuilt_steps.MISSING else INFO,
                line("prebuilt_steps", used=0, why=store.note))
    llm.capture(progress)
    for temperature in (0.0, 1.0):
        llm.warm_up(replace(llm.defaults, temperature=temperature), 1)
        progress(0, 0)


def _log_missed(count: int) -> None:
    LOG.warning(line("warm_up_later", missed=count))


def _later() -> Callable[[int, int], None]:
    """Logs how far steps are that follow after `ready`, where that takes long."""
    begun = logged = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal logged
        now_s = time.monotonic()
        if done < total and now_s < logged + PROGRESS_S: return
        logged = now_s
        LOG.info(line("warm_up_later", done=done, steps=total, seconds=now_s - begun))
    return progress


def model_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `LLM` for a command line."""
    return {**llm_arguments(arguments), "max_queue": arguments.max_queue, **lora_options(arguments)}


def api_keys(arguments: argparse.Namespace) -> frozenset[str]:
    """The API keys of the command line, else that of NV_API_KEY, or of VLLM_API_KEY: who guards vLLM with it
    shall not be without a guard here."""
    of_environment = str(config.get("NV_API_KEY")) or os.environ.get("VLLM_API_KEY", "")
    given = arguments.api_key or ([of_environment] if of_environment else [])
    if not all(key and key.isascii() and key.isprintable() and " " not in key for key in given):
        raise RequestError("an API key is empty, or has other than printable ASCII characters",
                           "a key that a header can carry", "change --api-key, NV_API_KEY or VLLM_API_KEY")
    return frozenset(given)


def parsers(arguments: argparse.Namespace) -> Parsers:
    """How answers are parsed, as the command line says."""
    return Parsers(arguments.reasoning_parser, arguments.tool_call_parser, arguments.enable_auto_tool_choice,
                   arguments.trust_request_chat_template)


def cors(arguments: argparse.Namespace) -> CORS:
    """Returns the rights of pages of other origins, as the command line says."""
    a = arguments
    return CORS(a.allowed_origins, a.allowed_methods, a.allowed_headers, a.allow_credentials)


def hosts(arguments: argparse.Namespace) -> Hosts:
    """The hosts that requests may be for, as the command line says; clients of a Unix socket may name it."""
    named = (Path(arguments.uds).name,) if arguments.uds else ()
    return Hosts.of(arguments.host, (*arguments.allowed_hosts, *named))


def open_socket(arguments: argparse.Namespace) -> socket.socket:
    """The socket that the command line names, bound."""
    return bind_path(arguments.uds) if arguments.uds else bind(arguments.host, arguments.port)


def http_options(arguments: argparse.Namespace) -> HTTPOptions:
    """The options of uvicorn on the command line."""
    a = arguments
    return HTTPOptions(a.root_path, a.ssl_keyfile, a.ssl_certfile, a.ssl_ca_certs, a.ssl_cert_reqs)


def limits(arguments: argparse.Namespace) -> RequestLimits:
    """The limits set on the command line."""
    return RequestLimits(body_bytes=arguments.max_body_bytes, header_s=arguments.header_timeout,
                         body_s=arguments.body_timeout, request_s=arguments.request_timeout,
                         drain_s=arguments.drain_timeout, logprobs=arguments.max_logprobs,
                         images=arguments.max_images, image_pixels=arguments.max_image_pixels,
                         audio_s=arguments.max_audio_seconds, connections=arguments.max_connections)


def fingerprint(llm: LLM) -> str:
    """Names what computes an answer: this version, and a hash of the model's config and dtype, of its device
    and the context length."""
    made = llm.embedder or llm
    facts = repr((made.config, str(made.dtype), llm.device, llm.length))
    return f"tinygrad-nv-{__version__}-{hashlib.sha256(facts.encode()).hexdigest()[:8]}"


def capacity_line(llm: LLM) -> str:
    """The capacity of the KV cache of each replica, in tokens and in requests of full length; of an embedding
    model that of a step."""
    if (made := llm.embedder) is not None:
        return line("embeddings", dimensions=made.config.width, pooling=made.config.pooling.kind,
                    max_model_len=llm.length, max_num_batched_tokens=made.runner.max_tokens,
                    max_num_seqs=made.runner.max_seqs)
    pages, runner = llm.core.pool.device.total, llm.runner
    requests = pages / runner.groups.num_pages(llm.length, runner.page_size, 1)
    replicas = 1 if llm.ranks is None else llm.ranks.num_replicas
    return line("kv_cache", tokens=int(requests * llm.length), pages=pages, page_size=runner.page_size,
                groups=len(runner.groups.windows), max_model_len=llm.length, concurrency=f"{requests:.2f}x",
                max_num_seqs=llm.core.config.max_seqs, replicas=replicas if replicas > 1 else None)


def lora_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `LLM`."""
    return {"enable_lora": bool(arguments.enable_lora or arguments.lora_modules),
            "max_loras": arguments.max_loras, "max_lora_rank": arguments.max_lora_rank,
            "max_cpu_loras": arguments.max_cpu_loras, "lora_dtype": arguments.lora_dtype}


def lora_modules(arguments: argparse.Namespace, names: tuple[str, ...]) -> list[tuple[str, str]]:
    """Names and paths of --lora-modules, of a model that is served under `names`. Raises `RequestError`."""
    return [_module(text, names) for text in arguments.lora_modules]


def _module(text: str, names: tuple[str, ...]) -> tuple[str, str]:
    if not text.lstrip().startswith("{"):
        name, there, path = text.partition("=")
        if not (name and there and path): raise _wrong(text)
        return name, path
    try: data = json.loads(text)
    except ValueError as error: raise _wrong(text) from error
    known = {"name", "path", "base_model_name"}
    if not isinstance(data, dict) or set(data) - known or not all(
            isinstance(data.get(key), str) and data[key] for key in ("name", "path")): raise _wrong(text)
    base = data.get("base_model_name")
    if base is not None and base not in names:
        raise RequestError(f"--lora-modules: the base of {data['name']!r} is {base!r}", ", ".join(names),
                           "leave base_model_name out, or serve the model under that name")
    return data["name"], data["path"]


def _wrong(text: str) -> RequestError:
    return RequestError(f"--lora-modules: {text[:100]!r}", 'NAME=PATH, or {"name": …, "path": …}',
                        "change --lora-modules")


def process_age_s() -> float:
    """Seconds since this process was started, to 10 ms; elsewhere than on Linux, its seconds of work."""
    try:
        # field 22 behind the name, which may hold spaces and parentheses
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError): return time.process_time()


class Waterfall:
    """The stages of a start: name to seconds, in the order of their first marks."""

    def __init__(self) -> None:
        self.started = time.perf_counter() - process_age_s()
        self.last = self.started
        self.stages: dict[str, float] = {}

    @property
    def total_s(self) -> float:
        """Seconds from the process's start to the last mark."""
        return self.last - self.started

    def mark(self, name: str) -> None:
        """Assigns the time since the last mark to `name`."""
        now = time.perf_counter()
        spent, self.last = now - self.last, now
        self.stages[name] = self.stages.get(name, 0.0) + spent

    def lines(self) -> list[str]:
        """One line for each stage, and their sum."""
        width, total, at, out = max(map(len, self.stages)), self.total_s or 1.0, 0.0, []
        for name, seconds in self.stages.items():
            first, last = round(BAR * at / total), round(BAR * (at + seconds) / total)
            bar = (" " * first + "█" * max(1, last - first)).ljust(BAR)
            out.append(f"{name:{width}} {seconds:8.3f} s  |{bar[:BAR]}|")
            at += seconds
        return [*out, f"{'sum':{width}} {total:8.3f} s"]
