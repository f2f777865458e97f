"""The frames that a rank and the store of rank 0 send each other over TCP.

Protocol: a frame is a header of 11 bytes, little-endian (kind, 1 byte; number of the request, 4; bytes of the
key, 2; bytes of the value, 4), the key in UTF-8 and the value. Nothing in it is executed or unpickled; facts
are JSON. Keys have at most 1024 bytes, values 64 MiB; before a process has shown that it is of the group,
values have at most 4096 bytes.

The store sends GREETING (a nonce) first. The rank answers HELLO: its facts, a nonce of its own, and the
HMAC-SHA256 of all that by the token of the group. The store sends WELCOME with an HMAC of the rank's nonce,
which shows that it is the group's store, or REFUSED (an error) and closes. Then the rank sends requests, and
gets one VALUE or FAILED (an error) for each, with its number, in any order; LOST and LEFT come unasked. BYE,
or a closed connection, ends it.
"""
from __future__ import annotations

import hashlib
import hmac
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from tinygrad_nv.errors import DistError, DistTimeout

MAGIC = b"tinygrad_nv store 1\n"
KEY_BYTES, VALUE_BYTES, HELLO_BYTES = 1024, 64 << 20, 4096
NONCE_BYTES = MAC_BYTES = 32
HEADER = struct.Struct("<BIHI")
SECONDS, NUMBER, SIZE = struct.Struct("<d"), struct.Struct("<q"), struct.Struct("<I")


class Kind(IntEnum):
    """Kinds of frames: of the handshake, of requests, of answers, unasked."""
    GREETING = 1
    HELLO = 2
    WELCOME = 3
    REFUSED = 4
    SET = 10
    GET = 11        # the value: seconds to wait
    ADD = 12        # the value: NUMBER
    GATHER = 13     # the value: seconds to wait, then what this rank adds
    ABORT = 14      # the value: why this rank is about to end
    BYE = 15
    VALUE = 20
    FAILED = 21
    LOST = 30       # the key: a rank; the value: why
    LEFT = 31


class BadFrame(Exception):
    """Bytes that are no frame of this protocol."""


@dataclass(frozen=True)
class Frame:
    kind: Kind
    request: int
    key: str
    value: bytes

    def pack(self) -> bytes:
        key = self.key.encode()
        return HEADER.pack(self.kind, self.request, len(key), len(self.value)) + key + self.value


def take(received: bytearray, value_bytes: int = VALUE_BYTES) -> Frame | None:
    """The first frame of what was received, taken off it; None while it is incomplete."""
    if len(received) < HEADER.size: return None
    kind, request, key_bytes, value_size = HEADER.unpack_from(received)
    if kind not in Kind._value2member_map_ or key_bytes > KEY_BYTES or value_size > value_bytes:
        raise BadFrame(f"kind {kind} with a key of {key_bytes} and a value of {value_size} bytes")
    end = HEADER.size + key_bytes + value_size
    if len(received) < end: return None
    try: key = received[HEADER.size:HEADER.size + key_bytes].decode()
    except UnicodeDecodeError: raise BadFrame("a key that is not UTF-8") from None
    frame = Frame(Kind(kind), request, key, bytes(received[HEADER.size + key_bytes:end]))
    del received[:end]
    return frame


def mac(token: str, *texts: bytes) -> bytes:
    """The HMAC of texts, each with its length."""
    text = b"".join(SIZE.pack(len(each)) + each for each in texts)
    return hmac.digest(token.encode(), text, hashlib.sha256)


def pack_list(values: list[bytes]) -> bytes:
    """Values with their lengths."""
    return b"".join(SIZE.pack(len(value)) + value for value in values)


def unpack_list(data: bytes) -> list[bytes]:
    values, at = [], 0
    while at < len(data):
        size, = SIZE.unpack_from(data, at)
        values.append(data[at + SIZE.size:at + SIZE.size + size])
        at += SIZE.size + size
    return values


def pack_error(error: DistError) -> bytes:
    return json.dumps([isinstance(error, DistTimeout), error.found, error.expected, error.fix, error.ranks]
                      ).encode()


def unpack_error(data: bytes) -> DistError:
    late, found, expected, fix, ranks = json.loads(data)
    return (DistTimeout if late else DistError)(found, expected, fix, tuple(ranks))


def first_loss(lost: Mapping[int, str]) -> DistError:
    """Returns the error of the rank that was lost first, of ranks and why in their order: the others ended
    because of it."""
    rank, why = next(iter(lost.items()))
    return DistError(f"rank {rank} was lost: {why}", ranks=(rank,))


def name_ranks(ranks: list[int] | tuple[int, ...]) -> str:
    """Such as "rank 1", "ranks 1, 3 and 4"; of many the first eight."""
    if len(ranks) == 1: return f"rank {ranks[0]}"
    if len(ranks) > 9: return f"ranks {', '.join(map(str, ranks[:8]))} and {len(ranks) - 8} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
