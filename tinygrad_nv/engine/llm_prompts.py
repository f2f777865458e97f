"""The part of `LLM` that makes requests of prompts: tokens, conversations, grammars.

Protocol: `request(name, prompt, params)` is a checked `Request` for the core, `tokenize(prompt)` its token
ids.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinygrad_nv.engine.core import EngineCore
from tinygrad_nv.engine.lora.request import LoRARequest
from tinygrad_nv.engine.lora.serving import ServedAdapters, with_adapter
from tinygrad_nv.engine.prompts import ParsedPrompt, Prompt, only_text, parse, text_or_tokens
from tinygrad_nv.engine.sampling import SamplingParams
from tinygrad_nv.engine.scheduling.request import Matcher, Request, check_request
from tinygrad_nv.engine.structured_output.matchers import Matchers
from tinygrad_nv.engine.text.earlier_calls import render
from tinygrad_nv.engine.text.tokenizer import Message, Tokenizer, Tools
from tinygrad_nv.engine.text.user_tokenizer import UserTokenizer
from tinygrad_nv.engine.worker.model_runner import ModelRunner
from tinygrad_nv.errors import NVError, RequestError, TokenizerError

if TYPE_CHECKING:
    from tinygrad_nv.engine.embedding.embedder import Embedder
    from tinygrad_nv.engine.vision.encoder import VisionEncoder
    from tinygrad_nv.engine.vision.images import AnImage
    from tinygrad_nv.models.config import ModelConfig


class PromptMethods:
    """Methods of `LLM` for prompts."""
    directory: Path
    embedder: Embedder | None
    length: int
    max_logprobs: int
    tokenizer: Tokenizer | None
    tokenizer_error: NVError | None
    config: ModelConfig
    eos: tuple[int, ...]
    defaults: SamplingParams
    core: EngineCore
    adapters: ServedAdapters | None
    vision: VisionEncoder | None
    runner: ModelRunner
    _seeds: Callable[[], int]

    def tokenize(self, prompt: Prompt, truncate_prompt_tokens: int | None = None,
                 truncation_side: str = "left") -> list[int]:
        """Token ids of a prompt, checked against the vocabulary and the context; with
        `truncate_prompt_tokens` its last ones, or its first ones where the `truncation_side` is "right"."""
        if self.embedder is not None:
            return self.embedder.encode(text_or_tokens(prompt), truncate_prompt_tokens)
        parsed = parse(prompt)
        limit = self.length - 1 if truncate_prompt_tokens == -1 else truncate_prompt_tokens
        if parsed.messages is not None: parsed = self.conversation(parsed.messages)
        if parsed.ids is not None:
            ids = parsed.ids[:limit] if limit is None or truncation_side == "right" else parsed.ids[-limit:]
        else:
            tokenizer, text = self.require_tokenizer(), parsed.text or ""
            tokenizer.require_fitting(text, self.length - 1, limit is not None)
            ids = tokenizer.encode(text) if limit is None else \
                tokenizer.encode_truncated(text, limit, truncation_side)
        if not ids:
            raise RequestError("the prompt has no tokens", "at least one token id", "pass a longer prompt")
        if len(ids) >= self.length:
            raise RequestError(f"the prompt has {len(ids)} tokens, the context holds {self.length}",
                               f"at most {self.length - 1}, so that one can be added",
                               "shorten the prompt or raise --max-model-len")
        for bad in (min(ids), max(ids)):
            if 0 <= bad < self.config.vocab_size: continue
            raise RequestError(f"token id {bad} is out of vocabulary",
                               f"0 to {self.config.vocab_size - 1}", "use ids of this model's tokenizer")
        return ids

    def tokenize_as_told(self, prompt: Prompt, given: Mapping[str, Any]) -> ParsedPrompt:
        """A prompt as its tokens, as vLLM's `tokenization_kwargs` say: `add_special_tokens`, and at most
        `truncate_prompt_tokens` (or `max_length` with `truncation`). Without a `truncation_side` it is cut
        off at its beginning, but for special tokens. Names that vLLM has not are ignored, as there."""
        side, most = given.get("truncation_side"), given.get("truncate_prompt_tokens")
        if most is None and given.get("truncation"): most = given.get("max_length", self.length)
        if most == -1: most = self.length - 1
        if side not in (None, "left", "right") or not (most is None or _is_whole(most, 1, self.length)):
            raise RequestError(f"tokenization_kwargs is {dict(given)!r:.200}",
                               f"truncate_prompt_tokens from 1 to {self.length}, or -1; truncation_side left "
                               "or right", "change tokenization_kwargs")
        if other := [name for name in ("padding", "pad_prompt_tokens", "do_lower_case") if given.get(name)]:
            raise RequestError(f"tokenization_kwargs has {other[0]}", "none: texts are as written",
                               f"leave {other[0]} out")
        parsed = parse(prompt)
        if parsed.messages is not None: parsed = replace(self.conversation(parsed.messages), salt=parsed.salt)
        ids, special = parsed.ids, given.get("add_special_tokens", True)
        if ids is None or (parsed is prompt and "add_special_tokens" in given):
            tokenizer, text = self.require_tokenizer(), parsed.text or ""
            tokenizer.require_fitting(text, self.length - 1, most is not None)
            ids = tokenizer.encode_truncated(text, most, "left") if most and special and side is None else \
                tokenizer.encode(text, special)
        if most is not None: ids = ids[:most] if side == "right" else ids[-most:]
        return replace(parsed, ids=ids)

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises the error of loading it if there is none."""
        if self.tokenizer is None: raise self.tokenizer_error or TokenizerError("no tokenizer")
        return self.tokenizer

    def get_tokenizer(self) -> UserTokenizer:
        """The tokenizer, with transformers' names."""
        return UserTokenizer(self.require_tokenizer(), str(self.directory), self.length)

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the parameters of a `generate` that gets none: the model's own, and 256 tokens."""
        return replace(self.defaults)

    def encode_chat(self, messages: Sequence[Message], tools: Tools = (), /, **extra: Any) -> list[int]:
        """Token ids of a conversation, through the model's chat template. `tools` and `extra` are variables
        of the template."""
        return self.tokenize(self.render_conversation(messages, tools, extra, local=False, truncated=False))

    def conversation(self, messages: Sequence[Message], tools: Tools = (), /, **extra: Any) -> ParsedPrompt:
        """A conversation as a prompt: its text and token ids. Parts of a content are joined by new lines,
        unless the template reads parts; images among them stay where they are, and no files are read for
        their URLs."""
        return self.render_conversation(messages, tools, extra, local=False)

    def render_conversation(self, messages: Sequence[Message], tools: Tools, extra: Mapping[str, Any],
                 local: bool, truncated: bool = True) -> ParsedPrompt:
        """`conversation`; `local`: URLs of images may be those of files. `truncated`: it may be longer than
        the context. Raises `RequestError`."""
        self._require_generator()
        images: tuple[AnImage, ...] = ()
        if self.vision is None: messages = [only_text(each) for each in messages]
        else:
            from tinygrad_nv.engine.vision.parts import all_with_placeholders
            messages, images = all_with_placeholders(messages, local)
        tokenizer = self.require_tokenizer()
        text = render(tokenizer, messages, tools, **extra)
        tokenizer.require_fitting(text, self.length - 1, truncated)
        return ParsedPrompt(text, tokenizer.encode(text, special=False), images=images)

    def with_images(self, parsed: ParsedPrompt, truncate_prompt_tokens: int | None = None) -> ParsedPrompt:
        """A prompt as token ids, its images as rows of the embedding: each placeholder becomes a token for
        each row. Computes what an image was not computed for before. Raises `RequestError`."""
        if parsed.inserted is not None: return parsed
        ids, encoder = self.tokenize(parsed, truncate_prompt_tokens), self.vision
        if not parsed.images: return replace(parsed, ids=ids)
        if encoder is None:
            raise RequestError(f"a prompt with {len(parsed.images)} images", "a prompt of text",
                               "load a model that reads images (Qwen2.5-VL), on one rank and not as a bundle")
        from tinygrad_nv.engine.vision.encoder import with_rows
        return with_rows(parsed, ids, encoder, self.runner, self.length)

    def _require_generator(self) -> None:
        if self.embedder is None: return
        raise RequestError(f"{self.directory} makes embeddings, and generates no text",
                           "a causal language model", "call embed(prompts)")

    @cached_property
    def structured_outputs(self) -> Matchers:
        """Compiler and cache of requests' matchers."""
        return Matchers(self.require_tokenizer, self.config.vocab_size, self.eos)

    def _require_more_than_ends(self, params: SamplingParams) -> None:
        """Raises `RequestError` where only end tokens are allowed, and none may come before `min_tokens`."""
        if params.allowed_token_ids is None or not params.min_tokens: return
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self.eos)}
        if {*params.allowed_token_ids} <= ends:
            raise RequestError(f"min_tokens is {params.min_tokens}, and only end tokens are allowed",
                               "a token that may come before", "allow more tokens, or set min_tokens to 0")

    def matchers(self, params: SamplingParams) -> tuple[Matcher, ...]:
        """A matcher for each answer if not every token may follow; compiling a new grammar takes up to
        seconds. Raises `RequestError` for a grammar that cannot be enforced."""
        return self.structured_outputs.of(params)

    def request(self, name: str, prompt: Prompt, params: SamplingParams | None = None,
                priority: int = 0, matched: bool = True, lora_request: LoRARequest | None = None) -> Request:
        """A checked request for the core; its parameters have a seed, and `matched` its matchers."""
        self._require_generator()
        params = self.defaults if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params of type {type(params).__name__}", "SamplingParams",
                               "pass SamplingParams(…)")
        params.require_vocabulary(self.config.vocab_size)
        if params.stop: self.require_tokenizer()
        self._require_more_than_ends(params)
        for asked in ("logprobs", "prompt_logprobs"):
            if (count := getattr(params, asked) or 0) > self.max_logprobs:
                raise RequestError(f"{asked} is {count}", f"at most max_logprobs, {self.max_logprobs}",
                                   f"lower {asked}, or raise max_logprobs of LLM")
        if params.thinking_token_budget is not None and params.reasoning is None:
            raise RequestError(f"thinking_token_budget is {params.thinking_token_budget}", "None: a server "
                               "with --reasoning-parser knows where reasoning ends", "ask the server")
        params = replace(params, seed=self._seeds() if params.seed is None else params.seed)
        parsed = parse(prompt)
        if parsed.messages is not None: parsed = replace(self.conversation(parsed.messages), salt=parsed.salt)
        parsed = self.with_images(parsed, params.truncate_prompt_tokens)
        salt, images = parsed.salt.encode(errors="surrogatepass"), parsed.inserted
        assert parsed.ids is not None
        made = Request(name, parsed.ids, params, priority, salt=salt, text=parsed.text, images=images)
        check_request(made, self.core.config, self.length, self.config.vocab_size)
        made = with_adapter(self.adapters, made, lora_request)
        return replace(made, matchers=self.matchers(params)) if matched else made


def _is_whole(x: Any, low: int, high: int) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and low <= x <= high
