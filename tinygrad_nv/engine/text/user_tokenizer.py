"""`UserTokenizer`: a model's tokenizer with transformers' names, as programs for vLLM call it.

Protocol: `llm.get_tokenizer()` makes one. Names, arguments and defaults are those of transformers'
tokenizers; results are lists of Python, not tensors, and `apply_chat_template` gives token ids or a text.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tinygrad_nv.engine.text.tokenizer import Message, Tokenizer, Tools


class Encoding(dict[str, Any]):
    """Result of calling a tokenizer: a dictionary whose values are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        if name in self: return self[name]
        raise AttributeError(name)


class UserTokenizer:
    """`tokenizer` of the directory `name_or_path`, for at most `model_max_length` tokens."""

    def __init__(self, tokenizer: Tokenizer, name_or_path: str, model_max_length: int) -> None:
        self.tokenizer, self.backend_tokenizer = tokenizer, tokenizer.backend
        self.name_or_path, self.model_max_length = name_or_path, model_max_length
        self.chat_template, self.is_fast = tokenizer.template, True

    def __getattr__(self, name: str) -> Any:
        """bos_token, eos_token, pad_token, …, and their ids: None where the model has none."""
        if name.endswith("_token") and not name.startswith("_"): return self.tokenizer.special.get(name)
        if name.endswith("_token_id") and not name.startswith("_"):
            text = self.tokenizer.special.get(name.removesuffix("_id"))
            return None if text is None else self.backend_tokenizer.token_to_id(text)
        raise AttributeError(f"the tokenizer has no attribute {name!r}")

    def __len__(self) -> int: return self.backend_tokenizer.get_vocab_size(True)

    def __call__(self, text: str | Sequence[str], text_pair: str | None = None, *,
                 add_special_tokens: bool = True) -> Encoding:
        """`input_ids` and `attention_mask`, of a text or of each of a list."""
        if isinstance(text, str):
            if text_pair is not None: ids = self.tokenizer.encode_pair(text, text_pair)[0]
            else: ids = self.tokenizer.encode(text, add_special_tokens)
            return Encoding(input_ids=ids, attention_mask=[1] * len(ids))
        many = [self.tokenizer.encode(each, add_special_tokens) for each in text]
        return Encoding(input_ids=many, attention_mask=[[1] * len(ids) for ids in many])

    def encode(self, text: str, text_pair: str | None = None, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        return list(self(text, text_pair, add_special_tokens=add_special_tokens)["input_ids"])

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of token ids."""
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return self.tokenizer.decode(ids, skip_special_tokens)

    def batch_decode(self, sequences: Sequence[Sequence[int]],
                     skip_special_tokens: bool = False) -> list[str]:
        """The text of each list."""
        return [self.decode(each, skip_special_tokens) for each in sequences]

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[str]:
        """The names of a text's tokens."""
        return list(self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).tokens)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """The id of a token's name, or of each of a list; that of the unknown token for others."""
        if not isinstance(tokens, str): return [self.convert_tokens_to_ids(each) for each in tokens]
        found = self.backend_tokenizer.token_to_id(tokens)
        return self.unk_token_id if found is None else found

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """The name of a token, or of each of a list."""
        if not isinstance(ids, int): return [self.convert_ids_to_tokens(each) for each in ids]
        return self.backend_tokenizer.id_to_token(ids)

    def get_vocab(self) -> dict[str, int]:
        """Ids by the names of tokens."""
        return dict(self.backend_tokenizer.get_vocab(True))

    @property
    def vocab(self) -> dict[str, int]:
        """`get_vocab()`."""
        return self.get_vocab()

    def get_added_vocab(self) -> dict[str, int]:
        """Returns the ids of added tokens."""
        return {each.content: at for at, each in self.backend_tokenizer.get_added_tokens_decoder().items()}

    @property
    def vocab_size(self) -> int:
        """Without added tokens."""
        return self.backend_tokenizer.get_vocab_size(False)

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of special tokens."""
        return sorted(self.tokenizer.special_ids)

    @property
    def all_special_tokens(self) -> list[str]:
        """Their names."""
        return [self.convert_ids_to_tokens(each) for each in self.all_special_ids]

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """Special tokens by their use, such as eos_token."""
        return dict(self.tokenizer.special)

    def apply_chat_template(self, conversation: Sequence[Message], tools: Tools | None = None,
                            chat_template: str | None = None, add_generation_prompt: bool = False,
                            continue_final_message: bool = False, tokenize: bool = True,
                            **extra: Any) -> str | list[int]:
        """The prompt of a conversation, as token ids or a text."""
        if isinstance(conversation, Mapping): conversation = [conversation]
        text = self.tokenizer.render(conversation, tools or (), chat_template=chat_template,
                                     add_generation_prompt=add_generation_prompt,
                                     continue_final_message=continue_final_message, **extra)
        return self.tokenizer.encode(text, special=False) if tokenize else text
