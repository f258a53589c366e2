// The frame around the pages: navigation, choice of the run, polling, keyboard shortcuts.

import { ask, Unauthorized, useToken } from "./ask.js";
import { showCurves } from "./curves.js";
import { speak } from "./language.js";
import { showQuestion } from "./question.js";
import { address, CHINESE, link, make, plural, say } from "./texts.js";
import { showTrajectories } from "./trajectories.js";
import { showTrajectory } from "./trajectory.js";

const PAGES = { curves: showCurves, trajectories: showTrajectories, trajectory: showTrajectory, question: showQuestion };
const TABS = [["curves", "Curves"], ["trajectories", "Trajectories"]];
const POLL_MS = 3000;
const byId = (id) => document.getElementById(id);

let runs = [];
let update = null; // updates the current page; null for a page that does not change
let shown = "";
let latest = 0; // number of the latest page request; results of earlier ones are ignored

function currentPage() {
  const [, page, query] = location.hash.match(/^#\/([a-z]*)\??(.*)$/) ?? [];
  return { page: Object.hasOwn(PAGES, page) ? page : TABS[0][0], params: Object.fromEntries(new URLSearchParams(query ?? "")) };
}

/** Go to a page; with `inPlace`, update the current page with other parameters instead. */
function go(page, params, inPlace = false) {
  const target = address(page, params);
  if (!inPlace || !update) {
    location.hash = target;
    return;
  }
  history.replaceState(null, "", target);
  shown = location.hash;
  attempt(() => update({ params }));
}

async function show() {
  const serial = ++latest;
  const { page, params } = currentPage();
  shown = location.hash;
  const number = Number(params.run ?? 0);
  byId("run").value = String(number);
  byId("run-field").hidden = runs.length < 2 || page === "curves";
  byId("tabs").replaceChildren(...TABS.map(([name, text]) => {
    const tab = link(name, name === "trajectories" && number ? { run: number } : {}, "", say(text));
    if (name === page || (name === "trajectories" && ["trajectory", "question"].includes(page))) tab.setAttribute("aria-current", "page");
    return tab;
  }));
  update = null;
  await attempt(async () => {
    const root = make("div", `page-${page}`);
    byId("main").replaceChildren(root);
    const updatePage = await PAGES[page](root, { runs, params, go });
    if (serial === latest) update = updatePage;
  });
}

/** Run `work` and show its error, if any, above the page. */
async function attempt(work) {
  try {
    await work();
    byId("problem").hidden = true;
  } catch (error) {
    byId("access").hidden = !(error instanceof Unauthorized);
    if (error instanceof Unauthorized) {
      byId("token").focus();
      setState("unauthorized", say("token required"));
      return;
    }
    byId("problem").textContent = error.message;
    byId("problem").hidden = false;
    if (!(error instanceof Error) || error.name !== "Error") console.error(error);
  }
}

async function poll() {
  try {
    const before = runs.map((run) => run.version).join();
    runs = await ask("runs");
    setState("ready", runs.map(describe).join(" · "));
    byId("access").hidden = true;
    if (before === runs.map((run) => run.version).join()) return;
    if (!before) {
      byId("run").replaceChildren(...runs.map((run, i) => Object.assign(make("option", "", run.name), { value: String(i) })));
      await show();
    } else if (update) await attempt(() => update({ runs }));
  } catch (error) {
    if (error instanceof Unauthorized) await attempt(() => { throw error; });
    else setState("unavailable", error.message);
  }
}

function describe(run) {
  const parts = [runs.length > 1 ? run.name : "", say(run.last_step === null ? "no step yet" : "step {step}", { step: run.last_step }),
    plural(run.trajectories.count, "trajectory", "trajectories")];
  if (run.trajectories.pending) parts.push(say("reading {files}", { files: plural(run.trajectories.pending, "file") }));
  return parts.filter(Boolean).join(", ");
}

function setState(name, text) {
  byId("state").dataset.state = name;
  byId("state").textContent = text;
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input:not([type=checkbox]), select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const tab = TABS[Number(event.key) - 1];
  if (tab) location.hash = address(tab[0]);
  else if (event.key === "/") document.querySelector("main input[type=search]")?.focus();
  else if ("[]".includes(event.key)) [...document.querySelectorAll("main [data-key]")].find((element) => element.dataset.key === event.key && element.href)?.click();
  else return;
  event.preventDefault();
}

addEventListener("hashchange", () => location.hash !== shown && show());
addEventListener("keydown", onKey);
byId("run").addEventListener("change", () => {
  const { page } = currentPage();
  location.hash = address(page === "trajectories" ? page : "trajectories", { run: byId("run").value });
});
byId("access").addEventListener("submit", (event) => {
  event.preventDefault();
  useToken(byId("token").value);
  poll();
});
speak(CHINESE, byId("language"), () => {
  setState("ready", runs.map(describe).join(" · "));
  show();
});
poll();
setInterval(() => document.hidden || poll(), POLL_MS);
