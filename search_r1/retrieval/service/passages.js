// Elements of the search page: passages with the words of the query marked.
// Text from servers and passages is always inserted as text, never as HTML.

import { say } from "./language.js";

const STOP_WORDS = new Set(
  "a an and are as at be by did do does for from has have how in is it its of on or that the this to was were what when where which who whom whose why will with".split(" "),
);
const UNSPACED = /[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Hangul}\p{Script=Thai}]+/gu;
const LONG_TEXT = 1200;
/** Create an element with a class and children; strings become text nodes. */
export function make(tag, className = "", ...children) {
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

export const milliseconds = (ms) => `${ms < 10 ? ms.toFixed(2) : ms < 100 ? ms.toFixed(1) : Math.round(ms)} ms`;
export const scoreText = (score) => (Number.isFinite(score) ? score.toFixed(Math.abs(score) < 100 ? 4 : 2) : String(score));

/** Return a passage; `score` may be missing. */
export function passage({ document: source, score }, rank, query) {
  const title = source.title
    ? make("h2", "", ...highlighted(source.title, query))
    : make("h2", "untitled", say("untitled"));
  const scoreLabel = score === undefined ? "" : make("span", "score", make("small", "", say("score ")), scoreText(score));
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
