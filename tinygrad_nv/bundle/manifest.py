"""The manifest of a bundle: JSON that names its parts and says what they are.

Protocol: `Manifest.encode()` is canonical JSON (keys sorted, no spaces), so that equal bundles have equal
bytes; `decoded(data, file)` checks every field before anything else is done, and raises `BundleError`, also
for a field that this format has not: a newer one has another number. A part lies in the file, at `offset`
behind the manifest, or, of weights that are kept by reference, in `ranges` of other files of one directory.
`about` is what the kind of bundle has to say (engine/bundled/), JSON as well.
"""
from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tinygrad_nv import collection
from tinygrad_nv.errors import BundleError
from tinygrad_nv.files import require_few_values

ALIGNMENT = 256             # bytes, of a part in the file: what tinygrad's buffers have
MOST_PARTS = 1 << 20
MOST_RANGES = 1 << 16       # limit: ranges of files that a bundle's part lies in; of experts, 768
MOST_BYTES = 64 << 20       # of a manifest
MOST_SIZE = 1 << 63         # of a part, and of an offset of one
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+,= -]*(?:/[A-Za-z0-9_][A-Za-z0-9_.+,= -]*)*")
FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
KINDS = ("model", "function")
FIX = "build the bundle again, or copy it again"
WORDS = 200                 # characters of a value of a file that an error shows
MOST_NAME, NAMES = 400, "letters, digits and ._- between slashes, 400 at most"
Type = type | tuple[type, ...]
ABOUT: dict[str, Type] = {"sets": list, "options": dict, "made_by": dict, "weights": str}
PART: dict[str, Type] = {"name": str, "bytes": int, "sha256": str, "offset": int, "ranges": list}


@dataclass(frozen=True)
class FileRange:
    """Bytes [offset, offset + nbytes) of a file of the directory that weights are referred to in."""
    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Part:
    """A part: its name, its bytes, their hash (`digest`), and where they are."""
    name: str
    nbytes: int
    sha256: str
    offset: int = 0
    ranges: tuple[FileRange, ...] = ()

    @property
    def end(self) -> int:
        """Offset of the end of the part in the file, with the zeros behind it."""
        return self.offset + -(-self.nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Manifest:
    """Manifest of a bundle. `kind` is one of KINDS; parts are in the order in which they lie in the file."""
    kind: str
    about: dict[str, Any]
    parts: tuple[Part, ...]

    def encode(self) -> bytes:
        """Returns the manifest's bytes."""
        parts = [{"name": each.name, "bytes": each.nbytes, "sha256": each.sha256,
                  **({"ranges": [[p.file, p.offset, p.nbytes] for p in each.ranges]} if each.ranges
                     else {"offset": each.offset})} for each in self.parts]
        return canonical({"kind": self.kind, "about": self.about, "parts": parts})


def shorten(value: object) -> str:
    """Returns the beginning of a value of a file, in words that any terminal and log takes."""
    text = str(value)[:WORDS + 1].encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= WORDS else f"{text[:WORDS]}…"


def canonical(data: Any) -> bytes:
    """JSON in one spelling."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True,
                      allow_nan=False).encode()


def parse_json(data: bytes, what: str) -> Any:
    """Parses JSON of a bundle. Raises `BundleError`."""
    try:
        require_few_values(data)
        with collection.pause(): return json.loads(data.decode(), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{what} is no JSON: {shorten(error)}", "what tinygrad-nv compile wrote",
                          FIX) from error


def decode(data: bytes, file: str) -> Manifest:
    """Returns a manifest, checked. Raises `BundleError`."""
    what = f"{file}: the manifest"
    found = fields(parse_json(data, what), {"kind": str, "about": dict, "parts": list}, what)
    kind, parts = found["kind"], found["parts"]
    about = fields(found["about"], ABOUT, f"{what}: about", ABOUT)
    if "made_by" in about: entries(about, "made_by", str, f"{what}: about")
    for name in about.get("sets", ()):
        if type(name) is not str or not _is_name(name):
            raise BundleError(f"{what} has a set {shorten(repr(name))}", NAMES, FIX)
    if kind not in KINDS: raise BundleError(f"{what} is of a {shorten(kind)!r}", f"one of {', '.join(KINDS)}")
    if len(parts) > MOST_PARTS: raise BundleError(f"{what} has {len(parts)} parts", f"{MOST_PARTS} at most")
    made = tuple(_part(each, what) for each in parts)
    if len({each.name for each in made}) < len(made): raise BundleError(f"{what} names a part twice")
    end = 0
    for each in made:
        if each.ranges: continue
        if each.offset != end:
            raise BundleError(f"{what} has {each.name} at {shorten(each.offset)}",
                              f"{end}, behind the part before")
        end = each.end
    return Manifest(kind, about, made)


def _no_number(name: str) -> None: raise ValueError(f"{name} is no number of JSON")


def fields(found: Any, known: Mapping[str, Type], what: str,
           optional: Collection[str] = ()) -> dict[str, Any]:
    """An object of JSON that has these fields, of these types, and no others. Raises `BundleError`."""
    if not isinstance(found, dict): raise BundleError(f"{what} is {shorten(found)}", "an object of JSON", FIX)
    for name, of in known.items():
        if name in found: field(found, name, of, what)
        elif name not in optional: raise BundleError(f"{what} has no {name}", ", ".join(known), FIX)
    if strange := [name for name in found if name not in known]:
        raise BundleError(f"{what} has a field {shorten(repr(strange[0]))}, which this format has not",
                          ", ".join(known), "use a newer tinygrad_nv, or compile it with this one")
    return found


def field(found: Any, name: str, of: Type, what: str) -> Any:
    """A field of JSON, of this type. Raises `BundleError`."""
    value = found.get(name) if isinstance(found, dict) else None
    kinds = of if isinstance(of, tuple) else (of,)
    if type(value) in kinds: return value
    raise BundleError(f"{what} has {shorten(name)} = {shorten(value)}",
                      f"{shorten(name)}: {' or '.join(each.__name__ for each in kinds)}", FIX)


def entries(found: Any, name: str, of: Type, what: str) -> dict[str, Any]:
    """A field of JSON that is a table whose values have this type. Raises `BundleError`."""
    made: dict[str, Any] = field(found, name, dict, what)
    for key in made: field(made, key, of, f"{what}: {name}")
    return made


def _is_name(text: str) -> bool: return len(text) <= MOST_NAME and NAME.fullmatch(text) is not None


def _part(found: Any, what: str) -> Part:
    found = fields(found, PART, what, ("offset", "ranges"))
    name, nbytes, sha256 = found["name"], found["bytes"], found["sha256"]
    if not _is_name(name): raise BundleError(f"{what} names a part {shorten(repr(name))}", NAMES, FIX)
    if not 0 <= nbytes < MOST_SIZE or not re.fullmatch("[0-9a-f]{64}", sha256):
        raise BundleError(f"{what} has {shorten(nbytes)} bytes of {name}, hash {shorten(repr(sha256))}",
                          "a number from 0 to 2⁶³, and 64 hexadecimal digits", FIX)
    if "ranges" not in found: return Part(name, nbytes, sha256, field(found, "offset", int, what))
    ranges = tuple(_range(each, what) for each in found["ranges"][:MOST_RANGES + 1])
    if "offset" in found or not 0 < len(ranges) <= MOST_RANGES \
            or sum(each.nbytes for each in ranges) != nbytes:
        raise BundleError(f"{what} has {len(found['ranges'])} ranges of {name}, of "
                          f"{sum(each.nbytes for each in ranges)} bytes",
                          f"1 to {MOST_RANGES} of {nbytes} bytes, as the part has, and no offset", FIX)
    return Part(name, nbytes, sha256, 0, ranges)


def _range(found: Any, what: str) -> FileRange:
    if not isinstance(found, list) or [type(each) for each in found] != [str, int, int] \
            or not FILE.fullmatch(found[0]) or not all(0 <= each < MOST_SIZE for each in found[1:]):
        raise BundleError(f"{what} has a range {shorten(found)}",
                          "the name of a file without a folder, an offset, a number of bytes", FIX)
    return FileRange(*found)
