"""Quantised and sparse checkpoints through the engine, held to transformers with dequantised weights and
zeros; and weights that are quantised while they are loaded."""
from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tinygrad import Tensor, dtypes

from tests.models.test_parity import GREEDY, PROMPT, require_same_answers
from tinygrad_nv.engine.llm import LLM
from tinygrad_nv.errors import WeightError
from tinygrad_nv.models import weights
from tinygrad_nv.models.checkpoint import TensorEntry, open_checkpoint, read_array
from tinygrad_nv.models.config import read_config
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.quant.readers.online import SCHEMES, quantise
from tinygrad_nv.quant.tensor import QTensor
from tinygrad_nv.quant.types import Scale
from tinygrad_nv.runtime.memory import allocate

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


def amax(w: torch.Tensor, scale: Scale) -> torch.Tensor:
    """Of the blocks of a matrix, each in the place of its elements."""
    rows, columns = scale.rows or w.shape[0], scale.columns or w.shape[1]
    padded = torch.nn.functional.pad(w.abs(), (0, -w.shape[1] % columns, 0, -w.shape[0] % rows))
    found = padded.reshape(padded.shape[0] // rows, rows, -1, columns).amax((1, 3))
    return found.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:w.shape[0], :w.shape[1]]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SCHEMES)
def test_matrices_are_rounded_to_the_nearest(name: str, dtype: torch.dtype):
    """The bits of torch; rows of zeros, subnormals, and more rows than are rounded at a time."""
    type = SCHEMES[name]
    w = torch.randn(700, 520, generator=torch.Generator().manual_seed(0))
    w[5], w[6, 1:] = 0, w[6, 1:] * 1e-4
    w = w.to(dtype)
    raw = w.view(torch.uint16).numpy() if dtype == torch.bfloat16 else w.numpy()
    found = QTensor.of(type, (700, 520), quantise(type, "w", lambda _: raw), "CPU").dequantize().numpy()
    most, wide = {"int8": 127, "e4m3": 448, "nf4": 1}[type.element.name], w.float()
    scales = (amax(wide, type.scale) / most).clamp(min=1e-12)
    codes = wide / scales
    if most == 1:
        book = torch.tensor(type.element.values)
        codes = book[(codes[..., None] - book).abs().argmin(-1)]
    else: codes = codes.round() if most == 127 else codes.to(torch.float8_e4m3fn).float()
    assert np.array_equal(found, (codes * scales).numpy())


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["fp8", "int8", "bitsandbytes"])
def test_through_the_engine(hf_model: Callable[[str], Path], name: str):
    """Greedy tokens of the dequantised weights; dense matrices are never allocated."""
    directory = hf_model("llama")
    llm = LLM(directory, device="CPU", max_num_seqs=1, quantization=name)
    made = list(llm.complete(PROMPT, replace(GREEDY, max_tokens=8)).token_ids)
    plain = Llama(read_config(directory), dtypes.float32, "CPU")
    weights.load(plain, directory)
    saved = 0
    for block, other in zip(llm.model.blocks, plain.blocks, strict=True):
        for linear, dense in ((block.attention.qkv, other.attention.qkv),
                              (block.attention.output, other.attention.output),
                              (block.feed_forward.gate_up, other.feed_forward.gate_up),
                              (block.feed_forward.down, other.feed_forward.down)):
            assert not linear.weight.uop.buffer.is_allocated()
            assert len(linear.parts) == 1
            matrix = linear.parts[0].matrix.dequantize()
            most = (0.2 if name == "bitsandbytes" else 0.05) * dense.weight.abs().max().item()
            assert 0 < (matrix - dense.weight).abs().max().item() < most
            dense.weight = matrix.contiguous().realize()
            saved += 4 * dense.weight.numel() - linear.parts[0].matrix.nbytes
    assert llm.streamed_bytes == 4 * plain.config.parameters - saved    # the embedding is the head
    tokens = list(PROMPT)
    for _ in range(8):
        ids = tokens + [0] * (len(PROMPT) + 8 - len(tokens))    # one shape
        tokens.append(int(plain(Tensor([ids], device="CPU")).numpy()[0, len(tokens) - 1].argmax()))
    llm.close()
    assert made == tokens[len(PROMPT):]


def test_weights_that_are_not_finite_are_refused(hf_model: Callable[[str], Path], tmp_path: Path):
    source = hf_model("llama")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text())))
    with pytest.raises(WeightError, match=r"layers.1.mlp.up_proj.weight holds numbers that are not"):
        LLM(tmp_path, device="CPU", max_num_seqs=1, quantization="fp8")


NAME = "model.layers.0.mlp.down_proj"


def matrix(kept: float, seed: int = 0) -> torch.Tensor:
    """bfloat16 [7, 100], with columns that end within a byte of the mask; of 0.5 two of four are kept."""
    random = torch.Generator().manual_seed(seed)
    w, drawn = torch.randn(7, 100, generator=random), torch.rand(7, 25, 4, generator=random)
    if kept == 0.5: mask = torch.zeros(7, 25, 4).scatter(2, drawn.topk(2, 2).indices, 1).reshape(7, 100)
    else: mask = (drawn.reshape(7, 100) < kept).float()
    return torch.where(mask > 0, w, 0).to(torch.bfloat16)


def stored(w: torch.Tensor, rows: bool = False) -> Tensors:
    """As the package stored it, of 2:4 sparse ones, or with `rows` of others."""
    kept = (w != 0).numpy()
    made = {"compressed": w[w != 0] if rows else w[w != 0].reshape(len(w), -1),
            "bitmask": torch.from_numpy(np.packbits(kept, axis=1, bitorder="little")),
            "shape": torch.tensor([[extent] for extent in w.shape])}
    if rows: made["row_offsets"] = torch.tensor([0, *kept.sum(1).cumsum()[:-1].tolist()])
    return {f"{NAME}.{name}": one.contiguous() for name, one in made.items()}


def entry(folder: Path, tensors: Mapping[str, torch.Tensor]) -> TensorEntry:
    save_file(dict(tensors), folder / "model.safetensors")
    entries = open_checkpoint(folder).entries
    assert list(entries) == [f"{NAME}.weight"]
    return entries[f"{NAME}.weight"]


@pytest.mark.parametrize(("kept", "rows"), [(0.5, False), (0.3, True), (0.0, True), (1.0, True)])
def test_a_tensor_is_read_whole_and_in_parts(tmp_path: Path, kept: float, rows: bool):
    w = matrix(kept)
    found = entry(tmp_path, stored(w, rows))
    assert (found.shape, found.dtype) == ((7, 100), "bfloat16")
    np.testing.assert_array_equal(read_array(found), w.view(torch.uint16).numpy())
    for begin, end in ((0, 700), (0, 1), (99, 101), (250, 617), (699, 700)):
        into = Tensor.empty(end - begin, dtype=dtypes.float32, device="CPU")
        allocate(into)
        open_checkpoint(tmp_path).read_into(found, begin, end, into, 0)
        np.testing.assert_array_equal(into.numpy(), w.float().flatten()[begin:end].numpy())


def test_what_does_not_fit_is_refused(tmp_path: Path):
    def refused(words: str, **changed: torch.Tensor | None) -> None:
        tensors = stored(matrix(0.5)) | {f"{NAME}.{name}": one for name, one in changed.items()}
        with pytest.raises(WeightError, match=words):
            read_array(entry(tmp_path, {name: one for name, one in tensors.items() if one is not None}))
    good = stored(matrix(0.5))
    refused("and no .*compressed", compressed=None)
    refused("and no .*shape", shape=None)
    refused(r"is of shape \[7, 96\]", shape=torch.tensor([[7], [96]]))
    refused(r"is of shape \[7\]", shape=torch.tensor([7]))
    mask = good[f"{NAME}.bitmask"].clone()
    mask[3, 2] ^= 1
    refused("its bitmask keeps", bitmask=mask)
    whole = stored(matrix(0.3), rows=True)
    offsets = whole[f"{NAME}.row_offsets"] + 1000
    with pytest.raises(WeightError, match="row_offsets: rows 0 to 7"):
        read_array(entry(tmp_path, whole | {f"{NAME}.row_offsets": offsets}))
