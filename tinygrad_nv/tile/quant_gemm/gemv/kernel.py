"""Matmuls of few rows of activations with a quantised matrix, the shape of decode: every byte of the codes
read once, at the speed of memory. For sm_80 and later.

    start the loads of the warp's first iteration: codes and factors of its units
    copy the activations of this split of K to shared memory, zeros beyond K
    for each iteration of the warp:
        for each unit: operands of mma.sync of its codes; load the next ones in their place
            for each block of scales: sums of its columns alone; add them, times the scales
    add the sums of the CTA's warps in shared memory, and of the CTAs that share K (gemm/gemv/epilogue.py)
    epilogue, store

mma.sync takes 16 rows of the matrix as operand A, and 8 rows of activations as B. Scales are applied to sums
of a block in float32, so that elements are exact in 16 bits. Minima are taken off with sums of activations,
which an operand of ones makes.

PDL as gemm/gemv/kernel.py has it.
"""
from __future__ import annotations

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.gemm.gemv.epilogue import GemvEpilogue
from tinygrad_nv.tile.gemm.gemv.kernel import stage_activations
from tinygrad_nv.tile.gemm.gemv.main_loop import Sums, at_most
from tinygrad_nv.tile.kernel import GemmKernel
from tinygrad_nv.tile.quant_gemm.factors import VECTORS, Factors, Pair, factor_names
from tinygrad_nv.tile.quant_gemm.fragments import BOTH, NAMES, ONE, Decoder
from tinygrad_nv.tile.quant_gemm.gemv.plan import QuantGemvPlan
from tinygrad_nv.tile.quant_gemm.schedules import QuantGemv
from tinygrad_nv.tile.quant_gemm.spec import QuantGemmSpec
from tinygrad_nv.tile.template import GPU


def quant_gemv(spec: QuantGemmSpec, schedule: QuantGemv, gpu: GPU) -> GemmKernel:
    """The kernel, by a legal schedule."""
    plan = QuantGemvPlan.of(spec, schedule)
    cluster = (1, plan.splits, 1) if plan.is_cluster(gpu.arch) else ()
    kb = Kernel("quant_gemv", arch=gpu.arch, threads=plan.threads, cluster=cluster, min_ctas=plan.ctas_an_sm)
    QuantGemvKernel(kb, plan).write()
    shared = plan.splits > 1 and not cluster
    gemm = plan.spec
    nbytes = 4 * plan.blocks_n * plan.splits * gemm.parts * gemm.m * plan.block_n if shared else 0
    return GemmKernel("quant_gemv", kb.ptx(), (plan.blocks_n, plan.splits, 1), plan.threads, kb.dynamic_smem,
                      cluster=cluster or (1, 1, 1), workspace_bytes=nbytes,
                      flags=plan.blocks_n if shared else 0, pdl=kb.hopper)


class _Tile:
    """A tile's registers: sums of 16 columns, and of each unit of an iteration codes and factors."""

    def __init__(self, kb: Kernel, plan: QuantGemvPlan, decoder: Decoder, factors: Factors) -> None:
        self.sums = [kb.regs("f32", 4, 0.0) for _ in range(plan.tiles_m)]
        self.codes = [{name: kb.regs("b32", decoder.words(name), 0) for name in decoder.planes}
                      for _ in range(plan.schedule.units)]
        self.factors = [[factors.registers() for _ in range(plan.groups)] for _ in range(plan.schedule.units)]
        self.code_places: dict[str, Value] = {}
        self.factor_places: dict[str, Value] = {}
        self.of_row: dict[str, list[Value]] = {}        # factors of a whole row


class QuantGemvKernel:
    """The kernel as it is written."""

    total = "f32"

    def __init__(self, kb: Kernel, plan: QuantGemvPlan) -> None:
        self.kb, self.plan, self.spec, self.type = kb, plan, plan.spec, plan.type
        self.out = kb.pointer("out")
        self.shared = [kb.pointer(name) for name in ("workspace", "flags")
                       if plan.splits > 1 and not kb.cluster]
        self.a, self.pointers, self.rows = self.declare_params()
        self.smem = kb.shared("activations", plan.smem_bytes, align=128)
        # ptxas moves ld.global.nc to before griddepcontrol.wait
        self.read = "ld.global" if kb.hopper else "ld.global.nc"
        self.decoder = Decoder(kb, self.type, self.spec.a.dtype)
        self.decoder.prepare()
        self.factors = Factors(kb, self.type, factor_names(self.pointers), self.read)
        warp, lane = kb.reg("u32"), kb.special("laneid")
        kb.emit("shfl.sync.idx.b32", warp, kb.tid.x >> 5, 0, 31, -1)
        self.warp, self.lane, self.lane_n, self.lane_k = warp, lane, lane >> 2, lane & 3
        self.policy = kb.reg("b64")
        kb.emit("createpolicy.fractional.L2::evict_first.b64", self.policy)
        self.tiles = [_Tile(kb, plan, self.decoder, self.factors)
                      for _ in range(self.spec.parts * plan.schedule.tiles)]

    def declare_params(self) -> tuple[Value, dict[str, Value], Value]:
        """Pointers to the activations and to the matrix's buffers, and how many rows there are."""
        kb, spec = self.kb, self.spec
        a = kb.pointer("a") + spec.a.offset * spec.a.dtype.itemsize
        pointers = {name: kb.pointer(name) for name in self.plan.quant.buffers}
        self.extras = [kb.pointer(f"x{i}") for i in range(len(spec.parameters))]
        return a, pointers, kb.param("m", "u32") if spec.symbolic else kb.reg("u32", spec.m)

    # **** the whole ****

    def write(self) -> None:
        """The kernel."""
        kb, plan = self.kb, self.plan
        with kb.comment("the warp's first units"):
            self.place()
            self.wait()
            self.load_all()
            if not plan.groups: self.load_rows()
        with kb.comment("activations"): self.stage(kb.ctaid.y * plan.span)
        self.point()
        count = self.iterations()
        with kb.comment("the sum"), kb.loop(0, count, kind="s32") as i:
            self.iteration(i, count)
        if not plan.groups:
            with kb.comment("scales of rows"): self.scale_rows()
        self.epilogue().write()

    def wait(self) -> None:
        """Has L2 fetch the first codes, and waits for the kernel before."""
        if not self.kb.hopper: return
        self.prefetch()
        self.kb.wait_for_previous_grid()
        self.kb.launch_dependents()

    def stage(self, first: Value) -> None:
        """Activations to shared memory, from a column on."""
        plan = self.plan
        stage_activations(self.kb, plan, self.a, self.rows, first, plan.span, plan.pitch_bytes,
                          self.smem.address(),
               self.read)

    def epilogue(self) -> GemvEpilogue:
        """Returns the epilogue, which follows the loop over K."""
        kb = self.kb
        return GemvEpilogue(kb, self.plan, self, self.smem, self.rows, [],
                            lambda strides, offset: kb.reg("u64", offset), self.warp, kb.reg("u32", 0),
                            self.out, self.extras, self.shared)

    def iterations(self) -> Value:
        """How many the warp has: s32."""
        kb, plan = self.kb, self.plan
        mine = kb.reg("s32")
        kb.emit("min.s32", mine, plan.iterations - (kb.ctaid.y * plan.iterations_a_split).to("s32"),
                plan.iterations_a_split)
        return (mine - self.warp.to("s32") + (plan.warps_k - 1)) // plan.warps_k

    # **** codes and factors ****

    def place(self) -> None:
        """Addresses of the first unit of each tile, and how many units the row has from there on."""
        kb, plan, s = self.kb, self.plan, self.plan.schedule
        self.unit = (kb.ctaid.y * plan.iterations_a_split + self.warp) * s.units
        tiles_of_part = -(-self.spec.n // 16)
        for number, tile in enumerate(self.tiles):
            part, at = divmod(number, s.tiles)
            place = kb.ctaid.x * s.tiles + at
            if tiles_of_part % s.tiles:  # beyond the last column: that tile again
                clamped = kb.reg("u32")
                kb.emit("min.u32", clamped, place, tiles_of_part - 1)
                place = clamped
            if part: place = place + part * tiles_of_part
            for plane in self.decoder.planes:
                nbytes = 4 * self.decoder.words(plane)
                first = (place * plan.total_units + self.unit).to("u64") * (32 * nbytes)
                tile.code_places[plane] = self.pointers[plane] + (first + (self.lane * nbytes).to("u64"))
            for name in self.factors.names:
                tile.factor_places[name] = self.factor_place(name, place)

    def factor_place(self, name: str, tile: Value) -> Value:
        """The address of this lane's rows, in the block of the first unit."""
        blocks = self.plan.quant.buffers[name].shape[1]
        first = tile * (16 * blocks) + self.lane_n * 2
        start = self.pointers[name] + first.to("u64") * self.factors.dtype_of(name).itemsize
        if not self.blocks_apart(name): return start
        return start + self.block_of(name).to("u64") * self.factors.block_bytes(name)

    def blocks_apart(self, name: str) -> bool:
        """Whether a row has several blocks."""
        return bool(self.factors.scale_of(name).columns)

    def block_of(self, name: str, more: int = 0) -> Value:
        """The block of the first column of unit `unit` + `more`."""
        columns, unit = self.factors.scale_of(name).columns, self.type.unit
        number = self.unit + more if more else self.unit
        return number * (unit // columns) if columns <= unit else number // (columns // unit)

    def prefetch(self) -> None:
        """Has L2 fetch the first lines of codes."""
        inside = self.unit < self.plan.total_units
        for tile in self.tiles:
            for place in tile.code_places.values():
                self.kb.emit("prefetch.global.L2", place.at(), guard=inside)

    def guard(self, at: int) -> Value:
        """Whether there is a unit `at` of the iteration that is loaded. Beyond the last one registers keep
        what they had, and activations are 0."""
        return self.unit + at < self.plan.total_units

    def load_all(self) -> None:
        """All units of the iteration that addresses are at."""
        for at in range(self.plan.schedule.units):
            guard = self.guard(at)
            for tile in self.tiles: self.load(tile, at, guard)

    def load(self, tile: _Tile, at: int, guard: Value | None) -> None:
        """A tile's unit `at` of the iteration that its addresses are at."""
        for name, words in tile.codes[at].items():
            nbytes = 4 * len(words)
            self.kb.emit(f"{self.read}.L1::no_allocate.L2::cache_hint{VECTORS[nbytes]}",
                         words if len(words) > 1 else words[0],
                         tile.code_places[name].at(32 * nbytes * at), self.policy, guard=guard)
        for number, registers in enumerate(tile.factors[at]):
            for name, into in registers.items():
                self.load_factor(tile, name, into, at, number, guard)

    def load_factor(self, tile: _Tile, name: str, into: list[Value], at: int, number: int,
                    guard: Value | None) -> None:
        """Loads the factors of block `number` of unit `at`."""
        columns, unit = self.factors.scale_of(name).columns, self.type.unit
        place = tile.factor_places[name]
        if not columns: block = 0
        elif columns <= unit: block = (at * unit + number * (unit // self.plan.groups)) // columns
        elif self.plan.schedule.units * unit % columns == 0: block = at * unit // columns
        else:  # an iteration may begin within a block
            block = 0
            nbytes = self.factors.block_bytes(name)
            if at: place = place + (self.block_of(name, at) - self.block_of(name)).to("u64") * nbytes
        self.factors.load(name, into, place, block, guard)

    def advance(self) -> None:
        """Addresses of the warp's next iteration."""
        plan = self.plan
        units = plan.warps_k * plan.schedule.units
        before = {name: self.block_of(name) for name in self.factors.names if self.blocks_apart(name)
                  and plan.schedule.units * self.type.unit % self.factors.scale_of(name).columns}
        self.unit += units
        for tile in self.tiles:
            for name, place in tile.code_places.items(): place += units * 128 * self.decoder.words(name)
            for name, place in tile.factor_places.items():
                if not self.blocks_apart(name): continue
                nbytes = self.factors.block_bytes(name)
                if name in before: place += (self.block_of(name) - before[name]).to("u64") * nbytes
                else: place += units * self.type.unit // self.factors.scale_of(name).columns * nbytes

    # **** the sum ****

    def iteration(self, i: Value, count: Value) -> None:
        """Multiplies the warp's units, and loads those of its next iteration."""
        plan, unit_bytes = self.plan, self.type.unit * self.spec.a.dtype.itemsize
        self.advance()
        more = i + 1 < count
        for at in range(plan.schedule.units):
            x = self.activations(at * unit_bytes)
            guard = more & self.guard(at)
            for tile in self.tiles:
                operands, factors = self.convert_unit(tile, at)
                self.load(tile, at, guard)
                self.multiply(tile, operands, factors, x)
        for address in self.xs: address += plan.warps_k * plan.schedule.units * unit_bytes

    def activations(self, offset: int) -> list[list[Value]]:
        """Operands B of a unit for each 8 rows: two registers for every 16 columns."""
        made = []
        for address in self.xs:
            made.append([register for at in range(0, self.type.unit, 32)
                         for register in self.kb.ldmatrix(address.at(offset + 2 * at))])
        return made

    def convert_unit(self, tile: _Tile, at: int) -> tuple[list[list[Value]], list[tuple[Pair, Pair | None]]]:
        """A unit's operands A, 16 columns each, and the factors of its blocks."""
        factors, steps = self.factors, self.type.unit // 16
        blocks = tile.factors[at] or [tile.of_row]
        made, found = [], []
        for number, loaded in enumerate(blocks):
            zeros = [self.decoder.offsets(zero) for zero in factors.zeros(loaded)]
            for step in range(number * steps // len(blocks), (number + 1) * steps // len(blocks)):
                made.append(self.decoder.operand(tile.codes[at], step, zeros))
            if self.plan.groups: found.append((factors.scales(loaded), factors.minima(loaded)))
        return made, found

    def multiply(self, tile: _Tile, operands: list[list[Value]], factors: list[tuple[Pair, Pair | None]],
                 x: list[list[Value]]) -> None:
        """Multiplies a unit and adds to the sums."""
        for sums, b in zip(tile.sums, x, strict=True):
            if not factors:
                self.chain(sums, sums, operands, b, 0)
                continue
            each = len(operands) // len(factors)
            for number, (scales, minima) in enumerate(factors):
                some = range(number * each, (number + 1) * each)
                part = self.block_sums([operands[i] for i in some], b, some.start)
                for i, total in enumerate(sums):
                    self.kb.emit("fma.rn.f32", total, part[i], scales[i // 2], total)
                if minima is None: continue
                ones = [self.decoder.constant(ONE[self.spec.a.dtype] * BOTH)] * 4
                part = self.block_sums([ones] * each, b, some.start)
                for i, total in enumerate(sums):
                    self.kb.emit("fma.rn.f32", total, -part[i], minima[i // 2], total)

    def block_sums(self, operands: list[list[Value]], b: list[Value], first: int) -> list[Value]:
        """The sums of some columns alone."""
        made = self.kb.regs("f32", 4)
        self.chain(made, [self.zero] * 4, operands, b, first)
        return made

    def chain(self, into: list[Value], start: list[Value], operands: list[list[Value]], b: list[Value],
              first: int) -> None:
        """`start` plus the mmas of operands, of which the first has columns from 16 `first` on."""
        name = NAMES[self.spec.a.dtype]
        for number, a in enumerate(operands, first):
            self.kb.mma("m16n8k16", f"f32.{name}.{name}.f32", into, a, b[2 * number:2 * number + 2],
                        start if number == first else into)

    # **** scales of whole rows ****

    def load_rows(self) -> None:
        """Starts their loads."""
        for tile in self.tiles:
            tile.of_row = self.factors.registers()
            for name, into in tile.of_row.items():
                self.factors.load(name, into, tile.factor_places[name], 0, None)

    def scale_rows(self) -> None:
        """Sums times them."""
        for tile in self.tiles:
            scales = self.factors.scales(tile.of_row)
            for sums in tile.sums:
                for i, total in enumerate(sums): self.kb.emit("mul.f32", total, total, scales[i // 2])

    # **** activations ****

    def point(self) -> None:
        """Addresses of ldmatrix for the warp's first unit; rows beyond the last read that again."""
        kb, plan = self.kb, self.plan
        self.zero = kb.reg("f32", 0.0)
        size = self.spec.a.dtype.itemsize
        start = self.smem.address() + self.warp * (plan.schedule.units * self.type.unit * size) \
            + (self.lane >> 3) * 16
        self.xs = []
        for tile in range(plan.tiles_m):
            row = at_most(kb, self.lane & 7, self.spec.m - 1 - 8 * tile)
            self.xs.append(start + (row + 8 * tile) * plan.pitch_bytes)

    # **** what the epilogue asks ****

    def corner(self) -> tuple[Value | int, Value]:
        """The lane's first row of activations and first column."""
        return self.lane_k * 2, self.lane_n

    def results(self) -> Sums:
        """All sums of the warp."""
        made: Sums = []
        for number, tile in enumerate(self.tiles):
            part, at = divmod(number, self.plan.schedule.tiles)
            for tile_m, sums in enumerate(tile.sums):
                for i, total in enumerate(sums):
                    row, odd = 8 * tile_m, i & 1
                    has = self.lane_k * 2 + (row + odd) < self.spec.m if row + 8 > self.spec.m else None
                    made.append((total, part, row + odd, 16 * at + 8 * (i >> 1), has))
        return made
