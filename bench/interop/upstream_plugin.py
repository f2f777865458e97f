"""The pytest plugin of upstream_tests.py: puts the hooks on, or with NV=0 only finds a compiler."""
from __future__ import annotations

from pathlib import Path

import pytest
import tinygrad

import tinygrad_nv  # noqa: F401 (the hooks)


def pytest_configure() -> None:
    """The tests must meet the installed tinygrad, not that of their checkout."""
    if Path(tinygrad.__file__).is_relative_to(Path.cwd()):
        raise pytest.UsageError(f"tinygrad is the checkout's, {tinygrad.__file__}: install tinygrad's wheel")
