"""Hashes of full pages, by which equal beginnings are found.

Protocol. A page's key is a digest of the key before it and of its tokens, int32 each:

    key(−1) = blake2b(secret + salt)        key(i) = blake2b(key(i − 1) + tokens of page i)

so equal keys mean equal tokens from the beginning on, not in this page alone: keys and values of a token
depend on all before it. `salt` keeps apart what must not be shared although the tokens are the same: users,
adapters. `secret` is random, the pool's own.

Whoever can make two prompts with one key reads, or spoils, another's context. Python's own hash has 64 bits
and can be inverted, so the digest is a cryptographic one: 128 bits, whose chain nobody outside can compute,
as he does not know the secret. It costs 1 µs a page.
"""
from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b


def root(secret: bytes, salt: bytes) -> bytes:
    """The key before the first page's."""
    return blake2b(secret + salt, digest_size=16).digest()


class Prefix:
    """A sequence's tokens as far as they are known, and the keys of their full pages of `size` tokens, each
    computed when it is first asked for."""
    __slots__ = ("first", "keys", "size", "tokens")

    def __init__(self, first: bytes, size: int) -> None:
        self.first, self.size = first, size
        self.tokens = array("i")
        self.keys: list[bytes] = []

    def put(self, start: int, tokens: Sequence[int]) -> None:
        """These stand at places `start`, start + 1, …, and what was known to follow others does not hold."""
        given, known = array("i", tokens), self.tokens
        assert start <= len(known), f"tokens from place {start} on, known are {len(known)}"
        had = known[start:start + len(given)]
        if had == given: return
        if had != given[:len(had)]:
            del known[start:]
            del self.keys[start // self.size:]
            had = had[:0]
        known.extend(given[len(had):])

    def key(self, page: int) -> bytes:
        """The key of a page whose tokens are known."""
        keys, size = self.keys, self.size
        while len(keys) <= page:
            at = len(keys) * size
            tokens = self.tokens[at:at + size].tobytes()
            keys.append(blake2b((keys[-1] if keys else self.first) + tokens, digest_size=16).digest())
        return keys[page]

    def copy(self) -> Prefix:
        """The same, to go on otherwise."""
        made = Prefix(self.first, self.size)
        made.tokens, made.keys = self.tokens[:], self.keys[:]
        return made
