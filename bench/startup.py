"""How long a server takes from an empty cache to ready, and whether a request compiles anything afterwards.

    python bench/startup.py [--model DIR] [--no-prebuilt] [--device CPU] [-- OPTIONS OF serve]

It starts `tinygrad-nv serve` twice in one cache directory, which is empty at first ("cold"), and each time
reports the stages up to ready, CPU seconds, kernels that were compiled, the latency of the first request of
each kind, that of a burst of 100 clients, and `compilations_after_ready`. `--no-prebuilt` leaves out steps
that come with the bundled model. Writes bench/results/startup-NAME.json.
"""
from __future__ import annotations

import argparse
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from measure import save, table

PROMPT, CLIENTS = "Once upon a time", 100
# one of each kind that has kernels of its own, or a step of another shape
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {}, "temperature": {"temperature": 1.0}, "n = 3": {"n": 3, "temperature": 1.0},
    "top_k": {"temperature": 1.0, "top_k": 5}, "top_p": {"temperature": 1.0, "top_p": 0.9},
    "min_p": {"temperature": 1.0, "min_p": 0.1}, "repetition_penalty": {"repetition_penalty": 1.3},
    "presence_penalty": {"presence_penalty": 0.5}, "logit_bias": {"logit_bias": {"5": 2.0}},
    "logprobs": {"logprobs": 3}, "choice": {"structured_outputs": {"choice": ["yes", "no"]}},
    "long prompt": {"prompt": [5] * 400}}


def environment(cache: Path, arguments: argparse.Namespace) -> dict[str, str]:
    """A process with caches of its own. A setting that is not its default, and changes no kernel of
    # models in floats, turns the steps off that came with a model."""
    own = {"NV_CACHE_DIR": str(cache), "CACHEDB": str(cache / "cache.db"),
           "XDG_CACHE_HOME": str(cache / "xdg")}
    if arguments.no_prebuilt: own["NV_QUANT_ACTIVATIONS"] = "float"
    return {**os.environ, **own}


def measured(cache: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """One start, and its first requests."""
    command = [sys.executable, "-m", "tinygrad_nv", "serve", "--port", "0", *arguments.options]
    if arguments.model: command.append(arguments.model)
    if arguments.device: command += ["--device", arguments.device]
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment(cache, arguments))
    assert server.stderr is not None
    lines = []
    for line in server.stderr:
        lines.append(line.rstrip())
        if re.search(r"Z ready ", line): break
    else: raise SystemExit("\n".join(lines))
    ready = time.perf_counter() - begun
    url = re.findall(r"url=(\S+)", lines[-1])[0]
    name = re.findall(r"model=(\S+)", lines[-1])[0]
    text = "\n".join(lines)
    stages = {stage.strip(): float(seconds)
              for stage, seconds in re.findall(r"waterfall ([a-z ]+?) +(\d+\.\d+) s", text)}
    compiled = sum(map(int, re.findall(r"compiled=(\d+)", text)))
    try: requests = asked(url, name)
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"ready_s": ready, "stages_s": stages, "compiled": compiled, "cpu_s": cpu, **requests}


def asked(url: str, model: str) -> dict[str, Any]:
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
    parser.add_argument("--device", default="")
    parser.add_argument("--no-prebuilt", action="store_true")
    parser.add_argument("options", nargs="*")
    arguments = parser.parse_args()
    load = os.getloadavg()
    with tempfile.TemporaryDirectory() as place:
        found = {which: measured(Path(place), arguments) for which in ("cold", "warm")}
    rows = [[name, *(f"{made[name]:.3g}" for made in found.values())]
            for name in ("ready_s", "cpu_s", "compiled", "burst_s", "burst_slowest_s",
                         "compilations_after_ready")]
    for part in ("stages_s", "first_s"):
        names = dict.fromkeys(name for made in found.values() for name in made[part])
        rows += [[f"{part[:-2]}: {name}", *(f"{made[part].get(name, 0):.3g}" for made in found.values())]
                 for name in names]
    print(table(["", *found], rows))
    name = Path(arguments.model).stem or "tales"
    kind = "-no-prebuilt" * arguments.no_prebuilt
    save(f"startup-{name}{kind}", {"load_before": load, "cores": os.cpu_count(), **found})


if __name__ == "__main__": main()
