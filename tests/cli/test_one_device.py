"""Commands on one device load nothing of dist/."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

LOADED = "print(*sorted(name for name in sys.modules if name.startswith('tinygrad_nv.dist')))"
# names of a launcher's variables, with the standard library alone
NAMES = ["tinygrad_nv.dist", "tinygrad_nv.dist.ranks"]


@pytest.mark.parametrize(("words", "allowed"), [
    (["generate", "Once", "--max-tokens", "2"], []),
    (["train", "MODEL", "ids.npy", "--max-steps", "1", "--max-length", "32", "--save-strategy",
      "no", "--per-device-train-batch-size", "1", "--report-to", "none"], NAMES)], ids=["generate", "train"])
def test_no_module_of_dist_is_loaded(tiny: Path, tmp_path: Path, words: list[str],
                                     allowed: list[str]) -> None:
    np.save(tmp_path / "ids.npy", np.arange(3, 999, dtype=np.uint16) % 256 + 3)
    words = [str(tiny) if word == "MODEL" else word for word in words]
    program = f"import sys\nfrom tinygrad_nv.cli import main\nassert main({words}) == 0\n{LOADED}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path,
                          check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].split() == allowed
