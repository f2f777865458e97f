"""Plans of the tokens of documents that make a row.

Protocol: `pieces` truncates or cuts documents of too many tokens; a `Plan` says which pieces each row has,
one after the other. Strategies, by TRL's names:

  bfd        `best_fit`, the longest first: a piece goes to the row in which it leaves the least room
  bfd_split  `best_fit` of documents that are cut, not truncated
  wrapped    `wrap`: all documents one after the other, cut into rows

Without packing, each piece is a row (`alone`). Attention stays within a piece: what `wrap` cuts begins
again with position 0. All documents are packed together; TRL packs a thousand at a time.
"""
from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Literal

import numpy as np

Strategy = Literal["bfd", "bfd_split", "wrapped"]


@dataclass(frozen=True)
class Plan:
    """Pieces: the document, the first token and the number of tokens of each, int64 [pieces]. `rows`: the
    first piece of each row and the end, int64 [rows + 1]."""
    documents: np.ndarray
    begins: np.ndarray
    counts: np.ndarray
    rows: np.ndarray

    def __len__(self) -> int: return len(self.rows) - 1

    @property
    def tokens(self) -> np.ndarray:
        """Tokens of each row, int64 [rows]."""
        before = np.concatenate(([0], np.cumsum(self.counts)))
        return np.diff(before[self.rows])

    def pieces(self, row: int) -> range:
        """The pieces of a row."""
        return range(int(self.rows[row]), int(self.rows[row + 1]))


Pieces = tuple[np.ndarray, np.ndarray, np.ndarray]     # documents, begins, counts


def pieces(lengths: np.ndarray, max_length: int, split: bool) -> Pieces:
    """Documents truncated to `max_length` tokens, or cut. Those without tokens have no piece."""
    documents = np.flatnonzero(lengths).astype(np.int64)
    lengths = lengths[documents]
    if not split: return documents, np.zeros_like(documents), np.minimum(lengths, max_length)
    fragments = -(-lengths // max_length)
    first = np.repeat(np.cumsum(fragments) - fragments, fragments)
    begins = (np.arange(fragments.sum()) - first) * max_length
    return (np.repeat(documents, fragments), begins,
            np.minimum(np.repeat(lengths, fragments) - begins, max_length))


def alone(given: Pieces) -> Plan:
    """A row for each piece."""
    return Plan(*given, np.arange(len(given[0]) + 1))


def best_fit(given: Pieces, max_length: int) -> Plan:
    """Rows of `max_length` tokens: best fit, the longest first. Of rows with as much room the oldest is
    taken, and of pieces of one length the first, so that the result is TRL's for the same documents."""
    documents, begins, counts = given
    rooms = defaultdict[int, deque[int]](deque)     # rows by the room that is left
    open_rooms, rows = 0, list[list[int]]()         # bit r: there is a row with room r
    for piece in np.argsort(-counts, kind="stable").tolist():
        count = int(counts[piece])
        enough = open_rooms >> count
        if enough:
            room = count + (enough & -enough).bit_length() - 1      # the lowest bit
            number = rooms[room].popleft()
            if not rooms[room]: open_rooms &= ~(1 << room)
        else:
            room, number = max_length, len(rows)
            rows.append([])
        rows[number].append(piece)
        if room > count:
            rooms[room - count].append(number)
            open_rooms |= 1 << (room - count)
    order = np.array([piece for row in rows for piece in row], np.int64)
    ends = np.cumsum([0, *map(len, rows)])
    return Plan(documents[order], begins[order], counts[order], ends)


def wrap(lengths: np.ndarray, order: np.ndarray, max_length: int) -> Plan:
    """The documents in this order, one after the other, cut every `max_length` tokens; the last row may have
    fewer."""
    order = order[lengths[order] > 0]
    ends = np.cumsum(lengths[order])
    total = int(ends[-1]) if len(ends) else 0
    starts = ends - lengths[order]
    cuts = np.union1d(np.arange(0, total, max_length), starts).astype(np.int64)    # a piece begins at each
    which = np.searchsorted(ends, cuts, "right")
    counts = np.diff(np.concatenate((cuts, [total])))
    rows = np.searchsorted(cuts, np.arange(0, total, max_length))
    return Plan(order[which], cuts - starts[which], counts, np.concatenate((rows, [len(cuts)])))
