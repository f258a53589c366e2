// The page of trajectories: filters, and a table in pages.

import { ask } from "./ask.js";
import { address, choice, input, labelled, link, make, outcome, plural, say, short } from "./texts.js";

const ORDERS = [["", "newest step"], ["oldest", "oldest step"], ["score_low", "lowest score"], ["score_high", "highest score"],
  ["searches_most", "most searches"], ["log_prob_low", "least expected tokens"]];
const OUTCOMES = [["", "any"], ["given", "right"], ["missed", "wrong: found, not used"], ["no_search", "wrong: no search"],
  ["one_search", "wrong: one search, not found"], ["not_found", "wrong: several searches, not found"], ["known", "right, not in documents"]];
const FOLDED = ["outcome", "kind", "status", "source", "order", ...["step", "score", "searches"].flatMap((name) => [`${name}_from`, `${name}_to`])];
const KINDS = { train: "training", val: "validation" };
const DEBOUNCE_MS = 200;
let listed = []; // the rows shown last, through which the keys [ and ] move on a trajectory's page

/** Return the address of the previous (-1) or next (1) trajectory in the list; null at its ends. */
export function neighbour(params, offset) {
  const index = listed.findIndex((row) => row.kind === params.kind && row.step === Number(params.step) && row.line === Number(params.line));
  const row = index < 0 ? undefined : listed[index + offset];
  return row ? address("trajectory", keyOf(row, params.run)) : null;
}

export function keyOf(row, run) {
  return { run, kind: row.kind, step: row.step, line: row.line };
}

export async function showTrajectories(root, { runs, params, go }) {
  const number = Number(params.run ?? 0);
  let run = runs[number] ?? runs[0];
  const choices = (name) => [["", "any"], ...run.trajectories[name].map((value) => [value, KINDS[value] ?? value.replaceAll("_", " ")])];
  const rangeFields = (name, label, step) => {
    const [low, high] = ["from", "to"].map((end) => {
      const field = input(`${name}_${end}`, "number", params[`${name}_${end}`] ?? "", say(end));
      field.step = step;
      field.setAttribute("aria-label", `${label} ${say(end)}`);
      return field;
    });
    return make("fieldset", "range", make("legend", "", say(label)), low, high);
  };
  const others = make("details", "more-filters", make("summary", "", say("Filters")), make("div", "bar",
    labelled("Answer", choice("outcome", OUTCOMES, params.outcome ?? "")),
    labelled("Kind", choice("kind", choices("kind"), params.kind ?? "")),
    labelled("Status", choice("status", choices("status"), params.status ?? "")),
    labelled("Source", choice("source", choices("source"), params.source ?? "")),
    rangeFields("step", "Step", 1), rangeFields("score", "Score", "any"), rangeFields("searches", "Searches", 1),
    labelled("Order", choice("order", ORDERS, params.order ?? ""))));
  others.open = matchMedia("(min-width: 56rem)").matches || FOLDED.some((name) => params[name]);
  const form = make("form", "bar filters",
    labelled("Words in question, queries or answer", input("words", "search", params.words ?? ""), "grow"), others);
  const chips = make("p", "chips");
  for (const name of ["uid", "group"]) {
    if (params[name]) chips.append(link("trajectories", { ...params, [name]: "", page: "" }, "chip", `${name} ${params[name]} ✕`));
  }
  const count = make("p", "quiet count");
  count.setAttribute("role", "status");
  const table = make("div", "scroll");
  const pager = make("nav", "pager");
  pager.setAttribute("aria-label", say("Pages of trajectories"));
  root.replaceChildren(form, chips, count, table, pager);

  let timer;
  const applyFilters = () => {
    clearTimeout(timer);
    const filters = Object.fromEntries([...new FormData(form)].filter(([, value]) => value !== ""));
    const fixed = Object.fromEntries(["run", "uid", "group"].filter((name) => params[name]).map((name) => [name, params[name]]));
    go("trajectories", { ...fixed, ...filters }, true);
  };
  form.addEventListener("submit", (event) => { event.preventDefault(); applyFilters(); });
  form.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(applyFilters, DEBOUNCE_MS); });

  let current = { ...params };
  const update = async (changed = {}) => {
    current = changed.params ? { ...changed.params } : current;
    if (changed.runs) {
      run = changed.runs[number] ?? run;
      for (const name of ["kind", "status", "source"]) {
        const field = form.elements[name];
        if (field.length !== choices(name).length) field.replaceWith(choice(name, choices(name), field.value));
      }
    }
    const { rows, count: total, page, pages } = await ask("trajectories", current);
    listed = rows;
    count.replaceChildren(countText(total, page, rows.length, run));
    table.replaceChildren(rows.length ? tableOf(rows, current) : make("p", "notice", emptyText(run)));
    pager.replaceChildren(...(pages > 1 ? pageLinks(page, pages, current) : []));
  };
  await update();
  return update;
}

function countText(total, page, shown, run) {
  const first = (page - 1) * 50;
  const parts = [total ? say("{first}–{last} of {all}", { first: (first + 1).toLocaleString("en"), last: (first + shown).toLocaleString("en"), all: plural(total, "trajectory", "trajectories") }) : say("none")];
  if (run.trajectories.pending) parts.push(say("{files} still to be read", { files: plural(run.trajectories.pending, "file") }));
  if (run.trajectories.bad) parts.push(say("{lines} could not be read", { lines: plural(run.trajectories.bad, "line") }));
  return parts.join(" · ");
}

function emptyText(run) {
  if (run.trajectories.count) return say("No trajectory matches these filters.");
  return run.rollouts === null
    ? say("This run does not record its training trajectories (trainer.rollout_data_dir=FOLDER does). The first validation will appear here.")
    : say("No trajectories yet.");
}

function tableOf(rows, params) {
  const names = ["step", "question", "answer", "outcome", "score", "searches", "tokens", "log-prob", "status"];
  const numbers = new Set(["step", "score", "searches", "tokens", "log-prob"]);
  const head = make("tr", "", ...names.map((name) => make("th", numbers.has(name) ? "number" : "", say(name))));
  return make("table", "list", make("thead", "", head), make("tbody", "", ...rows.map((row) => {
    const question = link("trajectory", keyOf(row, params.run), "question", row.question || say("(no question)"));
    const answer = make("td", `answer ${row.is_given ? "right" : ""}`, row.answer ?? "–");
    answer.title = say("accepted: {gold}", { gold: row.gold });
    const cell = (name, kind, ...parts) => {
      const made = make("td", kind, ...parts);
      made.dataset.name = say(name); // where the columns have no heads
      return made;
    };
    return make("tr", "",
      cell("step", "number", String(row.step), row.kind === "val" ? make("span", "badge", say("val")) : ""),
      make("td", "wide", question, make("span", "queries", row.queries.replaceAll("\n", " › "))),
      answer, make("td", `outcome ${row.is_given ? "right" : row.is_found ? "missed" : ""}`, outcome(row)),
      ...["score", "searches", "tokens", "log-prob"].map((name) => cell(name, "number", short(row[name.replace("-", "_")]))),
      make("td", "quiet", say(row.status.replaceAll("_", " "))));
  })));
}

function pageLinks(page, pages, params) {
  const linkTo = (number, word, key) => {
    const text = say(word);
    const element = number < 1 || number > pages ? make("span", "quiet", text) : link("trajectories", { ...params, page: number }, "button", text);
    if (key) element.dataset.key = key;
    return element;
  };
  return [linkTo(page > 1 ? 1 : 0, "first"), linkTo(page - 1, "previous", "["), make("span", "", `${page} / ${pages}`),
    linkTo(page + 1, "next", "]"), linkTo(page < pages ? pages : 0, "last")];
}
