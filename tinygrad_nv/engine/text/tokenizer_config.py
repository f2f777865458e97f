"""Changes that tokenizer_config.json makes to a tokenizer.json.

Protocol: `configure(backend, config, special, older, added)` adds the tokens that are named beside the file
alone, and sets split_special_tokens and add_prefix_space, as transformers does. `special` are tokens by name,
`older` is special_tokens_map.json and `added` added_tokens.json, which are read where tokenizer_config.json
has no added_tokens_decoder. A token that the vocabulary lacks gets the next id.
`add_tokens` and `add_ends` are for tokenizers that are made from other files than tokenizer.json.
"""
from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors

from tinygrad_nv.errors import TokenizerError, brief

Config = Mapping[str, Any]
EXTRA = ("extra_special_tokens", "additional_special_tokens")
BLANK = "▁"
# classes that make a tokenizer of the vocabulary anew, and what they put in front of a text without a word
BYTE_LEVEL = {"GPT2Tokenizer": False, "Qwen2Tokenizer": False, "RobertaTokenizer": False,
              "GPTNeoXTokenizer": False, "CodeGenTokenizer": False, "CohereTokenizer": False}
METASPACE = ("LlamaTokenizer", "CodeLlamaTokenizer")
# white space at the end of a piece, as DeepSeek's files have it: in a long run, each character is a new
# beginning that fails at the run's end. The second finds the same where newlines are pieces of their own.
SLOW_END, LINEAR_END = r"\s+$", r"(?<!\s)\s++$"
NEWLINES = ("[\r\n]", r"[\r\n]")
FLAGS = ("lstrip", "rstrip", "single_word")


def configure(backend: Tokenizer, config: Config, special: Mapping[str, str], older: Config,
              added: Config) -> None:
    """See above. Raises `TokenizerError` for entries that are no tokens."""
    backend.encode_special_tokens = bool(config.get("split_special_tokens"))
    _set_prefix(backend, config)
    _set_linear_end(backend)
    _add_tokens(backend, config, special, older, added)


def linear_end(state: Any) -> Any:
    """The JSON of a pre-tokenizer that finds white space at the end in linear time."""
    steps = state.get("pretokenizers") if isinstance(state, dict) else None
    if not isinstance(steps, list): return state
    patterns = [found if isinstance(each, dict) and isinstance(found := each.get("pattern"), dict) else {}
                for each in steps]
    texts = [each.get("Regex") for each in patterns]
    at = texts.index(SLOW_END) if SLOW_END in texts else 0
    if not any(each in NEWLINES for each in texts[:at]): return state
    return {**state, "pretokenizers": [
        *steps[:at], {**steps[at], "pattern": {**patterns[at], "Regex": LINEAR_END}}, *steps[at + 1:]]}


def _set_linear_end(backend: Tokenizer) -> None:
    if backend.pre_tokenizer is None: return
    state = json.loads(backend.pre_tokenizer.__getstate__())
    if (linear := linear_end(state)) is state: return
    made = pre_tokenizers.Sequence([])
    made.__setstate__(json.dumps(linear).encode())
    backend.pre_tokenizer = made


# **** tokens ****

def _add_tokens(backend: Tokenizer, config: Config, special: Mapping[str, str], older: Config,
                added: Config) -> None:
    known = {each.content: each for each in backend.get_added_tokens_decoder().values()}
    names = {*special.values()}
    extra = list(_extra(config))
    decoder = config.get("added_tokens_decoder")
    if isinstance(decoder, Mapping): found = [_token(each, key) for key, each in _in_order(decoder)]
    else:
        extra += _extra(older)
        names |= {each.content for each in extra}
        found = [AddedToken(text, normalized=text not in names, special=text in names)
                 for text, _ in sorted(added.items(), key=lambda entry: str(entry[1]).zfill(9))]
    for token in found: token.special = token.special or token.content in special.values()
    new = {each.content: each for each in found if each.content not in known or
           _flags(each) != _flags(known[each.content])}
    for token in (*(AddedToken(text, special=True) for text in special.values()), *extra):
        if token.content not in known and token.content not in new: new[token.content] = token
    backend.add_tokens([each for each in new.values() if each.content])


def _in_order(decoder: Config) -> list[tuple[str, Any]]:
    for key in decoder:
        if not is_id(key): raise _wrong("added_tokens_decoder", key)
    return sorted(decoder.items(), key=lambda entry: int(entry[0]))


def _extra(config: Config) -> Iterable[AddedToken]:
    for name in EXTRA:
        listed = config.get(name) or ()
        if isinstance(listed, Mapping): listed = listed.values()
        if not isinstance(listed, Iterable) or isinstance(listed, str): raise _wrong(name, listed)
        for each in listed:
            token = AddedToken(each, special=True) if isinstance(each, str) else _token(each, name)
            token.special = True
            yield token
        if config.get(name): return     # the newer name


def _token(entry: Any, where: str) -> AddedToken:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("content"), str): raise _wrong(where, entry)
    flags = {flag: bool(entry.get(flag)) for flag in FLAGS}
    special = bool(entry.get("special"))
    normalized = bool(entry.get("normalized", not special))
    return AddedToken(entry["content"], normalized=normalized, special=special, **flags)


def _flags(token: AddedToken) -> tuple[bool, ...]:
    return token.special, token.normalized, *(getattr(token, flag) for flag in FLAGS)


def _wrong(where: str, found: Any) -> TokenizerError:
    return TokenizerError(f"tokenizer_config.json: {where} has {str(found)[:60]!r}",
                          "texts, or objects with content", "download the file again")


# **** the blank in front of a text ****

def _set_prefix(backend: Tokenizer, config: Config) -> None:
    """add_prefix_space, for the classes whose tokenizers transformers makes with it; of SentencePiece's only
    where it is given: else tokenizer.json says it."""
    name, prefix = str(config.get("tokenizer_class", "")).removesuffix("Fast"), config.get("add_prefix_space")
    if name in BYTE_LEVEL and backend.pre_tokenizer is not None:
        part = _state(backend.pre_tokenizer)
        made = _with_prefix(part, BYTE_LEVEL[name] if prefix is None else bool(prefix))
        if made != part: backend.pre_tokenizer = _pre_tokenizer(made)
    elif name in METASPACE and prefix is not None and "ByteLevel" not in json.dumps(_state(backend.decoder)):
        blanks, scheme = BLANK, "always" if config.get("legacy") else "first"
        backend.normalizer = normalizers.Sequence([])
        backend.pre_tokenizer = pre_tokenizers.Metaspace(blanks, scheme if prefix else "never", split=False)
        strip = [decoders.Strip(" ", 1, 0)] if prefix else []
        backend.decoder = decoders.Sequence([decoders.Replace(blanks, " "), decoders.ByteFallback(),
                                             decoders.Fuse(), *strip])


def _state(part: Any) -> Any:
    """The JSON of a part, without the vocabulary that `to_str` has."""
    return None if part is None else json.loads(part.__getstate__())


def _with_prefix(part: Any, prefix: bool) -> Any:
    """A pre-tokenizer whose byte-level step has the blank, or has none."""
    if part.get("type") == "Sequence":
        return {**part, "pretokenizers": [_with_prefix(each, prefix) for each in part["pretokenizers"]]}
    return {**part, "add_prefix_space": prefix} if part.get("type") == "ByteLevel" else part


def _pre_tokenizer(part: Any) -> Any:
    """A pre-tokenizer of its JSON."""
    empty = json.loads(Tokenizer.from_str('{"model": {"type": "BPE", "vocab": {}, "merges": []}}').to_str())
    return Tokenizer.from_str(json.dumps({**empty, "pre_tokenizer": part})).pre_tokenizer


def is_id(key: str) -> bool:
    """Whether a key of `added_tokens_decoder` is the id of a token."""
    return key.isascii() and key.isdecimal() and len(key) < 10


def add_tokens(made: Tokenizer, config: Mapping[str, Any], older: Mapping[str, Any],
               special: Mapping[str, str], name: str) -> None:
    """Adds the tokens of tokenizer_config.json's `added_tokens_decoder`, of added_tokens.json (`older`, text
    to id), and special tokens, by their ids. Raises `TokenizerError` where an id is not the next one."""
    found: dict[int, AddedToken] = {}
    known = set(special.values())
    for text, token in older.items():
        if isinstance(token, int): found[token] = AddedToken(text, normalized=False, special=text in known)
    decoder = config.get("added_tokens_decoder")
    for key, entry in (decoder if isinstance(decoder, dict) else {}).items():
        if not is_id(key) or not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
            raise TokenizerError(f"{name}: added_tokens_decoder has {brief(key)}: {brief(entry)}",
                                 "ids, and objects with content", "download the file again")
        flags = {flag: bool(entry.get(flag)) for flag in FLAGS}
        found[int(key)] = AddedToken(entry["content"], normalized=False, special=bool(entry.get("special")),
                                     **flags)
    for token, added in sorted(found.items()):
        if added.special: made.add_special_tokens([added])
        else: made.add_tokens([added])
        if (given := made.token_to_id(added.content)) != token:
            raise TokenizerError(f"{name}: the added token {brief(added.content)} has id {token}, and the "
                                 f"vocabulary gives it {given}",
                                 "ids that follow the vocabulary's, without gaps",
                                 "use the files that belong to each other, or a tokenizer.json")
    made.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special.values()
                             if made.token_to_id(text) is not None])


def add_ends(made: Tokenizer, first: str | None, last: str | None) -> None:
    """A token before and one after each text; None for none."""
    ends = [text for text in (first, last) if text is not None and made.token_to_id(text) is not None]
    if not ends: return
    single = [text for text in (first, "$A", last) if text == "$A" or text in ends]
    pair = [f"{text}:1" for text in (first, "$B", last) if text == "$B" or text in ends]
    made.post_processor = processors.TemplateProcessing(
        single=single, pair=single + pair,
        special_tokens=[(text, made.token_to_id(text)) for text in dict.fromkeys(ends)])
