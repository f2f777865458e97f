"""A step as graphs of the device, one for each size of a batch.

Protocol. `GraphPool(step, inputs, sizes)` calls like the step, with any number of rows up to the largest
size: `pool(tokens=…, tables=…, lengths=…)`. Rows are rounded up to a size; the rows that fill up hold each
input's `pad`, by which the step must mask them. A call is one upload of small inputs and one launch of a
graph in stream 0, and returns before the device has run it.

 * What a call returns are the first rows of the outputs' region, which every call of the pool writes: as with
   TinyJit, they are valid until the next call. Reading them (`.numpy()`) waits for the device.
 * Bound Variables may be arguments too. Their values are parameters of kernels, so a call that changes them
   updates the nodes they reach before it launches; without Variables no call updates anything.
 * All sizes share one arena for intermediates: no graph carries anything there from one launch to the next.
   An arena that grows means other addresses, so graphs over the old one are instantiated again when they are
   next used; nothing is compiled again.
 * Beyond `limit_bytes` of graphs, arena and outputs the graphs least recently used go. They too come back
   without compilation.
 * One call at a time: threads take turns.
 * A step that cannot be one graph still runs, launch by launch or as it is written, and `stats()` says why.
 * After an exception, also Ctrl-C, pool and state can be used. What the interrupted step had written of its
   state may be there or not.
"""
from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from tinygrad import Device, Tensor, UOp
from tinygrad.device import Buffer
from tinygrad.dtype import DType
from tinygrad.engine import realize
from tinygrad.engine.jit import JitError
from tinygrad.uop.ops import buffers

from tinygrad_nv.errors import GraphError
from tinygrad_nv.graphs.bucket import Arena, Bucket
from tinygrad_nv.graphs.capture import Collected, Returned, collect, rebuilt, restoring, run
from tinygrad_nv.graphs.inputs import LABEL, Feed, Input
from tinygrad_nv.graphs.progress import progress
from tinygrad_nv.graphs.stats import PoolStats
from tinygrad_nv.runtime.device import NVDevice
from tinygrad_nv.runtime.observe.memory_report import human

SIZES = (1, 2, 4, 8, 16, 32, 64)
RETRY = 16      # eager calls after which a size that found no memory is tried again; then twice as many, …
KEEPS = ("the step keeps a Tensor that it makes of its inputs, or makes and then changes, which a "
         "replay would not bind again")


class GraphPool:
    """`step(**inputs)` as graphs for batches of `sizes` rows. Each input is a Tensor whose first dimension
    is the batch; the step returns a Tensor, or a tuple, list or dict of them, of as many rows. `limit_bytes`
    bounds graphs, arena and outputs; `staging` is how many steps' inputs may be on their way at once."""

    def __init__(self, step: Callable[..., Returned], inputs: Mapping[str, Input],
                 sizes: Sequence[int] = SIZES, device: str | None = None, limit_bytes: int | None = None,
                 staging: int = 2) -> None:
        self.step, self.inputs = step, dict(inputs)
        self.sizes = _checked(self.inputs, sizes, limit_bytes, staging)
        self.device = Device.canonicalize(device)
        self.limit_bytes = limit_bytes
        self.feed = Feed(self.device, self.inputs, self.sizes, staging)
        self.arena = Arena(self.device)
        self.buckets = {size: Bucket(size, self.device) for size in self.sizes}
        self._size_of = [min(size for size in self.sizes if size >= rows)
                         for rows in range(self.sizes[-1] + 1)]
        self._expected = [(name, given, given.numpy_dtype(), given.shape) for name, given in inputs.items()]
        self._variables: frozenset[str] | None = None
        self._collected: Collected | None = None
        self._calls = 0
        self._working = self._unsettled = False
        self._let_go = _reclaims(self)

    # **** calls ****

    def __call__(self, **given: np.ndarray | Tensor | UOp) -> Returned:
        """One step on the rows given: arrays, or Tensors of this device, one for each input, and bound
        Variables by any name. Returns what the step returns, of as many rows, valid until the next call.
        Raises `GraphError`."""
        rows, values, variables = self._understood(given)
        bucket = self.buckets[self._size_of[rows]]
        bucket.check_state()
        with self._at_work(bucket):
            self.feed.put(bucket.size, rows, values)
            returned = self._served(bucket, rows, variables)
        bucket.counts.rows += rows
        bucket.counts.padding += bucket.size - rows
        return returned

    @contextmanager
    def _at_work(self, bucket: Bucket) -> Iterator[None]:
        if self._working:
            raise GraphError("a GraphPool is called in the middle of its own call", "one call at a time",
                             "take turns with a lock, or use a pool for each thread; a step calls no pool")
        if self._unsettled: self.feed.settle()
        try:
            self._working = self._unsettled = True
            self._settle_kept()
            yield
        except BaseException:
            bucket.drop()  # nobody knows which of its nodes were updated
            raise
        finally: self._working = False
        self._unsettled = False

    def _served(self, bucket: Bucket, rows: int, variables: dict[str, UOp]) -> Returned:
        self._calls += 1
        bucket.used = self._calls
        if bucket.stale(): bucket.drop()
        if bucket.replay is not None: bucket.counts.hits += 1
        elif ((not bucket.given_up or bucket.counts.eager >= bucket.again)
              and (outputs := self._prepared(bucket, variables)) is not None):
            return rebuilt(bucket.shape, _first(outputs, rows))
        if bucket.replay is None: return self._eager(bucket, rows, variables)
        if bucket.recipe and bucket.recipe.obstacle:
            bucket.counts.eager += 1
            bucket.counts.because(bucket.recipe.obstacle)
        bucket.launch({v.expr: value for v, value in map(UOp.unbind, variables.values())})
        return rebuilt(bucket.shape, bucket.results(rows))

    def _eager(self, bucket: Bucket, rows: int, variables: dict[str, UOp]) -> Returned:
        """The step as it is written, on the same inputs."""
        bucket.counts.eager += 1
        bucket.counts.because(bucket.given_up)
        inputs = self.feed.tensors(bucket.size)
        with restoring():
            returned, results = run(self.step, bucket.size, inputs, variables, self.device, set(buffers))
        return rebuilt(returned, _first([tensor for _, tensor in results], rows))

    # **** graphs ****

    def capture(self, sizes: Sequence[int] | None = None, **variables: UOp) -> None:
        """Makes the graphs of these sizes, all by default, the largest first, without running them. Shows
        progress and memory on a terminal. A step with Variables needs some values of them. A size that was
        given up is tried again."""
        wanted = sorted(self.sizes if sizes is None else set(sizes), reverse=True)
        if unknown := [size for size in wanted if size not in self.buckets]:
            raise GraphError(f"no size {unknown[0]}", f"of {_listed(self.sizes)}")
        self._check_variables(variables)
        with progress(wanted, self._held) as done:
            for size in wanted:
                bucket = self.buckets[size]
                bucket.check_state()
                bucket.given_up = ""
                if bucket.replay is None:
                    with self._at_work(bucket):
                        self.feed.put(size, 0, ())  # a step that has to run has all rows masked
                        ran = self._prepared(bucket, variables) is not None
                        if ran and bucket.again < math.inf: self._prepared(bucket, variables)
                done(size)

    def reset(self) -> None:
        """Forgets what was captured, and gives back graphs, arena and outputs; inputs stay."""
        for bucket in self.buckets.values():
            bucket.drop()
            bucket.recipe, bucket.given_up = None, ""
        self.arena.resize(0, 0)
        self._variables = None

    def close(self) -> None:
        """Gives back everything. The pool cannot be called afterwards."""
        self.reset()
        self._let_go()
        self.feed.free()

    def stats(self) -> PoolStats:
        """What happened, and what is held now."""
        return PoolStats(self.device, tuple(self.buckets[size].stats() for size in self.sizes),
                         self.arena.nbytes, self.feed.nbytes, self.arena.output_bytes,
                         self.feed.staging_bytes, self.limit_bytes)

    def _prepared(self, bucket: Bucket, variables: dict[str, UOp]) -> list[Tensor] | None:
        """Brings a graph about, or the reason why there is none; the results, if the step has run."""
        bucket.again = math.inf
        for _ in range(2):
            try:
                if bucket.recipe is None and (outputs := self._captured(bucket, variables)) is not None:
                    return outputs
                bucket.given_up = self._built(bucket)
                return None
            except JitError as error:
                bucket.given_up = f"the step cannot be captured: {error}"
                return None
            except MemoryError as error: bucket.given_up = f"out of memory: {str(error).splitlines()[0]}"
            self._evict_all()  # here, where the error no longer holds what was half made
        bucket.again = 2 * bucket.counts.eager + RETRY
        return None

    def _captured(self, bucket: Bucket, variables: dict[str, UOp]) -> list[Tensor] | None:
        """Records and compiles the step; its results, if it had to run."""
        self._settle_kept()
        begun = time.perf_counter()
        inputs = self.feed.tensors(bucket.size)
        collected, returned = collect(self.step, bucket.size, inputs, variables, self.device)
        bucket.shape = returned
        bucket.counts.captures += 1
        self._variables = frozenset(variables)  # with others the step is another one
        self._collected = collected
        kept = collected.left_behind()
        self._collected = None
        if kept:
            bucket.counts.because(KEEPS)
            bucket.counts.eager += 1
            # what a step makes when it first runs is there the second time
            if bucket.given_up != KEEPS: bucket.again = bucket.counts.eager
            bucket.given_up = KEEPS
            collected.run()
            return [tensor for _, tensor in collected.results]
        bucket.recipe = collected.recipe()
        bucket.counts.capture_s += time.perf_counter() - begun
        return None

    def _settle_kept(self) -> None:
        """Computes what a step kept, where an exception came in between: it is state by now."""
        if self._collected is not None: self._collected.left_behind()
        self._collected = None

    # **** memory ****

    def _built(self, bucket: Bucket) -> str:
        """Instantiates a graph within the limit; why not, if that cannot be."""
        while not (reason := self._fitted(bucket)):
            if bucket.replay is not None: return ""
            bucket.build(self.arena)
        bucket.drop()
        return reason

    def _fitted(self, bucket: Bucket) -> str:
        """Evicts others and changes the arena until a bucket, as large as it was last, is within the limit;
        why that cannot be, if so."""
        recipe = bucket.recipe
        assert recipe is not None
        alone = recipe.arena_bytes + recipe.output_bytes + bucket.graph_bytes
        if self.limit_bytes is not None and alone > self.limit_bytes:
            return (f"{human(alone)} are needed for arena, outputs and graph, and the pool's limit is "
                    f"{human(self.limit_bytes)}")
        arena = max(self.arena.nbytes, recipe.arena_bytes)
        outputs = max(self.arena.output_bytes, recipe.output_bytes)
        while self.limit_bytes is not None:
            built = [each for each in self.buckets.values() if each.replay is not None and each is not bucket]
            graphs = bucket.graph_bytes + sum(each.graph_bytes for each in built)
            if arena + outputs + graphs <= self.limit_bytes: break
            if not built:
                arena, outputs = recipe.arena_bytes, recipe.output_bytes
                break
            _evict(min(built, key=lambda each: each.used))
        if (arena, outputs) != (self.arena.nbytes, self.arena.output_bytes):
            for each in self.buckets.values(): each.drop()  # built anew when they are next used
            self.arena.resize(arena, outputs)
        return ""

    def _held(self) -> int:
        """Bytes that the limit is for."""
        graphs = sum(each.graph_bytes for each in self.buckets.values() if each.replay is not None)
        return self.arena.nbytes + self.arena.output_bytes + graphs

    def _evict_all(self) -> None:
        for bucket in self.buckets.values(): _evict(bucket)
        self.arena.resize(0, 0)

    def _reclaim(self, _: int) -> None:
        """Somebody needs memory: all of it comes back when it is next used."""
        if not self._working: self._evict_all()

    # **** what is given ****

    def _understood(self, given: dict[str, Any]) -> tuple[int, list[np.ndarray | Buffer], dict[str, UOp]]:
        """Rows, values in the order of the inputs, and bound Variables. Raises `GraphError`."""
        if realize.capturing:
            raise GraphError("a GraphPool is called while a step is captured", "a call outside TinyJit",
                             "take the TinyJit off: the pool is a graph by itself")
        if not self.feed.usable: raise GraphError("a GraphPool is called after close()", "an open pool")
        rows, values = -1, list[np.ndarray | Buffer]()
        for name, spec, dtype, shape in self._expected:
            value = given.pop(name, None)
            if isinstance(value, np.ndarray):
                if value.dtype != dtype or value.shape[1:] != shape or not value.ndim:
                    raise _wrong(name, spec, value.shape, str(value.dtype))
                count = value.shape[0]
                values.append(value)
            elif isinstance(value, Tensor):
                values.append(self._on_device(name, spec, value))
                count = int(value.shape[0])
            elif value is None: raise GraphError(f"input {name!r} is missing", f"{_listed(self.inputs)}")
            else: raise _wrong(name, spec, (), type(value).__name__)
            if rows not in (-1, count):
                raise GraphError(f"input {name!r} has {count} rows, {self._expected[0][0]!r} has {rows}",
                                 "as many rows in every input")
            rows = count
        if given or self._variables: self._check_variables(given)
        if not 0 < rows <= self.sizes[-1]:
            raise GraphError(f"a batch of {rows} rows", f"1 to {self.sizes[-1]}: sizes {_listed(self.sizes)}",
                             "split the batch, or make the pool with a larger size" if rows else "")
        return rows, values, given

    def _check_variables(self, variables: dict[str, Any]) -> None:
        for name, value in variables.items():
            if isinstance(value, UOp) and value.is_bound_var: continue
            if name in self.inputs: raise GraphError(f"input {name!r} for a capture", "Variables alone")
            raise GraphError(f"there is no input {name!r}",
                             f"{_listed(self.inputs)}, and bound Variables by other names")
        names = frozenset(variables)
        if self._variables is not None and names != self._variables:
            raise GraphError(f"Variables {_listed(sorted(names))}",
                             f"{_listed(sorted(self._variables))}, as before",
                             "give all of them in every call")

    def _on_device(self, name: str, given: Input, tensor: Tensor) -> Buffer:
        """The memory of a Tensor's rows, which are computed if they are not yet."""
        shape = tuple(tensor.shape)
        known = bool(shape) and isinstance(shape[0], int)
        if not known or shape[1:] != given.shape or tensor.dtype != given.dtype:
            raise _wrong(name, given, shape, _called(tensor.dtype))
        if tensor.device != self.device:
            raise GraphError(f"input {name!r} is on {tensor.device}",
                             f"an array, or a Tensor on {self.device}", f".to({self.device!r})")
        if not tensor.uop.has_buffer_identity() or not tensor.uop.is_realized:
            tensor = tensor.contiguous().realize()
        buffer = tensor.uop.buffer
        assert isinstance(buffer, Buffer)
        return buffer.ensure_allocated()


def _checked(inputs: Mapping[str, Input], sizes: Sequence[int], limit_bytes: int | None,
             staging: int) -> tuple[int, ...]:
    """The sizes in order. Raises `GraphError` for what no pool can have."""
    if not inputs: raise GraphError("a pool without inputs", "at least one Input")
    for name, given in inputs.items(): given.check(name)
    listed = list(sizes) if isinstance(sizes, Sequence) else []
    if not listed or any(type(size) is not int or size < 1 for size in listed):
        raise GraphError(f"sizes {_listed(listed) if isinstance(sizes, Sequence) else sizes}",
                         "a list of Python's integers, at least one, each 1 or more")
    if limit_bytes is not None and limit_bytes < 1:
        raise GraphError(f"a limit of {limit_bytes} bytes", "1 or more")
    if staging < 2: raise GraphError(f"{staging} pieces of page-locked memory", "2 or more")
    return tuple(sorted(set(sizes)))


def _wrong(name: str, given: Input, shape: tuple[Any, ...], kind: str) -> GraphError:
    what = "a Tensor (numpy has no such type)" if given.numpy_dtype() is None else "an array or a Tensor"
    return GraphError(f"input {name!r} has shape {shape} and is {kind}",
                      f"{what}, rows of shape {given.shape} and {_called(given.dtype)}")


def _called(dtype: DType) -> str:
    """numpy's name, of what numpy has: tinygrad writes dtypes.float for float32."""
    return str(Input((), dtype).numpy_dtype() or dtype)


def _first(outputs: Sequence[Tensor], rows: int) -> list[Tensor]:
    return [tensor if tensor.shape[0] == rows else tensor[:rows] for tensor in outputs]


def _evict(bucket: Bucket) -> None: bucket.counts.evictions += bucket.drop()


def _listed(names: Any) -> str: return ", ".join(map(str, names)) or "none"


def _reclaims(pool: GraphPool) -> Callable[[], None]:
    """Has the device's memory ask a pool before it says that there is none; returns what ends that."""
    device = Device[pool.device]
    if not isinstance(device, NVDevice): return lambda: None
    refer = weakref.ref(pool)
    def reclaim(nbytes: int) -> None:
        if (asked := refer()) is not None: asked._reclaim(nbytes)
    device.pool.remedy(LABEL, lambda _: "give GraphPool a lower limit_bytes, or leave out its largest size")
    end = weakref.finalize(pool, device.pool.on_pressure(reclaim))
    end.atexit = False
    return end
