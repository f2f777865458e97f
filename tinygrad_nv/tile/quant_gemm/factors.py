"""Scales, zero points and minima of fragments (quant/types.py) in registers: those of a lane's two rows.

Protocol: `registers()` are for one block of each buffer, `load(name, into, at, block, guard)` loads two rows
of it, which lie side by side, from the address of block 0. `scales` and `minima`, f32, `broadcast`, pairs
of 16-bit floats, and `zeros`, u32, convert them where they are needed.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.quant.types import QType, Scale
from tinygrad_nv.tile.gemm.gemv.operands import spread
from tinygrad_nv.tile.gemm.spec import FP8

Pair = tuple[Value, Value]      # of rows g and g + 8
VECTORS = {16: ".v4.b32", 8: ".v2.b32", 4: ".b32", 2: ".b16"}   # bytes of a load


def factor_names(buffers: Iterable[str]) -> list[str]:
    """Returns the names of a matrix's buffers that are no codes."""
    return [name for name in buffers if name not in ("codes", "high", "order")]


@dataclass
class Factors:
    """The buffers `names` of a type, read by `opcode`."""
    kb: Kernel
    type: QType
    names: Sequence[str]
    opcode: str

    def scale_of(self, name: str) -> Scale:
        """The blocks of a buffer."""
        scale = self.type.outer if name.startswith("outer") else self.type.scale
        assert scale is not None
        return scale

    def dtype_of(self, name: str) -> DType:
        """Returns the dtype of a buffer."""
        return dtypes.uint8 if name == "zeros" else self.scale_of(name).dtype

    def block_bytes(self, name: str) -> int:
        """Returns the bytes of a block of 16 rows."""
        return 16 * self.dtype_of(name).itemsize

    def registers(self) -> dict[str, list[Value]]:
        """Returns the registers that a block is loaded into, zeros."""
        made = {}
        for name in self.names:
            nbytes = 2 * self.dtype_of(name).itemsize
            made[name] = self.kb.regs("b32", nbytes // 4, 0) if nbytes >= 4 else self.kb.regs("b16", 1, 0)
        return made

    def load(self, name: str, into: list[Value], at: Value, block: int, guard: Value | None) -> None:
        """Block `block` from an address on."""
        size = self.dtype_of(name).itemsize
        self.kb.emit(self.opcode + VECTORS[2 * size], into if len(into) > 1 else into[0],
                     at.at(16 * size * block), guard=guard)

    # **** numbers ****

    def scales(self, loaded: Mapping[str, list[Value]]) -> Pair:
        """scale · outer, f32."""
        return self._with_outer(loaded, "scales", "outer")

    def broadcast(self, loaded: Mapping[str, list[Value]], dtype: DType) -> Pair | None:
        """Scales as pairs of 16-bit floats, each twice; None where they are no numbers of that dtype."""
        scale = self.type.scale
        exponents = scale.e8m0 and dtype == dtypes.bfloat16
        if "outer" in loaded or not (exponents or scale.dtype == dtype): return None
        word, made = loaded["scales"][0], self.kb.regs("b32", 2)
        if exponents: word = self._exponents(word)
        for each, which in zip(made, (0x1010, 0x3232), strict=True):
            self.kb.emit("prmt.b32", each, word, 0, which)
        return made[0], made[1]

    def minima(self, loaded: Mapping[str, list[Value]]) -> Pair | None:
        """min · outer_min, f32; None without."""
        return self._with_outer(loaded, "mins", "outer_mins") if self.type.mins else None

    def zeros(self, loaded: Mapping[str, list[Value]]) -> tuple[Value | None, Value | None]:
        """u32; None without."""
        if not self.type.zeros: return None, None
        both = loaded["zeros"][0].to("u32")
        return both & 0xFF, both >> 8

    def _with_outer(self, loaded: Mapping[str, list[Value]], name: str, outer: str) -> Pair:
        made = self._floats(loaded[name], self.scale_of(name))
        if outer not in loaded: return made
        more = self._floats(loaded[outer], self.scale_of(outer))
        return made[0] * more[0], made[1] * more[1]

    def _floats(self, loaded: list[Value], scale: Scale) -> Pair:
        kb, dtype = self.kb, scale.dtype
        made = kb.regs("f32", 2)
        if dtype == dtypes.float32:
            for wide, bits in zip(made, loaded, strict=True): kb.emit("mov.b32", wide, bits)
        elif dtype == dtypes.bfloat16 or scale.e8m0:
            word = self._exponents(loaded[0]) if scale.e8m0 else loaded[0]
            kb.emit("mov.b32", made[0], word << 16)
            kb.emit("mov.b32", made[1], word & 0xFFFF0000)
        elif dtype == dtypes.float16 or dtype in FP8:
            word = loaded[0] if dtype == dtypes.float16 else spread(kb, [loaded[0].to("u32")], dtype)[0]
            halves = kb.regs("b16", 2)
            kb.emit("mov.b32", halves, word)
            for wide, half in zip(made, halves, strict=True): kb.emit("cvt.f32.f16", wide, half)
        else:
            both = loaded[0].to("u32")
            for wide, shift in zip(made, (0, 8), strict=True): self._byte(wide, both, shift, scale.dtype)
        return made[0], made[1]

    def _exponents(self, both: Value) -> Value:
        """Two bytes of E8M0 as bfloat16: 0 is 2^-127, a subnormal number; 255 is infinity, times 0 NaN."""
        kb, (spread, made) = self.kb, self.kb.regs("b32", 2)
        kb.emit("prmt.b32", spread, both.to("u32"), 0, 0x4140)
        kb.emit("max.bf16x2", made, spread << 7, kb.reg("b32", 0x00400040))
        kb.emit("fma.rn.bf16x2", made, made, kb.reg("b32", 0), made)
        return made

    def _byte(self, into: Value, both: Value, shift: int, dtype: DType) -> None:
        kb = self.kb
        if dtype == dtypes.int8:
            signed = kb.reg("s32")
            kb.emit("bfe.s32", signed, both, shift, 8)
            kb.emit("cvt.rn.f32.s32", into, signed)
            return
        kb.emit("cvt.rn.f32.u32", into, (both >> shift if shift else both) & 0xFF)
