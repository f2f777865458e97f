"""Quantised experts of a checkpoint: which layers have them, and how their matrices become stacks.

Protocol: `planned(…)` asks the reader for the matrices of every expert of a layer, gate and up of each in
turn, and down, before a byte is read: all of them are quantised, to one type, or none. A stack's matrices are
read some at a time, while those before them are repacked into the stack (`fill`): about six times as many
bytes are in memory beside the stacks.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from tinygrad import Tensor, dtypes

from tinygrad_nv import functional as F
from tinygrad_nv.errors import WeightError
from tinygrad_nv.quant.activations import StackWeight
from tinygrad_nv.quant.floats import as_float32
from tinygrad_nv.quant.readers.checks import AGAIN
from tinygrad_nv.quant.readers.reader import GetPart, Reader, Stored, StoredMatrix
from tinygrad_nv.quant.stack import QStack, Shape
from tinygrad_nv.quant.tensor import in_memory
from tinygrad_nv.quant.types import QType, Scale, nbytes, stack_buffers
from tinygrad_nv.runtime.memory import allocate_arena, host_bytes, read_part, write
from tinygrad_nv.runtime.memory_pool import label_allocations

from ..feed_forward import MixtureOfExperts
from ..llama import Llama

# bytes of matrices that are repacked together: of a stack so large a part, within these bounds. Of 0.8 GB, 32
# MB at a time peak at 1.25 times the model, 5 MB at 1.14
PART, LEAST, MOST = 8, 4 << 20, 32 << 20
Half = Literal["gate_up", "down"]


@dataclass(frozen=True)
class Experts:
    """The place of a stack in the network."""
    block: MixtureOfExperts
    half: Half

    def put(self, stack: StackWeight) -> None:
        """Puts a stack there."""
        if self.half == "gate_up": self.block.gate_up_stack = stack
        else: self.block.down_stack = stack


@dataclass(frozen=True)
class StoredStack:
    """How a stack is stored: its matrices in order, of one shape, and their names."""
    place: Experts
    matrices: tuple[StoredMatrix, ...]
    names: tuple[str, ...]
    shape: tuple[int, int]
    codes: bool = False     # are multiplied with codes of inputs: scales stay those of blocks

    @property
    def type(self) -> QType:
        """Type of the stack, as it is read."""
        type = self.matrices[0].type
        if not self.codes: return type.of_rows()
        return replace(type, scale=replace(type.scale, dtype=dtypes.float32))

    @property
    def extents(self) -> Shape:
        """Extents of the stack."""
        return (len(self.matrices), *self.shape)


def names_of(model: Llama, layer: int, half: Half) -> list[str]:
    """Returns the names of the matrices of a stack, without .weight, in order."""
    block, names = model.blocks[layer].feed_forward, model.config.names
    assert isinstance(block, MixtureOfExperts)
    *inner, down = names.expert_matrices
    return [f"model.layers.{layer}.{names.expert.format(i)}.{matrix}" for i in block.own
            for matrix in (inner if half == "gate_up" else (down,))]


def plan_stacks(model: Llama, layer: int, reader: Reader, stored: Stored) -> Iterator[StoredStack]:
    """The stacks of a layer that are quantised. Raises `WeightError` where some of their matrices are not, or
    are of several types."""
    block = model.blocks[layer].feed_forward
    if not isinstance(block, MixtureOfExperts): return
    width, hidden = block.moe.width, block.inputs
    shapes: dict[Half, tuple[int, int]] = {"gate_up": (width, hidden), "down": (hidden, width)}
    for half, shape in shapes.items():
        names = names_of(model, layer, half)
        found = [reader.matrix(name, shape, stored) for name in names]
        if not any(found): continue
        _require_alike(names, found)
        whole = tuple(each for each in found if each is not None)
        yield _with_codes(StoredStack(Experts(block, half), whole, tuple(names), shape), model)


def _require_alike(names: list[str], found: list[StoredMatrix | None]) -> None:
    kinds: dict[str, list[str]] = {}
    for name, each in zip(names, found, strict=True):
        kinds.setdefault("not quantised" if each is None else str(each.type.of_rows()), []).append(name)
    if len(kinds) == 1: return
    lines = [f"  {kind} ({len(some)}): {', '.join(some[:3])}" + ", …" * (len(some) > 3)
             for kind, some in kinds.items()]
    raise WeightError("\n".join(["experts of one layer are quantised in several ways", *lines]),
                      "one type for gate and up, and one for down, of all experts of a layer", AGAIN)


def _with_codes(stack: StoredStack, model: Llama) -> StoredStack:
    """The stack as one whose codes are multiplied, where all are stored so and the device has a kernel."""
    (kind, how), *others = {(each.type, each.activations) for each in stack.matrices}
    if others or how is None or how.static or kind.scale.e8m0: return stack
    made = replace(stack, codes=True)
    activation = model.config.activation if stack.place.half == "gate_up" else ""
    found = F.multiplies_grouped_codes(made.type, made.extents, activation, model.dtype, how.element,
                                       how.scale, model.device)
    return made if found else stack


def require_dynamic(stack: StoredStack) -> None:
    """Raises `WeightError` where inputs of a stack, as it runs, have a static scale: one for each expert."""
    for name, each in zip(stack.names, stack.matrices, strict=True):
        if each.activations is not None and each.activations.static:
            raise WeightError(f"{name} has a static scale of its inputs", "scales of each token",
                              "quantise the model anew with dynamic activations, or without")


# **** reading ****

@dataclass(frozen=True)
class Chunk:
    """Matrices that were read: their number, and their buffers one after the other, in rows."""
    count: int
    buffers: dict[str, np.ndarray]


def read(stack: StoredStack, get: GetPart) -> Iterator[Chunk]:
    """The matrices of a stack, some at a time; the next are read meanwhile."""
    matrices, names, shape = stack.matrices, stack.names, stack.shape
    each = nbytes(matrices[0].type.of_rows(), *shape)
    many = max(1, min(MOST, max(LEAST, each * len(matrices) // PART)) // each)

    def chunk(begin: int) -> Chunk:
        some = [_rows(one, name, shape, stack.codes, get) for one, name in
                zip(matrices[begin:begin + many], names[begin:begin + many], strict=True)]
        return Chunk(len(some), {name: np.concatenate([one[name] for one in some]) for name in some[0]})
    with ThreadPoolExecutor(1) as reader:
        ahead: Future[Chunk] | None = reader.submit(chunk, 0)
        for begin in range(many, len(matrices) + many, many):
            assert ahead is not None
            found = ahead.result()
            ahead = reader.submit(chunk, begin) if begin < len(matrices) else None
            yield found


def _rows(stored: StoredMatrix, name: str, shape: tuple[int, int], codes: bool,
          get: GetPart) -> dict[str, np.ndarray]:
    """A matrix's buffers, with scales of single rows, or of blocks where codes are multiplied; an order as a
    row."""
    n, made = shape[0], stored.read(get)
    if stored.type.element.dtype in LARGEST and \
            bool((made["codes"].view(np.uint8) & 0x7F > LARGEST[stored.type.element.dtype]).any()):
        raise WeightError(f"{name} has codes that are infinity or NaN", "finite numbers", AGAIN)

    def of(key: str, array: np.ndarray) -> np.ndarray:
        if key == "order": return array.reshape(1, -1)
        if key in ("codes", "high"): return array.reshape(n, -1)
        if codes: return as_float32(array)
        scale = stored.type.outer if key.startswith("outer") else stored.type.scale
        assert scale is not None
        return _repeat_scales(array, scale, n)
    return {key: of(key, array) for key, array in made.items()}


# of 8-bit floats: the largest finite code
LARGEST = {dtypes.fp8e4m3: 0x7E, dtypes.fp8e5m2: 0x7B}


def _repeat_scales(array: np.ndarray, scale: Scale, n: int) -> np.ndarray:
    """Scales of each row, of those of blocks."""
    if scale.rows == 1: return array.reshape(n, -1)
    blocks = array.reshape(-(-n // (scale.rows or n)), -1)
    return np.repeat(blocks, scale.rows or n, 0)[:n]


# **** repacking ****

def fill(model: Llama, stack: StoredStack, chunks: Iterable[Chunk], int8: bool) -> StackWeight:
    """A stack, of its matrices as kernels read them."""
    stored, (n, k), type, shape = stack.matrices[0], stack.shape, stack.type, stack.extents
    made = type if stack.codes else F.prepare_type(type, n, k, model.device)
    wanted = stack_buffers(made, shape)
    whole = {name: Tensor.empty(*extents, dtype=in_memory(dtype), device=model.device)
             for name, (extents, dtype) in wanted.items()}
    with label_allocations("weights"): allocate_arena(list(whole.values()))
    done = dict.fromkeys(whole, 0)
    for chunk in chunks:
        for name, tensor in _lay_out(type, made, (chunk.count, n, k), chunk, model.device).items():
            size = int(tensor.nbytes())
            view = host_bytes(tensor)
            write(whole[name], done[name], memoryview(read_part(tensor, 0, size)) if view is None else view)
            done[name] += size
    return StackWeight(QStack(made, shape, whole), stored.activations, int8, stack.codes)


def _lay_out(type: QType, made: QType, shape: Shape, chunk: Chunk, device: str | None) -> Mapping[str,
                                                                                                  Tensor]:
    some = {}
    for name, (extents, dtype) in stack_buffers(type, shape).items():
        some[name] = Tensor.empty(*extents, dtype=in_memory(dtype), device=device)
        write(some[name], 0, np.ascontiguousarray(chunk.buffers[name]).reshape(-1).view(np.uint8).data)
    stack = QStack(type, shape, some)
    if made != replace(type, layout=made.layout): stack = stack.with_multipliers()
    return stack.with_layout(made.layout).buffers


def stacks(model: Llama) -> list[StackWeight]:
    """Returns the stacks of a network."""
    blocks = [each.feed_forward for each in model.blocks]
    both = [stack for block in blocks if isinstance(block, MixtureOfExperts)
            for stack in (block.gate_up_stack, block.down_stack)]
    return [stack for stack in both if stack is not None]


def idle_bytes(model: Llama, tokens: int) -> int:
    """Expected bytes of experts that none of `tokens` tokens has."""
    total, config = 0.0, model.config
    for block in (each.feed_forward for each in model.blocks):
        if not isinstance(block, MixtureOfExperts): continue
        moe = block.moe
        size = config.hidden_size * moe.width * model.dtype.itemsize
        whole = sum(count * len(block.own) * size if stack is None else stack.matrix.nbytes
                    for stack, count in ((block.gate_up_stack, 2), (block.down_stack, 1)))
        total += whole * (1 - moe.distinct(tokens) / moe.experts)
    return round(total)
