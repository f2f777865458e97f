"""Device code of the API: what nvcc's code registers, modules, libraries, entry points."""
from __future__ import annotations

import struct
from pathlib import Path

from tinygrad_nv.errors import PTXError
from tinygrad_nv.host import fatbin
from tinygrad_nv.host.api import Int, Text, Unsigned, Word, api, function_of
from tinygrad_nv.host.errors import CudaError, Status
from tinygrad_nv.host.library import names
from tinygrad_nv.host.modules import Module
from tinygrad_nv.host.session import Session

# **** what nvcc's code registers ****

@api("__cudaRegisterFatBinary")
def register_fat_binary(s: Session, wrapper: Word) -> int:
    module = Module(image_at(s, wrapper), s.gpu.arch)
    handle = s.handle(module)
    s.modules[handle] = module
    return handle


def image_at(s: Session, address: int) -> bytes:
    """A fat binary, in its wrapper or not, or PTX text, in the program's memory."""
    magic, = struct.unpack("<I", s.wire.read(address, 4))
    if magic == fatbin.WRAPPER:
        _, _, data, _ = struct.unpack("<IIQQ", s.wire.read(address, 24))
        return image_at(s, data)
    if magic == fatbin.HEADER:
        return s.wire.read(address, fatbin.size_of(s.wire.read(address, fatbin.HEADER_BYTES)))
    if magic == int.from_bytes(fatbin.ELF, "little"): return fatbin.ELF
    return s.wire.text(address).encode()


@api("__cudaRegisterFatBinaryEnd", "__cudaUnregisterFatBinary")
def register_end(s: Session, handle: Word) -> None: ...


@api("__cudaInitModule")
def init_module(s: Session, handle: Word) -> int:
    s.manage(handle)
    return 1


@api("__cudaRegisterFunction")
def register_function(s: Session, handle: Word, host: Word, device: Word, name: Text) -> None:
    s.functions[host] = handle, name


@api("__cudaRegisterVar")
def register_variable(s: Session, handle: Word, host: Word, device: Word, name: Text) -> None:
    s.symbols[host] = handle, name


@api("__cudaGetKernel", "cudaGetKernel", "cudaGetFuncBySymbol")
def get_kernel(s: Session, into: Word, function: Word) -> None:
    if function not in s.functions:
        raise CudaError(Status.INVALID_DEVICE_FUNCTION, f"{function:#x} is no kernel of the program")
    s.put(into, function)


@api("__cudaRegisterManagedVar")
def register_managed(s: Session, handle: Word, host: Word, device: Word, name: Text, external: Int,
                     nbytes: Word) -> None:
    s.managed.setdefault(handle, []).append((host, name, nbytes))
    s.symbols[host] = handle, name


# **** modules and libraries of the driver, which are the same here ****

def load_module(s: Session, into: int, image: bytes) -> None:
    """Loads a module; its PTX is read at once, as the driver does."""
    module = Module(image, s.gpu.arch)
    try: _ = module.ptx_module
    except PTXError as error:
        if image.startswith(fatbin.ELF) or int.from_bytes(image[:4], "little") == fatbin.HEADER: raise
        raise CudaError(Status.INVALID_PTX, str(error)) from None
    s.put(into, s.handle(module))


@api("cuModuleLoadData", "cuModuleLoadDataEx", "cuModuleLoadFatBinary", "cuLibraryLoadData",
     "cudaLibraryLoadData")
def module_load_data(s: Session, into: Word, image: Word) -> None: load_module(s, into, image_at(s, image))


@api("cuModuleLoad", "cuLibraryLoadFromFile", "cudaLibraryLoadFromFile")
def module_load(s: Session, into: Word, name: Text) -> None:
    try: image = Path(f"/proc/{s.wire.pid}/cwd", name).read_bytes()
    except OSError as error: raise CudaError(Status.FILE_NOT_FOUND, str(error)) from None
    load_module(s, into, image)


@api("cuModuleUnload", "cuLibraryUnload", "cudaLibraryUnload")
def module_unload(s: Session, handle: Word) -> None: s.drop(handle, Module)


@api("cuModuleGetFunction", "cuLibraryGetKernel", "cudaLibraryGetKernel")
def module_function(s: Session, into: Word, module: Word, name: Text) -> None:
    s.put(into, s.handle(s.object(module, Module).kernel(name)))


@api("cuLibraryGetModule")
def library_module(s: Session, into: Word, library: Word) -> None:
    s.object(library, Module)
    s.put(into, library)


@api("cuKernelGetFunction")
def kernel_function(s: Session, into: Word, kernel: Word) -> None: s.put(into, s.handle(s.kernel(kernel)))


@api("cuModuleGetGlobal_v2", "cuLibraryGetGlobal", "cudaLibraryGetGlobal")
def module_variable(s: Session, pointer: Word, size: Word, module: Word, name: Text) -> None:
    found = s.variable(s.object(module, Module), name)
    s.fill_in(pointer, found.address)
    s.fill_in(size, found.nbytes)


@api("cuModuleGetFunctionCount", "cuLibraryGetKernelCount", "cudaLibraryGetKernelCount")
def function_count(s: Session, count: Word, module: Word) -> None:
    s.put(count, len(s.object(module, Module).ptx_module.functions), size=4)


@api("cuModuleEnumerateFunctions", "cuLibraryEnumerateKernels", "cudaLibraryEnumerateKernels")
def enumerate_functions(s: Session, into: Word, count: Unsigned, module: Word) -> None:
    found = s.object(module, Module)
    s.put(into, *[s.handle(found.kernel(name)) for name in found.ptx_module.functions][:count])


@api("cuModuleGetLoadingMode")
def loading_mode(s: Session, into: Word) -> None: s.put(into, 2, size=4)     # lazy


@api("cuFuncGetModule", "cuKernelGetLibrary")
def function_module(s: Session, into: Word, kernel: Word) -> None:
    s.put(into, s.handle(s.kernel(kernel).module))


@api("cuFuncGetName", "cuKernelGetName", "cudaFuncGetName")
def function_name(s: Session, into: Word, kernel: Word) -> None: s.put(into, s.text(s.kernel(kernel).name))


@api("cuFuncLoad", "cuFuncIsLoaded")
def function_load(s: Session, first: Word, second: Word) -> None:
    if s.name == "cuFuncIsLoaded": s.put(first, 1, size=4)


@api("cuFuncGetParamInfo", "cuKernelGetParamInfo", "cudaFuncGetParamInfo")
def parameter_info(s: Session, kernel: Word, number: Word, offset: Word, size: Word) -> None:
    found = list(s.kernel(kernel).function.parameters.values())
    if number >= len(found): raise CudaError(Status.INVALID_VALUE, f"parameter {number} of {len(found)}")
    s.put(offset, found[number].offset)
    s.fill_in(size, found[number].nbytes)


# **** entry points ****

@api("cudaGetDriverEntryPoint")
def entry_point(s: Session, name: Text, function: Word, flags: Word, status: Word) -> None:
    found = address_of(s, name)
    s.put(function, found)
    s.fill_in(status, 0 if found else 1, size=4)
    if not found and not status: raise CudaError(Status.SYMBOL_NOT_FOUND)


@api("cudaGetDriverEntryPointByVersion", "cuGetProcAddress_v2")
def entry_point_by_version(s: Session, name: Text, function: Word, version: Int, flags: Word,
                           status: Word) -> None:
    entry_point(s, name, function, flags, status)
    if s.name.startswith("cuGet") and not address_of(s, name): raise CudaError(Status.SYMBOL_NOT_FOUND)


@api("cuGetProcAddress")
def proc_address(s: Session, name: Text, function: Word, version: Int, flags: Word) -> None:
    entry_point(s, name, function, flags, 0)


@api("__cudaGetProcAddress")
def runtime_address(s: Session, name: Text, function: Word) -> None: entry_point(s, name, function, 0, 0)


def address_of(s: Session, name: str) -> int:
    """Returns where a function is in the program; 0: there is none of that name. Of its versions the newest
    that is emulated is meant."""
    known = names()
    versions = [each for each in (f"{name}_v4", f"{name}_v3", f"{name}_v2", name) if each in known]
    served = [each for each in versions if function_of(each) is not None] or versions
    return s.wire.trampolines + 16 * known.index(served[0]) if served else 0
