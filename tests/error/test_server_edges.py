"""HTTP that is too large, and numbers that no field can be: a status, words, and a server that goes on."""
from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator

import pytest

from tests.support.server.serve_case import NAME, Live, fake_service, live, until
from tinygrad_nv.server.limits import MAX_HEADER_BYTES, MAX_HEADERS, RequestLimits

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
POST = (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n")


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(fake_service(limits=RequestLimits(header_s=2.0))) as running: yield running


def answers(server: Live, sent: bytes, shut: bool = True) -> list[tuple[int, str]]:
    """Statuses and codes of what comes back, however much of `sent` the server reads."""
    with socket.create_connection(("127.0.0.1", server.port), 10) as client:
        try:
            client.sendall(sent)
            if shut: client.shutdown(socket.SHUT_WR)
        except OSError: pass
        got = b"".join(iter(lambda: client.recv(1 << 16), b""))
    out = []
    for each in got.split(b"HTTP/1.1 ")[1:]:
        text = each.partition(b"\r\n\r\n")[2]
        out.append((int(each[:3]), json.loads(text).get("error", {}).get("reason", "")))
    return out


ROOM = MAX_HEADER_BYTES - len(GET) - 10
HEADS = [
    ("a byte too long", GET + b"x: " + b"y" * (ROOM + 6) + b"\r\n\r\n", "headers_too_large"),
    ("no end", GET + b"x: " + b"y" * 200_000, "headers_too_large"),
    ("megabytes", GET + b"x: " + b"y" * 5_000_000 + b"\r\n\r\n", "headers_too_large"),
    ("a long line", b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", "headers_too_large"),
    ("many", GET + b"a:\r\n" * 100_000 + b"\r\n", "headers_too_large"),
    ("many short ones", GET + b"a:\r\n" * MAX_HEADERS + b"\r\n", "too_many_headers"),
    ("line feeds alone", GET.replace(b"\r", b"") + b"a:\n" * MAX_HEADERS + b"\n", "too_many_headers")]


@pytest.mark.parametrize(("what", "sent", "code"), HEADS, ids=[each[0] for each in HEADS])
def test_headers_are_counted_before_they_are_parsed(server: Live, what: str, sent: bytes, code: str):
    assert answers(server, sent) == [(431, code)]


def test_headers_that_fit(server: Live):
    assert answers(server, GET + b"x: " + b"y" * ROOM + b"\r\n\r\n") == [(200, "")]
    assert answers(server, GET + b"a: b\r\n" * (MAX_HEADERS - 2) + b"\r\n") == [(200, "")]
    # of a further request on the connection, too
    assert answers(server, (GET + b"\r\n") * 3 + GET + b"x: " + b"y" * 70_000 + b"\r\n\r\n", False) \
        == [(200, "")] * 3 + [(431, "headers_too_large")]


def test_bodies_of_tiny_chunks_and_endless_trailers(server: Live):
    assert answers(server, POST + b"1\r\n \r\n" * 300_000 + b"0\r\n\r\n") == [(413, "chunks_too_small")]
    (status, _), = answers(server, POST + b"2\r\n{}\r\n0\r\n" + b"t: x\r\n" * 100_000)
    assert status == 431
    body = json.dumps({"prompt": "a", "max_tokens": 1, "stop": ["x" * 40] * 16}).encode()
    whole = b"".join(b"1\r\n" + body[i:i + 1] + b"\r\n" for i in range(len(body)))
    assert answers(server, POST.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + whole + b"0\r\n\r\n",
                   False) == [(200, "")]


BODY = b'{"prompt":"a","max_tokens":1}'
PLAIN = POST.replace(b"Transfer-Encoding: chunked\r\n\r\n", b"")
# what is refused, and not waited for: the client sends no more, and does not close
FRAMES = [
    *((each, POST + head, 413, "body_too_large") for each, head in (
        ("size", b"f" * 18 + b"\r\n"), ("unfinished size", b"f" * 18), ("16 MiB", b"1000000\r\n"),
        ("a byte too many", b"2\r\n  \r\n3fffff\r\n"))),
    *((each, POST + head, 400, "invalid_http") for each, head in (
        ("negative", b"-5\r\nhello\r\n"), ("0x", b"0x1d\r\n"), ("21 digits", b"f" * 21), ("sign", b"+1d\r\n"),
        ("line feed", b"1d\n" + BODY + b"\n0\n\n"), ("no size", b"\r\n"), ("words", b"chunk"),
        ("no end of chunk", b"1d\r\n" + BODY + b"0\r\n\r\n"))),
    ("extension", POST + b"1d;" + b"a" * 1_000_000, 431, "invalid_http"),
    ("long trailer", POST + b"1d\r\n" + BODY + b"\r\n0\r\na: " + b"b" * 1_000_000, 431, "headers_too_large"),
    ("trailers", POST + b"1d\r\n" + BODY + b"\r\n0\r\n" + b"a: b\r\n" * 600 + b"\r\n", 431,
     "too_many_headers"),
    ("unequal lengths", PLAIN + b"Content-Length: 29\r\nContent-Length: 30\r\n\r\n", 400, "invalid_http"),
    ("length and chunks", PLAIN + b"Content-Length: 29\r\nTransfer-Encoding: chunked\r\n\r\n", 400,
     "invalid_http"),
    ("gzip", PLAIN + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 501, "invalid_http"),
    ("space in a name", PLAIN + b"Content-Length : 29\r\n\r\n", 400, "invalid_http"),
    ("NUL", PLAIN + b"X: a\0b\r\n\r\n", 400, "invalid_http"),
    ("version", b"GET /health HTTP/2.0\r\nHost: localhost\r\n\r\n", 400, "invalid_http"),
    ("encoding", PLAIN + b"Content-Encoding: gzip\r\nContent-Length: 29\r\n\r\n" + BODY, 415,
     "unsupported_media_type")]


@pytest.mark.parametrize(("what", "sent", "status", "code"), FRAMES, ids=[each[0] for each in FRAMES])
def test_wrong_framing_is_refused_at_once(server: Live, what: str, sent: bytes, status: int, code: str):
    assert first_answer(server, sent) == (status, code)


def first_answer(server: Live, sent: bytes) -> tuple[int, str]:
    """The answer to a client that sends all before it reads, and fails where it cannot."""
    with socket.create_connection(("127.0.0.1", server.port), 1.9) as client:
        client.sendall(sent)
        got = b""
        while not got.endswith(b"}"): got += client.recv(1 << 16) or b"(closed)}"
    return int(got[9:12]), json.loads(got.partition(b"\r\n\r\n")[2])["error"]["reason"]


def test_extensions_and_trailers_that_fit(server: Live):
    body = b"001D;a=b\r\n" + BODY + b"\r\n0;c\r\nt: x\r\n\r\n"
    assert answers(server, POST.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + body, False) \
        == [(200, "")]


CHUNKS = b"10000\r\n" + b" " * 0x10000 + b"\r\n"


@pytest.mark.parametrize("close", [b"", b"Connection: close\r\n"])
def test_a_client_that_sends_all_first_reads_why_it_was_refused(server: Live, close: bytes):
    """A connection that is closed while bytes arrive is reset, and what it had to say is lost."""
    def with_length(head: bytes) -> bytes:
        return head + close + b"Content-Length: 20000000\r\n\r\n" + b" " * 20_000_000
    assert first_answer(server, with_length(PLAIN)) == (413, "body_too_large")
    assert first_answer(server, PLAIN + close + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKS * 200) \
        == (413, "body_too_large")
    assert first_answer(server, with_length(PLAIN.replace(b"completions", b"none"))) == (404, "not_found")


def test_large_bodies_of_all_clients_are_bounded(server: Live, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tinygrad_nv.server.limits.MAX_LARGE_BODIES", 1)
    large = json.dumps({"prompt": "a", "max_tokens": 1, "user": "x" * 600_000}).encode()
    head = PLAIN + b"Content-Length: "
    with socket.create_connection(("127.0.0.1", server.port), 10) as client:
        client.sendall(head + b"4000000\r\n\r\n" + b" " * 3_900_000)
        until(lambda: server.service.body_budget.held == 3_900_000)
        assert first_answer(server, head + b"%d\r\n\r\n" % len(large) + large) == (503, "too_many_bodies")
        assert server.post({"prompt": "a", "max_tokens": 1}).status_code == 200
    until(lambda: server.service.body_budget.held == 0)
    assert server.http.post("/v1/completions", content=large,
                            headers={"Content-Type": "application/json"}).status_code == 200
    assert server.service.body_budget.held == 0


def test_a_refused_client_may_not_send_for_ever(server: Live, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tinygrad_nv.server.limits.MAX_LINGER_BYTES", 1 << 20)
    with socket.create_connection(("127.0.0.1", server.port), 10) as client, \
            pytest.raises((ConnectionResetError, BrokenPipeError)):
        client.sendall(PLAIN + b"Content-Length: 900000000\r\n\r\n" + b" " * 40_000_000)


def test_clients_that_are_gone_leave_no_traceback(server: Live, caplog: pytest.LogCaptureFixture):
    for _ in range(20): assert len(answers(server, GET + b"\r\nSM\r\n\r\n")) < 3
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", server.port), 10) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))     # a reset
            client.sendall(b"PRI * HTTP/2.0\r\nHost: localhost\r\n\r\nSM\r\n\r\n")
    assert server.http.get("/health").status_code == 200
    assert [each for each in caplog.records if each.exc_info] == []


def test_connections_are_bounded():
    with live(fake_service(limits=RequestLimits(connections=3))) as server:
        assert server.http.get("/health").status_code == 200
        held = [socket.create_connection(("127.0.0.1", server.port), 10) for _ in range(2)]
        for each in held: each.sendall(GET)
        assert answers(server, b"", False) == [(503, "too_many_connections")]
        assert server.http.get("/health").status_code == 200
        for each in held: each.close()


WRONG = (1e308, -1e308, 10 ** 400, "nan", "1e999", "one", [1])
NUMBERS = [
    ("/v1/completions", {"prompt": "a"}, ("temperature", "repetition_penalty"), WRONG,
     "0 to 2|to 3.4e38|at most 3.4e38|at least 0|64-bit float|expected a number"),
    ("/v1/completions", {"prompt": "a"}, ("top_k", "n", "max_tokens", "min_tokens", "seed", "priority"),
     (-1e308, 10 ** 400, -10 ** 3000, "1.5", "", "one", [1]),
     "at least|whole number|to 9223372036854775807|expected|too many choices"),
    ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
     ("temperature", "top_p"), WRONG, "0 to 1|0 to 2|64-bit float|expected a number"),
    ("/completion", {"prompt": "a"}, ("repeat_penalty",), WRONG,
     "at most 3.4e38|at least 0|64-bit float|expected a number")]


@pytest.mark.parametrize(("path", "body", "names", "values", "words"), NUMBERS)
def test_numbers_that_no_field_can_be(server: Live, path: str, body: dict, names: tuple, values: tuple,
                                      words: str):
    for name in names:
        for value in values:
            got = server.post({**body, name: value}, path)
            assert got.status_code == 400, (name, value, got.text)
            message = got.json()["error"]["message"]
            assert name in message or "choices" in message, message
            assert any(each in message for each in words.split("|")), message
            assert len(message) < 300


def test_an_integer_of_too_many_digits(server: Live):
    got = server.http.post("/v1/completions", content=b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
                           headers={"Content-Type": "application/json"})
    assert got.status_code == 400
    assert "more than 4300 digits" in got.text
    assert "sys." not in got.text


@pytest.mark.parametrize(("path", "body", "names"), [
    ("/v1/completions", {"prompt": "a"}, ("truncate_prompt_tokens", "max_tokens")),
    ("/v1/responses", {"input": "a"}, ("max_output_tokens",)),
    ("/api/generate", {"model": NAME, "prompt": "a", "stream": False}, ("top_logprobs",))])
def test_whole_numbers_have_64_bits(server: Live, path: str, body: dict, names: tuple):
    for name in names:
        for value in (1 << 63, 10 ** 4000, -10 ** 4000, 1e308, "9" * 63, "x"):
            got = server.post({**body, name: value}, path)
            assert got.status_code == 400, got.text[:200]
            assert name in got.text, got.text[:200]
            assert len(got.text) < 300


def test_true_is_one(server: Live):
    """As vLLM reads it; a list is no number."""
    for name in ("n", "top_p", "top_k"):
        assert server.post({"prompt": "a", "max_tokens": 1, name: True}).status_code == 200
        got = server.post({"prompt": "a", "max_tokens": 1, name: [True]})
        assert (got.status_code, got.json()["error"]["param"]) == (400, name), got.text


def test_tiny_numbers_are_served(server: Live):
    for name in ("temperature", "repetition_penalty", "top_p", "min_p"):
        assert server.post({"prompt": "a", "max_tokens": 1, name: 1e-320}).status_code == 200
