"""Log lines: one event each, `time event key=value …`, on stderr.

Protocol: `line` makes one; values with spaces or quotes are quoted as JSON strings, so that a line splits
into fields by rule and no input can begin a line of its own. `Periodic` tells what the engine does while it
does something.
"""
from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import time
from typing import Any

from tinygrad_nv.server.record import Record
from tinygrad_nv.server.service import Service

LOG = logging.getLogger("tinygrad_nv.server")


def line(event: str, **fields: Any) -> str:
    """`event key=value …`, without fields that are None."""
    told = {key: _shown(value) for key, value in fields.items() if value is not None}
    return " ".join([event, *(f"{key}={value}" for key, value in told.items())])


def _shown(value: Any) -> str:
    if isinstance(value, float): return f"{value:.4g}" if abs(value) < 1 else f"{value:.1f}"
    text = str(value)
    plain = text.isascii() and text.isprintable() and text != "" and not set(text) & set(' "=\\')
    return text if plain else json.dumps(text[:500])


class _Formatter(logging.Formatter):
    """Time in UTC to the millisecond; what other libraries log becomes one event, too."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z"
        text = record.getMessage()
        if record.name != LOG.name: text = line("log", level=record.levelname, name=record.name, text=text)
        if record.exc_info: text += "\n" + self.formatException(record.exc_info)
        return f"{at} {text}"


class _Stderr(logging.Handler):
    """Writes to what is stderr now. A reader that went away ends no request."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, ValueError): print(self.format(record), file=sys.stderr, flush=True)


def set_up() -> None:
    """Sends our lines, and warnings of uvicorn, to stderr."""
    handler = _Stderr()
    handler.setFormatter(_Formatter())
    for name, level in ((LOG.name, logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


def request_line(record: Record, method: str, path: str, status: int) -> str:
    """The line of a request that has ended. Times in milliseconds."""
    now = time.perf_counter()
    served = record.params is not None
    return line("request", id=record.id, method=method, path=path, status=status,
                stream=int(record.stream) if served else None,
                prompt_tokens=record.prompt_tokens if served else None,
                cached_tokens=record.cached_tokens if served else None,
                output_tokens=record.output_tokens if served else None,
                finish=",".join(record.reasons) or None, error=record.error,
                ttft_ms=None if record.first is None else (record.first - record.begun) * 1e3,
                total_ms=(now - record.begun) * 1e3)


async def periodic(service: Service, every_s: float) -> None:
    """Writes a line each `every_s` seconds while there is something to tell, for ever."""
    before, at, told = service.engine.stats(), time.perf_counter(), False
    while True:
        await asyncio.sleep(every_s)
        now, stats = time.perf_counter(), service.engine.stats()
        busy = bool(stats.running or stats.waiting or stats.generated_tokens != before.generated_tokens)
        # one more line when it becomes idle, so that the last one does not say it is busy
        if busy or told: LOG.info(engine_line(stats, before, now - at))
        before, at, told = stats, now, busy


def engine_line(stats: Any, before: Any, seconds: float) -> str:
    """What the engine does, with rates since `before`."""
    return line("engine", running=stats.running, waiting=stats.waiting, kv_used=float(stats.kv_used),
                prompt_tok_s=(stats.prompt_tokens - before.prompt_tokens) / seconds,
                gen_tok_s=(stats.generated_tokens - before.generated_tokens) / seconds,
                prefix_hits=stats.prefix_hits, preempted=stats.preempted)
