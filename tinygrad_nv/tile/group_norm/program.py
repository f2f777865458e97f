"""Group norm of channels-last images (spec.py) as programs of the tile language.

    a program has a slice of an image's positions, and whole groups of channels; of each channel and lane:
        pivot = the mean of the lane's positions in the slice's first block
        s, q = Σ (x - pivot), Σ (x - pivot)²
        mean = pivot + s / count,  squares = q - s² / count
    lanes, then a group's channels are joined (Chan, Golub and LeVeque, 1979): its mean, and squares around it
    results, of one slice in the same program; of several, in a second launch, which joins slices alike:
        out = act((x - mean) · (weight / √(variance + eps)) + bias)

q is at most 1 + (positions of a lane) / (of those in a block) times the squares around the mean, however far
that is from 0, so that few digits cancel. A GPU's lanes are positions that threads have side by side, a CPU
has one. Programs see channels as parts of a power of two, so that vectors fill warps. The order of all sums
is given by the extents of an image and the kind of target.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log
from typing import Any

from tinygrad.dtype import dtypes

from tinygrad_nv import tile
from tinygrad_nv.tile.group_norm.reference import arguments
from tinygrad_nv.tile.group_norm.spec import GroupNormSpec
from tinygrad_nv.tile.language.memory import LARGEST, Block, TensorRef
from tinygrad_nv.tile.language.values import Operand, Tile, unary
from tinygrad_nv.tile.programs import Blocks, Grid, TileProgram
from tinygrad_nv.tile.reference import Argument, Place

DETERMINISM_CLASS = "each image alone, in an order that its extents give"
F32, S32 = dtypes.float32, dtypes.int32
WARPS = 8
HELD = 1 << 13              # elements of a GPU's block: 32 of a thread
MOST_SLICES = 256           # of an image, whose statistics all its programs read
LEAST_CHANNELS = 128        # of a GPU's program, where groups may be shared out
LEAST_WIDTH, MOST_PARTS = 32, 15    # of channels in parts: others are one, padded to a power of two
MOST_PART_ELEMENTS = 64     # of a thread, one of each part
CPU_ROWS = 32, 16, 8, 4     # positions of a CPU's block
CHUNK_BYTES = 128           # of a position that a CPU reads at once, where there are several groups
MOST_CHANNELS = {"gpu": 1 << 13, "cpu": 1 << 14}    # of a program
MANY_BLOCKS = 64            # of a slice, whose sums need no more digits


@dataclass(frozen=True)
class PartsSpec:
    """A group norm whose channels are seen as parts of `width`: x as [batch, parts, positions, width]."""
    norm: GroupNormSpec
    width: int

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The norm's, as they are seen."""
        return tuple(Argument(each.name, each.dtype, (self.place(each.places[0]),), each.role)
                     for each in arguments(self.norm))

    def place(self, whole: Place) -> Place:
        """Returns where an argument's elements lie: parts before positions."""
        extents, steps = whole.extents[:-1], whole.strides[:-1]
        return Place(0, (*extents[:1], self.norm.channels // self.width, *extents[1:], self.width),
                     (*steps[:1], self.width, *steps[1:], 1))


@dataclass(frozen=True)
class Part:
    """A program's slice and channels, and the tensors that it reads."""
    spec: PartsSpec
    blocks: Blocks
    given: Mapping[str, TensorRef]

    @property
    def norm(self) -> GroupNormSpec: return self.spec.norm

    @property
    def size(self) -> int:
        """Positions of a slice: whole blocks."""
        return slice_size(self.norm, self.blocks)

    @property
    def first(self) -> Tile: return tile.program_id(0) * self.size

    @property
    def count(self) -> Tile:
        """Positions of this slice."""
        return tile.minimum(self.norm.positions - self.first, self.size)

    @property
    def image(self) -> Tile: return tile.program_id(2)

    @property
    def parts(self) -> Block:
        """The program's parts of all channels."""
        count = self.blocks.columns // self.spec.width
        return tile.block(tile.program_id(1) * count, count)

    @property
    def groups(self) -> Block:
        """The program's groups."""
        count = self.blocks.columns * self.norm.groups // self.norm.channels
        return tile.block(tile.program_id(1) * count, count)

    @property
    def group_size(self) -> int:
        """Channels of a group."""
        return self.norm.channels // self.norm.groups

    @property
    def every(self) -> Block: return Block(0, self.spec.width)

    @property
    def is_ragged(self) -> bool:
        """Whether the last block of an image has rows beyond it."""
        return self.norm.positions % self.blocks.rows > 0

    @property
    def in_turn(self) -> bool:
        """Whether a lane has several positions of a block, as on a CPU: there quotients cost no more than
        reciprocals, and differences from a mean are part of a multiplication, at the cost of digits of means
        far from 0."""
        return self.blocks.rows > self.blocks.lanes

    def rows(self, first: Operand) -> list[Block]:
        """A block's positions, `lanes` at a time."""
        lanes = self.blocks.lanes
        return [tile.block(first + i, lanes) for i in range(0, self.blocks.rows, lanes)]

    def load(self, first: Operand, count: int) -> Tile:
        """x of so many positions: (parts, count, width)."""
        return self.given["x"][self.image, self.parts, tile.block(first, count), self.every]

    def load_lanes(self, first: Operand) -> list[Tile]:
        """x of a block's positions, `lanes` at a time."""
        lanes = self.blocks.lanes
        return [self.load(first + i, lanes) for i in range(0, self.blocks.rows, lanes)]

    def load_behind(self, row: Operand) -> list[Tile]:
        """x of the block behind one, of the last itself: what threads load ahead. None of a CPU's."""
        if self.blocks.lanes == 1: return []
        last = self.first + (self.count - 1) // self.blocks.rows * self.blocks.rows
        return self.load_lanes(tile.minimum(row + self.blocks.rows, last))

    def there(self, rows: Block) -> Tile:
        """Tells which positions the image has: (1, lanes, 1)."""
        return (rows.indices < self.norm.positions)[None, :, None]

    def channels(self, name: str) -> Tile:
        """A vector of channels, in float32: (parts, width)."""
        image = [self.image] if name == "shift" else []
        return tile.cast(self.given[name][*image, self.parts, self.every], F32)

    def by_group(self, x: Tile) -> Tile:
        """A number of each channel, of each group (groups, channels)."""
        return x.reshape(self.groups.size, self.group_size)

    def by_part(self, x: Tile) -> Tile:
        """A number of each group, of each channel (parts, width)."""
        whole = x[:, None].broadcast_to(self.groups.size, self.group_size)
        return whole.reshape(self.parts.size, self.spec.width)


# **** statistics ****

def group_norm(out: TensorRef, spec: PartsSpec, blocks: Blocks, **given: TensorRef) -> None:
    """Computes means and squares of a slice's groups; of one slice, results."""
    part = Part(spec, blocks, given)
    made = measure(part)
    if blocks.groups == 1: store(part, out, part.load(part.first, blocks.rows), *made)
    else:
        for name, each in zip(("means", "squares"), made, strict=True):
            given[name][part.image, tile.program_id(0), part.groups] = tile.bitcast(each, S32)


def measure(part: Part) -> tuple[Tile, Tile]:
    """Mean of each group, and squares of distances from it."""
    first, rows, lanes = part.first, part.blocks.rows, part.blocks.lanes
    block = [tile.cast(x, F32) for x in part.load_lanes(first)]
    if part.size == lanes:
        mean, square = block[0], tile.zeros(block[0].shape)
        many = tile.cast(part.there(part.rows(first)[0]), F32) if part.is_ragged else 1.0
    else:
        pivot = sum(block[1:], block[0]) / float(min(len(block), part.norm.positions))
        s, q = add_moments(part, first, block, pivot)
        s_rest, q_rest = tile.zeros(s.shape), tile.zeros(s.shape)
        ahead = part.load_behind(first)
        for row in tile.range(first + rows, first + part.count, rows):
            now, ahead = ahead or part.load_lanes(row), part.load_behind(row)
            v, w = add_moments(part, row, now, pivot)
            if part.size <= MANY_BLOCKS * rows: s, q = s + v, q + w
            else:
                s, s_rest = add_exactly(s, v, s_rest)
                q, q_rest = add_exactly(q, w, q_rest)
        many = count_rows(part)
        share = 1.0 / tile.maximum(many, 1.0)
        mean, square = pivot + s * share, tile.maximum(q - s * s * share, 0.0)
    count = tile.cast(part.count, F32)
    mean, square = join(mean, square, many, 1, count if part.is_ragged else None)
    if part.norm.shift is not None: mean = mean + part.channels("shift")
    return join(part.by_group(mean), part.by_group(square), count, 1)


def add_exactly(total: Tile, x: Tile, rest: Tile) -> tuple[Tile, Tile]:
    """A sum of many numbers and one more, and how much too large it is (Kahan 1965)."""
    x = x - rest
    made = total + x
    return made, (made - total) - x


def count_rows(part: Part) -> Operand:
    """Positions of a slice that each lane has: (1, lanes, 1), or one number."""
    lanes = part.blocks.lanes
    if not part.is_ragged: return tile.cast(part.count, F32) / float(lanes)
    beyond = part.count + (lanes - 1) - tile.arange(lanes)
    return tile.cast(beyond // lanes, F32)[None, :, None]


def add_moments(part: Part, first: Operand, block: Sequence[Tile], pivot: Tile) -> tuple[Tile, Tile]:
    """Distances of a block from a pivot, and their squares, added up."""
    each = [tile.cast(x, F32) - pivot for x in block]
    if part.is_ragged:
        each = [tile.where(part.there(rows), x, 0.0) for x, rows in zip(each, part.rows(first), strict=True)]
    s, q = each[0], each[0] * each[0]
    for x in each[1:]: s, q = s + x, tile.fma(x, x, q)
    return s, q


def join(mean: Tile, square: Tile, many: Operand, axis: int,
         total: Operand | None = None) -> tuple[Tile, Tile]:
    """Mean and squares of `total` elements, of those of `many` each along an axis; None: of as many each."""
    extent = mean.shape[axis]
    if total is not None: whole = tile.sum(mean * many, axis, keepdims=True) / total
    elif extent & extent - 1: whole = tile.sum(mean, axis, keepdims=True) / float(extent)
    else: whole = tile.sum(mean, axis, keepdims=True) * (1 / extent)
    apart = mean - whole
    return whole.reshape(*whole.shape[:axis], *whole.shape[axis + 1:]), \
        tile.sum(tile.fma(apart * apart, many, square), axis)


# **** results ****

def results(out: TensorRef, means: TensorRef, squares: TensorRef, spec: PartsSpec, blocks: Blocks,
            **given: TensorRef) -> None:
    """Computes results of a slice from the statistics of all."""
    part, norm, every = Part(spec, blocks, given), spec.norm, Block(0, blocks.groups)
    block = part.load(part.first, blocks.rows)
    mean, square = (tile.bitcast(each[part.image, every, part.groups], F32) for each in (means, squares))
    last = norm.positions - (blocks.groups - 1) * part.size
    count = tile.where(tile.arange(blocks.groups) == blocks.groups - 1, last, part.size)[:, None]
    many = tile.cast(count, F32) * float(part.group_size)
    store(part, out, block, *join(mean, square, many, 0, float(norm.positions * part.group_size)))


def store(part: Part, out: TensorRef, block: Tile, mean: Tile, square: Tile) -> None:
    """Stores the results of a slice, of which the first block has been loaded."""
    norm, rows = part.norm, part.blocks.rows
    scale = 1.0 / tile.sqrt(square / float(norm.positions * part.group_size) + norm.eps)
    middle, factor = part.by_part(mean), part.by_part(scale) * part.channels("weight")
    if norm.shift is not None: middle = middle - part.channels("shift")
    bias = part.channels("bias")
    each = [factor, tile.fma(-middle, factor, bias)] if part.in_turn else [factor, bias, middle]
    each = [one[:, None, :] for one in each]
    store_block(part, out, part.first, block, *each)
    if part.size > rows:
        ahead = part.load_behind(part.first)
        for row in tile.range(part.first + rows, part.first + part.count, rows):
            now, ahead = ahead or [part.load(row, rows)], part.load_behind(row)
            store_block(part, out, row, now[0], *each)


def store_block(part: Part, out: TensorRef, first: Operand, x: Tile, factor: Tile, bias: Tile,
                middle: Tile | None = None) -> None:
    """Stores the results of a block; of no `middle`, of x itself."""
    x = tile.cast(x, F32)
    y = tile.fma(x if middle is None else x - middle, factor, bias)
    if part.norm.silu:
        power = 1.0 + tile.exp2(y * (-1 / log(2)))
        y = y / power if part.in_turn else y * unary("reciprocal", power)
    out[part.image, part.parts, tile.block(first, part.blocks.rows), part.every] = tile.cast(y, out.dtype)


# **** schedules ****

def slice_size(norm: GroupNormSpec, blocks: Blocks) -> int:
    """Positions of a slice: whole blocks."""
    return -(-norm.positions // (blocks.groups * blocks.rows)) * blocks.rows


def grid(spec: PartsSpec | GroupNormSpec, blocks: Blocks) -> Grid:
    """A program for each slice, for some groups of each image."""
    norm = spec if isinstance(spec, GroupNormSpec) else spec.norm
    return blocks.groups, norm.channels // blocks.columns, norm.batch


def scratch(spec: PartsSpec | GroupNormSpec, blocks: Blocks) -> dict[str, tuple[int, ...]]:
    """Means and squares of all slices, where there are several."""
    norm = spec if isinstance(spec, GroupNormSpec) else spec.norm
    shape = norm.batch, blocks.groups, norm.groups
    return {"means": shape, "squares": shape} if blocks.groups > 1 else {}


def cut(norm: GroupNormSpec, target: Any) -> Sequence[tuple[Blocks, int]]:
    """Slices of an image, by its extents alone."""
    if target.kind == "cpu":
        rows = next((each for each in CPU_ROWS if norm.positions % each == 0),
                    min(CPU_ROWS[1], power(norm.positions)))
        return [(Blocks(rows, chunk_channels(norm)), 1)]
    channels = channels_of(norm)
    width = width_of(channels)
    lanes = power(max(1, HELD // (channels // width * power(width))))
    lanes = max(lanes, 32 * WARPS * vector_of(norm) // power(width))
    lanes = min(lanes, power(norm.positions))
    most = min(MOST_SLICES, -(-norm.positions // lanes))
    made = Blocks(lanes, channels, most, lanes)
    slices = -(-norm.positions // slice_size(norm, made))
    return [(Blocks(lanes, channels, slices, lanes), WARPS)]


def channels_of(norm: GroupNormSpec) -> int:
    """Channels of a program: whole groups."""
    count = 1
    while norm.groups % (2 * count) == 0 and norm.channels // (2 * count) >= LEAST_CHANNELS: count *= 2
    return norm.channels // count


def chunk_channels(norm: GroupNormSpec) -> int:
    """Channels of a CPU's program: the fewest groups that fill two cache lines."""
    size = norm.channels // norm.groups
    return size * next(n for n in range(1, norm.groups + 1) if norm.groups % n == 0
                       and (n * size * norm.dtype.itemsize >= CHUNK_BYTES or n == norm.groups))


def width_of(channels: int) -> int:
    """Channels of a part: the largest power of two that divides all, where that is worth it."""
    width = channels & -channels
    return channels if width < LEAST_WIDTH or channels // width > MOST_PARTS else width


def power(count: int) -> int:
    """The least power of two not below a number."""
    return 1 << (count - 1).bit_length()


def steps(norm: GroupNormSpec, blocks: Blocks) -> Sequence[tuple[PartsSpec, Blocks]]:
    """The norm with its channels in parts."""
    return [(PartsSpec(norm, width_of(blocks.columns)), blocks)]


def vector_of(norm: GroupNormSpec) -> int:
    """Elements that a thread has side by side: at most 16 bytes."""
    parts = channels_of(norm) // width_of(channels_of(norm))
    return max(1, min(16 // norm.dtype.itemsize, MOST_PART_ELEMENTS // power(parts)))


def elements(norm: GroupNormSpec) -> int:
    """Elements of all images."""
    return norm.batch * norm.positions * norm.channels


def problems(norm: GroupNormSpec, kind: str) -> list[str]:
    """Why no kernel can be; empty when one can."""
    channels = chunk_channels(norm) if kind == "cpu" else channels_of(norm)
    most, longest = MOST_CHANNELS[kind], LARGEST - 2 * HELD     # so that the end of a block is an int32
    out = [f"{channels} channels at once, at most {most}"] * (channels > most)
    return out + [f"{norm.positions} positions, at most {longest}"] * (norm.positions > longest)


RESULTS = TileProgram("group_results", GroupNormSpec, results, grid, cut, elements, scratch=scratch,
                      vector=vector_of, steps=steps)
PROGRAMS = (TileProgram("group_norm", GroupNormSpec, group_norm, grid, cut, elements, problems,
                        fixed=True, steps=steps, vector=vector_of, scratch=scratch,
                        following=RESULTS),)
