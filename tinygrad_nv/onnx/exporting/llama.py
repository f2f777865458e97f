"""Decoders of the LLaMA family as ONNX models with their keys and values.

Protocol. The model takes `input_ids` int64 [batch, sequence], and of each layer i `past_key_values.i.key`
and `.value` [batch, kv heads, past, head size]; all extents but heads and sizes are free, and past may be 0.
It gives `logits` float32 [batch, sequence, vocabulary], and `present.i.key` and `.value` [batch, kv heads,
past + sequence, head size], rotated, to be the next call's past. Positions continue those of the past, and a
token sees what is at or before its own: there is no padding. The names are those of Hugging Face's exports.

The arithmetic is that of models/llama.py: norms, rotation tables and softmax in float32. Written in opset 21
without fused operators; runtimes, this package's too, find attention by its shape.
"""
from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from onnx import TensorProto, ValueInfoProto, helper
from tinygrad import Tensor, dtypes

from tinygrad_nv.errors import OnnxError
from tinygrad_nv.models import weights
from tinygrad_nv.models.attention import Attention
from tinygrad_nv.models.config import ModelConfig, read_config
from tinygrad_nv.models.feed_forward import FeedForward
from tinygrad_nv.models.layers import Linear, RMSNorm
from tinygrad_nv.models.llama import Block, Llama
from tinygrad_nv.onnx.exporting.builder import Builder, save, type_of
from tinygrad_nv.onnx.exporting.function import LEAST, check_opset

DTYPES = {"float32": dtypes.float32, "float16": dtypes.float16}


def export_model(directory: str | Path, path: str | Path, opset: int = LEAST, dtype: str = "float32",
                 external_data: bool | None = None) -> Path:
    """Writes the decoder in a model directory as `path`; its weights beside it in `path`.data where
    `external_data` says so, by default where they exceed 2 GiB.

    Raises `ModelError` for what is no model, `OnnxError` for one with what is not written: mixtures of
    experts, latent attention, quantised weights, attention sinks."""
    check_opset(opset)
    if dtype not in DTYPES: raise OnnxError(f"dtype {dtype!r}", " or ".join(DTYPES), "change --dtype")
    config = read_config(Path(directory))
    require_written(config)
    model = Llama(config, DTYPES[dtype])
    weights.load(model, Path(directory))
    inputs, outputs, builder = _Decoder(model).write()
    save(builder, config.architecture, inputs, outputs, Path(path), opset, external_data,
         {"architecture": config.architecture, "max_positions": str(config.max_positions)})
    return Path(path)


def require_written(c: ModelConfig) -> None:
    """Raises `OnnxError` for a config with what is not written here."""
    lacks = {"a mixture of experts": c.moe is not None, "latent attention": c.latent is not None,
             "quantised weights": c.quantization is not None, "attention sinks": c.sinks,
             "layers that keep states": c.has_states or bool(c.halves), "gated attention": c.gated_attention,
             "chunked attention": c.chunked, "a temperature by position": c.temperature is not None,
             "rotation of adjacent elements": c.rope_interleaved,
             "attention in both directions": not c.causal,
             "norms of all heads together": c.qk_norm in ("all", "unit"),
             f"the activation {c.activation}": c.activation not in ("silu", "gelu", "gelu_tanh")}
    for what, has in lacks.items():
        if has:
            raise OnnxError(f"a {c.architecture} with {what}", "a dense decoder with grouped-query attention",
                            "export its parts as functions: tinygrad_nv.onnx.export")


class _Decoder:
    """The graph of a decoder while it is written. A value is its name."""

    def __init__(self, model: Llama) -> None:
        self.model, self.c, self.b = model, model.config, Builder()
        self.kind = type_of(model.dtype)

    def write(self) -> tuple[list[ValueInfoProto], list[ValueInfoProto], Builder]:
        """Inputs, outputs and nodes."""
        c, b = self.c, self.b
        kv, longer = (["batch", c.num_kv_heads, extent, c.head_dim] for extent in ("past", "total"))
        inputs = [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"])]
        outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT,
                                                 ["batch", "sequence", c.vocab_size])]
        self.first = self.extent("past_key_values.0.key", 2)
        self.sequence = self.extent("input_ids", 1)
        self.total = b.node("Add", self.first, self.sequence)
        one, zero = (b.constant(np.array(n, dtype=np.int64), "number") for n in (1, 0))
        self.rows = b.node("Range", *map(self.scalar, (self.first, self.total)), one)
        self.columns = b.node("Range", zero, self.scalar(self.total), one)
        self.tables = [tuple(self.weight(f"rope.{i}.{name}", table) for name, table in
                             zip(("cos", "sin"), pair, strict=True))
                       for i, pair in enumerate(self.model.rope_tables)]
        x = b.node("Gather", self.weight("embed_tokens", self.model.embedding), "input_ids", axis=0)
        if c.embedding_scale != 1: x = b.node("Mul", x, self.number(c.embedding_scale))
        for i, block in enumerate(self.model.blocks):
            x = self.block(x, block, i)
            inputs += [helper.make_tensor_value_info(f"past_key_values.{i}.{name}", self.kind, kv)
                       for name in ("key", "value")]
            outputs += [helper.make_tensor_value_info(f"present.{i}.{name}", self.kind, longer)
                        for name in ("key", "value")]
        self.head(self.norm(x, self.model.norm, "norm"))
        return inputs, outputs, b

    # **** small values ****

    def weight(self, name: str, tensor: Tensor) -> str: return self.b.weight(name, tensor.numpy())

    def number(self, value: float) -> str:
        kind = {dtypes.float32: np.float32, dtypes.float16: np.float16}[self.model.dtype]
        return self.b.constant(np.array(value, dtype=kind), "number")

    def float32(self, value: float) -> str:
        return self.b.constant(np.array(value, dtype=np.float32), "number")

    def extent(self, name: str, axis: int) -> str:
        """An extent as a row of one integer."""
        return self.b.node("Shape", name, start=axis, end=axis + 1)

    def scalar(self, name: str) -> str: return self.b.node("Squeeze", name, self.b.integers(0))

    def cast(self, name: str, kind: int) -> str:
        """A value of the model's dtype in float32, or the other way."""
        return name if self.kind == TensorProto.FLOAT else self.b.node("Cast", name, to=kind)

    # **** layers ****

    def linear(self, x: str, layer: Linear, name: str) -> str:
        made = self.b.node("MatMul", x, self.b.weight(f"{name}.weight", layer.weight.numpy().T))
        if layer.bias is None: return made
        return self.b.node("Add", made, self.weight(f"{name}.bias", layer.bias))

    def norm(self, x: str, norm: RMSNorm, name: str) -> str:
        """x / rms(x) · (w + offset), the statistics in float32."""
        b, kind = self.b, self.kind
        f = self.cast(x, TensorProto.FLOAT)
        squares = b.node("ReduceMean", b.node("Mul", f, f), b.integers(-1), keepdims=1)
        made = b.node("Div", f, b.node("Sqrt", b.node("Add", squares, self.float32(norm.eps))))
        weight = norm.weight.numpy().astype(np.float32 if norm.rounds_last else norm.weight.numpy().dtype)
        by = b.weight(f"{name}.weight", weight + weight.dtype.type(norm.offset))
        if norm.rounds_last: return self.cast(b.node("Mul", made, by), kind)
        return b.node("Mul", self.cast(made, kind), by)

    def block(self, x: str, block: Block, i: int) -> str:
        """x + attention(norm(x)), then x + feed_forward(norm(x))."""
        assert isinstance(block.attention, Attention)
        assert isinstance(block.feed_forward, FeedForward)
        name = f"layers.{i}"
        h = self.maybe(x, block.attention_norm, f"{name}.attention_norm")
        made = self.attention(h, block.attention, i)
        x = self.add_residual(x, self.maybe(made, block.attention_post_norm, f"{name}.attention_post_norm"))
        h = self.maybe(x, block.feed_forward_norm, f"{name}.feed_forward_norm")
        made = self.feed_forward(h, block.feed_forward, name)
        return self.add_residual(x, self.maybe(made, block.feed_forward_post_norm,
                                               f"{name}.feed_forward_post_norm"))

    def maybe(self, x: str, norm: RMSNorm | None, name: str) -> str:
        return x if norm is None else self.norm(x, norm, name)

    def add_residual(self, x: str, made: str) -> str:
        if self.c.residual_scale != 1: made = self.b.node("Mul", made, self.number(self.c.residual_scale))
        return self.b.node("Add", x, made)

    def feed_forward(self, x: str, layer: FeedForward, name: str) -> str:
        """down(act(gate) · up)."""
        b, gate, up = self.b, f"{name}.gate", f"{name}.up"
        both = self.linear(x, layer.gate_up, f"{name}.gate_up")
        b.node("Split", both, outputs=[gate, up], axis=-1, num_outputs=2)
        if layer.activation == "silu": active = b.node("Mul", gate, b.node("Sigmoid", gate))
        else: active = b.node("Gelu", gate, approximate="tanh" if layer.activation == "gelu_tanh" else "none")
        return self.linear(b.node("Mul", active, up), layer.down, f"{name}.down")

    # **** attention ****

    def attention(self, x: str, layer: Attention, i: int) -> str:
        """Grouped-query attention over the past and x."""
        b, c, name = self.b, self.c, f"layers.{i}"
        both = self.linear(x, layer.qkv, f"{name}.qkv")
        sizes = b.integers(c.num_heads * c.head_dim, *[c.num_kv_heads * c.head_dim] * 2)
        parts = [f"{name}.{part}" for part in "qkv"]
        b.node("Split", both, sizes, outputs=parts, axis=-1)
        q, k, v = (b.node("Reshape", part, b.integers(0, 0, n, c.head_dim))
                   for part, n in zip(parts, (c.num_heads, *[c.num_kv_heads] * 2), strict=True))
        q, k = self.maybe(q, layer.q_norm, f"{name}.q_norm"), self.maybe(k, layer.k_norm, f"{name}.k_norm")
        q, k, v = (b.node("Transpose", each, perm=[0, 2, 1, 3]) for each in (q, k, v))
        if layer.rope is not None: q, k = (self.rotate(each, layer.rope) for each in (q, k))
        k, v = (b.node("Concat", f"past_key_values.{i}.{part}", each, outputs=[f"present.{i}.{part}"], axis=2)
                for part, each in (("key", k), ("value", v)))
        out = self.attend(q, k, v, layer)
        flat = b.node("Reshape", b.node("Transpose", out, perm=[0, 2, 1, 3]),
                      b.integers(0, 0, c.num_heads * c.head_dim))
        return self.linear(flat, layer.output, f"{name}.output")

    def rotate(self, x: str, rope: int) -> str:
        """The first dimensions of each head, those in halves rotated by a token's position."""
        b = self.b
        cos, sin = (b.node("Gather", table, self.rows, axis=0) for table in self.tables[rope])
        half = int(self.model.rope_tables[rope][0].shape[-1])
        sizes = [half, half, *([self.c.head_dim - 2 * half] if self.c.head_dim > 2 * half else [])]
        names = [b.fresh("half") for _ in sizes]
        b.node("Split", x, b.integers(*sizes), outputs=names, axis=-1)
        first, second, *rest = names
        a = b.node("Sub", b.node("Mul", first, cos), b.node("Mul", second, sin))
        c = b.node("Add", b.node("Mul", second, cos), b.node("Mul", first, sin))
        return b.node("Concat", a, c, *rest, axis=-1)

    def attend(self, q: str, k: str, v: str, layer: Attention) -> str:
        """softmax(scale · q kᵀ + mask) v, the softmax in float32."""
        b, c = self.b, self.c
        k, v = (self.repeat_heads(each) for each in (k, v))
        scores = self.cast(b.node("MatMul", q, b.node("Transpose", k, perm=[0, 1, 3, 2])), TensorProto.FLOAT)
        scores = b.node("Mul", scores, self.float32(layer.scale))
        if c.softcap is not None: scores = self.cap_scores(scores, c.softcap)
        probabilities = b.node("Softmax", b.node("Add", scores, self.mask(layer.window)), axis=-1)
        return b.node("MatMul", self.cast(probabilities, self.kind), v)

    def repeat_heads(self, x: str) -> str:
        """Keys or values for each head of queries."""
        b, c = self.b, self.c
        times = c.num_heads // c.num_kv_heads
        if times == 1: return x
        batch = self.extent("input_ids", 0)
        wide, flat = (b.node("Concat", batch, b.integers(*heads), self.total, b.integers(c.head_dim), axis=0)
                      for heads in ((c.num_kv_heads, times), (c.num_heads,)))
        return b.node("Reshape", b.node("Expand", b.node("Unsqueeze", x, b.integers(2)), wide), flat)

    def mask(self, window: int | None) -> str:
        """0 where a token sees another and -inf elsewhere: [sequence, total]."""
        b, rows = self.b, self.b.node("Unsqueeze", self.rows, self.b.integers(1))
        seen = b.node("LessOrEqual", self.columns, rows)
        if window is not None:
            first = b.node("Sub", rows, b.integers(window))
            seen = b.node("And", seen, b.node("Greater", self.columns, first))
        return b.node("Where", seen, self.float32(0.0), self.float32(-math.inf))

    def cap_scores(self, x: str, cap: float) -> str:
        by = self.float32(cap)
        return self.b.node("Mul", self.b.node("Tanh", self.b.node("Div", x, by)), by)

    def head(self, x: str) -> None:
        """Logits in float32."""
        b, c = self.b, self.c
        made = b.node("MatMul", x, b.weight("lm_head", self.model.head.numpy().T))
        made = self.cast(made, TensorProto.FLOAT)
        if c.logit_divisor != 1: made = b.node("Div", made, self.float32(c.logit_divisor))
        if c.logit_softcap is not None: made = self.cap_scores(made, c.logit_softcap)
        b.node("Identity", made, outputs=["logits"])
