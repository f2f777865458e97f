"""The bundled model in several replicas: the tokens are those of one, whichever answers."""
from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.models import replicas_program
from tinygrad_nv.dist.processes import ENDED
from tinygrad_nv.models import tales

TALES = Path(tales.__file__).parent
ENVIRONMENT = {**os.environ, "NUM_CPU_THREADS": "1", "NV_PROGRAM_CACHE": "1"}


@pytest.fixture(scope="module")
def alone() -> tuple[Any, Any]:
    with replicas_program.opened(str(TALES)) as llm:
        return json.loads(json.dumps(replicas_program.answers(llm, 5))), replicas_program.logprobs(llm)


def near(found: list[float], one: list[float]) -> None:
    """Log probabilities of a prompt are off float64 by no more than 4 times what those of one engine are, or
    4 roundings of the largest."""
    model = AutoModelForCausalLM.from_pretrained(TALES, dtype=torch.float64).eval()
    tokens = AutoTokenizer.from_pretrained(TALES)(replicas_program.PROMPTS[0], return_tensors="pt").input_ids
    with torch.no_grad(): logits = model(tokens).logits[0, :-1]
    exact = logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0].numpy()
    bound = 4 * max(np.abs(one - exact).max(), np.finfo(np.float32).eps * np.abs(exact).max())
    assert np.abs(found - exact).max() <= bound, (found, one, exact)


@pytest.mark.parametrize("options", [
    {"data_parallel_size": 2, "max_queue": 1},
    pytest.param({"data_parallel_size": 3, "speculative": "ngram:3"}, marks=pytest.mark.slow),
    pytest.param({"data_parallel_size": 2, "tensor_parallel_size": 2}, marks=pytest.mark.slow),
    pytest.param({"data_parallel_size": 2, "pipeline_parallel_size": 2}, marks=pytest.mark.slow),
    pytest.param({"data_parallel_size": 2, "speculative": f"draft:{TALES}:3"}, marks=pytest.mark.slow)],
    ids=str)
def test_tokens(options: dict[str, object], alone: tuple[Any, Any]) -> None:
    kinds = 2 if "max_queue" in options else 5
    done = run(sys.executable, replicas_program.__file__, str(TALES), json.dumps(options), str(kinds))
    assert done.returncode in (0, ENDED), done.stderr      # rank 1 is killed in the end
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["answers"] == alone[0][:6 * kinds], done.stderr
    if kinds > 2: near(found["logprobs"], alone[1])
    several = found["several"]
    assert min(several["tokens"]) > 50      # of about 350 in all, or more
    assert set(several["running"]) == {0}
    assert min(several["hits"]) > 0
    assert several["more"] == 0     # each replica has forgotten the prompt
    assert "several ranks" in several["refused"]
    assert any(several["drafted"]) == ("speculative" in options)
    if "max_queue" in options:
        read, unread = sorted(found["unreadable"], key=lambda each: each.startswith("rank"))
        assert read in ("red", "blue")
        assert re.match("rank 1 cannot read the request: .*Color", unread)
        # of both replicas; in `answers` each has more than `max_queue` requests
        assert found["limited"] == [5, "1 requests wait for their first token"]
    words, soon = found["lost"]
    assert re.search("rank 1 (was lost|has ended)", words), words
    assert soon


@pytest.mark.slow
@pytest.mark.parametrize(("size", "when"), [
    ("data_parallel_size", "load"), ("data_parallel_size", "capture"), ("tensor_parallel_size", "load"),
    ("tensor_parallel_size", "capture")])
def test_an_error_of_one_rank_is_that_of_all(size: str, when: str) -> None:
    """At once, and with its type; then a second model of a launcher's ranks is refused at once."""
    done = run(sys.executable, "-m", "tinygrad_nv", "launch", "-n", "2", replicas_program.__file__,
               str(TALES), "failing", size, when)
    lines = [line.partition("] ")[2] for line in done.stdout.splitlines() if line.startswith("[rank 0]")]
    assert lines == ["WeightError: rank 1: a tensor is missing", "quick: True",
                     "DistError: the ranks of this launcher had a model, and ended with it",
                     "quick: True"], done


@pytest.mark.slow
def test_a_server() -> None:
    """Answers 20 clients, and ends with its name when a replica is killed."""
    server = subprocess.Popen([sys.executable, "-m", "tinygrad_nv", "serve", "-dp", "2", "--port", "0",
                               "--no-warm-up", "--max-num-seqs", "4"], text=True, stderr=subprocess.PIPE,
                              env=ENVIRONMENT, start_new_session=True)
    lines, ready = list[str](), threading.Event()

    def read() -> None:
        assert server.stderr is not None
        for line in server.stderr:
            lines.append(line)
            if " ready " in line: ready.set()
        ready.set()
    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert ready.wait(200), lines
        assert server.poll() is None, lines
        fields = dict(each.split("=", 1) for line in lines if " ready " in line for each in line.split()[2:])
        assert any("replicas=2" in line for line in lines), lines

        def asked(number: int) -> str:
            answer = httpx.post(f"{fields['url']}/v1/completions", timeout=100, json={
                "prompt": "Once upon a time", "temperature": 0, "max_tokens": 8, "n": 1 + number % 2})
            texts = {each["text"] for each in answer.json()["choices"]}
            assert len(texts) == 1, texts
            return texts.pop()
        with ThreadPoolExecutor(20) as clients: texts = set(clients.map(asked, range(20)))
        assert texts == {", there was a kind little girl named"}
        metrics = httpx.get(f"{fields['url']}/metrics", timeout=10).text
        counted = re.search(r"^tinygrad_nv:generation_tokens_total.* (\S+)$", metrics, re.M)
        assert counted is not None
        assert float(counted[1]) == 30 * 8
        os.kill(rank_of(server.pid), signal.SIGKILL)
        assert server.wait(60) not in (0, None), lines
        reader.join(10)
        assert any("rank 1" in line for line in lines), lines
    finally:
        if server.poll() is None: os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def rank_of(server: int) -> int:
    """The process of rank 1."""
    every = [int(each.name) for each in Path("/proc").iterdir() if each.name.isdecimal()]
    for each in every:
        with suppress(OSError, IndexError):
            stat = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            if stat[1] == str(server) and b"executor.follower" in Path(f"/proc/{each}/cmdline").read_bytes():
                return each
    raise AssertionError("the server has no rank 1")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=ENVIRONMENT)
