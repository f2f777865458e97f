"""A conversation's ids, and which of them are the assistant's.

Protocol: `Template.answers(messages)` renders a conversation with the model's chat template, and finds which
characters are the assistant's: those that the template marks with {% generation %}. A token counts that has
one of them (`overlapping`), as in transformers' `apply_chat_template(return_assistant_tokens_mask=True)`. A
template without marks is rendered for each answer:

    before   the messages before the answer, and the generation prompt: where the answer begins
    through  the messages up to the answer: where it ends

Both have to be what the whole conversation begins with. Of `through` that is not so where a template ends the
conversation with a token of its own (Phi-3, gpt-oss): the answer ends with the end-of-turn token before or in
place of it. Nor is it where the template leaves the reasoning of earlier answers out (Qwen3): the answer is
what both end with. White space after the end-of-turn token, which a model never has to generate, is not the
assistant's.
"""
from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinygrad_nv.engine.text.chat_template import GENERATION
from tinygrad_nv.engine.text.tokenizer import Tokenizer
from tinygrad_nv.errors import DataError, RequestError, TokenizerError
from tinygrad_nv.train.data.records import Record

Message = Mapping[str, Any]
Spans = list[tuple[int, int]]   # in characters: begin, end
Rendered = Callable[[Sequence[Message], bool], str]     # of messages, with a generation prompt or without
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
CHECK = "add {% generation %} and {% endgeneration %} to the template, around the assistant's text"


@dataclass(frozen=True)
class Template:
    """The chat template with what a record gives it."""
    tokenizer: Tokenizer
    record: Record

    def render(self, messages: Sequence[Message], prompt: bool, marks: bool = False) -> str:
        """The text of messages, with a generation prompt or without. Raises `DataError`."""
        fields = self.record.fields
        tools, extra = fields.get("tools"), fields.get("chat_template_kwargs") or {}
        try: tools = json.loads(tools) if isinstance(tools, str) else tools
        except ValueError as error:
            raise self.record.wrong('"tools" is not JSON', "a list of functions", "correct it") from error
        try:
            return self.tokenizer.render(messages, tools or (), **{
                **extra, "add_generation_prompt": prompt, "generation_marks": marks})
        except (TokenizerError, RequestError, TypeError) as error:
            # what is wrong may be the template or the record: both are named
            found = error.found if isinstance(error, TokenizerError | RequestError) else str(error)
            raise self.record.wrong(found, "a conversation that the model's chat template accepts",
                                    "correct the record, or the template") from error

    @property
    def has_marks(self) -> bool:
        """Whether the template says which text is the assistant's."""
        try: template = self.tokenizer.chat_template(bool(self.record.fields.get("tools")))
        except TokenizerError: return False     # rendering says so, with the record
        return bool(MARKED.search(template))

    def answers(self, messages: Sequence[Message]) -> tuple[str, Spans]:
        """A conversation, and the spans of the assistant's text. Raises `DataError` where there are none."""
        if self.has_marks: text, spans = _strip_marks(self.render(messages, False, marks=True))
        else:
            text = self.render(messages, False)
            spans = [self._answer(messages, number, text) for number, message in enumerate(messages)
                     if message["role"] == "assistant"]
        if not any(begin < end for begin, end in spans):
            raise self.record.wrong("the conversation has no text of the assistant",
                                    "one or more messages of the role assistant", "remove the record")
        return text, spans

    def _answer(self, messages: Sequence[Message], number: int, text: str) -> tuple[int, int]:
        before, through = self.render(messages[:number], True), self.render(messages[:number + 1], False)
        begin = len(before)
        if not text.startswith(before): raise self._disagree(number, "before")
        if text.startswith(through): return begin, max(begin, self._end_of_turn(through))
        bare = through.rstrip()
        if token := self._special_end(bare):
            kept = bare[:-len(token)]
            turn = kept.rstrip()
            if len(turn) >= begin and self._special_end(turn) and text.startswith(turn):
                return begin, len(turn)     # the token ends the conversation, after the turn
            if len(kept) >= begin and text.startswith(kept) and (other := self._special_at(text, kept)):
                return begin, len(kept) + len(other)    # another ends the turn in its place
            end = text.find(token, begin) + len(token)
            answer = text[begin:end]
            if len(answer) > len(token) and bare.endswith(answer): return begin, end
        raise self._disagree(number, "up to")

    def _end_of_turn(self, text: str) -> int:
        """Returns where a text ends that ends with an answer, without white space after a special token."""
        bare = text.rstrip()
        return len(bare) if self._special_end(bare) else len(text)

    def _special_end(self, text: str) -> str:
        tokens = self.tokenizer.special_texts
        return max((token for token in tokens if text.endswith(token)), key=len, default="")

    def _special_at(self, text: str, before: str) -> str:
        """The special token that stands in a text after its beginning."""
        tokens = self.tokenizer.special_texts
        return max((token for token in tokens if text.startswith(token, len(before))), key=len, default="")

    def _disagree(self, number: int, which: str) -> DataError:
        return self.record.wrong(
            f"the assistant's text cannot be found: the chat template renders the messages {which} message "
            f"{number + 1} otherwise alone than in the conversation",
            "a template with {% generation %} marks, or one whose prefixes agree", CHECK)


def _strip_marks(text: str) -> tuple[str, Spans]:
    """A text without marks, and the spans that were between them."""
    begin, end = GENERATION
    parts = re.split(f"({begin}|{end})", text)
    out, spans, since = "", Spans(), 0
    for part in parts:
        if part == begin: since = len(out)
        elif part == end: spans.append((since, len(out)))
        else: out += part
    return out, spans


def overlapping(offsets: Sequence[tuple[int, int]], spans: Spans) -> list[bool]:
    """Tells for each token, given its characters, whether a span has one of them. Both are in order."""
    out, number = [False] * len(offsets), 0
    for token, (begin, end) in enumerate(offsets):
        while number < len(spans) and begin >= spans[number][1]: number += 1
        if number == len(spans): break
        out[token] = end > spans[number][0]
    return out
