// The page of a run's own report: what it learned, examples, cost, what to try next.

import { ask } from "./ask.js";
import { chart } from "./chart.js";
import { link, make, plural } from "./elements.js";
import { card } from "./question.js";

export async function showReport(root, { runs }) {
  const reports = await ask("report");
  for (const [i, one] of reports.entries()) {
    const found = await ask("curves", { name: one.curves });
    const charts = one.curves.map((name) => {
      const [steps, values] = found[name][i];
      return make("div", "place", chart(name, [{ name: runs[i].name, color: i % 8, steps, values }], { share: steps.length > 20 ? 0.6 : 0 }));
    });
    root.append(
      make("h2", "question", one.title),
      facts(one.facts),
      section("Evaluation", evaluation(one)),
      section("What to try next", make("ul", "", ...one.advice.map((line) => make("li", "", line)))),
      section("Curves", make("div", "grid-of-charts", ...charts), make("p", "quiet", link("curves", {}, "", "all curves"),
        one.alarms ? ` and ${plural(one.alarms, "alarm")} of the guard` : "")),
      section("Cost", facts(one.cost)),
      section("Before and after", ...examples(one, i)),
    );
  }
  return null;
}

function section(title, ...children) {
  return make("section", "", make("h2", "", title), ...children);
}

function facts(pairs) {
  return make("dl", "facts", ...pairs.flatMap(([name, value]) => [make("dt", "", name), make("dd", "", value)]));
}

const isNumber = (column) => column === 1 || column > 2;

function evaluation(one) {
  if (!one.rows.length) return make("p", "quiet", "There was no validation (trainer.test_freq); search-r1 evaluate measures the model.");
  const head = make("tr", "", ...one.heads.map((name, i) => make("th", isNumber(i) ? "number" : "", name)));
  const rows = one.rows.map((row) => make("tr", "", ...row.map((cell, i) => make("td", isNumber(i) ? "number" : "", cell))));
  const table = make("table", "", make("thead", "", head), make("tbody", "", ...rows));
  return make("div", "", make("div", "scroll", table), make("p", "quiet", "Answers of the validation; in brackets 95 % intervals, by resampling questions."));
}

function examples(one, run) {
  if (!one.examples.length) return [make("p", "quiet", "No validation kept its dialogues.")];
  return one.examples.flatMap((example) => [
    make("h3", "", example.question),
    make("p", "", "Accepted: ", make("strong", "", example.accepted)),
    make("div", "cards pair", ...[example.before, example.after].filter(Boolean).map((row) => card(row, run))),
  ]);
}
