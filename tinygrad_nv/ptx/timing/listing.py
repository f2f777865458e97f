"""The instructions that ptxas makes of PTX, by kernel and by the blocks of the PTX.

Protocol: `listing(text, arch)` assembles the PTX as `assemble` does, with ptxas's table of PTX lines, which
leaves the instructions as they are. A line tells which instruction of PTX is meant: text with several in a
line is laid out anew (`one_a_line`), and `Listing.origins` has the lines that were given. PTX of a version
that is newer than ptxas is assembled as the newest that it knows: compilers name theirs, whatever they use of
it. `Listing.placement(entry)` lays the instructions out by the blocks of the PTX.
"""
from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from tinygrad_nv import cache, private
from tinygrad_nv.errors import PTXError
from tinygrad_nv.ptx.assemble import Resources, assemble, version
from tinygrad_nv.ptx.emulator.calls import expand_calls
from tinygrad_nv.ptx.parser import parse
from tinygrad_nv.ptx.sass import disassemble, disassembler
from tinygrad_nv.ptx.timing.instructions import FLAGS, TimedInstruction, read_listing
from tinygrad_nv.ptx.timing.placement import Placement, place_instructions

LINES = ("-lineinfo",)  # what the listing's assembly is made with
VERSION = re.compile(r"(?m)(?<=^\.version )[\d.]+")
NEWEST = re.compile(r"Unsupported \.version .* current version is '([\d.]+)'")     # what ptxas says
# what may have a semicolon in it that ends no instruction, and one that something follows
PIECES = re.compile(r"\"[^\"\n]*\"|//[^\n]*|/\*.*?\*/|(;)[ \t]*(?=[^\s/.}])", re.DOTALL)


@dataclass(frozen=True, eq=False)
class Listing:
    """The kernels of a module, what ptxas says of each, the text that was assembled, and of each of its lines
    the one of the text that was given, empty where that is the same."""
    arch: str
    kernels: Mapping[str, tuple[TimedInstruction, ...]]
    resources: Mapping[str, Resources]
    text: str
    origins: tuple[int, ...] = ()

    @functools.lru_cache(32)  # noqa: B019
    def placement(self, entry: str) -> Placement:
        """The instructions by the blocks of the PTX function, whose calls are expanded."""
        module = parse(self.text)
        return place_instructions(self.kernels[entry], expand_calls(module, module.functions[entry]))


@functools.lru_cache(32)
def listing(text: str, arch: str = "sm_90a", entry: str | None = None, strict: bool = True) -> Listing:
    """The listing of all kernels, or of one. Raises `PTXError` as `assemble` does, `ToolchainError` without
    nvdisasm."""
    options = (*LINES, *(("--entry", entry) if entry else ()))
    laid, origins = one_a_line(text)
    try: made = assemble(laid, arch, options, strict)
    except PTXError as error:
        if (newest := NEWEST.search(error.found)) and (older := VERSION.sub(newest[1], text, 1)) != text:
            return listing(older, arch, entry, strict)
        if laid != text: assemble(text, arch, options, strict)   # names the line that was given
        raise
    return Listing(arch, read_listing(_disassemble_cached(made.cubin), parse(laid)), made.kernels, laid,
                   origins)


def one_a_line(text: str) -> tuple[str, tuple[int, ...]]:
    """The text with at most one instruction in a line, and of each line, from 1, the one it was in; empty
    where nothing changed."""
    laid = PIECES.sub(lambda found: ";\0" if found[1] else found[0], text)
    if laid == text: return text, ()
    lines = [each.split("\0") for each in laid.split("\n")]
    return "\n".join(each for line in lines for each in line), \
        (0, *(number for number, line in enumerate(lines, 1) for _ in line))


def _disassemble_cached(cubin: bytes) -> str:
    """Returns the text, from the cache where the same disassembler has written it."""
    if (program := disassembler()) is None: return disassemble(cubin, *FLAGS)
    key = hashlib.sha256(cubin + "\0".join((version(program), *FLAGS)).encode()).hexdigest()
    kept = cache.folder("sass") / f"{key}.txt"
    if (found := private.read_sealed(kept)) is not None: return found.decode()
    private.write_sealed(kept, (made := disassemble(cubin, *FLAGS)).encode())
    return made
