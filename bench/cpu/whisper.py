"""How fast is Whisper, beside transformers? Encoder, one recording and several, in one interleaved run.

    python bench/cpu/whisper.py [MODEL] [--recordings 4] [--tokens 48] [--rounds 5] [--dtype float32]

MODEL is a directory; without it, a random model of whisper-tiny's shape. Recordings have 30 s, and each gets
the same number of tokens from both sides, greedily, with the same weights: they must be the same tokens.
transformers makes its spectrograms, and decodes all recordings as one batch (SDPA, its own cache). Both have
all cores. A round times one side after the other; the median of the rounds' ratios counts.
"""
from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tinygrad import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.cpu.kernel_times import time_call
from bench.lib.measure import save, spread, table
from tinygrad_nv.engine.speech.params import TranscriptionParams
from tinygrad_nv.engine.speech.transcriber import Transcriber

SECONDS, RATE = 30, 16000
END = 50257
GENERATION = {"lang_to_id": {"<|en|>": 50259}, "task_to_id": {"transcribe": 50359}, "is_multilingual": True,
              "no_timestamps_token_id": 50363, "suppress_tokens": [END], "begin_suppress_tokens": None,
              "eos_token_id": END, "pad_token_id": END, "decoder_start_token_id": 50258, "max_length": 448,
              "return_timestamps": False}
# of the bench's own use only: texts are not looked at
VOCABULARY = {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}


def random_model(directory: Path) -> Path:
    """A random Whisper of tiny's shape, which never chooses the end."""
    torch.manual_seed(0)
    config = transformers.WhisperConfig(decoder_start_token_id=50258, eos_token_id=END, bos_token_id=END,
                                        pad_token_id=END, init_std=0.1, begin_suppress_tokens=None)
    transformers.WhisperForConditionalGeneration(config).save_pretrained(directory)
    path = directory / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **GENERATION}))
    (directory / "tokenizer.json").write_text(json.dumps({"version": "1.0", **VOCABULARY}))
    return directory


def recordings(count: int) -> list[np.ndarray]:
    """Tones that go up and down, in noise."""
    rng, t = np.random.default_rng(0), np.arange(SECONDS * RATE) / RATE
    return [(0.3 * np.sin(2 * np.pi * (200 + 150 * np.sin(t * (i + 1))) * t) + 0.02 * rng.normal(size=len(t))
             ).astype(np.float32) for i in range(count)]


class Theirs:
    """transformers."""

    def __init__(self, directory: Path, dtype: torch.dtype, tokens: int) -> None:
        loader = transformers.WhisperForConditionalGeneration
        self.model = loader.from_pretrained(directory, dtype=dtype).eval()
        for name, value in GENERATION.items(): setattr(self.model.generation_config, name, value)
        self.model.generation_config.max_length = None
        self.extractor = transformers.WhisperFeatureExtractor(self.model.config.num_mel_bins)
        self.tokens = tokens

    def features(self, samples: list[np.ndarray]) -> torch.Tensor:
        """Spectrograms."""
        made = self.extractor(samples, sampling_rate=RATE, return_tensors="pt").input_features
        return made.to(self.model.dtype)

    def encode(self, features: torch.Tensor) -> np.ndarray:
        """The encoder's output."""
        with torch.inference_mode(): made = self.model.model.encoder(features).last_hidden_state
        return made.float().numpy()

    def transcribe(self, samples: list[np.ndarray]) -> list[list[int]]:
        """Tokens of each recording."""
        made = self.model.generate(self.features(samples), language="en", task="transcribe",
                                   max_new_tokens=self.tokens)
        return [row[-self.tokens:] for row in made.tolist()]


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    for name, default in (("--recordings", 4), ("--tokens", 48), ("--rounds", 5)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory: Path = a.model or random_model(Path(folder))
        whisper = Transcriber(directory, device="CPU", dtype=a.dtype, max_num_seqs=a.recordings)
        theirs = Theirs(directory, getattr(torch, a.dtype), a.tokens)
        found = measure(whisper, theirs, recordings(a.recordings), a.tokens, a.rounds)
        whisper.close()
    save("whisper" if a.dtype == "float32" else f"whisper_{a.dtype}", found)


def measure(whisper: Transcriber, theirs: Theirs, samples: list[np.ndarray], tokens: int,
            rounds: int) -> dict[str, Any]:
    """All figures."""
    params = TranscriptionParams("en", temperatures=(0.0,), compression_ratio_threshold=None,
                                 logprob_threshold=None, no_speech_threshold=None, max_new_tokens=tokens)

    def ours(some: list[np.ndarray]) -> list[list[int]]:
        return [each.token_ids for each in whisper.transcribe_all(some, params)]
    features = theirs.features(samples[:1])
    given = features[0].float().T.contiguous().numpy()
    cases: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "encoder": (lambda: whisper.runner.encode(0, given), lambda: theirs.encode(features)),
        "1 recording": (lambda: ours(samples[:1]), lambda: theirs.transcribe(samples[:1])),
        f"{len(samples)} recordings": (lambda: ours(samples), lambda: theirs.transcribe(samples))}
    out: dict[str, Any] = {"tokens": tokens, "seconds_of_a_recording": SECONDS, "rows": {}}
    rows = []
    for name, (own, other) in cases.items():
        first, second = own(), other()      # compiles, and warms caches
        if name != "encoder": out["same_tokens"] = out.get("same_tokens", True) and first == second
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(rounds):
            for run, seconds in zip((own, other), times, strict=True): seconds.append(time_call(run))
        ratios = [b / a for a, b in zip(*times, strict=True)]
        out["rows"][name] = {"tinygrad_nv_s": times[0], "transformers_s": times[1],
                             "ratio": statistics.median(ratios)}
        rows.append([name, *(f"{statistics.median(each) * 1e3:.0f}" for each in times),
                     f"{statistics.median(ratios):.2f}", spread(ratios)])
    print(table(["", "tinygrad_nv ms", "transformers ms", "ratio", "spread"], rows))
    difference = np.abs(encode(whisper, given) - theirs.encode(features)[0]).max()
    print(f"same tokens: {out['same_tokens']}; encoders differ by at most {difference:.1e}")
    return {**out, "max_difference": float(difference)}


def encode(whisper: Transcriber, features: np.ndarray) -> np.ndarray:
    """The encoder's output."""
    given = Tensor(features[None], device=whisper.device).cast(whisper.network.dtype).contiguous()
    found: np.ndarray = whisper.network.encoder(given).float().numpy()[0]
    return found


if __name__ == "__main__": main()
