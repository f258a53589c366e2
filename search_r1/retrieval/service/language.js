// The language of a page: English as it is written there, or Chinese by the page's dictionary.

let language = sessionStorage.getItem("language") ?? preferred();
let chinese = {};
const written = new Map(); // the English text of each text node and attribute of the page's file

function preferred() {
  return navigator.languages.map((tag) => tag.slice(0, 2).toLowerCase()).find((code) => ["en", "zh"].includes(code)) ?? "en";
}

/** Return a text of the page in the chosen language, with `{name}` replaced by values. */
export function say(text, values = {}) {
  const said = language === "zh" ? chinese[text] ?? text : text;
  return said.replace(/\{(\w+)\}/g, (_, key) => String(values[key]));
}

/** Return a count with its noun, in Chinese without a plural. */
export function counted(count, one, many = `${one}s`) {
  return language === "zh" ? `${count.toLocaleString("zh")} ${say(many)}` : `${count.toLocaleString("en")} ${count === 1 ? one : many}`;
}

/** Translate the page's file by `texts` {English: Chinese}; `redraw` writes what depends on data. */
export function speak(texts, button, redraw) {
  chinese = texts;
  const walker = document.createTreeWalker(document.documentElement, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) remember(walker.currentNode, "data");
  for (const name of ["placeholder", "aria-label"]) {
    document.querySelectorAll(`[${name}]`).forEach((element) => remember(element.getAttributeNode(name), "value"));
  }
  button.addEventListener("click", () => {
    language = language === "zh" ? "en" : "zh";
    sessionStorage.setItem("language", language);
    translate(button);
    redraw();
  });
  translate(button);
}

function remember(node, field) {
  const text = node[field].replace(/\s+/g, " ").trim();
  if (Object.hasOwn(chinese, text)) written.set(node, { field, text, original: node[field] });
}

function translate(button) {
  document.documentElement.lang = language;
  for (const [node, { field, text, original }] of written) node[field] = language === "zh" ? chinese[text] : original;
  button.textContent = language === "zh" ? "English" : "中文";
  button.lang = language === "zh" ? "en" : "zh";
}
