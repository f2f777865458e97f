"""The part "correctness" of bench/gpu/run.py: recorded launches on the hardware, against the emulator's
answers.

A row is a test of tests/emu with all its launches (gpu/record.py). A launch ends in one of these:

    same        every byte as the emulator has it
    close       not every bit, but within the bound of the exact value that the suite itself allows
    order       it differs where the emulator differs from itself under other orders of warps
    open        it differs in values that PTX leaves open (approximations, sums of tensor cores, floating
                atomics, clocks), none by more than OPEN of the largest
    disagrees   either the kernel or the emulator is wrong

Integers, and sums that are exact, must be the same. `--only NAME`, with the name of a launch as a
disagreement prints it, runs that one alone.
"""
from __future__ import annotations

import contextlib
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bench.gpu.cases import DEFAULT, Case, Cases, Judged, relocate
from bench.gpu.parts import Measure, NotMeasured, Options, Part, Row, register
from bench.lib.measure import table
from tinygrad_nv.errors import NVError, PTXError
from tinygrad_nv.ptx.assemble import assemble, find_program
from tinygrad_nv.runtime.driver import Driver, Launch

KINDS = ("same", "close", "order", "open", "disagrees")
OPEN = 2.0**-6
SHOWN = 5           # disagreements of a row
# whatever the time: templates, whole kernels
FIRST = ("test_gem", "test_scaled_gemm", "test_quant", "test_pairs", "test_triton", "test_nvcc")
ORDERS = range(5)  # seeds of the emulator
# what PTX does not define to the last bit, or at all
APPROXIMATE = re.compile(r"\.approx|\bdiv\.full|\b(?:tanh|ex2|lg2|sin|cos)\.")
UNDEFINED = re.compile(APPROXIMATE.pattern
                       + r"|\b(?:wg?mma|mma)\S*\.(?:b?f\d+|tf32|e\dm\d)"
                       r"|\b(?:atom|red|cp\.reduce)\S*\.b?f\d+|%clock|%globaltimer|%smid|%nsmid|%warpid")
# additions and multiplications that ptxas may fuse: the emulator rounds each
UNROUNDED = re.compile(r"(?<![.\w])(add|sub|mul)((?:\.ftz|\.sat)*\.(?:b?f16(?:x2)?|f32(?:x2)?|f64)\b)")
NEWEST_PTX = (9, 0)  # Triton 3.9 writes 9.4 and uses nothing newer than 8.8
# of a launch: memory afterwards and where it lay, one or several times
Answers = Callable[[Driver, Case], Iterator[tuple[list[bytes], list[int]]]]
EMULATED_ARCH = {"sm_86": "sm_80", "sm_90": "sm_90a"}   # of the emulated driver


# **** a launch ****

def runnable(case: Case, arch: str) -> bool:
    """PTX for sm_X runs on X and later, for sm_Xa on X alone."""
    found = re.search(r"^\s*\.target\s+sm_(\d+)(a?)", case.ptx, re.M)
    if found is None: return False
    return arch == f"sm_{found[1]}a" if found[2] else int(found[1]) <= int(arch[3:5])


def readable(ptx: str) -> str:
    """With a version of PTX that drivers of today know, and with the rounding that PTX means where it names
    none: what is rounded by name is not fused."""
    ptx = UNROUNDED.sub(r"\1.rn\2", ptx)
    found = re.search(r"^\s*\.version\s+(\d+)\.(\d+)", ptx, re.M)
    if found is None or (int(found[1]), int(found[2])) <= NEWEST_PTX: return ptx
    return ptx.replace(found[0], ".version {}.{}".format(*NEWEST_PTX), 1)


def replay(driver: Driver, case: Case) -> tuple[list[bytes], list[int]]:
    """Memory after the launch, and where it lay. Nothing stays behind."""
    module = driver.load(readable(case.ptx).encode())
    addresses = [driver.alloc(len(each.before)) for each in case.memory]
    try:
        for each, address in zip(case.memory, addresses, strict=True):
            driver.copy_in(address, memoryview(relocate(each.before, case.memory, addresses)))
        driver.submit(Launch(module.function(case.entry), case.grid, case.block,
                             arguments(driver, case, addresses), case.dynamic_smem, case.cluster))
        driver.synchronize()
        found = [bytearray(len(each.before)) for each in case.memory]
        for out, address in zip(found, addresses, strict=True): driver.copy_out(memoryview(out), address)
    finally:
        module.unload()
        for address in addresses: driver.free(address)
    return [bytes(out) for out in found], addresses


def once(driver: Driver, case: Case) -> Iterator[tuple[list[bytes], list[int]]]:
    """The one answer of a launch by itself."""
    yield replay(driver, case)


def arguments(driver: Driver, case: Case, addresses: list[int]) -> tuple[bytes, ...]:
    """A launch's, on memory at these addresses, with tensor maps over it."""
    args = [relocate(each, case.memory, addresses) for each in case.args]
    for i, spec in case.maps.items():
        at = relocate(spec.address.to_bytes(8, "little"), case.memory, addresses)
        args[i] = driver.tensor_map(replace(spec, address=int.from_bytes(at, "little")))
    return tuple(args)


def emulator(case: Case, seed: int, check: bool) -> Driver:
    """An emulated device for a case."""
    from tinygrad_nv.runtime.emulated.driver import EmulatedDriver
    return EmulatedDriver(EMULATED_ARCH.get(case.arch, case.arch), check, seed)


# **** what it means ****

@dataclass(frozen=True)
class Verdict:
    """How a launch ended, and for a disagreement where and with what."""
    kind: str
    text: str = ""


def decode_values(data: bytes, dtype: str) -> np.ndarray:
    """Bytes as float64 of a torch dtype; as integers where the dtype is not known."""
    import torch
    kind = getattr(torch, dtype, None) if dtype else None
    if kind is None: return np.frombuffer(data, np.uint8).astype(np.float64)
    return torch.frombuffer(bytearray(data), dtype=kind).to(torch.float64).numpy()


def verdict(case: Case, found: list[bytes], addresses: list[int], seed: int = 0) -> Verdict:
    """The worst of what is said of each buffer."""
    said = [_of_buffer(case, i, found[i], relocate(case.memory[i].after, case.memory, addresses), seed)
            for i in range(len(case.memory))]
    return worst(said)


def worst(said: Iterable[Verdict]) -> Verdict:
    """The last of `KINDS` among them, the first of these."""
    return max(said, key=lambda each: KINDS.index(each.kind), default=Verdict("same"))


def _of_buffer(case: Case, i: int, got: bytes, emulated: bytes, seed: int) -> Verdict:
    if got == emulated: return Verdict("same")
    judged = next((each for each in case.judged if each.memory == i), None)
    if judged is not None and judged.exact.size:
        off = _beyond(judged, decode_values(got, case.memory[i].dtype))
        return Verdict("close") if off is None else _disagrees(case, i, got, emulated, off, judged)
    differ = np.frombuffer(got, np.uint8) != np.frombuffer(emulated, np.uint8)
    differ &= ~_varying(case, i)
    if not differ.any(): return Verdict("order")
    dtype = case.memory[i].dtype
    size = max(1, len(got) // max(1, decode_values(got, dtype).size))
    at = int(differ.argmax()) // size
    if judged is None and UNDEFINED.search(case.ptx):
        a, b = decode_values(got, dtype), decode_values(emulated, dtype)
        most = np.abs(b[np.isfinite(b)]).max(initial=0)
        with np.errstate(invalid="ignore"): off_by = np.abs(a - b)
        alike = (np.isnan(a) == np.isnan(b)).all() and not (off_by > OPEN * most).any()
        if alike or "float" not in dtype: return Verdict("open")
        at = int((~(off_by <= OPEN * most)).argmax())
    return _disagrees(case, i, got, emulated, at, judged)


def _beyond(judged: Judged, values: np.ndarray) -> int | None:
    """The first element that is not what it must be."""
    nan = np.isnan(judged.exact)
    with np.errstate(invalid="ignore"):
        right = np.where(nan, np.isnan(values), (values == judged.exact)
                         | (np.abs(values - judged.exact) <= judged.bound))
    return None if right.all() else int((~right).argmax())


def _varying(case: Case, i: int) -> np.ndarray:
    """Bytes that the emulator itself has otherwise when warps run in other orders."""
    answers = [np.frombuffer(replay(emulator(case, seed, False), case)[0][i], np.uint8) for seed in ORDERS]
    return np.any([answer != answers[0] for answer in answers], axis=0)


def _disagrees(case: Case, i: int, got: bytes, emulated: bytes, at: int, judged: Judged | None) -> Verdict:
    """In words."""
    dtype = case.memory[i].dtype
    a, b = decode_values(got, dtype), decode_values(emulated, dtype)
    exact = f", exactly {judged.exact[at]:g}" if judged is not None and judged.exact.size else ""
    count = int((~((a == b) | (np.isnan(a) & np.isnan(b)))).sum())
    return Verdict("disagrees", f"either the kernel or the emulator is wrong: {case.name}, kernel "
                   f"{case.entry}, buffer {i + 1} of {len(case.memory)} ({dtype or 'bytes'}): {count} of "
                   f"{a.size} elements differ, of which the first that must not is {at}: {a[at]:.9g} on "
                   f"the device, {b[at]:.9g} emulated{exact}")


# **** the part ****

def fill_cubin_cache(ptx: Iterable[str], arch: str) -> None:
    """Fills the cache of cubins, on all cores: where there is a ptxas, a device takes modules from there."""
    if find_program("ptxas") is None: return
    def one(text: str) -> None:
        with contextlib.suppress(NVError): assemble(readable(text), arch)  # the launch will say it
    with ThreadPoolExecutor(os.cpu_count()) as pool: list(pool.map(one, set(ptx)))


def _path(options: Options) -> Path: return options.cases or DEFAULT


def rows(options: Options) -> list[str]:
    """The tests; one launch, where its name is asked for."""
    return rows_of(options, Cases.names)


def rows_of(options: Options, names_of: Callable[[Cases], list[str]]) -> list[str]:
    """Returns the rows of some of the launches."""
    if not _path(options).exists():
        raise NotMeasured(f"no recorded launches in {_path(options)}: bench/gpu/record.py makes them, "
                          "without a GPU")
    names = names_of(Cases(_path(options)))
    if "#" in options.only: return [name for name in names if options.only in name]
    tests = dict.fromkeys(name.partition("#")[0] for name in names)
    return sorted(tests, key=lambda name: not name.startswith(FIRST))


def open_worker(options: Options, part: str = "correctness",
                names_of: Callable[[Cases], list[str]] = Cases.names,
                answers: Answers = once) -> Measure:
    """A worker: one driver for all its rows. Every one of a launch's `answers` is looked at, and the worst
    counts."""
    cases = Cases(_path(options))
    launches: dict[str, list[str]] = defaultdict(list)
    for name in names_of(cases): launches[name.partition("#")[0]].append(name)
    recorded_at = cases.about().get("commit", "")
    device: Driver | None = None
    if not options.emulate:
        from tinygrad_nv.runtime.cuda.driver import CUDADriver
        device = CUDADriver()

    def measure(row: str, budget_s: float) -> Row:
        counts: Counter[str] = Counter()
        texts: list[str] = []
        names = [row] if "#" in row else launches[row]
        if device: fill_cubin_cache((case.ptx for case in map(cases.get, names)
                                     if runnable(case, device.properties.arch)), device.properties.arch)
        for number, name in enumerate(names, 1):
            case = cases.get(name)
            on = device or emulator(case, options.seed + 1, True)
            if not runnable(case, on.properties.arch):
                counts["elsewhere"] += 1
                continue
            try: said = worst(verdict(case, *each) for each in answers(on, case))
            except Exception as error:
                if isinstance(error, PTXError) and error.found.startswith("ptxas changed the kernel"):
                    counts["elsewhere"] += 1  # no GPU runs it as it is written
                    continue
                raise RuntimeError(f"{name}, kernel {case.entry}, launch {number} of {len(names)}: "
                                   f"{type(error).__name__}: {error}") from error
            counts[said.kind] += 1
            if said.text:
                texts.append(f"{said.text}\n    again: python3 bench/gpu/run.py --part {part} "
                             f"--only '{name}'")
        if counts["elsewhere"] == len(names): raise NotMeasured("its kernels are for another architecture")
        row_: Row = {"status": "disagrees" if texts else "emulated" if options.emulate else "measured",
                     "launches": len(names), **counts, "texts": texts[:SHOWN], "recorded_at": recorded_at}
        if texts: row_["why"] = texts[0]
        return row_

    return measure


HEADER = ["", "tests", "launches", *KINDS, "elsewhere", "failed, hung, died", "not measured"]


def render(found: Mapping[str, Row]) -> str:
    """A line for each file of tests; then, in words, what went wrong."""
    files: dict[str, list[Row]] = defaultdict(list)
    for name, row in found.items(): files[name.partition("::")[0]].append(row)
    lines = [_line(name, some) for name, some in files.items()]
    lines.append(_line("all", list(found.values())))
    words = [f"  {text}" for row in found.values() for text in row.get("texts", [])]
    words += [f"  {name}: {row['status']}: {row['why']}" for name, row in found.items()
              if row["status"] in ("failed", "hung", "died")]
    return "\n".join([table(HEADER, lines), *words])


def _line(name: str, some: list[Row]) -> list[str]:
    def total(key: str) -> str: return str(sum(row.get(key, 0) for row in some) or "")
    broken = sum(row["status"] in ("failed", "hung", "died") for row in some)
    return [name, str(len(some)), total("launches"), *map(total, KINDS), total("elsewhere"),
            str(broken or ""), str(sum(row["status"] == "not measured" for row in some) or "")]


register(Part("correctness", "recorded launches against the emulator's answers", rows, open_worker, render,
              expected_s=1.0, limit_s=60.0))
