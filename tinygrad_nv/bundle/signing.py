"""Signatures of bundles: Ed25519, over a hash of header and manifest, which has the hash of every part.

Protocol: keys are PEM files, as `openssl genpkey -algorithm ed25519` and `openssl pkey -pubout` write them.
`sign(message, key)` is the signature block of a file, `SIGNATURE_BYTES` long: the public key, and the
signature. `check(message, block, key)` raises `BundleError` unless that key has signed. Needs the extra
`sign` (the cryptography package).
"""
from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinygrad_nv.errors import BundleError, ConfigError
from tinygrad_nv.files import read_bytes

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

MAX_KEY_BYTES = 64 << 10       # limit: bytes of a key's file
KEY_BYTES = 32
SIGNATURE_BYTES = KEY_BYTES + 64
CONTEXT = b"tinygrad_nv bundle\0"
MAKE = "openssl genpkey -algorithm ed25519 -out key.pem; openssl pkey -in key.pem -pubout -out key.pub"


def sign(message: bytes, key: Path) -> bytes:
    """The signature block of a message by the private key in a PEM file."""
    private = _private(key)
    return _raw(private.public_key()) + private.sign(CONTEXT + message)


def check(message: bytes, block: bytes, key: Path, file: str) -> None:
    """Raises `BundleError` unless `block` is a signature of the message by the public key in a PEM file."""
    public = _public(key)
    if not block:
        raise BundleError(f"{file} is not signed", f"a signature by {key}", "compile it with --sign-key")
    if block[:KEY_BYTES] != _raw(public):
        raise BundleError(f"{file} is signed by the key {block[:KEY_BYTES].hex()}",
                          f"{_raw(public).hex()}, the key in {key}",
                          "take a bundle of a publisher that you trust")
    from cryptography.exceptions import InvalidSignature
    try: public.verify(block[KEY_BYTES:], CONTEXT + message)
    except InvalidSignature:
        raise BundleError(f"{file} has a signature of something else", "a signature of its manifest",
                          "do not use it: the file was changed after it was signed") from None


def _private(path: Path) -> Ed25519PrivateKey:
    from_pem = _crypto().load_pem_private_key
    try: found = from_pem(_bytes(path), None)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} has no private key: {error}", "an Ed25519 key in PEM, not encrypted",
                          MAKE) from error
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    if isinstance(found, Ed25519PrivateKey): return found
    raise ConfigError(f"{path} has a key of another kind", "an Ed25519 key", MAKE)


def _public(path: Path) -> Ed25519PublicKey:
    from_pem = _crypto().load_pem_public_key
    try: found = from_pem(_bytes(path))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} has no public key: {error}", "an Ed25519 key in PEM", MAKE) from error
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    if isinstance(found, Ed25519PublicKey): return found
    raise ConfigError(f"{path} has a key of another kind", "an Ed25519 key", MAKE)


def _raw(key: Ed25519PublicKey) -> bytes:
    return key.public_bytes_raw()


def _bytes(path: Path) -> bytes:
    try: return read_bytes(path, MAX_KEY_BYTES, pipes=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", "a key in a PEM file", MAKE) from error


def _crypto() -> Any:
    try:
        from cryptography.hazmat.primitives import serialization
    except ImportError as error:
        raise ConfigError("signatures need the cryptography package, which is not installed",
                          "the extra `sign`", "pip install 'tinygrad-nv[sign]'") from error
    return serialization
