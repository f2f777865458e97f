"""How long a server takes from an empty cache to ready, and whether a request compiles anything afterwards.

    python bench/serving/startup.py [--model DIR | --billion] [--no-prebuilt] [--device CPU] [-- OPTIONS OF
    serve]

It starts `tinygrad-nv serve` twice in one cache directory, which is empty at first ("cold"), and each time
reports the stages up to ready, CPU seconds of all its processes until then, kernels that were compiled, the
latency of the first request of each kind, that of a burst of 100 clients, `compilations_after_ready`, and
when the steps that follow are there. `--no-prebuilt` leaves out steps that come with the bundled model.
`--billion` makes a model of 1.2 billion random weights (startup_model.py) for it. Python's byte code is there
before the first start, as an installer writes it. Memory is touched and given back before each start: a
virtual machine may have left it to its host, and gets it back at a tenth of the speed. Writes
bench/results/startup-NAME.json.
"""
from __future__ import annotations

import argparse
import mmap
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.lib.measure import save, table
from bench.serving import startup_model

PROMPT, CLIENTS = "Once upon a time", 100
# one of each kind that has kernels of its own, or a step of another shape
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {}, "temperature": {"temperature": 1.0}, "n = 3": {"n": 3, "temperature": 1.0},
    "top_k": {"temperature": 1.0, "top_k": 5}, "top_p": {"temperature": 1.0, "top_p": 0.9},
    "min_p": {"temperature": 1.0, "min_p": 0.1}, "repetition_penalty": {"repetition_penalty": 1.3},
    "presence_penalty": {"presence_penalty": 0.5}, "logit_bias": {"logit_bias": {"5": 2.0}},
    "logprobs": {"logprobs": 3}, "prompt_logprobs": {"prompt_logprobs": 1},
    "choice": {"structured_outputs": {"choice": ["yes", "no"]}},
    "long prompt": {"prompt": [5] * 400}}


def environment(cache: Path, arguments: argparse.Namespace) -> dict[str, str]:
    """A process with caches of its own. A setting that is not its default, and changes no kernel of
    models in floats, turns the steps off that came with a model."""
    own = {"NV_CACHE_DIR": str(cache), "CACHEDB": str(cache / "cache.db"),
           "XDG_CACHE_HOME": str(cache / "xdg"), "PYTHONPYCACHEPREFIX": str(cache / "python")}
    if arguments.no_prebuilt: own["NV_QUANT_ACTIVATIONS"] = "float"
    return {**{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}, **own}


def cpu_s(pid: int) -> float:
    """CPU seconds of a process, of its children that ended, and of those that run."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = [int(child) for task in Path(f"/proc/{pid}/task").iterdir()
                for child in (task / "children").read_text().split()]
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") + sum(map(cpu_s, children))


def touch(size: int) -> None:
    """Has the host of a virtual machine give memory back."""
    with mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, size, mmap.PAGESIZE): memory[at] = 1


def measure(cache: Path, model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One start, and its first requests."""
    command = [sys.executable, "-m", "tinygrad_nv", "serve", "--port", "0", *arguments.options]
    if model: command.append(model)
    if arguments.device: command += ["--device", arguments.device]
    if model: touch(2 * sum(file.stat().st_size for file in Path(model).iterdir()))
    begun = time.perf_counter()
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment(cache, arguments))
    assert server.stderr is not None
    lines = []
    for line in server.stderr:
        lines.append(line.rstrip())
        if re.search(r"Z ready ", line): break
    else: raise SystemExit("\n".join(lines))
    ready, cpu = time.perf_counter() - begun, cpu_s(server.pid)
    followed, later = threading.Event(), dict[str, float]()

    def read() -> None:
        assert server.stderr is not None
        for line in server.stderr:
            if (found := re.search(r"warm_up_later done=(\d+) steps=\1 ", line)):
                later[found[1]] = time.perf_counter() - begun - ready
                followed.set()
    threading.Thread(target=read, daemon=True).start()
    url = re.findall(r"url=(\S+)", lines[-1])[0]
    name = re.findall(r"model=(\S+)", lines[-1])[0]
    text = "\n".join(lines)
    stages = {stage.strip(): float(seconds)
              for stage, seconds in re.findall(r"waterfall ([a-z ]+?) +(\d+\.\d+) s", text)}
    compiled = sum(map(int, re.findall(r"compiled=(\d+)", text)))
    try:
        requests = time_requests(url, name)
        waits = arguments.device in ("", "CPU")     # elsewhere none follow
        if waits and not followed.wait(600): raise SystemExit("the steps that follow do not come")
        time.sleep(1)   # it writes them
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    return {"ready_s": ready, "cpu_s": cpu, "stages_s": stages, "compiled": compiled,
            "later_s": max(later.values(), default=0.0), **requests}


def time_requests(url: str, model: str) -> dict[str, Any]:
    """Latencies of first requests of each kind and of a burst, and what they compiled."""
    with httpx.Client(timeout=120, limits=httpx.Limits(max_connections=CLIENTS)) as client:
        def ask(**options: Any) -> float:
            begun = time.perf_counter()
            body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, **options}
            client.post(f"{url}/v1/completions", json=body).raise_for_status()
            return time.perf_counter() - begun
        first = {kind: ask(**options) for kind, options in KINDS.items()}
        begun = time.perf_counter()
        with ThreadPoolExecutor(CLIENTS) as threads:
            each = list(threads.map(lambda i: ask(prompt=PROMPT * (1 + i % 7), temperature=i % 2),
                                    range(CLIENTS)))
        burst = time.perf_counter() - begun
        metrics = client.get(f"{url}/metrics").text
    counted = re.findall(r":compilations_after_ready_total{.*} (\S+)", metrics)
    return {"first_s": first, "burst_s": burst, "burst_slowest_s": max(each),
            "compilations_after_ready": int(float(counted[0]))}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="")
    parser.add_argument("--billion", action="store_true")
    parser.add_argument("--device", default="")
    parser.add_argument("--no-prebuilt", action="store_true")
    parser.add_argument("options", nargs="*")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        cache, model = Path(place) / "cache", arguments.model
        cache.mkdir()
        if arguments.billion:
            startup_model.write(Path(model := f"{place}/billion"))
        subprocess.run([sys.executable, "-m", "tinygrad_nv", "serve", "--help"], check=True,
                       stdout=subprocess.DEVNULL, env=environment(cache, arguments))
        subprocess.run([sys.executable, "-c", "from tinygrad_nv.server import startup"], check=True,
                       env=environment(cache, arguments))
        load = os.getloadavg()
        found = {which: measure(cache, model, arguments) for which in ("cold", "warm")}
    rows = [[name, *(f"{made[name]:.3g}" for made in found.values())]
            for name in ("ready_s", "cpu_s", "compiled", "burst_s", "burst_slowest_s",
                         "compilations_after_ready", "later_s")]
    for part in ("stages_s", "first_s"):
        names = dict.fromkeys(name for made in found.values() for name in made[part])
        rows += [[f"{part[:-2]}: {name}", *(f"{made[part].get(name, 0):.3g}" for made in found.values())]
                 for name in names]
    print(table(["", *found], rows))
    name = Path(model).stem or "tales"
    kind = "-no-prebuilt" * arguments.no_prebuilt
    save(f"startup-{name}{kind}", {"load_before": load, "cores": os.cpu_count(), **found})


if __name__ == "__main__": main()
