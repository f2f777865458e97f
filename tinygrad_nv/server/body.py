"""Bounds on the JSON of a body, which are checked before it is parsed.

Protocol: `require_bounded(body, limits)` counts the objects, lists and other values of a body, and how deep
they are nested, without making any of them: a parser holds Python's lock until it is done, and a million
small objects take a hundred times the memory of their text. The counts are exact for valid JSON; a parser
does not come to what follows an error.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tinygrad_nv.server.errors import APIError
from tinygrad_nv.server.limits import RequestLimits

USUAL_BYTES = RequestLimits.body_bytes
# Those of a body of 4 MiB; a larger one may have as many more. Reading as many takes about 0.2 s and 50 MB.
MAX_CONTAINERS = 1 << 15    # limit: objects and lists of a body; grows with --max-body-bytes
MAX_NAMES = 1 << 16         # limit: names in objects of a body; grows with --max-body-bytes
MAX_VALUES = 1 << 20        # limit: values of a body, such as token ids; grows with --max-body-bytes
# JSON schemas of 100 levels have about 200
MAX_DEPTH = 512             # limit: levels of nesting of a body
SLICE = 1 << 20         # bytes that are counted at a time
QUOTE, COMMA, COLON = map(ord, '",:')


@dataclass
class Counted:
    """Counts of a text of JSON: containers, names, values, and its depth."""
    containers: int = 0
    names: int = 0
    values: int = 0
    depth: int = 0


def require_bounded(body: bytes, limits: RequestLimits) -> None:
    """Raises `APIError` 400 for a body of too many values, or one that is nested too deeply."""
    _require(count(body), limits, "the body")


def require_bounded_texts(texts: Sequence[str], limits: RequestLimits, what: str) -> None:
    """`require_bounded` of JSON in strings of a body."""
    # what is in strings of these texts, too: few have so many
    if sum(text.count(each) for text in texts for each in "[{,") < MAX_CONTAINERS:
        return
    total = Counted()
    for found in (count(text.encode(errors="replace")) for text in texts):
        total.containers += found.containers
        total.names += found.names
        total.values += found.values
    _require(total, limits, what)


def _require(found: Counted, limits: RequestLimits, where: str) -> None:
    if found.depth > MAX_DEPTH:
        raise APIError(400, f"{where} is not usable JSON: nested too deeply, {found.depth} levels, expected "
                       f"at most {MAX_DEPTH}", "invalid_json")
    for have, most, what in ((found.containers, MAX_CONTAINERS, "objects and lists"),
                             (found.names, MAX_NAMES, "names"), (found.values, MAX_VALUES, "values")):
        if have <= (allowed := most * max(limits.body_bytes, USUAL_BYTES) // USUAL_BYTES): continue
        raise APIError(400, f"{where} has {have} {what}, expected at most {allowed}; to fix: send less, or "
                       "raise --max-body-bytes, by which this grows", "too_many_values")


def count(body: bytes) -> Counted:
    """The containers, all values, and the depth of a text of JSON."""
    if b"\\" in body: body = body.replace(b"\\\\", b"").replace(b'\\"', b"")     # escapes of quotes, and of \
    made, inside, level = Counted(), 0, 0
    for at in range(0, len(body), SLICE):
        data = np.frombuffer(body, np.uint8, min(SLICE, len(body) - at), at)
        quotes = np.cumsum(data == QUOTE, dtype=np.uint8) + np.uint8(inside)    # modulo 256: parity is kept
        inside = int(quotes[-1]) & 1
        outside = data[quotes & 1 == 0]
        lower = outside | 32        # [ and { differ by one bit, so do ] and }
        opened, closed = lower == ord("{"), lower == ord("}")
        levels = np.cumsum(opened.astype(np.int8) - closed.astype(np.int8), dtype=np.int32)
        made.containers += int(np.count_nonzero(opened))
        made.names += int(np.count_nonzero(outside == COLON))
        made.values += int(np.count_nonzero(outside == COMMA))
        if len(levels):
            made.depth, level = max(made.depth, level + int(levels.max())), level + int(levels[-1])
    made.values += made.containers      # the first of each; commas are before the others
    return made
