"""The LLaMA family in NumPy, layer by layer: what calibration and evaluation run.

Protocol: `Source(directory)` reads one layer at a time, quantised or not: `source.block(i)` is a `Block` of
float32 matrices, and `block(x, lengths, see)` gives its output. x is [T, hidden]: the tokens of several
sequences of `lengths`, one after the other, so that a matmul has many rows and nothing is padded.
`see(name, x)` is called with the inputs of every linear layer, by its name in the block ("mlp.down_proj").
Numerics are those of models/llama.py in float32, inputs of quantised layers rounded as the checkpoint says.
Only one block's weights are in memory.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tinygrad_nv.errors import ModelError, WeightError
from tinygrad_nv.models.checkpoint import (
    TensorEntry,
    open_checkpoint,
    read_array,
    safetensors_dtype,
)
from tinygrad_nv.models.config import ModelConfig
from tinygrad_nv.models.layer_config import LLAMA_NAMES
from tinygrad_nv.models.multimodal import language_entries
from tinygrad_nv.models.rope import tables
from tinygrad_nv.models.tied import load_config
from tinygrad_nv.quant.activations import E4M3_MAX
from tinygrad_nv.quant.floats import as_float32, from_e4m3, to_e4m3
from tinygrad_nv.quant.readers.reader import Activations, reader_of
from tinygrad_nv.quant.tensor import QTensor

Q, K, V, O = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
GATE, UP, DOWN = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
LINEARS = (Q, K, V, O, GATE, UP, DOWN)
BATCH = 4096                    # tokens that are in a layer's matmuls at a time
See = Callable[[str, np.ndarray], None]


@dataclass(frozen=True)
class Linear:
    """y = x Wᵀ + b, x rounded as `activations` say."""
    weight: np.ndarray
    bias: np.ndarray | None = None
    activations: Activations | None = None
    input_scale: float | None = None

    def __call__(self, x: np.ndarray) -> np.ndarray:
        if self.activations is not None: x = round_inputs(x, self.activations, self.input_scale)
        y: np.ndarray = x @ self.weight.T
        return y if self.bias is None else y + self.bias


def round_inputs(x: np.ndarray, how: Activations, scale: float | None) -> np.ndarray:
    """x [T, K] rounded to elements of `how` (quant/activations.py)."""
    blocks = x.reshape(len(x), -1, how.scale.columns or x.shape[1])
    most = np.float32(127.5 if how.element == "int8" else E4M3_MAX)
    if scale is not None: s = np.float32(scale)
    else: s = np.abs(blocks).max(-1 if how.scale.rows else None, keepdims=True) / most
    s = np.maximum(s, np.float32(2.0 ** -100))
    q = blocks / s
    made = np.clip(np.rint(q), -128, 127) if how.element == "int8" else from_e4m3(to_e4m3(q))
    return (made * s).reshape(x.shape)


@dataclass(frozen=True)
class Block:
    """A layer. `norms` are by their names, with those of queries and keys; `rope` are cosines and sines, None
    where nothing is rotated."""
    config: ModelConfig
    window: int | None
    linears: Mapping[str, Linear]
    norms: Mapping[str, np.ndarray]
    rope: tuple[np.ndarray, np.ndarray] | None

    def __call__(self, x: np.ndarray, lengths: Sequence[int], see: See | None = None) -> np.ndarray:
        """The layer's output [T, hidden]."""
        def linear(name: str, x: np.ndarray) -> np.ndarray:
            if see is not None: see(name, x)
            return self.linears[name](x)
        c, names, scale = self.config, self.config.names, np.float32(self.config.residual_scale)
        h = self.norm(names.attention_norm, x)
        q, k, v = (linear(name, h) for name in (Q, K, V))
        if c.qk_norm == "all": q, k = self.norm(names.q_norm, q), self.norm(names.k_norm, k)
        q, k, v = (each.reshape(len(x), -1, c.head_dim) for each in (q, k, v))
        if c.qk_norm == "head": q, k = self.norm(names.q_norm, q), self.norm(names.k_norm, k)
        made = linear(O, self.attention(q, k, v, lengths))
        x = x + self.norm(names.attention_post_norm, made) * scale
        h = self.norm(names.feed_forward_norm, x)
        gate = activate(c.activation, linear(GATE, h))
        gate *= linear(UP, h)
        return x + self.norm(names.feed_forward_post_norm, linear(DOWN, gate)) * scale

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        """RMSNorm; x where a family has none, whose name is ""."""
        return normalise(x, self.norms[name], self.config) if name else x

    def attention(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
        """softmax(scale · q kᵀ) v of each sequence, [T, H · D]."""
        c, begin, out = self.config, 0, np.empty_like(q)
        scale = np.float32(c.head_dim ** -0.5 if c.attention_scale is None else c.attention_scale)
        for length in lengths:
            end = begin + length
            a, b = q[begin:end], k[begin:end]
            if self.rope is not None:
                cos, sin = (table[:length, None] for table in self.rope)
                a, b = _rotate(a, cos, sin), _rotate(b, cos, sin)
            a = a * scale
            # [H_kv, queries of a group, T, D]
            queries = a.reshape(length, c.num_kv_heads, -1, c.head_dim).transpose(1, 2, 0, 3)
            scores = queries @ b.transpose(1, 2, 0)[:, None]
            if c.softcap is not None: scores = np.tanh(scores / np.float32(c.softcap)) * np.float32(c.softcap)
            scores[..., ~_causal_mask(length, self.window)] = -np.inf
            weights = softmax(scores)
            made = weights @ v[begin:end].transpose(1, 0, 2)[:, None]
            out[begin:end] = made.transpose(2, 0, 1, 3).reshape(length, c.num_heads, c.head_dim)
            begin = end
        return out.reshape(len(q), -1)


def _causal_mask(length: int, window: int | None) -> np.ndarray:
    """True where token i attends to j."""
    rows, columns = np.arange(length)[:, None], np.arange(length)
    seen: np.ndarray = columns <= rows
    return seen if window is None else seen & (columns > rows - window)


def _rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    half = cos.shape[-1]
    a, b = x[..., :half], x[..., half:2 * half]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half:]], -1)


def softmax(x: np.ndarray) -> np.ndarray:
    """Over the last dimension, in place."""
    x -= x.max(-1, keepdims=True)
    np.exp(x, out=x)
    x /= x.sum(-1, keepdims=True)
    return x


def normalise(x: np.ndarray, weight: np.ndarray, config: ModelConfig) -> np.ndarray:
    """RMSNorm over the last dimension."""
    mean = np.square(x).mean(-1, keepdims=True) + np.float32(config.norm_eps)
    made: np.ndarray = x / np.sqrt(mean) * (weight + np.float32(config.norm_offset))
    return made


ACTIVATIONS = ("silu", "gelu", "gelu_tanh")       # what `activate` computes


def activate(name: str, x: np.ndarray) -> np.ndarray:
    """The gate's activation, one of ACTIVATIONS."""
    if name == "silu": return x / (1 + np.exp(-np.maximum(x, -80)))
    if name == "gelu_tanh": return x * 0.5 * (1 + np.tanh(np.float32(0.7978845608) * (x + 0.044715 * x ** 3)))
    assert name == "gelu"
    return x * 0.5 * (1 + _erf(x * np.float32(0.5 ** 0.5)))


def _erf(x: np.ndarray) -> np.ndarray:
    """Abramowitz and Stegun 7.1.26, off by at most 1.5e-7."""
    t = 1 / (1 + np.float32(0.3275911) * np.abs(x))
    series = np.zeros_like(x)
    for factor in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        series = (series + np.float32(factor)) * t
    return np.sign(x) * (1 - series * np.exp(-x * x))


def computes(config: ModelConfig) -> bool:
    """Whether `Block` is a layer of a model."""
    apart = (config.names.qkv, config.names.gate_up) == (LLAMA_NAMES.qkv, LLAMA_NAMES.gate_up)
    plain = apart and config.moe is None and not config.has_states
    return plain and config.activation in ACTIVATIONS


def require_computed(config: ModelConfig) -> None:
    """Raises `ModelError` for a model that `Block` is no layer of."""
    if not computes(config):
        raise ModelError(f"{config.architecture} is not calibrated or evaluated yet",
                         "a dense model whose projections are stored apart, with "
                         f"{' or '.join(ACTIVATIONS)}",
                         "use a scheme without calibration, and --no-report")


class Source:
    """A model directory, read layer by layer. Raises `ModelError` and `WeightError`."""

    def __init__(self, directory: Path, positions: int) -> None:
        self.config = load_config(directory)
        self.entries: dict[str, TensorEntry] = language_entries(open_checkpoint(directory).entries)
        require_computed(self.config)
        self.ropes = [None if rope is None else tables(rope, positions) for rope in self.config.ropes]
        given, file = self.config.quantization, str(directory / "config.json")
        if given is not None and given.get("quant_method") == "gguf":
            raise ModelError(f"{directory} is a GGUF file", "a directory of Hugging Face",
                             "name another model")
        self.reader = None if given is None else reader_of(given, file)
        self.rounds = given is not None and given["quant_method"] == "compressed-tensors"
        self.stored = {name: (safetensors_dtype(each), each.shape) for name, each in self.entries.items()}

    def array(self, name: str, optional: bool = False) -> np.ndarray | None:
        """A tensor of floats as float32; None where it is missing and may be."""
        if name not in self.entries:
            if optional: return None
            raise WeightError(f"{name} is missing", "every tensor of the architecture",
                              "use the config.json that belongs to these weights")
        return as_float32(read_array(self.entries[name]))

    def vector(self, name: str) -> np.ndarray:
        """One that must be there."""
        found = self.array(name)
        assert found is not None
        return found

    def block(self, index: int) -> Block:
        """Layer `index`."""
        c, layer = self.config, f"model.layers.{index}"
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        hidden, width = c.hidden_size, c.intermediate_size
        shapes = {Q: (q, hidden), K: (kv, hidden), V: (kv, hidden), O: (hidden, q),
                  GATE: (width, hidden), UP: (width, hidden), DOWN: (hidden, width)}
        names = [*c.names.norms, *([c.names.q_norm, c.names.k_norm] if c.qk_norm else [])]
        return Block(c, c.windows[index] if c.windows else None,
                     {name: self.linear(f"{layer}.{name}", shape) for name, shape in shapes.items()},
                     {name: self.vector(f"{layer}.{name}.weight") for name in names}, self.ropes[index])

    def linear(self, layer: str, shape: tuple[int, int]) -> Linear:
        """A linear layer, dequantised."""
        bias = self.array(f"{layer}.bias", optional=True)
        matrix = None if self.reader is None else self.reader.matrix(layer, shape, self.stored)
        if matrix is None:
            found = self.vector(f"{layer}.weight")
            if found.shape != shape:
                raise WeightError(f"{layer}.weight is {list(found.shape)}", str(list(shape)),
                                  "use the config.json that belongs to these weights")
            return Linear(found, bias)
        buffers = matrix.arrays(lambda name: read_array(self.entries[name]))
        weight = QTensor.of(matrix.type, shape, buffers, "CPU").dequantize().float().numpy()
        how, scale = matrix.activations if self.rounds else None, None
        if how is not None and how.static:
            name = next(each for each in matrix.tensors if each.endswith(".input_scale"))
            scale = float(self.vector(name).reshape(-1)[0])
        return Linear(weight, bias, how, scale)

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        """The first layer's input, [T, hidden]."""
        x: np.ndarray = self.vector("model.embed_tokens.weight")[tokens]
        return x * np.float32(self.config.embedding_scale)

    def head(self) -> Callable[[np.ndarray], np.ndarray]:
        """The last layer's outputs to logits."""
        c, norm = self.config, self.vector("model.norm.weight")
        linear = Linear(self.vector("model.embed_tokens.weight")) if c.tied else \
            self.linear("lm_head", (c.vocab_size, c.hidden_size))
        def logits(x: np.ndarray) -> np.ndarray:
            made = linear(normalise(x, norm, c)) / np.float32(c.logit_divisor)
            if c.logit_softcap is None: return made
            return np.tanh(made / np.float32(c.logit_softcap)) * np.float32(c.logit_softcap)
        return logits


def batches(lengths: Sequence[int]) -> Iterator[tuple[slice, list[int]]]:
    """Whole sequences of about `BATCH` tokens: their tokens, and their lengths."""
    begin, some = 0, list[int]()
    for length in lengths:
        if some and sum(some) + length > BATCH:
            yield slice(begin, begin + sum(some)), some
            begin, some = begin + sum(some), []
        some.append(length)
    if some: yield slice(begin, begin + sum(some)), some


def advance(block: Block, x: np.ndarray, lengths: Sequence[int]) -> None:
    """x through a block, in place."""
    for rows, some in batches(lengths): x[rows] = block(x[rows], some)
