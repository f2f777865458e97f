"""The router of a mixture of experts (tile/router/spec.py) on a CPU, in one launch.

Protocol: one part does all, for a step of decoding takes microseconds and the order needs all tokens.

    for each token
      scores, choices                            vectors of experts, padded with NaN, which is never chosen
      −inf for groups that are not among the best
      k times: the largest choice after the last one chosen, the lower number first
      weights of those
    count of each expert; offsets; order: each slot behind those of its expert

"After the last one" compares choice and number, so nothing is marked, and −inf is chosen like any other.
Where fewer than k choices are numbers, the last expert takes the place of those that are not.

The order of slots whose experts are given is a counting sort, by one part, too.
"""
from __future__ import annotations

from typing import ClassVar

from tinygrad_nv.cpu.expression import c_float
from tinygrad_nv.cpu.kernel import CPUKernel, c_type, kernel, up
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.cpu.template import CPUSchedule, template
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.order import BY_ROW
from tinygrad_nv.tile.router.spec import EPSILON, GroupRowsSpec, RouterSpec
from tinygrad_nv.tile.template import Family

MOST_EXPERTS = 1 << 15      # whose scores, choices and counts lie on a stack
LOG2_E = "0x1.715476p0f"


class CPURouter(CPUSchedule):
    """Nothing to choose."""
    template: ClassVar[str] = "router"


def default(spec: RouterSpec, target: CPU) -> CPURouter:
    """The schedule."""
    return CPURouter(target.isa)


def problems(spec: RouterSpec, s: CPURouter) -> list[str]:
    """Why a router cannot have a schedule; empty when it can."""
    out = [f"{s.parts} parts of a router, 1 is needed"] * (s.parts != 1)
    return out + [f"{spec.experts} experts, at most {MOST_EXPERTS}"] * (spec.experts > MOST_EXPERTS)


def build(spec: RouterSpec, s: CPURouter) -> CPUKernel:
    """The kernel: experts, weights, order, offsets; logits, bias."""
    policy, count = spec.policy, spec.experts
    body = f"""
  float scores[{up(count, 16)}] __attribute__((aligned(64)));
  float choices[{up(count, 16)}] __attribute__((aligned(64)));
  for (s64 e = 0; e <= {count}; e++) offsets[e] = 0;
  for (s64 t = 0; t < {spec.tokens}; t++) {{
    __typeof__(logits) from = logits + t * {count};
    s32 *const chosen = experts + t * {policy.k};
    float *const to = weights + t * {policy.k};
    {_scores(spec)}
    {_in_groups(spec) if policy.groups > 1 else ''}
    float last = __builtin_inff();
    s32 number = -1;
    for (s64 j = 0; j < {policy.k}; j++) {{
      number = next_(choices, last, number);
      last = choices[number];
      chosen[j] = number;
      to[j] = scores[number];
      offsets[number + 1]++;
    }}
    {_weights(spec)}
  }}
  s32 next[{count}];
  for (s64 e = 0; e < {count}; e++) {{
    next[e] = offsets[e];
    offsets[e + 1] += offsets[e];
  }}
  for (s64 slot = 0; slot < {spec.slots}; slot++) order[next[experts[slot]]++] = (s32)slot;"""
    inputs = [(c_type(spec.dtype), "logits"), *[("float", "bias")] * spec.biased]
    return kernel(f"router_{spec.tokens}x{count}", s.isa, body,
                  [("s32", "experts"), ("float", "weights"), ("s32", "order"), ("s32", "offsets")], inputs,
                  before=_next(count))


def _next(count: int) -> str:
    """The function that finds the largest choice behind (last, number), the lower number first."""
    return f"""
static __attribute__((noinline, unused)) s32 next_(const float *choices, float last, s32 number) {{
  vf top = (vf)-__builtin_inff();
  vi where = (vi)0x7fffffff, at = iota_();
  for (s64 e = 0; e < {count}; e += W, at += W) {{
    const vf x = *(const vf *)(choices + e);
    const vi behind = (x < last) | ((x == last) & (at > number));
    const vi better = behind & ((x > top) | ((x == top) & (at < where)));
    top = pick(better, x, top);
    where = pick_i(better, at, where);
  }}
  float best = top[0];
  s32 found = where[0];
  for (int lane = 1; lane < W; lane++)
    if (top[lane] > best || (top[lane] == best && where[lane] < found)) best = top[lane], found = where[lane];
  return found < {count} ? found : {count - 1};
}}"""


def _scores(spec: RouterSpec) -> str:
    """C of scores and choices."""
    count, kind, score = spec.experts, short(spec.dtype), spec.policy.score
    each = f"for (s64 e = 0; e < {count}; e += W)"
    read = f"load_n_{kind}(from + e, {count} - e)"
    inside = f"iota_() < (s32)({count} - e)"
    value = {"sigmoid": f"1.f / (1.f + exp2_({read} * -{LOG2_E}))"}.get(score, read)
    lines = [f"{each} *(vf *)(scores + e) = {value};"]
    if score == "softmax": lines = [f"""vf most = (vf)-__builtin_inff(), total = (vf)0.f;
    {each} most = max_(pick({inside}, {read}, most), most);
    const float top = top_(most);
    {each} {{
      const vf x = exp2_(({read} - top) * {LOG2_E});
      *(vf *)(scores + e) = x;
      total += pick({inside}, x, (vf)0.f);
    }}
    const float sum = sum_(total);
    {each} *(vf *)(scores + e) /= sum;"""]
    bias = f" + load_n_f32(bias + e, {count} - e)" if spec.biased else ""
    return "\n    ".join([*lines, f"{each} *(vf *)(choices + e) = pick({inside}, *(vf *)(scores + e){bias}, "
                          "(vf)__builtin_nanf(\"\"));"])


def _in_groups(spec: RouterSpec) -> str:
    """C that makes choices −inf in groups that are not among the best."""
    policy, within = spec.policy, spec.experts // spec.policy.groups
    value = "first" if policy.group_score == "max" else "first + second"
    return f"""float of[{policy.groups}];
    for (s64 g = 0; g < {policy.groups}; g++) {{
      float first = -__builtin_inff(), second = first;
      for (s64 e = g * {within}; e < (g + 1) * {within}; e++) {{
        const float x = choices[e];
        if (x > first) second = first, first = x;
        else if (x > second) second = x;
      }}
      of[g] = {value};
    }}
    for (s64 g = 0; g < {policy.groups}; g++) {{
      s64 before = 0;
      for (s64 h = 0; h < {policy.groups}; h++) before += of[h] > of[g] || (of[h] == of[g] && h < g);
      if (before >= {policy.top_groups})
        for (s64 e = g * {within}; e < (g + 1) * {within}; e++) choices[e] = -__builtin_inff();
    }}"""


def _weights(spec: RouterSpec) -> str:
    """C that makes weights of the chosen experts' scores."""
    policy = spec.policy
    each = f"for (s64 j = 0; j < {policy.k}; j++)"
    lines = []
    if policy.score == "chosen": lines.append(f"""float most = to[0], whole = 0.f;
    {each} most = to[j] > most ? to[j] : most;
    {each} whole += to[j] = exp2_((vf)((to[j] - most) * {LOG2_E}))[0];
    {each} to[j] /= whole;""")
    if policy.score == "chosen_sigmoid":
        lines.append(f"{each} to[j] = 1.f / (1.f + exp2_((vf)(to[j] * -{LOG2_E}))[0]);")
    if policy.renormalize:
        lines.append(f"float all = 0.f; {each} all += to[j];")
        lines.append(f"{each} to[j] /= all + {c_float(EPSILON)};")
    if policy.scale != 1: lines.append(f"{each} to[j] *= {c_float(policy.scale)};")
    return "\n    ".join(lines)


class CPUGroupRows(CPUSchedule):
    """Nothing to choose."""
    template: ClassVar[str] = "group_rows"


def default_rows(spec: GroupRowsSpec, target: CPU) -> CPUGroupRows:
    """The schedule."""
    return CPUGroupRows(target.isa)


def problems_rows(spec: GroupRowsSpec, s: CPUGroupRows) -> list[str]:
    """Why slots cannot be sorted by a schedule; empty when they can."""
    out = [f"{s.parts} parts of a sort, 1 is needed"] * (s.parts != 1)
    return out + [f"{spec.experts} experts, at most {MOST_EXPERTS}"] * (spec.experts > MOST_EXPERTS)


def build_rows(spec: GroupRowsSpec, s: CPUGroupRows) -> CPUKernel:
    """The kernel: order, offsets; experts; the number of tokens where it is symbolic."""
    count, there = spec.experts, f"m * {spec.k}ll" if spec.symbolic else str(spec.slots)
    body = f"""
  s32 next[{count}];
  for (s64 e = 0; e <= {count}; e++) offsets[e] = 0;
  for (s64 slot = 0; slot < {there}; slot++) if ((u32)experts[slot] < {count}u) offsets[experts[slot] + 1]++;
  for (s64 e = 0; e < {count}; e++) {{
    next[e] = offsets[e];
    offsets[e + 1] += offsets[e];
  }}
  s64 last = offsets[{count}];
  for (s64 slot = 0; slot < {spec.slots}; slot++) {{
    const u32 e = slot < {there} ? (u32)experts[slot] : {count}u;
    if (e < {count}u) order[next[e]++] = (s32)slot;
    else order[last++] = (s32)slot;
  }}"""
    return kernel(f"group_rows_{spec.slots}x{count}", s.isa, body, [("s32", "order"), ("s32", "offsets")],
                  [("s32", "experts")], ["m"] * spec.symbolic)


ROUTER = template(RouterSpec, CPURouter, default, problems, __name__)
ROWS = template(GroupRowsSpec, CPUGroupRows, default_rows, problems_rows, __name__, "build_rows")
FAMILY = Family("router", (ROUTER, ROWS), determinism_class=BY_ROW)
