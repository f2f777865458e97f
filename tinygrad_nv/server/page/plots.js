// The last minute of the engine, from /metrics: four line plots, drawn once a second while they are seen.

import { $, make, svg } from "./dom.js";

const SECONDS = 60;
const WIDTH = 276, HEIGHT = 96, LEFT = 38, RIGHT = 4, TOP = 8, BOTTOM = 18;

const rate = (now, then, name) => {
  if (!then) return null;
  // of a server that was started anew, none at first
  const gained = now[name] - then[name];
  return gained >= 0 ? gained / (now.at - then.at) : null;
};
// the mean of the requests that ended since; none: as before
const mean = (now, then, name) => {
  if (!then) return null;
  const count = now[`${name}_count`] - then[`${name}_count`];
  return count > 0 ? (now[`${name}_sum`] - then[`${name}_sum`]) / count : null;
};

const PLOTS = [
  { title: "Generation", unit: "tokens/s", least: 10, lines: [
    { id: "rate", label: "tokens/s", value: (now, then) => rate(now, then, "generation_tokens_total") }] },
  { title: "Time to first token", unit: "ms", least: 10, holds: true, lines: [
    { id: "ttft", label: "mean", value: (now, then) => {
      const seconds = mean(now, then, "time_to_first_token_seconds");
      return seconds === null ? null : seconds * 1000;
    } }] },
  { title: "Requests", unit: "", least: 4, lines: [
    { id: "running", label: "running", value: (now) => now.num_requests_running },
    { id: "queued", label: "waiting", value: (now) => now.num_requests_waiting }] },
  { title: "KV cache in use", unit: "%", least: 100, most: 100, lines: [
    { id: "kv", label: "in use", value: (now) => now.kv_cache_usage_perc * 100 }] },
];

// "prefix:name{labels} value" lines, without buckets of histograms
function parse(text) {
  const out = { at: performance.now() / 1000 };
  for (const [, name, value] of text.matchAll(/^\w+:(\w+)\{[^}]*\} (\S+)$/gm)) out[name] = Number(value);
  return out;
}

// The least of 1, 2, 2.5, 5, 10, … that is not below `value`.
function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((step) => step * power).find((each) => each >= value - 1e-9);
}

const said = (value) => value === null ? "–" : value >= 9950 ? `${(value / 1000).toFixed(0)}k`
  : value >= 10 || Number.isInteger(value) ? value.toFixed(0) : value.toFixed(1);

export class Plots {
  constructor(root) {
    this.then = null;
    this.plots = PLOTS.map((plot) => new Plot(plot, root));
  }

  // The text of /metrics, now.
  add(text) {
    const now = parse(text);
    for (const plot of this.plots) plot.add(now, this.then);
    this.then = now;
  }

  // After a pause: lines begin anew.
  restart() {
    this.then = null;
    for (const plot of this.plots) for (const line of plot.lines) line.past = [];
  }
}

const label = (x, y, end, text = "") => svg("text", { x, y, "text-anchor": end ? "end" : "start" }, text);

class Plot {
  constructor({ title, unit, least, most = Infinity, holds = false, lines }, root) {
    Object.assign(this, { title, unit, least, most, holds });
    this.lines = lines.map((line, at) => ({ ...line, past: [], shown: make("b", { id: line.id }, "–"),
      path: svg("path", { class: `line line-${at}` }), dot: svg("circle", { class: `dot dot-${at}`, r: 2.5 }),
      area: at ? null : svg("path", { class: "area" }) }));
    this.ticks = [0, 0.5, 1].map((part) => ({ part, text: label(LEFT - 6, this.y(part) + 3.5, true) }));
    const across = `H${WIDTH - RIGHT}`;
    const grid = this.ticks.map(({ part }) => svg("path", { class: "grid", d: `M${LEFT},${this.y(part)}${across}` }));
    this.svg = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" },
      ...grid, ...this.ticks.map(({ text }) => text),
      label(LEFT, HEIGHT - 4, false, `${SECONDS} s ago`), label(WIDTH - RIGHT, HEIGHT - 4, true, "now"),
      // the first line is drawn last, over the others
      ...this.lines.toReversed().flatMap((line) => [line.area, line.path, line.dot]).filter(Boolean));
    const key = ({ label: words }, at) => make("span", { className: `key key-${at}` }, `${words} `);
    root.append(make("div", { className: "plot" },
      make("div", { className: "row" }, make("h3", {}, title), make("span", { className: "values" },
        this.lines.flatMap((line, at) => [lines.length > 1 ? key(line, at) : null, line.shown]), ` ${unit}`)),
      this.svg));
    this.draw();
  }

  y(part) { return TOP + (1 - part) * (HEIGHT - TOP - BOTTOM); }

  add(now, then) {
    for (const line of this.lines) {
      const value = line.value(now, then);
      const held = value === null && this.holds ? line.past.at(-1) ?? null : value;
      line.past = [...line.past, Number.isFinite(held) ? held : null].slice(-SECONDS);
      line.shown.textContent = said(line.past.at(-1));
    }
    this.draw();
  }

  draw() {
    const all = this.lines.flatMap((line) => line.past).filter((value) => value !== null);
    const top = Math.min(this.most, ceiling(Math.max(this.least, ...all)));
    for (const { part, text } of this.ticks) text.textContent = (top * part).toLocaleString("en");
    for (const line of this.lines) {
      const first = SECONDS - line.past.length + 1;
      const points = line.past.map((value, at) => value === null ? null
        : [LEFT + (first + at) / SECONDS * (WIDTH - LEFT - RIGHT), this.y(Math.min(value, top) / top)])
        .filter(Boolean);
      const path = points.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join("L");
      line.path.setAttribute("d", path && `M${path}`);
      line.area?.setAttribute("d", path && `M${points[0][0].toFixed(1)},${this.y(0)}L${path}V${this.y(0)}Z`);
      line.dot.setAttribute("visibility", path ? "visible" : "hidden");
      if (!path) continue;
      line.dot.setAttribute("cx", points.at(-1)[0]);
      line.dot.setAttribute("cy", points.at(-1)[1]);
    }
    const values = this.lines.map(({ label, past }) => `${label} ${said(past.at(-1) ?? null)}`).join(", ");
    this.svg.setAttribute("aria-label", `${this.title}, the last minute, now: ${values} ${this.unit}`.trim());
  }
}

// Whether the plots can be seen.
export const seen = () => document.visibilityState === "visible" && $("figures").checkVisibility();
