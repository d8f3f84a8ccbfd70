"""A study's page and picture, made from its CSVs alone. Nothing on it is written by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from learner.study.arms import Study
from learner.study.figures import FIGURES, SMOOTH, common_updates, fell_at, with_interval
from learner.study.record import Record, read_records
from learner.study.search import chosen

PICTURE = "curves.png"
_TITLES = {
    "reward": "reward of the batch",
    "held_out": "held-out success",
    "explained_variance": "explained variance",
    "critic_norm": "critic's gradient norm",
    "critic_attention": "critic's gradient norm, attention",
    "critic_experts": "critic's gradient norm, experts",
    "critic_mlp": "critic's gradient norm, MLP",
    "policy_norm": "policy's gradient norm",
    "gated": "gated share of tokens",
    "entropy": "entropy",
    "ratio_kl": "KL of engine and learner",
    "lag": "lag (versions)",
    "turns": "turns an episode",
}
_SMOOTHED = frozenset(
    {
        "reward",
        "explained_variance",
        "critic_norm",
        "critic_attention",
        "critic_experts",
        "critic_mlp",
        "gated",
        "ratio_kl",
        "turns",
        "policy_norm",
    }
)


def write_page(study: Study, results: Path) -> Path:
    """Write `results/NAME.md` and its picture from the CSVs in `results/NAME/`; the page's path.

    Raises `RecordError` for a file there that is no CSV of a run.
    """
    records = {arm.name: read_records(results / study.name, arm.name) for arm in study.arms}
    found = {name: own for name, own in records.items() if own}
    page = results / f"{study.name}.md"
    if found:
        draw(study, found, results / study.name / PICTURE)
    results.mkdir(parents=True, exist_ok=True)
    page.write_text(text_of(study, found, results), encoding="utf-8")
    return page


def text_of(study: Study, records: Mapping[str, Sequence[Record]], results: Path) -> str:
    """The page in Markdown."""
    lines = [f"# Study: {study.name}", "", f"In small what the paper shows in: {study.source}.", ""]
    lines += [
        "Made by `python -m learner.study` from the CSVs beside it; do not edit.",
        "",
        "## What the paper says",
        "",
    ]
    lines += [f"- {claim}" for claim in study.claims]
    lines += ["", f"**If that holds in small:** {study.asks}", "", "## What was run", ""]
    if not records:
        return "\n".join([*lines, "Nothing yet: " + f"`python -m learner.study {study.name}`.", ""])
    updates = common_updates(records)
    lines += [_extent(study, records, updates), "", *_table(study, records, updates), ""]
    lines += [f"![curves]({study.name}/{PICTURE})", ""]
    lines += [
        f"Lines are means over seeds (reward and figures of a batch over {SMOOTH} updates), bands reach from the "
        "lowest to the highest seed. Brackets are Student's 95 % interval over seeds. *Fell* counts runs whose reward, "
        f"in means of {SMOOTH} updates, ended below half of its highest.",
        "",
        "## Commands",
        "",
        f"    python -m learner.study {study.name} --seeds {max(len(own) for own in records.values())}",
        "",
        "| run | updates | minutes | machine | date | command |",
        "|---|---|---|---|---|---|",
    ]
    for own in records.values():
        for record in own:
            minutes = float(record.facts.get("seconds", "nan")) / 60
            about = [record.facts.get(key, "") for key in ("machine", "date")]
            cells = [f"{record.arm}, seed {record.seed}", f"{record.rows[-1]['step']:.0f}", f"{minutes:.1f}", *about]
            lines.append("| " + " | ".join([*cells, f"`{record.facts.get('command', '')}`"]) + " |")
    lines += ["", *_searched(study, results)]
    return "\n".join(lines)


def _extent(study: Study, records: Mapping[str, Sequence[Record]], updates: int) -> str:
    missing = [arm.title for arm in study.arms if arm.name not in records]
    said = f"Figures are of the first {updates} updates, which all runs have made"
    said += f"; the study asks for {study.updates}." if updates < study.updates else "."
    few = min(len(own) for own in records.values())
    if few < 3:
        said += f" With {few} seed{'s' if few > 1 else ''} of an arm nothing is shown yet: seeds differ."
    return said + (f" Not run yet: {', '.join(missing)}." if missing else "")


def _table(study: Study, records: Mapping[str, Sequence[Record]], updates: int) -> list[str]:
    cells: dict[str, list[str]] = {}
    for name, (figure, form) in FIGURES.items():
        column = [with_interval([figure(r, updates) for r in own], form) for own in records.values()]
        if any(column):
            cells[name] = column
    lines = ["| " + " | ".join(["arm", "seeds", *cells, "fell"]) + " |", "|---" * (len(cells) + 3) + "|"]
    for row, (name, own) in enumerate(records.items()):
        fell = [at for r in own if not math.isnan(at := fell_at(r, updates))]
        said = "none" if not fell else f"{len(fell)} (at {', '.join(f'{at:.0f}' for at in fell)})"
        values = [column[row] or "-" for column in cells.values()]
        lines.append("| " + " | ".join([study.arm(name).title, str(len(own)), *values, said]) + " |")
    return lines


def _searched(study: Study, results: Path) -> list[str]:
    words = {arm.title: chosen(results, arm, study.recipe) for arm in study.arms}
    known = {title: found for title, found in words.items() if found}
    if not known:
        return ["Rates and widths were not searched: every arm has those of the recipe and its preset.", ""]
    lines = [f"- {title}: `{' '.join(found)}`" for title, found in known.items()]
    return ["Found by the search, of six settings for each preset ([search](search.md)):", "", *lines, ""]


def draw(study: Study, records: Mapping[str, Sequence[Record]], target: Path) -> None:
    """The picture of a study (PNG). Any thread may draw."""
    from matplotlib.figure import Figure

    columns = [name for name in study.plots if any(r.column(name) for own in records.values() for r in own)]
    width = min(3, max(len(columns), 1))
    height = -(-max(len(columns), 1) // width)
    figure = Figure(figsize=(4.6 * width, 3.4 * height), layout="constrained")
    axes = figure.subplots(height, width, squeeze=False)
    for axis in axes.flat[len(columns) :]:
        axis.set_visible(False)
    for axis, name in zip(axes.flat, columns, strict=False):
        for number, (arm, own) in enumerate(records.items()):
            lines = [line for record in own if (line := _line(record, name))]
            if not lines:
                continue
            steps = sorted(set.intersection(*(set(line) for line in lines)))
            mean = [math.fsum(line[step] for line in lines) / len(lines) for step in steps]
            axis.plot(steps, mean, color=f"C{number}", label=study.arm(arm).title)
            if len(lines) > 1:
                low, high = ([pick(line[step] for line in lines) for step in steps] for pick in (min, max))
                axis.fill_between(steps, low, high, color=f"C{number}", alpha=0.15, linewidth=0)
        axis.set_title(_TITLES[name])
        axis.set_xlabel("policy updates")
        axis.grid(alpha=0.3)
    if columns:
        axes.flat[0].legend(frameon=False, fontsize=8)
    figure.suptitle(study.name)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}")
    figure.savefig(part, dpi=100, format="png", metadata={"Software": None})
    part.replace(target)


def _line(record: Record, name: str) -> dict[int, float]:
    """A column by update, smoothed where it is noise from batch to batch."""
    found = record.column(name)
    if name not in _SMOOTHED:
        return dict(found)
    values = [value for _, value in found]
    windows = {step: values[max(0, i - SMOOTH + 1) : i + 1] for i, (step, _) in enumerate(found)}
    return {step: math.fsum(window) / len(window) for step, window in windows.items()}
