"""Tensors of a GGUF file by Hugging Face's names, with what llama.cpp's converter changes undone.

A tensor of all experts is listed as one for each, as Hugging Face has them; q | k | v or gate | up in one
tensor as two or three, where the architecture has them apart. Rows of queries and keys may be ordered so that
rope rotates neighbours, norms may have 1 added. Of latent attention the matrix of keys and values is in two
tensors, of which that of keys is transposed: it is listed in floats.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tinygrad_nv.errors import ModelError, brief
from tinygrad_nv.quant.gguf import blocks
from tinygrad_nv.quant.gguf.file import GGUFFile, GGUFTensor
from tinygrad_nv.quant.readers.gguf import row_order

from ..layer_config import LLAMA_NAMES, Names
from .architecture import AGAIN, FACTORS, LONG, SHORT, Architecture
from .architectures import architecture_of

FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
UNREAD = (FACTORS, LONG, SHORT)     # config.py reads them

NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LATENT = {"attn_q_a": "q_a_proj", "attn_q_b": "q_b_proj", "attn_q_a_norm": "q_a_layernorm",
          "attn_kv_a_mqa": "kv_a_proj_with_mqa", "attn_kv_a_norm": "kv_a_layernorm", "attn_kv_b": "kv_b_proj"}
EXPERTS = ("ffn_gate", "ffn_up", "ffn_down")    # as Names.expert_matrices has them
FUSED = "ffn_gate_up_exps"
KEYS, VALUES = "attn_k_b", "attn_v_b"       # of latent attention


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint: its Hugging Face name; a dtype of plain floats, or U8 for rows of blocks that
    a reader takes; its `shape` in elements of that dtype. With `values` it is that of keys and values: for
    each head `source` transposed, and below it `values`."""
    name: str
    dtype: str
    shape: tuple[int, ...]
    source: GGUFTensor
    values: GGUFTensor | None = None


# **** names ****

def parts_of(names: Names) -> dict[str, str]:
    """Returns what follows "model.layers.{i}." of a matrix or a norm, by the part of llama.cpp's name."""
    qkv, gate_up, shared = names.qkv, names.gate_up, names.shared_expert
    made = {"attn_norm": names.attention_norm, "post_attention_norm": names.attention_post_norm,
            "ffn_norm": names.feed_forward_norm, "post_ffw_norm": names.feed_forward_post_norm,
            "attn_output": names.output, "attn_q_norm": names.q_norm, "attn_k_norm": names.k_norm,
            "ffn_up": gate_up[-1], "ffn_down": names.down, "ffn_gate_inp": names.router,
            "ffn_gate_inp_shexp": f"{shared}_gate", "ffn_gate_shexp": f"{shared}.gate_proj",
            "ffn_up_shexp": f"{shared}.up_proj", "ffn_down_shexp": f"{shared}.down_proj",
            **{part: f"self_attn.{name}" for part, name in LATENT.items()}}
    if len(qkv) == 1: made["attn_qkv"] = qkv[0]
    else: made |= dict(zip(("attn_q", "attn_k", "attn_v"), qkv, strict=True))
    if len(gate_up) > 1: made["ffn_gate"] = gate_up[0]
    return made


def hugging_face_name(name: str, names: Names = LLAMA_NAMES) -> str:
    """blk.0.attn_q.weight → model.layers.0.self_attn.q_proj.weight; unknown names as they are. The number of
    an expert stands after the part, as in older files."""
    stem, dot, suffix = name.rpartition(".")
    if stem in NAMES: return f"{NAMES[stem]}{dot}{suffix}"
    block, _, rest = stem.partition(".")
    number, _, part = rest.partition(".")
    if block != "blk": return name
    # which have no suffix there
    if part == "attn_sinks": return f"model.layers.{number}.{names.sinks}"
    if part == "exp_probs_b": return f"model.layers.{number}.{names.choice_bias}"
    found, (stem, _, expert) = parts_of(names).get(part, ""), part.partition(".")
    if expert and stem in EXPERTS:
        found = f"{names.expert.format(expert)}.{names.expert_matrices[EXPERTS.index(stem)]}"
    return f"model.layers.{number}.{found}{dot}{suffix}" if found else name


# **** tensors ****

def list_tensors(file: GGUFFile) -> list[StoredTensor]:
    """The tensors of a model. An embedding of blocks is listed for the head, too, if that is tied."""
    made, architecture = list[StoredTensor](), architecture_of(file)
    for whole in file.tensors.values():
        if whole.name in UNREAD or _is_told_twice(file, whole): continue
        if (pair := _pair(file, whole)) is not None: made += [pair] * (pair.source is whole)
        else: made += [_entry(one, architecture) for one in _apart(file, whole, architecture)]
        if whole.name == EMBEDDING and whole.format.type is not None and HEAD not in file.tensors:
            made.append(replace(made[-1], name=hugging_face_name(HEAD)))
    return made


def _entry(source: GGUFTensor, architecture: Architecture) -> StoredTensor:
    *above, part, suffix = source.name.split(".")
    name = ".".join([*above, architecture.renamed.get(part, part), suffix])
    dtype = "float32" if _offset(architecture, source) else FLOATS.get(source.format.name, "U8")
    blocked = *source.shape[:-1], source.format.row_bytes(source.shape[-1])
    shape = blocked if dtype == "U8" else source.shape
    return StoredTensor(hugging_face_name(name, architecture.names), dtype, shape, source)


def _apart(file: GGUFFile, whole: GGUFTensor, architecture: Architecture) -> list[GGUFTensor]:
    """The matrices or vectors of a tensor that the architecture has one by one, with names of their own."""
    block, _, rest = whole.name.partition(".")
    number, _, rest = rest.partition(".")
    part, _, suffix = rest.partition(".")
    step = whole.nbytes // whole.shape[0]

    def cut(name: str, begin: int, shape: tuple[int, ...]) -> GGUFTensor:
        """Returns the part of bytes from `begin` on."""
        return replace(whole, name=f"{block}.{number}.{name}.{suffix}", offset=whole.offset + begin,
                       shape=shape)
    # llama.cpp drops an extent of 1
    if part == "ffn_gate_inp_shexp" and len(whole.shape) == 1:
        return [replace(whole, shape=(1, *whole.shape))]
    if part == "attn_qkv" and len(architecture.names.qkv) == 3:
        heads, shared = _heads(file)
        rows = whole.shape[0] // (heads + 2 * shared)
        return [cut(name, first * rows * step, (count * rows, *whole.shape[1:]))
                for name, first, count in (("attn_q", 0, heads), ("attn_k", heads, shared),
                                           ("attn_v", heads + shared, shared))]
    of_each = len(whole.shape) == (2 if suffix == "bias" else 3)
    if of_each and part == FUSED and whole.shape[1] % 2 == 0:
        half = whole.shape[1] // 2, *whole.shape[2:]
        return [cut(f"{name}.{i}", i * step + at, half) for i in range(whole.shape[0])
                for name, at in (("ffn_gate", 0), ("ffn_up", step // 2))]
    name = part.removesuffix("_exps")
    if not of_each or name == part or name not in EXPERTS: return [whole]
    return [cut(f"{name}.{i}", i * step, whole.shape[1:]) for i in range(whole.shape[0])]


def _is_told_twice(file: GGUFFile, one: GGUFTensor) -> bool:
    """Whether a file has the matrix of keys and values as one, too."""
    block, _, suffix = one.name.rpartition(".")[0].rpartition(".")
    return suffix in (KEYS, VALUES) and f"{block}.attn_kv_b.weight" in file.tensors


def _pair(file: GGUFFile, one: GGUFTensor) -> StoredTensor | None:
    """The matrix of keys and values that a tensor is one of two of."""
    block, _, suffix = one.name.rpartition(".")[0].rpartition(".")
    if suffix not in (KEYS, VALUES): return None
    keys, values = (file.tensors.get(f"{block}.{part}.weight") for part in (KEYS, VALUES))
    if keys is None or values is None or len(keys.shape) != 3 or len(values.shape) != 3: return None
    (heads, rank, nope), value = keys.shape, values.shape[1]
    if values.shape != (heads, value, rank): return None
    plain = FLOATS.get(keys.format.name) if keys.format == values.format else None
    return StoredTensor(hugging_face_name(f"{block}.attn_kv_b.weight"), plain or "float32",
                        (heads * (nope + value), rank), keys, values)


def elements(file: GGUFFile, tensor: StoredTensor, begin: int, end: int) -> np.ndarray:
    """Elements [begin, end) of plain floats, in the order and with the offset that Hugging Face has."""
    source = tensor.source
    if tensor.values is not None: return _keys_and_values(file, tensor, tensor.values, begin, end)
    heads = heads_to_reorder(file).get(tensor.name.rpartition(".")[0].rpartition(".")[2])
    columns = tensor.shape[-1] if len(tensor.shape) > 1 else 1
    first, last = begin // columns, -(-end // columns)
    raw = file.bytes_of(source)
    if len(tensor.shape) == 1: raw = raw.reshape(tensor.shape[0], -1)
    rows = raw[first:last] if heads is None else raw[row_order(len(raw), heads)[first:last]]
    numbers = _numbers(tensor, source, rows)
    if offset := _offset(architecture_of(file), source): numbers = numbers - np.float32(offset)
    return numbers.reshape(-1)[begin - first * columns:end - first * columns]


def _numbers(tensor: StoredTensor, source: GGUFTensor, rows: np.ndarray) -> np.ndarray:
    return (blocks.values if tensor.dtype == "float32" else blocks.floats)(source.format, rows)


def _keys_and_values(file: GGUFFile, tensor: StoredTensor, values: GGUFTensor, begin: int,
                     end: int) -> np.ndarray:
    """Reads keys or values of the matrix of both: whole heads are read."""
    keys, each = tensor.source, tensor.shape[0] // values.shape[0] * tensor.shape[1]
    first, last = begin // each, -(-end // each)

    def some(source: GGUFTensor) -> np.ndarray:
        rows = source.shape[1]
        raw = file.bytes_of(source)[first * rows:last * rows]
        return _numbers(tensor, source, raw).reshape(last - first, *source.shape[1:])
    both = np.concatenate([some(keys).swapaxes(1, 2), some(values)], axis=1)
    return both.reshape(-1)[begin - first * each:end - first * each]


def types(file: GGUFFile) -> dict[str, int]:
    """ggml's number of the type of each matrix of blocks."""
    numbers = {format.name: number for number, format in blocks.FORMATS.items()}
    return {each.name: numbers[each.source.format.name] for each in list_tensors(file) if each.dtype == "U8"}


def _heads(file: GGUFFile) -> tuple[int, int]:
    """Returns the numbers of heads of queries, and of keys and values. Raises `ModelError`."""
    kind = file.metadata["general.architecture"]
    found = file.metadata.get(f"{kind}.attention.head_count")
    shared = file.metadata.get(f"{kind}.attention.head_count_kv", found)
    counts = [each[0] if isinstance(each, list) and each else each for each in (found, shared)]
    heads, keys = (each if isinstance(each, int) else 0 for each in counts)
    if heads > 0 and keys > 0: return heads, keys
    raise ModelError(f"{file.path}: attention.head_count is {brief(found)}, and attention.head_count_kv "
                     f"{brief(shared)}", "numbers of heads", AGAIN)


def heads_to_reorder(file: GGUFFile) -> dict[str, int]:
    """Heads of the projections whose rows llama.cpp ordered. Raises `ModelError`."""
    if not architecture_of(file).permuted: return {}
    return dict(zip(("q_proj", "k_proj"), _heads(file), strict=True))


def _offset(architecture: Architecture, source: GGUFTensor) -> float:
    """Returns the number that llama.cpp added."""
    return architecture.norm_offset if source.name.endswith("norm.weight") else 0.0
