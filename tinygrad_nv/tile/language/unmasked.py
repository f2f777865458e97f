"""Whether an iteration whose scores are all -inf changes nothing: a proof by computing with terms.

Protocol: `changes_nothing(op, mask, makers)` of a loop and the mask that made its scores. What the loop
carries begins as constants; running maxima are what begins as -inf, and each is the maximum of itself and of
the scores of its row. A row has either seen a score, and its maxima are finite, or it is as it began: an
iteration changes a row only where it has a score, since rows do not mix (`_rows_apart`). The body is computed
for both, with -inf for the scores:

    maxima finite, the rest anything        each value leaves as it entered
    all as it began                         each value is as it began

Terms are constants, what entered, and operations on them; constants are computed as the interpreter does, in
their dtype, where every target gives the same bits. 0 times what a dot multiplies is 0: what masked columns
hold does not matter, NaN included. Loads are read, stores and other effects are not allowed.

What is supposed: scores are -inf, or of a magnitude below 2^127. Of larger ones, and of NaN, a softmax makes
NaN in the block that has them, whether the blocks after it are computed or not.
"""
from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tinygrad.dtype import dtypes

from tinygrad_nv.tile.language.interpret import of_numbers, round_to
from tinygrad_nv.tile.language.ir import Op, Region, Value

Term = tuple[Any, ...]
Makers = Mapping[Value, Op]
ANYTHING: Term = ("anything",)
KEPT = ("apply", "cast", "broadcast", "reshape", "reduce", "dot")
READ = (*KEPT, "constant", "program_id", "iota", "transpose", "load", "load_block", "bitcast")
# element operations whose results have the same bits on every target; exp2 has where they are 0 and 1
EXACT = ("add", "sub", "mul", "max", "min", "less", "not_equal", "and", "or", "xor", "where")
POWERS = ("exp2", "exp2_small")
LARGEST_SCORE = 2.0**127


def constant_of(value: Value, makers: Makers) -> Any:
    """The number that all elements of a value are; None of others."""
    op = makers.get(value)
    while op is not None and op.name in ("broadcast", "reshape"): op = makers.get(op.operands[0])
    return op.attributes["value"] if op is not None and op.name == "constant" else None


def changes_nothing(op: Op, mask: Op, makers: Makers) -> bool:
    """Whether iterations that the mask leaves no scores may be left out."""
    region, initial = op.regions[0], [_outer(each, makers) for each in op.operands[3:]]
    arguments = region.arguments[1:]
    if any(one.name not in READ for one in region.ops) or ANYTHING in initial: return False
    maxima = [i for i, each in enumerate(initial) if each == ("constant", -math.inf)]
    scores = _scores(region, mask, makers)
    if scores is None or not maxima: return False
    if not all(_maximum(region.yields[i], arguments[i], scores, makers) for i in maxima): return False
    if not _rows_apart(region, scores): return False
    seen: dict[Value, Term] = {each: ("finite" if i in maxima else "entered", i)
                               for i, each in enumerate(arguments)}
    fresh = dict(zip(arguments, initial, strict=True))
    return all(_same(region, scores, given, makers) for given in (seen, fresh))


def hides_columns(op: Op, mask: Op, makers: Makers) -> bool:
    """Whether, besides, a column whose score is -inf adds nothing to what its row has of others: to no
    maximum, sum or dot. A row's maximum is finite, or has been -inf so far."""
    if not changes_nothing(op, mask, makers): return False
    region = op.regions[0]
    scores = _scores(region, mask, makers)
    assert scores is not None
    own = [one.result for one in region.ops if one.name == "reduce" and one.operands[0] is scores
           and one.attributes["fn"] == "max"]
    tops = [made for one in region.ops for made in one.results
            if any(_maximum(made, argument, scores, makers) for argument in region.arguments[1:])]
    finite, least = ("finite", 0), ("constant", -math.inf)
    cases = ({scores: least, **dict.fromkeys(own, a), **dict.fromkeys(tops, b)}
             for a, b in ((finite, finite), (least, finite), (least, least)))
    return all(_adds_nothing(region, each, scores, makers) for each in cases)


def _adds_nothing(region: Region, given: Mapping[Value, Term], scores: Value, makers: Makers) -> bool:
    """Whether reductions and dots of a column have their neutral element."""
    known, columns = dict(given), {scores}
    for one in region.ops:
        for result in one.results:
            other = ANYTHING if one.name == "reduce" else _term(one, known, makers)
            known.setdefault(result, other)
        if not any(each in columns for each in one.operands) or one.result is scores: continue
        term = known.get(one.operands[0], ANYTHING)
        if one.name in ("apply", "cast"): columns.update(one.results)
        elif one.name == "reduce" and not one.regions:
            if term != ("constant", -math.inf if one.attributes["fn"] == "max" else 0.0): return False
            if one.attributes["fn"] not in ("max", "add"): return False
        elif one.name != "dot" or term != ("constant", 0.0) or columns & set(one.operands[1:]): return False
    return not columns & set(region.yields)


def _same(region: Region, scores: Value, given: Mapping[Value, Term], makers: Makers) -> bool:
    known = {**given, scores: ("constant", -math.inf)}
    for one in region.ops:
        for result in one.results: known.setdefault(result, _term(one, known, makers))
    return all(known.get(made, ANYTHING) == given[argument]
               for argument, made in zip(region.arguments[1:], region.yields, strict=True))


def _scores(region: Region, mask: Op, makers: Makers) -> Value | None:
    """Returns what a mask's scores are in the end: further masks, casts and positive factors, with nothing
    else that looks at those before."""
    value = mask.result
    while True:
        uses = [one for one in region.ops if value in one.operands]
        if value in region.yields or not uses: return None
        if len(uses) > 1 or not _leaves(uses[0], value, makers): return value
        value = uses[0].result


def _leaves(op: Op, value: Value, makers: Makers) -> bool:
    """Whether an operation leaves -inf what is -inf, and makes nothing else -inf but by masking it."""
    if op.name == "cast": return op.result.dtype == dtypes.float32
    if op.name != "apply": return False
    fn = op.attributes["fn"]
    if fn == "where": return op.operands[1] is value and constant_of(op.operands[2], makers) == -math.inf
    if fn != "mul": return False
    factor = constant_of(op.operands[0 if op.operands[1] is value else 1], makers)
    return factor is not None and 0 < float(round_to(factor, op.result.dtype)) < math.inf


def _maximum(made: Value, argument: Value, scores: Value, makers: Makers) -> bool:
    """Whether a value is the maximum of itself and of the scores of each row."""
    op = makers.get(made)
    if op is None or op.name != "apply" or op.attributes["fn"] != "max" or argument not in op.operands:
        return False
    other = makers.get(next(each for each in op.operands if each is not argument))
    return other is not None and other.name == "reduce" and not other.regions and \
        other.attributes["fn"] == "max" and other.attributes["axis"] == 1 and other.operands[0] is scores


def _rows_apart(region: Region, scores: Value) -> bool:
    """Whether a row of what is computed depends on the scores, and on what is carried, of that row alone."""
    rows, tainted = scores.shape[0], {scores, *region.arguments[1:]}
    if any(not each.shape or each.shape[0] != rows for each in region.arguments[1:]): return False
    for op in region.ops:
        if op.results and op.result is scores: continue
        mine = [each for each in op.operands if each in tainted]
        if not mine: continue
        if op.name not in KEPT or any(not each.shape or each.shape[0] != rows for each in op.results):
            return False
        if op.name == "broadcast" and len(op.operands[0].shape) != len(op.result.shape): return False
        if op.name == "reduce" and (op.regions or op.attributes["axis"] == 0): return False
        if op.name == "dot" and op.operands[1] in tainted: return False
        tainted |= set(op.results)
    return True


# **** terms ****

def _most(term: Term) -> float:
    """A bound of the magnitude of all elements: infinite where they may be infinite or NaN."""
    if term[0] == "constant": return abs(term[1])
    if term[0] == "finite": return LARGEST_SCORE
    if term[0] == "mul": return _most(term[1]) * _most(term[2])
    return _most(term[2]) if term[0] in ("broadcast", "reshape") else math.inf


def _finite(term: Term) -> bool: return _most(term) < 2.0**128


def _number(op: Op, *given: float) -> Term:
    """Returns what an operation makes of numbers; NaN is anything."""
    made = of_numbers(op, *given)
    return ANYTHING if math.isnan(made) else ("constant", made)


def _term(op: Op, known: Mapping[Value, Term], makers: Makers) -> Term:
    """Returns what an operation gives."""
    if op.name == "constant": return _number(op)
    given = [known.get(each) or _outer(each, makers) for each in op.operands]
    if op.name in ("broadcast", "reshape"):
        return given[0] if given[0][0] == "constant" else (op.name, op.result.shape, given[0])
    if op.name == "cast": return _cast(op, given[0])
    if op.name == "reduce" and not op.regions:
        alike = given[0][0] == "constant" and (op.attributes["fn"] == "max" or given[0][1] == 0)
        return given[0] if alike else ANYTHING
    if op.name == "dot": return given[2] if given[0] == ("constant", 0.0) else ANYTHING
    return _apply(op, given) if op.name == "apply" else ANYTHING


def _outer(value: Value, makers: Makers) -> Term:
    """Returns what a value of outside of the loop is."""
    op = makers.get(value)
    while op is not None and op.name in ("broadcast", "reshape"): op = makers.get(op.operands[0])
    return _number(op) if op is not None and op.name == "constant" else ANYTHING


def _cast(op: Op, given: Term) -> Term:
    source, dtype = op.operands[0].dtype, op.result.dtype
    if source == dtype: return given
    if given[0] != "constant": return ANYTHING
    infinite = dtypes.is_float(dtype) and dtype.itemsize > 1     # whether the dtype has infinities
    return _number(op, given[1]) if infinite or math.isfinite(given[1]) else ANYTHING


def _apply(op: Op, given: list[Term]) -> Term:
    """Returns what an element operation gives."""
    fn = op.attributes["fn"]
    if all(each[0] == "constant" for each in given):
        exact = fn in EXACT or (fn in POWERS and given[0][1] in (0.0, -math.inf))
        return _number(op, *(each[1] for each in given)) if exact else ANYTHING
    numbers = [each[1] if each[0] == "constant" else None for each in given]
    if fn == "where":
        if numbers[0] is not None: return given[1 if numbers[0] else 2]
        return given[1] if given[1] == given[2] and given[1] != ANYTHING else ANYTHING
    if len(given) != 2: return ANYTHING
    a, b = given
    if fn == "max" and -math.inf in numbers: return b if numbers[0] == -math.inf else a
    if fn == "not_equal" and -math.inf in numbers and any(map(_finite, given)): return "constant", 1.0
    if fn == "sub" and numbers[0] == -math.inf and _finite(b): return "constant", -math.inf
    if fn == "add" and 0.0 in numbers: return b if numbers[0] == 0 else a
    if fn == "mul" and 1.0 in numbers: return b if numbers[0] == 1 else a
    if fn == "sub" and a == b and _finite(a): return "constant", 0.0
    if fn in ("add", "sub", "mul") and ANYTHING not in given: return fn, a, b
    return ANYTHING
