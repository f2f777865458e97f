"""The schedule of a decode attention, from its spec and the architecture alone.

Its block of keys, its splits and with them the bits of the result do not depend on the number of requests;
its stages do.

    rows      16 for each warp along them, up to 64
    warps     four in all, those left over divide the keys; fewer where shared memory is too small
    keys      a step of about 32 KiB
    stages    as many as leave room for so many CTAs as an SM has, up to three, at least 2 and at most 5: one
              CTA has latency to hide, of several each hides that of the others
    splits    of at least 128 KiB for each 16 rows: what a split leaves in the workspace is then below a
              tenth of what it reads; of at least 256 KiB in all (with 128 an H100 took 2 to 9 % longer for 64
              and 256 requests of 512 and 2048 tokens, and for one of 2048 tokens 7.3 µs instead of 8.2); so
              many that the heads of one request fill an H100
"""
from __future__ import annotations

from collections.abc import Iterator

from tinygrad_nv.tile import limits
from tinygrad_nv.tile.decode.columns import divide_columns
from tinygrad_nv.tile.decode.combine import MOST_SPLITS
from tinygrad_nv.tile.decode.plan import DecodePlan
from tinygrad_nv.tile.decode.schedules import Decode, LatentWgmma
from tinygrad_nv.tile.decode.spec import DecodeSpec
from tinygrad_nv.tile.template import GPU

STEP_BYTES, SPLIT_BYTES, LEAST_BYTES = 32 << 10, 128 << 10, 256 << 10
SMS = 132           # of an H100; a GPU with fewer has more CTAs for each
LEAST_SPLITS = 8    # of many heads: a request's length may be far above those of others


def candidates(spec: DecodeSpec, gpu: GPU) -> Iterator[Decode]:
    """With more warps before fewer, which take less shared memory."""
    spec = divide_columns(spec)
    wanted = 1 if spec.rows <= 16 else 2 if spec.rows <= 32 else 4
    for rows in (4, 2, 1):
        for groups in (4, 2, 1):
            if rows <= wanted and rows * groups <= 4: yield _with(spec, gpu.arch, rows, groups)


def _with(spec: DecodeSpec, arch: str, rows: int, groups: int) -> Decode:
    """Returns the schedule of so many warps along rows and keys."""
    key_bytes = (spec.d + spec.d_v) * spec.k.dtype.itemsize
    keys = 16
    while keys < 64 and 2 * keys * groups * key_bytes <= STEP_BYTES: keys *= 2
    least = 128
    while 2 * least * key_bytes <= max(SPLIT_BYTES * rows, LEAST_BYTES): least *= 2
    made = Decode().keys(keys * groups).warps(rows, groups)
    blocks = spec.heads * -(-spec.rows // (16 * rows))
    splits = 1 << max(SMS // blocks, 1).bit_length() - 1
    made = made.split(min(MOST_SPLITS, max(LEAST_SPLITS, splits)), least)
    ctas = spec.batch * blocks * DecodePlan.of(spec, made).most_splits
    room = limits.SMEM_BYTES.get(arch, 0) // min(3, -(-ctas // SMS))
    while made.depth < 5 and DecodePlan.of(spec, made.stages(made.depth + 1)).smem_bytes <= room:
        made = made.stages(made.depth + 1)
    return made


def latent_candidates(spec: DecodeSpec, gpu: GPU) -> Iterator[LatentWgmma]:
    """Yields the candidates of latents, by wgmma: tiles of 32 keys, of which three are on their way where one
    is multiplied. Splits are smaller than workspace and launches of few requests ask for: few rows have much
    less to leave than to read, and with one request multiprocessors have nothing else to do."""
    if not spec.latent: return
    least = 128 if spec.rows <= 16 else 256 if spec.rows <= 64 else 512
    for depth in (6, 5, 4, 3, 2): yield LatentWgmma().keys(32).stages(depth).split(MOST_SPLITS, least)
