"""Tiles in registers.

Protocol: a `Held` has the elements of a tile that a thread holds: `Lanes` (tile/lanes.py) of two registers
side by side, or of the one. None stands for registers whose elements lie outside of the tile in all threads.
Elements that are equal may be one `Lanes`, which is computed once: `map_parts` sees to that. A scalar is a
tile of no axes, which all threads hold.

`Lanes` keep the forms that they have been converted to. A form that is made in a loop or a branch is not
there behind it, so each scope works on copies: `Scopes` makes them when a value is first used there.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tinygrad.dtype import DType

from tinygrad_nv.ptx.builder import Kernel
from tinygrad_nv.ptx.builder import Value as Register
from tinygrad_nv.tile.lanes import FLOAT16S, Lanes, Number, kind_of
from tinygrad_nv.tile.language.gpu.layout import Layout
from tinygrad_nv.tile.language.ir import Value

Part = Lanes | None


@dataclass(eq=False)
class Held:
    """A tile of a dtype and a shape in a layout."""
    dtype: DType
    shape: tuple[int, ...]
    layout: Layout
    parts: list[Part]

    @property
    def width(self) -> int:
        """Registers of a part."""
        return 1 if self.layout.count == 1 else 2

    def element(self, register: int) -> Number:
        """The wide value of a register that is inside."""
        part = self.parts[register // self.width]
        assert part is not None
        return part.at(register % self.width)

    @property
    def scalar(self) -> Lanes:
        """The value of a tile without axes."""
        part = self.parts[0]
        assert part is not None
        return part

    def inside(self) -> list[int]:
        """Registers that are inside in some thread."""
        return [i for i in range(self.layout.count) if self.parts[i // self.width] is not None]


def gather_parts(kb: Kernel, source: Held, registers: Sequence[int | None], dtype: DType) -> list[Part]:
    """Parts of some registers of a tile, in this order. Pairs that stay pairs keep their form, and equal ones
    are one."""
    width = 1 if len(registers) == 1 else 2
    known: dict[tuple[int | None, ...], Part] = {}
    made: list[Part] = []
    for at in range(0, len(registers), width):
        key = tuple(registers[at:at + width])
        if key not in known: known[key] = _join_registers(kb, source, key, dtype)
        made.append(known[key])
    return made


def _join_registers(kb: Kernel, source: Held, registers: Sequence[int | None], dtype: DType) -> Part:
    first = registers[0]
    there = [each for each in registers if each is not None
             and source.parts[each // source.width] is not None]
    if first is None or not there: return None
    if len(there) < len(registers): there = [there[0]] * len(registers)
    if len(set(there)) == 1 and len(there) == 2:
        part = source.parts[there[0] // source.width]
        assert part is not None
        if len(part.wide) == 1 or not part.several: return part
        at = there[0] % source.width
        if not part.wide and dtype in FLOAT16S: return Lanes(kb, dtype, halves=[part.half(at)])
        return Lanes(kb, dtype, [part.at(at)])
    if source.width == len(there) and there[0] % source.width == 0 and there[-1] == there[0] + len(there) - 1:
        return source.parts[there[0] // source.width]
    return Lanes(kb, dtype, [source.element(each) for each in there])


def map_parts(make: Callable[..., Lanes], *given: Sequence[Part]) -> list[Part]:
    """A function of parts, once for equal ones."""
    known: dict[tuple[int, ...], Part] = {}
    made: list[Part] = []
    for parts in zip(*given, strict=True):
        key = tuple(map(id, parts))
        if key not in known: known[key] = None if any(each is None for each in parts) else make(*parts)
        made.append(known[key])
    return made


@dataclass
class Scopes:
    """Values of the program by scope, the innermost last; of free ones one for each layout."""
    stack: list[dict[tuple[Value, Layout | None], Held]] = field(default_factory=lambda: [{}])

    def push(self) -> None: self.stack.append({})

    def pop(self) -> None: self.stack.pop()

    def put(self, value: Value, held: Held, layout: Layout | None = None) -> None:
        """The value in this scope."""
        self.stack[-1][value, layout] = held

    def get(self, value: Value, layout: Layout | None = None) -> Held | None:
        """The value; one of an outer scope is copied to this one."""
        key = value, layout
        for depth, scope in enumerate(reversed(self.stack)):
            if key not in scope: continue
            found = scope[key]
            if depth: self.stack[-1][key] = found = copy_held(found)
            return found
        return None


def copy_held(held: Held) -> Held:
    """A tile whose parts can be converted without changing those of the other."""
    known: dict[int, Part] = {}
    for part in held.parts:
        if id(part) not in known:
            known[id(part)] = None if part is None else copy_part(part)
    return Held(held.dtype, held.shape, held.layout, [known[id(part)] for part in held.parts])


def copy_part(part: Lanes) -> Lanes:
    """A part that can be converted without changing the other."""
    return Lanes(part.kb, part.dtype, list(part.wide), part.packed, list(part.halves))


# **** registers ****

def materialise(kb: Kernel, part: Lanes, width: int) -> list[Register]:
    """New registers with a part's value, in the form in which loops and branches carry it: pairs of 16 bits
    packed, else one for each element."""
    if part.dtype in FLOAT16S and width == 2: return [_copy(kb, part.pair())]
    return [_copy(kb, part.register(i)) for i in range(width)]


def _copy(kb: Kernel, value: Register) -> Register: return kb.reg(value.kind, value)


def from_registers(kb: Kernel, dtype: DType, registers: Sequence[Register], width: int) -> Lanes:
    """The part that `materialise` has made registers of."""
    if dtype in FLOAT16S and width == 2: return Lanes(kb, dtype, [], registers[0])
    return Lanes(kb, dtype, list(registers))


def words(kb: Kernel, part: Lanes, width: int) -> list[Register]:
    """A part as registers of 32 bits: a pair of 16 bits is one, a predicate 0 or 1."""
    if part.dtype in FLOAT16S and width == 2: return [part.pair()]
    made = [part.register(i) for i in range(min(width, max(len(part.each()), 1)))]
    return [kb.select(each, 1, 0, "u32") if each.kind == "pred" else each for each in made]


def from_words(kb: Kernel, dtype: DType, registers: Sequence[Register], width: int) -> Lanes:
    """The part that `words` are of; equal elements are one word."""
    if dtype in FLOAT16S and width == 2: return Lanes(kb, dtype, [], registers[0])
    if kind_of(dtype) == "pred": return Lanes(kb, dtype, [each != 0 for each in registers])
    return Lanes(kb, dtype, list(registers))
