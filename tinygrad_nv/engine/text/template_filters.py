"""jinja's filters, each bounded by what it is given: template_sandbox.py says why.

Protocol: `limit_filters(filters)` returns them by name. A filter whose result can be far
longer than its operands has a check of them in CHECKS, which raises `TemplateLimit`, or another
implementation in OWN.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from jinja2.filters import FILTERS, do_join, make_attrgetter
from jinja2.utils import pass_environment, pass_eval_context

from tinygrad_nv.engine.text.template_budget import (
    CONTAINERS,
    SMALL,
    charge,
    charge_items,
    limit_list,
    over_limit,
    require_bounded,
    weigh,
)
from tinygrad_nv.engine.text.template_sandbox import (
    MAX_DIGITS,
    MAX_INPUT,
    MAX_WIDTH,
    add,
    charge_value,
    check_size,
    limit_percent,
    limit_replace,
    text,
)

WIDTHS = frozenset(("center", "indent", "batch", "slice", "wordwrap", "truncate", "round", "urlize"))
SHORT = frozenset(("wordwrap", "urlize", "striptags", "xmlattr", "title", "filesizeformat"))
WRITES = frozenset(("string", "escape", "e", "forceescape", "pprint", "urlencode", "upper", "lower",
                    "capitalize", "replace", "format", "safe", "truncate", "indent", "center", "wordcount",
                    "xmlattr", "title", "striptags", "tojson", "sort", "unique", "dictsort", "min", "max"))


def limit_filters(filters: Mapping[str, Callable[..., Any]]) -> dict[str, Any]:
    """Returns the filters with limits, as described above."""
    return {**{name: _limit(name, OWN.get(name, each)) for name, each in filters.items()}, "trim": trim}


def _limit(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    first = 1 if hasattr(own, "jinja_pass_arg") else 0      # the context or environment comes before
    check, widths, short, writes = CHECKS.get(name), name in WIDTHS, name in SHORT, name in WRITES
    most = MAX_DIGITS if name == "round" else MAX_WIDTH

    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        value = args[first] if len(args) > first else None
        if type(value) is not str: _require_value(value, writes)
        elif short: _require_short(name, len(value))
        if widths:
            for each in (*args[first + 1:], *kwargs.values()):
                if isinstance(each, int) and abs(each) > most:
                    raise over_limit(f"calls the filter {name} with a number above {most:,}",
                                   f"numbers up to {most:,}")
        if check is not None: check(*args[first:], **kwargs)
        return charge_value(own(*args, **kwargs))
    return call


def _require_value(value: Any, writes: bool) -> None:
    if writes and isinstance(value, CONTAINERS): weigh(value)


def _require_short(name: str, length: int) -> None:
    if length > MAX_INPUT:
        raise over_limit(f"calls the filter {name} with {length:,} characters", f"at most {MAX_INPUT:,}")


# **** checks, which get what the filter gets ****

def _check_replace(value: Any, old: Any, new: Any, count: int | None = None) -> None:
    limit_replace(text(value), text(old), text(new), -1 if count is None else count)


def _check_format(value: Any, *args: Any, **kwargs: Any) -> None: limit_percent(text(value),
                                                                                args or kwargs.values())


def _check_indent(value: Any, width: int | str = 4, *_: Any, **__: Any) -> None:
    charge((text(value).count("\n") + 1) * (len(width) if isinstance(width, str) else width))


def _check_fill(value: Any, number: int, fill_with: Any = None) -> None:
    charge_items(abs(number))
    if isinstance(fill_with, CONTAINERS): charge(weigh(fill_with) * (abs(number) + 1))


def _check_center(value: Any, *_: Any, **__: Any) -> None: charge(len(text(value)))


def _check_map(*args: Any, **kwargs: Any) -> None:
    require_bounded((kwargs.get("default"),))
    for each in (*args[1:], *kwargs.values()):
        if isinstance(each, str): _require_short("map", len(each))


def _check_int(value: Any, default: Any = 0, base: int = 10) -> None:
    if isinstance(value, str): _require_short("int", len(value) * 16)


def _check_truncate(value: Any, length: int = 255, *_: Any, **__: Any) -> None: charge(len(text(value)))


CHECKS: Mapping[str, Callable[..., Any]] = {
    "replace": _check_replace, "format": _check_format, "indent": _check_indent, "batch": _check_fill,
    "slice": _check_fill, "center": _check_center, "map": _check_map, "int": _check_int,
    "select": _check_map, "reject": _check_map, "selectattr": _check_map, "rejectattr": _check_map}


# **** implementations of our own ****

@pass_eval_context
def join(eval_ctx: Any, value: Any, d: Any = "", attribute: Any = None) -> str:
    """The texts of values, with `d` between them."""
    listed = limit_list(value)
    if attribute is not None: listed = [*map(make_attrgetter(eval_ctx.environment, attribute), listed)]
    charge(sum(len(text(each)) for each in listed) + len(text(d)) * len(listed))
    return do_join(eval_ctx, listed, text(d) if isinstance(d, CONTAINERS) else d)


def trim(value: Any, chars: str | None = None) -> str:
    """The text without spaces, or `chars`, at its ends."""
    found = text(value)
    if chars is not None: _require_short("trim", len(chars) * (len(found) >> 12))
    if len(found) > SMALL: charge(len(found))
    return found.strip(chars) if type(value) is str else FILTERS["trim"](value, chars)


@pass_environment
def total(environment: Any, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
    """The sum of values."""
    pick = (lambda each: each) if attribute is None else make_attrgetter(environment, attribute)
    for each in iterable: start = add(start, pick(each))
    return start


def list_values(value: Any) -> list[Any]:
    """Returns the values as a list. Those that hold others are weighed where one of them is there twice."""
    found = limit_list(value)
    if len({*map(id, found)}) < len(found): require_bounded(found)
    return found


OWN: Mapping[str, Callable[..., Any]] = {"join": join, "sum": total, "list": list_values,
                                         "string": lambda value: FILTERS["string"](check_size(value))}
