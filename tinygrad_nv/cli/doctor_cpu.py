"""`tinygrad-nv doctor` for the CPU: instruction set, threads, and measured rates.

Protocol: as in doctor.py. Each line says why a higher level is not used: what the processor lacks, or the
system denies, and what limits threads below the number of cores.
"""
from __future__ import annotations

from tinygrad_nv import config
from tinygrad_nv.cli.doctor_finding import CheckResult
from tinygrad_nv.cpu import isa, measure
from tinygrad_nv.cpu.target import host
from tinygrad_nv.errors import NVError
from tinygrad_nv.explain.levels import with_prefix
from tinygrad_nv.patterns.target import why_no_cpu
from tinygrad_nv.runtime.cpu import threads

OFF = "switched off: NV_CPU=0"


def instructions() -> CheckResult:
    """The instruction set in use, and why not the next."""
    subject = "CPU kernels"
    if not config.get("NV_CPU"): return CheckResult(subject, "ok", OFF)
    try: found = isa.detect()
    except NVError as error: return CheckResult(subject, "broken", error.found, error.fix)
    if words := why_no_cpu("CPU"):
        return CheckResult(subject, "missing", f"tinygrad's own: {words}", "unset DEV, or DEV=CPU")
    best = isa.best()
    asked = f" (NV_CPU_ISA; {best} is there)" if found.level != best else ""
    return CheckResult(subject, "ok",
                       f"C for {found}, vectors of {32 * found.lanes} bits{asked}{_more(best)}",
                   _amx_advice())


def _more(best: str) -> str:
    """Why the next level is not used."""
    higher = isa.LEVELS[isa.LEVELS.index(best) + 1:]
    return f"; not {higher[0]}: {isa.why_not(higher[0])}" if higher else ""


def _amx_advice() -> str:
    """Returns how to get AMX if only the permission is missing."""
    if not set(isa.NEEDED["amx"]) <= isa.flags() or not isa.amx_refused(): return ""
    return "Linux 5.16 or newer grants AMX; a container's seccomp profile must allow arch_prctl"


def cores() -> CheckResult:
    """The number of threads that kernels use, and why not more."""
    found, used = threads.available(), threads.threads()
    what = f"{used} on {found.cores} core{'s' if found.cores > 1 else ''}"
    if threads.explicit(): what += ", by NUM_CPU_THREADS"
    if found.why: what += f": {found.why}"
    too_many = used > found.threads
    return CheckResult("CPU threads", "ok", what, f"{found.threads} can run at the same time: "
                   f"NUM_CPU_THREADS={found.threads}" if too_many else "")


def speed() -> CheckResult:
    """Bandwidth and compute rates of all threads."""
    if not config.get("NV_CPU"): return CheckResult("CPU rates", "ok", OFF)
    here = host()
    try: found = measure.rates(here)
    except NVError as error: return CheckResult("CPU rates", "missing", error.found, error.fix)
    per = ", ".join(f"{with_prefix(getattr(found, name), 'FLOP/s')} {name}" for name in ("f32", "bf16"))
    return CheckResult("CPU rates", "ok", f"{with_prefix(found.bandwidth, 'B/s')} read, {per}, "
                   f"{with_prefix(found.s8, 'OP/s')} s8 on {measure.processor()}; kept in {measure.path()}")
