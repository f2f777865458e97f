"""Filters by mass (tile/sampling/spec.py): the threshold by radix selection from the top, four bits a pass.

Protocol: rows are shared out among parts, each with a workspace for one row. At first elements are sifted: if
those above some floor have the mass, the threshold is not below it, and others add 0 to the sums that are
compared with the target. The floor is one of `DOWN`, parts of the way from the largest to the mean, by sums
that may be rounded otherwise, and is given up if sums in the order of the spec do not agree.

A pass has a sum for each of the 16 digits that may come next, side by side in vectors; an element is compared
with all of them at once. `TOGETHER` lanes of the spec go side by side, since a sum is a chain of additions
that none may reorder. What is below the digits found, or has no weight, is left behind: each pass writes what
remains in order to the workspace, over what it has read. A row whose target is infinity is copied.

    floor = max x - (max x - mean x) · the least of DOWN of which the elements above have the mass
    work = keys of x ≥ floor with weight ≠ 0, lane by lane; of all x if these have not
    found = 0
    for shift in 28, 24, … 0:
      for each lane: acc[d] += weight where key ≥ found + d · 2^shift;  keep if key ≥ found and weight ≠ 0
      found += 2^shift · (how many d have Σ_lanes acc[d] ≥ target, less one, at least 0)
    out = x where key(x) ≥ found, else -inf
"""
from __future__ import annotations

from typing import ClassVar

from tinygrad_nv.cpu.kernel import CPUKernel, kernel
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.cpu.template import CPUSchedule
from tinygrad_nv.tile.sampling.spec import DIGITS, LANES, NUMBERS, FilterSpec

TOGETHER = 4
SHORT = 64                  # elements of a lane up to which a floor is not worth its search
DOWN = (0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.8, 1.1)
PART_ELEMENTS = 1 << 12     # fewer are done before another thread has begun


class CPUThreshold(CPUSchedule):
    """Shares of rows."""
    template: ClassVar[str] = "threshold"


def problems(spec: FilterSpec, schedule: CPUThreshold) -> list[str]:
    """Why there is no kernel; empty when there is one."""
    return ["counts, whose order does not matter"] * spec.counted


def default(spec: FilterSpec, target: CPU) -> CPUThreshold:
    """The schedule."""
    enough = max(1, spec.rows * spec.size // PART_ELEMENTS)
    return CPUThreshold(target.isa, min(target.threads, spec.rows, enough))


def build(spec: FilterSpec, schedule: CPUThreshold) -> CPUKernel:
    """The kernel: out, workspace, logits, weights, numbers."""
    given = [("float", "all_logits"), ("float", "all_weights"), ("float", "numbers")]
    held, parts = LANES * spec.length, schedule.parts
    words = 2 * held    # of the workspace, of a part
    body = f"""
  u32 *work = all_work + core_id * {words}LL; float *mass = (float *)(work + {held});
  for (s64 row = core_id * {spec.rows}LL / {parts}; row < (core_id + 1) * {spec.rows}LL / {parts}; row++) {{
    const float *logits = all_logits + row * {spec.size};
    float *out = all_out + row * {spec.size};
    const float goal = numbers[row * {NUMBERS} + {int(spec.number)}];
    const float *weights = all_weights + row * {spec.size};
    u32 found = 0;
    if (goal != __builtin_inff()) {{
      s32 count[{LANES}];
      {_floor(spec)}
      {_sift(spec)}
      for (int shift = 28; shift >= 0; shift -= 4) {{ {_turn(spec, schedule)} }}
    }}
    for (s64 i = 0; i < {spec.size}; i += W) {{
      const vf x = load_n_f32(logits + i, {spec.size} - i);
      store_n_f32(out + i, pick((vu)ordered(x) >= found, x, (vf)-__builtin_inff()), {spec.size} - i);
    }}
  }}"""
    return kernel(f"threshold_{spec.rows}x{spec.size}", schedule.isa, body,
                  [("float", "all_out"), ("u32", "all_work")], given, parts=parts,
                  workspace_bytes=4 * words * parts, before=_ORDERED)


def _floor(spec: FilterSpec) -> str:
    """A key below which nothing is kept, by sums that may be wrong."""
    if spec.length <= SHORT: return "u32 floor = 0;"
    levels, count = ", ".join(f"{x}f" for x in DOWN), len(DOWN)
    return f"""
      vf best = (vf)-__builtin_inff(), sum = (vf)0.f; vi finite = (vi)0;
      for (s64 i = 0; i + W <= {spec.size}; i += W) {{
        const vf x = load_f32(logits + i); const vi is = x > -__builtin_inff();
        best = max_(x, best); finite -= is; sum += as_f(as_i(x) & is);
      }}
      const float down[{count}] = {{{levels}}}, most = top_(best);
      const float range = most - sum_(sum) / (float)sum_i(finite);
      vf near[{count}];
      for (int d = 0; d < {count}; d++) near[d] = (vf)0.f;
      for (s64 i = 0; i + W <= {spec.size}; i += W) {{
        const vf x = load_f32(logits + i), w = load_f32(weights + i);
        for (int d = 0; d < {count}; d++) near[d] += as_f((x >= most - range * down[d]) & as_i(w));
      }}
      u32 floor = 0;
      for (int d = {count} - 1; d >= 0; d--)
        if (sum_(near[d]) > goal * 1.001f) floor = (u32)ordered((vf)(most - range * down[d]))[0];"""


def _sift(spec: FilterSpec) -> str:
    """The elements that may be kept, lane by lane, to the workspace, and how many of each lane they are."""
    return f"""
      for (float total = -1.f; !(total >= goal);) {{
        total = 0.f;
        for (s64 lane = 0; lane < {LANES}; lane++) {{
          const s64 start = lane * {spec.length}, end = start + {spec.length};
          const s64 here = end < {spec.size} ? {spec.length} : {spec.size} - start;
          s32 kept = 0;
          for (s64 j = 0; j < here; j += W) {{
            const vu key = (vu)ordered(load_n_f32(logits + start + j, here - j));
            const vi within = (key >= floor) & (iota_() < (s32)(here - j))
                              & (load_n_f32(weights + start + j, here - j) != 0.f);
            if (!any_(within)) continue;
            const s64 many = here - j < W ? here - j : W;
            for (int i = 0; i < many; i++) {{
              work[start + kept] = key[i]; mass[start + kept] = weights[start + j + i]; kept -= within[i];
            }}
          }}
          count[lane] = kept;
          float sum = 0.f;
          for (s64 j = 0; j < kept; j++) sum += mass[start + j];
          total += sum;
        }}
        if (floor == 0) break;
        if (!(total >= goal)) floor = 0;
      }}"""


def _turn(spec: FilterSpec, schedule: CPUThreshold) -> str:
    """A pass."""
    vectors, lines = range(DIGITS // schedule.isa.lanes), "\n".join
    names = [f"a{u}_{v}" for u in range(TOGETHER) for v in vectors]
    starts = [f"const s64 at{u} = (lane + {u}) * {spec.length};" for u in range(TOGETHER)]
    least = "".join(f" if (count[lane + {u}] < least) least = count[lane + {u}];" for u in range(1, TOGETHER))
    rest = [f"for (s64 j = least; j < count[lane + {u}]; j++) {{ {_step(u, vectors)} }}"
            for u in range(TOGETHER)]
    sums = [f"total[{v}] += a{u}_{v};" for u in range(TOGETHER) for v in vectors]
    return f"""
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
            {lines(_step(u, vectors) for u in range(TOGETHER))}
          }}
          {lines(rest)}
          {lines(sums)}
          {" ".join(f"count[lane + {u}] = kept{u};" for u in range(TOGETHER))}
        }}
        s32 reached = 0;
        for (int v = 0; v < {len(vectors)}; v++) reached -= sum_i(total[v] >= goal);
        if (reached > 0) found += (u32)(reached - 1) << shift;"""


def _step(lane: int, vectors: range) -> str:
    """Element j of a lane: to the sums, and to those that remain."""
    added = " ".join(f"a{lane}_{v} += as_f((vi)((vu)key >= edge[{v}]) & as_i((vf)weight));" for v in vectors)
    return (f"{{ const u32 key = work[at{lane} + j]; const float weight = mass[at{lane} + j]; {added} "
            f"work[at{lane} + kept{lane}] = key; mass[at{lane} + kept{lane}] = weight; "
            f"kept{lane} += (key >= found) & (weight != 0.f); }}")


# negative numbers with all bits flipped, the others with the sign set
_ORDERED = """
INLINE vi ordered(vf x) { return as_i(x) ^ ((as_i(x) >> 31) | (s32)0x80000000); }
INLINE int any_(vi x) { return __builtin_reduce_or(x) != 0; }
"""
