"""Quantised checkpoints through the engine, held to transformers with dequantised weights."""
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tinygrad import dtypes

from tests.models.test_parity import require_same_answers
from tinygrad_nv.models import weights
from tinygrad_nv.models.config import read_config
from tinygrad_nv.models.llama import Llama

GROUP = 32
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Tensors = dict[str, torch.Tensor]


def grouped(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, zero points and float16 scales of 4 bits of each `GROUP` inputs, and the matrix they make."""
    rows, columns = weight.shape
    parts = weight.reshape(rows, columns // GROUP, GROUP)
    low, high = parts.amin(-1, keepdim=True).clamp(max=0), parts.amax(-1, keepdim=True).clamp(min=0)
    scales = ((high - low) / 15).clamp(min=1e-5).half()
    zeros = (-low / scales.float()).round().clamp(0, 15)
    codes = (parts / scales.float() + zeros).round().clamp(0, 15)
    matrix = ((codes - zeros) * scales.float()).reshape(rows, columns)
    return codes.reshape(rows, columns).int(), zeros[..., 0].int(), scales[..., 0], matrix


def words(fields: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """int32 [R, C / 8] of fields [R, C], of 4 bits each; `order` has the field of each nibble."""
    parts = fields.reshape(fields.shape[0], -1, 8).long()
    made = sum(parts[..., field] << 4 * i for i, field in enumerate(order))
    assert isinstance(made, torch.Tensor)
    return made.to(torch.int64).bitwise_and(0xFFFFFFFF).numpy().astype(np.uint32).view(np.int32)


def awq(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, zeros, scales, matrix = grouped(weight)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {f"{name}.qweight": torch.tensor(words(codes.T.contiguous(), order)),
            f"{name}.qzeros": torch.tensor(words(zeros.T.contiguous(), order)),
            f"{name}.scales": scales.T.contiguous()}, matrix


def gptq(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Version 2, inputs in an order of their own: each group has some from everywhere."""
    columns = weight.shape[1]
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
    codes, zeros, scales, matrix = grouped(weight[:, order])
    back = torch.argsort(order)
    plain = tuple(range(8))
    return {f"{name}.qweight": torch.tensor(words(codes[:, back], plain).T.copy()),
            f"{name}.qzeros": torch.tensor(words(zeros.T.contiguous(), plain)),
            f"{name}.scales": scales.T.contiguous(), f"{name}.bias": torch.zeros(weight.shape[0]).half(),
            f"{name}.g_idx": torch.arange(columns).div(GROUP, rounding_mode="floor")[back].int(),
            }, matrix[:, back]


KINDS: dict[str, tuple[Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]], dict[str, object]]] = {
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True,
                  "version": "gemm", "modules_to_not_convert": None}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False,
                    "checkpoint_format": "gptq_v2"})}


@pytest.fixture(scope="module", params=KINDS)
def both(request: pytest.FixtureRequest, hf_model: Callable[[str], Path],
         tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A quantised directory, of which the second layer's o_proj and down_proj are not quantised, and one of
    the weights that it stands for."""
    quantise, config = KINDS[request.param]
    source, made = hf_model("llama"), [tmp_path_factory.mktemp(f"{request.param}{i}") for i in range(2)]
    tensors = load_file(source / "model.safetensors")
    stored, plain = dict(tensors), dict(tensors)
    for name in tensors:
        layer = name.removesuffix(".weight")
        if layer.split(".")[-1] not in LINEARS or layer.endswith(("1.self_attn.o_proj", "1.mlp.down_proj")):
            continue
        new, plain[name] = quantise(layer, tensors[name].float())
        del stored[name]
        stored |= new
    data = json.loads((source / "config.json").read_text())
    for directory, weights_, more in ((made[0], stored, {"quantization_config": config}),
                                      (made[1], plain, {})):
        save_file({name: each.contiguous() for name, each in weights_.items()},
                  directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "config.json").write_text(json.dumps(data | more))
        (directory / "generation_config.json").write_text((source / "generation_config.json").read_text())
    return made[0], made[1]


@pytest.mark.sampled(1)
def test_logits_and_greedy_tokens(both: tuple[Path, Path]):
    """Logits as those of unquantised models; measured 1.5e-7 and 2.3e-7 of the largest."""
    quantised, plain = both
    require_same_answers(quantised, plain)


@pytest.mark.sampled(1)
def test_every_byte_is_counted(both: tuple[Path, Path]):
    quantised, _ = both
    config, seen = read_config(quantised), list[tuple[int, int]]()
    model = Llama(config, dtypes.float32, "CPU")
    total = weights.load(model, quantised, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (total, total)
    assert total == sum(each.nbytes for name, each in load_file(quantised / "model.safetensors").items()
                        if not name.endswith(".bias"))
    assert [len(block.feed_forward.down.parts) for block in model.blocks] == [1, 0]


def test_a_bias_that_is_left_out_must_be_zero(both: tuple[Path, Path], tmp_path: Path, command):
    quantised, _ = both
    tensors = load_file(quantised / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.bias"
    tensors[name] = torch.full((tensors["model.layers.0.mlp.up_proj.scales"].shape[1],), 0.5)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for file in ("config.json", "generation_config.json"):
        (tmp_path / file).write_text((quantised / file).read_text())
    command("generate", tmp_path, "--prompt-ids", "5,6").refused(
        f"{name} is not zero", "expected: biases of zeros", "to fix:   use the config.json that belongs")
