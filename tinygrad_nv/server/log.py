"""Log lines: one event each, `time event key=value …`, on stderr.

Protocol: `line` makes one. Values with spaces or quotes are written as JSON strings, so a line can be split
into fields, and no value can start another line. `periodic` logs the engine's statistics while it is active.
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

LEVELS = {"critical": logging.CRITICAL, "error": logging.ERROR, "warning": logging.WARNING,
          "info": logging.INFO, "debug": logging.DEBUG, "trace": 5}     # trace is uvicorn's
LOG = logging.getLogger("tinygrad_nv.server")
MOST_CHARACTERS = 500       # limit: characters of a value in a log line; the rest is cut off


def line(event: str, **fields: Any) -> str:
    """`event key=value …`, without fields that are None."""
    shown = {key: _format_value(value) for key, value in fields.items() if value is not None}
    return " ".join([event, *(f"{key}={value}" for key, value in shown.items())])


def _format_value(value: Any) -> str:
    if isinstance(value, float): return f"{value:.4g}" if abs(value) < 1 else f"{value:.1f}"
    text = str(value)[:MOST_CHARACTERS]
    plain = text.isascii() and text.isprintable() and text != "" and not set(text) & set(' "=\\')
    return text if plain else json.dumps(text)


class _Formatter(logging.Formatter):
    """Time in UTC to the millisecond. Messages of other libraries become one event, too."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z"
        text = record.getMessage()
        if record.name != LOG.name: text = line("log", level=record.levelname, name=record.name, text=text)
        if record.exc_info: text += "\n" + self.formatException(record.exc_info)
        return f"{at} {text}"


class _Stderr(logging.Handler):
    """Writes to the current stderr. Write errors do not end a request."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, ValueError): print(self.format(record), file=sys.stderr, flush=True)


def set_up(uvicorn_level: str = "warning") -> None:
    """Sends our log lines, those of uvicorn from `uvicorn_level` on, and warnings of OpenTelemetry, to
    stderr."""
    handler = _Stderr()
    handler.setFormatter(_Formatter())
    for name, level in ((LOG.name, logging.INFO), ("uvicorn", LEVELS[uvicorn_level]),
                        ("opentelemetry", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


def request_line(record: Record, method: str, path: str, status: int) -> str:
    """The line of a finished request. Times in milliseconds."""
    now = time.perf_counter()
    served = record.params is not None
    counted = served or record.prompt_tokens > 0    # embeddings have no sampling parameters
    return line("request", id=record.id, client_id=record.client_id, method=method, path=path, status=status,
                stream=int(record.stream) if served else None,
                prompt_tokens=record.prompt_tokens if counted else None,
                cached_tokens=record.cached_tokens if served else None,
                output_tokens=record.output_tokens if served else None,
                finish=",".join(record.reasons) or None, error=record.error,
                ttft_ms=None if record.first is None else (record.first - record.started) * 1e3,
                total_ms=(now - record.started) * 1e3)


async def periodic(service: Service, every_s: float) -> None:
    """Logs a line every `every_s` seconds while the engine is active, for ever."""
    before, at, shown = service.engine.stats(), time.perf_counter(), False
    while True:
        await asyncio.sleep(every_s)
        await service.engine.refresh_stats()
        now, stats = time.perf_counter(), service.engine.stats()
        busy = bool(stats.running or stats.waiting or stats.generated_tokens != before.generated_tokens)
        # one more line when it becomes idle, so that the last line is not a busy one
        if busy or shown: LOG.info(engine_line(stats, before, now - at))
        before, at, shown = stats, now, busy


def engine_line(stats: Any, before: Any, seconds: float) -> str:
    """The engine's statistics, with rates since `before`."""
    return line("engine", running=stats.running, waiting=stats.waiting, kv_used=float(stats.kv_used),
                prompt_tok_s=(stats.prompt_tokens - before.prompt_tokens) / seconds,
                gen_tok_s=(stats.generated_tokens - before.generated_tokens) / seconds,
                prefix_hits=stats.prefix_hits, preempted=stats.preempted)
