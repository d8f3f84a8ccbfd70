"""One episode on the terminal: a few lines on the whole of it, and a table with a line for every token."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from agent.episode import Episode
from agent.inspect.annotations import TokenAnnotations
from agent.inspect.tokens import TokenView

ROLE_STYLES = {"prompt": "dim", "observation": "cyan", "action": "bold"}


def episode_header(episode: Episode, annotations: TokenAnnotations | None) -> str:
    """What is known of the episode as a whole, in a few lines."""
    times, sampling = episode.timings, episode.sampling
    trained = "not trained" if annotations is None else f"trained from version {annotations.trained_version}"
    named = f"{episode.environment} ({episode.env_id})" if episode.environment else episode.env_id
    lines = [
        f"{episode.id}  {named}  task {episode.task_id}",
        f"{episode.stop_reason.value}, reward {episode.reward:g}, rewards by turn "
        + (" ".join(f"{reward:g}" for chain in episode.chains for reward in chain.turn_rewards) or "none"),
        f"{len(episode.actions)} turns, {episode.action_tokens} action tokens, temperature {sampling.temperature:g}, "
        f"top-p {sampling.top_p:g}; {times.finished_at - times.issued_at:.1f} s "
        f"(engine {times.generate_s:.1f}, environment {times.environment_s:.1f}); {trained}",
    ]
    figures = [f"{key}={value}" for key, value in sorted(episode.metrics.items()) if not isinstance(value, float)]
    if figures:
        lines.append(" ".join(figures))
    return "\n".join(lines)


def token_table(views: Sequence[TokenView]) -> Table:
    """A table with one line a token."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("#", justify="right", style="dim")
    table.add_column("role")
    table.add_column("id", justify="right", style="dim")
    table.add_column("token", overflow="fold")
    for name in ("log-prob", "version", "lag", "learner", "gate", "value", "advantage"):
        table.add_column(name, justify="right")
    for place, view in enumerate(views):
        table.add_row(
            str(place),
            view.role,
            str(view.token_id),
            Text(_visible(view.text)),
            _number(view.logprob),
            _number(view.version),
            _number(view.lag),
            _number(view.learner_logprob),
            view.gate or ("" if view.gate is None else "-"),
            _number(view.value),
            _advantage(view.advantage),
            style=ROLE_STYLES[view.role],
        )
    return table


def _visible(text: str) -> str:
    """A token on one line: control characters escaped, blanks kept visible at its ends."""
    escaped = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return escaped.replace(" ", "\u00b7") if escaped.strip() != escaped else escaped


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.3f}"


def _advantage(value: float | None) -> Text:
    # Sign by character as well as by colour: blue and orange differ for every eye, but not on every terminal.
    return Text("") if value is None else Text(f"{value:+.3f}", style="blue" if value >= 0 else "dark_orange")
