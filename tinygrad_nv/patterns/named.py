"""Functions that are known by name: what they compute is said twice, once for kernels and once for tinygrad.

Protocol. `call(what, body, *tensors)` puts a FUNCTION into the graph. `what`, a frozen dataclass, says what
is computed as far as the tensors do not; `body(what, *tensors)` computes it in plain tinygrad: it is the
reference, and what runs wherever no kernel of ours does. `lower(kind, fn)` registers for the type of `what`:

    fn(what, target, *arguments) -> the results, of the shapes and dtypes of the body's; or None

in a rewrite, with arguments rewritten already, where the device has a target and `setting`, if one is given,
is not 0. `Unsupported` or `SpecError` from it is a near miss, None one without a reason. Who is lowered has
no body any more; a body may not call named functions. A kind may be lowered by a function that `sees_uses`:

    fn(what, target, uses, *arguments) -> the values of nodes of the graph, or None

of results that are used, or in a result's place of a node that stands after it (`Uses`).

A gradient, `grad(*gradients, call)` as tinygrad asks of a FUNCTION, finds `what` in `call.arg.aux`, the
arguments in `call.src[1:]` and the results as `call.gettuple(i)`. Results that are not derived have no
gradient.

`behind` is for values that are used again only when a gradient is there. Tinygrad holds equal nodes to be
one, and runs a kernel as soon as its inputs are there: a region that is written down twice is computed once,
and early. `behind(value, gradient)` is a copy of a value that a kernel makes after `gradient`: it reads one
element of it, and would write that, were a flag in memory not 0. What is computed from the copy is other
nodes than the forward pass has, and comes after the gradient; the value itself is free after the copy. A copy
has the bits of its value.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from tinygrad import Tensor, dtypes
from tinygrad.helpers import TRAINING
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv import config, hooks
from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns import building, program
from tinygrad_nv.patterns.contraction import Unsupported
from tinygrad_nv.patterns.rewriting import rebuilt, write_through
from tinygrad_nv.patterns.target import target_of
from tinygrad_nv.runtime.observe import ranges

Users = Mapping[UOp, list[UOp]]
Lower = Callable[..., tuple[UOp, ...] | dict[UOp, UOp] | None]


@dataclass(frozen=True)
class Uses:
    """How a call is used: `after` each result that is, by its number, the nodes that follow, each the only
    user of the one before. `users` are those of every node; `new` gives what takes the place of a node that
    the call is made of."""
    call: UOp
    after: Mapping[int, tuple[UOp, ...]]
    users: Users
    new: Callable[[UOp], UOp]


@dataclass(frozen=True)
class _Lowering:
    name: str
    fn: Lower
    setting: str
    sees_uses: bool


_lowerings: dict[type, _Lowering] = {}


def lower(kind: type, name: str, fn: Lower, setting: str = "", sees_uses: bool = False) -> None:
    """Registers how calls of a kind become kernels; `name` is that under which misses are told."""
    _lowerings[kind] = _Lowering(name, fn, setting, sees_uses)
    hooks.keep_functions(kind)


def call(what: Any, body: Callable[..., tuple[Tensor, ...]], *tensors: Tensor,
         grad: Callable[..., tuple[UOp | None, ...]] | None = None) -> tuple[Tensor, ...]:
    """Calls a named function. Raises what `body` raises of tensors that do not fit each other, `SpecError`
    of tensors of several devices."""
    check_devices(*tensors)
    given = [tensor.uop for tensor in tensors]
    parameters = tuple(one.param_like(i) for i, one in enumerate(given))
    results = _body(what, body, parameters, dtypes.default_float, dtypes.default_int, bool(TRAINING))
    # tinygrad's key of a call knows its name, and nothing of its aux
    made = results.call(*given, grad_fxn=grad, name=repr(what), aux=what)
    given_back = [made.gettuple(i) for i in range(len(results.src))]
    ranges.note_call([made, *given_back], type(what).__name__)
    return tuple(map(Tensor, given_back))


@functools.lru_cache(128)
def _body(what: Any, body: Callable[..., tuple[Tensor, ...]], parameters: tuple[UOp, ...],
          *_: Hashable) -> UOp:
    """The results of a body, and what else it depends on. The same for all layers of a model: to write down
    those of a step over pages again for each of five takes as long as all else of its capture."""
    results = body(what, *map(Tensor, parameters))
    for result in results: result.shape  # noqa: B018  tinygrad finds what does not fit when it is asked for a shape
    return UOp.maketuple(*(result.uop for result in results))


def check_devices(*tensors: Tensor) -> None:
    """Raises `SpecError` for tensors of several devices; constants have none."""
    devices = list(dict.fromkeys(tensor.device for tensor in tensors if tensor.device is not None))
    if len(devices) > 1:
        raise SpecError(f"tensors on {' and '.join(map(str, devices))}", "one device for all",
                        f"move what is elsewhere: .to({devices[0]!r})")


def rewrite(sink: UOp) -> UOp:
    """The graph with kernels, or bodies, for its named functions. The first of the rewrites."""
    nodes = tuple(sink.toposort(enter_calls=False))
    if not any(node.op is Ops.FUNCTION and type(node.arg.aux) in _lowerings for node in nodes): return sink
    users = _users(nodes)
    places: dict[UOp, UOp] = {}
    done: set[UOp] = set()

    def change(node: UOp, new: Callable[[UOp], UOp]) -> UOp | None:
        if node.op is Ops.GETTUPLE and (function := node.src[0]) not in done and function.op is Ops.FUNCTION \
                and type(function.arg.aux) in _lowerings:
            done.add(function)
            made = _lower_call(function, users, new)
            ranges.carry_region(frozenset({function, node}), next(iter(made.values())))
            places.update(made)
        return places.get(node)
    return write_through(rebuilt(nodes, change))


def _users(nodes: tuple[UOp, ...]) -> Users:
    made: dict[UOp, list[UOp]] = {node: [] for node in nodes}
    for node in nodes:
        for one in dict.fromkeys(node.src):
            if one in made: made[one].append(node)
    return made


def _uses(function: UOp, users: Users, new: Callable[[UOp], UOp]) -> Uses:
    after = {}
    for result in users[function]:
        node, found = result, list[UOp]()
        while len(users[node]) == 1: found.append(node := users[node][0])
        after[result.arg] = tuple(found)
    return Uses(function, after, users, new)


def _lower_call(function: UOp, users: Users, new: Callable[[UOp], UOp]) -> dict[UOp, UOp]:
    """Returns what takes the place of a call's results: values of kernels, where there are any, else of its
    body."""
    arguments = tuple(map(new, function.src[1:]))
    what = function.arg.aux
    lowering = _lowerings[type(what)]
    value, target = function.src[0].src[0], target_of(function.device)
    uses = [_uses(function, users, new)] if lowering.sees_uses else []

    def run_lowering() -> tuple[UOp, ...] | dict[UOp, UOp] | None:
        try: return lowering.fn(what, target, *uses, *arguments)
        except SpecError as error: raise Unsupported(f"{error.found}, not {error.expected}") from error
    wanted = not lowering.setting or config.get(lowering.setting)
    try:
        if wanted and target and (made := building.attempt(lowering.name, value, run_lowering)) is not None:
            return made if isinstance(made, dict) else _results(function, made)
    except Unsupported as no: program.miss(lowering.name, value, str(no))
    body = hooks.inline(function.replace(src=(function.src[0], *arguments)))
    assert body is not None
    return _results(function, body.src)


def _results(function: UOp, values: tuple[UOp, ...]) -> dict[UOp, UOp]:
    return {function.gettuple(i): value for i, value in enumerate(values)}


@functools.cache
def _zero(device: str) -> Tensor:
    """0 in memory, int32 (1,), at once: `realize` would become part of a step that is being captured."""
    from tinygrad_nv.runtime.memory import write  # `import tinygrad_nv` loads this file, and no NumPy
    made = Tensor.empty(1, dtype=dtypes.int32, device=device)
    write(made, 0, memoryview(bytes(4)))
    return made


def behind(value: UOp, gradient: UOp) -> UOp:
    """A copy of `value`, of its shape and dtype, after `gradient`, of any. Both on one device."""
    flag = _zero(str(value.device)) != 0
    first = Tensor(gradient).flatten()[:1].cast(value.dtype)
    return flag.where(first, Tensor(value).flatten()).reshape(value.shape).contiguous().uop
