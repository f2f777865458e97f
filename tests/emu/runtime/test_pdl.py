"""Kernels that are launched before the one ahead of them has ended: every template behind kernels that write
what it reads, and ahead of kernels that write over it, on an emulated device that finds what is not
waited for; and in the code that ptxas makes of them. Graphs too: what TinyJit captures gives numpy's
answers, and how many edges are programmatic."""
from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from tinygrad.device import TinyELF
from tinygrad.dtype import dtypes
from tinygrad.engine.realize import graph_cache
from tinygrad.helpers import Target
from tinygrad.uop.ops import Ops

from tests.support.patterns.on_emu import emu, equal  # noqa: F401
from tests.support.tile.gemm_case import TORCH, arguments, bits, places, product, reference, run, view
from tests.support.tile.gemv_case import best, exact, scheduled
from tinygrad_nv import Tensor, TinyJit
from tinygrad_nv.errors import KernelError
from tinygrad_nv.ptx.assemble import assemble
from tinygrad_nv.ptx.sass import disassemble, functions
from tinygrad_nv.runtime.device import NVDevice
from tinygrad_nv.runtime.driver import Fill, Launch, integer, pointer
from tinygrad_nv.runtime.edges import EdgeChain, EdgeCounts
from tinygrad_nv.runtime.emulated.driver import EmulatedDriver
from tinygrad_nv.runtime.graph import NVGraph
from tinygrad_nv.runtime.program import NVProgram
from tinygrad_nv.tile.expression import Load, Sum
from tinygrad_nv.tile.gemm.schedules import GemmSchedule, Mma, Wgmma
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.kernel import GemmKernel
from tinygrad_nv.tile.launch import LaunchConfig
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

MMA, WGMMA = Mma().block(32, 32).k(32), Wgmma().block(128, 64)
WAIT, EARLY = "griddepcontrol.wait;", "griddepcontrol.launch_dependents;"
MOVE = """.version 7.8
.target sm_90
.address_size 64
.visible .entry move(.param .u64 to, .param .u64 from, .param .u32 count)
{
    .reg .b32 %r<5>; .reg .b64 %a<3>; .reg .b16 %h<1>; .reg .pred %p<1>;
    griddepcontrol.launch_dependents;
    griddepcontrol.wait;
    ld.param.u64 %a0, [to]; ld.param.u64 %a1, [from]; ld.param.u32 %r0, [count];
    mov.u32 %r1, %ctaid.x; mov.u32 %r2, %tid.x; mad.lo.u32 %r3, %r1, 256, %r2;
    setp.ge.u32 %p0, %r3, %r0;
    @%p0 bra $end;
    cvt.u64.u32 %a2, %r3; add.u64 %a0, %a0, %a2; add.u64 %a1, %a1, %a2;
    ld.global.u8 %h0, [%a1]; st.global.u8 [%a0], %h0;
$end:
    ret;
}
"""


class Case(NamedTuple):
    """A product, with what it is computed by."""
    spec: GemmSpec
    schedule: GemmSchedule
    sm_count: int = 132


def added(spec: GemmSpec) -> GemmSpec:
    """With a bias, which the epilogue reads."""
    return product(spec.m, spec.n, spec.k, spec.a.dtype, dtypes.float32,
                   epilogue=Sum(dtypes.float32) + Load(0, dtypes.float32, 0, 1))


def by_gemv(spec: GemmSpec, splits: int = 1) -> Case: return Case(spec, scheduled(spec, 1, 1, 2, splits))


CASES = {
    "mma": Case(product(48, 40, 96), MMA),
    "mma bias": Case(added(product(32, 32, 64)), MMA),
    "mma unaligned": Case(product(33, 31, 45), MMA),
    "mma symbolic": Case(product(48, 32, 64, symbolic=True), MMA),
    "mma split": Case(product(32, 32, 256), MMA.split(3)),
    "wgmma": Case(product(160, 96, 192), WGMMA, 2),
    "wgmma bias": Case(added(product(128, 64, 64)), WGMMA, 2),
    "wgmma ping-pong": Case(product(256, 64, 128), WGMMA.block(64, 64).pingpong(), 2),
    "wgmma cluster": Case(product(256, 64, 128), WGMMA.cluster(2), 2),
    "wgmma split": Case(product(128, 64, 256), WGMMA.split(2), 2),
    "wgmma stream-K": Case(product(256, 64, 320), WGMMA.stream_k(), 3),
    "gemv": by_gemv(product(3, 96, 512, out=exact(dtypes.bfloat16))),
    "gemv bytes": by_gemv(product(1, 50, 333, dtypes.int8)),
    "gemv MN-major": by_gemv(product(2, 96, 256, majors="KM")),
    "gemv cluster": by_gemv(product(1, 64, 1024), 4),
    "gemv split": by_gemv(product(1, 64, 2560), 9),
    "gemv chosen": Case(product(4, 256, 512), best(product(4, 256, 512), "sm_90a")),
}


class Device:
    """An emulated driver, and the parameters of a product twice: where they come from, where the kernel has
    them."""

    def __init__(self, spec: GemmSpec) -> None:
        self.driver, self.spec = EmulatedDriver("sm_90a"), spec
        self.given = arguments(spec, 1)
        self.move = self.driver.load(MOVE.encode()).function("move")
        self.source = {name: self.held(bits(storage)) for name, storage in self.given.items()}
        self.place = {name: self.driver.alloc(bits(storage).nbytes) for name, storage in self.given.items()}

    def held(self, data: np.ndarray) -> int:
        address = self.driver.alloc(data.nbytes)
        self.driver.copy_in(address, memoryview(data))
        return address

    def moves(self, names: list[str], to: dict[str, int], come: dict[str, int]) -> None:
        """A kernel for each of these parameters."""
        for name in names:
            nbytes = bits(self.given[name]).nbytes
            self.driver.submit(Launch(self.move, (-(-nbytes // 256), 1, 1), (256, 1, 1),
                                      (pointer(to[name]), pointer(come[name]), integer(nbytes)), pdl=True))

    def product(self, text: str, case: Case) -> list[object]:
        """Launches the kernel of a case, whose text this is; what was submitted."""
        made = kernel_of(case)
        places = [self.place["out"]]
        if made.workspace_bytes:
            places += [self.driver.alloc(made.workspace_bytes), self.driver.alloc(4 * made.flags)]
        places += [self.place[name] for name in self.given if name != "out"]
        values = [case.spec.m] if case.spec.symbolic else []
        signature = tuple((None, i, dtypes.uint64, ()) for i in range(len(places))) + \
            tuple((None, len(places), dtypes.int32, ()) for _ in values)
        elf = TinyELF(text.encode(), made.name, Target("EMU"), signature)
        elf.aux = made.launch
        program = NVProgram(NVDevice("EMU", self.driver), elf)
        works = program.works(places, values, made.grid_for(case.spec.m), (made.threads, 1, 1))
        for work in works: self.driver.submit(work)
        return works

    def run(self, text: str, case: Case) -> tuple[torch.Tensor, list[object]]:
        """Everything is written, multiplied, and overwritten."""
        names = list(self.given)
        self.moves(names, self.place, self.source)
        works = self.product(text, case)
        kept = {"out": self.driver.alloc(bits(self.given["out"]).nbytes)}
        self.moves(["out"], kept, self.place)
        self.moves(names, self.place, self.source)  # a and b again, and out as it was
        raw = bytearray(bits(self.given["out"]).nbytes)
        self.driver.copy_out(memoryview(raw), kept["out"])
        _, ((offset, extents, strides),) = places(self.spec)["out"]
        return view(torch.frombuffer(raw, dtype=TORCH[self.spec.out.dtype]), extents, strides, offset), works


def kernel_of(case: Case) -> GemmKernel:
    return TABLE.build(case.spec, case.schedule, GPU("sm_90a", case.sm_count))


def text_of(case: Case) -> str: return kernel_of(case).ptx


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", CASES)
def test_templates_between_kernels_that_write_what_they_read(name: str):
    case = CASES[name]
    got, works = Device(case.spec).run(text_of(case), case)
    assert torch.equal(got.double(), reference(case.spec, arguments(case.spec, 1)))
    assert works[-1].pdl
    assert all(isinstance(work, Fill) for work in works[:-1])


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", CASES)
def test_without_the_wait_it_is_found(name: str):
    case = CASES[name]
    text = text_of(case)
    assert WAIT in text
    with pytest.raises(KernelError, match=r"(without|not ordered after) griddepcontrol\.wait"):
        Device(case.spec).run(text.replace(WAIT, ""), case)


# behind a fill nothing runs early, so that a wait may be anywhere
@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not kernel_of(case).zeroed])
def test_a_wait_that_comes_late_is_found(name: str):
    case = CASES[name]
    text = text_of(case).replace(WAIT, "")
    assert "ret;" in text
    with pytest.raises(KernelError, match=r"a read of global memory at .* is not ordered after grid"):
        Device(case.spec).run(text.replace("ret;", f"{WAIT} ret;"), case)


def test_NV_PDL_0_launches_in_order(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NV_PDL", "0")
    case = CASES["gemv"]
    got, works = Device(case.spec).run(text_of(case), case)
    assert torch.equal(got.double(), reference(case.spec, arguments(case.spec, 1)))
    assert not works[-1].pdl


@pytest.mark.parametrize("arch", ["sm_80", "sm_89"])
@pytest.mark.parametrize("name", ["mma", "mma split", "gemv"])
def test_before_hopper_there_is_none(name: str, arch: str):
    made = TABLE.build(CASES[name].spec, CASES[name].schedule, GPU(arch))
    assert not made.pdl
    assert "griddepcontrol" not in made.ptx
    assert not made.launch.pdl


@pytest.mark.parametrize("name", [name for name in CASES if "wgmma" not in name])
@pytest.mark.parametrize("cut", [False, True])
def test_what_is_fetched_ahead_is_inside(name: str, cut: bool):
    """A prefetch is a hint, which may be wrong: here loads take their places, which may not."""
    spec = CASES[name].spec
    rows = spec.m - 15 * (cut and spec.symbolic)
    if cut and not spec.symbolic: spec = product(rows, spec.n - 5, spec.k - 24, spec.a.dtype, spec.out.dtype)
    made, given = TABLE.build(spec, CASES[name].schedule, GPU("sm_90a")), arguments(spec)
    probed, count = re.subn(r"prefetch\.global\.L2 ", "ld.global.u8 %probe, ", made.ptx)
    assert count
    made = replace(made, ptx=probed.replace("{", "{ .reg .b32 %probe;", 1))
    got = run(made, spec, given, "sm_90a", m=rows if spec.symbolic else None)
    assert torch.equal(got, reference(spec, given)[..., :rows, :])


# **** what ptxas makes of it ****

GLOBAL = ("LDG", "STG", "LDGSTS", "ATOMG", "ATOM", "RED", "REDG", "UTMALDG", "UTMASTG", "UTMAREDG", "UBLKCP")


def opcodes(text: str) -> list[str]:
    """Accesses of global memory, waits and triggers, in their order."""
    (code,) = functions(disassemble(assemble(text).cubin)).values()
    return [each.opcode for each in code if each.opcode in GLOBAL or each.opcode in ("ACQBULK", "PREEXIT")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CASES)
def test_nothing_is_moved_to_before_the_wait(name: str):
    found = opcodes(text_of(CASES[name]))
    assert found[0] == "ACQBULK"
    assert found.count("ACQBULK") == (2 if "wgmma" in name else 1)
    assert found.count("PREEXIT") == 1
    if "wgmma" not in name: return
    second = found.index("ACQBULK", 1)  # the consumers'; before it the producer's loads, then its trigger
    assert found[second - 1] == "PREEXIT"
    assert set(found[1:second - 1]) == {"UTMALDG"}


def test_ptxas_moves_what_is_said_to_be_constant():
    """Why weights are not read by ld.global.nc: this is no theory. A trigger behind it is in the way."""
    case = CASES["gemv MN-major"]
    text = text_of(case).replace("griddepcontrol.launch_dependents;", "")
    assert opcodes(text.replace("ld.global.L1::no_allocate", "ld.global.nc.L1::no_allocate"))[0] == "LDG"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["mma", "gemv"])
def test_index_arithmetic_comes_before_the_wait(name: str):
    (code,) = functions(disassemble(assemble(text_of(CASES[name])).cubin)).values()
    names = [each.opcode for each in code]
    first = next(i for i, opcode in enumerate(names) if opcode in ("LDG", "LDGSTS"))
    assert first // 2 < names.index("ACQBULK") < first


# **** graphs ****

SIDE, INPUTS, STEPS = 16, 3, 9


def graphs(jit: TinyJit) -> list[NVGraph]:
    """The graphs a captured function replays."""
    assert jit.captured is not None
    bodies = [call.src[0] for call in jit.captured.linear.src]
    return [graph_cache[body] for body in bodies if body.op is Ops.CUSTOM_FUNCTION and body.arg == "graph"]


def plan(seed: int) -> list[tuple[str, int, int]]:
    """What each step computes, of which values before it: small integers in float16."""
    choose = random.Random(seed)
    return [(choose.choice(["matmul", "matmul", "add", "less", "relu", "rows"]),
             choose.randrange(INPUTS + i), choose.randrange(INPUTS + i)) for i in range(STEPS)]


def steps(given: tuple, of: list[tuple[str, int, int]], clip, keep) -> list:
    """The values of a plan, by tinygrad or by numpy."""
    values = list(given)
    for what, i, j in of:
        x, y = values[i], values[j]
        made = {"matmul": lambda x=x, y=y: x @ y, "add": lambda x=x, y=y: x + y,
                "less": lambda x=x, y=y: x - 2 * y, "relu": lambda x=x: clip(x, 0, 9),
                "rows": lambda x=x, y=y: x.sum(axis=0) * y}[what]()
        values.append(keep(clip(made, -3, 3)))
    return values[len(given):]


def by_tinygrad(of: list[tuple[str, int, int]]) -> TinyJit:
    def run(*given: Tensor) -> list[Tensor]:
        made = steps(given, of, lambda x, low, high: x.clip(low, high), lambda x: x.contiguous())
        Tensor.realize(*made)
        return made
    return TinyJit(run)


def inputs(seed: int) -> list[np.ndarray]:
    return [np.random.default_rng((seed, i)).integers(-3, 4, (SIDE, SIDE)).astype(np.float16)
            for i in range(INPUTS)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sm_count", [132, 1])
@pytest.mark.parametrize("seed", range(6))
def test_random_graphs_equal_numpy(seed: int, sm_count: int, monkeypatch: pytest.MonkeyPatch):
    """Side by side where they fit, and all in a chain."""
    monkeypatch.setattr("tinygrad_nv.runtime.graph.EdgeChain", lambda _: EdgeChain(sm_count))
    graph_cache.clear()
    of = plan(seed)
    jit = by_tinygrad(of)
    for call in range(4):
        given = inputs(10 * seed + call)
        wanted = steps(tuple(x.astype(np.float32) for x in given), of, np.clip, lambda x: x)
        for got, right in zip(jit(*(Tensor(x).realize() for x in given)), wanted, strict=True):
            equal(got, right.astype(np.float16))
    counts = [graph.chain.counts for graph in graphs(jit)]
    assert sum(each.programmatic for each in counts) > 0
    assert sm_count > 1 or all(each.programmatic == each.edges == each.launches - 1 for each in counts)


def three(x: Tensor, w: Tensor) -> Tensor:
    """A chain of three products, and nothing beside it."""
    for _ in range(3): x = (x @ w).clip(-3, 3).contiguous()
    return x.realize()


def run_three() -> EdgeCounts:
    jit = TinyJit(three)
    for call in range(3):
        x, w, _ = inputs(call)
        wanted = x.astype(np.float32)
        for _ in range(3): wanted = np.clip(wanted @ w, -3, 3)
        equal(jit(Tensor(x).realize(), Tensor(w).realize()), wanted.astype(np.float16))
    (graph,) = graphs(jit)
    return graph.chain.counts


def test_a_chain_of_products_has_programmatic_edges_only():
    assert run_three() == EdgeCounts(launches=3, edges=2, programmatic=2)


def test_NV_PDL_0_has_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NV_PDL", "0")
    monkeypatch.setattr("tinygrad.engine.realize.runtime_cache", {})  # programs read it when they are made
    graph_cache.clear()
    assert run_three() == EdgeCounts(launches=3, edges=2)


def test_kernels_of_tinygrad_wait_before_all_else(monkeypatch: pytest.MonkeyPatch):
    """In the text, and after ptxas."""
    made: dict = {}
    monkeypatch.setattr("tinygrad.engine.realize.runtime_cache", made)
    x, _, _ = inputs(0)
    equal((Tensor(x) * 2 + 1).contiguous(), x * 2 + 1)
    equal(Tensor(x).softmax().argmax(axis=1).contiguous(), x.argmax(axis=1).astype(np.int32))
    assert len(made) > 2
    for program in made.values():
        text = program.module.text
        assert text.startswith(".version")
        assert program.launch == LaunchConfig(pdl=True)
        assert program.pdl
        text = text.replace(".version 7.8\n.target sm_90", ".version 8.0\n.target sm_90a")
        (code,) = functions(disassemble(assemble(text).cubin)).values()
        names = [each.opcode for each in code]
        first = next(i for i, name in enumerate(names) if name in ("LDG", "STG"))
        assert names.index("PREEXIT") < names.index("ACQBULK") < first
