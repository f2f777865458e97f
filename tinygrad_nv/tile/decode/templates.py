"""The template of decode attention."""
from __future__ import annotations

from tinygrad_nv.tile.decode.defaults import candidates
from tinygrad_nv.tile.decode.legality import problems
from tinygrad_nv.tile.decode.schedules import Decode
from tinygrad_nv.tile.decode.spec import DecodeSpec
from tinygrad_nv.tile.legality import legality
from tinygrad_nv.tile.template import Family, Template, later

FAMILY = Family("decode", (
    Template("decode", DecodeSpec, Decode, legality(problems), candidates,
             later("tinygrad_nv.tile.decode.kernel", "decode_attention")),))
