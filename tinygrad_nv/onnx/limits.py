"""Limits of a model: nodes, iterations, bytes of one tensor.

Protocol: `check_size(proto)` counts the nodes of a message before anything reads it, those of its functions
as often as they are called. While a call's graph is built, `budget()` is the call's `Budget`: it counts the
nodes that are evaluated, those of loops each time, and compares the bytes of each result with what the
model and its inputs have. What goes beyond a limit is an `OnnxError`.
"""
from __future__ import annotations

import contextlib
import math
import re
import resource
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from tinygrad import Tensor

from tinygrad_nv import config
from tinygrad_nv.errors import OnnxError
from tinygrad_nv.onnx.cuts import Cuts
from tinygrad_nv.onnx.elements import Narrow, Value

FILE_BYTES = (1 << 31) - 1  # limit: bytes of an ONNX file, as protobuf has it; weights may be external data
HELD = 1 << 28              # bytes of constants from which on the free memory is looked at
OPERANDS = 8                # of a node that counts as one; Sum, Concat and Split may have any number
CALL_DEPTH = 64             # limit: functions of an ONNX model that call each other, one inside the other
# limit: iterations of loops of an ONNX model, in one call, that end by a value that they compute, where
# their number of trips goes beyond NV_ONNX_NODES
WHILE_ITERATIONS = 8192
# limit: how many times the bytes of weights and inputs one result of an ONNX node may have, where that is
# more than NV_ONNX_GIB; half of the free memory, if the square of these bytes is as much
GROWTH = 64
TEXT = 1 << 26              # limit: characters of one result of an ONNX node, of all its strings
WORDS = 200                 # characters of a name or a message of a file that an error shows
NODES_FIX = "set NV_ONNX_NODES to a larger number if the model is trusted"
BYTES_FIX = "set NV_ONNX_GIB to a larger number if the model is trusted"


def shorten(text: str) -> str:
    """The beginning of a text of a file."""
    return text if len(text) <= WORDS else f"{text[:WORDS]}… ({len(text)} characters)"


def free_memory() -> int:
    """Bytes that this process may still take: what the system has, and what limits of the process allow."""
    free = 1 << 62
    with contextlib.suppress(OSError, ValueError):      # not on macOS
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        if found: free = int(found[1]) << 10
        most, now = (int(Path(f"/sys/fs/cgroup/memory.{each}").read_text()) for each in ("max", "current"))
        free = min(free, max(most - now, 0))
    if (most := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:
        with contextlib.suppress(OSError, ValueError):
            now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            free = min(free, max(most - now, 0))
    return free


def most_nodes() -> int:
    """NV_ONNX_NODES."""
    return int(config.get("NV_ONNX_NODES"))


# **** of a file ****

def require_text(what: str, *names: object) -> None:
    """Raises `OnnxError` for a name that is not UTF-8, which protobuf gives as bytes."""
    for each in names:
        if not isinstance(each, str):
            raise OnnxError(f"{what} has a name of bytes that are not UTF-8: {shorten(repr(each))}", "text",
                            "export the model again")


Key = tuple[str, str, str]      # of a function: domain, name, overload


def check_size(proto: onnx.ModelProto) -> None:
    """Raises `OnnxError` for more nodes than NV_ONNX_NODES, counted with functions inlined, and for functions
    that call themselves."""
    most, functions = most_nodes(), dict[Key, onnx.FunctionProto]()
    for what, there in (("functions", proto.functions), ("initializers", proto.graph.initializer),
                        ("sparse initializers", proto.graph.sparse_initializer),
                        ("inputs", proto.graph.input), ("outputs", proto.graph.output),
                        ("types of values", proto.graph.value_info)):
        if len(there) > most: raise _too_many(f"{len(there)} {what}", most)
    for each in proto.functions:
        require_text("a function", each.domain, each.name, each.overload, *each.input, *each.output)
        key = _key(each.domain, each.name, each.overload)
        if key in functions: raise OnnxError(f"two functions {_name_of(key)}", "one of each name",
                                             "remove one")
        functions[key] = each
    sizes: dict[Key, int] = {}
    for key in functions: _count_inlined(key, functions, sizes, (), most)
    own, calls = _contents(proto.graph.node, functions, most)
    _require_few("the model", own + sum(count * sizes[key] for key, count in calls.items()), most)


def _count_inlined(key: Key, functions: dict[Key, onnx.FunctionProto], sizes: dict[Key, int],
             above: tuple[Key, ...], most: int) -> int:
    """Nodes of a function, with those that it calls in their places."""
    if key in sizes: return sizes[key]
    if key in above or len(above) == CALL_DEPTH:
        found = f"the function {_name_of(key)} calls itself" if key in above else \
            f"functions that call each other {CALL_DEPTH + 1} deep, down to {_name_of(key)}"
        raise OnnxError(found, f"calls that end, {CALL_DEPTH} inside each other at most",
                        "export the model without these functions")
    own, calls = _contents(functions[key].node, functions, most)
    sizes[key] = own + sum(count * _count_inlined(each, functions, sizes, (*above, key), most)
                           for each, count in calls.items())
    _require_few(f"the function {_name_of(key)}", sizes[key], most)
    return sizes[key]


def _contents(nodes: Iterable[onnx.NodeProto], functions: dict[Key, onnx.FunctionProto],
              most: int) -> tuple[int, Counter[Key]]:
    """How many nodes a graph has, those of its nodes' graphs among them, and how often it calls which
    function."""
    count, calls, open_ = 0, Counter[Key](), [nodes]
    while open_:
        for node in open_.pop():
            # a node of many operands is a chain of as many
            count += 1 + (len(node.input) + len(node.output)) // OPERANDS
            if count > most: raise _too_many(f"more than {most} nodes", most)
            require_text("a node", node.domain, node.op_type, node.overload, node.name, *node.input,
                         *node.output, *(each.name for each in node.attribute))
            if functions and (key := _key(node.domain, node.op_type, node.overload)) in functions:
                calls[key] += 1
            for each in node.attribute:
                if each.type == onnx.AttributeProto.GRAPH: open_.append(each.g.node)
                elif each.type == onnx.AttributeProto.GRAPHS: open_ += [one.node for one in each.graphs]
    return count, calls


def _key(domain: str, name: str, overload: str) -> Key:
    return "" if domain == "ai.onnx" else domain, name, overload


def _name_of(key: Key) -> str: return shorten(repr(".".join(filter(None, key))))


def _require_few(what: str, count: int, most: int) -> None:
    if count <= most: return
    shown = count if count < 10**18 else "more than 10¹⁸"
    raise _too_many(f"{what} has {shown} nodes with functions inlined", most)


def _too_many(found: str, most: int) -> OnnxError: return OnnxError(found, f"{most} at most", NODES_FIX)


# **** of a call ****

@dataclass
class Budget:
    """Nodes, iterations and bytes that one call may still evaluate. `given` are the bytes of weights and
    inputs, `kernels` cuts long expressions."""
    given: int = 0
    dense: int = 0
    spent: int = 0
    iterations: int = 0
    kernels: Cuts = field(default_factory=Cuts)

    def spend(self, nodes: int) -> None:
        """Counts nodes that are evaluated."""
        self.spent += nodes
        if self.spent > (most := most_nodes()):
            raise _too_many(f"more than {most} nodes are evaluated in one call, those of loops in each "
                            "iteration", most)

    def expect(self, steps: int | None, nodes: int) -> None:
        """Raises where so many steps (None: without an end) of so many nodes go beyond what is left."""
        most = most_nodes()
        if steps is not None and steps * max(nodes, 1) <= most - self.spent: return
        found = "a loop without an end" if steps is None else f"{steps} iterations of {nodes} steps"
        raise _too_many(f"{found}, after {self.spent} evaluated nodes", most)

    def fits(self, steps: int | None, nodes: int) -> bool:
        """Whether so many steps are within what is left."""
        return steps is not None and steps * nodes <= most_nodes() - self.spent

    def iterate(self) -> None:
        """Counts an iteration of a loop whose end nothing but its values tells."""
        self.iterations += 1
        if self.iterations > WHILE_ITERATIONS:
            raise OnnxError(f"a loop whose condition is true after {WHILE_ITERATIONS} iterations",
                            f"an end by then, or a number of trips that fits {most_nodes()} evaluated nodes",
                            f"give the loop its number of trips; {NODES_FIX}")

    def check_bytes(self, shape: Sequence[Any], itemsize: int) -> None:
        """Raises for a result of this shape that is larger than what was given explains."""
        if not all(isinstance(n, int | np.integer) for n in shape): return
        # a size of 0 hides the others
        nbytes = math.prod(int(n) for n in shape) * itemsize
        if nbytes <= self.least_bytes() or nbytes <= (most := self.most_bytes()): return
        raise OnnxError(f"a result of shape {shorten(str(tuple(map(int, shape))))}, of {nbytes} bytes",
                        f"{most} bytes for {self.given} bytes of weights and inputs", BYTES_FIX)

    def least_bytes(self) -> int:
        """Bytes that one result may have whatever memory is free."""
        return max(int(config.get("NV_ONNX_GIB")) << 30, GROWTH * self.given)

    def most_bytes(self) -> int:
        """Bytes that one result may have: of pairs of what was given, half of the free memory."""
        return max(self.least_bytes(), min(self.given ** 2, free_memory() // 2))

    def check_total(self, made: Sequence[Value]) -> None:
        """Raises for results of a call that are together larger than one may be, and than half of the free
        memory."""
        if (total := bytes_of(made)) <= self.least_bytes(): return
        if total > (most := max(self.least_bytes(), free_memory() // 2)):
            raise OnnxError(f"{len(made)} results of {total} bytes together", f"{most} bytes", BYTES_FIX)

    def hold(self, nbytes: int) -> None:
        """Counts bytes of constants that are read from files. Raises for more than the free memory."""
        self.given += nbytes
        if self.given > HELD and self.given > (free := free_memory()):
            raise OnnxError(f"constants of {self.given} bytes", f"{free} bytes, as this machine has free",
                            "run the model where there is more memory")

    def spread(self, values: int, shape: Sequence[int], itemsize: int) -> None:
        """Counts the bytes of a sparse constant with its zeros. Raises for more of all than of one result."""
        self.given += values
        self.dense += math.prod(shape) * itemsize
        self.check_bytes((self.dense,), 1)

    def check(self, made: Sequence[Value]) -> None:
        """`check_bytes` of the outputs of a node."""
        for each in made:
            x = each.tensor if isinstance(each, Narrow) else each
            if isinstance(x, Tensor): self.check_bytes(x.shape, x.dtype.itemsize)
            elif isinstance(x, np.ndarray) and x.dtype == object: _check_text(x)


def _check_text(x: np.ndarray) -> None:
    if (count := sum(len(each) for each in x.reshape(-1) if isinstance(each, str))) > TEXT:
        raise OnnxError(f"strings of {count} characters", f"{TEXT} at most", "export the model again")


_current: ContextVar[Budget | None] = ContextVar("onnx_budget", default=None)


def budget() -> Budget:
    """The budget of the call whose graph this thread builds, or one of an operator alone."""
    return _current.get() or Budget()


@contextmanager
def limit_call(given: int) -> Iterator[None]:
    """Sets, within, the budget of a call that was given so many bytes."""
    token = _current.set(Budget(given))
    try: yield
    finally: _current.reset(token)


def bytes_of(values: Iterable[Value]) -> int:
    """Bytes of constants or inputs."""
    total = 0
    for each in values:
        x = each.tensor if isinstance(each, Narrow) else each
        if isinstance(x, list): total += bytes_of(x)
        elif isinstance(x, np.ndarray): total += x.nbytes
        elif isinstance(x, Tensor) and all(isinstance(n, int) for n in x.shape):
            total += math.prod(int(n) for n in x.shape) * x.dtype.itemsize
    return total
