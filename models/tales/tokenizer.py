"""The tokenizer of the tales: byte-level BPE in the Hugging Face layout.

    tokenizer = train_tokenizer(texts)   the same texts give the same tokenizer
    save(tokenizer, directory)           tokenizer.json, tokenizer_config.json, special_tokens_map.json

Ids 0 to 4 are <|bos|> <|eos|> <|pad|> <|user|> <|assistant|>; the 256 bytes follow, then the merges, so any
text round-trips. Encoding puts <|bos|> in front, as Llama does; the trainer of the model adds <|eos|>.
"""
from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS, PAD, USER, ASSISTANT = SPECIALS = ("<|bos|>", "<|eos|>", "<|pad|>", "<|user|>", "<|assistant|>")
MAX_LENGTH = 512

# The model was trained on stories, not on dialogues: what the user writes is the opening that it continues.
CHAT_TEMPLATE = ("{{ bos_token }}{% for message in messages %}{% if message['role'] != 'system' %}"
                 "{% if not loop.first and messages[loop.index0 - 1]['role'] != 'system' %} {% endif %}"
                 "{{ message['content'] | trim }}{% endif %}{% endfor %}")


def train_tokenizer(texts: Iterable[str], vocab_size: int = 1024) -> Tokenizer:
    """A byte-level BPE of at most `vocab_size` tokens, the five special ones and all bytes included."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1", special_tokens=[(BOS, tokenizer.token_to_id(BOS))])
    return tokenizer


def save(tokenizer: Tokenizer, directory: str | Path) -> None:
    """Write the files that transformers.AutoTokenizer and the engine read."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special, "model_max_length": MAX_LENGTH,
              "add_prefix_space": False, "clean_up_tokenization_spaces": False,
              "additional_special_tokens": [USER, ASSISTANT], "chat_template": CHAT_TEMPLATE}
    tokens = special | {"additional_special_tokens": [USER, ASSISTANT]}
    for name, content in (("tokenizer_config.json", config), ("special_tokens_map.json", tokens)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
