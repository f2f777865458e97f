"""Small random Whisper models, as transformers saves them, recordings, and what the reference makes of
them."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tinygrad_nv.engine.speech.params import TranscriptionParams

FIELDS: dict[str, Any] = {
    "vocab_size": 420, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_source_positions": 100,
    "max_target_positions": 64, "decoder_start_token_id": 258, "pad_token_id": 257, "bos_token_id": 257,
    "eos_token_id": 257, "begin_suppress_tokens": None}
GENERATION: dict[str, Any] = {
    "lang_to_id": {"<|en|>": 259, "<|de|>": 260}, "task_to_id": {"translate": 261, "transcribe": 262},
    "no_timestamps_token_id": 266, "prev_sot_token_id": 264, "max_initial_timestamp_index": 50,
    # those that a text of these models would begin with
    "suppress_tokens": [*range(1, 60, 3), 270], "begin_suppress_tokens": [*range(0, 260, 2), 257],
    "is_multilingual": True,
    "max_length": 40, "return_timestamps": False}
WINDOW_S = 2            # of these models
FIRST_TIMESTAMP = 267
# one attempt, greedily
GREEDY: dict[str, Any] = {"temperatures": (0.0,), "compression_ratio_threshold": None,
                          "logprob_threshold": None, "no_speech_threshold": None}


def save(directory: Path, seed: int = 0, generation: dict[str, Any] = GENERATION,
         **fields: Any) -> transformers.WhisperForConditionalGeneration:
    """A model in which every parameter tells, with a tokenizer of bytes."""
    torch.manual_seed(seed)
    config = transformers.WhisperConfig(**{**FIELDS, **fields})
    model = transformers.WhisperForConditionalGeneration(config).eval()
    for name, parameter in model.named_parameters():
        if name == "model.encoder.embed_positions.weight": continue
        torch.nn.init.normal_(parameter, float(name.endswith("norm.weight")), 0.3)
    configure(model, generation)
    model.save_pretrained(directory)
    add_tokenizer(directory)
    return model


def configure(model: transformers.WhisperForConditionalGeneration,
              generation: dict[str, Any] = GENERATION) -> None:
    """Sets the tokens of a model; loading one forgets them."""
    for name, value in generation.items(): setattr(model.generation_config, name, value)


def add_tokenizer(directory: Path) -> None:
    """A tokenizer whose tokens are the 256 bytes, and the end."""
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<pad>", "<|endoftext|>"])
    made.save(str(directory / "tokenizer.json"))


def sound(samples: int, seed: int = 0) -> np.ndarray:
    """A tone that goes up and down, in noise, at 16 kHz."""
    rng, t = np.random.default_rng(seed), np.arange(samples) / 16000
    tone = np.sin(2 * np.pi * (300 + 200 * np.sin(3 * t + seed)) * t)
    return (0.3 * tone + 0.02 * rng.normal(size=samples)).astype(np.float32)


def reference_features(samples: np.ndarray, mels: int = 80) -> torch.Tensor:
    """As WhisperFeatureExtractor makes them, [1, mels, frames]."""
    extractor = transformers.WhisperFeatureExtractor(feature_size=mels, chunk_length=WINDOW_S)
    how = {} if len(samples) <= 16000 * WINDOW_S else {"truncation": False, "padding": "longest"}
    return extractor(samples, sampling_rate=16000, return_tensors="pt", **how).input_features


def reference(model: transformers.WhisperForConditionalGeneration, samples: np.ndarray,
              **how: Any) -> tuple[list[int], list[dict[str, Any]]]:
    """Tokens and segments of transformers' `generate`."""
    features = reference_features(samples, model.config.num_mel_bins).to(model.dtype)
    made = model.generate(input_features=features, return_segments=True, **{"task": "transcribe", **how})
    segments = made["segments"][0]
    return [int(token) for each in segments for token in each["tokens"]], segments


def greedy(**how: Any) -> TranscriptionParams:
    """One attempt at each window."""
    return TranscriptionParams(**{**GREEDY, **how})
