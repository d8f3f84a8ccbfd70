"""What the public door decides: whose Host, Origin and content type are taken, and from which address a call comes.

Decisions only. What they guard against:

- *A page that has its own name point at 127.0.0.1* (DNS rebinding) is of our origin to the
  browser. Its Host gives it away.
- *Any other page* can have a browser send us requests, and with a text/plain body even without asking first. Its Origin
  gives it away, and where a browser sends none, `Sec-Fetch-Site`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import urlsplit

OPEN_PATHS = frozenset({"/", "/health", "/healthz", "/metrics"})
"""Answered without a key: the page, which asks for one, whether the server is up, and counts."""
_OPEN_FOLDER = "/static/"
_HOST = re.compile(r"(\[[0-9a-fA-F:.]{2,45}\]|[A-Za-z0-9._-]{1,255})(?::([0-9]{1,5}))?")
_PORTS = {"http": 80, "https": 443}
_ALWAYS = ("127.0.0.1", "localhost", "::1")

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def split_host(host: str) -> tuple[str, int | None] | None:
    """(name, port) of a Host header: in lower case, an IPv6 address without brackets. None: it is malformed."""
    found = _HOST.fullmatch(host)
    if found is None:
        return None
    name, port = found.group(1), found.group(2)
    if name.startswith("["):
        try:
            name = ipaddress.IPv6Address(name[1:-1]).compressed
        except ValueError:
            return None
    return name.lower().removesuffix("."), None if port is None else int(port)


def origin_of(origin: str) -> tuple[str, str, int] | None:
    """(scheme, name, port) of an Origin header; None for "null" and whatever else is not http or https."""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return None
    split = split_host(parts.netloc)
    if parts.scheme not in _PORTS or split is None or origin != f"{parts.scheme}://{parts.netloc}":
        return None
    return parts.scheme, split[0], split[1] or _PORTS[parts.scheme]


def host_is_ours(host: str, *, bound: str, arrived_at: str, named: Iterable[str]) -> bool:
    """Whether `host` (the header) names this server, which listens on `bound` and was called at `arrived_at`."""
    split = split_host(host)
    ours = {*_ALWAYS, arrived_at.lower(), bound.lower().strip("[]"), *(name.lower().strip("[]") for name in named)}
    return split is not None and split[0] in ours - {"", "0.0.0.0", "::"}


def is_foreign(headers: Mapping[str, str], method: str, host: str, scheme: str = "") -> bool:
    """Whether a page of another origin than `host`'s sends this. `scheme`: the one that clients use, if known."""
    if (origin := headers.get("Origin")) is not None:
        theirs, ours = origin_of(origin), split_host(host)
        if theirs is None or ours is None or (scheme and scheme != theirs[0]):
            return True
        return theirs[1:] != (ours[0], ours[1] or _PORTS[theirs[0]])
    # Pictures, scripts and forms of other sites, which send no Origin when they only read. Links may lead here.
    followed = method == "GET" and headers.get("Sec-Fetch-Mode") == "navigate"
    return headers.get("Sec-Fetch-Site", "none") in ("cross-site", "same-site") and not followed


def is_json(content_type: str) -> bool:
    """Whether a Content-Type header says JSON. No form of a page can, and no script without asking first."""
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def is_open(path: str) -> bool:
    """Whether `path` is answered without a key."""
    return path in OPEN_PATHS or path.startswith(_OPEN_FOLDER)


def networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """The networks that `texts` (addresses or networks) name."""
    return tuple(ipaddress.ip_network(text, strict=False) for text in texts)


def is_within(address: str, among: Sequence[Network]) -> bool:
    """Whether `address` lies in one of the networks `among`."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    return any(parsed in network for network in among)


def client_address(peer: str, forwarded_for: str, trusted: Sequence[Network]) -> str:
    """Who calls: `peer`, or where that is a trusted proxy, whom it names in X-Forwarded-For.

    Read from the right: an entry counts only if a trusted proxy has added it, so nobody can pass for somebody else.
    """
    address = peer
    for entry in reversed(forwarded_for.split(",")):
        if not is_within(address, trusted):
            break
        found = entry.strip()
        found = found[1:].partition("]")[0] if found.startswith("[") else found
        found = found.partition(":")[0] if found.count(":") == 1 else found
        try:
            address = ipaddress.ip_address(found).compressed
        except ValueError:
            break
    return address


def counted_as(address: str) -> str:
    """What limits count for `address`: an IPv6 client has a whole /64 network to call from."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return parsed.compressed
    if parsed.ipv4_mapped is not None:
        return parsed.ipv4_mapped.compressed
    return ipaddress.ip_network((parsed, 64), strict=False).compressed
