"""The chat templates of a model: one, or several by name.

Protocol: `templates_of(directory, config)` returns them by name, "default" for the one without. They are
read where transformers reads them: chat_template.jinja and additional_chat_templates/NAME.jinja come before
the chat_template of tokenizer_config.json, which is a text or a list of names and texts. A processor's
chat_template.json (or processor_config.json) is read where there is none of them. `choose_template` takes
tool_use, where there is one, for a conversation with tools.
"""
from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinygrad_nv.errors import TokenizerError
from tinygrad_nv.files import read_text

DEFAULT, TOOL_USE = "default", "tool_use"
MAX_TEMPLATE_BYTES = 1 << 20    # limit: bytes of a chat template's file; the longest has 20 KB
GGUF_KEY = "tokenizer.chat_template"


def templates_of(directory: Path, config: Mapping[str, Any],
                 processor: Mapping[str, Any]) -> dict[str, str]:
    """See above; `config` is tokenizer_config.json, `processor` what a processor has. Raises
    `TokenizerError` for a file that cannot be read."""
    found = {}
    if (path := directory / "chat_template.jinja").is_file(): found[DEFAULT] = read_template(path)
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        found[path.name.removesuffix(".jinja")] = read_template(path)
    return found or _by_name(config.get("chat_template")) or _by_name(processor.get("chat_template"))


def templates_in_metadata(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Returns the templates of a GGUF file: tokenizer.chat_template, and tokenizer.chat_template.NAME."""
    return {key[len(GGUF_KEY) + 1:] or DEFAULT: text for key, text in metadata.items()
            if (key == GGUF_KEY or key.startswith(GGUF_KEY + ".")) and isinstance(text, str)}


def read_template(path: Path) -> str:
    """The text of a file. Raises `TokenizerError`."""
    try: return read_text(path, MAX_TEMPLATE_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}", "a readable UTF-8 text file",
                             "download the file again") from error


def choose_template(templates: Mapping[str, str], name: str | None, tools: bool) -> str:
    """Returns the template of a conversation, with `tools` or without; `name` is one of the model's, or a
    template. Raises `TokenizerError` where there is none."""
    if name is not None: return templates.get(name, name)
    wanted = (TOOL_USE, DEFAULT) if tools else (DEFAULT,)
    if found := next((templates[each] for each in wanted if each in templates), None): return found
    if templates:
        raise TokenizerError(f"the model has the chat templates {', '.join(sorted(templates))}, and none is "
                             "the default", "a template named default, or one of these by its name",
                             f"pass --chat-template {min(templates)}")
    raise TokenizerError("the model has no chat template", "chat_template.jinja, or chat_template in "
                         "tokenizer_config.json", "use `generate` with a plain prompt")


def _by_name(found: Any) -> dict[str, str]:
    if isinstance(found, str): return {DEFAULT: found}
    if isinstance(found, list):
        found = {each.get("name"): each.get("template") for each in found if isinstance(each, Mapping)}
    if not isinstance(found, Mapping): return {}
    return {name: text for name, text in found.items() if isinstance(name, str) and isinstance(text, str)}
