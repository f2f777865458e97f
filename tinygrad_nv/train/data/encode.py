"""Records to token ids, with a loss mask.

Protocol: `Encoder(tokenizer, options).encode(records)` gives one `Encoded` a record, two for a preference
(chosen, rejected). The rules are TRL's:

  text                ids of text + EOS, unless the text ends with it; loss on all
  prompt-completion   ids of prompt + completion + EOS; loss on what comes after as many tokens as the prompt
                      has by itself
  messages            ids of the rendered conversation; loss on the assistant's text
  preference          prompt + chosen, prompt + rejected, each as prompt-completion

A conversation's prompt is rendered with the generation prompt, and has no EOS added: the template ends turns.
"""
from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinygrad_nv.engine.text.tokenizer import Tokenizer
from tinygrad_nv.errors import TokenizerError
from tinygrad_nv.train.data.chat import Template, overlapping
from tinygrad_nv.train.data.records import Record

LONG = 1 << 20      # characters that are encoded at once: below 1 GB
AROUND = 256        # characters on either side of a cut that are compared
TRIES = 16          # lines that are tried for one cut


@dataclass(frozen=True)
class EncodeOptions:
    """`completion_only_loss`, `assistant_only_loss` and `eos_token` are TRL's. None: loss on completions, and
    on the assistant's text in "messages" alone. `eos_token`: in place of the tokenizer's own."""
    completion_only_loss: bool | None = None
    assistant_only_loss: bool | None = None
    eos_token: str | None = None


@dataclass(frozen=True)
class Encoded:
    """`ids` of a document, and which of them have `loss` (None: all). `agrees`: False where the prompt by
    itself has other tokens than it has in front of the completion."""
    ids: np.ndarray
    loss: np.ndarray | None = None
    agrees: bool = True


@dataclass(frozen=True)
class Encoder:
    """Encoder of records into ids."""
    tokenizer: Tokenizer
    options: EncodeOptions = EncodeOptions()

    @property
    def eos(self) -> str:
        """The token that ends a document. Raises `TokenizerError` where there is none."""
        token = self.options.eos_token or self.tokenizer.special.get("eos_token")
        if token is None or self.tokenizer.backend.token_to_id(token) is None:
            found = "no eos_token" if token is None else f"no token {token!r}"
            raise TokenizerError(f"the tokenizer has {found}", "the token that ends a document",
                                 "set eos_token in tokenizer_config.json, or pass --eos-token")
        return token

    def encode(self, records: Sequence[Record]) -> list[list[Encoded]]:
        """The documents of each record. Raises `DataError`, with the record's place."""
        if not records: return []
        for record in records: _require_utf8(record)
        if records[0].kind == "text": return [[one] for one in self._texts(records)]
        return [self._pair(record) if record.kind == "preference" else [self._one(record)]
                for record in records]

    def _texts(self, records: Sequence[Record]) -> list[Encoded]:
        texts = [self._end_text(record.fields["text"]) for record in records]
        short = [text for text in texts if len(text) <= LONG]
        made = iter(self.tokenizer.backend.encode_batch(short))     # on all cores
        return [Encoded(np.array(next(made).ids if len(text) <= LONG else
                                 encode_long(self.tokenizer, text), np.int64)) for text in texts]

    def _end_text(self, text: str) -> str: return text if text.endswith(self.eos) else text + self.eos

    def _one(self, record: Record) -> Encoded:
        if record.kind == "prompt-completion": return self._complete(record, "completion")
        if self.options.assistant_only_loss is False:
            text = Template(self.tokenizer, record).render(record.fields["messages"], False)
            return Encoded(np.array(self.tokenizer.encode(text, special=False), np.int64))
        ids, loss = self._conversation(record, record.fields["messages"])
        return Encoded(ids, loss)

    def _pair(self, record: Record) -> list[Encoded]:
        return [self._complete(record, name, True) for name in ("chosen", "rejected")]

    def _complete(self, record: Record, name: str, pair: bool = False) -> Encoded:
        prompt, completion, options = record.fields["prompt"], record.fields[name], self.options
        assistant = None
        if record.is_chat:
            template, whole = Template(self.tokenizer, record), [*prompt, *completion]
            before = self.tokenizer.encode(template.render(prompt, True), special=False)
            if options.assistant_only_loss and not pair: ids, assistant = self._conversation(record, whole)
            else: ids = np.array(self.tokenizer.encode(template.render(whole, False), special=False))
        else:
            before = self.tokenizer.encode(prompt)
            ids = np.array(self.tokenizer.encode(prompt + self._end_text(completion)))
        loss = np.arange(len(ids)) >= len(before)
        if options.completion_only_loss is False and not pair: loss[:] = True
        if assistant is not None: loss &= assistant
        return Encoded(ids, loss, ids[:len(before)].tolist() == before)

    def _conversation(self, record: Record, messages: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
        text, spans = Template(self.tokenizer, record).answers(messages)
        made = self.tokenizer.backend.encode(text, add_special_tokens=False)
        return np.array(made.ids, np.int64), np.array(overlapping(made.offsets, spans), bool)


def _require_utf8(record: Record) -> None:
    """JSON can name halves of surrogate pairs, which no tokenizer reads."""
    for name, value in record.fields.items():
        try: json.dumps(value, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError as error:
            raise record.wrong(f'"{name}" has half of a surrogate pair: {error.object[error.start]!r}',
                               "text that UTF-8 can have", "correct the record") from error


def encode_long(tokenizer: Tokenizer, text: str, long: int = LONG) -> list[int]:
    """The ids of a text, with the special tokens that the model expects around it, that one call would give.
    The tokenizers library takes hundreds of bytes of memory a character, all at once: a text is cut, only
    between lines where the tokens around the cut are the same with and without it, as those of byte-level
    tokenizers are. What cannot be cut is encoded at once."""
    backend, own = tokenizer.backend, list[int]()
    for part in _parts(tokenizer, text, long): own += backend.encode(part, add_special_tokens=False).ids
    # what stands before and after a text is seen at one character, which may be several tokens
    probe, inside = backend.encode("a").ids, backend.encode("a", add_special_tokens=False).ids
    at = next(at for at in range(len(probe)) if probe[at:at + len(inside)] == inside)
    return [*probe[:at], *own, *probe[at + len(inside):]]


def _parts(tokenizer: Tokenizer, text: str, long: int) -> Iterator[str]:
    begin = 0
    while len(text) - begin > long:
        cut = _cut(tokenizer, text, begin, begin + long)
        if cut is None: break
        yield text[begin:cut]
        begin = cut
    yield text[begin:]


def _cut(tokenizer: Tokenizer, text: str, begin: int, end: int) -> int | None:
    """The end of a line before `end`, where the text can be cut."""
    at = end
    for _ in range(TRIES):
        if (at := text.rfind("\n", begin, at)) <= begin: return None
        left, right = text[max(begin, at + 1 - AROUND):at + 1], text[at + 1:at + 1 + AROUND]
        both, *alone = (tokenizer.backend.encode(each, add_special_tokens=False).ids
                        for each in (left + right, left, right))
        if both == alone[0] + alone[1]: return at + 1
    return None
