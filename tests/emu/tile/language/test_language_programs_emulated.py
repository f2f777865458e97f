"""Programs of users' kinds as PTX on the emulated GPUs: the answers of the CPU, and no finding."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tinygrad import Tensor
from tinygrad.dtype import dtypes

from tests.support.language.programs import PROGRAMS, UNORDERED
from tests.support.language.programs.case import Case, direct, tensor
from tinygrad_nv.language.inspection import check
from tinygrad_nv.language.kernels import Kernel
from tinygrad_nv.tile.language.batching import batch_program

# times the error of float32. Tensor cores keep 13 bits below the largest product of a step of float8
# (docs/numerics.md): 2^-13 of the largest sum, where float32 has half of 2^-23
WIDER = {"fp8_gemm-20x30x50": 2.0**11}
FROM_SM_89 = {"fp8_gemm-20x30x50"}


@pytest.mark.sampled(14)
@pytest.mark.parametrize("case", PROGRAMS, ids=lambda case: case.name)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_on_the_emulator(arch: str, case: Case) -> None:
    if arch == "sm_80" and case.name in FROM_SM_89: arch = "sm_89"

    def launch(kernel: Kernel, *args: Any, **constants: Any) -> Any:
        checked = kernel.check(*args, arch=arch, emulator_seed=1, **constants)
        assert not checked.findings, str(checked)
        outputs = [each for each in kernel.program(*args, **constants).tensors if each.output]
        device = next(each.device for each in (*args, *constants.values()) if isinstance(each, Tensor))
        made = tuple(tensor(checked.outputs[each.name], each.dtype, device) for each in outputs)
        return made if len(made) > 1 else made[0]
    replace(case, c=WIDER.get(case.name, case.c)).check("CPU", launch)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("case", [each for each in PROGRAMS if not each.name.startswith(UNORDERED)],
                         ids=lambda case: case.name)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_two_examples(arch: str, case: Case) -> None:
    """A program over two examples has the bits of each alone."""
    if arch == "sm_80" and case.name in FROM_SM_89: arch = "sm_89"

    def launch(kernel: Kernel, *args: Any, **constants: Any) -> Any:
        made = kernel.program(*args, **constants)
        given = kernel.bind(args, constants, kernel.chosen).tensors
        inputs = [each.name for each in made.tensors if not each.output]
        twice = {name: Tensor.stack(x, x * 2 if dtypes.is_float(x.dtype) else x) for name, x in given.items()}
        checked = check(batch_program(made, 2, inputs), kernel.chosen, twice, arch, 1)
        assert not checked.findings, str(checked)
        for i in range(2):
            one = check(made, kernel.chosen, {name: x[i].contiguous() for name, x in twice.items()}, arch, 1)
            for name, want in one.outputs.items(): assert checked.outputs[name][i].tobytes() == want.tobytes()
        return direct(kernel, *args, **constants)
    given = zip(case.arrays(), case.inputs, strict=True)
    case.run(launch, *(tensor(x, each.dtype, "CPU") for x, each in given))
