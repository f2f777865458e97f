"""Choice of the all-reduce, by size and number of GPUs, and its cost.

Sources: the tables of vLLM (`all_reduce_utils.py` and the pull requests that measured them) for bf16 on H100s
with NVSwitch, times in µs, of messages of 0.5, 2 and 4 MB:

    6 GPUs   one-shot 13, 38, 70   two-shot 15, 26, 37   NCCL 23, 43, 53   multimem 13, 21, 31
    4 GPUs   one-shot 10, 23       two-shot 17, 26       NCCL 21, 28

and its limits, above which NCCL is taken: 64 MB on 2 GPUs, 32 MB on 4, 512 KB on 6, 256 KB on 8; of multimem
64 MB on 6 and 8. `ONE_SHOT` ends where one-shot was last the faster of the two in these measurements; on 8
GPUs none is published, and vLLM's limit stands in.

`seconds` is a line through these figures: `LATENCY` and bytes that come in at `RATE`, 350 GB/s of the 450
that NVLink 4 has in a direction, by one-shot, and 260 by two-shot; of multimem, of the bytes that a GPU asks
for and writes, 68. Fitted to others' kernels; ours
ran on one GPU, not over NVLink.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile.all_reduce.schedules import AllReduceSchedule, Multimem, OneShot, TwoShot
from tinygrad_nv.tile.all_reduce.spec import MOST_WORLD, AllReduceSpec
from tinygrad_nv.tile.all_reduce.workspace import MOST_CHANNELS
from tinygrad_nv.tile.template import GPU

C = TypeVar("C", bound=AllReduceSchedule)
KB, MB = 1 << 10, 1 << 20
# by the number of GPUs, the least of these that is not below: bytes up to which it is taken
ONE_SHOT = {2: 64 * MB, 4: 2 * MB, 6: 512 * KB, 8: 256 * KB}
TWO_SHOT = {2: 64 * MB, 4: 32 * MB, 6: 512 * KB, 8: 256 * KB}
MULTIMEM = {6: 64 * MB, 8: 64 * MB}
LATENCY: dict[type, float] = {OneShot: 5.3e-6, TwoShot: 12.5e-6, Multimem: 10.4e-6}
RATE: dict[type, float] = {OneShot: 350e9, TwoShot: 260e9, Multimem: 68e9}
THREADS = 512


@dataclass(frozen=True)
class Estimate:
    """The estimated seconds of a schedule, nearly all of which the links between GPUs take."""
    seconds: float
    bound: str = "links"


def choose(world: int, nbytes: int, multicast: bool = False) -> type[AllReduceSchedule] | None:
    """The template for a message; None where NCCL is faster. `multicast`: there is a multicast object. Raises
    `SpecError` for a number of GPUs that there is no template for."""
    if not 2 <= world <= MOST_WORLD: raise SpecError(f"an all-reduce over {world} GPUs", f"2 to {MOST_WORLD}")
    size = next(each for each in ONE_SHOT if world <= each)
    if nbytes <= ONE_SHOT[size]: return OneShot
    if multicast and nbytes <= MULTIMEM.get(size, 0): return Multimem
    return TwoShot if nbytes <= TWO_SHOT[size] else None


def candidates(spec: AllReduceSpec, kind: type[C]) -> tuple[C, ...]:
    """CTAs of 512 threads with a vector for each of them, or a row, up to all channels."""
    made = kind(threads=THREADS)
    units = spec.vectors // made.unit(spec) if spec.columns else -(-spec.vectors // THREADS)
    return (replace(made, ctas=max(1, min(MOST_CHANNELS, units))),)


def default(spec: AllReduceSpec, gpu: GPU) -> AllReduceSchedule:
    """By size; where NCCL would be faster, two-shot."""
    return candidates(spec, choose(spec.world, spec.nbytes) or TwoShot)[0]


def share(kind: type[AllReduceSchedule], world: int) -> float:
    """Bytes that come in from peers, of each byte of a message."""
    shares = {OneShot: world - 1, TwoShot: 2 * (world - 1) / world, Multimem: 2 / world}
    return shares[kind]


def cost(spec: AllReduceSpec, s: Any, gpu: GPU) -> Estimate:
    """Latency and bytes that come in from peers."""
    kind = type(s)
    return Estimate(LATENCY[kind] + spec.nbytes * share(kind, spec.world) / RATE[kind])
