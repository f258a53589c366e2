// Time travel: forms that edit and replay a turn, and the results.

import { send } from "./ask.js";
import { input, labelled, make, say, short } from "./texts.js";

/** Return a form for each policy turn, by the index of its segment; results go to `showResult`. */
export function replayForms(trajectory, params, showResult) {
  const turns = trajectory.segments.flatMap((segment, index) => (segment.origin === "policy" ? [index] : []));
  return new Map(turns.map((index, i) => [index, form(trajectory, index, i + 1, params, showResult)]));
}

function form(trajectory, index, turn, params, showResult) {
  const calls = trajectory.calls.filter((call) => call.segment === index);
  const turnText = trajectory.segments[index].text;
  const text = textarea(turnText, Math.min(8, 2 + turnText.split("\n").length));
  const query = calls.length === 1 ? input("query", "text", calls[0].query) : null;
  const documents = calls.map((call) => call.documents.map((document) => ({ id: document.id, title: input("title", "text", document.title), text: textarea(document.text, 4) })));
  const gradient = input("gradient", "checkbox");
  const state = make("p", "quiet");
  state.setAttribute("role", "status");
  const button = make("button", "", say("Replay from here"));
  const fields = make("form", "replay", labelled("Text of the turn (the policy continues it if it closes neither a call nor an answer)", text));
  if (query) fields.append(labelled("or query of the turn", query));
  documents.flat().forEach((document, i) => fields.append(documentFields(say("Document {number} of the result (removed if both fields are empty)", { number: i + 1 }), document)));
  fields.append(make("div", "bar", button, labelled("Compare gradients", gradient, "check")), state);
  // The originals are read from the fields, which normalize line ends.
  const before = { text: text.value, query: query?.value, documents: JSON.stringify(valuesOf(documents)) };
  fields.addEventListener("submit", async (event) => {
    event.preventDefault();
    const body = { run: Number(params.run ?? 0), step: trajectory.step, line: trajectory.line, turn, gradient: gradient.checked };
    if (text.value !== before.text) body.text = text.value;
    if (query && query.value !== before.query) body.query = query.value;
    if (JSON.stringify(valuesOf(documents)) !== before.documents) body.documents = valuesOf(documents).map((call) => call.filter((d) => d.title || d.text));
    button.disabled = true;
    state.textContent = say("Replaying. Loading the weights takes seconds to minutes …");
    try {
      showResult(await send("replay", body), turn);
      state.textContent = say("Replayed: the result is below the dialogue.");
    } catch (error) {
      state.textContent = error.message || say("The access token is missing: reload the page.");
    }
    button.disabled = false;
  });
  return make("details", "edit", make("summary", "", say("Edit or replay from turn {turn}", { turn })), fields);
}

const valuesOf = (documents) => documents.map((call) => call.map((document) => ({ id: document.id, title: document.title.value, text: document.text.value })));

function textarea(value, rows) {
  const element = make("textarea");
  Object.assign(element, { value, rows, spellcheck: false });
  return element;
}

function documentFields(label, document) {
  document.text.setAttribute("aria-label", say("Text of {label}", { label }));
  return make("div", "document", labelled(label, document.title), document.text);
}

/** Return a section with the verdict, score, advantage and gradients of a replay, and its `dialogue`. */
export function replayResult(result, turn, dialogue) {
  const pair = (values) => `${short(values.recorded)} → ${short(values.replayed)}`;
  const facts = [["score", pair(result.score)]];
  if (result.advantage) facts.push(["advantage", pair(result.advantage)]);
  if (result.gradient) {
    const { norm_recorded, norm_replayed, norm_of_change, cosine, cosine_of_change } = result.gradient;
    facts.push(["gradient norm", `${short(norm_recorded)} → ${short(norm_replayed)}`], ["norm of the change", short(norm_of_change)],
      ["cosine of replayed and recorded", short(cosine)], ["cosine of change and recorded", short(cosine_of_change)]);
  }
  const list = make("dl", "facts inline", ...facts.map(([name, value]) => make("div", "", make("dt", "", say(name)), make("dd", "", value))));
  const title = make("h2", "", say("Replayed from turn {turn}", { turn }));
  title.tabIndex = -1;
  return make("section", `replayed ${result.identical ? "same" : ""}`, title, make("p", "verdict", result.verdict),
    list, make("ul", "quiet", ...result.notes.map((note) => make("li", "", note))), dialogue);
}
