// One question over the steps: its trajectories side by side, and how its score went.

import { ask } from "./ask.js";
import { chart } from "./chart.js";
import { choice, labelled, link, make, short } from "./elements.js";
import { placeOf } from "./trajectories.js";

const BOTH_KINDS = [["", "training and validation"], ["train", "training"], ["val", "validation"]];

export async function showQuestion(root, { params, go }) {
  const found = await ask("question", params);
  const kind = choice("kind", BOTH_KINDS, params.kind ?? "");
  kind.addEventListener("change", () => go("question", { ...params, kind: kind.value }));
  const first = found[0];
  const head = make("section", "head", make("p", "quiet", params.uid ?? ""), make("h2", "question", first?.question ?? "No such question"));
  if (first) head.append(make("p", "", "Accepted: ", make("strong", "", first.gold)));
  head.append(make("div", "bar", labelled("Of", kind)));
  const charts = make("div", "grid-of-charts");
  if (found.length > 1) {
    for (const name of ["score", "searches"]) {
      const line = { name, color: 0, ...means(found, name) };
      charts.append(make("div", "place", chart(name, [line], { height: 120 })));
    }
  }
  const cards = make("div", "cards", ...found.map((one) => card(one, params.run)));
  cards.tabIndex = 0;
  cards.setAttribute("role", "group");
  cards.setAttribute("aria-label", "Trajectories by step");
  root.replaceChildren(head, charts, cards);
  return null;
}

/** The mean of a number at each step. */
function means(rows, name) {
  const steps = [...new Set(rows.map((row) => row.step))];
  const values = steps.map((step) => {
    const own = rows.filter((row) => row.step === step && row[name] !== null).map((row) => row[name]);
    return own.length ? own.reduce((a, b) => a + b) / own.length : null;
  });
  return { steps, values };
}

export function card(one, run) {
  const title = link("trajectory", placeOf(one, run), "", `step ${one.step}${one.kind === "val" ? ", validation" : `, sample ${one.sample}`}`);
  const said = make("p", "", "answer ", make("strong", one.is_given ? "right" : "", one.answer ?? "none"), ` · score ${short(one.score)}`);
  const turns = one.segments.filter((part) => part.origin !== "prompt").map((part, i) => {
    const text = make("div", `turn ${part.origin}`, part.text.trim());
    if (i === 0) text.classList.add("first");
    return text;
  });
  return make("article", `card ${one.is_given ? "right" : ""}`, make("h3", "", title), said, ...turns);
}
