"""Random numbers: tinygrad's generator, whose numbers are not those of other runtimes for a seed.

Protocol: an op with a `seed` draws the same numbers each time that it is built; without one it goes on with
tinygrad's generator, which `Tensor.manual_seed` sets."""
from __future__ import annotations

from collections.abc import Sequence

from tinygrad import Tensor

from tinygrad_nv.onnx.elements import dtype_of
from tinygrad_nv.onnx.limits import budget
from tinygrad_nv.onnx.table import op


def _uniform(shape: Sequence[int], seed: float | None) -> Tensor:
    """Numbers from 0 to 1 in float32."""
    budget().check_bytes(shape, 4)
    if seed is not None: Tensor.manual_seed(int(seed) & 0x7FFFFFFF)
    return Tensor.rand(*shape)


@op("RandomUniform")
def uniform(shape: Sequence[int], low: float = 0.0, high: float = 1.0, seed: float | None = None,
            dtype: int = 1) -> Tensor:
    """Numbers between low and high."""
    return (_uniform(shape, seed) * (high - low) + low).cast(dtype_of(dtype))


@op("RandomNormal")
def normal(shape: Sequence[int], mean: float = 0.0, scale: float = 1.0, seed: float | None = None,
           dtype: int = 1) -> Tensor:
    """Numbers of a normal distribution."""
    budget().check_bytes(shape, 4)
    if seed is not None: Tensor.manual_seed(int(seed) & 0x7FFFFFFF)
    return (Tensor.randn(*shape) * scale + mean).cast(dtype_of(dtype))


@op("RandomUniformLike")
def uniform_like(x: Tensor, low: float = 0.0, high: float = 1.0, seed: float | None = None,
                 dtype: int | None = None) -> Tensor:
    """Draws as `uniform` does, of x's shape, and its type by default."""
    made = uniform(tuple(map(int, x.shape)), low, high, seed)
    return made.cast(x.dtype if dtype is None else dtype_of(dtype))


@op("RandomNormalLike")
def normal_like(x: Tensor, mean: float = 0.0, scale: float = 1.0, seed: float | None = None,
                dtype: int | None = None) -> Tensor:
    """Draws as `normal` does, of x's shape, and its type by default."""
    made = normal(tuple(map(int, x.shape)), mean, scale, seed)
    return made.cast(x.dtype if dtype is None else dtype_of(dtype))


@op("Multinomial")
def multinomial(x: Tensor, sample_size: int = 1, seed: float | None = None, dtype: int = 6) -> Tensor:
    """Numbers of classes whose log probabilities x [N, classes] has."""
    if seed is not None: Tensor.manual_seed(int(seed) & 0x7FFFFFFF)
    budget().check_bytes((int(x.shape[0]), sample_size), 4)
    return x.softmax(-1).multinomial(sample_size, replacement=True).cast(dtype_of(dtype))
