"""The instructions that ptxas makes of PTX, by kernel and by the blocks of the PTX.

Protocol: `listing(text, arch)` assembles the PTX as `assemble` does, with ptxas's table of PTX lines, which
leaves the instructions as they are. `Listing.placement(entry)` lays them out by the blocks of the PTX.
"""
from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from tinygrad_nv import cache
from tinygrad_nv.ptx.assemble import Resources, assemble, version
from tinygrad_nv.ptx.emulator.calls import expanded
from tinygrad_nv.ptx.parser import parse
from tinygrad_nv.ptx.sass import disassembled, disassembler
from tinygrad_nv.ptx.timing.instructions import FLAGS, TimedInstruction, timed
from tinygrad_nv.ptx.timing.placement import Placement, placed

LINES = ("-lineinfo",)  # what the listing's assembly is made with


@dataclass(frozen=True, eq=False)
class Listing:
    """The kernels of a module, what ptxas says of each, and the text they are of."""
    arch: str
    kernels: Mapping[str, tuple[TimedInstruction, ...]]
    resources: Mapping[str, Resources]
    text: str

    @functools.lru_cache(32)  # noqa: B019
    def placement(self, entry: str) -> Placement:
        """The instructions by the blocks of the PTX function, whose calls are expanded."""
        module = parse(self.text)
        return placed(self.kernels[entry], expanded(module, module.functions[entry]))


@functools.lru_cache(32)
def listing(text: str, arch: str = "sm_90a", entry: str | None = None, strict: bool = True) -> Listing:
    """The listing of all kernels, or of one. Raises `PTXError` as `assemble` does, `ToolchainError` without
    nvdisasm."""
    made = assemble(text, arch, (*LINES, *(("--entry", entry) if entry else ())), strict)
    return Listing(arch, timed(_disassembled(made.cubin), parse(text)), made.kernels, text)


def _disassembled(cubin: bytes) -> str:
    """The text, from the cache where the same disassembler has written it."""
    if (program := disassembler()) is None: return disassembled(cubin, *FLAGS)
    key = hashlib.sha256(cubin + "\0".join((version(program), *FLAGS)).encode()).hexdigest()
    kept = cache.directory() / "sass" / f"{key}.txt"
    if not kept.is_file(): cache.write(kept, disassembled(cubin, *FLAGS))
    return kept.read_text()
