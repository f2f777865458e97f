"""The rows of a data set.

Protocol: `load(paths, tokenizer, vocab_size, options)` gives a `Data`: its length is how many indices there
are, and `rows(index)` gives one `Row`, or two where they are preferences (chosen, rejected). Text is
tokenized once (token_cache.py) and mapped, shards are mapped: a row is read when it is asked for.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, Protocol, get_args

import numpy as np

from tinygrad_nv import progress
from tinygrad_nv.engine.text.tokenizer import Tokenizer
from tinygrad_nv.errors import ConfigError, DataError
from tinygrad_nv.train.data import packing
from tinygrad_nv.train.data.batch import Row, row
from tinygrad_nv.train.data.encode import EncodeOptions, Encoder
from tinygrad_nv.train.data.files import find, is_shard
from tinygrad_nv.train.data.packing import Strategy
from tinygrad_nv.train.data.records import Record, SampleBy, records
from tinygrad_nv.train.data.sampler import permute
from tinygrad_nv.train.data.shards import ShardDtype, Shards
from tinygrad_nv.train.data.token_cache import Tokens, Writer, hash_file, open_cached

Overflow = Literal["auto", "truncate", "split"]
TOGETHER = 256      # records that are tokenized at once, on all cores
MULTIPLE = 64       # of tokens: the width of batches is rounded up to it


@dataclass(frozen=True)
class DataOptions:
    """How files become rows.

      max_length              tokens of a row, at most
      packing                 several documents share a row; of shards, segments end after each EOS token
      packing_strategy        bfd, bfd_split or wrapped (packing.py)
      overflow                documents of more tokens: truncate, split, or auto: .txt split, others truncate
      sample_by               what of a .txt file is a document: document (all of it), paragraph or line
      completion_only_loss, assistant_only_loss, eos_token    TRL's (encode.py)
      shard_dtype             of .bin files
      seed                    of the order in which `wrapped` joins documents; `shuffle` False: file order

    Raises `ConfigError` for a value that is none of these."""
    max_length: int = 1024
    packing: bool = False
    packing_strategy: Strategy = "bfd"
    overflow: Overflow = "auto"
    sample_by: SampleBy = "document"
    completion_only_loss: bool | None = None
    assistant_only_loss: bool | None = None
    eos_token: str | None = None
    shard_dtype: ShardDtype = "auto"
    shuffle: bool = True
    seed: int = 42

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise ConfigError(f"--max-length {self.max_length}", "2 or more: one token predicts the next",
                              "raise it")
        allowed = {"packing_strategy": get_args(Strategy), "overflow": get_args(Overflow),
                   "sample_by": get_args(SampleBy), "shard_dtype": get_args(ShardDtype)}
        for name, values in allowed.items():
            if (value := getattr(self, name)) not in values:
                raise ConfigError(f"--{name.replace('_', '-')} {value}", ", ".join(values), "choose one")

    @property
    def encode(self) -> EncodeOptions:
        """Options that decide a document's ids and its loss."""
        return EncodeOptions(self.completion_only_loss, self.assistant_only_loss, self.eos_token)


@dataclass(frozen=True)
class Summary:
    """Counts of a data set. `dropped_tokens` were truncated, or are left at the end of a shard;
    `dropped_documents` have no token with loss in what is left of them. `prompts_disagree`: documents whose
    prompt alone has other tokens than in front of its completion. Of shards, `documents` are files, and
    `loss_tokens` is what each window has but its first token."""
    documents: int
    tokens: int
    rows: int
    row_tokens: int
    loss_tokens: int
    dropped_tokens: int
    dropped_documents: int
    prompts_disagree: int = 0

    def __str__(self) -> str:
        said = [f"{self.documents:,} documents", f"{self.tokens:,} tokens", f"{self.rows:,} rows"]
        if self.dropped_tokens: said.append(f"{self.dropped_tokens:,} tokens beyond --max-length dropped")
        if self.dropped_documents: said.append(f"{self.dropped_documents:,} documents without loss dropped")
        if self.prompts_disagree:
            said.append(f"{self.prompts_disagree:,} prompts have other tokens before their completion")
        return ", ".join(said)


class Data(Protocol):
    """Rows by index. `width`: tokens of the longest row, rounded up, at most `max_length`: the width of
    batches. `rows_per_index`: 2 for preferences, else 1."""

    @property
    def width(self) -> int: ...
    @property
    def rows_per_index(self) -> int: ...
    @property
    def summary(self) -> Summary: ...
    def __len__(self) -> int: ...
    def rows(self, index: int) -> tuple[Row, ...]:
        """The row, or chosen and rejected. Raises `DataError`."""


def load(paths: Sequence[str | Path], tokenizer: Tokenizer | None, vocab_size: int,
         options: DataOptions = DataOptions()) -> Data:
    """The rows of files, directories and globs. `vocab_size` is the model's. `tokenizer` may be None for
    shards of token ids. Raises `DataError` for data that cannot be used, `TokenizerError` for a tokenizer or
    a chat template that cannot."""
    files = find(paths)
    if is_shard(files[0]): return _shards(files, tokenizer, vocab_size, options)
    if tokenizer is None:
        raise DataError(f"{files[0]} is text, and there is no tokenizer", "a tokenizer, for text",
                        "name a model with a tokenizer, or train on token ids (.npy, .bin)")
    first = next(records(files[:1], options.sample_by))
    tokens = _tokenize(files, first, tokenizer, vocab_size, options)
    if first.kind == "preference": return Preferences.of(tokens, options.max_length)
    return Documents.of(tokens, options, split=_splits(files, options))


def _splits(files: Sequence[Path], options: DataOptions) -> bool:
    if options.overflow != "auto": return options.overflow == "split"
    if options.packing and options.packing_strategy == "bfd_split": return True
    return all(file.suffix.lower() == ".txt" for file in files)


# **** text ****

def _tokenize(files: Sequence[Path], first: Record, tokenizer: Tokenizer, vocab_size: int,
               options: DataOptions) -> Tokens:
    """The documents of files: from the cache, or tokenized now. Preferences are two documents each."""
    encoder = Encoder(tokenizer, options.encode)
    if not first.is_chat: _ = encoder.eos       # raises before minutes of work
    def write(writer: Writer) -> None:
        size, done = sum(file.stat().st_size for file in files), 0
        with progress.bar("tokenizing") as shown:
            def read(count: int) -> None:
                nonlocal done
                done += count
                shown(done, size)
            left = records(files, options.sample_by, read)
            while some := list(islice(left, TOGETHER)):
                _add(writer, some, encoder, vocab_size)
    key = hash_file(files, asdict(options.encode), options.sample_by, vocab_size, tokenizer.backend.to_str(),
                 dict(tokenizer.special), tokenizer.template, dict(tokenizer.named))
    return open_cached(key, vocab_size, write)


def _add(writer: Writer, some: Sequence[Record], encoder: Encoder, vocab_size: int) -> None:
    for record, documents in zip(some, encoder.encode(some), strict=True):
        for document in documents:
            if len(document.ids) and (most := int(document.ids.max())) >= vocab_size:
                raise record.wrong(f"the tokenizer gives id {most}", f"0 to {vocab_size - 1}, the vocabulary "
                                   "of the model", "use the tokenizer of the model")
            writer.add(document)


@dataclass(frozen=True)
class Documents:
    """Rows of documents, packed or not."""
    tokens: Tokens
    plan: packing.Plan
    width: int
    summary: Summary
    rows_per_index: int = 1

    @staticmethod
    def of(tokens: Tokens, options: DataOptions, split: bool) -> Documents:
        """Raises `DataError` where no row has loss."""
        lengths, most = tokens.lengths, options.max_length
        if options.packing and options.packing_strategy == "wrapped":
            order = np.arange(len(lengths))
            if options.shuffle: order = permute(order, len(order), options.seed, 0)
            plan, dropped = packing.wrap(lengths, order, most), 0
        else:
            found = packing.pieces(lengths, most, split)
            kept = _with_loss(tokens, found)
            dropped = len(np.unique(found[0])) - len(np.unique(found[0][kept]))
            given = found[0][kept], found[1][kept], found[2][kept]
            plan = packing.best_fit(given, most) if options.packing else packing.alone(given)
        loss = _loss_tokens(tokens, plan)
        if not loss: raise DataError("no document has a token with loss in its first "
                                     f"{most} tokens", "answers or completions within --max-length",
                                     "raise --max-length")
        summary = Summary(len(lengths), int(lengths.sum()), len(plan), int(plan.counts.sum()), loss,
                          int(lengths.sum() - plan.counts.sum()), dropped, tokens.disagree)
        return Documents(tokens, plan, _width(plan.tokens, most), summary)

    def __len__(self) -> int: return len(self.plan)

    def rows(self, index: int) -> tuple[Row, ...]:
        """The row."""
        plan, which = self.plan, self.plan.pieces(index)
        found = [self.tokens.piece(int(plan.documents[piece]), int(plan.begins[piece]),
                                   int(plan.counts[piece])) for piece in which]
        losses = [loss for _, loss in found if loss is not None]    # of all pieces, or of none
        return (row(np.concatenate([ids for ids, _ in found]), np.concatenate(losses) if losses else None,
                    tuple(plan.counts[which.start:which.stop].tolist())),)


def _width(tokens: np.ndarray, most: int) -> int:
    return min(most, -(-int(tokens.max()) // MULTIPLE) * MULTIPLE)


def _losses(tokens: Tokens, found: packing.Pieces) -> np.ndarray:
    """Tokens with loss of each piece, int64: its first has none."""
    documents, begins, counts = found
    if tokens.loss is None: return counts - 1
    first = tokens.offsets[documents] + begins + 1
    return np.array([np.count_nonzero(tokens.loss[begin:begin + count - 1])
                     for begin, count in zip(first.tolist(), counts.tolist(), strict=True)], np.int64)


def _with_loss(tokens: Tokens, found: packing.Pieces) -> np.ndarray: return _losses(tokens, found) > 0


def _loss_tokens(tokens: Tokens, plan: packing.Plan) -> int:
    return int(_losses(tokens, (plan.documents, plan.begins, plan.counts)).sum())


# **** preferences ****

@dataclass(frozen=True)
class Preferences:
    """Pairs: document 2i is chosen, 2i + 1 rejected, each truncated."""
    tokens: Tokens
    pairs: np.ndarray       # those whose answers both have a token left, int64
    max_length: int
    width: int
    summary: Summary
    rows_per_index: int = 2

    @staticmethod
    def of(tokens: Tokens, max_length: int) -> Preferences:
        """Raises `DataError` where no pair has loss."""
        found = packing.pieces(tokens.lengths, max_length, False)
        losses = np.zeros(len(tokens.lengths), np.int64)
        losses[found[0]] = _losses(tokens, found)
        pairs = np.flatnonzero((losses.reshape(-1, 2) > 0).all(1))
        if not len(pairs):
            raise DataError(f"no pair has answers in its first {max_length} tokens",
                            "prompts shorter than --max-length", "raise --max-length")
        kept = np.stack((2 * pairs, 2 * pairs + 1), 1).ravel()
        counts = np.minimum(tokens.lengths[kept], max_length)
        total, used = int(tokens.lengths.sum()), int(counts.sum())
        summary = Summary(len(losses), total, 2 * len(pairs), used, int(losses[kept].sum()), total - used,
                          len(losses) - 2 * len(pairs), tokens.disagree)
        return Preferences(tokens, pairs, max_length, _width(counts, max_length), summary)

    def __len__(self) -> int: return len(self.pairs)

    def rows(self, index: int) -> tuple[Row, ...]:
        """Chosen, rejected."""
        pair = int(self.pairs[index])
        return self._row(2 * pair), self._row(2 * pair + 1)

    def _row(self, document: int) -> Row:
        begin, end = self.tokens.offsets[document:document + 2].tolist()
        count = min(end - begin, self.max_length)
        return row(*self.tokens.piece(document, 0, count), (count,))


# **** token ids ****

@dataclass(frozen=True)
class Windows:
    """Rows of shards."""
    shards: Shards
    summary: Summary
    rows_per_index: int = 1

    @property
    def width(self) -> int:
        """Tokens of a window."""
        return self.shards.max_length

    def __len__(self) -> int: return len(self.shards)

    def rows(self, index: int) -> tuple[Row, ...]:
        """The window. Raises `DataError` for ids that are not in the vocabulary."""
        return (self.shards.row(index),)


def _shards(files: Sequence[Path], tokenizer: Tokenizer | None, vocab_size: int,
            options: DataOptions) -> Windows:
    end = None
    if options.packing:
        if tokenizer is None:
            raise DataError("--packing of token ids, and there is no tokenizer", "the id of the EOS token, "
                            "which ends documents", "name a model with a tokenizer, or leave --packing out")
        end = tokenizer.backend.token_to_id(Encoder(tokenizer, options.encode).eos)
    shards = Shards.open(files, options.max_length, vocab_size, options.shard_dtype, end)
    total, used = sum(map(len, shards.tokens)), len(shards) * options.max_length
    return Windows(shards, Summary(len(files), total, len(shards), used, used - len(shards), total - used, 0))
