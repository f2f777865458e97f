"""Derivatives of functions of Tensors: `grad`, `value_and_grad`, `vjp`, `jvp`, `jacrev`, `jacfwd`, `hessian`.

Protocol. The function is called once, on inputs of a trace (tracing.py); its graph is derived by tinygrad's
own rules, and those of named functions and of custom.py. Arguments are trees of Tensors (trees.py). What the
function closes over, and arguments that are not asked for, are constants. Results are as lazy as the
function's own.

`jvp` needs no rules of its own: the gradient of <v, J^T u> by u is J v, and J^T u, which reverse mode gives,
is linear in u (J. Townsend, "A new trick for calculating Jacobian vector products", 2017). The node that
stands for u is nowhere in the result.
"""
from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, ClassVar

from tinygrad import Tensor, dtypes
from tinygrad.mixin.gradient import compute_gradient
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv.errors import TransformError
from tinygrad_nv.transforms.tracing import concrete, depends, enter, leave, tracing
from tinygrad_nv.transforms.trees import Tree, flatten, same

_marks = itertools.count(1 << 28)   # of placeholders for u; regions have those from 1 << 24
Fn = Callable[..., Any]


# **** on graphs ****

def pull_back(results: Sequence[UOp], cotangents: Sequence[UOp], inputs: Sequence[UOp]) -> list[UOp]:
    """J^T u: for each input the sum over results, 0 where none depends on it."""
    found: dict[UOp, UOp] = {}
    if results: found = compute_gradient(UOp.maketuple(*results), UOp.maketuple(*cotangents), set(inputs))
    made = [found.get(x) for x in inputs]
    return [zeros(x) if each is None or each.op is Ops.NOOP else each.cast(x.dtype)
            for x, each in zip(inputs, made, strict=True)]


def push_forward(results: Sequence[UOp], inputs: Sequence[UOp], tangents: Sequence[UOp]) -> list[UOp]:
    """J v, by two reverse passes. Raises `TransformError` for a rule of a gradient that is not linear."""
    marks = [result.param_like(next(_marks)) for result in results]
    back = pull_back(results, marks, inputs)
    made = pull_back(back, tangents, marks)
    if any(depends(each, set(marks)) for each in made):
        raise TransformError("the derivative of a gradient that is not linear in what it is given",
                             "jvp of functions whose defvjp is linear in its cotangent")
    return made


def zeros(like: UOp) -> UOp:
    """Zeros of a node's shape and dtype."""
    return like.const_like(0).cast(like.dtype)


# **** of functions ****

class Trace:
    """A function called on inputs: the Tensors of `arguments`, of floats, of all arguments or of those of
    `argnums`."""

    def __init__(self, fn: Fn, args: tuple[Any, ...], kwargs: dict[str, Any], argnums: Sequence[int],
                 what: str, has_aux: bool = False) -> None:
        values = [_floats(args, number, what) for number in argnums]
        self.argnums = [number % len(args) for number in argnums]
        self.trees = [tree for _, tree in values]
        self.inputs = [enter(leaf) for leaves, _ in values for leaf in leaves]
        given = list(args)
        for number, value in zip(self.argnums, self.fill(self.inputs), strict=True): given[number] = value
        with tracing(self.inputs, what): out = fn(*given, **kwargs)
        if has_aux and not (isinstance(out, tuple) and len(out) == 2):
            raise TransformError(f"{what} with has_aux=True of a function that returns {flatten(out)[1]}",
                                 "a pair: the result, and what is passed through")
        self.aux = out[1] if has_aux else None
        results, self.tree = flatten(out[0] if has_aux else out)
        self.results = list(map(concrete, results))
        if not self.results:
            raise TransformError(f"{what} of a function that returns {self.tree}", "Tensors")

    def fill(self, leaves: Sequence[Any]) -> list[Any]:
        """A value for each argument, of leaves of all."""
        made, rest = [], list(leaves)
        for tree in self.trees:
            made.append(tree.fill(rest[:tree.size]))
            rest = rest[tree.size:]
        return made

    def leave(self, nodes: Sequence[UOp]) -> list[Tensor]:
        """Tensors of nodes of the trace."""
        return [Tensor(node) for node in leave(nodes, self.inputs)]

    def values(self) -> tuple[Any, Any]:
        """The function's result, and what is passed through."""
        more, tree = flatten(self.aux)
        made = self.leave([each.uop for each in (*self.results, *more)])
        return self.tree.fill(made[:len(self.results)]), tree.fill(made[len(self.results):])

    def pull(self, cotangents: Sequence[UOp | None]) -> list[Tensor]:
        """J^T u for each input; None for results that are not derived."""
        pairs = [(each.uop, u) for each, u in zip(self.results, cotangents, strict=True) if u is not None]
        back = pull_back([y for y, _ in pairs], [u for _, u in pairs], [x.uop for x in self.inputs])
        return self.leave(back)


def _floats(args: tuple[Any, ...], number: int, what: str) -> tuple[list[Tensor], Tree]:
    """An argument that is derived by. Raises `TransformError`."""
    if not -len(args) <= number < len(args):
        raise TransformError(f"{what} by argument {number} of {len(args)}", "the number of an argument")
    leaves, tree = flatten(args[number])
    wrong = next((leaf.dtype for leaf in leaves if not dtypes.is_float(leaf.dtype)), None)
    if wrong is None: return leaves, tree
    raise TransformError(f"{what} by argument {number}, which has a Tensor of {wrong}", "floats",
                         "leave the argument out of argnums, or cast it")


def value_and_grad(fn: Fn, argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Fn:
    """A function of the same arguments that returns (fn's result, its gradient).

    The result must be one float Tensor of one element and no dimension. The gradient has the structure of
    argument `argnums`, or is a tuple of such for several. With `has_aux` fn returns (result, aux), and the
    value is that pair. Raises `TransformError`."""
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        trace = Trace(fn, args, kwargs, numbers, "grad", has_aux)
        loss = trace.results[0]
        if len(trace.results) != 1 or loss.shape != () or not dtypes.is_float(loss.dtype):
            shown = ", ".join(f"{each.dtype} {each.shape}" for each in trace.results)
            raise TransformError(f"grad of a function that returns {shown}", "one float of shape ()",
                                 "sum() or mean() the result, or use vjp")
        found = trace.fill(trace.pull([loss.uop.const_like(1).cast(loss.dtype)]))
        value, aux = trace.values()
        return (value, aux) if has_aux else value, found[0] if isinstance(argnums, int) else tuple(found)
    return call


def grad(fn: Fn, argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Fn:
    """`value_and_grad` without the value; with `has_aux` (gradient, aux)."""
    both = value_and_grad(fn, argnums, has_aux)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        value, found = both(*args, **kwargs)
        return (found, value[1]) if has_aux else found
    return call


def vjp(fn: Fn, *primals: Any, has_aux: bool = False) -> tuple[Any, ...]:
    """(fn(*primals), pull), or with `has_aux` (result, pull, aux). `pull(cotangents)`, of the structure of
    the result, is a tuple: J^T cotangents for each primal. It may be called many times. Raises
    `TransformError`."""
    trace = Trace(fn, primals, {}, range(len(primals)), "vjp", has_aux)

    def pull(cotangents: Any) -> tuple[Any, ...]:
        given = _fitting(trace.results, trace.tree, cotangents, "a cotangent")
        floats = [each if dtypes.is_float(each.dtype) else None for each in given]
        return tuple(trace.fill(trace.pull(floats)))
    value, aux = trace.values()
    return (value, pull, aux) if has_aux else (value, pull)


def jvp(fn: Fn, primals: Sequence[Any], tangents: Sequence[Any], has_aux: bool = False) -> tuple[Any, ...]:
    """(fn(*primals), J tangents), or with `has_aux` (result, J tangents, aux). Tangents have the structure of
    the primals. Results that are no floats have tangents of 0. Raises `TransformError`."""
    if len(primals) != len(tangents):
        raise TransformError(f"jvp with {len(primals)} primals and {len(tangents)} tangents", "as many")
    trace = Trace(fn, tuple(primals), {}, range(len(primals)), "jvp", has_aux)
    leaves, tree = flatten(tuple(primals))
    given = _fitting(leaves, tree, tuple(tangents), "a tangent")
    floats = [each.uop for each in trace.results if dtypes.is_float(each.dtype)]
    made = iter(push_forward(floats, [each.uop for each in trace.inputs], given))
    out = [next(made) if dtypes.is_float(each.dtype) else zeros(each.uop) for each in trace.results]
    value, aux = trace.values()
    pushed = trace.tree.fill(trace.leave(out))
    return (value, pushed, aux) if has_aux else (value, pushed)


def _fitting(leaves: Sequence[Tensor], tree: Tree, given: Any, what: str) -> list[UOp]:
    """The nodes of a value of the same structure, shapes and dtypes. Raises `TransformError`."""
    found = same(tree, given, what)
    for leaf, each in zip(leaves, found, strict=True):
        if leaf.shape != each.shape: raise TransformError(f"{what} of shape {each.shape}", f"{leaf.shape}")
    return [concrete(each).cast(leaf.dtype).uop if dtypes.is_float(leaf.dtype) else each.uop
            for leaf, each in zip(leaves, found, strict=True)]


class autodiff:
    """A function with `grad`, `value_and_grad`, `vjp` and `jvp`: `@autodiff`, or `@autodiff(argnums=1,
    has_aux=True)`.

    `f.grad(*args)` is `grad(f)(*args)`, by the arguments `argnums`; with `has_aux` f returns (loss, aux).
    `f.vjp(*args)` and `f.jvp(primals, tangents)` are `vjp(f, *args)` and `jvp(f, primals, tangents)`. Under
    `jit` they are captured as well, but `vjp`, which returns a function."""

    # whether `jit` makes a capture of it
    transforms: ClassVar = {"grad": True, "value_and_grad": True, "jvp": True, "vjp": False}

    def __init__(self, fn: Callable[..., Any], argnums: int | Sequence[int] = 0,
                 has_aux: bool = False) -> None:
        self.fn = fn
        self.grad = grad(fn, argnums, has_aux)
        self.value_and_grad = value_and_grad(fn, argnums, has_aux)
        self.vjp = functools.partial(vjp, fn)
        self.jvp = functools.partial(jvp, fn)
        functools.update_wrapper(self, fn, updated=())

    def __new__(cls, fn: Callable[..., Any] | None = None, argnums: int | Sequence[int] = 0,
                has_aux: bool = False) -> Any:
        """The function; without one, what takes it."""
        if fn is None: return functools.partial(cls, argnums=argnums, has_aux=has_aux)
        return super().__new__(cls)

    def __call__(self, *args: Any, **kwargs: Any) -> Any: return self.fn(*args, **kwargs)

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return self if owner is None else MethodType(self, owner)
