"""`LLMJudge`: a language model behind an OpenAI-compatible endpoint as the judge."""

from __future__ import annotations

from dataclasses import dataclass

from envs.asking.endpoint import ChatCosts, ChatEndpoint, ModelEndpoint, Reply
from envs.style_shift.judging import rubric
from envs.style_shift.judging.cache import VerdictCache, cache_key
from envs.style_shift.judging.judge import Judge, JudgeFault, Verdict


@dataclass(frozen=True, slots=True)
class LLMJudgeSettings:
    """Where the judge is and what it may cost.

    `url`: the endpoint's base, as OpenAI clients take it (".../v1"). `api_key_env`: the environment variable that
    holds the key; unset is no key. `attempts`: requests a verdict may take, all reasons together. `concurrency`:
    requests at once. `request_timeout_s`: one request; `deadline_s`: one verdict with its retries and waits.
    `max_tokens`: of an answer, thinking included.
    `temperature`: of the first attempt; after an unreadable answer `retry_temperature`, since 0 would repeat it.
    `backoff_s`: the first wait between attempts, doubled each time, with jitter. `cache`: an SQLite file, or None.
    """

    url: str
    model: str
    api_key_env: str = "JUDGE_API_KEY"
    attempts: int = 4
    concurrency: int = 16
    request_timeout_s: float = 60.0
    deadline_s: float = 240.0
    max_tokens: int = 2048
    temperature: float = 0.0
    retry_temperature: float = 0.5
    backoff_s: float = 0.5
    cache: str | None = None

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")) or not self.model:
            raise ValueError(f"judge: url must be http(s)://.../v1 and model a name, not {self.url!r}, {self.model!r}")
        for name in ("attempts", "concurrency", "request_timeout_s", "deadline_s", "max_tokens"):
            if getattr(self, name) <= 0:
                raise ValueError(f"judge: {name} must be more than 0, not {getattr(self, name)!r}")

    @property
    def endpoint(self) -> ModelEndpoint:
        """Where and how it is asked."""
        return ModelEndpoint(
            url=self.url,
            name=self.model,
            key_env=self.api_key_env,
            attempts=self.attempts,
            concurrency=self.concurrency,
            request_timeout_s=self.request_timeout_s,
            deadline_s=self.deadline_s,
            backoff_s=self.backoff_s,
        )


@dataclass(slots=True)
class JudgeCosts(ChatCosts):
    """What a judge has used so far. `calls` are HTTP requests, `cached` verdicts that needed none."""

    verdicts: int = 0
    cached: int = 0
    faults: int = 0


class LLMJudge(Judge):
    """Asks `settings.model` for verdicts. `costs` counts what that took.

    Used from one event loop; the HTTP session starts with the first question and ends with `aclose`.
    """

    def __init__(self, settings: LLMJudgeSettings) -> None:
        self.settings = settings
        self.costs = JudgeCosts()
        self._cache = VerdictCache(settings.cache) if settings.cache else None
        self._endpoint = ChatEndpoint(settings.endpoint, who="the judge", fault=JudgeFault, costs=self.costs)

    async def judge(self, prompt: str, text: str, style: str) -> Verdict:
        """A verdict, from the cache or the model. `JudgeFault` after the last attempt or past the deadline."""
        # Half a surrogate pair cannot be sent; the judge sees a question mark there.
        prompt, text = (part.encode("utf-8", "replace").decode() for part in (prompt, text))
        key = cache_key(
            model=self.settings.model, rubric_version=rubric.RUBRIC_VERSION, style=style, prompt=prompt, text=text
        )
        if self._cache is not None and (kept := await self._cache.get(key)) is not None:
            self.costs.cached += 1
            self.costs.verdicts += 1
            return kept
        try:
            verdict = await self._endpoint.ask(
                rubric.messages(prompt, text),
                _verdict,
                temperature=self.settings.temperature,
                retry_temperature=self.settings.retry_temperature,
                max_tokens=self.settings.max_tokens,
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "verdict", "strict": True, "schema": rubric.SCHEMA},
                },
            )
        except JudgeFault:
            self.costs.faults += 1
            raise
        self.costs.verdicts += 1
        if self._cache is not None:
            await self._cache.put(key, verdict)
        return verdict

    async def aclose(self) -> None:
        """Close the HTTP session and the cache."""
        await self._endpoint.aclose()
        if self._cache is not None:
            await self._cache.aclose()


def _verdict(reply: Reply) -> Verdict:
    """The verdict in an answer. Raises `JudgeFault` for one that was cut off or cannot be read."""
    if reply.finish_reason != "stop":
        ended = f"the judge's answer ended for {reply.finish_reason!r}, not 'stop'"
        raise JudgeFault(f"{ended}; with 'length', raise max_tokens")
    assert reply.content is not None  # `ChatEndpoint` sees to it
    return rubric.read_verdict(reply.content)
