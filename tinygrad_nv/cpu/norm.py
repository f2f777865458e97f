"""Rows: norms, softmax, argmax, and what is computed with them (tile/norm/spec.py).

Protocol: a row stays in a cache while it is visited once for each statistic and once for the results, so that
memory is read once and written once. Rows are shared out among parts; a short row, or few of them, are one
part's. A statistic is kept in up to `ACCUMULATORS` vectors that are joined at the end, in one order whatever
the parts.

    for each row:
      s_0, s_1 … = reductions of their terms, W at a time; lanes beyond the row do not count
      for n in steps of W: out[n] = value(n, s_0, s_1 …)

An exponential in a statistic's term that is used again stays in `kept`, on the stack.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tinygrad.dtype import dtypes

from tinygrad_nv.cpu import expression
from tinygrad_nv.cpu.expression import LanePlace, statements
from tinygrad_nv.cpu.kernel import CPUKernel, c_type, kernel
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.cpu.template import CPUSchedule, template
from tinygrad_nv.tile.expression import Apply, Expression, Load, Sum, short, substitute, walk
from tinygrad_nv.tile.gemm.spec import Result
from tinygrad_nv.tile.norm.spec import NormSpec
from tinygrad_nv.tile.operations import OPERATIONS
from tinygrad_nv.tile.order import BY_ROW
from tinygrad_nv.tile.template import Family

ACCUMULATORS = 4
MOST_ELEMENTS = 1 << 18     # of a row, which has to stay in a cache: 1 MB of float32
MOST_KEPT = 2               # such rows on a stack
PART_ELEMENTS = 1 << 14     # fewer are done before another thread has begun
UNROLLED_NODES = 24         # of a term, for several accumulators


class CPUNorm(CPUSchedule):
    """Shares of rows."""
    template: ClassVar[str] = "norm"


def problems(spec: NormSpec, s: CPUNorm) -> list[str]:
    """Why this template does not take rows; empty when it does."""
    out = list(dict.fromkeys(words for root in spec.expressions for words in expression.problems(root)))
    if any(each.result.n not in (0, 1) for each in spec.results): out.append("elements of a result lie apart")
    if spec.groups: out.append("statistics of groups")
    if spec.n > MOST_ELEMENTS: out.append(f"a row of {spec.n} elements, at most {MOST_ELEMENTS}")
    kept = sum(stage.kept is not None for stage in _plan_stages(spec)[0])
    if kept > MOST_KEPT: out.append(f"{kept} terms to be kept on a stack, at most {MOST_KEPT}")
    return out


def default(spec: NormSpec, target: CPU) -> CPUNorm:
    """The default schedule, where none was tuned."""
    enough = max(1, spec.rows * spec.n // PART_ELEMENTS)
    return CPUNorm(target.isa, min(target.threads, spec.rows, enough))


def build(spec: NormSpec, schedule: CPUNorm) -> CPUKernel:
    """The kernel of rows."""
    m, parts = "m" if spec.symbolic else str(spec.m), schedule.parts
    batch = tuple(f"b{i}" for i in range(len(spec.batch)))
    stages, values = _plan_stages(spec)
    rows = _Rows(spec.n, schedule.isa.lanes, batch, len(stages))
    lines = [f"const s64 rows = (s64){' * '.join([m, *map(str, spec.batch)])};",
             f"const s64 first = core_id * rows / {parts}, last = (core_id + 1) * rows / {parts};"]
    lines += [f"float x{stage.array}[{rows.padded_width}] __attribute__((aligned(64)));"
              for stage in stages if stage.kept is not None]
    lines += ["for (s64 row = first; row < last; row++) {", f"const s64 i = row % {m};"]
    over = f"row / {m}"
    for name, extent in reversed(list(zip(batch, spec.batch, strict=True))):
        lines.append(f"const s64 {name} = {over} % {extent};")
        over = f"({over}) / {extent}"
    for number, stage in enumerate(stages): lines += _reduce(stage, number, rows)
    results = list(zip(spec.outputs, values, (each.result for each in spec.results), strict=True))
    along = [each for each in results if each[2].n]
    lines += rows.steps(lambda at, count: _all_stored(along, rows.place(at, count)))
    for number, value, result in results:
        if not result.n: lines += _all_stored([(number, value, result)], rows.place("0", "1"))
    outputs = [(c_type(each.result.dtype), f"out{i}")
               for i, each in zip(spec.outputs, spec.results, strict=True) if not each.beside]
    inputs = [(c_type(dtype), f"x{i}") for i, dtype in enumerate(spec.parameters)]
    return kernel(f"norm_{spec.rows}x{spec.n}", schedule.isa, "\n".join([*lines, "}"]), outputs, inputs,
                  ["m"] if spec.symbolic else [], parts, before=_TOP)


_TOP = """INLINE s32 top_i(vi x) {
  s32 best = x[0];
  for (int i = 1; i < W; i++) best = x[i] > best ? x[i] : best;
  return best;
}"""


@dataclass(frozen=True)
class _Rows:
    """How a row of `n` elements is visited, W lanes at a time."""
    n: int
    lanes: int
    batch: tuple[str, ...]
    statistics: int

    @property
    def padded_width(self) -> int: return -(-self.n // self.lanes) * self.lanes

    def place(self, at: str, count: str) -> LanePlace:
        """The lanes from element `at`. Statistics are s0, s1, …; what is being kept has numbers after
        those."""
        sums = [f"{name}{i}" for name in ("s", "kept") for i in range(self.statistics)]
        return LanePlace(sums, "i", at, self.batch, count)

    def steps(self, body: Callable[[str, str], list[str]], unrolled: int = 1) -> list[str]:
        """C that does `body(at, count)` for all of a row; at first `unrolled` times a step, at n, n + W, …"""
        lines, whole = ["{ s64 n = 0;"], self.n // self.lanes * self.lanes
        for times in dict.fromkeys((unrolled, 1)):
            if self.n < times * self.lanes: continue
            inner = [line for u in range(times) for line in ("{", *body(f"n + {u * self.lanes}", ""), "}")]
            step = times * self.lanes
            lines += [f"for (; n + {step} <= {self.n}; n += {step}) {{", *inner, "}"]
        if whole < self.n: lines += ["{", *body(str(whole), str(self.n - whole)), "}"]
        return [*lines, "}"]


def _reduce(stage: _Stage, number: int, rows: _Rows) -> list[str]:
    """Returns C of s{number} in all lanes."""
    floats = dtypes.is_float(stage.term.dtype)
    vector, pick = ("vf", "pick") if floats else ("vi", "pick_i")
    least = "(vf)-__builtin_inff()" if floats else "(vi)(s32)0x80000000"
    zero = least if stage.op == "max" else f"({vector})0"
    count = ACCUMULATORS if sum(1 for _ in walk(stage.term)) <= UNROLLED_NODES else 1
    names = [f"a{u}" for u in range(count)]

    def join(a: str, b: str) -> str:
        # a number is preferred to NaN: the comparison with one fails
        return f"{a} + {b}" if stage.op == "add" else f"{pick}({b} > {a}, {b}, {a})"

    def step(at: str, tail: str) -> list[str]:
        place, lines = rows.place(at, tail), list[str]()
        if stage.kept is not None:
            lines, value = statements(stage.kept, place, "k")
            lines += [f"const vf kept{number} = {value};", f"store_f32(x{stage.array} + {at}, {value});"]
        made, value = statements(stage.term, place)
        if tail: value = f"{pick}(iota_() < {tail}, {value}, {zero})"
        to = names[int(at.split()[-1]) // rows.lanes if " " in at else 0]
        return [*lines, *made, f"const {vector} v = {value};", f"{to} = {join(to, 'v')};"]

    lines = [f"{vector} s{number};", "{", *(f"{vector} {name} = {zero};" for name in names),
             *rows.steps(step, count)]
    width = count
    while width > 1:
        width //= 2
        lines += [f"{names[u]} = {join(names[u], names[u + width])};" for u in range(width)]
    across = {("add", True): "sum_", ("max", True): "top_", ("add", False): "sum_i", ("max", False): "top_i"}
    return [*lines, f"s{number} = ({vector}){across[stage.op, floats]}(a0);", "}"]


def _all_stored(results: Sequence[tuple[int, Expression, Result]], place: LanePlace) -> list[str]:
    """C that computes and stores results at a place, each with the number of its storage. What several are
    made of the compiler computes once."""
    lines = list[str]()
    for which, (number, value, result) in enumerate(results):
        made, name = statements(value, place, f"v{which}_")
        terms = [(result.m, place.m), (result.n, place.n), *zip(result.batch, place.batch, strict=True)]
        where = " + ".join([str(result.offset), *(f"(s64)({at}) * {by}" for by, at in terms if by)])
        kind = short(result.dtype)
        stored = f"store_n_{kind}(out{number} + {where}, {name}, {place.count});" if place.count else \
            f"store_{kind}(out{number} + {where}, {name});"
        lines += [*made, stored]
    return lines


# **** what is kept ****

@dataclass(frozen=True)
class _Stage:
    """A statistic; of its term the part that is used again, and the number of the array it is read from
    then."""
    op: str
    term: Expression
    kept: Expression | None = None
    array: int = 0


def _plan_stages(spec: NormSpec) -> tuple[list[_Stage], list[Expression]]:
    """Statistics and values of a spec, with what earlier ones keep read from where it is."""
    count, stages = len(spec.statistics), list[_Stage]()
    values = list(spec.expressions)
    for i, each in enumerate(spec.statistics):
        term, values = values[0], values[1:]
        if (kept := _common_part(term, values)) is None:
            stages.append(_Stage(each.op, term))
            continue
        array = len(spec.parameters) + i
        again = {kept: Load(array, dtypes.float32, 0, 1)}
        values = [substitute(value, again) for value in values]
        here = substitute(term, {kept: Sum(kept.dtype, count + i)})
        stages.append(_Stage(each.op, here, kept, array))
    return stages, values


def _common_part(term: Expression, users: list[Expression]) -> Expression | None:
    """The largest part of a term that is costly and which `users` read too."""
    others: set[Expression] = set()
    for root in users: _ = list(walk(root, others))
    found = [node for node in walk(term) if node in others and dtypes.is_float(node.dtype)
             and any(isinstance(part, Apply) and OPERATIONS[part.op].series for part in walk(node))]
    return found[-1] if found else None


NORM = template(NormSpec, CPUNorm, default, problems, __name__)
FAMILY = Family("norm", (NORM,), determinism_class=BY_ROW)
