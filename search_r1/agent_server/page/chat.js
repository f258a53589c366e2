// The chat page: asks by OpenAI's streaming route, and shows what the agent does as it comes.
// Whatever a server says is put in as text, never as HTML.

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
  },
};

const UNANSWERED = ["out_of_turns", "out_of_budget"]; // statuses of the agent server
const at = (id) => document.getElementById(id);
const past = []; // questions and answers of this conversation, as messages
let language = sessionStorage.getItem("language") ?? preferred();
let running = null; // the AbortController of the question under way

/** What stops a question: a name of TEXTS and what it is filled with. */
class Problem extends Error {
  constructor(name, values = {}, code = "") {
    super(name);
    Object.assign(this, { values, code });
  }
}

// ---- words -------------------------------------------------------------------------------------

function preferred() {
  return navigator.languages.map((one) => one.slice(0, 2).toLowerCase()).find((one) => one in TEXTS) ?? "en";
}

/** Let the element say a text of the table, in whichever language is chosen. */
function say(element, name, values = {}) {
  element.dataset.text = name;
  element.dataset.values = JSON.stringify(values);
  translate(element);
  return element;
}

const told = (tag, className, name, values) => say(make(tag, className), name, values);

function translate(element) {
  const values = JSON.parse(element.dataset.values ?? "{}");
  element.textContent = TEXTS[language][element.dataset.text].replace(/\{(\w+)\}/g, (_, key) => visible(values[key]));
}

function speak(chosen) {
  language = chosen;
  sessionStorage.setItem("language", chosen);
  document.documentElement.lang = chosen;
  document.querySelectorAll("[data-text]").forEach(translate);
  at("language").textContent = TEXTS[chosen].other;
  at("language").lang = chosen === "zh" ? "en" : "zh";
}

function state(name, words, values) {
  at("state").dataset.state = name;
  say(at("state"), words, values);
}

// ---- the server --------------------------------------------------------------------------------

const place = () => `token ${at("server").value}`; // a token is for the server that it was given to

/** The answer to a request for /v1/`path`. Raises Problem. */
async function call(path, options = {}) {
  const token = sessionStorage.getItem(place());
  const headers = { "Content-Type": "application/json", ...(token && { Authorization: `Bearer ${token}` }) };
  let answer;
  try {
    answer = await fetch(`${at("server").value || "."}/v1/${path}`, { ...options, headers, cache: "no-store" });
  } catch (error) {
    throw error.name === "AbortError" ? error : new Problem("unreachable");
  }
  if (answer.ok) return answer;
  const { error } = await answer.json().catch(() => ({}));
  const code = answer.status === 401 ? "token" : error?.code;
  throw error?.message ? new Problem("said", { message: error.message }, code) : new Problem("failed", { status: answer.status }, code);
}

/** What a stream of server-sent events holds, one after the other. Raises Problem when it is cut. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new Problem("lost");
    });
    if (done) throw new Problem("lost");
    const parts = (held + value).split(/\r?\n\r?\n/);
    held = parts.pop();
    for (const part of parts.filter((one) => one.startsWith("data:"))) {
      const data = part.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Problem("said", { message: event.error.message }, event.error.code);
      yield event;
    }
  }
}

async function connect() {
  state("waiting", "connecting");
  try {
    const { data } = await (await call("models")).json();
    if (!data.length) throw new Problem("no_model");
    offer("model", data.map((one) => one.id));
    at("access").hidden = true;
    ready();
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    if (error.code === "token") wantToken();
    else state("away", error.message === "unreachable" ? "away" : error.message, error.values);
  }
}

/** Let a person choose where there is a choice; the first is chosen at first. */
function offer(id, values) {
  at(id).replaceChildren(...choice(id, values.map((one) => [one, one])).children);
  at(id).selectedIndex = 0;
  at(id).parentElement.hidden = values.length < 2;
}

const ready = () => state("ready", "ready", { model: at("model").value });

function wantToken() {
  at("access").hidden = false;
  at("token").focus();
  state("asked", "asks_token");
}

// ---- one question and what becomes of it -------------------------------------------------------

/** A question on the page, and its answer as far as it is here. */
class Exchange {
  constructor(question) {
    this.element = make("article", "exchange", make("h2", "", question));
    this.answer = "";
    this.searches = this.tokens = 0;
    this.sources = new Map(); // id -> its element
    this.start = performance.now();
    this.part = null; // the element that the next words go on with
    at("talk").append(this.element);
    this.element.scrollIntoView({ block: "start" });
  }

  /** One event of the stream. */
  hear({ choices, usage }) {
    this.tokens = usage?.completion_tokens ?? this.tokens;
    for (const { delta, finish_reason: reason } of choices ?? []) {
      const thought = delta.reasoning_content ?? delta.reasoning;
      if (thought) this.write("p", "thought", thought);
      if (delta.content) this.write("p", "answer", delta.content);
      this.answer += delta.content ?? "";
      if (reason) this.status = delta.search_r1?.status ?? reason;
      else delta.search_r1?.searches?.forEach((search) => this.search(search));
    }
  }

  /** Words, after those of the same kind if nothing came in between. */
  write(tag, className, text) {
    const isNew = this.part?.className !== className;
    if (isNew) this.part = this.add(make(tag, className));
    const words = visible(isNew ? text.trimStart() : text);
    follow(() => this.part.append(words));
  }

  search({ query, documents }) {
    const found = make("ul", "", ...documents.map((one) => this.document(one)));
    const head = make("p", "", told("span", "badge", "searched"), " ", make("strong", "", query));
    this.searches += 1;
    this.part = null;
    this.add(make("section", "search", head, documents.length ? found : told("p", "quiet", "nothing")));
  }

  document({ id, title, text }) {
    const summary = make("summary", "", title || text?.slice(0, 80) || String(id));
    const words = text === undefined ? told("p", "quiet", "no_text") : make("p", "", text);
    const element = make("details", "", summary, words, told("p", "quiet", "id", { id }));
    if (!this.sources.has(id)) this.sources.set(id, element);
    return make("li", "", element);
  }

  /** After the last event: the sources, and what it took. */
  end() {
    if (!this.answer) this.add(told("p", "notice warn", UNANSWERED.includes(this.status) ? this.status : "no_answer"));
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
    if (buttons.length) this.add(make("p", "sources", told("span", "quiet", "sources"), ...buttons));
    const seconds = ((performance.now() - this.start) / 1000).toFixed(1);
    this.tell("facts", { searches: this.searches, tokens: this.tokens, seconds }, "quiet end");
  }

  tell(name, values, className) {
    this.add(told("p", className, name, values));
  }

  add(element) {
    follow(() => this.element.append(element));
    return element;
  }
}

/** Do what makes the page longer; who was at its end stays there. */
function follow(change) {
  const page = document.documentElement;
  const wasAtEnd = page.scrollHeight - page.clientHeight - page.scrollTop < 60;
  change();
  if (wasAtEnd) page.scrollTop = page.scrollHeight;
}

async function ask(question) {
  const shown = new Exchange(question);
  running = new AbortController();
  busy(true);
  try {
    await answer(question, shown, running.signal);
    shown.end();
    if (shown.answer) past.push({ role: "user", content: question }, { role: "assistant", content: shown.answer });
    ready();
  } catch (error) {
    if (error.name === "AbortError") {
      shown.tell("stopped", {}, "quiet end");
      ready();
    } else if (error instanceof Problem) {
      shown.tell(error.message, error.values, "notice bad");
      if (error.code === "token") wantToken();
      else if (["unreachable", "lost"].includes(error.message)) state("away", "away");
      else ready();
    } else throw error;
  } finally {
    running = null;
    busy(false);
  }
}

/** Let the server answer; what it no longer has room for of the conversation is forgotten. */
async function answer(question, shown, signal) {
  const stream_options = { include_usage: true, include_documents: true };
  for (;;) {
    const messages = [...past, { role: "user", content: question }];
    const body = JSON.stringify({ model: at("model").value, messages, stream: true, stream_options });
    try {
      const given = await call("chat/completions", { method: "POST", body, signal });
      for await (const event of events(given.body)) shown.hear(event);
      return;
    } catch (error) {
      if (error.code !== "context_length_exceeded" || !past.length) throw error;
      if (!shown.hasForgotten) shown.tell("forgot", {}, "quiet end");
      shown.hasForgotten = true;
      past.splice(0, 2);
    }
  }
}

function busy(isBusy) {
  at("send").hidden = isBusy;
  at("stop").hidden = !isBusy;
  at("talk").setAttribute("aria-busy", String(isBusy));
  if (isBusy) state("waiting", "busy");
  else if (at("access").hidden) at("question").focus();
}

function startAnew() {
  running?.abort();
  past.length = 0;
  at("talk").replaceChildren();
  at("question").focus();
}

// ---- what a person does ------------------------------------------------------------------------

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = at("question").value.trim();
  if (!question || running) return;
  at("question").value = "";
  ask(question);
});
at("question").addEventListener("keydown", (event) => {
  // An input method's Enter ends a word, as of Chinese, and not the question.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  at("ask").requestSubmit();
});
addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
  if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
  event.preventDefault();
  at("question").focus();
});
at("stop").addEventListener("click", () => running?.abort());
at("fresh").addEventListener("click", startAnew);
at("language").addEventListener("click", () => speak(language === "zh" ? "en" : "zh"));
at("server").addEventListener("change", () => {
  startAnew();
  connect();
});
at("access").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(place(), at("token").value.trim());
  at("token").value = "";
  connect();
});

speak(language);
const peers = await fetch("peers").then((answer) => answer.json()).catch(() => []);
offer("server", ["", ...peers]);
say(at("server").options[0], "here");
connect();
