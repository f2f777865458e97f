"""CORS, request ids, TLS, and the endpoints that tell of the server. A warm-up that takes long says how
far it is. Statistics that the server shows: those that the engine has when they are asked for. /sleep,
/wake_up, /is_sleeping: refused unless the server was started for them, and behind its keys."""
from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

import tinygrad_nv
from tests.support.server.serve_case import (
    LENGTH,
    NAME,
    FakeEngine,
    FakeModel,
    FakeStats,
    Live,
    fake_service,
    live,
)
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.errors import ConfigError, RequestError
from tinygrad_nv.server import startup
from tinygrad_nv.server.log import LOG, periodic
from tinygrad_nv.server.service import CORS
from tinygrad_nv.server.serving import HTTPOptions, bind_path
from tinygrad_nv.server.startup import Waterfall

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


def test_a_path_that_a_proxy_leaves_on():
    """vLLM's server answers with the root path and without. What is guarded stays so."""
    with live(fake_service(keys=frozenset({"key"})), HTTPOptions(root_path="/llm")) as server:
        asked, key = {"prompt": "a", "max_tokens": 1}, {"Authorization": "Bearer key"}
        for path in ("/v1/completions", "/llm/v1/completions"):
            assert server.post(asked, path).status_code == 401
            assert server.post(asked, path, headers=key).status_code == 200
        for path in ("/llm/llm/v1/completions", "/llmv1/completions"):
            assert server.post(asked, path, headers=key).status_code == 404


def test_a_unix_socket(tmp_path: Path):
    path = str(tmp_path / "socket")
    for _ in range(2):      # the second takes the place of what the first has left
        with live(fake_service(), path=path) as server:
            assert server.post({"prompt": "a", "max_tokens": 1}).status_code == 200
            with pytest.raises(RequestError, match=r"cannot be served: .*in use"): bind_path(path)
    (tmp_path / "file").write_text("kept")
    with pytest.raises(RequestError, match="change --uds"): bind_path(str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "kept"
    with pytest.raises(RequestError, match="cannot be served: AF_UNIX path too long"): bind_path(200 * "a")


def test_a_unix_socket_answers_for_its_name(tmp_path: Path):
    """vLLM's clients name it as the host. Others are refused: a proxy may pass on what a page says."""
    given = SimpleNamespace(uds=None, host="127.0.0.1", allowed_hosts=())
    for uds, status in ((None, 403), (str(tmp_path / "vllm.sock"), 200)):
        given.uds = uds
        with live(fake_service(hosts=startup.hosts(given)), path=uds) as server:
            assert server.http.get("/version", headers={"Host": "vllm.sock"}).status_code == status
            assert server.http.get("/version", headers={"Host": "evil.example"}).status_code == 403


def test_a_unix_socket_of_a_server_that_still_loads_is_not_taken(tmp_path: Path):
    first = bind_path(path := str(tmp_path / "socket"))
    with pytest.raises(RequestError, match=r"in use"): bind_path(path)
    first.close()
    bind_path(path).close()


@pytest.mark.parametrize(("word", "changes"), [("True", True), ("1", True), ("0", False), ("", False)])
def test_clients_may_load_adapters_where_vllms_variable_says_so(word: str, changes: bool,
                                                                monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", word)
    llm: Any = SimpleNamespace(embedder=None, adapters=SimpleNamespace(cache=None))
    given: Any = SimpleNamespace(allow_runtime_lora_updating=False, lora_modules=[])
    made = startup.open_adapters(llm, ("m",), given)
    assert made is not None
    assert made.changes is changes


def test_keys_of_the_environment(monkeypatch: pytest.MonkeyPatch):
    asked = SimpleNamespace(api_key=None)
    monkeypatch.setenv("VLLM_API_KEY", "theirs")
    assert startup.api_keys(asked) == {"theirs"}
    monkeypatch.setenv("NV_API_KEY", "ours")
    assert startup.api_keys(asked) == {"ours"}
    assert startup.api_keys(SimpleNamespace(api_key=["a", "b"])) == {"a", "b"}


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


@pytest.mark.parametrize(("patience", "lines"), [(0.0, ["warm_up done=1 steps=3", "warm_up done=2 steps=3"]),
                                                 (60.0, [])])
def test_a_warm_up_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch, patience: float, lines: list[str]):
    def steps(progress: Any) -> None:
        for done in range(4): progress(done, 3)

    monkeypatch.setattr(startup, "PROGRESS_S", patience)
    said: list[str] = []
    monkeypatch.setattr(startup.LOG, "info", said.append)
    llm = SimpleNamespace(runner=SimpleNamespace(step_store=None), defaults=SamplingParams(), embedder=None,
                          capture=steps, warm_up=lambda params, length: None, ready=lambda: None)
    startup.warm_up(llm, Waterfall())  # type: ignore[arg-type]
    assert said[:-1] == lines
    assert said[-1].startswith('startup stage="compile and capture" steps=3')


class LateEngine(FakeEngine):
    """Its statistics are those of the last `refresh_stats`, as of several replicas."""

    def stats(self) -> FakeStats: return FakeStats(self.refreshed, generated_tokens=10 * self.refreshed)


def test_metrics() -> None:
    with live(fake_service(LateEngine(FakeModel()))) as running:
        for count in (1, 2):
            text = httpx.get(f"{running.url}/metrics", timeout=10).text
            assert f'num_requests_running{{model_name="tales"}} {count}.0' in text


def test_the_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LOG, "propagate", False)
    monkeypatch.setattr(LOG, "handlers", [caplog.handler])  # this alone, whatever pytest has put there
    async def some_lines() -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(periodic(fake_service(LateEngine(FakeModel())), 0.02), 0.2)
    with caplog.at_level(logging.INFO, LOG.name): asyncio.run(some_lines())
    assert "engine running=1 " in caplog.messages[0]
    assert "engine running=2 " in caplog.messages[1]


class Sleeping:
    """A model that notes its calls."""

    def __init__(self) -> None: self.calls = list[tuple[object, ...]]()

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        if level > 2: raise ConfigError("sleep(level=3)", "1 or 2", "change level")
        self.calls.append((level, mode))

    def wake_up(self, tags: list[str] | None = None) -> None: self.calls.append(("wake", tags))

    def is_sleeping(self) -> bool: return len(self.calls) % 2 == 1


@pytest.fixture
def model() -> Sleeping: return Sleeping()


@pytest.fixture
def served(model: Sleeping) -> Iterator[Live]:
    with live(fake_service(FakeEngine(FakeModel(), "a"), sleeping=model, keys=frozenset({"k"}))) as made:
        made.http.headers["Authorization"] = "Bearer k"
        yield made


def test_calls(served: Live, model: Sleeping):
    assert served.http.get("/is_sleeping").json() == {"is_sleeping": False}
    assert served.http.post("/sleep").status_code == 200
    assert served.http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert served.http.post("/wake_up").status_code == 200
    served.http.post("/sleep?level=2&mode=wait")
    served.http.post("/wake_up?tags=weights&tags=kv_cache")
    assert model.calls == [(1, "abort"), ("wake", None), (2, "wait"), ("wake", ["weights", "kv_cache"])]


def test_what_is_wrong(served: Live, model: Sleeping):
    for query, words in (("level=x", "level is 'x'; expected: 1 or 2"), ("level=3", "sleep(level=3)")):
        refused = served.http.post(f"/sleep?{query}")
        assert refused.status_code == 400
        assert words in refused.json()["error"]["message"]
    assert served.http.get("/sleep").status_code == 405
    assert served.http.post("/sleep", headers={"Authorization": "Bearer x"}).status_code == 401
    assert model.calls == []


def test_pages_of_other_origins_are_refused(model: Sleeping):
    """By default any page may use the server; which may have it sleep must be said by name."""
    for origins in (("*",), ("https://chat.example",)):
        model.calls.clear()
        with live(fake_service(FakeEngine(FakeModel(), "a"), sleeping=model, cors=CORS(origins))) as made:
            named = {"Origin": "https://chat.example", "Sec-Fetch-Site": "cross-site"}
            for headers, allowed in (
                    ({}, True), ({"Origin": made.url}, True), ({"Sec-Fetch-Site": "none"}, True),
                    ({"Origin": made.url, "Sec-Fetch-Site": "same-origin"}, True),
                    (named, "*" not in origins),
                    ({"Origin": "https://evil.example"}, False), ({"Origin": "null"}, False),
                    ({"Origin": "http://[x"}, False),
                    ({"Origin": f"http://127.0.0.1:{made.port + 1}"}, False),
                    ({"Sec-Fetch-Site": "cross-site"}, False)):
                for path in ("/sleep", "/wake_up"):
                    model.calls.clear()
                    answer = made.http.post(path, headers=headers)
                    got = answer.status_code, len(model.calls)
                    assert got == ((200, 1) if allowed else (403, 0)), headers
                    if allowed: continue
                    assert answer.json()["error"]["reason"] == "cross_origin"
                    assert "--allowed-origins" in answer.json()["error"]["message"]


def test_a_server_that_was_not_started_for_it():
    with live(fake_service(FakeEngine(FakeModel(), "a"))) as made:
        for method, path in (("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping")):
            refused = made.http.request(method, path)
            assert refused.status_code == 404
            assert "--enable-sleep-mode" in refused.json()["error"]["message"]
