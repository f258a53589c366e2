// The search page: queries /retrieve and shows passages, scores and timings.
// Text from servers and passages is always inserted as text, never as HTML.

import { counted, say, speak } from "./language.js";
import { make, milliseconds, passage } from "./passages.js";
import { hasToken, post, Problem, request, useToken } from "./requests.js";
import { besideOf, setUpStudy, showBeside, showStart, showWhy } from "./study.js";

const CHINESE = {
  "Search-R1 retriever": "Search-R1 检索服务", retriever: "检索服务", "Skip to the passages": "跳到段落", "connecting …": "正在连接 …",
  Question: "问题", Passages: "段落", auto: "默认", Search: "搜索",
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
  "No passage fits this question.": "没有与这个问题相符的段落。", "This corpus answers, for example:": "例如，这个语料能回答：",
  Beside: "并排比较", nothing: "无", "What the score is made of": "得分的组成", "{count} in both lists": "两边都有 {count} 个",
  "Recall of a question set": "一组问题的召回率", "Count recall": "计算召回率", questions: "个问题",
  "A line each: the question, a tab, and its answer (more answers after further tabs), or JSON with question and golden_answers.":
    "每行一个：问题、制表符、答案（更多答案再用制表符隔开），或含 question 和 golden_answers 的 JSON。",
  "Pasted set": "粘贴的题集",
  "No answer in the first {last} passages of:": "前 {last} 个段落中没有答案的问题：",
  "Each question has an answer in its first {last} passages.": "每个问题的前 {last} 个段落中都有答案。",
};
const STAGES = ["queue", "encode", "search", "documents", "rerank"];
const at = (id) => document.getElementById(id);
let running = null; // AbortController of the search in progress

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
  at("problem").hidden = problem.needsToken && !hasToken();
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
  clearBeside();
}

function clearBeside() {
  at("other").hidden = true;
  at("other").replaceChildren();
  at("columns").classList.remove("beside");
  at("engine").hidden = true;
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
    at("engine").textContent = facts.retriever;
    await offerStart();
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    at("server").textContent = say(error.needsToken ? "needs a token" : "not reachable");
    at("server").dataset.state = "unavailable";
    if (error.needsToken) showProblem(error);
  }
}

/** Offer examples and other engines; one that the address names is searched, too. */
async function offerStart() {
  try {
    await showStart(ask);
    at("beside").value = new URLSearchParams(location.search).get("beside") ?? "";
    if (besideOf()) await search();
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    showProblem(error);
  }
}

/** Search for the question in the form and show the results; aborts a search in progress. */
async function search() {
  const query = at("query").value;
  running?.abort();
  at("problem").hidden = true;
  document.title = [query, say("Search-R1 retriever")].filter(Boolean).join(" · ");
  at("start").hidden = Boolean(query.trim());
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
  const response = await post("retrieve", body, signal);
  const hits = response.body.result[0];
  const roundTrip = performance.now() - start;
  const items = hits.map((hit, i) => passage(hit, i + 1, query));
  at("results").replaceChildren(...items);
  clearBeside();
  showTimings(readTimings(response.headers.get("Server-Timing")), roundTrip);
  at("summary").textContent = hits.length
    ? say("{passages} in {time}", { passages: counted(hits.length, "passage"), time: milliseconds(roundTrip) })
    : say("No passage fits this question.");
  at("access").hidden = true;
  const shown = body.topk ?? (Number(at("topk").placeholder) || Math.max(1, hits.length));
  if (besideOf()) {
    at("engine").hidden = false;
    await showBeside(besideOf(), query, shown, hits, items, signal);
  }
  if (hits.length) await showWhy(query, shown, items, signal);
}

/** Put a question into the form and search for it. */
function ask(question) {
  at("query").value = question;
  at("search").requestSubmit();
  at("query").scrollIntoView({ block: "nearest" });
}

function setBusy(isBusy) {
  document.body.classList.toggle("busy", isBusy);
  at("go").setAttribute("aria-busy", String(isBusy));
}

/** Return the query string for the form, `?q=...&topk=...`. */
function queryString() {
  const parameters = new URLSearchParams({ q: at("query").value });
  if (at("topk").value) parameters.set("topk", at("topk").value);
  if (besideOf()) parameters.set("beside", besideOf());
  return `?${parameters}`;
}

/** Fill the form from the address, and search if there is a question. */
function loadFromAddress() {
  const parameters = new URLSearchParams(location.search);
  at("query").value = parameters.get("q") ?? "";
  at("topk").value = parameters.get("topk") ?? "";
  if (at("beside").options.length > 1) at("beside").value = parameters.get("beside") ?? "";
  else if (parameters.get("beside")) return; // `offerStart` searches when it knows what there is
  search();
}

at("search").addEventListener("submit", (event) => {
  event.preventDefault();
  if (queryString() !== location.search) history.pushState(null, "", queryString());
  search();
});

at("beside").addEventListener("change", () => at("search").requestSubmit());

at("access").addEventListener("submit", (event) => {
  event.preventDefault();
  useToken(at("token").value.trim());
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
setUpStudy(ask, showProblem);
speak(CHINESE, at("language"), showAll);
showAll();
