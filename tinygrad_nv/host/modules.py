"""Images of device code that a program has, and the kernels in them.

Protocol: a `Module` is a fat binary or PTX text, read when the first of its kernels is asked for. Of several
PTX texts the one for the newest architecture that the GPU runs is taken. `Kernel` is an entry function with
the attributes that the program has set.
"""
from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property

from tinygrad_nv.errors import PTXError
from tinygrad_nv.host import fatbin
from tinygrad_nv.host.errors import CudaError, Status
from tinygrad_nv.ptx.assemble import Assembly, assemble, find_program, release
from tinygrad_nv.ptx.emulator.arguments import check_target, entry_registers
from tinygrad_nv.ptx.emulator.program import lay_out_shared, layout
from tinygrad_nv.ptx.parser import parse
from tinygrad_nv.ptx.syntax import PTXFunction, PTXModule
from tinygrad_nv.ptx.timing.listing import LINES
from tinygrad_nv.runtime.cuda.api import ptx_of_cuda

STATIC_LIMIT = 48 << 10     # dynamic shared bytes that a launch may have without asking
TARGET = re.compile(r"^\.target\s+(\w+)", re.MULTILINE)
VERSION = re.compile(r"^\.version\s+(\d+)\.(\d+)", re.MULTILINE)


@dataclass(eq=False)
class Kernel:
    """An entry function."""
    module: Module
    name: str
    attributes: dict[int, int] = field(default_factory=dict)

    @property
    def function(self) -> PTXFunction: return self.module.ptx_module.functions[self.name]

    @cached_property
    def static_bytes(self) -> int:
        """Shared memory that it always has."""
        return int(lay_out_shared(self.module.ptx_module, self.function)[1])

    @cached_property
    def registers(self) -> int:
        """Registers a thread: ptxas's word, or, without ptxas, what the PTX itself bounds; 0: not known."""
        if (made := self.assembly) is not None: return made.kernels[self.name].registers
        return entry_registers(self.function)

    @cached_property
    def local_bytes(self) -> int:
        """Stack of a thread."""
        if (made := self.assembly) is not None: return made.kernels[self.name].stack_bytes
        return int(layout(v for v in self.function.variables.values() if v.space == "local")[1])

    @cached_property
    def assembly(self) -> Assembly | None:
        """Assembly that ptxas makes of it; None without ptxas."""
        if find_program("ptxas") is None: return None
        return assemble(self.module.text, self.module.arch, (*LINES, "--entry", self.name), strict=False)


@dataclass(eq=False)
class Module:
    """An image. `arch` is the GPU's."""
    image: bytes
    arch: str
    kernels: dict[str, Kernel] = field(default_factory=dict)

    @cached_property
    def text(self) -> str:
        """Its PTX. Raises `CudaError` where there is none that the GPU runs."""
        return lower_version(choose_ptx(self.image, self.arch))

    @cached_property
    def ptx_module(self) -> PTXModule: return parse(self.text)

    def kernel(self, name: str) -> Kernel:
        """Raises `CudaError` for a name that no entry function has."""
        if name not in self.ptx_module.functions: raise CudaError(Status.SYMBOL_NOT_FOUND)
        return self.kernels.setdefault(name, Kernel(self, name))


def choose_ptx(image: bytes, arch: str) -> str:
    """The PTX of an image that a GPU runs."""
    if int.from_bytes(image[:4], "little") != fatbin.HEADER:
        if image[:4] == fatbin.ELF: raise only_machine_code([], arch)
        return image.rstrip(b"\0").decode()
    found = list(fatbin.entries(image))
    texts = [entry.text for entry in found if entry.kind == fatbin.PTX]
    fitting = [text for text in texts if runs(text, arch)]
    if fitting: return max(fitting, key=lambda text: TARGET.findall(text)[0])
    if texts:
        targets = ", ".join(sorted({TARGET.findall(text)[0] for text in texts}))
        raise no_image(f"the program has PTX for {targets}", f"PTX that runs on {arch}",
                       f"compile with nvcc -arch={arch}, or choose another --gpu")
    raise only_machine_code(sorted({f"sm_{entry.arch}" for entry in found}), arch)


def only_machine_code(archs: list[str], arch: str) -> CudaError:
    """The words for a program without PTX."""
    number, kinds = arch.removeprefix("sm_"), " for " + ", ".join(archs) if archs else ""
    return no_image(f"the program has machine code{kinds}, and no PTX", "PTX in the program",
                    f"compile with nvcc -gencode arch=compute_{number},code=[sm_{number},compute_{number}]")


def no_image(found: str, expected: str, fix: str) -> CudaError:
    """The error of device code that the emulated GPU cannot take."""
    return CudaError(Status.NO_KERNEL_IMAGE_FOR_DEVICE, str(PTXError(found, 0, expected, fix)), refused=True)


def lower_version(text: str) -> str:
    """The PTX, its version no newer than ptxas's: parts of nvcc may be of different releases."""
    found, newest = VERSION.search(text), release()
    if found is None or newest is None: return text
    version = min((int(found[1]), int(found[2])), ptx_of_cuda(newest))
    return f"{text[:found.start()]}.version {version[0]}.{version[1]}{text[found.end():]}"


def runs(text: str, arch: str) -> bool:
    """Whether a GPU runs PTX for its target."""
    try: check_target(arch, TARGET.findall(text)[0])
    except PTXError: return False
    return True
