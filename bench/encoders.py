"""An encoder through torch.compile beside eager torch, and as ONNX beside onnxruntime, on the CPU.

    python bench/encoders.py [--model FILE.onnx] [--shapes 1x16 1x128 8x16 8x128] [--rounds 15] [--threads 1]

Without a model both have one of random weights, in the shape of MiniLM-L6. Shapes are batch x tokens; each of
the four is called in turn, so that what else the machine does meets all of them. Prints the first call's
seconds, medians and quartiles; ratios are of medians. `--model` is an ONNX file with inputs input_ids and so
on: it is run as ONNX alone.
"""
from __future__ import annotations

import argparse
import io
import os
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from measure import save, table

MINILM = {"vocab_size": 30522, "hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6,
          "num_attention_heads": 12, "max_position_embeddings": 512}
PEERS = {"torch.compile": "eager", "ONNX": "onnxruntime"}
Call = Callable[[], Any]


def network() -> Any:
    """A BERT with random weights."""
    import torch
    from transformers import BertConfig, BertModel
    torch.manual_seed(0)
    return BertModel(BertConfig(**MINILM), add_pooling_layer=False).eval()


def exported(model: Any) -> bytes:
    """The model as ONNX, with free batch and length."""
    import torch

    class First(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            return self.model(input_ids, attention_mask)[0]
    names, file = ["input_ids", "attention_mask"], io.BytesIO()
    ones = torch.ones(2, 8, dtype=torch.int64)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(First().eval(), (ones, ones), file, input_names=names, output_names=["output"],
                          opset_version=18, dynamo=False,
                          dynamic_axes={name: {0: "batch", 1: "tokens"} for name in names})
    return file.getvalue()


def inputs(names: list[str], batch: int, tokens: int) -> dict[str, np.ndarray]:
    """Random tokens of one text each, without padding."""
    ids = np.random.default_rng(0).integers(0, MINILM["vocab_size"], (batch, tokens))
    known = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    return {name: known[name] for name in names}


def by_torch(model: Any, given: dict[str, np.ndarray]) -> dict[str, Call]:
    """Calls of the model, compiled and not."""
    import torch

    import tinygrad_nv.torch  # noqa: F401
    torch._dynamo.reset()
    tensors = {name: torch.from_numpy(x) for name, x in given.items()}
    compiled = torch.compile(model, backend="tinygrad_nv", dynamic=False)

    def called(which: Any) -> Any:
        with torch.no_grad(): return which(**tensors)[0].numpy()
    return {"torch.compile": lambda: called(compiled), "eager": lambda: called(model)}


def by_onnx(file: bytes, given: dict[str, np.ndarray], threads: int) -> dict[str, Call]:
    """Calls of an ONNX model, by this package and by onnxruntime."""
    import onnxruntime  # type: ignore[import-untyped]

    from tinygrad_nv.onnx import OnnxRunner
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    runner = OnnxRunner(file)
    return {"ONNX": lambda: next(iter(runner(given).values())).numpy(),
            "onnxruntime": lambda: session.run(None, given)[0]}


def measured(calls: dict[str, Call], rounds: int) -> dict[str, Any]:
    """Milliseconds of a call, in turn: median and quartiles; seconds of the first; distance of results."""
    found: dict[str, Any] = {}
    results: dict[str, np.ndarray] = {}
    for name, call in calls.items():
        begun = time.perf_counter()
        results[name] = call()
        found[name] = {"first_s": time.perf_counter() - begun}
        for _ in range(2): call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            begun = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - begun)
    for name, each in seconds.items():
        low, middle, high = (1e3 * q for q in statistics.quantiles(each, n=4))
        found[name] |= {"median_ms": middle, "low_ms": low, "high_ms": high}
        if (peer := PEERS.get(name)) is not None:
            found[name]["difference"] = float(np.abs(results[name] - results[peer]).max())
    return found


def row(shape: str, name: str, found: dict[str, Any]) -> list[str]:
    """A line of the table."""
    ours, theirs = found[name], found[PEERS[name]]
    return [shape, name, f"{ours['first_s']:.1f}", *(f"{each['median_ms']:.2f} ({each['low_ms']:.2f} … "
            f"{each['high_ms']:.2f})" for each in (ours, theirs)),
            f"{theirs['median_ms'] / ours['median_ms']:.2f}", f"{ours['difference']:.0e}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--shapes", nargs="+", default=["1x16", "1x128", "8x16", "8x128"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    os.environ["NUM_CPU_THREADS"] = str(given.threads)
    import torch
    torch.set_num_threads(given.threads)
    model = None if given.model else network()
    file = given.model.read_bytes() if given.model else exported(model)
    import onnx
    names = [each.name for each in onnx.load_from_string(file).graph.input]
    results, rows = {}, []
    for shape in given.shapes:
        x = inputs(names, *map(int, shape.split("x")))
        calls = ({} if model is None else by_torch(model, x)) | by_onnx(file, x, given.threads)
        results[shape] = found = measured(calls, given.rounds)
        rows += [row(shape, name, found) for name in PEERS if name in found]
    print(table(["shape", "way", "first s", "ms", "peer's ms", "times as fast", "apart"], rows))
    save("encoders", {"threads": given.threads, "model": given.model and given.model.name,
                      "results": results})


if __name__ == "__main__": main()
