"""Structured output options of a request.

Protocol: `find_option` reads at most one of response_format (OpenAI), structured_outputs and
guided_json, guided_regex, guided_choice, guided_grammar (vLLM), or a tool choice that forces a tool call.
"""
from __future__ import annotations

import json
from typing import Any

from tinygrad_nv.engine.structured_output.params import StructuredOutputsParams
from tinygrad_nv.engine.structured_output.schema import close_objects
from tinygrad_nv.errors import RequestError
from tinygrad_nv.server.errors import api_error, invalid
from tinygrad_nv.server.fields import Fields
from tinygrad_nv.server.leniency import ignore
from tinygrad_nv.server.limits import RequestLimits
from tinygrad_nv.server.tools import Tool, ToolChoice

# tool calls of an answer with tool_choice "required": a model may repeat a call until max_tokens
MAX_CALLS = 16
KINDS = ("json", "regex", "choice", "grammar")
CONSTRAINTS = (*KINDS, "json_object", "structural_tag")


def parse_structured(fields: Fields, limits: RequestLimits, forced: dict[str, Any] | None) -> Any:
    """Returns the constraint of a request's output. `is_forced` is the schema required by its tool choice."""
    option = find_option(fields, limits)
    # response_format constrains the content, which a forced tool call lacks
    if option and forced is not None and not option[0].startswith("response_format"):
        raise invalid(f"tool_choice forces a tool call, and {option[0]} asks for another output, expected "
                      "one of them", "tool_choice")
    if forced is not None: option = "tools", {"json": forced, "disable_any_whitespace": True}
    if option is None: return None
    path, arguments = option
    try: made = StructuredOutputsParams(**arguments)
    except RequestError as error: raise api_error(error, path) from error
    for name in sorted(made.annotations):
        ignore(invalid(f"{path} has format {name[:60]!r}, which is not known, and constrains nothing; to "
                       "fix: leave it out, or write a pattern", f"{path}.format", "unsupported"))
    return made


def find_option(fields: Fields, limits: RequestLimits) -> tuple[str, dict[str, Any]] | None:
    """Returns the field that constrains the output, and the arguments of `StructuredOutputsParams` for it."""
    found: list[tuple[str, dict[str, Any]]] = []
    if (wanted := fields.object("response_format")) is not None: found += _response_format(wanted)
    described = fields.object("structured_outputs")
    if described is not None and not any(described.get(name) is not None for name in CONSTRAINTS):
        raise invalid("structured_outputs has no constraint, expected one of " + ", ".join(CONSTRAINTS),
                      "structured_outputs")
    inner = Fields(described or {}, "structured_outputs")
    for kind in KINDS:
        for at, field in ((inner, kind), (fields, f"guided_{kind}")):
            if (value := at.take(field)) is not None: found.append((at.path(field), {kind: value}))
    if inner.flag("json_object"): found.append((inner.path("json_object"), {"json_object": True}))
    one_line = inner.flag("disable_any_whitespace")
    inner.as_usual({"structural_tag": "", "whitespace_pattern": "", "disable_additional_properties": False})
    inner.ignore(("_backend", "_backend_was_auto"))     # of vLLM's rendered requests
    inner.finish()
    if len(found) > 1:
        raise invalid(f"{found[0][0]} and {found[1][0]} both constrain the output, expected one", found[1][0])
    if not found: return None
    path, option = found[0]
    if len(json.dumps(option)) > limits.schema_bytes:
        raise invalid(f"{path} has more than {limits.schema_bytes} bytes", path, "schema_too_large")
    return path, {**option, "disable_any_whitespace": one_line}


def _response_format(wanted: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    fields = Fields(wanted, "response_format")
    kind = fields.text("type")
    described, own = fields.object("json_schema"), fields.take("schema")
    fields.finish()
    if kind == "text": return []
    # the schema beside the type, as llama.cpp has it
    if own is not None and described is None and kind in ("json_object", "json_schema"):
        return [("response_format.schema", {"json": own})]
    if kind == "json_object": return [("response_format", {"json_object": True})]
    if kind != "json_schema":
        raise invalid(f"response_format.type is {kind!r}, expected text, json_object or json_schema",
                      "response_format.type")
    inner = Fields(described or {}, "response_format.json_schema")
    inner.ignore(("name", "description", "strict"))
    schema = inner.take("schema")
    inner.finish()
    if schema is None:
        raise invalid("response_format.json_schema.schema is missing, expected a JSON schema",
                      "response_format.json_schema.schema", "missing_field")
    return [("response_format.json_schema.schema", {"json": schema})]


def call_schema(tools: tuple[Tool, ...], choice: ToolChoice) -> dict[str, Any] | None:
    """The schema of an answer that must be a tool call: its arguments ("named"), or a list of calls
    ("required"). None if no call is forced."""
    if not choice.is_forced: return None
    try:
        schemas = {tool["function"]["name"]: _arguments(tool["function"].get("parameters"), f"tools[{at}]")
                   for at, tool in enumerate(tools)}
        if choice.mode == "named": return schemas[choice.name]
        # each tool's schema is kept whole, so that its own references resolve
        defined = {f"tool{at}": _move_references(schema, f"#/$defs/tool{at}")
                   for at, schema in enumerate(schemas.values())}
    except RecursionError as error:
        raise invalid("tools have a schema that is nested too deeply, expected at most 100 levels",
                      "tools") from error
    call_schemas = [{"type": "object", "properties": {"name": {"const": name},
                                                      "parameters": {"$ref": f"#/$defs/tool{at}"}},
                     "required": ["name", "parameters"], "additionalProperties": False}
                    for at, name in enumerate(schemas)]
    return {"$defs": defined, "type": "array", "minItems": 1, "maxItems": MAX_CALLS if choice.several else 1,
            "items": {"anyOf": call_schemas}}


def _arguments(schema: dict[str, Any] | None, path: str) -> dict[str, Any]:
    """The schema of a tool's arguments: an object, without properties if the tool names no parameters."""
    if not schema: return {"type": "object", "properties": {}, "additionalProperties": False}
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        path = f"{path}.function.parameters.type"
        raise invalid(f"{path} is {json.dumps(kind)[:60]}, expected 'object': arguments have names", path)
    return close_objects({**schema, "type": "object"})


def _move_references(schema: Any, location: str) -> Any:
    """Returns `schema` with its references rewritten for a root at `location`."""
    if isinstance(schema, list): return [_move_references(each, location) for each in schema]
    if not isinstance(schema, dict): return schema
    return {key: location + each[1:] if key == "$ref" and isinstance(each, str) and each.startswith("#")
            else _move_references(each, location) for key, each in schema.items()}
