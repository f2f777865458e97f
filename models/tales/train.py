"""Trains the model in the box: `python -m tinygrad_nv.models.tales.train --out models/tales`.

Protocol: text from `stories.corpus("train")`, a tokenizer trained on it, and a LLaMA of about a million
parameters trained from `SEED` with tinygrad; loss on `stories.corpus("held-out")` is printed beside the
training loss. The same command on the same machine gives the same model; another machine's compiler may
round differently. What it took is written to training.json beside the weights.

Recipe: rows of consecutive stories, each row beginning with one, so that no story is seen without its
opening; AdamW (arXiv 1711.05101) with the gradient's norm clipped; linear warm-up, cosine decay.
"""
from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tinygrad import Context, Tensor, TinyJit, dtypes
from tinygrad.nn.optim import AdamW
from tokenizers import Tokenizer

from ..config import parse_config
from ..llama import Llama
from ..weights import slots
from .stories import corpus
from .tokenizer import EOS, save, train_tokenizer

SEED = 1
TOKENIZER_STORIES = 20_000

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", "vocab_size": 2048,
    "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "hidden_act": "silu",
    "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": 2,
}
GENERATION = {"do_sample": True, "temperature": 0.7, "top_p": 0.95, "bos_token_id": 0, "eos_token_id": [1],
              "pad_token_id": 2}


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters. Rows of `length` tokens, `batch` of them a step; `lr` is the peak."""
    steps: int = 3000
    batch: int = 16
    length: int = 160
    lr: float = 0.004
    warm_up: int = 100
    final: float = 0.02
    weight_decay: float = 0.1
    clip: float = 1.0

    def lr_at(self, step: int) -> float:
        """Learning rate of `step`: up in a line, down along a cosine to `final` of the peak."""
        cosine = 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return self.lr * min(1.0, (step + 1) / self.warm_up) * (self.final + (1 - self.final) * cosine)


def rows(tokenizer: Tokenizer, split: str, length: int) -> Iterator[list[int]]:
    """Rows of `length` + 1 ids: whole stories, each <|bos|> … <|eos|>, the last one cut. Every row starts a
    story."""
    texts, eos = corpus(split, 1 << 30), tokenizer.token_to_id(EOS)
    assert eos is not None, "train_tokenizer adds it"
    while True:
        row: list[int] = []
        while len(row) <= length: row += [*tokenizer.encode(next(texts)).ids, eos]
        yield row[:length + 1]


def initialise(model: Llama, rng: np.random.Generator) -> list[Tensor]:
    """Sets every parameter (normal 0.02, residual projections smaller by √(2·layers), norms 1) and returns
    them."""
    parameters = {id(slot.tensor): (name, slot.tensor) for name, slot in slots(model).items()}
    residual = 0.02 / math.sqrt(2 * model.config.num_layers)
    out = []
    for name, tensor in parameters.values():
        shape = tuple(int(s) for s in tensor.shape)
        scale = residual if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
        values = np.ones(shape) if len(shape) == 1 else rng.standard_normal(shape) * scale
        tensor.assign(Tensor(values.astype(np.float32), device=model.device)).realize()
        out.append(tensor.is_param_())
    return out


def clip_gradients(parameters: list[Tensor], most: float) -> None:
    """Scales all gradients so that their joint norm is at most `most`."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = sum((g.square().sum() for g in gradients), start=Tensor(0.0)).sqrt()
    scale = (most / (norm + 1e-6)).minimum(1.0)
    for p, g in zip(parameters, gradients, strict=True): p.grad = g * scale


def batches(source: Iterator[list[int]], size: int) -> Iterator[Tensor]:
    """Batches of rows, int32 (size, length + 1)."""
    while True: yield Tensor(np.array([next(source) for _ in range(size)], np.int32)).realize()


def loss_of(model: Llama, batch: Tensor) -> Tensor:
    """Mean cross entropy of the next token, nats."""
    return model(batch[:, :-1]).sparse_categorical_crossentropy(batch[:, 1:])


def train(model: Llama, tokenizer: Tokenizer, recipe: Recipe) -> list[dict[str, float]]:
    """Trains in place; returns the printed curve: step, train (mean since the last line), held_out,
    seconds."""
    parameters = initialise(model, np.random.default_rng(SEED))
    optimizer = AdamW(parameters, lr=recipe.lr, b1=0.9, b2=0.95, weight_decay=recipe.weight_decay)

    @TinyJit
    @Context(TRAINING=1)
    def step(batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch).backward()
        clip_gradients(parameters, recipe.clip)
        return loss.realize(*optimizer.schedule_step())

    evaluate = TinyJit(lambda batch: loss_of(model, batch).realize())
    source = batches(rows(tokenizer, "train", recipe.length), recipe.batch)
    held_out = batches(rows(tokenizer, "held-out", recipe.length), recipe.batch)
    exam = [next(held_out) for _ in range(8)]
    curve, losses, begun = [], [], time.perf_counter()
    for i in range(recipe.steps):
        rate = Tensor([recipe.lr_at(i)], dtype=dtypes.float32, device=optimizer.lr.device)
        optimizer.lr.assign(rate).realize()
        losses.append(float(step(next(source)).item()))
        if i % 100 == 99 or i == recipe.steps - 1:
            measured = float(np.mean([evaluate(batch).item() for batch in exam]))
            curve.append({"step": i + 1, "train": round(float(np.mean(losses)), 4),
                          "held_out": round(measured, 4), "seconds": round(time.perf_counter() - begun, 1)})
            line = "step {step:5.0f}  train {train:.4f}  held-out {held_out:.4f}  {seconds:7.1f} s"
            print(line.format(**curve[-1]), flush=True)
            losses = []
    return curve


def main() -> None:
    """Trains and writes a Hugging Face directory."""
    parser = argparse.ArgumentParser(description="Train the model in the box.")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    arguments = parser.parse_args()
    recipe = Recipe(steps=arguments.steps)
    tokenizer = train_tokenizer(corpus("train", TOKENIZER_STORIES), CONFIG["vocab_size"])
    model = Llama(parse_config(CONFIG))
    tokens = recipe.steps * recipe.batch * recipe.length
    print(f"{model.config.parameters:,} parameters, {tokens:,} tokens", flush=True)
    curve = train(model, tokenizer, recipe)
    write(model, tokenizer, arguments.out)
    record = {"seed": SEED, "recipe": vars(recipe), "device": model.embedding.device,
              "machine": platform.machine(), "curve": curve}
    (arguments.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")


def write(model: Llama, tokenizer: Tokenizer, directory: Path) -> None:
    """The directory transformers' save_pretrained would write."""
    save(tokenizer, directory)
    tensors = {name: np.ascontiguousarray(slot.tensor.numpy()[slot.first:slot.first + slot.shape[0]])
               for name, slot in slots(model).items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)  # the library writes files only their owner may read
    for name, content in (("config.json", CONFIG), ("generation_config.json", GENERATION)):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__": main()
