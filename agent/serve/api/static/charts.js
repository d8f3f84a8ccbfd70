// The charts: plotly, as the server's own installed package ships it. One table of points feeds all of them.

import { call } from "./api.js";

const SOURCE = "/static/plotly.min.js";
const SERIES = 8;
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Local wall-clock time, which plotly shows as it is written. */
function clock(point) {
  const at = new Date(point.at * 1000);
  return new Date(at.getTime() - at.getTimezoneOffset() * 60000).toISOString().slice(0, -1);
}

/** Plotly reads a few tags in its texts; names come from whoever gives feedback. */
const plain = (name) => name.replaceAll("<", "‹");

/** Stretches of points with the same phase: [{name, from, to}], each up to where the next one begins. */
export function phasesOf(points) {
  const found = [];
  for (const point of points) {
    const last = found.at(-1);
    if (last) last.to = point;
    if ((last?.name ?? null) !== (point.phase ?? null)) found.push({ name: point.phase ?? null, from: point, to: point });
  }
  return found.filter((phase) => phase.name !== null);
}

/** Where names fit over `width` pixels, as {name, x} with x from 0 to 1. The present phase always has its name. */
function labelsOf(phases, points, width) {
  const [first, last] = [points[0]?.at, points.at(-1)?.at];
  const found = [];
  let free = width; // what is right of it is taken
  for (const phase of phases.toReversed()) {
    const need = 7 * phase.name.length + 6;
    let start = (width * (phase.from.at - first)) / Math.max(last - first, 1e-3);
    if (!found.length) start = Math.max(0, Math.min(start, width - need));
    if (start + need <= free || !found.length) found.push({ name: phase.name, x: start / width });
    free = Math.min(free, start);
  }
  return found.reverse();
}

export class Charts {
  #ready = false;
  #points = [];
  #colours = new Map(); // by style or phase, in the order in which they were first seen
  #due = false;

  /** Load the library; throws an Error that says what to install where it is missing. */
  async load() {
    await new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = SOURCE;
      script.addEventListener("load", resolve);
      script.addEventListener("error", () => {
        call(SOURCE).then(() => reject(new Error("the charts could not be loaded")), reject);
      });
      document.head.append(script);
    });
    this.#ready = true;
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw(this.#points));
    document.addEventListener("visibilitychange", () => this.draw(this.#points));
    this.draw(this.#points);
  }

  /** Draw all charts from `points` before the next frame; nothing is drawn in a hidden tab. */
  draw(points) {
    this.#points = points;
    if (!this.#ready || this.#due || document.hidden) return;
    this.#due = true;
    requestAnimationFrame(() => {
      this.#due = false;
      this.#drawNow();
    });
  }

  #colour(name) {
    if (!this.#colours.has(name)) this.#colours.set(name, this.#colours.size % SERIES);
    return css(`--series-${this.#colours.get(name)}`);
  }

  #drawNow() {
    const points = this.#points;
    const x = points.map(clock);
    const line = (name, pick, colour, more = {}) => ({
      name: plain(name), x, y: points.map(pick), mode: "lines", line: { color: colour, width: 2 }, connectgaps: false, ...more,
    });
    const [blue, orange] = [css("--first"), css("--second")];
    const styles = [...new Set(points.flatMap((point) => Object.keys(point.styles)))].sort();
    styles.forEach((style) => this.#colour(style));

    this.#plot("chart-reward", [line("reward", (p) => p.reward, blue)], { y: { range: [0, 1.02] }, names: true });
    this.#plot(
      "chart-styles",
      styles.map((style) => line(style, (p) => (Object.keys(p.styles).length ? (p.styles[style] ?? 0) : null), this.#colour(style))),
      { y: { range: [0, 1.02], tickformat: ".0%" } },
    );
    this.#plot(
      "chart-lag",
      [
        line("lag", (p) => p.lag, blue),
        line("gated share", (p) => p.gated, orange, { yaxis: "y2" }),
      ],
      { y: { rangemode: "tozero" }, y2: { tickformat: "~%", rangemode: "tozero" } },
    );
    this.#plot(
      "chart-queue",
      [
        line("queue", (p) => p.queue, blue),
        line("episodes per minute", (p) => p.episodes_per_minute, orange, { yaxis: "y2" }),
      ],
      { y: { rangemode: "tozero" }, y2: { rangemode: "tozero" } },
    );
  }

  #plot(id, traces, { y, y2, names = false }) {
    // An axis without a value yet would be labelled with whatever plotly makes up.
    const known = (side) => traces.some((trace) => (trace.yaxis ?? "y") === side && trace.y.some((value) => value != null));
    const x = this.#points.length ? { range: [clock(this.#points[0]), clock(this.#points.at(-1))] } : { visible: false };
    const text = css("--soft");
    const axis = { gridcolor: css("--line"), zeroline: false, tickfont: { size: 11 }, fixedrange: true, automargin: true };
    const phases = phasesOf(this.#points);
    const nothing = !known("y") && !known("y2");
    const layout = {
      height: 190,
      margin: { l: 38, r: y2 ? 38 : 8, t: names ? 18 : 6, b: 24 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: text, size: 11, family: css("--font") },
      showlegend: !nothing && !names,
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 11 }, itemwidth: 30 },
      hovermode: "x unified",
      hoverlabel: { bgcolor: css("--panel"), bordercolor: css("--line"), font: { color: css("--text") } },
      xaxis: { ...axis, ...x, type: "date", showgrid: false, nticks: 5, tickformat: "%H:%M:%S", hoverformat: "%H:%M:%S" },
      yaxis: { ...axis, nticks: 5, ...y, showticklabels: known("y") },
      shapes: phases.map((phase) => ({
        type: "rect", xref: "x", yref: "paper", x0: clock(phase.from), x1: clock(phase.to), y0: 0, y1: 1,
        fillcolor: this.#colour(phase.name), opacity: 0.14, line: { width: 0 }, layer: "below",
      })),
      annotations: [
        ...(nothing ? [{ text: "nothing known yet", xref: "paper", yref: "paper", x: 0.5, y: 0.5, showarrow: false }] : []),
        ...(names ? labelsOf(phases, this.#points, document.getElementById(id).clientWidth - 46) : []).map(({ name, x }) => ({
          text: plain(name), xref: "paper", yref: "paper", x, y: 1,
          xanchor: "left", yanchor: "bottom", showarrow: false, font: { size: 11, color: css("--text") },
        })),
      ],
    };
    if (y2) layout.yaxis2 = { ...axis, nticks: 5, overlaying: "y", side: "right", showgrid: false, tickmode: "auto", ...y2, showticklabels: known("y2") };
    globalThis.Plotly.react(id, traces, layout, { displayModeBar: false, responsive: true });
  }
}
