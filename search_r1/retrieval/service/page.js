// The search page: queries /retrieve and shows passages, scores and timings.
// Text from servers and passages is always inserted as text, never as HTML.

import { counted, say, speak } from "./language.js";

const CHINESE = {
  "Search-R1 retriever": "Search-R1 检索服务", retriever: "检索服务", "Skip to the passages": "跳到段落", "connecting …": "正在连接 …",
  Question: "问题", "Who discovered penicillin?": "谁发现了青霉素？", Passages: "段落", auto: "默认", Search: "搜索",
  "to type a question,": " 输入问题，", "to search": " 搜索", "This server asks for an access token.": "此服务器需要访问令牌。",
  "Access token": "访问令牌", "Use token": "使用令牌",
  "Kept in this tab's memory only; a reload forgets it.": "只保存在本标签页的内存中，刷新后即忘记。", Timings: "用时",
  "Engine, corpus and index": "引擎、语料和索引", info: "信息", health: "状态", metrics: "指标", API: "接口",
  "The server took too long.": "服务器用时过长。", "No answer within {seconds} s.": "{seconds} 秒内没有回答。",
  "The server cannot be reached.": "无法连接服务器。", "Is it still running, and this machine online?": "它还在运行吗？本机联网了吗？",
  "The answer is not a retriever's.": "这不是检索服务的回答。",
  "The server is busy or not ready; try again in {wait} s.": "服务器忙或尚未就绪，请在 {wait} 秒后再试。",
  "The server is busy or not ready; try again soon.": "服务器忙或尚未就绪，请稍后再试。",
  "The server does not accept this token.": "服务器不接受这个令牌。", "The server asks for an access token.": "服务器需要访问令牌。",
  "The server does not accept this question.": "服务器不接受这个问题。", "The question is too large for this server.": "问题太长。",
  "The server or its search service cannot answer this question.": "服务器或它的搜索服务无法回答这个问题。",
  "The search took too long.": "搜索用时过长。", "The search failed (status {status}).": "搜索失败（状态 {status}）。",
  queue: "排队", encode: "编码", search: "搜索", documents: "取文", rerank: "重排", network: "网络", total: "合计", "round trip": "往返",
  cache: "缓存", hit: "命中", untitled: "无标题", "score ": "得分 ", "id ": "编号 ", "Show all": "全部显示", "Show less": "收起",
  passages: "个段落", "needs a token": "需要令牌", "not reachable": "无法连接", "{passages} in {time}": "{passages}，用时 {time}",
  "No passage fits this question.": "没有与这个问题相符的段落。",
};
const STAGES = ["queue", "encode", "search", "documents", "rerank"];
const STOP_WORDS = new Set(
  "a an and are as at be by did do does for from has have how in is it its of on or that the this to was were what when where which who whom whose why will with".split(" "),
);
const UNSPACED = /[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Hangul}\p{Script=Thai}]+/gu;
const LONG_TEXT = 1200;
const TIMEOUT_MS = 120_000;

const at = (id) => document.getElementById(id);
let token = ""; // in memory only
let running = null; // AbortController of the search in progress

// ---- elements ----------------------------------------------------------------------------------

/** Create an element with a class and children; strings become text nodes. */
function make(tag, className = "", ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

/** Return `text` as nodes, with the words of `query` marked. */
function highlighted(text, query) {
  const runs = query.toLowerCase().match(UNSPACED) ?? [];
  const pairs = runs.flatMap((run) => (run.length > 1 ? [...run].slice(1).map((next, i) => [...run][i] + next) : [run]));
  const words = [...new Set(query.toLowerCase().replace(UNSPACED, " ").match(/[\p{L}\p{N}]{2,}/gu) ?? [])]
    .filter((word) => !STOP_WORDS.has(word))
    .sort((a, b) => b.length - a.length)
    .map((word) => `(?<![\\p{L}\\p{N}])${word}(?![\\p{L}\\p{N}])`);
  const patterns = [...words, ...new Set(pairs)]; // of scripts without spaces, pairs of neighbours are marked
  if (!patterns.length) return [text];
  const pattern = new RegExp(`(${patterns.join("|")})`, "giu");
  return text.split(pattern).map((part, i) => (i % 2 ? make("mark", "", part) : part));
}

const milliseconds = (ms) => `${ms < 10 ? ms.toFixed(2) : ms < 100 ? ms.toFixed(1) : Math.round(ms)} ms`;
const scoreText = (score) => (Number.isFinite(score) ? score.toFixed(Math.abs(score) < 100 ? 4 : 2) : String(score));

// ---- requests and errors ------------------------------------------------------------------------

/** A failure to show: a headline and details, both plain text. */
class Problem extends Error {
  constructor(headline, details = [], needsToken = false) {
    super(headline);
    Object.assign(this, { details, needsToken });
  }
}

/** Return the JSON response and its headers; network failures and error statuses become a Problem. */
async function request(path, options = {}) {
  const headers = { ...options.headers, ...(token && { Authorization: `Bearer ${token}` }) };
  let response, text;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
    text = await response.text();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    if (error.name === "TimeoutError") throw new Problem(say("The server took too long."), [say("No answer within {seconds} s.", { seconds: TIMEOUT_MS / 1000 })]);
    throw new Problem(say("The server cannot be reached."), [say("Is it still running, and this machine online?")]);
  }
  if (!response.ok) throw toProblem(response, text);
  try {
    return { body: JSON.parse(text), headers: response.headers };
  } catch {
    throw new Problem(say("The answer is not a retriever's."), [text.slice(0, 200)]);
  }
}

/** Describe an error response for the user. */
function toProblem(response, text) {
  const wait = response.headers.get("Retry-After");
  const busy = `The server is busy or not ready; try again ${wait ? "in {wait} s" : "soon"}.`;
  const noToken = token ? "The server does not accept this token." : "The server asks for an access token.";
  const headlines = {
    400: "The server does not accept this question.",
    401: noToken,
    403: noToken,
    413: "The question is too large for this server.",
    422: "The server does not accept this question.",
    424: "The server or its search service cannot answer this question.",
    429: busy,
    503: busy,
    504: "The search took too long.",
  };
  const headline = say(headlines[response.status] ?? "The search failed (status {status}).", { wait, status: response.status });
  const needsToken = [401, 403].includes(response.status);
  return new Problem(headline, needsToken ? [] : errorDetails(text.slice(0, 2000)), needsToken);
}

/** Return the messages in an error body: FastAPI's `detail`, a string or a list. */
function errorDetails(text) {
  try {
    const { detail } = JSON.parse(text);
    if (Array.isArray(detail)) {
      return detail.map((item) => `${(item.loc ?? []).filter((part) => part !== "body").join(" ")}: ${item.msg}`.replace(/^: /, ""));
    }
    return detail === undefined ? [] : [typeof detail === "string" ? detail : JSON.stringify(detail)];
  } catch {
    return text && !text.trimStart().startsWith("<") ? [text] : [];
  }
}

/** Parse a `Server-Timing` header to {durations: {stage: ms}, isCached}. */
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

// ---- rendering ---------------------------------------------------------------------------------

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
    const row = make("div", kind, make("dt", "", say(name)), make("dd", "", milliseconds(ms)));
    row.dataset.stage = name;
    return row;
  };
  const rows = parts.map(([name, ms]) => entry(name, ms, name));
  if (total !== undefined) rows.push(entry("total", total, "plain"));
  rows.push(entry("round trip", roundTrip, "plain"));
  if (isCached) rows.push(make("div", "plain", make("dt", "", say("cache")), make("dd", "badge", say("hit"))));
  at("stages").replaceChildren(...rows);
  at("timings").hidden = false;
}

function passage({ document: source, score }, rank, query) {
  const title = source.title
    ? make("h2", "", ...highlighted(source.title, query))
    : make("h2", "untitled", say("untitled"));
  const scoreLabel = make("span", "score", make("small", "", say("score ")), scoreText(score));
  const text = make("p", "text", ...highlighted(source.text ?? source.contents ?? "", query));
  const item = make("li", "passage");
  item.append(make("header", "", make("span", "rank", `${rank}.`), title, scoreLabel), text);
  if (text.textContent.length > LONG_TEXT) item.append(expander(text));
  item.append(make("p", "id", say("id "), make("code", "", String(source.id))));
  return item;
}

/** Create a button that expands and collapses a long text. */
function expander(text) {
  const button = make("button", "more", say("Show all"));
  button.type = "button";
  button.setAttribute("aria-expanded", "false");
  text.classList.add("cut");
  button.addEventListener("click", () => {
    const isCut = text.classList.toggle("cut");
    button.textContent = say(isCut ? "Show all" : "Show less");
    button.setAttribute("aria-expanded", String(!isCut));
  });
  return button;
}

/** Yield nested facts as [name, value], for example ["corpus · num_documents", "3855"]. */
function* flat(facts, path = []) {
  for (const [name, value] of Object.entries(facts)) {
    if (value !== null && typeof value === "object" && !Array.isArray(value)) yield* flat(value, [...path, name]);
    else yield [[...path, name].join(" · "), Array.isArray(value) ? value.join(", ") : String(value)];
  }
}

// ---- actions -----------------------------------------------------------------------------------

async function showServer() {
  try {
    const facts = (await request("info")).body;
    const health = (await request("health")).body;
    const count = health.num_documents ? ` · ${counted(health.num_documents, "passage")}` : "";
    at("server").textContent = `${facts.retriever ?? health.retriever}${count}`;
    at("server").dataset.state = "ready";
    if (facts.default_topk) at("topk").placeholder = String(facts.default_topk);
    const rows = [...flat(facts)].flatMap(([name, value]) => [make("dt", "", name), make("dd", "", value)]);
    at("facts").replaceChildren(...rows);
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    at("server").textContent = say(error.needsToken ? "needs a token" : "not reachable");
    at("server").dataset.state = "unavailable";
    if (error.needsToken) showProblem(error);
  }
}

/** Search for the question in the form and show the results; aborts a search in progress. */
async function search() {
  const query = at("query").value;
  running?.abort();
  at("problem").hidden = true;
  document.title = [query, say("Search-R1 retriever")].filter(Boolean).join(" · ");
  if (!query.trim()) return clear();
  const controller = (running = new AbortController());
  setBusy(true);
  try {
    await retrieve(query, controller.signal);
  } catch (error) {
    if (error.name === "AbortError") return;
    clear();
    showProblem(error instanceof Problem ? error : new Problem(say("The answer is not a retriever's."), [String(error)]));
  } finally {
    if (running === controller) setBusy(false);
  }
}

async function retrieve(query, signal) {
  const topk = at("topk").valueAsNumber;
  const body = { queries: [query], topk: Number.isNaN(topk) ? null : topk, return_scores: true };
  const start = performance.now();
  const response = await request("retrieve", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal: AbortSignal.any([signal, AbortSignal.timeout(TIMEOUT_MS)]),
  });
  const hits = response.body.result[0];
  const roundTrip = performance.now() - start;
  at("results").replaceChildren(...hits.map((hit, i) => passage(hit, i + 1, query)));
  showTimings(readTimings(response.headers.get("Server-Timing")), roundTrip);
  at("summary").textContent = hits.length
    ? say("{passages} in {time}", { passages: counted(hits.length, "passage"), time: milliseconds(roundTrip) })
    : say("No passage fits this question.");
  at("access").hidden = true;
}

function setBusy(isBusy) {
  document.body.classList.toggle("busy", isBusy);
  at("go").setAttribute("aria-busy", String(isBusy));
}

/** Return the query string for the form, `?q=...&topk=...`. */
function queryString() {
  const parameters = new URLSearchParams({ q: at("query").value });
  if (at("topk").value) parameters.set("topk", at("topk").value);
  return `?${parameters}`;
}

/** Fill the form from the address, and search if there is a question. */
function loadFromAddress() {
  const parameters = new URLSearchParams(location.search);
  at("query").value = parameters.get("q") ?? "";
  at("topk").value = parameters.get("topk") ?? "";
  return search();
}

at("search").addEventListener("submit", (event) => {
  event.preventDefault();
  if (queryString() !== location.search) history.pushState(null, "", queryString());
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

function showAll() {
  showServer();
  loadFromAddress();
}

addEventListener("popstate", loadFromAddress);
speak(CHINESE, at("language"), showAll);
showAll();
