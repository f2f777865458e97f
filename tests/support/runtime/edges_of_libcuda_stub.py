"""Run by test_cuda_bindings.py with a driver library that has no cuCtxSetLimit: what each release of
cuda.bindings makes of that, and what is left to a fork.

Releases that are not installed are stood in for by what their wheels raise (seen with 13.0.3, 13.1.1, 13.2.0,
13.3.0, 13.4.4 and 13.5.0 over this stub): the installed ones find that the function is missing, and the
error is that of the release.
"""
from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from tinygrad_nv.errors import DriverError
from tinygrad_nv.runtime.cuda import api as cuda_api
from tinygrad_nv.runtime.cuda import driver as cuda


class FunctionNotFoundError(RuntimeError):
    """cuda.bindings._internal.utils has one of this name from 13.4 on."""


class DynamicLibNotFoundError(RuntimeError):
    """cuda.pathfinder has one of this name."""


def plain(name: str) -> Exception: return RuntimeError(f'Function "{name}" not found')
def named(name: str) -> Exception: return FunctionNotFoundError(f"function {name} is not found")


RAISED: dict[str, Callable[[str], Exception]] = {"13.0": plain, "13.1": plain, "13.2": plain, "13.3": plain,
                                                 "13.4": named}


class Release:
    """cuda.bindings.driver of a release, as far as errors go."""

    def __init__(self, real: Any, raised: Callable[[str], Exception]) -> None:
        self.real, self.raised = real, raised

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.real, name)
        if not callable(found) or isinstance(found, type): return found

        def called(*args: Any) -> Any:
            try: return found(*args)
            except RuntimeError: raise self.raised(name) from None
        return called


def say(*words: object) -> None: print("#", *words, file=sys.stderr, flush=True)


def one_line(error: Exception) -> str:
    return f"{type(error).__name__} " + " ".join(str(error).split())


real = cuda_api.bindings()
for release, raised in {"installed": None, **RAISED, "other": lambda name: DynamicLibNotFoundError(
        "no such library")}.items():
    cuda_api.bindings = (lambda raised=raised: Release(real, raised)) if raised else lambda: real
    gpu = cuda.CUDADriver()
    try: gpu.set_persisting_l2(4096)
    except Exception as error: say(f"{release}:", one_line(error))
    gpu.close()

cuda_api.bindings = lambda: real
gpu = cuda.CUDADriver()
address, event = gpu.alloc(64), gpu.event()
if not (child := os.fork()):
    try: gpu.copy_in(address, memoryview(bytes(64)))
    except DriverError as error: say("fork:", one_line(error))
    say("in the fork:", cuda.missing())
    del event
    gpu.free(address)
    gpu.close()
    say("in the fork: closed")
    os._exit(0)
say("the fork ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
gpu.close()
say("closed", len(gpu.live))
