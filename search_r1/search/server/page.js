// The search page: asks /retrieve, shows passages, scores and where the time went.
// Whatever a server or a passage says is put in as text, never as HTML.

const STAGES = ["queue", "encode", "search", "documents", "rerank"];
const STOP_WORDS = new Set(
  "a an and are as at be by did do does for from has have how in is it its of on or that the this to was were what when where which who whom whose why will with".split(" "),
);
const LONG_TEXT = 1200;
const PATIENCE_MS = 120_000;

const at = (id) => document.getElementById(id);
let token = ""; // in memory only
let running = null; // the AbortController of the search under way

// ---- elements ----------------------------------------------------------------------------------

/** An element with a class and children; strings become text nodes. */
function make(tag, className = "", ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

/** `text` as nodes, with the words of `query` marked. */
function highlighted(text, query) {
  const words = [...new Set(query.toLowerCase().match(/[\p{L}\p{N}]{2,}/gu) ?? [])]
    .filter((word) => !STOP_WORDS.has(word))
    .sort((a, b) => b.length - a.length);
  if (!words.length) return [text];
  const pattern = new RegExp(`(?<![\\p{L}\\p{N}])(${words.join("|")})(?![\\p{L}\\p{N}])`, "giu");
  return text.split(pattern).map((part, i) => (i % 2 ? make("mark", "", part) : part));
}

const milliseconds = (ms) => `${ms < 10 ? ms.toFixed(2) : ms < 100 ? ms.toFixed(1) : Math.round(ms)} ms`;
const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
const scoreText = (score) => (Number.isFinite(score) ? score.toFixed(Math.abs(score) < 100 ? 4 : 2) : String(score));

// ---- what the server says ----------------------------------------------------------------------

/** A failure to show: a headline and details, both plain text. */
class Problem extends Error {
  constructor(headline, details = [], needsToken = false) {
    super(headline);
    Object.assign(this, { details, needsToken });
  }
}

/** The JSON answer and its headers; network failures and error statuses become a Problem. */
async function ask(path, options = {}) {
  const headers = { ...options.headers, ...(token && { Authorization: `Bearer ${token}` }) };
  let answer, text;
  try {
    answer = await fetch(path, { ...options, headers, cache: "no-store" });
    text = await answer.text();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    if (error.name === "TimeoutError") throw new Problem("The server took too long.", [`No answer within ${PATIENCE_MS / 1000} s.`]);
    throw new Problem("The server cannot be reached.", ["Is it still running, and this machine online?"]);
  }
  if (!answer.ok) throw problemOf(answer, text);
  try {
    return { body: JSON.parse(text), headers: answer.headers };
  } catch {
    throw new Problem("The answer is not a retriever's.", [text.slice(0, 200)]);
  }
}

/** An error answer in words. */
function problemOf(answer, text) {
  const said = details(text.slice(0, 2000));
  const wait = answer.headers.get("Retry-After");
  switch (answer.status) {
    case 401:
    case 403:
      return new Problem(token ? "The server does not accept this token." : "The server asks for an access token.", [], true);
    case 413:
      return new Problem("The question is too large for this server.", said);
    case 400:
    case 422:
      return new Problem("The server does not accept this question.", said);
    case 424:
      return new Problem("The server has no record of this question.", said);
    case 429:
    case 503:
      return new Problem(`The server is busy or not ready; try again ${wait ? `in ${wait} s` : "soon"}.`, said);
    case 504:
      return new Problem("The search took too long.", said);
    default:
      return new Problem(`The search failed (status ${answer.status}).`, said);
  }
}

/** What an error body says: FastAPI's `detail`, a text or a list. */
function details(text) {
  try {
    const { detail } = JSON.parse(text);
    if (Array.isArray(detail)) {
      return detail.map((one) => `${(one.loc ?? []).filter((part) => part !== "body").join(" ")}: ${one.msg}`.replace(/^: /, ""));
    }
    return detail === undefined ? [] : [typeof detail === "string" ? detail : JSON.stringify(detail)];
  } catch {
    return text && !text.trimStart().startsWith("<") ? [text] : [];
  }
}

/** The `Server-Timing` header as {durations: {stage: ms}, isCached}. */
function readTimings(header) {
  const durations = {};
  let isCached = false;
  for (const entry of (header ?? "").split(",")) {
    const [name, ...parameters] = entry.split(";").map((part) => part.trim());
    const values = Object.fromEntries(parameters.map((p) => p.split("=").map((s) => s.replaceAll('"', ""))));
    if (name === "cache") isCached = values.desc === "hit";
    else if (Number.isFinite(parseFloat(values.dur))) durations[name] = parseFloat(values.dur);
  }
  return { durations, isCached };
}

// ---- what is shown -----------------------------------------------------------------------------

function showProblem(problem) {
  at("problem").replaceChildren(make("strong", "", problem.message));
  const lines = problem.details.filter(Boolean).map((line) => make("li", "", line));
  if (lines.length) at("problem").append(make("ul", "", ...lines));
  at("problem").hidden = problem.needsToken && !token;
  if (problem.needsToken) {
    at("access").hidden = false;
    at("token").select();
    at("token").focus();
  }
}

function clear() {
  at("timings").hidden = true;
  at("summary").textContent = "";
  at("results").replaceChildren();
}

function showTimings({ durations, isCached }, roundTrip) {
  const total = durations.total;
  const parts = STAGES.filter((name) => name in durations).map((name) => [name, durations[name]]);
  const others = Object.keys(durations).filter((name) => name !== "total" && !STAGES.includes(name));
  parts.push(...others.map((name) => [name, durations[name]]));
  if (total !== undefined) parts.push(["network", Math.max(0, roundTrip - total)]);
  const bar = parts.map(([name, ms]) => {
    const span = make("span", name);
    span.style.flexGrow = String(ms);
    return span;
  });
  at("bar").replaceChildren(...bar);
  const entry = (name, ms, kind) => {
    const row = make("div", kind, make("dt", "", name), make("dd", "", milliseconds(ms)));
    row.dataset.stage = name;
    return row;
  };
  const rows = parts.map(([name, ms]) => entry(name, ms, name));
  if (total !== undefined) rows.push(entry("total", total, "plain"));
  rows.push(entry("round trip", roundTrip, "plain"));
  if (isCached) rows.push(make("div", "plain", make("dt", "", "cache"), make("dd", "badge", "hit")));
  at("stages").replaceChildren(...rows);
  at("timings").hidden = false;
}

function passage({ document: found, score }, rank, query) {
  const title = found.title
    ? make("h2", "", ...highlighted(found.title, query))
    : make("h2", "untitled", "untitled");
  const shown = make("span", "score", make("small", "", "score "), scoreText(score));
  const text = make("p", "text", ...highlighted(found.text ?? found.contents ?? "", query));
  const item = make("li", "passage");
  item.append(make("header", "", make("span", "rank", `${rank}.`), title, shown), text);
  if (text.textContent.length > LONG_TEXT) item.append(expander(text));
  item.append(make("p", "id", "id ", make("code", "", String(found.id))));
  return item;
}

/** A button that shows a long text in full. */
function expander(text) {
  const button = make("button", "more", "Show all");
  button.type = "button";
  button.setAttribute("aria-expanded", "false");
  text.classList.add("cut");
  button.addEventListener("click", () => {
    const isCut = text.classList.toggle("cut");
    button.textContent = isCut ? "Show all" : "Show less";
    button.setAttribute("aria-expanded", String(!isCut));
  });
  return button;
}

/** Nested facts as rows `corpus · num_documents`, `3855`. */
function* flat(facts, path = []) {
  for (const [name, value] of Object.entries(facts)) {
    if (value !== null && typeof value === "object" && !Array.isArray(value)) yield* flat(value, [...path, name]);
    else yield [[...path, name].join(" · "), Array.isArray(value) ? value.join(", ") : String(value)];
  }
}

// ---- actions -----------------------------------------------------------------------------------

async function showServer() {
  try {
    const facts = (await ask("info")).body;
    const health = (await ask("health")).body;
    const count = health.num_documents ? ` · ${plural(health.num_documents, "passage")}` : "";
    at("server").textContent = `${facts.retriever ?? health.retriever}${count}`;
    at("server").dataset.state = "ready";
    if (facts.default_topk) at("topk").placeholder = String(facts.default_topk);
    const rows = [...flat(facts)].flatMap(([name, value]) => [make("dt", "", name), make("dd", "", value)]);
    at("facts").replaceChildren(...rows);
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    at("server").textContent = error.needsToken ? "needs a token" : "not reachable";
    at("server").dataset.state = "away";
    if (error.needsToken) showProblem(error);
  }
}

/** Search for what the form says and show it; a search under way is given up. */
async function search() {
  const query = at("query").value;
  running?.abort();
  at("problem").hidden = true;
  document.title = query ? `${query} · Search-R1 retriever` : "Search-R1 retriever";
  if (!query.trim()) return clear();
  const mine = (running = new AbortController());
  setBusy(true);
  try {
    await retrieve(query, mine.signal);
  } catch (error) {
    if (error.name === "AbortError") return;
    clear();
    showProblem(error instanceof Problem ? error : new Problem("The answer is not a retriever's.", [String(error)]));
  } finally {
    if (running === mine) setBusy(false);
  }
}

async function retrieve(query, signal) {
  const topk = at("topk").valueAsNumber;
  const body = { queries: [query], topk: Number.isNaN(topk) ? null : topk, return_scores: true };
  const start = performance.now();
  const answer = await ask("retrieve", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal: AbortSignal.any([signal, AbortSignal.timeout(PATIENCE_MS)]),
  });
  const found = answer.body.result[0];
  const roundTrip = performance.now() - start;
  at("results").replaceChildren(...found.map((hit, i) => passage(hit, i + 1, query)));
  showTimings(readTimings(answer.headers.get("Server-Timing")), roundTrip);
  at("summary").textContent = found.length
    ? `${plural(found.length, "passage")} in ${milliseconds(roundTrip)}`
    : "No passage fits this question.";
  at("access").hidden = true;
}

function setBusy(isBusy) {
  document.body.classList.toggle("busy", isBusy);
  at("go").setAttribute("aria-busy", String(isBusy));
}

/** The form as an address, `?q=...&topk=...`. */
function address() {
  const parameters = new URLSearchParams({ q: at("query").value });
  if (at("topk").value) parameters.set("topk", at("topk").value);
  return `?${parameters}`;
}

/** The form as the address says; searches at once if there is a question. */
function follow() {
  const parameters = new URLSearchParams(location.search);
  at("query").value = parameters.get("q") ?? "";
  at("topk").value = parameters.get("topk") ?? "";
  return search();
}

at("search").addEventListener("submit", (event) => {
  event.preventDefault();
  if (address() !== location.search) history.pushState(null, "", address());
  search();
});

at("access").addEventListener("submit", (event) => {
  event.preventDefault();
  token = at("token").value.trim();
  at("access").hidden = true;
  showServer();
  search();
});

document.addEventListener("keydown", (event) => {
  const isTyping = event.target.closest?.("input, textarea");
  if (event.key === "/" && !isTyping && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    at("query").select();
    at("query").focus();
  }
});

addEventListener("popstate", follow);
showServer();
follow();
