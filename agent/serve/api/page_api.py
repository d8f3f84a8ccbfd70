"""What the page asks for beyond the public API: how an answer looks, simulated users, figures by style and version."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from agent.serve.api.guide import Guide
from agent.serve.api.limits import Keys
from agent.serve.api.markdown import LONGEST, tree_of
from agent.serve.children.simulated import SimulatedUsers
from agent.serve.conversations.journal import Journal
from agent.serve.versions.scores import scores
from agent.store.database_thread import DatabaseThread
from agent.wire.body import body_of
from agent.wire.errors import ApiError, json_response

_SCORED = 200
T = TypeVar("T")


class _Text(msgspec.Struct, forbid_unknown_fields=True):
    text: str


class _Wanted(msgspec.Struct, forbid_unknown_fields=True):
    running: bool


class PageApi:
    """Handlers of `/page/...`, and what the page adds to answers of others."""

    def __init__(
        self,
        keys: Keys,
        thread: DatabaseThread,
        journal: Journal,
        guide: Guide | None,
        simulated: SimulatedUsers | None,
        signals: Collection[str] = (),
    ) -> None:
        self._keys, self._thread, self._journal = keys, thread, journal
        self._guide, self._simulated, self._signals = guide, simulated, sorted(signals)

    def routes(self) -> list[web.RouteDef]:
        """`/page/markdown` and `/page/simulated_users`."""
        return [
            web.post("/page/markdown", self._markdown),
            web.post("/page/simulated_users", self._simulated_users),
        ]

    def hello(self, request: web.Request) -> dict[str, Any]:
        """What the page is told first: prompts to offer, and what this caller may do."""
        try:
            self._keys.check_admin(request)
            admin = True
        except ApiError:
            admin = False
        prompts = list(self._guide.prompts) if self._guide is not None else []
        simulated = self._simulated is not None
        return {"admin": admin, "prompts": prompts, "simulated_users": simulated, "signals": self._signals}

    def simulated(self) -> dict[str, Any] | None:
        """Whether simulated users are there; None where there are none to be had."""
        return None if self._simulated is None else msgspec.to_builtins(self._simulated.state)

    async def with_style(self, metadata: dict[str, Any], response_id: str, conversation_id: str) -> dict[str, Any]:
        """What the figures hear of a verdict, with the style that the judge sees where `metadata` names none."""
        if self._guide is None or "style" in metadata:
            return metadata
        conversation = await self._thread.run(lambda: self._journal.conversation(conversation_id))
        if conversation is None:
            return metadata
        # From the end: what the client said before the first turn may have answers in it too.
        later = [turn.response_id for turn in reversed(conversation.turns)].index(response_id)
        answers = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        if later >= len(answers):
            return metadata
        at = answers[-1 - later]
        asked = conversation.messages[at - 1]["content"] if at else ""
        style = await self._guide.style_of(str(asked or ""), str(conversation.messages[at]["content"] or ""))
        return metadata if style is None else {**metadata, "style": style}

    async def with_scores(self, listing: dict[str, Any]) -> dict[str, Any]:
        """A listing of versions with the number of verdicts and their mean; the newest ones' only."""
        versions = listing["versions"]
        first = versions[-_SCORED]["version"] if len(versions) > _SCORED else 0
        known = await self._thread.run(lambda: scores(self._journal, first))
        for version in versions:
            count, mean = known.get(version["version"], (0, None))
            version["verdicts"], version["score"] = count, mean
        return listing

    async def _markdown(self, request: web.Request) -> web.Response:
        self._keys.caller(request)
        text = (await _read(request, _Text)).text
        if len(text) > LONGEST:
            raise ApiError(413, f"a text of more than {LONGEST} characters is shown as it is", code="body_too_large")
        return json_response({"tree": await asyncio.to_thread(tree_of, text)})

    async def _simulated_users(self, request: web.Request) -> web.Response:
        self._keys.check_admin(request)
        if self._simulated is None:
            raise ApiError(404, "no simulated users: they judge for sao/StyleShift-v0 only, and env.id is another")
        if (await _read(request, _Wanted)).running:
            await self._simulated.start(request.headers.get("Authorization", "").partition(" ")[2].strip())
        else:
            await self._simulated.stop()
        return json_response(self.simulated())


async def _read(request: web.Request, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(await body_of(request), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"bad request: {error}") from error
