"""Shapes of a function's variables with the names of its annotations, without running a kernel.

Protocol. `infer(fn)` calls the function on tensors without values (tracing.py) at several assignments of the
names in its annotations, and says each shape in these names (fit.py): a `Report` of lines and mismatches.
Names are tried as primes first; where the function refuses that, with integer arguments that divide all other
sizes, and with multiples of 64; of several that fail the one counts that comes furthest. Names whose sizes
are fixed keep them: `sizes` that are given, and those of module variables with annotations, which have values
already.

Arguments: a Tensor for each annotation with dimensions (leading ones are one dimension more), the default
where there is one, else the size of its name for an int, 0.5 for a float and False for a bool; `values` for
others.
"""
from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinygrad import Tensor, dtypes

from tinygrad_nv.errors import ShapeError
from tinygrad_nv.shapes.binding import Bindings
from tinygrad_nv.shapes.dims import Dim
from tinygrad_nv.shapes.fit import Sizes, assignments, fit_dim
from tinygrad_nv.shapes.signature import Signature, fields, inner, leaves, signature, type_of, types_in
from tinygrad_nv.shapes.tracing import Failure, Operand, Run, run
from tinygrad_nv.shapes.types import TensorType, dtype_text
from tinygrad_nv.table import align_columns

LEADING_SIZE = 2    # of the one dimension that stands for "..."
HEAD = ("line", "variable", "shape", "dtype")


@dataclass(frozen=True)
class Line:
    """A variable as a line leaves it: its shape in names, its dtype. `line` is 0 for an argument."""
    line: int
    name: str
    shape: str
    dtype: str


@dataclass(frozen=True)
class Mismatch:
    """Mismatch of shapes: where, the expression, the operands and where each is from, what was expected."""
    line: int
    text: str
    reason: str
    origins: tuple[str, ...]

    def __str__(self) -> str:
        head = f"line {self.line}: {self.text}" if self.line else self.text
        return "\n".join([head, *(f"  {each}" for each in self.origins), f"  {self.reason}"])


@dataclass(frozen=True)
class Report:
    """Report on a function: `lines` in the order of execution, `mismatches`, and the names with fixed
    sizes."""
    function: str
    file: str
    lines: tuple[Line, ...]
    mismatches: tuple[Mismatch, ...]
    fixed: Mapping[str, int]

    def raise_mismatch(self) -> None:
        """Raises `ShapeError` for the first mismatch, if there is one."""
        for each in self.mismatches:
            where = f"{self.file}:{each.line}" if each.line else self.file
            found = f"{where}, in {self.function}: {each.text}: {each.reason}"
            raise ShapeError(found, "; ".join(each.origins))


@dataclass
class _Case:
    """One assignment: what was bound, and what happened."""
    sizes: Sizes
    bindings: Bindings
    run: Run
    wrong: ShapeError | None = None     # of the result


class AbstractCache:
    """In the place of a KVCache: Tensors `K` and `V` [B, H, S, D]. `append` gives one with more tokens."""

    def __init__(self, keys: Tensor, values: Tensor) -> None: self.K, self.V = keys, values

    def append(self, keys: Tensor, values: Tensor) -> AbstractCache:
        """With keys and values behind those that are there, along dimension 2."""
        return AbstractCache(self.K.cat(keys, dim=2), self.V.cat(values, dim=2))


def infer(fn: Callable[..., Any], sizes: Mapping[str, int] | None = None,
          values: Mapping[str, Any] | None = None) -> Report:
    """The shapes of a function's variables. `sizes` fixes names, `values` gives arguments that no annotation
    describes. Raises `ShapeError` for an argument of which nothing is known."""
    plain = inner(fn)
    own = signature(plain)
    bindings, others = _outside(plain)
    for name, size in (sizes or {}).items(): bindings.scalar(name, size, f"{name}={size}, as given")
    scalars = [name for name in own.annotations if own.annotations[name] is int and name not in (values or {})
               and own.parameters.parameters[name].default is inspect.Parameter.empty]
    names = tuple(dict.fromkeys((*own.symbols, *scalars)))
    best: tuple[_Case, list[Sizes]] | None = None
    for tried in assignments(names, scalars, bindings.sizes):
        case = _case(plain, own, tried[0], bindings, values or {})
        if best is None or case.run.failure is None or case.run.lines > best[0].run.lines: best = case, tried
        if case.run.failure is None: break
    assert best is not None
    cases = [best[0], *(_case(plain, own, at, bindings, values or {}) for at in best[1][1:])]
    return _report(plain, own, cases, bindings, others)


# **** arguments ****

def _outside(plain: Any) -> tuple[Bindings, list[TensorType]]:
    """Sizes of names that module variables with annotations have already, and their types."""
    code, space = getattr(plain, "__func__", plain).__code__, getattr(plain, "__func__", plain).__globals__
    found, others = Bindings(), list[TensorType]()
    for name, annotation in space.get("__annotations__", {}).items():
        if name not in code.co_names or name not in space: continue
        if isinstance(annotation, str): annotation = eval(annotation, space)
        for leaf in leaves(annotation, space[name], f"module variable {name}"):
            found.tensor(leaf.where, leaf.type, leaf.value.shape, leaf.value.dtype)
            others.append(leaf.type)
    return found, others


def _case(plain: Any, own: Signature, at: Sizes, outside: Bindings, values: Mapping[str, Any]) -> _Case:
    bindings = outside.copy()
    args, kwargs, given = list[Any](), dict[str, Any](), dict[str, Any]()
    for name, parameter in own.parameters.parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD): continue
        value = values[name] if name in values else _argument(name, parameter, own.annotations.get(name), at)
        if parameter.kind is parameter.KEYWORD_ONLY: kwargs[name] = value
        else: args.append(value)
        given[name] = value
        if type(value) is int and name in at: bindings.scalar(name, value, f"argument {name}={value}")
    for name, value in given.items():
        for leaf in leaves(own.annotations.get(name), value, f"argument {name}"):
            bindings.tensor(leaf.where, leaf.type, leaf.value.shape, leaf.value.dtype)
    case = _Case(at, bindings, run(plain, tuple(args), kwargs))
    if case.run.failure is None:
        try:
            for leaf in leaves(own.result, case.run.result, "the result"):
                bindings.tensor(leaf.where, leaf.type, leaf.value.shape, leaf.value.dtype)
        except ShapeError as error: case.wrong = error
    return case


def _argument(name: str, parameter: inspect.Parameter, annotation: Any, at: Sizes) -> Any:
    if (made := _make_abstract(annotation, at)) is not None: return made
    if parameter.default is not parameter.empty: return parameter.default
    if name in at: return at[name]
    if annotation in (float, bool): return {float: 0.5, bool: False}[annotation]
    shown = inspect.formatannotation(annotation) if annotation is not None else "nothing"
    raise ShapeError(f"argument {name} has no dimensions: its annotation is {shown}",
                     'an annotation such as Tensor["B", "D"], or a value',
                     f"--set {name}=…, values={{{name!r}: …}}")


def _make_abstract(annotation: Any, at: Sizes) -> Any:
    """A value without elements for an annotation with dimensions; None for another."""
    if (own := type_of(annotation)) is not None:
        made = _empty(own, at)
        return AbstractCache(made, _empty(own, at)) if own.kind == "KVCache" else made
    if not types_in(annotation): return None
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is tuple:
        args = args[:1] * 2 if args[-1] is ... else args
        return tuple(_make_abstract(each, at) for each in args)
    if isinstance(origin, type) and issubclass(origin, Sequence): return [_make_abstract(args[0], at)] * 2
    if origin is typing.Union or isinstance(annotation, types.UnionType):
        return _make_abstract(next(each for each in args if types_in(each)), at)
    if (members := fields(annotation)) and all(types_in(each) for _, each in members):
        return annotation(**{name: _make_abstract(each, at) for name, each in members})
    return None


def _empty(own: TensorType, at: Sizes) -> Tensor:
    shape = own.shape(at)
    if shape is None or min(shape, default=0) < 0:
        raise ShapeError(f"{own} at {', '.join(f'{name}={size}' for name, size in at.items())}",
                         "sizes of at least 0", "give sizes that fit: --set D=64, sizes={'D': 64}")
    return Tensor.empty(*(LEADING_SIZE,) * own.leading, *shape, dtype=own.element or dtypes.default_float)


# **** what was found ****

def _report(plain: Any, own: Signature, cases: list[_Case], fixed: Bindings,
            others: list[TensorType]) -> Report:
    code = getattr(plain, "__func__", plain).__code__
    own_types = [one for each in (*own.annotations.values(), own.result) for one in types_in(each)]
    written = {one.text(i): dim for one in (*own_types, *others) for i, dim in enumerate(one.dims)}
    written = dict(sorted(written.items(), key=lambda item: len(item[1].terms[0][0]) if item[1].terms else 0))
    runs = [case.run for case in cases]
    lines = list[Line]()
    for i, first in enumerate(runs[0].assigned):
        same = [each.assigned[i].shape if i < len(each.assigned) and each.assigned[i].name == first.name
                and each.assigned[i].line == first.line else None for each in runs]
        made = Line(first.line, first.name, _shape(same, cases, written), dtype_text(first.value.dtype))
        if made not in lines: lines.append(made)
    found = []
    if (failure := runs[0].failure) is not None: found.append(_mismatch(failure, cases, own, written))
    if cases[0].wrong is not None: found.append(_of_result(cases, own, lines))
    return Report(plain.__qualname__, code.co_filename, tuple(lines), tuple(found), dict(fixed.sizes))


def _shape(shapes: list[tuple[Any, ...] | None], cases: list[_Case], written: Mapping[str, Dim]) -> str:
    """A shape in names, from those at all assignments."""
    first = shapes[0]
    assert first is not None
    if any(each is None or len(each) != len(first) for each in shapes): return plain_shape(first)
    sizes = [case.sizes for case in cases]
    whole = [each for each in shapes if each is not None]
    columns = [[shape[axis] for shape in whole] for axis in range(len(first))]
    if not all(isinstance(each, int) for column in columns for each in column): return plain_shape(first)
    return f"[{', '.join(fit_dim(column, sizes, written) or '?' for column in columns)}]"


def plain_shape(shape: Sequence[Any]) -> str:
    """A shape in numbers."""
    return f"[{', '.join(map(str, shape))}]"


def _mismatch(failure: Failure, cases: list[_Case], own: Signature, written: Mapping[str, Dim]) -> Mismatch:
    origins = []
    for i, operand in enumerate(failure.operands):
        others = [case.run.failure.operands[i].shape if case.run.failure is not None
                  and i < len(case.run.failure.operands) else None for case in cases]
        origins.append(origin(operand, _shape(others, cases, written), own))
    reason, sizes = failure.reason, [f"{name}={size}" for name, size in cases[0].sizes.items()]
    if sizes: reason += f" (at {', '.join(sizes)})"
    return Mismatch(failure.line, failure.text, reason, tuple(origins))


def origin(operand: Operand, shape: str, own: Signature) -> str:
    """An operand, its shape, and the variable that it is from."""
    text, source = operand.text or "an operand", operand.origin
    if operand.outside: return f"{text} is {shape}: its own shape"
    if source is None: return f"{text} is {shape}: made in this line"
    made = ("computed from " if operand.computed else "of ") if text != source.name else ""
    name = f"{source.name}, " if made else ""
    if source.line: return f"{text} is {shape}: {made}{name}assigned in line {source.line}"
    given = types_in(own.annotations.get(source.name.partition("[")[0].partition(".")[0]))
    return f"{text} is {shape}: {made}argument {source.name}, {', '.join(map(str, given)) or 'as given'}"


def _of_result(cases: list[_Case], own: Signature, lines: list[Line]) -> Mismatch:
    """A result that is not as annotated."""
    wrong = cases[0].wrong
    assert wrong is not None
    found = [line for line in lines if line.name.startswith("return")]
    origins = [f"{line.name} is {line.shape} of {line.dtype}" for line in found]
    origins.append(f"the annotation says {', '.join(map(str, types_in(own.result)))}")
    return Mismatch(found[0].line if found else 0, "the result is not what its annotation says",
                    f"{wrong.found}; expected: {wrong.expected}", tuple(origins))


def report_text(report: Report) -> str:
    """A report's lines and mismatches; those of arguments have no number."""
    fixed = ", ".join(f"{name}={size}" for name, size in report.fixed.items())
    rows = [HEAD, *((str(one.line or ""), one.name, one.shape, one.dtype) for one in report.lines)]
    lines = [f"{report.function}" + (f", with {fixed}" if fixed else ""),
             *(f"  {row}" for row in align_columns(rows, numbers=(0,)))]
    for each in report.mismatches: lines += [f"  mismatch in {line}" if i == 0 else f"  {line}"
                                             for i, line in enumerate(str(each).splitlines())]
    return "\n".join(lines)


def report_data(report: Report) -> dict[str, object]:
    """The same for JSON."""
    return {"function": report.function, "file": report.file, "fixed": dict(report.fixed),
            "lines": [vars(one) for one in report.lines],
            "mismatches": [{**vars(one), "origins": list(one.origins)} for one in report.mismatches]}
