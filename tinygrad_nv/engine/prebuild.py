"""`python -m tinygrad_nv.engine.prebuild [--check]`: captures the steps of the bundled model for x86-64 of
level 3, with the server's default options, into its directory, where a wheel takes them from
(worker/prebuilt_steps.py).

Protocol: it works in a process with the settings of that target and empty caches. `--check` says whether the
file is of these sources, and ends with status 1 if it is not. The file is no part of the repository: a change
of any source that steps depend on makes it stale, and a stale file is not used.
"""
from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

TARGET = {"DEV": "CPU::x86_64,x86-64-v3", "NV_CPU_ISA": "avx2"}


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tinygrad_nv.engine.prebuild")
    parser.add_argument("--check", action="store_true", help="only say whether the file is of these sources")
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inner: return _write()
    if arguments.check: return _check()
    from tinygrad_nv.engine.worker.prebuilt_steps import PARTS
    with tempfile.TemporaryDirectory() as place:
        own = {**TARGET, "NUM_CPU_THREADS": str(PARTS), "NV_CACHE_DIR": place, "CACHEDB": f"{place}/cache.db"}
        return subprocess.run([sys.executable, "-m", "tinygrad_nv.engine.prebuild", "--inner"], check=False,
                              env={**os.environ, **own}).returncode


def model_directory() -> Path:
    """Returns the directory of the bundled model."""
    from tinygrad_nv.models import tales
    return Path(str(tales.__file__)).parent


def _write() -> int:
    from tinygrad_nv.cpu.target import host
    from tinygrad_nv.engine.llm import LLM
    from tinygrad_nv.engine.worker import prebuilt_steps
    from tinygrad_nv.engine.worker.step_store import places_of
    if str(host().isa) != "avx2":
        print(f"this processor makes kernels for {host().isa}, not for level 3 alone", file=sys.stderr)
        return 1
    file = model_directory() / prebuilt_steps.NAME
    with LLM(model_directory()) as llm:
        assert llm.runner.step_store is not None
        places = places_of(llm.runner.step_store.tensors())
        llm.runner.warm_up(lambda done, total: print(f"\r{done} of {total} steps", end="", file=sys.stderr))
        prebuilt_steps.write(file, llm.runner.step_store.steps, llm.runner.facts, places)
    print(f"\n{file}: {file.stat().st_size} bytes, {len(llm.runner.step_store.steps)} steps", file=sys.stderr)
    return 0


def _check() -> int:
    from tinygrad_nv.engine.llm import LLM
    from tinygrad_nv.engine.worker import prebuilt_steps
    from tinygrad_nv.engine.worker.step_store import places_of
    file = model_directory() / prebuilt_steps.NAME
    with LLM(model_directory()) as llm:
        assert llm.runner.step_store is not None
        key = prebuilt_steps.key(llm.runner.facts, places_of(llm.runner.step_store.tensors()))
    fresh = file.is_file() and file.read_bytes()[:len(key)].decode(errors="replace") == key
    words = "is of these sources" if fresh else "is stale" if file.is_file() else "is not there"
    print(f"{file} {words}", file=sys.stderr)
    return 0 if fresh else 1


if __name__ == "__main__": sys.exit(main())
