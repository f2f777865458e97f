"""Launches a product's kernel on an NVIDIA GPU with cuda-python, on torch's tensors and streams.

Protocol: `missing()` says what is not there, "" when all is. `Loaded(made, arch)` has the module;
`bound(...)` binds it to torch's storages by name (`out`, `a`, `b`, `x0`, …) in the order that kernel.py
states, makes the tensor maps and the workspace, and `launch()` puts one launch into torch's current stream:
flags are zeroed before it where there are any. torch's context is the one that is used.
"""
from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tinygrad_nv.ptx.assemble import assemble, find_program
from tinygrad_nv.tile.kernel import GemmKernel, MapArgument
from tinygrad_nv.tile.spec import GemmSpec

MAP_TYPES = {"u8": "UINT8", "u16": "UINT16", "u32": "UINT32", "s32": "INT32", "f16": "FLOAT16",
             "f32": "FLOAT32", "bf16": "BFLOAT16", "tf32": "TFLOAT32"}
NEEDED = "an NVIDIA GPU of compute capability 8.0 or later, its driver, torch with CUDA, and cuda-python"


def missing() -> str:
    """What a launch needs and is not here."""
    if importlib.util.find_spec("cuda") is None: return "cuda-python is not installed"
    if not torch.cuda.is_available(): return "torch finds no CUDA device"
    if torch.cuda.get_device_capability() < (8, 0): return "the GPU is older than compute capability 8.0"
    return ""


def architecture() -> str:
    """The newest of our targets that the GPU runs."""
    return {(9, 0): "sm_90a", (8, 9): "sm_89"}.get(torch.cuda.get_device_capability(), "sm_80")


def _driver() -> Any:
    from cuda.bindings import driver
    return driver


def checked(answer: tuple[Any, ...]) -> Any:
    """What a driver call returns beside its status. Raises `RuntimeError` with the error's name."""
    cu, (status, *rest) = _driver(), answer
    if status != cu.CUresult.CUDA_SUCCESS: raise RuntimeError(f"{status.name} ({int(status)})")
    return rest[0] if rest else None


@dataclass
class Loaded:
    """A kernel on the device: a cubin where there is a ptxas and the GPU is of that architecture, PTX
    otherwise."""
    made: GemmKernel
    arch: str
    function: Any = field(init=False)

    def __post_init__(self) -> None:
        cu = _driver()
        torch.cuda.current_stream().synchronize()  # makes torch's context current
        own = torch.cuda.get_device_capability()[0] == int(self.arch[3])
        image = assemble(self.made.ptx, self.arch).cubin if own and find_program("ptxas") else \
            self.made.ptx.encode() + b"\0"
        self.module = checked(cu.cuModuleLoadData(image))
        self.function = checked(cu.cuModuleGetFunction(self.module, self.made.name.encode()))
        most = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        checked(cu.cuFuncSetAttribute(self.function, most, self.made.dynamic_smem))

    def bound(self, spec: GemmSpec, given: Mapping[str, torch.Tensor], m: int | None = None) -> Bound:
        """A launch with these storages, `m` rows of a symbolic spec."""
        return Bound(self, spec, dict(given), spec.m if m is None else m)


@dataclass
class Bound:
    """Arguments of one launch, kept alive."""
    loaded: Loaded
    spec: GemmSpec
    given: dict[str, torch.Tensor]
    rows: int
    flags: torch.Tensor | None = None

    def __post_init__(self) -> None:
        made, device = self.loaded.made, self.given["out"].device
        pointers = [self.given["out"]]
        if made.workspace_bytes:
            self.flags = torch.zeros(max(made.flags, 1), dtype=torch.int32, device=device)
            pointers += [torch.empty(made.workspace_bytes, dtype=torch.uint8, device=device), self.flags]
        extras = [f"x{i}" for i in range(len(self.spec.parameters))]
        pointers += [self.given[name] for name in ("a", "b", *extras)]
        self.kept: list[Any] = [pointers]
        values: list[Any] = [ctypes.c_uint64(tensor.data_ptr()) for tensor in pointers]
        if self.spec.symbolic: values.append(ctypes.c_uint32(self.rows))
        maps = [tensor_map(each, pointers[each.pointer].data_ptr(), self.rows) for each in made.maps]
        addresses = [*map(ctypes.addressof, values), *(int(each.getPtr()) for each in maps)]
        self.arguments = (ctypes.c_void_p * len(addresses))(*addresses)
        self.kept += [values, maps]
        self.config = launch_config(made, self.rows)

    def launch(self) -> None:
        """Into torch's current stream."""
        cu, stream = _driver(), torch.cuda.current_stream()
        if self.flags is not None: self.flags.zero_()
        self.config.hStream = stream.cuda_stream
        checked(cu.cuLaunchKernelEx(self.config, self.loaded.function, ctypes.addressof(self.arguments), 0))


def launch_config(made: GemmKernel, rows: int) -> Any:
    """Grid, block, shared memory and cluster."""
    cu = _driver()
    config = cu.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = made.grid_for(rows)
    config.blockDimX, config.blockDimY, config.blockDimZ = made.threads, 1, 1
    config.sharedMemBytes = made.dynamic_smem
    if made.cluster != (1, 1, 1):
        value, attribute = cu.CUlaunchAttributeValue(), cu.CUlaunchAttribute()
        value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = made.cluster
        attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        attribute.value = value
        config.attrs, config.numAttrs = [attribute], 1
    return config


def tensor_map(argument: MapArgument, address: int, rows: int) -> Any:
    """The driver's tensor map over a buffer."""
    cu, rank = _driver(), len(argument.dims)
    dims = [rows if i == argument.dynamic else extent for i, extent in enumerate(argument.dims)]
    swizzle = f"CU_TENSOR_MAP_SWIZZLE_{argument.swizzle.upper()}"
    return checked(cu.cuTensorMapEncodeTiled(
        getattr(cu.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{MAP_TYPES[argument.dtype]}"), rank,
        address + argument.offset_bytes, [cu.cuuint64_t(extent) for extent in dims],
        [cu.cuuint64_t(stride) for stride in argument.strides],
        [cu.cuuint32_t(extent) for extent in argument.box], [cu.cuuint32_t(1)] * rank,
        cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE, getattr(cu.CUtensorMapSwizzle, swizzle),
        cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE))
