"""Results of compilers that .ci/run keeps between runs, so that what has not changed is not compiled again.

    python .ci/cache.py take KEPT CACHE     puts what is kept into an empty cache directory
    python .ci/cache.py keep CACHE KEPT     keeps what a run's cache directory has

Only results of clang, NVRTC, ptxas, nvdisasm and zig are kept, each under a name that is a hash of the
source, the flags and the compiler: one that changed finds nothing. What our own code makes of them, and what
was tuned, measured or captured, is not kept: tests find none of it. The files that write such results are
part of the name of the folder in KEPT, with Python and the locked packages: where one changed, all is
compiled anew. LIMIT bounds each folder, and the three that were used last stay.
"""
from __future__ import annotations

import contextlib
import hashlib
import shutil
import sqlite3
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 2 << 30     # bytes; a larger folder is dropped, and begins anew
FOLDERS = 3
# what names the results and stores them
WRITERS = ("requirements/tests.txt", ".ci/cache.py", *(f"tinygrad_nv/{name}.py" for name in (
    "toolchain", "cache", "private", "hooks/threads", "host/library", "ptx/assemble", "ptx/timing/listing",
    "runtime/cpu/clang", "runtime/cuda/nvrtc", "runtime/programs")))
OURS = ("cubin", "sass", "emulator", "host", "zig-*", "*.key")      # in tinygrad_nv/; others stay behind
TABLES = ("compile_clang", "compile_tinygrad_nv_nvrtc")             # of tinygrad's database


def place(kept: Path) -> Path:
    """Returns the folder in `kept` for this Python, these packages and these writers."""
    parts = [sys.version.encode(), *(each.encode() + (ROOT / each).read_bytes() for each in WRITERS)]
    return kept / hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def select_tables(database: Path) -> None:
    """Drops the tables of a database that are not of compilers."""
    with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as opened:
        opened.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        for (name,) in opened.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            if not name.startswith(TABLES): opened.execute(f'DROP TABLE "{name}"')
        opened.execute("VACUUM")


def copy(source: Path, to: Path) -> None:
    """Copies what is kept of a cache directory, in place of what is there."""
    shutil.rmtree(to, ignore_errors=True)
    for folder, patterns in (("tinygrad_nv", OURS), ("tinygrad", ("cache.db*", "*.key"))):
        (to / folder).mkdir(0o700, parents=True)
        for path in (path for pattern in patterns for path in (source / folder).glob(pattern)):
            if path.is_dir(): shutil.copytree(path, to / folder / path.name, symlinks=True)
            else: shutil.copy2(path, to / folder / path.name)
    if (database := to / "tinygrad/cache.db").exists(): select_tables(database)


def size(folder: Path) -> int:
    """Returns the bytes of all files of a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def keep(cache: Path, kept: Path) -> None:
    """Keeps a cache directory. The folder is renamed when it is whole."""
    to = place(kept)
    part = to.with_suffix(".part")
    copy(cache, part)
    shutil.rmtree(to, ignore_errors=True)
    if size(part) > LIMIT: shutil.rmtree(part)
    else: part.rename(to)
    folders = [each for each in kept.iterdir() if each.name not in ("compilers", "mypy")]
    folders.sort(key=lambda each: each.stat().st_mtime)
    for old in folders[:-FOLDERS]: shutil.rmtree(old)


def main(command: str, source: str, to: str) -> None:
    """Does what the head of this file says."""
    if command == "keep": keep(Path(source), Path(to))
    elif (kept := place(Path(source))).exists():
        kept.touch()
        copy(kept, Path(to))


if __name__ == "__main__": main(*sys.argv[1:])
