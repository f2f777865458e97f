"""Devices that do not exist, cannot be opened, or cannot compute."""
from __future__ import annotations

from pathlib import Path

import pytest

DOCTOR = "to fix:   run `tinygrad-nv doctor` to see what"


@pytest.mark.parametrize("name", ["NOPE", "nope", "../x", "A.B"])
@pytest.mark.parametrize("subcommand", ["generate", "explain"])
def test_no_such_device(command, tiny: Path, subcommand: str, name: str):
    words = ["hello"] * (subcommand == "generate")
    command(subcommand, tiny, *words, "--device", name).refused(
        f"no such device: {name.upper()}", "expected: CPU, CUDA, EMU or another device of tinygrad", DOCTOR)


@pytest.mark.parametrize("name", ["DISK", "NPY"])
def test_a_device_that_does_not_compute(command, tiny: Path, name: str):
    command("generate", tiny, "hello", "--device", name).refused(
        f"device {name} cannot be opened: it is a storage device",
        "expected: a device this machine has", DOCTOR)


def test_a_renderer_the_device_does_not_have(command, tiny: Path):
    command("generate", tiny, "hello", "--device", "CPU:NOPE").refused(
        "device CPU:NOPE cannot be opened: CPU has no renderer 'NOPE'",
        "expected: a device this machine has", DOCTOR)


@pytest.mark.parametrize(("name", "found"), [("a:b:c:d", "too many ':'"), ("a+b+c", "too many '+'")])
def test_a_name_that_cannot_be_parsed(command, tiny: Path, name: str, found: str):
    command("generate", tiny, "hello", "--device", name).refused(
        f"--device {name}: {found}", "expected: a device of tinygrad, such as CPU or CUDA", DOCTOR)
