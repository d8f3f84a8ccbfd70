"""A model that an environment asks: behind an endpoint, one of the caller's own, and from a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import gymnasium
import pytest
from aiohttp import web
from gymnasium.spaces import Text

from envs import make_core
from envs.asking.endpoint import ModelFault
from envs.asking.model import SHARED
from envs.core import AsyncEnv, EnvironmentFault, Message, Model, Step
from envs.facade import TextEnv

HERE = __name__


class Shop(AsyncEnv):
    """The customer is a model: it opens, answers each reply, and ends with BYE."""

    model: Model | None = None

    @property
    def task_ids(self) -> Sequence[str]:
        return ["tea", "bread"]

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        self._said: list[Message] = [{"role": "system", "content": f"You want {(options or {})['task_id']}."}]
        text = await self._customer("hello")
        return text, {"messages": [{"role": "user", "content": text}], "tools": [], "segment": "prompt"}

    async def astep(self, action: str) -> Step:
        text = await self._customer(action)
        ended = "BYE" in text
        return text, float(ended), ended, False, {"messages": [{"role": "user", "content": text}]}

    async def _customer(self, heard: str) -> str:
        assert self.model is not None
        self._said.append({"role": "user", "content": heard})
        text = await self.model.chat(self._said, max_tokens=50, temperature=0.5, stop=["\n"])
        self._said.append({"role": "assistant", "content": text})
        return text

    async def atruncate(self, reason: str, action: str = "") -> Step:
        return "", 0.0, False, True, {"messages": [], "truncation": reason}

    async def aclose(self) -> None: ...


class SyncShop(gymnasium.Env[str, str]):
    """The same as a plain environment that knows no coroutine."""

    action_space = observation_space = Text(1000)
    model: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return self.model.chat([{"role": "user", "content": "hello"}], max_tokens=9), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        text = self.model.chat([{"role": "user", "content": action}])
        return text, 1.0, "BYE" in text, False, {}


class OwnModel(gymnasium.Env[str, str]):
    """Its `model` is a thing of its own, of which nobody else knows anything."""

    action_space = observation_space = Text(1000)

    def __init__(self, model: str = "linear") -> None:
        self.model = model

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return self.model, {}


class Parrot:
    """A model of the caller's own: repeats what it hears, and says BYE to thanks."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[Message], dict[str, Any]]] = []
        self.hold: asyncio.Event | None = None
        self.cancelled = threading.Event()

    async def chat(self, messages: Sequence[Message], **options: Any) -> str:
        self.asked.append((list(messages), options))
        if self.hold is not None:
            try:
                await self.hold.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        heard = str(messages[-1]["content"])
        return "BYE" if "thanks" in heard else f"you said {heard}"


class Endpoint:
    """Speaks the chat protocol like a `Parrot` that thinks aloud; `failing` requests are refused first."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.failing = 0
        self.finish, self.url = "stop", ""

    async def answer(self, request: web.Request) -> web.Response:
        self.bodies.append(body := await request.json())
        self.keys.append(request.headers.get("Authorization"))
        if self.failing:
            self.failing -= 1
            return web.Response(status=503)
        heard = body["messages"][-1]["content"]
        text = "<think>Hm.</think>" + ("BYE" if "thanks" in heard else f"you said {heard}")
        if self.finish == "length":
            text = "<think>Hm, let me"
        choice = {"message": {"role": "assistant", "content": text}, "finish_reason": self.finish}
        return web.json_response({"choices": [choice], "usage": {"prompt_tokens": 9, "completion_tokens": 5}})


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    served = Endpoint()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", served.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    served.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    yield served
    await runner.cleanup()


async def test_an_environment_asks_an_endpoint_and_tells_what_it_asked(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOP_KEY", "sesame")
    spec = {"url": endpoint.url, "name": "customer", "key_env": "SHOP_KEY", "backoff_s": 0.001}
    cores = [make_core(f"{HERE}:Shop", model=spec) for _ in range(2)]
    endpoint.failing = 1
    text, _ = await cores[0].areset(seed=0, options={"task_id": "tea"})
    assert text == "you said hello", "without its thinking"
    first = endpoint.bodies[0]
    assert (first["model"], first["max_tokens"], first["temperature"], first["stop"]) == ("customer", 50, 0.5, ["\n"])
    assert first["messages"][0] == {"role": "system", "content": "You want tea."}
    assert endpoint.keys[0] == "Bearer sesame"
    _, reward, terminated, _, info = await cores[0].astep("thanks")
    assert (reward, terminated) == (1.0, True)
    metrics = info["metrics"]
    assert (metrics["asked"], metrics["asked_tokens"], metrics["asked_faults"]) == (2, 10, 0)
    await cores[1].areset(seed=0, options={"task_id": "bread"})
    assert len(SHARED.held()) == 1, "the client is shared"
    for core in cores:
        await core.aclose()
    assert SHARED.held() == []


async def test_a_model_that_gives_no_answer_makes_the_episode_void(endpoint: Endpoint) -> None:
    spec = {"url": endpoint.url, "name": "customer", "attempts": 2, "backoff_s": 0.001}
    core = make_core(f"{HERE}:Shop", model=spec)
    endpoint.failing = 2
    with pytest.raises(ModelFault, match=r"after 2 attempts.*HTTP 503") as caught:
        await core.areset(seed=0, options={"task_id": "tea"})
    assert isinstance(caught.value, EnvironmentFault)
    endpoint.finish = "length"
    with pytest.raises(ModelFault, match="thinking"):
        await core.areset(seed=0, options={"task_id": "tea"})
    await core.aclose()


async def test_a_synchronous_environment_asks_and_waits_in_its_own_thread(endpoint: Endpoint) -> None:
    core = make_core(f"{HERE}:SyncShop", model={"url": endpoint.url, "name": "customer"})
    text, info = await core.areset(seed=0)
    assert (text, info["messages"][0]["content"]) == ("you said hello", "you said hello")
    assert endpoint.bodies[0]["max_tokens"] == 9
    _, _, terminated, _, info = await core.astep("thanks")
    assert (terminated, info["metrics"]["asked"]) == (True, 2)
    await core.aclose()


async def test_a_step_that_is_given_up_does_not_leave_its_question_behind() -> None:
    parrot = Parrot()
    core = make_core(f"{HERE}:SyncShop", model=parrot)
    await core.areset(seed=0)
    parrot.hold = asyncio.Event()
    step = asyncio.create_task(core.astep("well?"))
    while len(parrot.asked) < 2:  # noqa: ASYNC110 - the environment asks from its thread
        await asyncio.sleep(0)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    assert await asyncio.to_thread(parrot.cancelled.wait, 30)
    await core.aclose()


def test_the_facade_and_gymnasium_make_take_a_model_too() -> None:
    parrot = Parrot()
    gymnasium.register("test/Shop-v0", entry_point=TextEnv, kwargs={"core": f"{HERE}:Shop"})
    try:
        env = gymnasium.make("test/Shop-v0", model=parrot)
        assert env.reset(options={"task_id": "tea"})[0] == "you said hello"
        assert env.step("thanks")[1] == 1.0
        assert parrot.asked[0][1] == {"max_tokens": 50, "temperature": 0.5, "stop": ["\n"]}
        env.close()
    finally:
        del gymnasium.registry["test/Shop-v0"]


async def test_a_model_of_the_environments_own_is_left_alone() -> None:
    core = make_core(f"{HERE}:OwnModel", model="cubic")
    assert not core.take_model(Parrot())
    assert (await core.areset(seed=0))[0] == "cubic"
    await core.aclose()


@pytest.mark.parametrize(
    ("env_id", "model", "says"),
    [
        ("Shop", {"url": "no-address", "name": "x"}, r"model\.url"),
        ("Shop", {"url": "http://x/v1"}, r"model\.name"),
        ("Shop", {"url": "http://x/v1", "name": "x", "keyenv": "K"}, r"model\.keyenv"),
        ("OwnModel", {"url": "http://x/v1", "name": "x"}, "OwnModel|GymnasiumCore.*asks none"),
    ],
)
def test_a_wrong_model_is_refused_by_its_key(env_id: str, model: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_core(f"{HERE}:{env_id}", model=model)
