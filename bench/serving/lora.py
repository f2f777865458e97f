"""Cost of adapters: generated tokens a second of a batch whose sequences have 8 different ones, beside that
of the same batch without.

    python bench/serving/lora.py [--adapters 8] [--ranks 8,16] [--sequences 8,16] [--rounds 5] [--dtype
    float32]

The model is random, of some 110 million parameters (12 layers of 768, 2048 columns of feed-forward, 8192
tokens), in a directory made for this. Adapters change every linear layer. Each round generates 32 tokens of
every sequence without adapters and with, one after the other, the first of them in turn; what is told is the
median of the rounds' ratios, and the best times. `--decode` leaves the prompts out of the times.
"""
from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).parents[2]))

from tinygrad_nv.engine.llm import LLM
from tinygrad_nv.engine.lora.request import LoRARequest
from tinygrad_nv.engine.sampling import SamplingParams

HIDDEN, WIDTH, LAYERS, HEADS, KV_HEADS, VOCAB = 768, 2048, 12, 12, 4, 8192
TOKENS, PROMPT = 32, 16
SHAPES = {"self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
          "self_attn.v_proj": (HIDDEN * KV_HEADS // HEADS, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN),
          "mlp.gate_proj": (WIDTH, HIDDEN), "mlp.up_proj": (WIDTH, HIDDEN), "mlp.down_proj": (HIDDEN, WIDTH)}


def model(directory: Path) -> Path:
    """A random model."""
    random = np.random.default_rng(0)
    def some(*shape: int) -> np.ndarray: return random.standard_normal(shape, np.float32) * 0.05
    ones = np.ones(HIDDEN, np.float32)
    state = {"model.embed_tokens.weight": some(VOCAB, HIDDEN), "model.norm.weight": ones}
    for i in range(LAYERS):
        state |= {f"model.layers.{i}.{name}.weight": some(*shape) for name, shape in SHAPES.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            state[f"model.layers.{i}.{name}.weight"] = ones
    directory.mkdir()
    save_file(state, directory / "model.safetensors")
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
              "intermediate_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
              "num_key_value_heads": KV_HEADS, "vocab_size": VOCAB, "max_position_embeddings": 512,
              "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "hidden_act": "silu", "eos_token_id": 1,
              "bos_token_id": 0, "dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def adapter(directory: Path, rank: int, seed: int) -> str:
    """A random adapter of every linear layer."""
    random, state = np.random.default_rng(seed), dict[str, np.ndarray]()
    for i in range(LAYERS):
        for name, (out, inputs) in SHAPES.items():
            prefix = f"base_model.model.model.layers.{i}.{name}.lora_"
            state[f"{prefix}A.weight"] = random.standard_normal((rank, inputs), np.float32) * 0.02
            state[f"{prefix}B.weight"] = random.standard_normal((out, rank), np.float32) * 0.02
    directory.mkdir()
    save_file(state, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(
        {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}))
    return str(directory)


def seconds(llm: LLM, loras: Sequence[LoRARequest | None], decode: bool) -> tuple[float, float]:
    """Returns the seconds of a batch, by the clock and of all cores; with `decode` by the clock from the
    first tokens on."""
    random = np.random.default_rng(1)
    prompts = [{"prompt_token_ids": random.integers(5, VOCAB, PROMPT).tolist()} for _ in loras]
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    begun, cores = time.perf_counter(), time.process_time()
    made = llm.generate(prompts, params, lora_request=list(loras), use_tqdm=False)
    total, cores = time.perf_counter() - begun, time.process_time() - cores
    assert all(len(each.token_ids) == TOKENS for each in made)
    return max(each.decode_s for each in made) if decode else total, cores


def measure(llm: LLM, count: int, loras: Sequence[LoRARequest], rounds: int,
            decode: bool) -> tuple[float, ...]:
    """The median ratios of rates, by the clock and by time of cores, and the best seconds without and with
    adapters."""
    kinds: list[list[LoRARequest | None]] = [[None] * count, [loras[i % len(loras)] for i in range(count)]]
    for kind in kinds: seconds(llm, kind, decode)
    times: list[list[tuple[float, float]]] = [[], []]
    for turn in range(rounds):
        for which in (turn % 2, 1 - turn % 2): times[which].append(seconds(llm, kinds[which], decode))
    ratios = [median(a[i] / b[i] for a, b in zip(*times, strict=True)) for i in range(2)]
    return *ratios, min(times[0])[0], min(times[1])[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    def numbers(text: str) -> list[int]: return [int(each) for each in text.split(",")]
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--ranks", type=numbers, default=[8, 16])
    parser.add_argument("--sequences", type=numbers, default=[8, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--lora-dtype", default="auto")
    parser.add_argument("--decode", action="store_true", help="times from the first tokens on")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = model(Path(folder) / "model")
        print("rank  sequences  without       with  tokens/s with / without, by core time")
        for rank in given.ranks:
            loras = [LoRARequest(f"a{i}", i + 1, adapter(Path(folder) / f"a{rank}-{i}", rank, i))
                     for i in range(given.adapters)]
            with LLM(path, device="CPU", dtype=given.dtype, enable_lora=True, max_loras=given.adapters,
                     max_lora_rank=rank, max_cpu_loras=given.adapters, lora_dtype=given.lora_dtype,
                     max_num_seqs=max(given.sequences), max_model_len=128,
                     enable_prefix_caching=False) as llm:
                for count in given.sequences:
                    ratio, of_cores, base, adapted = measure(llm, count, loras, given.rounds, given.decode)
                    rates = [count * TOKENS / each for each in (base, adapted)]
                    print(f"{rank:4}  {count:9}  {rates[0]:5.1f} t/s  {rates[1]:5.1f} t/s  {ratio:.3f}  "
                          f"{of_cores:.3f}", flush=True)


if __name__ == "__main__": main()
