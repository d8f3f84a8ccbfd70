"""Whose Host, Origin and address are believed; how wrong keys, connections and log lines are counted. No server."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given
from hypothesis import strategies as st

from agent.serve.api.limits import Keys
from agent.serve.config import ServeConfig, ServeError, load_recipe
from agent.serve.doors import rules
from agent.serve.doors.audit import Audit
from agent.serve.doors.door import PublicDoor
from agent.serve.doors.quiet_log import Throttle
from agent.serve.doors.settings import DoorsConfig
from agent.serve.doors.visitors import Visitors
from agent.serve.doors.wrong_keys import WrongKeys
from agent.wire.errors import ApiError, errors_as_json

BOUND = "127.0.0.1"


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "LOCALHOST:9", "[::1]:8000", "chat.example.org."])
def test_our_own_names_are_ours(host: str) -> None:
    assert rules.host_is_ours(host, bound=BOUND, arrived_at=BOUND, named=["Chat.example.org"])


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "127.0.0.1.evil.example",
        "localhost.evil.example:80",
        "0.0.0.0:80",
        "",
        "[::1",
        "a b",
        "x@localhost",
    ],
)
def test_a_name_that_points_at_us_is_not_ours(host: str) -> None:
    assert not rules.host_is_ours(host, bound="0.0.0.0", arrived_at=BOUND, named=[])


def test_the_address_that_a_client_has_connected_to_is_ours() -> None:
    assert rules.host_is_ours("10.1.2.3:8000", bound="0.0.0.0", arrived_at="10.1.2.3", named=[])
    assert not rules.host_is_ours("10.1.2.4:8000", bound="0.0.0.0", arrived_at="10.1.2.3", named=[])


@pytest.mark.parametrize(
    ("origin", "host", "foreign"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1:8000", False),
        ("https://chat.example.org", "chat.example.org", False),
        ("https://chat.example.org:443", "chat.example.org", False),
        ("http://localhost:3000", "localhost:8000", True),
        ("http://evil.example", "127.0.0.1:8000", True),
        ("null", "127.0.0.1:8000", True),
        ("http://127.0.0.1:8000@evil.example", "127.0.0.1:8000", True),
        ("http://127.0.0.1:8000/", "127.0.0.1:8000", True),
        ("file://", "127.0.0.1:8000", True),
    ],
)
def test_a_page_of_another_origin_is_foreign(origin: str, host: str, foreign: bool) -> None:
    for method in ("GET", "POST"):
        assert rules.is_foreign({"Origin": origin}, method, host) is foreign


def test_a_plain_page_is_foreign_where_clients_use_tls() -> None:
    assert rules.is_foreign({"Origin": "http://chat.example.org"}, "POST", "chat.example.org", "https")


def test_a_picture_of_another_page_is_foreign_and_a_link_is_not() -> None:
    image = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert rules.is_foreign(image, "GET", BOUND)
    assert not rules.is_foreign(link, "GET", BOUND)
    assert rules.is_foreign(link, "POST", BOUND)
    assert not rules.is_foreign({}, "POST", BOUND), "a client that is no browser"


@given(st.text(max_size=60), st.text(max_size=30))
def test_no_header_breaks_the_rules(origin: str, host: str) -> None:
    rules.is_foreign({"Origin": origin}, "POST", host)
    rules.host_is_ours(host, bound=BOUND, arrived_at=BOUND, named=[])
    rules.is_json(origin)
    assert rules.client_address("10.0.0.9", origin, ()) == "10.0.0.9"
    rules.client_address("10.0.0.9", origin, rules.networks(["10.0.0.0/8"]))
    rules.counted_as(origin)


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("203.0.113.5", "198.51.100.1", "203.0.113.5"),
        ("10.0.0.9", "198.51.100.1", "198.51.100.1"),
        ("10.0.0.9", "1.1.1.1, 198.51.100.1", "198.51.100.1"),
        ("10.0.0.9", "198.51.100.1, 10.0.0.8", "198.51.100.1"),
        ("10.0.0.9", "198.51.100.1:5050", "198.51.100.1"),
        ("10.0.0.9", "[2001:db8::1]:5050", "2001:db8::1"),
        ("10.0.0.9", "unknown", "10.0.0.9"),
        ("10.0.0.9", "", "10.0.0.9"),
    ],
)
def test_only_what_a_trusted_proxy_has_added_is_believed(peer: str, forwarded: str, client: str) -> None:
    assert rules.client_address(peer, forwarded, rules.networks(["10.0.0.0/8"])) == client


def test_a_whole_network_of_ipv6_is_one_client() -> None:
    assert rules.counted_as("2001:db8::1") == rules.counted_as("2001:db8::ffff") != rules.counted_as("2001:db8:1::1")
    assert rules.counted_as("::ffff:10.0.0.1") == "10.0.0.1"


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", "application/problem+json"])
def test_json_is_json(kind: str) -> None:
    assert rules.is_json(kind)


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_what_a_form_may_send_is_no_json(kind: str) -> None:
    assert not rules.is_json(kind)


@pytest.mark.parametrize(
    ("doors", "key"),
    [
        ({"hosts": ["http://chat.example.org"]}, "serve.doors.hosts"),
        ({"cors_origins": ["*"]}, "serve.doors.cors_origins"),
        ({"cors_origins": ["https://chat.example.org/"]}, "serve.doors.cors_origins"),
        ({"trusted_proxies": ["nginx"]}, "serve.doors.trusted_proxies"),
        ({"opened": True}, "serve.doors.opened"),
    ],
)
def test_a_key_that_cannot_be_meant_so_is_refused_by_its_name(tmp_path: Any, doors: Any, key: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"name: x\nserve: {{doors: {doors}}}\n".replace("True", "true"))
    with pytest.raises(ServeError, match=key):
        load_recipe(recipe)


def test_a_server_without_keys_is_for_this_machine_alone() -> None:
    with pytest.raises(ValueError, match=r"doors\.open"):
        ServeConfig(host="0.0.0.0", doors=DoorsConfig(open=True))


def test_many_wrong_keys_close_the_door_to_their_address_and_not_to_whoever_was_inside() -> None:
    now = 0.0
    wrong = WrongKeys(3, clock=lambda: now)
    wrong.was_right("a", "Bearer right")
    for _ in range(3):
        wrong.check("a", "Bearer guess")
        wrong.was_wrong("a")
    with pytest.raises(ApiError) as refused:
        wrong.check("a", "Bearer next")
    assert (refused.value.status, refused.value.retry_s) == (429, 60.0)
    wrong.check("a", "Bearer right")
    wrong.check("b", "Bearer guess")
    now = 61.0
    wrong.check("a", "Bearer next")


class _Visitor:
    def __init__(self) -> None:
        self.dropped = False

    def drop(self) -> None:
        self.dropped = True


def _come(visitors: Visitors[_Visitor], address: str) -> _Visitor | None:
    if not visitors.admit(address):
        return None
    visitors.came(visitor := _Visitor(), address)
    return visitor


def test_sockets_that_send_nothing_make_room_for_others_and_clients_do_not() -> None:
    visitors: Visitors[_Visitor] = Visitors(4, 3, lambda address: address == "proxy")
    silent = [_come(visitors, "a") for _ in range(3)]
    client = _come(visitors, "a")
    assert client is not None
    assert silent[0] is not None
    assert silent[0].dropped, "the oldest one of the same address"
    visitors.arrived(client)
    for _ in range(2):
        found = _come(visitors, "a")
        assert found is not None
        visitors.arrived(found)
    assert _come(visitors, "a") is None, "three that have said what they want: nobody has to go for a fourth"
    assert not client.dropped
    other = _come(visitors, "b")
    assert other is not None
    assert visitors.inside == 4
    assert _come(visitors, "c") is not None, "the last one of b had said nothing"
    assert other.dropped
    visitors.left(client)
    visitors.left(client)
    assert visitors.inside == 3
    assert _come(visitors, "a") is not None
    assert (visitors.refused, visitors.dropped) == (1, 4)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["come", "arrive", "leave"]), st.integers(0, 30))))
def test_never_more_than_may_be(steps: list[tuple[str, str, int]]) -> None:
    visitors: Visitors[_Visitor] = Visitors(6, 3)
    inside: list[tuple[str, _Visitor]] = []
    for address, what, which in steps:
        if what == "come":
            if (found := _come(visitors, address)) is not None:
                inside.append((address, found))
        elif inside:
            _, visitor = inside[which % len(inside)]
            (visitors.arrived if what == "arrive" else visitors.left)(visitor)
            if what == "leave":
                inside = [(a, v) for a, v in inside if v is not visitor]
        inside = [(a, v) for a, v in inside if not v.dropped]
        assert visitors.inside == len(inside) <= 6
        assert all(sum(a == address for a, _ in inside) <= 3 for address in "abcd")


def test_the_same_message_fills_no_log_and_is_counted() -> None:
    now, seen = 0.0, []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    handler, logger = Kept(), logging.getLogger("test.flood")
    throttle = Throttle(5, clock=lambda: now)
    handler.addFilter(throttle)
    loggers = [logger, logging.getLogger("agent.serve.doors.quiet_log")]
    for one in loggers:
        one.addHandler(handler)
    try:
        for i in range(1000):
            logger.warning("socket %d is slow", i)
        logger.warning("another thing")
        assert len(seen) == 6
        now = 61.0
        throttle.report()
        assert "995 more of 'socket %d is slow'" in seen[-1]
        logger.warning("socket %d is slow", 1)
        assert len(seen) == 8
        for i in range(5000):  # texts that differ each time
            logger.warning(f"{i} is slow")
        assert len(seen) < 8 + 6 + 500 * 5
    finally:
        for one in loggers:
            one.removeHandler(handler)


async def test_an_action_that_is_refused_is_written_down_with_who_wanted_it(tmp_path: Any) -> None:
    keys = Keys({"ann-secret-1": "ann"})
    audit = Audit(tmp_path / "audit.jsonl")
    door = PublicDoor(DoorsConfig(), BOUND, caller=keys.caller, audit=audit)

    async def act(request: web.Request) -> web.Response:
        keys.check_admin(request)
        raise AssertionError("nobody gets here")

    async def plain(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application(middlewares=[errors_as_json, door.check])
    app.add_routes([web.post("/act", act), web.get("/act", act), web.post("/plain", plain)])
    async with TestClient(TestServer(app), headers={"Authorization": "Bearer ann-secret-1"}) as client:
        assert (await client.post("/act?why=fun", json={"version": 1})).status == 403
        assert (await client.post("/act", json={}, headers={"Authorization": "Bearer other"})).status == 401
        assert (await client.get("/act")).status == 403
        assert (await client.post("/plain", json={})).status == 200
    [line] = [json.loads(text) for text in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert (line["key"], line["action"], line["status"]) == ("ann", "POST /act", 403)
    assert line["arguments"] == {"why": "fun", "version": 1}
    assert "admin" in line["outcome"]
