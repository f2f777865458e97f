"""Programs of the tile language on the emulated GPU, held to the interpreter.

Protocol: `program(fn, tensors, …)` writes a function's program; `checked(program, …)` runs its kernel with
seeds early and late, without findings, over arrays (made from a seed where none are given), and compares the
outputs: integers bit for bit, floats within `ulps` units of their dtype at the size of the largest element,
or where `exact` is set with the interpreter's float64 result, at most C times as far from it as its float32
result.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tinygrad.dtype import DType, dtypes

from tinygrad_nv.ptx.emulator import LATE, Emulator
from tinygrad_nv.ptx.emulator.report import Report
from tinygrad_nv.tile.language.gpu import build, problems
from tinygrad_nv.tile.language.interpret import round_to, run
from tinygrad_nv.tile.language.ir import Program, TensorParameter
from tinygrad_nv.tile.language.memory import TensorRef
from tinygrad_nv.tile.language.program import trace_program
from tinygrad_nv.tile.language.schedule import TileSchedule
from tinygrad_nv.tile.template import GPU

UNIT = {dtypes.float32: 2.0**-24, dtypes.float16: 2.0**-11, dtypes.bfloat16: 2.0**-8, dtypes.fp8e4m3: 2.0**-4,
        dtypes.fp8e5m2: 2.0**-3}
PLAIN = {dtypes.int8: np.int8, dtypes.uint8: np.uint8, dtypes.int16: np.int16, dtypes.uint16: np.uint16,
         dtypes.int32: np.int32, dtypes.uint32: np.uint32, dtypes.bool: np.bool_}
FP8 = {dtypes.fp8e4m3: "float8_e4m3fn", dtypes.fp8e5m2: "float8_e5m2"}
GUARD = 0x5A        # bytes around and in outputs


def ref(name: str, dtype: DType, *shape: int, out: bool = False) -> TensorParameter:
    """A tensor of a program."""
    return TensorParameter(name, dtype, shape, out)


def program(fn: Any, tensors: Sequence[TensorParameter], schedule: TileSchedule | None = None,
            grid: tuple[int, ...] | None = (1,), more: Mapping[str, Any] | None = None) -> Program:
    """The program of a function of the tensors, by their names, and of other arguments."""
    given = {each.name: TensorRef(each) for each in tensors}
    return trace_program(fn, {**given, **(more or {})}, tensors, schedule or TileSchedule(), grid, None)


# **** arrays ****

def values(each: TensorParameter, random: np.random.Generator, integers: bool) -> np.ndarray:
    """Elements of an input: those of floats are values of the dtype, in float32."""
    if each.dtype == dtypes.bool: return random.integers(0, 2, each.shape).astype(np.bool_)
    if not dtypes.is_float(each.dtype):
        low = 0 if dtypes.is_unsigned(each.dtype) else -50
        return random.integers(low, 50, each.shape).astype(PLAIN[each.dtype])
    made = random.integers(-4, 5, each.shape) if integers else random.standard_normal(each.shape)
    return round_to(made.astype(np.float32), each.dtype)


def to_bytes(array: np.ndarray, dtype: DType) -> np.ndarray:
    """An array as it lies in memory."""
    if dtype == dtypes.bfloat16:
        return (np.ascontiguousarray(array, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if dtype == dtypes.float16: return array.astype(np.float16)
    if dtype in FP8:
        import torch
        wide = torch.from_numpy(np.ascontiguousarray(array, np.float32))
        return wide.to(getattr(torch, FP8[dtype])).view(torch.uint8).numpy()
    return array.astype(np.float32 if dtype == dtypes.float32 else PLAIN[dtype])


def from_bytes(raw: np.ndarray, dtype: DType, shape: tuple[int, ...]) -> np.ndarray:
    """What memory holds, floats in float32."""
    if dtype == dtypes.bfloat16:
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)
    if dtype == dtypes.float16: return raw.view(np.float16).astype(np.float32).reshape(shape)
    if dtype in FP8:
        import torch
        return torch.from_numpy(raw.copy()).view(getattr(torch, FP8[dtype])).float().numpy().reshape(shape)
    return raw.view(np.float32 if dtype == dtypes.float32 else PLAIN[dtype]).reshape(shape)


# **** runs ****

def launched(made: Program, arrays: Mapping[str, np.ndarray], schedule: TileSchedule, arch: str,
             seed: int | str, check: bool = True, sms: int = 0) -> tuple[dict[str, np.ndarray], Report]:
    """The outputs of a program's kernel, and the report."""
    assert not problems(made, schedule, GPU(arch, sms))
    kernel = build(made, schedule, GPU(arch, sms))
    emu = Emulator(arch, check=check, seed=seed)
    buffers = []
    for each in made.tensors:
        raw = to_bytes(arrays[each.name], each.dtype).reshape(-1).view(np.uint8)
        buffers.append(emu.alloc(raw))
    maps = [_map(buffers, one) for one in kernel.maps]
    report = emu.launch(kernel.ptx, kernel.grid, kernel.threads, [*buffers, *maps], kernel.name,
                        kernel.cluster, kernel.dynamic_smem)
    outputs = {each.name: from_bytes(buffer.numpy().reshape(-1).view(np.uint8), each.dtype, each.shape)
               for each, buffer in zip(made.tensors, buffers, strict=True) if each.output}
    return outputs, report


def _map(buffers: Sequence[Any], one: Any) -> Any:
    from tinygrad_nv.tile.emulated import tensor_map
    return tensor_map(buffers, one, [])


def inputs(made: Program, seed: int = 0, integers: bool = False,
           **given: np.ndarray) -> dict[str, np.ndarray]:
    """Arrays of a program's tensors: of outputs that are not given, ones."""
    random, arrays = np.random.default_rng(seed), dict[str, np.ndarray]()
    for each in made.tensors:
        if each.name in given: arrays[each.name] = np.asarray(given[each.name])
        elif each.output:
            arrays[each.name] = np.ones(each.shape, PLAIN.get(each.dtype, np.float32))
        else: arrays[each.name] = values(each, random, integers)
    return arrays


def checked(made: Program, schedule: TileSchedule | None = None, arch: str = "sm_80", ulps: float = 2.0,
            exact: float = 0.0, integers: bool = False, seeds: Sequence[int | str] = (1, LATE),
            sms: int = 0, **given: np.ndarray) -> dict[str, np.ndarray]:
    """The kernel's outputs, compared with the interpreter's."""
    schedule = schedule or TileSchedule()
    arrays = inputs(made, integers=integers, **given)
    wanted = run(made, arrays)
    ideal = run(made, arrays, exact=True) if exact else wanted
    found: dict[str, np.ndarray] = {}
    for seed in seeds:
        found, report = launched(made, arrays, schedule, arch, seed, sms=sms)
        assert not report.findings, "\n".join(map(str, report.findings[:5]))
        for each in made.tensors:
            if each.output: compared(each, found[each.name], wanted[each.name], ideal[each.name], ulps, exact)
    return found


def compared(each: TensorParameter, found: np.ndarray, wanted: np.ndarray, ideal: np.ndarray, ulps: float,
             exact: float) -> None:
    """Raises where an output is not what it should be."""
    if not dtypes.is_float(each.dtype):
        np.testing.assert_array_equal(found, wanted, each.name)
        return
    assert (np.isnan(found) == np.isnan(wanted)).all(), f"{each.name}: NaN"
    finite = np.isfinite(wanted)
    np.testing.assert_array_equal(found[~finite & ~np.isnan(wanted)], wanted[~finite & ~np.isnan(wanted)],
                                  each.name)
    size = np.abs(wanted[finite]).max(initial=0.0)
    allowed = ulps * 2 * UNIT[each.dtype] * size
    if exact:
        error = np.abs(wanted[finite] - ideal[finite]).max(initial=0.0)
        allowed = exact * error + 2 * UNIT[each.dtype] * size
    worst = np.abs(found[finite].astype(np.float64) - ideal[finite]).max(initial=0.0)
    assert worst <= allowed, f"{each.name}: {worst} from what it should be, {allowed} is allowed"
