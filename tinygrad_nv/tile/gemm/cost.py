"""How long a schedule takes: an analytic model of waves, tensor-core cycles and bytes by level.

Protocol: `predict(spec, schedule, machine)` for one, a `Model` for many schedules of one product. The model
orders candidates; its seconds are of a GPU that nobody has measured with these kernels.

The model is a roofline for each resource of the busiest SM and for the whole GPU (Williams et al. 2009), with
tiles as the unit, as DeepGEMM and Stream-K (Osama et al. 2023) choose theirs:

    step    = max of a step's cycles: tensor cores or shared memory, schedulers, L2 → SM, a load's latency
              shared by the loads in flight (Little's law); the lesser of the first two is not hidden to a
              tenth (wgmma) or a fifth (mma.sync, whose warps issue both); and the barrier of a step
    tile    = steps · step + finish
    SM      = max(tiles · steps · step + finish, turns · (steps · step of one CTA alone + finish))
              turns: tiles by CTAs (or ping-pong consumers) that an SM holds at once
    HBM     = bytes that must move once, and operands again for each pass in which L2 has lost them
    seconds = launch + first load + max(SM, HBM) + a 20th of the lesser + what joins split sums
              launch: less where the kernel begins early (Hopper), which flags to be zeroed prevent

L2 keeps what `group` rows of tiles walk over: A's rows of the group stay while B passes once for each group.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod
from typing import Literal, NamedTuple

from tinygrad_nv.ptx.gpcs import most_clusters
from tinygrad_nv.tile.gemm import work
from tinygrad_nv.tile.gemm.gemv.epilogue import MOST_CLUSTERED
from tinygrad_nv.tile.gemm.spec import GemmSpec, Operand
from tinygrad_nv.tile.gemm.work import L2_BYTES_PER_CYCLE, Work
from tinygrad_nv.tile.gpu import Machine, machine_for
from tinygrad_nv.tile.schedule import Schedule

Bound = Literal["tensor core", "shared memory", "issue", "L2", "HBM", "launch"]
HBM_SHARE = {"mma": 0.88, "wgmma": 0.90, "gemv": 0.92}     # of peak, that streaming reaches
L2_KEEPS = 0.5                       # of L2, for what is read again
JOIN_S = 1e-6                        # a flag from one SM to another, twice
MEETING = {"mma": 40, "wgmma": 10, "gemv": 0}   # cycles of a step in which a CTA's warps wait for each other
REGISTERS_OF_SM, REGISTERS_BESIDE = 65536, 56


@dataclass(frozen=True)
class Prediction:
    """`seconds`, and the resource that takes most of them. `parts`: seconds of each resource, where busiest;
    they overlap. `waves`: tiles for each place where one can be worked on."""
    seconds: float
    bound: Bound
    parts: Mapping[Bound, float]
    waves: float


def predict(spec: GemmSpec, schedule: Schedule, machine: Machine | str) -> Prediction:
    """What a schedule of a product takes on a GPU (or an architecture's first)."""
    return Model(spec, machine_for(machine) if isinstance(machine, str) else machine).predict(schedule)


class _Tiles(NamedTuple):
    """A schedule laid over a product, whose rows and columns have changed places if it is swapped."""
    rows: int
    columns: int
    tiles: int
    steps: int
    usable: int          # SMs
    resident: int        # CTAs of an SM at once
    lanes: int           # tiles of an SM at once


class Model:
    """The costs of one product on one GPU."""

    def __init__(self, spec: GemmSpec, machine: Machine) -> None:
        self.spec, self.machine = spec, machine
        self.size, self.ending = spec.a.dtype.itemsize, work.ending(spec)
        self.a_bytes = spec.m * spec.k * self.size
        self.b_bytes = spec.n * spec.k * self.size * spec.parts
        self.a_matrices, self.b_matrices = self._matrices(spec.a), self._matrices(spec.b)
        elements = spec.m * spec.n * spec.matrices
        self.result_bytes = elements * (self.ending.load_bytes + self.ending.store_bytes)

    def _matrices(self, operand: Operand) -> int:
        """How many there are that differ."""
        return prod(extent for extent, stride in zip(self.spec.batch, operand.batch, strict=True) if stride)

    def roofline(self, template: str = "wgmma") -> float:
        """Seconds below which no schedule of a template can be: all flops at peak, all bytes once."""
        machine, spec = self.machine, self.spec
        least = self.a_bytes * self.a_matrices + self.b_bytes * self.b_matrices + self.result_bytes
        rate = machine.tensor_flops_per_s * machine.tensor_scale(spec.a.dtype, template)
        if template == "gemv": rate = 2.0 * machine.fp32_fma * machine.sm_count * machine.clock_hz
        return max(spec.flops / rate, least / machine.hbm_bytes_per_s)

    def predict(self, s: Schedule) -> Prediction:
        """What a schedule takes."""
        return self.timed(s, work.planned(self.spec, s, self.machine, self.ending))

    def timed(self, s: Schedule, done: Work, registers: int = 0) -> Prediction:
        """What a schedule takes whose CTAs do this work, with so many registers a thread (0: an estimate)."""
        machine, t = self.machine, self._tiles(s, registers)
        units = t.tiles * s.splits
        active, at_once = min(units, t.usable), min(t.resident, ceil(units / t.usable))
        if s.stream:
            per_sm = t.tiles / t.usable
            turns, ends, active = float(per_sm), ceil(per_sm), t.usable
        else:
            per_sm = ceil(units / t.usable)
            turns, ends = float(ceil(per_sm / t.lanes)), 1
        l2 = self._l2_cycles(s, active)
        fetch = machine.load_s * machine.clock_hz
        wait = fetch / max(done.ahead, 1)
        meet = MEETING[s.template]
        step = max(self._compute(s, done, at_once), done.issue, l2, wait / at_once) + meet / at_once
        alone = max(self._compute(s, done, 1), done.issue, l2, wait) + meet
        first = 0.0 if s.template == "wgmma" else fetch      # CTAs that stay load ahead
        busy = max(per_sm * t.steps * step + ends * done.finish,
                   turns * (t.steps * alone + first) - first + ceil(turns) * done.finish)
        sm_s = busy / machine.clock_hz
        hbm_s = self._hbm_bytes(s, t) / (machine.hbm_bytes_per_s * HBM_SHARE[s.template])
        early = machine.early_launch_s and not self._flags(s)
        launch_s = machine.early_launch_s if early else machine.launch_s
        launch_s += machine.load_s + self._joining_s(s, t)
        cycles = per_sm * t.steps / machine.clock_hz
        parts: dict[Bound, float] = {
            "tensor core": cycles * done.tensor, "shared memory": cycles * done.shared,
            "issue": cycles * done.issue + per_sm * done.finish / machine.clock_hz,
            "L2": cycles * l2, "HBM": max(hbm_s, cycles * wait / at_once), "launch": launch_s}
        seconds = launch_s + max(sm_s, hbm_s) + 0.05 * min(sm_s, hbm_s)
        return Prediction(seconds, max(parts, key=lambda name: parts[name]), parts,
                          t.tiles * s.splits / (t.usable * t.lanes))

    def _tiles(self, s: Schedule, registers: int) -> _Tiles:
        spec, machine = self.spec, self.machine
        m, n = (spec.n, spec.m) if s.swap else (spec.m, spec.n)
        rows = -(-m // (s.block_m * s.cluster_m)) * s.cluster_m
        columns = -(-n // (work.columns(spec, s) * s.cluster_n)) * s.cluster_n
        cluster = s.cluster_m * s.cluster_n * (s.splits if s.template == "wgmma" else 1)
        usable = max(most_clusters(cluster, machine.sm_count), 1) * cluster
        resident, steps = self._resident(s, registers), -(-spec.k // s.block_k)
        return _Tiles(rows, columns, rows * columns * spec.matrices, -(-steps // s.splits), usable, resident,
                      2 if s.mode == "pingpong" else resident)

    def _resident(self, s: Schedule, registers: int) -> int:
        """CTAs that an SM holds at once."""
        if s.template == "wgmma": return 1
        threads, machine = s.threads, self.machine
        wide = work.width(self.spec, s)
        sums = s.block_m * wide // threads
        smem = 1024 + self.size * (min(self.spec.m, self.spec.n) * self.spec.k // s.splits
                                   if s.template == "gemv" else s.depth * (s.block_m + wide) * s.block_k)
        registers = registers or (min(255, sums + REGISTERS_BESIDE) if s.template == "mma" else 64)
        return max(1, min(machine.smem_of_sm // smem, machine.threads_of_sm // threads,
                          REGISTERS_OF_SM // (threads * registers)))

    def _compute(self, s: Schedule, done: Work, ctas: int) -> float:
        """Cycles of a step in tensor cores and shared memory, with so many CTAs on the SM. mma.sync waits
        for its operands: with one warp a scheduler a quarter of the time, with two an eighth."""
        tensor, lesser = done.tensor, 0.1
        if s.template == "mma":
            warps, lesser = s.threads / 32 / work.SCHEDULERS * ctas, 0.2
            tensor = tensor / (1 - 0.25 / warps if warps > 1 else 0.75 * warps)
        return max(tensor, done.shared) + lesser * min(tensor, done.shared)

    def _l2_cycles(self, s: Schedule, active: int) -> float:
        """Cycles in which L2 brings a step's operands to an SM while as many SMs as are active ask."""
        m, n = (self.spec.n, self.spec.m) if s.swap else (self.spec.m, self.spec.n * self.spec.parts)
        rows, columns = min(s.block_m, m) / s.cluster_n, min(work.width(self.spec, s), n) / s.cluster_m
        rate = min(L2_BYTES_PER_CYCLE, self.machine.l2_bytes_per_s / self.machine.clock_hz / active)
        return (rows + columns) * s.block_k * self.size / rate

    def _hbm_bytes(self, s: Schedule, t: _Tiles) -> float:
        """Bytes from and to HBM."""
        a, b = self.a_bytes, self.b_bytes
        keeps = L2_KEEPS * self.machine.l2_bytes
        a_times, b_times = 1, 1
        if a + b > keeps:
            above, across = (b, a) if s.swap else (a, b)
            group = min(s.group, t.rows)
            at_once = -(-min(t.tiles, t.usable * t.lanes) // group)
            above_times = 1 if above / t.rows * group <= keeps or above <= keeps else -(-t.columns // at_once)
            across_times = 1 if across <= keeps else -(-t.rows // group)
            a_times, b_times = (across_times, above_times) if s.swap else (above_times, across_times)
        return a * a_times * self.a_matrices + b * b_times * self.b_matrices + self.result_bytes

    def _flags(self, s: Schedule) -> bool:
        """Whether CTAs meet through memory: by flags that are zeroed before the launch."""
        if s.stream: return True
        if s.splits == 1 or s.template == "wgmma": return False
        return not (s.template == "gemv" and s.splits <= MOST_CLUSTERED and self.machine.arch == "sm_90a")

    def _joining_s(self, s: Schedule, t: _Tiles) -> float:
        """What it costs to join partial sums. In a cluster: each CTA leaves a tile's and reads a share of the
        others'. Beyond: zero flags, write a tile's, wait, read those of the others."""
        if s.splits == 1 and not s.stream: return 0.0
        tile_s = 4 * s.block_m * work.width(self.spec, s) / L2_BYTES_PER_CYCLE / self.machine.clock_hz
        if not self._flags(s): return JOIN_S + (2 * tile_s if s.template == "wgmma" else 0)
        if not s.stream: return self.machine.launch_s + JOIN_S + s.splits * tile_s
        if t.tiles % t.usable == 0: return self.machine.launch_s
        per_cta = -(-t.tiles * t.steps // t.usable)
        return self.machine.launch_s + JOIN_S + (1 + max(1, -(-t.steps // per_cta) - 1)) * tile_s
