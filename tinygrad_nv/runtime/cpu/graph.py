"""A captured graph on the CPU: all launches of a TinyJit batch in one call into C, parallel ones on every
core.

Protocol: tinygrad's graph interface (`GraphRunner`). Building the graph writes one row of words a launch, as
pool.py has them; a replay patches the words that changed (inputs, variables) and runs the table. tinygrad
0.14 launches each CPU kernel from Python (about 40 µs); here a launch costs well under a microsecond.
"""
from __future__ import annotations

import time
from typing import Any

import numpy as np
from tinygrad.device import MultiBuffer
from tinygrad.engine.jit import GraphRunner
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv.runtime.cpu.arguments import check_arguments
from tinygrad_nv.runtime.cpu.pool import ALONE, HEAD, pool
from tinygrad_nv.runtime.cpu.threads import threads


class CPUGraph(GraphRunner):
    """A batch of CPU launches. Buffers outside the batch and variables may change between replays, nothing
    else."""

    def __init__(self, linear: UOp, input_uops: tuple[UOp, ...] = ()) -> None:
        super().__init__(linear, input_uops)
        bodies = [ast.arg for _, ast, _, _ in self.calls]
        for body in bodies: check_arguments(body.function_name, len(body.globals) + len(body.vars))
        width = HEAD + max(len(body.globals) + len(body.vars) for body in bodies)
        self.table = np.zeros((len(self.calls), width), np.uint64)
        self.inputs: list[tuple[int, int, int]] = []  # row, word, input
        self.words: dict[int, list[tuple[int, int]]] = {}   # the same, by input
        for j, (_, ast, buffers, fixed) in enumerate(self.calls):
            program, words = self.runtimes[j], ast.arg.globals
            arguments = [buffers[i].get_buf(self.device).va_addr for i in words]
            arguments += [fixed.get(v.expr, 0) % (1 << 64) for v in ast.arg.vars]
            core = ast.arg.runtimevars.get("core_id")
            head = [program.addr, 1 if core is None else ast.arg.global_size[0],
                    ALONE if core is None else len(words) + core, len(arguments)]
            self.table[j, :HEAD + len(arguments)] = np.array(head + arguments, np.uint64)
            self.inputs += [(j, HEAD + k, slot) for position, slot in self.uop_replace[j]
                            for k, i in enumerate(words) if i == position]
        for row, word, slot in self.inputs: self.words.setdefault(slot, []).append((row, word))
        self.parallel = bool((self.table[:, 1] > 1).any())
        # word of each variable, found once: a replay only stores
        places = [(j, HEAD + len(self.calls[j][1].arg.globals) + i, v)
                  for j, pairs in self.var_vals_replace.items() for i, v in pairs]
        self.places = np.array(places, np.intp).reshape(-1, 3).T
        self.threads = threads()

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
        self.replay()
        return time.perf_counter() - begun if wait else None

    def bind(self, slot: int, address: int) -> None:
        """Places an input at an address, for replays from now on: a call places all of them anew."""
        for row, word in self.words.get(slot, ()): self.table[row, word] = address

    def replay(self) -> None:
        """Runs the launches with inputs and variables as they are."""
        pool(self.threads).run(self.table, self.parallel)

    @staticmethod
    def supports_uop(batch_devs: list[Any], new_call: UOp) -> bool:
        """Kernels of one CPU device; an input is an argument itself, not seen through a view."""
        if not GraphRunner.supports_uop(batch_devs, new_call): return False
        viewed = any(a.op is not Ops.PARAM and a.op_in_backward_slice_with_self(Ops.PARAM)
                     for a in new_call.src[1:] if not a.is_bound_var)
        return not viewed and all(isinstance(s, int) for s in new_call.src[0].arg.global_size)
