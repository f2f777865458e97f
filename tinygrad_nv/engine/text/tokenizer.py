"""Text to ids and back, and chat templates.

Protocol: `Tokenizer.load(directory)` reads tokenizer.json (with the `tokenizers` library) and the special
tokens of tokenizer_config.json and the chat templates (templates.py), or those of a GGUF file (gguf.py).
Of a directory without tokenizer.json it reads the older files (vocabulary_files.py): a SentencePiece model,
vocab.json with merges.txt, or vocab.txt.
Templates are untrusted code, which runs in a sandbox (chat_template.py).
"""
from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import tokenizers

from tinygrad_nv.engine.text.content_format import format_contents, is_text, text_of
from tinygrad_nv.engine.text.gguf_patterns import LINEAR
from tinygrad_nv.engine.text.prompt_length import TextBound
from tinygrad_nv.engine.text.templates import (
    DEFAULT,
    choose_template,
    read_template,
    templates_in_metadata,
    templates_of,
)
from tinygrad_nv.engine.text.tokenizer_config import configure, linear_end
from tinygrad_nv.errors import RequestError, TokenizerError
from tinygrad_nv.files import read_json
from tinygrad_nv.models.config import find_gguf
from tinygrad_nv.models.tokenizer_limits import as_typed, read_backend, require_strips

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]
MARK = "\ue000\ue001\ue002"     # of the end of a message, in no text: for private use
# characters and ids from which on a call leaves Python's lock to other threads
LONG, LONG_IDS = 2048, 1024
ALONE = 1 << 14     # texts of one id that are kept: a few MB


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer with its special tokens (name → text, such as "bos_token") and chat template; `named` are
    further ones, such as "tool_use". `content_format` says how templates read contents (content_format.py).
    `most`: bytes of a prompt; None is any number."""
    backend: tokenizers.Tokenizer
    special: Mapping[str, str]
    template: str | None
    named: Mapping[str, str] = field(default_factory=dict)
    content_format: str = "auto"
    most: int | None = None

    @staticmethod
    def load(directory: Path) -> Tokenizer:
        """Reads a Hugging Face directory. Raises `TokenizerError` when tokenizer.json is damaged, or missing
        with nothing to make it from."""
        path = directory / "tokenizer.json"
        if not path.is_file() and (file := find_gguf(directory)) is not None: return Tokenizer.of(file)
        config = _optional_json(directory / "tokenizer_config.json")
        older = _optional_json(directory / "special_tokens_map.json")
        special = {**_special_tokens(older), **_special_tokens(config)}
        if path.is_file():
            backend = read_backend(path, LINEAR, adjust=linear_end)
            configure(backend, config, special, older, _optional_json(directory / "added_tokens.json"))
        else:
            from tinygrad_nv.engine.text import vocabulary_files
            added = _optional_json(directory / "added_tokens.json")
            if (made := vocabulary_files.read(directory, config, special, added)) is None:
                raise TokenizerError(f"{directory} has no tokenizer.json",
                                     "a fast tokenizer saved by transformers, or tokenizer.model, vocab.json "
                                     "with merges.txt, or vocab.txt",
                                     "download tokenizer.json, or pass token ids instead of text")
            backend, special = made
        require_strips(backend, str(directory))
        backend.no_truncation()
        backend.no_padding()
        processor = {**_optional_json(directory / "processor_config.json"),
                     **_optional_json(directory / "chat_template.json")}
        templates = templates_of(directory, config, processor)
        return Tokenizer(backend, special, templates.pop(DEFAULT, None), templates)

    @staticmethod
    def of(path: Path) -> Tokenizer:
        """Returns the tokenizer of a GGUF file."""
        from tinygrad_nv.engine.text.gguf import special_tokens, tokenizer_of
        from tinygrad_nv.quant.gguf.file import open_gguf
        file = open_gguf(path)
        templates = templates_in_metadata(file.metadata)
        return Tokenizer(tokenizer_of(file), special_tokens(file), templates.pop(DEFAULT, None), templates)

    def require_fitting(self, text: str, room: int, truncated: bool = False) -> None:
        """Raises `RequestError` for a text that has more than `room` tokens for sure, unless it is to be
        `truncated`, and for one that is longer than any that is tokenized."""
        if not truncated and (least := self.length_bound.least(text)) > room:
            raise RequestError(f"the prompt has {len(text)} characters, {least} or more tokens, the context "
                               f"holds {room} of a prompt", f"at most {room} tokens",
                               "shorten the prompt or raise --max-model-len")
        if self.most is not None and (size := len(text.encode(errors="replace"))) > self.most:
            raise RequestError(f"the prompt has {size} bytes", f"at most {self.most} bytes: a longer one is "
                               "not tokenized, not even to be truncated", "shorten the prompt")

    @cached_property
    def length_bound(self) -> TextBound:
        """Lower bound of a text's number of tokens."""
        return TextBound.of(self.backend)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Ids of `text`, with the special tokens that the model expects around it unless `special` is False.
        """
        self.require_utf8(text)
        try:
            if len(text) <= LONG: return list(self.backend.encode(text, add_special_tokens=special).ids)
            # `encode` would hold Python's lock until it is done, for seconds
            [made] = self.backend.encode_batch_fast([text], add_special_tokens=special)
            return list(made.ids)
        except BaseException as error: raise as_typed(error, "encode this text") from error

    def require_utf8(self, text: str) -> None:
        """Raises `RequestError` for a text that is not."""
        try: text.encode()
        except UnicodeEncodeError as error:  # what Python makes of bytes on a command line that are not UTF-8
            raise RequestError(f"the prompt is not UTF-8: {text[error.start]!r} at character {error.start}",
                               "UTF-8 text", "correct the prompt's encoding, or pass token ids with "
                               "--prompt-ids") from error

    def encode_truncated(self, text: str, most: int, side: str = "right") -> list[int]:
        """`encode`, cut off at the end, or at the beginning ("left"), so that there are at most `most` ids,
        the special tokens among them."""
        own = self.encode(text, special=False)
        keep = max(most - self.backend.num_special_tokens_to_add(False), 0)
        own = own[:keep] if side == "right" else own[max(len(own) - keep, 0):]
        return self.add_special_tokens(own)[0][:most]

    def encode_pair(self, first: str, second: str, most: int | None = None) -> tuple[list[int], list[int]]:
        """Ids of two texts, and of which type each token is. Of more than `most` the longer text is cut off
        first, token by token."""
        return self.pair(self.encode(first, special=False), self.encode(second, special=False), most)

    def pair(self, one: Sequence[int], two: Sequence[int],
             most: int | None = None) -> tuple[list[int], list[int]]:
        """`encode_pair` of texts whose ids are known."""
        if most is not None:
            room = max(0, most - self.backend.num_special_tokens_to_add(True))
            half = -(-room // 2) if len(one) > len(two) else room // 2   # the longer one has the odd token
            own = min(len(one), max(room - len(two), half))
            one, two = one[:own], two[:max(0, room - own)]
        return self.add_special_tokens(one, two)

    def add_special_tokens(self, *texts: Sequence[int]) -> tuple[list[int], list[int]]:
        """Returns the ids of one or two texts with the special tokens around them, and of which type each
        token is."""
        ids, types = list[int](), list[int]()
        for token, kind in self._layouts[len(texts) - 1]:
            new = texts[-token - 1] if token < 0 else (token,)
            ids += new
            types += [kind] * len(new)
        return ids, types

    @cached_property
    def _layouts(self) -> tuple[list[tuple[int, int]], ...]:
        """Layouts around a text, and around two: ids, −1 for the first text and −2 for the second, each with
        its type."""
        def probe(token: int) -> tokenizers.Encoding:
            """The encoding of a text of one token."""
            made = tokenizers.Encoding()
            made.__setstate__(json.dumps({
                "ids": [token], "type_ids": [0], "tokens": [""], "words": [None], "offsets": [[0, 0]],
                "special_tokens_mask": [0], "attention_mask": [1], "overflowing": [], "sequence_ranges": {},
            }).encode())
            return made
        found = (self.backend.post_process(probe(0)), self.backend.post_process(probe(0), probe(1)))
        return tuple([(token if added else -1 - token, kind) for token, kind, added in zip(
            made.ids, made.type_ids, made.special_tokens_mask, strict=True)] for made in found)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`, special tokens left out unless `skip_special_tokens` is False."""
        try:
            if len(ids) == 1: return self._text_alone(ids[0], skip_special_tokens)
            if len(ids) <= LONG_IDS: return str(self.backend.decode(list(ids), skip_special_tokens))
            return str(self.backend.decode_batch([list(ids)], skip_special_tokens)[0])
        except BaseException as error: raise as_typed(error, "decode these ids") from error

    @cached_property
    def _text_alone(self) -> Callable[[int, bool], str]:
        """`decode` of one id, which a stream asks for with each of its tokens."""
        decode = self.backend.decode
        return lru_cache(ALONE)(lambda token, skip: str(decode([token], skip)))

    def silent(self, token: int) -> bool:
        """Whether `decode` omits the token: it is special, or not in the vocabulary."""
        return token in self.special_ids or self.unknown(token)

    def special_text(self, text: str) -> bool:
        """Whether `text` is a special token, which `decode` omits."""
        token = self.backend.token_to_id(text)
        return token is not None and token in self.special_ids

    def unknown(self, token: int) -> bool:
        """Whether the token is not in the vocabulary."""
        return self.backend.id_to_token(token) is None

    def token_text(self, token: int) -> str:
        """The text of one token: special tokens as they are written, bytes that are not a character as
        U+FFFD."""
        if token not in self._texts:
            before = self._before
            text = self.decode([*before, token], skip_special_tokens=False)
            self._texts[token] = text[len(self.decode(before, skip_special_tokens=False)):]
        return self._texts[token]

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(token for token, entry in added.items() if entry.special)

    @cached_property
    def special_texts(self) -> tuple[str, ...]:
        """Special tokens, as they are written."""
        added = self.backend.get_added_tokens_decoder()
        return tuple(entry.content for entry in added.values() if entry.special)

    @cached_property
    def _texts(self) -> dict[int, str]: return {}

    @cached_property
    def _before(self) -> list[int]:
        # a letter in front, for the space that decoders strip at the start of a text
        return self.encode("a", special=False)

    def with_template(self, given: str) -> Tokenizer:
        """Returns this tokenizer with the template of --chat-template: a file's text, the model's of this
        name, or a template itself, as vLLM has it. Raises `TokenizerError`."""
        names, path = [*({} if self.template is None else {DEFAULT: ""}), *self.named], Path(given)
        if given in names: text = self.chat_template(name=given)
        elif any(sign in given for sign in "{}\n"): text = given
        elif path.is_file(): text = read_template(path)
        else:
            raise TokenizerError(f"--chat-template {given} cannot be read: there is no such file",
                                 "a file, a template, or the name of one of the model's: "
                                 f"{', '.join(names) or 'it has none'}", "change --chat-template")
        return replace(self, template=text, named={})

    def chat_template(self, tools: bool = False, name: str | None = None) -> str:
        """The template of a conversation, with `tools` or without; `name` is one of the model's, or a
        template that stands for them. Raises `TokenizerError` where there is none."""
        own = {} if self.template is None else {DEFAULT: self.template}
        return choose_template({**self.named, **own}, name, tools)

    def render(self, messages: Sequence[Message], tools: Tools = (), /, *, chat_template: str | None = None,
               add_generation_prompt: bool = True, continue_final_message: bool = False,
               generation_marks: bool = False, content_format: str | None = None, **extra: Any) -> str:
        """The prompt of a conversation, up to the assistant's turn. `tools` are functions as in OpenAI's API,
        `extra` further variables of the template. `add_generation_prompt`: the assistant's next turn begins;
        `continue_final_message`: the last message goes on instead. `chat_template` stands for the model's
        own, or names one of them. `generation_marks`: `GENERATION` stands around what the template marks with
        {% generation %}. Contents are texts or parts, given to the template as `content_format` says."""
        template = self.chat_template(bool(tools), chat_template or None)
        if continue_final_message: messages = _mark_end(messages)
        from tinygrad_nv.engine.text.chat_template import render_template
        form = content_format or self.content_format
        text = render_template(template, generation_marks, lambda: {
            **extra, **self.special, "messages": format_contents(messages, form, template, self.special),
            "tools": [dict(tool) for tool in tools] or None, "documents": extra.get("documents"),
            "add_generation_prompt": add_generation_prompt and not continue_final_message})
        return _cut_at_mark(text) if continue_final_message else text

    def encode_chat(self, messages: Sequence[Message], tools: Tools = (), /, **extra: Any) -> list[int]:
        """Ids of a conversation, as `render` writes it. The template writes its own special tokens."""
        return self.encode(self.render(messages, tools, **extra), special=False)


def _mark_end(messages: Sequence[Message]) -> list[Message]:
    """Returns a conversation whose last content ends with a mark, by which its end is found in the prompt."""
    last = messages[-1] if messages else {}
    content = last.get("content")
    if not text_of(content).strip():
        raise RequestError("continue_final_message of a message without a text",
                           "a last message to go on with", "leave continue_final_message out")
    if isinstance(content, str): return [*messages[:-1], {**last, "content": content + MARK}]
    parts = list(content or ())
    at = max(i for i, part in enumerate(parts) if is_text(part))
    parts[at] = {**parts[at], "text": parts[at]["text"] + MARK}
    return [*messages[:-1], {**last, "content": parts}]


def _cut_at_mark(text: str) -> str:
    """Returns a conversation up to the end of its last message's content, as transformers cuts it."""
    if (at := text.find(MARK)) < 0:
        raise RequestError("continue_final_message, and the last message's content is not in the prompt",
                           "a last message of text that the template writes as it is",
                           "leave continue_final_message out")
    return text[:at]


def _optional_json(path: Path) -> dict[str, Any]:
    if not path.is_file(): return {}
    try: data = read_json(path)
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} is not JSON: {error}", "a JSON object",
                             "download the file again") from error
    if not isinstance(data, dict):
        raise TokenizerError(f"{path} holds a {type(data).__name__}", "a JSON object",
                             "download the file again")
    return data


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Entries such as "bos_token", written as a string or as an object with its content."""
    out = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str): out[name] = text
    return out
