// The chat page: sends questions to the OpenAI-compatible route and shows the agent's steps as they arrive.
// Data from servers is always inserted as text, never as HTML.

import { choice, make, visible } from "./elements.js";

const TEXTS = {
  en: {
    skip: "Skip to the question", chat: "chat", server: "Server", here: "this one", model: "Model",
    fresh: "New conversation", other: "中文", token: "Access token", use_token: "Use token",
    token_note: "This server asks for its token (AGENT_TOKEN). It is kept in this tab and sent to this server alone.",
    empty: "Ask a question: the agent thinks, searches, reads, and answers with its sources.",
    question: "Question", send: "Ask", stop: "Stop",
    keys: "Enter asks · Shift+Enter starts a line · Esc stops · / goes to the question",
    connecting: "connecting …", ready: "ready: {model}", busy: "answering …", away: "no answer from the server",
    asks_token: "a token is needed", searched: "Search", nothing: "Nothing was found.",
    no_text: "The server sent no text.", id: "id {id}", answer: "Answer", sources: "Sources",
    out_of_turns: "No answer: all turns are used up.", out_of_budget: "No answer: all tokens are used up.",
    no_answer: "No answer.", facts: "searches: {searches} · tokens written: {tokens} · seconds: {seconds}",
    stopped: "Stopped. This question is not remembered.",
    forgot: "The conversation had become too long: its oldest questions were left out.",
    unreachable: "The server cannot be reached. Is it running, and may this page ask it (--chat-peers of both)?",
    lost: "The connection ended before the answer did.", failed: "The server answered {status}.",
    said: "{message}", no_model: "The server has no model.",
    starting: "Reading the question …", thinking: "Thinking …", searching: "Searching …", searching_for: "Searching for “{query}” …",
    reading: "Reading what was found …",
  },
  zh: {
    skip: "跳到提问框", chat: "对话", server: "服务器", here: "本服务器", model: "模型",
    fresh: "新对话", other: "English", token: "访问令牌", use_token: "使用令牌",
    token_note: "此服务器需要令牌（AGENT_TOKEN）。令牌只保存在本标签页中，并且只发送给此服务器。",
    empty: "请提问：智能体会思考、检索、阅读，并给出答案和来源。",
    question: "问题", send: "提问", stop: "停止",
    keys: "Enter 提问 · Shift+Enter 换行 · Esc 停止 · / 转到提问框",
    connecting: "正在连接 …", ready: "就绪：{model}", busy: "正在回答 …", away: "服务器没有响应",
    asks_token: "需要令牌", searched: "检索", nothing: "没有找到文档。",
    no_text: "服务器没有发送正文。", id: "编号 {id}", answer: "答案", sources: "来源",
    out_of_turns: "没有答案：轮数已用完。", out_of_budget: "没有答案：词元已用完。",
    no_answer: "没有答案。", facts: "检索：{searches} 次 · 生成词元：{tokens} · 用时：{seconds} 秒",
    stopped: "已停止。这个问题不会被记住。",
    forgot: "对话过长：最早的问题已被略去。",
    unreachable: "无法连接服务器。它在运行吗？它允许本页面访问吗（双方的 --chat-peers）？",
    lost: "回答尚未结束，连接就断开了。", failed: "服务器返回状态 {status}。",
    said: "{message}", no_model: "服务器没有模型。",
    starting: "正在读问题 …", thinking: "正在思考 …", searching: "正在检索 …", searching_for: "正在检索“{query}” …",
    reading: "正在阅读找到的文档 …",
  },
};

const UNANSWERED = ["out_of_turns", "out_of_budget"]; // statuses of the agent server
const byId = (id) => document.getElementById(id);
const conversation = []; // messages of the questions and answers so far
let language = sessionStorage.getItem("language") ?? preferred();
let running = null; // the AbortController of the current question

/** An error to show: the name of a text in TEXTS and the values of its placeholders. */
class Problem extends Error {
  constructor(name, values = {}, code = "") {
    super(name);
    Object.assign(this, { values, code });
  }
}

// ---- texts -------------------------------------------------------------------------------------

function preferred() {
  return navigator.languages.map((tag) => tag.slice(0, 2).toLowerCase()).find((code) => code in TEXTS) ?? "en";
}

/** Show a text of TEXTS in the element, in the chosen language. */
function setText(element, name, values = {}) {
  element.dataset.text = name;
  element.dataset.values = JSON.stringify(values);
  translate(element);
  return element;
}

const makeText = (tag, className, name, values) => setText(make(tag, className), name, values);

function translate(element) {
  const values = JSON.parse(element.dataset.values ?? "{}");
  element.textContent = TEXTS[language][element.dataset.text].replace(/\{(\w+)\}/g, (_, key) => visible(values[key]));
}

function setLanguage(chosen) {
  language = chosen;
  sessionStorage.setItem("language", chosen);
  document.documentElement.lang = chosen;
  document.querySelectorAll("[data-text]").forEach(translate);
  byId("question").placeholder = TEXTS[chosen].question;
  byId("language").textContent = TEXTS[chosen].other;
  byId("language").lang = chosen === "zh" ? "en" : "zh";
}

function setState(name, text, values) {
  byId("state").dataset.state = name;
  setText(byId("state"), text, values);
}

// ---- the server --------------------------------------------------------------------------------

const tokenKey = () => `token ${byId("server").value}`; // each server has its own token

/** Send a request to /v1/`path` and return the response. Throws Problem. */
async function call(path, options = {}) {
  const token = sessionStorage.getItem(tokenKey());
  const headers = { "Content-Type": "application/json", ...(token && { Authorization: `Bearer ${token}` }) };
  let response;
  try {
    response = await fetch(`${byId("server").value || "."}/v1/${path}`, { ...options, headers, cache: "no-store" });
  } catch (error) {
    throw error.name === "AbortError" ? error : new Problem("unreachable");
  }
  if (response.ok) return response;
  const { error } = await response.json().catch(() => ({}));
  const code = response.status === 401 ? "token" : error?.code;
  if (error?.message) throw new Problem("said", { message: error.message }, code);
  throw new Problem("failed", { status: response.status }, code);
}

/** Yield the server-sent events of a response body. Throws Problem if the stream breaks off. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new Problem("lost");
    });
    if (done) throw new Problem("lost");
    const parts = (pending + value).split(/\r?\n\r?\n/);
    pending = parts.pop();
    for (const part of parts.filter((text) => text.startsWith("data:"))) {
      const data = part.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Problem("said", { message: event.error.message }, event.error.code);
      yield event;
    }
  }
}

async function connect() {
  setState("waiting", "connecting");
  try {
    const { data } = await (await call("models")).json();
    if (!data.length) throw new Problem("no_model");
    offer("model", data.map((model) => model.id));
    byId("access").hidden = true;
    setReady();
    offerExamples();
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    if (error.code === "token") askForToken();
    else setState("away", error.message === "unreachable" ? "away" : error.message, error.values);
  }
}

/** Offer questions that the corpus of the server's retriever answers; none if it cannot say. */
async function offerExamples() {
  const found = await call("examples").then((response) => response.json()).catch((error) => {
    if (error instanceof Problem) return [];
    throw error;
  });
  byId("examples").replaceChildren(...found.map((text) => {
    const button = make("button", "", text);
    button.type = "button";
    button.addEventListener("click", () => running || ask(text));
    return make("li", "", button);
  }));
}

/** Fill a select element; it is shown only if there are several values. */
function offer(id, values) {
  byId(id).replaceChildren(...choice(id, values.map((value) => [value, value])).children);
  byId(id).selectedIndex = 0;
  byId(id).parentElement.hidden = values.length < 2;
}

const setReady = () => setState("ready", "ready", { model: byId("model").value });

function askForToken() {
  byId("access").hidden = false;
  byId("token").focus();
  setState("asked", "asks_token");
}

// ---- one question and its answer ---------------------------------------------------------------

/** A question on the page, with the part of its answer that has arrived. */
class Exchange {
  constructor(question) {
    this.element = make("article", "exchange", make("h2", "", question));
    this.answer = "";
    this.searches = this.tokens = 0;
    this.sources = new Map(); // document id -> its element
    this.start = performance.now();
    this.part = null; // the element to which the next text of the same kind is appended
    this.working = make("p", "working", make("span"), make("time"));
    this.working.setAttribute("aria-hidden", "true"); // the state of the page says it once
    this.element.append(this.working);
    this.setPhase("starting");
    this.timer = setInterval(() => this.tick(), 1000);
    byId("fresh").hidden = false;
    byId("talk").append(this.element);
    this.element.scrollIntoView({ block: "start" });
  }

  /** Show one event of the stream. */
  handle({ choices, usage }) {
    this.tokens = usage?.completion_tokens ?? this.tokens;
    for (const { delta, finish_reason: reason } of choices ?? []) {
      const thought = delta.reasoning_content ?? delta.reasoning;
      if (thought) this.write("p", "thought", thought);
      if (thought) this.setPhase("thinking");
      const query = delta.search_r1?.searching;
      if (query !== undefined) this.setPhase(query ? "searching_for" : "searching", { query });
      if (delta.content) this.write("p", "answer", delta.content);
      this.answer += delta.content ?? "";
      if (reason) this.status = delta.search_r1?.status ?? reason;
      else delta.search_r1?.searches?.forEach((search) => this.search(search));
    }
  }

  /** Say what is being done, until the next phase; its seconds are counted. */
  setPhase(name, values = {}) {
    const text = this.working.firstChild;
    if (text.dataset.text === name && text.dataset.values === JSON.stringify(values)) return;
    setText(text, name, values);
    this.phaseStart = performance.now();
    this.tick();
  }

  tick() {
    const seconds = Math.floor((performance.now() - this.phaseStart) / 1000);
    this.working.lastChild.textContent = seconds ? `${seconds} s` : "";
  }

  /** Nothing more will happen. */
  finish() {
    clearInterval(this.timer);
    this.working.remove();
  }

  /** Append text to the current part, or start a new part if its kind differs. */
  write(tag, className, text) {
    const isNew = this.part?.className !== className;
    if (isNew) this.part = this.add(make(tag, className));
    const shown = visible(isNew ? text.trimStart() : text);
    keepAtEnd(() => this.part.append(shown));
  }

  search({ query, documents }) {
    const list = make("ul", "", ...documents.map((document) => this.document(document)));
    const head = make("p", "", makeText("span", "badge", "searched"), " ", make("strong", "", query));
    this.searches += 1;
    this.part = null;
    this.setPhase("reading");
    this.add(make("section", "search", head, documents.length ? list : makeText("p", "quiet", "nothing")));
  }

  document({ id, title, text }) {
    const summary = make("summary", "", title || text?.slice(0, 80) || String(id));
    const body = text === undefined ? makeText("p", "quiet", "no_text") : make("p", "", text);
    const element = make("details", "", summary, body, makeText("p", "quiet", "id", { id }));
    if (!this.sources.has(id)) this.sources.set(id, element);
    return make("li", "", element);
  }

  /** After the last event: show the sources and the counts. */
  end() {
    if (!this.answer) this.note(UNANSWERED.includes(this.status) ? this.status : "no_answer", {}, "notice warn");
    const buttons = [...this.sources.values()].map((element) => {
      const button = make("button", "", element.querySelector("summary").textContent);
      button.type = "button";
      button.addEventListener("click", () => {
        element.open = true;
        element.querySelector("summary").focus();
        element.scrollIntoView({ block: "center" });
      });
      return button;
    });
    if (buttons.length) this.add(make("p", "sources", makeText("span", "quiet", "sources"), ...buttons));
    const seconds = ((performance.now() - this.start) / 1000).toFixed(1);
    this.note("facts", { searches: this.searches, tokens: this.tokens, seconds }, "quiet end");
  }

  note(name, values, className) {
    this.add(makeText("p", className, name, values));
  }

  add(element) {
    keepAtEnd(() => (this.working.isConnected ? this.working.before(element) : this.element.append(element)));
    return element;
  }
}

/** Make a change that lengthens the page; if it was scrolled to the end, keep it there. */
function keepAtEnd(change) {
  const page = document.documentElement;
  const wasAtEnd = page.scrollHeight - page.clientHeight - page.scrollTop < 60;
  change();
  if (wasAtEnd) page.scrollTop = page.scrollHeight;
}

async function ask(question) {
  const exchange = new Exchange(question);
  running = new AbortController();
  setBusy(true);
  try {
    await answer(question, exchange, running.signal);
    exchange.finish();
    exchange.end();
    if (exchange.answer) conversation.push({ role: "user", content: question }, { role: "assistant", content: exchange.answer });
    setReady();
  } catch (error) {
    if (error.name === "AbortError") {
      exchange.note("stopped", {}, "quiet end");
      setReady();
    } else if (error instanceof Problem) {
      exchange.note(error.message, error.values, "notice bad");
      if (error.code === "token") askForToken();
      else if (["unreachable", "lost"].includes(error.message)) setState("away", "away");
      else setReady();
    } else throw error;
  } finally {
    exchange.finish();
    running = null;
    setBusy(false);
  }
}

/** Send the question and show the answer; the oldest messages are dropped if the prompt is too long. */
async function answer(question, exchange, signal) {
  const stream_options = { include_usage: true, include_documents: true };
  for (;;) {
    const messages = [...conversation, { role: "user", content: question }];
    const body = JSON.stringify({ model: byId("model").value, messages, stream: true, stream_options });
    try {
      const response = await call("chat/completions", { method: "POST", body, signal });
      for await (const event of events(response.body)) exchange.handle(event);
      return;
    } catch (error) {
      if (error.code !== "context_length_exceeded" || !conversation.length) throw error;
      if (!exchange.hasForgotten) exchange.note("forgot", {}, "quiet end");
      exchange.hasForgotten = true;
      conversation.splice(0, 2); // the oldest question and answer
    }
  }
}

function setBusy(isBusy) {
  byId("send").hidden = isBusy;
  byId("stop").hidden = !isBusy;
  byId("talk").setAttribute("aria-busy", String(isBusy));
  if (isBusy) setState("waiting", "busy");
  else if (byId("access").hidden) byId("question").focus();
}

function startAnew() {
  running?.abort();
  conversation.length = 0;
  byId("talk").replaceChildren();
  byId("fresh").hidden = true;
  byId("question").focus();
}

// ---- event handlers ----------------------------------------------------------------------------

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = byId("question").value.trim();
  if (!question || running) return;
  byId("question").value = "";
  ask(question);
});
byId("question").addEventListener("keydown", (event) => {
  // In an input method, e.g. for Chinese, Enter confirms a word and does not submit the question.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("ask").requestSubmit();
});
addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
  if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
  event.preventDefault();
  byId("question").focus();
});
byId("stop").addEventListener("click", () => running?.abort());
byId("fresh").addEventListener("click", startAnew);
byId("language").addEventListener("click", () => setLanguage(language === "zh" ? "en" : "zh"));
byId("server").addEventListener("change", () => {
  startAnew();
  connect();
});
byId("access").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(tokenKey(), byId("token").value.trim());
  byId("token").value = "";
  connect();
});

setLanguage(language);
const peers = await fetch("peers").then((response) => response.json()).catch(() => []);
offer("server", ["", ...peers]);
setText(byId("server").options[0], "here");
connect();
