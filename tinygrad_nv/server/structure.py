"""What form a request asks of its answer.

Protocol: at most one of response_format (OpenAI), structured_outputs and guided_json, guided_regex,
guided_choice, guided_grammar (vLLM), or a tool choice that leaves no way but a call, is read by `wish`.
"""
from __future__ import annotations

import json
from typing import Any

from tinygrad_nv.engine.structured import Structured
from tinygrad_nv.errors import RequestError
from tinygrad_nv.server.errors import explained, invalid
from tinygrad_nv.server.fields import Fields
from tinygrad_nv.server.limits import Limits
from tinygrad_nv.server.tools import Tool, ToolChoice

# vLLM's names, and `Structured`'s
KINDS = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}


def structured(fields: Fields, limits: Limits, forced: dict[str, Any] | None) -> Any:
    """What `SamplingParams.structured` is for a request. `forced` is a schema by its tool choice."""
    asked = wish(fields, limits)
    if asked and forced is not None:
        raise invalid("tool_choice leaves no way but a call, and another form is asked for, expected one",
                      "tool_choice")
    if forced is not None: asked = "tools", {"json_schema": forced}
    if asked is None: return None
    path, form = asked
    try: return Structured(**form)
    except RequestError as error: raise explained(error, path) from error


def wish(fields: Fields, limits: Limits) -> tuple[str, dict[str, Any]] | None:
    """The field that asks for a form, and the arguments of `Structured` for it."""
    found: list[tuple[str, dict[str, Any]]] = []
    if (form := fields.object("response_format")) is not None: found += _response_format(form)
    inner = Fields(fields.object("structured_outputs") or {}, "structured_outputs")
    for kind, name in KINDS.items():
        for at, field in ((inner, kind), (fields, f"guided_{kind}")):
            if (value := at.take(field)) is not None: found.append((at.path(field), {name: value}))
    if inner.flag("json_object"): found.append((inner.path("json_object"), {"json_object": True}))
    inner.finish()
    if len(found) > 1:
        raise invalid(f"{found[0][0]} and {found[1][0]} both ask for a form, expected one", found[1][0])
    if not found: return None
    path, asked = found[0]
    if len(json.dumps(asked)) > limits.schema_bytes:
        raise invalid(f"{path} has more than {limits.schema_bytes} bytes", path, "schema_too_large")
    return path, asked


def _response_format(form: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    fields = Fields(form, "response_format")
    kind = fields.text("type")
    described = fields.object("json_schema")
    fields.finish()
    if kind == "text": return []
    if kind == "json_object": return [("response_format", {"json_object": True})]
    if kind != "json_schema":
        raise invalid(f"response_format.type is {kind!r}, expected text, json_object or json_schema",
                      "response_format.type")
    schema = (described or {}).get("schema")
    if schema is None:
        raise invalid("response_format.json_schema.schema is missing, expected a JSON schema",
                      "response_format.json_schema.schema", "missing_field")
    return [("response_format.json_schema.schema", {"json_schema": schema})]


def call_schema(tools: tuple[Tool, ...], choice: ToolChoice) -> dict[str, Any] | None:
    """The schema of an answer that must be a call: its arguments ("named"), or a list of calls ("required").
    None when it may be anything."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {"type": "object"})
               for tool in tools}
    if choice.mode == "named": return schemas[choice.name]
    if choice.mode != "required": return None
    forms = [{"type": "object", "properties": {"name": {"const": name}, "parameters": schema},
              "required": ["name", "parameters"], "additionalProperties": False}
             for name, schema in schemas.items()]
    most = {} if choice.several else {"maxItems": 1}
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": forms}}
