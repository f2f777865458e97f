"""Writes a model of 1.2 billion random weights in bfloat16, with a tokenizer of 128,256 tokens: the shapes of
Llama 3.2 1B, for timings that do not depend on what weights say.

    python bench/serving/startup_model.py DIR
"""
from __future__ import annotations

import argparse
import json
import struct
from itertools import count
from pathlib import Path

import numpy as np

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD, VOCAB = 2048, 8192, 16, 32, 8, 64, 128256
CHUNK = 1 << 24     # weights that are drawn at a time


def shapes() -> dict[str, tuple[int, ...]]:
    """The tensors, by their names in a checkpoint."""
    made: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        made |= {f"{layer}input_layernorm.weight": (HIDDEN,),
                 f"{layer}post_attention_layernorm.weight": (HIDDEN,),
                 f"{layer}self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
                 f"{layer}self_attn.k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
                 f"{layer}self_attn.v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
                 f"{layer}self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
                 f"{layer}mlp.gate_proj.weight": (INNER, HIDDEN),
                 f"{layer}mlp.up_proj.weight": (INNER, HIDDEN),
                 f"{layer}mlp.down_proj.weight": (HIDDEN, INNER)}
    return {**made, "model.norm.weight": (HIDDEN,)}


def write_weights(file: Path) -> None:
    """A safetensors file: the length of its header, the header, the bytes."""
    rng, header, at = np.random.default_rng(0), dict[str, object](), 0
    for name, shape in shapes().items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for shape in shapes().values():
            left = int(np.prod(shape))
            while left:
                drawn = rng.standard_normal(min(left, CHUNK), np.float32) * np.float32(0.02)
                if len(shape) == 1: drawn += 1     # weights of norms
                out.write((drawn.view(np.uint32) >> 16).astype(np.uint16).tobytes())
                left -= len(drawn)


def tokenizer() -> dict[str, object]:
    """Byte-level BPE whose merges join tokens at random."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (256 + i for i in count())
    alphabet = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    rng, vocab, merges = np.random.default_rng(0), dict(zip(alphabet, count())), list[list[str]]()
    words = list(vocab)
    while len(words) < VOCAB - 2:
        left, right = words[rng.integers(min(len(words), 4096))], words[rng.integers(256)]
        if (joined := left + right) in vocab or len(joined) > 12: continue
        vocab[joined] = len(vocab)
        words.append(joined)
        merges.append([left, right])
    special = [{"id": VOCAB - 2 + i, "content": name, "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False, "special": True} for i, name in enumerate(("<|bos|>", "<|eos|>"))]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": special,
            "normalizer": None, "pre_tokenizer": level, "post_processor": None, "decoder": level,
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                      "ignore_merges": False, "vocab": vocab, "merges": merges}}


def write(directory: Path) -> None:
    """The directory."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
              "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER,
              "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
              "head_dim": HEAD, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "silu",
              "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "attention_bias": False,
              "mlp_bias": False, "tie_word_embeddings": True, "bos_token_id": VOCAB - 2,
              "eos_token_id": VOCAB - 1}
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer()))
    (directory / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|bos|>", "eos_token": "<|eos|>"}))
    write_weights(directory / "model.safetensors")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("directory", type=Path, help="where it goes")
    write(parser.parse_args().directory)
