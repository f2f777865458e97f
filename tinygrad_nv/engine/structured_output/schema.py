"""JSON schemas, simplified to the keywords that constrain something.

Protocol: `simplify(schema)` returns an equal schema without keywords that constrain nothing, which
llguidance would refuse, and the formats that it took out. Keywords that are null are none. `propertyNames`
with an enum or a pattern becomes `properties` or `patternProperties` where there are no others. A format that
is not among `FORMATS` (enforced) or `UNENFORCED` (refused) says how a string is meant, as JSON Schema has it
since draft 2019-09. A schema that nothing matches, or nothing that ends, because it needs itself, becomes
`false`: a model could never complete one.

`close_objects` forbids properties that a schema does not name. `find_closed_patterns(schema)` finds objects
whose names must match patterns, for matcher.py.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from tinygrad_nv.errors import RequestError

FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid",
                     "uri", "unknown"})
UNENFORCED = frozenset({"uri-reference", "uri-template", "iri", "iri-reference", "idn-email", "idn-hostname",
                        "json-pointer", "relative-json-pointer", "regex"})
# where schemas have others: by name, in a list, alone
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
LISTED = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
SINGLE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains",
          "propertyNames", "unevaluatedItems", "unevaluatedProperties")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains",
          "maxContains")
ANNOTATIONS = frozenset({"title", "description", "default", "examples", "$comment", "deprecated", "readOnly",
                         "writeOnly", "$schema", "$id", "$anchor", "$dynamicAnchor", "contentEncoding",
                         "contentMediaType"})
# keywords that allow, restrict or need further properties of an object
COMBINING = {"additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames",
             "minProperties", "dependentRequired", "dependentSchemas", "dependencies", "allOf", "anyOf",
             "oneOf", "not", "$ref", "if", "const", "enum"}
CHOICES = {"$ref", "anyOf", "oneOf"}
OF_OBJECTS = {"properties", "required", "patternProperties", "additionalProperties", "unevaluatedProperties"}
MIXING = {"not", "if", "then", "else", "dependentSchemas", "dependencies"}


def close_objects(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a schema whose objects that list properties allow no others, unless they say so: a model would
    invent them without end, and vLLM allows none. A schema in which an object has to match several of its
    parts stays as it is: one may need what another does not name."""
    closed: dict[str, Any] = schema if _combines(schema) else _close(schema)
    return closed


def _combines(schema: Any) -> bool:
    """Whether a value may have to match several parts of a schema. Names of properties count as keywords."""
    if isinstance(schema, list | tuple): return any(map(_combines, schema))
    if not isinstance(schema, dict): return False
    chosen, every = CHOICES & schema.keys(), schema.get("allOf")
    alone = isinstance(every, list | tuple) and len(every) == 1
    if (chosen or "allOf" in schema) and OF_OBJECTS & schema.keys(): return True
    if MIXING & schema.keys() or len(chosen) > 1 or ("allOf" in schema and (chosen or not alone)): return True
    return any(map(_combines, schema.values()))


def _close(schema: Any) -> Any:
    """Returns a schema with closed objects."""
    if not isinstance(schema, dict): return schema
    out = dict(schema)
    for key in ("properties", "$defs", "definitions"):
        if isinstance(inner := out.get(key), dict):
            out[key] = {name: _close(each) for name, each in inner.items()}
    if isinstance(out.get("items"), dict): out["items"] = _close(out["items"])
    listed, needed = out.get("properties"), out.get("required") or ()
    if isinstance(listed, dict) and isinstance(needed, list | tuple) and not COMBINING & out.keys() \
            and all(each in listed for each in needed if isinstance(each, str)):
        out["additionalProperties"] = False
    return out


def simplify(schema: dict[str, Any]) -> tuple[dict[str, Any] | bool, frozenset[str]]:
    """Returns the simplified schema and its formats, as described above."""
    formats: set[str] = set()
    made = _simple(schema, schema, formats)
    values = _References(made)
    if values.known: made = _without_endless(made, values)
    return made, frozenset(formats)


def find_closed_patterns(schema: Any) -> Iterator[dict[str, Any]]:
    """Yields the object schemas in a schema that allow only names that are listed, or match a pattern."""
    if not isinstance(schema, dict): return
    if schema.get("patternProperties") and schema.get("additionalProperties") is False: yield schema
    for _, _, inner in _inner(schema): yield from find_closed_patterns(inner)


def _inner(schema: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """The schemas in a schema: keyword, key (None where it is alone), schema."""
    for word in NAMED:
        if isinstance(named := schema.get(word), dict):
            for name, each in named.items(): yield word, name, each
    for word in LISTED:
        if isinstance(listed := schema.get(word), list):
            for at, each in enumerate(listed): yield word, at, each
    for word in SINGLE:
        if isinstance(each := schema.get(word), dict | bool): yield word, None, each


def _with(schema: dict[str, Any], changed: dict[tuple[str, Any], Any]) -> dict[str, Any]:
    """A copy with other inner schemas."""
    out = dict(schema)
    for word in {word for word, _ in changed}:
        if isinstance(out[word], dict | list): out[word] = out[word].copy()
    for (word, key), each in changed.items():
        if key is None: out[word] = each
        else: out[word][key] = each
    return out


# **** keywords that constrain nothing ****

def _simple(schema: Any, root: Any, formats: set[str]) -> Any:
    if not isinstance(schema, dict): return schema
    out = {word: value for word, value in schema.items() if value is not None or word == "const"}
    for word in out.keys() & COUNTS: out[word] = _count(word, out[word])
    out = _with(out, {(word, key): _simple(each, root, formats) for word, key, each in _inner(out)})
    if _allows_all(out.get("not")) or [] in map(out.get, ("enum", "anyOf", "oneOf")): return False
    for word in [word for word in out if _idle(out, word)]: del out[word]
    if "if" not in out or not {"then", "else"} & out.keys():
        for word in ("if", "then", "else"): out.pop(word, None)
    if "contains" not in out:
        for word in ("minContains", "maxContains"): out.pop(word, None)
    if isinstance(name := out.get("format"), str) and name not in FORMATS | UNENFORCED:
        if "string" in _types(out): formats.add(name)
        del out["format"]
    return _by_names(out, root)


def _count(word: str, value: Any) -> int:
    """The value of a keyword that counts: 2.0 is the integer 2, and a boolean is none. Raises `RequestError`.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 and value % 1 == 0:
        return int(value)
    raise RequestError(f"the JSON schema of the structured output has {word} {repr(value)[:60]}",
                       "a whole number from 0 on", "change the JSON schema")


def _by_names(schema: dict[str, Any], root: Any) -> dict[str, Any]:
    """A schema with names of properties for `propertyNames`, where that is alone."""
    words = schema.get("propertyNames")
    if isinstance(words, dict) and isinstance(ref := words.get("$ref"), str): words = _target(root, ref)
    if not isinstance(words, dict) or schema.keys() & {"properties", "patternProperties"} or \
            "string" not in _types(words): return schema
    out, rest = {**schema, "additionalProperties": False}, schema.get("additionalProperties", True)
    del out["propertyNames"]
    names, only = words.get("enum"), words.keys() - ANNOTATIONS - {"type"}
    if only == {"const"}: names = [words["const"]]
    if only in ({"enum"}, {"const"}) and isinstance(names, list):
        return {**out, "properties": {name: rest for name in names if isinstance(name, str)}}
    if only == {"pattern"} and isinstance(words["pattern"], str):
        return {**out, "patternProperties": {words["pattern"]: rest}}
    return schema


def _idle(schema: dict[str, Any], word: str) -> bool:
    """Whether a keyword constrains nothing, beside the others."""
    value = schema[word]
    if word == "uniqueItems": return value is False or schema.get("maxItems") in (0, 1)
    if word == "propertyNames": return _allows_all(value, "string")
    if word in ("unevaluatedItems", "unevaluatedProperties", "then", "else"): return _allows_all(value)
    if word == "additionalItems": return not isinstance(schema.get("items"), list)
    if word in ("dependentRequired", "dependentSchemas", "dependencies"):
        return isinstance(value, dict) and all(each == [] or _allows_all(each) for each in value.values())
    if word == "contains": return schema.get("minContains") == 0 and "maxContains" not in schema
    if word == "not": return value is False
    if word == "$dynamicAnchor": return True
    if word == "minProperties": return bool(value <= _count_required(schema))
    if word == "maxProperties":
        return schema.get("additionalProperties") is False and not schema.get("patternProperties") and \
            value >= len(schema.get("properties") or ())
    return False


def _allows_all(schema: Any, kind: str | None = None) -> bool:
    """Whether a schema allows every value, or every one of a type."""
    if not isinstance(schema, dict): return schema is True
    types = kind is None or "type" not in schema or kind in _types(schema)
    words = {"type"} if kind is not None else set[str]()
    idle = {word for word in ("minLength",) if schema.get(word) == 0}
    return types and not schema.keys() - ANNOTATIONS - words - idle


def _types(schema: dict[str, Any]) -> list[Any]:
    kind = schema.get("type", "string")
    return kind if isinstance(kind, list) else [kind]


def _count_required(schema: dict[str, Any]) -> int:
    names = schema.get("required")
    return len({each for each in names if isinstance(each, str)}) if isinstance(names, list) else 0


# **** schemas that need themselves ****

class _References:
    """References of a schema: their targets, and which of these have a finite value: the least fixed point.
    `known` is by the id of a target: one that is spelled in many ways is looked at once."""

    def __init__(self, root: Any) -> None:
        self.root, self.known, self.targets = root, dict[int, bool](), dict[str, Any]()
        users, queue = dict[int, set[int]](), [self._target(ref) for ref in _references(root)]
        schemas = dict[int, Any]()
        while queue:
            if (at := id(each := queue.pop())) in schemas: continue
            schemas[at], self.known[at] = each, False
            for other in map(self._target, _references(each)):
                users.setdefault(id(other), set()).add(at)
                queue.append(other)
        waiting = list(schemas)
        while waiting:
            at = waiting.pop()
            if self.known[at] or not self.satisfiable(schemas[at]): continue
            self.known[at] = True
            waiting += users.get(at, ())

    def _target(self, ref: str) -> Any:
        if ref not in self.targets: self.targets[ref] = _target(self.root, ref)
        return self.targets[ref]

    def satisfiable(self, schema: Any) -> bool:
        """Whether a schema may have a finite value, as far as its references say."""
        if not isinstance(schema, dict): return schema is not False
        if isinstance(ref := schema.get("$ref"), str) and not self.known.get(id(self._target(ref)), True):
            return False
        for word, holds in (("allOf", all), ("anyOf", any), ("oneOf", any)):
            if isinstance(listed := schema.get(word), list) and not holds(map(self.satisfiable, listed)):
                return False
        kind = _types(schema) if "type" in schema else []
        if kind == ["object"]: return self._object(schema)
        return self._array(schema) if kind == ["array"] else True

    def _object(self, schema: dict[str, Any]) -> bool:
        properties, required = schema.get("properties"), schema.get("required")
        if not isinstance(properties, dict) or not isinstance(required, list): return True
        return all(self.satisfiable(properties[name]) for name in required
                   if isinstance(name, str) and name in properties)

    def _array(self, schema: dict[str, Any]) -> bool:
        least, first = schema.get("minItems", 0), schema.get("prefixItems") or []
        rest = schema.get("items", True)
        if isinstance(rest, list): first, rest = rest, schema.get("additionalItems", True)
        if not isinstance(least, int) or not isinstance(first, list): return True
        return all(map(self.satisfiable, first[:least])) and (least <= len(first) or self.satisfiable(rest))


def _target(root: Any, ref: str) -> Any:
    """Returns the target of a reference; True where it is not understood, which llguidance then says."""
    if not ref.startswith("#") or (ref[1:] and not ref.startswith("#/")): return True
    at = root
    for part in ref[2:].split("/") if ref[2:] else ():
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(at, dict) and name in at: at = at[name]
        elif isinstance(at, list) and name.isdigit() and int(name) < len(at): at = at[int(name)]
        else: return True
    return at


def _references(schema: Any) -> Iterator[str]:
    """The references in a schema, but for those in definitions, which count where they are used."""
    if not isinstance(schema, dict): return
    if isinstance(ref := schema.get("$ref"), str): yield ref
    for word, _, inner in _inner(schema):
        if word not in ("$defs", "definitions"): yield from _references(inner)


def _without_endless(schema: Any, values: _References) -> Any:
    """`schema` with false for what has no finite value."""
    if not isinstance(schema, dict): return schema
    if not values.satisfiable(schema): return False
    return _with(schema, {(word, key): each if word in ("not", "if") else _without_endless(each, values)
                          for word, key, each in _inner(schema)})
