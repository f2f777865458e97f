"""Answers of a server to the requests of the table, in the form in which they are recorded.

An answer is a dictionary: `status`, `type` (of its content), and `body` (JSON, or a text) or `events` (those
of a stream, each with its name and its data). What differs from run to run is replaced: of identifiers their
random part, of times all.
"""
from __future__ import annotations

import http.client
import json
import re
from typing import Any
from urllib.parse import urlsplit

from tests.support.vllm.request import Request

TIMES = {"created", "created_at", "completed_at", "expires_at"}
IDENTIFIERS = {"id", "request_id", "item_id", "call_id", "response_id", "tool_call_id", "id_"}
RANDOM = re.compile(r"[0-9a-zA-Z]*[0-9][0-9a-zA-Z-]*$")
MESSAGE = 160       # characters of an error's message that are kept
Answer = dict[str, Any]


def plain(value: Any, name: str = "") -> Any:
    """Returns JSON without what differs from run to run. `name` is that of the field."""
    if isinstance(value, dict): return {key: plain(each, key) for key, each in value.items()}
    if isinstance(value, list): return [plain(each, name) for each in value]
    if name in TIMES and isinstance(value, int | float): return 0
    if isinstance(value, float): return round(value, 5)
    if not isinstance(value, str): return value
    if name in IDENTIFIERS and len(value) >= 12: return RANDOM.sub("*", value)
    if name == "system_fingerprint" or name == "version": return "*"
    return value[:MESSAGE] if name == "message" else value


def read_events(text: str) -> list[list[Any]]:
    """Returns the events of a stream: the name, "" where there is none, and the data."""
    events = []
    for block in re.split(r"\r?\n\r?\n", text):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        if "data" not in lines: continue
        data = lines["data"]
        events.append([lines.get("event", ""), data if data == "[DONE]" else plain(json.loads(data))])
    return events


def ask(url: str, request: Request, timeout: float = 120.0) -> Answer:
    """Returns the answer of the server at `url`."""
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=timeout)
    try:
        connection.request(request.method, request.path, request.data(), dict(request.headers))
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
        kind = response.getheader("Content-Type", "").partition(";")[0]
    finally: connection.close()
    answer: Answer = {"status": response.status, "type": kind}
    if kind == "text/event-stream": return answer | {"events": read_events(text)}
    try: return answer | {"body": plain(json.loads(text))}
    except ValueError: return answer | {"body": "" if request.path == "/metrics" else text[:200]}
