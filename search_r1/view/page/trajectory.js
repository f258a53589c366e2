// One trajectory: its dialogue by token, what is known of each token, its searches.

import { ask, isExport } from "./ask.js";
import { choice, labelled, link, make, outcome, short, visible } from "./elements.js";
import { outcomeOf, replayForms } from "./replay.js";
import { neighbour } from "./trajectories.js";

const LABELS = { log_probs: "log-prob of the engine", old_log_probs: "log-prob of the trainer", ref_log_probs: "log-prob of the reference",
  ratio: "ratio trainer / engine", rollout_weights: "weight of the correction", kl: "KL to the reference (k1)", advantages: "advantage",
  values: "value by the critic", weight_versions: "weight version by token" };
const tokenLook = { color: "log_probs" }; // kept from one trajectory to the next

export async function showTrajectory(root, { params, runs }) {
  const run = runs[Number(params.run ?? 0)] ?? runs[0];
  const found = await ask("trajectory", params);
  const columns = [...new Set(found.segments.flatMap((one) => Object.keys(one.columns ?? {})))];
  const versions = [...new Set(found.segments.filter((one) => one.weight_version !== null && one.weight_version !== undefined).map((one) => one.weight_version))];
  const color = choice("color", [["origin", "origin"], ...columns.map((name) => [name, LABELS[name] ?? name]), ["weight_version", "weight version"]],
    columns.includes(tokenLook.color) || tokenLook.color === "weight_version" ? tokenLook.color : columns.length ? columns[0] : "origin");
  const detail = make("dl", "facts");
  const dialogue = make("div", "dialogue");
  const replays = make("div");
  const bar = make("div", "bar");
  if (columns.length) bar.append(labelled("Tokens coloured by", color), make("p", "scale"));
  const side = make("aside", "", make("h2", "", "Token"), detail, make("h2", "", `Searches`, make("small", "", ` ${found.calls.length}`)), searches(found));
  root.replaceChildren(head(found, params, run), make("div", "columns", make("section", "", bar, dialogue, replays), side));
  const show = (result, turn) => {
    const again = make("div", "dialogue", ...result.segments.map((one, i) => segment(one, i, result, tokenLook.color, versions)));
    follow(again, (place, index) => tell(detail, result.segments[place], index, true));
    replays.prepend(outcomeOf(result, turn, again));
    replays.querySelector("h2").focus();
  };
  const forms = isExport || found.kind === "val" ? new Map() : replayForms(found, params, show);
  const draw = () => {
    tokenLook.color = color.value;
    dialogue.replaceChildren(...found.segments.map((one, i) => {
      const article = segment(one, i, found, color.value, versions);
      article.append(forms.get(i) ?? "");
      return article;
    }));
    scale(bar, color.value, columns, found, versions);
  };
  color.addEventListener("change", draw);
  draw();
  follow(dialogue, (place, index) => tell(detail, found.segments[place], index, isTrained(found)));
  tell(detail, null, 0);
  if (found.kind === "val") detail.replaceChildren(make("dt", "", "a validation keeps text only"));
  return null;
}

function head(found, params, run) {
  const facts = [
    ["answer", found.answer ?? "none", found.is_given ? "right" : ""], ["accepted", found.gold], ["outcome", outcome(found)],
    ["score", short(found.score)], ...Object.entries(found.components).map(([name, value]) => [name, short(value)]),
    ["ended", found.status.replaceAll("_", " ")], ["source", found.source],
  ];
  const list = make("dl", "facts inline", ...facts.map(([name, value, className]) => make("div", "", make("dt", "", name), make("dd", className ?? "", value))));
  const nav = make("p", "links",
    link("question", { run: params.run, uid: found.uid, kind: found.kind }, "button", "This question over the steps"),
    link("trajectories", { run: params.run, step_from: found.step, step_to: found.step, kind: found.kind }, "button", `All of step ${found.step}`));
  if (found.group) nav.append(link("trajectories", { run: params.run, step_from: found.step, step_to: found.step, group: found.group }, "button", `Its group ${found.group}`));
  for (const [key, by, words] of [["[", -1, "previous"], ["]", 1, "next"]]) {
    const where = neighbour(params, by);
    if (!where) continue;
    const element = make("a", "button", words);
    element.href = where;
    element.dataset.key = key;
    nav.append(element);
  }
  const place = `${run.name} · step ${found.step} · ${found.kind === "val" ? "validation" : "training"} · ${found.uid}${found.kind === "val" ? "" : ` · sample ${found.sample}`}`;
  return make("section", "head", make("p", "quiet", place), make("h2", "question", found.question || "(no question)"), list, nav);
}

/** One segment: what it is, then its tokens, or its text where only that was kept. */
function segment(one, place, found, color, versions) {
  const call = found.calls.find((search) => search.segment === place);
  const notes = [{ prompt: "prompt", policy: "policy", observation: "observation" }[one.origin] ?? one.origin];
  if (isTrained(found)) notes.push(inLoss(one) ? "in the loss" : "masked");
  if (one.ids?.length) notes.push(`${one.ids.length} tokens`);
  if (one.weight_version !== null && one.weight_version !== undefined) notes.push(`weights ${one.weight_version}`);
  if (call) notes.push(`${call.tool}: ${call.query}`);
  const body = make("div", "text");
  if (one.ids?.length) {
    const hasWords = one.pieces.length === one.ids.length;
    if (!hasWords) body.append(make("p", "whole", one.text));
    one.ids.forEach((id, i) => body.append(tokenSpan(one, i, place, color, versions, hasWords)));
  } else {
    body.append(visible(one.text));
  }
  return make("article", `segment ${one.origin}`, make("header", "", notes.join(" · ")), body);
}

/** Validations are not learned from, nor is what infrastructure broke. */
function isTrained(found) {
  return found.kind !== "val" && found.status !== "failed";
}

/** Of a segment: what has an advantage is learned from, which without state masking an observation is too. */
function inLoss(one) {
  return one.origin === "policy" || "advantages" in (one.columns ?? {});
}

function tokenSpan(one, i, place, color, versions, hasWords) {
  const element = document.createElement("span");
  element.className = "token";
  element.textContent = hasWords ? inSight(one.pieces[i]) : `#${one.ids[i]}`;
  if (!hasWords) element.classList.add("bare");
  element.dataset.place = `${place}.${i}`;
  element.tabIndex = -1;
  const value = one.columns[color]?.[i];
  if (color === "weight_version" && one.weight_version !== null && one.weight_version !== undefined) {
    element.classList.add("version", `run-${versions.indexOf(one.weight_version) % 8}`);
  } else if (value !== null && value !== undefined) {
    const heat = strength(color, value);
    element.classList.add(heat < 0 ? "below" : "above");
    element.style.setProperty("--heat", `${Math.round(Math.abs(heat) * 100)}%`);
  }
  return element;
}

/** From -1 to 1: how far a token is from the expected. */
function strength(name, value) {
  if (["ratio", "rollout_weights"].includes(name)) return Math.max(-1, Math.min(1, Math.log(value) / 0.5));
  if (name.includes("log_prob")) return Math.max(-1, value / 5);
  return Math.max(-1, Math.min(1, value / 2));
}

function inSight(piece) {
  return visible(piece).replaceAll("\n", "⏎\n").replaceAll("\t", "⇥\t");
}

function scale(bar, color, columns, found, versions) {
  const words = color === "origin" ? "policy, observation and prompt by their own paper"
    : color === "weight_version" ? `sampled with ${versions.length === 1 ? `weights ${versions[0]}` : `weights ${versions.join(", ")}`}`
    : color.includes("log_prob") ? "the redder, the less expected (full at −5 nats)" : "red below, green above";
  const missing = ["old_log_probs", "ref_log_probs", "advantages"].filter((name) => !columns.includes(name)).map((name) => LABELS[name]);
  const line = bar.querySelector(".scale");
  if (!line) return;
  line.textContent = words;
  if (missing.length && columns.length) line.append(make("span", "quiet", ` · not in this dump: ${missing.join(", ")}`));
  if (found.problem) line.append(make("span", "quiet", ` · ${found.problem}`));
}

/** Pointing at tokens, and going from one to the next with the arrows. */
function follow(dialogue, tell_of) {
  const at = (element) => {
    const [place, index] = element.dataset.place.split(".").map(Number);
    dialogue.querySelector(".token.at")?.classList.remove("at");
    element.classList.add("at");
    tell_of(place, index);
  };
  dialogue.addEventListener("pointerover", (event) => event.target.classList.contains("token") && at(event.target));
  dialogue.addEventListener("focusin", (event) => event.target.classList.contains("token") && at(event.target));
  dialogue.tabIndex = 0;
  dialogue.setAttribute("role", "group");
  dialogue.setAttribute("aria-label", "The dialogue by token; arrows go from token to token");
  dialogue.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (by === undefined || event.target.matches("input, textarea")) return;
    event.preventDefault();
    const tokens = [...dialogue.querySelectorAll(".token")];
    const now = tokens.indexOf(dialogue.querySelector(".token.at"));
    tokens[Math.max(0, Math.min(tokens.length - 1, now + by))]?.focus();
  });
}

function tell(detail, one, i, isInLoss = false) {
  const facts = one === null ? [["", "point at a token, or use the arrows"]] : [
    ["text", one.pieces.length === one.ids.length ? JSON.stringify(one.pieces[i]) : "unknown"], ["id", String(one.ids[i])],
    ["origin", one.origin], ["loss mask", isInLoss && inLoss(one) ? "1" : "0"],
    ...(one.weight_version !== null && one.weight_version !== undefined ? [["weight version", String(one.weight_version)]] : []),
    ...Object.entries(one.columns).map(([name, values]) => [LABELS[name] ?? name, short(values[i])]),
    ...(one.columns.log_probs ? [["probability", short(Math.exp(one.columns.log_probs[i] ?? NaN))]] : []),
  ];
  detail.replaceChildren(...facts.flatMap(([name, value]) => [make("dt", "", name), make("dd", "", value)]));
}

function searches(found) {
  if (!found.calls.length) return make("p", "quiet", "None brought anything.");
  return make("ol", "searches", ...found.calls.map((call) => make("li", "",
    make("p", "query", make("span", "badge", call.tool), " ", call.query),
    make("ul", "", ...call.documents.map((one) => {
      const title = make("summary", "", one.title || one.text.slice(0, 80) || "(empty)");
      if (one.has_answer) title.append(make("span", "badge holds", "holds the answer"));
      if (one.worth) title.append(worth(one.worth));
      const box = make("details", one.has_answer ? "holds" : "", title, make("p", "", one.text));
      if (one.id) box.append(make("p", "quiet", `id ${one.id}`));
      return make("li", "", box);
    })))));
}

/** What a document was worth to the answer: how much more likely it made the recorded tokens. */
function worth(found) {
  const badge = make("span", "badge", `${found.answer < 0 ? "−" : "+"}${short(Math.abs(found.answer))} nats`);
  const parts = [`the answer is ${short(found.answer)} nats more likely with it`, `its whole turn ${short(found.turn)}`];
  if ("reward" in found) parts.push(`reward of answers sampled anew ${short(found.reward)}`);
  badge.title = parts.join(", ");
  return badge;
}
