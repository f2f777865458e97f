"""Modules, functions and launches of the CUDA driver.

Protocol. PTX text becomes a cubin through ptxas where there is one that the GPU's driver accepts and the GPU
is of one of our architectures; otherwise the driver compiles it, and its log is in the error. A function is
let have all the shared memory of a CTA, and clusters above 8, when it is looked up, so that a launch sets
nothing.

`Launcher` keeps what launches have in common: a CUlaunchConfig for each shape and stream, and for each list
of argument sizes the struct that packs them, with the array of pointers that the driver reads them through.
Parameters are copied by the driver during the call, so each thread has one block for all launches.
"""
from __future__ import annotations

import ctypes
import re
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinygrad_nv.errors import DriverError
from tinygrad_nv.ptx.assemble import assemble, release
from tinygrad_nv.runtime import driver
from tinygrad_nv.runtime.cuda.api import cuda_of_ptx, too_old
from tinygrad_nv.runtime.cuda.context import CUDAContext
from tinygrad_nv.runtime.cuda.streams import CUDAStream
from tinygrad_nv.runtime.driver import TENSOR_MAP_ALIGN, Attributes, Function, Launch, Window

VERSION = re.compile(r"^\s*\.version\s+(\d+)\.(\d+)", re.MULTILINE)
TARGET = re.compile(r"^\s*\.target\s+sm_(\d+)([af]?)", re.MULTILINE)
ENTRY = re.compile(r"\.entry\s+([\w$%]+)")
LOG_BYTES = 16 << 10
BLOCK_BYTES = 64 << 10      # of one launch's arguments: twice what a kernel can have
MOST_PARAMETERS = 4096
CONFIGS_KEPT = 4096
LARGEST_CLUSTER = 16
PROBE = b""".version 8.0
.target sm_90
.address_size 64
.visible .entry probe() { ret; }
"""
OVERLAP = "PROGRAMMATIC_STREAM_SERIALIZATION"


# **** modules ****

@dataclass(eq=False)
class Image:
    """A CUmodule; unloaded when neither its module nor a graph holds it."""
    handle: Any


@dataclass(eq=False)
class LoadedFunction:
    """Function of a CUDA device, which a `Function` stands for: a CUfunction, and bytes of each parameter,
    None where the driver does not tell."""
    module: CUDAModule
    handle: Any
    sizes: tuple[int, ...] | None


class CUDAModule(driver.Module):
    """A cubin or PTX on the device."""

    def __init__(self, gpu: CUDAContext, image: bytes) -> None:
        self.gpu = gpu
        self.text = "" if image[:4] == b"\x7fELF" else image.rstrip(b"\0").decode()
        self.image: Image | None = Image(_load(gpu, self._code(image)))
        gpu.own(self.image, "cuModuleUnload", self.image.handle, after_work=True)
        self.functions: dict[str, Function] = {}

    def _code(self, image: bytes) -> bytes:
        """A cubin, or PTX text with the null that ends it."""
        if not self.text: return image
        version, target = VERSION.search(self.text), TARGET.search(self.text)
        if version is None or target is None:
            raise DriverError("a module without .version or .target", "PTX text, or a cubin")
        _check_target(self.gpu, int(target[1]), target[2])
        ptx = int(version[1]), int(version[2])
        if arch := _arch_to_assemble(self.gpu, int(target[1]), ptx): return assemble(self.text, arch).cubin
        if words := too_old(self.gpu.version, ptx):
            raise DriverError(words, fix="update the NVIDIA driver, or install ptxas of CUDA "
                              f"{self.gpu.version[0]}, which makes cubins")
        return self.text.encode() + b"\0"

    def function(self, name: str) -> Function:
        if self.image is None: raise DriverError(f"kernel {name} of a module that was unloaded", "one loaded")
        if (found := self.functions.get(name)) is None:
            found = self.functions[name] = _function(self, self.image, name)
        return found

    def names(self) -> list[str]:
        """Kernels of the module."""
        if self.text: return ENTRY.findall(self.text)
        if self.image is None: return []
        count = self.gpu.call("cuModuleGetFunctionCount", self.image.handle)
        functions = self.gpu.call("cuModuleEnumerateFunctions", count, self.image.handle)
        return [self.gpu.call("cuFuncGetName", each).decode() for each in functions]

    def unload(self) -> None: self.image = None


def _check_target(gpu: CUDAContext, number: int, special: str) -> None:
    own = gpu.capability[0] * 10 + gpu.capability[1]
    if number <= own and (special != "a" or number == own) and (special != "f" or number // 10 == own // 10):
        return
    raise DriverError(f"the module is for sm_{number}{special}, GPU {gpu.ordinal} is sm_{own}",
                      f"PTX for sm_{own} or an earlier architecture without 'a'")


def _arch_to_assemble(gpu: CUDAContext, target: int, ptx: tuple[int, int]) -> str:
    """The architecture that ptxas can assemble PTX of a target and a version for, to run here; "" where there
    is none, as where NVRTC is newer than ptxas."""
    arch = gpu.properties.arch
    if gpu.capability >= (9, 1) or target > int(arch[3:5]): return ""
    found = release()
    return arch if found is not None and found[0] <= gpu.version[0] and found >= cuda_of_ptx(ptx) else ""


def _load(gpu: CUDAContext, code: bytes) -> Any:
    cu, log = gpu.cu, bytearray(LOG_BYTES)
    options = [cu.CUjit_option.CU_JIT_ERROR_LOG_BUFFER, cu.CUjit_option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES]
    status, *module = gpu.status("cuModuleLoadDataEx", code, len(options), options, [log, LOG_BYTES])
    if not status: return module[0]
    words = log.split(b"\0", 1)[0].decode(errors="replace").strip()
    return gpu.check(status, doing=f"loading a module{f': {words}' if words else ''}")


def _function(module: CUDAModule, image: Image, name: str) -> Function:
    gpu, names = module.gpu, module.gpu.cu.CUfunction_attribute
    status, *handles = gpu.status("cuModuleGetFunction", image.handle, name.encode())
    if status.name == "CUDA_ERROR_NOT_FOUND":
        raise DriverError(f"the module has no kernel {name!r}",
                          f"one of: {', '.join(module.names()) or 'none'}")
    handle = gpu.check(status, *handles, doing=f"looking up kernel {name}")
    static, local, registers, threads = (
        int(gpu.call("cuFuncGetAttribute", which, handle)) for which in
        (names.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, names.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES,
         names.CU_FUNC_ATTRIBUTE_NUM_REGS, names.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK))
    gpu.call("cuFuncSetAttribute", handle, names.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
             gpu.properties.shared_limit - static)
    if gpu.capability >= (9, 0):
        gpu.call("cuFuncSetAttribute", handle, names.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
    return Function(name, Attributes(static, local, registers, threads),
                    LoadedFunction(module, handle, _sizes(gpu, handle)))


def _sizes(gpu: CUDAContext, handle: Any) -> tuple[int, ...] | None:
    """Bytes of each parameter; None below CUDA 12.4, whose driver does not tell."""
    if gpu.version < (12, 4): return None
    sizes: list[int] = []
    while len(sizes) < MOST_PARAMETERS:
        status, *found = gpu.status("cuFuncGetParamInfo", handle, len(sizes))
        if status.name == "CUDA_ERROR_INVALID_VALUE": break
        gpu.check(status, doing="reading a kernel's parameters")
        sizes.append(int(found[1]))
    return tuple(sizes)


# **** arguments ****

@dataclass(frozen=True)
class Layout:
    """Arguments of certain sizes in a thread's block: each aligned to its size, tensor maps to 64 bytes.
    `array` has a pointer to each."""
    packer: struct.Struct
    array: ctypes.Array[ctypes.c_void_p]
    address: int


class ArgumentBlock(threading.local):
    """A thread's block of arguments, 64-byte aligned."""

    def __init__(self) -> None:
        self.memory = ctypes.create_string_buffer(BLOCK_BYTES + TENSOR_MAP_ALIGN)
        self.start = -ctypes.addressof(self.memory) % TENSOR_MAP_ALIGN
        self.layouts: dict[tuple[int, ...], Layout] = {}

    def put(self, args: Sequence[bytes], sizes: tuple[int, ...]) -> int:
        """Lays arguments of these sizes out; the address of the array of pointers to them, 0 for none. Good
        until the next call in this thread."""
        if not args: return 0
        if (layout := self.layouts.get(sizes)) is None: layout = self.layouts[sizes] = self._layout(sizes)
        layout.packer.pack_into(self.memory, self.start, *args)
        return layout.address

    def _layout(self, sizes: tuple[int, ...]) -> Layout:
        words, end, places = "<", 0, []
        for size in sizes:
            gap = -end % max(1, min(size, TENSOR_MAP_ALIGN))
            words += f"{gap}x{size}s"
            places.append(ctypes.addressof(self.memory) + self.start + end + gap)
            end += gap + size
        if end > BLOCK_BYTES:
            raise DriverError(f"{end} bytes of arguments", f"at most {BLOCK_BYTES // 2 - 4}")
        array = (ctypes.c_void_p * len(places))(*places)
        return Layout(struct.Struct(words), array, ctypes.addressof(array))


# **** launches ****

@dataclass
class Launcher:
    """Launches on one device."""
    gpu: CUDAContext
    arguments: ArgumentBlock = field(default_factory=ArgumentBlock)
    configs: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def launch(self, work: Launch, stream: CUDAStream) -> None:
        """Into a stream; the context is current."""
        loaded, array = self.prepare(work)
        key = (work.grid, work.block, work.dynamic_smem, work.cluster, work.pdl, work.window, stream)
        if (config := self.configs.get(key)) is None: config = self._config(work, stream.handle, key)
        status, = self.gpu.launch_kernel(config, loaded.handle, array, 0)
        if status: self.gpu.check(status, doing=describe_refused(work))

    def prepare(self, work: Launch) -> tuple[LoadedFunction, int]:
        """Returns the function of a launch, which must be of this device, loaded, and take these arguments;
        and the array of pointers to them."""
        loaded, sizes = work.function.handle, tuple(map(len, work.args))
        if not isinstance(loaded,
                          LoadedFunction) or loaded.module.gpu is not self.gpu or loaded.module.image is None:
            raise DriverError(f"kernel {work.function.name} is launched",
                              "a function of a module that is loaded on this device")
        if loaded.sizes != sizes and loaded.sizes is not None: raise _misfit(work, loaded.sizes)
        return loaded, self.arguments.put(work.args, sizes)

    def _config(self, work: Launch, stream: Any, key: tuple[Any, ...]) -> Any:
        made = self.gpu.cu.CUlaunchConfig()
        made.gridDimX, made.gridDimY, made.gridDimZ = work.grid
        made.blockDimX, made.blockDimY, made.blockDimZ = work.block
        made.sharedMemBytes, made.hStream = work.dynamic_smem, stream
        if attributes := self.attributes(work):
            made.attrs, made.numAttrs = attributes, len(attributes)
        if len(self.configs) >= CONFIGS_KEPT: self.configs.clear()
        self.configs[key] = made
        return made

    def most_clusters(self, size: int) -> int:
        """Clusters of so many CTAs at once, by a kernel that has all the shared memory of an SM."""
        shape = size, 1, 1
        work = Launch(CUDAModule(self.gpu, PROBE).function("probe"), shape, (128, 1, 1),
                      dynamic_smem=self.gpu.properties.shared_limit, cluster=shape)
        loaded = work.function.handle
        assert isinstance(loaded, LoadedFunction)
        config = self._config(work, self.gpu.streams[0].handle, ("occupancy", size))
        return int(self.gpu.call("cuOccupancyMaxActiveClusters", loaded.handle, config))

    def attributes(self, work: Launch) -> list[Any]:
        """Returns the settings of a launch for cluster, overlap and L2, as CUlaunchAttributes."""
        cu, out = self.gpu.cu, []
        for name, value in self.values(work, cu.CUlaunchAttributeValue):
            out.append(cu.CUlaunchAttribute())
            out[-1].id, out[-1].value = getattr(cu.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{name}"), value
        return out

    def values(self, work: Launch, kind: Any) -> Iterator[tuple[str, Any]]:
        """Names of attributes and their values, of the union `kind`. Raises for those that this device cannot
        have."""
        self.check_cluster(work)
        if work.cluster != (1, 1, 1):
            value = kind()
            value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = work.cluster
            yield "CLUSTER_DIMENSION", value
        if work.pdl:
            if self.gpu.capability < (9, 0):
                raise DriverError(f"programmatic dependent launch on {self.gpu.properties.arch}",
                                  "sm_90 or later", "launch without pdl")
            value = kind()
            value.programmaticStreamSerializationAllowed = 1
            yield OVERLAP, value
        if work.window is not None:
            value = kind()
            value.accessPolicyWindow = self.window(work.window)
            yield "ACCESS_POLICY_WINDOW", value

    def check_cluster(self, work: Launch) -> None:
        """Raises for a cluster that the device or the grid cannot have."""
        if work.cluster == (1, 1, 1): return
        size = work.cluster[0] * work.cluster[1] * work.cluster[2]
        if self.gpu.capability < (9, 0):
            raise DriverError(f"cluster={work.cluster} on {self.gpu.properties.arch}",
                              "no cluster below sm_90")
        if size > LARGEST_CLUSTER:
            raise DriverError(f"a cluster of {size} CTAs", f"at most {LARGEST_CLUSTER}")
        if any(g % c for g, c in zip(work.grid, work.cluster, strict=True)):
            raise DriverError(f"grid={work.grid} is not a multiple of cluster={work.cluster}",
                              "whole clusters")

    def window(self, given: Window) -> Any:
        """A CUaccessPolicyWindow."""
        cu, limit = self.gpu.cu, self.gpu.properties.window_limit
        if not 0 < given.nbytes <= limit:
            raise DriverError(f"a window of {given.nbytes} bytes", f"1 to {limit} on this device",
                              "a narrower window, with its hit_ratio")
        if not 0 <= given.hit_ratio <= 1:
            raise DriverError(f"hit_ratio={given.hit_ratio} of a window", "0 to 1")
        made = cu.CUaccessPolicyWindow()
        made.base_ptr, made.num_bytes, made.hitRatio = given.address, given.nbytes, given.hit_ratio
        made.hitProp = cu.CUaccessProperty.CU_ACCESS_PROPERTY_PERSISTING
        made.missProp = cu.CUaccessProperty.CU_ACCESS_PROPERTY_STREAMING
        return made


def describe_refused(work: Launch) -> str:
    """Returns a launch in words, for the error of one that the driver does not take."""
    attributes = work.function.attributes
    cluster = "" if work.cluster == (1, 1, 1) else f", cluster={work.cluster}"
    return (f"launching kernel {work.function.name} with grid={work.grid}, block={work.block}{cluster}, "
            f"shared memory {attributes.static_smem} + {work.dynamic_smem} bytes, {attributes.registers} "
            f"registers a thread (it allows {attributes.max_threads} threads)")


def _misfit(work: Launch, sizes: tuple[int, ...]) -> DriverError:
    given = tuple(map(len, work.args))
    if len(given) != len(sizes):
        return DriverError(f"{len(given)} arguments for the {len(sizes)} parameters of {work.function.name}",
                           f"one for each of {len(sizes)}, of {', '.join(map(str, sizes))} bytes")
    at = next(i for i, size in enumerate(sizes) if given[i] != size)
    return DriverError(f"argument {at} of {work.function.name} has {given[at]} bytes", f"{sizes[at]} bytes")
