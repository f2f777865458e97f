"""Which layer made a NaN: the forward pass again, layer by layer.

Protocol: `first_bad(model, inputs, documents)` computes the batch that is in `inputs` with what a step
computes, realizes each layer's output, and names the first that has a NaN or an infinity; and the first
parameter of it that has one, where the weights are the cause.
"""
from __future__ import annotations

from tinygrad import Tensor
from tinygrad.helpers import Context

from tinygrad_nv.models.dense import DenseBatch, Documents
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.weights import slots
from tinygrad_nv.train.objectives import Inputs

LOSS = "the loss"


def first_bad(model: Llama, inputs: Inputs, documents: bool) -> str:
    """The layer in words."""
    with Context(TRAINING=1): return _first_bad(model, inputs, documents)


def _first_bad(model: Llama, inputs: Inputs, documents: bool) -> str:
    found = Documents(inputs.positions, inputs.segments) if documents else None
    batch = DenseBatch(0, model.rope_tables, None, found)
    x = model.embedded(inputs.tokens).realize()
    if not finite(x): return _told(model, "model.embed_tokens")
    for i, block in enumerate(model.blocks):
        x = block(x, batch, None).realize()
        if not finite(x): return _told(model, f"model.layers.{i}")
    x = model.ended(x).realize()
    if not finite(x): return _told(model, "model.norm")
    return _told(model, "lm_head") if not finite(model.logits(x)) else LOSS


def finite(x: Tensor) -> bool:
    """Whether all elements are."""
    return bool(x.isfinite().all().item())


def _told(model: Llama, layer: str) -> str:
    for name, slot in slots(model).items():
        if name.startswith(layer + ".") and not finite(slot.tensor): return f"{layer}, whose {name} has one"
    return layer
