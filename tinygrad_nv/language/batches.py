"""Kernels under `vmap`: one kernel over all examples, n times as many programs (tile/language/batching.py).

Protocol. Arguments that are the same for all examples stay as they are. The gradient is that of one example,
batched. A kernel that writes into a donated Tensor is refused: each example would write into the same.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tinygrad import Tensor
from tinygrad.uop.ops import UOp

from tinygrad_nv.errors import TransformError
from tinygrad_nv.language.kernels import Call, body
from tinygrad_nv.patterns import named
from tinygrad_nv.tile.language.batching import batch_program
from tinygrad_nv.transforms.batching.functions import gradient_of
from tinygrad_nv.transforms.batching.graph import repeat_node
from tinygrad_nv.transforms.batching.named import add_rule


def _over_examples(node: UOp, arguments: Sequence[UOp | None], n: int) -> list[UOp]:
    """The results [n, …] of a call."""
    call: Call = node.arg.aux
    if call.donated:
        written = ", ".join(sorted(call.donated))
        raise TransformError(f"vmap of kernel {call.label}, which writes into {written}",
                             "a kernel with results of its own", "leave donate() out")
    inputs = [each.name for each in call.program.tensors if not each.output]
    names = [name for name, new in zip(inputs, arguments, strict=False) if new is not None]
    program = batch_program(call.program, n, names)
    given = [new if new is not None else old if i < len(inputs) else repeat_node(old, n)
             for i, (old, new) in enumerate(zip(node.src[1:], arguments, strict=True))]
    own = [new is not None or i >= len(inputs) for i, new in enumerate(arguments)]
    back = None if node.arg.grad_fxn is None else gradient_of(node, own, n)
    made = named.call(replace(call, key=program.key, program=program), body, *map(Tensor, given), grad=back)
    return [each.uop for each in made]


add_rule(Call, _over_examples)
