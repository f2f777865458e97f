"""The package as users have it, for the tests of its files, of pages and of commands."""
from __future__ import annotations

import fcntl
import os

import pytest

from tests.support.cli.wheel_case import Installed, build, install


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """An environment with the wheel: one for all processes of a run."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "wheel"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (done := folder / "done").is_file():
            install(build(folder), folder / "environment")
            done.touch()
    return Installed(next(folder.glob("*.whl")), folder / "environment")
