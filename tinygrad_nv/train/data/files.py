"""Files of paths, directories and globs.

Protocol: `find(paths)` lists files in the order of `paths`; those of a directory or of a glob are sorted by
name. A file that is named twice counts once. Files of text (`TEXTS`) and of token ids (`SHARDS`) do not mix.
"""
from __future__ import annotations

import glob
from collections.abc import Iterable, Sequence
from pathlib import Path

from tinygrad_nv.errors import DataError

TEXTS, SHARDS = (".txt", ".jsonl", ".parquet"), (".npy", ".bin")
ACCEPTED = ", ".join((*TEXTS, *SHARDS))


def find(paths: Sequence[str | Path]) -> list[Path]:
    """The files of paths, directories (with those inside, hidden ones left out) and globs (`**` for any
    depth). Raises `DataError` for a path that names no file, a suffix that is not known, an empty file, and
    for files of text beside files of token ids."""
    if not paths: raise DataError("no training data was named", f"files ({ACCEPTED}), directories or globs",
                                  "name one or more")
    found = list(dict.fromkeys(file for path in paths for file in _files(Path(path).expanduser())))
    kinds = {is_shard(file): file for file in reversed(found)}
    if len(kinds) == 2:
        raise DataError(f"{kinds[False]} is text and {kinds[True]} is token ids",
                        "files of one kind", "train on the one or the other")
    for file in found: _require_content(file)
    return found


def is_shard(file: Path) -> bool:
    """Whether it holds token ids."""
    return file.suffix.lower() in SHARDS


def _files(path: Path) -> Iterable[Path]:
    if path.is_file():
        if path.suffix.lower() not in TEXTS + SHARDS:
            raise DataError(f"{path} is of no known kind", ACCEPTED, "convert it, or name another file")
        return [path]
    if path.is_dir():
        inside = [each for each in sorted(path.rglob("*")) if _require_known(each)
                  and not any(part.startswith(".") for part in each.relative_to(path).parts)]
        if not inside: raise DataError(f"{path} has no training data", f"files with the suffixes {ACCEPTED}",
                                       "name another directory")
        return inside
    if not glob.has_magic(str(path)):
        raise DataError(f"{path} does not exist", "a file, a directory or a glob", "check the path")
    matched = [Path(each) for each in sorted(glob.glob(str(path), recursive=True))]
    if not (known := [each for each in matched if _require_known(each)]):
        raise DataError(f"{path} matches no training data", f"files with the suffixes {ACCEPTED}",
                        "check the pattern")
    return known


def _require_known(path: Path) -> bool: return path.suffix.lower() in TEXTS + SHARDS and path.is_file()


def _require_content(file: Path) -> None:
    try: size = file.stat().st_size
    except OSError as error: raise unreadable(file, error) from error
    if not size: raise DataError(f"{file} is empty", "training data", "remove the file, or name another")


def unreadable(file: Path, error: OSError) -> DataError:
    """The error for a file that the system does not read."""
    return DataError(f"{file} cannot be read: {error.strerror or error}", "a file that can be read",
                     "check its permissions and the disk")
