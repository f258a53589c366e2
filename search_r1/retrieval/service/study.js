// What the search page shows beyond the passages: examples, the parts of scores, a second engine or server, recall.
// Text from servers and passages is always inserted as text, never as HTML.

import { counted, say } from "./language.js";
import { make, passage } from "./passages.js";
import { post, Problem } from "./requests.js";

const at = (id) => document.getElementById(id);

export const besideOf = () => at("beside").value;

/** Offer questions that the corpus answers, and what can be searched beside this engine. */
export async function showStart(ask) {
  const { body } = await post("page/start", {});
  at("first").hidden = !body.examples.length;
  at("examples").replaceChildren(...body.examples.map((text) => make("li", "", askButton(text, ask))));
  if (body.examples.length) at("query").placeholder = body.examples[0];
  const chosen = besideOf();
  const options = ["", ...body.beside].map((name) => Object.assign(make("option", "", name || say("nothing")), { value: name }));
  at("beside").replaceChildren(...options);
  at("beside").value = body.beside.includes(chosen) ? chosen : "";
  at("beside-field").hidden = !body.beside.length;
}

function askButton(text, ask) {
  const button = make("button", "", text);
  button.type = "button";
  button.addEventListener("click", () => ask(text));
  return button;
}

/** Show under each passage what its score is the sum of: words, or the engines of a hybrid. */
export async function showWhy(query, topk, items, signal) {
  const { parts } = (await post("page/why", { query, topk }, signal)).body;
  const best = Math.max(...(parts ?? []).flat().map(([, share]) => share));
  parts?.forEach((shares, i) => {
    const list = make("ul", "why", ...shares.map(([name, share]) => {
      const meter = Object.assign(make("meter"), { min: 0, max: best, value: share });
      meter.setAttribute("aria-hidden", "true");
      return make("li", "", meter, name, make("strong", "", share.toFixed(2)));
    }));
    list.setAttribute("aria-label", say("What the score is made of"));
    items[i]?.querySelector(".id").before(list);
  });
}

/** Show another engine's or server's passages beside those shown, and mark what both found. */
export async function showBeside(name, query, topk, hits, items, signal) {
  const { documents } = (await post("page/beside", { query, topk, beside: name }, signal)).body;
  const keys = (all) => all.map(({ title, text, contents }) => `${title}\n${text ?? contents}`);
  const [here, there] = [keys(hits.map((hit) => hit.document)), keys(documents)];
  const others = documents.map((document, i) => passage({ document }, i + 1, query));
  here.forEach((key, i) => items[i].classList.toggle("shared", there.includes(key)));
  there.forEach((key, i) => others[i].classList.toggle("shared", here.includes(key)));
  const list = make("ol", "results", ...others);
  const title = make("h2", "engine", name, make("small", "", ` · ${say("{count} in both lists", { count: here.filter((key) => there.includes(key)).length })}`));
  at("other").replaceChildren(title, list);
  at("other").hidden = false;
  at("columns").classList.add("beside");
}

/** Count recall of a pasted question set, for this engine and the one chosen beside it. */
export function setUpStudy(ask, showProblem) {
  at("set").addEventListener("submit", async (event) => {
    event.preventDefault();
    at("set-go").setAttribute("aria-busy", "true");
    at("recall").replaceChildren();
    try {
      const { body } = await post("page/recall", { text: at("set-text").value, beside: besideOf() || null });
      showRecall(body, ask);
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      showProblem(error);
    } finally {
      at("set-go").setAttribute("aria-busy", "false");
    }
  });
}

function showRecall({ questions, columns, missed }, ask) {
  const cutoffs = Object.keys(columns[0].found);
  const head = make("tr", "", ...[counted(questions, "question"), ...cutoffs.map((k) => `recall@${k}`)].map((text) => make("th", "", text)));
  const rows = columns.map(({ name, found }) => make("tr", "", make("td", "", name),
    ...cutoffs.map((k) => make("td", "", `${(100 * found[k] / questions).toFixed(1)} %`))));
  const last = cutoffs.at(-1);
  const note = make("p", "quiet", say(missed.length ? "No answer in the first {last} passages of:" : "Each question has an answer in its first {last} passages.", { last }));
  const list = make("ul", "missed", ...missed.map((text) => make("li", "", askButton(text, ask))));
  at("recall").replaceChildren(make("table", "recalls", make("thead", "", head), make("tbody", "", ...rows)), note, list);
}
