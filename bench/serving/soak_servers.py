"""The servers of soak.py, its HTTP client, and what a process holds.

`servers()` starts three of `tinygrad-nv serve`: "lookup" with adapters, prompt lookup, host pages and fewer
pages than its sequences need; "draft" with a draft model; "embed". Adapters and the draft model are made of
the model in the box: random matrices, and its weights with noise.
"""
from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from bench.cpu.decode import BOX

CAPTURE_S = 600.0       # for a server's start, and for its steps
FOLLOWS_S = 12.0        # until a server says that steps follow
SLOTS = ["--max-num-seqs", "16", "--max-num-batched-tokens", "128", "--max-model-len", "512"]
OPTIONS = {"lookup": [*SLOTS, "--speculative", "ngram:3", "--num-gpu-blocks-override", "48",
                      "--swap-space", "0.02", "--max-loras", "2", "--max-lora-rank", "8"],
           "draft": [*SLOTS, "--num-gpu-blocks-override", "40"],
           "embed": ["--task", "embed", "--max-num-seqs", "16"]}
ADAPTERS: tuple[tuple[int, tuple[str, ...]], ...] = (
    (8, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
    (4, ("q_proj", "v_proj")), (3, ("o_proj", "gate_proj")))


def adapter(directory: Path, seed: int, rank: int, targets: tuple[str, ...]) -> Path:
    """A PEFT directory of random matrices that change tokens."""
    directory.mkdir()
    random, matrices = np.random.default_rng(seed), dict[str, np.ndarray]()
    for name, weights in load_file(BOX / "model.safetensors").items():
        if not name.endswith(tuple(f"{each}.weight" for each in targets)): continue
        rows, columns = weights.shape
        base = f"base_model.model.{name.removesuffix('.weight')}"
        matrices[f"{base}.lora_A.weight"] = random.standard_normal((rank, columns), np.float32) * 0.1
        matrices[f"{base}.lora_B.weight"] = random.standard_normal((rows, rank), np.float32) * 0.1
    save_file(matrices, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(
        {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank,
         "target_modules": targets}))
    return directory


def draft_model(directory: Path) -> Path:
    """The model in the box with noise: most of its tokens are right."""
    directory.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"): shutil.copy(BOX / name, directory)
    random = np.random.default_rng(0)
    weights = {name: each + random.standard_normal(each.shape, np.float32) * 0.05 * each.std()
               for name, each in load_file(BOX / "model.safetensors").items()}
    save_file(weights, directory / "model.safetensors")
    return directory


# **** processes ****

@dataclass(frozen=True)
class Running:
    """A server: its address and its process."""
    address: tuple[str, int]
    process: int

    def status(self, name: str) -> int:
        """A number of /proc/PID/status."""
        [line] = [each for each in Path(f"/proc/{self.process}/status").read_text().splitlines()
                  if each.startswith(f"{name}:")]
        return int(line.split()[1])

    @property
    def resident_mb(self) -> float:
        """Memory that is in RAM."""
        return self.status("VmRSS") * 1024 / 1e6

    @property
    def holds(self) -> Counter[str]:
        """Threads, and open descriptors by what they are: files by name, others by kind."""
        found = Counter({"threads": self.status("Threads")})
        for each in os.listdir(f"/proc/{self.process}/fd"):
            with contextlib.suppress(OSError):
                found[os.readlink(f"/proc/{self.process}/fd/{each}").partition(":[")[0]] += 1
        return found


@contextmanager
def server(options: list[str], tree: Path | None = None, log: Path | None = None) -> Iterator[Running]:
    """`tinygrad-nv serve` of the sources in `tree` (default: these) on a free port, after it has captured its
    steps. Its log goes to `log`."""
    command = [sys.executable, "-m", "tinygrad_nv", "serve", "--port", "0", "--log-interval", "60", *options]
    environment = {**os.environ, **({"PYTHONPATH": str(tree)} if tree else {})}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tree, env=environment)
    reader = ServerLog(process, log or Path(os.devnull))
    try:
        found = reader.wait(r" ready url=http://([^:]+):(\d+)", CAPTURE_S)
        if found is None: sys.exit("the server did not start:\n" + "".join(reader.lines[-20:]))
        # what steps are not captured yet follow while it serves
        if reader.wait(r" warm_up_later ", FOLLOWS_S):
            reader.wait(r" warm_up_later done=(\d+) steps=\1 ", CAPTURE_S)
        yield Running((found[1], int(found[2])), process.pid)
        process.terminate()
        process.wait(60)
    finally:
        if process.poll() is None: process.kill()
        reader.join()


class ServerLog(threading.Thread):
    """Copies a server's log to a file. `lines`: those before it is told that it serves."""

    def __init__(self, process: subprocess.Popen[str], path: Path) -> None:
        super().__init__()
        self.process, self.path, self.lines = process, path, list[str]()
        self.start()

    def run(self) -> None:
        """Until the server has ended."""
        assert self.process.stderr is not None
        with self.path.open("a") as file:
            for line in self.process.stderr:
                file.write(line)
                file.flush()
                if len(self.lines) < 1000: self.lines.append(line)

    def wait(self, pattern: str, seconds: float) -> re.Match[str] | None:
        """The first line with this pattern, within so many seconds, or None."""
        ends = time.monotonic() + seconds
        while True:
            found = next((found for each in self.lines if (found := re.search(pattern, each))), None)
            if found or time.monotonic() > ends or not self.is_alive(): return found
            time.sleep(0.1)


@contextmanager
def servers(names: set[str], options: list[str], tree: Path | None = None, logs: Path | None = None
            ) -> Iterator[dict[str, Running]]:
    """The servers of these names, with further `options`. Their logs go to the folder `logs`."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        more: dict[str, list[str]] = {"lookup": [], "draft": [], "embed": []}
        if "lookup" in names:
            made = [adapter(folder / f"a{i}", i, *each) for i, each in enumerate(ADAPTERS)]
            more["lookup"] = ["--lora-modules", *(f"{each.name}={each}" for each in made)]
        if "draft" in names: more["draft"] = ["--speculative", f"draft:{draft_model(folder / 'draft')}:3"]
        yield {name: stack.enter_context(server([*OPTIONS[name], *more[name], *options], tree,
                                                logs and logs / f"{name}.log")) for name in sorted(names)}


# **** HTTP ****

async def ask(address: tuple[str, int], path: str, body: dict[str, Any] | None = None,
              half: bool = False) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream, or the one object of an answer. Raises RuntimeError for an error's status and
    a stream without [DONE]. `half`: only half of the body is sent, and there is no answer."""
    reader, writer = await asyncio.open_connection(*address, limit=1 << 22)
    try:
        data = b"" if body is None else json.dumps(body).encode()
        sent = data[:len(data) // 2] if half else data
        writer.write(f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                     "Content-Type: application/json\r\nConnection: close\r\n"
                     f"Content-Length: {len(data)}\r\n\r\n".encode() + sent)
        if half:
            await writer.drain()
            return
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        status = head.split(" ", 2)[1]
        if "text/event-stream" not in head:
            answer = (await reader.read()).decode()
            if status != "200": raise RuntimeError(f"{status} {answer[:300]}")
            yield json.loads(answer) if "application/json" in head else {"text": answer}
            return
        while True:
            line = await reader.readline()  # a chunk's size, or a line of an event
            if not line: raise RuntimeError("the stream ended without [DONE]")
            if line.startswith(b"data: [DONE]"): return
            if line.startswith(b"data: "): yield json.loads(line[6:])
    finally: writer.close()


async def figures(address: tuple[str, int]) -> dict[str, float]:
    """The server's metrics by name; those with several labels are summed up."""
    found: dict[str, float] = {}
    async for answer in ask(address, "/metrics"):
        for name, value in re.findall(r"^\w+:(\w+){[^}]*} (\S+)\r?$", answer["text"], re.M):
            found[name] = found.get(name, 0.0) + float(value)
    return found
