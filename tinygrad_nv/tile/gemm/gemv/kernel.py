"""Matmuls with few rows of activations, the shape of decode: every byte of the weights read once, at the
speed of memory. For sm_80 and later, and for any extents, strides and alignment.

    start the loads of the warp's first iteration
    copy the activations of this split of K to shared memory
    for each iteration of the warp:
        for each chunk of weights: multiply it with all rows of activations; load the next one in its place
    what is left of K, for the warp whose turn it is
    add the sums of the CTA's warps in shared memory, and of the CTAs that share K (epilogue.py)
    epilogue, store

See plan.py for which lane reads which bytes, main_loop.py for how they are multiplied.

On Hopper it is launched early: all threads wait for the kernel before ahead of their first loads, and the
kernel after may begin then, as far as there is room beside this one. Before they wait they have L2 fetch
their first weights: a hint, which reads nothing, and without which ptxas leaves all arithmetic for later.
"""
from __future__ import annotations

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.gemm.gemv import operands as w
from tinygrad_nv.tile.gemm.gemv.epilogue import Columns, GemvEpilogue
from tinygrad_nv.tile.gemm.gemv.main_loop import Slot, lanes_of
from tinygrad_nv.tile.gemm.gemv.plan import GemvPlan
from tinygrad_nv.tile.gemm.schedules import Gemv
from tinygrad_nv.tile.gemm.spec import GemmSpec, Operand
from tinygrad_nv.tile.kernel import GemmKernel
from tinygrad_nv.tile.template import GPU


def gemv(spec: GemmSpec, schedule: Gemv, gpu: GPU) -> GemmKernel:
    """The kernel of a product with at most 16 rows (of operand a; of b, where the schedule swaps), by a
    legal schedule."""
    plan = GemvPlan.of(spec, schedule)
    spec = plan.spec
    cluster = (1, plan.splits, 1) if plan.is_cluster(gpu.arch) else ()
    kb = Kernel("gemv", arch=gpu.arch, threads=schedule.threads, cluster=cluster,
               min_ctas=plan.ctas_an_sm)
    GemvKernel(kb, plan, swapped=schedule.swap).write()
    shared = plan.splits > 1 and not cluster
    tiles = plan.blocks_n * spec.matrices
    nbytes = 4 * tiles * plan.splits * spec.parts * spec.m * schedule.block_n if shared else 0
    return GemmKernel("gemv", kb.ptx(), (plan.blocks_n, plan.splits, spec.matrices), schedule.threads,
                      kb.dynamic_smem, cluster=cluster or (1, 1, 1), workspace_bytes=nbytes,
                      flags=tiles if shared else 0, pdl=kb.hopper)


class GemvKernel:
    """The kernel as it is written."""

    def __init__(self, kb: Kernel, plan: GemvPlan, swapped: bool) -> None:
        self.kb, self.plan, self.spec, self.schedule = kb, plan, plan.spec, plan.schedule
        spec = plan.spec
        out = kb.pointer("out")
        self.shared = [kb.pointer(name) for name in ("workspace", "flags")
                       if plan.splits > 1 and not kb.cluster]
        a, b, self.rows = self.declare_params(swapped)
        self.batch = self.indices()
        self.out, self.a, self.b = (
            pointer + self.batch_offset(place.batch, place.offset) * place.dtype.itemsize
            for pointer, place in ((out, spec.out), (a, spec.a), (b, spec.b)))
        self.smem = kb.shared("activations", plan.smem_bytes, align=128)
        self.lanes = lanes_of(plan)(kb, plan, self.words_of, self.again)
        self.warp_n, self.warp_k = self.warps()
        self.ring: dict[Slot, list[Value]] = {}
        self.policy = self.create_policy()
        # ptxas moves ld.global.nc to before griddepcontrol.wait: it assumes that what they read is never
        # written
        self.read = "ld.global" if kb.hopper else "ld.global.nc"
        self.more: Value | None = None  # whether the warp has an iteration after this one

    def declare_params(self, swapped: bool) -> tuple[Value, Value, Value]:
        """Pointers to the activations and the weights, and how many rows there are."""
        kb, spec = self.kb, self.spec
        first, second = kb.pointer("a"), kb.pointer("b")
        self.extras = [kb.pointer(f"x{i}") for i in range(len(spec.parameters))]
        rows = kb.param("m", "u32") if spec.symbolic else kb.reg("u32", spec.m)
        return (second, first, rows) if swapped else (first, second, rows)

    def warps(self) -> tuple[Value, Value]:
        """The first column of this warp, and its number along K. From lane 0, so that ptxas knows that loops
        over them are the same in all lanes."""
        kb, plan = self.kb, self.plan
        warp = kb.reg("u32")
        kb.emit("shfl.sync.idx.b32", warp, kb.tid.x >> 5, 0, 31, -1)
        if plan.warps_k == 1: return warp * plan.warp_n, kb.reg("u32", 0)
        if plan.warps_n == 1: return kb.reg("u32", 0), warp
        return warp % plan.warps_n * plan.warp_n, warp // plan.warps_n

    def indices(self) -> list[Value]:
        """Returns the CTA's index along each dimension of the batch."""
        made, rest = [], self.kb.ctaid.z
        for extent in reversed(self.spec.batch):
            made.append(rest % extent)
            rest = rest // extent
        return made[::-1]

    def batch_offset(self, strides: tuple[int, ...], offset: int) -> Value:
        """Elements before this CTA's matrix: u64."""
        at = self.kb.reg("u64", offset)
        for index, stride in zip(self.batch, strides, strict=True):
            if stride: at = at + index.to("u64") * stride
        return at

    def create_policy(self) -> Value | None:
        """Weights leave L2 first, unless several matrices of the batch are the same one."""
        shared = any(extent > 1 and not stride
                     for extent, stride in zip(self.spec.batch, self.spec.b.batch, strict=True))
        if shared: return None
        made = self.kb.reg("b64")
        self.kb.emit("createpolicy.fractional.L2::evict_first.b64", made)
        return made

    # **** the whole ****

    def write(self) -> None:
        """The kernel."""
        kb, plan, s = self.kb, self.plan, self.schedule
        a_round = plan.warps_k * s.block_k
        first_block = kb.ctaid.y * plan.blocks_a_split
        with kb.comment("iterations of this warp, and its first loads"):
            count = self.iterations(first_block)
            self.place(first_block, kb.ctaid.x * s.block_n + self.warp_n)
            self.make_ring()
            self.wait(count > 0)
            if plan.full: self.load_all(count > 0)
        with kb.comment("activations"): self.stage(first_block * s.block_k)
        start = self.smem.address()
        self.lanes.point(start + self.warp_k * (s.block_k * plan.itemsize))
        if plan.full:
            with kb.comment("the sum"), kb.loop(0, count, kind="s32") as i:
                self.advance(a_round)
                self.more = i + 1 < count
                for step in range(plan.steps): self.lanes.take(step)
                self.lanes.advance(a_round * plan.itemsize)
        if plan.tail: self.write_tail(start)
        self.epilogue().write()

    def wait(self, some: Value) -> None:
        """Has L2 fetch the first weights of a warp that has some, and waits for the kernel before."""
        kb = self.kb
        if not kb.hopper: return
        for slot in self.slots(0): self.ask(slot, some)
        kb.wait_for_previous_grid()
        kb.launch_dependents()

    def stage(self, first_k: Value) -> None:
        """Activations to shared memory."""
        plan = self.plan
        stage_activations(self.kb, plan, self.a, self.rows, first_k, plan.span, plan.pitch_bytes,
                          self.smem.address(),
               self.read)

    def epilogue(self) -> GemvEpilogue:
        """Returns the epilogue, which follows the loop over K."""
        return GemvEpilogue(self.kb, self.plan, self.lanes, self.smem, self.rows, self.batch,
                            self.batch_offset,
                            self.warp_k, self.warp_n, self.out, self.extras, self.shared)

    def iterations(self, first_block: Value) -> Value:
        """How many whole ones the warp has: s32."""
        kb, plan = self.kb, self.plan
        left = kb.reg("s32")
        kb.emit("sub.s32", left, plan.full, first_block.to("s32"))
        mine = kb.reg("s32")
        kb.emit("min.s32", mine, left, plan.blocks_a_split)
        return (mine - self.warp_k.to("s32") + (plan.warps_k - 1)) // plan.warps_k

    # **** weights ****

    def place(self, first_block: Value, first_n: Value) -> None:
        """Pointers to the lane's first chunk of each part, and which of its columns there are."""
        plan, b = self.plan, self.spec.b
        lane_k, lane_n = self.lanes.lane_k, self.lanes.lane_n
        each_k, each_n = (plan.piece, 1) if plan.along == "k" else (plan.depth, plan.piece)
        self.first_n, self.lane_column = first_n, first_n + lane_n * each_n
        self.lane_depth = lane_k * each_k
        along_k = (first_block + self.warp_k) * self.schedule.block_k + self.lane_depth
        start = self.b + (self.lane_column.to("u64") * b.mn + along_k.to("u64") * b.k) * plan.itemsize
        self.pointers = [start + p * self.spec.part * plan.itemsize if p else start
                         for p in range(self.spec.parts)]
        self.inside: dict[int, Value] = {}
        if self.spec.n % self.schedule.block_n:
            for column in sorted({self.columns(slot, piece) for slot in self.slots(0)
                                  for piece in range(self.pieces)}):
                self.inside[column] = self.lane_column + column < self.spec.n

    @property
    def pieces(self) -> int: return self.plan.chunk // self.plan.width

    def slots(self, step: int) -> list[Slot]:
        """The chunks of a step."""
        plan = self.plan
        return [(step, p, r, at) for p in range(self.spec.parts) for r in range(plan.rows)
                for at in range(plan.depth)]

    def columns(self, slot: Slot, piece: int) -> int:
        """How many columns a piece lies after the lane's first."""
        plan = self.plan
        if plan.along == "k": return slot[2] * plan.lanes_n
        return slot[2] * plan.granule + piece * plan.lanes_n * plan.piece

    def depths(self, slot: Slot, piece: int) -> int:
        """How far along K."""
        plan = self.plan
        if plan.along == "k": return slot[0] * plan.step + piece * plan.lanes_k * plan.piece
        return slot[0] * plan.step + slot[3]

    def make_ring(self) -> None:
        """Registers for an iteration's chunks; zeros where columns may be missing."""
        for step in range(self.plan.steps):
            for slot in self.slots(step):
                self.ring[slot] = w.registers(self.kb, self.plan.chunk, self.plan.width)
                if self.inside: self.clear(slot)

    def clear(self, slot: Slot) -> None:
        for register in self.ring[slot]: register.set(0)

    def words_of(self, slot: Slot) -> list[Value]:
        """A chunk's words."""
        return w.words(self.kb, self.ring[slot], self.plan.width)

    def load_all(self, guard: Value | None) -> None:
        """All chunks of an iteration."""
        for step in range(self.plan.steps):
            for slot in self.slots(step): self.load(slot, guard)

    def again(self, slot: Slot) -> None:
        """The same chunk of the warp's next iteration, if there is one."""
        if self.more is not None: self.load(slot, self.more)

    def load(self, slot: Slot, guard: Value | None) -> None:
        """A chunk, where its columns are inside."""
        for piece in range(self.pieces):
            self.load_piece(slot, piece, guard, self.inside.get(self.columns(slot, piece)))

    def ask(self, slot: Slot, guard: Value) -> None:
        """Has L2 fetch the first line of a chunk."""
        inside = self.inside.get(self.columns(slot, 0))
        b = self.spec.b
        offset = (self.columns(slot, 0) * b.mn + self.depths(slot, 0) * b.k) * self.plan.itemsize
        self.kb.emit("prefetch.global.L2", self.pointers[slot[1]].at(offset),
                    guard=guard if inside is None else guard & inside)

    def load_piece(self, slot: Slot, piece: int, *guards: Value | None) -> None:
        """Past L1, which is left to what is read again."""
        kb, b = self.kb, self.spec.b
        said = [guard for guard in guards if guard is not None]
        guard = said[0] & said[1] if len(said) > 1 else said[0] if said else None
        offset = (self.columns(slot, piece) * b.mn + self.depths(slot, piece) * b.k) * self.plan.itemsize
        opcode, policy = f"{self.read}.L1::no_allocate", [self.policy] if self.policy is not None else []
        if policy: opcode += ".L2::cache_hint"
        w.load(kb, opcode, self.ring[slot], piece, self.plan.width, self.pointers[slot[1]].at(offset),
               *policy,
               guard=guard)

    def advance(self, elements: int) -> None:
        """So many elements of K further."""
        for pointer in self.pointers: pointer += elements * self.spec.b.k * self.plan.itemsize

    def write_tail(self, start: Value) -> None:
        """Multiplies what is left of K, for the warp whose turn it is: only what is inside is read, the rest
        is zero."""
        kb, plan, s = self.kb, self.plan, self.schedule
        split = plan.full // plan.blocks_a_split
        local = plan.full - split * plan.blocks_a_split
        mine = self.warp_k == local % plan.warps_k
        if plan.splits > 1: mine = mine & (kb.ctaid.y == split)
        with kb.comment(f"the last {plan.tail} of K"), kb.if_(mine):
            self.more = None
            steps = -(-plan.tail // plan.step)
            for step in range(steps):
                for slot in self.slots(step): self.load_tail(slot)
            self.lanes.point(start + local * s.block_k * plan.itemsize)
            for step in range(steps): self.lanes.take(step)

    def load_tail(self, slot: Slot) -> None:
        """A chunk of which only what is inside K is read. The warp's pointers have come to it: iterations
        that it had before this one were all whole."""
        self.clear(slot)
        plan = self.plan
        reach = (plan.lanes_k - 1) * (plan.piece if plan.along == "k" else plan.depth)
        for piece in range(self.pieces):
            at = self.depths(slot, piece)
            if at >= plan.tail: continue
            last = at + reach + (plan.piece if plan.along == "k" else 1)
            guard = None if last <= plan.tail else self.lane_depth + at < plan.tail
            self.load_piece(slot, piece, guard, self.inside.get(self.columns(slot, piece)))


# **** activations ****

def stage_activations(kb: Kernel, plan: Columns, a: Value, rows: Value, first: Value, span: int,
                      pitch_bytes: int,
           target: Value, read: str) -> None:
    """Copies `span` columns of the activations at `a`, from column `first` (u32) on, to shared memory at
    `target`, as they are, zeros beyond K; `rows` are those that there are, `read` loads what is too narrow
    for cp.async."""
    spec, size = plan.spec, plan.spec.a.dtype.itemsize
    width = x_width(spec.a, spec.k)
    elements = width // size
    a_row = span // elements
    with kb.loop(kb.tid.x, spec.m * a_row, plan.threads, kind="u32") as number:
        row, at = number // a_row, number % a_row * elements
        inside = first + at < spec.k
        if spec.symbolic: inside = inside & (row < rows)
        place = target + row * pitch_bytes + at * size
        source = a + (row.to("u64") * spec.a.mn + (first + at).to("u64") * spec.a.k) * size
        if width >= 4:
            cache, some = "cg" if width == 16 else "ca", kb.select(inside, width, 0, "u32")
            kb.emit(f"cp.async.{cache}.shared.global", place.at(), source.at(), width, some)
        else:
            bits = "b16" if width == 2 else "u8"
            value = kb.reg("b16" if width == 2 else "u32", 0)
            kb.emit(f"{read}.{bits}", value, source.at(), guard=inside)
            kb.emit(f"st.shared.{bits}", place.at(), value)
    if width >= 4: kb.emit("cp.async.wait_all")
    kb.sync()


def x_width(a: Operand, depth: int) -> int:
    """Bytes of activations copied at a time: aligned, and all inside or all outside."""
    size = a.dtype.itemsize
    if a.k != 1: return size
    width = 16
    while any(place * size % width for place in (a.mn, a.offset, *a.batch)) or depth % (width // size):
        width //= 2
    return width
