"""The end of a consumer: the result, and l.

Protocol: registers 4j … 4j + 3 of the fragment are columns 8j … 8j + 7 of a warp's 16 rows. A result of 16
bits with aligned rows goes by stmatrix into shared memory, where the queries were (all of the warpgroup's
products are done with these rows), and from there by TMA, each warp its own 16 rows; what lies outside the
result is cut off by the map. What has room of its own is read there while the next tile is on its way, until
the next store. Another result goes by itself, two elements at a time.
"""
from __future__ import annotations

from collections.abc import Sequence

from tinygrad.dtype import dtypes

from tinygrad_nv.ptx.builder import Kernel, Shared, Value
from tinygrad_nv.tile.access import advance, write
from tinygrad_nv.tile.attention.wgmma.plan import FlashWgmmaPlan, map_argument, map_dimensions
from tinygrad_nv.tile.lanes import Lanes, pack
from tinygrad_nv.tile.launch import MapArgument
from tinygrad_nv.tile.layout import OperandTile

WARP_ROWS = 16


class AttentionEpilogue:
    """Destination of the results."""

    def __init__(self, kb: Kernel, plan: FlashWgmmaPlan, out: Value, lse: Value | None,
                 queries: Shared) -> None:
        self.kb, self.plan, self.out, self.lse = kb, plan, out, lse
        self.maps: list[MapArgument] = []
        self.tensor_maps: list[Value] = []
        if plan.out is None: return
        spec = plan.spec
        self.maps = [map_argument(plan, spec.out, 0, spec.s_q, spec.d_v, plan.out, WARP_ROWS, "s_q")]
        self.tensor_maps = [kb.tensor_map("map_out")]
        self.staging = queries if plan.overlaid else kb.shared("staging", plan.staging_bytes, align=1024)

    def store(self, sums: Sequence[Value], inverse: Sequence[Value], logs: Sequence[Value], row: Value,
              tile_row: Value, rows: Value | int, batch: Sequence[Value]) -> None:
        """Stores a warp's rows, which begin at `row` of the matrix and `tile_row` of the CTA (u32);
        `batch` are the indices of the head."""
        for i, each in enumerate(sums): each *= inverse[i >> 1 & 1]
        if self.plan.out is not None: self._by_tma(self.plan.out, sums, row, tile_row, batch)
        else: self._plain(sums, row, rows, batch)
        if self.lse is not None: self._logs(self.lse, logs, row, rows, batch)

    def _by_tma(self, tile: OperandTile, sums: Sequence[Value], row: Value, tile_row: Value,
                batch: Sequence[Value]) -> None:
        kb, lane, dtype = self.kb, self.kb.special("laneid"), self.plan.spec.out.dtype
        if not self.plan.overlaid: self._drain()
        base = self.staging.address() + tile_row * tile.span
        plain = (lane & 15) * tile.span + (lane >> 4) * 16
        mask = tile.span // 16 - 1
        own = plain ^ ((plain >> 7) & mask) << 4
        places = [base + (own ^ at if at else own) for at in range(0, tile.span, 32)]
        for pair in range(len(sums) // 8):
            words = [pack(kb, sums[at:at + 2], dtype) for at in range(8 * pair, 8 * pair + 8, 2)]
            column, inside = divmod(32 * pair, tile.span)
            kb.stmatrix(places[inside // 32].at(column * tile.column_bytes), words)
        kb.fence_proxy_async()
        kb.emit("bar.warp.sync", -1)
        with kb.if_(kb.elect()):
            outer = [batch[i].to("s32") for i in map_dimensions(self.plan.spec.out, self.plan.spec.batch)]
            for column in range(tile.columns):
                kb.tma_store(self.tensor_maps[0], [column * tile.inner, row.to("s32"), *outer],
                            base.at(column * tile.column_bytes))
            kb.tma_commit()
        if self.plan.overlaid: self._drain()

    def _drain(self) -> None:
        """Until the last result has been read from shared memory."""
        with self.kb.if_(self.kb.elect()): self.kb.tma_wait(0, read=True)
        self.kb.emit("bar.warp.sync", -1)

    def finish(self) -> None:
        """After all tiles."""
        if self.plan.out is not None and not self.plan.overlaid: self._drain()

    def _plain(self, sums: Sequence[Value], row: Value, rows: Value | int, batch: Sequence[Value]) -> None:
        kb, lane, out, d = self.kb, self.kb.special("laneid"), self.plan.spec.out, self.plan.spec.d_v
        size, own, column = out.dtype.itemsize, row + (lane >> 2), (lane & 3) << 1
        base = self.out + out.offset * size if out.offset else self.out
        for index, stride in zip((*batch, own), (*out.batch, out.row), strict=True):
            base = advance(kb, base, index, stride * size)
        base = advance(kb, base, column, size)
        pairs = d % 2 == 0 and out.alignment_bytes >= 2 * size
        for half in range(2):
            inside = own + 8 * half < rows
            for j in range(len(sums) // 4):
                value = Lanes(kb, out.dtype, list(sums[4 * j + 2 * half:4 * j + 2 * half + 2]))
                for i in range(0, 2, 2 if pairs else 1):
                    guard = inside & (column + (8 * j + i) < d) if 8 * j + 8 > d else inside
                    at = (8 * half * out.row + 8 * j + i) * size
                    write(kb, base, at, value, 2 if pairs else 1, guard, first=i)

    def _logs(self, to: Value, logs: Sequence[Value], row: Value, rows: Value | int,
              batch: Sequence[Value]) -> None:
        """One lane of the four that share a row."""
        kb, spec, lane = self.kb, self.plan.spec, self.kb.special("laneid")
        own = row + (lane >> 2)
        head = kb.reg("u32", 0)
        for index, extent in zip(batch, spec.batch, strict=True): head = head * extent + index
        at = advance(kb, advance(kb, to, head, spec.s_q * 4), own, 4)
        first = (lane & 3) == 0
        for half in range(2):
            value = Lanes(kb, dtypes.float32, [logs[half]])
            write(kb, at, 32 * half, value, 1, first & (own + 8 * half < rows))
