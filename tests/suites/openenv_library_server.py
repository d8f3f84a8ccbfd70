"""An environment served by the library itself; run in the environment of `make suites`. Its port goes to a file."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class EchoAction(Action):
    message: str


class EchoObservation(Observation):
    echoed: str = ""


class Echo(Environment):
    """Half a point for each message; done at "stop"."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(episode_id="e", step_count=0)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> EchoObservation:
        return EchoObservation(echoed=f"seed {seed}", done=False, reward=0.0)

    def step(self, action: EchoAction, timeout_s: float | None = None, **kwargs: Any) -> EchoObservation:
        return EchoObservation(echoed=action.message, done=action.message == "stop", reward=0.5)

    @property
    def state(self) -> State:
        return self._state


with socket.socket() as listening:
    listening.bind(("127.0.0.1", 0))
    app = create_app(Echo, EchoAction, EchoObservation, env_name="echo")
    listening.listen()
    Path(sys.argv[1]).write_text(str(listening.getsockname()[1]))
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])
