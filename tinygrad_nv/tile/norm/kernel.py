"""Rows: norms, softmax, argmax, and elements made without statistics (spec.py). For sm_80 and later.

    each team of threads has a row, a thread vectors of it (templates.py):
        have L2 fetch the weights; wait for the kernel before; the kernel after may begin; load the vectors
        for each statistic:
            its terms, added up (or the largest) in registers, in the order of the row
            of a group: shuffles of its lanes, for each vector
            of the team: shuffles; of several warps: through shared memory; of a cluster: through that of all
        what depends on the row alone (1 / √(s_0 / n + eps)), once
        results of each vector, stored

Which numbers are added in which order depends on the row's length and the plan alone: a row's result does not
depend on its neighbours. A row that does not fit in registers is read again for each statistic.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf, prod

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.access import advance, place, read, read_vector, store_form, write, write_vector
from tinygrad_nv.tile.epilogue import EpilogueEmitter
from tinygrad_nv.tile.expression import Apply, Constant, Expression, Load, Position, Sum, substitute, walk
from tinygrad_nv.tile.kernel import TileKernel
from tinygrad_nv.tile.lanes import FLOAT16S, Lanes, across, kind_of
from tinygrad_nv.tile.norm.elements import Elements, Row, Vector
from tinygrad_nv.tile.norm.spec import NormSpec, Statistic
from tinygrad_nv.tile.norm.templates import Norm, along, every
from tinygrad_nv.tile.template import GPU

LINE_BYTES = 128
MANY_ROWS = 264         # whose weights are in L2 by others
TOGETHER = 4            # chunks that are under way together, of a row that does not fit in registers
ACCUMULATORS = 4
# of which a statistic begins
NOTHING: dict[tuple[str, str], float] = {("add", "f32"): 0.0, ("add", "s32"): 0, ("max", "f32"): -inf,
                                         ("max", "s32"): -1 << 31}


def norm(spec: NormSpec, plan: Norm, gpu: GPU) -> TileKernel:
    """The kernel of rows, by a legal schedule. Parameters in this order: results; x0, x1, …; u32 rows, of a
    symbolic spec."""
    cluster = (1, 1, plan.blocks) if spec.statistics else (1, 1, 1)
    kb = Kernel("norm" if spec.statistics else "elements", arch=gpu.arch, threads=plan.threads,
                cluster=cluster if prod(cluster) > 1 else ())
    _NormKernel(kb, spec, plan).write()
    grid = (-(-spec.m // plan.rows), prod(spec.batch), plan.blocks)
    return TileKernel(kb.name, kb.ptx(), grid, plan.threads, cluster=cluster, rows_of_cta=plan.rows,
                      pdl=kb.hopper)


class _NormKernel:
    """The kernel of a spec under construction."""

    def __init__(self, kb: Kernel, spec: NormSpec, plan: Norm) -> None:
        self.kb, self.spec, self.plan, self.width = kb, spec, plan, min(2, plan.vector)
        storages = [kb.pointer(f"out{i}") for i in range(spec.outputs[-1] + 1)]
        self.outs = [storages[i] for i in spec.outputs]
        self.inputs = [kb.pointer(f"x{i}") for i in range(len(spec.parameters))]
        self.row = Row(kb, spec, plan, kb.param("m", "u32") if spec.symbolic else spec.m)
        # ptxas moves ld.global.nc to before griddepcontrol.wait
        self.space = "global" if kb.hopper else "global.nc"
        self.guards: dict[int, Value] = {}
        self.warps = plan.team // 32
        if spec.statistics and self.warps > 1:
            self.parts = kb.shared("parts", 4 * self.warps * len(spec.statistics))
        if kb.cluster: self.shares = kb.shared("shares", 4 * len(spec.statistics))

    def write(self) -> None:
        """The kernel."""
        kb, spec, row = self.kb, self.spec, self.row
        with kb.comment("where this thread's elements lie"):
            self.at = {load: row.address(self.inputs[load.parameter], load) for load in every(spec)}
            self.to = [row.address(out, each.result, each.group)
                       for out, each in zip(self.outs, spec.results, strict=True)]
        if kb.hopper:
            if spec.rows <= MANY_ROWS:
                for load in along(spec): self.ask(load)
            kb.wait_for_previous_grid()
            if spec.statistics: kb.launch_dependents()
        with kb.comment("numbers of the row"):
            for load, at in self.at.items():
                if not load.n: row.known[load] = read(kb, at, 0, load.dtype, 1, row.there, self.space)
        if self.plan.held:
            with kb.comment("its elements"):
                self.held = self.load_vectors(along(spec), self.at, range(self.plan.chunks))
        stands: dict[Expression, Expression] = {}
        for number, each in enumerate(spec.statistics):
            with kb.comment(f"statistic {number}"):
                term = self.of_elements(substitute(each.term, stands))
                if each.group:
                    stands[Sum(each.dtype, number)] = self.group_load(each, term)
                    continue
                total = self.of_team(self.reduce_elements(Statistic(each.op, term)), each, number)
                stands[Sum(each.dtype, number)] = self.name_number(Lanes(kb, each.dtype, [total]))
        with kb.comment("results"):
            values = [self.of_elements(self.of_groups(substitute(each.value, stands)))
                      for each in spec.results]
            if kb.cluster: kb.cluster_arrive()  # shared memory is there as long as others read it
            self.store(values)
            if kb.cluster: kb.cluster_wait()

    def ask(self, load: Load) -> None:
        """Has L2 fetch what is the same for all rows, a weight, while the kernel before is still running."""
        if load.m or any(load.batch): return
        line = (self.row.first & (LINE_BYTES // load.dtype.itemsize - 1)) == 0
        for chunk in range(min(self.plan.chunks, TOGETHER)):
            inside = self.inside(chunk)
            start = chunk * self.plan.span * load.dtype.itemsize
            self.kb.emit("prefetch.global.L2", place(self.at[load], start),
                        guard=line if inside is None else line & inside)

    # **** what belongs to a row ****

    def name_number(self, value: Lanes) -> Load:
        """A load that stands for a number of the row."""
        made = Load(len(self.inputs) + len(self.row.known), value.dtype, 1, 0)
        self.row.known[made] = value
        return made

    def of_elements(self, root: Expression) -> Expression:
        """An expression in which what does not differ along the row has been computed."""
        varies: dict[Expression, bool] = {}
        fixed: dict[Expression, bool] = {}  # the same in all rows
        known: dict[Expression, Expression] = {}

        def once(node: Expression) -> None:
            leaf = isinstance(node, Constant) or (isinstance(node, Load) and node in self.row.known)
            if not (varies[node] or fixed[node] or leaf or node in known):
                known[node] = self.name_number(EpilogueEmitter(self.kb, node, self.row, width=1).at(0, 0))

        for node in walk(root):
            args = node.args if isinstance(node, Apply) else ()
            varies[node] = any(varies[arg] for arg in args) or (isinstance(node, Load) and node.n != 0) or \
                (isinstance(node, Position) and node.axis == "n")
            fixed[node] = isinstance(node, Constant) or (bool(args) and all(fixed[arg] for arg in args))
            if varies[node]:
                for arg in args: once(arg)
        once(root)
        return substitute(root, known)

    # **** what belongs to a group ****

    def group_load(self, statistic: Statistic, term: Expression) -> Load:
        """A load that stands for a statistic of groups."""
        kb, kind = self.kb, kind_of(statistic.dtype)
        (elements,) = self.passes(term)
        finish, lanes = EpilogueEmitter(kb, term, elements, self.width), statistic.group // self.plan.vector
        found = []
        for chunk in elements.chunks:
            total = kb.reg(kind, NOTHING[statistic.op, kind])
            for pair in elements.pairs(chunk):
                value = finish.at(0, pair)
                for i in range(self.width): kb.emit(f"{statistic.op}.{kind}", total, total, value.at(i))
            found.append(Lanes(kb, statistic.dtype, [self.across(total, statistic, lanes)]))
        return self.of_each(found)

    def of_each(self, found: list[Lanes]) -> Load:
        """A load that stands for a number of each vector's group."""
        made = Load(len(self.inputs) + len(self.row.known) + len(self.row.groups), found[0].dtype, 1, 1)
        self.row.groups[made] = found
        return made

    def of_groups(self, root: Expression) -> Expression:
        """An expression in which what is the same for a group has been computed."""
        groups, of = self.row.groups, dict[Expression, bool]()      # whether a node is made of groups alone
        for node in walk(root):
            args = node.args if isinstance(node, Apply) else ()
            alike = isinstance(node, Constant) or (isinstance(node, Load) and not node.n)
            of[node] = node in groups or alike or (bool(args) and all(of[arg] for arg in args))
        made: dict[Expression, Expression] = {}
        for node in walk(root):
            for arg in (root,) if node is root else node.args if isinstance(node, Apply) else ():
                if isinstance(arg, Apply) and of[arg] and (arg is root or not of[node]) and arg not in made \
                        and any(each in groups for each in walk(arg)):
                    (elements,) = self.passes(arg)
                    finish = EpilogueEmitter(self.kb, arg, elements, width=1)
                    made[arg] = self.of_each([finish.at(0, chunk * self.plan.vector)
                                              for chunk in elements.chunks])
        return substitute(root, made)

    # **** elements ****

    def inside(self, chunk: int) -> Value | None:
        """Whether this thread's vector of a chunk is one; None where all are."""
        plan, there = self.plan, self.row.there
        if ((plan.blocks - 1) * plan.chunks + chunk + 1) * plan.span <= self.spec.n: return there
        if chunk not in self.guards:
            start = chunk * plan.span
            made = (self.row.first + start if start else self.row.first) < self.spec.n
            self.guards[chunk] = made if there is None else made & there
        return self.guards[chunk]

    def load_vectors(self, loads: Sequence[Load], at: dict[Load, Value],
               chunks: Sequence[int]) -> dict[Load, dict[int, Vector]]:
        """Vectors of loads."""
        made: dict[Load, dict[int, Vector]] = {load: {} for load in loads}
        for chunk in chunks:
            for load in loads: made[load][chunk] = self.vector(load, at[load], chunk)
        return made

    def vector(self, load: Load, at: Value, chunk: int) -> Vector:
        kb, dtype, count = self.kb, load.dtype, self.plan.vector
        start, guard = chunk * self.plan.span * dtype.itemsize, self.inside(chunk)
        return read_vector(kb, at, start, dtype, count, guard, self.space)

    def passes(self, *roots: Expression) -> Iterator[Elements]:
        """A row's chunks, as registers or a loop have them; what uses them is written as often as this
        yields."""
        kb, plan, row = self.kb, self.plan, self.row
        every = range(plan.chunks)
        if plan.held:
            yield Elements(row, plan, row.first, every, self.inside, self.held, self.to)
            return
        wanted = [load for load in along(self.spec) if any(load in set(walk(root)) for root in roots)]
        whole = self.spec.n // plan.span // TOGETHER
        if whole:
            with kb.loop(0, whole, kind="u32") as i:
                at, to = ([advance(kb, base, i, TOGETHER * plan.span * lies.n * lies.dtype.itemsize)
                           for lies, base in listed] for listed in (
                    [(load, self.at[load]) for load in wanted],
                    list(zip((each.result for each in self.spec.results), self.to, strict=True))))
                chunks = range(TOGETHER)
                vectors = self.load_vectors(wanted, dict(zip(wanted, at, strict=True)), chunks)
                first = row.first + i * (TOGETHER * plan.span)
                yield Elements(row, plan, first, chunks, lambda chunk: None, vectors, to)
        if rest := every[whole * TOGETHER:]:
            vectors = self.load_vectors(wanted, self.at, rest)
            yield Elements(row, plan, row.first, rest, self.inside, vectors, self.to)

    # **** statistics ****

    def reduce_elements(self, statistic: Statistic) -> Value:
        """A statistic of this thread's elements."""
        kb, kind = self.kb, kind_of(statistic.dtype)
        opcode = f"{statistic.op}.{kind}"
        nothing = NOTHING[statistic.op, kind]
        totals = kb.regs(kind, min(ACCUMULATORS, self.plan.vector), nothing)
        for elements in self.passes(statistic.term):
            finish = EpilogueEmitter(kb, statistic.term, elements, self.width)
            for chunk in elements.chunks:
                for pair in elements.pairs(chunk):
                    value = finish.at(0, pair)
                    for i in range(self.width):
                        total = totals[(pair + i) % len(totals)]
                        kb.emit(opcode, total, total, value.at(i), guard=elements.inside(chunk))
        while len(totals) > 1:
            half = len(totals) // 2
            for low, high in zip(totals[:half], totals[half:], strict=True): kb.emit(opcode, low, low, high)
            totals = totals[:half]
        return totals[0]

    def of_team(self, total: Value, statistic: Statistic, number: int) -> Value:
        """A statistic of the row, in all of its threads."""
        kb, kind = self.kb, kind_of(statistic.dtype)
        total = self.across(total, statistic, min(32, self.plan.team))
        if self.warps <= 1: return total
        warp, lane, start = kb.tid.x >> 5, kb.tid.x & 31, 4 * self.warps * number
        kb.emit("st.shared.b32", self.parts.address(warp * 4).at(start), total, guard=lane == 0)
        kb.sync()
        part = kb.reg(kind)
        kb.emit(f"ld.shared.{kind}", part, self.parts.address((lane & (self.warps - 1)) * 4).at(start))
        total = self.across(part, statistic, self.warps)
        return self.of_cluster(total, statistic, number) if kb.cluster else total

    def of_cluster(self, total: Value, statistic: Statistic, number: int) -> Value:
        """A statistic of the CTAs of a row, in their order, in all of their threads."""
        kb, kind, mine = self.kb, kind_of(statistic.dtype), self.shares.address().at(4 * number)
        kb.emit("st.shared.b32", mine, total, guard=kb.tid.x == 0)
        kb.cluster_arrive()
        kb.cluster_wait()
        shares = kb.regs(kind, self.plan.blocks)
        for rank, share in enumerate(shares):
            kb.emit(f"ld.shared::cluster.{kind}", share, kb.mapa(self.shares.address(), rank).at(4 * number))
        made = shares[0]
        for share in shares[1:]: kb.emit(f"{statistic.op}.{kind}", made, made, share)
        return made

    def across(self, value: Value, statistic: Statistic, lanes: int) -> Value:
        """A statistic of so many lanes, in all of them."""
        return across(self.kb, value, f"{statistic.op}.{kind_of(statistic.dtype)}", lanes)

    # **** results ****

    def store(self, values: list[Expression]) -> None:
        """Elements of every thread, and numbers of a row by its first one."""
        kb, results = self.kb, [each.result for each in self.spec.results]
        groups = [each.group for each in self.spec.results]
        elements = [i for i, result in enumerate(results) if result.n and not groups[i]]
        if elements:
            roots = [values[i] for i in elements]
            for block in self.passes(*roots):
                finish = EpilogueEmitter(kb, roots[-1], block, self.width, before=tuple(roots[:-1]))
                for chunk in block.chunks:
                    found = [finish.all(0, pair) for pair in block.pairs(chunk)]
                    if chunk == block.chunks[0] and not self.spec.statistics: self.trigger()
                    for i in elements:
                        vector = [each[values[i]] for each in found]
                        self.put(block.outs[i], vector, chunk, block.inside(chunk))
        for i, result in enumerate(results):
            if groups[i]: self.put_groups(i, self.row.groups[values[i]])
            if result.n: continue
            guard = self.row.first == 0
            if self.row.there is not None: guard = guard & self.row.there
            write(kb, self.to[i], 0, self.row.known[values[i]], 1, guard)

    def put_groups(self, number: int, values: list[Lanes]) -> None:
        """Stores a number of each group, by the first of its lanes."""
        one, plan = self.spec.results[number], self.plan
        first = self.row.first % one.group == 0
        for chunk, value in enumerate(values):
            inside = self.inside(chunk)
            start = chunk * (plan.span // one.group) * one.result.n * value.dtype.itemsize
            write(self.kb, self.to[number], start, value, 1, first if inside is None else first & inside)

    def trigger(self) -> None:
        """Lets the kernel after begin: behind the loads, which ptxas else moves to between the stores, and
        behind the first results, as ptxas has all loads wait for each other before it."""
        if self.kb.hopper: self.kb.launch_dependents()

    def put(self, at: Value, values: Vector, chunk: int, guard: Value | None) -> None:
        """Stores a vector of a result."""
        kb, dtype = self.kb, values[0].dtype
        start = chunk * self.plan.span * dtype.itemsize
        if dtype.itemsize == 1 and len(values) % 2 == 0 and self.width == 2:
            words = [self.four(*values[i:i + 2]) for i in range(0, len(values), 2)]
            some = f".v{len(words)}" if len(words) > 1 else ""
            kb.emit(f"st.global{some}.b32", place(at, start), words if some else words[0], guard=guard)
            return
        if self.width == 1 or (dtype not in FLOAT16S and dtype.itemsize != 4):
            for i, each in enumerate(values):
                write(kb, at, start + 2 * i * dtype.itemsize, each, self.width, guard)
            return
        write_vector(kb, at, start, values, guard)

    def four(self, low: Lanes, high: Lanes) -> Value:
        """Two pairs of 8 bits as a word."""
        made = self.kb.reg("b32")
        (_, (first,)), (_, (second,)) = (store_form(self.kb, each, 2) for each in (low, high))
        if first.kind == "b16": self.kb.emit("mov.b32", made, [first, second])
        else: self.kb.emit("prmt.b32", made, first, second, 0x5410)
        return made
