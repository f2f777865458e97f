"""Directories that others may write are refused; what is read is what this user wrote."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tinygrad_nv import cache, private
from tinygrad_nv.toolchain import build_shared_library

OTHER = 54321


def give(patch: pytest.MonkeyPatch, path: Path) -> None:
    """Makes a name another user's. (Root alone can, so that the answer of the system is changed.)"""
    own = private._lstat

    def lstat(asked: Path) -> os.stat_result | None:
        found = own(asked)
        if asked != path or found is None: return found
        return os.stat_result((*found[:4], OTHER, *found[5:10]))
    patch.setattr(private, "_lstat", lstat)


@pytest.fixture(autouse=True)
def umask():
    """The most careless, so that modes are what the code asks for."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int: return path.stat().st_mode & 0o7777


# **** directories ****

@pytest.mark.parametrize(("bits", "why", "after"), [
    (0o700, "", 0o700), (0o755, "", 0o755), (0o775, "", 0o700), (0o2770, "", 0o700),
    (0o777, "everyone may write it: its mode is 0777", 0o777),
    (0o1777, "everyone may write it: its mode is 1777", 0o1777), (0o702, "its mode is 0702", 0o702)])
def test_modes(tmp_path: Path, capsys: pytest.CaptureFixture[str], bits: int, why: str, after: int):
    (place := tmp_path / "a").mkdir()
    place.chmod(bits)
    assert (why in private.refusal(place)) if why else private.refusal(place) == ""
    assert mode(place) == after
    assert ("could write it" in capsys.readouterr().err) == (after != bits)


def test_a_directory_that_others_may_rename(tmp_path: Path):
    (place := tmp_path / "shared" / "deep" / "own").mkdir(parents=True, mode=0o700)
    (tmp_path / "shared" / "deep").chmod(0o755)
    (tmp_path / "shared").chmod(0o777)
    assert private.refusal(place) == (f"everyone may rename it: {tmp_path / 'shared'} has mode 0777, without "
                                      "the sticky bit")
    (tmp_path / "shared").chmod(0o1777)
    assert private.refusal(place) == ""


def test_a_directory_of_another_user(tmp_path: Path):
    (place := tmp_path / "a" / "own").mkdir(parents=True, mode=0o700)
    place.parent.chmod(0o755)
    (tmp_path / "link").symlink_to(place)
    for name, of in (("a", f"{tmp_path / 'a'} belongs to uid 54321"), ("a/own", "it belongs to "),
                     ("link", f"the link {tmp_path / 'link'} belongs to ")):
        assert private.refusal(tmp_path / "link") == "", "a link of ours is fine"
        with pytest.MonkeyPatch.context() as patch:
            give(patch, tmp_path / name)
            assert of in private.refusal(tmp_path / "link")


def test_what_is_made_is_private(tmp_path: Path):
    private.make(tmp_path / "a" / "b")
    private.write_sealed(tmp_path / "a" / "b" / "c" / "file", b"data")
    made = [path for path in (tmp_path / "a").rglob("*") if path.is_dir()] + [tmp_path / "a"]
    assert {mode(path) for path in made} == {0o700}
    assert {mode(path) for path in (tmp_path / "a").rglob("*") if path.is_file()} == {0o600}


def test_programs_go_on_with_another_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                               capsys: pytest.CaptureFixture[str]):
    """Nothing of the one that everyone may write is read or written, and a line says what to do."""
    (place := tmp_path / "a").mkdir()
    (place / "schedules.json").write_text("{}")
    place.chmod(0o777)
    monkeypatch.setenv("NV_CACHE_DIR", str(place))
    made = cache.readable()
    assert cache.is_temporary(made)
    assert mode(made) == 0o700
    assert cache.directory() == cache.environment_path() == cache.readable() == made
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tinygrad-nv: nothing is read from or kept in {place} (everyone may write it: "
                           "its mode is 0777); ")
    assert line.endswith("To keep it, set NV_CACHE_DIR to a directory that only you may write, or chmod 700 "
                         f"{place}")
    assert [path.name for path in place.iterdir()] == ["schedules.json"]


def test_a_folder_that_another_user_made_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                    capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("NV_CACHE_DIR", str(tmp_path))
    (tmp_path / "cubin").mkdir(mode=0o755)
    (tmp_path / "cubin" / "planted").touch()
    give(monkeypatch, tmp_path / "cubin")
    made = cache.folder("cubin")
    assert list(made.iterdir()) == []
    assert "is not used: it belongs to uid 54321" in capsys.readouterr().err


# **** files ****

def test_what_is_no_file_of_ours_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_bytes(b"data")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "zero").symlink_to("/dev/zero")
    with open(tmp_path / "huge", "wb") as file: file.truncate(1 << 40)
    (tmp_path / "folder").mkdir()
    assert private.read(tmp_path / "file") == b"data"
    for name in ("fifo", "link", "zero", "huge", "folder", "none"):
        with pytest.raises(OSError, match=r"regular file|Too many levels|bytes|No such|directory"):
            private.read(tmp_path / name)
    monkeypatch.setattr(private, "_is_trusted", lambda found: found.st_uid == OTHER)
    with pytest.raises(PermissionError, match="it belongs to "): private.read(tmp_path / "file")


def test_a_failing_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None: raise OSError("no room")
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no room"): private.write(tmp_path / "file", b"data")
    assert list(tmp_path.iterdir()) == []


def test_a_lock_follows_no_link(tmp_path: Path):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "lock").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="Too many levels"), private.lock_file(tmp_path / "lock"): pass
    assert (tmp_path / "victim").read_text() == "precious"
    with private.lock_file(tmp_path / "victim"): assert (tmp_path / "victim").read_text() == "precious"


# **** seals ****

def test_seals(tmp_path: Path):
    path = tmp_path / "steps" / "one"
    for data in (b"", b"data", bytes(1000)):
        private.write_sealed(path, data)
        assert private.read_sealed(path) == data
    whole = path.read_bytes()
    for where in (0, 500, 999, 1000, len(whole) - 1):
        path.write_bytes(whole[:where] + bytes([whole[where] ^ 1]) + whole[where + 1:])
        assert private.read_sealed(path) is None, where
    for damaged in (b"", whole[:-1], whole[1:], whole + b"0", whole[:31]):
        path.write_bytes(damaged)
        assert private.read_sealed(path) is None
    path.write_bytes(whole)
    assert private.read_sealed(path.rename(tmp_path / "steps" / "two")) is None, "of another name"
    (tmp_path / "steps" / "two").rename(path)
    assert private.read_sealed(path) == bytes(1000)
    private.write_sealed(tmp_path / "other" / "steps" / "one", bytes(1000))
    path.write_bytes((tmp_path / "other" / "steps" / "one").read_bytes())
    assert private.read_sealed(path) is None, "of another cache"
    path.unlink()
    path.mkdir()
    private.write_sealed(path, b"in the place of a folder")
    assert private.read_sealed(path) == b"in the place of a folder"


@pytest.mark.parametrize("kind", ["short", "fifo", "folder", "link"])
def test_a_key_that_is_none_is_made_again(tmp_path: Path, kind: str):
    path = tmp_path / private.KEY
    if kind == "short": path.write_bytes(b"0" * 31)
    elif kind == "fifo": os.mkfifo(path)
    elif kind == "folder": path.mkdir()
    else: path.symlink_to(__file__)
    made = private.key(tmp_path)
    assert made is not None
    assert len(set(made)) > 8
    assert private.key(tmp_path) == made
    assert mode(path) == 0o600
    assert [each.name for each in tmp_path.iterdir()] == [private.KEY]


def test_a_library_that_was_not_compiled_here_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its constructor would run: planted, cut or flipped, it is compiled again."""
    monkeypatch.setenv("NV_CACHE_DIR", str(tmp_path / "cache"))
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.c").write_text("int f(void) { return 7; }")

    def library() -> Path:
        flags = ("-shared", "-fPIC", "-nostdlib")   # zig would compile a libc first: 18 s
        return build_shared_library(source, "a.c", flags, "tests", "a test")
    path = library()
    made = path.stat().st_mtime_ns
    assert library().stat().st_mtime_ns == made, "it is kept"
    run = f"import ctypes; print(ctypes.CDLL({str(path)!r}).f())"
    whole = path.read_bytes()
    for damaged in (whole[:-private.SEAL_BYTES], whole[:100] + bytes([whole[100] ^ 1]) + whole[101:]):
        path.write_bytes(damaged)
        assert library().read_bytes() != damaged
        assert private.read_sealed(path) is not None
    assert subprocess.run([sys.executable, "-c", run], capture_output=True, text=True).stdout == "7\n"
    assert list(path.parent.iterdir()) == [path]


def test_a_key_that_another_thread_made_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first: list[bytes | None] = []
    make = private.make

    def make_meanwhile(folder: Path) -> None:
        monkeypatch.setattr(private, "make", make)
        first.append(private.key(tmp_path))
        make(folder)
    monkeypatch.setattr(private, "make", make_meanwhile)
    assert private.key(tmp_path) == first[0] is not None
