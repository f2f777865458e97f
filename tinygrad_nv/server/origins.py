"""Hosts that a server answers for, and pages that may change its state.

Protocol: a page of another site can point its own name at the server's address (DNS rebinding), and is then
of the server's origin to its browser. So a server without keys answers only requests whose Host is one of
`Hosts` (403). `X-Forwarded-Host` is never read. Requests that are not GET carry an Origin if a page sends
them:

* What changes the server's state (`STATE`, DELETE, cancelling) wants no Origin, the server's own, whose host
  is one of `Hosts`, or one that --allowed-origins names; "*" names none.
* What generates is also for every origin with "*", the default, but only with a body that a browser asks the
  server about first: Content-Type application/json.
"""
from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from tinygrad_nv.server.errors import APIError

STATE = ("/sleep", "/wake_up", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
SAFE = ("GET", "HEAD", "OPTIONS")
CROSS = ("cross-site", "same-site")
AUTHORITY = re.compile(r"(?:\[([0-9A-Fa-f:.]+(?:%[\w.~%-]+)?)\]|([A-Za-z0-9._-]+))(?::(\d{1,5}))?")
PORTS = {"http": "80", "https": "443"}


@dataclass(frozen=True)
class Hosts:
    """Names and addresses that requests may be for, besides those of loopback; "*" is every one, "*.a.org" is
    those below a.org. `addresses`: every numeric address, which no DNS answer can change. `always`: for
    servers with keys, too."""
    names: tuple[str, ...] = ()
    addresses: bool = False
    always: bool = False

    @classmethod
    def of(cls, host: str, allowed: tuple[str, ...]) -> Hosts:
        """The hosts of a server that listens at `host`, with those of --allowed-hosts."""
        names = [canonical(each) for each in allowed]
        if everywhere := host in ("", "0.0.0.0", "::"): names.append(canonical(socket.gethostname()))
        else: names.append(canonical(host))
        return cls(tuple(filter(None, names)), everywhere, bool(allowed))

    def allow(self, host: str) -> bool:
        """Whether requests may be for a host, in the spelling of `host_of`."""
        if address := _address(host):
            return self.addresses or address.is_loopback or host in self.names or "*" in self.names
        return host == "localhost" or any(
            each in ("*", host) or (each.startswith("*.") and host.endswith(each[1:])) for each in self.names)

    def __str__(self) -> str:
        every = ["localhost", "127.0.0.1", "[::1]", *self.names, *["any IP address"] * self.addresses]
        return ", ".join(dict.fromkeys(every))


@lru_cache(1024)
def split_authority(text: str) -> tuple[str, str] | None:
    """Host and port ("" without one) of "host:port": small letters, no dot at the end, IPv6 without brackets
    in its shortest form. None for what is none."""
    if (found := AUTHORITY.fullmatch(text)) is None: return None
    six, name, port = found.groups()
    if six is not None:
        address = _address(six.replace("%25", "%"))
        return None if address is None else (str(address), port or "")
    name = name.lower().removesuffix(".")
    return (name, port or "") if name else None


def canonical(name: str) -> str:
    """A host of an option, as `split_authority` spells it."""
    bare = name.strip().lower().removesuffix(".").removeprefix("[").removesuffix("]")
    address = _address(bare)
    return bare if address is None else str(address)


def require_host(scope: Any, hosts: Hosts, keyed: bool) -> None:
    """Raises `APIError` for a target that is no path, and for a Host that the server does not answer for."""
    if not str(scope["path"]).startswith("/"):
        raise APIError(400, f"the request's target is {scope['path'][:100]!r}; expected: a path, such as "
                       "/v1/models", "invalid_http")
    given = [value for name, value in scope["headers"] if name == b"host"]
    if not given and scope["http_version"] == "1.0": return     # no browser sends such a request
    text = given[0].decode("latin-1") if len(given) == 1 else ""
    if (found := split_authority(text)) is None:
        shown = f"is {text[:100]!r}" if len(given) == 1 else f"is given {len(given)} times"
        raise APIError(400, f"the header Host {shown}; expected: once, HOST or HOST:PORT", "invalid_host")
    if (keyed and not hosts.always) or hosts.allow(found[0]): return
    raise APIError(403, f"the header Host is {text[:100]!r}, and this server answers for {hosts}; to fix: "
                   "name the host by --allowed-hosts, or start the server with --api-key", "host_not_allowed")


def require_origin(scope: Any, path: str, origins: tuple[str, ...], hosts: Hosts, keyed: bool) -> None:
    """Raises `APIError` 403 for what a page sends that may not. Sets `scope["cross_origin"]` for pages of
    other origins that may."""
    if scope["method"] in SAFE: return
    given = [value.decode("latin-1").strip() for name, value in scope["headers"] if name == b"origin"]
    site = [value.decode("latin-1").strip().lower() for name, value in scope["headers"]
            if name == b"sec-fetch-site"]
    host = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")
    crosses = any(each in CROSS for each in site)
    changes = path in STATE or path.endswith("/cancel") or scope["method"] == "DELETE"
    if len(given) == 1 and given[0] in origins and given[0] not in ("*", "null"): return
    if not given and not crosses: return
    own = _own(given[0], host) if len(given) == 1 and not crosses else None
    if own is not None and (hosts.allow(own) or (keyed and not changes)): return
    if not changes and "*" in origins and len(given) <= 1:
        scope["cross_origin"] = True
        return
    shown = ", ".join(given)[:200] or "another origin"
    raise APIError(403, f"a page of {shown} asks; expected: a page of this server, or a client that is no "
                   "browser; to fix: name the page's origin by --allowed-origins, or this server's host by "
                   "--allowed-hosts", "cross_origin")


def _own(origin: str, host: str) -> str | None:
    """The host of an origin that has the host and port of the header Host; None of others."""
    try: parts = urlsplit(origin)
    except ValueError: return None
    if parts.scheme not in PORTS or parts.path or parts.query or parts.fragment: return None
    asked, sent, usual = split_authority(parts.netloc), split_authority(host), PORTS[parts.scheme]
    if asked is None or sent is None or asked[0] != sent[0]: return None
    return asked[0] if (asked[1] or usual) == (sent[1] or usual) else None


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try: return ipaddress.ip_address(text)
    except ValueError: return None
