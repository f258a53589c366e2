// The page of curves: those to look at first, then all metrics by the first part of the name.

import { ask } from "./ask.js";
import { chart } from "./chart.js";
import { choice, input, labelled, make, say } from "./texts.js";

const KEY_METRICS = ["val/em", "val/score", "critic/score/mean", "env/valid_searches", "response_length/mean",
  "actor/entropy", "actor/grad_norm", "actor/pg_loss", "critic/kl", "actor/rollout_mismatch",
  "guard/health", "guard/log_prob_drift", "timing_s/step", "perf/throughput"];
const SMOOTHING = [["0", "none"], ["0.6", "a little"], ["0.9", "much"]];
const curvesState = { words: "", smoothing: "0", wide: new Set() }; // kept while other pages are shown

export async function showCurves(root, { runs }) {
  const words = input("words", "search", curvesState.words, say("part of a name, such as em or timing"));
  const smoothing = choice("smoothing", SMOOTHING, curvesState.smoothing);
  const bar = make("form", "bar", labelled("Metrics", words, "grow"), labelled("Smoothing", smoothing), legend(runs));
  const body = make("div", "curves");
  root.replaceChildren(bar, body);
  bar.addEventListener("submit", (event) => event.preventDefault());
  const redraw = () => {
    Object.assign(curvesState, { words: words.value, smoothing: smoothing.value });
    draw();
  };
  words.addEventListener("input", redraw);
  smoothing.addEventListener("change", redraw);

  // Charts are drawn when their slot is scrolled into view.
  const metricOfSlot = new Map();
  const observer = new IntersectionObserver((entries) => {
    const slots = entries.filter((entry) => entry.isIntersecting).map((entry) => entry.target);
    slots.forEach((slot) => observer.unobserve(slot));
    if (slots.length) fill(slots);
  }, { rootMargin: "200px" });

  let names = [];
  const draw = () => {
    observer.disconnect();
    metricOfSlot.clear();
    const parts = curvesState.words.toLowerCase().split(/\s+/).filter(Boolean);
    const matching = names.filter((name) => parts.every((part) => name.toLowerCase().includes(part)));
    const groups = new Map();
    if (!parts.length) groups.set("overview", KEY_METRICS.filter((name) => names.includes(name)));
    for (const name of matching) {
      const group = name.includes("/") ? name.slice(0, name.indexOf("/")) : "others";
      groups.set(group, [...(groups.get(group) ?? []), name]);
    }
    body.replaceChildren(...[...groups].filter(([, members]) => members.length).map(([group, members]) => {
      const grid = make("div", "grid-of-charts", ...members.map((name) => {
        const slot = make("div", "chart-slot");
        metricOfSlot.set(slot, name);
        return slot;
      }));
      return make("section", "", make("h2", "", say(group), make("small", "", ` ${members.length}`)), grid);
    }));
    if (!matching.length) body.append(make("p", "quiet", say(names.length ? "No metric has such a name." : "No metrics yet: they appear after the first step.")));
    metricOfSlot.forEach((_, slot) => observer.observe(slot));
  };

  const fill = async (slots) => {
    const metrics = [...new Set(slots.map((slot) => metricOfSlot.get(slot)))];
    const curves = {};
    for (let i = 0; i < metrics.length; i += 60) Object.assign(curves, await ask("curves", { name: metrics.slice(i, i + 60) }));
    for (const slot of slots) {
      const name = metricOfSlot.get(slot);
      if (!curves[name]) continue;
      const isWide = curvesState.wide.has(name);
      slot.classList.toggle("wide", isWide);
      const lines = runs.map((run, i) => ({ name: run.name, color: i % 8, steps: curves[name][i][0], values: curves[name][i][1] }));
      const options = { width: Math.max(240, slot.clientWidth), height: isWide ? 340 : 170, smoothing: Number(curvesState.smoothing) };
      const hadFocus = slot.contains(document.activeElement);
      const figure = chart(name, lines, options);
      const toggleWide = () => {
        curvesState.wide[isWide ? "delete" : "add"](name);
        slot.classList.toggle("wide", !isWide);
        fill([slot]);
      };
      figure.addEventListener("dblclick", toggleWide);
      figure.addEventListener("keydown", (event) => event.key === "Enter" && toggleWide());
      slot.replaceChildren(figure);
      if (hadFocus) figure.focus();
    }
  };

  const update = async () => {
    const metrics = await ask("metrics");
    if (metrics.join() !== names.join()) {
      names = metrics;
      draw();
    } else {
      await fill([...metricOfSlot.keys()].filter((slot) => slot.firstChild));
    }
  };
  await update();
  return update;
}

function legend(runs) {
  const items = runs.map((run, i) => make("span", `key run-${i % 8}`, run.name));
  return make("p", "legend", ...items);
}
