"""The templates of decode attention."""
from __future__ import annotations

from dataclasses import replace

from tinygrad_nv.tile.choose import choose
from tinygrad_nv.tile.decode.defaults import candidates, latent_candidates
from tinygrad_nv.tile.decode.latent.legality import problems as latent_problems
from tinygrad_nv.tile.decode.legality import problems
from tinygrad_nv.tile.decode.schedules import Decode, KeySplits, LatentWgmma
from tinygrad_nv.tile.decode.spec import MOST_ROWS, DecodeSpec
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.order import Ordered
from tinygrad_nv.tile.template import GPU, Family, Template, lazy_build, legality
from tinygrad_nv.tile.templates import TABLE


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
