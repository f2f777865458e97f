"""The table of templates: each row is what it says, nothing else knows templates by their names, and asking
it loads no writer of kernels."""
from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

import tinygrad_nv
from tinygrad_nv.errors import ScheduleError
from tinygrad_nv.tile.attention.schedules import BackwardMma, BackwardWgmma, FlashFma, FlashMma, FlashWgmma
from tinygrad_nv.tile.gemm.dense import dense
from tinygrad_nv.tile.gemm.schedules import Gemv, Mma, Wgmma
from tinygrad_nv.tile.router.spec import GroupRowsSpec
from tinygrad_nv.tile.scaled_gemm.spec import ScaledGemmSpec
from tinygrad_nv.tile.template import GPU, Template
from tinygrad_nv.tile.templates import TABLE

PACKAGE = Path(tinygrad_nv.__file__).parent
KINDS = list(dict.fromkeys(kind for kind, _ in TABLE.rows))
TEMPLATES = [(kind, template) for kind in KINDS for family in TABLE.families(kind)
             for template in family.templates]
NAMES = {template.name for _, template in TEMPLATES}


@pytest.mark.parametrize(("kind", "template"), TEMPLATES, ids=lambda each: getattr(each, "name", each))
def test_a_row_is_what_it_says(kind: str, template: Template):
    schedule = template.schedule()
    assert (schedule.kind, schedule.template) == (kind, template.name)
    assert TABLE.of(schedule) is TABLE.find_template(kind, template.name) is template
    assert TABLE.read(kind, schedule.to_json()) == schedule
    assert str(schedule).split()[0] == template.name
    for field in fields(schedule):
        with pytest.raises(FrozenInstanceError): setattr(schedule, field.name, 1)


def test_every_type_of_spec_is_in_the_table():
    """Under its own name, of the family whose folder it lies in, on the targets that have templates."""
    found = {(kind, template.spec) for kind, template in TEMPLATES}
    assert {spec.__name__ for _, spec in found} == set(TABLE.specs)
    for kind, spec in found:
        assert spec.__module__.startswith(f"tinygrad_nv.tile.{TABLE.specs[spec.__name__]}.")
        assert TABLE.family(kind, spec).name == TABLE.specs[spec.__name__]
    assert TABLE.family("cpu", ScaledGemmSpec) is TABLE.family("gpu", GroupRowsSpec) is None
    assert TABLE.family("gpu", int) is None


def test_no_two_templates_have_a_name():
    assert len({(kind, template.name) for kind, template in TEMPLATES}) == len(TEMPLATES) >= 3


def test_a_name_there_is_not():
    with pytest.raises(ScheduleError, match="template 'fma'") as error: TABLE.find_template("gpu", "fma")
    assert {"mma", "wgmma", "gemv"} <= set(error.value.expected.removeprefix("one of ").split(", "))


def test_schedules_have_the_fields_of_their_template():
    assert Mma() != Wgmma().k(32).stages(3).warps(2)
    assert not hasattr(Mma(), "cluster_m")
    assert not hasattr(Gemv(), "block_m")
    assert not hasattr(Wgmma(), "warps_n")


@pytest.mark.parametrize(("kind", "template"), TEMPLATES, ids=lambda each: getattr(each, "name", each))
def test_fields_that_a_template_lacks_are_refused_unless_they_say_nothing(kind: str, template: Template):
    schedule = template.schedule()
    own = {field.name for field in fields(schedule)}
    for name, value in schedule.NEUTRAL.items():
        if name in own: continue
        data = {**schedule.to_json(), name: value}
        assert TABLE.read(kind, data) == schedule
        other = {False: True, 1: 2, "": "64B", "cooperative": "pingpong"}[value]
        if name == "warps_n" and template.schedule is Gemv: continue  # of warps along two sides, the product
        with pytest.raises(ScheduleError, match=f"{name}={other!r} is of another template"):
            TABLE.read(kind, {**data, name: other})


def test_entries_with_the_fields_of_every_template_are_read():
    """As they were written when all templates had one type of schedule."""
    old = {"block_m": 128, "block_n": 128, "block_k": 32, "warps_m": 2, "warps_n": 1, "depth": 3, "splits": 1,
           "cluster_m": 1, "cluster_n": 1, "stream": False, "mode": "cooperative", "group": 8, "swap": False,
           "swizzle_width": ""}
    for made in (FlashMma, FlashFma, FlashWgmma, BackwardMma, BackwardWgmma, Mma, Gemv, Wgmma):
        schedule = made()
        assert TABLE.read("gpu", old | schedule.to_json()) == schedule


def test_the_candidates_of_a_template_are_its_own():
    for arch in ("sm_80", "sm_89", "sm_90a"):
        for spec in (dense(4, 4096, 4096), dense(4096, 4096, 4096)):
            for template in TABLE.templates("gpu", spec):
                assert {type(s) for s in template.candidates(spec, GPU(arch))} <= {template.schedule}


def test_asking_the_table_loads_no_kernel():
    code = ("import sys\nfrom tinygrad_nv.tile.templates import TABLE\n"
            "for kind in ('gpu', 'cpu'): TABLE.families(kind)\n"
            "print(*[m for m in sys.modules if m[:17] == 'tinygrad_nv.tile.' and m[-7:] == '.kernel'\n"
            "        and m != 'tinygrad_nv.tile.kernel'])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


# **** names ****

def compared(tree: ast.AST, names: set[str]) -> Iterator[int]:
    """Lines that compare something with a name, or have a dict with one as a key."""
    for node in ast.walk(tree):
        asked: list[ast.expr | None] = []
        if isinstance(node, ast.Compare): asked = [node.left, *node.comparators]
        if isinstance(node, ast.Dict): asked = list(node.keys)
        if isinstance(node, ast.MatchValue): asked = [node.value]
        said = [leaf.value for one in asked if one is not None for leaf in ast.walk(one)
                if isinstance(leaf, ast.Constant)]
        if names & {value for value in said if isinstance(value, str)}: yield node.lineno


@pytest.mark.parametrize("code", ["s.template == 'mma'", "s.template in ('mma', 'gemv')", "{'wgmma': 1}[s]",
                                  "'gemv' != s", "match s:\n case 'mma': pass"])
def test_a_comparison_is_seen(code: str):
    assert list(compared(ast.parse(code), {"mma", "wgmma", "gemv"}))


def test_nothing_compares_names_of_templates():
    """Outside of the table itself, and of what has mma and wgmma as instructions. A level of an instruction
    set, a kind of structured output, objects and fields of OpenAI's API, a method of bytes that chat
    templates may call, and families of kernels have the names of templates too."""
    instructions = [PACKAGE / name for name in ("ptx", "tile/language/gpu", "numerics/semantics")]
    apart = {PACKAGE / "tile" / "templates.py", PACKAGE / "engine" / "text" / "template_sandbox.py",
             PACKAGE / "tile" / "known_error.py"}
    files = [file for file in PACKAGE.rglob("*.py") if file not in apart
             and not any(file.is_relative_to(folder) for folder in instructions)]
    names = NAMES - {"amx", "choice", "count", "embedding"}
    assert [f"{file}:{line}" for file in files for line in compared(ast.parse(file.read_text()), names)] == []
