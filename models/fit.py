"""Sizes that config.json says, against shapes in headers: before its word takes memory, or makes layers.

Protocol: `require_sizes(module, entries, directory)` compares headers alone. A `Module` has tensors, of each
axis an `Extent`: the fields that say it, and how large they make it; and stacks of modules that have numbers.
`decoder_sizes(config)` is that of decoders; encoder_weights.py, whisper/ and qwen_vl/ have their own. What is
not listed, `weights.check` compares when the network is there.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tinygrad_nv.errors import WeightError, shorten

from .checkpoint import FLOAT_BYTES, TensorEntry
from .config import ModelConfig

Extent = tuple[str, int]
Shapes = dict[str, tuple[Extent, ...]]
Entries = Mapping[str, TensorEntry]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
MOST_DIGITS = 7     # of a layer's number, or an expert's
MOST_LINES = 8
EXPERTS = "num_experts (num_local_experts, n_routed_experts)"
WIDTH = "moe_intermediate_size (intermediate_size)"


@dataclass(frozen=True)
class Module:
    """Tensors and stacks by their names inside a module."""
    tensors: Shapes
    stacks: tuple[Stack, ...] = ()


@dataclass(frozen=True)
class Stack:
    """Modules of names `prefix`, a number, a dot: as many as `name` of config.json says, `count`, and up to
    `more` that are not looked at. There need be none where one of the tensors `instead` holds all."""
    prefix: str
    name: str
    count: int
    module: Callable[[int], Module]
    more: int = 0
    instead: tuple[str, ...] = ()


def require_sizes(module: Module, entries: Entries, directory: Path) -> None:
    """Raises `WeightError` that names fields and tensors which do not fit."""
    if not (lines := list(_differences(module, entries))): return
    more = [f"  and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
    said = "metadata" if directory.is_file() else "config.json"
    raise WeightError("\n".join([f"the weights in {directory} do not fit the model of its {said}",
                                 *lines[:MOST_LINES], *more]),
                      f"sizes in {said} that are those of the tensors",
                      f"use the {said} that belongs to these weights, or download the model again")


def _differences(module: Module, entries: Entries) -> Iterator[str]:
    """A line for each."""
    for name, entry in entries.items():
        # of quantised tensors readers know the shape
        if (extents := module.tensors.get(name)) is None or entry.dtype not in FLOAT_BYTES: continue
        expected = tuple(size for _, size in extents)
        if expected == entry.shape: continue
        fields = ", ".join(dict.fromkeys(
            f"{what} is {size}" for (what, size), found in zip(extents, entry.shape, strict=False)
            if size != found))
        yield (f"  wrong shape: {shorten(entry.name)}: {list(entry.shape)}, expected {list(expected)}"
               f"{fields and ', as ' + fields}")
    for stack in module.stacks: yield from _in_stack(stack, entries)


def _in_stack(stack: Stack, entries: Entries) -> Iterator[str]:
    found: dict[int, dict[str, TensorEntry]] = {}
    for name, entry in entries.items():
        if not name.startswith(stack.prefix): continue
        digits, _, rest = name[len(stack.prefix):].partition(".")
        if digits.isascii() and digits.isdecimal() and len(digits) <= MOST_DIGITS:
            found.setdefault(int(digits), {})[rest] = entry
    own = sum(number < stack.count for number in found)
    if (own or entries.keys().isdisjoint(stack.instead)) and \
            (own < stack.count or max(found, default=0) >= stack.count + stack.more):
        yield f"  {stack.name} is {stack.count}, and the tensors {stack.prefix}… are those of {len(found)}"
    for number, inside in found.items():
        if number < stack.count: yield from _differences(stack.module(number), inside)


def decoder_sizes(c: ModelConfig) -> Module:
    """The sizes of a decoder."""
    hidden, names = ("hidden_size", c.hidden_size), c.names
    tensors: Shapes = {EMBEDDING: (("vocab_size", c.vocab_size), hidden),
                       f"{names.last_norm}.weight": (hidden,)}
    if not c.tied: tensors[HEAD] = tensors[EMBEDDING]

    def layer(number: int) -> Module:
        own: Shapes = {f"{name}.weight": (hidden,) for name in c.norm_names(number)}
        if c.has_mixer(number):
            if c.has_attention(number): own |= _attention(c, hidden)
            if (mixer := c.mixer(number)) is not None: own |= mixer.sizes(c.hidden_size)
        if not c.has_feed_forward(number): return Module(own)
        if c.moe is not None and c.moe.layers[number]: return _mixture(c, own, hidden)
        return Module({**own, **_dense(c, hidden)})
    return Module(tensors, (Stack("model.layers.", "num_hidden_layers", c.num_layers, layer,
                                  c.draft_layers),))


def _attention(c: ModelConfig, hidden: Extent) -> Shapes:
    names = c.names
    if (latent := c.latent) is not None:
        query = "num_attention_heads × (qk_nope_head_dim + qk_rope_head_dim)", c.num_heads * latent.head
        both = "num_attention_heads × (qk_nope_head_dim + v_head_dim)", \
            c.num_heads * (latent.nope + latent.value)
        rank, q_rank = ("kv_lora_rank", latent.rank), ("q_lora_rank", latent.q_rank)
        made: Shapes = {"self_attn.kv_b_proj.weight": (both, rank), f"{names.output}.weight": (
            hidden, ("num_attention_heads × v_head_dim", c.num_heads * latent.value)),
            "self_attn.kv_a_proj_with_mqa.weight": (("kv_lora_rank + qk_rope_head_dim", latent.width),
                                                    hidden)}
        if latent.gated:
            made["self_attn.g_proj.weight"] = ("num_attention_heads", c.num_heads), hidden
        if not latent.q_rank: return {**made, "self_attn.q_proj.weight": (query, hidden)}
        return {**made, "self_attn.q_a_proj.weight": (q_rank, hidden),
                "self_attn.q_b_proj.weight": (query, q_rank)}
    q = "num_attention_heads × head_dim", c.num_heads * c.head_dim
    given = (f"2 × {q[0]}", 2 * q[1]) if c.gated_attention is True else q
    kv = "num_key_value_heads × head_dim", c.num_kv_heads * c.head_dim
    rows = (given, kv, kv, ("num_attention_heads", c.num_heads))[:len(names.qkv)] if len(names.qkv) > 1 else \
        (("(num_attention_heads + 2 × num_key_value_heads) × head_dim", q[1] + 2 * kv[1]),)
    return {f"{names.output}.weight": (hidden, q),
            **{f"{name}.weight": (each, hidden) for name, each in zip(names.qkv, rows, strict=True)}}


def _dense(c: ModelConfig, hidden: Extent) -> Shapes:
    names, width = c.names, ("intermediate_size", c.intermediate_size)
    fused = len(names.gate_up) == 1 and c.mlp_gated
    rows = ("2 × intermediate_size", 2 * c.intermediate_size) if fused else width
    return {f"{names.down}.weight": (hidden, width),
            **{f"{name}.weight": (rows, hidden) for name in names.gate_up}}


def _mixture(c: ModelConfig, attention: Shapes, hidden: Extent) -> Module:
    """A layer with a mixture of experts."""
    if (moe := c.moe) is None: return Module(attention)
    count, width, prefix = (EXPERTS, moe.experts), (WIDTH, moe.width), c.names.expert.removesuffix("{}")
    *inner, down = c.names.expert_matrices
    inputs = ("moe_latent_size", moe.latent) if moe.latent else hidden
    fused: Shapes = dict(zip(c.names.fused_tensors, (
        (count, hidden, (f"2 × {WIDTH}", 2 * moe.width)), (count, width, hidden)), strict=True))
    if c.names.fused == "rows": fused = {name: (e, wide, tall) for name, (e, tall, wide) in fused.items()}
    if not c.names.fused: fused = {}
    expert = Module({**{f"{name}.weight": (width, inputs) for name in inner},
                     f"{down}.weight": (inputs, width)})
    return Module({**attention, **fused, f"{c.names.router}.weight": (count, hidden)},
                  (Stack(prefix, EXPERTS, moe.experts, lambda number: expert, instead=tuple(fused)),))
