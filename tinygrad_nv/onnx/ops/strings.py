"""Strings: on the host, in numpy arrays of objects."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tinygrad_nv.errors import OnnxError
from tinygrad_nv.onnx.elements import Value, from_numpy
from tinygrad_nv.onnx.limits import budget
from tinygrad_nv.onnx.table import op
from tinygrad_nv.regexes import compile_pattern


@op("StringConcat", raw=True)
def concat(a: np.ndarray, b: np.ndarray) -> np.ndarray: return np.asarray(np.add(a, b), dtype=object)


@op("StringSplit", raw=True)
def split(x: np.ndarray, delimiter: str = "", maxsplit: int | None = None) -> tuple[np.ndarray, Value]:
    """The parts of each string, filled up with empty ones, and how many they are."""
    most = -1 if maxsplit is None else maxsplit
    parts = [str(each).split(delimiter or None, most) for each in x.reshape(-1)]
    width = max(map(len, parts), default=0)
    made = np.empty((len(parts), width), dtype=object)
    for i, each in enumerate(parts): made[i] = each + [""] * (width - len(each))
    lengths = np.array(list(map(len, parts)), dtype=np.int64).reshape(x.shape)
    return made.reshape(*x.shape, width), from_numpy(lengths)


@op("StringNormalizer", raw=True)
def normalise(x: np.ndarray, case_change_action: str = "NONE", is_case_sensitive: int = 0, locale: str = "",
              stopwords: Sequence[str] = ()) -> np.ndarray:
    """Strings without stop words, in another case. Nothing left is one empty string."""
    change = {"LOWER": str.lower, "UPPER": str.upper}.get(case_change_action, str)
    compare = str if is_case_sensitive else str.lower
    stops = {compare(each) for each in stopwords}
    rows = [[change(each) for each in row if compare(each) not in stops] or [""] for row in np.atleast_2d(x)]
    made = np.array(rows, dtype=object)
    return made if x.ndim == 2 else made[0]


@op("RegexFullMatch", raw=True)
def full_match(x: np.ndarray, pattern: str) -> Value:
    known = compile_pattern(pattern, "the pattern of RegexFullMatch", OnnxError)
    found = [known.fullmatch(each) for each in x.reshape(-1)]
    return from_numpy(np.array(found, dtype=bool).reshape(x.shape))


@op("TfIdfVectorizer", raw=True)
def tf_idf(x: Value, max_gram_length: int, max_skip_count: int, min_gram_length: int, mode: str,
           ngram_counts: Sequence[int], ngram_indexes: Sequence[int], pool_int64s: Sequence[int] = (),
           pool_strings: Sequence[str] = (), weights: Sequence[float] = ()) -> Value:
    """How often n-grams of a pool occur in each row, their elements next to each other or with gaps."""
    from tinygrad_nv.onnx.elements import to_numpy
    known = np.asarray(x if isinstance(x, np.ndarray) else to_numpy(x))
    grams = _grams(list(pool_int64s) or list(pool_strings), ngram_counts)
    shape = (*known.shape[:-1], max(ngram_indexes) + 1)
    budget().check_bytes(shape, 4)
    made = np.zeros(shape, dtype=np.float32)
    for place in np.ndindex(*known.shape[:-1]):
        for gram in _occurring(known[place].tolist(), min_gram_length, max_gram_length, max_skip_count):
            if gram in grams: made[(*place, ngram_indexes[grams[gram]])] += 1
    weight = np.ones(made.shape[-1], dtype=np.float32)
    if len(weights): weight[list(ngram_indexes)] = weights
    if mode != "TF": made = (made if mode == "TFIDF" else (made > 0).astype(np.float32)) * weight
    return from_numpy(made)


def _grams(pool: list[Any], counts: Sequence[int]) -> dict[tuple[Any, ...], int]:
    """The pool's n-grams by their place: those of one element begin at counts[0], of two at counts[1], …"""
    made: dict[tuple[Any, ...], int] = {}
    for n, (first, last) in enumerate(zip(counts, [*counts[1:], len(pool)], strict=True), 1):
        for i in range(first, last, n): made[tuple(pool[i:i + n])] = len(made)
    return made


def _occurring(row: list[Any], least: int, most: int, skips: int) -> Sequence[tuple[Any, ...]]:
    """The n-grams of a row; those of one element have no gaps, and count once."""
    made = []
    for n in range(least, min(most, len(row)) + 1):
        for step in range(1, min(skips if n > 1 else 0, len(row)) + 2):
            for i in range(len(row) - step * (n - 1)): made.append(tuple(row[i:i + step * (n - 1) + 1:step]))
    return made
