// One question over the steps: its trajectories side by side, and its score and searches by step.

import { ask } from "./ask.js";
import { chart } from "./chart.js";
import { choice, labelled, link, make, say, short } from "./texts.js";
import { keyOf } from "./trajectories.js";

const BOTH_KINDS = [["", "training and validation"], ["train", "training"], ["val", "validation"]];

export async function showQuestion(root, { params, go }) {
  const rows = await ask("question", params);
  const kind = choice("kind", BOTH_KINDS, params.kind ?? "");
  kind.addEventListener("change", () => go("question", { ...params, kind: kind.value }));
  const first = rows[0];
  const head = make("section", "head", make("p", "quiet", params.uid ?? ""), make("h2", "question", first?.question ?? say("No such question")));
  if (first) head.append(make("p", "", say("Accepted: "), make("strong", "", first.gold)));
  head.append(make("div", "bar", labelled("Kind", kind)));
  const charts = make("div", "grid-of-charts");
  if (rows.length > 1) {
    for (const name of ["score", "searches"]) {
      const line = { name, color: 0, ...means(rows, name) };
      charts.append(make("div", "chart-slot", chart(name, [line], { height: 120 })));
    }
  }
  const cards = make("div", "cards", ...rows.map((row) => card(row, params.run)));
  cards.tabIndex = 0;
  cards.setAttribute("role", "group");
  cards.setAttribute("aria-label", say("Trajectories by step"));
  root.replaceChildren(head, charts, cards);
  return null;
}

/** Return the mean of a column at each step. */
function means(rows, name) {
  const steps = [...new Set(rows.map((row) => row.step))];
  const values = steps.map((step) => {
    const known = rows.filter((row) => row.step === step && row[name] !== null).map((row) => row[name]);
    return known.length ? known.reduce((a, b) => a + b) / known.length : null;
  });
  return { steps, values };
}

function card(row, run) {
  const title = link("trajectory", keyOf(row, run), "", `${say("step {step}", { step: row.step })}, ${row.kind === "val" ? say("validation") : say("sample {sample}", { sample: row.sample })}`);
  const answer = make("p", "", say("answer "), make("strong", row.is_given ? "right" : "", row.answer ?? say("none")), ` · ${say("score")} ${short(row.score)}`);
  const turns = row.segments.filter((segment) => segment.origin !== "prompt").map((segment, i) => {
    const text = make("div", `turn ${segment.origin}`, segment.text.trim());
    if (i === 0) text.classList.add("first");
    return text;
  });
  return make("article", `card ${row.is_given ? "right" : ""}`, make("h3", "", title), answer, ...turns);
}
