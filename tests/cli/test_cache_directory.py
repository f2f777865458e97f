"""Programs run where nothing can be kept, and one line says so. The first answer on a machine
compiles few kernels, and the next process none."""
from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tinygrad_nv import cache

GENERATE = ("-m", "tinygrad_nv", "generate", "Once upon a time", "--max-tokens", "3", "--seed", "1")
PROGRAM = ("-c", "from tinygrad_nv import Tensor; print((Tensor([1, 2, 3]) * 2).tolist())")


def run(words: tuple[str, ...], **environment: str) -> subprocess.CompletedProcess[str]:
    """A program on the CPU, with these and no other places for caches."""
    ours = ("XDG_CACHE_HOME", "CACHEDB", "NV_CACHE_DIR", "ZIG_GLOBAL_CACHE_DIR", "NV_SCHEDULES")
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True,
                          env={**kept, "DEV": "CPU", **environment}, check=False)


def said(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("tinygrad-nv: ")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("where", ["XDG_CACHE_HOME", "HOME"])
def test_a_directory_that_cannot_be_made(where: str, tmp_path: Path):
    """Below a file: root may write everywhere else."""
    (tmp_path / "file").touch()
    (tmp_path / "tmp").mkdir()
    done = run(PROGRAM, **{where: str(tmp_path / "file"), "TMPDIR": str(tmp_path / "tmp")})
    assert (done.returncode, done.stdout) == (0, "[2, 4, 6]\n"), done.stderr
    line, = said(done)
    assert line.startswith(f"tinygrad-nv: nothing can be kept in {tmp_path / 'file'}")
    assert "(Not a directory)" in line
    assert "set NV_CACHE_DIR" in line
    assert list((tmp_path / "tmp").iterdir()) == []


WORKERS = ("-c", """
from tinygrad_nv import Tensor
a = Tensor([1.0, 2, 3]).realize()
b, c = a + 1, a * 3
Tensor.realize(b, c)
print(b.tolist(), c.tolist())
""")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("hooked", ["0", "1"])
def test_processes_that_compile_find_the_directory(hooked: str, tmp_path: Path):
    """tinygrad compiles two kernels in workers, which have a cache of their own."""
    (tmp_path / "file").touch()
    (tmp_path / "tmp").mkdir()
    done = run(WORKERS, HOME=str(tmp_path / "file"), TMPDIR=str(tmp_path / "tmp"), PARALLEL="2", NV=hooked)
    assert (done.returncode, done.stdout) == (0, "[2.0, 3.0, 4.0] [3.0, 6.0, 9.0]\n"), done.stderr
    assert len(said(done)) == 1
    assert list((tmp_path / "tmp").iterdir()) == []


def test_threads_find_one_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                    capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("NV_CACHE_DIR", "")
    together, found = threading.Barrier(8), []

    def look() -> None:
        together.wait()
        found.append(cache.directory())
    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert len(set(found)) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
def test_a_model_is_run(tmp_path: Path):
    """28 s on 2 cores: everything is compiled."""
    (tmp_path / "file").touch()
    done = run(GENERATE, HOME=str(tmp_path / "file"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Once upon a time")
    assert len(said(done)) == 1


def test_a_directory_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                  capsys: pytest.CaptureFixture[str]):
    own = cache.why_not
    (full := tmp_path / "full" / "tinygrad_nv").mkdir(parents=True)
    def why_not(place: Path) -> str: return "No space left on device" if place == full else own(place)
    monkeypatch.setattr(cache, "why_not", why_not)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "full"))
    monkeypatch.setenv("NV_CACHE_DIR", "")
    made = cache.directory()
    assert cache.is_temporary(made)
    assert made.is_dir()
    assert "(No space left on device)" in capsys.readouterr().err
    assert cache.directory() == made
    assert os.environ["NV_CACHE_DIR"] == str(made)
    assert cache.readable() == full, "what is there is of use"


def test_room_is_looked_for(tmp_path: Path):
    script = ("import resource, signal; from pathlib import Path; from tinygrad_nv import cache\n"
              "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
              f"place = Path({str(tmp_path)!r}); print(repr(cache.why_not(place)))\n"
              "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); print(cache.why_not(place))")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "''\nFile too large\n"


def test_tinygrads_database_alone(tmp_path: Path):
    (tmp_path / "file").touch()
    done = run(PROGRAM, CACHEDB=str(tmp_path / "file/deep/cache.db"), NV_CACHE_DIR=str(tmp_path / "ours"))
    assert (done.returncode, done.stdout) == (0, "[2, 4, 6]\n"), done.stderr
    line, = said(done)
    assert line == (f"tinygrad-nv: {tmp_path / 'file/deep/cache.db'} cannot be written (Not a directory); "
                    f"{tmp_path / 'ours' / 'tinygrad.db'} is used")
    assert (tmp_path / "ours" / "tinygrad.db").is_file()


def test_what_was_tuned_is_read_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from tinygrad_nv.tile import database
    monkeypatch.setattr(cache, "directory", lambda: tmp_path / "elsewhere")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("NV_CACHE_DIR", raising=False)
    monkeypatch.delenv("NV_SCHEDULES", raising=False)
    assert database.path() == tmp_path / "elsewhere" / "schedules.json"
    (tmp_path / "tinygrad_nv").mkdir()
    (tmp_path / "tinygrad_nv" / "schedules.json").touch()
    database._path.cache_clear()
    assert database.path() == tmp_path / "tinygrad_nv" / "schedules.json"
    database._path.cache_clear()


def test_a_directory_that_everyone_may_write(tmp_path: Path):
    """The program runs, and neither its cache nor tinygrad's database is used."""
    for name in ("ours", "theirs", "tmp"): (tmp_path / name).mkdir()
    for name in ("ours", "theirs"): (tmp_path / name).chmod(0o777)
    done = run(PROGRAM, CACHEDB=str(tmp_path / "theirs" / "cache.db"), NV_CACHE_DIR=str(tmp_path / "ours"),
               TMPDIR=str(tmp_path / "tmp"))
    assert (done.returncode, done.stdout) == (0, "[2, 4, 6]\n"), done.stderr
    line, = said(done)
    assert f"nothing is read from or kept in {tmp_path / 'ours'} (everyone may write it" in line
    assert all(list((tmp_path / name).iterdir()) == [] for name in ("ours", "theirs", "tmp"))


# tinygrad's four for its queues, one for the pool of threads, the rest for the bundled model: its prompt
# in a chunk of 16, its step, its sampler
MOST = 25


def compiled(database: Path) -> int:
    """How many kernels the compiler's cache holds."""
    with contextlib.closing(sqlite3.connect(database)) as connection:
        names = [name for name, in connection.execute("select name from sqlite_master where type='table'")]
        return sum(connection.execute(f"select count(*) from [{name}]").fetchone()[0]
                   for name in names if name.startswith("compile_"))


def test_the_first_answer_compiles_few_kernels_and_the_second_none(tmp_path: Path):
    database = tmp_path / "cache.db"
    own = {"CACHEDB": str(database), "NV_CACHE_DIR": str(tmp_path / "cache"), "DEV": "CPU",
           "NUM_CPU_THREADS": "2"}
    command = [sys.executable, "-m", "tinygrad_nv", "generate", "Once upon a time", "--max-tokens", "3",
               "--seed", "1", "--json"]
    found, answers = [], []
    for _ in range(2):
        done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, timeout=120,
                              check=False)
        assert done.returncode == 0, done.stderr
        found.append(compiled(database))
        answers.append(done.stdout.split('"ttft_s"')[0])
    assert 0 < found[0] <= MOST
    assert found[1] == found[0]
    assert answers[1] == answers[0]
