"""The schedule of a decode attention, from its spec and the architecture alone.

Protocol: `default(spec, arch)` is a schedule that the template takes, or None where it takes none. Its block
of keys, its splits and with them the bits of the result do not depend on the number of requests.

    rows      16 for each warp along them, up to 64
    warps     four in all, those left over divide the keys; fewer where shared memory is too small
    keys      a step of about 32 KiB
    stages    as many as leave room for two CTAs, at least 2 and at most 4
    splits    of at least 128 KiB for each 16 rows: what a split leaves in the workspace is then below a
              tenth of what it reads
"""
from __future__ import annotations

from tinygrad_nv.tile import limits
from tinygrad_nv.tile.decode.combine import MOST_SPLITS
from tinygrad_nv.tile.decode.legality import problems
from tinygrad_nv.tile.decode.plan import Plan
from tinygrad_nv.tile.decode.spec import DecodeSpec
from tinygrad_nv.tile.schedule import Schedule

STEP_BYTES, SPLIT_BYTES = 32 << 10, 128 << 10


def default(spec: DecodeSpec, arch: str) -> Schedule | None:
    """A schedule, or None."""
    wanted = 1 if spec.rows <= 16 else 2 if spec.rows <= 32 else 4
    for rows in (4, 2, 1):
        for groups in (4, 2, 1):
            if rows > wanted or rows * groups > 4: continue
            made = _with(spec, arch, rows, groups)
            if not problems(made, spec, arch): return made
    return None


def _with(spec: DecodeSpec, arch: str, rows: int, groups: int) -> Schedule:
    """That of so many warps along rows and keys."""
    key_bytes = (spec.d + spec.d_v) * spec.k.dtype.itemsize
    keys = 16
    while keys < 64 and 2 * keys * groups * key_bytes <= STEP_BYTES: keys *= 2
    least = 128
    while 2 * least * key_bytes <= SPLIT_BYTES * rows: least *= 2
    made = Schedule(template="decode").block(16 * rows, keys * groups).k(least).warps(rows, groups) \
        .split(MOST_SPLITS).stages(2)
    room = limits.SMEM_BYTES.get(arch, 0) // 2
    while made.depth < 4 and Plan(spec, made.stages(made.depth + 1)).smem_bytes <= room:
        made = made.stages(made.depth + 1)
    return made
