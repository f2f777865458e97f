"""Training over ranks: what is refused before anything is sent."""
from __future__ import annotations

import pytest
from tinygrad import Tensor, dtypes, nn

from tinygrad_nv.dist.collectives.functions import shift
from tinygrad_nv.dist.group import Group
from tinygrad_nv.dist.train.data_parallel import average_gradients
from tinygrad_nv.dist.train.experts import LocalExperts, dispatch
from tinygrad_nv.dist.train.fully_sharded import FullySharded
from tinygrad_nv.dist.train.pipeline import Pipeline, Recomputed
from tinygrad_nv.dist.train.ring_attention import ring_attention, zigzag
from tinygrad_nv.dist.train.schedules import one_f_one_b
from tinygrad_nv.dist.train.sequence import SequenceParallel
from tinygrad_nv.errors import DistError


@pytest.fixture(scope="module")
def pair() -> Group:
    """Rank 0 of 2, which is never called."""
    return Group("0-1", (0, 1), 0, 1.0)


def empty(*shape: int) -> Tensor: return Tensor.empty(*shape, dtype=dtypes.float32, device="CPU")


def test_a_parameter_without_a_gradient(pair: Group):
    used, unused = empty(2, 2), empty(3, 2)
    used.sum().backward()
    with pytest.raises(DistError, match=r"1 of 2 parameters have no gradient, the first of shape \(3, 2\)"):
        average_gradients([used, unused], pair)


def test_layers_of_several_dtypes(pair: Group):
    layer = nn.Linear(2, 2)
    layer.weight = layer.weight.cast(dtypes.float16)
    with pytest.raises(DistError, match=r"layer 1 has parameters of \['float', 'half'\]"):
        FullySharded([nn.Linear(2, 2), layer], pair)
    with pytest.raises(DistError, match="layer 0 has parameters of no dtype"):
        FullySharded([Tensor.relu], pair)


def test_pipelines_that_do_not_fit(pair: Group):
    stage = Recomputed(lambda x: x, [])
    with pytest.raises(DistError, match="a schedule of 3 ranks in a group of 2"):
        Pipeline(one_f_one_b(3, 3), pair, {0: stage}, (2,), dtypes.float32)
    with pytest.raises(DistError, match=r"(?s)rank 0 has stages \[1\].*\[0\], by the schedule"):
        Pipeline(one_f_one_b(2, 2), pair, {1: stage}, (2,), dtypes.float32)
    wide = Recomputed(lambda: Tensor.ones(3, device="CPU").contiguous(), [])
    with pytest.raises(DistError, match=r"F0 of stage 0 makes float \(3,\)"):
        Pipeline(one_f_one_b(2, 2), pair, {0: wide}, (2,), dtypes.float32).run()


def test_sequences_that_do_not_divide(pair: Group):
    with pytest.raises(DistError, match="5 tokens over 2 sequence parallel ranks"):
        SequenceParallel(pair).own(empty(1, 5, 4))
    with pytest.raises(DistError, match="a sequence of 6 over 2 ranks"): zigzag(empty(1, 1, 6, 4), pair)
    q = empty(1, 2, 3, 4)
    with pytest.raises(DistError, match="3 positions a rank"): ring_attention(q, q, q, pair)
    with pytest.raises(DistError, match="parts of one length"): ring_attention(q, q[:, :, :2], q, pair)


def test_experts_that_do_not_divide(pair: Group):
    experts = LocalExperts(empty(4, 8), empty(4, 6, 8), empty(4, 8, 3))
    with pytest.raises(DistError, match="4 experts on rank 0 of 2, of 4 of the router"):
        dispatch(empty(2, 8), experts, pair)


def test_shifts(pair: Group):
    with pytest.raises(DistError, match="shift of a tensor on PYTHON"):
        shift(Tensor.empty(2, device="PYTHON"), pair)
