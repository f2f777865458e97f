"""Chat templates, which are jinja's: tokenizer.py says what they are given. Loaded with the
first that is rendered.

Templates are untrusted code: they run in jinja's immutable sandbox, with only the helpers that transformers
documents, and each compilation and rendering has a budget of steps, time and characters
(template_budget.py, template_sandbox.py).
"""
from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

import jinja2
import jinja2.debug  # jinja2 imports it as a template fails, again and again where the stack has no room left
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from tinygrad_nv.engine.text.template_budget import TemplateLimit, charge, over_limit, run_metered, weigh
from tinygrad_nv.engine.text.template_filters import limit_filters
from tinygrad_nv.engine.text.template_sandbox import BoundedEnvironment, charge_value
from tinygrad_nv.errors import RequestError, TokenizerError

MAX_TEMPLATE = 1 << 18      # limit: characters of a chat template; a published one has up to 40,000
MAX_WORDS = 1000            # limit: characters of what raise_exception says
MAX_INDENT = 64             # limit: indentation of a template's JSON
GENERATION = "\ue000\ue001\ue003", "\ue000\ue001\ue004"     # around what {% generation %} marks


def render_template(template: str, generation_marks: bool, variables: Callable[[], Mapping[str, Any]]) -> str:
    """Renders a template. `generation_marks`: `GENERATION` stands around what it marks. Raises
    `TokenizerError`, also where the variables cannot be made."""
    try:
        # one budget: what the variables are may take renderings of its own (content_format.py)
        return run_metered(lambda: _compile(template, generation_marks).render(variables()))
    except (RequestError, TemplateLimit): raise
    except jinja2.exceptions.SecurityError as error:
        raise TokenizerError(f"the chat template tried to leave its sandbox: {_brief(error)}",
                             "a template that only formats messages", "do not use this model's template; "
                             "treat its files as hostile") from error
    except Exception as error:  # a template is a program, and can fail in any way
        raise TokenizerError(f"the chat template failed: {_brief(error) or type(error).__name__}",
                             "a template for messages with role and content",
                             "check chat_template.jinja or tokenizer_config.json") from error


def _brief(error: Exception) -> str:
    """Its words; a template can make them as long as it likes."""
    return said if len(said := str(error)) <= MAX_WORDS else said[:MAX_WORDS] + "…"


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
def _compile(template: str, generation_marks: bool) -> jinja2.Template:
    if len(template) > MAX_TEMPLATE:
        raise over_limit(f"has {len(template):,} characters", f"at most {MAX_TEMPLATE:,} characters")
    environment = _environment()
    if generation_marks: environment.extend(generation_marks=GENERATION)
    return run_metered(lambda: environment.from_string(template))


def _environment() -> BoundedEnvironment:
    def raise_exception(message: str) -> None: raise jinja2.TemplateError(message)
    # jinja's own escapes what HTML does not take
    def to_json(value: Any, ensure_ascii: bool = False, indent: int | str | None = None,
                separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
        wide = len(indent) if isinstance(indent, str) else indent or 0
        if wide > MAX_INDENT or any(len(each) > MAX_INDENT for each in separators or ()):
            raise over_limit("indents JSON widely", f"at most {MAX_INDENT} characters")
        charge(len(value) if isinstance(value, str) else weigh(value) * (1 + wide))
        return str(charge_value(json.dumps(value, ensure_ascii=ensure_ascii, indent=indent,
                                           separators=separators,
                                   sort_keys=sort_keys)))
    def strftime_now(pattern: str) -> str: return datetime.datetime.now().strftime(pattern[:MAX_WORDS])
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag])
    environment.filters = {**limit_filters(environment.filters), "tojson": to_json}
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return environment
