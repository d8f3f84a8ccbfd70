"""A completion as a stream of server-sent events: reading it on the client's side. No network here.

Every chunk brings the tokens and log-probs since the last one; the last chunk has the finish reason and the versions
of all tokens, as vLLM sends them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from agent.engines.base import Completion, EngineFault
from agent.engines.wire import Answer, Choice, Likely, LogProb, LogProbs, completion

_DATA = b"data:"
_END = b"[DONE]"


class Partial(msgspec.Struct, frozen=True):
    """Tokens that have arrived since the last `Partial`, with their log-probs; on the last one the whole completion."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    completion: Completion | None = None
    top: tuple[Sequence[Likely], ...] = ()
    """For each token its likeliest alternatives, itself among them; empty lists where none were asked for."""


class _Error(msgspec.Struct):
    message: str = ""


class _Chunk(msgspec.Struct):
    choices: list[Choice] = []
    error: _Error | None = None


_chunks = msgspec.json.Decoder(_Chunk)


class StreamReader:
    """Turns the bytes of one stream, cut anywhere, into `Partial`s; raises `EngineFault` for what is unsound."""

    def __init__(self, url: str, *, goes_back: bool = False) -> None:
        self._goes_back = goes_back
        self._url = url
        self._rest = b""
        self._entries: list[LogProb] = []
        self._done = False

    @property
    def tokens(self) -> int:
        """How many tokens have come so far."""
        return len(self._entries)

    def feed(self, block: bytes) -> Iterator[Partial]:
        """The partials that `block` completes."""
        *lines, self._rest = (self._rest + block).split(b"\n")
        for line in lines:
            data = line.strip().removeprefix(_DATA).strip()
            if line.startswith(_DATA) and data != _END:
                yield from self._chunk(data)

    def _chunk(self, data: bytes) -> Iterator[Partial]:
        try:
            chunk = _chunks.decode(data)
        except msgspec.DecodeError as error:
            raise EngineFault(f"engine {self._url}: a chunk of its stream can't be read ({error})") from error
        if chunk.error is not None:
            raise EngineFault(f"engine {self._url}: it failed in mid-stream: {chunk.error.message}")
        for choice in chunk.choices:
            if self._done:
                raise EngineFault(f"engine {self._url}: its stream goes on after its end")
            yield self._partial(choice)

    def _partial(self, choice: Choice) -> Partial:
        tokens = choice.token_ids or []
        new = (choice.logprobs.content if choice.logprobs else None) or []
        if [entry.token_id for entry in new] != tokens or any(entry.logprob is None for entry in new):
            raise EngineFault(f"engine {self._url}: {len(new)} log-probs for {len(tokens)} tokens, or of other tokens")
        self._entries += new
        whole = None
        if choice.finish_reason is not None:
            self._done = True
            everything = Choice(
                [entry.token_id for entry in self._entries],
                choice.finish_reason,
                LogProbs(self._entries),
                choice.weight_versions,
                choice.routed_experts,
            )
            whole = completion(Answer([everything]), self._url, goes_back=self._goes_back)
        top = tuple(entry.top_logprobs for entry in new)
        return Partial(tuple(tokens), tuple(e.logprob for e in new if e.logprob is not None), whole, top)
