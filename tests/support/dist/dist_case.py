"""Ranks of tests: stores of several ranks in threads of one process, and small programs as ranks, which
import no tinygrad: they start in a tenth of a second."""
from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from tinygrad_nv.dist.ranks import Ranks
from tinygrad_nv.dist.store import Store

ROOT = Path(__file__).resolve().parents[3]
# the package without what it imports: tinygrad takes a second
HEAD = f"""
import os, signal, sys, time, types
package = types.ModuleType("tinygrad_nv")
package.__path__ = [{str(ROOT / "tinygrad_nv")!r}]
sys.modules["tinygrad_nv"] = package
from tinygrad_nv.dist.ranks import Ranks
from tinygrad_nv.dist.store import Store
ranks = Ranks.from_environment()
"""
MARK = "DIST_TEST_MARK"     # a variable that every process of a test has
# "at once" on a machine that is busy with other tests: a rank starts in 0.1 s alone and has taken 9 s there;
# programs of tests sleep for 300 s, and wait for 200, so that what waits to the end is seen
SOON_S = 60.0


def free_port() -> int:
    """A free port below those the kernel hands out, which another test's connection may take."""
    while True:
        port = random.SystemRandom().randrange(10000, 32768)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)): return port


def ranks_of(world: int, port: int = 0) -> list[Ranks]:
    """Ranks of one host."""
    port = port or free_port()
    return [Ranks(rank, world, rank, world, 0, "127.0.0.1", port, "launch") for rank in range(world)]


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """What calls return or raise, each in its thread."""
    def outcome(call: Callable[[], Any]) -> Any:
        try: return call()
        except Exception as error: return error
    with ThreadPoolExecutor(len(calls)) as pool: return list(pool.map(outcome, calls))


def opened(ranks: list[Ranks], timeout_s: float = SOON_S) -> list[Any]:
    """The stores of these ranks, or what opening them raised."""
    return together([lambda each=each: Store.open(each, timeout_s) for each in ranks])


def close(stores: list[Any]) -> None:
    """All at the same time, as ranks end."""
    together([store.close for store in stores if isinstance(store, Store)])


# **** processes ****

def program(folder: Path, text: str) -> Path:
    """A file of Python that knows which rank it is: `ranks`."""
    path = folder / "rank.py"
    path.write_text(HEAD + text)
    return path


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    """The variables of a rank that are set by hand."""
    return {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world), "MASTER_PORT": str(port)}


def spawned(path: Path, world: int, *words: str) -> list[subprocess.Popen[str]]:
    """Ranks without a launcher."""
    port = free_port()
    return [subprocess.Popen([sys.executable, str(path), *words], env=environment(rank, world, port),
                             text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            for rank in range(world)]


def ended(processes: list[subprocess.Popen[str]], timeout_s: float = SOON_S) -> list[tuple[int, str, str]]:
    """Exit status, stdout and stderr of each."""
    try:
        texts = [process.communicate(timeout=timeout_s) for process in processes]
        return [(process.returncode, *text) for process, text in zip(processes, texts, strict=True)]
    finally:
        for process in processes: process.kill()


def alive(mark: str) -> list[str]:
    """Processes with this mark that are no zombies, by their command lines."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() not in (folder / "environ").read_bytes().split(b"\0"): continue
            if (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z": continue
            found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError: continue
    return found


def await_none(mark: str, timeout_s: float) -> list[str]:
    """What is alive after that time, at the latest."""
    end = time.monotonic() + timeout_s
    while (left := alive(mark)) and time.monotonic() < end: time.sleep(0.02)
    return left
