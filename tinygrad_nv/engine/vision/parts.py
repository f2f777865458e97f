"""Messages with parts that are images, as OpenAI's API and vLLM have them.

Protocol: `with_placeholders(message, local)` returns the message as a chat template reads it, its images as
parts {"type": "image"}, and the images in their order. A part is of type image_url (a data URL, or a file's
where `local` allows it) or image (an array, an `ImageFile`, or an image of PIL). Files are not decoded yet.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tinygrad_nv.engine.prompts import only_text
from tinygrad_nv.engine.text.content_format import is_text
from tinygrad_nv.engine.vision.images import AnImage, as_image, from_url
from tinygrad_nv.errors import RequestError

IMAGES = ("image_url", "image", "image_pil")


def is_image(part: Any) -> bool:
    """Whether a part of a content is an image."""
    return isinstance(part, Mapping) and part.get("type") in IMAGES


def with_placeholders(message: Mapping[str, Any],
                      local: bool = False) -> tuple[Mapping[str, Any], list[AnImage]]:
    """See above. Raises `RequestError`."""
    parts = message.get("content")
    if not isinstance(parts, list | tuple) or not any(map(is_image, parts)): return only_text(message), []
    made, images = list[dict[str, Any]](), list[AnImage]()
    for part in parts:
        if is_image(part):
            images.append(image_of(part, local))
            made.append({"type": "image"})
        elif is_text(part): made.append({"type": "text", "text": part["text"]})
        else: raise RequestError(f"a part {str(part)[:60]}", f"one of type text, {', '.join(IMAGES)}")
    return {**message, "content": made}, images


def all_with_placeholders(messages: Sequence[Mapping[str, Any]], local: bool
                          ) -> tuple[list[Mapping[str, Any]], tuple[AnImage, ...]]:
    """The messages of a conversation, and the images of all."""
    found = [with_placeholders(each, local) for each in messages]
    return [message for message, _ in found], tuple(each for _, own in found for each in own)


def image_of(part: Mapping[str, Any], local: bool) -> AnImage:
    """The image of a part; `local`: files may be read. Raises `RequestError`."""
    kind = str(part["type"])
    given = part.get(kind)
    if kind != "image_url": return as_image(given)
    url = given.get("url") if isinstance(given, Mapping) else given
    if isinstance(url, str): return from_url(url, local)
    raise RequestError(f"a part of type image_url without a URL: {str(given)[:40]}",
                       '{"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}',
                       "send the image as a data URL")
