"""Tokens of a Whisper model by their meaning, and those that a decoder may choose next.

Protocol: `SpeechTokens.read(directory, config)` has them from generation_config.json, or config.json where
that is missing. A prompt is start, language, task, and `no_timestamps` unless timestamps are to be predicted.
`TokenRules` takes scores of the next token and the tokens chosen so far, and hides what may not come next:
suppressed tokens, some more at the beginning, and with timestamps all that breaks their rules (arXiv
2212.04356, section 2.3): they come in pairs around a segment, never go back, the first token is one of the
first second, and one comes next if all together are likelier than any other token.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tinygrad_nv.errors import ModelError, RequestError, brief

from ..config import read_json, token_ids
from .config import WhisperConfig
from .languages import language_code

TASKS = ("transcribe", "translate")
OWN = "use the generation_config.json that belongs to these weights"


@dataclass(frozen=True)
class SpeechTokens:
    """Ids of special tokens; None where a model has no such token. `languages` by code, `tasks` by name: both
    empty of English-only models. `max_initial` is the last timestamp that may come first, counted from 0 s. A
    sequence has at most `max_length` tokens."""
    start: int
    end: int
    no_timestamps: int | None
    languages: Mapping[str, int]
    tasks: Mapping[str, int]
    suppressed: tuple[int, ...]
    first_suppressed: tuple[int, ...]
    max_initial: int | None
    previous: int | None
    max_length: int

    @staticmethod
    def read(directory: Path, config: WhisperConfig) -> SpeechTokens:
        """Reads the tokens of a model. Raises `ModelError`."""
        path, general = directory / "generation_config.json", read_json(directory / "config.json")
        if not path.is_file(): path = directory / "config.json"
        own = read_json(path)

        def get(name: str) -> Any:
            # the model's fields of generation are defaults of transformers where it has a file of its own
            return general.get(name) if name == "eos_token_id" and own.get(name) is None else own.get(name)

        def several(name: str) -> tuple[int, ...]:
            found = token_ids(get(name), f"{path}: {name}") or ()
            return tuple(_token(each, config, f"{path}: {name}") for each in found)

        def single(name: str) -> int | None:
            found = get(name)
            return None if found is None else _token(found, config, f"{path}: {name}")
        start, ends, last = single("decoder_start_token_id"), several("eos_token_id"), get("max_length")
        if not ends: raise ModelError(f"{path} has no eos_token_id", "the id of <|endoftext|>",
                                      "download the file again")
        lengths = isinstance(last, int) and not isinstance(last, bool) and last > 0
        initial = get("max_initial_timestamp_index")
        multilingual = get("is_multilingual") is not False
        suppressed, previous = several("suppress_tokens"), single("prev_sot_token_id")
        # as transformers has it for files without the field: lists end with it and one more
        if previous is None and len(suppressed) > 1: previous = suppressed[-2]
        stamps = single("no_timestamps_token_id")
        if stamps is not None and not 0 < stamps < config.vocab_size - 1:
            raise ModelError(f"{path}: no_timestamps_token_id is {stamps}",
                             f"a token before those of times, below {config.vocab_size - 1}", OWN)
        if isinstance(initial, int) and initial < 0:
            raise ModelError(f"{path}: max_initial_timestamp_index is {initial}", "0 or more", OWN)
        return SpeechTokens(
            config.start_token if start is None else start, ends[0], stamps,
            _ids_by_name(get("lang_to_id"), config, f"{path}: lang_to_id") if multilingual else {},
            _ids_by_name(get("task_to_id"), config, f"{path}: task_to_id") if multilingual else {},
            suppressed, several("begin_suppress_tokens"), initial if isinstance(initial, int) else None,
            previous,
            min(last, config.max_tokens) if lengths else config.max_tokens)

    @property
    def first_timestamp(self) -> int | None:
        """Token of 0.00 s; each next is 0.02 s later."""
        return None if self.no_timestamps is None else self.no_timestamps + 1

    @property
    def no_speech(self) -> int | None:
        """The token of silence."""
        return None if self.no_timestamps is None else self.no_timestamps - 1

    @cached_property
    def codes(self) -> dict[int, str]:
        """Languages by token."""
        return {token: code for code, token in self.languages.items()}

    def language(self, text: str | None) -> int | None:
        """The token of a language, by code or name; None of None. Raises `RequestError`."""
        if text is None: return None
        code = language_code(text) or text.strip().lower()
        if code in self.languages: return self.languages[code]
        if not self.languages:
            raise RequestError(f"the language is {text[:60]!r}, and the model has one language",
                               "no language", "leave the language out")
        known = ", ".join(sorted(self.languages))
        raise RequestError(f"the language is {text[:60]!r}, which the model does not have",
                           f"one of: {known}", "correct the language, or leave it out: it is detected")

    def prompt(self, language: int | None, task: str, timestamps: bool) -> list[int]:
        """Tokens in front of a transcription. Raises `RequestError`."""
        if task not in TASKS: raise RequestError(f"the task is {task!r}", f"one of: {', '.join(TASKS)}")
        if task == "translate" and task not in self.tasks:
            raise RequestError("the task is 'translate', and the model has one language", "transcribe",
                               "use a multilingual model")
        if timestamps and self.no_timestamps is None:
            raise RequestError("timestamps are asked for, and generation_config.json has no "
                               "no_timestamps_token_id", "a model that predicts timestamps",
                               "transcribe at most 30 s without timestamps")
        tokens = [self.start] if language is None else [self.start, language]
        if task in self.tasks: tokens.append(self.tasks[task])
        if not timestamps and self.no_timestamps is not None: tokens.append(self.no_timestamps)
        return tokens


def _token(found: object, config: WhisperConfig, name: str) -> int:
    if isinstance(found, int) and not isinstance(found, bool) and 0 <= found < config.vocab_size: return found
    raise ModelError(f"{name} is {brief(found)}", f"token ids below vocab_size, {config.vocab_size}",
                     OWN)


def _ids_by_name(found: object, config: WhisperConfig, name: str) -> dict[str, int]:
    """Token ids by name, without the marks around a token: <|en|> is en."""
    if found is None: return {}
    if not isinstance(found, dict):
        raise ModelError(f"{name} is {brief(found)}", "an object with a token id for each name",
                         "download the file again")
    return {str(key).removeprefix("<|").removesuffix("|>"): _token(token, config, name)
            for key, token in found.items()}


class TokenRules:
    """Rules of the next token, with or without timestamps."""

    def __init__(self, tokens: SpeechTokens, timestamps: bool) -> None:
        self.tokens, self.timestamps = tokens, timestamps
        self.always = np.array(tokens.suppressed, np.int64)
        self.first = np.array(tokens.first_suppressed, np.int64)

    def __call__(self, scores: np.ndarray, chosen: Sequence[int]) -> np.ndarray:
        """Scores, float32 [vocab], of the token after those `chosen`; −∞ of what may not come. They are
        changed in place."""
        scores[self.always] = -np.inf
        if not chosen: scores[self.first] = -np.inf
        if self.timestamps: self._with_timestamps(scores, chosen)
        return scores

    def _with_timestamps(self, scores: np.ndarray, chosen: Sequence[int]) -> None:
        t = self.tokens
        first = t.first_timestamp
        assert first is not None, "a prompt without <|notimestamps|> is refused where there is none"
        scores[t.no_timestamps] = -np.inf
        after = bool(chosen) and chosen[-1] >= first
        paired = len(chosen) < 2 or chosen[-2] >= first
        if after and paired: scores[first:] = -np.inf       # a segment begins: text
        elif after: scores[:t.end] = -np.inf                # a segment has ended: its twin, or the end
        last = next((token for token in reversed(chosen) if token >= first), None)
        # a segment is not empty; only its end and the next one's begin may be the same
        if last is not None: scores[first:last + (not after or paired)] = -np.inf
        if not chosen:
            scores[:first] = -np.inf
            if t.max_initial is not None: scores[first + t.max_initial + 1:] = -np.inf
        if lse_of(scores[first:]) > scores[:first].max(): scores[:first] = -np.inf


def lse_of(scores: np.ndarray) -> float:
    """LSE of scores: log Σ exp, float64; −∞ where all are."""
    top = float(scores.max())
    if top == -np.inf: return top
    return top + float(np.log(np.exp(scores - top, dtype=np.float32).sum(dtype=np.float64)))

