"""Failures of engines, in the words that callers are told."""
from __future__ import annotations

import traceback
from pathlib import Path

from tinygrad_nv.errors import EngineError


def stopping() -> EngineError:
    """Returns the error of a request to an engine that is closed, or that ends as the engine is."""
    return EngineError("the engine is stopping", "an engine that takes requests", "retry later")


def step_error(error: Exception) -> EngineError:
    """Returns the error that callers get for an exception of another package. It names the innermost place,
    since most callers show no traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f", {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    made = EngineError(f"a step of the engine failed: {type(error).__name__}: {error}{place}", "",
                       "retry; if it happens again, lower --max-num-seqs or --max-num-batched-tokens"
                       if isinstance(error, MemoryError) else "retry; if it happens again, report it")
    made.__cause__ = error
    return made
