"""Prompts: a text, token ids, or vLLM's dictionary of one of them or of messages; one or many.

Protocol: `parse(prompt)` makes a `ParsedPrompt`, which has one of text, ids and messages. Prompts
with different salts share no pages of keys and values.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from tinygrad_nv.engine.text.content_format import is_text
from tinygrad_nv.errors import RequestError

if TYPE_CHECKING:
    from tinygrad_nv.engine.vision.images import AnImage
    from tinygrad_nv.engine.vision.prompt import PromptImages

TextOrTokens = str | Sequence[int]
KINDS = ("prompt", "prompt_token_ids", "messages")
# keys of vLLM that would say more; one that it does not know has no effect
NOT_SERVED = ("prompt_embeds", "encoder_prompt", "decoder_prompt", "mm_processor_kwargs", "multi_modal_uuids")


@dataclass(frozen=True)
class ParsedPrompt:
    """See above. A conversation that was rendered has both ids and their text. `images`, RGB bytes or files,
    belong in the places of placeholders; once they are `inserted`, the ids have a token for each of their
    rows."""
    text: str | None = None
    ids: list[int] | None = None
    messages: list[Mapping[str, Any]] | None = None
    salt: str = ""
    images: tuple[AnImage, ...] = ()
    inserted: PromptImages | None = None


Prompt = TextOrTokens | Mapping[str, Any] | ParsedPrompt


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts; a single prompt becomes a list of one. Raises `RequestError` for other types."""
    if isinstance(prompts, str | Mapping | ParsedPrompt): return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable): raise _not_a_prompt(prompts)
    many = list(prompts)
    if many and all(isinstance(each, int | np.integer) for each in many): return [cast(Prompt, many)]
    return cast(list[Prompt], many)


def parse(prompt: Prompt) -> ParsedPrompt:
    """Returns text, token ids and images of a prompt. Raises `RequestError` for other types."""
    if isinstance(prompt, ParsedPrompt): return prompt
    if isinstance(prompt, str): return ParsedPrompt(prompt)
    if not isinstance(prompt, Mapping): return ParsedPrompt(ids=as_token_ids(prompt))
    given = {name: value for name, value in prompt.items() if value is not None}
    salt, text, media = given.pop("cache_salt", ""), None, given.pop("multi_modal_data", None)
    if "prompt_token_ids" in given: text = given.pop("prompt", None)   # the text of these tokens
    found = [name for name in KINDS if name in given]
    other = [name for name in NOT_SERVED if given.get(name)]
    if len(found) != 1 or other or not isinstance(salt, str):
        raise RequestError(f"a prompt with {', '.join(map(repr, prompt)) or 'nothing'}",
                           f"one of {', '.join(KINDS)}, and perhaps cache_salt, a text, or multi_modal_data",
                           "pass a text, token ids or messages; sounds are not read")
    value, images = given[found[0]], _images(media)
    if found[0] == "prompt" and isinstance(value, str): return ParsedPrompt(value, salt=salt, images=images)
    if found[0] == "prompt_token_ids" and not isinstance(value, str | Mapping):
        text = text if isinstance(text, str) else None
        return ParsedPrompt(text, as_token_ids(value), salt=salt, images=images)
    if found[0] == "messages" and isinstance(value, list | tuple) and not images:
        return ParsedPrompt(messages=[*value], salt=salt)
    raise _not_a_prompt(value)


def _images(data: Any) -> tuple[AnImage, ...]:
    """Returns the images of vLLM's multi_modal_data. Raises `RequestError`."""
    if data is None: return ()
    if not isinstance(data, Mapping) or {*data} - {"image"}:
        raise RequestError(f"multi_modal_data of {str(data)[:60]}", '{"image": an image, or a list of them}',
                           "leave sounds and videos out")
    if data.get("image") is None: return ()
    from tinygrad_nv.engine.vision.images import as_images
    return as_images(data["image"])


def text_or_tokens(prompt: Prompt) -> TextOrTokens:
    """A prompt without messages. Raises `RequestError`."""
    parsed = parse(prompt)
    if parsed.messages is not None:
        raise RequestError("a prompt of messages", "a text, or token ids", "embed one of the messages' texts")
    return parsed.text or "" if parsed.ids is None else parsed.ids


def as_token_ids(prompt: Iterable[Any]) -> list[int]:
    """The token ids of a prompt that is not a text. Raises `RequestError` for other types."""
    try: ids = [token if isinstance(token, bool) else index(token) for token in prompt]
    except TypeError: raise _not_a_prompt(prompt) from None
    if isinstance(prompt, bytes) or any(isinstance(each, bool) for each in ids): raise _not_a_prompt(prompt)
    return ids


def only_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose content is a text, or parts of text. Raises `RequestError` for other parts."""
    parts = message.get("content")
    if not isinstance(parts, list | tuple) or all(map(is_text, parts)): return message
    raise RequestError(f"a content of parts {str(parts)[:60]}", "parts of type text",
                       "leave images and sounds out: the model reads text")


def require_messages(messages: Any) -> list[Mapping[str, Any]]:
    """A conversation, with parts for the texts of a list. Raises `RequestError` for what is none."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError(f"messages is {str(messages)[:60]!r}", "a list of messages", "write at least one")
    made = []
    for each in messages:
        content = each.get("content") if isinstance(each, Mapping) else None
        if not isinstance(each, Mapping) or not isinstance(each.get("role"), str) or \
                not isinstance(content, str | list | tuple | None):
            raise RequestError(f"a message {str(each)[:60]}",
                               "a role, and a content that is a text, parts or None", "correct the message")
        if isinstance(content, list | tuple):
            parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
            each = {**each, "content": parts}
        made.append(each)
    return made


def _not_a_prompt(found: Any) -> RequestError:
    return RequestError(f"a prompt of type {type(found).__name__}: {str(found)[:40]}",
                        "a text, or a list of token ids", "pass prompt texts, or lists of ids")
