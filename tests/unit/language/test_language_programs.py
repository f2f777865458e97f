"""Programs of users' kinds on the CPU, and as NumPy computes them from the Tile IR."""
from __future__ import annotations

import pytest

from tests.support.language.programs import PROGRAMS
from tests.support.language.programs.case import Case, interpreted
from tinygrad_nv.language.kernels import Kernel


def test_there_are_programs_of_many_kinds():
    from tests.support.language import programs
    kernels = {name for module in programs.MODULES for name, each in vars(module).items() if isinstance(each,
                                                                                                        Kernel)}
    assert len(kernels) >= 60
    assert len({each.name for each in PROGRAMS}) == len(PROGRAMS)


@pytest.mark.sampled(28)
@pytest.mark.parametrize("case", PROGRAMS, ids=lambda case: case.name)
def test_on_the_cpu(case: Case): case.check("CPU")


@pytest.mark.parametrize("case", PROGRAMS, ids=lambda case: case.name)
def test_interpreted(case: Case): case.check("CPU", interpreted)
