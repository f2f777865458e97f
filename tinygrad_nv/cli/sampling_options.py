"""Sampling options of the command line: every field of `SamplingParams` that a command line can state.

Protocol: `add_sampling_options` adds them, `sampling_fields` is what a command line sets, by the names of the
fields. `SamplingParams` checks the values. Options that make several answers, or tell about tokens, are of
`generate` alone.
"""
from __future__ import annotations

import argparse
from typing import Any

from tinygrad_nv.errors import RequestError
from tinygrad_nv.files import MAX_NAMED_BYTES, parse_json, read_text

NUMBERS: dict[str, tuple[type, str, str]] = {
    "max_tokens": (int, "N", "tokens to generate at most (default 256)"),
    "min_tokens": (int, "N", "no end token before so many"),
    "temperature": (float, "T", "0 is greedy"),
    "top_p": (float, "P", "keep the likeliest tokens that sum to P"),
    "top_k": (int, "K", "keep the K likeliest tokens; 0 keeps all"),
    "min_p": (float, "P", "drop tokens below P times the likeliest"),
    "repetition_penalty": (float, "R", "1 is none"),
    "presence_penalty": (float, "X", "subtracted from the logits of tokens in the output; 0 is none"),
    "frequency_penalty": (float, "X", "the same, for each occurrence"),
    "seed": (int, "N", "the same seed gives the same text")}
OF_ANSWERS: dict[str, tuple[type, str, str]] = {
    "n": (int, "N", "answers to the prompt (default 1)"),
    "logprobs": (int, "N", "log probabilities of the N likeliest tokens and the sampled one, in --json"),
    "prompt_logprobs": (int, "N", "the same of the prompt's tokens"),
    "truncate_prompt_tokens": (int, "N", "cut a longer prompt off at its beginning; -1 to the context")}
TEXTS = {"stop": "end before this text", "bad_words": "never write this text"}
CONSTRAINTS = {"json_schema": ("json", "FILE", "a JSON schema that the answer follows"),
               "regex": ("regex", "R", "a regular expression that it matches"),
               "choice": ("choice", "TEXT", "one of these texts; may be repeated"),
               "grammar": ("grammar", "FILE", "a Lark or GBNF grammar that it follows")}


def token_ids(text: str) -> list[int]:
    """Token ids of an option."""
    try: return [int(word) for word in text.replace(",", " ").split()]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids; write 1,2,3") from error


def _bias(text: str) -> dict[int, float]:
    try:
        pairs = (pair.rsplit(":", 1) for pair in text.split(","))
        return {int(token): float(bias) for token, bias in pairs}
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of biases; write TOKEN:BIAS, such as "
                                         "11:-100,12:2.5") from error


def add_sampling_options(command: argparse.ArgumentParser, answers: bool) -> None:
    """Adds the options; those `OF_ANSWERS` where `answers`."""
    group = command.add_argument_group("sampling (defaults: the model's generation_config.json)")
    for name, (kind, metavar, words) in {**NUMBERS, **(OF_ANSWERS if answers else {})}.items():
        group.add_argument(_option(name), type=kind, metavar=metavar, help=words)
    for name, words in TEXTS.items():
        group.add_argument(_option(name), action="append", metavar="TEXT", help=f"{words}; may be repeated")
    for name, words in (("stop_token_ids", "end after one of these tokens"),
                        ("allowed_token_ids", "sample these tokens only")):
        group.add_argument(_option(name), type=token_ids, metavar="1,2,3", help=words)
    group.add_argument("--logit-bias", type=_bias, metavar="ID:B,…", help="added to logits, by token id")
    group.add_argument("--ignore-eos", action="store_true", default=None,
                       help="go on past the model's end token")
    group.add_argument("--include-stop-str-in-output", action="store_true", default=None,
                       help="keep the stop text that ends an answer")
    group.add_argument("--keep-special-tokens", action="store_false", default=None,
                       dest="skip_special_tokens", help="leave special tokens in the text")
    limits = command.add_argument_group("structured output (at most one)")
    for name, (field, metavar, words) in CONSTRAINTS.items():
        limits.add_argument(_option(name), metavar=metavar, help=words,
                            action="append" if field == "choice" else "store")


def _option(name: str) -> str: return "--" + name.replace("_", "-")


def sampling_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of `SamplingParams` that a command line sets."""
    names = (*NUMBERS, *OF_ANSWERS, *TEXTS, "stop_token_ids", "allowed_token_ids", "logit_bias", "ignore_eos",
             "include_stop_str_in_output", "skip_special_tokens")
    found = {name: getattr(arguments, name, None) for name in names}
    made = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()
            if value is not None}
    asked = {field: getattr(arguments, name) for name, (field, _, _) in CONSTRAINTS.items()}
    asked = {field: value for field, value in asked.items() if value is not None}
    if not asked: return made
    from tinygrad_nv.engine.structured_output.params import StructuredOutputsParams
    if "json" in asked: asked["json"] = _json(asked["json"])
    if "grammar" in asked: asked["grammar"] = _read(asked["grammar"])
    return {**made, "structured_outputs": StructuredOutputsParams(**asked)}


def _json(name: str) -> Any:
    try: return parse_json(_read(name))
    except ValueError as error:
        raise RequestError(f"{name} is not JSON: {error}", "a JSON schema", "change --json-schema") from error


def _read(name: str) -> str:
    try: return read_text(name, MAX_NAMED_BYTES, pipes=True)
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{name} cannot be read: {error}", "a UTF-8 text file",
                           "change the option") from error
