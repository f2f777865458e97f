"""The sandbox that chat templates run in: jinja's immutable one, whose every operation is bounded.

Protocol: `BoundedEnvironment()` compiles templates whose loops are counted, and whose texts and lists are
bounded before they are made (template_budget.py). Its code generator sends what can make something large
through the environment: `+`, `~`, other arithmetic, slices, lists, and what is written. Methods of strings
and numbers are those of LINEAR, whose result is bounded by their operands, and those of BOUNDED, whose result
is computed first; filters likewise.

A list that holds another twice, made again and again, is written exponentially often: what holds others is
weighed when it is made.
"""
from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from string import Formatter
from types import BuiltinMethodType, CodeType, GeneratorType, MethodType
from typing import Any

import jinja2.nodes
from jinja2.compiler import CodeGenerator
from jinja2.runtime import Macro, markup_join
from jinja2.sandbox import (
    ImmutableSandboxedEnvironment,
    SandboxedEscapeFormatter,
    SandboxedFormatter,
    SecurityError,
)
from jinja2.utils import Cycler, Namespace, generate_lorem_ipsum
from markupsafe import Markup

from tinygrad_nv.engine.text.template_budget import (
    CONTAINERS,
    SMALL,
    charge,
    charge_items,
    count,
    limit_list,
    max_chars,
    over_limit,
    require_bounded,
    weigh,
)

MAX_WIDTH = 10_000          # limit: width of a template's fields, indentations, batches
MAX_DIGITS = 1000           # limit: digits of a template's round
# a template of 40,000 characters has 200,000; Python compiles 512 KiB in 0.15 s, and lets nothing else go on
MAX_CODE = 1 << 19          # limit: characters of the Python code that jinja makes of a template
MAX_INTEGER = 1 << 16384
MAX_INPUT = 1 << 16         # limit: characters of filters that read a text many times
MAX_COMPARISONS = 1 << 29   # limit: characters that a search from the end may compare
DIRECT, CHUNK = 1000, 256   # items of a loop that are counted all at once, and of a longer one
SPEC = re.compile(r"%(?:\([^()]*\))?[#0\- +]*(\*|\d*)(?:\.(\*|\d*))?[hlL]?[a-zA-Z%]?")
LINEAR = frozenset((
    "capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii",
    "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle",
    "isupper", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "rfind", "rindex",
    "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title",
    "upper", "decode", "hex", "get", "items", "keys", "values", "copy", "union", "difference",
    "intersection", "issubset", "issuperset", "isdisjoint", "bit_length", "bit_count", "is_integer",
    "as_integer_ratio", "conjugate", "unescape", "striptags"))
FROM_END = frozenset(("rfind", "rindex", "rsplit", "rpartition", "strip", "lstrip", "rstrip"))
SPACES = "\n\r\t\x0b\x0c\x1c\x1d\x1e\x85 \u2028\u2029"
OF_DICTS = frozenset(dir(dict))
BUILTIN: tuple[type, ...] = (str, bytes, int, float, complex, *CONTAINERS, range)


class _Generator(CodeGenerator):
    """jinja's, with operations of the environment in the place of Python's."""

    def visit_Add(self, node: jinja2.nodes.BinExpr, frame: Any) -> None:
        operands: list[Any] = []
        first: Any = node
        while isinstance(first, jinja2.nodes.Add):
            operands.append(first.right)
            first = first.left
        self._call("add", [first, *reversed(operands)], frame)

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: Any) -> None:
        escapes = frame.eval_ctx.volatile or frame.eval_ctx.autoescape
        self._call("join_markup" if escapes else "join_texts", node.nodes, frame)

    def visit_List(self, node: jinja2.nodes.List, frame: Any) -> None:
        self._check_items(super().visit_List, node, frame, node.items)

    def visit_Tuple(self, node: jinja2.nodes.Tuple, frame: Any) -> None:
        self._check_items(super().visit_Tuple, node, frame, node.items if node.ctx == "load" else ())

    def visit_Dict(self, node: jinja2.nodes.Dict, frame: Any) -> None:
        self._check_items(super().visit_Dict, node, frame, [each.value for each in node.items])

    def visit_Getitem(self, node: jinja2.nodes.Getitem, frame: Any) -> None:
        cut = isinstance(node.arg, jinja2.nodes.Slice)
        if cut: self.write("environment.charge_value(")
        super().visit_Getitem(node, frame)
        if cut: self.write(")")

    def _check_items(self, visit: Callable[[Any, Any], None], node: Any, frame: Any,
                     items: Sequence[Any]) -> None:
        checked = any(not isinstance(each, jinja2.nodes.Const) for each in items)
        if checked: self.write("environment.check_items(")
        visit(node, frame)
        if checked: self.write(")")

    def _call(self, name: str, operands: Sequence[Any], frame: Any) -> None:
        self.write(f"environment.{name}(")
        for each in operands:
            self.visit(each, frame)
            self.write(", ")
        self.write(")")

    def _output_child_pre(self, node: Any, frame: Any, finalize: Any) -> None:
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super()._output_child_pre(node, frame, finalize)
            self.write("environment.check_size(")
        else: self.write("environment.text(")

    def _output_child_post(self, node: Any, frame: Any, finalize: Any) -> None:
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape: self.write(")")
        super()._output_child_post(node, frame, finalize)


class _Namespace(Namespace):
    """jinja's, which does not write what it holds: it may hold itself."""

    def __repr__(self) -> str: return "<Namespace>"


class _Counted:
    """Values that a loop goes over, counted as it goes."""

    def __init__(self, values: Any) -> None: self.values = values
    def __len__(self) -> int: return len(self.values)

    def __iter__(self) -> Iterator[Any]:
        values = iter(self.values)
        while some := list(islice(values, CHUNK)):
            count(len(some))
            yield from some


_COUNTED = "counted by tinygrad_nv"     # no name that a template can write


def count_iterations(values: Any) -> Any:
    """Returns the values of a loop, whose iterations count."""
    if not isinstance(values, list | tuple | dict | str | range): return _Counted(values)
    if len(values) > DIRECT: return _Counted(values)
    count(len(values))
    return values


def text(value: Any) -> str:
    """A value as a template writes it."""
    return value if type(value) is str else str(check_size(value))


def check_size(value: Any) -> Any:
    """Returns the value. Raises `TemplateLimit` where its text would be too long."""
    if isinstance(value, CONTAINERS): weigh(value)
    return value


def check_items(made: Any) -> Any:
    """A list, tuple or dict that a template made. Raises `TemplateLimit` where what it holds is too large."""
    for each in made.values() if type(made) is dict else made:
        if isinstance(each, CONTAINERS):
            weigh(made)
            break
    if type(made) is dict and any(isinstance(each, tuple) for each in made): weigh(made)
    return made


def charge_value(value: Any) -> Any:
    """Counts a text or list that was made, and returns it."""
    if isinstance(value, str): charge(len(value))
    elif isinstance(value, list | tuple): charge_items(len(value))
    elif isinstance(value, GeneratorType): charge_items(1)
    return value


def join_list(texts: Any) -> str:
    """The texts as one."""
    texts = list(texts)
    charge(sum(map(len, texts)))
    return "".join(texts)


def join_texts(*values: Any) -> str:
    """The texts of values as one."""
    return join_list([text(each) for each in values])


def add(*values: Any) -> Any:
    """The sum, from the left."""
    for each in values:
        if type(each) is not str: return functools.reduce(_add, values)
    if (total := sum(map(len, values))) > SMALL: charge(total)
    return "".join(values)


def _add(left: Any, right: Any) -> Any:
    if isinstance(left, str) and isinstance(right, str): charge(len(left) + len(right))
    elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
        charge_items(len(left) + len(right))
    else: require_small(left, right)
    return left + right


def multiply(left: Any, right: Any) -> Any:
    """left · right, of numbers, or of a text or list and a number."""
    for repeated, times in ((left, right), (right, left)):
        if not isinstance(times, int) or not isinstance(repeated, str | bytes | list | tuple): continue
        if isinstance(repeated, str | bytes): charge(len(repeated) * max(times, 0))
        else:
            charge_items(len(repeated) * max(times, 0))
            if any(isinstance(each, CONTAINERS) for each in repeated): _require(weigh(repeated) * times)
    return left * right


def power(left: Any, right: Any) -> Any:
    """left to the power of right."""
    if isinstance(left, int) and isinstance(right, int) and \
            left.bit_length() * right > MAX_INTEGER.bit_length():
        raise over_limit("computes a power of thousands of digits", "numbers of messages")
    return left ** right


def modulo(left: Any, right: Any) -> Any:
    """left % right, of numbers, or of a format and its values."""
    if isinstance(left, str | bytes):
        limit_percent(str(left), right.values() if isinstance(right, Mapping) else
                      right if isinstance(right, tuple) else (right,))
    return operator.mod(left, right)


def limit_percent(pattern: str, values: Any) -> None:
    """Raises `TemplateLimit` where a text of a format and values is too long."""
    found, values = SPEC.findall(pattern), list(values)
    widths = [each for pair in found for each in pair if each]
    if "*" in widths: widths += [str(each) for each in values if isinstance(each, int)]
    require_widths([each.lstrip("-") for each in widths if each != "*"])
    largest = max((len(text(each)) for each in values if not isinstance(each, int)), default=0)
    charge(len(pattern) + len(found) * largest)


def require_widths(widths: Sequence[str]) -> None:
    """Raises `TemplateLimit` for a width of a field that is too large."""
    if any(len(each) > 6 or int(each or 0) > MAX_WIDTH for each in widths):
        raise over_limit("formats a field of more than 10,000 characters", f"widths up to {MAX_WIDTH:,}")


def require_small(*numbers: Any) -> None:
    """Raises `TemplateLimit` for integers of thousands of digits."""
    for each in numbers:
        if isinstance(each, int) and not -MAX_INTEGER < each < MAX_INTEGER:
            raise over_limit("computes with numbers of thousands of digits", "numbers of messages")


def _require(chars: int) -> None:
    if chars > max_chars():
        raise over_limit(f"makes a text of {chars:,} characters", f"at most {max_chars():,} characters")


# **** methods of Python's own types ****

def _call_method(method: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    owner, name = method.__self__, method.__name__
    if name in LINEAR:
        if type(owner) is str and len(owner) < SMALL and name not in FROM_END: return method(*args, **kwargs)
    elif name in BOUNDED: args = BOUNDED[name](owner, *args, **kwargs) or args
    else: raise SecurityError(f"{type(owner).__name__}.{name} is not one of the methods of messages")
    if not isinstance(owner, str): return charge_value(method(*args, **kwargs))
    if name in FROM_END and args:
        sought = max((len(each) for each in (*args, *kwargs.values()) if isinstance(each, str)), default=1)
        if len(owner) * sought > MAX_COMPARISONS:
            raise over_limit(f"searches a long text with {name}", "short texts to search for")
    if name in ("split", "rsplit", "splitlines"): _limit_split(owner, args, kwargs)
    charge(len(owner))
    return method(*args, **kwargs)


def _limit_split(owner: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    separator = args[0] if args else kwargs.get("sep")
    if isinstance(separator, str) and separator: charge_items(owner.count(separator) + 1)
    elif len(owner) > MAX_INPUT: charge_items(sum(map(owner.count, SPACES)))


def limit_replace(owner: str, old: str, new: str, most: int = -1) -> None:
    """Raises `TemplateLimit` for a text that becomes too long."""
    found = owner.count(old)
    charge(len(owner) + len(new) * (found if most is None or most < 0 else min(found, most)))


def limit_join(owner: str, values: Any) -> tuple[list[Any]]:
    """Returns the values, which may be an iterator. Raises `TemplateLimit` where they are too long
    together."""
    listed = limit_list(values)
    charge(sum(len(each) for each in listed if isinstance(each, str)) + len(owner) * len(listed))
    return (listed,)


def _limit_width(owner: Any, width: int, *_: Any) -> None: require_widths([str(width).lstrip("-")])


def _limit_tabs(owner: str, tabsize: int = 8) -> None:
    require_widths([str(tabsize).lstrip("-")])
    charge(len(owner) + owner.count("\t") * tabsize)


def _limit_translate(owner: str, table: Any) -> None:
    if not isinstance(table, dict): raise SecurityError("str.translate takes a dict")
    longest = max((len(each) for each in table.values() if isinstance(each, str)), default=1)
    charge(len(owner) * longest)


def _check_encoding(owner: Any, encoding: str = "utf-8", errors: str = "strict") -> None:
    if encoding.lower() not in ("utf-8", "utf8", "ascii", "latin-1"):
        raise SecurityError(f"{encoding[:40]!r} is not one of the encodings of messages")


BOUNDED: Mapping[str, Callable[..., Any]] = {
    "center": _limit_width, "ljust": _limit_width, "rjust": _limit_width, "zfill": _limit_width,
    "expandtabs": _limit_tabs, "replace": limit_replace, "join": limit_join, "translate": _limit_translate,
    "encode": _check_encoding, "decode": _check_encoding}


# **** the environment ****

class _Formatter(SandboxedFormatter):
    def format_field(self, value: Any, format_spec: str) -> Any:
        require_widths(re.findall(r"\d+", format_spec))
        return super().format_field(check_size(value), format_spec)


class _EscapeFormatter(_Formatter, SandboxedEscapeFormatter):
    """Escapes the fields of Markup."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """See above."""
    code_generator_class = _Generator
    text, check_size, check_items, charge_value, add = map(
        staticmethod, (text, check_size, check_items, charge_value, add))
    join_texts, concat = map(staticmethod, (join_texts, join_list))
    intercepted_binops = frozenset(("-", "*", "/", "//", "%", "**"))

    def __init__(self, **options: Any) -> None:
        super().__init__(optimized=False, **options)
        self.filters[_COUNTED] = count_iterations
        self.globals["namespace"] = _Namespace
        self.binop_table |= {"*": multiply, "**": power, "%": modulo}

    def join_markup(self, *values: Any) -> str:
        """The texts of values, as Markup where one of them is."""
        charge(sum(len(text(each)) for each in values))
        return markup_join(values)

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = super()._parse(source, name, filename)
        for each in tree.find_all(jinja2.nodes.For):
            each.iter = jinja2.nodes.Filter(each.iter, _COUNTED, [], [], None, None, lineno=each.lineno,
                                            environment=self)
        return tree

    def _compile(self, source: str, filename: str) -> CodeType:
        if len(source) > MAX_CODE:
            raise over_limit(f"is {len(source):,} characters of Python", f"at most {MAX_CODE:,} characters")
        return super()._compile(source, filename)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """The attribute, else the item of this name; of a dict without asking first for an attribute."""
        if type(obj) is dict and attribute not in OF_DICTS:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """The result of an operation on numbers, or on a text or list."""
        require_small(left, right)
        return self.binop_table[operator](left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls a function or method of a template, if its result is bounded."""
        if type(__obj) is BuiltinMethodType or isinstance(getattr(__obj, "__self__", None), BUILTIN):
            # without jinja's own, of loops and blocks
            kwargs = {key: each for key, each in kwargs.items() if key[:1] != "_"} if kwargs else kwargs
            return _call_method(__obj, args, kwargs)
        if __obj is generate_lorem_ipsum: require_widths([str(10 * each) for each in (*args,
                                                                                      *kwargs.values())])
        if __obj is dict or __obj is _Namespace or __obj is Cycler or (
                type(__obj) is Macro and (__obj.catch_varargs or __obj.catch_kwargs)):
            require_bounded((*args, *kwargs.values()))
            charge_items(1)
            if __obj is dict and args and isinstance(args[0], CONTAINERS): weigh(args[0])
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """str.format and str.format_map of a template, bounded; None for other values."""
        if not isinstance(value, MethodType | BuiltinMethodType) or \
                value.__name__ not in ("format", "format_map") or not isinstance(value.__self__, str):
            return None
        pattern: str = value.__self__
        formatter: Formatter = _EscapeFormatter(self, escape=pattern.escape) \
            if isinstance(pattern, Markup) else _Formatter(self)

        def format_text(*args: Any, **kwargs: Any) -> str:
            named = args[0] if value.__name__ == "format_map" else kwargs
            unnamed = () if value.__name__ == "format_map" else args
            largest = max((len(str(text(each))) for each in (*unnamed, *named.values())), default=0)
            charge(len(pattern) + pattern.count("{") * largest)
            return type(pattern)(formatter.vformat(pattern, unnamed, named))
        return format_text
