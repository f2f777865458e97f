"""The wheel has what git has, and works away from the checkout; test_docs.py runs the pages with it."""
from __future__ import annotations

from zipfile import ZipFile

import tinygrad_nv
from tests.support.cli.wheel_case import PREBUILT, Installed, tracked


def test_its_files_are_those_of_git(installed: Installed) -> None:
    found = {name for name in ZipFile(installed.wheel).namelist() if ".dist-info/" not in name}
    wanted = {name if name.startswith("tinygrad_nv/") else f"tinygrad_nv/{name}"
              for name in [*tracked(), PREBUILT]}
    assert (sorted(found - wanted), sorted(wanted - found)) == ([], [])
    assert "tinygrad_nv/cpu/language/language.h" in found


def test_it_tells_a_story(installed: Installed) -> None:
    """By the console script, with the model in the box, from the wheel's files."""
    done = installed.run("tinygrad-nv", "generate", "Once upon a time", "--seed", "6", "--max-tokens", "30")
    assert done.returncode == 0, done.stderr
    assert "a kind young boy named Finn lived in a white house" in done.stdout.replace("\n", " ")
    where = installed.run("python", "-c", "import tinygrad_nv, tinygrad_nv.models as m;"
                                          "print(tinygrad_nv.__file__, m.__file__, sep='\\n')")
    assert all(line.startswith(str(installed.folder)) for line in where.stdout.splitlines()), where
    script = "from importlib.metadata import version; print(version('tinygrad_nv'))"
    version = installed.run("python", "-c", script)
    assert version.stdout.strip() == tinygrad_nv.__version__


def test_torch_finds_its_backend(installed: Installed) -> None:
    """By the entry point, with no import of this package."""
    done = installed.run("python", "-c", "import torch; x = torch.ones(1, 3); m = torch.nn.Linear(3, 3);"
                                         "y = torch.compile(m, backend='tinygrad_nv')(x);"
                                         "assert torch.allclose(y, m(x), atol=1e-6)")
    assert done.returncode == 0, done.stderr
