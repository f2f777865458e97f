"""GGUF files that are damaged, or of a kind that is not read."""
from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest

from tinygrad_nv.errors import ModelError, WeightError
from tinygrad_nv.models import weights
from tinygrad_nv.models.config import read_config
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.quant.gguf.file import open_gguf

AGAIN = "  to fix:   download the file again"


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def entry(key: str, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def tensor(name: str = "t", shape: tuple[int, ...] = (32, 2), kind: int = 2, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def header(*parts: bytes, tensors: int = 0, entries: int = 0, version: int = 3, data: int = 0) -> bytes:
    made = b"GGUF" + struct.pack("<IQQ", version, tensors, entries) + b"".join(parts)
    return made + bytes(-len(made) % 32 + data)


def refused(path: Path, content: bytes | None, found: str, *more: str) -> None:
    """Opening the file is refused with these words, and without allocating what it asks for."""
    if content is not None: path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(WeightError) as caught: open_gguf(path)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 1 << 20
    message = str(caught.value)
    for words in (found, *more): assert words in message, message


@pytest.fixture
def path(tmp_path: Path) -> Path: return tmp_path / "model.gguf"


def test_no_gguf_file(path: Path):
    refused(path, b"", f"{path} starts with b''", "expected: a GGUF file, which starts with b'GGUF'", AGAIN)
    refused(path, b"GGML" + bytes(40), f"{path} starts with b'GGML'")


def test_a_file_that_cannot_be_read(tmp_path: Path):
    refused(tmp_path / "none", None, "none cannot be read: No such file", "to fix:   check its permissions")


@pytest.mark.parametrize(("version", "found"), [(1, "version 1"), (4, "version 4"),
                                                (3 << 24, "big-endian, version 3")])
def test_another_version(path: Path, version: int, found: str):
    refused(path, header(version=version), f"{path} is a GGUF file of {found}",
            "expected: version 2 or 3, little-endian", "to fix:   convert the model again with llama.cpp")


@pytest.mark.parametrize(("content", "found"), [
    (header(tensors=1 << 60), f"it has {1 << 60} tensors, and 16 bytes are left"),
    (header(entries=1 << 62), f"it has {1 << 62} entries, and 8 bytes are left"),
    (header(struct.pack("<Q", 1 << 50), entries=1, data=32), f"it has {1 << 50} bytes of a string"),
    (header(entry("a", 9, struct.pack("<IQ", 4, 1 << 40)), entries=1),
     f"it has {1 << 40} numbers of an array"),
    (header(entry("a", 9, struct.pack("<IQ", 8, 1 << 40)), entries=1),
     f"it has {1 << 40} values of an array"),
    (header(tensor(shape=(1 << 40, 1 << 20)), tensors=1), "tensor t ends at byte "),
    (header(entry("a", 9, struct.pack("<IQ", 9, 1) * 5), entries=1), "are 4 deep"),
], ids=["tensors", "entries", "string", "numbers", "strings", "extents", "nested"])
def test_absurd_counts(path: Path, content: bytes, found: str):
    refused(path, content, f"{path} is damaged: ", found, "expected: a complete GGUF file", AGAIN)


@pytest.mark.parametrize(("content", "found"), [
    (header(entry("a", 13, b""), entries=1), "is of kind 13"),
    (header(entry("a", 0, b"x") * 2, entries=2), "a is there twice"),
    (header(entry("a", 8, string(b"\xff")), entries=1), "is not UTF-8: "),
    (header(entry("general.alignment", 4, struct.pack("<I", 24)), entries=1),
     "general.alignment is 24, no power of two"),
    (header(entry("general.alignment", 8, string("x")), entries=1), "general.alignment is 'x'"),
    (header(tensor(), tensor(), tensors=2, data=72), "tensor t is there twice"),
    (header(tensor(offset=18), tensors=1, data=54), "tensor t is at 18, no multiple of 32"),
    (header(tensor(shape=()), tensors=1), "tensor t has 0 extents"),
    (header(tensor(shape=(1,) * 5), tensors=1), "tensor t has 5 extents"),
    (header(tensor(shape=(33,)), tensors=1, data=36),
     "tensor t has rows of 33 in Q4_0, whose blocks have 32"),
    (header(tensor(offset=1 << 63), tensors=1, data=36), "tensor t ends at byte "),
], ids=["kind", "key twice", "utf-8", "alignment", "alignment's kind", "tensor twice", "offset", "no extents",
        "extents", "blocks", "beyond"])
def test_damaged(path: Path, content: bytes, found: str):
    refused(path, content, f"{path} is damaged: ", found)


@pytest.mark.parametrize(("kind", "name"), [(16, "IQ2_XXS"), (26, "I32"), (4, "4"), (1 << 31, str(1 << 31))])
def test_a_type_that_is_not_read(path: Path, kind: int, name: str):
    refused(path, header(tensor(kind=kind), tensors=1, data=99), f"{path}: tensor t is of type {name}\n",
            "expected: one of F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K,",
            "to fix:   use a file of the model with another quantisation")


def test_every_truncation(path: Path):
    """Cut anywhere, a file is refused."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc"])
    writer.add_array("tokenizer.ggml.scores", [1.0, 2.0])
    writer.add_uint32("llama.block_count", 1)
    writer.add_tensor("t", np.ones((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    whole = path.read_bytes()
    assert open_gguf(path).tensors["t"].nbytes == 256
    for end in range(0, len(whole), 3):
        path.write_bytes(whole[:end])
        with pytest.raises(WeightError, match=r"is damaged|starts with"): open_gguf(path)


# **** models ****

METADATA = {"llama.context_length": 64, "llama.embedding_length": 32, "llama.block_count": 1,
            "llama.feed_forward_length": 32, "llama.attention.head_count": 4,
            "llama.attention.layer_norm_rms_epsilon": 1e-5}
MATRIX, VECTOR = np.zeros((32, 32), np.float32), np.ones(32, np.float32)
TENSORS = {"token_embd.weight": MATRIX, "output_norm.weight": VECTOR, "blk.0.attn_norm.weight": VECTOR,
           "blk.0.ffn_norm.weight": VECTOR,
           **{f"blk.0.{name}.weight": MATRIX for name in ("attn_q", "attn_k", "attn_v", "attn_output",
                                                          "ffn_gate", "ffn_up", "ffn_down")}}


def write(path: Path, metadata: dict[str, object], tensors: dict[str, np.ndarray | None] | None = None,
          kind: str = "llama") -> None:
    """A model, with changes; None leaves out."""
    writer = gguf.GGUFWriter(path, kind)
    for key, value in (METADATA | metadata).items():
        if value is None: continue
        if isinstance(value, list): writer.add_array(key, value)
        elif isinstance(value, str): writer.add_string(key, value)
        elif isinstance(value, float): writer.add_float32(key, value)
        elif isinstance(value, bool): writer.add_bool(key, value)
        elif isinstance(value, int): writer.add_uint32(key, value)
    for name, data in (TENSORS | (tensors or {})).items():
        if data is not None: writer.add_tensor(name, data, raw_dtype=2 if data.dtype == np.uint8 else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_an_architecture_that_is_not_implemented(path: Path):
    write(path, {}, kind="mamba")
    with pytest.raises(ModelError) as caught: read_config(path)
    assert str(caught.value) == (f"{path}: general.architecture is 'mamba'\n  expected: one of llama, qwen2, "
                                 "qwen3, qwen2moe, qwen3moe, olmoe, gemma, gemma2, gemma3, gpt-oss, "
                                 "phi3, deepseek2, olmo2, smollm3, granite, llama4\n"
                                 "  to fix:   use a model of a supported family")


def test_parts_that_do_not_belong_together(tmp_path: Path):
    paths = [tmp_path / f"m-0000{i + 1}-of-00002.gguf" for i in range(2)]
    write(tmp_path / "m.gguf", {"split.count": 2, "split.no": 0})
    with pytest.raises(WeightError, match=r"m.gguf is one of 2 files of a model\n.*-00001-of-00002.gguf"):
        open_gguf(tmp_path / "m.gguf")
    for i, path in enumerate(paths): write(path, {"split.count": 2, "split.no": i})
    with pytest.raises(WeightError, match=r"m-00002-of-00002.gguf: tensor .* is in another part, too"):
        open_gguf(paths[0])
    write(paths[1], {"split.count": 2, "split.no": 0})
    with pytest.raises(WeightError, match=r"split.no 0 and split.count 2\n.*: 1 and 2, as its name says"):
        open_gguf(paths[1])
    others = dict.fromkeys(TENSORS) | {"more": np.zeros(4, np.float32)}
    write(paths[1], {"split.count": 2, "split.no": 1}, others)
    write(paths[0], {"split.count": 2, "split.no": 0, "split.tensors.count": 99})
    with pytest.raises(WeightError, match=f"files of m-00001-of-00002.gguf have {len(TENSORS) + 1} tensors"):
        open_gguf(paths[0])


@pytest.mark.parametrize("key", METADATA)
def test_metadata_that_are_missing(path: Path, key: str):
    write(path, {key: None})
    with pytest.raises(ModelError, match=f"has no {key}\n  expected: the metadata that llama.cpp writes"):
        read_config(path)


@pytest.mark.parametrize(("metadata", "found"), [
    ({"llama.attention.head_count_kv": [4, 2]}, r": attention.head_count_kv is \[4, 2\]"),
    ({"llama.attention.value_length": 4}, "attention.value_length is 4, and heads have 8 elements"),
    ({"llama.rope.dimension_count": 4, "llama.attention.key_length": 8}, "rope.dimension_count is 4, and "),
    ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0},
     "short_factor of the rope parameters has 0 factors"),
    ({"llama.rope.scaling.type": "yarn"}, "rope type yarn lacks factor"),
    ({"llama.rope.scaling.factor": 2.0, "llama.rope.scaling.alpha": 2.0}, "rope.scaling.alpha is 2.0"),
    ({"llama.expert_count": 8, "llama.expert_used_count": 9}, "num_experts_per_tok is 9, of 8 experts"),
    ({"llama.logit_scale": 0.5}, "logits_scaling is 0.5, which is not implemented"),
    ({"llama.attention.head_count": "x"}, "num_attention_heads is 'x'"),
    ({"llama.attention.head_count": 5}, "hidden_size 32 is not a multiple of num_attention_heads 5"),
    ({"llama.block_count": 0}, "num_hidden_layers is 0"),
])
def test_metadata_that_cannot_be(path: Path, metadata: dict[str, object], found: str):
    write(path, metadata)
    with pytest.raises(ModelError, match=found): read_config(path)


LATENT = {"attention.kv_lora_rank": 16, "rope.dimension_count": 4, "attention.key_length": 12,
          "attention.value_length": 8, "expert_feed_forward_length": 32, "expert_count": 4,
          "expert_used_count": 2, "expert_shared_count": 1}
EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}


@pytest.mark.parametrize(("kind", "metadata", "found"), [
    ("llama", {"attention.temperature_scale": .5}, r"llama.attention.temperature_scale is 0.5, which is not "
                                                   r"implemented\n  expected: a model without it"),
    ("llama", {"attention.causal": False}, "is_causal is False, which is not implemented"),
    ("llama", {"rope.dimension_sections": [1, 1, 2, 0]}, r"llama.rope.dimension_sections is \[1, 1, 2, 0\]"),
    ("llama", {"router_logit_softcapping": 30.0}, "llama.router_logit_softcapping is 30.0"),
    ("gemma", {"attention.sliding_window": 16}, r"gemma.attention.sliding_window is 16.*\n  expected: 0"),
    ("gemma2", {"attention.scale": .5}, "attention_multiplier is 0.5, which is not implemented"),
    ("gemma3", {"attention.sliding_window": 16, "attention.sliding_window_pattern": [True, False]},
     r"attention.sliding_window_pattern is \[True, False\]\n  expected: a number of layers, or a list of 1"),
    ("gemma3", {"attention.shared_kv_layers": 2}, "gemma3.attention.shared_kv_layers is 2"),
    ("gemma3", {"attention.key_length_swa": 4}, "gemma3.attention.key_length_swa is 4"),
    ("qwen3moe", {**EXPERTS, "expert_weights_norm": False},
     r"qwen3moe.expert_weights_norm is False.*\n  expected: True"),
    ("phi3", {"rope.dimension_count": 3}, "partial_rotary_factor 0.375 rotates 3 of 8 dimensions"),
    ("granite", {"logit_scale": 2.0, "rope.scaling.finetuned": False},
     r"granite.rope.scaling.finetuned is False.*\n  expected: true: layers with rope"),
    ("llama4", {**EXPERTS, "interleave_moe_layer_step": 1, "attention.sliding_window": 16},
     r"llama4.attention.sliding_window is 16.*\n  expected: 8192, or none"),
    ("deepseek2", {**LATENT, "attention.kv_lora_rank": None}, "attention.kv_lora_rank is None"),
    ("deepseek2", {**LATENT, "expert_feed_forward_length": 0}, "expert_feed_forward_length is 0"),
    ("deepseek2", {**LATENT, "expert_gating_func": 4}, r"expert_gating_func is 4.*\n  expected: 1 \("),
    ("deepseek2", {**LATENT, "expert_weights_norm": True}, "expert_weights_norm is True, and deep"),
    ("deepseek2", {**LATENT, "nextn_predict_layers": 1}, "deepseek2.nextn_predict_layers is 1"),
    ("deepseek2", {**LATENT, "attention.temperature_length": 8192}, "attention.temperature_length is 8192"),
    ("deepseek2", {**LATENT, "expert_gating_func": 2, "expert_group_count": 3, "expert_group_used_count": 4},
     "n_group is 3, topk_group 4"),
])
def test_metadata_that_a_family_does_not_have(path: Path, kind: str, metadata: dict[str, object], found: str):
    """What changes what is computed is read, or refused by name."""
    own = {key.replace("llama.", f"{kind}."): value for key, value in METADATA.items()}
    given = {f"{kind}.{key}": value for key, value in metadata.items()}
    write(path, dict.fromkeys(METADATA) | own | given, kind=kind)
    with pytest.raises(ModelError, match=found): read_config(path)


@pytest.mark.parametrize(("factors", "found"), [(3, "has 3 factors"), (4, None)])
def test_rope_factors(path: Path, factors: int, found: str | None):
    write(path, {}, {"rope_freqs.weight": np.full(factors, 2, np.float32)})
    if found is None: assert read_config(path).distinct_ropes[0].factors == (2.0,) * 4
    else:
        with pytest.raises(ModelError, match=found): read_config(path)
    write(path, {"llama.rope.scaling.factor": 2.0}, {"rope_freqs.weight": np.full(4, 2, np.float32)})
    with pytest.raises(ModelError, match=r"has rope_freqs.weight and rope scaling of type 'linear'"):
        read_config(path)


@pytest.mark.parametrize(("tensors", "found"), [
    ({"blk.0.ffn_up.weight": None}, r"missing \(1\): model.layers.0.mlp.up_proj.weight"),
    ({"blk.0.ssm_a.weight": VECTOR}, r"unexpected \(1\): blk.0.ssm_a.weight"),
    ({"blk.0.attn_sinks.weight": VECTOR}, r"unexpected \(1\): model.layers.0.self_attn.sinks"),
    ({"blk.0.attn_q.weight": np.zeros((32, 64), np.float32)},
     r"wrong shape: model.layers.0.self_attn.q_proj.weight: \[32, 64\], expected \[32, 32\]"),
    ({"blk.0.attn_q.weight": np.zeros((32, 36), np.uint8)},
     r"self_attn.q_proj.weight is Q4_0 of shape \[32, 64\]\n  expected: shape \[32, 32\]"),
    ({"blk.0.attn_norm.weight": np.zeros(18, np.uint8)}, "input_layernorm.weight has dtype U8"),
])
def test_tensors_that_do_not_fit(path: Path, tensors: dict[str, np.ndarray | None], found: str):
    write(path, {}, tensors)
    model = Llama(read_config(path), device="CPU")
    with pytest.raises(WeightError, match=found): weights.load(model, path)


# **** tokenizers ****

BYTES = [chr(i) for i in range(33, 127)]
TOKENIZER = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": BYTES,
             "tokenizer.ggml.merges": ["a b"]}


@pytest.mark.parametrize(("metadata", "found", "expected"), [
    ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model is None", "gpt2 or llama"),
    ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model is 'bert'", "gpt2 or llama"),
    ({"tokenizer.ggml.pre": "mystery"}, "tokenizer.ggml.pre is 'mystery'", "one of default, gpt-2, "),
    ({"tokenizer.ggml.tokens": None}, "has no tokenizer.ggml.tokens", "the metadata that llama.cpp writes"),
    ({"tokenizer.ggml.merges": None}, "has no tokenizer.ggml.merges", "the metadata that llama.cpp writes"),
    ({"tokenizer.ggml.tokens": [1, 2]}, "has no tokenizer.ggml.tokens", "the metadata that llama.cpp writes"),
    ({"tokenizer.ggml.model": "llama"}, "has no tokenizer.ggml.scores", "the metadata that llama.cpp writes"),
    ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [1.0]}, "its tokenizer cannot be made: ",
     "tokens, merges and ids that fit together"),
    ({}, "merge 'a' 'b' is not of tokens", "merges of two tokens to a token"),
    ({"tokenizer.ggml.merges": ["ab"], "tokenizer.ggml.tokens": [*BYTES, "ab"]},
     "merge 'ab' '' is not of tokens", "merges of two tokens to a token"),
    ({"tokenizer.ggml.tokens": [*BYTES, "ab"], "tokenizer.ggml.bos_token_id": 99,
      "tokenizer.ggml.add_eos_token": 1, "tokenizer.ggml.eos_token_id": 99},
     "its tokenizer cannot be made: list index out of range", "tokens, merges and ids that fit together"),
])
def test_a_tokenizer_that_cannot_be_made(command, path: Path, metadata: dict[str, object], found: str,
                                         expected: str):
    """It is needed for prompts of text, not for ids."""
    write(path, TOKENIZER | metadata)
    command("generate", path, "hello").refused(
        f"{path}", found, f"expected: {expected}",
        "to fix:   put the model's tokenizer.json beside the file and name their directory, or pass token")


def test_ids_need_no_tokenizer(command, path: Path):
    write(path, {})
    command("generate", path, "--prompt-ids", "1,2", "--max-tokens", "2").succeeded()


def test_a_file_without_a_prompt(command, path: Path):
    write(path, {})
    command("generate", path).refused(f"{path} is a model, and no prompt follows it",
                                      "expected: [MODEL] PROMPT")
