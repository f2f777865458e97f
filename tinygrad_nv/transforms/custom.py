"""Functions with derivatives, or batches, of their own: `custom_vjp`, `custom_jvp` and `custom_vmap`.

Protocol. A call computes the function, and passes each result through an identity function node whose
gradient is the rule. The node has the arguments beside the result, so that the rule is applied to what they
are when a gradient is taken, in whatever transform: there the residuals are computed, from the same
arguments. tinygrad's nodes are unique, so what function and forward rule have in common is computed once.

The gradient of several results is the sum of the rule's for each, with 0 for the others: a rule is linear in
cotangents, as every derivative is. A rule of tangents is linear in them, and its transpose is the gradient.

A rule of batches stands at the same node, and makes the results of all examples from the arguments of all.
"""
from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from tinygrad import Tensor, dtypes
from tinygrad.uop.ops import UOp

from tinygrad_nv.errors import TransformError
from tinygrad_nv.transforms.batching.graph import Given
from tinygrad_nv.transforms.gradients import pull_back
from tinygrad_nv.transforms.tracing import concrete
from tinygrad_nv.transforms.trees import Tree, flatten, same

_numbers = itertools.count(1 << 29)     # of placeholders for tangents
# of arguments, results, and the cotangents of these the gradients of the arguments
Rule = Callable[[list[Tensor], Tree, Tree, list[Tensor]], list[UOp | None]]


class _Custom:
    """A function with a rule; arguments `nondiff_argnums` are not Tensors that are derived."""

    def __init__(self, fn: Callable[..., Any], nondiff_argnums: Sequence[int] = ()) -> None:
        self.fn, self.nondiff = fn, tuple(nondiff_argnums)
        functools.update_wrapper(self, fn, updated=())

    def rule(self, static: list[Any], given: list[Any], cotangents: Any) -> Sequence[Any]:
        """For each of the arguments `given` its gradient, of the same structure, or None."""
        raise NotImplementedError

    def missing(self) -> str | None:
        """The method that was not called."""
        raise NotImplementedError

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (method := self.missing()) is not None:
            raise TransformError(f"{self._name} without a rule", f"a rule before a call: .{method}(…)")
        if kwargs:
            raise TransformError(f"{self._name} with {', '.join(kwargs)} by name", "arguments by position")
        static = [each for i, each in enumerate(args) if i in self.nondiff]
        leaves, tree = flatten([each for i, each in enumerate(args) if i not in self.nondiff])
        leaves = [concrete(each) for each in leaves]
        results, shape = flatten(self.fn(*self._merge(static, tree.fill(leaves))))
        nodes = [each.uop for each in leaves]
        def pass_result(i: int) -> Tensor:
            if not dtypes.is_float(results[i].dtype): return results[i]
            return self._with_rule(i, results, shape, nodes, static, tree)
        return shape.fill([pass_result(i) for i in range(len(results))])

    @property
    def _name(self) -> str: return str(getattr(self.fn, "__name__", self.fn))

    def _merge(self, static: list[Any], given: list[Any]) -> list[Any]:
        """All arguments, in order."""
        rest, kept = iter(given), iter(static)
        return [next(kept) if i in self.nondiff else next(rest) for i in range(len(static) + len(given))]

    def _with_rule(self, index: int, results: list[Tensor], shape: Tree, nodes: list[UOp], static: list[Any],
                tree: Tree) -> Tensor:
        """A result whose gradient is the rule's."""
        result = concrete(results[index])
        others = [(each.shape, each.dtype) for each in results]

        def back(gradient: UOp, call: UOp) -> tuple[UOp | None, ...]:
            given = tree.fill([Tensor(each) for each in call.src[2:]])
            cotangents = [Tensor.zeros(*size, dtype=dtype, device=result.device) for size, dtype in others]
            cotangents[index] = Tensor(gradient)
            found = self.rule(static, given, shape.fill(cotangents))
            return (None, *self._leaves(found, tree, call.src[2:]))
        same_value = UOp.maketuple(result.uop.param_like(0))
        return Tensor(same_value.call(result.uop, *nodes, grad_fxn=back, name=self._name).gettuple(0))

    def _leaves(self, found: Sequence[Any], tree: Tree, given: Sequence[UOp]) -> list[UOp | None]:
        """The gradients of all leaves of the arguments. Raises `TransformError`."""
        if not isinstance(found, tuple | list) or len(found) != len(tree.children):
            count = len(found) if isinstance(found, tuple | list) else f"a {type(found).__name__}"
            raise TransformError(f"the rule of {self._name} returns {count}",
                                 f"a tuple of {len(tree.children)}: a gradient, or None, for each argument")
        made, rest = list[UOp | None](), list(given)
        for each, child in zip(found, tree.children, strict=True):
            own, rest = rest[:child.size], rest[child.size:]
            if each is None: made += [None] * child.size
            else: made += map(self._fits, same(child, each, f"a gradient of {self._name}"), own)
        return made

    def _fits(self, gradient: Tensor, argument: UOp) -> UOp | None:
        if not dtypes.is_float(argument.dtype): return None
        if gradient.shape != argument.shape:
            raise TransformError(f"a gradient of {self._name} of shape {gradient.shape}",
                                 f"{argument.shape}, the argument's")
        return concrete(gradient).uop.cast(argument.dtype)


class custom_vjp(_Custom):
    """A function whose gradient is given: `@custom_vjp`, then `f.defvjp(fwd, bwd)`.

    fwd(*args) returns (result, residuals). bwd(*nondiff, residuals, cotangent) returns a tuple: the gradient
    of each argument, of its structure, or None for 0. Arguments `nondiff_argnums` are no Tensors (an axis, a
    function); fwd gets them in their places, and bwd first. Raises `TransformError`."""

    fwd: Callable[..., Any] | None = None
    bwd: Callable[..., Any] | None = None

    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any]) -> None:
        """Says what the gradient is."""
        self.fwd, self.bwd = fwd, bwd

    def missing(self) -> str | None: return "defvjp" if self.fwd is None else None

    def rule(self, static: list[Any], given: list[Any], cotangents: Any) -> Sequence[Any]:
        assert self.fwd is not None, "__call__ has asked"
        assert self.bwd is not None
        both = self.fwd(*self._merge(static, given))
        if not isinstance(both, tuple) or len(both) != 2:
            raise TransformError(f"the forward rule of {self._name} returns a {type(both).__name__}",
                                 "a pair: the result, and residuals")
        found: Sequence[Any] = self.bwd(*static, both[1], cotangents)
        return found


class custom_jvp(_Custom):
    """A function whose derivative is given: `@custom_jvp`, then `f.defjvp(rule)`.

    rule(*nondiff, primals, tangents) gets two tuples and returns (result, tangent of the result), linear in
    tangents. Raises `TransformError`."""

    tangents: Callable[..., Any] | None = None

    def defjvp(self, rule: Callable[..., Any]) -> None:
        """Says what the derivative is."""
        self.tangents = rule

    def missing(self) -> str | None: return "defjvp" if self.tangents is None else None

    def rule(self, static: list[Any], given: list[Any], cotangents: Any) -> Sequence[Any]:
        assert self.tangents is not None
        leaves, tree = flatten(given)
        marks = [each.uop.param_like(next(_numbers)) for each in leaves]
        moves = tuple(tree.fill([Tensor(each) for each in marks]))
        both = self.tangents(*static, tuple(given), moves)
        if not isinstance(both, tuple) or len(both) != 2:
            raise TransformError(f"the rule of {self._name} returns a {type(both).__name__}",
                                 "a pair: the result, and its tangent")
        outs = [each.uop for each in flatten(both[1])[0]]
        ups = [each.uop for each in flatten(cotangents)[0]]
        pairs = [(y, u) for y, u in zip(outs, ups, strict=True) if dtypes.is_float(y.dtype)]
        back = pull_back([y for y, _ in pairs], [u.cast(y.dtype) for y, u in pairs], marks)
        return list(tree.fill([Tensor(each) for each in back]))


class custom_vmap:
    """A function that says how it is batched: `@custom_vmap`, then `f.defvmap(rule)`.

    rule(n, batched, *args) gives the function's result with n in front of each shape. `batch` has for each
    argument a bool, or a tree of them in its structure: whether n is in front of it. So a kernel, whose nodes
    vmap does not look into, is called once for all examples. Arguments by position; what depends on the
    example must be one of them. Raises `TransformError`."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn, self.rule = fn, None
        functools.update_wrapper(self, fn, updated=())

    rule: Callable[..., Any] | None

    def defvmap(self, rule: Callable[..., Any]) -> None:
        """Says how it is batched."""
        self.rule = rule

    def __call__(self, *args: Any) -> Any:
        if self.rule is None:
            raise TransformError(f"{self.__name__} without a rule", "a rule before a call: .defvmap(…)")
        leaves, tree = flatten(args)
        leaves = [concrete(each) for each in leaves]
        results, shape = flatten(self.fn(*tree.fill(leaves)))
        nodes = [each.uop for each in leaves]
        return shape.fill([self._with_rule(i, concrete(each).uop, nodes, tree, shape)
                             for i, each in enumerate(results)])

    __name__: str

    def _with_rule(self, index: int, result: UOp, nodes: list[UOp], tree: Tree, shape: Tree) -> Tensor:
        """A result that is batched by the rule."""
        def batch(node: UOp, arguments: Sequence[UOp | None], n: int) -> list[UOp]:
            assert self.rule is not None
            pairs = zip(node.src[2:], arguments, strict=True)
            given = tree.fill([Tensor(old if new is None else new) for old, new in pairs])
            whole = self.rule(n, tree.fill([new is not None for new in arguments]), *given)
            made = same(shape, whole, f"the batch of {self.__name__}")[index]
            if made.shape == (n, *result.shape): return [concrete(made).uop.cast(result.dtype)]
            raise TransformError(f"a batch of {self.__name__} of shape {made.shape}", f"{(n, *result.shape)}")
        value = UOp.maketuple(result.param_like(0))
        return Tensor(value.call(result, *nodes, name=self.__name__, aux=Given(batch)).gettuple(0))
