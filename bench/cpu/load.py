"""How fast a checkpoint loads: a sharded directory against a plain read of the same files, interleaved.

    python bench/cpu/load.py [--gb 2] [--repeat 5] [--dtype float32]

Each measurement is a process of its own, so that its peak memory is its own. "read" reads every shard whole
into fresh memory and drops it; "load" brings the same bytes into the parameters of the model. With --cold
the files are dropped from the page cache before each measurement (the ratio then says how well a disk is
kept busy).
"""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.lib.measure import save, spread, table

HIDDEN, SHARDS = 1024, 4


def make_directory(directory: Path, gigabytes: float) -> None:
    """A random Llama of the given size in float32, in shards."""
    from safetensors.numpy import save_file

    from tinygrad_nv.models.config import parse_config
    from tinygrad_nv.models.llama import Llama
    from tinygrad_nv.models.weights import slots
    layers = max(2, round(8 * gigabytes))
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "num_hidden_layers": layers,
              "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32000, "dtype": "float32",
              "max_position_embeddings": 2048, "tie_word_embeddings": False}
    rest = gigabytes * 1e9 / 4 - 2 * 32000 * HIDDEN - layers * 3 * HIDDEN * HIDDEN
    config["intermediate_size"] = int(rest / (3 * layers * HIDDEN)) // 64 * 64
    wanted = slots(Llama(parse_config(config), device="CPU"))
    names, rng = list(wanted), np.random.default_rng(0)
    weight_map: dict[str, str] = {}
    for shard in range(SHARDS):
        file = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
        part = names[shard * len(names) // SHARDS:(shard + 1) * len(names) // SHARDS]
        tensors = {name: rng.standard_normal(wanted[name].shape, np.float32) for name in part}
        save_file(tensors, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(config))


def work(kind: str, directory: Path, dtype: str) -> dict[str, float]:
    """One measurement in this process: seconds, bytes in the files, peak resident bytes before and after."""
    from tinygrad_nv.engine.loading import open_device, resolve_dtype
    from tinygrad_nv.models import weights
    from tinygrad_nv.models.config import read_config
    from tinygrad_nv.models.llama import Llama
    from tinygrad_nv.runtime.memory import resident_bytes
    files, config = sorted(directory.glob("*.safetensors")), read_config(directory)
    device = open_device("CPU")
    before, begun = resident_bytes(), time.perf_counter()
    if kind == "read":
        for file in files:
            with file.open("rb", buffering=0) as opened: opened.readall()
    else: weights.load(Llama(config, resolve_dtype(dtype, config, directory), device), directory)
    seconds = time.perf_counter() - begun
    model_bytes = config.parameters * resolve_dtype(dtype, config, directory).itemsize
    return {"seconds": seconds, "bytes": sum(f.stat().st_size for f in files), "rss_before": before,
            "rss_peak": resident_bytes(), "model_bytes": model_bytes}


def forget(directory: Path) -> None:
    """Drops the files from the page cache."""
    for file in directory.glob("*.safetensors"):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(kind: str, directory: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """`work` in a process of its own."""
    if arguments.cold: forget(directory)
    command = [sys.executable, __file__, "--work", kind, "--directory", str(directory),
               "--dtype", arguments.dtype]
    return dict(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))


def main() -> None:
    """Makes the directory, alternates the two kinds, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gb", type=float, default=2.0, help="of weights that are made for it (default 2)")
    parser.add_argument("--repeat", type=int, default=5, help="loads and reads (default 5)")
    parser.add_argument("--dtype", default="float32", help="of the model (default float32, as the files)")
    parser.add_argument("--cold", action="store_true", help="without the page cache")
    parser.add_argument("--work", choices=("read", "load"), help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        print(json.dumps(work(arguments.work, arguments.directory, arguments.dtype)))
        return
    with tempfile.TemporaryDirectory() as name:
        make_directory(Path(name), arguments.gb)
        runs: dict[str, list[dict[str, float]]] = {"read": [], "load": []}
        for kind in runs: measure(kind, Path(name), arguments)
        for _ in range(arguments.repeat):
            for kind, done in runs.items(): done.append(measure(kind, Path(name), arguments))
    report(runs, arguments)


def report(runs: dict[str, list[dict[str, float]]], arguments: argparse.Namespace) -> None:
    """Prints and saves what was measured."""
    rows, rates = [], {}
    for kind, done in runs.items():
        rates[kind] = [r["bytes"] / r["seconds"] / 1e9 for r in done]
        rows.append([kind, f"{median(rates[kind]):.2f}", spread(rates[kind]),
                     f"{max(r['rss_peak'] for r in done) / 1e9:.2f}"])
    ratio = median(rates["load"]) / median(rates["read"])
    last = runs["load"][-1]
    memory = max(r["rss_peak"] for r in runs["load"]) / last["model_bytes"]
    print(table(["", "GB/s", "spread", "peak GB"], rows))
    print(f"load / read = {ratio:.2f} (wanted ≥ 0.70); peak memory / model = {memory:.3f} (wanted ≤ 1.2)")
    record: dict[str, Any] = {"ratio": ratio, "peak_over_model": memory, "runs": runs, "cold": arguments.cold,
                              "gb": arguments.gb, "dtype": arguments.dtype}
    save("load" if arguments.dtype == "float32" else f"load_{arguments.dtype}", record)


if __name__ == "__main__": main()
