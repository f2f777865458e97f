"""Shared parts of tests: cases, fakes, and programs that run in processes of their own.

Imported as `tests.support.…` from the checkout's root, which pytest puts into sys.path; a process of its own
has it by `with_root()`.
"""
from __future__ import annotations

import os
from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parents[1]


def with_root(**variables: str) -> dict[str, str]:
    """Makes the environment of a process that imports from `tests`."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, **variables}
