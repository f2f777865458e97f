"""A bar of finished prompts, by tqdm where it is installed."""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, cast


@contextmanager
def progress_bar(use_tqdm: bool | Callable[..., Any], total: int) -> Iterator[Callable[[], None]]:
    """Yields what counts one more. True is tqdm's own bar, on a terminal alone; a callable makes another."""
    make = use_tqdm if callable(use_tqdm) else _tqdm() if use_tqdm and sys.stderr.isatty() else None
    if make is None:
        yield lambda: None
        return
    bar = make(total=total, desc="Processed prompts", dynamic_ncols=True)
    try: yield lambda: bar.update(1)
    finally: bar.close()


def _tqdm() -> Callable[..., Any] | None:
    try: return cast(Callable[..., Any], import_module("tqdm").tqdm)
    except ModuleNotFoundError: return None
