"""What form a request asks of its answer.

Protocol: at most one of response_format (OpenAI), structured_outputs and guided_json, guided_regex,
guided_choice, guided_grammar (vLLM), or a tool choice that leaves no way but a call, is read by `wish`.
"""
from __future__ import annotations

import json
from typing import Any

from tinygrad_nv.server.errors import APIError, invalid
from tinygrad_nv.server.fields import Fields
from tinygrad_nv.server.limits import Limits
from tinygrad_nv.server.tools import Tool, ToolChoice

KINDS = ("json", "regex", "choice", "grammar")


def structured(fields: Fields, limits: Limits, forced: dict[str, Any] | None) -> Any:
    """What `SamplingParams.structured` is for a request. `forced` is a schema by its tool choice."""
    asked = wish(fields, limits)
    if asked and forced is not None:
        raise invalid("tool_choice leaves no way but a call, and another form is asked for, expected one",
                      "tool_choice")
    if asked or forced is not None:
        raise invalid("structured answers are not served", code="unsupported")
    return None


def wish(fields: Fields, limits: Limits) -> tuple[str, Any] | None:
    """The kind of form asked for, one of `KINDS`, and its schema, expression, choices or grammar."""
    found: list[tuple[str, str, Any]] = []
    if (form := fields.object("response_format")) is not None: found += _response_format(form)
    inner = Fields(fields.object("structured_outputs") or {}, "structured_outputs")
    for kind in KINDS:
        if (value := inner.take(kind)) is not None: found.append((inner.path(kind), kind, value))
        if (value := fields.take(f"guided_{kind}")) is not None: found.append((f"guided_{kind}", kind, value))
    if inner.flag("json_object"): found.append(("structured_outputs.json_object", "json", {"type": "object"}))
    inner.finish()
    if len(found) > 1:
        raise invalid(f"{found[0][0]} and {found[1][0]} both ask for a form, expected one", found[1][0])
    if not found: return None
    path, kind, value = found[0]
    return kind, _checked(path, kind, value, limits)


def _response_format(form: dict[str, Any]) -> list[tuple[str, str, Any]]:
    fields = Fields(form, "response_format")
    kind = fields.text("type")
    described = fields.object("json_schema")
    fields.finish()
    if kind == "text": return []
    if kind == "json_object": return [("response_format", "json", {"type": "object"})]
    if kind != "json_schema":
        raise invalid(f"response_format.type is {kind!r}, expected text, json_object or json_schema",
                      "response_format.type")
    schema = (described or {}).get("schema")
    if schema is None:
        raise invalid("response_format.json_schema.schema is missing, expected a JSON schema",
                      "response_format.json_schema.schema", "missing_field")
    return [("response_format.json_schema.schema", "json", schema)]


def _checked(path: str, kind: str, value: Any, limits: Limits) -> Any:
    """The schema as an object, or the text or list that the kind has, of a bounded size."""
    if len(json.dumps(value)) > limits.schema_bytes:
        raise APIError(400, f"{path} has more than {limits.schema_bytes} bytes", "schema_too_large", path)
    if kind == "json":
        try: value = json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError) as error:
            raise invalid(f"{path} is a string that is not JSON: {error}", path) from error
        if not isinstance(value, dict | bool): raise invalid(f"{path} is no JSON schema", path)
    elif kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
            raise invalid(f"{path} is not a list of strings", path)
    elif not isinstance(value, str) or not value: raise invalid(f"{path} is not a string", path)
    return value


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
    return {"type": "array", "minItems": 1, "items": {"anyOf": forms}}
