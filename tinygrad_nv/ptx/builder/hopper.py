"""Memory, barriers, copies and tensor cores: instructions under the names that CUDA and CUTLASS use.

Protocol: each method emits the instructions of its name through `Core.emit`, with the modifiers that the
common case needs; anything else is `emit` itself. Addresses are `MemoryOperand`s: `tile.at(16)`,
`pointer.at()`, `barriers[i]`. Bytes, threads and coordinates are constants or u32 / s32 registers, as the
instruction has them.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinygrad_nv.ptx.builder.flow import Flow
from tinygrad_nv.ptx.builder.values import SINK, MemoryOperand, Number, PairOperand, Shared, Value

SWIZZLES = {"none": 0, "128B": 1, "64B": 2, "32B": 3}


def descriptor_bits(leading_bytes: int, stride_bytes: int, swizzle: str = "128B") -> int:
    """A wgmma matrix descriptor without its address: byte offsets LBO and SBO, and the swizzle."""
    def encode(nbytes: int) -> int: return (nbytes & 0x3FFFF) >> 4
    return encode(leading_bytes) << 16 | encode(stride_bytes) << 32 | SWIZZLES[swizzle] << 62


class Hopper(Flow):
    """Conveniences over `Flow`."""

    @property
    def hopper(self) -> bool:
        """Whether the target is sm_90 or later."""
        return self.arch >= "sm_90"

    # **** memory ****

    def ld(self, space: str, kind: str, place: MemoryOperand, count: int = 1,
           modifiers: str = "") -> list[Value]:
        """`count` (1, 2, 4) registers from memory: `ld("global.nc", "f32", p.at(), 4)`."""
        made = self.regs(kind, count)
        vector = f".v{count}" if count > 1 else ""
        self.emit(f"ld.{space}{modifiers}{vector}.{kind}", made if count > 1 else made[0], place)
        return made

    def st(self, space: str, kind: str, place: MemoryOperand, values: Number | Sequence[Number],
           modifiers: str = "") -> None:
        """One value or a vector of 2 or 4 to memory."""
        listed = list(values) if isinstance(values, Sequence) else [values]
        vector = f".v{len(listed)}" if len(listed) > 1 else ""
        self.emit(f"st.{space}{modifiers}{vector}.{kind}", place, listed if len(listed) > 1 else listed[0])

    def select(self, predicate: Value, yes: Number, no: Number, kind: str = "") -> Value:
        """`yes` where the predicate holds, else `no`."""
        typed = kind or next((v.kind for v in (yes, no) if isinstance(v, Value)), "s32")
        made = self.reg(typed)
        self.emit(f"selp.{typed}", made, yes, no, predicate)
        return made

    # **** barriers ****

    def mbarrier_init(self, barrier: MemoryOperand, arrivals: int) -> None:
        """Makes a barrier of phase 0 that `arrivals` arrivals complete; one thread, then
        `fence_mbarrier_init`."""
        if not 1 <= arrivals < 1 << 20: self.fail(f"{arrivals} arrivals", "1 to 1048575", "correct the count")
        self.emit("mbarrier.init.shared::cta.b64", barrier, arrivals)

    def fence_mbarrier_init(self) -> None:
        """Makes initialised barriers visible to the cluster and to asynchronous copies."""
        self.emit("fence.mbarrier_init.release.cluster")

    def mbarrier_arrive(self, barrier: MemoryOperand) -> None:
        """One arrival."""
        if self.arch >= "sm_90": self.emit("mbarrier.arrive.shared::cta.b64", SINK, barrier)
        else: self.emit("mbarrier.arrive.shared::cta.b64", self.reg("b64"), barrier)

    def mbarrier_arrive_remote(self, barrier: Value, rank: Number) -> None:
        """One arrival at the barrier that has the shared address `barrier` (u32) in the CTA of a cluster
        rank."""
        self.emit("mbarrier.arrive.shared::cluster.b64", SINK, self.mapa(barrier, rank).at())

    def mbarrier_expect(self, barrier: MemoryOperand, nbytes: Number) -> None:
        """One arrival, and `nbytes` that copies will bring before the phase completes."""
        if isinstance(nbytes, int) and not 0 <= nbytes < 1 << 20:
            self.fail(f"{nbytes} bytes in one phase", "0 to 1048575", "use several barriers")
        self.emit("mbarrier.arrive.expect_tx.shared::cta.b64", SINK, barrier, nbytes)

    def mbarrier_wait(self, barrier: MemoryOperand, parity: Number) -> None:
        """Waits until the phase of a parity has completed: parity 1 passes on a fresh barrier."""
        if isinstance(parity, int) and not 0 <= parity <= 1:
            self.fail(f"parity {parity}", "0 or 1", "take % 2")
        _, again = self._label("wait")
        done = self.reg("pred")
        wait = "try_wait" if self.arch >= "sm_90" else "test_wait"
        self._mark(again)
        self.emit(f"mbarrier.{wait}.parity.shared::cta.b64", done, barrier, parity)
        self.emit("bra", again, guard=~done)

    def sync(self, barrier: Number = 0, threads: int = 0) -> None:
        """bar.sync: all threads of the block, or `threads` of them at a named barrier 1..15."""
        self.emit("bar.sync", barrier, *([threads] if threads else []))

    def arrive(self, barrier: Number, threads: int) -> None:
        """bar.arrive: counts at a named barrier without waiting."""
        self.emit("bar.arrive", barrier, threads)

    # **** threads and clusters ****

    def elect(self) -> Value:
        """A predicate that holds in one thread of the warp."""
        made = self.reg("pred")
        self.emit("elect.sync", PairOperand(SINK, made), -1)
        return made

    def setmaxnreg(self, registers: int, more: bool) -> None:
        """Registers a thread of this warpgroup: `more` raises, else lowers. The kernel needs min_ctas or
        max_registers, without which ptxas ignores it."""
        if not (self.min_ctas or self.max_registers):
            self.fail("setmaxnreg in a kernel of unknown register count", "min_ctas or max_registers",
                      "Kernel(…, min_ctas=1)")
        self.emit(f"setmaxnreg.{'inc' if more else 'dec'}.sync.aligned.u32", registers)

    def cluster_arrive(self, relaxed: bool = False) -> None:
        """Arrives at the cluster's barrier; relaxed orders no memory."""
        self.emit(f"barrier.cluster.arrive{'.relaxed' if relaxed else ''}.aligned")

    def cluster_wait(self) -> None:
        """Waits at the cluster's barrier."""
        self.emit("barrier.cluster.wait.aligned")

    def mapa(self, address: Value, rank: Number) -> Value:
        """The shared::cluster address that a shared address (u32) has in the CTA of a rank."""
        made = self.reg("u32")
        self.emit("mapa.shared::cluster.u32", made, address, rank)
        return made

    def wait_for_previous_grid(self) -> None:
        """griddepcontrol.wait: earlier grids are complete and their writes visible."""
        self.emit("griddepcontrol.wait")

    def launch_dependents(self) -> None:
        """griddepcontrol.launch_dependents: the next grid may start."""
        self.emit("griddepcontrol.launch_dependents")

    # **** copies ****

    def fence_proxy_async(self) -> None:
        """Orders shared-memory writes of this thread before asynchronous reads of wgmma and TMA."""
        self.emit("fence.proxy.async.shared::cta")

    def cp_async(self, tile: MemoryOperand, source: MemoryOperand, nbytes: int) -> None:
        """Copies 4, 8 or 16 bytes from global to shared memory; 16 bypass L1."""
        self.emit(f"cp.async.{'cg' if nbytes == 16 else 'ca'}.shared.global", tile, source, nbytes)

    def cp_async_commit(self) -> None:
        """Makes the thread's copies since the last one a group."""
        self.emit("cp.async.commit_group")

    def cp_async_wait(self, groups: int = 0) -> None:
        """Waits until at most `groups` of the newest groups are pending."""
        self.emit("cp.async.wait_group", groups)

    def tma_load(self, tile: MemoryOperand, tensor_map: Value, coordinates: Sequence[Number],
                 barrier: MemoryOperand,
                 multicast: Number | None = None, policy: Value | None = None,
                 offsets: Sequence[Number] = ()) -> None:
        """Loads the box at `coordinates` (s32, innermost first) and counts its bytes at the barrier.
        `multicast` is a b16 mask of cluster ranks, `policy` a cache policy. With `offsets` (b16) the map is
        one of im2col, and pixels are so far from the base pixels."""
        opcode = f"cp.async.bulk.tensor.{len(coordinates)}d.shared::cluster.global"
        opcode += (".im2col" if offsets else "") + ".mbarrier::complete_tx::bytes"
        rest: list[Any] = [list(offsets)] if offsets else []
        if multicast is not None: opcode, rest = f"{opcode}.multicast::cluster", [*rest, multicast]
        if policy is not None: opcode, rest = f"{opcode}.L2::cache_hint", [*rest, policy]
        self._check_alignment(tile)
        self.emit(opcode, tile, tensor_map.at(coordinates=coordinates), barrier, *rest)

    def tma_store(self, tensor_map: Value, coordinates: Sequence[Number], tile: MemoryOperand) -> None:
        """Stores a box; `tma_commit` and `tma_wait` follow."""
        self._check_alignment(tile)
        self.emit(f"cp.async.bulk.tensor.{len(coordinates)}d.global.shared::cta.bulk_group",
                  tensor_map.at(coordinates=coordinates), tile)

    def _check_alignment(self, tile: MemoryOperand) -> None:
        """Raises `PTXError` for a tile of TMA that does not begin at a multiple of 128 bytes."""
        if isinstance(tile.base, Shared) and (tile.base.align % 128 or tile.offset % 128):
            self.fail(f"{tile.base.name}+{tile.offset}, aligned to {tile.base.align}, as a tile of TMA",
                      "a multiple of 128 bytes", "k.shared(name, nbytes, align=1024)")

    def tma_commit(self) -> None:
        """Makes the thread's bulk stores a group."""
        self.emit("cp.async.bulk.commit_group")

    def tma_wait(self, groups: int = 0, read: bool = False) -> None:
        """Waits until at most `groups` store groups are pending; `read`: until their tiles have been read."""
        self.emit(f"cp.async.bulk.wait_group{'.read' if read else ''}", groups)

    # **** tensor cores ****

    def ldmatrix(self, place: MemoryOperand, count: int = 4, trans: bool = False) -> list[Value]:
        """`count` 8x8 matrices of 16-bit elements, a b32 register each."""
        made = self.regs("b32", count)
        self.emit(f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' if trans else ''}.shared.b16", made, place)
        return made

    def stmatrix(self, place: MemoryOperand, values: Sequence[Value], trans: bool = False) -> None:
        """8x8 matrices of 16-bit elements from b32 registers."""
        modifiers = f".x{len(values)}{'.trans' if trans else ''}"
        self.emit(f"stmatrix.sync.aligned.m8n8{modifiers}.shared.b16", place, list(values))

    def mma(self, shape: str, types: str, d: Sequence[Value], a: Sequence[Value], b: Sequence[Value],
            c: Sequence[Value]) -> None:
        """mma.sync: `mma("m16n8k16", "f32.bf16.bf16.f32", d, a, b, c)`."""
        self.emit(f"mma.sync.aligned.{shape}.row.col.{types}", list(d), list(a), list(b), list(c))

    def descriptor(self, address: Value, bits: int) -> Value:
        """A wgmma matrix descriptor: a u32 shared address and `descriptor_bits`."""
        made = ((address & 0x3FFFF) >> 4).to("u64")
        made |= bits - (1 << 64) if bits >= 1 << 63 else bits
        return made

    def wgmma(self, shape: str, types: str, acc: Sequence[Value], a: Value | Sequence[Value], b: Value,
              accumulate: Value | bool = True, negate: tuple[bool, bool] = (False, False),
              trans: tuple[bool, bool] = (False, False)) -> None:
        """wgmma.mma_async: `a` is a descriptor or four b32 registers; `trans` says which operands are
        MN-major (16-bit types only)."""
        signs = [-1 if each else 1 for each in negate]
        tail: list[int] = []
        if not types.startswith("s32"): tail += signs
        if types.split(".")[1] in ("f16", "bf16"):
            tail += [int(each) for each in (trans if isinstance(a, Value) else trans[1:])]
        elif any(trans):
            self.fail(f"MN-major operands of {types}", "K-major operands", "transpose while loading")
        flag = accumulate if isinstance(accumulate, Value) else int(accumulate)
        left = a if isinstance(a, Value) else list(a)
        self.emit(f"wgmma.mma_async.sync.aligned.{shape}.{types}", list(acc), left, b, flag, *tail)

    def wgmma_fence(self) -> None:
        """Orders the warpgroup's register writes before wgmma."""
        self.emit("wgmma.fence.sync.aligned")

    def wgmma_commit(self) -> None:
        """Makes the wgmmas since the last one a group."""
        self.emit("wgmma.commit_group.sync.aligned")

    def wgmma_wait(self, groups: int = 0) -> None:
        """Waits until at most `groups` groups are pending."""
        self.emit("wgmma.wait_group.sync.aligned", groups)
