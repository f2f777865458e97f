"""What comes from HBM, and the clock that power leaves. How many clusters run at once: of a model of the
GPU, and as a driver says; grids follow it."""
from __future__ import annotations

from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from tests.support.runtime.cuda_fake import installed
from tinygrad_nv.errors import ConfigError, DriverError
from tinygrad_nv.ptx.emulator.arguments import resident_clusters
from tinygrad_nv.ptx.emulator.tapes import NOTE, Note
from tinygrad_nv.ptx.gpcs import GPCS, gpcs, most_clusters
from tinygrad_nv.ptx.timing.gpu import clock_under_load, figures, list_gpus, slow_down
from tinygrad_nv.ptx.timing.l2 import first_shares, shares_of
from tinygrad_nv.runtime.cuda.driver import CUDADriver
from tinygrad_nv.runtime.emulated.driver import EmulatedDriver
from tinygrad_nv.tile.gemm.dense import dense
from tinygrad_nv.tile.gemm.schedules import GemmSchedule, Wgmma
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

H100 = figures("h100")


def reads(*keys: int, source: int = 7) -> np.ndarray:
    """A warp's instruction that reads tiles of 64 rows of 128 bytes."""
    return np.array([(Note.READS, source, 128, key << 13, 64, 128) for key in keys], NOTE)


def test_what_all_read_comes_once():
    assert first_shares([reads(0, 1, 2, 3)] * 8) == {7: 1 / 8}
    assert first_shares([reads(4 * i, 4 * i + 1) for i in range(8)]) == {7: 1.0}
    assert first_shares([]) == {}


def test_each_instruction_has_its_own_share():
    """Queries of its own, keys that all share."""
    some = [np.concatenate([reads(1000 + i, source=3), reads(0, 1, source=5)]) for i in range(10)]
    assert first_shares(some) == {3: 1.0, 5: 0.1}


def test_a_grid_of_tiles_shares_rows_and_columns():
    """8 x 8 tiles, each reads its rows and its columns: 16 of 128 are the first."""
    assert first_shares([reads(i, 50 + j) for i in range(8) for j in range(8)]) == {7: 16 / 128}


def test_what_fits_into_l2_comes_once_of_all_waves():
    size = 64 * 128 * 4
    some, memory = [reads(0, 1, 2, 3)] * 8, [(0, size), (1 << 40, 1 << 40)]
    def share(times: float, l2_bytes: int = H100.l2_bytes) -> float:
        gpu = replace(H100, l2_bytes=l2_bytes)
        return float(shares_of(first_shares(some), memory, reads(0, 1, 2, 3), times, 1, gpu)[0, 0])
    assert share(8) == 1 / 8
    assert share(80) == pytest.approx(1 / 80)
    assert share(80, size) == 1 / 8         # too small to keep it


def test_what_is_written_stays_in_l2_where_there_is_room():
    written = np.array([(Note.WRITES, 9, 128, 0, 64, 128)], NOTE)
    for size, share in ((1 << 20, 0.0), (1 << 30, 1.0)):
        assert shares_of({}, [(0, size)], written, 1.0, 1, H100).tolist() == [[share, 1.0]]


@pytest.mark.parametrize("kind", [(Note.REDUCED, 9, 128, 0, 64, 128), (Note.SECTORS, 9, 256, 0, 64, 2)])
def test_reductions_reach_hbm_once_for_each_byte(kind: tuple[int, ...]):
    """8 KiB of each of 2^20 warps, to 1 GiB; stores to the same place are not added up in L2."""
    def share(times: float, *note: int) -> float:
        return float(shares_of({}, [(0, 1 << 30)], np.array([note], NOTE), times, 1, H100)[0, 0])
    assert share(2**20, *kind) == 1 / 8
    assert share(2**10, *kind) == 1.0
    assert share(2**20, Note.WRITES, *kind[1:5], 0) == 1.0


def test_what_sms_of_a_gpc_read_in_step_l2_serves_once():
    """All SMs read the same: L2 serves `coalesced` of it once a GPC. With two CTAs on an SM half of that; of
    what each reads for itself, all."""
    def near(some: list[np.ndarray], together: int) -> float:
        return float(shares_of(first_shares(some), [(0, 1 << 40)], reads(0, 1), 1.0, together, H100)[0, 1])
    alike, own = [reads(0, 1)] * 128, [reads(2 * i, 2 * i + 1) for i in range(128)]
    assert near(alike, 1) == pytest.approx(1 - H100.coalesced * (1 - 8 / 128))
    assert near(alike, 2) == pytest.approx(1 - H100.coalesced / 2 * (1 - 8 / 128))
    assert near(own, 1) == 1.0


def test_an_instruction_that_no_other_cluster_came_to_reads_like_the_rest():
    some = [reads(0, 1)] * 4
    found = shares_of(first_shares(some), [(0, 1 << 40)], reads(0, source=99), 1.0, 1, H100)
    assert found[0, 0] == 1 / 4


def test_power_limits_the_clock_of_busy_tensor_cores():
    """All parts together take what the board may take."""
    for tensor, hbm in ((1.0, 0.0), (0.9, 0.3)):
        share = clock_under_load(H100, tensor, 0.5, hbm) / H100.clock_hz
        dynamic = (H100.tensor_w * tensor + H100.memory_w * 0.5) * share**H100.power_exponent
        assert H100.static_w + dynamic + H100.hbm_w * hbm == pytest.approx(H100.power_w)
    assert clock_under_load(H100, 0.3, 0.9, 0.9) == H100.clock_hz
    assert clock_under_load(H100, 1.0, 0.0, 0.9) < clock_under_load(H100, 1.0, 0.0, 0.0)


def test_l2_and_hbm_do_not_slow_down_with_the_sms():
    slow = slow_down(H100, H100.clock_hz / 2)
    assert slow.l2_bytes_per_cycle == 2 * H100.l2_bytes_per_cycle
    assert slow.hbm_bytes_per_s / slow.clock_hz == 2 * H100.hbm_bytes_per_s / H100.clock_hz


def test_gpus_have_all_figures():
    assert {"a100", "h100", "h200", "h800", "l40s"} <= set(list_gpus())
    assert all(figures(name).sms > 0 for name in list_gpus())
    assert all(figures(name).pdl_gap_s <= figures(name).gap_s < figures(name).submit_s
               for name in list_gpus())
    with pytest.raises(ConfigError, match="no figures of a GPU 'x'"): figures("x")


def test_figures_come_from_files_too(tmp_path: Path):
    file = tmp_path / "mine.toml"
    text = (resources.files("tinygrad_nv.ptx.timing") / "gpus" / "h100.toml").read_text()
    file.write_text(text.replace("sms = 132", "sms = 78"))
    assert figures(str(file)) == replace(H100, sms=78)
    few, none = tmp_path / "few.toml", tmp_path / "none.toml"
    few.write_text('name = "few"\nsms = 78\n')
    with pytest.raises(ConfigError, match="has no arch, threads_of_sm, "): figures(str(few))
    with pytest.raises(ConfigError, match=r"or a \.toml file"): figures(str(none))


@pytest.mark.parametrize(("field", "value"), [
    *((rate, value) for rate in ("hbm_bytes_per_s", "l2_bytes_per_cycle", "clock_hz", "beside_wgmma")
      for value in ("-1.0", "nan", "inf", "-inf", "1e308", "true", '"x"', "[]")),
    ("hbm_bytes_per_s", "0"), ("l2_bytes_per_cycle", "0.0"), ("sms", "0"), ("sms", "1.5"),
    ("sms", "9" * 4000), ("mma_macs", "0"), ("hbm_latency", "-1"), ("hbm_latency", "4294967296"),
    ("power_w", "119"), ("name", "5")])
def test_figures_that_no_gpu_has(tmp_path: Path, field: str, value: str):
    """Rates of 0 or NaN would become integers that no cycle has."""
    file = tmp_path / "mine.toml"
    lines = (resources.files("tinygrad_nv.ptx.timing") / "gpus" / "h100.toml").read_text().splitlines()
    made = [f"{field} = {value}" if each.startswith(f"{field} ") else each for each in lines]
    file.write_text("\n".join(made))
    with pytest.raises(ConfigError, match=rf"mine\.toml: {field} = .*") as error: figures(str(file))
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("text", ["a = [" * 5000, "a = " + "9" * 5000, "= 1", "\x00"], ids="abcd")
def test_figures_that_are_no_toml(tmp_path: Path, text: str):
    (file := tmp_path / "mine.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"mine\.toml cannot be read"): figures(str(file))


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
