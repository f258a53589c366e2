// Time travel: a turn edited and replayed, and what came of it beside the record.

import { send } from "./ask.js";
import { input, labelled, make, short } from "./elements.js";

/** The forms of a trajectory's policy turns, by segment. `show` is given what a replay found. */
export function replayForms(found, params, show) {
  const turns = found.segments.flatMap((one, place) => (one.origin === "policy" ? [place] : []));
  return new Map(turns.map((place, i) => [place, form(found, place, i + 1, params, show)]));
}

function form(found, place, turn, params, show) {
  const calls = found.calls.filter((call) => call.segment === place);
  const text = area(found.segments[place].text, Math.min(8, 2 + found.segments[place].text.split("\n").length));
  const query = calls.length === 1 ? input("query", "text", calls[0].query) : null;
  const documents = calls.map((call) => call.documents.map((one) => ({ id: one.id, title: input("title", "text", one.title), text: area(one.text, 4) })));
  const gradient = input("gradient", "checkbox");
  const state = make("p", "quiet");
  state.setAttribute("role", "status");
  const button = make("button", "", "Replay from here");
  const fields = make("form", "replay", labelled("The policy says (it goes on from a text that closes no call or answer)", text));
  if (query) fields.append(labelled("or it asks for", query));
  documents.flat().forEach((one, i) => fields.append(fieldset(`Document ${i + 1} that it finds (none if both are empty)`, one)));
  fields.append(make("div", "bar", button, labelled("Compare gradients", gradient, "check")), state);
  const before = [text.value, query?.value, JSON.stringify(given(documents))]; // as fields keep them
  fields.addEventListener("submit", async (event) => {
    event.preventDefault();
    const body = { run: Number(params.run ?? 0), step: found.step, line: found.line, turn, gradient: gradient.checked };
    if (text.value !== before[0]) body.text = text.value;
    if (query && query.value !== before[1]) body.query = query.value;
    if (JSON.stringify(given(documents)) !== before[2]) body.documents = given(documents).map((one) => one.filter((d) => d.title || d.text));
    button.disabled = true;
    state.textContent = "Replaying. The weights are loaded first, which takes seconds to minutes …";
    try {
      show(await send("replay", body), turn);
      state.textContent = "Replayed: see below the dialogue.";
    } catch (error) {
      state.textContent = error.message || "The access token is missing: reload the page.";
    }
    button.disabled = false;
  });
  return make("details", "travel", make("summary", "", `Edit or replay from turn ${turn}`), fields);
}

const given = (documents) => documents.map((call) => call.map((one) => ({ id: one.id, title: one.title.value, text: one.text.value })));

function area(value, rows) {
  const element = make("textarea");
  Object.assign(element, { value, rows, spellcheck: false });
  return element;
}

function fieldset(words, one) {
  one.text.setAttribute("aria-label", `Text of ${words}`);
  return make("div", "document", labelled(words, one.title), one.text);
}

/** What came of a replay: the verdict, what it was worth, and its dialogue as `segments` draws it. */
export function outcomeOf(result, turn, segments) {
  const pair = (one) => `${short(one.recorded)} → ${short(one.replayed)}`;
  const facts = [["score", pair(result.score)]];
  if (result.advantage) facts.push(["advantage", pair(result.advantage)]);
  if (result.gradient) {
    const { norm_recorded, norm_replayed, norm_of_change, cosine, cosine_of_change } = result.gradient;
    facts.push(["gradient's norm", `${short(norm_recorded)} → ${short(norm_replayed)}`], ["norm of its change", short(norm_of_change)],
      ["cosine with the recorded one", short(cosine)], ["of the change", short(cosine_of_change)]);
  }
  const list = make("dl", "facts inline", ...facts.map(([name, value]) => make("div", "", make("dt", "", name), make("dd", "", value))));
  const title = make("h2", "", `Replayed from turn ${turn}`);
  title.tabIndex = -1;
  return make("section", `replayed ${result.identical ? "same" : ""}`, title, make("p", "verdict", result.verdict),
    list, make("ul", "quiet", ...result.notes.map((note) => make("li", "", note))), segments);
}
