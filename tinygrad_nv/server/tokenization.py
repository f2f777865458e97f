"""POST /tokenize and /detokenize: between texts and token ids, as the model reads them.

Protocol: vLLM's fields. /tokenize takes a `prompt`, or the `messages` of a conversation with the fields that
are about the chat template. `token_strs` are the entries of the vocabulary. A text that is far longer than
the context is refused before it is tokenized.
"""
from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tinygrad_nv.engine.text.tokenizer import Tokenizer
from tinygrad_nv.server.chat_protocol import chat
from tinygrad_nv.server.conversation import Conversation
from tinygrad_nv.server.errors import invalid
from tinygrad_nv.server.fields import MAX_WHOLE, Fields
from tinygrad_nv.server.json_answer import JSONAnswer
from tinygrad_nv.server.leniency import ignore
from tinygrad_nv.server.record import Record
from tinygrad_nv.server.service import Service

MAX_ID = (1 << 32) - 1  # the largest id that the tokenizer takes; no vocabulary has it
CONVERSATION = ("model", "messages", "tools", "add_generation_prompt", "continue_final_message",
                "add_special_tokens", "chat_template", "chat_template_kwargs")


async def tokenize(request: Request, service: Service, record: Record, data: dict[str, Any]) -> Response:
    """The token ids of a prompt, or of a conversation."""
    fields, tokenizer = Fields(data), service.require_tokenizer()
    shown = fields.flag("return_token_strs")
    if not {"prompt", "messages"} & fields.left.keys():
        raise invalid("one of prompt and messages is expected, found neither", "prompt", "missing_field")
    ids = await _conversation(service, record, fields) if "messages" in fields.left else \
        await _prompt(service, record, fields, tokenizer)
    record.prompt_tokens = len(ids)
    pieces = await service.aside(len(ids), lambda: [*map(tokenizer.backend.id_to_token, ids)]) \
        if shown else None
    return JSONAnswer({"count": len(ids), "max_model_len": service.model.length, "tokens": ids,
                         "token_strs": pieces})


async def _prompt(service: Service, record: Record, fields: Fields, tokenizer: Tokenizer) -> list[int]:
    text, special = fields.text("prompt") or "", fields.flag("add_special_tokens", True)
    service.require_name(fields.text("model"))
    fields.finish()

    def encode() -> list[int]:
        tokenizer.require_fitting(text, service.model.length)
        return tokenizer.encode(text, special)
    return await service.aside(record.size, encode)


async def _conversation(service: Service, record: Record, fields: Fields) -> list[int]:
    given = {name: value for name in CONVERSATION if (value := fields.take(name)) is not None}
    if fields.take("prompt") is not None:   # as in vLLM the messages count
        ignore(invalid("prompt is given beside messages, which are tokenized; to fix: leave one out",
                       "prompt"))
    fields.finish()
    request = await service.read(record, lambda: chat(given, service.model.defaults, service.limits))
    return (await Conversation.of(service, request, record.size)).prompt


async def detokenize(request: Request, service: Service, record: Record, data: dict[str, Any]) -> Response:
    """The text of token ids, special tokens as they are written."""
    fields, tokenizer = Fields(data), service.require_tokenizer()
    if "tokens" not in fields.left:
        raise invalid("tokens is missing, expected a list of token ids", "tokens", "missing_field")

    def decode() -> str:
        ids = fields.wholes("tokens") or ()
        service.require_name(fields.text("model"))
        fields.finish()
        if (most := max(ids, default=0)) > MAX_WHOLE:
            raise invalid(f"tokens has the id {str(most)[:20]}, expected at most {MAX_WHOLE}", "tokens")
        # ids that are not in the vocabulary have no text
        return tokenizer.decode([min(each, MAX_ID) for each in ids], skip_special_tokens=False)
    text = await service.aside(record.size, decode)
    return JSONAnswer({"prompt": text})
