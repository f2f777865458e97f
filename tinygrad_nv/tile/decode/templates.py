"""The templates of decode attention, their candidates, and why none takes a spec.

A schedule is chosen from the spec and the architecture alone. Its block of keys, its splits and with them the
bits of the result do not depend on the number of requests; its stages do.

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
from dataclasses import replace

from tinygrad_nv.tile import limits
from tinygrad_nv.tile.choose import choose
from tinygrad_nv.tile.decode.latent.plan import problems as latent_problems
from tinygrad_nv.tile.decode.plan import MOST_SPLITS, DecodePlan, divide_columns, problems
from tinygrad_nv.tile.decode.schedules import Decode, KeySplits, LatentWgmma
from tinygrad_nv.tile.decode.spec import MOST_ROWS, DecodeSpec
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.order import Ordered
from tinygrad_nv.tile.template import GPU, Family, Template, lazy_build, legality
from tinygrad_nv.tile.templates import TABLE

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


def _why_not(spec: DecodeSpec, gpu: GPU) -> str:
    """Returns the problem of the default, or that even it is too large."""
    words = "; ".join(TABLE.problems(spec, Decode(), gpu)) or f"d {spec.d} needs more shared memory"
    return f"no kernel for {short(spec.q.dtype)} on {gpu.arch}: {words}"


def _choose_ordered(spec: DecodeSpec, gpu: GPU) -> Ordered | None:
    """Splits and steps of keys as of one request with the most rows, so that a chunk of a prompt and a token
    that is decoded have theirs in one order."""
    found = FAMILY.default(replace(spec, batch=1, s_q=spec.s_q if spec.latent else MOST_ROWS), gpu)
    if not isinstance(found, KeySplits) or TABLE.problems(spec, found, gpu): return None
    words = f"{found.template}, keys in steps of {found.block_n}, splits of {found.split_keys} or more"
    return Ordered(found, f"{words} by the request's own length")


FAMILY = Family("decode", (
    Template("latent_wgmma", DecodeSpec, LatentWgmma, legality(latent_problems), latent_candidates,
             lazy_build("tinygrad_nv.tile.decode.latent.kernel", "latent_attention")),
    Template("decode", DecodeSpec, Decode, legality(problems), candidates,
             lazy_build("tinygrad_nv.tile.decode.kernel", "decode_attention"))),
                choice=choose, refusal=_why_not, determinism_class=_choose_ordered)
