"""What comes from HBM, and the clock that power leaves."""
from __future__ import annotations

import numpy as np
import pytest

from tinygrad_nv.errors import ConfigError
from tinygrad_nv.ptx.emulator.tapes import NOTE, Note
from tinygrad_nv.ptx.timing.gpu import figures, known, sustained_hz
from tinygrad_nv.ptx.timing.l2 import far_share, first_share

H100 = figures("h100")


def reads(*keys: int) -> np.ndarray:
    """A warp that reads tiles of 64 rows of 128 bytes."""
    return np.array([(Note.READS, 128, key << 13, 64, 128) for key in keys], NOTE)


def test_what_all_read_comes_once():
    assert first_share([reads(0, 1, 2, 3)] * 8) == 1 / 8
    assert first_share([reads(4 * i, 4 * i + 1) for i in range(8)]) == 1.0
    assert first_share([]) == 1.0


def test_a_grid_of_tiles_shares_rows_and_columns():
    """8 x 8 tiles, each reads its rows and its columns: 16 of 128 are the first."""
    grid = [reads(100 * k + i, 100 * k + 50 + j) for k in range(1) for i in range(8) for j in range(8)]
    assert first_share(grid) == 16 / 128


def test_what_fits_into_l2_comes_once_of_all_waves():
    size = 64 * 128 * 4
    some, memory = [reads(0, 1, 2, 3)] * 8, [(0, size), (1 << 40, 1 << 40)]
    assert far_share(some, memory, 8 * size, H100.l2_bytes) == 1 / 8
    assert far_share(some, memory, 80 * size, H100.l2_bytes) == 1 / 80
    assert far_share(some, memory, 80 * size, size) == 1 / 8         # too small to keep it


def test_power_limits_the_clock_of_busy_tensor_cores():
    """m64n256k16 on random numbers, nothing else: 1.714 GHz (HOPPER_TIMING.md 7.3)."""
    assert sustained_hz(H100, 1.0, 0.0) == pytest.approx(1.714e9, rel=0.01)
    assert sustained_hz(H100, 0.3, 0.9) == H100.clock_hz
    assert sustained_hz(H100, 1.0, 0.9) < 0.92 * H100.clock_hz


def test_gpus_have_all_figures():
    assert {"h100", "h200", "h800"} <= set(known())
    assert all(figures(name).sms > 0 for name in known())
    with pytest.raises(ConfigError, match="no figures of a GPU 'x'"): figures("x")
