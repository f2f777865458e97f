"""Hooks look before they walk: what is done to a program in which there is nothing of ours, by count.
Rewrites that are registered when something is lowered first, and renderers that are loaded when they are
asked for."""
from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tinygrad.helpers import Context
from tinygrad.tensor import transform_to_call
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv import Tensor, explain, functional, hooks
from tinygrad_nv.hooks import rewrites
from tinygrad_nv.hooks import rewrites as hook_rewrites
from tinygrad_nv.models.families import EMBEDDERS, FAMILIES
from tinygrad_nv.patterns import registered
from tinygrad_nv.patterns.norm import match as norm
from tinygrad_nv.runtime import programs

PLAIN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda a, b: a + b,
    "relu": lambda a, b: ((a + b) * a - b).relu(),
    "where": lambda a, b: (a > 0.5).where(a, b),
    "sum": lambda a, b: a.sum(),
    "max of rows": lambda a, b: a.max(-1),
    "clone": lambda a, b: a.clone(),
    "transpose": lambda a, b: a.T.contiguous(),
    "cat": lambda a, b: a.cat(b),
    "slice": lambda a, b: a[3:17, ::2] + 1,
    "item": lambda a, b: a[0, 0].contiguous(),
}


def tensors() -> tuple[Tensor, Tensor]:
    a, b = (Tensor(np.arange(4096, dtype=np.float32).reshape(64, 64) / 4096, device="CPU") for _ in range(2))
    return a.realize(), b.realize()


def body(tensor: Tensor) -> UOp:
    """What the rewrites of a program get."""
    return transform_to_call(UOp.sink(tensor.uop))[0].src[0]


def refuse(*args: object, **kwargs: object) -> None: raise AssertionError("called")


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[Ops]:
    """The roots of the walks that there were."""
    seen, own = list[Ops](), UOp.toposort
    def toposort(self: UOp, *args: object, **kwargs: object) -> dict[UOp, None]:
        seen.append(self.op)
        return own(self, *args, **kwargs)
    monkeypatch.setattr(UOp, "toposort", toposort)
    return seen


@pytest.mark.parametrize("name", PLAIN)
def test_a_program_with_nothing_of_ours_is_walked_once(name: str, walks: list[Ops],
                                                       monkeypatch: pytest.MonkeyPatch):
    sink = body(PLAIN[name](*tensors()))
    monkeypatch.setattr(hook_rewrites, "graph_rewrite", refuse)
    walks.clear()
    assert hooks.rewritten(sink) is sink
    assert walks == [Ops.SINK]


def test_a_number_for_each_row_is_not_translated(walks: list[Ops], monkeypatch: pytest.MonkeyPatch):
    a, b = tensors()
    monkeypatch.setenv("NV_SPEC", "0")  # verifying walks
    monkeypatch.setattr(norm, "match_node", refuse)
    monkeypatch.setattr(hook_rewrites, "graph_rewrite", refuse)
    for tensor in (a.mean(-1), (a * 2 + b).sum(-1) * 2 + 1, (a + b).max()):
        sink = body(tensor)
        walks.clear()
        hooks.rewritten(sink)
        assert walks.count(Ops.SINK) <= 3  # one before, one for products, one for rows
    assert explain(a.mean(-1)).kernels[0].template is None


ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "share": lambda a: a / a.sum(-1, keepdim=True),
    "expanded": lambda a: a.sum(-1)[0:1].expand(512) * a[0],
    "from largest": lambda a: a - a.max(-1, keepdim=True),
    "rms": lambda a: a * (a.square().mean(-1, keepdim=True) + 1e-5).rsqrt(),
    "softmax": lambda a: a.softmax(),
    "argmax": lambda a: a.argmax(-1),
    "variance": lambda a: a.var(-1),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_found(name: str):
    rows = Tensor(np.ones((8, 512), np.float32), device="CPU").realize()
    assert [kernel.template for kernel in explain(ROWS[name](rows)).kernels] == ["norm"]


@pytest.mark.parametrize("name", PLAIN)
def test_a_schedule_without_rewrites_needs_no_configuration(name: str, monkeypatch: pytest.MonkeyPatch):
    a, b = tensors()
    PLAIN[name](a, b).realize()
    monkeypatch.setattr(hook_rewrites, "configuration", refuse)
    monkeypatch.setattr(hook_rewrites, "_rewritten", refuse)
    PLAIN[name](a, b).realize()


def test_a_schedule_with_rewrites_belongs_to_the_configuration(monkeypatch: pytest.MonkeyPatch):
    a, _ = tensors()
    def templates() -> list[str | None]:
        return [getattr(call.src[0].src[0].arg, "template", None) or call.src[0].op.name
                for call in a.softmax().schedule_linear().src]
    ours = templates()
    monkeypatch.setenv("NV_NORM", "0")
    assert templates() != ours
    monkeypatch.delenv("NV_NORM")
    assert templates() == ours


def test_a_renderer_that_takes_no_c_has_schedules_of_its_own():
    """The device is the same; its renderer goes by DEV."""
    before = hooks.configuration()
    with Context(DEV="CPU:LLVM"): assert hooks.configuration() != before
    assert hooks.configuration() == before


@pytest.mark.parametrize("setting", ["NV_CPU", "EMU_ARCH"])
@pytest.mark.parametrize("name", ["named", "attention", "gemm", "norm"])
def test_each_rewrite_has_its_targets_among_its_keys(name: str, setting: str,
                                                     monkeypatch: pytest.MonkeyPatch):
    """Also where the others are removed."""
    own = next(each for each in registered.REWRITES if each.name == name)
    before = [key() for key in own.keys]
    monkeypatch.setenv(setting, {"NV_CPU": "0", "EMU_ARCH": "sm_80"}[setting])
    assert [key() for key in own.keys] != before


def test_each_key_is_asked_once():
    asked = []
    def key() -> int:
        asked.append(0)
        return 1
    for name in "ab": hooks.add_rewrite(name, lambda sink: sink, key)
    try:
        hooks.configuration()
        assert len(asked) == 1
    finally:
        for name in "ab": hooks.remove_rewrite(name)


def test_a_rewrite_is_given_what_has_the_ops_it_needs():
    a, b = tensors()
    seen, needs = [], [{Ops.SQRT}, {Ops.MUL, Ops.REDUCE}]
    hooks.add_rewrite("looks", lambda sink: seen.append(sink) or sink, needs=needs)
    try:
        for tensor in (a + b, a * b, a.sum()): hooks.rewritten(body(tensor))
        assert seen == []
        for tensor in (a.sqrt(), (a * b).sum()): hooks.rewritten(body(tensor))
        assert len(seen) == 2
    finally: hooks.remove_rewrite("looks")


def test_a_rewrite_is_given_what_one_before_it_has_made():
    a, b = tensors()
    made, seen = body(a.sqrt()), []
    hooks.add_rewrite("makes", lambda sink: made)
    hooks.add_rewrite("looks", lambda sink: seen.append(sink) or sink, needs=[{Ops.SQRT}])
    try: hooks.rewritten(body(a + b))
    finally:
        for name in ("makes", "looks"): hooks.remove_rewrite(name)
    assert seen == [made]


def test_what_is_compiled_already_is_not_walked(walks: list[Ops]):
    a, b = tensors()
    (a + b).realize()
    linear, given = (a + b).schedule_linear(), []
    for call in linear.src: programs._to_make(call)  # a node's device is found once, by a walk
    walks.clear()
    programs.compile_cached(linear, hooks.Compile(0, lambda linear: given.append(linear) or linear))
    assert walks == []
    assert given == [linear]


def test_products_need_a_product():
    a, b = tensors()
    ops = hook_rewrites.ops_of(body(a @ b))
    gemm = next(each for each in registered.REWRITES if each.name == "gemm")
    assert hook_rewrites.has(ops, tuple(map(frozenset, gemm.needs)))


# **** later ****


ROOT = Path(__file__).resolve().parents[3]
PATTERNS = "sum(name.startswith('tinygrad_nv.patterns.') for name in sys.modules)"


def said(script: str, **variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True,
                          check=True).stdout


def test_what_lowers_nothing_loads_no_patterns():
    assert said("import sys\nfrom tinygrad_nv import Tensor, hooks, LLM, SamplingParams, KernelRecord\n"
                "from tinygrad_nv.engine.bundled import opened\n"
                "with hooks.disabled(): Tensor([1.0]).add(1).realize()\n"
                f"print({PATTERNS})") == "0\n"


def test_the_first_graph_loads_them():
    assert said("import sys\nfrom tinygrad_nv import Tensor, hooks\n"
                "Tensor([1.0]).add(1).realize()\n"
                "print(*(f'tinygrad_nv.patterns.{name}' in sys.modules for name in ('program', 'gemm')),\n"
                "      *hooks.rewrites.rewrites, sep=', ')"
                ) == ("True, False, stable, statistics, division, named, attention, grouped_gemm, gemm, "
                      "norm, several devices\n")


@pytest.mark.parametrize("first", ["hooks.add_rewrite('mine', lambda sink: sink)",
                                   "hooks.remove_check('building')", "explain(Tensor([1.0]).sum())"])
def test_what_asks_for_them_loads_them(first: str):
    text = said(f"from tinygrad_nv import Tensor, explain, hooks\n{first}\nprint(*hooks.rewrites.rewrites)")
    assert text.startswith("stable statistics division named"), text
    assert "mine" not in text or text.endswith("mine\n"), "ours come first"


def test_each_is_called_once_and_again_after_an_exception():
    calls = []

    def register() -> None:
        calls.append(len(calls))
        hooks.configuration()       # asks for what is being registered
        if len(calls) == 1: raise RuntimeError("once")
    hooks.load_later()
    hooks.add_later(register)
    assert calls == []
    assert rewrites.has_rewrites()
    with pytest.raises(RuntimeError, match="once"): hooks.configuration()
    for _ in range(2): hooks.configuration()
    assert calls == [0, 1]


def test_names_of_functional_are_where_it_says():
    assert sorted(functional.PLACES) == sorted(functional.__all__) == sorted({*functional.__all__} &
                                                                           {*dir(functional)})
    assert all(getattr(functional, name) is not None for name in functional.__all__)
    with pytest.raises(AttributeError, match="no attribute 'atention'"): functional.__getattr__("atention")


def test_families_are_where_they_say():
    assert [family.architecture for family in FAMILIES.values()] == list(FAMILIES)
    assert all(family.architecture for family in EMBEDDERS.values())
    assert "NoSuchModel" not in FAMILIES


PROGRAM = """
import sys, tinygrad_nv
from tinygrad import Device, Tensor
renderer = type(Device["CPU"].renderer)
seldom = [name for name in ("tinygrad.renderer.nir", "tinygrad.renderer.isa.x86") if name in sys.modules]
print((Tensor([1, 2, 3]) * 2).tolist(), renderer.__module__, renderer.__name__, seldom)
"""


@pytest.mark.parametrize(("device", "wanted"), [
    ("CPU", "[2, 4, 6] tinygrad_nv.runtime.cpu.clang ClangRenderer []"),
    pytest.param("CPU:X86", "[2, 4, 6] tinygrad.renderer.isa.x86 X86Renderer ['tinygrad.renderer.isa.x86']",
                 marks=pytest.mark.skipif(os.uname().machine != "x86_64", reason="it renders for x86-64"))])
def test_a_renderer_is_loaded_where_it_is_asked_for(device: str, wanted: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], env={**os.environ, "DEV": device}, check=True,
                          capture_output=True, text=True)
    assert done.stdout.strip() == wanted
