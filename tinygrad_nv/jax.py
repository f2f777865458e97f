"""JAX: a function of Tensors as a function of JAX's arrays: `function(fn)`.

Protocol. `fn` takes trees of Tensors and returns one, and is pure, as transforms/ asks. `function(fn)` is:

    with arrays           DLPack both ways: results are shared, arguments copied, as JAX's are read-only
    inside of jax.jit     jax.pure_callback to the captured function, captured while JAX traces: a call only
                          replays
    jax.grad, jax.vjp     custom_vjp: the backward pass is transforms.vjp of fn, called in the same way, so
                          that it has derivatives, too; no forward mode (jax.jvp)
    jax.vmap              transforms.vmap of fn: one call for all examples; one after the other where that
                          has no rule

Results have JAX's dtypes: without jax_enable_x64 those of 64 bits become those of 32.
"""
from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from importlib.util import find_spec
from typing import Any

from tinygrad_nv.errors import TransformError, as_well

if find_spec("jax") is None:
    raise as_well(TransformError("the package jax is not installed", "jax 0.10",
                                 "pip install 'tinygrad-nv[jax]'"), ImportError())

import jax
import jax.numpy as jnp
import numpy as np
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType, strong_dtype

from tinygrad_nv.dlpack import exporting, from_dlpack
from tinygrad_nv.errors import TorchError
from tinygrad_nv.transforms import jit, vmap
from tinygrad_nv.transforms.foreign import Constants, pullback, shapes_of

DTYPES: dict[DType, Any] = {
    dtypes.bool: jnp.bool_, dtypes.int8: jnp.int8, dtypes.int16: jnp.int16, dtypes.int32: jnp.int32,
    dtypes.int64: jnp.int64, dtypes.uint8: jnp.uint8, dtypes.uint16: jnp.uint16, dtypes.uint32: jnp.uint32,
    dtypes.uint64: jnp.uint64, dtypes.float16: jnp.float16, dtypes.bfloat16: jnp.bfloat16,
    dtypes.float32: jnp.float32, dtypes.float64: jnp.float64}
OURS = {np.dtype(theirs): ours for ours, theirs in DTYPES.items()}
_lock = threading.RLock()   # tinygrad records and replays one function at a time


def function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A pure function of trees of Tensors as a function of the same trees of JAX's arrays.

    Leaves that are no arrays are constants. Raises `TorchError` for dtypes that one side does not have,
    constants without a hash, and results that are no Tensors."""
    flat: dict[Hashable, _Flat] = {}

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        arrays = [jnp.asarray(each) for each in leaves if _is_array(each)]
        for each in arrays: _ours(each)
        constants = Constants.of(leaves, _is_array)
        try: found = flat.get((tree, constants))
        except TypeError as error:
            raise TorchError(f"an argument that is no array and has no hash: {error}",
                             "arrays, and values that stay as they are", "give it as an array") from error
        if found is None: found = flat[tree, constants] = _Flat(_bind_constants(fn, tree, constants))
        made = found.call(*arrays)
        return jax.tree.unflatten(found.tree_of(arrays), made)
    return call


class _Flat:
    """A function of Tensors, as JAX calls it: of arrays, to a list of arrays."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.tree: Any = None       # of the last capture
        self.trees: dict[Hashable, Any] = {}
        self.step = jit(self._leaves)
        self.known: dict[Hashable, list[jax.ShapeDtypeStruct]] = {}
        self.backwards: dict[Hashable, _Flat] = {}
        self.batched: dict[Hashable, _Flat] = {}
        self.mapped = _with_vmap_rule(self)
        self.call = _differentiable(self)

    def _leaves(self, *given: Tensor) -> list[Tensor]:
        leaves, self.tree = jax.tree.flatten(self.fn(*given), is_leaf=lambda each: isinstance(each, Tensor))
        self.trees[shapes_of(given)] = self.tree
        for each in leaves:
            if not isinstance(each, Tensor):
                raise TorchError(f"a function that returns a {type(each).__name__}",
                                 "Tensors, or a tree of them")
        return [each.cast(OURS[_theirs(each)]) for each in leaves]

    def tree_of(self, arrays: Sequence[jax.Array]) -> Any:
        """The structure of the results for arguments; examples of jax.vmap have the last one."""
        return self.trees.get(tuple((tuple(each.shape), _ours(each)) for each in arrays), self.tree)

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The captured function. Results are Tensors of their own."""
        with _lock: return list(self.step(*tensors))

    def results(self, arrays: Sequence[jax.Array]) -> list[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the results; the first time for these arguments, the function is captured."""
        key = tuple((each.shape, str(each.dtype)) for each in arrays)
        if (found := self.known.get(key)) is None:
            given = [Tensor.zeros(*each.shape, dtype=_ours(each), device="CPU").clone() for each in arrays]
            for _ in range(2): made = self.run(given)   # the first call runs as it is, the second is captured
            found = self.known[key] = [jax.ShapeDtypeStruct(each.shape, _theirs(each)) for each in made]
        return found

    def eager(self, *arrays: jax.Array) -> list[jax.Array]:
        # before the lock is taken: an array may have to wait for a callback that takes it
        given = [from_dlpack(each) for each in arrays]
        return [jnp.from_dlpack(each) for each in self.run(given)]

    def host(self, *arrays: Any) -> list[np.ndarray]:
        """A call from inside of jax.jit."""
        made = self.run([from_dlpack(each) for each in arrays])
        return [exporting.over(each).view(_theirs(each)) for each in made]

    def trace(self, *arrays: jax.Array) -> list[jax.Array]:
        made: list[jax.Array] = jax.pure_callback(self.host, self.results(arrays), *arrays,
                                                  vmap_method="sequential")
        return made

    def backward(self, derived: tuple[bool, ...], given: tuple[bool, ...]) -> _Flat:
        """J^T: of arguments and the gradients of float results, to gradients of float arguments."""
        if (derived, given) not in self.backwards:
            self.backwards[derived, given] = _Flat(pullback(self._leaves, derived, given))
        return self.backwards[derived, given]

    def batch(self, axes: tuple[bool, ...]) -> _Flat:
        """The function of many examples of the arguments in `axes`."""
        if axes not in self.batched:
            fn = vmap(self._leaves, in_axes=tuple(0 if each else None for each in axes))
            self.batched[axes] = _Flat(fn)
        return self.batched[axes]


# **** what JAX asks for ****

def _differentiable(flat: _Flat) -> Callable[..., Any]:
    """The function with derivatives in reverse mode."""
    @jax.custom_vjp
    def call(*arrays: jax.Array) -> list[jax.Array]:
        if any(isinstance(each, jax.core.Tracer) for each in arrays): return list(flat.mapped(*arrays))
        return flat.eager(*arrays)

    def forward(*arrays: jax.Array) -> tuple[list[jax.Array], tuple[jax.Array, ...]]:
        return call(*arrays), arrays

    def backward(arrays: tuple[jax.Array, ...], grads: Sequence[jax.Array]) -> tuple[Any, ...]:
        derived = tuple(map(_is_float, arrays))
        given = tuple(map(_is_float, grads))
        if not any(derived) or not any(given): return (None,) * len(arrays)
        floats = [grad for grad, real in zip(grads, given, strict=True) if real]
        made = iter(flat.backward(derived, given).call(*arrays, *floats))
        return tuple(next(made) if real else None for real in derived)
    call.defvjp(forward, backward)
    return call


def _with_vmap_rule(flat: _Flat) -> Callable[..., Any]:
    """The function with a rule for examples."""
    @jax.custom_batching.custom_vmap
    def call(*arrays: jax.Array) -> list[jax.Array]: return flat.trace(*arrays)

    @call.def_vmap
    def rule(size: int, axes: Sequence[bool], *arrays: jax.Array) -> tuple[list[jax.Array], list[bool]]:
        many = flat.batch(tuple(axes))
        try: made = list(many.mapped(*arrays))
        except TransformError: made = _one_by_one(flat, axes, arrays)
        return made, [True] * len(made)
    return call


def _one_by_one(flat: _Flat, axes: Sequence[bool], arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The function of one example after the other."""
    def one(batched: list[jax.Array]) -> list[jax.Array]:
        rest = iter(batched)
        return flat.trace(*(next(rest) if each else x for x, each in zip(arrays, axes, strict=True)))
    return list(jax.lax.map(one, [x for x, each in zip(arrays, axes, strict=True) if each]))


def _bind_constants(fn: Callable[..., Any], tree: Any, constants: Constants) -> Callable[..., Any]:
    """fn of its arrays alone."""
    def of_arrays(*given: Tensor) -> Any:
        args, kwargs = jax.tree.unflatten(tree, constants.fill(given))
        return fn(*args, **kwargs)
    return of_arrays


def _is_array(x: Any) -> bool: return isinstance(x, jax.Array | np.ndarray)


def _is_float(x: Any) -> bool: return bool(jnp.issubdtype(x.dtype, jnp.floating))


def _ours(x: jax.Array) -> DType:
    """tinygrad's dtype of an array. Raises `TorchError`."""
    if (found := OURS.get(np.dtype(x.dtype))) is not None: return found
    raise TorchError(f"an array of {x.dtype}", "a dtype that tinygrad has", "cast it before the call")


def _theirs(x: Tensor) -> np.dtype:
    """JAX's dtype of a Tensor, as its settings have it. Raises `TorchError`."""
    if (found := DTYPES.get(strong_dtype(x.dtype))) is not None:
        return np.dtype(jax.dtypes.canonicalize_dtype(found))
    raise TorchError(f"a result of {x.dtype}", "a dtype that JAX has", "cast it inside the function")
