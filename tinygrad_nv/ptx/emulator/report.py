"""The report of a launch: findings of the checks, and counters.

Formulas: a shared-memory access of a warp takes as many passes as its busiest bank has words (32 banks of
4 bytes); conflicts are the passes beyond the least that its bytes need. A request to global memory touches
sectors of 32 bytes.
"""
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tinygrad_nv.ptx.emulator.footprint import Footprint

if TYPE_CHECKING:
    from tinygrad_nv.ptx.timing.model import Timing

LIMIT_KIND, DEADLOCK_KIND = "instruction-limit", "deadlock"
KINDS = ("race", "proxy-fence", "uninitialized", "out-of-bounds", "misaligned", "barrier", DEADLOCK_KIND,
         "wgmma-hazard", "async-hazard", LIMIT_KIND)
NOTE = "note"  # the kind after them


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. `ptx_line` counts from 1; `ctas` and `threads` (numbers in the grid and in the
    CTA) are those of the access and, when there are two, of the one it conflicts with; `count` is how often
    it happened."""
    kind: str
    message: str
    ptx_line: int
    ctas: tuple[int, ...] = ()
    threads: tuple[int, ...] = ()
    count: int = 1

    def __str__(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        where = f" [CTA {', '.join(map(str, self.ctas))}; thread {', '.join(map(str, self.threads))}]" \
            if self.ctas else ""
        return f"{self.kind}: line {self.ptx_line}: {self.message}{where}{times}"


@dataclass(frozen=True)
class Site:
    """Counters of one PTX instruction: executions by warps and by threads, shared-memory passes and those
    that conflicts cost, global requests and sectors, tensor-core operations (2 for a multiply-add)."""
    opcode: str
    line: int
    warps: int
    threads: int
    passes: int
    conflicts: int
    sectors: int
    requests: int
    flops: int


@dataclass(frozen=True)
class Stats:
    """Counters of a launch. Bytes: `global_read` and `global_written` as threads asked for them, `l2` in
    sectors, `shared` as threads asked, `asynchronous` moved by cp.async, bulk and tensor copies."""
    sites: tuple[Site, ...] = ()
    warp_instructions: int = 0
    global_read_bytes: int = 0
    global_written_bytes: int = 0
    l2_bytes: int = 0
    shared_bytes: int = 0
    asynchronous_bytes: int = 0

    @property
    def instructions(self) -> Counter[str]:
        """Warp-instructions executed, by opcode."""
        out: Counter[str] = Counter()
        for site in self.sites: out[site.opcode] += site.warps
        return out

    @property
    def bank_conflicts(self) -> dict[int, int]:
        """Passes lost to shared-memory bank conflicts, by PTX line."""
        return {site.line: site.conflicts for site in self.sites if site.conflicts}

    @property
    def sectors_per_request(self) -> dict[int, float]:
        """Mean sectors a warp's request to global memory touches, by PTX line."""
        return {site.line: site.sectors / site.requests for site in self.sites if site.requests}

    @property
    def tensor_flops(self) -> int:
        """Tensor-core operations, 2 for a multiply-add."""
        return sum(site.flops for site in self.sites)


@dataclass(frozen=True)
class Report:
    """The findings and counters of one launch; `seconds` is the time it took here. `footprint` is there when
    it was asked for. `early`: a programmatic launch let the next one begin before it had itself waited.
    `notes` are of what PTX does not promise and GPUs are known to do: no faults. `printed`: by printf.
    `timing`, of a launch that asked for it, is a prediction; there are no findings then."""
    findings: list[Finding] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    seconds: float = 0.0
    footprint: Footprint | None = None
    early: bool = False
    notes: list[Finding] = field(default_factory=list)
    timing: Timing | None = None
    printed: str = ""
