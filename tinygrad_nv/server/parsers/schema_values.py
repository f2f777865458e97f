"""Values that are written as bare texts, typed by a tool's schema.

Protocol: `parameter(schema, name)` is what a tool's schema allows for a parameter, as an `Allowed`. `json_of`
writes a value as JSON. A text stays a text where the schema allows texts: "12", "true" and "null" are texts,
unless another type is allowed, too, and the text is one of it. Where no text is allowed, the value is read
as JSON, or as Python writes it; what is neither is passed on as a text.
"""
from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from tinygrad_nv.errors import RequestError
from tinygrad_nv.regexes import compile_pattern
from tinygrad_nv.server.parsers.json_calls import to_json
from tinygrad_nv.server.parsers.literals import literal

MAX_DEPTH = 64      # of references and of combined schemas
TYPES = ("string", "null", "boolean", "integer", "number", "object", "array")
NULLS = ("null", "None")
SECONDS = 0.05      # of all matches of patternProperties, which hold the event loop
WHOLE = re.compile(r"[+-]?\d+")


@dataclass(frozen=True)
class Allowed:
    """The JSON types of a value, and its values if the schema lists them."""
    types: frozenset[str]
    values: tuple[Any, ...] | None = None

    @property
    def is_text(self) -> bool:
        """Whether it is a text whatever is written, or null where this is written."""
        return self.types <= {"string", "null"} and "string" in self.types

    @property
    def may_be_null(self) -> bool: return "null" in self.types


TEXT = Allowed(frozenset({"string"}))


def parameter(schema: Any, name: str) -> Allowed:
    """See above: a text, where the schema says nothing of the parameter."""
    found = find(schema, name, schema)
    made = None if found is None else _find_allowed(found, schema, {}, 0)
    return TEXT if made is None or not made.types else made


def names_of(schema: Any) -> list[str]:
    """The parameters of a tool, in their order."""
    found = (each.get("properties") for each in _combine(schema, schema, "allOf"))
    return [*dict.fromkeys(name for own in found if isinstance(own, Mapping) for name in own)]


def json_of(text: str, allowed: Allowed) -> str:
    """The JSON of a value that is written as `text`."""
    return to_json(_value(text, allowed))


def _value(text: str, allowed: Allowed) -> Any:
    if allowed.is_text: return None if allowed.may_be_null and text.strip() in NULLS else text
    if allowed.values is not None and text in [each for each in allowed.values if isinstance(each, str)]:
        return text
    for value in _readings(text.strip(), allowed):
        if allowed.values is not None and not any(_same(value, each) for each in allowed.values): continue
        if _type(value) in allowed.types: return value
    if "string" in allowed.types: return text
    try: value = literal(text)
    except ValueError: return text
    # 5,000 is no list, where none is allowed
    return text if isinstance(value, list) and text.lstrip()[0] not in "[({" else value


def _readings(text: str, allowed: Allowed) -> Iterable[Any]:
    """Lists the values that a text may mean, the likeliest first."""
    if text.lower() in ("true", "false"): yield text.lower() == "true"
    if text in NULLS: yield None
    if WHOLE.fullmatch(text) and len(text) < 300: yield int(text)
    try: value = literal(text)
    except ValueError:
        try: value = float(text)
        except ValueError: return
        if not math.isfinite(value): return
    if isinstance(value, float) and value.is_integer() and "number" not in allowed.types: yield int(value)
    yield value


def _same(one: Any, other: Any) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _type(value: Any) -> str:
    if isinstance(value, bool): return "boolean"
    kinds = {str: "string", int: "integer", float: "number", dict: "object", list: "array"}
    return kinds.get(type(value), "null")


# **** schemas ****

def _resolve(reference: Any, root: Any) -> Any:
    """Returns the target of a reference inside of the schema; None for others."""
    if not isinstance(reference, str) or not reference.startswith("#"): return None
    found = root
    for step in unquote(reference[1:]).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping): found = found.get(step)
        elif isinstance(found, list) and step.isdigit() and int(step) < len(found): found = found[int(step)]
        else: return None
    return found


def _inner(schema: Mapping[str, Any], root: Any, *names: str) -> list[Any]:
    listed = [each for name in names if isinstance(found := schema.get(name), list) for each in found]
    return [*([_resolve(schema["$ref"], root)] if "$ref" in schema else []), *listed]


def find(schema: Any, name: str, root: Any) -> Any:
    """The schema of a property, that of other properties where it is not named; None where there is none."""
    others = []
    for each in _combine(schema, root, "allOf", "anyOf", "oneOf"):
        for key, matches in (("properties", str.__eq__), ("patternProperties", _matches)):
            for own, found in (each.get(key) or {}).items() if isinstance(each.get(key), Mapping) else ():
                if matches(own, name): return found
        if isinstance(rest := each.get("additionalProperties"), Mapping): others.append(rest)
    return others[0] if others else None


def _combine(schema: Any, root: Any, *words: str) -> Iterator[Mapping[str, Any]]:
    """Yields a schema and those that it refers to or combines, each once: references may go in circles."""
    waiting, seen = [schema], set[int]()
    while waiting:
        each = waiting.pop()
        if not isinstance(each, Mapping) or id(each) in seen: continue
        seen.add(id(each))
        yield each
        waiting += reversed(_inner(each, root, *words))


def _matches(pattern: str, name: str) -> bool:
    try: return compile_pattern(pattern, "patternProperties", RequestError, SECONDS).search(name)
    except RequestError: return False


def _find_allowed(schema: Any, root: Any, known: dict[int, Allowed | None], depth: int) -> Allowed | None:
    """Returns the values that a schema allows; None where it does not say. `known`: what was found, None
    inside of a circle."""
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH: return None
    if id(schema) in known: return known[id(schema)]
    known[id(schema)] = None
    found = [_own(schema), _find_enum(schema)]
    found += [_find_allowed(each, root, known, depth + 1) for each in _inner(schema, root, "allOf")]
    for name in ("anyOf", "oneOf"):
        if options := schema.get(name): found.append(_either(options, root, known, depth + 1))
    made = None
    for each in found: made = each if made is None else made if each is None else _both(made, each)
    if made is not None and schema.get("nullable") is True:
        made = Allowed(made.types | {"null"}, None if made.values is None else (*made.values, None))
    known[id(schema)] = made
    return made


def _own(schema: Mapping[str, Any]) -> Allowed | None:
    """Returns the values that `type` allows, or keywords that only one type has."""
    kinds = schema.get("type")
    if kinds is None:
        kinds = "object" if "properties" in schema else "array" if "items" in schema else None
    types = {kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if kind in TYPES}
    if "number" in types: types.add("integer")
    return Allowed(frozenset(types)) if types else None


def _find_enum(schema: Mapping[str, Any]) -> Allowed | None:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not values: return None
    return Allowed(frozenset(map(_type, values)), tuple(values))


def _either(options: Any, root: Any, known: dict[int, Allowed | None],
            depth: int) -> Allowed | None:
    found = [_find_allowed(each, root, known, depth) for each in options] if isinstance(options, list) else []
    given = [each for each in found if each is not None]
    if not given or len(given) < len(found): return None
    values = None if any(each.values is None for each in given) else \
        tuple(value for each in given for value in each.values or ())
    return Allowed(frozenset().union(*(each.types for each in given)), values)


def _both(one: Allowed, other: Allowed) -> Allowed:
    types = one.types & other.types
    values = other.values if one.values is None else one.values
    return Allowed(types or one.types, values)
