"""How long a schedule takes: an analytic model of waves, tensor-core cycles and bytes by level.

Protocol: `predict(spec, schedule, gpu_model)` for one, a `CostModel` for many schedules of one matmul; what
differs between templates is a `Cost`, in each one's cost.py. The model orders candidates; docs/hardware.md
has what an H100 took.

The model is a roofline for each resource of the busiest SM and for the whole GPU (Williams et al. 2009), with
tiles as the unit, as DeepGEMM and Stream-K (Osama et al. 2023) choose theirs:

    step    = max of a step's cycles: tensor cores or shared memory, schedulers, L2 → SM, a load's latency
              shared by the loads in flight (Little's law); the lesser of the first two is not hidden to a
              tenth (wgmma) or a fifth (mma.sync, whose warps issue both); the barrier of a step; and
              what L2 takes of the tensor cores' power
    tile    = steps · step + finish
    SM      = max(tiles · steps · step + finish, turns · (steps · step of one CTA alone + finish))
              turns: tiles by CTAs (or ping-pong consumers) that an SM holds at once
    HBM     = bytes that must move once, and operands again for each pass in which L2 has lost them
    seconds = launch + first load + max(SM, HBM) + a 20th of the lesser + what joins split sums
              launch: less with programmatic dependent launch (Hopper), which flags to be zeroed prevent

L2 keeps what `group` rows of tiles walk over: A's rows of the group stay while B passes once for each group.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod
from typing import TYPE_CHECKING, Generic, Literal, NamedTuple, TypeVar

from tinygrad_nv.ptx.gpcs import most_clusters
from tinygrad_nv.tile.gemm import work
from tinygrad_nv.tile.gemm.schedules import CTATile, GemmSchedule
from tinygrad_nv.tile.gemm.spec import GemmSpec, Operand
from tinygrad_nv.tile.gemm.work import L2_BYTES_PER_CYCLE, Ending, Work
from tinygrad_nv.tile.gpu import GPUModel, gpu_model_for
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

if TYPE_CHECKING:
    from tinygrad_nv.ptx.emulator.report import Stats

Bound = Literal["tensor core", "shared memory", "issue", "L2", "HBM", "launch"]
L2_KEEPS = 0.5                       # of L2, for what is read again
JOIN_S = 1e-6                        # a flag from one SM to another, twice
REGISTERS_OF_SM = 65536

C = TypeVar("C", bound=GemmSchedule)


@dataclass(frozen=True)
class Prediction:
    """`seconds`, and the resource that takes most of them. `parts`: seconds of each resource, where busiest;
    they overlap. `waves`: tiles for each place where one can be worked on."""
    seconds: float
    bound: Bound
    parts: Mapping[Bound, float]
    waves: float


class Cost(Generic[C]):
    """Figures of a template that the model asks for. `hbm_share` of peak is what its streaming reaches,
    `barrier_cycles` those of a step in which a CTA's warps wait for each other. `loads_ahead`: CTAs stay, and
    load a tile while they work on the one before. `by_mma`: with mma.sync, where it multiplies on tensor
    cores. `cluster_tiles`: how many times a tile's sums pass where CTAs of a cluster join theirs. `streams`:
    HBM is what all SMs wait for; of what it could bring while only SMs with a CTA more are busy, half is
    lost."""
    hbm_share: float
    barrier_cycles = 0
    loads_ahead = False
    by_mma = True
    cluster_tiles = 0
    streams = False

    def __call__(self, spec: GemmSpec, s: C, gpu: GPU) -> Prediction:
        """Returns the predicted time of a schedule."""
        return CostModel(spec, gpu_model_for(gpu.arch, gpu.sm_count)).predict(s)

    def work(self, spec: GemmSpec, s: C, gpu_model: GPUModel, end: Ending) -> Work:
        """Returns the work of a CTA."""
        raise NotImplementedError

    def resident(self, spec: GemmSpec, s: C, gpu_model: GPUModel, registers: int) -> int:
        """CTAs that an SM holds at once, with so many registers a thread (0: an estimate)."""
        raise NotImplementedError

    def flags(self, s: C, arch: str) -> bool:
        """Whether CTAs reduce sums through memory, by flags that are zeroed before the launch."""
        raise NotImplementedError

    def cluster_ctas(self, s: C, arch: str) -> int:
        """CTAs of a cluster."""
        return s.cluster_ctas

    def streaming(self, spec: GemmSpec, s: C) -> float:
        """The share of HBM's peak that a schedule's loads reach."""
        return self.hbm_share

    def compute(self, s: C, done: Work, ctas: int) -> float:
        """Cycles of a step in tensor cores and shared memory, with so many CTAs on the SM."""
        return max(done.tensor, done.shared) + 0.1 * min(done.tensor, done.shared)

    def flops_per_s(self, spec: GemmSpec, gpu_model: GPUModel) -> float:
        """Operations a second at peak."""
        return gpu_model.tensor_flops_per_s * gpu_model.tensor_scale(spec.a.dtype, self.by_mma)

    def multiply_rate(self, spec: GemmSpec, gpu_model: GPUModel) -> float:
        """Multiply-adds that an SM's tensor cores sustain in a cycle."""
        return gpu_model.tensor_fma * gpu_model.tensor_scale(spec.a.dtype, self.by_mma) * gpu_model.sustained

    def copy_bytes(self, stats: Stats, s: C) -> float:
        """Bytes that copies write to shared memory without being counted as passes."""
        return 0.0


def cost_of(s: GemmSchedule) -> Cost[GemmSchedule]:
    """Returns what the model asks of a schedule's template."""
    cost = TABLE.of(s).cost
    assert isinstance(cost, Cost), s
    return cost


def resident_ctas(gpu_model: GPUModel, threads: int, smem_bytes: int, registers: int) -> int:
    """CTAs that an SM holds at once, that take so much."""
    return max(1, min(gpu_model.smem_of_sm // smem_bytes, gpu_model.threads_of_sm // threads,
                      REGISTERS_OF_SM // (threads * registers)))


def predict(spec: GemmSpec, schedule: GemmSchedule, gpu_model: GPUModel | str) -> Prediction:
    """Returns the predicted time of a schedule of a matmul on a GPU (or an architecture's first)."""
    if isinstance(gpu_model, str): gpu_model = gpu_model_for(gpu_model)
    return CostModel(spec, gpu_model).predict(schedule)


class _Tiles(NamedTuple):
    """A schedule laid over a matmul, whose rows and columns have changed places if it is swapped."""
    rows: int
    columns: int
    tiles: int
    steps: int
    usable: int          # SMs
    resident: int        # CTAs of an SM at once
    lanes: int           # tiles of an SM at once
    tile: CTATile        # of a CTA


class CostModel:
    """The costs of one matmul on one GPU."""

    def __init__(self, spec: GemmSpec, gpu_model: GPUModel) -> None:
        self.spec, self.gpu_model = spec, gpu_model
        self.size, self.ending = spec.a.dtype.itemsize, work.ending(spec)
        self.a_bytes = spec.m * spec.k * self.size
        self.b_bytes = spec.n * spec.k * self.size * spec.parts
        self.a_matrices, self.b_matrices = self._matrices(spec.a), self._matrices(spec.b)
        self.matrices = spec.matrices
        elements = spec.m * spec.n * self.matrices
        self.result_bytes = elements * (self.ending.load_bytes + self.ending.store_bytes)

    def _matrices(self, operand: Operand) -> int:
        """How many there are that differ."""
        return prod(extent for extent, stride in zip(self.spec.batch, operand.batch, strict=True) if stride)

    def roofline(self, s: GemmSchedule) -> float:
        """Seconds below which no schedule of the same template can be: all flops at peak, all bytes once."""
        least = self.a_bytes * self.a_matrices + self.b_bytes * self.b_matrices + self.result_bytes
        rate = cost_of(s).flops_per_s(self.spec, self.gpu_model)
        return max(self.spec.flops / rate, least / self.gpu_model.hbm_bytes_per_s)

    def plan_work(self, s: GemmSchedule) -> Work:
        """The work of a schedule as its template does it."""
        return cost_of(s).work(self.spec, s, self.gpu_model, self.ending)

    def predict(self, s: GemmSchedule) -> Prediction:
        """Returns the predicted time of a schedule."""
        cost = cost_of(s)
        return self._predict_work(s, cost, cost.work(self.spec, s, self.gpu_model, self.ending), 0)

    def predict_work(self, s: GemmSchedule, done: Work, registers: int = 0) -> Prediction:
        """Returns the predicted time of a schedule whose CTAs do this work, with so many registers a thread
        (0: an estimate)."""
        return self._predict_work(s, cost_of(s), done, registers)

    def _predict_work(self, s: GemmSchedule, cost: Cost[GemmSchedule], done: Work,
                      registers: int) -> Prediction:
        gpu_model = self.gpu_model
        t = self._tiles(s, cost.resident(self.spec, s, gpu_model, registers))
        units = t.tiles * s.splits
        active, at_once = min(units, t.usable), min(t.resident, ceil(units / t.usable))
        if s.stream:
            per_sm = t.tiles / t.usable
            turns, ends, active = float(per_sm), ceil(per_sm), t.usable
        else:
            per_sm = ceil(units / t.usable)
            turns, ends = float(ceil(per_sm / t.lanes)), 1
        l2 = self._l2_cycles(s, t.tile, active)
        fetch = gpu_model.load_s * gpu_model.clock_hz
        wait = fetch / max(done.ahead, 1)
        power = gpu_model.l2_power * min(l2, done.tensor)
        step = max(cost.compute(s, done, at_once), done.issue, l2, wait / at_once) \
            + cost.barrier_cycles / at_once + power
        alone = max(cost.compute(s, done, 1), done.issue, l2, wait) + cost.barrier_cycles + power
        first = 0.0 if cost.loads_ahead else fetch
        busy = max(per_sm * t.steps * step + ends * done.finish,
                   turns * (t.steps * alone + first) - first + ceil(turns) * done.finish)
        sm_s = busy / gpu_model.clock_hz
        hbm_s = self._hbm_bytes(s, t) / (gpu_model.hbm_bytes_per_s * cost.streaming(self.spec, s))
        if cost.streams and units > t.usable: hbm_s *= (1 + per_sm * t.usable / units) / 2
        flags = cost.flags(s, gpu_model.arch)
        launch_s = gpu_model.early_launch_s if gpu_model.early_launch_s and not flags else gpu_model.launch_s
        launch_s += gpu_model.load_s + self._joining_s(s, t, flags)
        cycles = per_sm * t.steps / gpu_model.clock_hz
        parts: dict[Bound, float] = {
            "tensor core": cycles * done.tensor, "shared memory": cycles * done.shared,
            "issue": cycles * done.issue + per_sm * done.finish / gpu_model.clock_hz,
            "L2": cycles * l2, "HBM": max(hbm_s, cycles * wait / at_once), "launch": launch_s}
        seconds = launch_s + max(sm_s, hbm_s) + 0.05 * min(sm_s, hbm_s)
        return Prediction(seconds, max(parts, key=lambda name: parts[name]), parts,
                          t.tiles * s.splits / (t.usable * t.lanes))

    def _tiles(self, s: GemmSchedule, resident: int) -> _Tiles:
        tile, (above, across) = s.tile(self.spec), s.cluster_shape
        m, n = (self.spec.n, self.spec.m) if s.swap else (self.spec.m, self.spec.n)
        rows = -(-m // (tile.rows * above)) * above             # whole clusters
        columns = -(-n // (tile.columns * across)) * across
        together = cost_of(s).cluster_ctas(s, self.gpu_model.arch)
        usable = max(most_clusters(together, self.gpu_model.sm_count), 1) * together
        steps = -(-self.spec.k // s.block_k)
        return _Tiles(rows, columns, rows * columns * self.matrices, -(-steps // s.splits), usable,
                      resident, resident * s.turns, tile)

    def _l2_cycles(self, s: GemmSchedule, tile: CTATile, active: int) -> float:
        """Cycles in which L2 brings a step's operands to an SM while as many SMs as are active ask."""
        m, n = (self.spec.n, self.spec.m) if s.swap else (self.spec.m, self.spec.n * self.spec.parts)
        above, across = s.cluster_shape
        rows, columns = min(tile.rows, m) / across, min(tile.width, n) / above
        rate = min(L2_BYTES_PER_CYCLE, self.gpu_model.l2_bytes_per_s / self.gpu_model.clock_hz / active)
        return (rows + columns) * s.block_k * self.size / rate

    def _hbm_bytes(self, s: GemmSchedule, t: _Tiles) -> float:
        """Bytes from and to HBM."""
        a, b = self.a_bytes, self.b_bytes
        keeps = L2_KEEPS * self.gpu_model.l2_bytes
        a_times, b_times = 1, 1
        if a + b > keeps:
            above, across = (b, a) if s.swap else (a, b)
            group = min(s.group, t.rows)
            at_once = -(-min(t.tiles, t.usable * t.lanes) // group)
            above_times = 1 if above / t.rows * group <= keeps or above <= keeps else -(-t.columns // at_once)
            across_times = 1 if across <= keeps else -(-t.rows // group)
            a_times, b_times = (across_times, above_times) if s.swap else (above_times, across_times)
        return a * a_times * self.a_matrices + b * b_times * self.b_matrices + self.result_bytes

    def _joining_s(self, s: GemmSchedule, t: _Tiles, flags: bool) -> float:
        """Returns the seconds of joining partial sums. In a cluster: each CTA leaves a tile's and reads a
        share of the others'. Beyond: zero flags, write a tile's, wait as long, read those of the others."""
        if s.splits == 1 and not s.stream: return 0.0
        tile_s = 4 * t.tile.rows * t.tile.width / L2_BYTES_PER_CYCLE / self.gpu_model.clock_hz
        if not flags: return JOIN_S + cost_of(s).cluster_tiles * tile_s
        if not s.stream: return self.gpu_model.launch_s + JOIN_S + s.splits * tile_s
        if t.tiles % t.usable == 0: return self.gpu_model.launch_s
        per_cta = -(-t.tiles * t.steps // t.usable)
        return self.gpu_model.launch_s + JOIN_S + (2 + max(1, -(-t.steps // per_cta) - 1)) * tile_s
