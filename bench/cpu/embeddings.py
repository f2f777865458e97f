"""How fast are embeddings, beside transformers? Texts of 5 to 60 words in one interleaved run.

    python bench/cpu/embeddings.py [MODEL] [--texts 256] [--rounds 5]

MODEL is a BERT-like directory; without it, a random one of MiniLM-L6's shape. transformers runs as
sentence-transformers calls it: batches of 32 texts, sorted by length and padded, mean pooling, normalised.
Both get the same token ids and all cores; a round times one after the other, and the median of rounds counts.
"""
from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.lib.measure import save
from tinygrad_nv.engine.llm import LLM

MINILM = {"vocab_size": 30522, "hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6,
          "num_attention_heads": 12, "max_position_embeddings": 512}
POOLING = {"pooling_mode_mean_tokens": True}
KINDS = ("Transformer", "Pooling", "Normalize")


def random_model(directory: Path) -> Path:
    """A random BERT, with mean pooling."""
    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(**MINILM)).save_pretrained(directory)
    (directory / "modules.json").write_text(json.dumps([
        {"type": f"sentence_transformers.models.{kind}", "path": f"{i}_{kind}" if i else ""}
        for i, kind in enumerate(KINDS)]))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(POOLING))
    return directory


def reference(model: torch.nn.Module, texts: list[list[int]]) -> np.ndarray:
    """transformers' vectors."""
    order, out = sorted(range(len(texts)), key=lambda i: -len(texts[i])), [np.empty(0)] * len(texts)
    for first in range(0, len(order), 32):
        some = order[first:first + 32]
        ids = torch.zeros(len(some), len(texts[some[0]]), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, i in enumerate(some):
            ids[row, :len(texts[i])], mask[row, :len(texts[i])] = torch.tensor(texts[i]), 1
        with torch.inference_mode(): hidden = model(ids, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).float()
        pooled = (hidden * weights).sum(1) / weights.sum(1)
        for i, row in zip(some, torch.nn.functional.normalize(pooled).numpy(), strict=True): out[i] = row
    return np.stack(out)


def time_call(run: Callable[[], np.ndarray]) -> tuple[float, np.ndarray]:
    """Seconds of a call, and its result."""
    begun = time.perf_counter()
    made = run()
    return time.perf_counter() - begun, made


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory: Path = arguments.model or random_model(Path(folder))
        llm = LLM(directory, device="CPU", dtype="float32")
        model = transformers.AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
        rng = np.random.default_rng(0)
        texts = [rng.integers(1000, 20000, rng.integers(7, 80)).tolist() for _ in range(arguments.texts)]
        def ours() -> np.ndarray:
            return np.array([each.outputs.embedding for each in llm.embed(texts)], np.float32)
        sides: dict[str, Callable[[], np.ndarray]] = {"tinygrad_nv": ours,
                                                      "transformers": lambda: reference(model, texts)}
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        vectors = {name: run() for name, run in sides.items()}      # compiles, and warms caches
        for _ in range(arguments.rounds):
            for name, run in sides.items(): seconds[name].append(time_call(run)[0])
        llm.close()
    tokens = sum(map(len, texts))
    found = {"texts": len(texts), "tokens": tokens,
             "max_difference": float(np.abs(vectors["tinygrad_nv"] - vectors["transformers"]).max()),
             "tokens_per_s": {name: tokens / statistics.median(times) for name, times in seconds.items()},
             "seconds": seconds}
    found["ratio"] = statistics.median(a / b for a, b in zip(seconds["transformers"], seconds["tinygrad_nv"],
                                                             strict=True))
    print(json.dumps(found, indent=1))
    save("embeddings", found)


if __name__ == "__main__": main()
