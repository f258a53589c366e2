// Charts as SVG: one for each metric, with a line for each run.

import { makeSvg, make, short } from "./elements.js";
import { say } from "./language.js";

const MARGIN = { left: 46, right: 10, top: 8, bottom: 22 };

/** Return about `count` round numbers from `low` to `high`. */
export function ticks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= 0.8 * rough) ?? rough;
  const values = [];
  for (let i = Math.ceil(low / size); i * size <= high + size * 1e-9; i++) values.push(i * size);
  return values;
}

/** Return the exponential moving average of the values; `weight` is that of the past. */
export function smoothed(values, weight) {
  let mean = null;
  return values.map((value) => {
    if (value === null) return null;
    mean = mean === null ? value : weight * mean + (1 - weight) * value;
    return mean;
  });
}

/** Return the least and the greatest value; equal values get room, and an axis of values then has zero. */
function range(values, isWhole) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value === null) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (low > high) return [0, 1];
  if (low === high) return isWhole ? [low - 1, high + 1] : low >= 0 && low <= 1 ? [0, 1] : [Math.min(low, 0), Math.max(high, 0)];
  return [low, high];
}

/**
 * Return a figure of `lines`: {name, color, steps, values}, where a null value is a gap. The arrow
 * keys move along the steps.
 */
export function chart(title, lines, { width = 340, height = 170, smoothing = 0 } = {}) {
  const figure = make("figure", "chart");
  const readout = make("output", "readout");
  const caption = make("figcaption", "", make("span", "name", title), readout);
  const known = lines.flatMap((line) => line.steps.filter((_, i) => line.values[i] !== null));
  const [x0, x1] = range(known, true);
  const [y0, y1] = range(lines.flatMap((line) => line.values), false);
  const x = (step) => MARGIN.left + ((step - x0) / (x1 - x0)) * (width - MARGIN.left - MARGIN.right);
  const y = (value) => height - MARGIN.bottom - ((value - y0) / (y1 - y0)) * (height - MARGIN.top - MARGIN.bottom);
  const svg = makeSvg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": summary(title, lines) });
  for (const value of known.length ? ticks(y0, y1, 4) : []) {
    svg.append(
      makeSvg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value) }),
      makeSvg("text", { class: "tick", x: MARGIN.left - 6, y: y(value) + 3.5, "text-anchor": "end" }, short(value)),
    );
  }
  if (!known.length) svg.append(makeSvg("text", { class: "tick", x: width / 2, y: height / 2, "text-anchor": "middle" }, say("No values.")));
  const isOne = new Set(known).size === 1; // then its step alone is on the axis
  for (const step of isOne ? known.slice(0, 1) : !known.length ? [] : ticks(x0, x1, width / 60).filter(Number.isInteger)) {
    svg.append(makeSvg("text", { class: "tick", x: x(step), y: height - 6, "text-anchor": "middle" }, short(step)));
  }
  for (const line of lines) {
    const isSmooth = smoothing > 0 && line.values.length > 2;
    svg.append(...drawLine(line, line.values, isSmooth ? "faint" : "", x, y));
    if (isSmooth) svg.append(...drawLine(line, smoothed(line.values, smoothing), "", x, y));
  }
  const cursor = makeSvg("line", { class: "cursor", y1: MARGIN.top, y2: height - MARGIN.bottom, visibility: "hidden" });
  svg.append(cursor);
  const steps = [...new Set(lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
  const last = steps.length - 1;
  let current = last;
  const select = (index) => {
    current = Math.max(0, Math.min(last, index));
    const step = steps[current];
    cursor.setAttribute("x1", x(step));
    cursor.setAttribute("x2", x(step));
    cursor.setAttribute("visibility", "visible");
    showValues(readout, lines, step);
  };
  const leave = () => {
    current = last;
    cursor.setAttribute("visibility", "hidden");
    showValues(readout, lines, null);
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const target = x0 + (((event.clientX - box.left) / box.width) * width - MARGIN.left) / (width - MARGIN.left - MARGIN.right) * (x1 - x0);
    let nearest = 0;
    steps.forEach((step, i) => { if (Math.abs(step - target) < Math.abs(steps[nearest] - target)) nearest = i; });
    if (steps.length) select(nearest);
  });
  svg.addEventListener("pointerleave", leave);
  figure.addEventListener("blur", leave);
  figure.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (move === undefined || !steps.length) return;
    event.preventDefault();
    select(current + move);
  });
  figure.tabIndex = 0;
  figure.append(caption, svg);
  leave();
  return figure;
}

/** Return the pieces of a line, which is cut where a value is missing; single points are dots. */
function drawLine(line, values, className, x, y) {
  const pieces = [[]];
  values.forEach((value, i) => (value === null ? pieces.push([]) : pieces.at(-1).push([x(line.steps[i]), y(value)])));
  return pieces.filter((piece) => piece.length).map((piece) =>
    piece.length === 1
      ? makeSvg("circle", { class: `dot run-${line.color} ${className}`, cx: piece[0][0], cy: piece[0][1], r: 3 })
      : makeSvg("polyline", { class: `line run-${line.color} ${className}`, points: piece.map(([a, b]) => `${a.toFixed(1)},${b.toFixed(1)}`).join(" ") }),
  );
}

/** Show each line's value at a step, or its last value if `step` is null. */
function showValues(readout, lines, step) {
  const parts = lines.filter((line) => line.steps.length).map((line) => {
    const index = step === null ? line.steps.length - 1 : line.steps.indexOf(step);
    const text = index < 0 ? "–" : short(line.values[index]);
    return make("span", `value run-${line.color}`, text);
  });
  readout.replaceChildren(...(step === null ? [] : [make("span", "step", say("step {step}", { step }))]), ...parts);
}

function summary(title, lines) {
  return `${title}: ` + lines.filter((line) => line.values.length)
    .map((line) => `${line.name} from ${short(line.values[0])} to ${short(line.values.at(-1))}`).join("; ");
}
