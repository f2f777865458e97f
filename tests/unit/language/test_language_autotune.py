"""Schedules of users' kernels in the schedule database."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tinygrad import Tensor as Plain

from tinygrad_nv import explain
from tinygrad_nv.errors import ConfigError, ScheduleError
from tinygrad_nv.language import *
from tinygrad_nv.language.autotune import Autotuned
from tinygrad_nv.tile import database
from tinygrad_nv.tile.language.searched import KernelSpec


def scale(x: KTile["N", f32], out: OTile["N", f32], *, BM: int, by: float = 2.0):
    rows = tile.block(tile.program_id(0) * BM, BM)
    out[rows] = x[rows] * by


def tuned(cache: Path | None = None) -> Autotuned:
    """A kernel that has found nothing yet."""
    return kernel.autotune(space=dict(BM=[32, 64]), grid=lambda N, BM: (cdiv(N, BM),), cache=cache)(scale)


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A database of the test's own."""
    monkeypatch.setenv("NV_SCHEDULES", str(tmp_path / "kept" / "schedules.json"))
    return tmp_path / "kept" / "schedules.json"


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The searches that are made."""
    made: list[Any] = []
    search = Autotuned._search

    def counted(self: Autotuned, spec: KernelSpec, *rest: Any) -> Any:
        made.append(spec)
        return search(self, spec, *rest)
    monkeypatch.setattr(Autotuned, "_search", counted)
    return made


def called(made: Autotuned, length: int = 100, **constants: Any) -> None:
    x = Plain.arange(length).float().realize()
    assert (made(x, **constants) == x * constants.get("by", 2.0)).all().item()


def test_a_winner_is_an_entry_of_the_schedule_database(searched: list[Any], place: Path):
    called(tuned())
    entry, = database.entries()
    assert (entry.spec.name, entry.how) == (f"{__name__}.scale", "measured")
    assert dict(entry.schedule.numbers)["BM"] in (32, 64)
    called(tuned())
    assert len(searched) == 1


@pytest.mark.parametrize("change", [dict(length=101), dict(by=3.0)])
def test_what_a_winner_depends_on(searched: list[Any], change: dict[str, Any]):
    called(tuned())
    called(tuned(), **change)
    assert len(set(searched)) == 2


def test_a_directory_of_its_own(searched: list[Any], place: Path, tmp_path: Path):
    called(tuned(tmp_path / "own"))
    assert not place.exists()
    called(tuned())
    assert len(searched) == 2
    called(tuned(tmp_path / "own"))
    assert len(searched) == 2


def test_the_command_lists_and_carries_it(command, searched: list[Any], monkeypatch: pytest.MonkeyPatch,
                                          tmp_path: Path):
    called(tuned())
    assert f"kernel {__name__}.scale" in command("tune", "--list").succeeded().out
    command("tune", "--export", str(tmp_path / "all.json")).succeeded()
    monkeypatch.setenv("NV_SCHEDULES", str(tmp_path / "other.json"))
    command("tune", "--import", str(tmp_path / "all.json")).succeeded()
    called(tuned())
    assert len(searched) == 1


def test_a_kernel_takes_its_own_entries_alone(searched: list[Any], monkeypatch: pytest.MonkeyPatch,
                                              tmp_path: Path):
    called(tuned())
    tuned().export(tmp_path / "own.json")
    data = json.loads((tmp_path / "own.json").read_text())
    data["entries"].append(data["entries"][0] | {"spec": data["entries"][0]["spec"] | {"name": "other"}})
    (tmp_path / "both.json").write_text(json.dumps(data))
    monkeypatch.setenv("NV_SCHEDULES", str(tmp_path / "other.json"))
    tuned().load(tmp_path / "both.json")
    assert [each.spec.name for each in database.entries()] == [f"{__name__}.scale"]


@pytest.mark.parametrize("numbers", [{"warps": 0}, {"BM": [1]}, 3, {"stages": "two"}])
def test_numbers_that_no_schedule_has_are_noted(numbers: Any, tmp_path: Path):
    called(tuned())
    data = json.loads(database.path().read_text())
    data["entries"][0]["schedule"]["numbers"] = numbers
    (tmp_path / "wrong.json").write_text(json.dumps(data))
    with pytest.warns(database.ScheduleWarning, match="entry 0 of .*wrong.json is ignored"):
        assert database.parse((tmp_path / "wrong.json").read_text(), tmp_path / "wrong.json") == []


def test_files_that_are_none(tmp_path: Path):
    with pytest.raises(ConfigError, match="a file that `export` has written"):
        tuned().load(tmp_path / "absent.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ScheduleError, match="is no schedule database"): tuned().load(tmp_path / "list.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="schedules cannot be kept in"): called(tuned(tmp_path / "file"))


def test_nothing_is_searched_for_where_sums_have_one_order(searched: list[Any]):
    made = tuned()
    with deterministic():
        for length in (100, 1000):
            called(made, length)
            assert made.choice((Plain.arange(length).float().realize(),), {}).constants == {"BM": 64}
        kernels = explain(made(Plain.arange(100).float().realize())).kernels
    [found] = [each for each in kernels if each.template == "tile"]
    assert found.schedule_class == "class: the schedule of the kernel alone, sums in the order of its program"
    assert searched == []
    called(made)
    assert len(searched) == 1
