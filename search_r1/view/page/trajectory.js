// One trajectory: its dialogue token by token, the data of each token, its searches.

import { ask } from "./ask.js";
import { replayResult, replayForms } from "./replay.js";
import { choice, labelled, link, make, outcome, say, short, visible } from "./texts.js";
import { neighbour } from "./trajectories.js";

const LABELS = { log_probs: "log-prob of the engine", old_log_probs: "log-prob of the trainer", ref_log_probs: "log-prob of the reference",
  ratio: "ratio trainer / engine", rollout_weights: "weight of the correction", kl: "KL to the reference (k1)", advantages: "advantage",
  values: "value by the critic" };
const tokenState = { color: "log_probs" }; // kept from one trajectory to the next

export async function showTrajectory(root, { params, runs }) {
  const run = runs[Number(params.run ?? 0)] ?? runs[0];
  const trajectory = await ask("trajectory", params);
  const columns = [...new Set(trajectory.segments.flatMap((part) => Object.keys(part.columns ?? {})))];
  const versions = [...new Set(trajectory.segments.map((part) => part.weight_version).filter(isKnown))];
  const color = choice("color", [["origin", "origin"], ...columns.map((name) => [name, LABELS[name] ?? name]), ["weight_version", "weight version"]],
    columns.includes(tokenState.color) || tokenState.color === "weight_version" ? tokenState.color : columns.length ? columns[0] : "origin");
  const detail = make("dl", "facts");
  const dialogue = make("div", "dialogue");
  const replays = make("div");
  const bar = make("div", "bar");
  if (columns.length) bar.append(labelled("Tokens coloured by", color), make("p", "scale"));
  const side = make("aside", "", make("h2", "", say("Token")), detail, make("h2", "", say("Searches"), make("small", "", ` ${trajectory.calls.length}`)), searches(trajectory));
  root.replaceChildren(head(trajectory, params, run), make("div", "columns", make("section", "", bar, dialogue, replays), side));
  const showReplay = (result, turn) => {
    const replayed = make("div", "dialogue", ...result.segments.map((_, i) => segmentArticle(result, i, tokenState.color, versions)));
    followTokens(replayed, (segment, token) => showToken(detail, result.segments[segment], token, true));
    replays.prepend(replayResult(result, turn, replayed));
    replays.querySelector("h2").focus();
  };
  const forms = trajectory.kind === "val" ? new Map() : replayForms(trajectory, params, showReplay);
  const draw = () => {
    tokenState.color = color.value;
    dialogue.replaceChildren(...trajectory.segments.map((_, i) => {
      const article = segmentArticle(trajectory, i, color.value, versions);
      article.append(forms.get(i) ?? "");
      return article;
    }));
    showLegend(bar, color.value, columns, trajectory, versions);
  };
  color.addEventListener("change", draw);
  draw();
  followTokens(dialogue, (segment, token) => showToken(detail, trajectory.segments[segment], token, isTrained(trajectory)));
  const hint = say(trajectory.kind === "val" ? "validations are recorded as text only" : "point at a token, or use the arrow keys");
  detail.replaceChildren(make("dt", "", hint));
  return null;
}

function head(trajectory, params, run) {
  const facts = [
    ["answer", trajectory.answer ?? say("none"), trajectory.is_given ? "right" : ""], ["accepted", trajectory.gold], ["outcome", outcome(trajectory)],
    ["score", short(trajectory.score)], ...Object.entries(trajectory.components).map(([name, value]) => [name, short(value)]),
    ["status", say(trajectory.status.replaceAll("_", " "))], ["source", trajectory.source],
  ];
  const list = make("dl", "facts inline", ...facts.map(([name, value, className]) => make("div", "", make("dt", "", say(name)), make("dd", className ?? "", value))));
  const nav = make("p", "links",
    link("question", { run: params.run, uid: trajectory.uid, kind: trajectory.kind }, "button", say("This question over the steps")),
    link("trajectories", { run: params.run, step_from: trajectory.step, step_to: trajectory.step, kind: trajectory.kind }, "button", say("All of step {step}", { step: trajectory.step })));
  if (trajectory.group) nav.append(link("trajectories", { run: params.run, step_from: trajectory.step, step_to: trajectory.step, group: trajectory.group }, "button", say("Its group {group}", { group: trajectory.group })));
  for (const [key, offset, text] of [["[", -1, "previous"], ["]", 1, "next"]]) {
    const target = neighbour(params, offset);
    if (!target) continue;
    const element = make("a", "button", say(text));
    element.href = target;
    element.dataset.key = key;
    nav.append(element);
  }
  const title = `${run.name} · ${say("step {step}", { step: trajectory.step })} · ${say(trajectory.kind === "val" ? "validation" : "training")} · ${trajectory.uid}${trajectory.kind === "val" ? "" : ` · ${say("sample {sample}", { sample: trajectory.sample })}`}`;
  return make("section", "head", make("p", "quiet", title), make("h2", "question", trajectory.question || say("(no question)")), list, nav);
}

/** Return a segment with a header and its tokens, or its text if only that was recorded. */
function segmentArticle(trajectory, index, color, versions) {
  const segment = trajectory.segments[index];
  const call = trajectory.calls.find((search) => search.segment === index);
  const notes = [say(segment.origin)];
  if (isTrained(trajectory)) notes.push(say(isInLoss(segment) ? "in the loss" : "masked"));
  if (segment.ids?.length) notes.push(say("{count} tokens", { count: segment.ids.length }));
  if (isKnown(segment.weight_version)) notes.push(say("weights {version}", { version: segment.weight_version }));
  if (call) notes.push(`${call.tool}: ${call.query}`);
  const body = make("div", "text");
  if (segment.ids?.length) {
    if (!hasPieces(segment)) body.append(make("p", "whole", segment.text));
    segment.ids.forEach((id, i) => body.append(tokenSpan(segment, index, i, color, versions)));
  } else {
    body.append(visible(segment.text));
  }
  return make("article", `segment ${segment.origin}`, make("header", "", notes.join(" · ")), body);
}

const isKnown = (value) => value !== null && value !== undefined;

/** Whether the text of each token is known. */
const hasPieces = (segment) => segment.pieces.length === segment.ids.length;

/** The loss contains neither validations nor trajectories that failed because of infrastructure. */
function isTrained(trajectory) {
  return trajectory.kind !== "val" && trajectory.status !== "failed";
}

/** Segments with advantages are in the loss: without state masking also observations. */
function isInLoss(segment) {
  return segment.origin === "policy" || "advantages" in (segment.columns ?? {});
}

function tokenSpan(segment, index, i, color, versions) {
  const element = document.createElement("span");
  element.className = "token";
  element.textContent = hasPieces(segment) ? withMarks(segment.pieces[i]) : `#${segment.ids[i]}`;
  if (!hasPieces(segment)) element.classList.add("bare");
  element.dataset.position = `${index}.${i}`;
  element.tabIndex = -1;
  const value = segment.columns[color]?.[i];
  if (color === "weight_version" && isKnown(segment.weight_version)) {
    element.classList.add("version", `run-${versions.indexOf(segment.weight_version) % 8}`);
  } else if (isKnown(value)) {
    const heat = strength(color, value);
    element.classList.add(heat < 0 ? "below" : "above");
    element.style.setProperty("--heat", `${Math.round(Math.abs(heat) * 100)}%`);
  }
  return element;
}

/** Return from -1 (red) to 1 (green) how strongly a token is coloured. */
function strength(name, value) {
  if (["ratio", "rollout_weights"].includes(name)) return Math.max(-1, Math.min(1, Math.log(value) / 0.5));
  if (name.includes("log_prob")) return Math.max(-1, value / 5);
  return Math.max(-1, Math.min(1, value / 2));
}

function withMarks(piece) {
  return visible(piece).replaceAll("\n", "⏎\n").replaceAll("\t", "⇥\t");
}

function showLegend(bar, color, columns, trajectory, versions) {
  const text = color === "origin" ? say("segments of policy, observation and prompt look different")
    : color === "weight_version" ? say("sampled with weights {versions}", { versions: versions.join(", ") })
    : color.includes("log_prob") ? say("the redder, the less expected (full at −5 nats)") : say("red below, green above");
  const missing = ["old_log_probs", "ref_log_probs", "advantages"].filter((name) => !columns.includes(name)).map((name) => say(LABELS[name]));
  const line = bar.querySelector(".scale");
  if (!line) return;
  line.textContent = text;
  if (missing.length && columns.length) line.append(make("span", "quiet", ` · ${say("not recorded: {names}", { names: missing.join(", ") })}`));
  if (trajectory.problem) line.append(make("span", "quiet", ` · ${trajectory.problem}`));
}

/** Select a token with the pointer or the arrow keys; `onToken` gets its segment and its index. */
function followTokens(dialogue, onToken) {
  const select = (element) => {
    const [segment, token] = element.dataset.position.split(".").map(Number);
    dialogue.querySelector(".token.selected")?.classList.remove("selected");
    element.classList.add("selected");
    onToken(segment, token);
  };
  dialogue.addEventListener("pointerover", (event) => event.target.classList.contains("token") && select(event.target));
  dialogue.addEventListener("focusin", (event) => event.target.classList.contains("token") && select(event.target));
  dialogue.tabIndex = 0;
  dialogue.setAttribute("role", "group");
  dialogue.setAttribute("aria-label", say("The dialogue token by token; the arrow keys move between tokens"));
  dialogue.addEventListener("keydown", (event) => {
    const offset = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (offset === undefined || event.target.matches("input, textarea")) return;
    event.preventDefault();
    const tokens = [...dialogue.querySelectorAll(".token")];
    const current = tokens.indexOf(dialogue.querySelector(".token.selected"));
    tokens[Math.max(0, Math.min(tokens.length - 1, current + offset))]?.focus();
  });
}

function showToken(detail, segment, i, isTrainedOn) {
  const facts = [
    ["text", hasPieces(segment) ? JSON.stringify(segment.pieces[i]) : say("unknown")], ["id", String(segment.ids[i])],
    ["origin", say(segment.origin)], ["loss mask", isTrainedOn && isInLoss(segment) ? "1" : "0"],
    ...(isKnown(segment.weight_version) ? [["weight version", String(segment.weight_version)]] : []),
    ...Object.entries(segment.columns).map(([name, values]) => [LABELS[name] ?? name, short(values[i])]),
    ...(segment.columns.log_probs ? [["probability", short(Math.exp(segment.columns.log_probs[i] ?? NaN))]] : []),
  ];
  detail.replaceChildren(...facts.flatMap(([name, value]) => [make("dt", "", say(name)), make("dd", "", value)]));
}

function searches(trajectory) {
  if (!trajectory.calls.length) return make("p", "quiet", say("No call returned a result."));
  return make("ol", "searches", ...trajectory.calls.map((call) => make("li", "",
    make("p", "query", make("span", "badge", call.tool), " ", call.query),
    make("ul", "", ...call.documents.map((document) => {
      const title = make("summary", "", document.title || document.text.slice(0, 80) || say("(empty)"));
      if (document.has_answer) title.append(make("span", "badge has-answer", say("has the answer")));
      const box = make("details", document.has_answer ? "has-answer" : "", title, make("p", "", document.text));
      if (document.id) box.append(make("p", "quiet", say("id {id}", { id: document.id })));
      return make("li", "", box);
    })))));
}
