"""Compares the bytes and numbers of a streamed token that takes the short way with those of the long one."""
from __future__ import annotations

import asyncio
import json
from typing import Any

import h11
import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from tests.support.server.serve_case import fake_service, live
from tinygrad_nv.server.limits import CountedConnection, RequestLimits
from tinygrad_nv.server.metrics import TOKEN, Metrics
from tinygrad_nv.server.service import Deadline
from tinygrad_nv.server.sse import Plain, Template

TEXTS = ("", " a", '"\\\n\t\0', "é\x85\u2028\u2029", "👋", "\0", "\x7f\x1b")


@pytest.mark.parametrize("name", ["model", "\0", '"text":"\0"'])
def test_templates_write_what_json_does(name: str) -> None:
    def chunk(text: str) -> dict[str, Any]:
        return {"model": name, "choices": [{"index": 0, "text": text, "logprobs": None}], "n": 1}
    template = Template(chunk("\0"))
    for text in TEXTS: assert template.fill(text) == Plain().event(chunk(text))


def test_streams_have_the_same_chunks_as_those_with_usage() -> None:
    """Chunks with a usage are written as a whole: without it they are the same."""
    with live(fake_service()) as server:
        def read(**more: Any) -> list[dict[str, Any]]:
            reply = server.post({"prompt": "hi", "stream": True, "max_tokens": 5, "n": 2, **more})
            assert reply.text.endswith("data: [DONE]\n\n")
            found = [json.loads(each.removeprefix("data: ")) for each in reply.text.split("\n\n")[:-2]]
            return [{key: each for key, each in chunk.items() if key not in ("id", "created", "usage")}
                    for chunk in found]
        options = {"include_usage": True, "continuous_usage_stats": True}
        short, long = read(stream_options={"include_usage": True}), read(stream_options=options)
        assert len(short) == 11
        assert sorted(map(json.dumps, short)) == sorted(map(json.dumps, long))


def test_parts_of_a_body_are_written_as_h11_writes_them() -> None:
    for headers in ([], [("Content-Length", "7")]):
        ours, theirs = CountedConnection(RequestLimits()), h11.Connection(h11.SERVER)
        for each in (ours, theirs):
            each.receive_data(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            while each.next_event() is not h11.NEED_DATA and each.their_state is not h11.DONE: pass
        for event in (h11.Response(status_code=200, headers=headers), h11.Data(data=b"one"),
                      h11.Data(data=b""), h11.Data(data=b"four"), h11.EndOfMessage()):
            assert ours.send(event) == theirs.send(event)
        assert ours.our_state is theirs.our_state is h11.DONE
        with pytest.raises(h11.LocalProtocolError): ours.send(h11.Data(data=b"late"))


def test_times_between_tokens_are_those_of_prometheus() -> None:
    registry = CollectorRegistry()
    theirs = Histogram("tinygrad_nv:inter_token_latency_seconds", "Time between a sequence's tokens.",
                       ["model_name"], buckets=TOKEN, registry=registry).labels("m")
    ours = Metrics("m", 64, lambda: None)
    for seconds in (0.0, 0.01, 0.010001, 0.3, 80.0, 99.0):
        theirs.observe(seconds)
        ours.inter_token_latencies([seconds])
    ours.registry = CollectorRegistry()
    ours.registry.register(ours.inter_token_latency)
    told = [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]
    assert ours.text().decode().splitlines() == told


def test_a_deadline_ends_waits_and_nothing_else() -> None:
    async def main() -> None:
        deadline = Deadline(0.02)
        with deadline: await asyncio.sleep(0)
        with pytest.raises(TimeoutError), deadline: await asyncio.sleep(5)
        task = asyncio.current_task()
        assert task is not None
        assert not task.cancelling()
        between = Deadline(0.001)
        await asyncio.sleep(0.01)   # it cancels no wait of others
        with pytest.raises(TimeoutError), between: raise AssertionError
        for each in (deadline, between): each.close()

    async def cancel_it() -> None:
        async def wait() -> None:
            with Deadline(0.02): await asyncio.sleep(5)
        task = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError): await task
    asyncio.run(main())
    asyncio.run(cancel_it())
