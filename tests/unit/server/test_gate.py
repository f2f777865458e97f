"""CORS, request ids, TLS, and the endpoints that tell of the server."""
from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

import tinygrad_nv
from tests.support.server.serve_case import LENGTH, NAME, Live, fake_service, live
from tinygrad_nv.errors import RequestError
from tinygrad_nv.server.service import CORS
from tinygrad_nv.server.serving import HTTPOptions

ORIGIN = "https://page.example"
PREFLIGHT = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST",
             "Access-Control-Request-Headers": "authorization,content-type"}


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(fake_service(keys=frozenset({"key"}))) as running: yield running


@pytest.fixture(scope="module")
def strict() -> Iterator[Live]:
    cors = CORS((ORIGIN,), ("POST",), ("authorization",), True)
    with live(fake_service(cors=cors)) as running: yield running


def test_a_preflight_passes_a_keyed_server(server: Live):
    answer = server.http.options("/v1/chat/completions", headers=PREFLIGHT)
    assert answer.status_code == 200, answer.text
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert "authorization" in answer.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in answer.headers
    # without the headers of a preflight it is a request like others
    assert server.http.options("/v1/chat/completions").status_code == 401


def test_pages_of_other_origins_can_read_answers_and_errors(server: Live):
    for key, status in (("key", 200), ("wrong", 401)):
        answer = server.post({"prompt": "a", "max_tokens": 1},
                             headers={"Origin": ORIGIN, "Authorization": f"Bearer {key}"})
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == "*"
        assert "X-Request-Id" in answer.headers["access-control-expose-headers"]


def test_other_origins_methods_and_headers_are_not_allowed(strict: Live):
    allowed = {**PREFLIGHT, "Access-Control-Request-Headers": "authorization"}
    answer = strict.http.options("/v1/completions", headers=allowed)
    assert answer.status_code == 200, answer.text
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert answer.headers["access-control-allow-credentials"] == "true"
    for changed in ({"Origin": "https://other.example"}, {"Access-Control-Request-Method": "DELETE"},
                    {"Access-Control-Request-Headers": "x-other"}):
        assert strict.http.options("/v1/completions", headers={**allowed, **changed}).status_code == 400
    answer = strict.post({"prompt": "a"}, headers={"Origin": "https://other.example"})
    assert "access-control-allow-origin" not in answer.headers


def test_a_request_keeps_the_id_of_its_client(strict: Live):
    def asked(given: str) -> tuple[str, str]:
        answer = strict.post({"prompt": "a", "max_tokens": 1}, headers={"X-Request-Id": given})
        return answer.headers["x-request-id"], answer.json()["id"]
    told, made = asked("order-7")
    assert (told, made[:5]) == ("order-7", "cmpl-")
    assert asked("order-7")[1] != made      # the server's own ids are unique
    for wrong in ("", "x" * 129, "a\x01b"):
        told, made = asked(wrong)
        assert told == made
    answer = strict.http.get("/nowhere", headers={"X-Request-Id": "order-8"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (404, "order-8")


def test_endpoints_without_a_key(server: Live):
    for method in ("GET", "POST"):
        assert server.http.request(method, "/ping").json() == {"status": "ok"}
    assert server.http.get("/version").json() == {"version": tinygrad_nv.__version__}
    assert server.http.get("/load").json() == {"server_load": 0}
    for path in ("/tokenize", "/detokenize", "/v1/models"):
        assert server.http.get(path).status_code == 401


def test_the_tokenizer_is_told_of_where_the_server_says_so(server: Live):
    with_key = {"Authorization": "Bearer key"}
    answer = server.http.get("/tokenizer_info", headers=with_key)
    assert answer.status_code == 404
    assert "start it with --enable-tokenizer-info-endpoint" in answer.text
    server.service.tokenizer_info = True
    try:
        assert server.http.get("/tokenizer_info").status_code == 401
        told = server.http.get("/tokenizer_info", headers=with_key).json()
    finally: server.service.tokenizer_info = False
    assert (told["bos_token"], told["eos_token"], told["model_max_length"]) == ("<|bos|>", "<|eos|>", LENGTH)


def test_load_counts_what_runs(strict: Live):
    strict.service.active += 2
    try: assert strict.http.get("/load").json() == {"server_load": 2}
    finally: strict.service.active -= 2


def test_each_served_name_is_a_model(strict: Live):
    data = strict.http.get("/v1/models").json()["data"]
    assert [(each["id"], each["root"], each["max_model_len"]) for each in data] == [
        (NAME, NAME, LENGTH), ("alias", NAME, LENGTH)]
    for name in (NAME, "alias"):
        assert strict.http.get(f"/v1/models/{name}").json()["id"] == name
        assert strict.post({"prompt": "a", "model": name, "max_tokens": 1}).json()["model"] == name
    assert strict.http.get("/v1/models/other").status_code == 404


def test_a_path_that_a_proxy_takes_off():
    """uvicorn puts it in front of paths; they are served, and guarded, without it."""
    with live(fake_service(keys=frozenset({"key"})), HTTPOptions(root_path="/llm")) as server:
        assert server.http.get("/health").status_code == 200
        assert server.post({"prompt": "a"}).status_code == 401
        assert server.post({}, "/v1/messages").json()["type"] == "error"
        done = server.post({"prompt": "a", "max_tokens": 1}, headers={"Authorization": "Bearer key"})
        assert done.status_code == 200, done.text
        assert "text/css" in server.http.get("/page.css").headers["content-type"]
        assert "text/html" in server.http.get("/").headers["content-type"]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> HTTPOptions:
    if (openssl := shutil.which("openssl")) is None: pytest.skip("openssl makes the certificate")
    folder = tmp_path_factory.mktemp("tls")
    key, made = folder / "key.pem", folder / "cert.pem"
    subprocess.run([openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                    "-keyout", key, "-out", made, "-days", "2", "-subj", "/CN=localhost",
                    "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    return HTTPOptions(keyfile=str(key), certfile=str(made))


def test_tls(certificate: HTTPOptions):
    certificate.check()
    with live(fake_service(), certificate) as server:
        assert server.url.startswith("https://127.0.0.1:")
        assert server.post({"prompt": "a", "max_tokens": 1}).status_code == 200
        trusted = ssl.create_default_context(cafile=certificate.certfile)
        with httpx.stream("POST", f"{server.url}/v1/completions", verify=trusted,
                          json={"prompt": "a fox", "max_tokens": 5, "stream": True}) as answer:
            assert [*answer.iter_lines()][-2] == "data: [DONE]"


def test_tls_that_cannot_be(certificate: HTTPOptions, tmp_path: Path):
    (tmp_path / "no.pem").write_text("nothing")
    wrong = str(tmp_path / "no.pem")
    for options, words in (
            (HTTPOptions(keyfile=wrong, certfile=wrong), "TLS cannot use"),
            (HTTPOptions(keyfile="/nowhere", certfile=certificate.certfile), "No such file"),
            (HTTPOptions(keyfile=certificate.keyfile), "TLS cannot use"),
            (HTTPOptions(cert_reqs=2), "the server has none"),
            (replace(certificate, ca_certs=wrong), "change --ssl-certfile")):
        with pytest.raises(RequestError, match=words): options.check()
