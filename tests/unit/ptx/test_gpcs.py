"""How many clusters run at once: of a model of the GPU, and as a driver says; grids follow it."""
from __future__ import annotations

import pytest

from tests.support.runtime.cuda_fake import installed
from tinygrad_nv.errors import DriverError
from tinygrad_nv.ptx.emulator.arguments import resident_clusters
from tinygrad_nv.ptx.gpcs import GPCS, gpcs, most_clusters
from tinygrad_nv.runtime.cuda.driver import CUDADriver
from tinygrad_nv.runtime.emulated.driver import EmulatedDriver
from tinygrad_nv.tile.gemm.dense import dense
from tinygrad_nv.tile.gemm.schedules import GemmSchedule, Wgmma
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

LARGE = dense(8192, 8192, 1024, "bf16")
PAIRS = Wgmma().block(128, 128).cluster(2)
FOURS, EIGHTS = PAIRS.cluster(2, 2), PAIRS.cluster(4, 2)


@pytest.mark.parametrize("sm_count", [*GPCS, 114, 78, 18, 5])
def test_gpcs_have_all_sms(sm_count: int):
    assert sum(gpcs(sm_count)) == sm_count
    assert max(gpcs(sm_count)) <= 18
    assert most_clusters(1, sm_count) == sm_count


def test_clusters_of_h100():
    """Of 8 as published, 120 CTAs; one of 4 fewer than 132 / 4."""
    assert [most_clusters(size, 132) for size in (2, 4, 8, 16)] == [66, 31, 15, 7]
    assert most_clusters(4, 132, 2) == 66
    found = [resident_clusters("sm_90a", (384, 1, 1), (size, 1, 1), 200_000) for size in (1, 4, 8)]
    assert found == [132, 31, 15]
    assert resident_clusters("sm_80", (128, 1, 1), (1, 1, 1), 160_000) == 108


def test_the_emulated_device_answers_by_the_model():
    assert EmulatedDriver("sm_90a").clusters == ((2, 66), (4, 31), (8, 15))
    assert EmulatedDriver("sm_80").clusters == ()
    for arch, size, most in (("sm_80", 2, 1), ("sm_90a", 16, 8), ("sm_90a", 0, 8)):
        with pytest.raises(DriverError, match=rf"a cluster of {size} CTAs on {arch}\n.*1 to {most}"):
            EmulatedDriver(arch).most_clusters(size)


def test_the_driver_is_asked_once():
    with installed() as fake:
        fake.clusters |= {4: 30, 8: 14}
        gpu = CUDADriver()
        for _ in range(2): assert gpu.clusters == ((2, 66), (4, 30), (8, 14))
        assert fake.calls["cuOccupancyMaxActiveClusters"] == 3
        assert gpu.most_clusters(1) == 132
        with pytest.raises(DriverError, match="a cluster of 16 CTAs on sm_90a"): gpu.most_clusters(16)
        gpu.close()
        assert fake.left() == {}


@pytest.mark.parametrize(("schedule", "modelled", "told"), [(PAIRS, 132, 120), (FOURS, 124, 100),
                                                            (EIGHTS, 120, 112)])
def test_persistent_grids_are_what_runs_at_once(schedule: GemmSchedule, modelled: int, told: int):
    alone = TABLE.build(LARGE, schedule, GPU("sm_90a", 132))
    assert alone.grid == (modelled, 1, 1)
    asked = TABLE.build(LARGE, schedule, GPU("sm_90a", 132, ((2, 60), (4, 25), (8, 14))))
    assert asked.grid == (told, 1, 1)
    assert asked.ptx == alone.ptx


def test_grids_of_few_tiles_and_of_splits_stay():
    few = dense(512, 256, 1024, "bf16")
    assert TABLE.build(few, FOURS, GPU("sm_90a", 132, ((4, 25),))).grid == (8, 1, 1)
    split = PAIRS.cluster(1).split(4)
    assert TABLE.build(LARGE, split, GPU("sm_90a", 132, ((4, 25),))).grid == (64 * 64 * 4, 1, 1)
