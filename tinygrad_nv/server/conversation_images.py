"""Images of conversations.

Protocol: `has_images(service, request)` refuses parts of type image_url that the model does not read;
`with_images(…)` renders a conversation that has some, and returns its token ids with what stands for images
among them. In a thread it opens the images, checks their sizes against the limits of a request and the length
of the context, and then decodes and computes one after the other, within the budget of all requests. URLs are
data URLs: the server reads no files for a request, and downloads nothing.
"""
from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tinygrad_nv.engine.vision.images import AnImage, decoding_bytes, require_budget
from tinygrad_nv.engine.vision.parts import image_of
from tinygrad_nv.engine.vision.prompt import PromptImages
from tinygrad_nv.server.chat_protocol import IMAGE, ChatRequest, only_text
from tinygrad_nv.server.errors import invalid
from tinygrad_nv.server.service import Service
from tinygrad_nv.server.tools import Tool


def has_images(service: Service, request: ChatRequest) -> bool:
    """Whether a conversation has images. Raises `APIError` where they cannot be read."""
    found = [(f"messages[{at}].content[{i}].type", part) for at, message in enumerate(request.messages)
             if isinstance(message["content"], list)
             for i, part in enumerate(message["content"]) if part["type"] == IMAGE]
    if not found: return False
    if service.vision is None: raise only_text(*found[0])
    if len(found) > service.limits.images:
        raise invalid(f"messages have {len(found)} images, expected at most {service.limits.images}; to fix: "
                      "send fewer, or raise --max-images", "messages", "too_many_images")
    if request.beams is not None:
        raise invalid("use_beam_search with images; to fix: leave one of them out", "use_beam_search",
                      "unsupported")
    return True


async def with_images(service: Service, request: ChatRequest, tools: Sequence[Tool],
                      extra: Mapping[str, Any]) -> tuple[list[int], PromptImages | None]:
    """See above. Raises `APIError`."""
    reader = service.vision
    assert reader is not None, "has_images() comes first"

    def open_images() -> tuple[list[dict[str, Any]], int]:
        """Returns the messages with files in place of URLs, and the bytes that the largest takes as it is
        decoded."""
        messages, images = [*map(_open_files, request.messages)], list[AnImage]()
        for message in messages:
            if isinstance(message["content"], list):
                images += [part["image"] for part in message["content"] if part["type"] == "image"]
        require_budget(images, service.limits.image_pixels)
        return messages, max(map(decoding_bytes, images))

    def encode() -> tuple[list[int], PromptImages | None]:
        parsed = reader.conversation(messages, tools, **extra)
        made = reader.with_images(parsed, request.params.truncate_prompt_tokens)
        return made.ids or [], made.inserted
    messages, nbytes = await service.aside(sys.maxsize, open_images)
    async with service.media.hold(nbytes): return await service.aside(sys.maxsize, encode)


def _open_files(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message with files in place of URLs."""
    if not isinstance(parts := message["content"], list): return message
    return {**message, "content": [
        {"type": "image", "image": image_of(part, local=False)} if part["type"] == IMAGE else part
        for part in parts]}
