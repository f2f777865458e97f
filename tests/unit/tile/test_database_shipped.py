"""Schedules that come with the package, and databases that are merged."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.timing.hardware_rows import load_rows, spec_of
from tinygrad_nv.ptx.timing.gpu import figures
from tinygrad_nv.tile import database
from tinygrad_nv.tile.database import Entry
from tinygrad_nv.tile.gemm.dense import dense
from tinygrad_nv.tile.gemm.schedules import Mma
from tinygrad_nv.tile.template import GPU

SPEC, FAST = dense(64, 64, 256), Mma().block(64, 64)
A100 = GPU("sm_80", figures("a100").sms, model="a100")


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.delenv("NV_SCHEDULES", raising=False)
    monkeypatch.setenv("NV_CACHE_DIR", str(tmp_path))
    shipped = Entry(SPEC, "sm_80", "ptxas 99.9", FAST, 1e-5, "modelled", "a100", "tinygrad_nv 9")
    (tmp_path / "shipped.json").write_text(database.dump([shipped]))
    monkeypatch.setattr(database, "SHIPPED", tmp_path / "shipped.json")
    database._load_shipped.cache_clear()
    yield tmp_path
    database._load_shipped.cache_clear()


def test_a_shipped_schedule_is_known_where_nothing_better_is(places: Path,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    found = database.find_winner(SPEC, "sm_80", A100)
    assert found is not None
    assert (found.schedule, found.how, found.provenance) == (FAST, "modelled", "modelled for a100")
    assert database.find_winner(dense(64, 64, 128), "sm_80", A100) is None
    other = GPU("sm_90a", figures("h100").sms, model="h100")
    assert database.find_winner(SPEC, "sm_90a", other) is None
    own = Entry(SPEC, "sm_80", database.toolchain(), Mma().block(32, 64), 2e-5, "modelled", "a100")
    database.store([own])
    assert database.find_winner(SPEC, "sm_80", A100) == own       # what was found here comes first
    monkeypatch.setenv("NV_SCHEDULES", str(places / "none.json"))
    assert database.find_winner(SPEC, "sm_80", A100) is None      # a file that is named is all there is


def test_what_is_shipped_is_legal_and_was_measured() -> None:
    """On an H100; an H200, which measured nothing, takes it too."""
    shipped = database.parse(database.SHIPPED.read_text(), database.SHIPPED)
    assert len(shipped) >= 15
    for each in shipped:
        gpu = GPU(each.arch, figures(each.gpu).sms, model=each.gpu)
        assert (each.how, each.gpu, each.throttled) == ("measured", "h100", False)
        assert each.origin.startswith("tinygrad_nv ")
        assert each.driver
        assert each.commit
        assert not database.problems(each.spec, each.schedule, gpu)
        sibling = database.find_winner(each.spec, each.arch, replace(gpu, model="h200"))
        assert sibling is not None
        assert sibling.schedule == each.schedule


def test_shipped_schedules_are_the_fastest_that_were_timed() -> None:
    """They come from each spec's sweep, from a power-limited one only where schedules took turns."""
    rows = [row for row in load_rows() if row.sweep.startswith("schedules ")]
    for each in database.parse(database.SHIPPED.read_text(), database.SHIPPED):
        sweep = [row.us for row in rows if row.sweep.endswith(each.commit)
                 and database.tuning_key(spec_of(row)) == each.spec]
        assert each.seconds * 1e6 == pytest.approx(min(sweep))


def test_merging_takes_what_is_new_or_faster(places: Path) -> None:
    def made(seconds: float, **more: Any) -> Entry:
        return replace(Entry(SPEC, "sm_80", "ptxas 1", FAST, seconds, "measured", origin="here"), **more)
    database.store([made(2e-5), made(2e-5, arch="sm_89")])
    other = [made(1e-5, origin="there"), made(3e-5, arch="sm_89", origin="there"),
             made(1e-5, toolchain="ptxas 2", origin="there")]
    assert database.merge(other) == (1, 1)
    assert {(each.arch, each.toolchain): (each.seconds, each.origin) for each in database.entries()} == {
        ("sm_80", "ptxas 1"): (1e-5, "there"), ("sm_89", "ptxas 1"): (2e-5, "here"),
        ("sm_80", "ptxas 2"): (1e-5, "there")}
    assert database.merge(other) == (0, 0)


def test_the_command_merges(places: Path, command: Any) -> None:
    file = places / "other.json"
    there = Entry(SPEC, "sm_80", "ptxas 1", FAST, 1e-5, "measured", origin="there")
    file.write_text(database.dump([there]))
    assert "1 schedules added" in command("tune", "--merge", file).succeeded().out
    assert "0 schedules added" in command("tune", "--merge", file).succeeded().out
    assert "there" in command("tune", "--list").succeeded().out
    file.write_text("{}")
    command("tune", "--merge", file).refused("is no schedule database")
