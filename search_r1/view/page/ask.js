// Requests to the server; in an exported file, answers from the data in the file.

const snapshot = document.getElementById("snapshot");
const data = snapshot ? JSON.parse(snapshot.textContent) : null;
let token = ""; // in memory only

export const isExport = data !== null;
export const hasReport = Boolean(data?.report);

export class Unauthorized extends Error {}

export function useToken(text) {
  token = text;
}

/** Return the answer to GET /api/`name`. Throws Unauthorized without the token, else Error. */
export async function ask(name, params = {}) {
  if (isExport) return answerFromFile(name, params);
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(params)) {
    for (const item of Array.isArray(value) ? value : [value]) {
      if (item !== "" && item !== null && item !== undefined) query.append(key, item);
    }
  }
  return request(`api/${name}?${query}`);
}

/** Return the answer to POST /api/`name`. Throws as `ask` does. */
export function send(name, body) {
  return request(`api/${name}`, { method: "POST", body: JSON.stringify(body) }, { "Content-Type": "application/json" });
}

async function request(url, options = {}, headers = {}) {
  let answer;
  try {
    const allHeaders = token ? { ...headers, Authorization: `Bearer ${token}` } : headers;
    answer = await fetch(url, { ...options, headers: allHeaders, cache: "no-store" });
  } catch {
    throw new Error("The server cannot be reached. Is it still running?");
  }
  if (answer.status === 401) throw new Unauthorized();
  const body = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(errorText(body.detail) || `The server answered with status ${answer.status}.`);
  return body;
}

function errorText(detail) {
  if (Array.isArray(detail)) return detail.map((item) => `${(item.loc ?? []).slice(1).join(" ")}: ${item.msg}`).join("; ");
  return detail;
}

/** Return what the server would answer about the trajectories in the file. */
function answerFromFile(name, params) {
  const run = Number(params.run ?? 0);
  const rows = data.rows[run] ?? [];
  switch (name) {
    case "curves":
      return Object.fromEntries(params.name.map((metric) => [metric, data.curves[metric]]));
    case "trajectories":
      return onePage(rows.filter((row) => matches(row, params)), params);
    case "trajectory": {
      const index = rows.findIndex((row) => row.kind === params.kind && row.step === Number(params.step) && row.line === Number(params.line));
      if (index < 0) throw new Error("This file does not contain that trajectory.");
      return data.trajectories[run][index];
    }
    case "question":
      return data.trajectories[run].filter((row) => row.uid === params.uid && (!params.kind || row.kind === params.kind));
    default:
      return data[name];
  }
}

function matches(row, params) {
  const text = [row.question, row.queries, row.answer ?? ""].join("\n").toLowerCase();
  const words = (params.words ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  const outcomes = { given: row.is_given, missed: row.is_found && !row.is_given,
    not_found: !row.is_found && !row.is_given, known: !row.is_found && row.is_given };
  const isWithin = (name) =>
    (!params[`${name}_from`] || (row[name] !== null && row[name] >= Number(params[`${name}_from`]))) &&
    (!params[`${name}_to`] || (row[name] !== null && row[name] <= Number(params[`${name}_to`])));
  return words.every((word) => text.includes(word)) &&
    ["kind", "status", "source", "group", "uid"].every((name) => !params[name] || row[name] === params[name]) &&
    ["step", "score", "searches"].every(isWithin) && (!params.outcome || Boolean(outcomes[params.outcome]));
}

function onePage(rows, params) {
  const size = 50;
  const [column, sign] = { newest: ["step", -1], oldest: ["step", 1], score_low: ["score", 1], score_high: ["score", -1],
    searches_most: ["searches", -1], log_prob_low: ["log_prob", 1] }[params.order || "newest"];
  const known = (value) => value ?? (params.order === "log_prob_low" ? Infinity : -Infinity);
  const sorted = [...rows].sort((a, b) => (sign * (known(a[column]) - known(b[column])) || b.step - a.step) || 0);
  const pages = Math.max(1, Math.ceil(rows.length / size));
  const page = Math.min(Number(params.page ?? 1), pages);
  return { count: rows.length, page, pages, rows: sorted.slice((page - 1) * size, page * size) };
}
