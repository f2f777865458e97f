"""Chunks of many tensors in C: which a part has, and where they lie.

Protocol. A part has the chunks from chunks · core_id / parts on. `walk(counts, parts, chunk, kinds, body)` is
C that runs `body` for each, with `t` the tensor, `at` the first element, `n` how many there are, and a
pointer of each kind of `kinds` (C type, name), to the chunk's first element. Parameters of the kernel are
named x0, x1, …
"""
from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def walk(counts: Sequence[int], parts: int, chunk: int, kinds: Sequence[tuple[str, str]], body: str) -> str:
    """The loop."""
    chunks = [-(-count // chunk) for count in counts]
    firsts = list(accumulate(chunks, initial=0))
    names = {name: ", ".join(f"{name}{i}" for i in range(len(counts))) for _, name in kinds}
    tables = "\n".join(f"  {kind} *const all_{name}[] = {{{names[name]}}};" for kind, name in kinds)
    pointers = " ".join(f"{kind} *{name} = all_{name}[t] + at;" for kind, name in kinds)
    return f"""
  static const s64 counts[] = {{{', '.join(map(str, counts))}}}, firsts[] = {{{', '.join(map(str, firsts))}}};
{tables}
  const s64 first = {firsts[-1]}ll * core_id / {parts}, last = {firsts[-1]}ll * (core_id + 1) / {parts};
  s64 t = 0;
  for (s64 c = first; c < last; c++) {{
    while (c >= firsts[t + 1]) t++;
    const s64 at = (c - firsts[t]) * {chunk}, n = counts[t] - at < {chunk} ? counts[t] - at : {chunk};
    {pointers}
{body}
  }}"""
