"""Who may come in: the rules of a shared key. Nothing is read or sent here."""

from __future__ import annotations

import hmac
import ipaddress

KEY_VARIABLE = "SAO_KEY"
"""The environment variable that holds the shared key."""

SHORTEST_KEY = 8
"""Characters. `openssl rand -hex 32` gives 64."""

ALWAYS_OPEN = frozenset({"/health", "/healthz"})
"""Paths that are answered without a key: whether a server is up is no secret, and load balancers ask."""


class DoorFault(RuntimeError):
    """A key that is missing, malformed or wrong: a fault of configuration. The message says what to set."""


class WrongKey(DoorFault):
    """A server does not take the key that it was given (401), and will not take it the next time either."""


def checked_key(key: str, source: str) -> str:
    """`key` without the blanks around it; raises `DoorFault`, which names `source` and never the key."""
    key = key.strip()
    if len(key) < SHORTEST_KEY or not all("!" <= character <= "~" for character in key):
        raise DoorFault(
            f"{source}: a shared key has at least {SHORTEST_KEY} characters, all of them printable ASCII without "
            "blanks, for instance what `openssl rand -hex 32` prints"
        )
    return key


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to a server that listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, whose address may change; or "", which is every interface
        return False


def check_host(host: str, key: str, what: str) -> None:
    """Raise `DoorFault` if `what` would listen on `host` for everybody, because it has no key."""
    if not key and not is_loopback(host):
        raise DoorFault(
            f"{what} does not listen on {host or 'every interface'} without a key: whoever reached the port could "
            f"read and change what it holds. Set {KEY_VARIABLE} (or name a file: --key-file, key_file) to the same "
            "secret here and for everything that talks to it, for instance what `openssl rand -hex 32` prints; or "
            "listen on 127.0.0.1"
        )


def bearer(key: str) -> dict[str, str]:
    """The header that shows `key`; none without one."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def opens(key: str, authorization: str) -> bool:
    """Whether the header `authorization` shows `key`, compared in constant time. Without a key everybody may enter."""
    if not key:
        return True
    scheme, _, given = authorization.partition(" ")
    # A header may hold any bytes.
    same = hmac.compare_digest(key.encode(), given.strip().encode("utf-8", "surrogateescape"))
    return scheme.lower() == "bearer" and same


def refusal(authorization: str) -> str:
    """What a server says (401) to whom it does not let in."""
    why = "the key that was sent is another one" if authorization else "no key was sent"
    return (
        f"this server wants its shared key, and {why}: send `Authorization: Bearer KEY`; clients of ours {_WHAT_TO_SET}"
    )


def wrong_key(server: str) -> WrongKey:
    """The error of a client that was answered 401 by `server`."""
    return WrongKey(
        f"{server} refuses the shared key, or was sent none (401): {_WHAT_TO_SET}. A run that learner.train or "
        "agent.serve has started keeps its key in the run's folder, in the file `key`"
    )


_WHAT_TO_SET = f"take it from {KEY_VARIABLE} (or --key-file, key_file), which must be the one that it was started with"
