"""Section `serve.doors` of a recipe: who may reach the public port, and how much of it one visitor may take."""

from __future__ import annotations

import ipaddress
import re

from pydantic import BaseModel, ConfigDict, Field, field_validator

from agent.serve.doors.rules import origin_of, split_host

_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]*[a-z0-9])?")


class DoorsConfig(BaseModel):
    """Section `serve.doors`. Times are seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    open: bool = False
    """No key is made where none is given, and nobody needs one: for tests and demonstrations, on the loopback interface
    only. What pages of other sites may do stays forbidden."""
    hosts: tuple[str, ...] = ()
    """Names (without a port) by which clients may call this server, besides 127.0.0.1, localhost, [::1], `serve.host`
    and the address that they have connected to."""
    cors_origins: tuple[str, ...] = ()
    """Origins such as `https://chat.example.org` whose pages may use this server; each of them is named."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses or networks of proxies of yours. From them alone `X-Forwarded-For`, `-Proto` and `-Host` are believed,
    and the limit of connections per address does not hold for them."""
    header_s: float = Field(default=10.0, gt=0)
    """How long a new connection may take to send its first request's header."""
    keep_alive_s: float = Field(default=150.0, gt=0)
    """How long a connection may wait for its next request, with that one's header. Longer than a proxy keeps it (Caddy:
    120), which might otherwise send a request into a connection that is just being closed."""
    connections: int | None = Field(default=None, ge=16)
    """At once, in all. None: 4096, or fewer where the system allows fewer open files."""
    connections_per_address: int = Field(default=512, ge=1)
    """At once, from one address (IPv6: from one /64 network)."""
    wrong_keys_per_minute: int = Field(default=20, ge=1)
    """After so many wrong keys from an address it is answered 429 for the rest of a minute."""
    log_lines_per_minute: int = Field(default=30, ge=1)
    """How often the same message is written to the log; the others are counted."""

    @field_validator("hosts")
    @classmethod
    def _names(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            if split_host(host) is None or not (_NAME.fullmatch(host.lower()) or _is_address(host.strip("[]"))):
                raise ValueError(f"{host!r} is no name: write it without scheme, port and path, e.g. chat.example.org")
        return hosts

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if origin_of(origin) is None:
                raise ValueError(
                    f"{origin!r} is no origin: write scheme and host, with a port that is not the scheme's own, and "
                    "name each one, e.g. https://chat.example.org"
                )
        return origins

    @field_validator("trusted_proxies")
    @classmethod
    def _networks(cls, proxies: tuple[str, ...]) -> tuple[str, ...]:
        for proxy in proxies:
            try:
                ipaddress.ip_network(proxy, strict=False)
            except ValueError as error:
                raise ValueError(f"{proxy!r} is no address or network, such as 10.0.0.0/8") from error
        return proxies


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
