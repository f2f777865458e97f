"""Finishes kernels of ours (program.py) before a schedule is compiled: their variables.

Protocol: `finalize` is a compile hook. In a schedule made from a rewrite the variables of a kernel's body
have become the user's own, whose type is usually weak; tinygrad lowers that in the kernels it generates, and
encodes arguments by it in the others. Estimates, upper bounds until then, become those of the variables. What
other processes have compiled is taken from their cache (runtime/programs.py).
"""
from __future__ import annotations

from dataclasses import replace

from tinygrad.dtype import dtypes
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv import hooks
from tinygrad_nv.patterns.program import estimates_of, in_body
from tinygrad_nv.runtime import programs
from tinygrad_nv.runtime.note import ProgramKernel


def finalize(linear: UOp, inner: hooks.Compile) -> UOp:
    """A compile hook: the caller's variables into Estimates, and typed int32, as kernels take them."""
    if not any(call.src[0].op is Ops.PROGRAM for call in linear.src): return inner(linear)
    calls = (call.replace(src=(_finalize(call.src[0]), *call.src[1:])) if _is_ours(call.src[0]) else call
             for call in linear.src)
    finalized = linear.replace(src=tuple(calls))
    programs.finish(finalized)
    return inner(finalized)


def _is_ours(body: UOp) -> bool: return body.op is Ops.PROGRAM and isinstance(body.src[0].arg, ProgramKernel)


def _finalize(body: UOp) -> UOp:
    weak = [v for v in body.variables() if v.dtype in dtypes.weaks]
    body = body.substitute({v: in_body(v).cast(v.dtype) for v in weak})
    sink = body.src[0]
    final = sink.replace(arg=replace(sink.arg, estimates=estimates_of(body)))
    return body.substitute({sink: final})
