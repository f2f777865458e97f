"""The package as users have it: the wheel, in an environment outside the checkout."""
from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from tests.support import ROOT

PREBUILT = "models/tales/steps-x86-64-v3.xz"    # not in git, but in a wheel that is built after it


def tracked() -> list[str]:
    """Files of the package and of models/ that git has, by their paths in the checkout."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "tinygrad_nv", "models"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in names if (ROOT / name).is_file()]


def outside() -> dict[str, str]:
    """The environment variables, but for what brings a checkout's package."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel, and all else that the environment of the tests has."""
    wheel: Path
    folder: Path

    def run(self, *command: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Runs a program of the environment, away from the checkout."""
        programs, away = self.folder / "bin", self.folder / "away"
        away.mkdir(exist_ok=True)
        path = os.pathsep.join((str(programs), os.environ["PATH"]))
        return subprocess.run([str(programs / command[0]), *command[1:]], cwd=away, check=False, text=True,
                              env={**outside(), "PATH": path}, input=stdin, capture_output=True)


def build(folder: Path) -> Path:
    """Builds the wheel of what git has, of prebuilt steps and what Python leaves, without the network."""
    source = folder / "source"
    for name in [*tracked(), "pyproject.toml", "README.md", "LICENSE"]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)
    (source / "tinygrad_nv" / "models").symlink_to(os.path.join("..", "models"))
    (source / PREBUILT).write_bytes(b"")
    (source / "tinygrad_nv" / "cli" / "__pycache__").mkdir()
    (source / "tinygrad_nv" / "cli" / "__pycache__" / "run.cpython-311.pyc").write_bytes(b"")
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-index",
                    "--no-build-isolation", "-w", str(folder), str(source)], check=True)
    return next(folder.glob("*.whl"))


def install(wheel: Path, folder: Path) -> None:
    """Makes an environment with it. Third-party packages are found by a .pth file, in which an editable
    install of this one does nothing."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    subprocess.run([sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "-q",
                    "--no-deps", "--no-index", "--no-compile", str(wheel)], check=True, env=outside())
    place = sysconfig.get_path("purelib", "venv", vars={"base": str(folder)})
    (Path(place) / "third_party.pth").write_text(sysconfig.get_path("purelib"))
