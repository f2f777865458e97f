"""GGUF files as models: hyper-parameters and weights equal those that transformers makes of the file, and
of the directory that it was converted from. Blocks of GGUF files equal ggml's dequantised values bit for
bit. Headers of GGUF files: metadata and tensors as gguf's writer put them there."""
from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from tinygrad import Tensor, dtypes
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from tests.support.quant.gguf_case import gguf_name, write_model
from tinygrad_nv.errors import WeightError
from tinygrad_nv.models import weights
from tinygrad_nv.models.config import parse_config, read_config
from tinygrad_nv.models.gguf import hugging_face_name
from tinygrad_nv.models.layers import lookup_quantised
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.quantised.layers import projections
from tinygrad_nv.models.rope import inverse_frequencies
from tinygrad_nv.models.weights import slots
from tinygrad_nv.quant import QTensor
from tinygrad_nv.quant.activations import QWeight
from tinygrad_nv.quant.gguf import blocks
from tinygrad_nv.quant.gguf.blocks import FORMATS, Format
from tinygrad_nv.quant.gguf.file import open_gguf

SIZES = {"vocab_size": 96, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
         "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 128}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 64}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 128}),
    "gemma": ("Gemma", {"head_dim": 64}),
}
WRITTEN = {"Q4_0": Kind.Q4_0, "Q8_0": Kind.Q8_0, "Q6_K": Kind.Q6_K,
             "Q4_K_M": {"attn_v": Kind.Q6_K, "ffn_down": Kind.Q6_K, "output.weight": Kind.Q6_K,
                        "": Kind.Q4_K},
             "mixed": {"attn_k": Kind.F16, "ffn_gate": Kind.F32, "token_embd": Kind.Q4_K, "": Kind.IQ4_XS}}
Directories = dict[str, Path]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Directories:
    """A model of each family, with norms and biases that differ from 1 and 0."""
    made = {}
    for name, (family, fields) in FAMILIES.items():
        torch.manual_seed(len(name))
        config = getattr(transformers, f"{family}Config")(**{**SIZES, **fields})
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        for parameter_name, parameter in model.named_parameters():
            mean = 1.0 if "norm" in parameter_name else 0.0
            if parameter.ndim == 1: torch.nn.init.normal_(parameter, mean, 0.3)
        made[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(made[name])
    return made


def theirs(path: Path) -> dict[str, np.ndarray]:
    """The weights that transformers makes of a file, in float32."""
    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with torch.device("meta"): model = transformers.AutoModelForCausalLM.from_config(config)
    found = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    return {name: np.asarray(tensor, np.float32) for name, tensor in found.items()}


def ours(path: Path) -> dict[str, np.ndarray]:
    """All weights of a loaded model in float32, by Hugging Face's names."""
    model = Llama(read_config(path), device="CPU")
    weights.load(model, path)
    whole = {}
    for each in (one for layer in range(len(model.blocks)) for one in projections(model, layer)):
        parts = [part.matrix.dequantize() if isinstance(part, QWeight) else part
                 for part in each.linear.parts]
        if parts: whole[id(each.linear.weight)] = Tensor.cat(*parts, dim=0)
    if model.quantised_head is not None:
        head = model.quantised_head.matrix.dequantize()
        whole[id(model.head)] = head
    if model.quantised_embedding is not None:
        if model.config.tied: assert model.quantised_embedding is model.quantised_head.matrix
        every = Tensor(np.arange(model.config.vocab_size, dtype=np.int32), device="CPU")
        whole[id(model.embedding)] = lookup_quantised(model.quantised_embedding, every, dtypes.float32)
    return {name: whole.get(id(slot.tensor), slot.tensor)[slot.first:slot.first + slot.shape[0]].numpy()
            for name, slot in slots(model).items()}


def require_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert np.array_equal(found[name].view(np.uint32), values.view(np.uint32)), name


@pytest.mark.parametrize("family", FAMILIES)
def test_hyper_parameters_are_those_of_the_directory(directories: Directories, tmp_path: Path, family: str):
    path = tmp_path / "model.gguf"
    write_model(path, directories[family])
    found, expected = read_config(path), read_config(directories[family])
    assert np.float32(found.norm_eps) == np.float32(expected.norm_eps)
    if family == "mistral": expected = replace(expected, architecture="LlamaForCausalLM")
    if family == "llama3":
        rates = [inverse_frequencies(each.ropes[0], 1) for each in (found, expected)]
        assert np.allclose(*rates, rtol=1e-6, atol=0)
        found = replace(found, ropes=expected.ropes)
    same = {"norm_eps": expected.norm_eps, "dtype": expected.dtype, "eos_token_ids": expected.eos_token_ids}
    assert replace(found, **same) == expected


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_hyper_parameters_are_those_of_transformers(directories: Directories, tmp_path: Path, family: str):
    path = tmp_path / "model.gguf"
    write_model(path, directories[family], metadata={"tokenizer.ggml.eos_token_id": 7})
    config = transformers.AutoConfig.from_pretrained(tmp_path, gguf_file=path.name)
    data = {**config.to_dict(), "architectures": [f"{FAMILIES[family][0]}ForCausalLM"]}
    assert replace(read_config(path), dtype=None) == replace(parse_config(data), dtype=None)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_floats_are_those_of_the_directory(directories: Directories, tmp_path: Path, family: str):
    path = tmp_path / "model.gguf"
    write_model(path, directories[family])
    expected = ours(directories[family])
    if family == "gemma":   # 1 is added and subtracted
        expected = {name: values + np.float32(1) - np.float32(1) if "norm" in name else values
                    for name, values in expected.items()}
    require_same(ours(path), expected)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kinds", WRITTEN)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_blocks_are_those_of_transformers(directories: Directories, tmp_path: Path, family: str, kinds: str):
    path = tmp_path / "model.gguf"
    write_model(path, directories[family], WRITTEN[kinds])
    expected = theirs(path)
    if family == "qwen2": expected.pop("lm_head.weight", None)
    require_same(ours(path), expected)


def test_names(directories: Directories):
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 2)
    model = Llama(read_config(directories["qwen3"]), device="CPU")
    for name in slots(model):
        stem, _, suffix = name.rpartition(".")
        assert gguf_name(name) == f"{names.get_name(stem)}.{suffix}"
        assert hugging_face_name(gguf_name(name)) == name
    assert hugging_face_name("blk.0.attn_sinks.weight") == "model.layers.0.self_attn.sinks"
    assert hugging_face_name("blk.0.ssm_a.weight") == "blk.0.ssm_a.weight"


QUANTISED = [kind for kind, format in FORMATS.items() if format.type is not None]
# bytes of a block where float16 scales begin
SCALES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82),
          "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
          "MXFP4": ()}


def random_rows(format: Format, n: int, blocks: int, sane: bool = True, seed: int = 0) -> np.ndarray:
    """Blocks of random bytes; `sane` ones have scales between -1 and 1."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (n * blocks, format.nbytes), dtype=np.uint8)
    if sane:
        for at in SCALES[format.name]:
            raw[:, at:at + 2] = rng.uniform(-1, 1, (len(raw), 1)).astype("<f2").view(np.uint8)
    if format.name == "MXFP4": raw[:, 0] = rng.integers(0, 255, len(raw))
    return raw.reshape(n, blocks * format.nbytes)


def dequantized(format: Format, raw: np.ndarray, rows: np.ndarray | None = None) -> np.ndarray:
    assert format.type is not None
    shape = len(raw), raw.shape[1] // format.nbytes * format.columns
    return QTensor.of(format.type, shape, blocks.arrays(format, raw, rows), "CPU").dequantize().numpy()


def require_same_bits(found: np.ndarray, expected: np.ndarray) -> None:
    """Equal bits, signs of zeros too; of NaNs, that they are."""
    assert found.dtype == expected.dtype == np.float32
    assert found.shape == expected.shape
    numbers = ~np.isnan(expected)
    assert np.array_equal(np.isnan(found), ~numbers)
    assert np.array_equal(found[numbers].view(np.uint32), expected[numbers].view(np.uint32))


def test_sizes_are_those_of_ggml():
    for kind, format in FORMATS.items():
        assert Kind(kind).name == format.name
        assert gguf.GGML_QUANT_SIZES[kind] == (format.columns, format.nbytes)
    assert {kind.value: kind.name for kind in Kind if kind not in FORMATS} == blocks.NAMES


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: FORMATS[kind].name)
def test_values_in_numpy_are_those_of_ggml(kind: int):
    raw = random_rows(FORMATS[kind], 5, 3, seed=1)
    require_same_bits(blocks.values(FORMATS[kind], raw), gguf.dequantize(raw, Kind(kind)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sane", [True, False], ids=["numbers", "any bytes"])
@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: FORMATS[kind].name)
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
def test_values_are_those_of_ggml(kind: int, sane: bool):
    raw = random_rows(FORMATS[kind], 5, 3, sane)
    require_same_bits(dequantized(FORMATS[kind], raw), gguf.dequantize(raw, Kind(kind)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: FORMATS[kind].name)
@pytest.mark.filterwarnings("ignore:overflow")
def test_extreme_bytes(kind: int):
    """Of codes and integer scales, the same byte in all of a row."""
    format = FORMATS[kind]
    raw = np.repeat(np.array([0x00, 0xff, 0x7f, 0x80], np.uint8)[:, None], format.nbytes, axis=1)
    for at in SCALES[format.name]: raw[:, at:at + 2] = np.array([1.2345], "<f2").view(np.uint8)
    if format.name == "MXFP4": raw[:, 0] = (0, 254, 1, 2)
    require_same_bits(dequantized(format, raw), gguf.dequantize(raw, Kind(kind)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.MXFP4])
def test_what_ggml_quantised(kind: Kind):
    values = np.random.default_rng(1).standard_normal((4, 96)).astype(np.float32)
    raw = gguf.quantize(values, kind)
    require_same_bits(dequantized(FORMATS[kind], raw), gguf.dequantize(raw, kind))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: FORMATS[kind].name)
def test_rows_in_another_order_and_in_chunks(kind: int, monkeypatch: pytest.MonkeyPatch):
    format, rows = FORMATS[kind], np.random.default_rng(2).permutation(7)
    raw = random_rows(format, 7, 2)
    expected = gguf.dequantize(np.ascontiguousarray(raw[rows]), Kind(kind))
    monkeypatch.setattr(blocks, "CHUNK", 2 * 2 * format.columns)
    require_same_bits(dequantized(format, raw, rows), expected)


def test_scale_255_of_mxfp4_is_refused():
    raw = random_rows(FORMATS[Kind.MXFP4], 2, 2)
    raw[1, 17] = 255
    with pytest.raises(WeightError, match="scale 255, which is NaN"): blocks.arrays(FORMATS[Kind.MXFP4], raw)


VALUES = {"general.name": "ä name", "a.u8": 255, "a.i8": -1, "a.u16": 65535, "a.i16": -2, "a.u32": 1 << 31,
          "a.i32": -3, "a.u64": 1 << 63, "a.i64": -4, "a.f32": 0.5, "a.f64": 0.1, "a.bool": True,
          "a.strings": ["", "▁the", "日本"], "a.integers": [1, -2, 3], "a.floats": [0.5, -1.5],
          "a.flags": [True, False]}


def write(path: Path, tensors: dict[str, tuple[np.ndarray, Kind]], alignment: int | None = None) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    for key in VALUES:
        kind, value = key[2:], VALUES[key]
        if isinstance(value, list): writer.add_array(key, value)
        else:
            names = {"u": "uint", "i": "int", "f": "float"}
            name = names[kind[0]] + kind[1:] if kind[0] in names and kind[1:].isdigit() else kind
            getattr(writer, f"add_{name}" if key.startswith("a.") else "add_string")(key, value)
    if alignment is not None: writer.add_custom_alignment(alignment)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=None if data.dtype != np.uint8 else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("alignment", [None, 8, 256])
def test_metadata_and_tensors(tmp_path: Path, alignment: int | None):
    rng, path = np.random.default_rng(0), tmp_path / "x.gguf"
    given = {"norm": (rng.standard_normal(7).astype(np.float32), Kind.F32),
             "half": (rng.standard_normal((3, 5)).astype(np.float16), Kind.F16),
             "quarter": (rng.integers(0, 256, (3, 2 * 18), dtype=np.uint8), Kind.Q4_0),
             "experts": (rng.integers(0, 256, (2, 3, 144), dtype=np.uint8), Kind.Q4_K)}
    write(path, given, alignment)
    file = open_gguf(path)
    assert {key: file.metadata[key] for key in VALUES} == VALUES
    assert file.metadata["general.architecture"] == "llama"
    shapes = {"norm": (7,), "half": (3, 5), "quarter": (3, 64), "experts": (2, 3, 256)}
    for name, (data, kind) in given.items():
        tensor, raw = file.tensors[name], file.raw(name)
        assert (tensor.format.name, tensor.shape) == (kind.name, shapes[name])
        assert tensor.offset % (alignment or 32) == 0
        assert raw.tobytes() == data.tobytes()
    assert np.array_equal(blocks.floats(file.tensors["half"].format, file.raw("half")), given["half"][0])
    assert file.raw("experts").shape == (6, 144)


def test_headers_of_any_length(tmp_path: Path):
    """One of them ends at a multiple of the alignment, and has no padding."""
    data, path = np.arange(7, dtype=np.float32), tmp_path / "x.gguf"
    for length in range(32):
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_string("general.name", "x" * length)
        writer.add_tensor("norm", data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        assert open_gguf(path).raw("norm").tobytes() == data.tobytes()


def test_version_2_and_arrays_of_arrays(tmp_path: Path):
    def string(text: str) -> bytes: return struct.pack("<Q", len(text)) + text.encode()
    integers, strings = struct.pack("<IQBB", 0, 2, 1, 2), struct.pack("<IQ", 8, 1) + string("x")
    array = struct.pack("<IIQ", 9, 9, 2) + integers + strings
    data = b"GGUF" + struct.pack("<IQQ", 2, 0, 1) + string("nested") + array
    (tmp_path / "x.gguf").write_bytes(data)
    file = open_gguf(tmp_path / "x.gguf")
    assert file.metadata == {"nested": [[1, 2], ["x"]]}
    assert not file.tensors
