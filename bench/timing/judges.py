"""Helpers that the judges of the timing model share: nvcc to PTX, a row of a table, figures of agreement."""
from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.lib.measure import RESULTS
from tinygrad_nv.errors import NVError
from tinygrad_nv.ptx.assemble import find_program

CACHE = RESULTS / "cache" / "judges"


@dataclass(frozen=True)
class Judged:
    """A kernel of others, in TFLOP/s. `fitted`: used to choose figures of a GPU, so it judges nothing."""
    family: str
    name: str
    published: float
    predicted: float
    fitted: bool = False

    @property
    def error(self) -> float: return self.predicted / self.published - 1


def nvcc() -> Path:
    """nvcc in PATH, or of NVIDIA's wheel. Raises `NVError`."""
    found = shutil.which("nvcc") or find_program("nvcc")
    if found is None:
        raise NVError("no nvcc", "nvcc in PATH, or NVIDIA's wheel", "pip install nvidia-cuda-nvcc")
    return Path(found)


def to_ptx(source: str, include: Sequence[Path], flags: Sequence[str] = ()) -> str:
    """The PTX of a .cu for sm_90a, kept by its text. `include`: folders; headers that they share with nvcc's
    own count as unchanged. Raises `NVError` with the compiler's words."""
    program = nvcc()
    key = hashlib.sha256("\0".join([source, *map(str, include), *flags]).encode()).hexdigest()[:24]
    out, file = CACHE / f"{key}.ptx", CACHE / f"{key}.cu"
    if not out.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
        own = program.resolve().parents[1] / "include"
        command = [str(program), "-ptx", "-O3", "-std=c++17", "-DNDEBUG", "-gencode",
                   "arch=compute_90a,code=compute_90a", *flags, *(f"-I{one}" for one in (*include, own)),
                   str(file), "-o", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not out.exists():
            out.unlink(missing_ok=True)
            raise NVError(f"nvcc did not compile {file.name}:\n{errors(done.stderr)}",
                          "its repository's headers", "pass --include with the folders that are missing")
    return out.read_text()


def errors(words: str) -> str:
    """The first lines with errors, or the end of what a compiler said."""
    found = [line for line in words.splitlines() if "error" in line]
    return "\n".join(found[:8]) or words[-1500:]


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's: of ranks, those of equal values shared."""
    def ranks(values: Sequence[float]) -> np.ndarray:
        array = np.asarray(values)
        return np.array([(np.sum(array < each) + np.sum(array <= each) - 1) / 2 for each in array])
    return float(np.corrcoef(ranks(one), ranks(other))[0, 1])


def agreement(rows: Sequence[Judged]) -> dict[str, float]:
    """Mean and worst error, and the rank correlation, of rows that judge."""
    judged = [row for row in rows if not row.fitted]
    errors = [abs(row.error) for row in judged]
    rank = rank_correlation([row.published for row in judged], [row.predicted for row in judged])
    return {"rows": len(judged), "mape": float(np.mean(errors)), "worst": max(errors), "rank": rank}
