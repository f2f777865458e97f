"""Tensors of a Qwen2.5-VL checkpoint that are the vision tower's, and where in it each is stored.

Protocol: as ../weights.py. Names begin with "visual.", or with "model.visual.".
"""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tinygrad_nv.runtime.memory import allocate_arena
from tinygrad_nv.runtime.memory_pool import label_allocations

from ..checkpoint import TensorEntry, open_checkpoint
from ..encoder_weights import whole
from ..fit import Module, Shapes, Stack, require_sizes
from ..layers import Linear, RMSNorm
from ..multimodal import VISUAL
from ..weights import WeightSlice, check, fill_slots, tensors_of
from .config import VisionConfig
from .tower import VisionTower


def slots(tower: VisionTower) -> dict[str, WeightSlice]:
    """Every tensor that the checkpoint must hold, by its name without the prefix."""
    c, out = tower.config, dict[str, WeightSlice]()

    def add(one: Linear | RMSNorm, *names: str) -> None:
        for kind, tensor in (("weight", one.weight), ("bias", getattr(one, "bias", None))):
            if tensor is None: continue
            rows, *rest = map(int, tensor.shape)
            count = rows // len(names)
            for at, name in enumerate(names):
                out[f"{name}.{kind}"] = WeightSlice(tensor, at * count, (count, *rest))
    # a convolution whose strides are its extents: a matmul of patches
    kernel = (c.hidden, c.channels, c.frames, c.patch, c.patch)
    out["patch_embed.proj.weight"] = WeightSlice(tower.patches.weight, 0, kernel)
    for i, block in enumerate(tower.blocks):
        add(block.attention_norm, f"blocks.{i}.norm1")
        add(block.feed_forward_norm, f"blocks.{i}.norm2")
        add(block.qkv, f"blocks.{i}.attn.qkv")
        add(block.output, f"blocks.{i}.attn.proj")
        add(block.gate_up, f"blocks.{i}.mlp.gate_proj", f"blocks.{i}.mlp.up_proj")
        add(block.down, f"blocks.{i}.mlp.down_proj")
    out["merger.ln_q.weight"] = whole(tower.norm.weight)
    add(tower.merge, "merger.mlp.0")
    add(tower.output, "merger.mlp.2")
    return out


def require_vision_sizes(c: VisionConfig, directory: Path) -> None:
    """Raises `WeightError` where headers have other sizes than config.json."""
    hidden, width = ("hidden_size", c.hidden), ("intermediate_size", c.intermediate)
    merged = "hidden_size × spatial_merge_size²", c.hidden * c.unit
    patch = ("patch_size", c.patch)
    layer = Module({"attn.proj.weight": (hidden, hidden), "mlp.down_proj.weight": (hidden, width)})
    tensors: Shapes = {
        "patch_embed.proj.weight": (hidden, ("in_channels", c.channels), ("temporal_patch_size", c.frames),
                                    patch, patch),
        "merger.mlp.0.weight": (merged, merged), "merger.mlp.2.weight": (("out_hidden_size", c.out), merged)}
    require_sizes(Module(tensors, (Stack("blocks.", "depth", c.layers, lambda number: layer),)),
                  _entries(open_checkpoint(directory).entries), directory)


def _entries(entries: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    return {name.removeprefix(prefix): entry for name, entry in entries.items()
            for prefix in VISUAL if name.startswith(prefix)}


def nbytes(tower: VisionTower) -> int:
    """Returns the bytes of all parameters."""
    return sum(int(each.nbytes()) for each in tensors_of(slots(tower).values()))


def load(tower: VisionTower, directory: Path, progress: Callable[[int, int], None] | None = None) -> int:
    """Fills every parameter of `tower` from `directory`; returns bytes read. Raises `WeightError`."""
    checkpoint, wanted = open_checkpoint(directory), slots(tower)
    checkpoint.entries = _entries(checkpoint.entries)
    check(wanted, checkpoint.entries, False, directory)
    with label_allocations("weights"):
        allocate_arena(tensors_of(wanted.values()))
    return fill_slots(checkpoint, wanted, progress)
