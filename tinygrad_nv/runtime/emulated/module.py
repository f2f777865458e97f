"""Modules of the emulated driver: PTX text, and findings that quote it."""
from __future__ import annotations

import numpy as np

from tinygrad_nv.errors import DriverError
from tinygrad_nv.ptx.emulator import Emulator, Finding
from tinygrad_nv.ptx.emulator.program import lay_out_shared, layout
from tinygrad_nv.ptx.parser import parse
from tinygrad_nv.runtime import driver
from tinygrad_nv.runtime.driver import Attributes, Function, Launch


class EmulatedModule(driver.Module):
    """PTX text, parsed. What the emulator cannot run is refused when a function is asked for, as ptxas
    refuses it before a launch."""

    def __init__(self, image: bytes, emulator: Emulator) -> None:
        if image[:4] == b"\x7fELF":
            raise DriverError("the module is a cubin", "PTX text: the emulator runs no machine code",
                              "load the PTX the cubin was made from")
        self.text = image.rstrip(b"\0").decode()
        self.module = parse(self.text)
        self.emulator, self.loaded = emulator, True

    def function(self, name: str) -> Function:
        if (found := self.module.functions.get(name)) is None:
            raise DriverError(f"the module has no kernel {name!r}",
                              f"one of: {', '.join(self.module.functions) or 'none'}")
        self.emulator.prepare(self.text, name)
        _, static, _ = lay_out_shared(self.module, found)
        _, local = layout(v for v in found.variables.values() if v.space == "local")
        bound = found.directives.get("reqntid") or found.directives.get("maxntid") or (1024,)
        return Function(name, Attributes(static, local, 0, int(np.prod(bound))), self)

    def unload(self) -> None: self.loaded = False


def describe_finding(work: Launch, module: EmulatedModule, finding: Finding, on: str = "") -> str:
    """Returns a finding with the kernel's name, where it ran, and the line of PTX it means."""
    lines = module.text.splitlines()
    line = finding.ptx_line
    quoted = f"\n    {line}: {lines[line - 1].strip()}" if 0 < line <= len(lines) else ""
    return f"kernel {work.function.name}{on}: {finding}{quoted}"
