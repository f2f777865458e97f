"""tinygrad's database: values that this user's processes did not write are absent; damage is no error."""
from __future__ import annotations

import os
import pickle
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from tinygrad import helpers

from tinygrad_nv import private


class Hostile:
    """What a pickle would run."""
    def __init__(self, marker: Path) -> None: self.marker = marker
    def __reduce__(self): return Path.touch, (self.marker,)


def use(patch: pytest.MonkeyPatch, database: Path) -> None:
    """Makes a file tinygrad's database, as in a process that begins."""
    patch.setattr(helpers, "CACHEDB", str(database))
    patch.setattr(helpers, "_db_connection", None)
    patch.setattr(helpers, "_db_tables", set())
    patch.setenv("CACHEDB", str(database))


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """One with a value."""
    monkeypatch.setenv("NV_CACHE_DIR", str(tmp_path / "ours"))
    use(monkeypatch, made := tmp_path / "theirs" / "cache.db")
    helpers.diskcache_put("table", "key", {"value": 1})
    assert helpers.diskcache_get("table", "key") == {"value": 1}
    helpers._db_connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    yield made
    helpers.CACHELEVEL.value = 2


def change(database: Path, value: bytes) -> None:
    with sqlite3.connect(database) as opened: opened.execute("UPDATE 'table_22' SET val = ?", (value,))


def test_it_is_private_and_plain_tinygrad_reads_it(database: Path):
    assert database.parent.stat().st_mode & 0o777 == 0o700
    assert database.stat().st_mode & 0o777 == 0o600
    [[value]] = sqlite3.connect(database).execute("SELECT val FROM 'table_22'").fetchall()
    assert pickle.loads(value) == {"value": 1}


def test_what_was_planted_or_changed_is_absent_and_made_again(database: Path, tmp_path: Path):
    [[good]] = sqlite3.connect(database).execute("SELECT val FROM 'table_22'").fetchall()
    planted = pickle.dumps(Hostile(tmp_path / "ran"))
    for value in (planted, planted + good[-private.SEAL_BYTES:], good[:-1], b"", good[:9] + b"?" + good[10:]):
        change(database, value)
        assert helpers.diskcache_get("table", "key") is None
    assert not (tmp_path / "ran").exists()
    helpers.diskcache_put("table", "key", 2)
    assert helpers.diskcache_get("table", "key") == 2


@pytest.mark.parametrize("bits", [0o777, 0o666])
def test_one_that_others_may_write(database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                   capsys: pytest.CaptureFixture[str], bits: int):
    """Nor is it copied; a file of its own in a private directory is as good as any."""
    if bits == 0o777: database.parent.chmod(bits)
    else: database.chmod(bits)
    monkeypatch.setattr("tinygrad_nv.hooks.threads._moved", {})
    use(monkeypatch, database)
    found = helpers.diskcache_get("table", "key")
    said = capsys.readouterr().err
    if bits == 0o666: assert (found, said) == ({"value": 1}, "")
    else:
        assert found is None
        assert f"{database} is not used (everyone may write it: its mode is 0777); " in said
        assert str(tmp_path / "ours" / "tinygrad.db") == helpers.CACHEDB == os.environ["CACHEDB"]


@pytest.mark.parametrize(("damage", "words"), [
    (lambda data: data[:5000], "is damaged (database disk image is malformed)"),
    (lambda data: data[:100] + os.urandom(3996) + data[4096:], "is damaged ("),
    (lambda data: b"notes of the user", "is not used (it is no database)")])
def test_a_damaged_one_is_no_error(database: Path, monkeypatch: pytest.MonkeyPatch,
                                   capsys: pytest.CaptureFixture[str], damage, words: str):
    data = database.read_bytes()
    for each in database.parent.glob("cache.db*"): each.unlink()
    database.write_bytes(damage(data))
    monkeypatch.setattr("tinygrad_nv.hooks.threads._moved", {})
    use(monkeypatch, database)
    assert helpers.diskcache_get("table", "key") is None
    helpers.diskcache_put("table", "key", 3)
    assert helpers.diskcache_get("table", "key") == 3
    assert words in capsys.readouterr().err


def test_one_that_is_damaged_later_is_put_out_of_use(database: Path, capsys: pytest.CaptureFixture[str]):
    with database.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(8192))
    helpers._db_connection.execute("PRAGMA cache_size = 0")
    assert helpers.diskcache_get("table", "key") is None
    assert helpers.diskcache_put("table", "key", 4) == 4
    assert f"{database} is damaged (" in capsys.readouterr().err
