"""The documents of an attention (tile/attention/documents.py), in C: each as if it were an attention alone.

Protocol: `each` is a loop over the documents of key head b1 of element b0 of the batch, in order. Inside,
`lead` is the first token of one, `s_q` and `s_kv` the token after its last: they hide the kernel's own. Runs
of tokens that are no document's are given to what is written `outside`. So blocks of rows and of keys begin
with a document and are of one alone: numbers are computed as if the document were the whole row, to the bit,
what lies between documents takes no time, and nothing of one is ever multiplied by another's. Bounds that are
wrong give wrong numbers, but nothing beside the operands is read or written.
"""
from __future__ import annotations

from tinygrad_nv.tile.attention.documents import bounds
from tinygrad_nv.tile.attention.spec import AttentionSpec
from tinygrad_nv.tile.expression import Load

EXTENTS = """
INLINE s64 smaller(s64 a, s64 b) { return a < b ? a : b; }
INLINE s64 larger(s64 a, s64 b) { return a > b ? a : b; }"""


def each(spec: AttentionSpec, inside: str, outside: str) -> str:
    """The loop. Needs `EXTENTS`."""
    first, end = (f"(x{load.parameter} + {_start(load)})" for load in bounds(spec))
    return f"""{{
    const s32 *begins = {first}, *ends = {end};
    for (s64 from = 0, until = 0; from < {spec.s_q}; from = until) {{
      const int seen = begins[from] < ends[from] && ends[from] > from;
      if (seen) until = smaller(ends[from], {spec.s_q});
      else for (until = from + 1; until < {spec.s_q} && begins[until] >= ends[until];) until++;
      const s64 lead = from, s_q = until, s_kv = until;
      if (seen) {{ {inside} }} else {{ {outside} }}
    }}
  }}"""


def _start(load: Load) -> str:
    b, heads, _ = load.batch or (0, 0, 0)
    return f"{load.offset} + b0 * (s64){b} + b1 * (s64){heads}"
