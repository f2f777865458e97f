"""A program of the tile language with its inputs and its answer, on any device.

Protocol: a `Case` has `run(launch, *tensors)`, which launches kernels by `launch(kernel, *args, **constants)`
and gives a Tensor or a tuple of them, and `reference(*arrays)`,
the same from NumPy or torch. The reference is
computed twice, of float64 and of float32 arrays: a result may differ from the first by `c` times what the
second does, rounded to the result's dtype. Integers and booleans have to be equal.

`direct` launches on the tensors' device, `interpreted` in NumPy, from the Tile IR.
"""
from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tinygrad import Tensor
from tinygrad.dtype import DType, dtypes

from tinygrad_nv.language.kernels import Kernel

TORCH = {dtypes.float16: torch.float16, dtypes.bfloat16: torch.bfloat16, dtypes.fp8e4m3: torch.float8_e4m3fn,
         dtypes.fp8e5m2: torch.float8_e5m2}
SMALLEST = {dtypes.fp8e4m3: 2.0 ** -6, dtypes.fp8e5m2: 2.0 ** -14}
HALF_ULP = 2.0 ** -24   # of float32, relative: what a reference in float32 may be lucky by
Array = np.ndarray[Any, np.dtype[Any]]
Run = Callable[..., Any]


@dataclass(frozen=True)
class Given:
    """An input: drawn from a generator, as values of a dtype."""
    draw: Callable[[np.random.Generator], Array]
    dtype: DType


@dataclass(frozen=True)
class Case:
    """One call of a program. `c`: how many times the error of float32 a result may have."""
    name: str
    run: Run
    inputs: tuple[Given, ...]
    reference: Callable[..., Any]
    c: float = 4.0

    def arrays(self) -> list[Array]:
        """The inputs, the same at every call."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        return [rounded(each.draw(rng), each.dtype) for each in self.inputs]

    def got(self, device: str, launch: Run | None = None) -> tuple[Tensor, ...]:
        """The results of a device, or of another launcher."""
        tensors = [tensor(x, each.dtype, device) for x, each in zip(self.arrays(), self.inputs, strict=True)]
        made = self.run(launch or direct, *tensors)
        return made if isinstance(made, tuple) else (made,)

    def want(self, wide: bool) -> tuple[Array, ...]:
        """The reference's results, of float64 or of float32 arrays."""
        kind = np.float64 if wide else np.float32
        made = self.reference(*(x.astype(kind) if x.dtype.kind == "f" else x for x in self.arrays()))
        return tuple(map(np.asarray, made if isinstance(made, tuple) else (made,)))

    def check(self, device: str, launch: Run | None = None) -> None:
        """Holds the results to the reference."""
        got, exact, plain = self.got(device, launch), self.want(True), self.want(False)
        assert len(got) == len(exact)
        for i, (x, true, near) in enumerate(zip(got, exact, plain, strict=True)):
            assert tuple(x.shape) == true.shape, f"output {i}: {x.shape}, {true.shape} expected"
            compare(f"{self.name}, output {i}", x, true, near, self.c)


def compare(name: str, got: Tensor, exact: Array, plain: Array, c: float) -> None:
    """Raises an AssertionError that names the first place where a result is wrong."""
    if not dtypes.is_float(got.dtype):
        np.testing.assert_array_equal(got.numpy(), exact, name)
        return
    values = got.cast(dtypes.float32).numpy().astype(np.float64)
    near = rounded(plain, got.dtype).astype(np.float64)
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(np.where(finite, 0, values), np.where(finite, 0, exact), name)
    error = np.abs(np.where(finite, values, 0) - np.where(finite, exact, 0))
    own = np.abs(np.where(finite, near, 0) - np.where(finite, exact, 0)).max(initial=0)
    allowed = c * max(own, HALF_ULP * np.abs(exact[finite]).max(initial=0))
    if not (error <= allowed).all():
        at = np.unravel_index(np.argmax(np.nan_to_num(error, nan=np.inf)), error.shape)
        count = int((error > allowed).sum())
        raise AssertionError(f"{name}: {values[at]} at {tuple(map(int, at))}, {exact[at]} expected: an error "
                             f"of {error[at]:.3g}, {allowed:.3g} allowed; {count} such elements")


def direct(kernel: Kernel, *args: Any, **constants: Any) -> Any:
    """On the device of the tensors."""
    return kernel(*args, **constants)


def interpreted(kernel: Kernel, *args: Any, **constants: Any) -> Any:
    """In NumPy."""
    made = kernel.interpret(*args, **constants)
    outputs = [each for each in kernel.program(*args, **constants).tensors if each.output]
    arrays = made if isinstance(made, tuple) else (made,)
    device = next(each.device for each in (*args, *constants.values()) if isinstance(each, Tensor))
    results = tuple(tensor(x, each.dtype, device) for x, each in zip(arrays, outputs, strict=True))
    return results if isinstance(made, tuple) else results[0]


def call(kernel: Kernel, **constants: Any) -> Run:
    """A run that launches one kernel."""
    return lambda launch, *tensors: launch(kernel, *tensors, **constants)


def rounded(x: Any, dtype: DType) -> Array:
    """Values of a dtype: float32 arrays of those that NumPy does not have. Subnormals of float8 are 0:
    tinygrad's own conversions lose them."""
    if dtype in TORCH:
        made = torch.from_numpy(np.asarray(x, np.float32)).to(TORCH[dtype]).float().numpy()
        return np.where(np.abs(made) < SMALLEST.get(dtype, 0), np.float32(0), made)
    return np.asarray(x).astype(_numpy(dtype))


def tensor(x: Array, dtype: DType, device: str) -> Tensor:
    """A Tensor of values that a dtype has."""
    return Tensor(np.ascontiguousarray(x), device=device).cast(dtype).realize()


def _numpy(dtype: DType) -> Any: return np.dtype(dtype.fmt) if dtype.fmt else np.float32


# **** inputs ****

def normal(*shape: int, dtype: DType = dtypes.float32, scale: float = 1.0, mean: float = 0.0) -> Given:
    """Normally distributed numbers."""
    return Given(lambda rng: rng.standard_normal(shape) * scale + mean, dtype)


def uniform(*shape: int, low: float = 0.0, high: float = 1.0, dtype: DType = dtypes.float32) -> Given:
    """Evenly distributed numbers."""
    return Given(lambda rng: rng.uniform(low, high, shape), dtype)


def integers(low: int, high: int, *shape: int, dtype: DType = dtypes.int32) -> Given:
    """Integers from `low` to below `high`."""
    return Given(lambda rng: rng.integers(low, high, shape), dtype)


def fixed(values: Any, dtype: DType = dtypes.int32) -> Given:
    """These values."""
    return Given(lambda rng: np.asarray(values), dtype)


def permutation(count: int) -> Given:
    """0 to count - 1 in some order."""
    return Given(lambda rng: rng.permutation(count), dtypes.int32)
