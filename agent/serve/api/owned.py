"""What belongs to a caller: reading a conversation, deleting one, a session or everything of a user.

What is another key's does not exist (404). Within a key `?user=` narrows to one user; a call that names none speaks for
whoever holds the key, and reaches all of it.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from agent.serve.api.limits import Keys
from agent.serve.conversations.conversation import Conversation
from agent.serve.conversations.delivery import Delivery
from agent.serve.conversations.journal import Journal
from agent.store.database_thread import DatabaseThread
from agent.wire.errors import ApiError, json_response


class OwnedApi:
    """Handlers of `/v1/conversations`, `/v1/sessions` and `/v1/users`."""

    def __init__(self, keys: Keys, thread: DatabaseThread, journal: Journal, delivery: Delivery) -> None:
        self._keys, self._thread, self._journal, self._delivery = keys, thread, journal, delivery

    def routes(self) -> list[web.RouteDef]:
        """Names of users and sessions may hold any character, slashes too."""
        return [
            web.get("/v1/conversations/{id}", self._read),
            web.delete("/v1/conversations/{id}", self._delete_conversation),
            web.delete("/v1/sessions/{name:.+}", self._delete_session),
            web.delete("/v1/users/{name:.+}", self._delete_user),
        ]

    async def _read(self, request: web.Request) -> web.Response:
        key, name, user = self._keys.caller(request), request.match_info["id"], _user(request)
        conversation = await self._thread.run(lambda: self._journal.owned(name, key, user))
        if conversation is None or conversation.status in ("wiping", "wiped"):
            raise ApiError(404, f"no conversation {name}", code="conversation_not_found")
        return json_response(_shown(conversation))

    async def _delete_conversation(self, request: web.Request) -> web.Response:
        key, name, user = self._keys.caller(request), request.match_info["id"], _user(request)
        ids = await self._thread.run(lambda: self._journal.delete(name, key, user))
        return self._deleted("conversation", name, ids)

    async def _delete_session(self, request: web.Request) -> web.Response:
        key, name, user = self._keys.caller(request), request.match_info["name"], _user(request)
        return self._deleted(
            "session", name, await self._thread.run(lambda: self._journal.delete_session(name, key, user))
        )

    async def _delete_user(self, request: web.Request) -> web.Response:
        key, name = self._keys.caller(request), request.match_info["name"]
        return self._deleted("user", name, await self._thread.run(lambda: self._journal.delete_user(name, key)))

    def _deleted(self, kind: str, name: str, ids: list[str]) -> web.Response:
        self._delivery.erase()
        return json_response({"id": name, "object": f"{kind}.deleted", "deleted": True, "conversations": len(ids)})


def _user(request: web.Request) -> str | None:
    return request.query.get("user")


def _shown(conversation: Conversation) -> dict[str, Any]:
    return {
        "id": conversation.id,
        "session": conversation.session or None,
        "user": conversation.user or None,
        "status": conversation.status,
        "trainable": conversation.trainable,
        "messages": conversation.messages,
        "responses": [
            {
                "id": turn.response_id,
                "policy_version": turn.version,
                "reward": turn.reward,
                "explicit": turn.explicit,
                "comment": turn.comment or None,
                "correction": turn.correction or None,
                "final": turn.final,
                "created_at": turn.created_at,
            }
            for turn in conversation.turns
        ],
    }
