"""Quantised checkpoints that are not whole, or of a kind that is not read, and text that cannot calibrate."""
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinygrad_nv.errors import ModelError, WeightError
from tinygrad_nv.models.quantised.layers import QuantisedLayer, read_layer
from tinygrad_nv.quant.readers import mxfp4
from tinygrad_nv.quant.readers.reader import Activations, Stored, StoredMatrix, reader_of
from tinygrad_nv.quant.readers.schemes import cache_of
from tinygrad_nv.quant.types import E4M3, Scale
from tinygrad_nv.quant.types import NF4 as NF4_ELEMENT
from tinygrad_nv.quantize.directory import require_plain

L, SHAPE = "model.layers.0.mlp.up_proj", (64, 128)
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
AWQ_STORED = {f"{L}.qweight": ("I32", (128, 8)), f"{L}.qzeros": ("I32", (4, 8)),
              f"{L}.scales": ("F16", (4, 64))}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": True}
GPTQ_STORED = {f"{L}.qweight": ("I32", (16, 64)), f"{L}.qzeros": ("I32", (4, 8)),
               f"{L}.scales": ("F16", (4, 64)), f"{L}.g_idx": ("I32", (128,))}
CT: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
                      "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
                          "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32,
                          "symmetric": False, "actorder": "group"}}}}
CT_STORED = {f"{L}.weight_packed": ("I32", (64, 16)), f"{L}.weight_scale": ("BF16", (64, 4)),
             f"{L}.weight_zero_point": ("I32", (8, 4)), f"{L}.weight_shape": ("I64", (2,)),
             f"{L}.weight_g_idx": ("I32", (128,))}
FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FP8_STORED = {f"{L}.weight": ("F8_E4M3", SHAPE), f"{L}.weight_scale_inv": ("F32", (1, 1))}
FBGEMM: dict[str, Any] = {"quant_method": "fbgemm_fp8"}
MODELOPT: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
NF4: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
STATE = "weight.quant_state.bitsandbytes__nf4"
NF4_STORED = {f"{L}.weight": ("U8", (4096, 1)), f"{L}.weight.absmax": ("U8", (128,)),
              f"{L}.weight.quant_map": ("F32", (16,)), f"{L}.{STATE}": ("U8", (120,)),
              f"{L}.weight.nested_absmax": ("F32", (1,)), f"{L}.weight.nested_quant_map": ("F32", (256,))}


def group(more: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    """compressed-tensors' settings with other ones of the weights, and of the group."""
    first = CT["config_groups"]["group_0"]
    changed = {**first, "weights": {**first["weights"], **weights}, **(more or {})}
    return {**CT, "config_groups": {"group_0": changed}}


def refused(call: Callable[[], object], *texts: str, error: type[ModelError] = WeightError) -> None:
    """The call raises the error, whose message has all of the texts."""
    with pytest.raises(error) as caught: call()
    for text in texts: assert text in str(caught.value)
    assert caught.value.fix


def matrix(config: dict[str, Any], stored: Stored, *texts: str, shape: tuple[int, int] = SHAPE) -> None:
    """The layer's tensors are refused before any is read."""
    refused(lambda: reader_of(config, "config.json").matrix(L, shape, stored), *texts)


def config(settings: dict[str, Any], *texts: str) -> None:
    """The settings are refused."""
    refused(lambda: reader_of(settings, "config.json"), "config.json: ", *texts, error=ModelError)


def arrays(config: dict[str, Any], stored: Stored, data: dict[str, np.ndarray], *texts: str,
           shape: tuple[int, int] = SHAPE) -> None:
    """The layer's tensors are refused when they are read: `data` are some of them, the others are 0."""
    kinds = {"I32": np.int32, "F16": np.float16, "BF16": np.uint16, "F32": np.float32, "I64": np.int64,
             "I8": np.int8}
    found = reader_of(config, "config.json").matrix(L, shape, stored)
    assert found is not None

    def get(name: str) -> np.ndarray:
        kind, extents = stored[name]
        return data.get(name.removeprefix(f"{L}."), np.zeros(extents, kinds.get(kind, np.uint8)))
    refused(lambda: found.arrays(get), *texts)


def without(stored: Stored, name: str) -> Stored:
    return {key: value for key, value in stored.items() if key != f"{L}.{name}"}


def replaced(stored: Stored, name: str, kind: str, *shape: int) -> Stored:
    return {**stored, f"{L}.{name}": (kind, shape)}


def test_unknown_kind():
    config({"quant_method": "hqq"}, "quant_method is 'hqq'", "one of awq, gptq, compressed-tensors, fp8")
    config({}, "quant_method is None", "one of awq, gptq")


def test_awq_settings():
    config({**AWQ, "bits": 8}, "bits of quantization_config is 8", "one of 4")
    config({**AWQ, "version": "gemv_fast"}, "version of quantization_config is 'gemv_fast'", "one of gemm")
    config({**AWQ, "group_size": 0}, "group_size of quantization_config is 0", "columns of a group, or -1")
    config({**AWQ, "group_size": "128"}, "group_size of quantization_config is '128'")


@pytest.mark.parametrize("name", ["qweight", "scales"])
def test_awq_lacks(name: str):
    matrix(AWQ, without(AWQ_STORED, name), f"{L}.{name} is missing", "expected: ")


def test_awq_shapes():
    matrix(AWQ, replaced(AWQ_STORED, "qweight", "I32", 128, 7), "qweight is I32 [128, 7]", "I32 [128, 8]")
    matrix(AWQ, replaced(AWQ_STORED, "qweight", "F16", 128, 8), "qweight is F16 [128, 8]", "I32 [128, 8]")
    matrix(AWQ, replaced(AWQ_STORED, "qzeros", "I32", 4, 64), f"{L}.qzeros is I32 [4, 64]", "I32 [4, 8]")
    matrix({**AWQ, "group_size": 128}, AWQ_STORED, f"{L}.scales is F16 [4, 64]", "F16 or BF16 [1, 64]")
    odd = {f"{L}.qweight": ("I32", (33, 8)), f"{L}.scales": ("F16", (2, 64))}
    matrix(AWQ, odd, "33 columns of 4 bits", "whole bytes", shape=(64, 33))


def test_gptq_settings():
    config({**GPTQ, "bits": 5}, "bits of quantization_config is 5", "one of 2, 3, 4, 8")
    config({**GPTQ, "bits": None}, "bits of quantization_config is None")
    config({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format of quantization_config is 'marlin'",
           "one of gptq, gptq_v2")
    config({**GPTQ, "group_size": -2}, "group_size of quantization_config is -2")
    config({**GPTQ, "sym": "yes"}, "sym of quantization_config is 'yes'", "one of True, False")
    broken = {**GPTQ, "dynamic": {"-:(": {}}}
    refused(lambda: reader_of(broken, "config.json").matrix(L, SHAPE, GPTQ_STORED),
            "dynamic of quantization_config: '(' is no regular expression", error=ModelError)
    mixed = {**GPTQ, "dynamic": {".*up_proj": {"bits": 7}}}
    refused(lambda: reader_of(mixed, "config.json").matrix(L, SHAPE, GPTQ_STORED),
            "config.json: bits of quantization_config is 7", error=ModelError)


@pytest.mark.parametrize("name", ["qweight", "qzeros", "scales", "g_idx"])
def test_gptq_lacks(name: str):
    matrix(GPTQ, without(GPTQ_STORED, name), f"{L}.{name} is missing", "expected: ")


def test_gptq_shapes():
    matrix(GPTQ, replaced(GPTQ_STORED, "qweight", "I32", 15, 64), "qweight is I32 [15, 64]", "I32 [16, 64]")
    matrix({**GPTQ, "bits": 8}, GPTQ_STORED, "qweight is I32 [16, 64]", "I32 [32, 64]")
    matrix(GPTQ, replaced(GPTQ_STORED, "qzeros", "I32", 4, 64), "qzeros is I32 [4, 64]", "I32 [4, 8]")
    matrix({**GPTQ, "group_size": 64}, GPTQ_STORED, "qzeros is I32 [4, 8]", "I32 [2, 8]")
    matrix(GPTQ, replaced(GPTQ_STORED, "g_idx", "I32", 64), "g_idx is I32 [64]", "I32 or I64 [128]")


def test_gptq_groups_of_inputs():
    groups = np.arange(128, dtype=np.int32) // 32
    points = {"qzeros": np.full((4, 8), 0x77777777, np.int32)}
    for wrong, text in (((5, 9), "groups from 0 to 9"), ((5, -1), "groups from -1 to 3"),
                        ((5, 2), "31 columns of group 0")):
        bad = groups.copy()
        bad[wrong[0]] = wrong[1]
        arrays(GPTQ, GPTQ_STORED, {"g_idx": bad, **points}, f"{L}.g_idx has {text}",
               "groups 0 to 3, of 32 columns each")
    arrays({**GPTQ, "desc_act": False}, GPTQ_STORED, {"g_idx": groups[::-1].copy(), **points},
           f"{L}.g_idx permutes inputs, and quantization_config does not", "set desc_act to true")


def test_gptq_zero_points_that_are_not_symmetric():
    data = {"g_idx": np.arange(128, dtype=np.int32) // 32, "qzeros": np.full((4, 8), 0x77777778, np.int32)}
    arrays(GPTQ, GPTQ_STORED, data, f"{L}.qzeros has zero points other than 8", "set sym to false")


def test_compressed_tensors_settings():
    formats = "one of pack-quantized, int-quantized, float-quantized, naive-quantized, nvfp4-pack-quantized"
    config({**CT, "format": "marlin-24"}, "group_0: format of quantization_config is 'marlin-24'", formats)
    config(group({"format": "sparse-bitmask"}), "group_0: format of", "'sparse-bitmask'", formats)
    config(group(num_bits=12), "weights of pack-quantized are 12-bit int", "4-bit int, 5-bit int")
    config(group({"format": "float-quantized"}), "weights of float-quantized are 4-bit int", "8-bit float")
    config(group(type="complex"), "group_0.weights: type of quantization_config is 'complex'", "int or float")
    config(group(strategy="row"), "strategy of quantization_config is 'row'", "tensor, channel, token, group")
    config(group(group_size=None), "group_size of quantization_config is None", "columns of a group")
    config(group(strategy="block", block_structure=[16]), "block_structure of quantization_config is [16]")
    config({**CT, "config_groups": None}, "config_groups of quantization_config is None")
    config({**CT, "config_groups": {"W4A16": ["Linear"]}}, "config_groups of quantization_config is {'W4A16'")
    config({**CT, "sparsity_config": {"format": "marlin-24"}}, "format of sparsity_config is 'marlin-24'",
           "dense, sparse-24-bitmask, sparse-bitmask")
    quip = {"type": "hadamard", "apply": [{"location": "weight_input"}, {"location": "input"}]}
    config({**CT, "transform_config": {"config_groups": {"v": quip}}},
           "transform_config of quantization_config applies 'v' to input", "weight_input, weight_output")
    config({**CT, "transform_config": {"config_groups": {"R1": 7}}}, "transform_config of quantization")
    config({**CT, "ignore": "lm_head"}, "ignore of quantization_config is 'lm_head'", "a list of names")
    config(group({"targets": [7]}), "group_0: targets of quantization_config is [7]", "a list of names")
    config(group({"targets": ["re:*"]}), "targets of quantization_config: '*' is no regular expression")
    refused(lambda: cache_of({**CT, "kv_cache_scheme": "fp8"}, "config.json"),
            "config.json: kv_cache_scheme of quantization_config is 'fp8'", "an object", error=ModelError)


@pytest.mark.parametrize("name", ["weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"])
def test_compressed_tensors_lacks(name: str):
    matrix(CT, without(CT_STORED, name), f"{L}.{name} is missing", "expected: ")


def test_static_inputs_without_a_scale():
    static = Activations("e4m3", Scale(0, 0), static=True)
    stored = StoredMatrix(E4M3 @ Scale(1, 0), (f"{L}.weight", f"{L}.weight_scale"), lambda get: {}, static)
    refused(lambda: read_layer(QuantisedLayer("lm_head", ((stored, SHAPE),)), {}),
            f"{L}.weight has no input_scale beside it", "calls them static")


def test_compressed_tensors_that_is_not_compressed():
    """As llmcompressor saves it with save_compressed=False."""
    plain = {f"{L}.weight": ("BF16", (64, 128)), f"{L}.weight_scale": ("BF16", (64, 4))}
    matrix({**group({"format": "dense"}), "format": "dense"}, plain, f"{L}.weight_scale is there, and ",
           "quantization_config has the layer as floats", "save_compressed=True")


def test_compressed_tensors_shapes():
    matrix(CT, replaced(CT_STORED, "weight_packed", "I32", 64, 15), "is I32 [64, 15]", "I32 [64, 16]")
    matrix(group(num_bits=3), CT_STORED, "weight_packed is I32 [64, 16]", "I32 [64, 12] or [64, 13]")
    matrix(group(group_size=64), CT_STORED, "weight_scale is BF16 [64, 4]", "F16 or BF16 [64, 2]")
    matrix(CT, replaced(CT_STORED, "weight_zero_point", "I8", 64, 4), "point is I8 [64, 4]", "I32 [8, 4]")
    small = {f"{L}.weight_packed": ("I32", (4, 1)), f"{L}.weight_scale": ("BF16", (4, 1))}
    channels = group(strategy="channel", symmetric=True, actorder=None)
    matrix(channels, small, "5 columns of 4 bits", shape=(4, 5))
    floats = group({"format": "float-quantized"}, type="float", num_bits=8, strategy="channel")
    matrix(floats, {f"{L}.weight": ("I8", SHAPE), f"{L}.weight_scale": ("F32", (64, 1))}, "F8_E4M3 [64, 128]")
    fp4 = group({"format": "nvfp4-pack-quantized"}, type="float", strategy="tensor_group", group_size=16)
    matrix(fp4, {f"{L}.weight_packed": ("U8", (64, 64)), f"{L}.weight_scale": ("F8_E4M3", (64, 8))},
           "weight_global_scale is missing", "F32 [1]")


def test_compressed_tensors_content():
    groups = {"weight_g_idx": np.arange(128, dtype=np.int32) // 32, "weight_shape": np.array([64, 128])}
    wrong = np.array([64, 127])
    arrays(CT, CT_STORED, {**groups, "weight_shape": wrong}, "weight_shape is [64, 127]", "[64, 128]")
    bad = groups["weight_g_idx"].copy()
    bad[7] = 4
    arrays(CT, CT_STORED, {**groups, "weight_g_idx": bad}, "has groups from 0 to 4", "groups 0 to 3")
    arrays(group(actorder=None), CT_STORED, {**groups, "weight_g_idx": groups["weight_g_idx"][::-1].copy()},
           "weight_g_idx permutes inputs", 'set actorder to "group"')
    arrays(group(symmetric=True), CT_STORED, {**groups, "weight_zero_point": np.ones((8, 4), np.int32)},
           "weight_zero_point is not 0", "set symmetric to false")


def test_fp8_settings():
    config({**FP8, "weight_block_size": [128]}, "weight_block_size of quantization_config is [128]",
           "rows and columns of a block, or null")
    config({**FP8, "weight_block_size": [0, 128]}, "weight_block_size of quantization_config is [0, 128]")
    config({**FP8, "activation_scheme": "none"}, "activation_scheme of", "dynamic, static")
    config({**MODELOPT, "quant_algo": "W4A8_AWQ"}, "quant_algo of quantization_config is 'W4A8_AWQ'",
           "one of FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, MXFP8, NVFP4, W4A16_NVFP4, MIXED_PRECISION")
    config({**MODELOPT, "quant_algo": "MIXED_PRECISION", "quantized_layers": {L: {"quant_algo": "INT4"}}},
           f"{L}: quant_algo of quantization_config is 'INT4'")


@pytest.mark.parametrize("name", ["weight", "weight_scale_inv"])
def test_fp8_lacks(name: str):
    matrix(FP8, without(FP8_STORED, name), f"{L}.{name} is missing", "expected: ")


def test_fp8_shapes():
    matrix(FP8, replaced(FP8_STORED, "weight", "F8_E4M3", 64, 127), "is F8_E4M3 [64, 127]", "[64, 128]")
    matrix(FP8, replaced(FP8_STORED, "weight", "I8", *SHAPE), "weight is I8 [64, 128]", "F8_E4M3 [64, 128]")
    matrix(FP8, replaced(FP8_STORED, "weight_scale_inv", "F32", 3, 1), "is F32 [3, 1]", "[1, 1]")
    rows = {f"{L}.weight": ("F8_E4M3", SHAPE), f"{L}.weight_scale": ("F32", (63, 1))}
    matrix(FBGEMM, rows, "weight_scale is F32 [63, 1]", "[64, 1]")
    matrix(FBGEMM, without(rows, "weight_scale"), "weight_scale is missing")
    fp4 = {f"{L}.weight": ("U8", (64, 64)), f"{L}.weight_scale": ("F8_E4M3", (64, 8))}
    matrix(MODELOPT, fp4, "weight_scale_2 is missing", "F32 []")
    matrix(MODELOPT, replaced(fp4, "weight_scale", "F8_E4M3", 64, 4), "is F8_E4M3 [64, 4]", "[64, 8]")


def test_bitsandbytes_settings():
    config({"quant_method": "bitsandbytes"}, "load_in_4bit of quantization_config is False", "one of True")


@pytest.mark.parametrize("name", [key.removeprefix(f"{L}.") for key in NF4_STORED])
def test_bitsandbytes_lacks(name: str):
    matrix(NF4, without(NF4_STORED, name), f"{L}.{name} is missing", "expected: ")


def test_bitsandbytes_shapes():
    matrix(NF4, replaced(NF4_STORED, "weight", "U8", 4095, 1), "weight is U8 [4095, 1]", "4096 bytes")
    matrix(NF4, replaced(NF4_STORED, "weight.absmax", "U8", 100),
           "weight.absmax has 100 scales of 8192 elements", "one for each 32, 64, 128")
    eight = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    matrix(eight, {f"{L}.weight": ("I8", SHAPE)}, "SCB is missing", "F32 [64]")
    matrix(eight, {f"{L}.weight": ("I8", SHAPE), f"{L}.SCB": ("F32", (128,))}, "SCB is F32 [128]", "F32 [64]")
    stored = {f"{L}.weight": ("I8", SHAPE), f"{L}.SCB": ("F32", (64,)), f"{L}.weight_format": ("U8", ())}
    arrays(eight, stored, {"weight_format": np.array(1, np.uint8)}, "weight_format is 1", "rows one after")


def test_bitsandbytes_content():
    settings = {"quant_type": "nf4", "blocksize": 64, "shape": [64, 128], "nested_blocksize": 256,
                "nested_offset": .1}
    book = {"weight.quant_map": np.float32(NF4_ELEMENT.values)}

    def state(**more: object) -> dict[str, np.ndarray]:
        return {**book, STATE: np.frombuffer(json.dumps({**settings, **more}).encode(), np.uint8)}
    for key, wrong in (("blocksize", 128), ("shape", [128, 64]), ("quant_type", "fp4")):
        arrays(NF4, NF4_STORED, state(**{key: wrong}), f"{STATE} says that {key} is {wrong}")
    arrays(NF4, NF4_STORED, state(nested_blocksize=64), "1 scales of 128 numbers, blocks of 64")
    arrays(NF4, NF4_STORED, state(nested_offset=None), "nested_offset", "is None", "a number")
    zeros = np.zeros(16, np.float32)
    arrays(NF4, NF4_STORED, {**state(), "weight.quant_map": zeros}, "other numbers than nf4")
    arrays(NF4, NF4_STORED, {**book, STATE: np.frombuffer(b"{", np.uint8)}, f"{STATE} is no JSON")
    arrays(NF4, NF4_STORED, {**book, STATE: np.frombuffer(b"[]", np.uint8)}, f"{STATE} is []", "an object")


def test_mxfp4_experts():
    name, reader = "model.layers.0.mlp.experts.3.down_proj", mxfp4.reader({}, "config.json")
    stored = {f"{name}_blocks": ("U8", (64, 4, 16)), f"{name}_scales": ("U8", (64, 4))}
    refused(lambda: reader.matrix(name, SHAPE, {f"{name}_blocks": ("U8", (64, 4, 16))}),
            f"{name}_scales is missing", "U8 [64, 4]")
    refused(lambda: reader.matrix(name, (64, 96), stored), "is U8 [64, 4, 16]", "[64, 3, 16]")
    both = {key.replace("down", "gate_up"): value for key, value in stored.items()}
    refused(lambda: reader.matrix(name.replace("down", "up"), SHAPE, both), "[128, 4, 16]")


def test_a_gguf_file_is_not_quantised_again(tmp_path: Path):
    """It has types of its own; what is read is a directory."""
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for source in (tmp_path / "model.gguf", tmp_path):
        with pytest.raises(ModelError) as caught: require_plain(source, tmp_path / "out")
        assert f"{source} is a GGUF file, and quantize reads model directories" in str(caught.value)


WORDS = "--scheme", "gptq", "--group-size", "32"


@pytest.mark.parametrize(("name", "content", "found"), [
    ("a.txt", b"", "a.txt is empty"), ("a.txt", b" \n\n", "a.txt is empty"),
    ("a.txt", b"fox \xff", "a.txt is not UTF-8, at byte 4"), ("a.jsonl", b"\n", "a.jsonl is empty"),
    ("a.jsonl", b'{"text": "fox"}\nfox', "a.jsonl, line 2: no JSON"),
    ("a.jsonl", b'{"prompt": "fox"}', 'a.jsonl, line 1: neither "text" nor "messages"'),
    ("a.jsonl", b'{"text": ""}', 'a.jsonl, line 1: neither "text" nor "messages"'),
    ("a.jsonl", b"[1]", 'a.jsonl, line 1: neither "text" nor "messages"'),
    ("none.txt", None, "none.txt cannot be read: No such file or directory")])
def test_text_that_cannot_be_used(command, tiny: Path, tmp_path: Path, name: str, content: bytes | None,
                                  found: str):
    path = tmp_path / name
    if content is not None: path.write_bytes(content)
    command("quantize", tiny, "--out", tmp_path / "made", *WORDS, "--calibration", path).refused(
        found, 'expected: text, or JSONL with "text" or "messages" in each line',
        "to fix:   name another file")
    assert not list(tmp_path.glob("made*"))


def test_a_model_without_a_tokenizer(command, copy: Path, tmp_path: Path):
    (copy / "tokenizer.json").unlink()
    command("quantize", copy, "--out", tmp_path / "made", *WORDS).refused("has no tokenizer.json")


@pytest.mark.parametrize(("words", "found", "fix"), [
    (("--scheme", "w4a16", "--method", "obq"), "method 'obq'", "change --method"),
    (("--scheme", "fp8", "--method", "gptq"), "method gptq of scheme fp8", "change --method or --scheme"),
    (("--scheme", "w4a16", "--method", "smoothquant"), "method smoothquant of scheme w4a16",
     "change --method or --scheme"),
    (("--scheme", "awq", "--act-order", "group"), "an order of columns in method awq",
     "leave --act-order out"),
    (("--scheme", "gptq", "--act-order", "size"), "act-order 'size'", "change --act-order"),
    (("--scheme", "w4a16", "--method", "gptq", "--act-order", "group"),
     "act-order group in format compressed-tensors", "change --act-order to weight, or --format to gptq"),
    (("--scheme", "gptq", "--smoothing", "0.5"), "smoothing in method gptq", "leave --smoothing out"),
    (("--scheme", "w8a8", "--method", "smoothquant", "--smoothing", "1.5"), "smoothing 1.5",
     "change --smoothing"),
    (("--scheme", "w4a16", "--static"), "static scales of inputs in scheme w4a16", "leave --static out"),
    (("--scheme", "gptq", "--group-size", "48"), "columns, in groups of 48", "choose another --group-size"),
    (("--scheme", "gptq", "--samples", "0"), "0 sequences of 512 tokens", "change --samples or --length"),
    (("--scheme", "gptq", "--length", "1"), "sequences of 1 tokens", "change --samples or --length")])
def test_what_does_not_go_together(command, tiny: Path, tmp_path: Path, words: tuple[str, ...], found: str,
                                   fix: str):
    command("quantize", tiny, "--out", tmp_path / "made", *words).refused(found, f"to fix:   {fix}")
    assert not list(tmp_path.glob("made*/config.json"))
