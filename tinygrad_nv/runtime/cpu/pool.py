"""The threads that run kernels on the CPU, and the C that hands them their parts.

Protocol: `pool(threads).run(table, parallel)` runs the launches of a table, a row of words each, in order.
The caller walks the rows. A launch of one part is a plain call; of one with more, it publishes row and number
of parts, and each thread, the caller included, takes the next part until none is left. It goes on when all
are done. So which thread runs a part is left to chance, which no result may depend on (cpu/kernel.py); a core
that is slow or busy with another process gets fewer parts; a thread without a part is not waited for.

Ticket: one word, the number of parts above and the next part below. Adding 1 takes a part and says of how
many. A thread that comes late adds 1 to a word where nothing is left, or takes a part of a later launch: both
are as they should be, since the row is read after the part is taken and stays until that part is done.

Threads look at the ticket for a while and then sleep (futex); how long depends on how often looking has paid.
The caller wakes them with one call, when a run begins that has parts and when a launch finds one asleep.
There are never more threads than cores: launches in more parts take turns.

Row, in 64-bit words: function, parts, position of core_id among the arguments (-1: none), argument count,
arguments. Every CPU kernel takes its arguments as 64-bit words in registers and on the stack, so calling
one with more words than it reads is harmless in the C conventions of x86-64 and arm64; rows are called at
one of four lengths.
"""
from __future__ import annotations

import ctypes
import functools
import os
import platform
import sqlite3
import threading
from dataclasses import replace

import numpy as np
from tinygrad import Device
from tinygrad.device import TinyELF
from tinygrad.runtime import ops_cpu
from tinygrad.runtime.autogen import libc

from tinygrad_nv.runtime.cpu.arguments import MOST_ARGUMENTS
from tinygrad_nv.runtime.cpu.available import available

HEAD = 4  # words before the arguments
LENGTHS = (6, 14, 30, MOST_ARGUMENTS)
ALONE = (1 << 64) - 1  # a row whose function takes no core_id
# words of the control block; those that different threads write on cache lines of their own
SYSCALL, FUTEX, YIELD, TICKET, ROW, DONE, ASLEEP, WOKEN, WORDS = 0, 1, 2, 8, 9, 16, 24, 25, 32
# looks at the ticket, about 20 ns each, before a thread sleeps: from the cost of waking one to ten times that
LEAST_LOOKS, MOST_LOOKS = 256, 8192


def _source() -> str:
    def call(length: int) -> str:
        kinds, values = ",".join(["u"] * length), ",".join(f"a[{i}]" for i in range(length))
        return f"if (n <= {length}) ((void(*)({kinds}))f)({values});"
    return f"""
typedef unsigned long long u;
#define INLINE static inline __attribute__((always_inline))
#define load(word, order) __atomic_load_n(&c[word], __ATOMIC_##order)
#define store(word, value, order) __atomic_store_n(&c[word], value, __ATOMIC_##order)
#if defined(__x86_64__)
#define REST() __builtin_ia32_pause()
#else
#define REST() __asm__ volatile("yield")
#endif
INLINE void launch(u *row, u part) {{
  u a[64], f = row[0], n = row[3], core = row[2];
  for (u i = 0; i < n; i++) a[i] = row[{HEAD} + i];
  if (core != ~0ull) a[core] = part;
  {" else ".join(call(length) for length in LENGTHS)}
}}
INLINE int some(u ticket) {{ return (unsigned)ticket < ticket >> 32; }}
INLINE void take_parts(u *c) {{
  while (some(load({TICKET}, ACQUIRE))) {{
    u taken = __atomic_fetch_add(&c[{TICKET}], 1, __ATOMIC_ACQ_REL);
    if (!some(taken)) return;
    launch((u*)load({ROW}, RELAXED), (unsigned)taken);
    __atomic_fetch_add(&c[{DONE}], 1, __ATOMIC_RELEASE);
  }}
}}
INLINE u futex(u *c, u operation, u value) {{
  return ((u(*)(u, u, u, u, u))c[{SYSCALL}])(c[{FUTEX}], (u)&c[{WOKEN}], operation | 128, value, 0);
}}
INLINE void wake(u *c) {{
  if (!load({ASLEEP}, SEQ_CST)) return;
  store({ASLEEP}, 0, SEQ_CST);
  __atomic_fetch_add((unsigned*)&c[{WOKEN}], 1, __ATOMIC_SEQ_CST);
  futex(c, 1, 0x7fffffff);
}}
INLINE void walk(u *c, u *table, u rows, u stride, u parallel) {{
  if (parallel) wake(c);
  for (u *row = table; row < table + rows * stride; row += stride) {{
    u parts = row[1];
    if (parts == 1 || !parallel) {{
      for (u part = 0; part < parts; part++) launch(row, part);
      continue;
    }}
    store({ROW}, (u)row, RELAXED);
    store({DONE}, 1, RELAXED);
    store({TICKET}, parts << 32 | 1, SEQ_CST);  /* part 0 is the caller's */
    wake(c);
    launch(row, 0);
    take_parts(c);
    for (u looks = 0; load({DONE}, ACQUIRE) != parts; looks++)
      if (looks < {MOST_LOOKS}) REST(); else ((int(*)(void))c[{YIELD}])();
  }}
}}
INLINE void serve(u *c) {{
  for (u most = {LEAST_LOOKS};;) {{
    u looks = 0;
    while (looks < most && !some(load({TICKET}, ACQUIRE))) {{ looks++; REST(); }}
    if (looks < most) most = most * 2 < {MOST_LOOKS} ? most * 2 : {MOST_LOOKS};
    else {{
      most = most / 2 > {LEAST_LOOKS} ? most / 2 : {LEAST_LOOKS};
      unsigned before = __atomic_load_n((unsigned*)&c[{WOKEN}], __ATOMIC_SEQ_CST);
      store({ASLEEP}, 1, SEQ_CST);
      if (!some(load({TICKET}, SEQ_CST))) futex(c, 0, before);
    }}
    take_parts(c);
  }}
}}
/* the only function: programs are entered where they begin */
void pool(u *c, u *table, u rows, u stride, u parallel) {{
  if (table) walk(c, table, rows, stride, parallel); else serve(c);
}}
"""


_given: list[bytes] = []     # the C as machine code, of a process without a compiler


def give(code: bytes) -> None:
    """Has pools made of what `machine_code` returned in another process."""
    _given[:] = [code]


def machine_code() -> bytes:
    """Returns the C as machine code of this device."""
    if _given: return _given[0]
    clang = ops_cpu.ClangRenderer(replace(Device["CPU"].renderer.target, renderer="CLANG"))
    try: return bytes(clang.compiler.compile_cached(_source()))
    # the disk cache serves the thread that opened it alone
    except sqlite3.ProgrammingError: return bytes(clang.compiler.compile(_source()))


class ThreadPool:
    """The compiled walker, its control block and its threads. What they use lives as long as the process."""

    def __init__(self, threads: int) -> None:
        device = Device["CPU"]
        program = device.runtime(TinyELF(machine_code(), "pool", device.renderer.target, ()))
        memory = np.zeros(WORDS + 8, np.uint64)
        self.control = memory[-memory.ctypes.data % 64 // 8:]
        # a thread may be awake while the interpreter ends
        for kept in (program, memory): ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        self.control[SYSCALL], self.control[YIELD] = _address("syscall"), _address("sched_yield")
        self.control[FUTEX] = 202 if platform.machine() == "x86_64" else 98
        self.enter = ctypes.CFUNCTYPE(None, *[ctypes.c_uint64] * 5)(program.addr)
        self.address, self.threads = int(self.control.ctypes.data), threads
        for t in range(1, threads):
            threading.Thread(target=self.enter, args=(self.address, 0, 0, 0, 0), daemon=True,
                             name=f"cpu-{t}").start()

    def run(self, table: np.ndarray, parallel: bool) -> None:
        """Runs the rows of `table` in order and returns when all are done."""
        rows, stride = table.shape
        self.run_at(table.ctypes.data, rows, stride, parallel)

    def run_at(self, address: int, rows: int, stride: int, parallel: bool) -> None:
        """`run` of a table of 64-bit words at an address."""
        if not parallel or self.threads == 1: return self.enter(self.address, address, rows, stride, 0)
        with _lock: self.enter(self.address, address, rows, stride, 1)


def _address(name: str) -> int:
    address = ctypes.cast(getattr(libc.dll, name), ctypes.c_void_p).value
    assert address is not None
    return address


def pool(threads: int) -> ThreadPool:
    """The pool of so many threads, or as many as there are cores."""
    return _pool(min(threads, available().threads))


@functools.cache
def _pool(threads: int) -> ThreadPool: return ThreadPool(threads)


# one launch at a time has the cores; a signal's handler may launch in the midst of another's turn
_lock = threading.RLock()


def _reset_after_fork() -> None:
    """Forgets the threads in a child of fork, which has none of them: it makes a pool of its own."""
    global _lock
    _pool.cache_clear()
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_reset_after_fork)
