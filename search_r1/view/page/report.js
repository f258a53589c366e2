// The page of a run's report: evaluation, suggestions, curves, cost, examples.

import { ask } from "./ask.js";
import { chart } from "./chart.js";
import { link, make, plural } from "./elements.js";
import { card } from "./question.js";

export async function showReport(root, { runs }) {
  const reports = await ask("report");
  for (const [i, report] of reports.entries()) {
    const curves = await ask("curves", { name: report.curves });
    const charts = report.curves.map((name) => {
      const [steps, values] = curves[name][i];
      return make("div", "chart-slot", chart(name, [{ name: runs[i].name, color: i % 8, steps, values }], { smoothing: steps.length > 20 ? 0.6 : 0 }));
    });
    root.append(
      make("h2", "question", report.title),
      facts(report.facts),
      section("Evaluation", evaluation(report)),
      section("What to try next", make("ul", "", ...report.advice.map((line) => make("li", "", line)))),
      section("Curves", make("div", "grid-of-charts", ...charts), make("p", "quiet", link("curves", {}, "", "all curves"),
        report.alarms ? ` and ${plural(report.alarms, "alarm")} of the guard` : "")),
      section("Cost", facts(report.cost)),
      section("Before and after", ...examples(report, i)),
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

function evaluation(report) {
  if (!report.rows.length) return make("p", "quiet", "There was no validation (trainer.test_freq); search-r1 evaluate measures the model.");
  const head = make("tr", "", ...report.heads.map((name, i) => make("th", isNumber(i) ? "number" : "", name)));
  const rows = report.rows.map((row) => make("tr", "", ...row.map((cell, i) => make("td", isNumber(i) ? "number" : "", cell))));
  const table = make("table", "", make("thead", "", head), make("tbody", "", ...rows));
  return make("div", "", make("div", "scroll", table), make("p", "quiet", "Answers of the validation; in brackets: 95 % intervals from resampling the questions."));
}

function examples(report, run) {
  if (!report.examples.length) return [make("p", "quiet", "No validation recorded its dialogues.")];
  return report.examples.flatMap((example) => [
    make("h3", "", example.question),
    make("p", "", "Accepted: ", make("strong", "", example.accepted)),
    make("div", "cards pair", ...[example.before, example.after].filter(Boolean).map((row) => card(row, run))),
  ]);
}
