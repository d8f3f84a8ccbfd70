"""OpenAI's responses, written: the object, and the events in which it comes to be. Decisions only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from agent.wire.answer import Answer, Event, Said
from agent.wire.errors import ApiError


class ResponsesWire:
    """See `agent.wire.answer.Wire`. `head`: id, created_at and model; `echo`: what is repeated of the request.

    Items stand in the order thinking, what is said, calls; one that holds nothing is left out.
    """

    mark = False

    def __init__(self, head: dict[str, Any], echo: dict[str, Any]) -> None:
        self._base = {**head, "object": "response", "error": None, "incomplete_details": None, **echo}
        self._number = 0
        self._name = head["id"]
        self._kind = ""  # of the item that is open
        self._place = 0
        self._text = ""
        self._logprobs: list[dict[str, Any]] = []
        self._items: list[dict[str, Any]] = []

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """A `response`."""
        for _ in (*self.opening(), *self._all(answers[0])):
            pass  # made by the same steps as a stream
        return self._response(answers[0])

    def _all(self, answer: Answer) -> Iterator[Event]:
        yield from self.said(0, Said(answer.reasoning))
        yield from self.said(0, Said(content=answer.message["content"], logprobs=answer.logprobs or []))
        yield from self._close()
        yield from self._calls(answer)

    def opening(self) -> Iterator[Event]:
        """The response, with nothing in it."""
        begun = {**self._base, "status": "in_progress", "output": [], "usage": None}
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)

    def said(self, index: int, said: Said) -> Iterator[Event]:
        """A piece of thinking or of what is said."""
        for kind, text in (("reasoning", said.reasoning), ("message", said.content)):
            if not text:
                continue
            if self._kind != kind:
                yield from self._close()
                yield from self._open(kind)
            self._text += text
            if kind == "message":
                self._logprobs += said.logprobs
            yield self._delta(text, said.logprobs)

    def answered(self, answer: Answer) -> Iterator[Event]:
        """The rest, and the calls."""
        yield from self.said(0, answer.rest)
        yield from self._close()
        yield from self._calls(answer)

    def ending(self, answers: Sequence[Answer]) -> Iterator[Event]:
        """The whole response."""
        whole = self._response(answers[0])
        yield self._event(f"response.{whole['status']}", response=whole)

    def failed(self, error: ApiError) -> Event:
        """An `error` event."""
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def alive(self) -> Event | None:
        """A comment."""
        return None

    def _event(self, name: str, /, **data: Any) -> Event:
        event = {"type": name, "sequence_number": self._number, **data}
        self._number += 1
        return name, event

    def _id(self, kind: str) -> str:
        return f"{kind}_{self._name}_{self._place}"

    def _open(self, kind: str) -> Iterator[Event]:
        self._kind, self._text, self._logprobs = kind, "", []
        yield self._event("response.output_item.added", output_index=self._place, item=self._item("in_progress"))
        if kind == "message":
            yield self._event("response.content_part.added", **self._where(), part=_part("", []))

    def _close(self) -> Iterator[Event]:
        if not self._kind:
            return
        if self._kind == "message":
            yield self._event("response.output_text.done", **self._where(), text=self._text, logprobs=self._logprobs)
            yield self._event("response.content_part.done", **self._where(), part=_part(self._text, self._logprobs))
        else:
            yield self._event("response.reasoning_text.done", **self._where(), text=self._text)
        yield from self._done(self._item("completed"))
        self._kind = ""

    def _done(self, item: dict[str, Any]) -> Iterator[Event]:
        yield self._event("response.output_item.done", output_index=self._place, item=item)
        self._items.append(item)
        self._place += 1

    def _delta(self, text: str, logprobs: list[dict[str, Any]]) -> Event:
        if self._kind == "message":
            return self._event("response.output_text.delta", **self._where(), delta=text, logprobs=logprobs)
        return self._event("response.reasoning_text.delta", **self._where(), delta=text)

    def _where(self) -> dict[str, Any]:
        return {"item_id": self._id(self._kind), "output_index": self._place, "content_index": 0}

    def _item(self, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._id(self._kind), "type": self._kind, "status": status}
        whole = status == "completed"
        if self._kind == "message":
            return {**item, "role": "assistant", "content": [_part(self._text, self._logprobs)] if whole else []}
        thought = [{"type": "reasoning_text", "text": self._text}] if whole else []
        return {**item, "summary": [], "content": thought}

    def _calls(self, answer: Answer) -> Iterator[Event]:
        for call in answer.message.get("tool_calls", ()):
            function, name = call["function"], self._id("function_call")
            item = {"id": name, "type": "function_call", "call_id": call["id"], "name": function["name"]}
            begun = {**item, "arguments": "", "status": "in_progress"}
            yield self._event("response.output_item.added", output_index=self._place, item=begun)
            where = {"item_id": name, "output_index": self._place}
            arguments = function["arguments"]
            yield self._event("response.function_call_arguments.delta", **where, delta=arguments)
            yield self._event(
                "response.function_call_arguments.done", **where, name=function["name"], arguments=arguments
            )
            yield from self._done({**item, "arguments": arguments, "status": "completed"})

    def _response(self, answer: Answer) -> dict[str, Any]:
        cut = answer.finish_reason == "length"
        return {
            **self._base,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._items,
            "usage": {
                "input_tokens": answer.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": answer.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": answer.prompt_tokens + answer.completion_tokens,
            },
            **{k: v if k != "conversation" else {"id": v} for k, v in answer.extras.items()},
        }


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
