"""A step as device graphs, one for each batch size.

Protocol. `GraphPool(step, inputs, sizes)` is called like the step, with any number of rows up to the largest
size: `pool(tokens=…, tables=…, lengths=…)`. Rows are padded to a size; padding rows hold each input's `pad`,
by which the step must mask them. A call is one upload of small inputs and one graph launch in stream 0, and
returns before the device has run it.

 * A call returns the first rows of the outputs' region, which every call of the pool overwrites. As with
   TinyJit, they are valid until the next call. Reading them (`.numpy()`) waits for the device.
 * Bound Variables may be arguments, too. Their values are kernel parameters: a call that changes them updates
   the affected graph nodes before the launch. Without Variables no call updates anything.
 * All sizes share one arena for intermediates: no graph keeps anything there from one launch to the next.
   When the arena grows, its addresses change, and graphs over the old one are instantiated again on their
   next use; nothing is recompiled.
 * Beyond `limit_bytes` of graphs, arena and outputs, the least recently used graphs are evicted. They too are
   instantiated again without compilation.
 * Not thread-safe: one call at a time.
 * A step that cannot be one graph still runs, launch by launch or eagerly, and `stats()` says why.
 * After an exception, Ctrl-C included, pool and state stay usable. The interrupted step's writes to its state
   may or may not have happened.
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
from tinygrad_nv.graphs.capture import RecordedStep, Returned, call_step, rebuild, record, restore_on_error
from tinygrad_nv.graphs.inputs import LABEL, Input, InputStaging
from tinygrad_nv.graphs.stats import GraphPoolStats, progress
from tinygrad_nv.runtime.device import NVDevice
from tinygrad_nv.runtime.observe.memory_report import human

SIZES = (1, 2, 4, 8, 16, 32, 64)
RETRY = 16      # eager calls before a size that ran out of memory is captured again; doubles each time
KEEPS = ("the step keeps a Tensor that it computes from its inputs, or creates and then changes, which a "
         "replay would not rebind")


class GraphPool:
    """`step(**inputs)` as graphs for batches of `sizes` rows. Each input is a Tensor whose first dimension is
    the batch; the step returns a Tensor, or a tuple, list or dict of them, of as many rows. `limit_bytes`
    limits graphs, arena and outputs; `staging` is the number of steps whose inputs may be in flight."""

    def __init__(self, step: Callable[..., Returned], inputs: Mapping[str, Input],
                 sizes: Sequence[int] = SIZES, device: str | None = None, limit_bytes: int | None = None,
                 staging: int = 2) -> None:
        self.step, self.inputs = step, dict(inputs)
        self.sizes = _check_sizes(self.inputs, sizes, limit_bytes, staging)
        self.device = Device.canonicalize(device)
        self.limit_bytes = limit_bytes
        self.input_staging = InputStaging(self.device, self.inputs, self.sizes, staging)
        self.arena = Arena(self.device)
        self.buckets = {size: Bucket(size, self.device) for size in self.sizes}
        self._size_of = [min(size for size in self.sizes if size >= rows)
                         for rows in range(self.sizes[-1] + 1)]
        self._expected = [(name, given, given.numpy_dtype(), given.shape) for name, given in inputs.items()]
        self._variables: frozenset[str] | None = None
        self._recorded: RecordedStep | None = None
        self._calls = 0
        self._in_call = self._needs_sync = False
        self._unregister_reclaim = _register_reclaim(self)

    # **** calls ****

    def __call__(self, **given: np.ndarray | Tensor | UOp) -> Returned:
        """One step on the given rows: arrays, or Tensors of this device, one for each input, and bound
        Variables by other names. Returns what the step returns, of as many rows, valid until the next call.
        Raises `GraphError`."""
        rows, values, variables = self._check_inputs(given)
        bucket = self.buckets[self._size_of[rows]]
        bucket.check_state()
        with self._call(bucket):
            self.input_staging.put(bucket.size, rows, values)
            returned = self._run(bucket, rows, variables)
        bucket.counts.rows += rows
        bucket.counts.padding += bucket.size - rows
        return returned

    @contextmanager
    def _call(self, bucket: Bucket) -> Iterator[None]:
        if self._in_call:
            raise GraphError("a GraphPool is called in the middle of its own call", "one call at a time",
                             "take turns with a lock, or use a pool for each thread; a step calls no pool")
        if self._needs_sync: self.input_staging.sync()
        try:
            self._in_call = self._needs_sync = True
            self._finalize_kept()
            yield
        except BaseException:
            bucket.drop()  # it is unknown which of its nodes were updated
            raise
        finally: self._in_call = False
        self._needs_sync = False

    def _run(self, bucket: Bucket, rows: int, variables: dict[str, UOp]) -> Returned:
        self._calls += 1
        bucket.used = self._calls
        if bucket.stale(): bucket.drop()
        if bucket.replay is not None: bucket.counts.hits += 1
        elif ((not bucket.eager_reason or bucket.counts.eager >= bucket.retry_at)
              and (outputs := self._prepare(bucket, variables)) is not None):
            return rebuild(bucket.shape, _first_rows(outputs, rows))
        if bucket.replay is None: return self._eager(bucket, rows, variables)
        if bucket.compiled and bucket.compiled.graph_obstacle:
            bucket.counts.eager += 1
            bucket.counts.because(bucket.compiled.graph_obstacle)
        bucket.launch({v.expr: value for v, value in map(UOp.unbind, variables.values())})
        return rebuild(bucket.shape, bucket.results(rows))

    def _eager(self, bucket: Bucket, rows: int, variables: dict[str, UOp]) -> Returned:
        """Runs the step eagerly, on the same inputs."""
        bucket.counts.eager += 1
        bucket.counts.because(bucket.eager_reason)
        inputs = self.input_staging.tensors(bucket.size)
        with restore_on_error():
            returned, results = call_step(self.step, bucket.size, inputs, variables, self.device,
                                          set(buffers))
        return rebuild(returned, _first_rows([tensor for _, tensor in results], rows))

    # **** graphs ****

    def capture(self, sizes: Sequence[int] | None = None, **variables: UOp) -> None:
        """Captures graphs of these sizes (default: all), the largest first, without running them. Shows
        progress and memory on a terminal. A step with Variables needs a value for each. A size that runs
        eagerly is tried again."""
        wanted = sorted(self.sizes if sizes is None else set(sizes), reverse=True)
        if unknown := [size for size in wanted if size not in self.buckets]:
            raise GraphError(f"no size {unknown[0]}", f"one of {_join_names(self.sizes)}")
        self._check_variables(variables)
        with progress(wanted, self._count_bytes) as done:
            for size in wanted:
                bucket = self.buckets[size]
                bucket.check_state()
                bucket.eager_reason = ""
                if bucket.replay is None:
                    with self._call(bucket):
                        # all rows are padding, in case the step has to run
                        self.input_staging.put(size, 0, ())
                        ran = self._prepare(bucket, variables) is not None
                        if ran and bucket.retry_at < math.inf: self._prepare(bucket, variables)
                done(size)

    def reset(self) -> None:
        """Drops all captures, and frees graphs, arena and outputs; inputs stay."""
        for bucket in self.buckets.values():
            bucket.drop()
            bucket.compiled, bucket.eager_reason = None, ""
        self.arena.resize(0, 0)
        self._variables = None

    def close(self) -> None:
        """Frees everything. The pool cannot be called afterwards."""
        self.reset()
        self._unregister_reclaim()
        self.input_staging.free()

    def stats(self) -> GraphPoolStats:
        """Counts so far, and current memory."""
        return GraphPoolStats(self.device, tuple(self.buckets[size].stats() for size in self.sizes),
                         self.arena.nbytes, self.input_staging.nbytes, self.arena.output_bytes,
                         self.input_staging.staging_bytes, self.limit_bytes)

    def _prepare(self, bucket: Bucket, variables: dict[str, UOp]) -> list[Tensor] | None:
        """Captures and builds a graph, or records why that failed. Returns the results if the step has run.
        """
        bucket.retry_at = math.inf
        for _ in range(2):
            try:
                if bucket.compiled is None and (outputs := self._capture(bucket, variables)) is not None:
                    return outputs
                bucket.eager_reason = self._build(bucket)
                return None
            except JitError as error:
                bucket.eager_reason = f"the step cannot be captured: {error}"
                return None
            except MemoryError as error: bucket.eager_reason = f"out of memory: {str(error).splitlines()[0]}"
            self._evict_all()  # after the except block, which keeps partial results alive
        bucket.retry_at = 2 * bucket.counts.eager + RETRY
        return None

    def _capture(self, bucket: Bucket, variables: dict[str, UOp]) -> list[Tensor] | None:
        """Records and compiles the step. Returns its results if it had to run."""
        self._finalize_kept()
        started = time.perf_counter()
        inputs = self.input_staging.tensors(bucket.size)
        recorded, returned = record(self.step, bucket.size, inputs, variables, self.device)
        bucket.shape = returned
        bucket.counts.captures += 1
        self._variables = frozenset(variables)  # other Variables would make another step
        self._recorded = recorded
        kept = recorded.keeps_tensors()
        self._recorded = None
        if kept:
            bucket.counts.because(KEEPS)
            bucket.counts.eager += 1
            # a Tensor created on first use exists the second time
            if bucket.eager_reason != KEEPS: bucket.retry_at = bucket.counts.eager
            bucket.eager_reason = KEEPS
            recorded.execute()
            return [tensor for _, tensor in recorded.results]
        bucket.compiled = recorded.finalize()
        bucket.counts.capture_s += time.perf_counter() - started
        return None

    def _finalize_kept(self) -> None:
        """Computes the Tensors that a step kept, if an exception interrupted that: they are state by now."""
        if self._recorded is not None: self._recorded.keeps_tensors()
        self._recorded = None

    # **** memory ****

    def _build(self, bucket: Bucket) -> str:
        """Instantiates a graph within the limit. Returns why not, or ""."""
        while not (reason := self._make_room(bucket)):
            if bucket.replay is not None: return ""
            bucket.build(self.arena)
        bucket.drop()
        return reason

    def _make_room(self, bucket: Bucket) -> str:
        """Evicts other graphs and resizes the arena until a bucket, at its last measured size, is within the
        limit. Returns why that cannot be, or ""."""
        recipe = bucket.compiled
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
            for each in self.buckets.values(): each.drop()  # rebuilt on their next use
            self.arena.resize(arena, outputs)
        return ""

    def _count_bytes(self) -> int:
        """Bytes that count towards the limit."""
        graphs = sum(each.graph_bytes for each in self.buckets.values() if each.replay is not None)
        return self.arena.nbytes + self.arena.output_bytes + graphs

    def _evict_all(self) -> None:
        for bucket in self.buckets.values(): _evict(bucket)
        self.arena.resize(0, 0)

    def _reclaim(self, _: int) -> None:
        """Frees everything under memory pressure; graphs are rebuilt on their next use."""
        if not self._in_call: self._evict_all()

    # **** arguments ****

    def _check_inputs(self, given: dict[str, Any]) -> tuple[int, list[np.ndarray | Buffer], dict[str, UOp]]:
        """Returns the number of rows, the values in the order of the inputs, and bound Variables. Raises
        `GraphError`."""
        if realize.capturing:
            raise GraphError("a GraphPool is called while a step is captured", "a call outside TinyJit",
                             "remove the TinyJit: the pool is a graph by itself")
        if not self.input_staging.open:
            raise GraphError("a GraphPool is called after close()", "an open pool")
        rows, values = -1, list[np.ndarray | Buffer]()
        for name, spec, dtype, shape in self._expected:
            value = given.pop(name, None)
            if isinstance(value, np.ndarray):
                if value.dtype != dtype or value.shape[1:] != shape or not value.ndim:
                    raise _bad_input(name, spec, value.shape, str(value.dtype))
                count = value.shape[0]
                values.append(value)
            elif isinstance(value, Tensor):
                values.append(self._on_device(name, spec, value))
                count = int(value.shape[0])
            elif value is None: raise GraphError(f"input {name!r} is missing", f"{_join_names(self.inputs)}")
            else: raise _bad_input(name, spec, (), type(value).__name__)
            if rows not in (-1, count):
                raise GraphError(f"input {name!r} has {count} rows, {self._expected[0][0]!r} has {rows}",
                                 "as many rows in every input")
            rows = count
        if given or self._variables: self._check_variables(given)
        if not 0 < rows <= self.sizes[-1]:
            raise GraphError(f"a batch of {rows} rows",
                             f"1 to {self.sizes[-1]}: sizes {_join_names(self.sizes)}",
                             "split the batch, or make the pool with a larger size" if rows else "")
        return rows, values, given

    def _check_variables(self, variables: dict[str, Any]) -> None:
        for name, value in variables.items():
            if isinstance(value, UOp) and value.is_bound_var: continue
            if name in self.inputs: raise GraphError(f"input {name!r} for a capture", "Variables alone")
            raise GraphError(f"there is no input {name!r}",
                             f"{_join_names(self.inputs)}, and bound Variables by other names")
        names = frozenset(variables)
        if self._variables is not None and names != self._variables:
            raise GraphError(f"Variables {_join_names(sorted(names))}",
                             f"{_join_names(sorted(self._variables))}, as before",
                             "give all of them in every call")

    def _on_device(self, name: str, given: Input, tensor: Tensor) -> Buffer:
        """The memory of a Tensor's rows, realized if needed."""
        shape = tuple(tensor.shape)
        known = bool(shape) and isinstance(shape[0], int)
        if not known or shape[1:] != given.shape or tensor.dtype != given.dtype:
            raise _bad_input(name, given, shape, _dtype_name(tensor.dtype))
        if tensor.device != self.device:
            raise GraphError(f"input {name!r} is on {tensor.device}",
                             f"an array, or a Tensor on {self.device}", f".to({self.device!r})")
        if not tensor.uop.has_buffer_identity() or not tensor.uop.is_realized:
            tensor = tensor.contiguous().realize()
        buffer = tensor.uop.buffer
        assert isinstance(buffer, Buffer)
        return buffer.ensure_allocated()


def _check_sizes(inputs: Mapping[str, Input], sizes: Sequence[int], limit_bytes: int | None,
                   staging: int) -> tuple[int, ...]:
    """Returns the sizes, sorted. Raises `GraphError` for invalid arguments."""
    if not inputs: raise GraphError("a pool without inputs", "at least one Input")
    for name, given in inputs.items(): given.check(name)
    listed = list(sizes) if isinstance(sizes, Sequence) else []
    if not listed or any(type(size) is not int or size < 1 for size in listed):
        raise GraphError(f"sizes {_join_names(listed) if isinstance(sizes, Sequence) else sizes}",
                         "a list of Python's integers, at least one, each 1 or more")
    if limit_bytes is not None and limit_bytes < 1:
        raise GraphError(f"a limit of {limit_bytes} bytes", "1 or more")
    if staging < 2: raise GraphError(f"{staging} page-locked buffers", "2 or more")
    return tuple(sorted(set(sizes)))


def _bad_input(name: str, given: Input, shape: tuple[Any, ...], kind: str) -> GraphError:
    what = "a Tensor (numpy has no such type)" if given.numpy_dtype() is None else "an array or a Tensor"
    return GraphError(f"input {name!r} has shape {shape} and is {kind}",
                      f"{what}, rows of shape {given.shape} and {_dtype_name(given.dtype)}")


def _dtype_name(dtype: DType) -> str:
    """numpy's name of a dtype where it has one: tinygrad writes dtypes.float for float32."""
    return str(Input((), dtype).numpy_dtype() or dtype)


def _first_rows(outputs: Sequence[Tensor], rows: int) -> list[Tensor]:
    return [tensor if tensor.shape[0] == rows else tensor[:rows] for tensor in outputs]


def _evict(bucket: Bucket) -> None: bucket.counts.evictions += bucket.drop()


def _join_names(names: Any) -> str: return ", ".join(map(str, names)) or "none"


def _register_reclaim(pool: GraphPool) -> Callable[[], None]:
    """Registers a pool to be asked for memory before the device raises out-of-memory; returns a function that
    unregisters it."""
    device = Device[pool.device]
    if not isinstance(device, NVDevice): return lambda: None
    refer = weakref.ref(pool)
    def reclaim(nbytes: int) -> None:
        if (asked := refer()) is not None: asked._reclaim(nbytes)
    device.pool.remedy(LABEL, lambda _: "give GraphPool a lower limit_bytes, or leave out its largest size")
    end = weakref.finalize(pool, device.pool.on_pressure(reclaim))
    end.atexit = False
    return end
