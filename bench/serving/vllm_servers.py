"""Both servers of against_vllm.py, and what vLLM's own client measures of them.

Protocol: a `Server` is ready when its constructor returns, and stopped by a signal, so that it takes no
processor time; within `turn()` it runs. `run_client` gives it a load; `run_offline` runs `bench throughput`
and `bench latency` of a side, which have the same options and write the same fields.
"""
from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from tinygrad_nv.benchmarks import vllm_environment

OURS, THEIRS = "tinygrad_nv", "vLLM"
START_S = 900.0
LAST_WORDS = 3000       # characters of a log that an error quotes
KEPT = ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms",
        "median_itl_ms",
        "p99_itl_ms", "total_input_tokens", "total_output_tokens", "duration")
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20},
                                           "age": {"type": "integer"}}, "required": ["name", "age"]}
TOPICS = ("a garden in spring", "how engines work", "the history of bread", "a letter to a friend",
          "sorting numbers", "rain on a tin roof", "planets and their moons", "a market in the morning")


def command(side: str) -> list[str]:
    """Returns the command line program of a side."""
    if side == OURS: return [sys.executable, "-m", "tinygrad_nv"]
    return [str(vllm_environment.interpreter()), "-m", "vllm.entrypoints.cli.main"]


def variables(side: str, bind: str = "") -> dict[str, str]:
    """Returns the environment of a side's processes; `bind` has the cores of vLLM's."""
    return vllm_environment.environment(bind=bind) if side == THEIRS else dict(os.environ)


class Server:
    """A server in a process group of its own, which `turn` lets run. Exits where it does not start."""

    def __init__(self, side: str, model: Path, log: Path, options: tuple[str, ...] = (),
                 bind: str = "") -> None:
        self.side, self.log = side, log
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        words = ["serve", str(model), "--port", str(port), "--max-model-len", "2048",
                 "--served-model-name", "model", "--dtype", "bfloat16", *options]
        started = time.monotonic()
        with log.open("w") as file:
            self.process = subprocess.Popen([*command(side), *words], stdout=file, stderr=file,
                                            env=variables(side, bind), start_new_session=True)
        while not self._is_ready():
            if time.monotonic() > started + START_S or self.process.poll() is not None:
                self.close()
                sys.exit(f"{side}'s server did not start:\n" + log.read_text(errors="replace")[-LAST_WORDS:])
            time.sleep(0.2)
        self.start_s = time.monotonic() - started
        self._signal(signal.SIGSTOP)

    def _is_ready(self) -> bool:
        try:
            with urlopen(f"{self.url}/health", timeout=10) as reply: return bool(reply.status == 200)
        except OSError: return False

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError): os.killpg(self.process.pid, number)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Lets the server run while this is open."""
        self._signal(signal.SIGCONT)
        try: yield
        finally: self._signal(signal.SIGSTOP)

    def memory_mb(self) -> float:
        """Returns the memory of all of its processes; what they share counts once."""
        total = 0
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit(): continue
            with contextlib.suppress(OSError):
                if os.getsid(int(folder.name)) == self.process.pid:
                    found = re.search(r"^Pss:\s+(\d+)", (folder / "smaps_rollup").read_text(), re.MULTILINE)
                    if found: total += int(found[1])
        return total * 1024 / 1e6

    def close(self) -> None:
        """Ends its processes."""
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired): self.process.wait(30)
        self._signal(signal.SIGKILL)


# **** loads ****

@dataclass(frozen=True)
class Load:
    """Requests as `vllm bench serve` draws them: `options` of the client; `body` goes into every request."""
    options: tuple[str, ...]
    body: dict[str, Any]


def _write_conversations(path: Path, count: int = 256) -> str:
    """Writes conversations in the layout of ShareGPT, whose prompts and answers have lengths as different as
    those of people: short questions, long pastes."""
    made = []
    for i in range(count):
        topic = TOPICS[i % len(TOPICS)]
        question = f"Tell me about {topic}. " * (1 + (i * 37) % 24)
        answer = f"There is much to say about {topic}. " * (1 + (i * 13) % 16)
        made.append({"conversations": [{"from": "human", "value": question},
                                       {"from": "gpt", "value": answer}]})
    path.write_text(json.dumps(made))
    return str(path)


def _write_prompts(path: Path, count: int = 64) -> str:
    """Writes prompts for structured answers, a line of JSON each."""
    prompts = [f"A person who likes {TOPICS[i % len(TOPICS)]}, number {i}, as JSON:" for i in range(count)]
    path.write_text("".join(json.dumps({"prompt": each}) + "\n" for each in prompts))
    return str(path)


def make_loads(folder: Path) -> dict[str, Load]:
    """Returns the loads, by name; their files go into `folder`. Answers are greedy, and as long as asked for
    but in the structured one, which ends where its JSON does."""
    def load(dataset: str, words: str, **body: Any) -> Load:
        return Load(("--dataset-name", dataset, *words.split()), {"temperature": 0.0, **body})
    conversations = _write_conversations(folder / "conversations.json")
    prompts = _write_prompts(folder / "prompts.jsonl")
    return {
        "random": load("random", "--random-input-len 128 --random-output-len 64 --ignore-eos"),
        "sharegpt": load("sharegpt", f"--ignore-eos --dataset-path {conversations}"),
        "prefix": load("prefix_repetition",
                       "--prefix-repetition-prefix-len 256 --prefix-repetition-suffix-len 32 "
                       "--prefix-repetition-num-prefixes 4 --prefix-repetition-output-len 32 --ignore-eos"),
        "structured": load("custom", f"--skip-chat-template --custom-output-len 48 --dataset-path {prompts}",
                           structured_outputs={"json": SCHEMA})}


# **** clients ****

def run_client(server: Server, tokenizer: Path, load: Load, concurrency: int, rate: float, prompts: int,
               seed: int, models: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns figures of `vllm bench serve`, which sends `prompts` requests to one server, at most
    `concurrency` at once (0: all) and `rate` a second (0: no limit), each to one of `models`, which are its
    adapters. Exits where a request failed."""
    with tempfile.TemporaryDirectory() as folder, server.turn():
        words = [*command(THEIRS), "bench", "serve", "--backend", "openai", "--base-url", server.url,
                 "--model", "model", "--tokenizer", str(tokenizer), "--num-prompts", str(prompts),
                 "--request-rate", str(rate) if rate else "inf", "--seed", str(seed), "--disable-tqdm",
                 "--save-result", "--result-dir", folder, "--result-filename", "result.json",
                 "--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99",
                 "--extra-body", json.dumps(load.body), *load.options]
        if concurrency: words += ["--max-concurrency", str(concurrency)]
        if models: words += ["--lora-modules", *models]
        figures = _run(words, THEIRS, Path(folder) / "result.json")
    if figures["completed"] != prompts:
        sys.exit(f"{server.side} answered {figures['completed']} of {prompts} requests: "
                 f"{figures.get('errors')}")
    return {name: figures[name] for name in KEPT}


def run_offline(side: str, kind: str, model: Path) -> float:
    """Returns tokens a second of `bench throughput` (64 requests), or of `bench latency` (1 request): 128
    tokens in, 64 out."""
    sizes = {"throughput": ["--num-prompts", "64"],
             "latency": ["--batch-size", "1", "--num-iters-warmup", "1", "--num-iters", "5"]}
    if kind == "throughput" and side == THEIRS: sizes[kind] += ["--dataset-name", "random"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        words = [*command(side), "bench", kind, "--model", str(model), "--dtype", "bfloat16",
                 "--max-model-len", "2048", "--input-len", "128", "--output-len", "64",
                 "--output-json", str(out), *sizes[kind]]
        found = _run(words, side, out)
    if kind == "latency": return 64 / float(found["avg_latency"])
    return float(found["tokens_per_second"]) * 64 / 192     # which counts tokens of prompts, too


def _run(words: list[str], side: str, out: Path) -> dict[str, Any]:
    """Returns the JSON that a command writes. Exits where it fails."""
    done = subprocess.run(words, env=variables(side), capture_output=True, text=True, check=False)
    if done.returncode or not out.exists():
        sys.exit(f"{' '.join(words)} failed:\n" + (done.stdout + done.stderr)[-LAST_WORDS:])
    found: dict[str, Any] = json.loads(out.read_text())
    return found
