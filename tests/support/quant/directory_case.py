"""Directories of a tiny Llama in each quantised format, and of the weights that they stand for.

`write(kind, directory)` makes `directory/quantised` and `directory/plain` of one random model. What
compressed-tensors can write, it writes, and NVFP4's plain weights are rounded to bfloat16 as it does.
lm_head, norms and embeddings stay as they are.
"""
from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from safetensors.torch import save_file

from tests.unit.quant.test_reader_awq import packed as awq_words
from tests.unit.quant.test_reader_bitsandbytes import json_of
from tests.unit.quant.test_reader_gptq import tensor, v1, words
from tinygrad_nv.quant.types import NF4

HIDDEN, WIDTH, GROUP = 128, 192, 32
Tensors = dict[str, torch.Tensor]
# a layer's tensors without its name, and its matrix in float32
Quantise = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]


@dataclass(frozen=True)
class Kind:
    """A format: what it makes of a matrix, and the quantization_config."""
    quantise: Quantise
    config: dict[str, Any]


def grouped(weight: torch.Tensor, bits: int,
            symmetric: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [N, K], zero points and float16 scales [N, K / g] of each `GROUP` inputs."""
    rows, columns = weight.shape
    blocks, last = weight.reshape(rows, columns // GROUP, GROUP), (1 << bits) - 1
    low, high = blocks.amin(-1), blocks.amax(-1)
    if symmetric: low, high = -blocks.abs().amax(-1), blocks.abs().amax(-1)
    scales = ((high - low) / last).half()
    zeros = torch.full_like(low, 1 << (bits - 1)) if symmetric else (-low / scales).round().clamp(0, last)
    codes = (blocks / scales.float()[..., None] + zeros[..., None]).round().clamp(0, last)
    return codes.reshape(rows, columns).int(), zeros.int(), scales


def matrix_of(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    of = torch.arange(codes.shape[1]) // GROUP
    return (codes - zeros[:, of]) * scales.float()[:, of]


def awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, zeros, scales = grouped(weight, 4, False)
    return {"qweight": awq_words(codes.T), "qzeros": awq_words(zeros.T), "scales": scales.T.contiguous()}, \
        matrix_of(codes, zeros, scales)


def gptq(bits: int, version: int, symmetric: bool, ordered: bool) -> Quantise:
    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        columns = weight.shape[1]
        order = torch.arange(columns)
        if ordered: order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
        codes, zeros, scales = grouped(weight[:, order], bits, symmetric)
        back, points = torch.argsort(order), v1 if version == 1 else words
        return {"qweight": tensor([words(row, bits) for row in codes[:, back].tolist()]).T.contiguous(),
                "qzeros": tensor([points(row, bits) for row in zeros.T.tolist()]),
                "scales": scales.T.contiguous(), "g_idx": (torch.arange(columns) // GROUP)[back].int()}, \
            matrix_of(codes, zeros, scales)[:, back]
    return quantise


def gptq_config(bits: int, version: int, symmetric: bool, ordered: bool) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": ordered, "sym": symmetric,
            "checkpoint_format": {1: "gptq", 2: "gptq_v2"}[version]}


def compressed(format: str, inputs: dict[str, Any] | None = None, **args: Any) -> Kind:
    """Of compressed-tensors, with scales by the largest element of each block."""
    scheme = QuantizationScheme(targets=["Linear"], format=format, weights=QuantizationArgs(**args),
                                input_activations=QuantizationArgs(**inputs) if inputs else None)
    writer, weights = BaseCompressor.get_value_from_registry(format), scheme.weights
    bits = weights.num_bits
    largest = (1 << (bits - 1)) - 1 if weights.type == "int" else {4: 6., 8: 448.}[bits]

    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        (n, k), (rows, columns) = weight.shape, weights.block_structure or (1, weights.group_size or 0)
        columns = columns if columns > 0 else weight.shape[1]
        amax = weight.reshape(n // rows, rows, k // columns, columns).abs().amax((1, 3))
        if weights.strategy == "tensor": amax = amax.max().reshape(1)
        state = {"weight": weight, "weight_scale": amax / largest}
        if weights.strategy == "tensor_group":
            state["weight_global_scale"] = (448 * 6 / weight.abs().max()).reshape(1)
            state["weight_scale"] = amax / largest * state["weight_global_scale"]
        if not weights.symmetric: state["weight_zero_point"] = torch.full(amax.shape, -3, dtype=torch.int8)
        if weights.scale_dtype == torch.uint8: state["weight_scale"] = torch.exp2(amax.log2().floor() - 2)
        stored = writer.compress(state, scheme)
        return stored, writer.decompress(stored, scheme)["weight"].float()
    config = QuantizationConfig(config_groups={"group_0": scheme}, format=format, ignore=["lm_head"],
                                quantization_status="compressed")
    return Kind(quantise, json.loads(config.model_dump_json()))


def fp8(rows: int, columns: int, name: str, flat: bool = False) -> Quantise:
    """fp8 of blocks, 0 for all; `flat` scales have one dimension less."""
    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        n, k = weight.shape
        r, c = rows or n, columns or k
        padded = torch.nn.functional.pad(weight, (0, -k % c, 0, -n % r))
        amax = padded.reshape(-(-n // r), r, -(-k // c), c).abs().amax((1, 3))
        scales = amax / 448
        whole = scales.repeat_interleave(r, 0).repeat_interleave(c, 1)[:n, :k]
        codes = (weight / whole).to(torch.float8_e4m3fn)
        stored = {"weight": codes, name: scales.reshape(()) if flat else scales}
        return stored | ({"input_scale": torch.tensor(1.)} if flat else {}), codes.float() * whole
    return quantise


def nf4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Double quantised, blocks of 64."""
    blocks, book = weight.reshape(-1, 64), torch.tensor(NF4.values)
    amax, numbers = blocks.abs().amax(-1), torch.linspace(-1, 1, 256)
    offset = float(amax.mean())
    larger = (amax - offset).abs().max().reshape(1)
    small = ((amax - offset) / larger).sub(numbers[:, None]).abs().argmin(0)
    scales = numbers[small] * larger + offset
    codes = (blocks / amax[:, None])[..., None].sub(book).abs().argmin(-1)
    pairs = codes.reshape(-1, 2)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight.shape),
             "nested_blocksize": 1024, "nested_offset": offset, "nested_dtype": "float32"}
    stored = {"weight": (pairs[:, :1] << 4 | pairs[:, 1:]).to(torch.uint8), "weight.quant_map": book,
              "weight.absmax": small.to(torch.uint8), "weight.nested_quant_map": numbers,
              "weight.nested_absmax": larger, "weight.quant_state.bitsandbytes__nf4": json_of(state)}
    return stored, (book[codes] * scales[:, None]).reshape(weight.shape)


def int8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales = weight.abs().amax(1)
    codes = (weight * (127 / scales[:, None])).round().to(torch.int8)
    return {"weight": codes, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}, \
        codes * scales.view(-1, 1) * 7.874015718698502e-3


TOKENS = {"num_bits": 8, "strategy": "token", "dynamic": True}
FP8, FP4 = ({"num_bits": bits, "type": "float"} for bits in (8, 4))
G32 = {"strategy": "group", "group_size": GROUP}
KINDS = {
    "awq": Kind(awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "gptq": Kind(gptq(4, 1, True, False), gptq_config(4, 1, True, False)),
    "gptq-3-bits": Kind(gptq(3, 2, False, True), gptq_config(3, 2, False, True)),
    "gptq-8-bits": Kind(gptq(8, 2, True, True), gptq_config(8, 2, True, True)),
    "ct-int4": compressed("pack-quantized", num_bits=4, **G32),
    "ct-int4-zeros": compressed("pack-quantized", num_bits=4, symmetric=False, **G32),
    "ct-int8": compressed("int-quantized", TOKENS, num_bits=8, strategy="channel"),
    "ct-fp8": compressed("float-quantized", {**TOKENS, "type": "float"}, **FP8, strategy="channel"),
    "ct-fp8-blocks": compressed("float-quantized", **FP8, strategy="block", block_structure=[64, 64]),
    "ct-nvfp4": compressed("nvfp4-pack-quantized", **FP4, strategy="tensor_group", group_size=16),
    "ct-mxfp4": compressed("mxfp4-pack-quantized", **FP4, scale_dtype="torch.uint8", **G32),
    "fp8": Kind(fp8(128, 128, "weight_scale_inv"), {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "fbgemm": Kind(fp8(1, 0, "weight_scale"), {"quant_method": "fbgemm_fp8"}),
    "modelopt": Kind(fp8(0, 0, "weight_scale", True), {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "nf4": Kind(nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "int8": Kind(int8, {"quant_method": "bitsandbytes", "load_in_8bit": True})}


def write(kind: str, directory: Path, width: int = WIDTH) -> tuple[Path, Path]:
    """The directories of the quantised model and of its plain one, with weights of float32."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=HIDDEN, intermediate_size=width, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False)
    model = transformers.LlamaForCausalLM(config).float()
    stored, plain = {}, {}
    for name, tensor_ in model.state_dict().items():
        layer = name.removesuffix(".weight")
        if not layer.endswith("_proj"): stored[name] = plain[name] = tensor_
        else:
            found, plain[name] = KINDS[kind].quantise(tensor_)
            stored |= {f"{layer}.{key}": each for key, each in found.items()}
    data = json.loads(config.to_json_string(use_diff=False)) | {"architectures": ["LlamaForCausalLM"]}
    for place, tensors, more in (("quantised", stored, {"quantization_config": KINDS[kind].config}),
                                 ("plain", plain, {})):
        (directory / place).mkdir(parents=True)
        save_file({name: each.contiguous() for name, each in tensors.items()},
                  directory / place / "model.safetensors", metadata={"format": "pt"})
        (directory / place / "config.json").write_text(json.dumps(data | more))
    return directory / "quantised", directory / "plain"
