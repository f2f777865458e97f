"""Asynchronous copies: cp.async, bulk and tensor copies and their groups, st.async, red.async, tensor maps
edited in place; addresses in other CTAs. Handlers: csrc/async.c, csrc/bulk.c, csrc/tma.c, csrc/tensormap.c.

Addresses beyond an op's own are made 64-bit values first (`async_address`), whatever they were written as.
"""
from __future__ import annotations

from tinygrad_nv.ptx.emulator.lower_memory import scope_flag
from tinygrad_nv.ptx.emulator.lowering import SPACES, WIDTHS, FunctionLowering, lowers
from tinygrad_nv.ptx.syntax import Address, Immediate, Instruction, Operand, Register, Vector

REDUCTIONS = {"add": 1, "min": 2, "max": 3, "inc": 4, "dec": 5, "and": 6, "or": 7, "xor": 8}
TYPES = {"u32": 2, "b32": 2, "s32": 3, "u64": 4, "b64": 4, "s64": 5, "f16": 6, "f32": 7, "f64": 9, "bf16": 10}
FIELDS = {"global_address": 0, "rank": 1, "elemtype": 2, "interleave_layout": 3, "swizzle_mode": 4,
          "fill_mode": 5, "global_dim": 6, "global_stride": 7, "element_stride": 8, "box_dim": 9}
ORDINALS = {"global_dim": 5, "global_stride": 4, "element_stride": 5, "box_dim": 5}
LIMITS = {"rank": 4, "elemtype": 12, "interleave_layout": 2, "swizzle_mode": 3, "fill_mode": 1}
WAIT_ALL = NOINC = WAIT_READ = 1
IM2COL = 16
SHARED = ("shared", "shared::cta", "shared::cluster")


# **** operands ****

def address_of(low: FunctionLowering, operand: Operand) -> int:
    """The place of a u64 with an address."""
    where = low.address(operand)
    if where["wide"] and int(where["a"]) >= 0 and where["imm"] == 0: return int(where["a"])
    place = low.scratch("b64")
    low.emit("async_address", d=place, **where)
    return place


def spaces_of(instruction: Instruction) -> list[str]:
    """The state spaces of an opcode in order: destination, source."""
    return [m for m in instruction.modifiers if m in SPACES]


def without_policy(low: FunctionLowering, instruction: Instruction) -> list[Operand]:
    """The operands but the cache policy, which must be one, and changes nothing here."""
    operands = list(instruction.operands)
    if low.has("L2::cache_hint"): low.emit("check_policy", a=low.source(operands.pop(), "b64"))
    return operands


def count_of(low: FunctionLowering, operand: Operand) -> int:
    """A constant number of groups."""
    if not isinstance(operand, Immediate) or not 0 <= operand.value < 1 << 32:
        raise low.fail("a count that is not constant", "an integer constant ≥ 0")
    return int(operand.value)


def reduction(low: FunctionLowering) -> int:
    """A reduction's flags: what, and on which type."""
    types = low.types()
    if not low.one_of(*REDUCTIONS) or not types or types[-1] not in TYPES:
        raise low.fail("no reduction", f"one of {', '.join(REDUCTIONS)} and a type of {', '.join(TYPES)}")
    return REDUCTIONS[low.one_of(*REDUCTIONS)] | TYPES[types[-1]] << 4


def places(*candidates: int | bool) -> tuple[int, ...]:
    """Returns the candidates that are there: what an op with a list reads."""
    return tuple(int(place) for place in candidates if int(place) >= 0)


# **** other CTAs' shared memory ****

@lowers("mapa")
def mapa(low: FunctionLowering, instruction: Instruction) -> None:
    """`mapa{.shared::cluster}.{u32, u64} d, a, rank;`."""
    to, address, rank = instruction.operands
    kind = low.types()[-1]
    low.emit("mapa", d=low.dest(to, kind), a=low.source(address, kind), b=low.source(rank, "u32"),
             width=WIDTHS[kind])


@lowers("getctarank")
def getctarank(low: FunctionLowering, instruction: Instruction) -> None:
    """`getctarank{.shared::cluster}.{u32, u64} d, a;`."""
    to, address = instruction.operands
    kind = low.types()[-1]
    low.emit("getctarank", d=low.dest(to), a=low.source(address, kind), width=WIDTHS[kind])


# **** cp.async ****

@lowers("cp.async")
def cp_async(low: FunctionLowering, instruction: Instruction) -> None:
    """`cp.async.{ca, cg}.shared{::cta}.global{.hints} [dst], [src], size{, src-size | ignore-src}
    {, policy};`."""
    to, source, size, *rest = without_policy(low, instruction)
    if not isinstance(size, Immediate) or size.value not in ((16,) if low.has("cg") else (4, 8, 16)):
        raise low.fail("a copy of that size", "16 bytes with .cg; 4, 8 or 16 with .ca")
    fields = {}
    if rest:
        is_predicate = isinstance(rest[0], Register) and rest[0].kind == "pred"
        fields["e" if is_predicate else "c"] = low.source(rest[0], "pred" if is_predicate else "u32")
    low.emit("cp_async", b=address_of(low, source), width=int(size.value), space=SPACES["shared"],
             **low.address(to), **fields)


@lowers("cp.async.commit_group")
def cp_commit(low: FunctionLowering, instruction: Instruction) -> None:
    """`cp.async.commit_group;`."""
    low.emit("cp_commit")


@lowers("cp.async.wait_group", "cp.async.wait_all")
def cp_wait(low: FunctionLowering, instruction: Instruction) -> None:
    """`cp.async.wait_group n;` and `cp.async.wait_all;`."""
    if low.has("wait_all"): low.emit("cp_wait", flags=WAIT_ALL)
    else: low.emit("cp_wait", imm=count_of(low, instruction.operands[0]))


@lowers("cp.async.mbarrier.arrive")
def cp_arrive(low: FunctionLowering, instruction: Instruction) -> None:
    """`cp.async.mbarrier.arrive{.noinc}{.shared{::cta}}.b64 [mbarrier];`."""
    (barrier,) = instruction.operands
    low.emit("cp_arrive", space=low.space(), flags=NOINC if low.has("noinc") else 0, **low.address(barrier))


# **** bulk ****

@lowers("cp.async.bulk.commit_group")
def bulk_commit(low: FunctionLowering, instruction: Instruction) -> None:
    """`cp.async.bulk.commit_group;`."""
    low.emit("bulk_commit")


@lowers("cp.async.bulk.wait_group")
def bulk_wait(low: FunctionLowering, instruction: Instruction) -> None:
    """`cp.async.bulk.wait_group{.read} n;`."""
    flags = WAIT_READ if low.has("read") else 0
    low.emit("bulk_wait", imm=count_of(low, instruction.operands[0]), flags=flags)


@lowers("cp.async.bulk", "cp.reduce.async.bulk")
def bulk(low: FunctionLowering, instruction: Instruction) -> None:
    """`cp{.reduce}.async.bulk.dst.src.completion… [dst], [src], size{, [mbarrier]}{, mask}{, policy};`."""
    to, source, size, *rest = without_policy(low, instruction)
    spaces = spaces_of(instruction)
    if len(spaces) != 2: raise low.fail(f"{len(spaces)} state spaces", "those of destination and source")
    flags = reduction(low) if low.has("reduce") else 0
    from_, bytes_ = address_of(low, source), low.source(size, "u32")
    barrier = address_of(low, rest.pop(0)) if spaces[0] in SHARED else -1
    ctas = (low.source(rest.pop(0), "u16"),) if low.has("multicast::cluster") else ()
    where = low.address(to)
    if spaces[0] in SHARED:
        low.emit("bulk_load", b=from_, c=barrier, e=bytes_, list=ctas, flags=flags,
                 space=SPACES["shared::cluster"],
                 more=SPACES["shared" if spaces[1] in SHARED else "global"],
                 reads=places(where["a"], from_, barrier, bytes_, *ctas), **where)
    else: low.emit("bulk_store", b=from_, e=bytes_, flags=flags, space=SPACES["global"], **where)


@lowers("cp.async.bulk.prefetch")
def bulk_prefetch(low: FunctionLowering, instruction: Instruction) -> None:
    """`cp.async.bulk.prefetch.L2.global{.hint} [src], size{, policy};`."""
    source, size = without_policy(low, instruction)
    low.emit("bulk_prefetch", b=address_of(low, source), e=low.source(size, "u32"))


@lowers("st.async", "red.async")
def st_async(low: FunctionLowering, instruction: Instruction) -> None:
    """`st.async….shared::cluster.mbarrier::complete_tx::bytes{.vec}.type [dst], value, [mbarrier];` and
    `red.async….op.type …;`."""
    to, value, barrier = instruction.operands
    kind = low.types()[-1]
    values = low.sources(value, kind)
    if len(values) != int(low.one_of("v2", "v4", default="v1")[1:]) or WIDTHS[kind] not in (4, 8):
        raise low.fail(f"{len(values)} values of type .{kind}",
                       "as many as .v2 or .v4 says, of 32 or 64 bits")
    where, signal = low.address(to), address_of(low, barrier)
    low.emit("st_async", c=signal, list=values, width=WIDTHS[kind], vector=len(values),
             space=SPACES["shared::cluster"], flags=reduction(low) if instruction.mnemonic == "red" else 0,
             reads=places(where["a"], signal, *values), **where)


# **** tensors ****

def tensor(low: FunctionLowering, operand: Operand) -> tuple[int, tuple[int, ...]]:
    """The place of the map's address and those of the coordinates of `[map, {c0, …}]`."""
    if not isinstance(operand, Address) or operand.coordinates is None:
        raise low.fail("a tensor's place is expected", "[map, {c0, c1, …}]")
    coordinates = low.sources(operand.coordinates, "s32")
    rank = int(low.one_of("1d", "2d", "3d", "4d", "5d", default="0d")[0])
    if len(coordinates) != rank:
        raise low.fail(f"{len(coordinates)} coordinates", f"{rank}, as the opcode says")
    return address_of(low, Address(operand.base, operand.offset)), coordinates


def mode(low: FunctionLowering) -> int:
    """The flag of im2col modes. Modes of later architectures are errors."""
    if low.one_of("tile::gather4", "tile::scatter4", "im2col::w", "im2col::w::128"):
        raise low.fail("a mode of sm_100", ".tile or .im2col")
    return IM2COL if low.one_of("im2col", "im2col_no_offs") else 0


@lowers("cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor")
def bulk_tensor(low: FunctionLowering, instruction: Instruction) -> None:
    """`cp{.reduce}.async.bulk.tensor.dim.dst.src…`: to shared memory `[dst], [map, {c}], [mbarrier]
    {, {offsets}}{, mask}{, policy};`, to global memory `[map, {c}], [src]{, policy};`."""
    operands = without_policy(low, instruction)
    spaces = spaces_of(instruction)
    load = bool(spaces) and spaces[0] in SHARED
    flags = mode(low)
    map_, coordinates = tensor(low, operands.pop(1 if load else 0))
    where = low.address(operands.pop(0))
    if not load:
        if low.has("reduce"): flags |= REDUCTIONS[low.one_of(*REDUCTIONS)]
        low.emit("tma_store", b=map_, list=coordinates, vector=len(coordinates), flags=flags,
                 space=SPACES["shared"], reads=places(where["a"], map_, *coordinates), **where)
        return
    barrier = address_of(low, operands.pop(0))
    offsets: tuple[int, ...] = ()
    if operands and isinstance(operands[0], Vector): offsets = low.sources(operands.pop(0), "u16")
    if flags and len(offsets) != len(coordinates) - 2:
        raise low.fail(f"{len(offsets)} im2col offsets", "one for each spatial dimension")
    ctas = low.source(operands.pop(0), "u16") if low.has("multicast::cluster") else -1
    low.emit("tma_load", b=map_, c=barrier, e=ctas, list=(*coordinates, *offsets), vector=len(coordinates),
             flags=flags, space=SPACES["shared::cluster"],
             reads=places(where["a"], map_, barrier, ctas, *coordinates, *offsets), **where)


@lowers("cp.async.bulk.prefetch.tensor")
def prefetch_tensor(low: FunctionLowering, instruction: Instruction) -> None:
    """`cp.async.bulk.prefetch.tensor.dim.L2.global{.mode} [map, {c}]{, {offsets}}{, policy};`."""
    place, *offsets = without_policy(low, instruction)
    map_, coordinates = tensor(low, place)
    shifts = low.sources(offsets[0], "u16") if offsets else ()
    low.emit("tma_prefetch", b=map_, list=(*coordinates, *shifts), vector=len(coordinates), flags=mode(low),
             reads=places(map_, *coordinates, *shifts))


# **** tensor maps ****

@lowers("tensormap.replace")
def tensormap_replace(low: FunctionLowering, instruction: Instruction) -> None:
    """`tensormap.replace.tile.field{.space}.b1024.{b32, b64} [map]{, ordinal}, value;`."""
    address, *ordinals, value = instruction.operands
    name = low.one_of(*FIELDS)
    if not name: raise low.fail("no field", f"one of {', '.join(FIELDS)}")
    if len(ordinals) != (name in ORDINALS):
        raise low.fail("operands that do not fit", "an ordinal for dimensions alone")
    ordinal = count_of(low, ordinals[0]) if ordinals else 0
    if ordinal >= ORDINALS.get(name, 1): raise low.fail(f"ordinal {ordinal}", f"less than {ORDINALS[name]}")
    if name in LIMITS and isinstance(value, Immediate) and not 0 <= value.value <= LIMITS[name]:
        raise low.fail(f"{name} {value.value}", f"0 to {LIMITS[name]}")
    place = low.source(value, "b64")
    if isinstance(value, Register) and low.width_of(value) != 8:
        narrow, place = low.source(value, "b32"), low.scratch("b64")
        low.emit("widen_u32", d=place, a=narrow)
    low.emit("tensormap_replace", b=place, more=FIELDS[name], flags=ordinal, space=low.space(),
             **low.address(address))


@lowers("tensormap.cp_fenceproxy")
def tensormap_copy(low: FunctionLowering, instruction: Instruction) -> None:
    """`tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.scope.sync.aligned
    [dst], [src], 128;`."""
    to, source, size = instruction.operands
    if not isinstance(size, Immediate) or size.value != 128: raise low.fail("a size that is not 128", "128")
    low.emit("tensormap_copy", b=address_of(low, source), space=SPACES["global"], flags=scope_flag(low),
             **low.address(to))


@lowers("fence.proxy.tensormap::generic.acquire")
def tensormap_acquire(low: FunctionLowering, instruction: Instruction) -> None:
    """`fence.proxy.tensormap::generic.acquire.scope [map], 128;`."""
    low.emit("tensormap_acquire", flags=scope_flag(low), **low.address(instruction.operands[0]))
