"""Peak memory while a quantised mixture of experts is loaded, beside the model's own bytes."""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.quant.directory_case import KINDS
from tinygrad_nv.models.config import parse_config
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.weights import slots

ROOT = Path(__file__).parents[2]
CONFIG = {"architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 512, "hidden_size": 1024, "head_dim": 64,
          "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 4, "num_experts": 48,
          "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 1024,
          "max_position_embeddings": 256, "tie_word_embeddings": True, "dtype": "bfloat16"}


def write(kind: str, directory: Path) -> int:
    """A directory of 1.36 billion weights in `kind`; equal matrices have equal weights. Its bytes."""
    torch.manual_seed(0)
    made: dict[tuple[int, ...], dict[str, torch.Tensor]] = {}
    stored: dict[str, torch.Tensor] = {}
    for name, shape in _matrices():
        if not name.endswith("_proj.weight"): stored[name] = torch.randn(*shape).bfloat16()
        else:
            if shape not in made: made[shape] = KINDS[kind].quantise(torch.randn(*shape) / 32)[0]
            layer = name.removesuffix(".weight")
            stored |= {f"{layer}.{key}": each.clone() for key, each in made[shape].items()}
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": KINDS[kind].config}))
    return sum(each.nbytes for each in stored.values())


def _matrices() -> list[tuple[str, tuple[int, ...]]]:
    found, width, hidden = [], CONFIG["moe_intermediate_size"], CONFIG["hidden_size"]
    for name, slot in slots(Llama(parse_config(CONFIG), device="CPU")).items():
        if ".experts." not in name: found.append((name, tuple(slot.shape)))
    for layer in range(CONFIG["num_hidden_layers"]):
        for expert in range(CONFIG["num_experts"]):
            at = f"model.layers.{layer}.mlp.experts.{expert}"
            found += [(f"{at}.gate_proj.weight", (width, hidden)), (f"{at}.up_proj.weight", (width, hidden)),
                      (f"{at}.down_proj.weight", (hidden, width))]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["awq", "gptq", "ct-int4", "fp8", "ct-mxfp4"])
def test_memory_is_that_of_the_quantised_model(tmp_path: Path, kind: str):
    """At most 1.15 times the model, beside what the process had before."""
    nbytes = write(kind, tmp_path)
    script = "import json; from bench.cpu import load; from pathlib import Path\n" \
        f"print(json.dumps(load.work('load', Path({str(tmp_path)!r}), 'bfloat16')))"
    done = json.loads(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                                     check=True, cwd=ROOT).stdout)
    ratio = (done["rss_peak"] - done["rss_before"]) / nbytes
    assert 0.9 <= ratio <= 1.15, f"{ratio:.3f} times {nbytes / 1e6:.0f} MB"
