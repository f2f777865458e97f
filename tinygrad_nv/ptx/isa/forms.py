"""Instruction forms, read from the tables.

A row is `key pattern; operands; needs`, and a line that begins with a blank continues the row above.
  key       the fixed leading words of the opcode: the name of what the instruction does
  pattern   the modifiers after them: `.x` as it stands, `(.a|.b)` one of them, `{.a|.b}` one or none;
            `[…]` all of it or nothing, which makes two rows; `<name>` stands for the alternatives of
            `SETS`, and for one of them outside brackets
  operands  slots as `operands.py` writes them, `-` for none; ` | ` between alternative lists
  needs     lowest targets, `80` if empty: `90`, or with the lowest .version `90:8.1`; `89:8.1 90` says that
            from sm_90 on the version of the target itself is enough. `.x@90:8.1` says so of a modifier.

Types among the modifiers keep their order (cvt.d.s, mma D.A.B.C); the order of all others means nothing.
"""
from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from tinygrad_nv.ptx.isa import arithmetic as isa_arithmetic
from tinygrad_nv.ptx.isa import memory as isa_memory
from tinygrad_nv.ptx.isa import tensor as isa_tensor
from tinygrad_nv.ptx.isa.operands import PACKED, Need, OperandSlot, Use, family, need, rank, slot, width
from tinygrad_nv.ptx.parser import WIDTHS

ARCH_VERSIONS = {"sm_80": (7, 0), "sm_86": (7, 1), "sm_87": (7, 4), "sm_89": (7, 8), "sm_90": (7, 8),
                 "sm_90a": (8, 0)}


def _sets() -> dict[str, str]:
    def each(words: str) -> str: return "|".join(f".{word}" for word in words.split())
    shapes = {f"m64k{k}": "|".join(f".m64n{n}k{k}" for n in range(8, 257, 8)) for k in (8, 16, 32, 64)}
    counts = (8, 16, 24, *range(32, 257, 16))  # N of the integer types
    shapes |= {name: "|".join(f".m64n{n}k{k}" for n in counts)
               for name, k in (("m64k32i", 32), ("m64k64i", 64), ("m64k256", 256))}
    shared = ".shared|.shared::cta@80:7.8|.shared::cluster@90"
    return {
        "int": each("u16 s16 u32 s32 u64 s64"), "int32": each("u32 s32 u64 s64"),
        "byte": each("u8 s8 u16 s16 u32 s32 u64 s64"),
        "any": each("b16 b32 b64 u16 u32 u64 s16 s32 s64 f32 f64"),
        "mem": each("b8 b16 b32 b64 u8 u16 u32 u64 s8 s16 s32 s64 f32 f64") + "|.b128@80:8.3",
        "round": each("rn rz rm rp"), "rint": each("rni rzi rmi rpi"), "fp8": each("e4m3 e5m2"),
        "compare": each("eq ne lt le gt ge"), "boolean": each("and or xor"),
        "fcompare": each("eq ne lt le gt ge equ neu ltu leu gtu geu num nan"),
        "vec": each("v2 v4"), "shared": shared, "space": f".global|.local|{shared}",
        "fspace": ".global|.shared|.shared::cta@80:7.8",
        "cta": ".shared|.shared::cta@80:7.8", "scope": ".cta|.gpu|.sys|.cluster@90", "near": ".cta|.cluster",
        "sem": each("relaxed acquire release acq_rel"), "hint": ".L2::cache_hint@80:7.4",
        "L1": "|".join(f".L1::{word}@80:7.4" for word in
                       ("evict_normal", "evict_unchanged", "evict_first", "evict_last", "no_allocate")),
        "prefetch": "|".join(f".L2::{size}@80:7.4" for size in ("64B", "128B", "256B")),
        "evict": "|".join(f".L2::evict_{word}" for word in ("last", "normal", "first", "unchanged")),
        "dim": each("1d 2d 3d 4d 5d"), "dim3": each("3d 4d 5d"), "layout": each("row col"),
        "m16k16": each("m16n16k16 m8n32k16 m32n8k16"), **shapes}


SETS = _sets()
TYPES = frozenset({*WIDTHS, *PACKED, "b1", "u2", "s2", "u4", "s4", "e4m3", "e5m2"})
PART = re.compile(r"\((?P<one>[^)]+)\)|\{(?P<optional>[^}]+)\}|(?P<set><\w+>)|(?P<fixed>\.[\w:]+)")
OPTIONAL = re.compile(r"\[([^]]+)\]")
COUNTED = re.compile(r"v(\d)|(\d)d|m64n(\d+)k\d+")


@dataclass(frozen=True)
class Group:
    """Alternatives of which one, or (not `required`) at most one, is among the modifiers."""
    alternatives: dict[str, Need]
    required: bool
    is_type: bool


@dataclass(frozen=True)
class Form:
    """A row: `words` are the modifiers in its key, `operands` the alternative operand lists."""
    key: str
    mnemonic: str
    words: tuple[str, ...]
    groups: tuple[Group, ...]
    operands: tuple[tuple[OperandSlot, ...], ...]
    need: Need
    text: str

    def match(self, modifiers: tuple[str, ...]) -> tuple[str | None, ...] | None:
        """The alternative each group has in an opcode, None where the opcode is no instance of the form."""
        rest = list(modifiers)
        for word in self.words:
            if word not in rest: return None
            rest.remove(word)
        taken: list[str | None] = [None] * len(self.groups)
        types = iter([i for i, group in enumerate(self.groups) if group.is_type])
        for word in rest:
            if word in TYPES: place = next(types, None)
            else: place = next((i for i, group in enumerate(self.groups) if taken[i] is None
                                and word in group.alternatives), None)
            if place is None or word not in self.groups[place].alternatives: return None
            taken[place] = word
        missing = any(group.required and word is None for group, word in zip(self.groups, taken, strict=True))
        return tuple(taken) if not missing and self.combine(tuple(rest)) else None

    def use(self, modifiers: tuple[str, ...]) -> Use:
        """Returns what the slots need to know of an opcode."""
        rest = list(modifiers)
        for word in self.words: rest.remove(word)
        count = next((int(next(filter(None, found.groups()))) for word in rest
                      if (found := COUNTED.fullmatch(word))), 1)
        return Use(tuple(word for word in rest if word in TYPES), count, modifiers)

    def combine(self, rest: tuple[str, ...]) -> bool:
        """Vectors in memory have at most 16 bytes, L2 qualifiers are for global memory, and integers saturate
        where the destination lacks values of the source."""
        types = [word for word in rest if word in TYPES]
        if self.mnemonic in ("ld", "ldu", "st", "atom", "red"):
            vector = next((int(word[1]) for word in rest if word in ("v2", "v4", "v8")), 1)
            if vector > 1 and vector * width(types[-1]) > 128: return False
            return not any(word[:4] == "L2::" for word in rest) or all(word[:6] != "shared" for word in rest)
        return self.key != "cvt" or "sat" not in rest or not _holds(types[0], types[1])

    def lowest(self, modifiers: tuple[str, ...], arch: str,
               slots: tuple[OperandSlot, ...] = ()) -> tuple[int, int] | None:
        """The lowest .version that has an opcode with these operands on an architecture, None where none has.
        """
        taken = self.match(modifiers)
        assert taken is not None, f"{modifiers} is no instance of {self.text}"
        needs = [self.need, *(group.alternatives[word] for group, word in zip(self.groups, taken, strict=True)
                              if word is not None),
                 *(slot.need for slot in slots)]
        versions = [ARCH_VERSIONS[arch]]
        for targets in needs:
            reached = [version for target, version in targets if target <= rank(arch)]
            if targets and not reached: return None
            versions += reached[-1:]
        return max(versions)

    def target(self, modifiers: tuple[str, ...], slots: tuple[OperandSlot, ...] = ()) -> str:
        """The lowest architecture that has an opcode."""
        return next(arch for arch in ARCH_VERSIONS if self.lowest(modifiers, arch, slots) is not None)

    def opcodes(self) -> Iterator[tuple[str, ...]]:
        """Instances (their modifiers) in which each alternative stands at least once."""
        seen = set()
        first = [next(iter(group.alternatives)) if group.required else None for group in self.groups]
        for place, group in enumerate(self.groups):
            for word in group.alternatives:
                made = next((made for made in self._around(first, place, word) if self.match(made)), None)
                if made is not None and made not in seen:
                    seen.add(made)
                    yield made
        if not self.groups: yield self.words

    def _around(self, first: list[str | None], place: int, word: str) -> Iterator[tuple[str, ...]]:
        """The first alternatives but for one group, then with any types."""
        kinds = [[word] if i == place else list(group.alternatives) if group.is_type else [first[i]]
                 for i, group in enumerate(self.groups)]
        for words in itertools.product(*kinds):
            yield (*self.words, *(each for each in words if each is not None))


def _holds(target: str, source: str) -> bool:
    """Whether an integer type has all values of another."""
    if family(target) != "i" or family(source) != "i": return False
    signs, more = (target[0], source[0]), width(target) - width(source)
    return more >= 0 if signs in (("u", "u"), ("s", "s")) else signs == ("s", "u") and more > 0


@functools.cache
def _alternatives(text: str) -> dict[str, Need]:
    out: dict[str, Need] = {}
    for each in text.split("|"):
        if each.startswith("<"): out |= _alternatives(SETS[each[1:-1]])
        else:
            name, _, needs = each.partition("@")
            out[name[1:]] = need(needs)
    return out


@functools.cache
def _group(text: str, required: bool) -> Group:
    alternatives = _alternatives(text)
    return Group(alternatives, required, required and all(word in TYPES for word in alternatives))


def _form(row: str) -> Form:
    head, operands, needs = (*(part.strip() for part in row.split(";")), "")[:3]
    key, _, pattern = head.partition(" ")
    mnemonic, *words = key.split(".")
    groups = []
    for part in PART.finditer(pattern.replace(" ", "")):
        text = part["one"] or part["optional"] or part["set"] or part["fixed"]
        groups.append(_group(text, part["optional"] is None))
    lists = tuple(tuple(slot(each) for each in one.split() if each != "-") for one in operands.split(" | "))
    return Form(key, mnemonic, tuple(words), tuple(groups), lists, need(needs), head)


def _rows() -> Iterator[str]:
    modules = (isa_arithmetic, isa_memory, isa_tensor)
    tables = [value for module in modules for name, value in vars(module).items()
              if name.isupper() and name != "SPARSE"]
    for table in tables:
        for row in re.sub(r"\n +", " ", table).strip().splitlines():
            part = OPTIONAL.search(row.partition(";")[0])
            if part is not None: yield row[:part.start()] + row[part.end():]
            yield row if part is None else row[:part.start()] + part.group(1) + row[part.end():]
    for row in isa_tensor.SPARSE.strip().splitlines():
        head, operands, needs = (*(part.strip() for part in row.split(";")), "")[:3]
        yield f"mma.sp .sync.aligned.{head}; {operands}; {needs or '80:7.1'}"
        yield f"mma.sp::ordered_metadata .sync.aligned.{head}; {operands}; {'89:8.5' if needs else '80:8.5'}"


FORMS: tuple[Form, ...] = tuple(_form(row) for row in _rows())
