"""The templates of decode attention."""
from __future__ import annotations

from tinygrad_nv.tile.choose import choose
from tinygrad_nv.tile.decode.defaults import candidates, latent_candidates
from tinygrad_nv.tile.decode.latent.legality import problems as latent_problems
from tinygrad_nv.tile.decode.legality import problems
from tinygrad_nv.tile.decode.schedules import Decode, LatentWgmma
from tinygrad_nv.tile.decode.spec import DecodeSpec
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.legality import legality
from tinygrad_nv.tile.template import GPU, Family, Template, later
from tinygrad_nv.tile.templates import TABLE


def _why_not(spec: DecodeSpec, gpu: GPU) -> str:
    """What is wrong with the default, or that even it is too large."""
    words = "; ".join(TABLE.problems(spec, Decode(), gpu)) or f"d {spec.d} needs more shared memory"
    return f"no kernel for {short(spec.q.dtype)} on {gpu.arch}: {words}"


FAMILY = Family("decode", (
    Template("latent_wgmma", DecodeSpec, LatentWgmma, legality(latent_problems), latent_candidates,
             later("tinygrad_nv.tile.decode.latent.kernel", "latent_attention")),
    Template("decode", DecodeSpec, Decode, legality(problems), candidates,
             later("tinygrad_nv.tile.decode.kernel", "decode_attention")),), chooses=choose, says=_why_not)
