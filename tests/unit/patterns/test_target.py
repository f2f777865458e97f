"""What patterns ask of targets: a schedule, or why there is none, and kernels, made once."""
from __future__ import annotations

from typing import Any

import pytest
from tinygrad import dtypes

from tinygrad_nv.cpu.target import CPU, host
from tinygrad_nv.patterns.contraction import Unsupported
from tinygrad_nv.patterns.target import Chosen, choose
from tinygrad_nv.tile.embedding.spec import EmbeddingSpec, Tokens
from tinygrad_nv.tile.gemm.dense import dense
from tinygrad_nv.tile.launch import Integer
from tinygrad_nv.tile.router.spec import GroupRowsSpec
from tinygrad_nv.tile.sampling.spec import ChoiceSpec, FilterSpec, Number
from tinygrad_nv.tile.template import GPU

HOPPER = GPU("sm_90a", 132)
TOKENS = Tokens(dtypes.int32, (7,), (1,))
TABLE = EmbeddingSpec(100, 64, dtypes.float32, TOKENS)
SPECS = (dense(64, 64, 64), TABLE, ChoiceSpec(2, 1 << 17), FilterSpec(2, 1000, Number.top_k, True))


@pytest.fixture(params=["gpu", "cpu"])
def target(request: pytest.FixtureRequest) -> GPU | CPU: return HOPPER if request.param == "gpu" else host()


@pytest.mark.parametrize("spec", SPECS, ids=lambda each: type(each).__name__)
def test_a_spec_becomes_kernels_that_equal_choices_share(target: GPU | CPU, spec: Any):
    one, other = choose(spec, target), choose(spec, target)
    assert (one.spec, one.target, one.schedule.kind) == (spec, target, target.kind)
    assert one.build() is other.build()


def test_other_integers_are_other_kernels():
    one, integers = choose(dense(64, 64, 64), HOPPER), (Integer(3, (1,)),)
    (other,) = Chosen(one.spec, one.schedule, HOPPER, integers).build().kernels
    assert other.launch.integers == integers
    assert one.build().kernels[0].launch.integers == ()


@pytest.mark.parametrize(("where", "spec", "words"), [
    ("gpu", dense(64, 64, 64, "f32"), "float32 without ALLOW_TF32"),
    ("gpu", ChoiceSpec(1 << 16, 8), "65536 rows, at most 65535"),
    ("gpu", GroupRowsSpec(7, 2, 4), "no template for 14 slots by their 4 experts"),
    ("cpu", dense(5000, 4, 4, "f32"), "K of 4 with 4 rows or columns, at least 9 or 64")],
    ids=["f32", "rows", "groups", "short"])
def test_what_no_template_takes_is_refused_with_the_reason(where: str, spec: Any, words: str):
    with pytest.raises(Unsupported) as no: choose(spec, HOPPER if where == "gpu" else host())
    assert str(no.value) == words
