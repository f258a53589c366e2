// Questions to the server; in an exported file, to what was written into it.

const held = document.getElementById("snapshot");
const data = held ? JSON.parse(held.textContent) : null;
let token = ""; // in memory only

export const isExport = data !== null;
export const hasReport = Boolean(data?.report);

export class Refused extends Error {}

export function useToken(text) {
  token = text;
}

/** The answer to /api/`name`. Raises Refused without the token, Error for all else. */
export async function ask(name, params = {}) {
  if (isExport) return answered(name, params);
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(params)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== "" && one !== null && one !== undefined) query.append(key, one);
    }
  }
  return fetched(`api/${name}?${query}`);
}

/** What the server answers to a request that makes it work. Raises as `ask` does. */
export function send(name, body) {
  return fetched(`api/${name}`, { method: "POST", body: JSON.stringify(body) }, { "Content-Type": "application/json" });
}

async function fetched(address, options = {}, headers = {}) {
  let answer;
  try {
    const own = token ? { ...headers, Authorization: `Bearer ${token}` } : headers;
    answer = await fetch(address, { ...options, headers: own, cache: "no-store" });
  } catch {
    throw new Error("The server cannot be reached. Is it still running?");
  }
  if (answer.status === 401) throw new Refused();
  const body = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(said(body.detail) || `The server answered ${answer.status}.`);
  return body;
}

function said(detail) {
  if (Array.isArray(detail)) return detail.map((one) => `${(one.loc ?? []).slice(1).join(" ")}: ${one.msg}`).join("; ");
  return detail;
}

/** What the server would have answered, of the trajectories that the file holds. */
function answered(name, params) {
  const run = Number(params.run ?? 0);
  const rows = data.rows[run] ?? [];
  switch (name) {
    case "curves":
      return Object.fromEntries(params.name.map((one) => [one, data.curves[one]]));
    case "trajectories":
      return onePage(rows.filter((row) => isWanted(row, params)), params);
    case "trajectory": {
      const place = rows.findIndex((row) => row.kind === params.kind && row.step === Number(params.step) && row.line === Number(params.line));
      if (place < 0) throw new Error("This file does not hold that trajectory.");
      return data.trajectories[run][place];
    }
    case "question":
      return data.trajectories[run].filter((one) => one.uid === params.uid && (!params.kind || one.kind === params.kind));
    default:
      return data[name];
  }
}

function isWanted(row, params) {
  const text = [row.question, row.queries, row.answer ?? ""].join("\n").toLowerCase();
  const wanted = (params.words ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  const outcomes = { given: row.is_given, missed: row.is_found && !row.is_given,
    not_found: !row.is_found && !row.is_given, known: !row.is_found && row.is_given };
  const isWithin = (name) =>
    (!params[`${name}_from`] || (row[name] !== null && row[name] >= Number(params[`${name}_from`]))) &&
    (!params[`${name}_to`] || (row[name] !== null && row[name] <= Number(params[`${name}_to`])));
  return wanted.every((word) => text.includes(word)) &&
    ["kind", "status", "source", "group", "uid"].every((name) => !params[name] || row[name] === params[name]) &&
    ["step", "score", "searches"].every(isWithin) && (!params.outcome || Boolean(outcomes[params.outcome]));
}

function onePage(rows, params) {
  const size = 50;
  const by = { newest: ["step", -1], oldest: ["step", 1], score_low: ["score", 1], score_high: ["score", -1],
    searches_most: ["searches", -1], log_prob_low: ["log_prob", 1] }[params.order || "newest"];
  const last = (value) => value ?? (params.order === "log_prob_low" ? Infinity : -Infinity);
  const sorted = [...rows].sort((a, b) => (by[1] * (last(a[by[0]]) - last(b[by[0]])) || b.step - a.step) || 0);
  const pages = Math.max(1, Math.ceil(rows.length / size));
  const page = Math.min(Number(params.page ?? 1), pages);
  return { count: rows.length, page, pages, rows: sorted.slice((page - 1) * size, page * size) };
}
