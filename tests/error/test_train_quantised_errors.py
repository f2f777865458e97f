"""Training on quantised weights: what is refused, in words."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tinygrad import Tensor, dtypes

from tinygrad_nv.errors import ConfigError, ModelError
from tinygrad_nv.models.config import read_config
from tinygrad_nv.quant.activations import SparseWeight
from tinygrad_nv.quant.sparse import SparseTensor, buffers
from tinygrad_nv.quant.tensor import in_memory
from tinygrad_nv.train import network
from tinygrad_nv.train.arguments import TrainingArguments
from tinygrad_nv.train.plan import rank_memory


@pytest.mark.parametrize(("options", "words"), [
    ({"quantization": "int3", "use_peft": True}, r"(?s)--quantization int3.*fp8_per_block.*bitsandbytes"),
    ({"quantization": "int8"}, r"(?s)--quantization int8 without --use-peft.*an adapter"),
    ({"load_in_4bit": True}, r"(?s)--quantization bitsandbytes without --use-peft"),
    ({"load_in_4bit": True, "quantization": "fp8", "use_peft": True},
     r"(?s)--load-in-4bit with --quantization fp8.*bitsandbytes")])
def test_options(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words): TrainingArguments(**options)      # type: ignore[arg-type]


def test_weights(tiny: Path) -> None:
    model = network.open_network(tiny, dtypes.float32, quantization="int8")
    with pytest.raises(ModelError, match=r"(?s)the weights are quantised.*an adapter.*--use-peft"):
        network.require_trainable(model, adapter=False, fp8=False)
    with pytest.raises(ModelError, match=r"(?s)quantised, and --precision is of FP8.*--precision bfloat16"):
        network.require_trainable(model, adapter=True, fp8=True)
    network.require_trainable(model, adapter=True, fp8=False)
    sparse = SparseTensor(dtypes.bfloat16, (8, 64), *(
        Tensor.empty(*shape, dtype=in_memory(dtype))
        for shape, dtype in buffers(dtypes.bfloat16, 8, 64).values()))
    model.blocks[0].feed_forward.down.parts = SparseWeight(sparse),
    with pytest.raises(ModelError, match=r"(?s)the weights are 2:4 sparse.*dense weights"):
        network.require_trainable(model, adapter=True, fp8=False)


def test_plans(tiny: Path) -> None:
    config = replace(read_config(tiny), quantization={"quant_method": "awq"})
    with pytest.raises(ConfigError, match=r"(?s)--plan of quantised weights.*--quantization"):
        rank_memory(config, TrainingArguments(use_peft=True, max_length=16), 1, "CPU")
