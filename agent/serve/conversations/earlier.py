"""The conversation that a response belongs to, for a request that names it and sends only what is new."""

from __future__ import annotations

from agent.serve.conversations.conversation import Conversation
from agent.serve.conversations.journal import Journal
from agent.wire.errors import ApiError
from agent.wire.responses import transcript_before


def earlier(journal: Journal, key: str, user: str, response_id: str) -> tuple[Conversation, list[dict[str, object]]]:
    """The conversation of `response_id`, and its messages up to that response.

    Runs in the journal's thread. Raises `ApiError` 400 where there is none that this key and `user` may go on with.
    """
    name = journal.one("SELECT conversation FROM responses WHERE id = ?", response_id)
    found = None if name is None else journal.conversation(str(name))
    if found is None or (found.key, found.user) != (key, user) or found.status in ("wiping", "wiped"):
        message = f"no response {response_id} to go on from: it is unknown here, or deleted"
        raise ApiError(400, message, param="previous_response_id", code="previous_response_not_found")
    turn = next(i for i, turn in enumerate(found.turns) if turn.response_id == response_id)
    return found, transcript_before(found.messages, len(found.turns), turn)
