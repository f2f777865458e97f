"""A directory whose files change together.

Protocol: `replaced(directory, marker, stale, write)` has `write` make all files in a folder inside
`directory`, each synced. Then `marker`, without which nothing loads the directory, is removed, the files get
their places, files that match `stale` and are not new are removed, and the new marker comes last. A process
that is killed in between leaves a directory without its marker, never a mixture that loads.
"""
from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from tinygrad_nv.train.files import make_folder, refusal, sync_folder

PARTIAL = ".export.partial"


def replace_folder(directory: Path, marker: str, stale: Iterable[str], write: Callable[[Path], None],
             nbytes: int) -> Path:
    """The directory, with new files of about `nbytes` bytes. Raises `CheckpointError` where it cannot be
    written; before the files get their places, what was there is as it was."""
    staged = directory / PARTIAL
    try:
        make_folder(directory)
        if staged.exists(): shutil.rmtree(staged)
        staged.mkdir()
        try:
            write(staged)
            _place(staged, directory, marker, stale)
        finally: shutil.rmtree(staged, ignore_errors=True)
    except OSError as error: raise refusal(Path(error.filename or directory), error, nbytes) from error
    return directory


def _place(staged: Path, directory: Path, marker: str, stale: Iterable[str]) -> None:
    (directory / marker).unlink(missing_ok=True)
    sync_folder(directory)
    new = {path.name for path in staged.iterdir()}
    for path in [path for pattern in stale for path in directory.glob(pattern) if path.name not in new]:
        path.unlink()
    for name in sorted(new - {marker}):
        if (directory / name).is_dir(): shutil.rmtree(directory / name)
        os.rename(staged / name, directory / name)
    sync_folder(directory)
    os.rename(staged / marker, directory / marker)
    sync_folder(directory)
