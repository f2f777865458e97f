"""Layouts of a matrix's buffers (types.py) into each other, in plain tinygrad."""
from __future__ import annotations

from collections.abc import Callable

from tinygrad import Tensor
from tinygrad.dtype import dtypes

from tinygrad_nv.quant.types import TILE, QType


def fields(data: Tensor, bits: int) -> Tensor:
    """Fields of `bits` of bytes [N, B], the lowest first: [N, 8 B / bits]."""
    if bits == 8: return data
    each, mask = 8 // bits, (1 << bits) - 1
    return Tensor.stack(*[(data >> (i * bits)) & mask for i in range(each)], dim=-1).flatten(1)


def lay_out(type: QType, name: str, data: Tensor, k: int) -> Tensor:
    """A buffer in rows, of a matrix of k columns, in the layout of `type`."""
    n = int(data.shape[0])
    tiles = -(-n // TILE)
    if name in ("codes", "high"):
        bits = _plane(type, name)
        rows = fields(data.pad(((0, -n % TILE), (0, 0))), bits)
        return _in_fragments(rows, type, bits, k) if type.layout == "fragments" else _in_tiles(rows, bits, k)
    if type.layout == "tiles":
        return data.pad(((0, -n % TILE), (0, 0))).reshape(tiles, TILE, -1).permute(0, 2, 1)
    scale = type.outer if name.startswith("outer") else type.scale
    assert scale is not None
    more = scale.blocks(n, type.pad_columns(k))[1] - int(data.shape[1])
    rows = data.pad(((0, -n % TILE), (0, more)))
    return rows.reshape(tiles, 2, 8, -1).permute(0, 3, 2, 1).reshape(tiles, -1, TILE)


def unlaid(type: QType, name: str, data: Tensor, n: int, k: int) -> Tensor:
    """`lay_out` undone, of a matrix of n rows and k columns. "tiles" may be of any number of rows."""
    tiles = int(data.shape[0])
    if name in ("codes", "high"):
        bits = _plane(type, name)
        rows = _out_of_fragments(data, type, bits, k) if type.layout == "fragments" else \
            _out_of_tiles(data, bits)
        return _join_fields([rows[:n, i::8 // bits] for i in range(8 // bits)], bits)
    if type.layout == "tiles": return data.permute(0, 2, 1).reshape(tiles * int(data.shape[2]), -1)[:n]
    scale = type.outer if name.startswith("outer") else type.scale
    assert scale is not None
    rows = data.reshape(tiles, -1, 8, 2).permute(0, 3, 2, 1).reshape(tiles * TILE, -1)
    return rows[:n, :scale.blocks(n, k)[1]]


def _plane(type: QType, name: str) -> int:
    return type.low_bits if name == "codes" else type.bits - type.low_bits


def _join_fields(parts: list[Tensor], bits: int) -> Tensor:
    """Fields of `bits` as integers, the first is lowest."""
    made = parts[0]
    for i, more in enumerate(parts[1:], 1): made = made | (more << (i * bits))
    return made


# **** codes, of fields [16 T, K] ****

def _in_tiles(rows: Tensor, bits: int, k: int) -> Tensor:
    tiles, each = int(rows.shape[0]) // TILE, 8 // bits
    split = rows.reshape(tiles, TILE, k // (4 * each), each, 4).permute(3, 0, 2, 1, 4)
    return _join_fields([split[i] for i in range(each)], bits)


def _out_of_tiles(data: Tensor, bits: int) -> Tensor:
    tiles, each, mask = int(data.shape[0]), 8 // bits, (1 << bits) - 1
    parts = [data] if each == 1 else [(data >> (i * bits)) & mask for i in range(each)]
    return Tensor.stack(*parts, dim=-2).permute(0, 2, 1, 3, 4).reshape(tiles * int(data.shape[2]), -1)


def _in_fragments(rows: Tensor, type: QType, bits: int, k: int) -> Tensor:
    """Extents are row half, g, unit, 16 columns, column half, q, the column after."""
    tiles, units = int(rows.shape[0]) // TILE, type.pad_columns(k) // type.unit
    padded = rows.pad(((0, 0), (0, type.pad_columns(k) - k)))
    if bits == 8: padded = padded.bitcast(dtypes.uint8)
    split = padded.reshape(tiles, 2, 8, units, type.unit // 16, 2, 4, 2).permute(0, 3, 2, 6, 4, 5, 1, 7)
    some = split.reshape(tiles, units, 32, -1, 16 // bits, 2).cast(dtypes.uint32)
    words = _join_fields([some[..., f, 0] | (some[..., f, 1] << 16) for f in range(16 // bits)], bits)
    return words.contiguous().bitcast(dtypes.uint8).reshape(tiles, units, 32, -1).bitcast(rows.dtype)


def _out_of_fragments(data: Tensor, type: QType, bits: int, k: int) -> Tensor:
    tiles, units = int(data.shape[0]), int(data.shape[1])
    split = _lane_fields(data, bits).reshape(tiles, units, 8, 4, type.unit // 16, 2, 2, 2)
    made = split.permute(0, 6, 2, 1, 4, 5, 3, 7).reshape(tiles * TILE, -1)[:, :k].cast(dtypes.uint8)
    return made.bitcast(data.dtype) if bits == 8 else made


def _lane_fields(data: Tensor, bits: int) -> Tensor:
    """Fields of lanes' bytes (…, B), in order, the one of the lower half first: (…, 8 B / bits), uint32."""
    words = data.bitcast(dtypes.uint8).contiguous().bitcast(dtypes.uint32).unsqueeze(-1)
    # by a power of two for each place: up to 32 shifts, stacked, take ten seconds to compile
    place = Tensor.arange(32 // bits, dtype=dtypes.uint32).to(data.device)
    away, power = place // 2 * bits + place % 2 * 16, place * 0 + 1
    for i in range(5):
        power = power * ((away // (1 << i)) % 2).eq(1).where(1 << (1 << i), 1).cast(dtypes.uint32)
    return ((words // power) & ((1 << bits) - 1)).flatten(-2)


# **** single rows ****

def rows_of(type: QType, name: str, data: Tensor, rows: Tensor, k: int,
            read: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Rows (count) of a buffer in any layout, as a matrix of them in rows has it. `read(lines, at)` gives
    lines [L, B] of a tensor at int32 places."""
    if type.layout == "rows": return read(data, rows)
    count, pieces = int(rows.shape[0]), int(data.shape[1])
    tile, row = (rows // TILE).reshape(-1, 1), (rows % TILE).reshape(-1, 1)
    piece = tile * pieces + Tensor.arange(pieces, dtype=dtypes.int32).to(rows.device)
    codes = name in ("codes", "high")
    if type.layout == "tiles":
        lines = read(data.reshape(int(data.shape[0]) * pieces * TILE, -1), piece * TILE + row)
        return unlaid(type, name, lines.reshape(count, pieces, 1, *data.shape[3:]), count, k)
    half = row // 8
    if not codes:
        lines = read(data.reshape(-1, 1), piece * TILE + row % 8 * 2 + half)
        scale = type.outer if name.startswith("outer") else type.scale
        assert scale is not None
        return lines.reshape(count, pieces)[:, :scale.blocks(count, k)[1]]
    # four lanes have a row's columns of a unit, and those of the row 8 after it
    bits, every = _plane(type, name), data.reshape(int(data.shape[0]) * pieces * 8, -1)
    lanes = read(every, piece * 8 + row % 8)
    split = _lane_fields(lanes.reshape(count, pieces, 4, -1), bits).reshape(count, pieces, 4, -1, 2, 2, 2)
    own = half.reshape(-1, 1, 1, 1, 1, 1).eq(0).where(split[..., 0, :], split[..., 1, :])
    made = own.permute(0, 1, 3, 4, 2, 5).reshape(count, -1)[:, :k].cast(dtypes.uint8)
    if bits == 8: return made.bitcast(data.dtype)
    return _join_fields([made[:, i::8 // bits] for i in range(8 // bits)], bits)
