"""`tinygrad-nv run-batch -i FILE -o FILE`: a file of requests, as vLLM's run-batch and OpenAI's batches have
it.

Protocol: a line of the input is `{"custom_id", "method": "POST", "url", "body"}`, where `url` is one of
`URLS` and `body` what that endpoint takes. A line of the output has the request's `custom_id` and its
`response` (`status_code`, `request_id`, `body`) or `error`; lines are in the order of the input, each written
once all before it are done. The requests are those of the server (server/app.py), without a network: they run
as one batch. A line that is no request, or is refused, is an error of that line alone. `-` is stdin or
stdout.
"""
from __future__ import annotations

import argparse
import asyncio
import codecs
import contextlib
import importlib
import json
import re
import secrets
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from tinygrad_nv import files
from tinygrad_nv.cli import vllm_options
from tinygrad_nv.cli.engine_options import add_engine_options, choose_model
from tinygrad_nv.cli.model_path import list_names
from tinygrad_nv.errors import NVError, RequestError

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings",
        "/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank", "/pooling", "/classify")
WANTED = '{"custom_id": …, "method": "POST", "url": …, "body": {…}}'
BODY_BYTES = 64 << 20   # limit: bytes of a line of run-batch
FILE_BYTES = 1 << 30    # limit: bytes of a file of run-batch
REQUEST_S = 30 * 86400.0
NAME = re.compile(rb'"custom_id"\s*:\s*("(?:[^"\\]|\\.){0,512}")')


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser], directory: str,
                model: Callable[[str | None, bool], Path]) -> None:
    """Adds `run-batch`."""
    command = commands.add_parser("run-batch", help="answer a file of requests, as vLLM's run-batch",
                                  usage="%(prog)s [options] -i FILE -o FILE [MODEL]")
    command.add_argument("model", nargs="?", metavar="MODEL", help=directory)
    command.add_argument("-i", "--input-file", required=True, metavar="FILE",
                         help="JSON lines of custom_id, method, url, body; - is stdin")
    command.add_argument("-o", "--output-file", required=True, metavar="FILE", help="- is stdout")
    engine = add_engine_options(command)
    engine.add_argument("--task", default="auto", metavar="T",
                        help="generate or embed (default auto: what the model's files say)")
    engine.add_argument("--served-model-name", nargs="+", metavar="NAME",
                        help="names that requests may use (default: the directory's name, and MODEL)")
    vllm_options.add_options(command)
    command.set_defaults(run=lambda arguments: run(arguments, model(choose_model(arguments),
                                                                    arguments.download)))


def run(arguments: argparse.Namespace, directory: Path) -> int:
    """The command `run-batch`."""
    try: importlib.import_module("tinygrad_nv.server.app")  # before anything is loaded
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("tinygrad_nv"): raise
        raise NVError(f"the Python package {error.name} is not installed", "what serving needs",
                      "pip install starlette uvicorn prometheus_client llguidance") from error
    from tinygrad_nv.cli import console
    lines = _lines(arguments.input_file)
    with _open_output(arguments.output_file) as out:
        llm = console.load(directory, arguments)
        names = tuple(list_names(arguments.served_model_name, choose_model(arguments), directory))
        try: failed = asyncio.run(answer_lines(llm, names, lines, out))
        finally: llm.close()
    print(f"[{len(lines)} requests · {failed} failed]", file=sys.stderr)
    return 0


def _lines(name: str) -> list[bytes]:
    """The lines of a file, those that are none among them: each fails alone."""
    try:
        if name == "-": return _split(sys.stdin.buffer)
        # a FIFO without a writer would be waited for; the shell's <(…) has one
        if not name.startswith("/dev/fd/"): files.regular_size(name)
        with open(name, "rb") as file: return _split(file)
    except (OSError, ValueError) as error:
        raise RequestError(f"{name[:200]} cannot be read: {error}",
                           f"a file of JSON lines, of {FILE_BYTES} bytes at most",
                           "change --input-file, or split it") from error


def _split(file: IO[bytes]) -> list[bytes]:
    """Lines, of which those that are too long keep their beginning. Raises ValueError for too many bytes."""
    made, total, begins = list[bytes](), 0, True
    while line := file.readline(BODY_BYTES + 1):
        if not total: line = line.removeprefix(codecs.BOM_UTF8)
        if begins and line.strip(): made.append(line)
        total, begins = total + len(line) + 1, line.endswith(b"\n")
        if total > FILE_BYTES: raise ValueError(f"it has more than {FILE_BYTES} bytes")
    return made


@contextlib.contextmanager
def _open_output(name: str) -> Iterator[IO[str]]:
    if name == "-":
        yield sys.stdout
        return
    with open(name, "w", encoding="utf-8", errors="backslashreplace") as file: yield file


async def answer_lines(llm: Any, names: tuple[str, ...], lines: list[bytes], out: IO[str]) -> int:
    """Answers all lines at a time, and writes the answers in order. Returns how many failed."""
    from tinygrad_nv.engine.async_engine import AsyncEngine
    from tinygrad_nv.server.app import application
    from tinygrad_nv.server.limits import RequestLimits
    from tinygrad_nv.server.metrics import Metrics
    from tinygrad_nv.server.service import EmbeddingEngineClient, Service
    generates = llm.embedder is None
    engine = AsyncEngine(llm) if generates else EmbeddingEngineClient(llm.embedder.engine)
    limits = RequestLimits(body_bytes=BODY_BYTES, request_s=REQUEST_S)
    service = Service(engine, llm, names, limits, Metrics(names[0], llm.length, engine.stats),
                      embedder=llm.embedder)
    if isinstance(engine, AsyncEngine): await engine.start()
    app, failed = application(service), 0
    # the engine's queue has an end; so many keep every step full
    at_a_time = asyncio.Semaphore(4 * llm.engine.max_seqs if generates else 64)
    taken = set[str]()
    tasks = deque(asyncio.create_task(_answer(app, line, number, at_a_time, taken))
                  for number, line in enumerate(lines, 1))
    try:
        while tasks:
            made = await tasks[0]
            tasks.popleft()     # an answer that is written is no longer kept
            failed += made["error"] is not None
            out.write(_format_line(made) + "\n")
            out.flush()
    finally:
        for task in tasks: task.cancel()
        await engine.stop()
    return failed


def _format_line(made: dict[str, Any]) -> str:
    """Returns a line of the output; half a surrogate pair, which no UTF-8 has, is escaped."""
    text = json.dumps(made, ensure_ascii=False)
    return json.dumps(made) if any("\ud800" <= each <= "\udfff" for each in text) else text


async def _answer(app: Any, line: bytes, number: int, at_a_time: asyncio.Semaphore,
                  taken: set[str]) -> dict[str, Any]:
    """One line of the output. `taken` are the custom_ids of lines before it. A line is parsed when its turn
    comes: lines that wait are bytes."""
    async with at_a_time: return await _answer_now(app, line, number, taken)


async def _answer_now(app: Any, line: bytes, number: int, taken: set[str]) -> dict[str, Any]:
    asked: dict[str, Any] = {}
    try:
        asked = _object(line)
        _check(asked)
        if asked["custom_id"] in taken:
            raise RequestError(f"custom_id {asked['custom_id'][:80]!r} is that of a line before",
                               "a custom_id of its own")
        taken.add(asked["custom_id"])
        status, body = await _post(app, asked["url"], json.dumps(asked["body"]).encode())
    except RequestError as error: status, body = 400, _error(f"line {number}: {error}", 400)
    except Exception as error:      # whatever it is, the other lines are answered
        print(f"line {number}: {type(error).__name__}: {str(error)[:500]}", file=sys.stderr)
        status, body = 500, _error(f"line {number} could not be answered: {type(error).__name__}", 500)
    name = asked.get("custom_id") if asked else _name(line)
    found = {"status_code": status, "request_id": f"batch-{secrets.token_hex(12)}",
             "body": body if status == 200 else None}
    return {"id": f"batch_req_{secrets.token_hex(12)}",
            "custom_id": name if isinstance(name, str) else None,
            "response": found,
            "error": None if status == 200 else body.get("error", body)}


def _error(message: str, code: int) -> dict[str, Any]:
    """The body of an error, as the server's."""
    from tinygrad_nv.server.errors import APIError
    return APIError(code, message).body()


def _name(line: bytes) -> str | None:
    """The custom_id of a line that is no request, where there is one to read."""
    if (found := NAME.search(line)) is None: return None
    try: return str(json.loads(found[1]))
    except ValueError: return None


def _object(line: bytes) -> dict[str, Any]:
    if len(line) > BODY_BYTES:
        raise RequestError("the line is longer than is read", f"{BODY_BYTES} bytes at most",
                           "shorten the request")
    try: asked = json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the line is not JSON: {error}", WANTED) from error
    if not isinstance(asked, dict): raise RequestError("the line is no object", WANTED)
    return asked


def _no_constant(name: str) -> None:
    raise ValueError(f"{name}, which JSON has not")


def _check(asked: dict[str, Any]) -> None:
    """Raises `RequestError` for what is no request."""
    for name, kind in (("custom_id", str), ("url", str), ("body", dict)):
        if not isinstance(asked.get(name), kind):
            raise RequestError(f"{name} is {repr(asked.get(name))[:80]}", WANTED)
    if asked.get("method", "POST") != "POST":
        raise RequestError(f"method is {repr(asked['method'])[:80]}", "POST")
    if asked["url"] not in URLS:
        raise RequestError(f"url is {repr(asked['url'])[:80]}", f"one of {', '.join(URLS)}")
    if asked["body"].get("stream"):
        raise RequestError("stream is true", "an answer that is whole", "leave stream out of the body")


async def _post(app: Any, path: str, body: bytes) -> tuple[int, Any]:
    """A request to the application, as a web server hands it over. Returns the status and the JSON."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if messages: return messages.pop()
        await asyncio.Event().wait()  # a client that stays
        raise AssertionError

    async def send(message: dict[str, Any]) -> None: sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"),
               (b"content-length", str(len(body)).encode())]
    await app({"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
               "path": path,
               "raw_path": path.encode(), "root_path": "", "scheme": "http", "query_string": b"",
               "headers": headers, "client": ("run-batch", 0), "server": ("run-batch", 0)}, receive, send)
    text = b"".join(each.get("body", b"") for each in sent if each["type"] == "http.response.body")
    return sent[0]["status"], json.loads(text)
