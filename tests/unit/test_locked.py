"""Locked packages: what the lock files pin is what pyproject.toml asks for, each by its hashes."""
from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXCLUDED = {"torch"}    # its build (CPU, CUDA) is the machine's
LOCKS = {"tests": ("cpu", "test", "bench", "docs"), "serve": ("cpu", "image", "audio"),
         "cuda": ("cpu", "image", "audio", "cuda")}
# versions that the advisories of these packages name as mended
FLOORS = {"starlette": "0.49.0", "h11": "0.15.0", "pillow": "12.1.1", "cryptography": "46.0.6",
          "jinja2": "3.1.5", "python-multipart": "0.0.25", "pyarrow": "23.0.0", "pytest": "9.0.2"}


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_pins_what_the_project_asks_for(name: str):
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    assert "://" not in text
    pinned: dict[str, list[Requirement]] = {}
    for entry in re.split(r"\n(?=\S)", re.sub(r"(?m)^#.*\n", "", text)):
        words, *hashes = re.split(r" \\\n\s+--hash=sha256:", entry.strip())
        assert hashes, f"{words} has no hash"
        found = Requirement(words)
        pinned.setdefault(canonicalize_name(found.name), []).append(found)
    asked = [*PROJECT["dependencies"], *(each for extra in LOCKS[name]
                                         for each in PROJECT["optional-dependencies"][extra])]
    for wanted in map(Requirement, asked):
        if wanted.name in EXCLUDED: continue
        for found in pinned[canonicalize_name(wanted.name)]:
            version = next(iter(found.specifier)).version
            assert wanted.specifier.contains(version), f"{found}: {wanted}"


@pytest.mark.parametrize("name", FLOORS)
def test_no_version_with_an_advisory_is_accepted(name: str):
    every = [*PROJECT["dependencies"], *(each for extra in PROJECT["optional-dependencies"].values()
                                         for each in extra)]
    found = [each for each in map(Requirement, every) if canonicalize_name(each.name) == name]
    assert found
    assert not [each for each in found if each.specifier.contains(FLOORS[name])]
