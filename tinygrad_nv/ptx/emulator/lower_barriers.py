"""Barriers of a CTA and of a cluster, mbarriers, fences, setmaxnreg, griddepcontrol. Handlers:
csrc/barriers.c, csrc/mbarrier.c, csrc/phases.c."""
from __future__ import annotations

from tinygrad_nv.ptx.emulator.lower_memory import scope_flag
from tinygrad_nv.ptx.emulator.lowering import SPACES, FunctionLowering, lowers
from tinygrad_nv.ptx.syntax import Immediate, Instruction, Operand, Register, Sink

WAITS, REDUCES, UNALIGNED = 16, 32, 64            # barriers.c
NO_COMPLETE, EXPECT, DROP, PARITY, RELAXED, TEST, CLUSTER_WIDE = 16, 32, 64, 128, 256, 512, 1024  # mbarrier.c
REDUCTIONS = {"popc": 0, "and": 1, "or": 2}
SHARED, GLOBAL = 1, 2                             # fence_proxy
ACQUIRES, RELEASES, INITS = 1, 2, 4               # fence


# **** named barriers ****

@lowers("bar", "bar.sync", "bar.arrive", "bar.red", "barrier", "barrier.sync", "barrier.arrive",
        "barrier.red")
def lower_named_barrier(low: FunctionLowering, instruction: Instruction) -> None:
    """`bar{.cta}.{sync, arrive, red.op.type} …` and `barrier{.cta}…{.aligned}`; bar is always aligned."""
    kind = low.one_of("sync", "arrive", "red")
    operands = list(instruction.operands)
    out = operands.pop(0) if kind == "red" else None
    predicate = operands.pop() if kind == "red" else None
    if not kind or not 1 <= len(operands) <= 2:
        raise low.fail("operands that do not fit", "a barrier and a count")
    if kind == "arrive" and len(operands) != 2:
        raise low.fail("no count of threads", "bar.arrive barrier, count")
    aligned = instruction.mnemonic == "bar" or low.has("aligned")
    flags = {"sync": WAITS, "arrive": 0, "red": WAITS | REDUCES}[kind] | (0 if aligned else UNALIGNED)
    fields = {"a": low.source(operands[0], "u32"), "flags": flags, "aligned": aligned}
    if len(operands) == 2: fields["b"] = low.source(operands[1], "u32")
    if out is not None and predicate is not None:
        operation = low.one_of(*REDUCTIONS)
        fields["more"] = REDUCTIONS[operation]
        fields["c"] = low.source(predicate, "pred")
        fields["d"] = low.dest(out, "u32" if operation == "popc" else "pred")
    low.emit("bar", **fields)


@lowers("barrier.cluster.arrive")
def cluster_arrive(low: FunctionLowering, instruction: Instruction) -> None:
    """`barrier.cluster.arrive{.release, .relaxed}{.aligned};`."""
    low.emit("cluster_arrive", flags=RELAXED if low.has("relaxed") else 0)


@lowers("barrier.cluster.wait")
def cluster_wait(low: FunctionLowering, instruction: Instruction) -> None:
    """`barrier.cluster.wait{.acquire}{.aligned};`."""
    low.emit("cluster_wait")


# **** mbarriers ****

def place(low: FunctionLowering, operand: Operand) -> dict[str, int | bool]:
    """Address and state space of an mbarrier."""
    return {**low.address(operand), "space": low.space()}


@lowers("mbarrier.init")
def mbarrier_init(low: FunctionLowering, instruction: Instruction) -> None:
    """`mbarrier.init{.shared{::cta}}.b64 [a], count;`."""
    address, count = instruction.operands
    low.emit("mbarrier_init", b=low.source(count, "u32"), **place(low, address))


@lowers("mbarrier.inval")
def mbarrier_inval(low: FunctionLowering, instruction: Instruction) -> None:
    """`mbarrier.inval{.shared{::cta}}.b64 [a];`."""
    (address,) = instruction.operands
    low.emit("mbarrier_inval", **place(low, address))


@lowers("mbarrier.expect_tx", "mbarrier.complete_tx")
def mbarrier_tx(low: FunctionLowering, instruction: Instruction) -> None:
    """`mbarrier.{expect_tx, complete_tx}{.relaxed}{.scope}{.space}.b64 [a], bytes;`."""
    address, count = instruction.operands
    low.emit("mbarrier_expect_tx" if low.has("expect_tx") else "mbarrier_complete_tx",
             b=low.source(count, "u32"), **place(low, address))


@lowers("mbarrier.arrive", "mbarrier.arrive_drop")
def mbarrier_arrive(low: FunctionLowering, instruction: Instruction) -> None:
    """`mbarrier.arrive{_drop}{.noComplete}{.expect_tx}{.sem}{.scope}{.space}.b64 {state,} [a]{, count};`."""
    operands = list(instruction.operands)
    # the state may be left out
    state = operands.pop(0) if isinstance(operands[0], Register | Sink) else None
    address, *count = operands
    flags = NO_COMPLETE if low.has("noComplete") else 0
    if low.has("expect_tx"): flags |= EXPECT
    if low.has("arrive_drop"): flags |= DROP
    if low.has("relaxed"): flags |= RELAXED
    if low.has("cluster"): flags |= CLUSTER_WIDE
    if flags & (EXPECT | NO_COMPLETE) and not count:
        raise low.fail("no count", "bytes" if flags & EXPECT else "arrivals")
    fields = place(low, address)
    if fields["space"] == SPACES["shared::cluster"] and isinstance(state, Register):
        raise low.fail("the state of a remote mbarrier", "_ as destination")
    if count: fields["b"] = low.source(count[0], "u32")
    if isinstance(state, Register): fields["d"] = low.dest(state, "b64")
    low.emit("mbarrier_arrive", flags=flags, **fields)


@lowers("mbarrier.test_wait", "mbarrier.try_wait")
def mbarrier_wait(low: FunctionLowering, instruction: Instruction) -> None:
    """`mbarrier.{test_wait, try_wait}{.parity}{.sem}{.scope}{.space}.b64 p, [a], {state, parity}{, ns};`. How
    long try_wait may take is up to the machine."""
    ended, address, which = instruction.operands[:3]
    parity = PARITY if low.has("parity") else 0
    scope = CLUSTER_WIDE if low.has("cluster") else 0
    low.emit("mbarrier_wait", d=low.dest(ended, "pred"), b=low.source(which, "u32" if parity else "b64"),
             flags=parity | scope | (TEST if low.has("test_wait") else 0),
             **place(low, address))


@lowers("mbarrier.pending_count")
def mbarrier_pending_count(low: FunctionLowering, instruction: Instruction) -> None:
    """`mbarrier.pending_count.b64 n, state;`."""
    count, state = instruction.operands
    low.emit("mbarrier_pending_count", d=low.dest(count), a=low.source(state, "b64"))


# **** fences ****

@lowers("fence", "membar", "fence.mbarrier_init", "fence.proxy.tensormap::generic")
def fence(low: FunctionLowering, instruction: Instruction) -> None:
    """`fence{.sc, .acq_rel, .acquire, .release}.scope;`, `membar.level;`,
    `fence.mbarrier_init.release.cluster;` and `fence.proxy.tensormap::generic.{acquire, release}.scope
    …;`."""
    one = {"acquire": ACQUIRES, "release": RELEASES}
    inits = INITS if instruction.mnemonic == "fence" and low.has("mbarrier_init") else 0
    low.emit("fence", flags=inits | scope_flag(low) | one.get(low.one_of(*one), ACQUIRES | RELEASES))


@lowers("fence.proxy.async", "fence.proxy.async::generic")
def fence_proxy_async(low: FunctionLowering, instruction: Instruction) -> None:
    """`fence.proxy.async{.global, .shared::cta, .shared::cluster};`: both spaces without one."""
    space = low.space()
    one = GLOBAL if space == SPACES["global"] else SHARED
    low.emit("fence_proxy", flags=one if space else SHARED | GLOBAL)


@lowers("fence.proxy.alias")
def fence_proxy_alias(low: FunctionLowering, instruction: Instruction) -> None:
    """Virtual addresses have no aliases here."""
    low.emit("nop")


# **** registers, grids ****

@lowers("setmaxnreg")
def setmaxnreg(low: FunctionLowering, instruction: Instruction) -> None:
    """`setmaxnreg.{inc, dec}.sync.aligned.u32 count;`."""
    (count,) = instruction.operands
    if not isinstance(count, Immediate): raise low.fail("a count that is not constant", "a constant")
    low.emit("setmaxnreg", imm=int(count.value), flags=int(low.has("inc")))


@lowers("griddepcontrol")
def griddepcontrol(low: FunctionLowering, instruction: Instruction) -> None:
    """`griddepcontrol.{wait, launch_dependents};`."""
    low.emit("grid_wait" if low.has("wait") else "grid_release")
