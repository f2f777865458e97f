"""Images of conversations.

Protocol: `has_images(service, request)` refuses parts of type image_url that the model does not read;
`with_images(…)` renders a conversation that has some, decodes and computes them in a thread, and returns its
token ids with what stands for images among them. URLs are data URLs: the server reads no files for a request,
and downloads nothing.
"""
from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

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
    if request.beams is not None:
        raise invalid("use_beam_search with images; to fix: leave one of them out", "use_beam_search",
                      "unsupported")
    return True


async def with_images(service: Service, request: ChatRequest, tools: Sequence[Tool],
                      extra: Mapping[str, Any]) -> tuple[list[int], PromptImages | None]:
    """See above. Raises `APIError`."""
    reader = service.vision
    assert reader is not None, "has_images() comes first"

    def computed() -> tuple[list[int], PromptImages | None]:
        parsed = reader.conversation([*map(_decoded, request.messages)], tools, **extra)
        made = reader.with_images(parsed, request.params.truncate_prompt_tokens)
        return made.ids or [], made.inserted
    return await service.aside(sys.maxsize, computed)


def _decoded(message: dict[str, Any]) -> dict[str, Any]:
    """A message with arrays in place of URLs."""
    if not isinstance(parts := message["content"], list): return message
    return {**message, "content": [
        {"type": "image", "image": image_of(part, local=False)} if part["type"] == IMAGE else part
        for part in parts]}
