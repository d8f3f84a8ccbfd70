"""What a runtime tells of the episodes that it runs at this moment: the answer of its `GET /episodes`, as JSON."""

from __future__ import annotations

import msgspec


class LiveEpisode(msgspec.Struct):
    """An episode that grows. Times are seconds, `text` is the end of its transcript.

    `stage`: what is awaited now, for `stage_s` already: "waiting" (for an engine or an environment), "reset",
    "generate", "step", "grade" or "deliver". `turn`: the action that is being sampled or carried out, from 1; 0 before
    the first. `tokens` are of the whole transcript, `action_tokens` those that were sampled, in `generate_s` seconds.
    """

    id: str
    slot: int
    kind: str
    attempt: int
    environment: str
    task: str = ""
    engine: str = ""
    stage: str = "waiting"
    stage_s: float = 0.0
    age_s: float = 0.0
    turn: int = 0
    tokens: int = 0
    action_tokens: int = 0
    generate_s: float = 0.0
    text: str = ""


class LiveEvent(msgspec.Struct):
    """Something that happened to an episode. `number` counts a runtime's events from 1, `at` is in Unix seconds.

    `what`: "begins", "prompt", "action", "observation", "ends" or "fails". `tokens` are those of the text, of which
    `text` is the beginning; for the end it says how and with which reward, or why there is no episode.
    """

    number: int
    at: float
    episode: str
    slot: int
    what: str
    turn: int = 0
    tokens: int = 0
    text: str = ""


class LiveReport(msgspec.Struct):
    """The state of one runtime.

    `slots` are counted by what they do. `sampled_tokens` are all since its start `uptime_s` seconds ago, whatever
    became of their episodes; `delivered` and `reward` are of the episodes that the store keeps. `episodes` are the
    oldest ones, at most as many as were asked for, of `running`. `events` are those after the number that was asked
    for, and `missed` how many of them are forgotten by now.
    """

    worker: str
    uptime_s: float
    slots: dict[str, int]
    sampled_tokens: int
    delivered: int
    reward: float
    running: int
    episodes: list[LiveEpisode]
    events: list[LiveEvent]
    missed: int = 0
