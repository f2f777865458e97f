"""Templates of grouped matmuls with quantised matrices on the emulator: whole numbers to the bit for many
routings, random numbers near float64's, types, orders of copies; what is refused."""
from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import cycle

import pytest
from tinygrad.dtype import DType, dtypes

from tests.support.tile import quant_grouped_case as case
from tests.support.tile.grouped_case import routings
from tests.support.tile.quant_grouped_case import BF16, F16, ROUNDED, TYPES, exact, near, spec_of
from tinygrad_nv.ptx.emulator import LATE
from tinygrad_nv.tile.grouped_gemm.spec import GroupedGemmSpec
from tinygrad_nv.tile.quant_grouped.schedules import QuantGroupedGemv, QuantGroupedMma, QuantGroupedWgmma
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

AMPERE, ADA, HOPPER = GPU("sm_80", 4), GPU("sm_89", 4), GPU("sm_90a", 4)
GEMV, MMA, WGMMA = QuantGroupedGemv().warps(2), QuantGroupedMma().k(64), QuantGroupedWgmma().warps(12)
GROUPS = 5
Schedules = dict[str, QuantGroupedGemv] | dict[str, QuantGroupedMma] | dict[str, QuantGroupedWgmma]


@dataclass(frozen=True)
class Suite:
    """What a template is tried with. K has two stages more than the deepest ring, or several iterations of a
    warp and no whole unit; columns end within a tile."""
    plain: GroupedGemmSpec
    gathered_k: int
    odd: tuple[str, int]            # matrices whose K no unit divides
    gated: tuple[int, tuple[str, ...]]      # columns of gate and up, and the schedules of activations
    ragged: list[int]
    gpus: tuple[GPU, ...]
    typed: tuple[tuple[str, ...], tuple[tuple[DType, GPU], ...], dict[str, int]]     # schedules; K of a type
    schedules: Schedules

    @property
    def gathered(self) -> GroupedGemmSpec:
        return replace(self.plain, sources=self.plain.rows // 2, gather=2, biased=True, k=self.gathered_k)

    @property
    def scattered(self) -> GroupedGemmSpec:
        return replace(self.plain, scatter=True, weighted=True, biased=True, dtype=F16)

    @property
    def gate_and_up(self) -> GroupedGemmSpec:
        return replace(self.gathered, n=self.gated[0], activation="silu")

    def with_matrices(self, kind: str) -> case.QuantGroupedSpec:
        return spec_of(kind, self.gathered if kind == "MXFP4" else self.scattered)


BOTH = (BF16, HOPPER), (F16, AMPERE)
GATE_AND_UP = WGMMA.block(384, 16).k(128).warps(16).stages(2)   # three consumers, each with columns of both
SUITES = {
    "gemv": Suite(
        GroupedGemmSpec(GROUPS, 50, 40, 608, BF16), 608, ("int8 channel", 328), (88, ("1 row", "8 rows")),
        [20, 0, 7, 20, 1], (HOPPER, AMPERE), (("1 row", "16 rows"), BOTH, {"Q4_K": 768}),
        {"1 row": GEMV.by(1).of(1, 2), "4 rows": GEMV.by(4).of(2, 1), "8 rows": GEMV.by(8).of(1, 2),
         "16 rows": GEMV.by(16).of(2, 1), "2 splits": GEMV.by(4).of(1, 1).split(2)}),
    "mma": Suite(
        GroupedGemmSpec(GROUPS, 150, 72, 320, BF16), 360, ("int4 g32", 330), (136, ("64 rows",)),
        [70, 0, 17, 60, 1], (AMPERE, HOPPER),
        (("16 rows",), (*BOTH, (BF16, ADA)), {"Q4_K": 512, "awq": 512, "e4m3 g128": 512}),
        {"128 rows": MMA.block(128, 64).warps(2, 2).stages(3),
         "64 rows": MMA.block(64, 64).warps(2, 2).stages(2),
         "16 rows": MMA.block(16, 64).warps(1, 2).stages(3),
         "32 rows": MMA.block(32, 32).warps(1, 1).stages(2)}),
    "wgmma": Suite(
        GroupedGemmSpec(GROUPS, 150, 152, 384, BF16), 360, ("int4 g32", 328), (304, ()),
        [70, 0, 17, 60, 1], (HOPPER,),
        (("24 rows", "one consumer"), ((BF16, HOPPER), (F16, HOPPER)), {"Q4_K": 512}),
        {"8 rows": WGMMA.block(128, 8).stages(4), "24 rows": WGMMA.block(128, 24).stages(3),
         "64 rows": WGMMA.block(256, 64).stages(4), "112 rows": WGMMA.block(256, 112).stages(2),
         "192 rows": WGMMA.block(128, 192).stages(3), "one consumer": WGMMA.block(64, 32).warps(8).stages(4),
         "three consumers": WGMMA.block(192, 40).k(128).warps(16).stages(2),
         "ping-pong": WGMMA.block(128, 16).pingpong().stages(4)})}
KINDS = ("MXFP4", "awq g32")
QUICK = [*(("gemv", name, routing, gpu, KINDS) for gpu in (AMPERE, HOPPER) for name, routing in (
             ("1 row", "ragged 7"), ("8 rows", "every other"), ("2 splits", "ragged 5"))),
         *(("mma", name, routing, AMPERE, KINDS) for name, routing in (("64 rows", "ragged 7"),
                                                                      ("16 rows", "every other"))),
         ("wgmma", "64 rows", "ragged 7", HOPPER, ("MXFP4",)),
         ("wgmma", "8 rows", "every other", HOPPER, ("awq g32",))]
each_template = pytest.mark.parametrize("template", SUITES)


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("template", "name", "routing", "gpu", "kinds"), QUICK,
                         ids=[f"{template}, {name}, {gpu.arch}" for template, name, _, gpu, _ in QUICK])
def test_whole_numbers_are_exact(template: str, name: str, routing: str, gpu: GPU, kinds: tuple[str, ...]):
    suite = SUITES[template]
    counts, before = routings(GROUPS, suite.plain.rows)[routing]
    for kind in kinds: exact(suite.with_matrices(kind), suite.schedules[name], gpu, counts, before)


@pytest.mark.slow
@pytest.mark.parametrize(("template", "routing"), [(template, routing) for template, suite in SUITES.items()
                                                   for routing in routings(GROUPS, suite.plain.rows)])
def test_routings(template: str, routing: str):
    suite = SUITES[template]
    counts, before = routings(GROUPS, suite.plain.rows)[routing]
    specs = {kind: suite.with_matrices(kind) for kind in KINDS}
    if template != "mma": specs["int8 channel"] = spec_of("int8 channel", suite.plain)
    for (name, schedule), gpu in zip(suite.schedules.items(), cycle(suite.gpus)):
        for kind, spec in specs.items():
            if TABLE.problems(spec, schedule, gpu):     # boxes of 128 columns of bytes
                assert (name, kind) == ("three consumers", "int8 channel")
            else: exact(spec, schedule, gpu, counts, before)


@pytest.mark.parametrize(("template", "kind"), [
    pytest.param(template, kind, marks=[] if (template, kind) == ("gemv", "NF4") else pytest.mark.slow)
    for template in SUITES for kind in TYPES])
def test_types(template: str, kind: str):
    """Of both dtypes and all architectures."""
    suite, (names, targets, extents) = SUITES[template], SUITES[template].typed
    for dtype, gpu in targets:
        spec = spec_of(kind, replace(suite.plain, dtype=dtype, k=extents.get(kind, suite.plain.k)))
        for name in names:
            schedule = suite.schedules[name]
            if (template, kind) == ("mma", "int8 channel"): schedule = schedule.k(32)
            near(spec, schedule, gpu, suite.ragged, 2)
            if kind not in ROUNDED: exact(spec, schedule, gpu, suite.ragged, 2)


@pytest.mark.slow
@each_template
@case.each_activation
def test_activations(template: str, activation: str):
    suite = SUITES[template]
    spec = spec_of("MXFP4", replace(suite.gate_and_up, activation=activation))
    for schedule in [suite.schedules[name] for name in suite.gated[1]] or [GATE_AND_UP]:
        near(spec, schedule, suite.gpus[0], suite.ragged, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("template", "name", "gpu"), [
    pytest.param(template, name, gpu, id=f"{template}, {name}, {gpu.arch}")
    for template, suite in SUITES.items() for name in suite.schedules for gpu in suite.gpus])
def test_numbers(template: str, name: str, gpu: GPU):
    suite, (kind, k) = SUITES[template], SUITES[template].odd
    specs = [spec_of("int4 g32", one) for one in (suite.plain, suite.scattered)]
    specs += [spec_of("int4 g32", suite.gathered), spec_of(kind, replace(suite.gathered, k=k))]
    if template != "wgmma": specs.append(spec_of("int4 g32", suite.gate_and_up))
    for spec in specs: near(spec, suite.schedules[name], gpu, suite.ragged, 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int4 g32", "int8 channel"])
@pytest.mark.parametrize("schedule", [WGMMA.block(256, 24).warps(12).stages(3),
                                      WGMMA.block(384, 24).warps(16).stages(3)], ids=str)
def test_numbers_of_gate_and_up(kind: str, schedule: QuantGroupedWgmma):
    suite = SUITES["wgmma"]
    near(spec_of(kind, suite.gate_and_up), schedule, HOPPER, suite.ragged, 2)


@pytest.mark.slow
@each_template
@pytest.mark.parametrize("seed", [1, 2, 3, LATE])
def test_orders_of_copies(template: str, seed: int | str):
    suite = SUITES[template]
    for schedule in suite.schedules.values():
        for gpu in suite.gpus:
            for kind in KINDS: exact(suite.with_matrices(kind), schedule, gpu, suite.ragged, 1, seed)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 33, 300])
@pytest.mark.parametrize(("n", "k", "schedule"), [
    (32, 96, GEMV.by(4).of(2, 1)), (64, 320, WGMMA.block(64, 32).warps(8).stages(3))], ids=["gemv", "wgmma"])
def test_counts_of_groups(n: int, k: int, schedule: QuantGroupedGemv | QuantGroupedWgmma, groups: int):
    """One; more than lanes; several for each lane."""
    spec = spec_of("MXFP4", GroupedGemmSpec(groups, 40, n, k, BF16))
    for routing in ("ragged 9", "all to the last", "ragged 11"):
        exact(spec, schedule, HOPPER, *routings(groups, 40)[routing])


@pytest.mark.parametrize("template", ["mma", "wgmma"])
def test_no_bank_conflict_in_the_main_loop(template: str):
    suite = SUITES[template]
    spec = suite.with_matrices("MXFP4")
    found = case.reported(spec, suite.schedules["64 rows"], suite.gpus[0], suite.ragged)
    assert sum(found.stats.bank_conflicts.values()) == 0


G, M, W = (SUITES[template].plain for template in SUITES)
REFUSED = [
    ("tiles of 3 rows, not 1, 2, 4, 8, 16", G, GEMV.by(3), HOPPER),
    ("activations of float", replace(G, dtype=dtypes.float32), GEMV, HOPPER),
    ("of shared memory", replace(G, k=1 << 16), GEMV, HOPPER), ("splits", M, MMA.split(2), AMPERE),
    ("block_m=24 is not a multiple", M, MMA.block(24, 64), AMPERE),
    ("multiple of the unit's 64", M, MMA.k(32), AMPERE),
    ("no multiple of block_k=128", M, MMA.k(128), AMPERE),
    *(("2000 groups, at most 1024", replace(one, groups=2000), schedule, gpu)
      for one, schedule, gpu in ((G, GEMV, HOPPER), (M, MMA, AMPERE), (W, WGMMA, HOPPER))),
    ("sm_90a, the target is sm_80", W, WGMMA, AMPERE),
    ("activations of float", replace(W, dtype=dtypes.float32), WGMMA, HOPPER),
    ("rows as the left operand", W, replace(WGMMA, swap=False), HOPPER),
    ("64 columns of gate and up for a consumer", SUITES["wgmma"].gate_and_up, WGMMA.block(128, 16), HOPPER),
    ("224 gathered rows of a tile, at most 192", SUITES["wgmma"].gathered, WGMMA.block(128, 224).stages(2),
     HOPPER),
    ("a stage has rows of 128 B or 256 B", W, WGMMA.k(192), HOPPER),
    ("128 rows of tiles that are stored in turns", W, WGMMA.block(256, 128).stages(2), HOPPER),
    ("of shared memory, sm_90a has", W, WGMMA.block(256, 64).k(128).stages(8), HOPPER)]


@pytest.mark.parametrize(("words", "one", "schedule", "gpu"), REFUSED, ids=[each[0] for each in REFUSED])
def test_refused(words: str, one: GroupedGemmSpec, schedule: QuantGroupedMma, gpu: GPU):
    assert words in "; ".join(TABLE.problems(spec_of("MXFP4", one), schedule, gpu))


def test_a_stack_in_rows_is_refused():
    assert "not in fragments" in TABLE.why_not(replace(spec_of("MXFP4", G), type=TYPES["MXFP4"]), HOPPER)
