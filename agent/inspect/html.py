"""One episode as one self-contained page: tokens coloured by advantage, figures on hover or tap."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Sequence

from agent.episode import Episode
from agent.inspect.tokens import TokenView

# Blue and orange are told apart by every common kind of colour vision, and both carry dark text.
_POSITIVE, _NEGATIVE = (86, 160, 233), (240, 150, 40)

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
script-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --ink: #1a1a1a; --paper: #fff; --soft: #f2f2ee; --faint: #666; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #eaeaea; --paper: #16181b; --soft: #23262b; --faint: #a0a0a0; }} }}
body {{ margin: 0 auto; max-width: 60rem; padding: 1rem 1rem 9rem; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, sans-serif; }}
h1 {{ font-size: 1.15rem; overflow-wrap: anywhere; }}
header p, .legend {{ color: var(--faint); font-size: .88rem; white-space: pre-wrap; overflow-wrap: anywhere; }}
.legend b {{ padding: .1em .5em; border-radius: .2em; color: #1a1a1a; font-weight: normal; }}
section {{ margin: .8rem 0; padding: .5rem .7rem; border-left: .25rem solid var(--faint); }}
section.action {{ border-left-color: {positive}; }}
section.prompt, section.observation {{ background: var(--soft); }}
h2 {{ margin: 0 0 .3rem; font-size: .8rem; color: var(--faint); font-weight: 600; }}
.t {{ font: .92rem/1.8 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }}
.t span {{ border-radius: .15em; }}
.t span[data-c] {{ color: #1a1a1a; }}
.t span.gated {{ text-decoration: underline wavy 2px; }}
.t span.on {{ outline: 2px solid var(--ink); }}
#figures {{ position: fixed; inset: auto 0 0 0; padding: .6rem 1rem; background: var(--soft); color: var(--ink);
  border-top: 1px solid var(--faint); font: .85rem/1.5 ui-monospace, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; min-height: 3em; }}
</style></head><body>
<header><h1>{title}</h1><p>{header}</p>
<p class="legend">{legend}</p></header>
<main>
{sections}
</main>
<div id="figures" role="status">Touch a token, or point at it.</div>
<script>
const figures = document.getElementById("figures");
let chosen = null;
function show(event) {{
  const token = event.target.closest("span[data-f]");
  if (!token) return;
  if (chosen) chosen.classList.remove("on");
  chosen = token; token.classList.add("on");
  figures.textContent = token.dataset.f;
}}
document.addEventListener("pointerover", show);
document.addEventListener("click", show);
document.addEventListener("keydown", event => {{
  if (event.key !== "ArrowRight" && event.key !== "ArrowLeft") return;
  const all = [...document.querySelectorAll("span[data-f]")];
  const next = all[all.indexOf(chosen) + (event.key === "ArrowRight" ? 1 : -1)];
  if (next) {{ show({{target: next}}); next.scrollIntoView({{block: "nearest"}}); event.preventDefault(); }}
}});
</script>
</body></html>
"""


def episode_page(episode: Episode, views: Sequence[TokenView], header: str) -> str:
    """The page, as HTML. It names no other address, and all text of the episode is escaped."""
    known = [abs(v.advantage) for v in views if v.advantage is not None and math.isfinite(v.advantage)]
    scale = max(known, default=0.0) or 1.0
    sections = []
    turn = 0
    segments = [segment for chain in episode.chains for segment in chain.segments]
    rewards = [reward for chain in episode.chains for reward in chain.turn_rewards]
    for number, group in itertools.groupby(views, key=lambda view: view.segment):
        segment = segments[number]
        branch = "branch: " if segment.kind == "prompt" and number else ""
        label = f"{branch}{segment.kind}, {len(segment.token_ids)} tokens"
        if segment.kind == "action":
            label += f", {segment.finish_reason}, reward {rewards[turn]:g}"
            turn += 1
        spans = "".join(_span(view, scale) for view in group)
        sections.append(
            f'<section class="{segment.kind}"><h2>{html.escape(label)}</h2><div class="t">{spans}</div></section>'
        )
    if known:
        legend = (
            f'<b style="background:{_mix(_NEGATIVE, 1.0)}">advantage -{scale:.3g}</b> 0 '
            f'<b style="background:{_mix(_POSITIVE, 1.0)}">+{scale:.3g}</b>  wavy line: gated, not trained on'
        )
    else:
        legend = "No advantages are known: the learner has not trained on this episode."
    return _PAGE.format(
        title=html.escape(f"Episode {episode.id}"),
        header=html.escape(header),
        legend=legend,
        sections="\n".join(sections),
        positive=_mix(_POSITIVE, 1.0),
    )


def _span(view: TokenView, scale: float) -> str:
    text = html.escape(view.text)
    attributes = [f'data-f="{html.escape(_figures(view), quote=True)}"']
    if view.gate:
        attributes.append('class="gated"')
    if view.advantage is not None and math.isfinite(view.advantage):
        strength = min(1.0, abs(view.advantage) / scale)
        if strength >= 0.02:
            colour = _mix(_POSITIVE if view.advantage >= 0 else _NEGATIVE, 0.2 + 0.8 * strength)
            attributes.append(f'data-c style="background:{colour}"')
    return f"<span {' '.join(attributes)}>{text}</span>"


def _mix(colour: tuple[int, int, int], strength: float) -> str:
    """`colour` on white: opaque, so that dark text is readable on it on a dark page too."""
    return "#" + "".join(f"{round(255 + (part - 255) * strength):02x}" for part in colour)


def _figures(view: TokenView) -> str:
    parts = [f"{view.text!r} (id {view.token_id}), {view.role}"]
    if view.logprob is not None:
        parts.append(f"log-prob {view.logprob:.4f}, version {view.version}")
    if view.advantage is not None:
        ratio = ""
        if view.learner_logprob is not None and view.logprob is not None:
            difference = view.learner_logprob - view.logprob
            ratio = f", ratio {math.exp(difference):.4g}" if abs(difference) < 50 else ", ratio beyond e^50"
        parts.append(f"advantage {view.advantage:+.4f}, value {view.value:.4f}, lag {view.lag}")
        parts.append(f"learner's log-prob {view.learner_logprob:.4f}{ratio}, gate {view.gate or 'open'}")
    return "\n".join(parts)
