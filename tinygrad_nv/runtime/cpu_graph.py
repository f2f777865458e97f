"""A captured graph on the CPU: all launches of a TinyJit batch in one call into C, parallel ones on every
core.

Protocol: tinygrad's graph interface (`GraphRunner`). Building the graph writes one row of words a launch; a
replay patches the words that changed (inputs, variables) and calls `walk` once. tinygrad 0.14 launches each
CPU kernel from Python (about 40 µs) and runs the parts it splits for `core_id` one after the other; here a
launch costs well under a microsecond and the parts run on a pool of threads.

Pool: thread 0 is the caller. Workers sleep on a semaphore between replays and are woken only for graphs
with parallel launches. Serial launches run on thread 0 alone; a parallel one is fenced by a barrier on both
sides (sense reversing, spinning, then yielding, so that a core taken by somebody else delays but does not
hang it).

Row, in 64-bit words: function, parts, position of core_id among the arguments (-1: none), argument count,
arguments. Every CPU kernel takes its arguments as 64-bit words in registers and on the stack, so calling
one with more words than it reads is harmless in the C conventions of x86-64 and arm64; rows are called at
one of four lengths.
"""
from __future__ import annotations

import ctypes
import functools
import os
import threading
import time
from typing import Any

import numpy as np
from tinygrad import Device
from tinygrad.device import MultiBuffer, TinyELF
from tinygrad.engine.jit import GraphRunner
from tinygrad.helpers import NUM_CPU_THREADS
from tinygrad.runtime.autogen import libc
from tinygrad.uop.ops import Ops, UOp

HEAD = 4  # words before the arguments
LENGTHS = (6, 14, 30, 63)  # 63 is tinygrad's own limit of arguments
# words of the control block, on cache lines of their own where threads meet
THREADS, ROWS, STRIDE, TABLE, YIELD, WAIT, POST, ARRIVED, PHASE, SEMAPHORES = 0, 1, 2, 3, 4, 5, 6, 8, 16, 24
SEMAPHORE_WORDS = 8  # sizeof(sem_t) is 32 on Linux; a cache line each


def _source() -> str:
    def call(length: int) -> str:
        kinds, values = ",".join(["u"] * length), ",".join(f"a[{i}]" for i in range(length))
        return f"if (n <= {length}) ((void(*)({kinds}))f)({values});"
    return f"""
typedef unsigned long long u;
#define INLINE static inline __attribute__((always_inline))
INLINE void launch(u f, u *row, u part) {{
  u a[64], n = row[3], core = row[2];
  for (u i = 0; i < n; i++) a[i] = row[{HEAD} + i];
  if (core != ~0ull) a[core] = part;
  {" else ".join(call(length) for length in LENGTHS)}
}}
INLINE void barrier(volatile u *c, u threads) {{
  u phase = __atomic_load_n(&c[{PHASE}], __ATOMIC_ACQUIRE);
  if (__atomic_add_fetch(&c[{ARRIVED}], 1, __ATOMIC_ACQ_REL) == threads) {{
    __atomic_store_n(&c[{ARRIVED}], 0, __ATOMIC_RELAXED);
    __atomic_store_n(&c[{PHASE}], phase + 1, __ATOMIC_RELEASE);
    return;
  }}
  for (u spins = 0; __atomic_load_n(&c[{PHASE}], __ATOMIC_ACQUIRE) == phase; spins++)
    if (spins > 4096) ((int(*)(void))c[{YIELD}])();
}}
INLINE void rows(u *c, u me) {{
  u threads = c[{THREADS}], *table = (u*)c[{TABLE}];
  for (u i = 0; i < c[{ROWS}]; i++) {{
    u *row = table + i * c[{STRIDE}], parts = row[1];
    if (parts == 1 || threads == 1) {{
      if (me == 0) for (u p = 0; p < parts; p++) launch(row[0], row, p);
      continue;
    }}
    barrier(c, threads);
    for (u p = me; p < parts; p += threads) launch(row[0], row, p);
    barrier(c, threads);
  }}
  if (threads > 1) barrier(c, threads);
}}
void walk(u *c, u me) {{
  if (me == 0) {{
    for (u t = 1; t < c[{THREADS}]; t++) ((int(*)(void*))c[{POST}])(c + {SEMAPHORES} + t * {SEMAPHORE_WORDS});
    rows(c, 0);
    return;
  }}
  for (;;) {{
    while (((int(*)(void*))c[{WAIT}])(c + {SEMAPHORES} + me * {SEMAPHORE_WORDS}));
    rows(c, me);
  }}
}}
"""


class Pool:
    """The compiled walker, its control block and its threads."""

    def __init__(self, device: Any, threads: int) -> None:
        compiler = device.renderer.compiler
        binary = compiler.compile_cached(_source())
        self.program = device.runtime(TinyELF(binary, "walk", device.renderer.target, ()))
        self.memory = np.zeros(SEMAPHORES + (threads + 1) * SEMAPHORE_WORDS + 8, np.uint64)
        skew = -self.memory.ctypes.data % 64 // 8
        self.control = self.memory[skew:]
        self.address = self.control.ctypes.data
        for word, name in ((YIELD, "sched_yield"), (WAIT, "sem_wait"), (POST, "sem_post")):
            function = ctypes.cast(getattr(libc.dll, name), ctypes.c_void_p).value
            assert function is not None
            self.control[word] = function
        self.threads, self.lock = threads, threading.Lock()
        for t in range(1, threads):
            semaphore = self.address + 8 * (SEMAPHORES + t * SEMAPHORE_WORDS)
            failed = libc.dll.sem_init(ctypes.c_void_p(semaphore), 0, 0)  # made under `python -O` too
            assert not failed
            threading.Thread(target=self.walk, args=(t,), daemon=True, name=f"cpu-graph-{t}").start()

    def walk(self, me: int) -> None:
        """Thread 0: one replay. The others: wait for replays for ever."""
        self.program.fxn(ctypes.c_uint64(self.address), ctypes.c_uint64(me))

    def run(self, table: np.ndarray, parallel: bool) -> None:
        """Runs the rows of `table` in order and returns when all are done."""
        with self.lock:
            self.control[THREADS] = self.threads if parallel else 1
            self.control[ROWS], self.control[STRIDE], self.control[TABLE] = *table.shape, table.ctypes.data
            self.walk(0)


@functools.cache
def pool(device: str, threads: int) -> Pool:
    """The pool of a device; made once, its threads live as long as the process."""
    return Pool(Device[device], threads)


# a child of fork has none of the threads: it makes a pool of its own
os.register_at_fork(after_in_child=pool.cache_clear)


class CPUGraph(GraphRunner):
    """A batch of CPU launches. Buffers outside the batch and variables may change between replays, nothing
    else."""

    def __init__(self, linear: UOp, input_uops: tuple[UOp, ...] = ()) -> None:
        super().__init__(linear, input_uops)
        width = HEAD + max(len(ast.arg.globals) + len(ast.arg.vars) for _, ast, _, _ in self.calls)
        self.table = np.zeros((len(self.calls), width), np.uint64)
        self.inputs: list[tuple[int, int, int]] = []  # row, word, input
        for j, (_, ast, buffers, fixed) in enumerate(self.calls):
            program, words = self.runtimes[j], ast.arg.globals
            arguments = [buffers[i].get_buf(self.device).va_addr for i in words]
            arguments += [fixed.get(v.expr, 0) % (1 << 64) for v in ast.arg.vars]
            core = ast.arg.runtimevars.get("core_id")
            head = [program.addr, 1 if core is None else ast.arg.global_size[0],
                    (1 << 64) - 1 if core is None else len(words) + core, len(arguments)]
            self.table[j, :HEAD + len(arguments)] = np.array(head + arguments, np.uint64)
            self.inputs += [(j, HEAD + k, slot) for position, slot in self.uop_replace[j]
                            for k, i in enumerate(words) if i == position]
        self.parallel = bool((self.table[:, 1] > 1).any())
        # word of each variable, found once: a replay only stores
        places = [(j, HEAD + len(self.calls[j][1].arg.globals) + i, v)
                  for j, pairs in self.var_vals_replace.items() for i, v in pairs]
        self.places = np.array(places, np.intp).reshape(-1, 3).T
        self.threads = int(NUM_CPU_THREADS.value)

    def __call__(self, input_uops: tuple[UOp, ...], var_vals: dict[str, int],
                 wait: bool = False) -> float | None:
        for row, word, slot in self.inputs:
            buffer = input_uops[slot].buffer
            assert not isinstance(buffer, MultiBuffer), "the CPU graph is of one device"
            self.table[row, word] = buffer.ensure_allocated().get_buf(self.device).va_addr
        if self.places.size:
            values = np.array([var_vals[name] for name in self.vars], np.int64).astype(np.uint64)
            self.table[self.places[0], self.places[1]] = values[self.places[2]]
        begun = time.perf_counter()
        pool(self.device, self.threads).run(self.table, self.parallel)
        return time.perf_counter() - begun if wait else None

    @staticmethod
    def supports_uop(batch_devs: list[Any], new_call: UOp) -> bool:
        """Kernels of one CPU device; an input is an argument itself, not seen through a view."""
        if not GraphRunner.supports_uop(batch_devs, new_call): return False
        viewed = any(a.op is not Ops.PARAM and a.op_in_backward_slice_with_self(Ops.PARAM)
                     for a in new_call.src[1:] if not a.is_bound_var)
        return not viewed and all(isinstance(s, int) for s in new_call.src[0].arg.global_size)
