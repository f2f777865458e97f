"""Search of the layer that made a NaN: the forward pass again, layer by layer.

Protocol: `first_bad(model, inputs, documents)` computes the batch that is in `inputs` with what a step
computes, realizes each layer's output, scans it as sentinels do (numerics/verify/scan.py), and names the
first that has a NaN or an infinity; and the first parameter of it that has one, where the weights are the
cause.
"""
from __future__ import annotations

from tinygrad import Tensor
from tinygrad.helpers import Context

from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.weights import slots
from tinygrad_nv.numerics.verify.scan import finite
from tinygrad_nv.train.objectives import Inputs

LOSS = "the loss"


def first_bad(model: Llama, inputs: Inputs, documents: bool) -> str:
    """The layer in words."""
    with Context(TRAINING=1): return first_bad_layer(model, inputs, documents)[0]


def first_bad_layer(model: Llama, inputs: Inputs, documents: bool, x: Tensor | None = None
                    ) -> tuple[str, Tensor]:
    """The layer in words, and what the last one makes of the batch; of a stage of a pipeline the first of
    its own, which gets the hidden states x."""
    batch, stage, bad = inputs.of(model, documents), model.parallel, list[str]()
    first, ends = (0, True) if stage is None else (stage.layers.start, stage.last)

    def see(made: Tensor, layer: str, own: str = "") -> Tensor:
        made = made.realize()
        if not bad and not finite(made): bad.append(_describe(model, layer, own or layer))
        return made
    if x is None: x = see(model.embed(inputs.tokens), "model.embed_tokens")
    for i, block in enumerate(model.blocks):
        x = see(block(x, batch, None), f"model.layers.{first + i}", f"model.layers.{i}")
    if ends: see(model.logits(see(model.normalise_last(x), "model.norm")), "lm_head")
    return (bad or [LOSS])[0], x


def _describe(model: Llama, layer: str, own: str) -> str:
    """A layer, which is `own` in this network."""
    for name, slot in slots(model).items():
        if name.startswith(own + ".") and not finite(slot.tensor):
            return f"{layer}, whose {layer}{name.removeprefix(own)} has one"
    return layer
