"""`AskingCore`: an environment with the model of an endpoint; `CountedModel`: what one episode has asked."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from envs.asking.endpoint import ChatEndpoint, ModelEndpoint, ModelFault, Reply
from envs.core import AsyncEnv, Message, Model, Step
from envs.shared import SharedByLoop
from envs.tool_calls import visible_text
from envs.wrapping import WrappedCore, with_figures

ModelSpec = Model | ModelEndpoint | Mapping[str, Any]
"""A model of one's own, or an endpoint: `{"url": ".../v1", "name": ..., "key_env": ...}` (`ModelEndpoint`)."""

SHARED: SharedByLoop[ModelEndpoint, ChatEndpoint] = SharedByLoop(close=ChatEndpoint.aclose)


def read_spec(spec: ModelSpec) -> Model | ModelEndpoint:
    """`spec` with its keys checked. Raises `ValueError`, which names the first key that is wrong."""
    if not isinstance(spec, Mapping):
        return spec
    try:
        return ModelEndpoint.model_validate(dict(spec))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(["model", *map(str, first["loc"])])
        raise ValueError(
            f"{key}: {first['msg']}; a model is {{url: https://.../v1, name: ..., key_env: ...}}"
        ) from None


class EndpointModel:
    """A `Model` behind an endpoint. `tokens` counts what it has written, as far as the endpoint says."""

    def __init__(self, endpoint: ChatEndpoint) -> None:
        self._endpoint = endpoint
        self.tokens = 0

    async def chat(
        self, messages: Sequence[Message], *, max_tokens: int = 512, temperature: float = 1.0, stop: Sequence[str] = ()
    ) -> str:
        """See `Model.chat`. An answer that was cut off in its thinking is asked for again."""
        stops: dict[str, Any] = {"stop": list(stop)} if stop else {}
        return await self._endpoint.ask(messages, self._said, temperature=temperature, max_tokens=max_tokens, **stops)

    def _said(self, reply: Reply) -> str:
        self.tokens += reply.tokens
        text = visible_text(reply.content or "").strip()
        if not text and reply.finish_reason == "length":
            raise ModelFault("the model was still thinking when its max_tokens were used up: raise them")
        return text


class CountedModel:
    """`model`, with a count of what it was asked. `tokens` stays 0 for a model that does not count its own."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.calls = self.faults = 0
        self.seconds = 0.0

    async def chat(
        self, messages: Sequence[Message], *, max_tokens: int = 512, temperature: float = 1.0, stop: Sequence[str] = ()
    ) -> str:
        """See `Model.chat`."""
        began = time.monotonic()
        self.calls += 1
        try:
            return await self._model.chat(messages, max_tokens=max_tokens, temperature=temperature, stop=stop)
        except BaseException:
            self.faults += 1
            raise
        finally:
            self.seconds += time.monotonic() - began

    def figures(self) -> dict[str, Any]:
        """What an episode reports of it, by name; nothing where nothing was asked."""
        if not self.calls:
            return {}
        tokens = int(getattr(self._model, "tokens", 0))
        return {"asked": self.calls, "asked_tokens": tokens, "asked_s": self.seconds, "asked_faults": self.faults}


class AskingCore(WrappedCore):
    """`inner`, which asks `model` and no other. Environments of an event loop share the client of an endpoint.

    Raises `ValueError` for an environment that asks no model, and for a `model` that is none.
    """

    def __init__(self, inner: AsyncEnv, model: ModelSpec) -> None:
        super().__init__(inner)
        self._spec = read_spec(model)
        self._client: ChatEndpoint | None = None
        self._counted: CountedModel | None = None
        if not inner.take_model(NoModel()):
            raise ValueError(
                f"model: {type(inner).__name__} asks none: it has no class attribute `model: Model | None = None`"
            )

    def take_model(self, model: Model) -> bool:
        """False: it has the model that it was given."""
        return False

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """As the inner environment's own, with the model set before it."""
        if not isinstance(self._spec, ModelEndpoint):
            model = self._spec
        else:
            if self._client is None:
                endpoint = self._spec
                self._client = SHARED.acquire(endpoint, lambda: ChatEndpoint(endpoint))
            model = EndpointModel(self._client)
        self._counted = CountedModel(model)
        self.inner.take_model(self._counted)
        return await self.inner.areset(seed=seed, options=options)

    async def astep(self, action: str) -> Step:
        """As the inner environment's own; its last step tells in `metrics` what was asked."""
        return self._told(await self.inner.astep(action))

    async def atruncate(self, reason: str, action: str = "") -> Step:
        """As the inner environment's own; `metrics` tell what was asked."""
        return self._told(await self.inner.atruncate(reason, action))

    async def aclose(self) -> None:
        """Close the inner environment, and give back this one's use of the endpoint's client."""
        try:
            await self.inner.aclose()
        finally:
            client, self._client = self._client, None
            if client is not None:
                await SHARED.release(client)

    def _told(self, step: Step) -> Step:
        return step if self._counted is None else with_figures(step, self._counted.figures())


class NoModel:
    """What an environment has that asks a model while there is none: before its first reset, say."""

    async def chat(
        self, messages: Sequence[Message], *, max_tokens: int = 512, temperature: float = 1.0, stop: Sequence[str] = ()
    ) -> str:
        """Raises `ModelFault`."""
        raise ModelFault("there is no model to ask here: it is given with each reset")
