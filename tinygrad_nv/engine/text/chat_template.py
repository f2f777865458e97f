"""Chat templates, which are jinja's: tokenizer.py says what they are given. Loaded with the
first that is rendered.

Templates are untrusted code: they run in jinja's immutable sandbox, with only the helpers that transformers
documents.
"""
from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from tinygrad_nv.errors import RequestError, TokenizerError

GENERATION = "\ue000\ue001\ue003", "\ue000\ue001\ue004"     # around what {% generation %} marks


def rendered(template: str, generation_marks: bool, variables: Callable[[], Mapping[str, Any]]) -> str:
    """What a template writes. `generation_marks`: `GENERATION` stands around what it marks. Raises
    `TokenizerError`, also where the variables cannot be made."""
    try: return _compiled(template, generation_marks).render(variables())
    except RequestError: raise
    except jinja2.exceptions.SecurityError as error:
        raise TokenizerError(f"the chat template tried to leave its sandbox: {error}",
                             "a template that only formats messages", "do not use this model's template; "
                             "treat its files as hostile") from error
    except Exception as error:  # a template is a program, and can fail in any way
        raise TokenizerError(f"the chat template failed: {error or type(error).__name__}",
                             "a template for messages with role and content",
                             "check chat_template.jinja or tokenizer_config.json") from error


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} … {% endgeneration %} marks the assistant's text for training. Ignored, unless the
    environment's `generation_marks` are to stand around it."""
    tags = {"generation"}  # noqa: RUF012 (jinja2 reads a plain class attribute)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        inside = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        if not (marks := getattr(self.environment, "generation_marks", ())): return inside
        begin, end = (jinja2.nodes.Output([jinja2.nodes.TemplateData(mark)]) for mark in marks)
        return [begin, *inside, end]


@functools.lru_cache(16)
def _compiled(template: str, generation_marks: bool) -> jinja2.Template:
    environment = _environment()
    if generation_marks: environment.extend(generation_marks=GENERATION)
    return environment.from_string(template)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    def raise_exception(message: str) -> None: raise jinja2.TemplateError(message)
    # jinja's own escapes what HTML does not take
    def to_json(value: Any, ensure_ascii: bool = False, indent: int | str | None = None,
                separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                          sort_keys=sort_keys)
    def strftime_now(pattern: str) -> str: return datetime.datetime.now().strftime(pattern)
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag])
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return environment
