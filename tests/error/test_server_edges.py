"""HTTP that is too large, and numbers that no field can be: a status, words, and a server that goes on."""
from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest
from serve_case import Live, fake_service, live

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
        out.append((int(each[:3]), json.loads(text).get("error", {}).get("code", "")))
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


def test_connections_are_bounded():
    with live(fake_service(limits=RequestLimits(connections=3))) as server:
        assert server.http.get("/health").status_code == 200
        held = [socket.create_connection(("127.0.0.1", server.port), 10) for _ in range(2)]
        for each in held: each.sendall(GET)
        assert answers(server, b"", False) == [(503, "too_many_connections")]
        assert server.http.get("/health").status_code == 200
        for each in held: each.close()


WRONG = (1e308, -1e308, 10 ** 400, True, "1")
NUMBERS = [
    ("/v1/completions", {"prompt": "a"}, ("temperature", "repetition_penalty"), WRONG,
     "to 3.4e38|at most 3.4e38|at least 0|64-bit float|expected a number"),
    ("/v1/completions", {"prompt": "a"}, ("top_k", "n", "max_tokens", "min_tokens", "seed", "priority"),
     (-1e308, 10 ** 400, -10 ** 3000, True, "1"),
     "at least|whole number|to 9223372036854775807|expected|too many choices"),
    ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
     ("temperature", "top_p"), WRONG, "0 to 1|64-bit float|expected a number"),
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


def test_tiny_numbers_are_served(server: Live):
    for name in ("temperature", "repetition_penalty", "top_p", "min_p"):
        assert server.post({"prompt": "a", "max_tokens": 1, name: 1e-320}).status_code == 200
