"""`tinygrad-nv serve` with the bundled model, started as a user does. Tests that do not end it share one."""
from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

import tinygrad_nv.server
from tests.support.lazy import lazy
from tests.support.server.serve_case import until
from tinygrad_nv.cli import DEFAULT_MODEL
from tinygrad_nv.engine.llm import LLM
from tinygrad_nv.engine.sampling import SamplingParams

openai = lazy("openai")

ROOT = Path(__file__).parents[2]
HTTP = httpx.Client(timeout=60, verify=False)  # tests run beside each other, on few cores
PROMPT = "Once upon a time there was a little fox"
OPTIONS = ("--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--max-model-len", "256")
# the command, with a compile worker from the start, as after a cold cache
WITH_WORKER = """
from multiprocessing import active_children
from tinygrad.engine import worker
from tinygrad_nv.cli import main
worker.PARALLEL.value = 1
worker.get_worker_pool()
worker.worker_pool.map(abs, [1])
%s
main()
"""


@dataclass
class Process:
    """A server of its own, and what it has said."""
    popen: subprocess.Popen[str]
    begun: float
    lines: list[str] = field(default_factory=list)
    url: str = ""
    ready: float = 0.0

    def __post_init__(self) -> None:
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr: self.lines.append(line.rstrip())

    def ended(self) -> int:
        """The status, when it and all processes that it started have ended: they share its stderr."""
        self.reader.join(60)
        assert not self.reader.is_alive(), "a process is left behind"
        return self.popen.wait(10)

    def said(self, event: str) -> list[dict[str, str]]:
        """Fields of all lines of an event."""
        out = []
        for line in self.lines:
            _, _, rest = line.partition(" ")
            if rest.startswith(event + " "):
                fields = re.findall(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)', rest)
                out.append({key: json.loads(value) if value[0] == '"' else value for key, value in fields})
        return out


@contextlib.contextmanager
def started(*options: str, program: tuple[str, ...] = ("-m", "tinygrad_nv")) -> Iterator[Process]:
    command = [sys.executable, *program, "serve", "--port", "0", *OPTIONS, *options]
    begun = time.perf_counter()
    popen = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        process = Process(popen, begun)
        until(lambda: process.said("ready") or popen.poll() is not None, 120)
        process.ready = time.perf_counter()
        assert popen.poll() is None, process.lines
        process.url = process.said("ready")[0]["url"]
        yield process
        assert not [line for line in process.lines if "Traceback" in line]
    finally: popen.kill()


def figure(metrics: str, name: str) -> float:
    return float(re.findall(rf"^tinygrad_nv:{name}{{.*}} (\S+)$", metrics, re.M)[0])


@pytest.fixture(scope="module")
def server() -> Iterator[Process]:
    with started("--log-interval", "0.2", "--seed", "7") as process:
        yield process
        # whatever tests have asked for: nothing was compiled or captured for it
        assert figure(HTTP.get(process.url + "/metrics").text, "compilations_after_ready_total") == 0
        process.popen.terminate()
        assert process.ended() == 0


@pytest.fixture(scope="module")
def client(server: Process) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as made: yield made


@pytest.fixture(scope="module")
def alone() -> LLM: return LLM(DEFAULT_MODEL, max_model_len=256, max_num_seqs=4)


# what has kernels of its own in the sampler, or a step of another shape
@pytest.mark.parametrize("options", [
    {"n": 3, "temperature": 1.0}, {"presence_penalty": 0.5}, {"frequency_penalty": 0.5, "temperature": 1.0},
    {"logit_bias": {"5": 3.0}}, {"extra_body": {"repetition_penalty": 1.3}}, {"extra_body": {"min_p": 0.1}},
    {"extra_body": {"top_k": 5}}, {"top_p": 0.5}, {"logprobs": 3}, {"max_tokens": 1},
    {"extra_body": {"prompt_logprobs": 2}}, {"prompt": PROMPT * 12, "extra_body": {"prompt_logprobs": 0}},
    {"echo": True, "logprobs": 1}, {"best_of": 2, "n": 2, "temperature": 1.0},
    {"prompt": [PROMPT] * 6, "n": 2},
    {"extra_body": {"structured_outputs": {"choice": ["yes", "no"]}}}, {"prompt": PROMPT * 25}])
def test_no_request_compiles(server: Process, client: openai.OpenAI, options: dict[str, Any]):
    client.completions.create(**{"model": "tales", "prompt": PROMPT, "max_tokens": 6} | options)
    assert figure(HTTP.get(server.url + "/metrics").text, "compilations_after_ready_total") == 0


def test_a_burst_of_requests_compiles_nothing(server: Process, client: openai.OpenAI):
    """Steps of every mixture of prompts and answers that four sequences can be in."""
    def ask(i: int) -> None:
        client.completions.create(model="tales", prompt=PROMPT * (1 + i % 5), max_tokens=1 + i % 7,
                                  temperature=i % 2)
    with ThreadPoolExecutor(32) as threads: list(threads.map(ask, range(100)))
    assert figure(HTTP.get(server.url + "/metrics").text, "compilations_after_ready_total") == 0


def test_the_start_has_no_gap(server: Process):
    waterfall = [line.split(" waterfall ")[1] for line in server.lines if " waterfall " in line]
    parts = {line[:15].strip(): float(line[15:].split()[0]) for line in waterfall}
    whole = parts.pop("sum")
    assert list(parts)[:5] == ["import", "open device", "read files", "load weights", "pages"]
    assert list(parts)[-1] == "listen"
    assert {"capture"} <= set(parts) <= {*list(parts)[:5], "compile", "capture", "listen"}
    assert sum(parts.values()) == pytest.approx(whole, abs=0.01)
    # and it equals the time from the start of the process to ready
    assert whole == pytest.approx(server.ready - server.begun, rel=0.05, abs=0.1)


def test_capacity_is_told(server: Process):
    [fields] = server.said("kv_cache")
    assert int(fields["tokens"]) == int(fields["pages"]) * int(fields["page_size"])
    assert float(fields["concurrency"][:-1]) == pytest.approx(int(fields["tokens"]) / 256, abs=0.01)


def test_greedy_tokens_are_those_of_the_model_alone(client: openai.OpenAI, alone: LLM):
    expected = alone.complete(PROMPT, SamplingParams(temperature=0.0, max_tokens=24))
    done = client.completions.create(model="tales", prompt=PROMPT, max_tokens=24, temperature=0)
    assert done.choices[0].text == expected.text
    assert done.choices[0].finish_reason == expected.finish_reason
    streamed = client.completions.create(model="tales", prompt=[PROMPT, PROMPT], max_tokens=24, temperature=0,
                                         stream=True)
    texts = {0: "", 1: ""}
    for chunk in streamed:
        for choice in chunk.choices: texts[choice.index] += choice.text
    assert texts == {0: expected.text, 1: expected.text}


def test_a_conversation_with_all_there_is(client: openai.OpenAI):
    asked = {"model": "tales", "messages": [{"role": "user", "content": PROMPT}], "max_completion_tokens": 12,
             "temperature": 1, "n": 2, "logprobs": True, "top_logprobs": 2, "seed": 3, "stop": [" zebra"]}
    done = client.chat.completions.create(**asked)  # type: ignore[call-overload]
    again = client.chat.completions.create(**asked)  # type: ignore[call-overload]
    assert [c.message.content for c in done.choices] == [c.message.content for c in again.choices]
    assert done.choices[0].message.content != done.choices[1].message.content
    for choice in done.choices:
        assert "".join(each.token for each in choice.logprobs.content) == choice.message.content
        assert all(each.logprob <= 0 and len(each.top_logprobs) == 2 for each in choice.logprobs.content)
    # a request that names no seed has the server's
    plain = {key: asked[key] for key in ("model", "messages", "max_completion_tokens", "temperature")}
    texts = {client.chat.completions.create(**plain).choices[0].message.content  # type: ignore[call-overload]
             for _ in range(2)}
    assert len(texts) == 1


def test_answers_have_the_form_asked_for(client: openai.OpenAI):
    messages = [{"role": "user", "content": PROMPT}]
    schema = {"type": "object", "properties": {"name": {"enum": ["fox", "bear"]}, "age": {"enum": [1, 20]}},
              "required": ["name", "age"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": schema}}
    asked = {"model": "tales", "messages": messages, "max_tokens": 200, "temperature": 0}
    done = client.chat.completions.create(**asked, response_format=form)  # type: ignore[call-overload]
    assert json.loads(done.choices[0].message.content)["name"] in ("fox", "bear")
    chosen = client.chat.completions.create(
        **asked, extra_body={"structured_outputs": {"choice": ["yes", "no"]}})  # type: ignore[call-overload]
    assert chosen.choices[0].message.content in ("yes", "no")
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    for choice in ("required", {"type": "function", "function": {"name": "look"}}):
        called = client.chat.completions.create(**asked, tools=[tool], tool_choice=choice,  # type: ignore[call-overload]
                                                parallel_tool_calls=False)
        [call] = called.choices[0].message.tool_calls
        assert call.function.name == "look"
        assert json.loads(call.function.arguments)["name"] in ("fox", "bear")


def test_a_forced_call_ends_in_a_call_or_is_cut_and_says_so(client: openai.OpenAI):
    """With the bundled model, which has never seen a call: whole answers and streams, short and long."""
    # calls whose arguments are long, or that are several, would fill the context
    city = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": "look", "parameters": city}},
             {"type": "function", "function": {"name": "time"}}]
    named = {"type": "function", "function": {"name": "look"}}
    seen = set()
    for choice in ("required", named):
        for most in (3, 20, 256):
            for stream in (False, True):
                asked = {"model": "tales", "messages": [{"role": "user", "content": PROMPT}], "tools": tools,
                         "max_tokens": most, "temperature": 0, "tool_choice": choice, "stream": stream,
                         "stop": ["."], "response_format": {"type": "json_object"},
                         "parallel_tool_calls": False}
                done = client.chat.completions.create(**asked)  # type: ignore[call-overload]
                reason, content, calls = gathered(done) if stream else (
                    done.choices[0].finish_reason, done.choices[0].message.content,
                    [call.function for call in done.choices[0].message.tool_calls or []])
                # a whole answer whose call was cut has it as text, as vLLM's
                cut = reason == "length" and not stream
                assert bool(content) == cut, content
                assert not (cut and calls)
                assert {call.name for call in calls} <= {"look", "time"}
                assert all(isinstance(call.arguments, str) for call in calls)
                # as of vLLM's, a call by name ends with "stop"
                assert reason in ("length", "stop" if choice is named else "tool_calls")
                if reason != "length": assert calls
                # of a call that was cut, the arguments are what came of them
                for call in calls[:len(calls) - (reason == "length")]:
                    assert set(json.loads(call.arguments)) <= {"city"}
                seen.add((choice is named, stream, reason))
    assert seen == {(by_name, stream, reason) for by_name in (False, True) for stream in (False, True)
                    for reason in ("length", "stop" if by_name else "tool_calls")}


def gathered(stream: openai.Stream) -> tuple[str, str, list]:
    """Finish reason, content and calls of a stream of one choice."""
    parts = [chunk.choices[0] for chunk in stream if chunk.choices]
    calls = []
    for call in (call for part in parts for call in part.delta.tool_calls or []):
        if call.index == len(calls): calls.append(call.function)
        else: calls[call.index].arguments += call.function.arguments
    return parts[-1].finish_reason, "".join(part.delta.content or "" for part in parts), calls


def test_a_schema_that_cannot_be_held_is_refused(client: openai.OpenAI, server: Process):
    for form in ({"guided_json": {"type": "nothing"}}, {"guided_regex": "(?=a)b"}, {"guided_regex": "("},
                 {"guided_grammar": "start: start"}):
        answer = HTTP.post(server.url + "/v1/completions", json={"prompt": PROMPT, **form})
        assert answer.status_code == 400, (form, answer.text)
        assert answer.json()["error"]["message"]


def test_a_schema_bomb_is_refused_soon(client: openai.OpenAI, server: Process):
    bomb = "(" * 6 + "a{1,200}" + "){1,200}" * 6
    begun = time.perf_counter()
    answer = HTTP.post(server.url + "/v1/completions", json={"prompt": PROMPT, "guided_regex": bomb})
    assert answer.status_code == 400, answer.text
    assert time.perf_counter() - begun < 20
    assert client.completions.create(model="tales", prompt=PROMPT, max_tokens=1).choices


def test_lines_tell_what_happened(server: Process, client: openai.OpenAI):
    done = client.completions.create(model="tales", prompt=PROMPT, max_tokens=9, temperature=0,
                                     extra_body={"ignore_eos": True})
    until(lambda: [fields for fields in server.said("request") if fields["id"] == done.id])
    [fields] = [fields for fields in server.said("request") if fields["id"] == done.id]
    assert (fields["status"], fields["output_tokens"], fields["finish"]) == ("200", "9", "length")
    assert 0 < float(fields["ttft_ms"]) <= float(fields["total_ms"])
    until(lambda: any(int(fields["running"]) == 0 for fields in server.said("engine")))
    assert {"waiting", "kv_used", "gen_tok_s", "prompt_tok_s"} <= set(server.said("engine")[0])
    text = HTTP.get(server.url + "/metrics").text
    assert figure(text, "generation_tokens_total") >= 9
    assert figure(text, "num_requests_running") == 0


def test_no_page_is_left_behind_by_clients_that_leave(server: Process):
    asked = {"prompt": PROMPT, "max_tokens": 200, "stream": True, "ignore_eos": True}
    for _ in range(3):
        with HTTP.stream("POST", server.url + "/v1/completions", json=asked) as answer:
            lines = answer.iter_lines()
            next(lines)
    until(lambda: figure(HTTP.get(server.url + "/metrics").text, "kv_cache_usage_perc") == 0)


@pytest.mark.slow
def test_a_load_of_everything(tmp_path: Path):
    """bench/serving/soak.py, for some seconds: too few for its slope of memory."""
    command = [sys.executable, "bench/serving/soak.py", "--seconds", "20", "--warm-up", "5",
               "--clients", "12", "--slope", "1000", "--json", str(tmp_path / "soak.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads((tmp_path / "soak.json").read_text())
    assert data["faults"] == []
    assert min(data["finished"], data["left"], data["pauses"]) >= 4


def test_a_signal_drains():
    asked = {"prompt": PROMPT, "max_tokens": 150, "stream": True, "ignore_eos": True}
    with (started("--no-warm-up", program=("-c", WITH_WORKER % "")) as process,
          HTTP.stream("POST", process.url + "/v1/completions", json=asked) as answer):
        lines = answer.iter_lines()
        next(lines)
        process.popen.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2]
        assert process.ended() == 0
    assert process.said("drained")[0]["aborted"] == "0"
    assert process.lines[-1].endswith(" stopped")


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once():
    """Also when a signal to its group has killed the idle compile worker, which held the pool's lock."""
    kill = "import time; time.sleep(0.2); active_children()[0].kill()"
    with started("--no-warm-up", "--api-key", "secret", "--served-model-name", "one", "two",
                 "--metrics-prefix", "vllm", program=("-c", WITH_WORKER % kill)) as process:
        headers = {"Authorization": "Bearer secret"}
        models = HTTP.get(process.url + "/v1/models", headers=headers).json()["data"]
        assert [model["id"] for model in models] == ["one", "two"]
        assert HTTP.get(process.url + "/v1/models").status_code == 401
        assert "vllm:num_requests_running" in HTTP.get(process.url + "/metrics").text
        with HTTP.stream("POST", process.url + "/v1/completions", headers=headers, json={
                "prompt": PROMPT, "max_tokens": 200, "stream": True, "ignore_eos": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.popen.send_signal(signal.SIGINT)
            until(lambda: process.said("draining"))
            begun = time.perf_counter()
            process.popen.send_signal(signal.SIGINT)
            assert process.ended() == 128 + signal.SIGINT
            assert time.perf_counter() - begun < 3
    assert " killed signal=SIGINT" in process.lines[-1]


def test_an_address_that_is_taken(command):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command("serve", "--port", port).refused(f"127.0.0.1:{port} cannot be served", "--port")


@pytest.mark.parametrize(("options", "words"), [
    (["--port", "99999"], "is not a port"), (["--api-key", ""], "API key is empty"),
    (["--api-key", "a b"], "printable"), (["--max-queue", "0"], "not a whole number"),
    (["--drain-timeout", "-1"], "not a number"), (["--max-num-seqs", "x"], "not a whole number"),
    (["--metrics-prefix", "x"], "invalid choice"),
    (["--reasoning-parser", "x"], "'x' is none of auto, none, openai_gptoss"),
    (["--tool-call-parser", "x"], "'x' is none of auto, none, openai, qwen3_coder"),
    (["--allowed-origins", "x"], "'x' is not a JSON list"), (["--allowed-headers", "[1]"], "is not a JSON"),
    (["--root-path", "llm"], "does not begin with /"), (["--ssl-certfile", "/nowhere"], "TLS cannot use"),
    (["--ssl-cert-reqs", "3"], "invalid choice"), (["--uvicorn-log-level", "loud"], "invalid choice"),
    (["--api-key", "a", "/"], "--api-key has the value /, which is a file or directory"),
    (["--device", "NOPE"], "NOPE"), (["--kv-cache-dtype", "int4"], "int4"),
    (["--speculative", "magic:3"], "magic"), (["--swap-space", "nan"], "not a number"),
    (["--chat-template", "/nowhere"], "/nowhere cannot be read")])
def test_options_out_of_range(command, options: list[str], words: str):
    command("serve", "--port", "0", *options).refused(words)


def test_a_missing_library_is_named(command, monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.startswith("tinygrad_nv.server")]:
        monkeypatch.delitem(sys.modules, name)
    # importing it again sets the package's attribute, which other tests patch through
    monkeypatch.setattr(tinygrad_nv, "server", tinygrad_nv.server)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    command("serve").refused("uvicorn is not installed", "pip install")


def test_help_names_the_defaults(command):
    shown = command("serve", "--help").succeeded().out
    for word in ("--host", "127.0.0.1", "8000", "--max-num-seqs", "--served-model-name", "NV_API_KEY"):
        assert word in shown


def test_a_harness_gets_the_log_probabilities_of_prompts(client: openai.OpenAI, alone: LLM):
    """The request of lm-eval's local-completions, of prompts in several chunks and short ones."""
    prompts = [alone.tokenize(text) for text in (PROMPT * 12, PROMPT, "A dog")]
    done = client.completions.create(model="tales", prompt=prompts, max_tokens=1, echo=True, logprobs=1,
                                     seed=1, temperature=0)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, logprobs=1)
    for choice, ids, its in zip(done.choices, prompts, alone.generate(prompts, params), strict=True):
        assert choice.logprobs is not None
        assert its.prompt_logprobs is not None
        values, tops = choice.logprobs.token_logprobs[:-1], choice.logprobs.top_logprobs[:-1]
        assert (len(values), values[0], tops[0]) == (len(ids), None, None)
        expected = [each for each in its.prompt_logprobs if each is not None]
        for token, value, top, own in zip(ids[1:], values[1:], tops[1:], expected, strict=True):
            assert value == pytest.approx(own[token].logprob, abs=2e-4)
            assert max(top.values()) == pytest.approx(max(each.logprob for each in own.values()), abs=2e-4)
            assert (value == max(top.values())) == (own[token].rank == 1)   # what the harness calls greedy
