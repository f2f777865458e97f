"""Fields of a request that have no effect: accepted, logged, and named in a header.

Protocol: the gate opens `Ignored` for each request. What reads the request calls `ignore(error)` for a field
that has no effect here: a hint, an unknown extra, a switch that the chat template lacks, an annotation. It
notes `error.param`; with --strict-requests it raises the error instead. `note(param)` notes a field that is
accepted either way. A field that would change the answer, and cannot, is refused where it is read.

`translate_names(names)` is for endpoints that translate their requests to those of another protocol: errors
and notes raised inside name the fields that the client sent.
"""
from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from urllib.parse import quote

from tinygrad_nv.server.errors import APIError

HEADER = "x-ignored-fields"
# names in the header and in the log, each of so many characters: proxies refuse headers of more than 4 KB
MOST_NAMES, MOST_LOGGED, MOST_CHARACTERS = 32, 1000, 80


@dataclass
class Ignored:
    """The fields of one request that have no effect, without the indexes of lists. `strict`: they are errors.
    """
    strict: bool = False
    names: dict[str, str] = field(default_factory=dict)     # and the known field that is nearest to each
    spelling: Mapping[str, str] = field(default_factory=dict)

    def add(self, param: str, nearest: Callable[[], str] = str) -> None:
        """Notes a field."""
        if len(self.names) >= MOST_NAMES: return
        name = re.sub(r"\[\d+\]", "[]", translate(param, self.spelling))
        name = quote(name[:MOST_CHARACTERS], "[]._-$@", errors="replace")[:MOST_CHARACTERS]
        self.names[re.sub("%[0-9A-F]?$", "", name) or '""'] = nearest()

    @property
    def header(self) -> str:
        """The header's value, "" without such fields."""
        return ", ".join(self.names)


_CURRENT: ContextVar[Ignored | None] = ContextVar("ignored", default=None)


@contextlib.contextmanager
def collect(strict: bool) -> Iterator[Ignored]:
    """Collects the fields of one request."""
    ignored = Ignored(strict)
    token = _CURRENT.set(ignored)
    try: yield ignored
    finally: _CURRENT.reset(token)


def ignore(error: APIError) -> None:
    """Accepts the field that `error` is about. Raises `error` where requests are strict."""
    if (current := _CURRENT.get()) is None: return
    if current.strict: raise error
    if error.param is not None: current.add(error.param)


def is_strict() -> bool:
    """Whether fields without effect are errors."""
    return (current := _CURRENT.get()) is not None and current.strict


def note(param: str, nearest: Callable[[], str] = str) -> None:
    """Names a field that is accepted, strict or not. `nearest` finds the known field that it may stand for.
    """
    if (current := _CURRENT.get()) is not None: current.add(param, nearest)


@contextlib.contextmanager
def translate_names(names: Mapping[str, str]) -> Iterator[None]:
    """Translates the names of fields, by their longest beginning that is in `names`."""
    current = _CURRENT.get()
    before = {} if current is None else current.spelling
    if current is not None: current.spelling = names
    try: yield
    except APIError as error:
        if error.param is not None:
            own = translate(error.param, names)
            if error.param in error.message: error.message = error.message.replace(error.param, own, 1)
            elif own != error.param: error.message = f"{own}: {error.message}"
            error.param = own
        raise
    finally:
        if current is not None: current.spelling = before


def translate(param: str, names: Mapping[str, str]) -> str:
    """`param` as the client spells it."""
    for end in range(len(param), 0, -1):
        if (end == len(param) or param[end] in ".[") and (own := names.get(param[:end])) is not None:
            return own + param[end:]
    return param
