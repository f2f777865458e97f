"""Records what the emulator's tests launch, with its answers, for bench/gpu/run.py --part correctness.

    python bench/gpu/record.py [--times 3] [--out FILE] [tests/emu/ptx/test_mma.py …]

Runs tests/emu under pytest with this file as a plugin: every launch in which the emulator finds nothing is
kept: hand-written PTX, the cured kernels of the pairs, what nvcc and Triton compiled, products that the
templates made, and tinygrad's own kernels of DEV=EMU. Takes ten minutes and more on two cores, and no GPU.
`--times` draws so many times as many products as the tests do; what is drawn is always the same.

Of products and of matmuls with quantised matrices it is kept what they must be: the exact values, and how
far the suite lets a kernel be from them.

Left out: launches with findings, those of an emulator that sums exactly (no hardware does), modules whose
variables an earlier launch changed, PTX with an address in its text, and what is beyond the `limits` of a
test.
"""
from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.gpu.cases import DEFAULT, Case, Cases, Judged, Memory
from bench.gpu.correct import APPROXIMATE
from tinygrad_nv.ptx.emulator import Buffer, Emulator, TensorMap, emulator
from tinygrad_nv.ptx.emulator.arguments import pack_argument, triple
from tinygrad_nv.runtime.driver import TensorMapSpec
from tinygrad_nv.tile.quant_gemm.spec import QuantGemmSpec
from tinygrad_nv.tile.templates import TABLE

try:
    import pytest
    import torch
except ImportError as error: sys.exit(f"{error.name} is not installed, and the tests need it: "
                                      "pip install -e '.[cpu,test]'")

ROOT = Path(__file__).parents[2]
MOST, MOST_BYTES = 24, 16 << 20
SCANNED = 1 << 16       # larger memory is not scanned for addresses
MAP_BYTES, MAP_ALIGN = 128, 64
FIRST_ADDRESS = 0x5ea7_1d3b_0000    # as odd as those of a GPU: the emulator's own are 7, 0 and up in 32 bits
Wanted = dict[int, tuple[str, np.ndarray, np.ndarray]]  # by address: a torch dtype, exact values, bounds
Given = tuple[list[bytes], dict[int, TensorMapSpec], dict[int, bytes]]  # arguments, maps, memory


class Limits(NamedTuple):
    """Limits of a test: launches, bytes of the file that each may take, and how many may take more."""
    launches: int = MOST
    nbytes: int = 32 << 10
    large: int = 1


def limits(test: str) -> Limits:
    """More for tests that draw, and for those of quantised matrices: random codes do not compress."""
    if test.startswith(("test_scaled_gemm", "test_quant_templates")): return Limits(200, 64 << 10, 8)
    return Limits(200) if test.startswith(("test_gemm", "test_gemv")) else Limits()


class Recorder:
    """Stands in `Emulator.launch` and keeps what goes through it."""

    def __init__(self, cases: Cases) -> None:
        self.cases, self.test = cases, "by hand"
        self.counts: Counter[str] = Counter()
        self.large: Counter[str] = Counter()
        self.wanted: Callable[[Emulator, list[bytes]], Wanted] | None = None
        self.launch = Emulator.launch

    def install(self) -> None:
        """From now on."""
        recorder = self
        # no small integers beside each other look like an address (`gpu_cases.moved`)
        emulator.FIRST_ADDRESS = FIRST_ADDRESS

        def launch(emu: Emulator, ptx_text: str, grid: Any, block: Any, args: Sequence[object] = (),
                   entry: str | None = None, cluster: Any = (1, 1, 1), dynamic_smem: int = 0,
                   **options: Any) -> Any:
            partial = options.get("tapes") or options.get("timing")  # not all of it runs
            before = None if partial else recorder.before(emu, ptx_text, entry, args)
            report = recorder.launch(emu, ptx_text, grid, block, args, entry, cluster, dynamic_smem,
                                     **options)
            if before is not None and not report.findings and not emu.exact:
                recorder.keep(emu, ptx_text, entry, (grid, block, cluster), dynamic_smem, *before)
            return report

        setattr(Emulator, "launch", launch)  # noqa: B010 (not a method as mypy knows it)

    def before(self, emu: Emulator, text: str, entry: str | None, args: Sequence[object]) -> Given | None:
        """Arguments, tensor maps, and the memory that the launch can reach; None when it is not kept."""
        if self.counts[self.test] >= limits(self.test).launches or "%envreg" in text: return None
        try:
            loaded = emu._load(text)
            function = emu._entry(loaded.module, entry)
            parameters = list(function.parameters.values())
            if len(parameters) != len(args): return None
            packed = [pack_argument(i, parameter, value)
                      for i, (parameter, value) in enumerate(zip(parameters, args, strict=True))]
            maps = {i: decode_map(data) for i, (p, data) in enumerate(zip(parameters, packed, strict=True))
                    if len(data) == MAP_BYTES and p.align >= MAP_ALIGN}
            for variable in loaded.module.variables.values():
                if variable.space not in ("global", "const"): continue
                now = emu.buffers[loaded.addresses[variable.name]].data.tobytes()
                if now != variable.data.ljust(max(variable.nbytes, 1), b"\0"): return None
        except Exception: return None  # the launch itself will say what is wrong
        reached = reachable(emu, [*packed, *(spec.address.to_bytes(8, "little") for spec in maps.values())],
                            set(loaded.addresses.values()))
        if sum(map(len, reached.values())) > MOST_BYTES: return None
        if any(str(address) in text or f"{address:#x}" in text for address in reached): return None
        return packed, maps, reached

    def keep(self, emu: Emulator, text: str, entry: str | None, shape: tuple[Any, Any, Any], smem: int,
             packed: list[bytes], maps: dict[int, TensorMapSpec], reached: dict[int, bytes]) -> None:
        """Into the file."""
        wanted = self.wanted(emu, packed) if self.wanted else {}
        def dtype_of(address: int) -> str:
            if address in wanted: return wanted[address][0]
            name = emu.buffers[address].dtype.name
            return "" if name == "uint8" else name
        memory = tuple(Memory(address, data, emu.buffers[address].data.tobytes(), dtype_of(address))
                       for address, data in reached.items())
        judged = tuple(judge(i, each, text, *wanted[each.address]) for i, each in enumerate(memory)
                       if each.address in wanted)
        grid, block, cluster = (triple(each, "extents") for each in shape)
        function = emu._entry(emu._load(text).module, entry)
        case = Case("", emu.arch, text, function.name, grid, block, cluster, int(smem), tuple(packed), maps,
                    memory, judged)
        case = Case(**{**vars(case), "name": f"{self.test}#{case.digest}"})
        if not self.cases.add(case, limits(self.test).nbytes):
            self.large[self.test] += 1
            if self.large[self.test] > limits(self.test).large: return
            self.cases.add(case)
        self.counts[self.test] += 1


def decode_map(data: bytes) -> TensorMapSpec:
    """A tensor map's bytes as the driver is asked for it."""
    made = TensorMap.decode(data)
    return TensorMapSpec(made.dtype, made.address, made.dims[::-1], made.strides[-2::-1], made.box[::-1],
                         made.element_strides[::-1], made.interleave, made.swizzle,  # type: ignore[arg-type]
                         "none", made.fill, made.lower[::-1], made.upper[::-1])  # type: ignore[arg-type]


def judge(i: int, memory: Memory, text: str, dtype: str, exact: np.ndarray,
          bound: np.ndarray) -> Judged:
    """Nothing but bits, where the emulator has the exact value of every element and the PTX has no
    approximation: the emulator rounds those exactly, a GPU does not."""
    if APPROXIMATE.search(text): return Judged(i, exact, bound)
    values = torch.frombuffer(bytearray(memory.after), dtype=getattr(torch, dtype)).double().numpy()
    if np.array_equal(values, exact, equal_nan=True): return Judged(i, np.zeros(0), np.zeros(0))
    return Judged(i, exact, bound)


def reachable(emu: Emulator, seeds: Sequence[bytes], own: set[int]) -> dict[int, bytes]:
    """Memory that these words point into, and what words in there point into, without the module's own."""
    buffers = sorted((b for b in emu.buffers.values() if b.nbytes and b.ptr not in own), key=lambda b: b.ptr)
    starts = np.array([b.ptr for b in buffers], np.uint64)
    found: dict[int, bytes] = {}
    todo = list(seeds)
    while todo and len(starts):
        data = todo.pop()
        words = np.frombuffer(data[:len(data) // 8 * 8], np.uint64)
        for at in set((np.searchsorted(starts, words[words >= starts[0]], "right") - 1).tolist()):
            buffer: Buffer = buffers[at]
            inside = (words >= buffer.ptr) & (words < buffer.ptr + buffer.nbytes)
            if buffer.ptr in found or not inside.any(): continue
            found[buffer.ptr] = buffer.data.tobytes()
            if buffer.nbytes <= SCANNED: todo.append(found[buffer.ptr])
    return dict(sorted(found.items()))


# **** what elements must be ****

def judge_products(recorder: Recorder) -> None:
    """Products: against float64, within the bound that the suite states."""
    gemm_case = import_module("tests.support.tile.gemm_case")
    inner = gemm_case.launched

    def launch(made: Any, spec: Any, given: Any, arch: str, seed: int = 0, m: int | None = None,
               check: bool = True) -> Any:
        def expect(emu: Emulator, packed: list[bytes]) -> Wanted:
            exact, bound = gemm_case.stored(spec, given, m)
            kind = str(gemm_case.TORCH[spec.out.dtype]).removeprefix("torch.")
            return {int.from_bytes(packed[0], "little"): (kind, exact, bound)}
        recorder.wanted = expect
        try: return inner(made, spec, given, arch, seed, m, check)
        finally: recorder.wanted = None

    setattr(gemm_case, "launched", launch)  # noqa: B010


def judge_quantised(recorder: Recorder) -> None:
    """Matmuls with quantised matrices: against their references, within the bound of their tests. Those with
    fewer rows than their spec has are kept without."""
    case = import_module("tests.support.tile.reference_case")
    inner, cut = case.run, import_module("tests.support.tile.quant_case").CUT

    def run(spec: Any, schedule: Any, target: Any, given: Any, seed: int = 0,
            integers: Sequence[int] = ()) -> Any:
        def expect(emu: Emulator, packed: list[bytes]) -> Wanted:
            out, *_ = TABLE.arguments(spec)
            exact, usual = (case.answer(spec, given, each)["out"] for each in (True, False))
            bound = case.bound(out.dtype, exact, usual, cut=cut)
            place, storage = out.places[0], given["out"].double()
            found = [storage.clone(), storage * 0]
            for each, values in zip(found, (exact, bound), strict=True): case.view(each, place).copy_(values)
            kind = str(given["out"].dtype).removeprefix("torch.")
            return {int.from_bytes(packed[0], "little"): (kind, found[0].numpy(), found[1].numpy())}
        recorder.wanted = expect if isinstance(spec, QuantGemmSpec) and not integers else None
        try: return inner(spec, schedule, target, given, seed, integers)
        finally: recorder.wanted = None

    setattr(case, "run", run)  # noqa: B010


def judge_triton(recorder: Recorder) -> None:
    """Triton's kernels: against what each problem wants, within its bounds."""
    triton_case = import_module("tests.support.ptx.triton_case")
    inner = triton_case.solve

    def solve(emulator: Emulator, case: Any, problem: Any, compiled: Any = None) -> Any:
        first = emulator.next_address
        tensors = {name: getattr(value, "tensor", value) for name in case.kernel.arg_names
                   if not isinstance(value := problem.arguments.get(name), int | float | None)}

        def expect(emu: Emulator, packed: list[bytes]) -> Wanted:
            places = sorted(address for address in emu.buffers if address >= first)[:len(tensors)]
            made: Wanted = {}
            for (name, tensor), place in zip(tensors.items(), places, strict=True):
                if (want := problem.wanted.get(name)) is None: continue
                values = np.asarray(want.values, np.float64).reshape(-1)
                bound = np.broadcast_to(np.asarray(want.bound, np.float64), np.shape(want.values))
                made[place] = (str(tensor.dtype).removeprefix("torch."), values, bound.reshape(-1).copy())
            return made
        recorder.wanted = expect
        try: return inner(emulator, case, problem, compiled)
        finally: recorder.wanted = None

    setattr(triton_case, "solve", solve)  # noqa: B010


# **** the plugin ****

recorder: Recorder | None = None


def pytest_configure(config: pytest.Config) -> None:
    """Every process of pytest records into the same file."""
    global recorder
    recorder = Recorder(Cases(Path(os.environ["GPU_CASES"]), write=True))
    recorder.install()
    judge_products(recorder)
    judge_quantised(recorder)
    judge_triton(recorder)
    test_gemm_generated = import_module("tests.emu.tile.gemm.test_gemm_generated")
    setattr(test_gemm_generated, "TIMES", int(os.environ["GPU_CASES_TIMES"]))  # noqa: B010


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Names what is recorded by its test, without parameters."""
    assert recorder is not None
    recorder.test = f"{Path(item.path).stem}::{getattr(item, 'originalname', item.name)}"
    return (yield)


def record(path: Path, times: int, tests: Sequence[str]) -> int:
    """Runs the tests and records; pytest's exit code."""
    begun = time.perf_counter()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True,
                          check=False, cwd=ROOT).stdout.strip()
    cases = Cases(path, write=True)
    cases.note("commit", head)
    where = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-p", "bench.gpu.record", "-p", "no:cacheprovider", "-m",
               "not slow and not gpu", "-q", *(tests or ["tests/emu"])]
    done = subprocess.run(command, cwd=ROOT, check=False,
                          env={**os.environ, "PYTHONPATH": where, "GPU_CASES": str(path.resolve()),
                               "GPU_CASES_TIMES": str(times)})
    print(f"{len(cases.names())} launches recorded in {time.perf_counter() - begun:.0f} s, "
          f"{path.stat().st_size / 1e6:.1f} MB: {path}", file=sys.stderr)
    return done.returncode


def main() -> int:
    """Records."""
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    made.add_argument("tests", nargs="*", help="files of tests (default tests/emu)")
    made.add_argument("--times", type=int, default=3, help="as many products as the tests draw (default 3)")
    made.add_argument("--out", type=Path, default=DEFAULT, help=f"(default {DEFAULT.relative_to(ROOT)})")
    options = made.parse_args()
    return record(options.out, options.times, options.tests)


if __name__ == "__main__": sys.exit(main())
