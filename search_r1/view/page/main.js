// The frame: which page is shown, which run, what is new, the keys.

import { ask, hasReport, isExport, Refused, useToken } from "./ask.js";
import { showConfig } from "./config.js";
import { showCurves } from "./curves.js";
import { address, link, make, plural } from "./elements.js";
import { showQuestion } from "./question.js";
import { showReport } from "./report.js";
import { showTrajectories } from "./trajectories.js";
import { showTrajectory } from "./trajectory.js";

const PAGES = { curves: showCurves, trajectories: showTrajectories, config: showConfig, trajectory: showTrajectory, question: showQuestion, report: showReport };
const TABS = [...(hasReport ? [["report", "Report"]] : []), ["curves", "Curves"], ["trajectories", "Trajectories"], ["config", "Configuration"]];
const EVERY_MS = 3000;
const at = (id) => document.getElementById(id);

let runs = [];
let update = null; // of the page that is shown: brings it up to date
let shown = "";
let turn = 0; // grows with each page that is asked for: an answer that comes too late is left

function here() {
  const [, page, query] = location.hash.match(/^#\/([a-z]*)\??(.*)$/) ?? [];
  return { page: Object.hasOwn(PAGES, page) ? page : TABS[0][0], params: Object.fromEntries(new URLSearchParams(query ?? "")) };
}

/** Go to a page; with `inPlace` the same page goes on, with other parameters. */
function go(page, params, inPlace = false) {
  const where = address(page, params);
  if (!inPlace || !update) {
    location.hash = where;
    return;
  }
  history.replaceState(null, "", where);
  shown = location.hash;
  attempt(() => update({ params }));
}

async function show() {
  const mine = ++turn;
  const { page, params } = here();
  shown = location.hash;
  const number = Number(params.run ?? 0);
  at("run").value = String(number);
  at("run-field").hidden = runs.length < 2 || ["curves", "config", "report"].includes(page);
  at("tabs").replaceChildren(...TABS.map(([name, words]) => {
    const tab = link(name, name === "trajectories" && number ? { run: number } : {}, "", words);
    if (name === page || (name === "trajectories" && ["trajectory", "question"].includes(page))) tab.setAttribute("aria-current", "page");
    return tab;
  }));
  update = null;
  await attempt(async () => {
    const root = make("div", `page-${page}`);
    at("main").replaceChildren(root);
    const made = await PAGES[page](root, { runs, params, go });
    if (mine === turn) update = made;
  });
}

/** Do it; what goes wrong is said above the page. */
async function attempt(work) {
  try {
    await work();
    at("problem").hidden = true;
  } catch (error) {
    at("access").hidden = !(error instanceof Refused);
    if (error instanceof Refused) {
      at("token").focus();
      state("asked", "a token is needed");
      return;
    }
    at("problem").textContent = error.message;
    at("problem").hidden = false;
    if (!(error instanceof Error) || error.name !== "Error") console.error(error);
  }
}

async function look() {
  try {
    const before = runs.map((run) => run.version).join();
    runs = await ask("runs");
    state("ready", runs.map(inWords).join(" · "));
    at("access").hidden = true;
    if (before === runs.map((run) => run.version).join()) return;
    if (!before) {
      at("run").replaceChildren(...runs.map((run, i) => Object.assign(make("option", "", run.name), { value: String(i) })));
      await show();
    } else if (update) await attempt(() => update({ runs }));
  } catch (error) {
    if (error instanceof Refused) await attempt(() => { throw error; });
    else state("away", error.message);
  }
}

function inWords(run) {
  const parts = [runs.length > 1 ? run.name : "", run.last_step === null ? "no step yet" : `step ${run.last_step}`,
    plural(run.trajectories.count, "trajectory", "trajectories")];
  if (run.trajectories.pending) parts.push(`reading ${plural(run.trajectories.pending, "file")}`);
  return parts.filter(Boolean).join(", ");
}

function state(name, words) {
  at("state").dataset.state = name;
  at("state").textContent = isExport ? `exported · ${words}` : words;
}

function keys(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input:not([type=checkbox]), select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const tab = TABS[Number(event.key) - 1];
  if (tab) location.hash = address(tab[0]);
  else if (event.key === "/") document.querySelector("main input[type=search]")?.focus();
  else if ("[]".includes(event.key)) [...document.querySelectorAll("main [data-key]")].find((one) => one.dataset.key === event.key && one.href)?.click();
  else return;
  event.preventDefault();
}

addEventListener("hashchange", () => location.hash !== shown && show());
addEventListener("keydown", keys);
at("run").addEventListener("change", () => {
  const { page } = here();
  location.hash = address(page === "trajectories" ? page : "trajectories", { run: at("run").value });
});
at("access").addEventListener("submit", (event) => {
  event.preventDefault();
  useToken(at("token").value);
  look();
});
look();
if (!isExport) setInterval(() => document.hidden || look(), EVERY_MS);
