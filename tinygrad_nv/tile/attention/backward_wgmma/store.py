"""dk and dv: a warp's 16 keys from registers to memory.

Protocol: a result of 16 bits with aligned rows goes by stmatrix into shared memory, where the keys or values
were, and from there by TMA, each warp its own 16 rows; what lies outside is cut off by the map. All products
of all consumers are done with the keys by then. Another result goes by itself, two elements at a time.
"""
from __future__ import annotations

from collections.abc import Sequence

from tinygrad_nv.ptx.builder import Kernel, Shared, Value
from tinygrad_nv.tile.access import advance, write
from tinygrad_nv.tile.attention.backward_wgmma.plan import (
    WARP_ROWS,
    BackwardWgmmaPlan,
    map_argument,
    map_dimensions,
)
from tinygrad_nv.tile.attention.spec import Rows
from tinygrad_nv.tile.lanes import Lanes, pack
from tinygrad_nv.tile.launch import MapArgument
from tinygrad_nv.tile.layout import OperandTile


class GradientEpilogue:
    """Destination of one of the two gradients: `rows` at `pointer`, the parameter's number, through `tile`
    and the shared memory `staging` if it goes by TMA."""

    def __init__(self, kb: Kernel, plan: BackwardWgmmaPlan, rows: Rows, width: int, out: Value, pointer: int,
                 tile: OperandTile | None, staging: Shared, name: str) -> None:
        self.kb, self.plan, self.rows, self.width, self.out = kb, plan, rows, width, out
        self.tile, self.staging = tile, staging
        self.maps: list[MapArgument] = []
        self.tensor_maps: list[Value] = []
        if tile is None: return
        self.maps = [map_argument(plan, rows, pointer, plan.spec.forward.s_kv, width, tile.inner, tile.span,
                                  WARP_ROWS, "s_kv")]
        self.tensor_maps = [kb.tensor_map(name)]

    def store(self, sums: Sequence[Value], key: Value, tile_row: Value, keys: Value | int,
              batch: Sequence[Value], half: Value) -> None:
        """Stores a warp's keys, which begin at `key` of all and `tile_row` of the CTA (u32), of all columns
        or of the half with the number `half` (u32)."""
        if self.tile is not None: self._by_tma(self.tile, sums, key, tile_row, batch, half)
        else: self._plain(sums, key, keys, batch, half)

    def _by_tma(self, tile: OperandTile, sums: Sequence[Value], key: Value, tile_row: Value,
                batch: Sequence[Value], half: Value) -> None:
        kb, lane = self.kb, self.kb.special("laneid")
        columns = tile.columns // (2 if self.plan.splits_columns else 1)
        base, first = self.staging.address() + tile_row * tile.span, kb.reg("s32", 0)
        if self.plan.splits_columns:
            base = base + half * (columns * tile.column_bytes)
            first = (half * (columns * tile.inner)).to("s32")
        plain = (lane & 15) * tile.span + (lane >> 4) * 16
        mask = tile.span // 16 - 1
        own = plain ^ ((plain >> 7) & mask) << 4
        places = [base + (own ^ at if at else own) for at in range(0, tile.span, 32)]
        for pair in range(len(sums) // 8):
            words = [pack(kb, sums[at:at + 2], self.rows.dtype) for at in range(8 * pair, 8 * pair + 8, 2)]
            column, inside = divmod(32 * pair, tile.span)
            kb.stmatrix(places[inside // 32].at(column * tile.column_bytes), words)
        kb.fence_proxy_async()
        kb.emit("bar.warp.sync", -1)
        with kb.if_(kb.elect()):
            outer = [batch[i].to("s32") for i in map_dimensions(self.rows, self.plan.spec.forward.batch)]
            for column in range(columns):
                kb.tma_store(self.tensor_maps[0], [first + column * tile.inner, key.to("s32"), *outer],
                            base.at(column * tile.column_bytes))
            kb.tma_commit()

    def _plain(self, sums: Sequence[Value], key: Value, keys: Value | int, batch: Sequence[Value],
               half: Value) -> None:
        kb, lane, rows, d = self.kb, self.kb.special("laneid"), self.rows, self.width
        size, own, column = rows.dtype.itemsize, key + (lane >> 2), (lane & 3) << 1
        width = 2 * len(sums) if self.plan.splits_columns else 0
        if width: column = column + half * width
        base = self.out + rows.offset * size if rows.offset else self.out
        for index, stride in zip((*batch, own), (*rows.batch, rows.row), strict=True):
            base = advance(kb, base, index, stride * size)
        base = advance(kb, base, column, size)
        pairs = d % 2 == 0 and rows.alignment_bytes >= 2 * size
        for h in range(2):
            inside = own + 8 * h < keys
            for j in range(len(sums) // 4):
                value = Lanes(kb, rows.dtype, list(sums[4 * j + 2 * h:4 * j + 2 * h + 2]))
                for i in range(0, 2, 2 if pairs else 1):
                    guard = inside & (column + (8 * j + i) < d) if width + 8 * j + 8 > d else inside
                    at = (8 * h * rows.row + 8 * j + i) * size
                    write(kb, base, at, value, 2 if pairs else 1, guard, first=i)
