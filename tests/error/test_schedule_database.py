"""A schedule database that is damaged, or has what cannot be: a warning that says what became of it, never an
error."""
from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from tinygrad_nv.tile import database
from tinygrad_nv.tile.choose import choose
from tinygrad_nv.tile.database import Entry, ScheduleWarning
from tinygrad_nv.tile.gemm.analytic import analytic
from tinygrad_nv.tile.gemm.dense import dense
from tinygrad_nv.tile.gemm.schedules import Mma
from tinygrad_nv.tile.template import GPU

SPEC = dense(64, 64, 256)
ENTRY = Entry(SPEC, "sm_80", database.toolchain(), Mma().block(64, 64).stages(2), 1e-5)


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NV_SCHEDULES", str(tmp_path / "schedules.json"))
    monkeypatch.setattr(database, "_noted", set())
    return tmp_path / "schedules.json"


@pytest.mark.parametrize("content", [
    b"", b"garbage", b"\xff\xfe\x00", b"[]", b"null", b'{"format": "tinygrad_nv schedules 9", "entries": []}',
    b'{"format": "tinygrad_nv schedules 1"}', b'{"format": "tinygrad_nv schedules 1", "entries": {}}',
    b"[" * 100_000, database.dump([ENTRY]).encode()[:-40]])
def test_a_file_that_is_no_database_is_set_aside(file: Path, content: bytes):
    file.write_bytes(content)
    with pytest.warns(ScheduleWarning, match=r"schedules\.json is no schedule database .*\n?"
                                             r".*set aside as schedules\.json\.corrupt-1"):
        assert choose(SPEC, GPU("sm_80")) == analytic(SPEC, "sm_80")
    assert not file.exists()
    assert file.with_name("schedules.json.corrupt-1").read_bytes() == content
    database.store([ENTRY])                                             # and a new one takes its place
    assert choose(SPEC, GPU("sm_80")) == ENTRY.schedule


def test_every_corrupt_file_is_kept(file: Path):
    for number in (1, 2, 3):
        file.write_text(f"broken {number}")
        with pytest.warns(ScheduleWarning, match=f"corrupt-{number}"): database.entries()
    kept = sorted(path.name for path in file.parent.glob("*.corrupt-*"))
    assert kept == [f"schedules.json.corrupt-{number}" for number in (1, 2, 3)]


def test_storing_into_a_corrupt_file_sets_it_aside(file: Path):
    file.write_text("{")
    with pytest.warns(ScheduleWarning, match="set aside"): database.store([ENTRY])
    assert database.entries() == [ENTRY]


def test_an_entry_that_cannot_be_read_is_ignored_and_the_others_are_not(file: Path):
    data = json.loads(database.dump([ENTRY]))
    data["entries"] += [{"spec": 3}, {**data["entries"][0], "spec": {"m": 1}}]
    file.write_text(json.dumps(data))
    with pytest.warns(ScheduleWarning) as warned: assert database.lookup(SPEC, "sm_80") == ENTRY.schedule
    assert ["entry 1 of" in str(w.message) or "entry 2 of" in str(w.message) for w in warned] == [True, True]
    assert file.exists()


def test_a_field_of_another_template_is_named(file: Path):
    data = json.loads(database.dump([ENTRY]))
    data["entries"][0]["schedule"]["cluster_m"] = 2
    file.write_text(json.dumps(data))
    words = "entry 0 of .* ignored: cluster_m=2 is of another template than mma"
    with pytest.warns(ScheduleWarning, match=words):
        assert choose(SPEC, GPU("sm_80")) == analytic(SPEC, "sm_80")


def test_a_winner_that_is_no_longer_legal_is_ignored_with_the_arithmetic(file: Path):
    database.store([Entry(SPEC, "sm_80", database.toolchain(), Mma().block(100, 64), 1e-5)])
    with pytest.warns(ScheduleWarning, match="ignored for 64x64x256 bf16 NT → bf16: block_m=100"):
        assert choose(SPEC, GPU("sm_80")) == analytic(SPEC, "sm_80")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choose(SPEC, GPU("sm_80"))                                           # said once


def test_what_is_no_file_is_left_alone(file: Path):
    file.mkdir()
    with pytest.warns(ScheduleWarning, match="cannot be read"):
        assert choose(SPEC, GPU("sm_80")) == analytic(SPEC, "sm_80")
    assert file.is_dir()
