"""Collectives between processes, by shared memory and by MPI: every kind, dtype and axis, gradients,
replays; primitives of training over ranks, and meshes, which give one device's result (train_program.py,
mesh_program.py); and the binding against NCCL itself, as far as it answers without a driver."""
from __future__ import annotations

import ctypes
import time

import pytest
from tinygrad import Tensor, dtypes, nn
from tinygrad.helpers import Context

from tests.support.dist import rank_programs
from tests.support.dist.dist_case import SOON_S
from tinygrad_nv.dist.group import Group
from tinygrad_nv.dist.processes import ENDED
from tinygrad_nv.dist.train.data_parallel import ShardedOptimizer
from tinygrad_nv.dist.transports import nccl_api
from tinygrad_nv.errors import DistError


@pytest.mark.parametrize(("ranks", "mpi", "more"), [
    (2, False, ()), (2, True, ("few",)), (4, True, ("few",)),
    *(pytest.param(ranks, mpi, (), marks=pytest.mark.slow) for ranks in (2, 3, 4) for mpi in (False, True))])
def test_collectives(ranks: int, mpi: bool, more: tuple[str, ...]) -> None:
    made = rank_programs.run("dist/collectives_program.py", ranks, *more, mpi=mpi)
    told = "".join(each.text for each in made)
    over = "mpi" if mpi else "shared"
    assert all(each.code == 0 for each in made), told
    for rank in range(ranks): assert f"rank {rank} of {ranks}: all right over {over}" in told, told


BOTH = ("all_reduce #1 of layers.3.down float[64]", "rank 0 calls", "rank 1 calls")


@pytest.mark.parametrize(("how", "words"), [
    ("kind", (*BOTH, "rank 1 calls all_gather #1")),
    pytest.param("count", (*BOTH, "float[32]"), marks=pytest.mark.slow),
    pytest.param("dtype", (*BOTH, "int[64]"), marks=pytest.mark.slow),
    ("lost", ("rank 1 was lost", "its process ended without closing the store")),
    pytest.param("left", ("rank 1 ended while this rank was in all_reduce #1 of layers.3.down float[64]",),
                 marks=pytest.mark.slow),
    pytest.param("late", ("rank 1 did not come to all_reduce #1 of layers.3.down float[64] within 1 s",),
                 marks=pytest.mark.slow)])
def test_ranks_that_differ(how: str, words: tuple[str, ...]) -> None:
    begun = time.monotonic()
    made = rank_programs.run("dist/collectives_program.py", 2, how)
    assert [word for word in words if word not in made[0].text] == [], made
    assert made[0].code != 0, made
    if how not in ("late", "lost", "left"): assert made[1].code != 0, made
    assert time.monotonic() - begun < SOON_S * rank_programs.SLOWER


def test_a_message_of_another_shape() -> None:
    made = rank_programs.run("dist/collectives_program.py", 2, "message")
    assert made[1].code == 3, made
    assert "rank 1 calls recv #1 of a tensor float[32], rank 0 calls send #1 of a tensor float[64]" in \
        made[1].text, made


def test_a_rank_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NV_DIST_TIMEOUT", "2")
    begun = time.monotonic()
    made = rank_programs.run("dist/collectives_program.py", 2, "hang")
    assert time.monotonic() - begun < SOON_S * rank_programs.SLOWER
    for each in made:
        assert each.code == ENDED, made
        assert "rank 1 has not reached all_reduce #1 of layers.3.down float[64] in 2 s" in each.text, made


QUICK = ("overlap", "fully_sharded", "zero_bubble", "vocabulary")
SLOW = ("steps", "adam", "memory", "pipelines", "sequence", "expert", "ring", "ring_both_ways")


def right(program: str, ranks: int, *checks: str, mpi: bool = False) -> None:
    """Runs checks as ranks, which all have to say that each is right."""
    made = rank_programs.run(program, ranks, *checks, mpi=mpi, timeout_s=500)
    told = "".join(each.text for each in made)
    assert all(each.code == 0 for each in made), told
    for rank in range(ranks):
        for check in checks or ("meshes",): assert f"rank {rank} of {ranks}: {check} " in told, told


def test_two_ranks() -> None: right("dist/train_program.py", 2, *QUICK)


@pytest.mark.slow
def test_two_ranks_all() -> None: right("dist/train_program.py", 2, *SLOW)


@pytest.mark.slow
def test_four_ranks() -> None: right("dist/train_program.py", 4, *QUICK, *SLOW)


def test_two_ranks_over_mpi() -> None: right("dist/train_program.py", 2, *QUICK, "ring", mpi=True)


def test_four_ranks_over_mpi() -> None: right("dist/train_program.py", 4, *QUICK, mpi=True)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_over_mpi(ranks: int) -> None: right("dist/train_program.py", ranks, *QUICK, *SLOW, mpi=True)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_meshes(ranks: int) -> None: right("dist/mesh_program.py", ranks)


def test_the_configuration_is_laid_out_as_in_the_header():
    """nccl.h, ncclConfig_t: 4-byte fields behind the size, a pointer, and a last field."""
    config = nccl_api.Config
    assert [getattr(config, name).offset for name, _ in config._fields_] == [0, 8, 12, 16, 20, 24, 28, 32, 40]
    made = config.make()
    assert (made.size, made.magic, made.blocking) == (ctypes.sizeof(config), 0xcafebeef, 0)


def test_the_library():
    pytest.importorskip("nvidia.nccl", reason="needs the wheel nvidia-nccl-cu13")
    nccl = nccl_api.real()
    assert nccl.version >= nccl_api.LOWEST_VERSION
    assert [name for name in nccl_api.FUNCTIONS if not hasattr(nccl.library, name)] == []
    assert len({nccl.unique_id() for _ in range(2)}) == 2


def test_an_old_library_is_refused():
    class Old:
        def ncclGetVersion(self, version):
            version._obj.value = 21701
            return 0
    with pytest.raises(DistError, match=r"NCCL 2\.17\.1\n.*NCCL 2\.18\.0 or later"): nccl_api.NCCL(Old())


def test_where_there_is_none(monkeypatch):
    monkeypatch.setattr(nccl_api, "_paths", lambda: ["no-libnccl.so"])
    with pytest.raises(DistError, match=r"NCCL cannot be loaded: no-libnccl\.so"):
        nccl_api.real.__wrapped__()


def test_gradients_of_microbatches_are_added():
    """ZeRO-2; what ranks exchange is in train_program.py."""
    weight = Tensor([1.0, 2.0, 3.0], dtype=dtypes.float32, device="CPU").realize()
    with Context(TRAINING=1):
        optimizer = ShardedOptimizer([weight], Group("alone", (0,), 0, 1.0),
                                     lambda parts: nn.optim.SGD(parts, 0.5))
        for by in (1.0, 2.0):
            (weight * by).sum().backward()
            optimizer.reduce()
        optimizer.step()
    assert weight.tolist() == [-0.5, 0.5, 1.5]
