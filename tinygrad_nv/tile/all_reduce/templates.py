"""The templates of an all-reduce on GPUs."""
from __future__ import annotations

from collections.abc import Iterator

from tinygrad_nv.tile.all_reduce.cost import candidates, cost, default
from tinygrad_nv.tile.all_reduce.schedules import AllReduceSchedule, Multimem, OneShot, TwoShot
from tinygrad_nv.tile.all_reduce.spec import VECTOR_BYTES, AllReduceSpec
from tinygrad_nv.tile.all_reduce.workspace import LINE_BYTES, MOST_BYTES, MOST_CHANNELS
from tinygrad_nv.tile.template import Family, Template, lazy_build, legality

MOST_THREADS = 1024
MOST_CHUNKS = 8         # vectors of a row that a thread keeps in registers, 4 each


def _problems(spec: AllReduceSpec, s: AllReduceSchedule, arch: str) -> Iterator[str]:
    if not 1 <= s.channels <= MOST_CHANNELS: yield f"{s.channels} channels, at most {MOST_CHANNELS}"
    if s.ctas > s.channels: yield f"{s.ctas} CTAs, and {s.channels} channels"
    if type(s) is Multimem and arch < "sm_90": yield f"multimem on {arch}, which is of sm_90"
    if s.threads % 32 or s.threads > MOST_THREADS:
        yield f"{s.threads} threads: a multiple of 32 up to {MOST_THREADS}"
    if s.half_bytes % VECTOR_BYTES:
        yield f"halves of {s.half_bytes} bytes, not a multiple of {VECTOR_BYTES}"
        return
    if (nbytes := s.channels * (LINE_BYTES + 2 * s.half_bytes)) > MOST_BYTES:
        yield f"a workspace of {nbytes} bytes, at most {MOST_BYTES}"
    if spec.columns % spec.of_vector:
        yield f"rows of {spec.columns} elements, not a multiple of {spec.of_vector} (16 bytes)"
        return
    unit = s.unit(spec)
    if (room := s.vectors_held(spec)) < unit:
        yield f"a row of {unit * VECTOR_BYTES} bytes, and a half has room for {room * VECTOR_BYTES}"
    if spec.columns and -(-unit // s.threads) > MOST_CHUNKS:
        yield f"a row of {unit} vectors by {s.threads} threads, at most {MOST_CHUNKS} each"


problems = legality(_problems)

KERNEL = "tinygrad_nv.tile.all_reduce.kernel"
ONE_SHOT = Template(OneShot.template, AllReduceSpec, OneShot, problems,
                    lambda spec, gpu: candidates(spec, OneShot), lazy_build(KERNEL, "one_shot"), cost)
TWO_SHOT = Template(TwoShot.template, AllReduceSpec, TwoShot, problems,
                    lambda spec, gpu: candidates(spec, TwoShot), lazy_build(KERNEL, "two_shot"), cost)
MULTIMEM = Template(Multimem.template, AllReduceSpec, Multimem, problems,
                    lambda spec, gpu: candidates(spec, Multimem), lazy_build(KERNEL, "multimem"), cost)
FAMILY = Family("all_reduce", (ONE_SHOT, TWO_SHOT, MULTIMEM), defaults=default)
