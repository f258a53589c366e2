// The page of options: the resolved configuration, and the differences between runs.

import { ask } from "./ask.js";
import { input, labelled, make, plural } from "./elements.js";

export async function showConfig(root, { runs }) {
  const words = input("words", "search", "", "part of a name or value");
  const only = input("only", "checkbox");
  only.checked = runs.length > 1;
  const count = make("p", "quiet");
  const bar = make("form", "bar", labelled("Options", words, "grow"));
  if (runs.length > 1) bar.append(labelled("Only differences", only, "check"));
  bar.addEventListener("submit", (event) => event.preventDefault());
  const head = make("thead", "", make("tr", "", make("th", "", "option"), ...runs.map((run, i) => make("th", `key run-${i % 8}`, run.name))));
  const body = make("tbody");
  const table = make("table", "options", head, body);
  root.replaceChildren(bar, count, make("div", "scroll", table));
  let options = [];
  const draw = () => {
    const parts = words.value.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = options.filter((option) => {
      const text = [option.name, ...option.values].join(" ").toLowerCase();
      return parts.every((part) => text.includes(part)) && (!(only.checked && runs.length > 1) || option.differs);
    });
    count.textContent = options.length
      ? `${plural(shown.length, "option")} of ${options.length}`
      : "No config.yaml: the run has not started, or the file was removed.";
    body.replaceChildren(...shown.map((option) => make("tr", option.differs ? "differs" : "", make("th", "", option.name),
      ...option.values.map((value) => make("td", value === null ? "quiet" : "", value ?? "no such option")))));
  };
  words.addEventListener("input", draw);
  only.addEventListener("change", draw);
  const update = async () => {
    options = await ask("config");
    draw();
  };
  await update();
  return update;
}
