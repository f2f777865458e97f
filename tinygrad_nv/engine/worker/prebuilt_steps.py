"""Captured steps that come with a model, for a common processor.

Protocol: `read(model, …)` gives the steps of `steps-x86-64-v3.xz` in the bundled model's directory (no other
model's: such a file is code), and none where `why_unused` says why: they must be of these sources, this model
and these facts, and this machine must run them, an x86-64 of level 3 with Linux, with every setting that
changes kernels at its default, and no compiler that was asked for by name (CC). The file begins with its key.
`python -m tinygrad_nv.engine.prebuild` writes it.

Kernels are called in `PARTS` parts: threads beyond these have nothing to do, and fewer take turns. A model
that is worth more threads has no such file.
"""
from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

from tinygrad.codegen import to_program_config
from tinygrad.helpers import NUM_CPU_THREADS
from tinygrad.uop.ops import UOp

from tinygrad_nv import config
from tinygrad_nv.cpu.isa import flags
from tinygrad_nv.engine.worker import step_file
from tinygrad_nv.runtime.renderers import renderer_of

NAME = "steps-x86-64-v3.xz"
MISSING = f"there is no {NAME}"
PARTS = 4
# what Linux calls the instructions of level 3 (x86-64 psABI, 2.8)
LEVEL_3 = frozenset(("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"))
KEY_BYTES = 64
BUNDLED = Path(str(resources.files("tinygrad_nv.models") / "tales")).resolve()


def key(facts: Iterable[object], places: object) -> str:
    """A hash of what these steps depend on; processor and settings are those of `why_not`."""
    settings = [each.value for each in to_program_config if each is not NUM_CPU_THREADS]
    words = [*map(repr, facts), repr(places), step_file.sources(), repr(settings)]
    return hashlib.sha256("\0".join(words).encode()).hexdigest()


def why_not(device: str) -> str:
    """Returns the reason why this process cannot use such steps; "" if it can."""
    if device != "CPU": return f"the device is {device}"
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"this is {sys.platform} on {platform.machine()}"
    if missing := LEVEL_3 - flags(): return f"the processor lacks {', '.join(sorted(missing))}"
    if os.environ.get("CC", "").strip(): return "CC is set"
    changed = [each.name for each in config.SETTINGS
               if each.name not in step_file.NEUTRAL and config.get(each.name) != each.default]
    if changed: return f"{changed[0]} is set"
    from tinygrad_nv.tile import database
    return "schedules were tuned" if database.state()[1] is not None else ""


def why_unused(model: Path, device: str, facts: Iterable[object], places: object) -> str:
    """Why steps that come with the bundled model are captured instead; "" where they are used, and of any
    other model."""
    if model.resolve() != BUNDLED: return ""
    if (why := why_not(device)): return why
    try:
        with (model / NAME).open("rb") as file: found = file.read(KEY_BYTES).decode(errors="replace")
    except OSError: return MISSING
    return "" if found == key(facts, places) else f"{NAME} is of other sources, weights or options"


def read(model: Path, device: str, facts: Iterable[object], places: object) -> dict[str, UOp]:
    """The steps of the bundled model; none where they are not used, and of any other model: such a file has
    machine code."""
    facts = list(facts)
    if model.resolve() != BUNDLED or why_unused(model, device, facts, places): return {}
    return step_file.loads((model / NAME).read_bytes()[KEY_BYTES:], renderer_of(device).target)


def write(file: Path, steps: dict[str, UOp], facts: Iterable[object], places: object) -> None:
    """Writes the file."""
    file.write_bytes(key(facts, places).encode() + step_file.dumps(steps, step_file.SMALLEST))
