"""Filters by mass (tile/sampling.py): the threshold by radix selection from the top, four bits a pass.

Protocol: rows are shared out among parts, each with a workspace for one row. A pass has a sum for each of the
16 digits that may come next, side by side in vectors; an element is compared with all of them at once.
`TOGETHER` lanes of the spec go side by side, since a sum is a chain of additions that none may reorder. What
is below the digits found, or has no weight, adds 0 to every later sum of its lane: each pass leaves it
behind, and writes what remains in order to the workspace, over what it has read. The later passes see little.
A row whose target is infinity is copied.

    work = keys;  found = 0
    for shift in 28, 24, … 0:
      for each lane: acc[d] += weight where key ≥ found + d · 2^shift;  keep if key ≥ found and weight ≠ 0
      found += 2^shift · (how many d have Σ_lanes acc[d] ≥ target, less one, at least 0)
    out = x where key(x) ≥ found, else -inf
"""
from __future__ import annotations

from tinygrad_nv.cpu.kernel import CPUKernel, kernel
from tinygrad_nv.cpu.machine import CPUMachine
from tinygrad_nv.cpu.schedule import CPUSchedule
from tinygrad_nv.tile.sampling import DIGITS, LANES, NUMBERS, FilterSpec

TEMPLATE = "threshold"
TOGETHER = 4
OPERATIONS = 2 * DIGITS     # an element, in the first pass
PART_ELEMENTS = 1 << 12     # fewer are done before another thread has begun


def default(spec: FilterSpec, machine: CPUMachine) -> CPUSchedule:
    """The schedule."""
    enough = max(1, spec.rows * spec.size // PART_ELEMENTS)
    return CPUSchedule(TEMPLATE, machine.isa, min(machine.threads, spec.rows, enough))


def build(spec: FilterSpec, schedule: CPUSchedule) -> CPUKernel:
    """The kernel: out, workspace, logits, weights unless they are counted, numbers."""
    given = [("float", "all_logits"), *[("float", "all_weights")] * (not spec.counted), ("float", "numbers")]
    vectors, held, parts = range(DIGITS // schedule.isa.lanes), LANES * spec.length, schedule.parts
    words = held * (1 if spec.counted else 2)   # of the workspace, of a part
    names = [f"a{u}_{v}" for u in range(TOGETHER) for v in vectors]
    starts = [f"const s64 at{u} = (lane + {u}) * {spec.length};" for u in range(TOGETHER)]
    least = "".join(f" if (count[lane + {u}] < least) least = count[lane + {u}];" for u in range(1, TOGETHER))
    rest = [f"for (s64 j = least; j < count[lane + {u}]; j++) {{ {_step(spec, u, vectors)} }}"
            for u in range(TOGETHER)]
    sums = [f"total[{v}] += a{u}_{v};" for u in range(TOGETHER) for v in vectors]
    weights = "" if spec.counted else f"""
  const float *weights = all_weights + row * {spec.size};
  float *kept_weights = (float *)(work + {held});"""
    from_weights = "" if spec.counted else "const float *mass = shift == 28 ? weights : kept_weights;"
    lines = "\n".join
    body = f"""
  u32 *work = all_work + core_id * {words}LL;
  for (s64 row = core_id * {spec.rows}LL / {parts}; row < (core_id + 1) * {spec.rows}LL / {parts}; row++) {{
  const float *logits = all_logits + row * {spec.size};
  float *out = all_out + row * {spec.size};
  const float goal = numbers[row * {NUMBERS} + {int(spec.number)}];{weights}
  u32 found = 0;
  if (goal != __builtin_inff()) {{
  for (s64 i = 0; i < {spec.size}; i += W)
    store_n_u32(work + i, ordered(load_n_f32(logits + i, {spec.size} - i)), {spec.size} - i);
  s32 count[{LANES}];
  for (s32 lane = 0; lane < {LANES}; lane++) {{
    s32 left = {spec.size} - lane * {spec.length};
    count[lane] = left < 0 ? 0 : left < {spec.length} ? left : {spec.length};
  }}
  for (int shift = 28; shift >= 0; shift -= 4) {{
    {from_weights}
    vu edge[{len(vectors)}]; vf total[{len(vectors)}];
    for (int v = 0; v < {len(vectors)}; v++) {{
      edge[v] = found + ((vu)(iota_() + v * W) << (u32)shift);
      total[v] = (vf)0.f;
    }}
    for (s64 lane = 0; lane < {LANES}; lane += {TOGETHER}) {{
      {lines(starts)}
      vf {", ".join(f"{name} = (vf)0.f" for name in names)};
      s32 {", ".join(f"kept{u} = 0" for u in range(TOGETHER))}, least = count[lane];{least}
      for (s64 j = 0; j < least; j++) {{
        {lines(_step(spec, u, vectors) for u in range(TOGETHER))}
      }}
      {lines(rest)}
      {lines(sums)}
      {" ".join(f"count[lane + {u}] = kept{u};" for u in range(TOGETHER))}
    }}
    s32 reached = 0;
    for (int v = 0; v < {len(vectors)}; v++) reached -= sum_i(total[v] >= goal);
    if (reached > 0) found += (u32)(reached - 1) << shift;
  }}
  }}
  for (s64 i = 0; i < {spec.size}; i += W) {{
    const vf x = load_n_f32(logits + i, {spec.size} - i);
    const vi keep = (vu)ordered(x) >= found;
    store_n_f32(out + i, pick(keep, x, (vf)-__builtin_inff()), {spec.size} - i);
  }}
  }}"""
    return kernel(f"threshold_{spec.rows}x{spec.size}", schedule.isa, body,
                  [("float", "all_out"), ("u32", "all_work")], given, parts=parts,
                  workspace_bytes=4 * words * parts, before=_ORDERED)


def _step(spec: FilterSpec, lane: int, vectors: range) -> str:
    """Element j of a lane: to the sums, and to those that remain."""
    weight = "1.f" if spec.counted else f"mass[at{lane} + j]"
    added = " ".join(f"a{lane}_{v} += as_f((vi)((vu)key >= edge[{v}]) & as_i((vf)weight));" for v in vectors)
    stored = "" if spec.counted else f"kept_weights[at{lane} + kept{lane}] = weight; "
    kept = "key >= found" if spec.counted else "(key >= found) & (weight != 0.f)"
    return (f"{{ const u32 key = work[at{lane} + j]; const float weight = {weight}; {added} "
            f"work[at{lane} + kept{lane}] = key; {stored}kept{lane} += {kept}; }}")


# negative numbers with all bits flipped, the others with the sign set
_ORDERED = "INLINE vi ordered(vf x) { return as_i(x) ^ ((as_i(x) >> 31) | (s32)0x80000000); }"
