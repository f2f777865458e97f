"""A PTX entry function in the form that csrc/ runs: ops, constants, lists, and where each register lives.

Protocol: `lower(module, entry, addresses)` gives a `Program`. Control flow is made of positions in the op
list; each conditional branch carries its immediate post-dominator, the place where lanes that part there meet
again. `Program.pack(handlers)` turns the ops into bytes once handlers have addresses.
"""
from __future__ import annotations

import importlib
import pkgutil
import struct
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tinygrad_nv import collection
from tinygrad_nv.errors import PTXError
from tinygrad_nv.ptx.emulator.lowering import (
    REGISTRY,
    SHARED_BASE,
    SPECIALS,
    FunctionLowering,
    Lower,
    OpRecord,
    lowering_of,
)
from tinygrad_nv.ptx.isa import ARCH_VERSIONS, check, find
from tinygrad_nv.ptx.syntax import (
    Address,
    Immediate,
    Instruction,
    Operand,
    Pair,
    PTXFunction,
    PTXModule,
    Register,
    Symbol,
    Variable,
    Vector,
)
from tinygrad_nv.ptx.tokens import shorten

# the families register themselves
for _family in pkgutil.iter_modules([str(Path(__file__).parent)]):
    if _family.name.startswith("lower_"): importlib.import_module(f"tinygrad_nv.ptx.emulator.{_family.name}")

OP = struct.Struct("<Qq14iI4BHHi")
MOST_TARGETS = 1 << 18      # limit: targets of all brx.idx of a function
ENDLESS = -2                # where branches meet from which no way leads to an exit
RELATIVE = 1 << 24  # places above it are relative to the end of the constants
LOCAL_LIMIT = 512 << 10  # bytes a thread (CUDA C++ Programming Guide, "Technical Specifications")
# warps must be whole at these: what PTX calls .aligned, and instructions that imply it
ALIGNED = ("aligned",)
KNOWN: dict[tuple[str, tuple[str, ...]], Lower] = {}  # by mnemonic and modifiers
SOUND: set[Hashable] = set()  # kinds of instructions that the table has let pass: a check takes 0.1 ms


@dataclass(frozen=True)
class Program:
    """A lowered function. Sizes in bytes; `lines` and `opcodes` are by number of the PTX instruction."""
    name: str
    function: PTXFunction
    ops: list[OpRecord]
    constants: bytes
    register_bytes: int
    registers: dict[str, int]
    local_bytes: int
    static_bytes: int
    dynamic_align: int
    opcodes: list[str]
    lines: list[int]
    uses_wgmma: bool
    narrow: bool        # an access or a fence has a scope smaller than the GPU's
    remote: bool        # threads arrive at mbarriers that may be another CTA's

    def specials(self) -> list[int]:
        """Places of special registers in the order of core.h, -1 where unused."""
        return [self.registers.get("%" + name, -1) for name in SPECIALS]

    def pack(self, handler: Callable[[str], int]) -> tuple[bytes, list[int]]:
        """The ops as an array of core.h's `Op`, and the lists they refer to."""
        lists: list[int] = []
        packed = bytearray()
        for record in self.ops:
            places = []
            for values in (record.list, (len(record.reads), *record.reads),
                           (len(record.writes), *record.writes)):
                places.append(len(lists))
                lists += values
            aligned = record.aligned | record.counts << 1
            packed += OP.pack(
                handler(record.handler), signed64(record.imm), record.d, record.a, record.b, record.c,
                record.e, record.guard, places[0], len(record.list), record.target, record.join, record.line,
                record.source, places[1], places[2], record.flags, record.guard_negated, aligned,
                record.space, record.wide, record.width, record.vector, record.more)
        return bytes(packed), lists


def signed64(value: int) -> int:
    """An integer as its 64 bits are read: addresses wrap."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


@collection.pause()
def lower(module: PTXModule, function: PTXFunction, addresses: dict[str, int]) -> Program:
    """Lowers one entry function. `addresses` are those of the module's global and constant variables. Raises
    `PTXError` with the line of an instruction that is not emulated."""
    shared, static_bytes, align = lay_out_shared(module, function)
    local, local_bytes = layout(v for v in function.variables.values() if v.space == "local")
    check_sizes(module, function, local_bytes)
    low = FunctionLowering(function, module.target, addresses, shared, local,
                   {**module.variables, **function.variables})
    starts = []
    for number, instruction in enumerate(function.body):
        starts.append(len(low.ops))
        low.current, low.source_number = instruction, number
        made = find_lowering(instruction)
        try: made(low, instruction)
        except (IndexError, ValueError, KeyError, OverflowError, StopIteration) as error:
            raise low.fail(f"operands that do not fit ({error})", "the operands of the PTX manual") from error
        check_allowed(instruction, module)
        if len(low.ops) == starts[-1]: low.emit("nop")
        low.ops[-1].counts = True
        for op in low.ops[starts[-1]:]: op.aligned |= "aligned" in instruction.modifiers
    end = len(low.ops)
    # a body that runs off its end returns, whatever the guard of its last instruction
    low.ops.append(OpRecord("exit", line=low.current.line if low.current else function.line))
    starts.append(end)
    resolve(low, {name: starts[at] for name, at in function.labels.items()})
    relocate(low)
    return Program(function.name, function, low.ops, bytes(low.constants),
                   len(low.constants) + low.register_bytes,
                   low.registers, local_bytes, static_bytes, align, [i.opcode for i in function.body],
                   [i.line for i in function.body], any(i.mnemonic == "wgmma" for i in function.body),
                   any(is_narrow(i) for i in function.body), any(is_remote(i) for i in function.body))


def is_narrow(instruction: Instruction) -> bool:
    """Whether an access or a fence has a scope smaller than the GPU's. fence.mbarrier_init, which can have no
    other, is not counted."""
    ordering = ("ld", "st", "atom", "red", "fence", "membar", "multimem", "tensormap")
    return instruction.mnemonic in ordering and "mbarrier_init" not in instruction.modifiers \
        and not {"cta", "cluster"}.isdisjoint(instruction.modifiers)


def is_remote(instruction: Instruction) -> bool:
    """Whether threads arrive at an mbarrier that may be another CTA's."""
    return instruction.mnemonic == "mbarrier" and instruction.modifiers[0] in ("arrive", "arrive_drop") \
        and {"shared", "shared::cta"}.isdisjoint(instruction.modifiers)


def find_lowering(instruction: Instruction) -> Lower:
    """The lowering of an instruction that the table has: an unknown modifier is an error here, as it
    is for ptxas."""
    key = instruction.mnemonic, instruction.modifiers
    if (made := KNOWN.get(key)) is None: made = KNOWN[key] = _search_lowering(instruction)
    return made


def _search_lowering(instruction: Instruction) -> Lower:
    line, opcode = instruction.line, shorten(instruction.opcode)
    if instruction.mnemonic == "call": return REGISTRY["call"]  # of what calls.py leaves
    try: find(instruction.mnemonic, instruction.modifiers, line)
    except PTXError as error:
        raise PTXError(f"PTX line {line}: {opcode} is no instruction of sm_80 … sm_90a", line, error.expected,
                       error.fix) from None
    if (made := lowering_of(instruction)) is None:
        raise PTXError(f"PTX line {line}: {opcode} is not emulated", line,
                       "an instruction the emulator knows",
                       "see tinygrad_nv/ptx/emulator/lower_*.py for how to add it")
    return made


def check_allowed(instruction: Instruction, module: PTXModule) -> None:
    """Checks what the table says of operands, target and .version, as ptxas does. PTX for what came before
    sm_80 is held to that."""
    if instruction.mnemonic == "call": return
    arch, version = module.target, module.version
    if arch not in ARCH_VERSIONS: arch, version = "sm_80", max(version, ARCH_VERSIONS["sm_80"])
    kinds = [(o.kind, o.negated) if type(o) is Register else kind_of(o) for o in instruction.operands]
    kind = (arch, version, instruction.mnemonic, instruction.modifiers, *kinds)
    if kind in SOUND: return
    try: check(instruction, arch, version)
    except PTXError as error:
        raise PTXError(f"PTX {error.found}", error.line, error.expected, error.fix) from None
    SOUND.add(kind)


def kind_of(operand: Operand) -> Hashable:
    """Returns what the table asks of an operand: all but the names of registers."""
    match operand:
        case Register(_, kind, negated): return kind, negated
        case Immediate(value, bits): return type(value), value, bits  # 1 is not 1.0
        case Vector(items): return tuple(map(kind_of, items))
        case Pair(first, second): return Pair, kind_of(first), kind_of(second)
        case Address(Register() as base, _, coordinates):
            return Address, kind_of(base), coordinates and kind_of(coordinates)
    return operand


def check_sizes(module: PTXModule, function: PTXFunction, local_bytes: int) -> None:
    """Local memory and parameters that no device has are `PTXError`s (shared memory: see check_launch)."""
    if local_bytes > LOCAL_LIMIT:
        raise PTXError(f"{local_bytes} bytes of local memory a thread in {function.name}", function.line,
                       f"at most {LOCAL_LIMIT}")
    limit = 4352 if module.version < (8, 1) else 32764
    if function.parameter_bytes > limit:
        raise PTXError(f"{function.parameter_bytes} bytes of parameters of {function.name}", function.line,
                       f"at most {limit} in PTX {module.version[0]}.{module.version[1]}")


def layout(variables: object) -> tuple[dict[str, int], int]:
    """Offsets of variables one after the other, aligned, and the size of all."""
    places, at = {}, 0
    for variable in variables:  # type: ignore[attr-defined]
        assert isinstance(variable, Variable)
        at = -(-at // variable.align) * variable.align
        places[variable.name] = at
        at += variable.nbytes
    return places, -(-at // 16) * 16


def lay_out_shared(module: PTXModule, function: PTXFunction) -> tuple[dict[str, int], int, int]:
    """Addresses of shared variables (the first where it is on hardware), bytes of the static ones, and the
    alignment of the dynamic one, which begins after them."""
    variables = [v for v in (*module.variables.values(), *function.variables.values()) if v.space == "shared"]
    used = names_in(function)
    static = [v for v in variables if v.nbytes and v.name in used]
    dynamic = [v for v in variables if not v.nbytes]
    places, at = {}, SHARED_BASE
    for variable in static:
        at = -(-at // variable.align) * variable.align
        places[variable.name] = at
        at += variable.nbytes
    align = max((v.align for v in dynamic), default=1)
    if dynamic and static: at = -(-at // align) * align
    for variable in dynamic: places[variable.name] = at
    return places, at - SHARED_BASE, align


def names_in(function: PTXFunction) -> set[str]:
    """Symbols that instructions mention."""
    found = set()
    def visit(operand: object) -> None:
        if isinstance(operand, Symbol): found.add(operand.name)
        elif isinstance(operand, Address): visit(operand.base)
        elif isinstance(operand, Vector):
            for item in operand.items: visit(item)
    for instruction in function.body:
        for operand in instruction.operands: visit(operand)
    return found


# **** positions ****

def resolve(low: FunctionLowering, labels: dict[str, int]) -> None:
    """Labels become positions, and branches learn where their ways meet."""
    targets = 0
    for op in low.ops:
        if (targets := targets + len(op.labels)) > MOST_TARGETS:
            raise PTXError(f"PTX line {op.line}: the brx.idx of the function have more than "
                           f"{MOST_TARGETS} targets", op.line,
                           "shorter lists of .branchtargets, or fewer brx.idx")
        if isinstance(op.target, str): op.target = labels[op.target]
        if op.labels: op.list = tuple(labels[label] for label in op.labels)
    meet = post_dominators(low.ops)
    for at, op in enumerate(low.ops):
        if op.handler not in ("bra", "brx"): continue
        if meet[at] == ENDLESS and op.handler == "bra": op.handler = "bra_endless"
        op.join = max(meet[at], -1)


def successors(ops: list[OpRecord], at: int) -> tuple[int, ...]:
    """Positions that may follow; len(ops) is the exit."""
    op = ops[at]
    if op.handler == "exit": return (len(ops),) if op.guard < 0 else (at + 1, len(ops))
    if op.handler == "brx": return op.list if op.guard < 0 else (at + 1, *op.list)
    if op.handler != "bra": return (at + 1,)
    assert isinstance(op.target, int)
    return (op.target,) if op.guard < 0 else (at + 1, op.target)


def post_dominators(ops: list[OpRecord]) -> dict[int, int]:
    """For each branch the position of its immediate post-dominator, -1 when that is the exit, ENDLESS
    when no way leads there."""
    exit_ = len(ops)
    leaders = {0, exit_}
    branches = [at for at, op in enumerate(ops) if op.handler in ("bra", "brx", "exit")]
    for at in branches: leaders |= {*successors(ops, at), at + 1}
    starts = sorted(leader for leader in leaders if leader <= exit_)
    block_of = {start: number for number, start in enumerate(starts)}
    last = [end - 1 for end in starts[1:]]
    after = [tuple([block_of[s] for s in successors(ops, at)]) for at in last] + [()]
    before: list[list[int]] = [[] for _ in starts]
    for number, following in enumerate(after):
        for other in following: before[other].append(number)
    meet = dominators(before, after, len(starts) - 1)
    found = {last[number]: starts[meet[number]] for number in range(len(last)) if number in meet}
    return {at: (p if p < exit_ else -1) for at in branches
            for p in (found.get(at, ENDLESS),) if ops[at].handler != "exit"}


def dominators(after: Sequence[Sequence[int]], before: Sequence[Sequence[int]], root: int) -> dict[int, int]:
    """Immediate dominators of the nodes that the root reaches, by edges to what comes after and from what
    comes before. Lengauer and Tarjan, "A Fast Algorithm for Finding Dominators in a Flowgraph" (1979), the
    simple version: m log n steps. Nodes go by their depth-first numbers."""
    nodes, parent = depth_first(after, root)
    number = {node: at for at, node in enumerate(nodes)}
    semi, label, found = list(range(len(nodes))), list(range(len(nodes))), [0] * len(nodes)
    ancestor = [-1] * len(nodes)    # in the forest of what has been visited, with paths compressed
    waiting: list[list[int]] = [[] for _ in nodes]  # by semidominator

    def least(at: int) -> int:
        """The node with the least semidominator on the way up from a node."""
        path = []
        while ancestor[at] >= 0 and ancestor[ancestor[at]] >= 0:
            path.append(at)
            at = ancestor[at]
        top = at
        for below in reversed(path):
            if semi[label[top]] < semi[label[below]]: label[below] = label[top]
            ancestor[below], top = ancestor[at], below
        return label[top]

    for at in range(len(nodes) - 1, 0, -1):
        semi[at] = min([semi[least(number[node])] for node in before[nodes[at]] if node in number])
        waiting[semi[at]].append(at)
        ancestor[at] = up = parent[at]
        for other in waiting[up]:
            lowest = least(other)
            found[other] = lowest if semi[lowest] < semi[other] else up
        waiting[up].clear()
    for at in range(1, len(nodes)):
        if found[at] != semi[at]: found[at] = found[found[at]]
    return {node: nodes[found[at]] for at, node in enumerate(nodes)}


def depth_first(edges: Sequence[Sequence[int]], root: int) -> tuple[list[int], list[int]]:
    """Nodes in depth-first order, and for each the number of its parent. Without recursion."""
    nodes, parents, seen, stack = [root], [0], {root}, [(0, iter(edges[root]))]
    while stack:
        number, rest = stack[-1]
        for other in rest:
            if other in seen: continue
            seen.add(other)
            stack.append((len(nodes), iter(edges[other])))
            nodes.append(other)
            parents.append(number)
            break
        else: stack.pop()
    return nodes, parents


# **** places ****

def relocate(low: FunctionLowering) -> None:
    """Registers follow the constants, now that all of those are known; reads and writes are collected."""
    low.constants += bytes(-len(low.constants) % 128)
    by = len(low.constants) - RELATIVE

    def relocate_places(places: tuple[int, ...]) -> tuple[int, ...]:
        return tuple([at + by if at >= RELATIVE else at for at in places])
    low.registers = {name: at + by if at >= RELATIVE else at for name, at in low.registers.items()}
    for op in low.ops:
        op.d, op.a, op.b, op.c, op.e, op.guard = relocate_places((op.d, op.a, op.b, op.c, op.e, op.guard))
        op.reads = relocate_places(op.reads) or tuple([at for at in (op.a, op.b, op.c, op.e) if at >= 0])
        op.writes = relocate_places(op.writes) or ((op.d,) if op.d >= 0 else ())
        if op.list: op.list = relocate_places(op.list)
