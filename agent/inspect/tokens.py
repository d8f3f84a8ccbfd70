"""One episode as a list of tokens with everything that is known about each: what `agent.inspect` shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from agent.episode import Episode
from agent.inspect.annotations import TokenAnnotations

GATES = {0: "", -1: "low", 1: "high", 2: "not finite"}


@dataclass(frozen=True, slots=True)
class TokenView:
    """One token. What does not apply to it (an observation has no log-prob), or is not known, is None.

    `segment` counts through all chains of an episode, its branches last. `logprob` is the engine's, as sampled;
    `learner_logprob`, `lag`, `gate`, `value` and `advantage` are the learner's, of the update that trained on the
    episode. `gate` is "" for a trusted token.
    """

    segment: int
    role: str
    token_id: int
    text: str
    logprob: float | None = None
    version: int | None = None
    learner_logprob: float | None = None
    lag: int | None = None
    gate: str | None = None
    value: float | None = None
    advantage: float | None = None


def find_tokenizer(run: Path, model: Path | None = None) -> Tokenizer | None:
    """The tokenizer of `model`, else the first one found in the run's folder, the shallowest first; None without."""
    if model is not None:
        path = model / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"no tokenizer.json in {model}")
        return Tokenizer.from_file(str(path))
    for pattern in ("tokenizer.json", "*/tokenizer.json", "*/*/tokenizer.json"):
        for path in sorted(run.glob(pattern)):
            return Tokenizer.from_file(str(path))
    return None


def token_texts(ids: Sequence[int], tokenizer: Tokenizer | None) -> list[str]:
    """The text of each token, so that they join to the text of all.

    A character that several tokens spell stands at the last of them; without a tokenizer, ids in angle brackets.
    """
    if tokenizer is None:
        return [f"⟨{index}⟩" for index in ids]
    texts: list[str] = []
    pending: list[int] = []
    for index in ids:
        pending.append(index)
        text = tokenizer.decode(pending, skip_special_tokens=False)
        # A character is at most four bytes long: what is still broken then stays so.
        if text.endswith("\ufffd") and len(pending) < 4:
            texts.append("")
        else:
            texts.append(text)
            pending = []
    if pending:
        texts[-1] = tokenizer.decode(pending, skip_special_tokens=False)
    return texts


def token_views(episode: Episode, annotations: TokenAnnotations | None, tokenizer: Tokenizer | None) -> list[TokenView]:
    """Every token of `episode`, its branches last; raises `ValueError` if the annotations are not of this episode."""
    if annotations is not None and len(annotations.values) != episode.action_tokens:
        raise ValueError(
            f"episode {episode.id} has {episode.action_tokens} action tokens and {len(annotations.values)} annotations"
        )
    views: list[TokenView] = []
    place = 0
    for number, segment in enumerate(s for chain in episode.chains for s in chain.segments):
        texts = token_texts(segment.token_ids, tokenizer)
        logprobs, versions = tuple(segment.logprobs), tuple(segment.versions)
        for index, (token_id, text) in enumerate(zip(segment.token_ids, texts, strict=True)):
            if segment.kind != "action":
                views.append(TokenView(number, segment.kind, token_id, text))
                continue
            logprob, version = logprobs[index], versions[index]
            if annotations is None:
                views.append(TokenView(number, segment.kind, token_id, text, logprob, version))
            else:
                views.append(
                    TokenView(
                        number,
                        segment.kind,
                        token_id,
                        text,
                        logprob,
                        version,
                        learner_logprob=annotations.logprobs[place],
                        lag=annotations.trained_version - version,
                        gate=GATES.get(annotations.gated[place], str(annotations.gated[place])),
                        value=annotations.values[place],
                        advantage=annotations.advantages[place],
                    )
                )
            place += 1
    return views
