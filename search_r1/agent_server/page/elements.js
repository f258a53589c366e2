// Helpers for elements and labels. Text of a run is inserted as text, never as HTML.

const SVG = "http://www.w3.org/2000/svg";
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

/** Return the text with control characters and invisible ones escaped. */
export function visible(text) {
  return String(text).replace(HIDDEN, (character) => `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

/** Return a new element with a class and children; strings become text. */
export function make(tag, className = "", ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children.map((child) => (child instanceof Node ? child : visible(child))));
  return element;
}

/** Return a new SVG element. */
export function makeSvg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** A link to a page of this application; the address is made of data only after `#/`. */
export function link(page, params, className, ...children) {
  const element = make("a", className, ...children);
  element.href = address(page, params);
  return element;
}

export function address(page, params = {}) {
  const set = Object.entries(params).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const query = new URLSearchParams(set).toString();
  return `#/${page}${query ? `?${query}` : ""}`;
}

/** Return a <select>; `options` are pairs of value and label. */
export function choice(name, options, value = "") {
  const element = make("select");
  element.name = name;
  for (const [optionValue, label] of options) {
    const option = make("option", "", label);
    option.value = optionValue;
    element.append(option);
  }
  element.value = value;
  return element;
}

export function input(name, type, value = "", hint = "") {
  const element = make("input");
  Object.assign(element, { name, type, value, placeholder: hint, autocomplete: "off", spellcheck: false });
  return element;
}

export function labelled(label, field, className = "") {
  return make("label", className, make("span", "", label), field);
}

export const plural = (count, noun, nouns = `${noun}s`) =>
  `${count.toLocaleString("en")} ${count === 1 ? noun : nouns}`;

/** Format a number in about five characters. */
export function short(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(1);
  if (Number.isInteger(value)) return String(value);
  return String(Number(value.toPrecision(size < 1 ? 3 : 4)));
}

/** Describe whether the answer is right, and what a wrong one lacked: as an evaluation counts it. */
export function outcome(row) {
  if (row.is_given) return row.is_found ? "right" : "right, not in documents";
  if (row.is_found) return "found, not used";
  const searches = Array.isArray(row.searches) ? row.searches.length : row.searches;
  return ["no search", "one search, not found"][searches] ?? "several searches, not found";
}
