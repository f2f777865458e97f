"""The emulated GPU: runs PTX on a CPU with Hopper's semantics, and reports its bugs.

Read in this order:

  emulator.py   the public API: `Emulator.alloc`, `Emulator.launch`
  running.py    one launch; peers.py: launches of several GPUs that see each other's memory
  buffer.py     memory
  arguments.py  the arguments of a launch, checked against the kernel
  tensormap.py  `TensorMap`: what TMA reads and writes through
  report.py     findings and counters
  trace.py      chosen warps' instructions with the values of their operands
  footprint.py  the bytes of memory that a launch touches
  lowering.py   from PTX instructions to ops: the registry; lower_*.py are the families; fragments.py and
                calls.py serve them
  program.py    a function as ops, with registers placed and branches joined
  native.py     the interpreter, compiled from csrc/
  csrc/         core.h first: objects and protocol; then machine.c, shadow.c (happens-before), the families

The interpreter is C because checks cost some hundred operations for each access: in NumPy, vectorised over
a CTA, an instruction takes about 20 µs; here one of a warp takes about 0.05.
"""
from tinygrad_nv.ptx.emulator.buffer import Buffer
from tinygrad_nv.ptx.emulator.emulator import Emulator
from tinygrad_nv.ptx.emulator.peers import Peers
from tinygrad_nv.ptx.emulator.report import Finding, Report, Site, Stats
from tinygrad_nv.ptx.emulator.running import LATE
from tinygrad_nv.ptx.emulator.tensormap import TensorMap
from tinygrad_nv.ptx.emulator.trace import Trace

__all__ = ["LATE", "Buffer", "Emulator", "Finding", "Peers", "Report", "Site", "Stats", "TensorMap", "Trace"]
