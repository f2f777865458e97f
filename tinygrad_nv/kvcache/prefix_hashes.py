"""Hashes of full pages, the keys of the prefix cache.

Protocol. A page's hash covers the hash before it and its tokens, int32 each:

    hash(−1) = blake2b(secret + salt)       hash(i) = blake2b(hash(i − 1) + tokens and extra of page i)

So equal hashes mean equal tokens from the start of the sequence, not in this page alone: keys and values of
a token depend on all tokens before it. `extra` says of a page what its tokens alone do not: the digests of
images whose rows stand for some of them. `salt` separates what must not be shared although the tokens are
equal: users, adapters. `secret` is random, one for each pool.

A hash collision would let a request read, or overwrite, another request's context. Python's own hash has 64
bits and can be inverted, so the hash is cryptographic: 128 bits, and the secret keeps clients from computing
it. It costs 1 µs a page.
"""
from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import TypeAlias

Extra: TypeAlias = Callable[[int, int], bytes]      # of the tokens first … end − 1


def root(secret: bytes, salt: bytes) -> bytes:
    """The hash before the first page's."""
    return blake2b(secret + salt, digest_size=16).digest()


class PrefixHashes:
    """A sequence's known tokens, and the hashes of their full pages of `size` tokens, computed on demand.
    `extra(first, end)`: what else the hash of a page with these tokens covers."""
    __slots__ = ("extra", "first", "keys", "size", "tokens")

    def __init__(self, first: bytes, size: int, extra: Extra | None = None) -> None:
        self.first, self.size, self.extra = first, size, extra
        self.tokens = array("i")
        self.keys: list[bytes] = []

    def put(self, start: int, tokens: Sequence[int]) -> None:
        """Sets the tokens at positions start, start + 1, … If they differ from known tokens, the known tokens
        from `start` on, and their hashes, are dropped."""
        given, known = array("i", tokens), self.tokens
        assert start <= len(known), f"tokens from position {start} on, {len(known)} are known"
        had = known[start:start + len(given)]
        if had == given: return
        if had != given[:len(had)]:
            del known[start:]
            del self.keys[start // self.size:]
            had = had[:0]
        known.extend(given[len(had):])

    def key(self, page: int) -> bytes:
        """The hash of a page whose tokens are known."""
        keys, size = self.keys, self.size
        while len(keys) <= page:
            at = len(keys) * size
            tokens = self.tokens[at:at + size].tobytes()
            if self.extra is not None: tokens += self.extra(at, at + size)
            keys.append(blake2b((keys[-1] if keys else self.first) + tokens, digest_size=16).digest())
        return keys[page]

    def copy(self) -> PrefixHashes:
        """An independent copy."""
        made = PrefixHashes(self.first, self.size, self.extra)
        made.tokens, made.keys = self.tokens[:], self.keys[:]
        return made
